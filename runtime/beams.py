"""The beams of one search as sequences of the scheduler: they run in lockstep and share what they have in common.

Before there are beams, and after a preemption by recomputation, only the lead runs: it computes the tokens that all
beams share, once, and then the others fork off. A beam's last token runs only in a step in which every beam's does.
"""

from __future__ import annotations

from collections.abc import Mapping

from runtime.beam_search import Candidates
from runtime.memory.kv_cache_manager import KVCacheManager
from runtime.request import Request, RequestStatus


def next_rows(lead: Request, budget: int, max_tokens_per_row: int) -> list[tuple[Request, int]]:
    """What runs next of a request with beams, as (beam, number of tokens), within a budget of tokens."""
    if lead.num_common_tokens:
        return [(lead, min(lead.num_common_tokens - lead.num_computed_tokens, budget, max_tokens_per_row))]
    beams, rows = lead.sequences, []
    if all(beam.num_computed_tokens == beam.num_tokens - 1 for beam in beams):
        return [(beam, 1) for beam in beams] if budget >= len(beams) else []
    for beam in beams:
        num_tokens = min(beam.num_tokens - 1 - beam.num_computed_tokens, budget, max_tokens_per_row)
        if num_tokens:
            rows.append((beam, num_tokens))
            budget -= num_tokens
    return rows


def resumable(lead: Request, manager: KVCacheManager) -> list[Request]:
    """The sequences of a waiting request that are admitted together: all of a search whose beams are swapped out.

    Of beams that have lost their blocks only the lead: it computes what they share, at least the prompt, before the
    others fork off.
    """
    if not lead.beams or lead.num_common_tokens:
        return [lead]
    if all(map(manager.is_swapped, lead.sequences)):
        return lead.sequences
    for beam in lead.sequences:
        manager.free(beam)
    columns = zip(*(beam.token_ids[:-1] for beam in lead.sequences), strict=True)
    differs = (i for i, tokens in enumerate(columns) if len(set(tokens)) > 1)
    lead.num_common_tokens = next(differs, lead.num_tokens - 1)
    return [lead]


def fork_off(lead: Request, manager: KVCacheManager) -> None:
    """Fork the other beams off a lead that has computed what they share, if there are such."""
    common = lead.num_common_tokens
    if common and lead.num_computed_tokens >= common:
        for beam in lead.beams:
            manager.fork(lead, beam, common)
            beam.num_computed_tokens, beam.status = common, RequestStatus.RUNNING
        lead.num_common_tokens = 0


def select(lead: Request, candidates: Mapping[Request, Candidates], manager: KVCacheManager) -> None:
    """Let the search choose the beams of the next step from what each offers, or end the request with it.

    Beams that do not go on take over the tokens and the blocks of those that go on more than once.
    """
    assert lead.search is not None
    beams = lead.sequences
    chosen = lead.search.advance([beam.output_token_ids for beam in beams], [candidates[beam] for beam in beams])
    if not chosen:
        best = lead.search.hypotheses[0]
        lead.finish("length" if best.stop_reason is None else "stop", best.stop_reason)
        return
    for index in range(len(beams), len(chosen)):
        beam = lead.fork(f"{lead.request_id}~{index}", index)
        beam.lead = lead
        lead.beams.append(beam)
    beams = lead.sequences
    for index, (beam, continuation) in enumerate(zip(beams, chosen, strict=True)):
        if continuation.parent != index:
            manager.free(beam)
            beam.take_over(beams[continuation.parent])
            manager.fork(beams[continuation.parent], beam)
            beam.status = RequestStatus.RUNNING
    for beam, continuation in zip(beams, chosen, strict=True):
        beam.token_ids.append(continuation.token)
