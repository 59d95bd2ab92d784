"""The bench of a whole step: its variants do the same work less and less often."""

import pytest
import torch

from flowrl.bench import sharing
from tests.tiny import NFT, config, tiny_sana


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    model = tiny_sana(folder / "sana")
    block = f"{{name: sana, path: {model}, instruction: false, max_sequence_length: 40, lora: {{rank: 4, alpha: 8}}}}"
    return sharing.measure(config(folder, model, f"model={block}", *NFT), steps=1)


def test_each_variant_spares_work(measured):
    assert list(measured) == ["stock", "trimmed", "shared"]
    for stage in ("act", "learn", "step"):
        flop = [measured[name][stage]["flop"] for name in measured]
        assert flop == sorted(flop, reverse=True) and len(set(flop)) == 3
        assert measured["shared"][stage]["ceiling"] == pytest.approx(flop[0] / flop[2])
        assert measured["stock"][stage]["speedup"] == 1
    assert all(row in sharing.table(measured) for row in ("stock", "trimmed", "shared"))


def test_the_flop_of_attention_are_counted():
    q, k = torch.randn(2, 3, 5, 8, requires_grad=True), torch.randn(2, 3, 7, 8, requires_grad=True)
    with sharing.FlopCounterMode(display=False, custom_mapping=sharing.UNCOUNTED) as counter:
        out = torch.nn.functional.scaled_dot_product_attention(q, k, k)
        forward = counter.get_total_flops()
        out.sum().backward()
    assert forward == 2 * 2 * 2 * 3 * 5 * 7 * 8
    assert counter.get_total_flops() - forward == 2.5 * forward
