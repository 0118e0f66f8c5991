"""How many bytes of intermediate tensors a step keeps alive at once: counted on tensors that have no memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from graphs.inputs import StepSizes
from graphs.kv_cache import KVCache
from models.step_inputs import FIELDS, StepInputs

if TYPE_CHECKING:  # it imports transformers
    from models.adapted import AdaptedModel


class LiveStorages(TorchDispatchMode):
    """Counts, while it is entered, the bytes of the storages that operators make and that are still alive.

    A storage counts once, from the operator that returns it until the last tensor on it is gone; those of `given`
    (inputs, weights, caches) never do. What an operator's kernel allocates for itself is not seen, nor does an
    allocator's rounding count. Works alike on real, meta and fake tensors.
    """

    def __init__(self, given: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.current = self.peak = 0  # bytes
        # By the address of torch's own storage object: it is the same for every tensor on the storage.
        self._given = {tensor.untyped_storage()._cdata for tensor in given}
        self._live: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                self._see(tensor.untyped_storage())
        self.peak = max(self.peak, self.current)
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._given or key in self._live:
            return
        self._live[key] = storage.nbytes()
        self.current += self._live[key]
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.current -= self._live.pop(key)


class _AnyGroupedProduct(TorchDispatchMode):
    """Answers torch's grouped matrix product, whose own fake knows bfloat16 only, by an empty tensor of its shape."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten._grouped_mm.default:
            rows, matrices = args[:2]  # [S, K] and [experts, K, N]
            return rows.new_empty(rows.shape[0], matrices.shape[2])
        return func(*args, **(kwargs or {}))


def peak_activation_bytes(module: AdaptedModel, cache: KVCache, sizes: StepSizes, device: torch.device) -> int:
    """Estimate the most bytes of intermediate tensors, logits included, that an uncompiled step of `sizes` has at once.

    Runs the module on fake tensors (torch._subclasses.fake_tensor) of the same shapes, dtypes and device: nothing is
    allocated and nothing computed. Weights, inputs and caches are left out, as is what kernels allocate inside (the
    reference attention gathers keys and values). Compiled code fuses operators, so it usually stays below.
    Side effect: for the time of the call the module's parameters are fake ones, so no other thread may run it.
    """
    mode = FakeTensorMode(allow_non_fake_inputs=True)  # the latter are small constants that a module keeps

    def fake(tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        return ((name, mode.from_tensor(tensor)) for name, tensor in tensors)

    state = {**dict(fake(module.named_parameters())), **dict(fake(module.named_buffers()))}
    k_caches, v_caches = ([mode.from_tensor(tensor) for tensor in tensors] for tensors in (cache.k, cache.v))
    with torch.no_grad(), mode:
        inputs = StepInputs(
            *(torch.empty(sizes.shape(dims), dtype=dtype, device=device) for dtype, dims in FIELDS.values())
        )
        with _AnyGroupedProduct(), LiveStorages([*state.values(), *inputs, *k_caches, *v_caches]) as storages:
            functional_call(module, state, (inputs, k_caches, v_caches))
    return storages.peak
