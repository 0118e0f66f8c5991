"""The four packages import in one direction, and parts that must stay light import no torch."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
ALLOWED = {
    "ops": {"ops"},
    "models": {"models", "ops"},
    "graphs": {"graphs", "models", "ops"},
    "runtime": {"runtime", "graphs", "models", "ops"},
}
OURS = {*ALLOWED, "bench", "tests"}
FILES = sorted(path for package in ALLOWED for path in (ROOT / package).rglob("*.py"))
TORCH_FREE = sorted(
    [
        *(ROOT / "runtime" / "memory").glob("*.py"),
        *(ROOT / "runtime" / f"{name}.py" for name in ("scheduler", "request", "sampling", "beam_search")),
        *(ROOT / "runtime" / f"{name}.py" for name in ("outputs", "suggest")),
    ]
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(path: Path) -> Iterator[str]:
    """Dotted names of the modules that a file imports anywhere in it, functions and type checking included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name(path)} has a relative import"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    """Run code in a fresh interpreter, in a folder where nothing lies, with `path` first on sys.path."""
    setup = f"import sys; sys.path[:0] = {[str(entry) for entry in path]!r}\n"
    return subprocess.run([sys.executable, "-P", "-c", setup + code], capture_output=True, text=True, check=False)


def test_there_are_files_in_every_package() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(ALLOWED)
    assert len(TORCH_FREE) >= 9
    assert all(path.is_file() for path in TORCH_FREE)


@pytest.mark.parametrize("path", FILES, ids=name)
def test_imports_go_in_one_direction(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    roots = {module.split(".")[0] for module in imported(path)}
    assert roots & OURS <= ALLOWED[package]


@pytest.mark.parametrize("path", TORCH_FREE, ids=name)
def test_memory_and_scheduling_import_no_torch(path: Path) -> None:
    seen, todo = set(), [path]
    while todo:
        current = todo.pop()
        for module in imported(current):
            assert module.split(".")[0] not in {"torch", "transformers"}, f"{name(current)} imports {module}"
            found = ROOT / (module.replace(".", "/") + ".py")
            if found.is_file() and found not in seen:
                seen.add(found)
                todo.append(found)


def test_importing_them_loads_no_torch() -> None:
    modules = [name(path).removesuffix(".py").replace("/", ".").removesuffix(".__init__") for path in TORCH_FREE]
    result = python(
        f"import {', '.join(modules)}\nprint('torch' in sys.modules, runtime.SamplingParams().max_tokens)", ROOT
    )
    assert result.stderr == ""
    assert result.stdout.split() == ["False", "16"]


@pytest.mark.parametrize("shadowed", ["ops", "models", "graphs"])
@pytest.mark.parametrize("kind", ["package", "module"])
def test_a_foreign_package_that_comes_first_is_named(tmp_path: Path, shadowed: str, kind: str) -> None:
    foreign = tmp_path / shadowed / "__init__.py" if kind == "package" else tmp_path / f"{shadowed}.py"
    foreign.parent.mkdir(exist_ok=True)
    foreign.write_text("")
    result = python("import runtime", tmp_path, ROOT)
    assert result.returncode == 1
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: ")
    assert str(foreign.resolve()) in last
    assert repr(shadowed) in last
    assert str(ROOT) in last


def test_a_foreign_package_that_comes_later_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "__init__.py").write_text("")
    result = python("import runtime; print(runtime.SamplingParams().max_tokens)", ROOT, tmp_path)
    assert (result.stdout, result.stderr) == ("16\n", "")
