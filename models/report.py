"""What adapting a model found out: its attention call sites, the verdict, and what each rule did."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from enum import Enum

from ops.providers import Choice


class Verdict(Enum):
    """How far a model's correctness under paging is known."""

    PROVEN = "proven"  # its architecture is in the tested table
    UNPROVEN = "unproven"  # its attention dispatches as it should, but nobody tested the architecture
    # The third verdict, refused, is an UnsupportedModelError: there is no report to carry it.


class UnsupportedModelError(ValueError):
    """A model whose attention or state the paged cache cannot serve. Raised before any weight is read."""

    def __init__(self, model: str, where: str, reason: str) -> None:
        super().__init__(
            f"{model} is not supported: {where}: {reason}. Supported are decoder-only Hugging Face models whose every "
            "attention layer dispatches through transformers' attention interface with a causal mask, optionally a "
            "sliding window, a softcap or sinks, and which keep no other state from token to token"
        )
        self.where, self.reason = where, reason


@dataclass(frozen=True)
class CallSite:
    """One attention call of the forward pass, in call order, as the probe observed it.

    Sizes are counts of heads and elements. `window` is the number of positions that a query sees, itself included
    (0: all). `softcap` is in logit units (0: none). `cache` is the index of the K and V tensors the site uses; a
    site with `writes` False reads what an earlier site with the same `cache` has written.
    """

    module: str
    num_q_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False
    cache: int = 0
    writes: bool = True

    @property
    def elements_per_token(self) -> int:
        """Number of K and V elements that one token occupies in this site's cache."""
        return self.num_kv_heads * (self.k_dim + self.v_dim) if self.writes else 0


@dataclass(frozen=True)
class CachePlan:
    """All call sites of a model; `caches` lists one owning site per K/V cache."""

    sites: tuple[CallSite, ...]

    @property
    def caches(self) -> tuple[CallSite, ...]:
        """The sites that own a cache, in the order of their cache index."""
        return tuple(site for site in self.sites if site.writes)

    def bytes_per_token(self, element_size: int) -> int:
        """Bytes of K and V that one token occupies in all caches, for elements of `element_size` bytes."""
        return element_size * sum(site.elements_per_token for site in self.sites)


@dataclass(frozen=True)
class RuleOutcome:
    """What one rule did at one module: applied, or skipped and why."""

    rule: str
    module: str
    applied: bool
    reason: str


@dataclass
class RewriteReport:
    """What adapting did to a model. Printing it gives a summary a person can read."""

    architecture: str
    verdict: Verdict
    plan: CachePlan
    outcomes: list[RuleOutcome] = field(default_factory=list)
    providers: dict[str, Choice] = field(default_factory=dict)

    def applied(self, rule: str) -> int:
        """Number of modules at which `rule` was applied."""
        return sum(outcome.applied for outcome in self.outcomes if outcome.rule == rule)

    def __str__(self) -> str:
        sites = len(self.plan.sites)
        lines = [f"{self.architecture}: {self.verdict.value}, {sites} attention sites, {len(self.plan.caches)} caches"]
        counts = Counter((o.rule, o.applied, o.reason) for o in self.outcomes)
        for (rule, applied, reason), count in counts.items():
            lines.append(f"  {rule}: {'applied' if applied else 'skipped'} at {count} modules ({reason})")
        lines += [f"  {op}: provider {choice.provider} ({choice.reason})" for op, choice in self.providers.items()]
        return "\n".join(lines)
