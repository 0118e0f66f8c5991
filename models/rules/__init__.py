"""Optional rewrites, one a file: each is matched on what the probe saw, verified numerically, and reported."""

from models.rewrite import Rule
from models.rules.merge_gate_up import MergeGateUp
from models.rules.merge_qkv import MergeQKV

DEFAULT_RULES: tuple[Rule, ...] = (MergeQKV(), MergeGateUp())
