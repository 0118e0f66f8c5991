"""The knobs of an engine, checked."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from ops.providers import select

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}
BACKENDS = ("inductor", "eager")
POLICIES = ("fcfs", "priority")
PREEMPTIONS = ("auto", "swap", "recompute")
OPTIMIZE = ("startup", "latency")  # compile equal layers once, or the whole model as one unit


@dataclass(frozen=True)
class EngineConfig:
    """What `runtime.compile` was asked for. None and "auto" are resolved by the engine, which knows the model.

    Raises ValueError, naming the knob and what is supported.
    """

    dtype: str | torch.dtype = "auto"
    device: str | torch.device = "auto"
    backend: str = "inductor"
    max_model_len: int | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    preemption: str = "auto"
    swap_space: float = 4  # GiB
    seed: int = 0
    providers: Mapping[str, str] = field(default_factory=dict)
    rules: Collection[str] | None = None
    num_threads: int | None = None
    cuda_graphs: bool | str | None = None
    cudagraph_capture_sizes: Sequence[int] | None = None
    async_scheduling: bool | None = None
    debug: bool = False
    optimize: str = "startup"
    eager_start: bool = False

    def __post_init__(self) -> None:
        at_least = {
            "max_model_len": 2,
            "block_size": 1,
            "num_blocks": 2,
            "kv_cache_memory_bytes": 1,
            "max_num_seqs": 1,
            "max_num_batched_tokens": 1,
            "long_prefill_token_threshold": 0,
            "num_threads": 1,
        }
        for name, least in at_least.items():
            value = getattr(self, name)
            optional = EngineConfig.__dataclass_fields__[name].default is None
            if value is None and optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                why = "; block 0 is the null block and holds no tokens" if name == "num_blocks" else ""
                raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}{why}")
        for name in ("enable_prefix_caching", "enable_chunked_prefill", "debug", "eager_start"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool):
            raise ValueError(f"seed must be a whole number, not {self.seed!r}")
        if self.long_prefill_token_threshold and not self.enable_chunked_prefill:
            warnings.warn(
                f"long_prefill_token_threshold={self.long_prefill_token_threshold} is ignored: chunked prefill is off",
                stacklevel=4,
            )
        utilization = self.gpu_memory_utilization
        if isinstance(utilization, bool) or not isinstance(utilization, int | float) or not 0 < utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], not {self.gpu_memory_utilization!r}")
        known = {"backend": BACKENDS, "scheduling_policy": POLICIES, "preemption": PREEMPTIONS, "optimize": OPTIMIZE}
        for name, choices in known.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}")
        self._check_swap_space()
        self._check_rules()
        self._check_graphs()
        if self.dtype not in ("auto", *DTYPES, *DTYPES.values()):
            names = ", ".join(DTYPES)
            raise ValueError(f"dtype must be 'auto' or one of {names}, by name or torch's own, not {self.dtype!r}")

    def _check_swap_space(self) -> None:
        space = self.swap_space
        if isinstance(space, bool) or not isinstance(space, int | float) or not 0 <= space <= 2**20:
            raise ValueError(f"swap_space must be a number of GiB from 0 to {2**20}, not {space!r}")
        if self.preemption == "swap" and space == 0:
            raise ValueError("preemption='swap' needs a swap_space above 0; preemption='recompute' needs none")
        if self.preemption == "recompute" and space != EngineConfig.__dataclass_fields__["swap_space"].default:
            warnings.warn(f"swap_space={space} is ignored: preemption='recompute' swaps nothing out", stacklevel=5)

    def _check_rules(self) -> None:
        if self.rules is None:
            return
        # With transformers' modelling code, which an artifact does without.
        from graphs.rules import GRAPH_RULES
        from models.rules import RULES

        known = [*RULES, *GRAPH_RULES]
        listed = isinstance(self.rules, Collection) and not isinstance(self.rules, str)
        unknown = [name for name in self.rules if name not in known] if listed else [self.rules]
        if unknown:
            raise ValueError(f"rules must be None (all) or a list of names from {', '.join(known)}; not {unknown[0]!r}")

    def _check_graphs(self) -> None:
        if not (self.cuda_graphs is None or isinstance(self.cuda_graphs, bool) or self.cuda_graphs == "lazy"):
            raise ValueError(f"cuda_graphs must be None, True, False or 'lazy', not {self.cuda_graphs!r}")
        if self.async_scheduling not in (None, True, False):
            raise ValueError(f"async_scheduling must be None, True or False, not {self.async_scheduling!r}")
        sizes = self.cudagraph_capture_sizes
        if sizes is None:
            return
        listed = isinstance(sizes, Sequence) and not isinstance(sizes, bytes | str)
        whole = listed and all(isinstance(n, int) and not isinstance(n, bool) for n in sizes)
        if not whole or not sizes or min(sizes) < 1:
            raise ValueError(f"cudagraph_capture_sizes must be None or a list of batch sizes from 1 on, not {sizes!r}")

    def captures(self, device: torch.device) -> bool:
        """Whether decode steps are captured into graphs.

        Raises ValueError where they cannot be: on a CPU a stand-in replays them, which sees no compiled code.
        """
        if self.cuda_graphs is None:
            return device.type == "cuda"
        if self.cuda_graphs and device.type == "cpu" and self.backend != "eager":
            raise ValueError(
                f"cuda_graphs={self.cuda_graphs!r} needs a CUDA device; on a CPU they are only imitated, for tests, "
                f"which needs backend='eager', not {self.backend!r}"
            )
        return bool(self.cuda_graphs)

    def starts_eagerly(self, device: torch.device) -> bool:
        """Whether steps run uncompiled until another process has compiled the graph."""
        return self.eager_start and self.backend == "inductor" and device.type == "cpu"

    def runs_ahead(self, device: torch.device) -> bool:
        """Whether the next step is launched before the tokens of this one are known."""
        return device.type == "cuda" if self.async_scheduling is None else self.async_scheduling

    def applies(self, rule: str) -> bool:
        """Whether a rewrite rule of that name may be applied."""
        return self.rules is None or rule in self.rules

    def resolve_device(self) -> torch.device:
        """The device asked for; "auto" is the current GPU if there is one."""
        if self.device != "auto":
            try:
                device = torch.device(self.device)
            except (RuntimeError, TypeError) as error:
                raise ValueError(f"device must be 'auto', 'cpu' or 'cuda[:index]', not {self.device!r}") from error
        else:
            device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"device must be 'auto', 'cpu' or 'cuda[:index]', not {self.device!r}")
        if device.type == "cuda":
            if not torch.cuda.is_available():
                raise ValueError(f"device={self.device!r}, but this PyTorch sees no CUDA device; use device='cpu'")
            device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
        return device

    def _has_own_product(self, device: torch.device, dtype: torch.dtype) -> bool:
        """Whether linear layers will run through a provider of `linear` that is not PyTorch's own product."""
        choice = select("linear", device, self.providers.get("linear"), dtype)
        return self.applies("linear") and choice.provider != "reference"

    def resolve_dtype(self, stored: torch.dtype, device: torch.device, nbytes: int, memory: int) -> torch.dtype:
        """The dtype to run in. "auto" is the weights' own, except on a CPU that cannot multiply it.

        stored: the weights' dtype; nbytes: their size; memory: bytes the process may use.
        Without bf16 instructions PyTorch's bf16 product is emulated: 15 to 16 GFLOP/s against 78 to 79 in float32 at 64
        to 512 rows (AVX2, two cores). Unless the op `linear` has a provider of its own for the dtype, float32 is then
        chosen as long as it leaves half of the memory to the rest.
        """
        if isinstance(self.dtype, torch.dtype):
            return self.dtype
        if self.dtype != "auto":
            return DTYPES[self.dtype]
        slow = (
            device.type == "cpu"
            and stored.itemsize == 2
            and not cpu_multiplies(stored)
            and not (stored == torch.bfloat16 and self._has_own_product(device, stored))
        )
        fits = nbytes * 4 // stored.itemsize <= memory // 2
        return torch.float32 if slow and fits else stored


def cpu_multiplies(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions to multiply a 16-bit floating dtype (Linux; elsewhere: no)."""
    flags = {"bfloat16": ("avx512_bf16", "amx_bf16", "bf16"), "float16": ("avx512_fp16", "amx_fp16", "asimdhp")}
    info = Path("/proc/cpuinfo")
    present = set(info.read_text().split()) if info.exists() else set()
    return any(flag in present for flag in flags.get(str(dtype).removeprefix("torch."), ()))
