"""Who may import whom: the direction of the layout, read from the syntax trees. The standard library is free to all."""

import ast
import sys
from importlib.util import resolve_name
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {"flowrl": ROOT / "flowrl", "flowrl_rewards": ROOT / "rewards", "flowrl_kernels": ROOT / "kernels"}
ANY = None

# module or package: (what it may import of the project, what it may import from elsewhere)
TABLE = {
    "flowrl.registry": ("", "pydantic yaml"),
    "flowrl.config_file": ("", "pydantic yaml"),
    "flowrl.config_errors": ("flowrl.config_file", "pydantic"),
    "flowrl.config_blocks": ("flowrl.registry", "pydantic"),
    "flowrl.config": (
        "flowrl.registry flowrl.config_file flowrl.config_blocks flowrl.config_errors",
        "pydantic yaml",
    ),
    "flowrl.types": ("", "torch"),
    "flowrl.prompt_source": ("", ""),
    "flowrl.pictures": ("flowrl.prompt_source", "numpy PIL"),
    "flowrl.prompt_files": ("flowrl.types flowrl.prompt_source flowrl.prompt_tables flowrl.pictures", ""),
    "flowrl.pairs": (
        "flowrl.types flowrl.prompt_source flowrl.prompt_tables flowrl.prompt_files flowrl.pictures",
        "",
    ),
    "flowrl.draws": ("", "torch"),
    "flowrl.flow": ("flowrl.types flowrl_kernels", "torch"),
    "flowrl.grids": ("flowrl.types flowrl_kernels", "torch"),
    "flowrl.credit": ("flowrl.types flowrl_kernels", "torch"),
    "flowrl.regularise": ("flowrl.types flowrl.flow flowrl_kernels", "torch"),
    "flowrl.sample": ("flowrl.types flowrl.flow flowrl.draws", "torch"),
    "flowrl.algorithms": (
        "flowrl.types flowrl.flow flowrl.draws flowrl.grids flowrl.credit flowrl.registry",
        "torch",
    ),
    "flowrl.models": (
        "flowrl.types flowrl.registry flowrl.draws flowrl.grids flowrl.flow flowrl.zoo flowrl_kernels",
        "torch diffusers transformers safetensors numpy PIL",
    ),
    "flowrl.daemon": ("", ""),
    "flowrl.verdicts": ("flowrl.types flowrl.wire flowrl.daemon", "torch numpy"),
    "flowrl.rewards": ("flowrl.types", "torch PIL"),
    "flowrl.http": ("", "httpx tenacity"),
    "flowrl.png": ("", "PIL"),
    "flowrl.wire": ("flowrl.png", "numpy PIL"),
    "flowrl.watch": ("", "torch"),
    "flowrl.watchdog": ("", "pydantic"),
    "flowrl.remote": ("flowrl.types flowrl.rewards flowrl.wire flowrl.http flowrl.verdicts", "torch"),
    "flowrl.isolated": ("flowrl.types flowrl.rewards flowrl.remote flowrl.http flowrl.verdicts", "torch"),
    "flowrl.served": (
        "flowrl.daemon flowrl.registry flowrl.wire flowrl.types flowrl.rewards flowrl.scorers",
        "torch numpy",
    ),
    "flowrl.serve": ("flowrl.served flowrl.wire", "fastapi uvicorn"),
    "flowrl.scorers": (
        "flowrl.types flowrl.registry flowrl.rewards flowrl.verdicts flowrl.remote flowrl.isolated",
        "torch pydantic",
    ),
    "flowrl.bank": ("flowrl.types flowrl.rewards flowrl.scorers flowrl.verdicts", "torch"),
    "flowrl.policy": ("flowrl.types flowrl.models.base", "torch accelerate peft safetensors"),
    "flowrl_kernels": ("", "torch triton xformers"),
    "flowrl_rewards": (
        "flowrl.types flowrl.rewards flowrl.http flowrl.png flowrl.wire flowrl.daemon flowrl.verdicts flowrl.watch "
        "flowrl.zoo",
        ANY,
    ),
}


def inside(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


def modules() -> dict[str, Path]:
    """Dotted name of every module of the three packages: its file."""
    found = {}
    for package, folder in SOURCES.items():
        base = folder.parent if folder.name == package else folder
        for path in sorted((base / package).rglob("*.py")):
            parts = path.relative_to(base).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(source: str, package: str) -> set[str]:
    """Dotted names of the modules that a source text inside `package` imports, at any depth of its tree."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            origin = resolve_name("." * node.level + (node.module or ""), package)
            full = {f"{origin}.{alias.name}" for alias in node.names}
            names |= {name if name in MODULES else origin for name in full}
    return names


def forbidden(name: str, row: str) -> bool:
    """Whether a module under `row` of the table may not import `name`."""
    project, elsewhere = TABLE[row]
    top = name.partition(".")[0]
    if top in sys.stdlib_module_names:
        return False
    if top in SOURCES:
        return not any(inside(name, allowed) for allowed in [row, *project.split()])
    return elsewhere is not ANY and top not in elsewhere.split()


CASES = [pytest.param(row, module, id=module) for module in MODULES for row in TABLE if inside(module, row)]


@pytest.mark.parametrize(("row", "module"), CASES)
def test_imports_point_down_the_table(row, module):
    path = MODULES[module]
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    wrong = sorted(name for name in imported(path.read_text("utf-8"), package) if forbidden(name, row))
    assert not wrong, f"{path.relative_to(ROOT)} may not import {', '.join(wrong)}; see the row {row!r} of the table"


@pytest.mark.parametrize("row", TABLE)
def test_every_row_governs_a_module(row):
    assert row in MODULES


@pytest.mark.parametrize(
    ("source", "caught"),
    [
        ("import accelerate", "accelerate"),
        ("from diffusers.utils import logging", "diffusers.utils"),
        ("from flowrl import rewards", "flowrl.rewards"),
        ("from ..models import base", "flowrl.models"),
        ("def f():\n    import flowrl_rewards.shapes", "flowrl_rewards.shapes"),
        ("if TYPE_CHECKING:\n    from flowrl.train import train", "flowrl.train"),
    ],
    ids=["plain", "submodule", "name of a module", "relative", "inside a function", "for types only"],
)
def test_an_algorithm_that_reaches_up_is_caught(source, caught):
    wrong = {name for name in imported(source, "flowrl.algorithms") if forbidden(name, "flowrl.algorithms")}
    assert len(wrong) == 1 and inside(wrong.pop(), caught)
