"""OCR on what the authors' recogniser read."""

import pytest
import torch

from flowrl.rewards import Media
from flowrl.types import Prompt
from flowrl_rewards.ocr import OCR


def test_rewards_are_the_authors_except_where_they_could_not_read(golden):
    cases = golden("i_ocr_reward.json")
    media = Media(torch.zeros(1, 3, 4, 4, dtype=torch.uint8))
    failed = 0
    for case in cases:

        def read(picture, case=case):
            if case["recogniser"] == "raised":
                raise RuntimeError("no picture")
            dropped = [("XX", 0.0)] if "XX" in case["recogniser"] else []
            return [*dropped, *((text, 1.0) for text in case["recognised_segments"])]

        prompts = [Prompt(0, "a sign", {"target": case["target"]})]
        with_rule, without = (OCR(recogniser=read, substring=rule)(media, prompts).item() for rule in (True, False))
        if case["recogniser"] == "raised":
            failed += 1
            assert with_rule != with_rule and without != without, "no verdict, where the authors give 0"
        else:
            assert with_rule == pytest.approx(case["reward"], rel=1e-6)
            assert without == pytest.approx(case["reward_no_substring_rule"], rel=1e-6)
    assert 0 < failed < len(cases)
