"""Golden lists: what the one graph of every family calls, on a CPU and on a GPU. A change that changes a graph shows.

    PAGEGRAPH_WRITE_GOLDEN=1 python -m pytest tests/graphs/test_golden_ops.py

rewrites golden_ops.json; its difference is then to be looked at, and committed with the change that caused it. Ops of
ours must be the same with every version of torch and transformers, what lies between them with the versions named in
the file.
"""

import json
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

FILE = Path(__file__).with_name("golden_ops.json")
COMMAND = f"PAGEGRAPH_WRITE_GOLDEN=1 python -m pytest tests/graphs/{Path(__file__).name}"
DEVICES = ("cpu", "cuda")
PRODUCTS = frozenset(
    {"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "einsum", "scaled_dot_product_attention"}
    | {"grouped_mm", "_grouped_mm"}
)
Traced = Callable[[str, str], dict[str, Any]]


def versions() -> dict[str, str]:
    """Major and minor numbers: what a patch release changes in a graph is worth a look."""
    return {module.__name__: ".".join(module.__version__.split(".")[:2]) for module in (torch, transformers)}


def summary(trace: dict[str, Any]) -> dict[str, Any]:
    """Counts of ours by name, of matrix products by name, and of all other calls together."""
    counts = Counter(trace["calls"])
    ours = {name.removeprefix("pagegraph."): n for name, n in counts.items() if name.startswith("pagegraph.")}
    products = {name: n for name, n in counts.items() if name in PRODUCTS}
    others = counts.total() - sum(ours.values()) - sum(products.values())
    return {
        "graphs": trace["graphs"],
        "breaks": sum(trace["breaks"].values()),
        "ours": dict(sorted(ours.items())),
        "products": dict(sorted(products.items())),
        "others": others,
    }


def differences(golden: dict[str, int], found: dict[str, int]) -> list[str]:
    """One line for each name whose count changed, with both counts."""
    names = [name for name in sorted({*golden, *found}) if golden.get(name, 0) != found.get(name, 0)]
    return [f"{name}: {golden.get(name, 0)} -> {found.get(name, 0)}" for name in names]


def check(where: str, golden: dict[str, int], found: dict[str, int]) -> None:
    lines = differences(golden, found)
    if lines:
        changes = "\n".join(f"    {line}" for line in lines)
        pytest.fail(f"{where}: number of calls, golden -> found\n{changes}\nIf that is meant: {COMMAND}", pytrace=False)


@pytest.fixture(scope="module")
def golden(traced: Traced, families: list[str]) -> dict[str, Any]:
    """The lists as they lie in the file, which is rewritten first if asked for."""
    if os.environ.get("PAGEGRAPH_WRITE_GOLDEN"):
        lists = {device: {family: summary(traced(device, family)) for family in families} for device in DEVICES}
        FILE.write_text(json.dumps({"versions": versions(), **lists}, indent=2) + "\n")
    return json.loads(FILE.read_text())


def test_there_is_a_list_for_every_family_on_every_device(golden: dict[str, Any], families: list[str]) -> None:
    assert {device: sorted(golden[device]) for device in DEVICES} == dict.fromkeys(DEVICES, sorted(families))
    assert golden.keys() == {"versions", *DEVICES}


@pytest.mark.parametrize("device", DEVICES)
def test_ops_of_ours(golden: dict[str, Any], traced: Traced, device: str, family: str) -> None:
    expected, found = golden[device][family], summary(traced(device, family))
    assert (found["graphs"], found["breaks"]) == (expected["graphs"], expected["breaks"]) == (1, 0)
    check(f"ops of ours in {family} on {device}", expected["ours"], found["ours"])


@pytest.mark.parametrize("device", DEVICES)
def test_products_and_the_number_of_other_calls(
    golden: dict[str, Any], traced: Traced, device: str, family: str
) -> None:
    if versions() != golden["versions"]:
        pytest.skip(f"golden lists are of {golden['versions']}, here is {versions()}: only ops of ours are compared")
    expected, found = golden[device][family], summary(traced(device, family))
    check(f"matrix products in {family} on {device}", expected["products"], found["products"])
    check(f"{family} on {device}", {"other calls": expected["others"]}, {"other calls": found["others"]})


def test_a_difference_names_what_changed() -> None:
    golden, found = (
        {"linear.cpu": 4, "rms_norm.cpu": 1, "sample.cpu": 1},
        {"linear.cpu": 6, "linear": 1, "sample.cpu": 1},
    )
    assert differences(golden, golden) == []
    assert differences(golden, found) == ["linear: 0 -> 1", "linear.cpu: 4 -> 6", "rms_norm.cpu: 1 -> 0"]
    with pytest.raises(pytest.fail.Exception, match=r"(?s)llama on cpu.*linear\.cpu: 4 -> 6.*PAGEGRAPH_WRITE_GOLDEN=1"):
        check("llama on cpu", golden, found)
