"""A model's compiled graph on disk: the program, its units, and what rules did; in the compile cache or an artifact."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from graphs.program import Program, ProgramRunner, Unit
from models.report import RuleOutcome

CONSTANTS = "constants.safetensors"


@dataclass(frozen=True)
class CompiledGraph:
    """What `folder` holds beside its manifest: a package for each unit of `program`, and constants if there are any."""

    folder: Path
    program: Program
    outcomes: tuple[RuleOutcome, ...]

    @property
    def files(self) -> list[Path]:
        """The files in the folder that belong to the graph."""
        units = [unit_file(self.folder, unit) for unit in range(self.program.num_units)]
        return [*units, *([self.folder / CONSTANTS] if self.program.num_constants else [])]

    def to_json(self) -> dict[str, Any]:
        """What a manifest has to say of it."""
        return {"program": self.program.to_json(), "outcomes": [vars(outcome) for outcome in self.outcomes]}

    @classmethod
    def from_json(cls, data: Mapping[str, Any], folder: Path) -> CompiledGraph:
        """What `to_json` gave, of the files that lie in `folder`."""
        outcomes = tuple(RuleOutcome(**outcome) for outcome in data["outcomes"])
        return cls(folder, Program.from_json(data["program"]), outcomes)

    def runner(self, state: Mapping[str, Tensor], device: torch.device) -> ProgramRunner:
        """Load the units, which runs their code, and bind them to a model's tensors. Takes some ms."""
        units = [load_unit(unit_file(self.folder, unit), device) for unit in range(self.program.num_units)]
        return ProgramRunner(self.program, units, load_constants(self.folder, self.program, device), state)


@dataclass(frozen=True)
class Compiled:
    """A graph that runs.

    graph: its files; None if it could be compiled for this process only, because of `problem`. num_graphs: what Dynamo
    made; 0 if the graph came out of the cache. kept: what the files lie in, if not in the cache.
    """

    runner: ProgramRunner
    outcomes: tuple[RuleOutcome, ...]
    graph: CompiledGraph | None
    num_graphs: int = 0
    problem: str | None = None
    kept: tempfile.TemporaryDirectory[str] | None = None


def compiler_missing(device: torch.device) -> str | None:
    """Say which compiler inductor would need on this machine and not find, or None."""
    compiler = os.environ.get("CXX", "g++")
    found = shutil.which(compiler.split()[0])  # the first word: CXX may be "ccache g++"
    return None if found else f"the C++ compiler {compiler!r}, which inductor needs for {device.type},"


def save_constants(folder: Path, constants: tuple[Tensor, ...]) -> None:
    """Write a program's unnamed tensors, if it has any."""
    if constants:
        save_file({str(index): tensor.contiguous() for index, tensor in enumerate(constants)}, folder / CONSTANTS)


def load_constants(folder: Path, program: Program, device: torch.device) -> list[Tensor]:
    """Read them."""
    found = load_file(folder / CONSTANTS, device=str(device)) if program.num_constants else {}
    return [found[str(index)] for index in range(program.num_constants)]


def unit_file(folder: Path, unit: int) -> Path:
    """Where in a folder the package of a unit lies."""
    return folder / f"unit-{unit}.pt2"


def load_unit(file: Path, device: torch.device) -> Unit:
    """Load a package, which runs its code: some ms. Raises ValueError if a library of the system does not suffice."""
    index = -1 if device.type == "cpu" else device.index or 0
    # Not torch._inductor.aoti_load_package: that imports the compiler, and probes for instruction sets by g++.
    try:
        return torch._C._aoti.AOTIModelPackageLoader(str(file), "model", True, 1, index).run
    except RuntimeError as error:
        raise ValueError(f"the compiled code in {file} cannot be loaded here: {error}") from error
