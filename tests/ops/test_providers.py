"""The choice among providers of an op."""

import pytest
import torch

from ops import SCHEMAS, Provider, providers, register, schema, select

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def copies(monkeypatch):
    """copy_blocks with two more providers that call the reference; neither needs an overload to be chosen among."""
    monkeypatch.setitem(providers.REGISTRY, "copy_blocks", dict(providers.REGISTRY["copy_blocks"]))
    monkeypatch.setattr(providers, "overload", lambda op, name: (op, name))
    register("copy_blocks", "fast", Provider(frozenset({"cuda"}), 20, frozenset({torch.bfloat16})))
    register("copy_blocks", "native", Provider(frozenset({"cpu"}), 10))


@pytest.mark.parametrize("device", [CPU, CUDA, torch.device("meta")])
@pytest.mark.parametrize("op", SCHEMAS)
def test_reference_serves_every_op_on_every_device(op, device):
    choice = select(op, device, "reference")
    assert (choice.op, choice.provider) == (op, "reference")
    assert choice.overload is getattr(torch.ops.pagegraph, op).reference


@pytest.mark.parametrize("op", SCHEMAS)
def test_reference_is_chosen_where_nothing_else_serves_and_the_reason_names_the_device(op):
    choice = select(op, torch.device("meta"))
    assert choice.provider == "reference"
    assert "meta" in choice.reason


def test_override_is_the_reason():
    assert select("sample", CPU, "reference").reason == "asked for"


@pytest.mark.usefixtures("copies")
@pytest.mark.parametrize(
    ("device", "dtype", "expected"),
    [
        (CPU, None, "native"),
        (CUDA, None, "fast"),
        (CUDA, torch.bfloat16, "fast"),
        (CUDA, torch.float32, "reference"),
        (torch.device("meta"), None, "reference"),
    ],
)
def test_highest_priority_that_serves_device_and_dtype(device, dtype, expected):
    choice = select("copy_blocks", device, dtype=dtype)
    assert choice.provider == expected
    assert choice.overload == ("copy_blocks", expected)
    assert select("copy_blocks", device, "reference", dtype).provider == "reference"


@pytest.mark.usefixtures("copies")
def test_unknown_names_are_refused_with_the_valid_ones():
    with pytest.raises(ValueError, match=r"unknown provider 'tritn' of copy_blocks; on cpu there are .*native.*refer"):
        select("copy_blocks", CPU, "tritn")
    with pytest.raises(ValueError, match=r"'fast' of copy_blocks does not serve cpu; these do: .*native.*reference"):
        select("copy_blocks", CPU, "fast")
    with pytest.raises(ValueError, match=r"'fast' .* does not serve cuda with float32"):
        select("copy_blocks", CUDA, "fast", torch.float32)
    with pytest.raises(ValueError, match=r"unknown op 'rope'; the ops are .*copy_blocks"):
        select("rope", CPU)


def test_a_provider_is_one_definition_and_one_registration(monkeypatch):
    """And both providers stay callable side by side."""
    monkeypatch.setitem(providers.REGISTRY, "copy_blocks", dict(providers.REGISTRY["copy_blocks"]))
    calls = []
    schema.define("copy_blocks", "test_double", CPU=lambda caches, src_dst: calls.append(len(caches)))
    register("copy_blocks", "test_double", Provider(frozenset({"cpu"}), 5))
    cache, src_dst = torch.arange(3.0).view(3, 1, 1, 1), torch.tensor([[1, 2]])
    select("copy_blocks", CPU).overload([cache, cache], src_dst)
    assert calls == [2]
    assert cache.flatten().tolist() == [0, 1, 2]
    select("copy_blocks", CPU, "reference").overload([cache], src_dst)
    assert calls == [2]
    assert cache.flatten().tolist() == [0, 1, 1]
