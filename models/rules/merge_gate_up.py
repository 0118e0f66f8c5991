"""Gate and up projections of a gated feed-forward layer as one matrix product."""

from models.rules.merged_linear import MergeLinears


class MergeGateUp(MergeLinears):
    """Merge linear layers that share their input outside of attention."""

    name = "merge_gate_up"
    in_attention = False
