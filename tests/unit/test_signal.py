"""The signal-to-noise measure of `flowrl bench signal`, on gradients whose signal and noise are known."""

from types import SimpleNamespace

import pytest
import torch

from flowrl.bench import signal
from flowrl.bench.signal import signal_and_noise


@pytest.mark.parametrize("strength", [0.0, 1.0, 3.0])
def test_it_finds_signal_and_noise(strength):
    g = torch.Generator().manual_seed(0)
    signal = torch.zeros(50)
    signal[0] = strength
    found = torch.tensor(
        [signal_and_noise(signal + torch.randn(16, 50, generator=g, dtype=torch.float64)) for _ in range(400)]
    )
    square, noise, error = found.mean(0)
    assert square == pytest.approx(strength**2, abs=4 * found[:, 0].std().item() / 20)  # unbiased
    assert noise == pytest.approx(50, rel=0.01)
    assert 0.9 <= error / found[:, 0].std() <= 1.5  # without signal the jackknife is sqrt(2) too wide


def test_equal_gradients_are_all_signal():
    square, noise, error = signal_and_noise(torch.ones(4, 9))
    assert (square, noise, error) == pytest.approx((9, 0, 0), abs=1e-9)


def test_pairs_that_are_given_are_refused():
    with pytest.raises(ValueError, match="data.pairs = p.jsonl: the bench asks for new pictures; give it data.prompts"):
        signal.measure(SimpleNamespace(data=SimpleNamespace(pairs="p.jsonl")))
