"""tidegate.causal_conv1d against torch's own convolution, row by row of what the package documents."""

import pytest
import torch
from compare import assert_bits, assert_close, leaves
from test_compat import conv

from tidegate.causal_conv1d import causal_conv1d_fn, causal_conv1d_update

D, T = 13, 10


def make(B=2, W=4):
    return torch.randn(B, D, T), torch.randn(D, W), torch.randn(D)


@pytest.mark.parametrize("activation", [None, "silu", "swish"])
@pytest.mark.parametrize("W", [2, 3, 4])
def test_forward(W, activation):
    x, w, b = make(W=W)
    want = conv(x, w, b, activation=activation)
    out = causal_conv1d_fn(x, w, b, activation=activation)
    assert_close("out", out, want, 1e-6)
    assert out.is_contiguous()
    channel_last = x.transpose(1, 2).contiguous().transpose(1, 2)
    out = causal_conv1d_fn(channel_last, w, b, activation=activation)
    assert_close("out", out, want, 1e-6)
    assert out.stride(1) == 1


def test_states_and_their_gradients():
    x, w, b = make()
    state = torch.randn(2, D, 3)
    inputs = leaves(x, w, b, state)
    out, final = causal_conv1d_fn(*inputs[:3], None, inputs[3], True, None, "silu")
    whole = torch.cat([inputs[3], inputs[0]], -1)
    want, want_final = conv(*inputs, "silu"), whole[..., -3:]
    assert_close("out", out, want, 1e-6)
    assert_bits("final", final, want_final)
    gradients = torch.randn(2, D, T), torch.randn(2, D, 3)
    got = torch.autograd.grad([out, final], inputs, gradients)
    expected = torch.autograd.grad([want, want_final], inputs, gradients)
    for name, a, e in zip(("x", "weight", "bias", "initial_states"), got, expected, strict=True):
        assert_close(name, a, e, 1e-6)


def test_final_states_of_both_memory_orders_into_a_given_tensor():
    x, w, _ = make()
    channel_last = x.transpose(1, 2).contiguous().transpose(1, 2)
    for form in (x, channel_last):
        given = torch.empty(2, D, 3)
        out, final = causal_conv1d_fn(form, w, return_final_states=True, final_states_out=given)
        assert final is given
        assert_bits("final", final, x[..., -3:].contiguous())
    for wrong in (torch.empty(1, D, 3), torch.empty(3, 2, D, 3), torch.empty(2, D, 4)):
        with pytest.raises(ValueError, match="final_states_out: expected shape"):
            causal_conv1d_fn(x, w, return_final_states=True, final_states_out=wrong)


def test_final_states_may_replace_the_initial_ones():
    x, w, _ = make()
    state = torch.randn(2, D, 3)
    want = causal_conv1d_fn(x[..., :2], w, initial_states=state, return_final_states=True)
    got = causal_conv1d_fn(x[..., :2], w, initial_states=state, return_final_states=True, final_states_out=state)
    assert got[1] is state
    for name, a, e in zip(("out", "final"), got, want, strict=True):
        assert_bits(name, a, e)


FINAL_ERRORS = {
    "dtype": (TypeError, lambda x: torch.zeros(2, D, 3, dtype=torch.int32)),
    "device": (ValueError, lambda x: torch.zeros(2, D, 3, device="meta")),
    "memory of x": (ValueError, lambda x: x[..., :3]),
    "one place for all": (ValueError, lambda x: torch.zeros(2, D, 1).expand(2, D, 3)),
    "list": (TypeError, lambda x: [0.0]),
}


@pytest.mark.parametrize("case", FINAL_ERRORS)
def test_final_states_errors(case):
    kind, make_out = FINAL_ERRORS[case]
    x, w, _ = make()
    out, before = make_out(x), x.clone()
    with pytest.raises(kind, match="causal_conv1d_fn: final_states_out: expected"):
        causal_conv1d_fn(x, w, return_final_states=True, final_states_out=out)
    assert_bits("x", x, before)


def test_seq_idx_of_nothing():
    for rows, tokens in ((2, 0), (0, 5)):
        x = torch.zeros(rows, D, tokens, requires_grad=True)
        out = causal_conv1d_fn(x, torch.ones(D, 3), seq_idx=torch.zeros(rows, tokens, dtype=torch.int32))
        assert out.shape == x.shape
        out.sum().backward()
        assert x.grad.shape == x.shape


def by_hand(x, w, b, ids):
    """Every run of equal ids on its own; negative ids give 0."""
    out = torch.zeros_like(x)
    for row, row_ids in enumerate(ids.tolist()):
        starts = [t for t in range(len(row_ids)) if t == 0 or row_ids[t] != row_ids[t - 1]] + [len(row_ids)]
        for s, e in zip(starts, starts[1:], strict=False):
            if row_ids[s] >= 0:
                out[row, :, s:e] = conv(x[row, :, s:e], w, b, activation="silu")
    return out


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_seq_idx(dtype):
    x, w, b = make()
    rows = [[0, 0, 0, 1, 1, 1, 1, 1, 9, 9], [3, 3, 3, 3, 0, 0, -1, -1, -1, -1]]
    ids = torch.tensor(rows, dtype=dtype)
    assert_close("out", causal_conv1d_fn(x, w, b, ids, activation="silu"), by_hand(x, w, b, ids), 1e-6)
    full = ids.clamp(min=0)
    full[1] = torch.arange(10)
    assert_close("out", causal_conv1d_fn(x, w, b, full, activation="silu"), by_hand(x, w, b, full), 1e-6)


def test_padding_never_reaches_anything():
    ids = torch.tensor([[0] * 6 + [-1] * 4, [-1] * 2 + [5] * 8], dtype=torch.int32)
    x, w, b = make()
    results = []
    for fill in (1.0, float("nan")):
        leaf_x, leaf_w, leaf_b = leaves(x.masked_fill((ids < 0)[:, None], fill), w, b)
        out = causal_conv1d_fn(leaf_x, leaf_w, leaf_b, ids, activation="silu")
        out.backward(torch.ones_like(out))
        assert not leaf_x.grad.transpose(1, 2)[ids < 0].any() and not out.transpose(1, 2)[ids < 0].any()
        results.append((out, leaf_x.grad, leaf_w.grad, leaf_b.grad))
    for a, e in zip(*results, strict=True):
        assert_bits("with NaN in the padding", e, a)


FN_ERRORS = {
    "activation": (NotImplementedError, {"activation": "gelu"}),
    "seq_idx and initial_states": (AssertionError, {"seq_idx": True, "initial_states": torch.zeros(2, D, 3)}),
    "seq_idx and final states": (AssertionError, {"seq_idx": True, "return_final_states": True}),
    "seq_idx dtype": (TypeError, {"seq_idx": torch.zeros(2, T)}),
    "seq_idx elsewhere": (ValueError, {"seq_idx": torch.zeros(2, T, dtype=torch.int32, device="meta")}),
    "no x": (ValueError, {"x": None}),
    "no weight": (ValueError, {"weight": None}),
    "text as bias": (TypeError, {"bias": "x"}),
    "seq_idx shape": (ValueError, {"seq_idx": torch.zeros(T, 2, dtype=torch.int32)}),
    "seq_idx that comes back": (ValueError, {"seq_idx": torch.tensor([[0] * 4 + [1] * 2 + [0] * 4] * 2)}),
    "width 1": (ValueError, {"weight": torch.zeros(D, 1)}),
    "width 5": (ValueError, {"weight": torch.zeros(D, 5)}),
    "rank of x": (ValueError, {"x": torch.zeros(D, T)}),
    "dtype of x": (TypeError, {"x": torch.zeros(2, D, T, dtype=torch.int32)}),
    "bias": (ValueError, {"bias": torch.zeros(D + 1)}),
    "initial_states": (ValueError, {"initial_states": torch.zeros(3, D, 3)}),
    "dtype of initial_states": (TypeError, {"initial_states": torch.zeros(2, D, 3, dtype=torch.bfloat16)}),
}


@pytest.mark.parametrize("case", FN_ERRORS)
def test_fn_errors(case):
    kind, changes = FN_ERRORS[case]
    x, w, _ = make()
    if changes.get("seq_idx") is True:
        changes = {**changes, "seq_idx": torch.zeros(2, T, dtype=torch.int32)}
    with pytest.raises(kind):
        causal_conv1d_fn(**({"x": x, "weight": w} | changes))


@pytest.mark.parametrize("S", [3, 4, 7])
@pytest.mark.parametrize("tokens", [0, 1, 5])
def test_update(S, tokens):
    """tokens = 0: x without a token dimension."""
    _, w, b = make()
    x, state = torch.randn(2, D, max(tokens, 1)), torch.randn(2, D, S)
    whole = torch.cat([state, x], -1)
    want = conv(x, w, b, state[..., -3:], "silu")
    out = causal_conv1d_update(x if tokens else x[..., 0], state, w, b, "silu")
    assert_close("out", out, want if tokens else want[..., 0], 1e-6)
    assert_bits("state", state, whole[..., -S:].contiguous())


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_update_circular_and_slots(dtype):
    x, w, _ = make()
    pool = torch.zeros(6, D, 8)
    slots = torch.tensor([4, 1], dtype=dtype)
    want = conv(x, w)
    for first, last in ((0, 4), (4, 5), (5, 10)):
        counts = torch.full((2,), first, dtype=dtype)
        step = x[..., first:last]
        out = causal_conv1d_update(step, pool, w, cache_seqlens=counts, conv_state_indices=slots)
        assert_close("out", out, want[..., first:last], 1e-6)
    assert not pool[[0, 2, 3, 5]].any()


def test_update_skips_negative_rows():
    x, w, _ = make(B=3)
    pool = torch.randn(4, D, 3)
    before = pool.clone()
    out = causal_conv1d_update(x, pool, w, conv_state_indices=torch.tensor([2, -1, -7], dtype=torch.int32))
    assert not out[1:].any()
    assert_close("out", out[0], conv(x[:1], w, None, before[2:3])[0], 1e-6)
    assert_bits("other rows", pool[[0, 1, 3]], before[[0, 1, 3]])


UPDATE_ERRORS = {
    "activation": (NotImplementedError, {"activation": "gelu"}),
    "rank of x": (ValueError, {"x": torch.zeros(D)}),
    "dtype of conv_state": (TypeError, {"conv_state": torch.zeros(2, D, 3, dtype=torch.float16)}),
    "conv_state length": (ValueError, {"conv_state": torch.zeros(2, D, 2)}),
    "conv_state rows": (ValueError, {"conv_state": torch.zeros(1, D, 3)}),
    "width": (ValueError, {"weight": torch.zeros(D, 5)}),
    "dtype of cache_seqlens": (TypeError, {"cache_seqlens": torch.zeros(2)}),
    "cache_seqlens": (ValueError, {"cache_seqlens": torch.tensor([0, -1])}),
    "dtype of conv_state_indices": (TypeError, {"conv_state_indices": torch.zeros(2)}),
    "list of conv_state_indices": (TypeError, {"conv_state_indices": [0, 1]}),
    "no x": (ValueError, {"x": None}),
    "conv_state_indices out of range": (ValueError, {"conv_state_indices": torch.tensor([0, 2])}),
    "conv_state_indices twice": (ValueError, {"conv_state_indices": torch.tensor([1, 1])}),
}


@pytest.mark.parametrize("case", UPDATE_ERRORS)
def test_update_errors(case):
    kind, changes = UPDATE_ERRORS[case]
    x, w, _ = make()
    arguments = {"x": x, "conv_state": torch.randn(2, D, 3), "weight": w} | changes
    before = arguments["conv_state"].clone()
    with pytest.raises(kind):
        causal_conv1d_update(**arguments)
    assert_bits("conv_state", arguments["conv_state"], before)
