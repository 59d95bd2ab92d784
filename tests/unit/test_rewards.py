import random
import threading
import time
from dataclasses import dataclass, field
from io import BytesIO

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from pydantic import ValidationError

from flowrl.bank import RewardBank
from flowrl.registry import REWARDS
from flowrl.rewards import Gold, Media, reward
from flowrl.scorers import RewardSpec
from flowrl.types import Prompt
from flowrl.verdicts import RewardError, Unavailable
from flowrl.zoo.shapes import picture, prompts

N = 6
GROUPS = torch.tensor([7, 7, 7, 2, 2, 2])


def batch(n=N):
    """n images of one grey each, 10, 20, ..., and n prompts whose ids are 100, 101, ..."""
    grey = torch.arange(1, n + 1).mul(10).to(torch.uint8)
    media = Media(grey[:, None, None, None].expand(n, 3, 4, 4).contiguous())
    return media, [Prompt(100 + i, f"prompt {i}", {"target": i}) for i in range(n)]


@pytest.fixture
def bank(monkeypatch):
    """Build a bank of the given scorers, named r0, r1, ..., all under the same rules."""

    def build(*scorers, **rules):
        named = {f"r{i}": scorer for i, scorer in enumerate(scorers)}
        monkeypatch.setattr("flowrl.scorers.REWARDS", named)
        return RewardBank([RewardSpec(name=name, **{"budget": 1.0, **rules}) for name in named])

    return build


def constant(value):
    return lambda images, prompts, metadata: value


def grey(images, prompts, metadata):
    return [image.getpixel((0, 0))[0] / 10 for image in images]


# what a scorer may return


@pytest.mark.parametrize(
    "value",
    [
        [0, 0.5, 1, 2, -1, 3],
        (0, 0.5, 1, 2, -1, 3),
        np.array([0, 0.5, 1, 2, -1, 3]),
        [np.float32(0), np.float64(0.5), np.int64(1), 2, torch.tensor(-1), torch.tensor([3.0])],
        torch.tensor([0, 0.5, 1, 2, -1, 3], dtype=torch.float16),
        torch.tensor([0, 0.5, 1, 2, -1, 3], dtype=torch.bfloat16, requires_grad=True),
        torch.tensor([[0], [0.5], [1], [2], [-1], [3]]),
        np.array([[0], [0.5], [1], [2], [-1], [3]]),
    ],
    ids=["list", "tuple", "numpy", "mixed scalars", "half", "bfloat16 with grad", "column", "numpy column"],
)
def test_numbers_of_any_kind_become_float32(bank, value):
    verdicts = bank(constant(value))(*batch(), GROUPS)
    assert verdicts.scores.dtype == torch.float32
    assert verdicts.scores.tolist() == [[0], [0.5], [1], [2], [-1], [3]]
    assert verdicts.failures == {"r0": 0}


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "returned None (NoneType)"),
        (0.7, "returned 0.7 (float)"),
        (torch.tensor(0.7, dtype=torch.float64), "returned tensor(0.7"),
        ("0.5", "returned '0.5' (str)"),
        ({"a": 1}, "returned {'a': 1} (dict)"),
        ([0.5] * 5, "returned 5 scores for 6 samples"),
        ([0.5] * 7, "returned 7 scores for 6 samples"),
        (torch.zeros(1, 6), "returned 1 scores for 6 samples"),
        ([], "returned 0 scores for 6 samples"),
    ],
    ids=["None", "scalar", "0-d tensor", "text", "dict", "short", "long", "one row", "empty"],
)
def test_anything_but_one_score_a_sample_is_refused(bank, value, shown):
    with pytest.raises(RewardError) as caught:
        bank(constant(value))(*batch(), GROUPS)
    message = str(caught.value)
    assert message.startswith("reward 'r0' returned ")
    assert shown in message and "sample 0 (prompt 100) to sample 5 (prompt 105)" in message
    verdicts = bank(constant(value), on_failure="drop_sample")(*batch(), GROUPS)
    assert verdicts.scores.isnan().all() and verdicts.failures == {"r0": 6}


BAD = {
    "None": None,
    "bool": True,
    "numpy bool": np.bool_(False),
    "tensor bool": torch.tensor(True),
    "text": "0.5",
    "nan": float("nan"),
    "inf": -np.inf,
    "beyond float32": 1e300,
    "complex": 1j,
    "two numbers": [1.0, 2.0],
}


@pytest.mark.parametrize("value", BAD.values(), ids=BAD.keys())
@pytest.mark.parametrize(
    ("policy", "lost"),
    [("fail", None), ("drop_sample", [4]), ("drop_group", [3, 4, 5])],
    ids=["fail", "drop sample", "drop group"],
)
def test_one_bad_verdict_costs_what_the_policy_says(bank, value, policy, lost):
    values = [0.0, 1.0, 2.0, 3.0, value, 5.0]
    judges = bank(constant(values), grey, on_failure=policy)
    if lost is None:
        with pytest.raises(RewardError, match=r"^reward 'r0' returned .+ for sample 4 \(prompt 104\)"):
            judges(*batch(), GROUPS)
        return
    verdicts = judges(*batch(), GROUPS)
    kept = [row for row in range(N) if row not in lost]
    assert verdicts.scores[lost, 0].isnan().all()
    assert verdicts.scores[kept, 0].tolist() == [float(row) for row in kept]
    assert verdicts.scores[:, 1].tolist() == [row + 1.0 for row in range(N)], "the other scorer's verdicts stand"
    assert verdicts.failures == {"r0": 1, "r1": 0}


@pytest.mark.parametrize("policy", ["drop_sample", "drop_group"])
def test_a_budget_bounds_what_may_be_lost(bank, policy):
    value = constant([None, None, 2.0, 3.0, 4.0, None])
    assert bank(value, on_failure=policy, budget=0.5)(*batch(), GROUPS).failures == {"r0": 3}
    with pytest.raises(RewardError, match=r"^reward 'r0' returned None .* 3 of 6 samples, over budget = 0.4"):
        bank(value, on_failure=policy, budget=0.4)(*batch(), GROUPS)


def test_portions_are_judged_as_one(bank, caplog):
    """Failures and flat columns are those of the whole; a scorer is asked one portion at a time."""
    busy, groups = [], torch.tensor([0, 0, 1, 1, 2, 2])

    def counts(images, prompts, metadata):
        busy.append(1)
        time.sleep(0.02)
        assert len(busy) == 1
        busy.pop()
        return [None if row["target"] == 3 else 1.0 + (row["target"] == 5) for row in metadata]

    judges, (media, prompts) = bank(counts, on_failure="drop_group", retries=0), batch()
    rows = [[0, 1], [2, 3], [4, 5]]
    asked = [judges.ask(media[r], [prompts[i] for i in r], groups[r]) for r in rows]
    verdicts = judges.verdicts(asked)
    assert verdicts.scores.flatten().isnan().tolist() == [False, False, True, True, False, False]
    assert verdicts.scores[[0, 1, 4, 5], 0].tolist() == [1, 1, 1, 2] and not verdicts.constant


class Golden:
    """Scores 1 and 2, and says what they should be; lacks what `absent` says."""

    columns, needs, scope = ("score",), frozenset(), "sample"

    def __init__(self, upper=2.0, absent=()):
        self.upper, self.absent = upper, absent

    def __call__(self, media, prompts):
        return torch.arange(1.0, len(prompts) + 1)

    def missing(self):
        return self.absent

    def gold(self):
        return Gold(*batch(2), torch.tensor([[1.0], [1.5]]), torch.tensor([[1.0], [self.upper]]))


def test_a_scorer_that_fails_its_gold_case_ends_the_start(bank):
    bank(Golden).check([])
    with pytest.raises(ValueError, match="'r0' fails its own check: .* gold sample 1 is 2, wanted 1.5 to 1.9"):
        bank(Golden, options={"upper": 1.9}).check([])


def test_a_scorer_that_lacks_something_is_refused_with_all_of_it(bank):
    with pytest.raises(ValueError, match="reward 'r0': no a; reward 'r0': no b"):
        bank(Golden, options={"absent": ["no a", "no b"]})


def test_a_label_names_the_columns_and_tells_two_of_a_kind_apart(monkeypatch):
    monkeypatch.setattr("flowrl.scorers.REWARDS", {"scaled": scaled})
    rows = [RewardSpec(name="scaled", label=f"x{k}", options={"scale": float(k)}) for k in (1, 2)]
    bank = RewardBank(rows)
    assert bank.columns == ("x1", "x2")
    with pytest.raises(ValueError, match="reward 'scaled' is given 2 times.*give each its own `label`"):
        RewardBank([RewardSpec(name="scaled"), RewardSpec(name="scaled", options={"scale": 2.0})])


@pytest.mark.parametrize(
    "row, message",
    [
        ({"url": "http://127.0.0.1:1", "python": "python3"}, "url excludes python and options"),
        ({"url": "http://127.0.0.1:1", "options": {"a": 1}}, "give them to flowrl rewards serve"),
        ({"token_env": "T"}, "token_env = T is of a url"),
    ],
    ids=["two places", "options elsewhere", "token of nothing"],
)
def test_a_scorer_runs_in_one_place(row, message):
    with pytest.raises(ValueError, match=message):
        RewardSpec(name="r", **row)


def test_a_failure_that_costs_samples_is_logged_with_its_value(bank, caplog):
    bank(constant([0, 1, "bad", 3, 4, 5]), on_failure="drop_group")(*batch(), GROUPS)
    assert "reward 'r0' returned 'bad' (str) for sample 2 (prompt 102)" in caplog.text
    assert "drop_group for 1 of 6 samples" in caplog.text


# what belongs to whom


@given(
    order=st.permutations(range(N)),
    size=st.integers(1, N + 1),
    bad=st.sets(st.integers(0, N - 1)),
    policy=st.sampled_from(["drop_sample", "drop_group"]),
)
@settings(max_examples=40, deadline=None)
def test_permuting_a_batch_permutes_the_verdicts(order, size, bad, policy):
    def picky(images, prompts, metadata):
        if bad & {row["target"] for row in metadata}:
            raise KeyError("no target")
        return [g + int(p.split()[1]) for g, p in zip(grey(images, prompts, metadata), prompts, strict=True)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("flowrl.scorers.REWARDS", {"picky": picky})
        judges = RewardBank([RewardSpec(name="picky", batch=size, on_failure=policy, retries=0, budget=1.0)])
        media, rows = batch()
        straight = judges(media, rows, GROUPS)
        permuted = judges(media[order], [rows[i] for i in order], GROUPS[order])
    torch.testing.assert_close(permuted.scores, straight.scores[order], equal_nan=True, rtol=0, atol=0)
    assert straight.failures == permuted.failures == {"picky": len(bad)}


def test_a_scorer_sees_no_more_than_its_batch(bank):
    sizes = []
    verdicts = bank(lambda images, prompts, metadata: sizes.append(len(images)) or grey(images, prompts, metadata),
                    batch=4)(*batch(), GROUPS)  # fmt: skip
    assert sizes == [4, 2]
    assert verdicts.scores.flatten().tolist() == [1, 2, 3, 4, 5, 6]


def test_a_scorer_of_groups_sees_whole_groups(bank):
    seen = []

    @reward(scope="group", columns=("rank", "best"))
    def ranks(images, prompts, metadata):
        seen.append([row["target"] for row in metadata])
        value = torch.tensor(grey(images, prompts, metadata))
        rank = value.argsort().argsort().float()
        return torch.stack([rank, (value == value.max()).float()], 1)

    judges = bank(ranks, batch=2, weight=0.5)
    groups = torch.tensor([7, 2, 7, 2, 7, 2])
    verdicts = judges(*batch(), groups)
    assert sorted(seen) == [[0, 2, 4], [1, 3, 5]]
    assert verdicts.scores.tolist() == [[0, 0], [0, 0], [1, 0], [1, 0], [2, 1], [2, 1]]
    assert judges.columns == ("r0/rank", "r0/best") and judges.weights == (0.5, 0.5)


def test_columns_follow_the_order_of_the_config(bank):
    judges = bank(reward(columns=("a", "b"))(constant([[1, 2]] * N)), grey)
    assert judges.columns == ("r0/a", "r0/b", "r1")
    assert judges(*batch(), GROUPS).scores[2].tolist() == [1, 2, 3]


def test_equal_scores_are_flagged_and_one_score_is_not(bank):
    judges = bank(constant([0.5] * N), grey)
    assert judges(*batch(), GROUPS).constant == ("r0",)
    assert bank(grey)(*batch(1), torch.zeros(1)).constant == ()


# what a scorer cannot do to the run


def test_a_scorer_that_paints_changes_nothing_for_others(bank):
    def paints(images, prompts, metadata):
        for image in images:
            image.paste((0, 0, 0), (0, 0, *image.size))
        return [0.5] * len(images)

    class Zeroes:
        columns, needs, scope = ("score",), frozenset(), "sample"

        def __call__(self, media, prompts):
            media.images.zero_()
            return [0.5] * len(prompts)

    media, rows = batch()
    before = media.images.clone()
    assert bank(paints, Zeroes, grey)(media, rows, GROUPS).scores[:, 2].tolist() == [1, 2, 3, 4, 5, 6]
    assert torch.equal(media.images, before)


def test_a_repeated_call_gets_fresh_images(bank):
    def paints_then_fails(images, prompts, metadata):
        if images[0].getpixel((0, 0))[0] and not calls:
            calls.append(images[0].paste((0, 0, 0), (0, 0, 4, 4)))
            raise ConnectionError
        return grey(images, prompts, metadata)

    calls = []
    assert bank(paints_then_fails)(*batch(), GROUPS).scores.flatten().tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("fails", [False, True], ids=["returns", "raises"])
def test_the_random_states_survive_a_scorer(bank, fails):
    def reseeds(images, prompts, metadata):
        random.seed(0), np.random.seed(0), torch.manual_seed(0)
        return None if fails else [0.5] * len(images)

    def draw():
        return random.random(), np.random.rand(), torch.rand(()).item()

    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    quiet = draw()
    random.seed(5), np.random.seed(5), torch.manual_seed(5)
    bank(reseeds, on_failure="drop_sample")(*batch(), GROUPS)
    assert draw() == quiet


def test_a_scorer_keeps_no_graph(bank):
    weight = torch.ones(1, requires_grad=True)

    def probes(images, prompts, metadata):
        assert not (weight * 2).requires_grad
        return [0.5] * len(images)

    assert bank(probes)(*batch(), GROUPS).failures == {"r0": 0}


def test_a_hung_scorer_ends_the_wait(bank):
    release, calls = threading.Event(), []

    def hangs(images, prompts, metadata):
        calls.append(len(images))
        if len(calls) == 2:
            release.wait(30)
        return [0.25] * len(images)

    start = time.perf_counter()
    verdicts = bank(hangs, batch=2, timeout=0.2, on_failure="drop_sample")(*batch(), GROUPS)
    assert time.perf_counter() - start < 5
    assert verdicts.scores.flatten().isnan().tolist() == [False, False, True, True, True, True]
    assert calls == [2, 2]  # neither again nor further
    calls[:] = [0]
    with pytest.raises(RewardError, match=r"'r0' did not answer within 0.2 s for sample 0 \(prompt 100\).*`timeout`"):
        bank(hangs, timeout=0.2)(*batch(), GROUPS)
    release.set()


@pytest.mark.parametrize("retries", [0, 1, 3])
def test_retries_are_bounded(bank, retries):
    calls = []

    def fails(images, prompts, metadata):
        calls.append(len(images))
        raise ConnectionError("no route to scorer")

    judges = bank(fails, retries=retries)
    with pytest.raises(
        RewardError, match=r"'r0' raised ConnectionError: no route to scorer, for sample 0 \(prompt 100"
    ):
        judges(*batch(), GROUPS)
    assert calls == [N] * (retries + 1) + [1]


def test_nothing_is_asked_of_a_scorer_that_is_still_in_a_call(bank):
    release, calls = threading.Event(), []

    def hangs(images, prompts, metadata):
        calls.append(len(images))
        release.wait(5)
        return [1.0] * len(images)

    judges, (media, prompts) = bank(hangs, on_failure="drop_sample", timeout=0.1), batch()
    asked = [judges.ask(media[[row]], [prompts[row]], GROUPS[[row]], N) for row in range(N)]
    assert judges.verdicts(asked).failures == {"r0": N} and calls == [1]
    release.set()
    time.sleep(0.05)
    assert judges(media, prompts, GROUPS).failures == {"r0": 0}, "it is back"


def test_no_more_is_asked_once_the_budget_is_spent(bank):
    calls = []

    def fails(images, prompts, metadata):
        calls.append(len(images))
        raise RuntimeError("broken")

    with pytest.raises(RewardError, match="6 of 6 samples, over budget = 0.1"):
        bank(fails, on_failure="drop_sample", budget=0.1, batch=2, retries=0)(*batch(), GROUPS)
    assert calls == [2, 1]


def test_what_a_scorer_does_to_metadata_reaches_nobody(bank):
    def paints(images, prompts, metadata):
        for row in metadata:
            row["source"].paste((0, 0, 0), (0, 0, 4, 4))
            row["scene"]["n"] = 99
        return [0.0] * len(images)

    def looks(images, prompts, metadata):
        return [row["source"].getpixel((0, 0))[0] + row["scene"]["n"] for row in metadata]

    media, _ = batch(2)
    prompts = [Prompt(i, "", {"source": Image.new("RGB", (4, 4), (7, 7, 7)), "scene": {"n": i}}) for i in range(2)]
    for _ in range(2):
        scores = bank(paints, looks)(media, prompts, torch.zeros(2)).scores
        assert scores[:, 1].tolist() == [7, 8]


def test_a_scorer_that_cannot_be_had_is_asked_once(bank):
    calls = []

    def gone(images, prompts, metadata):
        calls.append(len(images))
        raise Unavailable("the server is down")

    verdicts = bank(gone, on_failure="drop_sample", batch=2, retries=3)(*batch(), GROUPS)
    assert calls == [2] and verdicts.failures == {"r0": N}
    with pytest.raises(RewardError, match=r"^reward 'r0' the server is down, for sample"):
        bank(gone)(*batch(), GROUPS)


def test_a_scorer_that_recovers_is_as_good_as_one_that_never_failed(bank):
    calls = []

    def flaky(images, prompts, metadata):
        calls.append(1)
        if len(calls) < 3:
            raise ConnectionError
        return grey(images, prompts, metadata)

    verdicts = bank(flaky, retries=2)(*batch(), GROUPS)
    assert verdicts.scores.flatten().tolist() == [1, 2, 3, 4, 5, 6] and verdicts.failures == {"r0": 0}


def test_a_scorer_that_exits_is_one_that_failed(bank):
    def leaves(images, prompts, metadata):
        raise SystemExit(3)

    assert bank(leaves, on_failure="drop_sample", retries=0)(*batch(), GROUPS).failures == {"r0": 6}


# what is refused before a weight is loaded


@pytest.mark.parametrize(
    ("weights", "message"), [((1, -1), "they cancel"), ((1, 2), "with weight 3")], ids=["cancel", "add up"]
)
def test_a_reward_is_given_once(weights, message):
    with pytest.raises(ValueError, match=f"reward 'jpeg_size' is given 2 times.*{message}"):
        RewardBank([RewardSpec(name="jpeg_size", weight=weight) for weight in weights])


@pytest.mark.parametrize(
    ("row", "key"),
    [
        ({"wieght": 1.0}, "wieght"),
        ({"weight": float("nan")}, "weight"),
        ({"on_failure": "zero"}, "on_failure"),
        ({"timeout": 0}, "timeout"),
        ({"batch": 0}, "batch"),
        ({"retries": -1}, "retries"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_row_is_refused(row, key):
    with pytest.raises(ValidationError, match=key):
        RewardSpec(name="jpeg_size", **row)


@dataclass
class Target:
    columns: tuple = ("score",)
    needs: frozenset = frozenset({"target"})
    scope: str = "sample"
    scale: float = field(default=1.0, kw_only=True)

    def __call__(self, media, prompts):
        return [self.scale * p.metadata["target"] for p in prompts]


class Unready:
    columns, needs, scope = ("score",), frozenset(), "sample"

    def __init__(self):
        import no_such_package_kettle  # noqa: F401


def scaled(images, prompts, metadata, scale=1.0):
    return [scale * row["target"] for row in metadata]


@pytest.mark.parametrize("scorer", [Target, scaled, reward(scaled)], ids=["class", "function", "decorated"])
def test_options_reach_the_scorer(bank, scorer):
    judges = bank(scorer, options={"scale": 3})
    assert judges(*batch(), GROUPS).scores.flatten().tolist() == [0, 3, 6, 9, 12, 15]
    names = "its options: (columns, needs, scope, )?scale$"
    with pytest.raises(ValueError, match=f"reward 'r0' cannot be built .*'scael'; {names}"):
        bank(scorer, options={"scael": 3})


@pytest.mark.parametrize(
    ("scorer", "message"),
    [
        (Unready, "reward 'r0' cannot be built: .*no_such_package_kettle"),
        (dict, "reward 'r0' is no Reward"),
        (lambda images: None, "reward 'r0' cannot be built .*'prompts'"),
        (3.14, "reward 'r0' is 3.14, not a class or a function"),
    ],
    ids=["missing package", "another class", "another signature", "a number"],
)
def test_what_is_no_reward_is_refused(bank, scorer, message):
    with pytest.raises(ValueError, match=message):
        bank(scorer)


def test_prompts_without_the_metadata_a_scorer_needs_are_named(bank):
    judges = bank(grey, Target)
    _, rows = batch()
    judges.check(rows)
    rows[1], rows[4] = Prompt(101, "a"), Prompt(104, "b", {"Target": 1})
    with pytest.raises(ValueError, match=r"reward 'r1' needs the metadata key 'target', which 2 of 6 .*\[101, 104\]"):
        judges.check(rows)


# the rewards of the package


def test_pil_images_are_the_pixels_in_order():
    images = torch.arange(2 * 3 * 4 * 5, dtype=torch.uint8).reshape(2, 3, 4, 5)
    media = Media(images)
    again = torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in media.pil()])
    assert torch.equal(again, images)


def test_jpeg_rewards_are_the_file_size_and_its_opposite():
    noise = torch.randint(0, 256, (1, 3, 64, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    media = Media(torch.cat([noise, torch.full_like(noise, 9)]))
    scores = RewardBank([RewardSpec(name="jpeg_size"), RewardSpec(name="jpeg_incompressible")])(
        media, [Prompt(i, "") for i in range(2)], torch.zeros(2)
    ).scores
    file = BytesIO()
    media.pil()[0].save(file, "JPEG", quality=95)
    assert scores[0, 1].item() == pytest.approx(len(file.getvalue()) / 500_000, rel=1e-6)
    assert torch.equal(scores[:, 0], -scores[:, 1])
    assert scores[0, 0] < scores[1, 0]


def test_shapes_mixes_partial_and_strict_credit():
    rows = prompts("train", 4)
    drawn = [torch.from_numpy(picture(row.metadata["scene"], np.random.default_rng(row.id))) for row in rows]
    images = torch.stack(drawn).permute(0, 3, 1, 2)
    images[2:] = images[:2].clone()  # the last two prompts get other prompts' pictures
    media, groups = Media(images), torch.zeros(4)

    def scores(name, **options):
        return RewardBank([RewardSpec(name=name, options=options)])(media, rows, groups).scores.flatten()

    strict, partial = scores("shapes_strict"), scores("shapes_partial")
    assert strict.tolist() == [1, 1, 0, 0]
    assert (partial[:2] == 1).all() and (partial[2:] < 1).all() and (partial[2:] > 0).any()
    torch.testing.assert_close(scores("shapes"), 0.5 * partial + 0.5 * strict)
    torch.testing.assert_close(scores("shapes", partial=0.2), 0.2 * partial + 0.8 * strict)
    with pytest.raises(ValueError, match="partial is 2"):
        scores("shapes", partial=2)


@pytest.mark.parametrize("name", ["shapes", "shapes_strict", "shapes_partial"])
def test_shapes_needs_a_scene(name):
    with pytest.raises(ValueError, match="'scene'"):
        RewardBank([RewardSpec(name=name)]).check([Prompt(0, "a red circle")])


def test_the_built_in_rewards_are_installed_as_entry_points():
    assert {"shapes", "shapes_strict", "shapes_partial", "jpeg_size", "jpeg_incompressible"} <= set(REWARDS.names())
