"""Drifts by hand, in the units of the base; alarms when they should sound, and only then."""

import json
import math
import random
import re
from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl import charts, watch
from flowrl.credit import alone
from flowrl.tell import Sums, Teller
from flowrl.watchdog import PROMPTS, V_NORM, Probe, Watch, Watchdog, base, metric

BASE = {"brightness": (0.8, 0.05), "sharpness": (11.0, 2.0), "v_norm": (1.0, V_NORM), "reward/strict": (0.4, 0.5)}
FINITE = st.floats(-1e3, 1e3)


def pictures(n, side=16, seed=0):
    return torch.randint(256, (n, 3, side, side), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


def row(**values):
    """Metrics of a step, by the probe they are of."""
    return {metric(name.replace("__", "/")): value for name, value in values.items()}


def seen(dog, rows):
    """What the dog says of rows, one a step: the drifts, and whether the run ends there."""
    return [(dog.see(step, one), dog.trips) for step, one in enumerate(rows)]


# --- the panel -------------------------------------------------------------------------------------------------------


def test_the_panel_is_its_probes_however_many_pictures_there_are():
    images = pictures(2 * watch.AT_ONCE + 3)
    found = watch.panel(images, torch.arange(len(images)))
    assert set(found) == set(watch.PROBES)  # nobody has company, so there is no diversity
    for name, probe in watch.PROBES.items():
        assert_close(found[name], probe(images))


def test_the_panels_diversity_is_of_each_group_wherever_its_pictures_are():
    images, order = pictures(12), torch.tensor([4, 0, 9, 7, 2, 11, 1, 3, 10, 5, 8, 6])
    group = torch.tensor([3, 5, 8]).repeat_interleave(4)
    found = watch.panel(images[order], group[order])["diversity"]
    assert_close(found, watch.diversity(images.view(3, 4, *images.shape[1:])))


def test_the_panel_changes_nothing_and_draws_nothing():
    images = pictures(8)
    before, states = images.clone(), (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist())
    watch.panel(images, torch.arange(8) // 4)
    assert torch.equal(images, before) and torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == states[1:]


def test_every_probe_of_the_panel_can_be_chosen():
    found = watch.panel(pictures(4), torch.zeros(4, dtype=torch.long))
    assert {*found, "v_norm"} == set(get_args(Probe))


# --- the base --------------------------------------------------------------------------------------------------------


def test_the_base_is_the_mean_and_the_spread_of_all_its_pictures():
    rollouts, sums = [pictures(6, seed=seed) for seed in range(3)], Sums()
    for images in rollouts:
        for name, values in watch.panel(images, torch.arange(6) // 3).items():
            sums.moments(f"probe/{name}", values)
        sums.spread("reward/strict", torch.tensor([0.0, 1.0, math.nan, 1.0, 0.0, 1.0]))
        sums.spread("reward/trained", torch.rand(6))
    found = base(sums.reduced(alone), ["strict"])
    together = torch.cat(rollouts)
    for name, probe in watch.PROBES.items():
        values = probe(together).double()
        assert found[name] == pytest.approx((values.mean().item(), values.std(correction=0).item()))
    apart = watch.diversity(together.view(6, 3, *together.shape[1:])).double()
    assert found["diversity"] == pytest.approx((apart.mean().item(), apart.std(correction=0).item()))
    assert found["reward/strict"] == pytest.approx((0.6, math.sqrt(0.24)))
    assert "reward/trained" not in found and found["v_norm"] == (1.0, V_NORM)


@pytest.mark.parametrize(
    ("every", "steps", "prompts", "wanted"),
    [(1, 80, 8, [0, 1, 2, 3]), (1, 80, 48, [0]), (1, 80, 12, [0, 1, 2]), (10, 80, 16, [9, 19]), (1, 3, 2, [0, 1, 2])],
    ids=["demo", "many prompts", "rounded up", "every tenth", "short run"],
)
def test_the_base_is_measured_by_the_first_watched_steps(every, steps, prompts, wanted):
    assert PROMPTS == 32
    assert Watch(every=every).reference(steps, prompts) == wanted


@pytest.mark.parametrize("constant", [0.0, 0.1, -7.3])
def test_a_probe_that_is_the_same_in_all_pictures_has_no_unit(constant):
    sums = Sums()
    sums.moments("probe/brightness", torch.full((7,), constant))
    sums.moments("probe/sharpness", torch.arange(7.0))
    dog = Watchdog(Watch(), base(sums.reduced(alone), []))
    assert dog.flat == ["brightness"] and dog.watched == ["sharpness", "v_norm"]
    assert list(dog.see(0, row(brightness=constant + 1.0, sharpness=3.0))) == ["watch/sharpness"]


# --- drifts ----------------------------------------------------------------------------------------------------------


def test_a_drift_by_hand():
    dog = Watchdog(Watch(patience=2), BASE)
    rows = [row(brightness=0.8, v_norm=1.1), row(brightness=0.7), row(brightness=0.5), row(sharpness=15.0)]
    told = [drifts for drifts, _ in seen(dog, rows)]
    assert told[0] == pytest.approx({"watch/brightness": 0, "watch/v_norm": 0.1 / V_NORM})
    assert told[1] == pytest.approx({"watch/brightness": -1})  # the mean of 0 and -2
    assert told[2] == pytest.approx({"watch/brightness": -4})
    assert told[3] == pytest.approx({"watch/sharpness": 2})


@given(st.lists(FINITE, min_size=1, max_size=12), st.floats(0.1, 10), FINITE, st.integers(1, 6))
def test_a_drift_does_not_depend_on_the_units_of_its_probe(values, scale, shift, patience):
    one = Watchdog(Watch(patience=patience), {"brightness": (0.0, 1.0)})
    other = Watchdog(Watch(patience=patience), {"brightness": (shift, scale)})
    pairs = zip(
        seen(one, [row(brightness=v) for v in values]),
        seen(other, [row(brightness=v * scale + shift) for v in values]),
        strict=True,
    )
    for (a, _), (b, _) in pairs:
        assert a == pytest.approx(b, rel=1e-6, abs=1e-6)


@given(st.lists(st.dictionaries(st.sampled_from(sorted(BASE)), FINITE), min_size=1, max_size=12), st.data())
def test_a_dog_that_went_through_a_checkpoint_says_the_same(values, data):
    cut = data.draw(st.integers(0, len(values)))
    rows = [{metric(name): value for name, value in one.items()} for one in values]
    whole = Watchdog(Watch(patience=3, action="stop"), BASE)
    told = seen(whole, rows)
    first = Watchdog(Watch(patience=3, action="stop"), BASE)
    seen(first, rows[:cut])
    again = Watchdog(Watch(patience=3, action="stop"), **json.loads(json.dumps(first.state)))
    assert seen(again, rows[cut:]) == told[cut:]
    assert again.quiet == whole.quiet


# --- alarms ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("patience", [1, 3, 5])
@pytest.mark.parametrize("start", [0, 4])
def test_a_drift_that_stays_trips_as_soon_as_the_windows_mean_is_beyond(patience, start):
    """A jump to 3 standard deviations; the mean over a window is beyond 2 once more than two thirds of it are."""
    dog = Watchdog(Watch(action="stop", patience=patience), {"brightness": (0.0, 1.0)})
    ends = [trips for _, trips in seen(dog, [row(brightness=3.0 * (step >= start)) for step in range(12)])]
    soonest = math.floor(2 * patience / 3) + 1  # steps after the jump
    assert ends.index(True) == max(start + soonest, patience) - 1


@pytest.mark.parametrize(
    ("values", "alarms"),
    [
        ({"brightness": 0.8 - 0.11}, ["brightness"]),
        ({"brightness": 0.8 + 0.11}, ["brightness"]),
        ({"brightness": 0.8 + 0.09}, []),
        ({"v_norm": 1 + 2.2 * V_NORM}, ["v_norm"]),
        ({"reward__strict": 0.4 - 1.1}, ["reward/strict"]),
        ({"reward__strict": 0.4 + 1.1}, []),
        ({"brightness": 0.0, "sharpness": 0.0}, ["brightness", "sharpness"]),
        ({}, []),
    ],
    ids=["darker", "brighter", "within", "longer velocities", "reward falls", "reward rises", "two", "none"],
)
def test_what_is_an_alarm(values, alarms):
    """Probes either way, a reward that is not trained only where it falls."""
    dog = Watchdog(Watch(patience=1, action="stop"), BASE)
    ((_, trips),) = seen(dog, [row(**values)])
    assert sorted(dog.beyond) == alarms and trips == bool(alarms)
    assert all(re.search(rf"(^|; ){name} is [\d.]+ ", dog.verdict) for name in alarms)


@pytest.mark.parametrize("action, ends", [("warn", False), ("stop", True), ("rollback", True)])
def test_a_warning_is_said_once_a_probe_where_the_run_goes_on(action, ends):
    dog, said = Watchdog(Watch(patience=1, action=action), BASE), []
    for step, one in enumerate([row(brightness=0.5), row(brightness=0.4, sharpness=1.0), row(brightness=0.4)]):
        dog.see(step, one)
        assert dog.trips == ends
        said += dog.news()
    assert [line.split()[0] for line in said] == ([] if ends else ["brightness", "sharpness"])


def test_chosen_probes_alone_are_watched_and_untrained_rewards_always():
    dog = Watchdog(Watch(probes=("sharpness",), patience=1), BASE)
    drifts = dog.see(0, row(brightness=0.0, sharpness=11.0, v_norm=5.0, reward__strict=0.4))
    assert drifts == {"watch/sharpness": 0, "watch/reward/strict": 0}


def test_steps_between_are_neither_watched_nor_counted():
    dog = Watchdog(Watch(every=3, patience=2, action="stop"), {"brightness": (0.0, 1.0)})
    told = seen(dog, [row(brightness=float(step)) for step in range(9)])
    assert [bool(drifts) for drifts, _ in told] == [step in (2, 5, 8) for step in range(9)]
    assert [drifts["watch/brightness"] for drifts, _ in told[2::3]] == [2, 3.5, 6.5]
    assert [step for step, (_, trips) in enumerate(told) if trips] == [5, 6, 7, 8]


@pytest.mark.parametrize(
    ("values", "quiet"),
    [([0, 0, 0], True), ([0, 0, 0.9], True), ([0, 0, 1.5], False), ([1.2, 1.2, 0.9], False), ([-1.2] * 3, False)],
    ids=["still", "a little", "a drift that has just begun", "the window's mean", "downwards"],
)
def test_a_checkpoint_is_sound_while_all_is_within_half_the_bound(values, quiet):
    dog = Watchdog(Watch(patience=3), {"brightness": (0.0, 1.0)})
    assert dog.quiet
    seen(dog, [row(brightness=value) for value in values])
    assert dog.quiet == quiet


def test_prompts_alone_raise_no_alarm():
    """The worst case: a prompt's pictures are all alike. 32 prompts measure the base, each step has 8 others."""
    rng = np.random.default_rng(0)
    for _ in range(100):
        law = rng.normal(size=PROMPTS)
        dog = Watchdog(Watch(action="stop"), {"brightness": (law.mean(), law.std())})
        assert not any(trips for _, trips in seen(dog, [row(brightness=m) for m in rng.normal(size=(80, 8)).mean(1)]))


@pytest.mark.parametrize(
    ("settings", "pairs", "said"),
    [
        ({}, None, []),
        ({"action": "stop"}, None, []),
        ({}, "pairs.jsonl", []),
        ({"action": "stop"}, "pairs.jsonl", ["remove the block"]),
        ({"every": 20}, None, []),
        ({"every": 21}, None, ["watch.every = 21"]),
    ],
)
def test_a_watch_that_would_see_nothing_is_refused(settings, pairs, said):
    objections = list(Watch(**settings).objections(20, pairs))
    assert len(objections) == len(said)
    assert all(part in line for part, line in zip(said, objections, strict=True))


# --- where it is seen ------------------------------------------------------------------------------------------------


def test_the_progress_bar_shows_what_is_beyond_the_bound(tmp_path):
    process = SimpleNamespace(is_main_process=True, log=lambda metrics, step: None)
    teller = Teller(tmp_path, process, steps=4)
    for beyond, said in (({}, "a/mean 0.500"), ({"brightness": -2.345}, "a/mean 0.500  brightness drift -2.3")):
        teller.row(0, {"reward/a/mean": 0.5, "watch/brightness": -2.345}, beyond)
        assert teller.bar.tasks[0].description == said


def strokes(svg, colour):
    """How many lines of the chart have a colour; the frame and the ticks are thinner."""
    return len(re.findall(rf"stroke: {re.escape(colour)}; (?:stroke-opacity: [\d.]+; )?stroke-width: 1\.6", svg))


@pytest.mark.parametrize(("last", "beyond"), [(1.9, 0), (2.1, 1), (-2.1, 1)])
def test_the_chart_of_drifts_marks_those_that_were_beyond_the_bound(last, beyond):
    rows = [{"step": s, "watch/brightness": y, "watch/sharpness": 0.1} for s, y in enumerate([0.0, last, 0.5])]
    svg = str(charts.drifts(rows, ["watch/brightness", "watch/sharpness"], 2.0))
    assert strokes(svg, "var(--second)") == beyond * 2  # the line and its key in the legend
    assert ">brightness<" in svg and ">sharpness<" in svg


@pytest.mark.parametrize("name", ["probe/<name>/mean", "probe/<name>/std", "watch/<name>"])
def test_the_metrics_are_explained(name):
    assert f"| `{name}` |" in Path(__file__).parents[2].joinpath("docs/metrics.md").read_text(encoding="utf-8")
