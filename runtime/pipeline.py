"""Steps one after the other, or one ahead: the host schedules the next step while the device runs this one."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Iterable

from runtime.metrics import StepSeconds
from runtime.model_runner import ModelRunner, StepInFlight
from runtime.preemption import Preemption
from runtime.request import Request
from runtime.schedule import Schedule
from runtime.scheduler import Scheduler

logger = logging.getLogger(__name__)

_SECONDS_BETWEEN_WARNINGS = 60.0


class Pipeline:
    """Schedules, launches and collects steps; `news` names, in order, the requests that have advanced or ended.

    runs_ahead: launch a step before the tokens of the one before it are known, where the scheduler can. Two steps are
    then in flight for a while, in the order of the device's stream: what the later one reads or overwrites, the earlier
    one has written or read before. So a block that is freed while a step is in flight may be handed out at once.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: ModelRunner,
        preemption: Preemption,
        *,
        runs_ahead: bool,
    ) -> None:
        self.scheduler, self.runner, self.runs_ahead = scheduler, runner, runs_ahead
        self.step_seconds = StepSeconds()
        self.num_steps = self.num_steps_ahead = self.num_prompt_tokens = self.num_output_tokens = 0
        self.switched_at_step: int | None = None  # steps that ran before a background compilation's graph took over
        self.news: dict[str, None] = {}  # kept until the caller has taken it: an interruption must not lose any
        self._preemption = preemption
        self._in_flight: deque[StepInFlight] = deque()
        self._collected = 0.0  # when the last step was, by time.perf_counter()
        self._warned_at = float("-inf")  # of the last warning that requests are preempted

    def advance(self) -> int:
        """Take the tokens of one step, and launch what may follow it; returns how many prompt tokens were in that step.

        A failure ends the step's requests, and no more.
        """
        if not self._in_flight:
            self.take_compiled()
            self.runner.capture_missing()
            self._launch_next()
        if not self._in_flight:
            return 0
        if self.runs_ahead:
            self._launch_ahead()
        num_prompt_tokens = self._in_flight[0].schedule.num_prompt_tokens
        self._take()
        return num_prompt_tokens

    def take_compiled(self) -> None:
        """Run the compiled graph from now on, if a background compilation has made it. No step may be in flight."""
        if self.runner.take_compiled():
            self.switched_at_step = self.num_steps

    def drop(self) -> None:
        """Forget the steps in flight: requests and blocks may then be changed from outside.

        Nothing is lost but time. Their rows run again, draw the same tokens, and write what lies in the caches already.
        """
        self._in_flight.clear()

    def close(self) -> None:
        """Forget what is in flight or news, and let go of the runner."""
        self._in_flight.clear()
        self.news.clear()
        del self.runner

    def _launch_next(self) -> None:
        start = time.perf_counter()
        schedule = self.scheduler.schedule()
        self._note(schedule.finished)
        if schedule.preempted:
            self._warn_of_preemption()
        self.step_seconds.schedule += time.perf_counter() - start
        if schedule.rows or schedule.swap_outs:
            self._launch(schedule)

    def _launch_ahead(self) -> None:
        graphs = self.runner.graphs
        current = self._in_flight[0]
        if current.followed or current.error is not None or (graphs is not None and graphs.is_missing):
            return
        start = time.perf_counter()
        ahead = self.scheduler.schedule_ahead(current.schedule)
        self.step_seconds.schedule += time.perf_counter() - start
        if ahead is not None:
            current.followed = True  # first: launched twice, it would find its own tokens instead of those before
            self.num_steps_ahead += 1
            self._launch(ahead)

    def _launch(self, schedule: Schedule) -> None:
        self.num_steps += 1
        self._in_flight.append(self.runner.launch(schedule, self.step_seconds))

    def _take(self) -> None:
        """Wait for the first step in flight and take its tokens."""
        step = self._in_flight[0]
        schedule, start = step.schedule, time.perf_counter()
        try:
            tokens, candidates = step.collect()
        except Exception:
            logger.exception("a step of %d tokens failed; its %d requests end", schedule.num_tokens, len(schedule.rows))
            self._note(self.scheduler.fail(schedule))
            self._in_flight.popleft()
            return
        now = time.perf_counter()
        self.step_seconds.forward += now - start
        if schedule.num_tokens > len(schedule.rows):
            self._preemption.note_prefill(schedule.num_tokens, now - max(step.launched, self._collected))
        self._collected = now
        try:
            self._in_flight.popleft()
            advanced = self.scheduler.update(schedule, tokens, candidates)
            self._note(advanced)
        except BaseException:  # an interruption: what follows was planned on all of these tokens
            self.drop()
            raise
        self.num_output_tokens += len(advanced)
        self.num_prompt_tokens += schedule.num_prompt_tokens
        self.step_seconds.update += time.perf_counter() - now

    def _note(self, requests: Iterable[Request]) -> None:
        self.news.update(dict.fromkeys(request.root.request_id for request in requests))

    def _warn_of_preemption(self) -> None:
        """At most once a minute."""
        now = time.monotonic()
        if now - self._warned_at >= _SECONDS_BETWEEN_WARNINGS:
            self._warned_at = now
            logger.warning(self._preemption.advice())
