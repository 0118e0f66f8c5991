"""What a rule saves, on hand-made times, and the script on a tiny model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import PreTrainedModel

from bench import rules
from bench.rules import KNOWN, saving


def test_a_saving_is_the_median_of_the_differences_within_rounds() -> None:
    # The machine is slower in later rounds; the difference of the medians would be 50.
    found = saving(with_rule=[10, 20, 100, 50, 80], without=[12, 23, 101, 55, 84])
    assert found == {"median": 3, "low": 2, "high": 4, "of_time": 3 / 55}


def test_a_rule_that_costs_time_saves_less_than_nothing() -> None:
    assert saving(with_rule=[2.0, 2.0], without=[1.0, 1.0])["median"] == -1.0


def test_every_rule_is_left_out_once_and_those_that_apply_nowhere_are_skipped(
    tiny_model: Callable[..., PreTrainedModel], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny_model("llama").save_pretrained(tmp_path)
    sizes = "--batch 1,2 --prompt 3 --steps 2 --prefill 4 --rounds 2 --backend eager"
    rules.main(["--model", str(tmp_path), *sizes.split()])
    (model,) = json.loads(capsys.readouterr().out.splitlines()[-1])["models"]
    assert [row["rule"] for row in model["rules"]] == list(KNOWN)
    by_rule = {row["rule"]: row for row in model["rules"]}
    assert by_rule["merge_qkv"]["modules"] == 3
    for row in model["rules"]:
        if row["modules"]:
            assert row["decode"].keys() == {"1", "2"}
            assert row["prefill"]["low"] <= row["prefill"]["median"] <= row["prefill"]["high"]
        else:
            assert row.keys() == {"rule", "modules"}


def test_an_unknown_rule_is_refused() -> None:
    with pytest.raises(ValueError, match="--rules merge_everything is unknown; these are known: "):
        rules.main(["--rules", "merge_everything"])
