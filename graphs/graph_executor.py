"""Decode steps as graphs, captured per batch bucket and replayed."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import torch
from torch import Tensor
from tqdm import tqdm

from graphs.buckets import Buckets
from graphs.cuda_graph import CaptureError, GraphMaker, Replayable
from graphs.executor import Executor
from graphs.inputs import InputArena, StepSizes, fill_padding
from graphs.kv_cache import KVCache
from models.report import RuleOutcome
from models.step_inputs import FIELDS, StepInputs, StepOutputs

logger = logging.getLogger(__name__)

MASKED = 8  # ids a row of a graph may mask (for min_tokens): the stop tokens of models and most users; more: no graph


class GraphExecutor:
    """Replays decode steps that were captured once per bucket; `inner` runs all others.

    A decode step, one token and one draw a sequence, is padded to the next bucket, its block table to `table_width`
    columns and its masked ids to MASKED of them. Captures are the largest first, so that the others fit into the memory
    of the first. Inputs lie in `arena`; outputs in tensors that all buckets share, the tokens in `arena.previous`,
    where the next step finds them.

    Without `capture` nothing is captured before `capture_missing` is called: a bucket that a step has missed.
    debug: each replay checks that its inputs lie where they lay when it was captured.
    """

    def __init__(
        self,
        inner: Executor,
        arena: InputArena,
        buckets: Buckets,
        table_width: int,
        maker: GraphMaker,
        *,
        debug: bool = False,
    ) -> None:
        assert buckets.sizes[-1] <= len(arena.previous), "every drawn token needs its place"
        self.inner, self.arena, self.buckets, self.table_width = inner, arena, buckets, table_width
        self.num_replays = 0
        self.nbytes = 0  # of device memory that the graphs took
        self._maker, self._debug = maker, debug
        self._graphs: dict[int, Replayable] = {}
        self._missing: dict[int, None] = {}
        self._addresses: dict[int, list[int]] = {}
        self._logits: Tensor | None = None

    @property
    def num_recompiles(self) -> int:
        """See Executor."""
        return self.inner.num_recompiles

    @property
    def outcomes(self) -> list[RuleOutcome]:
        """See Executor."""
        return self.inner.outcomes

    @property
    def is_missing(self) -> bool:
        """Whether a step missed a bucket that `capture_missing` would capture."""
        return bool(self._missing)

    @property
    def captured(self) -> list[int]:
        """The buckets that have a graph, ascending."""
        return sorted(self._graphs)

    def sizes(self, bucket: int) -> StepSizes:
        """The sizes of a step of that bucket."""
        return graph_sizes(bucket, self.table_width)

    def padded(self, sizes: StepSizes) -> StepSizes:
        """See Executor: those of the bucket of a decode step that has a graph. One that has none yet is missing now."""
        batch = sizes.sequences
        if not sizes.tokens == batch == sizes.rows:
            return sizes
        bucket = self.buckets.find(batch)
        if bucket is None or sizes.masked > MASKED or sizes.table_width > self.table_width:
            return sizes
        if bucket not in self._graphs:
            self._missing[bucket] = None
            return sizes
        return self.sizes(bucket)

    @torch.no_grad()
    def run(self, inputs: StepInputs) -> StepOutputs:
        """See Executor."""
        bucket = len(inputs.seq_lens)
        graph = self._graphs.get(bucket)
        if graph is None or not self._fits(inputs, bucket):
            return self.inner.run(inputs)
        if self._debug:
            self._check_addresses(inputs, bucket)
        graph.replay()
        self.num_replays += 1
        return self._outputs(bucket)

    def use(self, cache: KVCache) -> None:
        """See Executor. What was captured is forgotten: it reads the old ones."""
        self.forget()
        self.inner.use(cache)

    def rebind(self) -> None:
        """See Executor. Captures again what was captured: a graph holds the parameters' addresses."""
        captured = self.captured
        self.forget()
        self.inner.rebind()
        self._capture_all(reversed(captured))

    def forget(self) -> None:
        """Let go of all graphs and of their memory."""
        self._graphs.clear()
        self._addresses.clear()
        self.nbytes = 0
        self._maker.reset()

    def capture(self, *, progress: bool = True) -> None:
        """Capture every bucket that has no graph yet. Side effects: the arena's inputs and outputs, the null block.

        A bucket for which the memory does not suffice is dropped, with a warning; all are, if what runs there cannot be
        captured (experts whose grouped product reads on the host).
        """
        todo = [bucket for bucket in reversed(self.buckets.sizes) if bucket not in self._graphs]
        self._capture_all(tqdm(todo, desc="capture", unit="graph", disable=None if progress else True))

    def capture_missing(self) -> bool:
        """Capture the bucket that a step missed first since this was last called; whether there was one.

        Side effects: see `capture`.
        """
        if not self._missing:
            return False
        bucket = next(iter(self._missing))
        del self._missing[bucket]
        self._capture_all([bucket])
        return True

    def measure(self) -> int:
        """Bytes of device memory that capturing all buckets is going to take: two are captured, measured and forgotten.

        The smaller one fits into the memory of the larger one, as all others will; so what it takes is what each of
        them costs beside its tensors.
        """
        start = self._maker.memory_used()
        while self.buckets.sizes and not self._graphs:  # a bucket that does not fit is gone
            self._try_capture(self.buckets.sizes[-1])
        first = max(0, self._maker.memory_used() - start)
        each, others = 0, len(self.buckets.sizes) - 1
        if others > 0:
            self._try_capture(self.buckets.sizes[0])
            each = max(0, self._maker.memory_used() - start - first)
        self.forget()
        return first + each * max(0, others)

    def _capture_all(self, buckets: Iterable[int]) -> None:
        before = self._maker.memory_used()
        for bucket in buckets:
            if bucket in self.buckets.sizes:  # not if none can be captured
                self._try_capture(bucket)
        self.nbytes += self._maker.memory_used() - before

    def _try_capture(self, bucket: int) -> None:
        try:
            self._capture(bucket)
        except CaptureError as error:
            self.buckets = Buckets([])
            logger.warning("decode steps run uncaptured: %s", error)
        except Exception as error:
            if not _is_out_of_memory(error):
                raise
            self.buckets.drop(bucket)
            logger.warning(
                "no memory to capture the decode step of %d rows: it runs uncaptured (lower gpu_memory_utilization, or "
                "the largest of cudagraph_capture_sizes)",
                bucket,
            )

    @torch.no_grad()
    def _capture(self, bucket: int) -> None:
        fill_padding(self.arena.carve(self.sizes(bucket)))
        inputs = self.arena.upload()

        def run() -> None:
            outputs = self.inner.run(inputs)
            tokens, logits = self._outputs(bucket, outputs.logits)
            tokens.copy_(outputs.tokens)
            logits.copy_(outputs.logits)

        self._graphs[bucket] = self._maker.capture(run)
        self._addresses[bucket] = _addresses(inputs)

    def _fits(self, inputs: StepInputs, bucket: int) -> bool:
        sizes = self.sizes(bucket)
        shapes = zip(inputs, FIELDS.values(), strict=True)
        return all(tuple(tensor.shape) == sizes.shape(dims) for tensor, (_, dims) in shapes if dims != ("R",))

    def _outputs(self, bucket: int, like: Tensor | None = None) -> StepOutputs:
        """Where that bucket's outputs lie; like: some logits, to make room as theirs."""
        if self._logits is None:
            assert like is not None
            self._logits = like.new_empty(self.buckets.sizes[-1], like.shape[1])
        return StepOutputs(self.arena.previous[:bucket], self._logits[:bucket])

    def _check_addresses(self, inputs: StepInputs, bucket: int) -> None:
        for name, now, then in zip(StepInputs._fields, _addresses(inputs), self._addresses[bucket], strict=True):
            assert now == then, f"{name} of bucket {bucket} lies at {now:#x} and was captured at {then:#x}"


def graph_sizes(bucket: int, table_width: int) -> StepSizes:
    """The sizes of the decode step of a bucket."""
    return StepSizes(tokens=bucket, sequences=bucket, table_width=table_width, rows=bucket, masked=MASKED)


def _addresses(inputs: StepInputs) -> list[int]:
    return [tensor.data_ptr() for tensor in inputs]


def _is_out_of_memory(error: BaseException | None) -> bool:
    """Whether that, or what it was raised in the wake of, is for want of memory: torch's own, or a library's."""
    while error is not None:
        said = str(error)
        if isinstance(error, torch.OutOfMemoryError) or "out of memory" in said or "ALLOC_FAILED" in said:
            return True
        error = error.__cause__ or error.__context__
    return False
