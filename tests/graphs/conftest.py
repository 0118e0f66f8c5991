"""Graphs of the tested families, traced on fake tensors for a device that need not be there."""

import copy
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from ops.cpu.build import BuildError, find_compiler

SCRIPT = Path(__file__).with_name("fake_cuda.py")
ROOT = SCRIPT.parents[2]


@pytest.fixture(scope="session")
def traced(
    families: list[str], tiny_model: Callable[..., PreTrainedModel], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], dict[str, Any]]:
    """`traced(device, family)`: its `Trace` (see fake_cuda.py) on "cpu" or "cuda", one process for all."""
    try:
        find_compiler()
    except BuildError as error:
        pytest.skip(str(error))
    folder = tmp_path_factory.mktemp("configs")
    for family in families:
        config = copy.deepcopy(tiny_model(family).config)
        config.num_hidden_layers = 2  # one of each kind, where there are two
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:2]
        config.save_pretrained(folder / family)
    # Not interpreted: a Triton kernel then has the provider's place in CUDA graphs, and none on a CPU.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))

    @cache
    def run(device: str) -> dict[str, Any]:
        command = [sys.executable, str(SCRIPT), device, *(str(folder / family) for family in families)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def get(device: str, family: str) -> dict[str, Any]:
        trace = run(device)[family]
        assert "error" not in trace, trace["error"]
        return trace

    return get
