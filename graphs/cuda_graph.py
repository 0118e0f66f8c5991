"""What captures the kernels that a function launches, to launch them again at once: a CUDA graph, and its stand-in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class CaptureError(RuntimeError):
    """What was to be captured waits for the device, or reads from it, which no graph can replay."""


class Replayable(Protocol):
    """Work on the device that was captured once."""

    def replay(self) -> None:
        """Queue that very work again, on the same addresses."""


class GraphMaker(Protocol):
    """Captures functions; all graphs of one maker share their memory, so no two may run at once."""

    def capture(self, run: Callable[[], None]) -> Replayable:
        """Run `run` until all that it needs is there, and then capture what it does.

        Raises CaptureError for what cannot be captured, torch.OutOfMemoryError, or what is raised in its wake.
        """

    def memory_used(self) -> int:
        """Bytes in use on the device: differences count."""

    def reset(self) -> None:
        """Give the memory of graphs back that nobody holds any more."""


class CudaGraphs:
    """CUDA graphs on one device, in one memory pool."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def capture(self, run: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """See GraphMaker."""
        run()  # compiles and loads kernels, which a capture forbids
        try:
            torch.cuda.set_sync_debug_mode("error")  # now, since torch 2.11 does not recover from a broken capture
            run()
        except RuntimeError as error:
            if "synchroniz" not in str(error):
                raise
            raise CaptureError(str(error)) from error
        finally:
            torch.cuda.set_sync_debug_mode("default")
        graph = torch.cuda.CUDAGraph()
        # A capture that breaks, for want of memory, leaves its own stream as the current one: the outer context ends
        # that. thread_local: what other threads of the process do to the device meanwhile is their own business.
        current = torch.cuda.stream(torch.cuda.current_stream(self._device))
        with current, torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            run()
        return graph

    def memory_used(self) -> int:
        """See GraphMaker: what the driver says, since graphs take memory beside that of their tensors.

        Side effect: what torch has cached goes back first; a capture, which does that too, would seem to free some.
        """
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        return total - free

    def reset(self) -> None:
        """See GraphMaker."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        self._pool = torch.cuda.graph_pool_handle()  # a pool whose graphs are all gone must not be used again


class RecordedGraphs:
    """A stand-in on a CPU, for tests: as stale as a CUDA graph, though not as quick.

    A capture records the operators that are called, with their Python arguments and the tensors themselves; a replay
    calls them again, each result written to where the recorded one lies. What Python decided, numbers that it read from
    tensors included, therefore stays as it was at the capture. Reading a tensor on the host raises, as it does while
    CUDA captures. Code that inductor compiled is not seen: record an eager module.
    """

    def __init__(self) -> None:
        self._graphs: list[RecordedGraph] = []

    def capture(self, run: Callable[[], None]) -> RecordedGraph:
        """See GraphMaker."""
        run()
        with _Recorder() as recorder:
            run()
        graph = RecordedGraph(recorder.calls)
        self._graphs.append(graph)
        return graph

    def memory_used(self) -> int:
        """See GraphMaker: bytes that the recorded results hold."""
        return sum(graph.nbytes for graph in self._graphs)

    def reset(self) -> None:
        """See GraphMaker."""
        self._graphs.clear()


class RecordedGraph:
    """The calls of one capture: operator, arguments, keyword arguments, results."""

    def __init__(self, calls: list[tuple[Any, Any, Any, Any]]) -> None:
        self._calls = calls
        results = (leaf for *_, result in calls for leaf in tree_leaves(result) if isinstance(leaf, Tensor))
        self.nbytes = sum(
            {leaf.untyped_storage().data_ptr(): leaf.untyped_storage().nbytes() for leaf in results}.values()
        )

    def replay(self) -> None:
        """See Replayable."""
        for operator, args, kwargs, recorded in self._calls:
            result = operator(*args, **kwargs)
            for old, new in zip(tree_leaves(recorded), tree_leaves(result), strict=True):
                if isinstance(old, Tensor) and old.untyped_storage().data_ptr() != new.untyped_storage().data_ptr():
                    old.copy_(new)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, Any, Any, Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            raise CaptureError(f"{func} reads a tensor on the host, which cannot be captured")
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result
