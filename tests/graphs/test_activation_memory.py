"""The peak of live intermediate tensors: by hand, on fake tensors, and equal to what a real step has."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from graphs.activation_memory import LiveStorages, peak_activation_bytes
from graphs.inputs import InputArena, StepSizes
from graphs.kv_cache import KVCache
from models.report import CachePlan
from models.step_inputs import StepInputs
from ops.providers import select
from runtime.engine import Engine

CPU = torch.device("cpu")
MIXED = StepSizes(tokens=33, sequences=5, table_width=20, rows=7)
DECODE = StepSizes(tokens=8, sequences=8, table_width=20, rows=8)


class Halves(nn.Module):
    """Makes, from L temperatures, two tensors of 40 L bytes that live at once, and then one more of a quarter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(10), requires_grad=False)
        self.register_buffer("offset", torch.zeros(10))
        self.fails = False

    def forward(self, inputs: StepInputs, k_caches: list[Tensor], v_caches: list[Tensor]) -> Tensor:
        assert not k_caches
        assert not v_caches
        if self.fails:
            raise RuntimeError("half-way")
        outer = inputs.temperature[:, None] * self.weight  # 40 L bytes
        shifted = outer + self.offset  # 80 L
        del outer  # 40 L
        shifted += 1  # in place
        half = shifted[:, :5]  # a view
        return half.to(torch.float16)  # 50 L


def no_cache() -> KVCache:
    return KVCache(CachePlan(()), 2, 4, torch.float32, CPU, select("copy_blocks", CPU))


def real_peak(engine: Engine, sizes: StepSizes) -> int:
    """The peak in a real step: `sizes.sequences` prompts, the last one longest, in the null block."""
    arena = InputArena(CPU)
    host = arena.carve(sizes)
    for tensor in host:
        tensor.zero_()
    host.prev_row.fill_(-1)
    host.masked_ids.fill_(-1)
    host.query_start_loc[:-1] = torch.arange(sizes.sequences)
    host.query_start_loc[-1] = sizes.tokens
    host.seq_lens[:] = host.query_start_loc.diff()
    inputs, cache, module = arena.upload(), engine.runner.cache, engine._loaded.module
    with LiveStorages([*module.parameters(), *module.buffers(), *inputs, *cache.tensors]) as storages:
        outputs = engine.runner.executor.run(inputs)
    assert storages.current == outputs.logits.nbytes + outputs.tokens.nbytes, "all else is gone"
    return storages.peak


def fake_peak(engine: Engine, sizes: StepSizes) -> int:
    return peak_activation_bytes(engine._loaded.module, engine.runner.cache, sizes, CPU)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_storages_count_once_from_their_birth_to_their_last_view(device: str) -> None:
    given = torch.zeros(100, device=device)
    with LiveStorages([given]) as storages:
        first = given + 1
        assert (storages.current, storages.peak) == (400, 400)
        view, same = first[:10], given.view(10, 10)
        given.add_(1)
        assert storages.current == 400, "neither views nor writes in place make storages, and inputs do not count"
        second = first.repeat(3)
        assert (storages.current, storages.peak) == (1600, 1600)
        del first, second
        assert storages.current == 400, "a view keeps the whole storage"
        del view
        assert (storages.current, storages.peak) == (0, 1600)
        flags = same > 0
        assert (storages.current, storages.peak) == (100, 1600)
    assert flags.nbytes == 100


def test_the_peak_of_a_module_made_by_hand() -> None:
    sizes = StepSizes(tokens=1, sequences=1, table_width=1, rows=6)
    assert peak_activation_bytes(Halves(), no_cache(), sizes, CPU) == 80 * 6


def test_the_module_keeps_its_own_tensors_even_if_it_fails() -> None:
    module = Halves()
    before = [module.weight, module.offset]
    module.fails = True
    with pytest.raises(RuntimeError, match="half-way"):
        peak_activation_bytes(module, no_cache(), DECODE, CPU)
    assert module.weight is before[0]
    assert module.offset is before[1]


@pytest.mark.parametrize("sizes", [MIXED, DECODE], ids=["mixed", "decode"])
def test_fake_tensors_give_the_peak_of_a_real_step(
    tiny_model: Callable, make_engine: Callable[..., Engine], family: str, sizes: StepSizes
) -> None:
    engine = make_engine(tiny_model(family))
    peak = fake_peak(engine, sizes)
    assert peak == real_peak(engine, sizes)
    assert peak >= sizes.rows * engine.vocab_size * 4, "the logits alone"
    parameters = list(engine._loaded.module.parameters())
    assert all(type(parameter) is nn.Parameter for parameter in parameters)


def test_experts_in_float64_too(tiny_model: Callable, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(tiny_model("mixtral"), dtype="float64")
    assert fake_peak(engine, MIXED) == real_peak(engine, MIXED)


def test_the_peak_grows_with_tokens_and_rows(tiny_model: Callable, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(tiny_model("llama"))

    def peak(tokens: int, rows: int) -> int:
        return fake_peak(engine, StepSizes(tokens=tokens, sequences=1, table_width=1, rows=rows))

    assert peak(64, 1) == 2 * peak(32, 1), "in the layers everything has a row a token"
    assert peak(32, 2000) - peak(32, 1000) >= 1000 * engine.vocab_size * 4, "many rows peak at the logits"
