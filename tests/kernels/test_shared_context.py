"""Every back end against the definition: value and all gradients, on any shapes; and the definition against a loop."""

import math
import os

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from flowrl_kernels import shared_context_attention
from flowrl_kernels.backend import why_not_triton

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DEVICE = os.environ.get("FLOWRL_TEST_DEVICE", "cpu")
NAMES = ("q", "k_ctx", "v_ctx", "k_own", "v_own")


def case(rows, heads, queries, dim, contexts, keys, own, masked, dtype, seed=0):
    """The arguments by name; q as a network's projection lays it out, context 0 all padding where there is a mask."""
    g = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=g).to(dtype)

    args = {
        "q": normal(rows, queries, heads, dim).transpose(1, 2),
        "k_ctx": normal(contexts, keys, heads, dim).transpose(1, 2), "v_ctx": normal(contexts, heads, keys, dim),
        "context": torch.randint(contexts, (rows,), generator=g),
    }  # fmt: skip
    if own:
        args |= {"k_own": normal(rows, heads, own, dim), "v_own": normal(rows, own, heads, dim).transpose(1, 2)}
    if masked:
        args["ctx_mask"] = torch.rand(contexts, keys, generator=g) > 0.4
        args["ctx_mask"][0] = False
    return {name: value.to(DEVICE) for name, value in args.items()}


def value_and_gradients(args, **how):
    leaves = {name: value.detach().requires_grad_() if name in NAMES else value for name, value in args.items()}
    out = shared_context_attention(**leaves, **how)
    g = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=g).to(out))
    return {"out": out.detach(), **{name: leaves[name].grad for name in NAMES if name in leaves}}


def assert_agree(got, want, tolerance):
    """Relative root mean squares, against that of the value where a gradient vanishes, as over a single key."""
    floor = max(rms(value) for value in want.values())
    for name, value in want.items():
        assert torch.isfinite(got[name]).all(), name
        off = rms(got[name].double() - value.double())
        assert off <= tolerance * max(rms(value), 0.1 * floor), f"{name}: {off:.2e}"


def rms(x):
    return x.double().square().mean().sqrt().item() if x.numel() else 0.0


def shapes(most):
    return st.tuples(
        st.integers(1, 6), st.integers(1, 2), st.integers(1, most), st.sampled_from((32, 40, 64, 112, 128)),
        st.integers(1, 4), st.integers(1, most), st.sampled_from((0, 1, most)), st.booleans(),
    )  # fmt: skip


def test_the_definition_is_attention_over_the_keys_that_are_shown():
    args = case(5, 2, 3, 32, 3, 7, 2, True, torch.float64)
    out = shared_context_attention(**args, back_end="naive")
    for b, h, i in ((b, h, i) for b in range(5) for h in range(2) for i in range(3)):
        c = args["context"][b]
        shown = args["ctx_mask"][c]
        k = torch.cat([args["k_ctx"][c, h][shown], args["k_own"][b, h]])
        v = torch.cat([args["v_ctx"][c, h][shown], args["v_own"][b, h]])
        weight = [math.exp(args["q"][b, h, i] @ key / math.sqrt(32)) for key in k]
        expected = sum(w * value for w, value in zip(weight, v, strict=True)) / sum(weight)
        assert_close(out[b, h, i], expected, rtol=1e-12, atol=1e-12)


def test_gradients_of_the_definition():
    args = case(3, 1, 2, 4, 2, 3, 2, True, torch.float64)
    leaves = [args[name].detach().requires_grad_() for name in NAMES]

    def attend(q, k, v, k_own, v_own):
        return shared_context_attention(
            q, k, v, args["context"], k_own, v_own, ctx_mask=args["ctx_mask"], back_end="naive"
        )

    assert torch.autograd.gradcheck(attend, leaves)


@pytest.mark.parametrize("back_end", ["fold", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@given(shape=shapes(33), seed=st.integers(0, 99))
@example(shape=(4, 2, 9, 64, 6, 5, 0, False), seed=0)  # contexts that nobody reads
@example(shape=(3, 1, 5, 32, 1, 8, 0, True), seed=0)  # nothing is shown to anybody
@settings(max_examples=30)
def test_torch_back_ends_agree_with_the_definition(back_end, dtype, shape, seed):
    args = case(*shape, dtype, seed)
    want = value_and_gradients(args, back_end="naive")
    assert_agree(value_and_gradients(args, back_end=back_end), want, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@given(shape=shapes(70), seed=st.integers(0, 99))
@example(shape=(5, 2, 70, 40, 3, 65, 3, True), seed=0)  # more than one tile of everything
@example(shape=(2, 1, 3, 64, 4, 1, 0, False), seed=0)
@example(shape=(3, 1, 5, 32, 1, 8, 0, True), seed=0)
@settings(max_examples=6)
def test_tritons_kernels_agree_with_the_definition(dtype, shape, seed):
    args = case(*shape, dtype, seed)
    want = value_and_gradients(args, back_end="naive")
    assert_agree(value_and_gradients(args, back_end="triton"), want, TOLERANCE[dtype])


@pytest.mark.parametrize("back_end", ["naive", "fold", "sdpa", "triton"])
def test_no_shared_key_leaves_attention_to_own_keys(back_end):
    args = case(3, 2, 5, 32, 2, 0, 4, False, torch.float32)
    got = value_and_gradients(args, back_end=back_end)
    plain = torch.nn.functional.scaled_dot_product_attention(args["q"], args["k_own"], args["v_own"])
    assert_close(got["out"], plain, rtol=1e-5, atol=1e-6)
    assert got["k_ctx"].shape == args["k_ctx"].shape


@pytest.mark.parametrize("back_end", ["naive", "fold", "sdpa", "triton"])
def test_rows_never_influence_each_other_and_order_means_nothing(back_end):
    args = case(6, 1, 4, 32, 3, 9, 2, True, torch.float32)
    out = shared_context_attention(**args, back_end=back_end)
    order = torch.tensor([4, 2, 5, 0, 1, 3])
    by_row = {name: args[name][order] for name in ("q", "context", "k_own", "v_own")}
    assert_close(shared_context_attention(**{**args, **by_row}, back_end=back_end), out[order], rtol=1e-5, atol=1e-6)
    alone = {name: args[name][2:3] for name in by_row}
    assert_close(shared_context_attention(**{**args, **alone}, back_end=back_end), out[2:3], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("back_end", ["fold", "triton"])
def test_the_gradient_of_the_shared_region_is_the_same_every_time(back_end):
    args = case(6, 2, 20, 32, 2, 40, 0, False, torch.float32)
    first, second = (value_and_gradients(args, back_end=back_end) for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_the_scale_is_the_callers():
    args = case(2, 1, 3, 32, 2, 5, 1, False, torch.float64)
    doubled = {**args, "q": 2 * args["q"]}
    for back_end in ("naive", "fold", "sdpa"):
        plain = shared_context_attention(**doubled, back_end=back_end)
        assert_close(shared_context_attention(**args, scale=2 * 32**-0.5, back_end=back_end), plain)


@pytest.mark.skipif(DEVICE != "cpu", reason="the profiler is asked for the CPU's memory")
def test_no_key_of_a_context_is_copied_in_folding():
    """What is live beside the inputs is the output and its softmax statistics, however many keys there are."""
    args = case(8, 2, 4, 32, 1, 4096, 0, False, torch.float32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        shared_context_attention(**args, back_end="fold")
    largest = max(event.cpu_memory_usage for event in seen.events())
    assert largest < args["k_ctx"].numel() * 4


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"v_ctx": torch.zeros(3, 2, 6, 32)}, r"v_ctx is of shape \(3, 2, 6, 32\): .* must be \(3, 2, 7, 32\)"),
        ({"context": torch.zeros(4, dtype=torch.long)}, r"context is of shape \(4,\): .* must be \(5,\)"),
        ({"context": torch.zeros(5)}, "context is torch.float32: it must be int32 or int64"),
        ({"v_own": None}, "v_own is missing"),
        ({"k_own": torch.zeros(5, 1, 2, 32)}, r"k_own is of shape \(5, 1, 2, 32\): .* must be \(5, 2, 2, 32\)"),
        ({"ctx_mask": torch.ones(5, 7, dtype=torch.bool)}, r"ctx_mask is of shape \(5, 7\): .* must be \(3, 7\)"),
        ({"v_ctx": torch.zeros(3, 2, 7, 32, dtype=torch.float64)}, "v_ctx is torch.float64: q is torch.float32"),
        ({"back_end": "flash"}, "is 'flash': it must be auto or one of naive, fold, triton, xformers, sdpa"),
    ],
)
def test_what_does_not_belong_together_is_refused(change, said):
    args = case(5, 2, 3, 32, 3, 7, 2, True, torch.float32)
    with pytest.raises(ValueError, match=said):
        shared_context_attention(**{**args, **change})


def test_the_variable_chooses_where_the_caller_does_not(monkeypatch):
    args = case(2, 1, 3, 160, 2, 5, 0, False, torch.float32)
    naive, fold = (shared_context_attention(**args, back_end=name) for name in ("naive", "fold"))
    assert not torch.equal(naive, fold)
    for name, expected in (("naive", naive), ("fold", fold), ("auto", fold), ("", fold)):
        monkeypatch.setenv("FLOWRL_KERNELS", name)
        assert torch.equal(shared_context_attention(**args), expected)
    monkeypatch.setenv("FLOWRL_KERNELS", "nai")
    with pytest.raises(ValueError, match="FLOWRL_KERNELS .* 'nai'"):
        shared_context_attention(**args)


def test_a_back_end_that_declines_is_replaced_and_says_so_once(caplog):
    args = case(2, 1, 3, 160, 2, 5, 0, False, torch.float32)
    got = [shared_context_attention(**args, back_end="triton") for _ in range(2)]
    assert torch.equal(got[0], shared_context_attention(**args, back_end="fold"))
    [message] = caplog.messages
    why = "triton's kernel takes head dimensions up to 128, not 160"
    assert message == f"the back end 'triton' is not used, 'fold' is: {why}"
    assert why_not_triton(torch.zeros(1, 1, 1, 64, device=DEVICE)) == "", "the interpreter takes tensors of the CPU"
