"""Which dtype, device and limits an engine resolves to, and which knobs are refused."""

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphs import swap_space
from graphs.rules import GRAPH_RULES
from models.rules import RULES
from ops import Choice
from ops.cpu.library import problem
from runtime import config as config_module
from runtime.config import EngineConfig
from runtime.limits import size_swap_space

CPU = torch.device("cpu")
GB = 1 << 30


@pytest.fixture
def no_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU without instructions for 16-bit floats."""
    monkeypatch.setattr(config_module, "cpu_multiplies", lambda dtype: False)


@pytest.fixture
def linear_provider(monkeypatch: pytest.MonkeyPatch) -> dict[torch.dtype, str]:
    """The providers of the op `linear` by dtype, the reference where none is set."""
    providers: dict[torch.dtype, str] = {}

    def select(op: str, device: torch.device, override: str | None = None, dtype: Any = None) -> Choice:
        assert (op, device) == ("linear", CPU)
        name = override or providers.get(dtype, "reference")
        return Choice(op, name, "for a test", torch.ops.pagegraph.linear.reference)

    monkeypatch.setattr(config_module, "select", select)
    return providers


@pytest.mark.usefixtures("no_bf16", "linear_provider")
def test_auto_dtype_avoids_emulated_products() -> None:
    resolve = EngineConfig().resolve_dtype
    assert resolve(torch.bfloat16, CPU, nbytes=GB, memory=16 * GB) is torch.float32
    assert resolve(torch.float16, CPU, nbytes=GB, memory=16 * GB) is torch.float32
    assert resolve(torch.float32, CPU, nbytes=GB, memory=16 * GB) is torch.float32
    assert resolve(torch.float64, CPU, nbytes=GB, memory=16 * GB) is torch.float64
    assert resolve(torch.bfloat16, torch.device("cuda"), nbytes=GB, memory=16 * GB) is torch.bfloat16


@pytest.mark.usefixtures("no_bf16", "linear_provider")
def test_auto_dtype_stays_small_when_float32_would_fill_the_memory() -> None:
    assert EngineConfig().resolve_dtype(torch.bfloat16, CPU, nbytes=5 * GB, memory=16 * GB) is torch.bfloat16


@pytest.mark.usefixtures("no_bf16")
def test_auto_dtype_is_kept_where_linear_has_a_provider_of_its_own(linear_provider: dict[torch.dtype, str]) -> None:
    linear_provider[torch.bfloat16] = "cpu"
    resolve = EngineConfig().resolve_dtype
    assert resolve(torch.bfloat16, CPU, nbytes=GB, memory=16 * GB) is torch.bfloat16
    assert resolve(torch.float16, CPU, nbytes=GB, memory=16 * GB) is torch.float32
    overridden = EngineConfig(providers={"linear": "reference"})
    assert overridden.resolve_dtype(torch.bfloat16, CPU, nbytes=GB, memory=16 * GB) is torch.float32


@pytest.mark.usefixtures("no_bf16")
def test_the_library_of_this_machine_is_such_a_provider() -> None:
    if problem() is not None:
        pytest.skip("the C++ ops cannot be built here")
    assert EngineConfig().resolve_dtype(torch.bfloat16, CPU, nbytes=GB, memory=16 * GB) is torch.bfloat16
    assert EngineConfig().resolve_dtype(torch.float16, CPU, nbytes=GB, memory=16 * GB) is torch.float32


def test_auto_dtype_on_a_cpu_with_the_instructions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_module, "cpu_multiplies", lambda dtype: True)
    assert EngineConfig().resolve_dtype(torch.bfloat16, CPU, nbytes=GB, memory=16 * GB) is torch.bfloat16


@pytest.mark.parametrize("dtype", ["float16", torch.float16])
def test_a_given_dtype_is_taken(dtype: str | torch.dtype) -> None:
    assert EngineConfig(dtype=dtype).resolve_dtype(torch.float32, CPU, nbytes=GB, memory=GB) is torch.float16


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"block_size": 0}, "block_size must be a whole number of at least 1, not 0"),
        ({"block_size": 16.0}, "block_size must be a whole number"),
        ({"num_blocks": 1}, "num_blocks must be a whole number of at least 2, not 1; block 0 is the null block"),
        ({"max_model_len": 1}, "max_model_len"),
        ({"max_num_seqs": True}, "max_num_seqs"),
        ({"max_num_seqs": None}, "max_num_seqs"),
        ({"gpu_memory_utilization": 0}, r"gpu_memory_utilization must be in \(0, 1\]"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization"),
        ({"backend": "tensorrt"}, "backend must be one of inductor, eager, not 'tensorrt'"),
        ({"preemption": "kill"}, "preemption must be one of auto, swap, recompute, not 'kill'"),
        ({"swap_space": -1}, "swap_space must be a number of GiB from 0 to 1048576, not -1"),
        ({"swap_space": float("nan")}, "swap_space must be a number of GiB"),
        ({"swap_space": float("inf")}, "swap_space must be a number of GiB"),
        ({"swap_space": True}, "swap_space must be a number of GiB"),
        ({"swap_space": "4"}, "swap_space must be a number of GiB from 0 to 1048576, not '4'"),
        ({"preemption": "swap", "swap_space": 0}, "preemption='swap' needs a swap_space above 0"),
        ({"dtype": "int8"}, "dtype must be 'auto' or one of float32"),
        (
            {"rules": "linear"},
            r"rules must be None \(all\) or a list of names from merge_qkv, .*grouped_linear; not 'linear'",
        ),
        ({"rules": ["linear", "fuse"]}, "rules must be .* linear, rms_norm, add_rms_norm, .*; not 'fuse'"),
        ({"rules": True}, "rules must be .*; not True"),
        ({"rules": [3]}, "rules must be .*; not 3"),
        ({"num_threads": 0}, "num_threads must be a whole number of at least 1, not 0"),
        ({"num_threads": 2.0}, "num_threads must be a whole number"),
        ({"num_threads": True}, "num_threads must be a whole number"),
    ],
)
def test_bad_knobs_name_what_is_supported(knobs: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(**knobs)


def test_rules_that_may_be_applied() -> None:
    assert EngineConfig().applies("linear")
    assert not EngineConfig(rules=[]).applies("linear")
    some = EngineConfig(rules=("linear", "rope_write_kv"))
    assert [name for name in (*RULES, *GRAPH_RULES) if some.applies(name)] == ["linear", "rope_write_kv"]


@pytest.mark.parametrize("device", ["meta", "tpu", "cuda:x"])
def test_bad_devices(device: str) -> None:
    with pytest.raises(ValueError, match="device"):
        EngineConfig(device=device).resolve_device()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there() -> None:
    assert EngineConfig().resolve_device() == CPU
    with pytest.raises(ValueError, match="sees no CUDA device; use device='cpu'"):
        EngineConfig(device="cuda").resolve_device()


def test_a_threshold_without_chunking_is_ignored_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="long_prefill_token_threshold=3 is ignored: chunked prefill is off"):
        EngineConfig(enable_chunked_prefill=False, long_prefill_token_threshold=3)


def test_swap_space_without_swapping_is_ignored_with_a_warning() -> None:
    with pytest.warns(UserWarning, match="swap_space=2 is ignored: preemption='recompute' swaps nothing out"):
        EngineConfig(preemption="recompute", swap_space=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        EngineConfig(preemption="recompute")
        EngineConfig(swap_space=0)
        EngineConfig(swap_space=0.5, preemption="swap")


def swap_blocks(monkeypatch: pytest.MonkeyPatch, free: int, max_model_len: int = 10**9, **knobs: Any) -> int:
    """What size_swap_space gives for a model of 1 MiB a block on a CPU, beside a KV cache of 100 blocks."""
    monkeypatch.setattr(swap_space, "free_host_memory", lambda: free)
    plan = SimpleNamespace(bytes_per_token=lambda element_size: element_size << 14)
    facts: Any = SimpleNamespace(report=SimpleNamespace(plan=plan), dtype=torch.float32, device=CPU)
    return size_swap_space(facts, EngineConfig(**knobs), 100, max_model_len)


def test_the_swap_space_is_what_was_asked_for_what_is_free_or_what_could_be_filled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert swap_blocks(monkeypatch, 64 * GB) == 4096
    assert swap_blocks(monkeypatch, 64 * GB, swap_space=0.5) == 512
    assert swap_blocks(monkeypatch, 64 * GB, swap_space=0) == 0
    assert swap_blocks(monkeypatch, GB) == (1024 - 100) // 2
    assert swap_blocks(monkeypatch, 64 * GB, max_num_seqs=3, max_model_len=33) == 3 * 3
    assert swap_blocks(monkeypatch, 64 * GB, preemption="recompute") == 0


def test_swapping_without_room_is_ignored_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.warns(UserWarning, match="preemption='swap' is ignored: swap_space=4 GiB .* 1048576 bytes"):
        assert swap_blocks(monkeypatch, 0, preemption="swap") == 0
