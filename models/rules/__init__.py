"""Optional rewrites, one a file: each is matched on what the probe saw, verified numerically, and reported."""

from collections.abc import Callable, Mapping

from models.rewrite import Rule
from models.rules.linear import UseLinearOp
from models.rules.merge_gate_up import MergeGateUp
from models.rules.merge_qkv import MergeQKV
from models.rules.rms_norm import UseRMSNormOp
from ops.providers import Choice

RULES: dict[str, Callable[[Mapping[str, Choice]], Rule]] = {
    MergeQKV.name: lambda choices: MergeQKV(),
    MergeGateUp.name: lambda choices: MergeGateUp(),
    UseLinearOp.name: lambda choices: UseLinearOp(choices["linear"]),
    UseRMSNormOp.name: lambda choices: UseRMSNormOp(choices["rms_norm"]),
}
"""Makes each rule from the providers chosen, in the order in which they are applied: ops take over merged products."""
