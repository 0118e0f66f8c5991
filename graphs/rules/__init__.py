"""Optional rewrites of the captured graph, one a file: nodes that lie side by side become one op.

They are anchored at ops of ours, which other rules put in the graph, so they depend on little of a model's own code.
"""

from collections.abc import Callable, Mapping

from graphs.fusion import GraphRule
from graphs.rules.add_rms_norm import AddRMSNorm
from graphs.rules.gated_activation import GatedActivation
from graphs.rules.grouped_linear import GroupedLinear
from graphs.rules.rope_write_kv import RopeWriteKV
from ops.providers import Choice

GRAPH_RULES: dict[str, Callable[[Mapping[str, Choice]], GraphRule]] = {
    rule.name: rule for rule in (AddRMSNorm, GatedActivation, RopeWriteKV, GroupedLinear)
}
"""Makes each rule from the providers chosen."""
