"""An artifact: a folder with a model's compiled graph and all that serves it without the compiler or the model's code.

It is native code, which `load` runs: trust an artifact as you would trust a program. The hashes find damage, and not
malice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from graphs.background_compile import Job
from graphs.compiled_graph import CompiledGraph
from graphs.device import describe, mismatch
from graphs.sealed_folder import MANIFEST, unseal
from models.report import CachePlan, CallSite, RewriteReport, RuleOutcome, Verdict
from models.step_inputs import FIELDS, StepOutputs
from models.weight_plan import WeightPlan, replay
from ops.providers import Choice
from ops.schema import SCHEMAS, overload, schema_hash
from runtime.config import EngineConfig
from runtime.loaded_model import ModelFacts

if TYPE_CHECKING:
    from models.adapted import AdaptedModel
    from models.checkpoint import Checkpoint

FORMAT = 1
GRAPH_KNOBS = ("dtype", "backend", "block_size", "providers", "rules", "optimize")
"""Those of `runtime.compile` that the compiled graph follows from: an artifact has its own."""

TENSORS, WEIGHTS, OPS, KERNELS = "tensors.safetensors", "weights.safetensors", "ops.so", "kernels"
TOKENIZER = "tokenizer"
"""Members: what no checkpoint holds, merged weights if they are included, the C++ ops, Triton's compiled kernels,
and the tokenizer's files."""

_SUPPORTED = "supported: a folder that engine.export or pagegraph export has made"


class ArtifactError(ValueError):
    """An artifact that does not fit this process, machine or model. Names the field, what it has and what is here."""

    def __init__(self, path: Path, field: str, expected: object, found: object, remedy: str = "") -> None:
        super().__init__(
            f"the artifact {path} cannot be used here: {field}: it was made for {expected}, here is {found}"
            + (f"; {remedy}" if remedy else "; export it anew here")
        )
        self.field = field


def abi() -> str:
    """A hash of what goes into a graph and comes out of it."""
    return hashlib.sha256(repr((FORMAT, FIELDS, StepOutputs._fields)).encode()).hexdigest()[:16]


def requirements(device: torch.device) -> dict[str, Any]:
    """What must be the same where an artifact is made and where it is used."""
    return {
        "format": FORMAT,
        "abi": abi(),
        "torch": torch.__version__,
        "device": describe(device),
        "op schemas": {op: schema_hash(op) for op in SCHEMAS},
    }


@dataclass(frozen=True)
class Artifact:
    """What a manifest says, but for the graph.

    knobs: the graph's, and what the exporting engine was asked for besides. plan: how the weights of a folder are
    loaded, None if they came from memory. folder: where that was; weights: its fingerprint. included: whether the
    artifact holds the weights. tensors: shape and dtype of each that the graph uses and `TENSORS` does not hold.
    """

    requires: dict[str, Any]
    made_by: dict[str, str]
    graph_knobs: dict[str, Any]
    knobs: dict[str, Any]
    facts: dict[str, Any]
    plan: dict[str, Any] | None
    folder: str | None
    weights: str | None
    included: bool
    tensors: dict[str, Any]
    graph: dict[str, Any]

    def check(self, path: Path, device: torch.device) -> None:
        """Raise ArtifactError for the first requirement that is not met."""
        here = requirements(device)
        for field in ("format", "abi", "torch"):
            if self.requires[field] != here[field]:
                raise ArtifactError(path, field, self.requires[field], here[field])
        if (unlike := mismatch(self.requires["device"], here["device"])) is not None:
            field, expected, found = unlike
            raise ArtifactError(path, f"device {field}", expected, found)
        for op, expected in self.requires["op schemas"].items():
            found = here["op schemas"].get(op, "no such op")
            if expected != found:
                raise ArtifactError(path, f"schema of op {op}", expected, found)


def read(path: Path) -> Artifact:
    """The artifact in a folder, every byte of which has been checked. Raises ValueError."""
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; {_SUPPORTED}")
    if not (path / MANIFEST).exists():
        raise ValueError(f"{path} holds no {MANIFEST}: it is no artifact, or a damaged one; {_SUPPORTED}")
    content = unseal(path)
    if "requires" not in content:
        raise ValueError(f"{path} is no artifact; {_SUPPORTED}")
    if content["requires"]["format"] != FORMAT:  # before fields are looked for that it may not have
        raise ArtifactError(path, "format", content["requires"]["format"], FORMAT)
    return Artifact(**content)


def inspect(path: str | Path) -> str:
    """A summary of an artifact for people, whether or not it can be used here. Raises ValueError for a damaged one."""
    folder = Path(path)
    artifact = read(folder)
    graph = CompiledGraph.from_json(artifact.graph, folder)
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    weights = "included" if artifact.included else f"those of {artifact.folder}, fingerprint {artifact.weights}"
    knobs = {name: value for name, value in artifact.knobs.items() if value != getattr(EngineConfig, name, None)}
    lines = [
        f"artifact {folder}, {size / 2**20:.1f} MiB",
        f"  made by {', '.join(f'{name} {version}' for name, version in artifact.made_by.items())}",
        f"  for torch {artifact.requires['torch']} on {artifact.requires['device']}",
        f"  graph: {graph.program.num_units} units, called {len(graph.program.calls)} times; "
        + ", ".join(f"{name}={value}" for name, value in artifact.graph_knobs.items() if value not in (None, {})),
        f"  weights: {weights}",
        f"  other knobs: {', '.join(f'{name}={value}' for name, value in knobs.items()) or 'none'}",
        str(report_from_json(artifact.facts["report"])),
    ]
    return "\n".join(lines)


def report_to_json(report: RewriteReport) -> dict[str, Any]:
    """A report for the manifest; which op overloads are called follows from the providers' names."""
    return {
        "architecture": report.architecture,
        "verdict": report.verdict.value,
        "sites": [asdict(site) for site in report.plan.sites],
        "outcomes": [asdict(outcome) for outcome in report.outcomes],
        "providers": {op: [choice.provider, choice.reason] for op, choice in report.providers.items()},
    }


def report_from_json(data: Mapping[str, Any], *, callable_ops: bool = False) -> RewriteReport:
    """What `report_to_json` gave.

    callable_ops: with the overloads of these providers, which must be loaded, and not with the reference.
    """
    providers = {
        op: Choice(op, provider, reason, overload(op, provider) if callable_ops else overload(op, "reference"))
        for op, (provider, reason) in data["providers"].items()
    }
    plan = CachePlan(tuple(CallSite(**site) for site in data["sites"]))
    outcomes = [RuleOutcome(**outcome) for outcome in data["outcomes"]]
    return RewriteReport(data["architecture"], Verdict(data["verdict"]), plan, outcomes, providers)


class ArtifactModel:
    """A model out of an artifact; see LoadedModel."""

    def __init__(self, path: Path, artifact: Artifact, facts: ModelFacts, tensors: dict[str, Tensor]) -> None:
        self.path, self.artifact, self.facts = path, artifact, facts
        self.graph: CompiledGraph | None = CompiledGraph.from_json(artifact.graph, path)
        self._tensors = tensors

    @property
    def module(self) -> AdaptedModel:
        """See LoadedModel: there is none."""
        raise ValueError(f"an artifact ({self.path}) holds no model's code: use runtime.compile for what needs it")

    def background_job(self, config: EngineConfig, key: str | None) -> Job | None:
        """See LoadedModel: there is nothing to compile."""
        return None

    def tensors(self) -> dict[str, Tensor]:
        """See LoadedModel."""
        return self._tensors

    def reload(self, source: Checkpoint | Mapping[str, Tensor], *, progress: bool) -> None:
        """See LoadedModel. The weights must have the names, shapes and dtypes of the folder that it was made from."""
        if self.artifact.plan is None:
            raise ValueError(
                f"{self.path} was made from a model in memory, and does not know how the weights of a folder are "
                "loaded: use runtime.compile"
            )
        replay(WeightPlan.from_json(self.artifact.plan), source, self._tensors, progress=progress)
