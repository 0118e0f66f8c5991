"""The engine: requests in, one step of the schedule at a time, cumulative outputs back."""

from __future__ import annotations

import itertools
import logging
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from tqdm import tqdm

from graphs.activation_memory import peak_activation_bytes
from graphs.inputs import StepSizes
from graphs.self_check import SelfCheck
from models.checkpoint import resolve
from models.report import RewriteReport
from runtime.beam_search import BeamSearchParams
from runtime.completions import Completions
from runtime.config import EngineConfig
from runtime.limits import batched_tokens, pool_is_automatic, size_pool, size_swap_space
from runtime.loaded_model import LoadedModel, ModelFacts
from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.memory_report import MemoryReport, take_report
from runtime.metrics import EngineStats, PhaseSeconds
from runtime.model_runner import ModelRunner
from runtime.outputs import RequestOutput
from runtime.pipeline import Pipeline
from runtime.preemption import Preemption
from runtime.prompt import Prompt, as_batch, check_arguments, check_params, encode
from runtime.request import Request
from runtime.sampling import SamplingParams
from runtime.scheduler import Scheduler
from runtime.threads import use_threads

if TYPE_CHECKING:  # an engine that was loaded from an artifact runs without
    from transformers import PreTrainedModel

logger = logging.getLogger(__name__)


class Engine:
    """Serves one model. Made by `runtime.compile`; a context manager that closes itself. Not for several threads."""

    def __init__(
        self,
        loaded: LoadedModel,
        config: EngineConfig,
        seconds: PhaseSeconds,
        *,
        progress: bool = True,
    ) -> None:
        """Serve `loaded`, which took the `seconds` so far."""
        self.config, self.seconds = config, seconds
        self._closed = False
        self._progress = progress
        self._loaded = loaded
        if self.device.type == "cpu":
            use_threads(self.config.num_threads)
        elif self.config.num_threads is not None:
            logger.warning("num_threads=%d is ignored: the model runs on %s", self.config.num_threads, self.device)
        if not self.config.captures(self.device) and self.config.cudagraph_capture_sizes is not None:
            sizes = list(self.config.cudagraph_capture_sizes)
            warnings.warn(f"cudagraph_capture_sizes={sizes} is ignored: no graphs are captured", stacklevel=3)
        num_blocks, self.max_model_len = size_pool(loaded.facts, self.config)
        self.max_num_batched_tokens = batched_tokens(self.config, self.max_model_len)
        self.runner = ModelRunner(loaded, self.config, self.seconds, progress=progress)
        try:
            self._start(num_blocks)
        except BaseException:
            self.runner.stop_compiling()
            raise

    def _start(self, num_blocks: int) -> None:
        """Take the memory that the runner needs, and make what feeds it."""
        if self.device.type == "cuda" and pool_is_automatic(self.config):
            needed = self.runner.measure(self.max_num_batched_tokens, self.max_model_len)
            num_blocks, self.max_model_len = size_pool(self._facts, self.config, needed)
        num_swap_blocks = size_swap_space(self._facts, self.config, num_blocks, self.max_model_len)
        manager = KVCacheManager(num_blocks, self.config.block_size, self.config.enable_prefix_caching, num_swap_blocks)
        self.runner.attach(manager, self.max_model_len)
        self._preemption = Preemption(manager, self.config.preemption, lambda: self.runner.copy_rate())
        self.scheduler = Scheduler(
            manager,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len,
            enable_chunked_prefill=self.config.enable_chunked_prefill,
            long_prefill_token_threshold=self.config.long_prefill_token_threshold,
            scheduling_policy=self.config.scheduling_policy,
            preemption=self._preemption,
        )
        self._pipeline = Pipeline(
            self.scheduler,
            self.runner,
            self._preemption,
            runs_ahead=self.config.runs_ahead(self.device),
        )
        self._completions: dict[str, Completions] = {}
        self._undelivered: dict[str, RequestOutput] = {}  # made while another method was stepping
        self._arrivals = itertools.count()

    @property
    def switched_at_step(self) -> int | None:
        """How many steps ran uncompiled before the compiled graph took over (eager_start); None: it has not."""
        return self._pipeline.switched_at_step

    @property
    def report(self) -> RewriteReport:
        """What adapting the model found out and did."""
        return self._facts.report

    @property
    def model(self) -> PreTrainedModel:
        """The adapted transformers model, for reading: its weights are the engine's own.

        Raises ValueError for an engine that was loaded from an artifact, which holds no model's code.
        """
        self._check_open()
        return self._loaded.module.model

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of weights and caches."""
        return self._facts.dtype

    @property
    def device(self) -> torch.device:
        """Where the model runs."""
        return self._facts.device

    @property
    def vocab_size(self) -> int:
        """Token ids are 0 to vocab_size - 1."""
        return self._facts.vocab_size

    @property
    def tokenizer(self) -> Any:
        """The tokenizer in use, or None."""
        return self._facts.tokenizer

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | BeamSearchParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: str | None = None,
        priority: int = 0,
    ) -> str:
        """Queue a prompt (text, or token ids) and return its id.

        params: with BeamSearchParams nothing is returned of the request before it ends, since any beam may be dropped.

        cache_salt: only requests with the same salt share cached prefixes. priority: smaller is sooner, under
        scheduling_policy="priority"; ignored with a warning otherwise. Raises ValueError for what can never run,
        and then nothing has changed.
        """
        self._check_open()
        search = params if isinstance(params, BeamSearchParams) else None
        if params is None or isinstance(params, BeamSearchParams):
            params = SamplingParams() if search is None else search.sampling
        check_params(params, self._facts.tokenizer, self._facts.vocab_size)
        check_arguments(request_id, cache_salt, priority)
        if priority and self.config.scheduling_policy != "priority":
            warnings.warn('priority is ignored: give runtime.compile(..., scheduling_policy="priority")', stacklevel=2)
        token_ids = encode(prompt, self._facts.tokenizer, self._facts.vocab_size)
        arrival = next(self._arrivals)
        request = Request(
            request_id if request_id is not None else self._new_id(arrival),
            token_ids,
            params,
            arrival=arrival,
            eos_token_ids=self._facts.eos_token_ids,
            max_model_len=self.max_model_len,
            cache_salt=cache_salt,
            priority=priority,
            default_seed=self.config.seed,
            beam_search=search,
        )
        self._check_new_id(request.request_id)
        if request.search is not None and request.search.num_candidates > self._facts.vocab_size:
            raise ValueError(
                f"beam_width={request.search.params.beam_width} needs {request.search.num_candidates} candidates, and "
                f"the vocabulary has {self._facts.vocab_size} tokens: lower beam_width, or "
                "give fewer stop_token_ids"
            )
        completions = Completions(request, prompt if isinstance(prompt, str) else None, self._facts.tokenizer)
        self.scheduler.add(request)
        self._completions[request.request_id] = completions
        return request.request_id

    def fork(self, request_id: str, params: SamplingParams | None = None, *, new_id: str | None = None) -> str:
        """Let a live request go on twice from here, and return the new one's id.

        Nothing of a running request is computed again, unless max_num_seqs run already: then the fork waits its turn.

        The fork has the same tokens so far and shares their blocks; it draws noise of its own, so it diverges when it
        samples. It has one completion. params: its own from here on (None: the same); `max_tokens` counts the tokens
        that are there already, and a seed of them is the fork's own. Of a request for n completions it is the first
        live one that goes on twice, of a beam search
        (which needs params) the best beam.
        Raises ValueError for an unknown or ended request, and for parameters that would end the fork at once.
        """
        self._check_open()
        self._pipeline.drop()
        completions = self._completions.get(request_id)
        members = completions.members if completions is not None else []
        parent = next((member for member in members if not member.is_finished), None)
        if completions is None or parent is None:
            raise ValueError(f"request {request_id!r} is unknown or has ended: only a live request can be forked")
        if parent.search is not None:
            if params is None:
                raise ValueError(f"request {request_id!r} is a beam search: give the SamplingParams of its fork")
            parent = max(zip(parent.search.scores, parent.sequences, strict=False), key=lambda beam: beam[0])[1]
        params = parent.params if params is None else params
        check_params(params, self._facts.tokenizer, self._facts.vocab_size)
        check_arguments(new_id, None, 0)
        params = replace(params, n=1)
        if params.max_tokens <= parent.num_output_tokens:
            raise ValueError(
                f"request {request_id!r} has {parent.num_output_tokens} tokens already, so max_tokens="
                f"{params.max_tokens} leaves none for its fork: raise max_tokens"
            )
        arrival = next(self._arrivals)
        new_id = new_id if new_id is not None else self._new_id(arrival)
        self._check_new_id(new_id)
        child = parent.fork(new_id, params=params)
        child.arrival = arrival
        forked = completions.fork(parent, child)
        self.scheduler.fork(parent, child)
        self._completions[new_id] = forked
        return new_id

    def step(self) -> list[RequestOutput]:
        """Run one step of the schedule and return the cumulative outputs of the requests that advanced or ended."""
        self._check_open()
        outputs = {**self._undelivered, **{output.request_id: output for output in self._advance()}}
        self._undelivered.clear()
        return list(outputs.values())

    def has_unfinished_requests(self) -> bool:
        """Whether calling `step` again can return anything."""
        return self.scheduler.has_unfinished() or bool(self._undelivered or self._pipeline.news)

    def abort_request(self, request_id: str) -> None:
        """End a request, its children too, and free its blocks; nothing more is returned of it.

        Unknown ids are no error.
        """
        completions = self._completions.pop(request_id, None)
        for member in completions.members if completions is not None else ():
            self.scheduler.abort(member.request_id)
        self._undelivered.pop(request_id, None)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | BeamSearchParams | Sequence[SamplingParams | BeamSearchParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[RequestOutput]:
        """Run prompts to their end and return their outputs in order.

        params: one for all, or one for each. Requests added otherwise go on; their outputs are kept for `step`.
        """
        batch = as_batch(prompts)
        each: list[Any] = list(params) if isinstance(params, list | tuple) else [params] * len(batch)
        if len(each) != len(batch):
            raise ValueError(f"{len(batch)} prompts need one SamplingParams, or one each; {len(each)} were given")
        finished: dict[str, RequestOutput] = {}
        ids: list[str] = []
        try:
            for prompt, one in zip(batch, each, strict=True):
                ids.append(self.add_request(prompt, one))
            own = set(ids)
            with tqdm(
                total=len(ids), desc="generate", unit="request", disable=not (progress and self._progress)
            ) as bar:
                while len(finished) < len(ids):
                    for output in self._advance():
                        if output.request_id not in own:
                            self._undelivered[output.request_id] = output
                        elif output.finished:
                            finished[output.request_id] = output
                            bar.update()
        finally:
            for request_id in ids:
                if request_id not in finished:
                    self.abort_request(request_id)
        return [finished[request_id] for request_id in ids]

    def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[str]:
        """Yield the text of one prompt's completion as it grows; the pieces join to its `text`.

        The request starts with the first piece asked for, and is aborted if the iterator is dropped before the end.
        Raises RuntimeError if one of its steps fails.
        """
        self._check_open()
        if self._facts.tokenizer is None:
            raise ValueError("streaming text needs a tokenizer: give runtime.compile(..., tokenizer=...)")
        if isinstance(params, BeamSearchParams):
            raise ValueError("a beam search has no text before its end: use generate, or add_request and step")
        if params is not None and params.n > 1:
            raise ValueError(f"n={params.n}: stream yields the text of one completion; use add_request and step")
        request_id, shown = self.add_request(prompt, params), 0
        completions = self._completions[request_id]
        request = completions.root
        try:
            while True:
                # Only between whole steps: the iterator may be dropped, or `step` be called, while a piece is out.
                if delta := completions.text[shown:]:
                    shown += len(delta)
                    yield delta
                elif request.is_finished:
                    break
                else:
                    others = [output for output in self._advance() if output.request_id != request_id]
                    self._undelivered.update({output.request_id: output for output in others})
            if request.finish_reason == "error":
                raise RuntimeError("a step failed before the text was complete; the log has the reason")
        finally:
            self.abort_request(request_id)

    def stats(self) -> EngineStats:
        """Return a snapshot of the counters."""
        self._check_open()
        scheduler, manager, preemption = self.scheduler, self.scheduler.manager, self._preemption
        pipeline, graphs = self._pipeline, self.runner.graphs
        return EngineStats(
            step_seconds=replace(pipeline.step_seconds),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            num_preemptions=preemption.num_preemptions,
            num_preemptions_swapped=preemption.num_swapped_out,
            num_preemptions_recomputed=preemption.num_recomputed,
            num_blocks_swapped_out=manager.num_swapped_out,
            num_blocks_swapped_in=manager.num_swapped_in,
            num_blocks_copied=manager.num_copied,
            num_steps=pipeline.num_steps,
            num_steps_ahead=pipeline.num_steps_ahead,
            num_graph_replays=0 if graphs is None else graphs.num_replays,
            num_prompt_tokens=pipeline.num_prompt_tokens,
            num_output_tokens=pipeline.num_output_tokens,
            prefix_cache_queries=scheduler.admission.prefix_cache_queries,
            prefix_cache_hits=scheduler.admission.prefix_cache_hits,
            resumed_cache_queries=scheduler.admission.resumed_cache_queries,
            resumed_cache_hits=scheduler.admission.resumed_cache_hits,
            kv_cache_usage=manager.usage,
            swap_space_usage=manager.host_pool.usage,
            num_recompiles=self.runner.executor.num_recompiles,
        )

    def memory_report(self) -> MemoryReport:
        """Return who holds how much memory, and which blocks hold which tokens, now; print it to read it.

        The first call estimates the activations, by one forward pass on tensors without memory; of an artifact they are
        unknown.
        """
        self._check_open()
        members = [member for completions in self._completions.values() for member in completions.members]
        return take_report(
            self.scheduler,
            [sequence for member in members for sequence in member.sequences],
            weights=self._facts.weight_bytes,
            activations=self._activation_bytes,
            graphs=0 if self.runner.graphs is None else self.runner.graphs.nbytes,
            bytes_per_block=self.runner.cache.bytes_per_block,
        )

    @cached_property
    def _activation_bytes(self) -> int | None:
        """An estimate for the largest step: every sequence samples, and all of the token budget is used.

        None for an artifact, which has no module to run.
        """
        if self._loaded.graph is not None:
            return None
        tokens, sequences = self.max_num_batched_tokens, self.config.max_num_seqs
        sizes = StepSizes(tokens=tokens, sequences=min(sequences, tokens), table_width=1, rows=sequences)
        return peak_activation_bytes(self._loaded.module, self.runner.cache, sizes, self.device)

    def self_check(self) -> list[SelfCheck]:
        """Compare decode steps with those of the uncompiled model, bucket by bucket, at a short and a long context.

        Print the entries to read them; with cuda_graphs="lazy" there are those of the sizes captured so far. Side
        effect: cached prefixes are forgotten, and their blocks overwritten.
        Raises ValueError while requests are alive, and for an artifact, which holds no model to compare with.
        """
        self._check_open()
        if self.has_unfinished_requests():
            raise ValueError("self_check overwrites the KV cache: wait until all requests have ended, or abort them")
        module = self._loaded.module
        self._pipeline.drop()
        forgotten = self.scheduler.manager.reset_prefix_cache()
        assert forgotten, "no request is alive, and blocks are in use"
        return self.runner.self_check(module)

    def check_integrity(self) -> None:
        """Check block tables, counts, free list, prefix cache and swap space; AssertionError prints what disagrees."""
        self.scheduler.manager.check_integrity()
        live = [member for completions in self._completions.values() for member in completions.members]
        for member in live:
            scheduled = self.scheduler.get(member.request_id) is member
            assert scheduled is not member.is_finished, f"{member.request_id!r}: scheduled {scheduled}"

    def reset_prefix_cache(self) -> bool:
        """Forget all cached prefixes; False, and nothing changed, while any block is in use."""
        return self.scheduler.manager.reset_prefix_cache()

    def load_weights(self, source: str | Path | Mapping[str, Tensor]) -> None:
        """Replace the weights by those of a folder, hub id or state dict of the same architecture.

        All requests are computed anew under the new weights; cached prefixes, and what is swapped out, are forgotten.
        Raises ValueError for weights that do not fit, and then the old ones are still in place.
        """
        self._check_open()
        self._pipeline.drop()
        weights = source if isinstance(source, Mapping) else resolve(source, progress=self._progress)
        self._loaded.reload(weights, progress=self._progress)
        self.scheduler.preempt_all()
        forgotten = self.scheduler.manager.reset_prefix_cache()
        assert forgotten, "preempted requests still held blocks"
        self.runner.rebind()

    def export(self, path: str | Path, *, include_weights: bool = False) -> None:
        """Write an artifact: a folder that `runtime.load` serves without compiling anything.

        It holds the compiled graph, the C++ ops, the tokenizer, and how to read the weights from the folder that they
        came from; with include_weights the weights too, as they lie in memory. Knobs that the graph follows from are
        fixed by it; others, such as num_blocks or max_model_len, can be given to `runtime.load`. `path` appears by one
        rename, so it is whole or absent. Waits for a background compilation.
        Raises ValueError if `path` is there already, if nothing is compiled, if inductor could compile for this process
        only, and for weights from memory without include_weights.
        """
        self._check_open()
        from runtime.artifact_writer import export  # with the model's code, which an artifact's engine goes without
        from runtime.model_loader import AdaptedLoad

        if not isinstance(self._loaded, AdaptedLoad):
            raise ValueError("this engine was loaded from an artifact: copy that folder instead")
        self._pipeline.drop()
        self.runner.wait_for_compiler()
        self._pipeline.take_compiled()
        compiled = self.runner.compiled
        if compiled is None:
            raise ValueError("nothing is compiled: steps run uncompiled (backend='eager', or the log says why)")
        if compiled.graph is None:
            raise ValueError(f"the graph could be compiled for this process only: {compiled.problem}")
        export(Path(path), self._loaded, compiled.graph, self.config, include_weights=include_weights)

    def keep_compiling(self) -> bool:
        """Let a background compilation (eager_start) go on when the engine is closed or the process ends, so that the
        next start finds the graph in the cache; whether one is at work. Otherwise closing the engine ends it."""
        self._check_open()
        return self.runner.keep_compiling()

    def close(self) -> None:
        """Abort everything and let go of the caches and weights. A closed engine serves nothing any more."""
        if self._closed:
            return
        self.runner.stop_compiling()
        for request_id in list(self._completions):
            self.abort_request(request_id)
        self._undelivered.clear()
        self._pipeline.close()
        self._closed = True
        del self.runner, self._loaded

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def _facts(self) -> ModelFacts:
        self._check_open()
        return self._loaded.facts

    def _new_id(self, arrival: int) -> str:
        """An id of ours for a request: its number, and more if the user has given that very id to another one."""
        request_id = f"request-{arrival}"
        while request_id in self._completions or request_id in self._undelivered or self.scheduler.get(request_id):
            request_id += "'"
        return request_id

    def _check_new_id(self, request_id: str) -> None:
        if request_id in self._completions or self.scheduler.get(request_id) is not None:
            raise ValueError(f"request {request_id!r} is still alive: give a new id, or wait until it ends or abort it")
        if request_id in self._undelivered:
            raise ValueError(f"request id {request_id!r} has output that step() has not returned yet")

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("this engine is closed: make a new one with runtime.compile")

    def _advance(self) -> list[RequestOutput]:
        """Run one step; outputs of the requests that advanced or ended in it."""
        start = time.perf_counter()
        num_prompt_tokens = self._pipeline.advance()
        advanced = time.perf_counter()
        outputs = self._deliver()
        end = time.perf_counter()
        self._pipeline.step_seconds.output += end - advanced
        if num_prompt_tokens:
            self.seconds.prefill += end - start
        else:
            self.seconds.decode += end - start
        return outputs

    def _deliver(self) -> list[RequestOutput]:
        """Decode what is new and make the outputs; forget the requests that have ended."""
        news = self._pipeline.news
        alive = [self._completions[request_id] for request_id in news if request_id in self._completions]
        for completions in alive:
            for member in completions.members:
                self._take_text(completions, member)
        outputs = [
            completions.output()
            for completions in alive
            if completions.is_deliverable and completions.root.request_id in self._completions
        ]
        for output in outputs:
            if output.finished:
                del self._completions[output.request_id]
        news.clear()
        return outputs

    def _take_text(self, completions: Completions, member: Request) -> None:
        """Decode what is new of a completion, and end it if a stop string is complete, or if its tokenizer fails."""
        try:
            stop = completions.take(member)
        except Exception:
            logger.exception("the tokenizer failed on %r, which ends", member.request_id)
            self.scheduler.finish(member, "error")
        else:
            if stop is not None:
                self.scheduler.finish(member, "stop", stop)
