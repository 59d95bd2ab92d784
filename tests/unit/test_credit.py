"""Properties of advantages inside groups, of their way up a tree, and of pairs."""

import math
import threading
from collections import defaultdict
from statistics import fmean, pstdev

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from flowrl.credit import Credit, backup, best_worst, column_advantages, group_advantages

MODES = pytest.mark.parametrize("normalise", ["group", "global", "gdpo"])
NAN = float("nan")


def holds(**strategies):
    """The test must hold for every draw; the draws are the same in every run."""
    return lambda test: settings(deadline=None, max_examples=50, derandomize=True, database=None)(
        given(**strategies)(test)
    )


def f64(values):
    return torch.tensor(values, dtype=torch.float64)


@st.composite
def batches(draw, columns=2, verdicts_only=False):
    """(rewards [N, R], group [N]): shuffled groups of 1 to 6, some constant; multiples of 1/64 add without rounding."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=5))
    group = draw(st.permutations([7 * g + 3 for g, size in enumerate(sizes) for _ in range(size)]))
    verdict = st.integers(-640, 640).map(lambda k: k / 64) | st.sampled_from([0.5, 0.25])
    entry = verdict if verdicts_only else verdict | st.just(NAN)
    rows = draw(st.lists(st.lists(entry, min_size=columns, max_size=columns), min_size=len(group), max_size=len(group)))
    rewards = f64(rows)
    if draw(st.booleans()):
        rewards[torch.tensor(group) == group[0]] = 0.1
    return rewards, torch.tensor(group)


WEIGHTS = f64([0.7, 1.3])


def slow(rewards, group, weights, normalise):
    """The definition, one sample after the other."""
    rows = [i for i in range(len(group)) if not any(math.isnan(r) for r in rewards[i].tolist())]
    adv, weight = [0.0] * len(group), [0.0] * len(group)
    for i in rows:
        peers = [j for j in rows if group[j] == group[i]]
        weight[i] = float(len(peers) > 1)
        for k, w in enumerate(weights.tolist()):
            mine = [rewards[j, k].item() for j in peers]
            if max(mine) > min(mine):
                scale = pstdev([rewards[j, k].item() for j in rows]) if normalise == "global" else pstdev(mine)
                adv[i] += w * (rewards[i, k].item() - fmean(mine)) / (scale + 1e-4)
    if normalise == "gdpo":
        live = [i for i in rows if weight[i]]
        scale = pstdev([adv[i] for i in live]) if live else 0.0
        adv = [a / (scale + 1e-4) for a in adv]
    return f64(adv), f64(weight)


@MODES
@holds(batch=batches())
def test_agrees_with_the_definition(normalise, batch):
    rewards, group = batch
    got = group_advantages(rewards, group, WEIGHTS, normalise, None)
    torch.testing.assert_close(got, slow(rewards, group, WEIGHTS, normalise), rtol=1e-9, atol=1e-10)


@MODES
@holds(batch=batches(), constant=st.integers(-64_000, 64_000))
def test_a_constant_added_to_a_reward_changes_nothing(normalise, batch, constant):
    rewards, group = batch
    moved = group_advantages(rewards + f64([constant / 64, 0]), group, WEIGHTS, normalise)
    fixed = group_advantages(rewards, group, WEIGHTS, normalise)
    torch.testing.assert_close(moved, fixed, rtol=1e-8, atol=1e-8)


@MODES
@holds(batch=batches(), scale=st.sampled_from([1e7, 3e8]))
def test_the_scale_of_a_reward_matters_only_beside_the_floor(normalise, batch, scale):
    rewards, group = batch
    one, other = (group_advantages(1e6 * s * rewards, group, WEIGHTS, normalise, None) for s in (1.0, scale))
    torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


@MODES
@holds(batch=batches())
def test_a_negated_reward_negates_the_advantages(normalise, batch):
    rewards, group = batch
    adv, weight = group_advantages(rewards, group, WEIGHTS, normalise)
    negated, same = group_advantages(-rewards, group, WEIGHTS, normalise)
    assert torch.equal(negated, -adv) and torch.equal(same, weight)


@MODES
@holds(batch=batches(), data=st.data())
def test_permuting_rows_permutes(normalise, batch, data):
    rewards, group = batch
    order = torch.tensor(data.draw(st.permutations(range(len(group)))))
    adv, weight = group_advantages(rewards, group, WEIGHTS, normalise)
    permuted = group_advantages(rewards[order], group[order], WEIGHTS, normalise)
    torch.testing.assert_close(permuted, (adv[order], weight[order]), rtol=1e-10, atol=1e-10)


@holds(batch=batches(), data=st.data())
def test_groups_never_influence_each_other(batch, data):
    rewards, group = batch
    mine = group == group[0]
    others = data.draw(batches())[0][: len(group)]
    changed = rewards.clone()
    changed[: len(others)] = others
    changed[mine] = rewards[mine]
    before, after = (group_advantages(r, group, WEIGHTS, "group") for r in (rewards, changed))
    assert torch.equal(before[0][mine], after[0][mine]) and torch.equal(before[1][mine], after[1][mine])


@MODES
@holds(batch=batches())
def test_a_sample_without_a_verdict_is_as_good_as_absent(normalise, batch):
    rewards, group = batch
    seen = ~rewards.isnan().any(1)
    adv, weight = group_advantages(rewards, group, WEIGHTS, normalise)
    alone = group_advantages(rewards[seen], group[seen], WEIGHTS, normalise)
    assert not adv[~seen].any() and not weight[~seen].any()
    torch.testing.assert_close((adv[seen], weight[seen]), alone, rtol=1e-12, atol=1e-12)


@MODES
@holds(batch=batches(verdicts_only=True))
def test_advantages_of_a_group_sum_to_zero(normalise, batch):
    rewards, group = batch
    adv, _ = group_advantages(rewards, group, WEIGHTS, normalise, None)
    for one in group.unique():
        assert adv[group == one].sum().abs() < 1e-9


def test_a_group_of_one_verdict_is_dropped_and_one_of_two_is_kept():
    rewards = f64([[1.0], [NAN], [2.0], [3.0], [NAN], [NAN]])
    adv, weight = group_advantages(rewards, torch.tensor([0, 0, 1, 1, 1, 2]), f64([1.0]))
    assert weight.tolist() == [0, 0, 1, 1, 0, 0]
    torch.testing.assert_close(adv, f64([0, 0, -0.5 / 0.5001, 0.5 / 0.5001, 0, 0]))


def test_a_column_of_weight_zero_is_not_looked_at():
    rewards, group = f64([[1.0, NAN], [2.0, 5.0], [4.0, NAN]]), torch.zeros(3, dtype=torch.long)
    both = group_advantages(rewards, group, f64([2.0, 0.0]))
    single = group_advantages(rewards[:, :1], group, f64([2.0]))
    assert torch.equal(both[0], single[0]) and torch.equal(both[1], single[1])


@MODES
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_a_constant_group_is_exactly_zero(normalise, dtype):
    """Also where equal images were scored in batches of other shapes, which moves a score by a rounding or two."""
    one = torch.tensor(0.1, dtype=dtype)
    above = one.nextafter(one + 1)
    rewards = torch.stack([one, above, one, above.nextafter(above + 1), one, 1.001 * one])[:, None]
    adv, weight = group_advantages(rewards, torch.tensor([0, 0, 0, 0, 1, 1]), torch.ones(1), normalise)
    assert adv.dtype == weight.dtype == dtype
    assert (adv[:4] == 0).all() and (adv[4] < 0) and (adv[5] > 0)
    assert weight.tolist() == [1.0] * 6


def test_clip_bounds_the_weighted_sum():
    rewards, group = f64([[0.0]] * 15 + [[1.0]]), torch.zeros(16, dtype=torch.long)
    free, _ = group_advantages(rewards, group, f64([3.0]), clip=None)
    clipped, _ = group_advantages(rewards, group, f64([3.0]), clip=2.0)
    assert free[-1] > 11 and clipped[-1] == 2
    assert torch.equal(clipped[:-1], free[:-1])


@MODES
def test_groups_spread_over_processes_see_one_batch(normalise):
    """Two threads that add up their sums agree with one process that holds every group."""
    rewards = torch.randn(24, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 20
    rewards[3, 1] = NAN
    group = torch.arange(24) // 4
    barrier, sums, out = threading.Barrier(2), {}, {}

    def work(rank, mine):
        def all_reduce(value):
            sums[rank] = value
            barrier.wait()
            total = sums[0] + sums[1]
            barrier.wait()
            return total

        out[rank] = group_advantages(rewards[mine], group[mine], WEIGHTS, normalise, 5.0, all_reduce)

    threads = [
        threading.Thread(target=work, args=(0, slice(0, 16))),
        threading.Thread(target=work, args=(1, slice(16, 24))),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    adv, weight = group_advantages(rewards, group, WEIGHTS, normalise)
    torch.testing.assert_close(torch.cat([out[0][0], out[1][0]]), adv, rtol=1e-12, atol=1e-12)
    assert torch.equal(torch.cat([out[0][1], out[1][1]]), weight)


def test_group_statistics_never_leave_the_process():
    def refuse(_):
        raise AssertionError("a group's statistics asked another process")

    rewards, group = f64([[1.0], [2.0], [4.0]]), torch.zeros(3, dtype=torch.long)
    adv, _ = column_advantages(rewards, group, "group", refuse)
    assert adv[2] > 0 > adv[0]


def tree(k, depth, trees=1):
    """(parent [E], leaf [N]) of balanced trees of k^depth leaves, edges in the order a sampler adds them."""
    parent, last = [torch.full((trees * k,), -1)], torch.arange(trees * k)
    for _ in range(depth - 1):
        first = int(last[-1]) + 1
        parent.append(last.repeat_interleave(k))
        last = torch.arange(first, first + len(last) * k)
    return torch.cat(parent), last


@st.composite
def forests(draw):
    """(adv, leaf [N], parent, logp [E]) of a random forest whose edges are numbered at random."""
    above = [draw(st.integers(-1, e - 1)) for e in range(draw(st.integers(1, 25)))]
    name = torch.tensor(draw(st.permutations(range(len(above)))))
    parent = torch.empty(len(above), dtype=torch.long)
    parent[name] = torch.tensor([-1 if p < 0 else name[p] for p in above])
    leaf = torch.tensor(sorted(set(range(len(above))) - set(parent.tolist())))
    rng = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    numbers = torch.randn(2, len(above), generator=rng, dtype=torch.float64)
    return numbers[0, : len(leaf)], leaf[torch.randperm(len(leaf), generator=rng)], parent, numbers[1]


@pytest.mark.parametrize("weights", ["uniform", "mean_logp"])
@holds(forest=forests())
def test_backup_is_the_mean_over_children(weights, forest):
    adv, leaf, parent, logp = forest
    sample = {edge: adv[n] for n, edge in enumerate(leaf.tolist())}
    children = defaultdict(list)
    for edge, above in enumerate(parent.tolist()):
        children[above].append(edge)

    def value(edge):
        below = children[edge]
        if not below:
            return sample[edge]
        share = logp[below].softmax(0) if weights == "mean_logp" else torch.full((len(below),), 1 / len(below))
        return sum(w * value(child) for w, child in zip(share, below, strict=True))

    want = torch.stack([value(edge) for edge in range(len(parent))])
    torch.testing.assert_close(backup(adv, leaf, parent, logp, weights), want)


@pytest.mark.parametrize(("k", "depth"), [(3, 3), (2, 4), (5, 1), (1, 4)])
def test_root_edges_hold_the_means_of_their_subtrees(k, depth):
    parent, leaf = tree(k, depth)
    assert (len(leaf), len(parent)) == (k**depth, sum(k**i for i in range(1, depth + 1)))
    adv = torch.randn(len(leaf), generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    edges = backup(adv, leaf, parent, torch.zeros(len(parent)))
    torch.testing.assert_close(edges[parent < 0], adv.view(k, -1).mean(1))


@pytest.mark.parametrize("weights", ["uniform", "mean_logp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
def test_on_chains_backup_is_a_copy(weights, dtype):
    """Four chains of five edges; a fifth sample took no stochastic step."""
    parent = torch.cat([torch.full((4,), -1), torch.arange(16)])
    leaf = torch.tensor([17, 16, -1, 19, 18])
    rng = torch.Generator().manual_seed(0)
    adv, logp = torch.randn(5, generator=rng, dtype=dtype), torch.randn(20, generator=rng)
    edges = backup(adv, leaf, parent, logp, weights)
    assert torch.equal(edges.view(5, 4), adv[[1, 0, 4, 3]].expand(5, 4))


def test_samples_without_a_verdict_can_be_left_out_of_a_backup():
    """Two roots of three leaves; the first leaf has no verdict, and none under the second root has one."""
    parent, leaf = torch.tensor([-1, -1, 0, 0, 0, 1, 1, 1]), torch.arange(2, 8)
    adv, weight = f64([0, 3, 5, 0, 0, 0]), f64([0, 1, 1, 0, 0, 0])
    edges, seen = (backup(values, leaf, parent, torch.zeros(8)) for values in (adv, weight))
    assert (seen > 0).tolist() == [True, False, False, True, True, False, False, False]
    torch.testing.assert_close(edges[0] / seen[0], f64(4.0))


def test_backup_without_a_stochastic_step_has_no_edges():
    none = torch.empty(0, dtype=torch.long)
    assert backup(f64([1.0, -1.0]), torch.tensor([-1, -1]), none, f64([])).shape == (0,)


def test_mean_logp_weights_are_nearly_uniform_over_a_latent():
    """Mean-reduced log-probs of siblings differ by about 1 / sqrt(2 D): their softmax is within a percent of 1/3."""
    logp = -torch.randn(3, 65_536, generator=torch.Generator().manual_seed(0)).square().mean(1) / 2
    roots, leaf = torch.full((1,), -1), torch.tensor([1, 2, 3])
    parent = torch.cat([roots, torch.zeros(3, dtype=torch.long)])
    for child in range(3):
        adv = torch.eye(3, dtype=torch.float64)[child]
        share = backup(adv, leaf, parent, torch.cat([torch.zeros(1), logp]), "mean_logp")[0]
        assert share.item() == pytest.approx(1 / 3, rel=0.01) and share != 1 / 3


def test_backup_shrinks_advantages_towards_the_root():
    """z-scored iid leaves, 3 x 3 x 3: std 1, .556, .277; without replacement, (27 - m) / 26 / m for a mean over m."""
    trees = 4000
    parent, leaf = tree(3, 3, trees)
    adv = torch.randn(trees, 27, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    adv = (adv - adv.mean(1, keepdim=True)) / adv.std(1, keepdim=True, correction=0)
    edges = backup(adv.flatten(), leaf, parent, torch.zeros(len(parent)))
    stds = [level.square().mean().sqrt().item() for level in edges.split([3 * trees, 9 * trees, 27 * trees])]
    assert stds[2] == pytest.approx(1, abs=1e-12)
    assert stds[1] == pytest.approx(0.556, abs=4e-3) and stds[1] == pytest.approx(math.sqrt(24 / 26 / 3), abs=4e-3)
    assert stds[0] == pytest.approx(0.277, abs=4e-3) and stds[0] == pytest.approx(math.sqrt(18 / 26 / 9), abs=4e-3)


@pytest.mark.parametrize("pairs", [1, 2, 3])
@holds(batch=batches(columns=1))
def test_pairs_are_the_extremes_of_groups_and_what_lies_inside_them(batch, pairs):
    rewards, group = batch
    adv = rewards[:, 0]
    want = []
    for one in sorted(set(group.tolist())):
        rows = [i for i in range(len(adv)) if group[i] == one and not math.isnan(adv[i])]
        best, worst = sorted(rows, key=lambda i: -adv[i]), sorted(rows, key=lambda i: adv[i])
        want += [[b, w] for b, w in zip(best[:pairs], worst, strict=False) if adv[b] > adv[w]]
    found = best_worst(adv, group, pairs)
    assert found.shape == (len(want), 2) and found.dtype == torch.long
    assert found.tolist() == want
    assert len(found.unique()) == found.numel(), "nobody is in two pairs"


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"clip": -1.0}, r"credit\.clip is -1\.0: give"),
        ({"clip": 0}, r"credit\.clip"),
        ({"normalise": "batch"}, "gdpo"),
    ],
    ids=["negative clip", "zero clip", "unknown scale"],
)
def test_a_wrong_credit_block_is_refused(block, message):
    with pytest.raises(ValidationError, match=message):
        TypeAdapter(Credit).validate_python(block)


def test_the_credit_block_of_an_unclipped_method():
    assert TypeAdapter(Credit).validate_python({"clip": None}) == Credit(normalise="group", clip=None, backup="uniform")
