"""The reward plug-ins of the acceptance cases: what each one gets from the bank, by its row in expect.json."""

import json
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from flowrl.bank import RewardBank
from flowrl.rewards import Media
from flowrl.scorers import RewardSpec
from flowrl.types import Prompt
from flowrl.verdicts import RewardError

CASES = Path(os.environ.get("FLOWRL_CASES", Path(__file__).parents[1] / "data" / "cases"))
NAN = float("nan")
GROUPS = torch.tensor([0, 0, 1, 1])
PROMPTS = [Prompt(10 + i, f"prompt {i}") for i in range(4)]
MEDIA = Media(torch.tensor([0, 51, 102, 255], dtype=torch.uint8)[:, None, None, None].expand(4, 3, 8, 8).contiguous())

USED = {
    "ok_brightness": [0, 0.2, 0.4, 1],
    "half_tensor": [0, 0.125, 0.25, 0.375],
    "cuda_like": [0, 0.125, 0.25, 0.375],
    "prints_megabytes": [0.5, 0.51, 0.52, 0.53],
    "reseeds_globally": [0, 0.1, 0.2, 0.3],
    "slow_first_call": [0, 0.25, 0.5, 0.75],
    "mutates_images": [0.5] * 4,
    "all_equal": [0.5] * 4,
    "raises_on_one": [0.5] * 4,  # asked one by one, no batch has a third sample
}
FAILS = {
    "returns_none": ("sample 0 (prompt 10) to sample 3 (prompt 13)", "returned None", [NAN] * 4),
    "scalar_broadcast": ("sample 0 (prompt 10) to sample 3 (prompt 13)", "returned 0.7", [NAN] * 4),
    "one_short": ("sample 0 (prompt 10) to sample 3 (prompt 13)", "3 scores for 4 samples", [NAN] * 4),
    "list_of_str": ("sample 0 (prompt 10)", "returned 'bad'", [NAN] * 4),
    "nan_one_row": ("sample 1 (prompt 11)", "returned nan", [0, NAN, 0.5, 0.75]),
    "hangs": ("sample 0 (prompt 10) to sample 3 (prompt 13)", "did not answer within 0.3 s", [NAN] * 4),
}
REFUSED = {
    "no_score_function": ["has no 'score'", "it has: rate"],
    "import_fails": ["cannot be imported", "surely_not_installed_kettle_package"],
}
ENDS_THE_RUN = {"os_exit"}  # as the module text of flowrl.bank says


@pytest.fixture(autouse=True)
def _seconds(monkeypatch):
    monkeypatch.setenv("CASE_HANG_S", "3")
    monkeypatch.setenv("CASE_SLOW_S", "0.1")


def bank(*cases, **rules):
    return RewardBank([RewardSpec(name=f"{CASES / 'rewards' / case}.py:score", **rules) for case in cases])


def judge(*cases, budget=1.0, **rules):
    return bank(*cases, budget=budget, **rules)(MEDIA, PROMPTS, GROUPS)


def test_every_case_is_here():
    rows = json.loads((CASES / "expect.json").read_text("utf-8"))["files"]
    handed = {Path(row["file"]).stem for row in rows if row["kind"] == "rewards"}
    assert handed == set(USED) | set(FAILS) | set(REFUSED) | ENDS_THE_RUN


@pytest.mark.parametrize("case", USED)
def test_scores_are_used(case):
    verdicts = judge(case)
    torch.testing.assert_close(verdicts.scores, torch.tensor(USED[case]).float()[:, None], rtol=0, atol=1e-6)
    assert set(verdicts.failures.values()) == {0}
    assert bool(verdicts.constant) == (len(set(USED[case])) == 1)


@pytest.mark.parametrize("case", FAILS)
def test_a_failure_is_named_and_follows_its_policy(case):
    samples, value, scores = FAILS[case]
    with pytest.raises(RewardError) as caught:
        judge(case, timeout=0.3)
    assert all(part in str(caught.value) for part in (f"{case}.py:score", samples, value))
    verdicts = judge(case, timeout=0.3, on_failure="drop_sample")
    torch.testing.assert_close(verdicts.scores[:, 0], torch.tensor(scores), equal_nan=True)
    assert sum(verdicts.failures.values()) == sum(score != score for score in scores)


@pytest.mark.parametrize("case", REFUSED)
def test_a_module_without_a_scorer_is_refused_before_it_is_called(case):
    with pytest.raises(ValueError) as caught:
        bank("ok_brightness", case)
    assert all(part in str(caught.value) for part in (f"{case}.py", *REFUSED[case]))


def test_an_exception_keeps_its_text_where_the_scorer_cannot_be_asked_one_by_one(tmp_path):
    text = (CASES / "rewards" / "raises_on_one.py").read_text("utf-8")
    (tmp_path / "always.py").write_text(text.replace("> 2", "> 0"), "utf-8")
    with pytest.raises(RewardError, match="ValueError: cannot read sample 2: no target, for sample 0"):
        RewardBank([RewardSpec(name=f"{tmp_path}/always.py:score")])(MEDIA, PROMPTS, GROUPS)


def test_the_group_of_a_lost_sample_is_lost():
    verdicts = judge("nan_one_row", "ok_brightness", on_failure="drop_group")
    assert verdicts.scores.isnan().any(1).tolist() == [True, True, False, False]
    torch.testing.assert_close(verdicts.scores[2:], torch.tensor([[0.5, 0.4], [0.75, 1.0]]))


@pytest.mark.parametrize("cases", [("mutates_images", "ok_brightness"), ("ok_brightness", "mutates_images")])
def test_painting_the_images_changes_no_other_reward(cases):
    verdicts = judge(*cases)
    assert verdicts.scores[:, cases.index("ok_brightness")].tolist() == pytest.approx(USED["ok_brightness"])
    assert MEDIA.images[:, 0, 0, 0].tolist() == [0, 51, 102, 255]


def test_reseeding_does_not_reach_the_run():
    random.random(), np.random.rand(), torch.rand(())  # away from the states that seed 0 gives
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    judge("reseeds_globally")
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before


def test_the_deadline_and_not_the_scorer_ends_the_wait():
    start = time.perf_counter()
    judge("hangs", timeout=0.2, on_failure="drop_group")
    assert time.perf_counter() - start < 2


def test_a_slow_first_call_says_how_to_allow_it(monkeypatch, tmp_path):
    monkeypatch.setenv("CASE_SLOW_S", "2")
    (tmp_path / "slow.py").write_bytes((CASES / "rewards" / "slow_first_call.py").read_bytes())
    with pytest.raises(RewardError, match="raise its `timeout`"):
        RewardBank([RewardSpec(name=f"{tmp_path}/slow.py:score", timeout=0.1)])(MEDIA, PROMPTS, GROUPS)
