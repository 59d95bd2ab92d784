"""The fused step against its definition, value and gradients; a drawn step and its replay are the same numbers."""

import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl_kernels import sde_step

DEVICE = os.environ.get("FLOWRL_TEST_DEVICE", "cpu")
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 6), st.sampled_from(((7,), (3, 5, 5), (1030,), (2, 32, 33))))


def case(rows, edges, shape, seed=0, dtype=torch.float32):
    """(x, v, dt, pull, rest, std, row) and noise."""
    g = torch.Generator().manual_seed(seed)
    x, v = (torch.randn(rows, *shape, generator=g).to(dtype) for _ in range(2))
    numbers = [torch.rand(rows, generator=g, dtype=torch.float64).to(torch.promote_types(dtype, torch.float32))
               for _ in range(4)]  # fmt: skip
    row = torch.randint(rows, (edges,), generator=g)
    return tuple(one.to(DEVICE) for one in (x, v, *numbers, row)), torch.randn(edges, *shape, generator=g).to(DEVICE)


def gradients(args, x_next, back_end):
    x, v = (value.detach().requires_grad_() for value in args[:2])
    _, square = sde_step(x, v, *args[2:], x_next=x_next, back_end=back_end)
    weight = torch.linspace(-1, 2, len(square)).to(square)
    (weight * square).sum().backward()
    return square.detach(), x.grad, v.grad


def test_the_definition_is_the_step_and_its_distance():
    (x, v, dt, pull, rest, std, row), z = case(3, 4, (5,), dtype=torch.float64)
    z = z.double()
    x_next, square = sde_step(x, v, dt, pull, rest, std, row, noise=z, dtype=torch.float64)
    for e, r in enumerate(row):
        mean = x[r] + dt[r] * v[r] + pull[r] * (x[r] + rest[r] * v[r])
        assert_close(x_next[e], mean + std[r] * z[e], rtol=1e-12, atol=1e-12)
        assert_close(square[e], (std[r] * z[e]).square().mean(), rtol=1e-9, atol=0)


@pytest.mark.parametrize("store", [torch.float32, torch.bfloat16], ids=str)
@given(shape=SHAPES, seed=st.integers(0, 99))
@settings(max_examples=8)
def test_triton_agrees_with_the_definition(store, shape, seed):
    args, z = case(*shape, seed)
    drawn, naive = (sde_step(*args, noise=z, dtype=store, back_end=name) for name in ("triton", "naive"))
    assert drawn[0].dtype == store
    assert_close(drawn[0].float(), naive[0].float(), rtol=1e-5 if store == torch.float32 else 1e-2, atol=1e-6)
    assert_close(drawn[1], sde_step(*args, x_next=drawn[0], back_end="naive")[1], rtol=1e-5, atol=1e-7)
    for got, want in zip(*(gradients(args, naive[0], name) for name in ("triton", "naive")), strict=True):
        assert torch.isfinite(got).all()
        assert (got - want).square().mean().sqrt() <= 1e-5 * want.square().mean().sqrt()


@pytest.mark.parametrize("back_end", ["naive", "triton"])
@pytest.mark.parametrize("store", [torch.float32, torch.bfloat16], ids=str)
def test_a_drawn_step_and_its_replay_are_bitwise_alike(store, back_end):
    args, z = case(3, 7, (2, 32, 33))
    x_next, square = sde_step(*args, noise=z, dtype=store, back_end=back_end)
    assert torch.equal(sde_step(*args, x_next=x_next, back_end=back_end)[1], square)


def test_rows_without_an_edge_have_no_gradient():
    args, z = case(3, 4, (6,))
    args = (*args[:-1], torch.tensor([0, 2, 2, 0], device=DEVICE))
    for back_end in ("naive", "triton"):
        _, of_x, of_v = gradients(args, z, back_end)
        assert not of_x[1].any() and not of_v[1].any() and of_v[[0, 2]].any()


def test_the_variable_switches_it_off_and_other_names_leave_it(monkeypatch):
    args, z = case(2, 3, (5,))
    seen = {}
    for name in ("naive", "fold", "auto"):
        monkeypatch.setenv("FLOWRL_KERNELS", name)
        seen[name] = sde_step(*args, noise=z)[1]
    assert torch.equal(seen["naive"], seen["fold"]) and torch.equal(seen["naive"], seen["auto"])
    monkeypatch.setenv("FLOWRL_KERNELS", "fused")
    with pytest.raises(ValueError, match="FLOWRL_KERNELS .* 'fused': it must be auto or one of naive"):
        sde_step(*args, noise=z)
