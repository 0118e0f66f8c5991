"""Every family of the tested table: greedy, float32, token for token what Hugging Face's generate gives."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, BloomConfig, MambaConfig, PretrainedConfig, PreTrainedModel

import runtime
from models.checkpoint import Checkpoint
from models.families import PROVEN
from models.report import UnsupportedModelError, Verdict
from runtime import RequestOutput, SamplingParams
from runtime.engine import Engine

MakeEngine = Callable[..., Engine]
TinyModel = Callable[..., PreTrainedModel]
Greedy = Callable[[PreTrainedModel, list[int], int], list[int]]
Drain = Callable[[Engine], dict[str, RequestOutput]]

NEW = 24
GREEDY = SamplingParams(max_tokens=NEW, temperature=0)


def prompts(*lengths: int, shared: int = 0) -> list[list[int]]:
    """Random prompts, the first `shared` tokens of which are equal."""
    generator = torch.Generator().manual_seed(7)
    common = torch.randint(0, 256, (shared,), generator=generator).tolist()
    return [common + torch.randint(0, 256, (n - shared,), generator=generator).tolist() for n in lengths]


# All but one longer than the window of 6; two batches for all tests, since the oracle takes longest.
DIFFERENT = prompts(23, 5, 12, 17)
SHARED = prompts(23, 18, 23, 17, shared=16)


def tokens(outputs: list[RequestOutput]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


@pytest.mark.parametrize(
    ("family", "override"),
    [
        ("mistral", {"sliding_window": None}),
        ("gemma2", {"sliding_window": 256}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma3_text", {"layer_types": ["full_attention"] * 3}),
        ("gemma3_text", {"rope_parameters": {"rope_type": "default", "rope_theta": 20.0}}),
        ("mixtral", {"num_experts_per_tok": 1}),
        ("gpt_oss", {"sliding_window": 256}),
    ],
)
def test_traits_in_the_config_matter(
    family: str, override: dict[str, object], tiny_model: TinyModel, hf_greedy: Greedy
) -> None:
    """Without its trait the model says something else, so the tests below would notice an engine that drops it."""
    prompt = DIFFERENT[0]
    if "rope_parameters" in override:
        override = {
            "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), override["rope_parameters"])
        }
    assert hf_greedy(tiny_model(family, **override), prompt, NEW) != hf_greedy(tiny_model(family), prompt, NEW)


@pytest.mark.parametrize(
    ("family", "part", "value"),
    [("qwen3", "q_norm", 1.0), ("qwen3", "k_norm", 1.0), ("gpt_oss", "sinks", -1e9), ("gpt2", "wpe", 0.0)],
)
def test_traits_in_the_weights_matter(
    family: str, part: str, value: float, tiny_model: TinyModel, hf_greedy: Greedy
) -> None:
    prompt = DIFFERENT[0]
    without = copy.deepcopy(tiny_model(family))
    with torch.no_grad():
        for name, parameter in without.named_parameters():
            if part in name:
                parameter.fill_(value)
    assert hf_greedy(without, prompt, NEW) != hf_greedy(tiny_model(family), prompt, NEW)


def test_proven_is_what_is_tested_here(families: list[str], tiny_model: TinyModel, make_engine: MakeEngine) -> None:
    assert {type(tiny_model(family)).__name__ for family in families} == PROVEN
    assert make_engine(tiny_model("llama")).report.verdict is Verdict.PROVEN


def test_whole_prompts(family: str, tiny_model: TinyModel, make_engine: MakeEngine, hf_greedy: Greedy) -> None:
    model, batch = tiny_model(family), DIFFERENT
    engine = make_engine(model)
    outputs = engine.generate(batch, GREEDY, progress=False)
    assert tokens(outputs) == [hf_greedy(model, prompt, NEW) for prompt in batch]
    assert engine.stats().num_steps == NEW, "one step ran all prompts whole"


def test_prompts_cut_small_among_running_requests(
    family: str, tiny_model: TinyModel, make_engine: MakeEngine, hf_greedy: Greedy, drain: Drain
) -> None:
    """The acceptance test: 7 tokens a step over blocks of 3, and prompts that arrive while others decode."""
    model, batch = tiny_model(family), SHARED
    engine = make_engine(model, block_size=3, max_num_batched_tokens=7, max_num_seqs=3)
    outputs: dict[str, RequestOutput] = {}
    for index, prompt in enumerate(batch):
        engine.add_request(prompt, GREEDY, request_id=str(index))
        for _ in range(5):
            outputs.update({output.request_id: output for output in engine.step()})
    assert engine.stats().num_running > 1
    outputs.update(drain(engine))
    assert tokens([outputs[str(i)] for i in range(len(batch))]) == [hf_greedy(model, prompt, NEW) for prompt in batch]
    assert engine.stats().prefix_cache_hits > 0


def test_preempted(
    family: str, tiny_model: TinyModel, make_engine: MakeEngine, hf_greedy: Greedy, drain: Drain
) -> None:
    """23 usable blocks of 4 for four requests that want 12, 8, 9 and 11 in the end."""
    model, batch = tiny_model(family), DIFFERENT
    engine = make_engine(model, num_blocks=24)
    ids = [engine.add_request(prompt, GREEDY) for prompt in batch]
    outputs = drain(engine)
    assert engine.stats().num_preemptions > 0
    assert tokens([outputs[i] for i in ids]) == [hf_greedy(model, prompt, NEW) for prompt in batch]


def test_prefix_cache_on_equals_off(
    family: str, tiny_model: TinyModel, make_engine: MakeEngine, hf_greedy: Greedy
) -> None:
    model, batch = tiny_model(family), SHARED
    expected = [hf_greedy(model, prompt, NEW) for prompt in batch]
    for enabled, hits in ((True, 3 * 16), (False, 0)):
        engine = make_engine(model, enable_prefix_caching=enabled)
        first = engine.generate(batch[0], GREEDY, progress=False)
        rest = engine.generate(batch[1:], GREEDY, progress=False)
        assert tokens(first + rest) == expected
        assert engine.stats().prefix_cache_hits == hits
        assert [output.num_cached_tokens for output in rest] == [hits // 3] * 3


def test_a_module_in_memory_stays_as_it_is(family: str, tiny_model: TinyModel, make_engine: MakeEngine) -> None:
    model, prompt = copy.deepcopy(tiny_model(family)), DIFFERENT[3]

    def own_tokens() -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
        return out[0, len(prompt) :].tolist()

    def described() -> tuple[list[str], dict[str, object], list[object]]:
        implementations: list[object] = [
            (module.config._attn_implementation, module.config._experts_implementation, module.training)
            for module in model.modules()
            if hasattr(module, "config")
        ]
        return [name for name, _ in model.named_modules()], model.config.to_dict(), implementations

    state = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    before, expected = described(), own_tokens()
    for _ in range(2):
        output = make_engine(model).generate(prompt, GREEDY, progress=False)
        assert tokens(output) == [expected]
    assert own_tokens() == expected
    assert described() == before
    after: dict[str, Tensor] = model.state_dict()
    assert after.keys() == state.keys()
    for name, (address, value) in state.items():
        assert after[name].data_ptr() == address, name
        assert torch.equal(after[name], value), name


REFUSED: list[tuple[PretrainedConfig, str]] = [
    (MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2), "state from token to token"),
    (BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2), "dispatches through transformers' attention"),
]


@pytest.mark.parametrize(("config", "reason"), REFUSED, ids=lambda value: getattr(value, "model_type", None))
def test_refused_before_weights_load(
    config: PretrainedConfig, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(tmp_path)

    def unreadable(self: Checkpoint, name: str) -> Tensor:
        raise AssertionError(f"{name} was read")

    monkeypatch.setattr(Checkpoint, "get", unreadable)
    for source in (model, tmp_path):
        with pytest.raises(UnsupportedModelError, match=reason) as caught:
            runtime.compile(source, backend="eager", progress=False)
        assert isinstance(caught.value, ValueError)
        assert type(model).__name__ in str(caught.value)
        assert "Supported are" in str(caught.value)
