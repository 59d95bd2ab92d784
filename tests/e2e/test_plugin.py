"""The example plug-in, installed like anybody's: its names are listed, checked and known to a config."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """Run a command where the example is installed."""
    site = tmp_path_factory.mktemp("site")
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation", "--target"]
    subprocess.run([*pip, str(site), str(ROOT / "rewards/examples/warm")], check=True, capture_output=True)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}

    def run(*args):
        command = [sys.executable, "-m", "flowrl", *args]
        return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)

    return run


def test_its_names_are_listed(installed):
    rows = {row["name"]: row for row in json.loads(installed("rewards", "list", "--json").stdout)}
    assert rows["warm"]["state"] == rows["warm_or"]["state"] == "ready"
    assert rows["warm_or"]["columns"] == "warm, other" and rows["shapes"]["needs"] == "scene"


@pytest.mark.parametrize(
    "args, code, said",
    [
        (("warm_or", "instead=0"), 0, "ok    warm_or: "),
        (("warm",), 0, "no gold case: tried on noise"),
        (("warm_or", "instead=7"), 2, "instead = 7: it is a channel; take 0, 1 or 2"),
        (("warmer",), 2, "did you mean 'warm'"),
    ],
    ids=["class", "function", "bad option", "unknown"],
)
def test_it_is_checked(installed, args, code, said):
    run = installed("rewards", "check", *args)
    assert run.returncode == code and said in run.stdout + run.stderr


def test_a_config_knows_its_names(installed):
    rewards = "rewards=[{name: warm}, {name: warm_or, options: {instead: 0}}]"
    assert installed("plan", "shapes/demo", rewards).returncode == 0
