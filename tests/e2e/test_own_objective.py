"""The objective of docs/objectives.md, written outside the package, trains and is checked like one of ours."""

import re
from pathlib import Path

import pytest

from flowrl import train
from flowrl.config_file import ConfigError
from flowrl.forwards import forwards
from flowrl.session import start
from tests.tiny import config

DOC = Path(__file__).parents[2] / "docs" / "objectives.md"


@pytest.fixture
def rwr(tmp_path):
    (code,) = re.findall(r"```python\n(.*?)```", DOC.read_text(), re.S)
    assert len(code.splitlines()) <= 22
    path = tmp_path / "rwr.py"
    path.write_text(code)
    return f"{path}:RWR"


def test_it_trains_and_keeps_its_promises(tiny, tmp_path, rwr):
    c = config(
        tmp_path, tiny, f"algorithm={{name: '{rwr}', power: 2, draws: 2}}", "sampler={steps: 4}",
        "regularise.norm_hinge=0.1", "optimiser.updates=2",
    )  # fmt: skip
    s, seen = start(c), []
    s.adapter.network.register_forward_hook(lambda network, args, output: seen.append(len(output[0])))
    for step in range(2):
        seen.clear()
        metrics = train.train_step(s, step)
        planned = forwards(c, step)
        assert sum(seen) == (planned.rollout + planned.current + planned.others).rows
    assert metrics["train/grad_norm"] > 0 and metrics["train/moved"] > 0 and "train/v_norm_ratio" in metrics


def test_its_settings_are_checked(tiny, tmp_path, rwr):
    with pytest.raises(ConfigError, match="algorithm.powr.*power"):
        config(tmp_path, tiny, f"algorithm={{name: '{rwr}', powr: 2}}", "sampler={steps: 4}")
