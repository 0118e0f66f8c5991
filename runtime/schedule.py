"""What one step runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from runtime.request import Request


@dataclass(slots=True)
class ScheduledRow:
    """Tokens [start, start + num_tokens) of a request; `num_draws` tokens are drawn if they reach its last one.

    previous_draw: where the one token is still being drawn, its number among the draws of the step before; else -1.
    """

    request: Request
    start: int
    num_tokens: int
    num_draws: int
    previous_draw: int = -1

    @property
    def samples(self) -> bool:
        """Whether the row reaches the request's last token."""
        return self.num_draws > 0


@dataclass(slots=True)
class Schedule:
    """One step: rows to run, `num_tokens` in all, of which `num_prompt_tokens` in rows that begin in a prompt, drawing
    `num_draws`; who was preempted for it; who ended because the pool is too small.

    Before the forward blocks move, in this order, each pair a (source, destination) of block ids: `swap_outs` from the
    device to the host, `swap_ins` back from it, `copies` on the device.
    """

    rows: list[ScheduledRow] = field(default_factory=list)
    swap_outs: list[tuple[int, int]] = field(default_factory=list)
    swap_ins: list[tuple[int, int]] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    finished: list[Request] = field(default_factory=list)
    num_tokens: int = 0
    num_prompt_tokens: int = 0
    num_draws: int = 0

    def add(self, request: Request, num_tokens: int) -> None:
        """Append a row of the next `num_tokens` tokens of `request`."""
        start = request.num_computed_tokens
        num_draws = request.num_draws if start + num_tokens == len(request.token_ids) else 0
        self.rows.append(ScheduledRow(request, start, num_tokens, num_draws))
        self.num_tokens += num_tokens
        self.num_draws += num_draws
        if start < request.num_prompt_tokens:
            self.num_prompt_tokens += num_tokens

    def drop(self, request: Request) -> None:
        """Take the rows of `request` out again, those of its beams too, and give their tokens back."""
        rows, self.rows = self.rows, []
        self.num_tokens = self.num_prompt_tokens = self.num_draws = 0
        for row in rows:
            if row.request.lead is not request:
                self.add(row.request, row.num_tokens)
