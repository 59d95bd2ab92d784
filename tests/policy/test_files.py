"""What a reader may rely on: short files, one place that prints, a page for every algorithm."""

import ast
from pathlib import Path

import pytest

from flowrl.registry import ALGORITHMS

ROOT = Path(__file__).parents[2]
LIMITS = {
    "flowrl/*.py": 200,
    "flowrl/bench/*.py": 200,
    "flowrl/zoo/*.py": 200,
    "flowrl/algorithms/*.py": 120,
    "flowrl/models/*.py": 300,
}


def paths(*patterns: str) -> list[str]:
    return [str(path.relative_to(ROOT)) for pattern in patterns for path in sorted(ROOT.glob(pattern))]


@pytest.mark.parametrize(("path", "limit"), [(path, limit) for glob, limit in LIMITS.items() for path in paths(glob)])
def test_a_file_is_short_enough_to_read(path, limit):
    lines = len((ROOT / path).read_text("utf-8").splitlines())
    assert lines <= limit, f"{path} has {lines} lines, {limit} is the limit: split it where a reader would"


@pytest.mark.parametrize("path", paths("flowrl/**/*.py", "rewards/**/*.py", "kernels/**/*.py"))
def test_only_the_command_line_prints(path):
    calls = (node for node in ast.walk(ast.parse((ROOT / path).read_text("utf-8"))) if isinstance(node, ast.Call))
    lines = [call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"]
    assert path == "flowrl/cli.py" or not lines, f"{path} prints in lines {lines}: return or log it instead"


@pytest.mark.parametrize("name", ALGORITHMS.names())
def test_every_algorithm_has_its_page(name):
    assert (ROOT / "docs/algorithms" / f"{name}.md").is_file(), f"write docs/algorithms/{name}.md"


@pytest.mark.parametrize("folder", ["rewards", "kernels"])
def test_folders_that_must_not_become_packages(folder):
    assert not (ROOT / folder / "__init__.py").exists()
