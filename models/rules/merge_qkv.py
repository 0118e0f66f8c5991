"""Query, key and value projections as one matrix product."""

from models.rules.merged_linear import MergeLinears


class MergeQKV(MergeLinears):
    """Merge linear layers that share their input inside modules that call attention."""

    name = "merge_qkv"
    in_attention = True
