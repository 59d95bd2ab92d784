"""Every built-in that runs on this machine passes what `flowrl rewards check` asks of anybody's."""

import pytest

from flowrl import trials
from flowrl.scorers import RewardSpec

HERE = (
    "shapes", "shapes_strict", "shapes_partial", "jpeg_size", "jpeg_incompressible", "sharpness", "colour_entropy",
    "saturation", "brightness", "darkness", "ocr",
)  # fmt: skip


@pytest.mark.parametrize("name", HERE)
def test_it_passes_its_trial(name):
    trial = trials.trial(RewardSpec(name=name))
    assert trial.tried and not trial.failures and not trial.note
