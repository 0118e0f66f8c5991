"""The contract of every op: its schema, its fake, and the one way to define a provider of it.

Ops live in the torch.library namespace `pagegraph`. Each provider of an op is an overload with the very same schema
(`torch.ops.pagegraph.write_kv.reference`), so a graph names its provider and two engines in one process may differ.

Legend: T tokens, B sequences, L sampled rows, W block-table width, N blocks, V vocabulary, Hq query heads, Hk kv heads.
No schema takes a number that depends on the batch: a captured graph would replay a stale one.
"""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

NAMESPACE = "pagegraph"

# In torch's own spelling (a test holds this), so that the hash of the text is the hash of the schema.
SCHEMAS: dict[str, str] = {
    "paged_attention": (
        "(Tensor q, Tensor k_cache, Tensor v_cache, Tensor block_table, Tensor seq_lens, Tensor query_start_loc, "
        "float scale, int window, float softcap, Tensor? sinks) -> Tensor"
    ),
    "write_kv": "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor slot_mapping) -> ()",
    "copy_blocks": "(Tensor(a!)[] caches, Tensor src_dst) -> ()",
    "swap_blocks": "(Tensor[] src, Tensor(a!)[] dst, Tensor src_dst) -> ()",
    "sample": (
        "(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p, Tensor seed, Tensor position, "
        "Tensor masked_ids) -> Tensor"
    ),
    "linear": "(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    "grouped_linear": "(Tensor x, Tensor weight, Tensor offsets) -> Tensor",
    "rms_norm": "(Tensor x, Tensor weight, float eps, float offset) -> Tensor",
    "add_rms_norm": "(Tensor x, Tensor residual, Tensor weight, float eps, float offset) -> (Tensor, Tensor)",
    "silu_and_mul": "(Tensor gate_up) -> Tensor",
    "gelu_and_mul": "(Tensor gate_up, bool tanh) -> Tensor",
    "rope_write_kv": (
        "(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) k_cache, Tensor(b!) v_cache, "
        "Tensor slot_mapping) -> Tensor"
    ),
}

# Lives as long as the process: torch drops the definitions of a library that is collected.
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")


def schema_hash(op: str) -> str:
    """Return the sha256 (hex) of an op's schema without provider: two builds with equal hashes agree on the op."""
    return hashlib.sha256(f"{NAMESPACE}::{op}{SCHEMAS[op]}".encode()).hexdigest()


def define(op: str, provider: str, **kernels: Callable[..., Any]) -> None:
    """Define overload `provider` of `op` with its fake and its Python kernels.

    Args:
        op: a key of SCHEMAS.
        provider: the overload's name.
        kernels: dispatch key (`CPU`, `CUDA`, `CompositeExplicitAutograd`) -> function. None at all for a provider
            whose kernels a C++ library registers.

    Side effects: registers with torch for the rest of the process; twice the same overload is torch's RuntimeError.
    """
    name = f"{op}.{provider}"
    # flexible_layout: q, k and v come with any strides, so the compiler need not copy them into eager's strides.
    tags = (torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout)
    _LIBRARY.define(name + SCHEMAS[op], tags=tags)
    torch.library.register_fake(f"{NAMESPACE}::{name}", _FAKES[op], lib=_LIBRARY)
    for dispatch_key, kernel in kernels.items():
        _LIBRARY.impl(name, kernel, dispatch_key)


def overload(op: str, provider: str) -> torch._ops.OpOverload:
    """Return the callable of a defined provider, e.g. `torch.ops.pagegraph.sample.reference`."""
    return getattr(getattr(getattr(torch.ops, NAMESPACE), op), provider)


# The fakes compare no sizes: a comparison would become a guard, and a guard another compiled graph.


def _fake_paged_attention(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape[0], q.shape[1], v_cache.shape[3])


def _fake_sample(logits: Tensor, *_: Any) -> Tensor:
    return logits.new_empty(logits.shape[0], dtype=torch.int64)


def _fake_linear(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(*x.shape[:-1], weight.shape[0])


def _fake_rms_norm(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _fake_add_rms_norm(x: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


def _fake_act_and_mul(gate_up: Tensor, *_: Any) -> Tensor:
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def _fake_rope_write_kv(q: Tensor, *_: Any) -> Tensor:
    return q.new_empty(q.shape)


def _fake_grouped_linear(x: Tensor, weight: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _fake_nothing(*_: Any) -> None:
    return None


_FAKES: dict[str, Callable[..., Any]] = {
    "paged_attention": _fake_paged_attention,
    "write_kv": _fake_nothing,
    "copy_blocks": _fake_nothing,
    "swap_blocks": _fake_nothing,
    "sample": _fake_sample,
    "linear": _fake_linear,
    "grouped_linear": _fake_grouped_linear,
    "rms_norm": _fake_rms_norm,
    "add_rms_norm": _fake_add_rms_norm,
    "silu_and_mul": _fake_act_and_mul,
    "gelu_and_mul": _fake_act_and_mul,
    "rope_write_kv": _fake_rope_write_kv,
}
