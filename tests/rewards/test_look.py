"""The looks of a picture: their values on pictures whose probes are known, and that they are those that are watched."""

import pytest
import torch

from flowrl import watch
from flowrl.rewards import Media
from flowrl.scorers import RewardSpec, off_gold
from flowrl.types import Prompt
from flowrl_rewards.look import Brightness, ColourEntropy, Darkness, Saturation, Sharpness

PROBES = {
    Sharpness: watch.sharpness,
    ColourEntropy: watch.colour_entropy,
    Saturation: watch.saturation,
    Brightness: watch.brightness,
    Darkness: lambda images: 1 - watch.brightness(images),
}
looks = pytest.mark.parametrize("look", PROBES, ids=lambda look: look.__name__)


def noise(n=5):
    images = torch.randint(256, (n, 3, 12, 9), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    return Media(images), [Prompt(row, "") for row in range(n)]


@looks
def test_black_red_and_a_chess_board_have_the_values_worked_out_by_hand(look):
    assert not off_gold(RewardSpec(name="look"), look())


@looks
def test_a_look_is_the_probe_of_its_name(look):
    media, prompts = noise()
    assert torch.equal(look()(media, prompts), PROBES[look](media.images))


@looks
def test_a_look_follows_its_picture(look, steady):
    steady(look(), *noise())


def test_a_greyer_picture_is_less_saturated_and_a_blurred_one_less_sharp():
    media, prompts = noise()
    grey = Media(media.images.float().mean(1, keepdim=True).expand_as(media.images).to(torch.uint8))
    blurred = torch.nn.functional.avg_pool2d(media.images.float(), 3, 1, 1).to(torch.uint8)
    assert (Saturation()(grey, prompts) == 0).all() and (Saturation()(media, prompts) > 0.2).all()
    assert (Sharpness()(Media(blurred), prompts) < 0.5 * Sharpness()(media, prompts)).all()
