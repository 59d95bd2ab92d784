"""Layouts of pairs, what a run may say of them, and what is promised of its steps."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner

from flowrl.cli import app
from flowrl.config_file import ConfigError
from flowrl.data import asked
from flowrl.forwards import Count, forwards
from flowrl.pairs import read_pairs
from flowrl.plan import plan
from flowrl.prompt_files import PromptFileError
from tests.unit.test_config import config

PAIRS = ("data={pairs: pairs.jsonl, prompts_per_step: 6}", "sampler={steps: 8}")
DPO = (*PAIRS, "algorithm={name: dpo}")


@pytest.fixture
def folder(tmp_path) -> Path:
    for level, name in enumerate("abc"):
        Image.new("RGB", (32, 32), (60 * level, 0, 0)).save(tmp_path / f"{name}.png")
    return tmp_path


def written(folder: Path, *rows: object, name: str = "pairs.jsonl") -> Path:
    (folder / name).write_text("\n".join(json.dumps(row) for row in rows))
    return folder / name


def nested(**changes: object) -> dict[str, object]:
    def media(name):
        return {"media": [{"type": "image", "path": name}]}

    supervision = {"type": "preference", "chosen": media("a.png"), "rejected": media("b.png")}
    return {"schema_version": 2, "input": {"prompt": "p"}, "supervision": supervision, **changes}


RANKED = {"prompt": "p", "image_path": ["a.png", "b.png", "c.png"]}
LABELLED = {"caption": "p", "jpg_0": "a.png", "jpg_1": "b.png"}
LAYOUTS = {
    "flat": ({"prompt": "p", "chosen": "a.png", "rejected": "b.png"}, "ab"),
    "the first labelled better": ({**LABELLED, "label_0": 1}, "ab"),
    "the second labelled better": ({**LABELLED, "label_0": 0.0}, "ba"),
    "preferred of two": ({"prompt": "p", "image_path": ["a.png", "b.png"], "human_preference": [0, 1]}, "ba"),
    "most and least preferred": ({**RANKED, "human_preference": [2, 0, 5]}, "cb"),
    "ranked, 0 is best": ({**RANKED, "rank": [1, 2, 0]}, "cb"),
    "the first of equals": ({**RANKED, "rank": [1, 0, 1]}, "ba"),
    "nested": (nested(), "ab"),
}


@pytest.mark.parametrize(("row", "names"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_layout_gives_the_chosen_and_the_rejected_picture(folder, row, names):
    file = read_pairs(written(folder, row))
    ((prompt,), ((chosen, rejected),)) = file.prompts, file.pairs.values()
    assert (prompt.id, prompt.text, prompt.metadata) == (1, "p", {})
    assert chosen.path.stem + rejected.path.stem == names
    assert chosen.size == (32, 32)


TIES = {"label": {**LABELLED, "label_0": 0.5}, "rank": {**RANKED, "rank": [3, 3, 3]}}


@pytest.mark.parametrize("tie", TIES.values(), ids=TIES)
def test_a_tie_is_left_out_and_counted(folder, tie):
    file = read_pairs(written(folder, tie, LAYOUTS["flat"][0], tie))
    assert list(file.pairs) == [2] and "2 ties skipped: line 1, line 3" in file.notices
    with pytest.raises(PromptFileError, match="no pairs in .*: 1 tie skipped: line 1$"):
        read_pairs(written(folder, tie))


FAULTS = {
    "no pictures": ({"prompt": "p"}, "no pair of pictures: wanted chosen and rejected, .* the keys are 'prompt'"),
    "no object": (["a.png", "b.png"], "the row is an array, wanted an object with a pair"),
    "one picture": ({"prompt": "p", "rejected": "a.png"}, "one picture only, chosen is missing"),
    "no path": ({"prompt": "p", "chosen": 7, "rejected": "a.png"}, "chosen is a number, wanted the path of a picture"),
    "no label": (LABELLED, "label_0 is wanted as 1 .jpg_0 is better., 0"),
    "odd label": ({**LABELLED, "label_0": "1"}, "label_0 is wanted as 1"),
    "ranks of others": ({**RANKED, "rank": [0, 1]}, "wanted image_path as a list of paths and rank as a list of as"),
    "ranks that are none": ({**RANKED, "rank": [0, 1, None]}, "rank as a list of as many numbers"),
    "another version": (nested(schema_version="2\x1b"), r"schema_version is '2\\x1b', 2 is read"),
    "no version": ({k: v for k, v in nested().items() if k != "schema_version"}, "schema_version is 'None', 2 is read"),
    "other supervision": (nested(supervision={"type": "score"}), "supervision of type preference"),
    "no medium": (nested(supervision={"type": "preference", "chosen": {"media": []}}), "supervision.chosen.media as a"),
    "the same contents": ({"prompt": "p", "chosen": "a.png", "rejected": "./a.png"}, "are the same picture"),
    "no prompt": ({"chosen": "a.png", "rejected": "b.png"}, "no prompt"),
}  # fmt: skip


@pytest.mark.parametrize(("row", "fault"), FAULTS.values(), ids=FAULTS)
def test_a_row_at_fault_is_named_and_the_others_may_be_used(folder, row, fault):
    path = written(folder, LAYOUTS["flat"][0], row)
    with pytest.raises(PromptFileError, match=f"1 bad row; .*\n  line 2: .*{fault}"):
        read_pairs(path)
    file = read_pairs(path, skip_bad=True)
    assert list(file.pairs) == [1] and [bad.number for bad in file.skipped] == [2]


def test_other_keys_are_metadata_and_rows_of_equal_text_stay_apart(folder):
    row = {**LAYOUTS["flat"][0], "id": "x1", "source": "s"}
    file = read_pairs(written(folder, row, {**row, "id": "x2", "rejected": "c.png"}))
    assert [(p.id, p.key, p.metadata) for p in file.prompts] == [(1, "x1", {"source": "s"}), (2, "x2", {"source": "s"})]
    assert [pair[1].path.stem for pair in file.pairs.values()] == ["b", "c"]


def test_pictures_lie_beside_the_file_however_it_is_packed(folder):
    (folder / "pairs.jsonl.gz").write_bytes(gzip.compress(json.dumps(LAYOUTS["flat"][0]).encode()))
    assert list(read_pairs(folder / "pairs.jsonl.gz").pairs) == [1]
    (folder / "pairs.txt").write_text("a.png b.png")
    with pytest.raises(PromptFileError, match="a file of pairs is .jsonl or .json"):
        read_pairs(folder / "pairs.txt")


def test_the_command_line_shows_pairs(folder):
    shown = CliRunner().invoke(app, ["data", str(written(folder, LAYOUTS["flat"][0])), "--pairs"])
    assert shown.exit_code == 0 and "1 prompts" in shown.stdout
    assert f"chosen    '{folder}/a.png', 32 x 32" in shown.stdout and f"rejected  '{folder}/b.png'" in shown.stdout
    refused = CliRunner().invoke(app, ["data", str(written(folder, FAULTS["one picture"][0])), "--pairs"])
    assert refused.exit_code == 2 and "line 1: one picture only" in refused.stderr


# the config


def test_pairs_are_groups_of_two(folder):
    c = config(*DPO)
    assert (c.data.prompts, c.data.pairs, c.data.group_size) == (None, "pairs.jsonl", 2)
    assert config(*DPO, "data.group_size=2") == c
    skipping = config(f"data={{pairs: {written(folder, LAYOUTS['flat'][0], {})}, prompts_per_step: 1, skip_bad: true}}")
    assert list(asked(skipping.data).pairs) == [1]


REFUSED = {
    "both": (("data.pairs=x.jsonl",), "data.prompts or data.pairs, exactly one of the two is wanted"),
    "neither": (("data={prompts_per_step: 2, group_size: 2}",), "data.prompts or data.pairs, exactly one"),
    "no group size": (("data={prompts: x.txt, prompts_per_step: 2}",), "data.group_size is missing; add it"),
    "a larger group": ((*DPO, "data.group_size=4"), "data.pairs = 'pairs.jsonl': .* remove data.group_size"),
    "shared noise": ((*DPO, "data.shared_noise=1"), "data.pairs = 'pairs.jsonl': .* data.shared_noise"),
    "dropped repeats": ((*DPO, "data.dedupe=true"), "data.pairs = 'pairs.jsonl': .* data.dedupe"),
    "stochastic steps": ((*PAIRS, "optimiser.updates=1"), "algorithm.name = flow_grpo learns from the sto.*=dpo"),
    "a stochastic sampler": ((*DPO, "sampler={steps: 8, kernel: flow_sde, eta: 0.7}"), "sampler.eta = 0.7: .* no step"),
    "credit": ((*DPO, "credit.normalise=centre"), "credit is given, .* remove the block"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "said"), REFUSED.values(), ids=REFUSED)
def test_what_does_not_go_with_pairs_is_refused(changes, said):
    with pytest.raises(ConfigError, match=said) as error:
        plan(config(*changes))
    assert "\n" not in str(error.value), "nothing else is wrong"


# the plan


def test_the_plan_of_pairs_samples_nothing():
    p = plan(config(*DPO, "data.prompts_per_step=8", "compute.rows_per_forward=3"), world=2, n_prompts=100)
    assert p.lines()[1:] == [
        "a step: 8 prompts x 2 = 16 samples, 8 on each of 2 processes",
        "rollout: none, since pairs of pictures are given",
        "learning: 2 updates of 4 rows in 2 micro-batches of up to 3 rows",
        "forwards, as rows (calls): rollout 0 (0), updates 8 (4), old and reference 8 (4)",
    ]
    assert (p.states, p.edges) == (0, 0)


@pytest.mark.parametrize("rows", [1, 5, "auto"])
def test_the_rows_of_pairs_are_those_of_their_pictures(rows):
    f = forwards(config(*DPO, "optimiser.updates=1", f"compute.rows_per_forward={rows}"), step=1)
    assert f.rollout == Count() and f.current.rows == f.others.rows == 12
