"""Awkward configs: each edit of edits.json, made to the key of our own schema that plays its role.

FLOWRL_CASES names another folder of the same layout (configs/edits.json, prompts/).
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from flowrl import data
from flowrl.config import Config, load
from flowrl.plan import plan

CASES = Path(os.environ.get("FLOWRL_CASES", Path(__file__).parents[1] / "data" / "cases")).absolute()
EDITS = json.loads((CASES / "configs" / "edits.json").read_bytes())
OURS = f"""\
run: canal-test
seed: 7
steps: 20
model:
  name: tests.unit.test_config:Tiny
  path: tiny
data:
  prompts: {CASES}/prompts/plain_ok.txt
  prompts_per_step: 4
  group_size: 4
sampler:
  steps: 8
  kernel: flow_sde
  eta: 0.7
rewards:
  - name: jpeg_size
    weight: 1.0
algorithm:
  name: flow_grpo
optimiser:
  lr: 1.0e-4
  updates: 2
compute:
  precision: fp32
"""
WORDS = {  # of the placeholder schema: of ours
    "run_name:": "run:",
    "total_steps": "steps",
    "learning_rate": "lr",
    "learing_rate": "lrr",
    "batch_size: 8": "updates: 2",
    "batch_size: 7": "updates: 3",
    "noise_level": "eta",
    "brightness": "jpeg_size",
    "brigthness": "jpge_size",
    "algorithm: grpo": "name: flow_grpo",
    "algorithm: gpr": "name: flow_gpr",
    "../prompts": f"{CASES}/prompts",
}
SAID = {  # what a refusal must tell: the key, and the value or the fix
    "learning rate value": ["optimiser.lr = "],
    "group size": ["data.group_size = 1", "no relative signal", "compute.rows_per_forward"],
    "batch size": ["optimiser.updates = 3", "data.group_size = 4", "take 2 or 4"],
    "number of updates": ["steps = -5", "greater than 0"],
    "reward name": ["rewards.0 = ", "did you mean 'jpeg_size'?"],
    "algorithm name": ["algorithm.name = ", "U+043E CYRILLIC SMALL LETTER O", "'flow_grpo'", "nft"],
    "seed": ["line 2", "!!python/object/apply:os.system"],
    "prompt file": [str(CASES / "prompts" / "does_not_exist.txt")],
    "any nested line": ["config.yaml", "line 12", "a tab"],
    "precision": ["compute.precision = false", "'fp32', 'bf16' or 'fp16'", "unquoted yes, no"],
    "a duration": ["time_limit = '1:30:00'", "unknown key"],
    "noise level": ["eta"],
    "reward weights": ["rewards = jpeg_size 1, jpeg_size -1", "no signal"],
}
MORE = {
    "misspelt_key.yaml": ["did you mean optimiser.lr?"],
    "duplicate_key.yaml": ["line 21", "line 23"],
    "null_value.yaml": ["null", "give a value"],
    "unit_mistake.yaml": ["less than or equal to 1"],
    "wrong_nesting.yaml": ["did you mean sampler.eta?"],
    "noise_negative.yaml": ["-0.7", "at least 0"],
    "empty.yaml": ["empty config"],
    "alias_bomb.yaml": ["anchors", "line 1"],
}


def edited(edit: dict[str, Any]) -> bytes:
    """Our config with the edit; of a whole-file edit the file itself or, where it must be accepted, its likeness."""
    if edit["role"] != "whole file":
        old, new = (_ours(edit[key]) for key in ("replace", "by"))
        assert old in OURS, "the edit has a place in our schema"
        return OURS.replace(old, new, 1).encode()
    original = (CASES / "configs" / edit["file"]).read_bytes()
    if edit["outcome"] == "reject":
        return original
    assert original.startswith(b"\xef\xbb\xbf") and b"\r\n" in original
    return b"\xef\xbb\xbf" + OURS.replace("\n", "\r\n").encode()


def _ours(text: str) -> str:
    for theirs, ours in WORDS.items():
        text = text.replace(theirs, ours)
    return text


def start(path: Path) -> Config:
    """All that is done before weights are loaded."""
    config = load(path)
    plan(config, n_prompts=len(data.load(config.data.prompts).prompts))
    return config


def outcome(content: bytes, folder: Path) -> Config | str:
    """The run, or what the user is told instead."""
    (folder / "config.yaml").write_bytes(content)
    try:
        return start(folder / "config.yaml")
    except ValueError as error:
        return str(error)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("edit", EDITS, ids=[edit["file"] for edit in EDITS])
def test_outcome(edit: dict[str, Any], tmp_path: Path) -> None:
    begun = time.process_time()
    result = outcome(edited(edit), tmp_path)
    if edit["outcome"] == "accept":
        assert result == outcome(OURS.encode(), tmp_path)
    elif edit["file"] == "lr_as_string.yaml":
        assert isinstance(result, Config) and result.optimiser.lr == 1e-4
    else:  # what may be warned of, or be one or the other, is refused
        assert isinstance(result, str)
        for words in SAID.get(edit["role"], []) + MORE.get(edit["file"], []):
            assert words in result
        assert len(result) < 5000 and result.replace("\n", "").isprintable()
    assert time.process_time() - begun < 10
    assert {path.name for path in tmp_path.iterdir()} == {"config.yaml"}, "nothing in a file is run"


def test_the_resolved_config_is_the_same_run(tmp_path: Path) -> None:
    config = outcome(OURS.encode(), tmp_path)
    assert isinstance(config, Config)
    assert outcome(config.to_yaml().encode(), tmp_path) == config


def test_every_edit_but_the_control_changes_the_config() -> None:
    same = [edit["file"] for edit in EDITS if edited(edit) == OURS.encode()]
    assert same == [edit["file"] for edit in EDITS if edit["role"] == "none"]
