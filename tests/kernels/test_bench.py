"""The bench of attention: it reports nothing on a wrong result, and what it counts is what there is."""

import json
from dataclasses import asdict, replace

import pytest
import torch
from typer.testing import CliRunner

from flowrl.cli import app
from flowrl_kernels import bench

SMALL = bench.Case(prompts=2, samples=3, image=5, text=7, width=32, heads=2)


@pytest.mark.parametrize("projections", [True, False])
def test_every_variant_agrees_before_it_is_timed(projections):
    case = replace(SMALL, projections=projections)
    assert bench.available(case)[:3] == ["repeated", "sdpa", "fold"]
    for name in bench.available(case):
        assert bench.disagreement(case, name) <= 1e-5, name


def test_a_wrong_variant_reports_nothing(monkeypatch):
    monkeypatch.setattr(bench, "cases", lambda *_: [SMALL])
    attend = bench.attend
    monkeypatch.setattr(bench, "attend", lambda name, *args: attend(name, *args) * (1.001 if name == "fold" else 1))
    done = CliRunner().invoke(app, ["bench", "attention"])
    assert done.exit_code == 1 and done.stdout == ""
    assert "fold differs from the definition by" in done.stderr and "nothing is reported" in done.stderr


def test_what_is_not_there_is_the_users_mistake():
    for flags, said in ((["--device", "tpu"], "device is 'tpu'"), (["--dtype", "int8"], "dtype is 'int8'")):
        done = CliRunner().invoke(app, ["bench", "attention", *flags])
        assert done.exit_code == 2 and said in done.stderr


def test_flop_are_those_of_the_products():
    """Forward and backward of the stock layer by hand: of its text no gradient is asked for."""
    rows, text = 6 * 5, 6 * 7
    forward = 2 * 32 * 32 * (2 * rows + 2 * text) + 2 * 2 * 6 * 5 * 7 * 32
    backward = 2 * 32 * 32 * (2 * 2 * rows + 2 * text) + 2.5 * 2 * 2 * 6 * 5 * 7 * 32
    assert bench.counted(SMALL, "repeated")["flop"] == forward + backward
    shared = 2 * 32 * 32 * 3 * 2 * (text - 2 * 7) - 2 * 32 * 32 * 2 * (text - 2 * 7)
    assert bench.counted(SMALL, "repeated")["flop"] - bench.counted(SMALL, "fold")["flop"] == shared


def test_the_peak_is_of_tensors_that_live_at_once():
    def run():
        a = torch.ones(1000, 256)
        b = a + 1  # two of them live
        del a
        return b * 2

    size = 1000 * 256 * 4
    assert 2 * size <= bench.peak(run, "cpu") < 2.2 * size


def test_times_come_from_a_process_of_their_own(monkeypatch):
    monkeypatch.setattr(bench, "peaks", lambda case: {"flop_s": 1e12, "byte_s": 1e12})
    result = bench.measure(SMALL)
    assert list(result["variants"]) == bench.available(SMALL)
    assert result["variants"]["repeated"]["speedup"] == 1 and result["case"] == asdict(SMALL)
    flat = bench.rows([result])
    assert [row["variant"] for row in flat] == bench.available(SMALL) and flat[0]["width"] == 32
    assert json.loads(json.dumps(result)) == result
    assert all(name in bench.table(result) for name in result["variants"])
