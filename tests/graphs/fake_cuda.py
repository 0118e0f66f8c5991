"""Traces models on fake tensors of a device that the machine may lack, through the very code that an engine runs.

    python tests/graphs/fake_cuda.py DEVICE FOLDER ...

Each folder holds the config.json of a model, which is adapted for the device in bfloat16, with fake weights, caches and
inputs; its graph is captured, rules included, and for "cuda" lowered to ATen. The report on stdout is one JSON object:
the folder's name -> its `Trace`, or {"error": traceback}.

A process of its own, since it changes torch for good: where there is no GPU, device guards of CUDA do nothing, and
torch.cuda answers for an H200.
"""

import json
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, TypedDict
from unittest.mock import Mock

import torch
from functorch.compile import make_boxed_func
from torch import Tensor, fx
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import aot_module_simplified
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from transformers import AutoConfig

from graphs import fusion
from graphs.capture import capture
from graphs.kv_cache import KVCache
from graphs.partition import partition
from graphs.rules import GRAPH_RULES
from models import rewrite, skeleton
from models.adapted import adapt
from ops.cpu.build import find_compiler
from ops.schema import NAMESPACE, overload
from ops.triton.library import FILES

STAND_INS = torch.library.Library(NAMESPACE, "IMPL")  # torch drops the kernels of a library that is collected
BLOCK_SIZE, NUM_BLOCKS, DTYPE = 4, 23, torch.bfloat16
GUARD = """
#include <c10/core/impl/DeviceGuardImplInterface.h>
C10_REGISTER_GUARD_IMPL(CUDA, c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA>)
"""


class Trace(TypedDict):
    """What was seen of one model's graph."""

    graphs: int  # that Dynamo captured
    call_sites: int  # of attention
    breaks: dict[str, int]  # reason -> number
    calls: list[str]  # of the graph after rules, in order; ops of ours are "pagegraph.op.provider"
    skipped: list[str]  # rules that matched and were not applied: "rule: reason"
    num_dynamic_sizes: int  # different symbols among the sizes of the graph's inputs
    devices: list[str]  # of all tensors in the lowered graph, inputs included
    host_reads: list[str]  # calls of the lowered graph that give the host a value, or a size, from a tensor's data


def pretend_a_gpu(folder: Path) -> None:
    """Let torch make fake CUDA tensors without a GPU.

    Side effects: a file in `folder`; the guard, which every call that gets a tensor of a device looks for, and what
    torch.cuda says of the device, for the rest of the process.
    """
    root = Path(torch.__file__).parent
    library = folder / "no_op_cuda_guard.so"
    include, libraries = f"-I{root / 'include'}", f"-L{root / 'lib'}"
    flags = ["-std=c++20", "-fPIC", "-shared", include, "-x", "c++", "-", libraries, "-lc10", "-o", str(library)]
    subprocess.run([*find_compiler().command, *flags], input=GUARD, text=True, check=True)
    torch.ops.load_library(library)
    torch.cuda.get_device_capability = lambda device=None: (9, 0)  # transformers asks before it uses grouped products
    torch.cuda.Event = Mock  # the arena of inputs waits for copies that nobody makes here


def heed_marks_on_fake_tensors() -> None:
    """Let Dynamo make those sizes of a fake tensor dynamic that are marked so, as it does for a real one.

    Versions of torch since pull request 181794 (2.13 is one) take them over as they are. Side effect: torch is changed.
    """

    def as_if_real(self: ShapeEnv, sizes: Any, strides: Any, offset: Any, source: Any, **settings: Any) -> Any:
        dynamic = [False] * len(sizes)  # unless marked: `settings` say so
        return self._create_symbolic_sizes_strides_storage_offset(sizes, strides, offset, dynamic, source, **settings)

    if hasattr(ShapeEnv, "transfer_symbols_from_foreign_shape_env"):
        ShapeEnv.transfer_symbols_from_foreign_shape_env = as_if_real


def verify_on_the_cpu() -> None:
    """Let rules be verified on the CPU, where the reference stands in for the Triton ops.

    Verification needs real numbers, which fake tensors have none of. So whether a rule replaces the right thing is
    verified here; the kernels are not: they have tests of their own, and where there is a GPU, rules verify with them.
    Side effects: kernels of those ops, and the device that models.rewrite and graphs.fusion verify on.
    """
    for op in FILES:
        STAND_INS.impl(f"{op}.triton", overload(op, "reference"), "CPU")
    for module in (rewrite, fusion):
        module._verify = partial(_with_cpu, module._verify)


def _with_cpu(verify: Callable[..., str | None], *args: Any) -> str | None:
    *others, device = args
    assert isinstance(device, torch.device)
    return verify(*others, torch.device("cpu"))


def lowered(unit: fx.GraphModule) -> list[fx.Node]:
    """The nodes that AOTAutograd would give to inductor for a unit, which is not compiled."""
    nodes: list[fx.Node] = []

    def keep(graph: fx.GraphModule, example: list[Any]) -> Any:
        nodes.extend(graph.graph.nodes)
        return make_boxed_func(graph)

    examples = [node.meta["val"] for node in unit.graph.find_nodes(op="placeholder")]
    aot_module_simplified(unit, examples, fw_compiler=keep)
    return nodes


def trace(folder: Path, device: torch.device) -> Trace:
    """Adapt and capture the model whose config lies in `folder`."""
    counters.clear()
    adaptation = adapt(skeleton.build(AutoConfig.from_pretrained(folder), DTYPE), device)
    choices = adaptation.report.providers
    rules = [make(choices) for make in GRAPH_RULES.values()]
    # Buffers, such as rope frequencies, have been computed for real: they become fake when they move to the device.
    # What the host would read becomes a symbol of the ShapeEnv, and is found in the graph; without one it is an error.
    with FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv()), torch.no_grad():
        adaptation.materialise(device, own=True)
        cache = KVCache(adaptation.report.plan, NUM_BLOCKS, BLOCK_SIZE, DTYPE, device, choices["copy_blocks"])
        captured = capture(adaptation.module, cache, device, rules)
    with torch.no_grad():  # outside of that mode, for Dynamo's own tensors are of another
        _, units = partition(captured, share=False)
        nodes = lowered(units[0]) if device.type == "cuda" else []
    outcomes = [*adaptation.report.outcomes, *captured.outcomes]
    return Trace(
        graphs=counters["stats"]["unique_graphs"],
        call_sites=len(adaptation.report.plan.sites),
        breaks=dict(counters["graph_break"]),
        calls=[_name(node) for node in captured.graph.graph.nodes if node.op.startswith("call_")],
        skipped=[f"{outcome.rule}: {outcome.reason}" for outcome in outcomes if not outcome.applied],
        num_dynamic_sizes=_num_dynamic_sizes(captured.graph),
        devices=sorted({str(value.device) for node in nodes for value in _tensors(node)}),
        host_reads=[str(node.target) for node in nodes if _reads_on_the_host(node)],
    )


def _name(node: fx.Node) -> str:
    if isinstance(node.target, str | torch._ops.OpOverload):
        return str(node.target)
    return getattr(node.target, "__name__", str(node.target))


def _num_dynamic_sizes(graph: fx.GraphModule) -> int:
    examples = [node.meta["example_value"] for node in graph.graph.find_nodes(op="placeholder")]
    sizes = [size for example in examples if isinstance(example, Tensor) for size in example.shape]
    return len({str(size) for size in sizes if not isinstance(size, int)})


def _tensors(node: fx.Node) -> list[Tensor]:
    return [value for value in torch.utils._pytree.tree_leaves(node.meta.get("val")) if isinstance(value, Tensor)]


def _reads_on_the_host(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    tags = node.target.tags if isinstance(node.target, torch._ops.OpOverload) else ()
    return torch.Tag.data_dependent_output in tags or "unbacked_bindings" in node.meta


def main(device: torch.device, folders: list[Path]) -> None:
    """Print the report."""
    if device.type == "cuda" and not torch.cuda.is_available():
        with tempfile.TemporaryDirectory() as scratch:
            pretend_a_gpu(Path(scratch))
        verify_on_the_cpu()
    heed_marks_on_fake_tensors()
    report: dict[str, Any] = {}
    for folder in folders:
        try:
            report[folder.name] = trace(folder, device)
        except Exception:
            report[folder.name] = {"error": traceback.format_exc()}
    print(json.dumps(report))


if __name__ == "__main__":
    main(torch.device(sys.argv[1]), [Path(folder) for folder in sys.argv[2:]])
