"""From a schedule to tokens: blocks are moved, inputs filled, the graph run."""

from __future__ import annotations

import logging
import time

import torch
from torch import Tensor

from graphs.executor import Executor, make_executor
from graphs.inputs import InputArena
from graphs.kv_cache import KVCache
from graphs.rules import GRAPH_RULES
from graphs.swap_space import SwapSpace
from runtime.batch import InputFiller
from runtime.beam_search import Candidates
from runtime.config import EngineConfig
from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.metrics import StepSeconds
from runtime.model_loader import LoadedModel
from runtime.schedule import Schedule, ScheduledRow

logger = logging.getLogger(__name__)


class ModelRunner:
    """Owns what lives on the device beside the weights: caches, swap space, inputs, and the executor over them."""

    def __init__(
        self, loaded: LoadedModel, manager: KVCacheManager, config: EngineConfig, *, progress: bool = True
    ) -> None:
        """Takes the memory of the caches and compiles the graph, in `seconds`."""
        report, module, device = loaded.adaptation.report, loaded.adaptation.module, loaded.device
        self._manager = manager
        num_blocks = manager.num_usable_blocks + 1
        self.cache = KVCache(
            report.plan, num_blocks, config.block_size, loaded.dtype, device, report.providers["copy_blocks"]
        )
        self.swap_space = SwapSpace(self.cache, manager.host_pool.num_blocks, report.providers["swap_blocks"])
        logger.info(
            "kv cache: %d blocks of %d tokens, %.0f MiB", num_blocks, config.block_size, self.cache.nbytes / 2**20
        )
        start = time.perf_counter()
        rules = [make(report.providers) for name, make in GRAPH_RULES.items() if config.applies(name)]
        self.executor: Executor = make_executor(module, self.cache, device, config.backend, rules, progress=progress)
        report.outcomes += self.executor.outcomes
        self.seconds = time.perf_counter() - start
        self._filler = InputFiller(InputArena(device), manager)

    def copy_rate(self) -> float:
        """Blocks that move to or from the swap space a second, measured; 0 if there is no swap space after all."""
        if not self.swap_space.reserve():
            return 0.0
        return self.swap_space.measure_copy_rate() / self.cache.bytes_per_block

    def run(self, schedule: Schedule, seconds: StepSeconds) -> tuple[list[int], list[Candidates]]:
        """Run a step; returns the drawn tokens, and the candidates of the rows that sample for a beam search.

        Side effects: the caches, in the order swap-out, swap-in, copies, forward; the manager's transfers are finished;
        the phases' `seconds` grow.
        """
        start = time.perf_counter()
        if schedule.swap_outs:
            self.swap_space.swap_out(schedule.swap_outs)
            self._manager.finish_swap_outs()  # each at once: an interrupted step must not move anything again
        if schedule.swap_ins:
            self.swap_space.swap_in(schedule.swap_ins)
            self._manager.finish_swap_ins()
        if schedule.copies:
            self.cache.copy_blocks(schedule.copies)
            self._manager.finish_copies()
        moved = time.perf_counter()
        seconds.transfer += moved - start
        if not schedule.rows:
            return [], []
        inputs = self._filler.fill(schedule)
        filled = time.perf_counter()
        seconds.prepare += filled - moved
        outputs = self.executor.run(inputs)
        tokens: list[int] = outputs.tokens[: schedule.num_draws].tolist()
        candidates = _candidates([row for row in schedule.rows if row.samples], outputs.logits)
        seconds.forward += time.perf_counter() - filled
        return tokens, candidates


def _candidates(sampled: list[ScheduledRow], logits: Tensor) -> list[Candidates]:
    """The likeliest tokens of the rows of beam searches, as many as each search looks at. logits: [draws, V]."""
    wanted, start = {}, 0
    for row in sampled:
        if row.request.lead.search is not None:
            wanted[start] = row.request.lead.search.num_candidates
        start += row.num_draws
    if not wanted:
        return []
    rows = logits[torch.tensor(list(wanted), device=logits.device)]
    # float32 as in transformers; at least, for a float64 model.
    logprobs = rows.to(torch.promote_types(rows.dtype, torch.float32)).log_softmax(-1)
    values, ids = logprobs.topk(min(max(wanted.values()), logprobs.shape[-1]))
    offered = zip(wanted.values(), ids.tolist(), values.tolist(), strict=True)
    return [list(zip(row_ids[:count], row_values[:count], strict=True)) for count, row_ids, row_values in offered]
