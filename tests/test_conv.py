"""causal_conv1d_fwd and _bwd against the truth, and what never changes their bits."""

import random

import golden
import pytest
import torch
from compare import assert_all_bits, assert_bits, assert_close, flushed_denormals, leaves
from torch.utils.checkpoint import checkpoint

import tidegate

LENGTHS = [0, 1, 2, 3, 63, 64, 65, 0, 17]
NAMES = ("x", "weight", "bias", "initial_state")


def make(W=4, D=70, lengths=LENGTHS, state=0, bias=True, dtype=torch.float32, wdtype=None):
    """A packed problem with everything that goes in and comes back. state = 0: no initial state."""
    cu = golden.cu_from_lengths(lengths)
    T, N = cu[-1], len(lengths)
    return {
        "x": torch.randn(T, D).to(dtype),
        "weight": (torch.randn(D, W) * 0.5).to(wdtype or dtype),
        "bias": torch.randn(D).to(wdtype or dtype) if bias else None,
        "initial_state": torch.randn(N, D, state).to(dtype) if state else None,
        "dy": torch.randn(T, D).to(dtype),
        "dfinal": torch.randn(N, D, state or W - 1).to(dtype),
        "cu": cu,
    }


def run(p, activation="silu", layout="TND", head_num=0, to_x=lambda x: x, to_y=lambda y: y):
    """Forward and backward through autograd. to_x and to_y bring [T, D] into the layout of the call."""
    x, weight, bias, state = leaves(*[p[name] for name in NAMES])
    y, final = tidegate.ops.causal_conv1d_fwd(
        to_x(x),
        weight,
        bias,
        state,
        cu_seqlens=torch.tensor(p["cu"]),
        activation=activation,
        head_num=head_num,
        output_final_state=True,
        layout=layout,
    )
    torch.autograd.backward([y, final], [to_y(p["dy"]), p["dfinal"]])
    results = {"y": y.detach(), "final": final.detach()}
    for name, t in zip(NAMES, (x, weight, bias, state), strict=True):
        if t is not None:
            results["d" + name] = t.grad
    return results


def truth(p, activation="silu", dtype=torch.float64):
    q = {name: t.to(dtype) if isinstance(t, torch.Tensor) else t for name, t in p.items()}
    args = (q["bias"], q["cu"], q["initial_state"])
    y, _, final = golden.causal_conv1d_fwd(q["x"], q["weight"], *args, activation)
    grads = golden.causal_conv1d_bwd(q["x"], q["weight"], q["dy"], *args, q["dfinal"], activation)
    return {"y": y, "final": final, **{"d" + name: g for name, g in zip(NAMES, grads, strict=True)}}


@pytest.mark.parametrize("W", [2, 3, 4])
def test_matches_golden(isa, dtype, W):
    for activation in (None, "silu"):
        for state, bias in ((0, False), (W - 1, True), (W, False), (W + 2, True)):
            p = make(W, state=state, bias=bias, dtype=dtype, wdtype=torch.float32 if state == W else None)
            got, want, plain = run(p, activation), truth(p, activation), truth(p, activation, torch.float32)
            for name, value in got.items():
                limit = 5e-7 if name.startswith("d") else 2e-7
                yardstick = None if name in ("dweight", "dbias") else plain[name]  # sums: the RMS error alone
                assert_close(f"{name} state={state} {activation}", value, want[name], limit, yardstick)
            assert_bits("final state", got["final"], want["final"].to(dtype))


def test_state_length_is_free():
    x, w = torch.randn(7, 12), torch.randn(12, 4)
    options = {"cu_seqlens": torch.tensor([0, 5, 7]), "output_final_state": True, "layout": "TND"}
    for length in (3, 4, 9):
        final = tidegate.ops.causal_conv1d_fwd(x, w, state_len=length, **options)[1]
        for n, samples in enumerate((x[:5], x[5:])):
            padded = torch.cat([torch.zeros(length, 12), samples])
            assert_bits(f"state_len={length}", final[n], padded[-length:].T.contiguous())


def test_layouts_have_the_same_bits():
    p = make(D=48, lengths=[7, 0, 66], state=3)
    want = run(p)
    heads = lambda t: golden.to_head_major(t, 6)  # noqa: E731
    got = run(p, head_num=6, to_y=heads)
    assert_bits("head-major y", got.pop("y"), heads(want["y"]))
    assert_all_bits(got, {k: v for k, v in want.items() if k != "y"})
    batched = lambda t: t[None]  # noqa: E731
    for layout, to_x in (("BSND", batched), ("NTD", heads), ("BNSD", lambda t: heads(t)[None])):
        got = run(p, layout=layout, to_x=to_x, to_y=to_x)
        assert_bits(f"{layout} y", got.pop("y"), to_x(want["y"]))
        assert_all_bits(got, {k: v for k, v in want.items() if k != "y"})


def test_packed_equals_separate(isa):
    rng = random.Random(1)
    for _ in range(4):
        lengths = rng.sample([0, 1, 2, 3, 63, 64, 65, rng.randrange(200)], 8)
        p = make(D=33, lengths=lengths, state=4, dtype=rng.choice([torch.float32, torch.bfloat16]))
        packed = run(p)
        parts = []
        for n in range(len(lengths)):
            part = {**p, "cu": [0, lengths[n]]}
            part.update({k: p[k][p["cu"][n] : p["cu"][n + 1]] for k in ("x", "dy")})
            part.update({k: p[k][n : n + 1] for k in ("initial_state", "dfinal")})
            parts.append(run(part))
        for name in ("y", "dx", "final", "dinitial_state"):
            assert_bits(name, packed[name], torch.cat([part[name] for part in parts]))


@pytest.mark.parametrize("T, D", [(65, 40), (2100, 1024)])  # beyond 16 MB results are written past the caches
def test_batch_rows_equal_single_rows(isa, T, D):
    x, w, h = torch.randn(2, T, D), torch.randn(D, 4), torch.randn(2, D, 3)
    y, final = tidegate.ops.causal_conv1d_fwd(x, w, None, h, activation="silu", output_final_state=True)
    for b in (slice(0, 1), slice(1, 2)):
        one = tidegate.ops.causal_conv1d_fwd(x[b], w, None, h[b], activation="silu", output_final_state=True)
        assert_bits("y", y[b], one[0])
        assert_bits("final", final[b], one[1])


def test_threads_do_not_change_bits(isa):
    p = make(D=700, lengths=[300, 65, 1], state=3, dtype=torch.bfloat16, wdtype=torch.float32)
    torch.set_num_threads(1)
    want = run(p)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert_all_bits(run(p), want)


def test_strides_do_not_change_bits():
    B, T, D = 2, 37, 24
    x, w, h, dy = torch.randn(B, T, D), torch.randn(D, 4), torch.randn(B, D, 4), torch.randn(B, T, D)

    def grads(x, w, h, dy):
        x, w, h = (t.detach().requires_grad_() for t in (x, w, h))
        y, final = tidegate.ops.causal_conv1d_fwd(x, w, None, h, activation="silu", output_final_state=True)
        torch.autograd.backward([y, final], [dy, final.detach()])
        return {"y": y, "final": final, "dx": x.grad, "dw": w.grad, "dh": h.grad}

    want = grads(x, w, h, dy)
    channel_major = x.transpose(1, 2).contiguous().transpose(1, 2)  # inner stride is not 1: copied inside
    every_second = torch.randn(B, T, 2 * D)
    every_second[..., ::2] = x
    module_weight = w[:, None].clone().squeeze(1)
    for name, args in {
        "channel-major x": (channel_major, w, h, dy),
        "[B,D,T] view of [B,T,D] memory": (x.transpose(1, 2).transpose(1, 2), w, h, dy),
        "every second channel": (every_second[..., ::2], w, h, dy),
        "rows of a wider buffer": (torch.cat([x, x], -1)[..., :D], w, h, dy),
        "weight [D,1,W]": (x, module_weight, h, dy),
        "weight of a [W,D] buffer": (x, w.T.contiguous().T, h, dy),
        "token-major state": (x, w, h.transpose(1, 2).contiguous().transpose(1, 2), dy),
        "channel-major dy": (x, w, h, dy.transpose(1, 2).contiguous().transpose(1, 2)),
        "sliced dy": (x, w, h, torch.cat([dy, dy], 1)[:, :T]),
    }.items():
        got = grads(*args)
        for key, value in want.items():
            assert_bits(f"{name}: {key}", got[key], value)
    got = grads(x, w, h, torch.ones(()).expand(B, T, D))  # what sum().backward() passes: every stride 0
    want = grads(x, w, h, torch.ones(B, T, D))
    assert_all_bits(got, want)


def test_absent_gradients():
    x, w = leaves(torch.randn(2, 9, 8), torch.randn(8, 4))
    y, final = tidegate.ops.causal_conv1d_fwd(x, w, output_final_state=True)
    final.sum().backward()  # nothing comes from y
    assert_bits("dx", x.grad, torch.cat([torch.zeros(2, 6, 8), torch.ones(2, 3, 8)], 1))
    assert not w.grad.any()


def test_gradcheck():
    x, w, b = torch.randn(7, 3), torch.randn(3, 3), torch.randn(3)
    inputs = [t.double().requires_grad_() for t in (x, w, b, torch.randn(3, 3, 4))]
    cu = torch.tensor([0, 1, 1, 7])

    def call(x, w, b, h):
        return tidegate.ops.causal_conv1d_fwd(
            x, w, b, h, cu_seqlens=cu, activation="silu", output_final_state=True, layout="TND"
        )

    assert torch.autograd.gradcheck(call, inputs, nondet_tol=0.0)


def test_checkpoint_has_the_same_bits():
    p = make(lengths=[65, 3])
    call = lambda x, w: tidegate.ops.causal_conv1d_fwd(x, w, activation="silu", layout="TND")[0]  # noqa: E731
    x1, w1, x2, w2 = leaves(p["x"], p["weight"], p["x"], p["weight"])
    call(x1, w1).square().sum().backward()
    checkpoint(call, x2, w2, use_reentrant=False).square().sum().backward()
    assert_bits("dx", x2.grad, x1.grad)
    assert_bits("dw", w2.grad, w1.grad)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_stays_in_its_window(isa, bad):
    p = make(D=40, lengths=[9, 30, 12], state=4)
    want = run(p)
    t, c = 20, 17  # in the second sequence
    p["x"][t, c] = bad
    got = run(p)
    touched = torch.zeros(51, 40, dtype=torch.bool)
    touched[t : t + 4, c] = True
    assert not torch.isfinite(got["y"][touched]).any()
    for name in ("y", "dx"):
        keep = ~touched if name == "y" else torch.arange(40) != c
        at = (slice(None), keep) if name == "dx" else keep
        assert_bits(name, got[name][at], want[name][at])
        assert_bits(name + " of other sequences", got[name][:9], want[name][:9])
        assert_bits(name + " of other sequences", got[name][39:], want[name][39:])
    for name in ("final", "dinitial_state", "dweight", "dbias"):
        other = [i for i in range(40) if i != c]
        dim = 1 if got[name].dim() == 3 else 0
        index = torch.tensor(other)
        assert_bits(name, got[name].index_select(dim, index), want[name].index_select(dim, index))


def test_unread_state_columns_do_not_matter():
    p = make(lengths=[9, 30], state=6)
    want = run(p)
    p["initial_state"][:, :, :3] = float("nan")
    got = run(p)
    for name in ("y", "dx", "dweight", "dbias", "dinitial_state"):
        assert_bits(name, got[name], want[name])


def test_flushed_denormals_do_not_matter(isa):
    p = make(D=40, lengths=[70], state=3, bias=False)
    for name in ("x", "initial_state", "dy", "dfinal"):
        p[name] = p[name] * 2e-39
    want = run(p, None)
    assert (want["y"] != 0).any() and want["y"].abs().max() < 1.2e-38
    with flushed_denormals():
        got = run(p, None)
    assert_all_bits(got, want)


@pytest.mark.parametrize("shape", [(0, 5, 8), (2, 0, 8), (2, 5, 0)])
def test_empty(shape):
    x, w = leaves(torch.randn(shape), torch.randn(shape[2], 4))
    y, final = tidegate.ops.causal_conv1d_fwd(x, w, output_final_state=True)
    assert y.shape == shape and final.shape == (shape[0], shape[2], 3) and not final.any()
    (y.sum() + final.sum()).backward()
    assert x.grad.shape == shape and not w.grad.any()
