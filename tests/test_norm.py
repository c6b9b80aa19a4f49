"""l2norm, gated RMSNorm and zero-centred RMSNorm: forward and backward."""

from collections import namedtuple

import golden
import pytest
import torch
from compare import assert_all_bits, assert_bits, assert_close, flushed_denormals, leaves
from torch.utils.checkpoint import checkpoint

import tidegate

ops = tidegate.ops


def l2norm_truth(p, eps=1e-6):
    y, rstd = golden.l2norm_fwd(p["x"], eps)
    return {"y": y, "rstd": rstd, "dx": golden.l2norm_bwd(p["x"], rstd, p["dy"])}


def gated_call(x, z, weight, rounding="fp32", **options):
    return ops.rms_norm_gated_fwd(x, z, weight, rounding=rounding, **options)


def gated_truth(p, eps=1e-6, activation="silu"):
    y, rstd = golden.rms_norm_gated_fwd(p["x"], p["z"], p["weight"], eps, activation)
    grads = golden.rms_norm_gated_bwd(p["x"], p["z"], p["weight"], rstd, p["dy"], activation)
    return {"y": y, "rstd": rstd, **dict(zip(("dx", "dz", "dweight"), grads, strict=True))}


def rms_truth(p, eps=1e-6):
    y, rstd = golden.rms_norm_fwd(p["x"], p["weight"], eps)
    grads = golden.rms_norm_bwd(p["x"], p["weight"], rstd, p["dy"])
    return {"y": y, "rstd": rstd, **dict(zip(("dx", "dweight"), grads, strict=True))}


Norm = namedtuple("Norm", "inputs call truth")
L2 = Norm(("x",), ops.l2norm_fwd, l2norm_truth)
Gated = Norm(("x", "z", "weight"), gated_call, gated_truth)
Rms = Norm(("x", "weight"), ops.rms_norm_fwd, rms_truth)
every_norm = pytest.mark.parametrize("norm", [L2, Gated, Rms], ids=["l2norm", "rms_norm_gated", "rms_norm"])


def make(rows=90, width=128, dtype=torch.float32, wdtype=None):
    x = torch.randn(rows, width) * torch.logspace(-2, 2, rows)[:, None]
    return {
        "x": x.to(dtype),
        "z": torch.randn(rows, width).to(dtype),
        "weight": torch.randn(width).to(wdtype or dtype),
        "dy": torch.randn(rows, width).to(dtype),
    }


def run(norm, p, **options):
    tensors = leaves(*[p[name] for name in norm.inputs])
    y, rstd = norm.call(*tensors, **options)
    y.backward(p["dy"].to(y.dtype))
    grads = {"d" + n: t.grad for n, t in zip(norm.inputs, tensors, strict=True) if t is not None}
    return {"y": y.detach(), "rstd": rstd.detach(), **grads}


def cast(p, dtype):
    return {k: None if t is None else t.to(dtype) for k, t in p.items()}


@every_norm
@pytest.mark.parametrize("width", [1, 60, 128, 1027])
def test_matches_golden(isa, dtype, norm, width):
    options = [{}, {"eps": 1e-5}] + [{"activation": "sigmoid"}] * (norm is Gated)
    for i, option in enumerate(options):
        p = make(rows=30, width=width, dtype=dtype, wdtype=torch.float32 if i == 1 else None)
        got = run(norm, p, **option)
        want, plain = norm.truth(cast(p, torch.float64), **option), norm.truth(cast(p, torch.float32), **option)
        assert got["rstd"].dtype == torch.float32
        for name, value in got.items():
            limit = 1e-6 if name.startswith("d") else 3e-7
            if width == 1 and name == "dx":
                continue  # x * rstd = +-1: the gradient is a difference of numbers that agree in all their digits
            assert_close(f"{name} {option}", value, want[name], limit, None if name == "dweight" else plain[name])


def test_l2norm_output_dtype(isa):
    p = make(dtype=torch.bfloat16)
    want = L2.truth(cast(p, torch.float64))
    for out in (torch.float32, torch.bfloat16, torch.float16):
        got = run(L2, p, out_dtype=out)
        assert got["y"].dtype == out and got["dx"].dtype == torch.bfloat16
        assert_close(f"y {out}", got["y"], want["y"], 3e-7)
        assert_close(f"dx {out}", got["dx"], L2.truth(cast({**p, "dy": p["dy"].to(out)}, torch.float64))["dx"], 3e-7)


def test_zero_row(isa):
    p = make(rows=4, width=32)
    p["x"][2] = 0
    got = run(L2, p)
    assert not got["y"][2].any()
    assert_close("true derivative", got["dx"][2], 1000 * p["dy"][2], 3e-7)
    safe = ops.l2norm_bwd(p["dy"], p["x"], got["rstd"], zero_row_safe=True)
    assert not safe[2].any()
    keep = [0, 1, 3]
    assert_bits("other rows", safe[keep], got["dx"][keep])


@pytest.mark.parametrize("wdtype", [torch.bfloat16, torch.float32])
def test_hf_rounding(isa, wdtype):
    p = make(rows=250, dtype=torch.bfloat16, wdtype=wdtype)
    for activation in ("silu", "sigmoid"):
        got = run(Gated, p, rounding="hf", activation=activation)
        want = golden.rms_norm_gated_hf(p["x"], p["z"], p["weight"], activation=activation)
        steps = (got["y"].view(torch.int16).int() - want.view(torch.int16).int()).abs()
        assert steps.max() <= 1 and (steps != 0).sum() <= 4, f"{int((steps != 0).sum())} of {steps.numel()} differ"
        once = run(Gated, p, activation=activation)
        for name in ("dx", "dz", "dweight"):
            assert_bits(name, got[name], once[name])  # both modes share the gradient
    assert not torch.equal(got["y"], once["y"])


def test_weight_may_be_absent():
    p = {**make(), "weight": None}
    got, want = run(Gated, p), run(Gated, {**p, "weight": torch.ones(128)})
    assert_all_bits(got, {k: v for k, v in want.items() if k != "dweight"})


@every_norm
def test_rows_do_not_see_each_other(isa, norm):
    p = make(rows=130, dtype=torch.bfloat16)
    want = run(norm, p)
    for first, last in ((0, 1), (1, 4), (63, 128), (2, 130)):
        part = {k: t[first:last] if k != "weight" else t for k, t in p.items()}
        for name, value in run(norm, part).items():
            if name != "dweight":
                assert_bits(f"{name}[{first}:{last}]", value, want[name][first:last])


@every_norm
def test_leading_shapes_have_the_same_bits(norm):
    p = make(rows=60, width=24)
    want = run(norm, p)
    for shape in ((2, 5, 6, 24), (60, 1, 24), (1, 60, 24)):
        q = {k: t.view(shape) if k != "weight" else t for k, t in p.items()}
        got = run(norm, q)
        for name, value in want.items():
            assert_bits(f"{shape} {name}", got[name].reshape(value.shape), value)
    one = run(norm, {k: t[0] if k != "weight" else t for k, t in p.items()})
    assert one["rstd"].shape == () and one["y"].shape == (24,)


@every_norm
def test_threads_do_not_change_bits(isa, norm):
    p = make(rows=3000, width=256, dtype=torch.bfloat16, wdtype=torch.float32)
    torch.set_num_threads(1)
    want = run(norm, p)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert_all_bits(run(norm, p), want)


@every_norm
def test_large_outputs_have_the_same_bits(isa, norm):
    p = {k: torch.randn(4200, 1024) for k in ("x", "z")} | {"weight": torch.randn(1024)}  # 17 MB: past the caches
    y = norm.call(*[p[name] for name in norm.inputs])[0]
    for rows in (slice(0, 2100), slice(2100, 4200)):
        half = norm.call(*[p[name] if name == "weight" else p[name][rows] for name in norm.inputs])[0]
        assert_bits("y", y[rows], half)


@every_norm
def test_strides_do_not_change_bits(norm):
    p = {k: t.view(3, 10, 24) if k != "weight" else t for k, t in make(rows=30, width=24).items()}
    forms = {
        "head-major": lambda t: t.transpose(0, 1).contiguous().transpose(0, 1),
        "channels apart": lambda t: t.transpose(0, 2).contiguous().transpose(0, 2),
        "slice": lambda t: torch.cat([t, t], 2)[..., :24],
        "every second": lambda t: t.repeat_interleave(2, -1)[..., ::2],
    }

    def grads(p):
        tensors = [p[name].detach().requires_grad_() for name in norm.inputs]
        y, rstd = norm.call(*tensors)
        y.backward(p["dy"])
        return {"y": y, "rstd": rstd, **{n: t.grad for n, t in zip(norm.inputs, tensors, strict=True)}}

    want = grads(p)
    for form, to in forms.items():
        got = grads({k: to(t) if k != "weight" else t.repeat_interleave(2)[::2] for k, t in p.items()})
        for name, value in want.items():
            assert_bits(f"{form}: {name}", got[name].contiguous(), value.contiguous())
    flat, ones = torch.ones(()).expand(3, 10, 24), torch.ones(3, 10, 24)
    assert_all_bits(grads({**p, "dy": flat}), grads({**p, "dy": ones}))


def test_swapped_output_memory():
    p = make(rows=60, width=16)
    x, z = p["x"].view(2, 5, 6, 16), p["z"].view(2, 5, 6, 16)
    want = ops.rms_norm_gated_fwd(x, z, p["weight"])
    got = ops.rms_norm_gated_fwd(x, z, p["weight"], out_memory="swapped")
    assert got[0].shape == x.shape and got[0].transpose(1, 2).is_contiguous()
    assert_all_bits(dict(enumerate(got)), dict(enumerate(want)))


@every_norm
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_stays_in_its_row(isa, norm, bad):
    p = make(rows=70, width=40)
    want = run(norm, p)
    for name in {"x", "z", "dy"} & {*norm.inputs, "dy"}:
        q = {k: t.clone() for k, t in p.items()}
        q[name][33, 7] = bad
        keep = torch.arange(70) != 33
        for result, value in run(norm, q).items():
            if result != "dweight":
                assert_bits(f"{name} -> {result}", value[keep], want[result][keep])


@every_norm
@pytest.mark.parametrize("tiny, result", [("x", "y"), ("dy", "dx")])
def test_flushed_denormals_do_not_matter(isa, norm, tiny, result):
    p = make(rows=30, width=40)
    p[tiny] *= 2e-39 / p[tiny].abs().max()
    want = run(norm, p, eps=1e-2)
    assert ((want[result] != 0) & (want[result].abs() < 1e-38)).any()
    with flushed_denormals():
        got = run(norm, p, eps=1e-2)
    assert_all_bits(got, want)


@every_norm
def test_gradcheck(norm):
    p = make(rows=3, width=5)
    inputs = [(p[name] if name != "x" else torch.randn(3, 5)).double().requires_grad_() for name in norm.inputs]
    assert torch.autograd.gradcheck(norm.call, inputs, nondet_tol=0.0)
    assert torch.autograd.gradcheck(lambda *t: norm.call(*t)[1], inputs, nondet_tol=0.0)


@every_norm
def test_checkpoint_has_the_same_bits(norm):
    p = make()
    first, second = leaves(*[p[n] for n in norm.inputs]), leaves(*[p[n] for n in norm.inputs])
    norm.call(*first)[0].square().sum().backward()
    checkpoint(lambda *t: norm.call(*t)[0], *second, use_reentrant=False).square().sum().backward()
    assert_all_bits({i: t.grad for i, t in enumerate(second)}, {i: t.grad for i, t in enumerate(first)})


@every_norm
@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (2, 0, 8)])
def test_empty(norm, shape):
    p = {k: torch.randn(shape[-1:] if k == "weight" else shape) for k in ("x", "z", "weight", "dy")}
    got = run(norm, p)
    assert got["y"].shape == shape and got["rstd"].shape == shape[:-1]
    assert got["dx"].shape == shape and not ("dweight" in got and got["dweight"].any())
