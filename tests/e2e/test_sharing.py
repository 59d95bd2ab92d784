"""Training with shared text is training with repeated text: the tolerance class of kernels and sharing."""

import pytest
from diffusers.models.normalization import RMSNorm
from torch.testing import assert_close

from flowrl.session import start
from flowrl.train import train_step
from tests.tiny import NFT, config, tiny_sana

METHODS = {
    "nft": (*NFT, "regularise.velocity_kl=0.1", "optimiser.updates=2"),
    "flow_grpo": ("sampler.window={size: 2, start: 0}", "sampler.branch=2", "regularise.velocity_kl=0.1"),
    "nft, all weights": (*NFT, "model.lora=null"),
    "nft, recomputed": (*NFT, "compute.checkpointing=true"),
}


@pytest.fixture(scope="module")
def sana(tmp_path_factory):
    return tiny_sana(tmp_path_factory.mktemp("sharing") / "sana")


@pytest.fixture
def wide(monkeypatch):
    """diffusers' norm in the width of its input: in float32, as it is, it makes 1e-16 into 1e-7 now and then."""

    def forward(self, x):
        return x * (x.square().mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight

    monkeypatch.setattr(RMSNorm, "forward", forward)


def session(folder, sana, method, share, wide, guidance=1.0):
    model = (
        f"model={{name: sana, path: {sana}, instruction: false, max_sequence_length: 12, guidance: {guidance}, "
        f"share_context: {str(share).lower()}, lora: {{rank: 4, alpha: 8}}}}"
    )
    s = start(config(folder, sana, model, *METHODS[method], "compute.rows_per_forward=5"))
    if wide:
        s.adapter.network.double()
        s.policy.snapshots = {slot: [p.double() for p in values] for slot, values in s.policy.snapshots.items()}
    return s


@pytest.mark.parametrize("method", METHODS)
def test_ten_steps_in_float64_are_alike(tmp_path, sana, wide, method):
    shared, repeated = (session(tmp_path / str(share), sana, method, share, wide=True) for share in (True, False))
    for step in range(10):
        mine, theirs = (train_step(s, step) for s in (shared, repeated))
        for name in ("train/loss", "train/grad_norm"):
            assert mine[name] == pytest.approx(theirs[name], rel=1e-8, abs=1e-8), (step, name)
    for name, p, other in zip(shared.policy.names, shared.policy.parameters, repeated.policy.parameters, strict=True):
        assert_close(p, other, rtol=1e-8, atol=1e-8, msg=lambda text, name=name: f"{name}: {text}")
    assert any(
        (p != ref).any() for p, ref in zip(shared.policy.parameters, shared.policy.snapshots["ref"], strict=True)
    )


@pytest.mark.parametrize("guidance", [1.0, 3.0], ids=["unguided", "guided"])
def test_the_first_step_in_float32_is_alike(tmp_path, sana, guidance):
    shared, repeated = (
        session(tmp_path / str(share), sana, "flow_grpo", share, wide=False, guidance=guidance)
        for share in (True, False)
    )
    mine, theirs = (train_step(s, 0) for s in (shared, repeated))
    for name in ("train/loss", "train/grad_norm"):
        assert mine[name] == pytest.approx(theirs[name], rel=1e-5, abs=1e-6), name


def test_kernels_switched_off_change_nothing(tmp_path, sana, monkeypatch):
    seen = {}
    for name in ("auto", "naive"):
        monkeypatch.setenv("FLOWRL_KERNELS", name)
        s = session(tmp_path / name, sana, "nft", True, wide=True)
        seen[name] = [train_step(s, step)["train/grad_norm"] for step in range(3)]
    assert seen["auto"] == pytest.approx(seen["naive"], rel=1e-8)
