"""The laws of the schedule: epochs are permutations of the file, steps a pure function of (seed, step)."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flowrl.data import load, take, wrapping
from flowrl.prompt_files import PromptFileError, read_prompts
from flowrl.types import Prompt


def _prompts(n: int) -> list[Prompt]:
    return [Prompt(i, f"prompt {i}") for i in range(n)]


def _ids(n: int, per_step: int, seed: int, step: int, rank: int = 0, world: int = 1) -> list[int]:
    return [prompt.id for prompt in take(_prompts(n), per_step, seed, step, rank, world)]


sizes = st.integers(1, 12)
seeds = st.integers(0, 2**32)


@given(sizes, sizes, seeds)
def test_each_epoch_visits_every_prompt_once(n: int, per_step: int, seed: int) -> None:
    epochs = 4
    steps = -(-epochs * n // per_step)
    stream = [i for step in range(steps) for i in _ids(n, per_step, seed, step)]
    for epoch in range(epochs):
        assert sorted(stream[epoch * n : (epoch + 1) * n]) == list(range(n))


@given(sizes, sizes, sizes, seeds, st.integers(0, 50))
def test_ranks_share_the_step_in_order(n: int, share: int, world: int, seed: int, step: int) -> None:
    whole = _ids(n, share * world, seed, step)
    shares = [_ids(n, share * world, seed, step, rank, world) for rank in range(world)]
    assert [len(mine) for mine in shares] == [share] * world
    assert sum(shares, []) == whole


def test_a_step_does_not_depend_on_the_steps_before() -> None:
    forwards = [_ids(10, 4, 0, step) for step in range(8)]
    backwards = [_ids(10, 4, 0, step) for step in reversed(range(8))]
    assert forwards == backwards[::-1]


@pytest.mark.parametrize("other", [{"seed": 1, "step": 0}, {"seed": 0, "step": 1}], ids=["seed", "epoch"])
def test_seeds_and_epochs_have_their_own_order(other: dict[str, int]) -> None:
    assert _ids(64, 64, seed=0, step=0) != _ids(64, 64, **other)


def test_fewer_prompts_than_a_step_come_round_within_it() -> None:
    ids = _ids(3, 8, seed=5, step=0)
    assert sorted(ids[:3]) == sorted(ids[3:6]) == [0, 1, 2]
    assert _ids(1, 4, seed=5, step=9) == [0] * 4
    assert "prompts_per_step = 4" in wrapping(1, 4) and not wrapping(4, 4)


@pytest.mark.parametrize(
    ("per_step", "world", "advice"), [(7, 2, "use 6 or 8"), (3, 8, "use 8")], ids=["between", "below"]
)
def test_an_uneven_split_is_refused_with_numbers_that_work(per_step: int, world: int, advice: str) -> None:
    with pytest.raises(ValueError, match=f"prompts_per_step = {per_step} .* {world} processes: {advice}$"):
        take(_prompts(9), per_step, 0, 0, 0, world)


def test_rows_of_equal_text_stay_apart() -> None:
    twins = [Prompt(0, "same", {"target": 1}), Prompt(1, "same", {"target": 2})]
    seen = [(prompt.id, prompt.metadata["target"]) for prompt in take(twins, 4, seed=3, step=0)]
    assert sorted(seen) == [(0, 1), (0, 1), (1, 2), (1, 2)]


def test_a_missing_file_is_named_in_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(PromptFileError) as error:
        load("prompts/none.txt")
    assert str(tmp_path / "prompts" / "none.txt") in str(error.value)
    assert "current folder as 'prompts/none.txt'" in str(error.value)


def test_load_reads_files_and_built_in_sets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "two.txt").write_text("one\ntwo\none\n")
    monkeypatch.chdir(tmp_path)
    assert load("two.txt") == read_prompts(tmp_path / "two.txt")
    assert [prompt.text for prompt in load("two.txt", dedupe=True).prompts] == ["one", "two"]
    train, heldout = ({prompt.text for prompt in load(f"shapes/{s}").prompts} for s in ("train", "heldout"))
    assert train and heldout and not train & heldout
    with pytest.raises(ValueError, match="shapes/heldout"):
        load("shapes/trian")
