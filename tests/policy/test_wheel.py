"""The wheel holds the three packages, their data and nothing else, and works away from the clone."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
NEEDED = ["pyproject.toml", "README.md", "LICENSE", "flowrl", "rewards", "kernels", "configs"]
PLACES = {"flowrl": "flowrl", "flowrl/configs": "configs", "flowrl_rewards": "rewards/flowrl_rewards",
          "flowrl_kernels": "kernels/flowrl_kernels"}  # fmt: skip
PROBE = """
from importlib.metadata import entry_points, version
from importlib.resources import files
import flowrl, flowrl_kernels, flowrl_rewards
print(files("flowrl"))
assert version("flowrl-posttrain") == flowrl.__version__
assert files("flowrl").joinpath("configs/shapes/demo.yaml").read_text("utf-8")
for entry in entry_points(group="flowrl.rewards"):
    entry.load()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from a copy, so that no earlier build can leak into it."""
    clone = tmp_path_factory.mktemp("clone")
    for name in NEEDED:
        copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
        copy(ROOT / name, clone / name)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", str(clone)]
    subprocess.run(command, check=True, capture_output=True)
    (built,) = (clone / "dist").glob("*.whl")
    return built


def test_wheel_holds_every_file_of_the_packages_and_no_other(wheel):
    """Pages for readers of the source (.md) may be there or not."""
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name and not name.endswith(".md")}
    expected = {
        f"{place}/{path.relative_to(ROOT / folder).as_posix()}"
        for place, folder in PLACES.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in {".md", ".pyc"}
    }
    assert held - expected == set()
    assert expected - held == set()


def test_wheel_works_outside_the_clone(wheel, tmp_path):
    site = tmp_path / "site"
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target"]
    subprocess.run([*install, str(site), str(wheel)], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": str(site)}
    run = subprocess.run([sys.executable, "-c", PROBE], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.strip() == str(site / "flowrl")
