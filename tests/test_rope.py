"""partial_rope_fwd, _bwd and mrope_cos_sin."""

import golden
import pytest
import torch
from compare import assert_all_bits, assert_bits, assert_close, flushed_denormals, leaves
from torch.utils.checkpoint import checkpoint

import tidegate

LAYOUTS = {  # from [B, H, T, D]
    "BNSD": lambda t: t,
    "BSND": lambda t: t.transpose(1, 2),
    "NTD": lambda t: t[0],
    "TND": lambda t: t[0].transpose(0, 1),
}


def make(B=2, H=3, T=21, D=40, R=16, dtype=torch.float32, table=None):
    angle = torch.rand(B, T, R // 2) * 100
    angle = torch.cat([angle, angle], -1)
    table = table or dtype
    shape = (B, H, T, D)
    return {
        "x": torch.randn(shape).to(dtype),
        "dy": torch.randn(shape).to(dtype),
        "cos": angle.cos().to(table),
        "sin": angle.sin().to(table),
    }


def run(p, layout="BNSD", rounding="fp32"):
    to = LAYOUTS[layout]
    (x,) = leaves(p["x"])
    y = tidegate.ops.partial_rope_fwd(to(x), p["cos"], p["sin"], layout=layout, rounding=rounding)
    y.backward(to(p["dy"]))
    return {"y": y.detach(), "dx": x.grad}


def truth(p, dtype=torch.float64):
    q = {k: t.to(dtype) for k, t in p.items()}
    cos, sin = (q[k] if q[k].dim() == 2 else q[k][:, None] for k in ("cos", "sin"))
    return {"y": golden.partial_rope_fwd(q["x"], cos, sin), "dx": golden.partial_rope_bwd(q["dy"], cos, sin)}


def rotate_half(x):
    return torch.cat([-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]], -1)


def model_rope(x, cos, sin):
    """As the models compute it, in the type of x."""
    R = cos.shape[-1]
    return torch.cat([x[..., :R] * cos + rotate_half(x[..., :R]) * sin, x[..., R:]], -1)


@pytest.mark.parametrize("D, R", [(40, 16), (64, 64), (7, 2), (256, 64), (30, 26)])
def test_matches_golden(isa, dtype, D, R):
    for table in {dtype, torch.float32}:
        p = make(D=D, R=R, dtype=dtype, table=table)
        want, plain = truth(p), truth(p, torch.float32)
        for name, value in run(p).items():
            assert value.dtype == dtype
            assert_close(f"{name} table={table}", value, want[name], 2e-7, plain[name])
    assert_bits("channels that pass through", run(p)["y"][..., R:], p["x"][..., R:])


def test_hf_rounding_has_the_bits_of_the_models(isa, dtype):
    p = make(D=96, R=64, dtype=dtype)
    got = run(p, rounding="hf")
    (x,) = leaves(p["x"])
    want = model_rope(x, p["cos"][:, None], p["sin"][:, None])
    want.backward(p["dy"])
    assert_bits("y", got["y"], want)
    assert_bits("dx", got["dx"], x.grad)


@pytest.mark.parametrize("rounding", ["hf", "fp32"])
def test_layouts_have_the_same_bits(rounding):
    p = make(B=1, dtype=torch.bfloat16)
    want = run(p, rounding=rounding)
    for layout, to in LAYOUTS.items():
        q = {**p, **{k: p[k][0] for k in ("cos", "sin")}}  # [T, R]
        got = run(q, layout, rounding)
        assert_bits(f"{layout} y", got["y"], to(want["y"]))
        assert_bits(f"{layout} dx", got["dx"], want["dx"])


def test_one_table_for_all_rows():
    p = make(B=3)
    shared = {**p, "cos": p["cos"][0], "sin": p["sin"][0]}
    repeated = {**p, "cos": p["cos"][:1].expand(3, -1, -1), "sin": p["sin"][:1].expand(3, -1, -1)}
    assert_all_bits(run(shared), run(repeated))


def test_tokens_do_not_see_each_other(isa):
    p = make(T=70, dtype=torch.bfloat16)
    want = run(p, rounding="hf")
    for first, last in ((0, 1), (1, 3), (5, 70)):
        part = {k: t[..., first:last, :] for k, t in p.items()}
        for name, value in run(part, rounding="hf").items():
            assert_bits(f"{name}[{first}:{last}]", value, want[name][:, :, first:last])


def test_threads_do_not_change_bits(isa):
    p = make(T=700, D=128, R=64, dtype=torch.bfloat16)
    torch.set_num_threads(1)
    want = run(p)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert_all_bits(run(p), want)


def test_strides_do_not_change_bits():
    p = make()
    want = run(p)
    forms = {
        "channels apart": lambda t: t.transpose(0, -1).contiguous().transpose(0, -1),
        "slice": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
        "every second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    }
    for form, to in forms.items():
        x = to(p["x"]).detach().requires_grad_()
        y = tidegate.ops.partial_rope_fwd(x, to(p["cos"]), to(p["sin"]), rounding="fp32")
        y.backward(to(p["dy"]))
        assert_bits(f"{form}: y", y, want["y"])
        assert_bits(f"{form}: dx", x.grad.contiguous(), want["dx"])
    flat = torch.ones(()).expand(p["x"].shape)
    assert_all_bits(run({**p, "dy": flat}), run({**p, "dy": flat.contiguous()}))


def test_in_place(isa, dtype):
    p = make(dtype=dtype)
    want = run(p)["y"]
    tidegate.ops.partial_rope_fwd.out(p["x"], p["cos"], p["sin"], rounding="fp32", y=p["x"])
    assert_bits("y", p["x"], want)


def test_nan_stays_in_its_pair(isa):
    p = make(R=16)
    want = run(p)
    for channel, touched in ((3, [3, 11]), (11, [3, 11]), (20, [20])):
        q = {k: t.clone() for k, t in p.items()}
        q["x"][1, 2, 7, channel] = float("nan")
        got = run(q)
        keep = torch.ones_like(want["y"], dtype=torch.bool)
        keep[1, 2, 7, touched] = False
        assert_bits("y", got["y"][keep], want["y"][keep])
        assert_bits("dx", got["dx"], want["dx"])


def test_flushed_denormals_do_not_matter(isa):
    p = make()
    p["x"], p["dy"] = p["x"] * 2e-39, p["dy"] * 2e-39
    want = run(p)
    assert want["y"].any()
    with flushed_denormals():
        got = run(p)
    assert_all_bits(got, want)


def test_gradcheck():
    p = make(B=1, H=2, T=2, D=6, R=4, dtype=torch.float64)
    call = lambda x: tidegate.ops.partial_rope_fwd(x, p["cos"], p["sin"])  # noqa: E731
    assert torch.autograd.gradcheck(call, (p["x"].requires_grad_(),), nondet_tol=0.0)


def test_tables_have_no_gradient():
    p = make()
    (cos,) = leaves(p["cos"])
    y = tidegate.ops.partial_rope_fwd(p["x"], cos, p["sin"])
    with pytest.raises(RuntimeError, match="cos, sin: expected no gradient"):
        y.sum().backward()


def test_checkpoint_has_the_same_bits():
    p = make()
    call = lambda x: tidegate.ops.partial_rope_fwd(x, p["cos"], p["sin"])  # noqa: E731
    x1, x2 = leaves(p["x"], p["x"])
    call(x1).square().sum().backward()
    checkpoint(call, x2, use_reentrant=False).square().sum().backward()
    assert_bits("dx", x2.grad, x1.grad)


@pytest.mark.parametrize("shape", [(0, 3, 5, 8), (2, 0, 5, 8), (2, 3, 0, 8)])
def test_empty(shape):
    (x,) = leaves(torch.randn(shape))
    table = torch.ones(shape[0], shape[2], 4)
    y = tidegate.ops.partial_rope_fwd(x, table, table)
    y.sum().backward()
    assert y.shape == shape and x.grad.shape == shape


@pytest.mark.parametrize("section", [(11, 11, 10), (24, 4, 4), (0, 0, 0), (2, 20, 1)])
def test_mrope_tables(section):
    inv_freq = 1e7 ** (-torch.arange(32) / 32.0)
    ids = torch.randint(0, 5000, (3, 2, 19))
    want = golden.mrope_cos_sin(ids, inv_freq, section)
    got = tidegate.ops.mrope_cos_sin(ids, inv_freq, section)
    for name, value, truth in zip(("cos", "sin"), got, want, strict=True):
        assert value.shape == (2, 19, 64) and (value - truth).abs().max() < 1e-7, name
    for dtype in (torch.bfloat16, torch.float16):
        scaled = tidegate.ops.mrope_cos_sin(ids, inv_freq, section, scaling=0.5, dtype=dtype)
        for value, full in zip(scaled, got, strict=True):
            assert_bits(f"{dtype}", value, (full * 0.5).to(dtype))
    same = tidegate.ops.mrope_cos_sin(ids[0], inv_freq, section)
    assert_all_bits(
        dict(enumerate(same)), dict(enumerate(tidegate.ops.mrope_cos_sin(ids[:1].expand(3, -1, -1), inv_freq, section)))
    )
    strided = tidegate.ops.mrope_cos_sin(ids.transpose(1, 2).contiguous().transpose(1, 2).int(), inv_freq, section)
    assert_all_bits(dict(enumerate(strided)), dict(enumerate(got)))


def test_mrope_axes():
    axis = golden.mrope_axis(32, (11, 11, 10))
    assert [axis.count(i) for i in range(3)] == [11, 11, 10] and axis[:6] == [0, 1, 2, 0, 1, 2] and axis[30:] == [0, 1]
    for i in range(3):
        ids = torch.zeros(3, 1, 1, dtype=torch.int64)
        ids[i] = 1
        sin = tidegate.ops.mrope_cos_sin(ids, torch.ones(32), (11, 11, 10))[1][0, 0, :32]
        assert [t for t in range(32) if sin[t] != 0] == [t for t in range(32) if axis[t] == i]
