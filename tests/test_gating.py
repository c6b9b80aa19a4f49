"""gdn_gating_fwd and _bwd."""

import golden
import pytest
import torch
from compare import assert_all_bits, assert_bits, assert_close, flushed_denormals, leaves
from torch.utils.checkpoint import checkpoint

import tidegate

NAMES = ("a", "b", "A_log", "dt_bias")


def make(T=150, HV=12, dtype=torch.float32, wdtype=None, bias=True):
    wdtype = wdtype or dtype
    return {
        "a": (torch.randn(T, HV) * 4).to(dtype),
        "b": (torch.randn(T, HV) * 3).to(dtype),
        "A_log": torch.empty(HV).uniform_(0.01, 16).log().to(wdtype),
        "dt_bias": (torch.randn(HV) - 3).to(wdtype) if bias else None,
        "dg": torch.randn(T, HV) + 2,  # not centred, so that the sums over tokens do not cancel
        "dbeta": torch.randn(T, HV),
    }


def run(p, to=lambda t: t, layout="TND", **options):
    """Forward and backward; `to` brings [T, HV] into the layout of the call."""
    a, b, A_log, dt_bias = leaves(*[p[name] for name in NAMES])
    g, beta = tidegate.ops.gdn_gating_fwd(to(a), to(b), A_log, dt_bias, layout=layout, **options)
    torch.autograd.backward([g, beta], [to(p["dg"]).to(g.dtype), to(p["dbeta"]).to(beta.dtype)])
    results = {"g": g.detach(), "beta": beta.detach()}
    return results | {
        "d" + name: t.grad for name, t in zip(NAMES, (a, b, A_log, dt_bias), strict=True) if t is not None
    }


def truth(p, beta_dtype, scale=1.0, dtype=torch.float64):
    q = {k: None if t is None else t.to(dtype) for k, t in p.items()}
    q["dbeta"] = p["dbeta"].to(beta_dtype).to(dtype)
    bias = q["dt_bias"]
    a, b, dg, dbeta = (q[k].T for k in ("a", "b", "dg", "dbeta"))
    g, beta = golden.gdn_gating_fwd(a, b, q["A_log"], bias, scale)
    da, db, dA_log, ddt_bias = golden.gdn_gating_bwd(a, b, q["A_log"], dg, dbeta, bias, scale)
    return {"g": g.T, "beta": beta.T, "da": da.T, "db": db.T, "dA_log": dA_log, "ddt_bias": ddt_bias}


@pytest.mark.parametrize("HV", [1, 12, 33])
def test_matches_golden(isa, dtype, HV):
    cases = ((True, 1.0, None, None), (False, 2.0, torch.float32, torch.float32), (True, 2.0, None, torch.float32))
    for bias, scale, beta_dtype, wdtype in cases:
        p = make(HV=HV, dtype=dtype, wdtype=wdtype, bias=bias)
        got = run(p, beta_scale=scale, beta_dtype=beta_dtype)
        args = (p, beta_dtype or dtype, scale)
        want, plain = truth(*args), truth(*args, dtype=torch.float32)
        assert got["g"].dtype == torch.float32 and got["beta"].dtype == (beta_dtype or dtype)
        for name, value in got.items():
            limit = 1e-6 if name.startswith("d") else 3e-7
            yardstick = None if name in ("dA_log", "ddt_bias") else plain[name]
            assert_close(f"{name} bias={bias}", value, want[name], limit, yardstick)


def test_bf16_sigmoid_is_the_rounded_fp32_one(isa):
    """What Transformers computes: b.sigmoid() in bf16. Values next to a rounding border may differ by one step."""
    b = torch.arange(-(2**15), 2**15).to(torch.int16).view(torch.bfloat16)
    b = b[torch.isfinite(b)][:, None]
    got = tidegate.ops.gdn_gating_fwd(torch.zeros_like(b), b, torch.zeros(1), layout="TND")[1]
    want = b.double().sigmoid().bfloat16()
    steps = (got.view(torch.int16).int() - want.view(torch.int16).int()).abs()
    normal = want >= 2 * torch.finfo(torch.bfloat16).tiny
    assert steps[normal].max() <= 1 and (steps[normal] != 0).sum() <= 4
    assert (got.double() - want.double())[~normal].abs().max() <= 2 * torch.finfo(torch.bfloat16).tiny


def test_layouts_agree():
    p = make(T=130, HV=7)
    want = run(p)
    shapes = {"BSND": lambda t: t[None], "BNSD": lambda t: t.T[None], "NTD": lambda t: t.T}
    for layout, to in shapes.items():
        got = run(p, to, layout)
        for name in ("g", "beta"):
            assert_bits(f"{layout} {name}", got[name], to(want[name]))
        for name in ("da", "db"):
            assert_bits(f"{layout} {name}", got[name], want[name])
        for name in ("dA_log", "ddt_bias"):
            assert_close(f"{layout} {name}", got[name], want[name], 1e-6)
    split = {k: t.view(2, 65, 7) if t is not None and t.dim() == 2 else t for k, t in p.items()}
    got = run(split, layout="BSND")
    for name in ("g", "beta", "da", "db"):
        assert_bits(f"two rows: {name}", got[name].view(130, 7), want[name])


def test_tokens_do_not_see_each_other(isa):
    p = make(T=300, HV=12, dtype=torch.bfloat16)
    want = run(p)
    for first, last in ((0, 1), (1, 3), (63, 128), (5, 300)):
        part = {k: t[first:last] if k in ("a", "b", "dg", "dbeta") else t for k, t in p.items()}
        got = run(part)
        for name in ("g", "beta", "da", "db"):
            assert_bits(f"{name}[{first}:{last}]", got[name], want[name][first:last])


def test_threads_do_not_change_bits(isa):
    p = make(T=20000, HV=32, dtype=torch.bfloat16, wdtype=torch.float32)
    torch.set_num_threads(1)
    want = run(p)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        assert_all_bits(run(p), want)


def test_strides_do_not_change_bits():
    p = make(T=40, HV=6)
    want = run(p)
    wide = torch.randn(40, 12)
    forms = {
        "transposed": lambda t: t.T.contiguous().T,
        "every second": lambda t: wide.index_copy(1, torch.arange(0, 12, 2), t)[:, ::2],
        "slice": lambda t: torch.cat([t, t], 1)[:, :6],
    }
    for form, to in forms.items():
        got = run(p, to)
        for name, value in want.items():
            assert_bits(f"{form}: {name}", got[name].contiguous(), value)
    a, b = leaves(p["a"], p["b"])
    g, beta = tidegate.ops.gdn_gating_fwd(a, b, p["A_log"], layout="TND")
    (g.sum() + beta.sum()).backward()  # gradients of stride 0
    again = run({**p, "dt_bias": None, "dg": torch.ones(40, 6), "dbeta": torch.ones(40, 6)})
    assert_bits("da", a.grad, again["da"])
    assert_bits("db", b.grad, again["db"])


def test_one_output_alone():
    p = make(T=9, HV=4)
    for used in (0, 1):
        a, b, A_log, dt_bias = leaves(*[p[name] for name in NAMES])
        tidegate.ops.gdn_gating_fwd(a, b, A_log, dt_bias, layout="TND")[used].sum().backward()
        zero, other = (b, a) if used == 0 else (a, b)
        assert not zero.grad.any() and other.grad.all()


def test_gate_formation_cannot_make_nan(isa):
    a = torch.arange(-200.0, 201.0)[:, None].expand(-1, 4).contiguous()
    A_log = torch.tensor([-100.0, 0.0, 89.0, 200.0])
    a, A = leaves(a, A_log)
    g, beta = tidegate.ops.gdn_gating_fwd(a, a.detach(), A, layout="TND")
    rate, soft = A_log.exp(), golden.softplus(a.detach().double())
    want = torch.where(soft < 1e-46, 0.0, -rate * soft.float())
    sure = (soft < 1e-46) | (soft > 2e-38)  # in between lies fp32's denormal range
    assert not g.isnan().any() and (g <= 0).all() and not beta.isnan().any()
    assert torch.isinf(want).any() and torch.equal(torch.isinf(g)[sure], torch.isinf(want)[sure])
    finite = sure & torch.isfinite(want)
    assert_close("g", g.detach()[finite], want[finite], 1e-6)
    g.backward(torch.ones_like(g))
    assert not a.grad.isnan().any() and not A.grad.isnan().any()
    assert torch.isfinite(A.grad).all(), "a term with g = -inf counts as 0 in dA_log"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_stays_with_its_token_and_head(isa, bad):
    for name, touched in (("a", ("g", "da")), ("b", ("beta", "db"))):
        p = make(T=70, HV=20)
        want = run(p)
        p[name][33, 5] = bad
        got = run(p)
        keep = torch.ones(70, 20, dtype=torch.bool)
        keep[33, 5] = False
        for result in ("g", "beta", "da", "db"):
            at = keep if result in touched else torch.ones_like(keep)
            assert_bits(f"{name} -> {result}", got[result][at], want[result][at])
        heads = torch.arange(20) != 5
        for result in ("dA_log", "ddt_bias"):
            assert_bits(f"{name} -> {result}", got[result][heads], want[result][heads])


def test_flushed_denormals_do_not_matter(isa):
    p = make(T=30, HV=9)
    p["a"] -= 95.0  # softplus of these is denormal
    p["A_log"] = torch.linspace(-10.0, 2.0, 9)
    want = run(p)
    assert ((want["g"] != 0) & (want["g"].abs() < 1e-38)).any()
    with flushed_denormals():
        got = run(p)
    assert_all_bits(got, want)


def test_gradcheck():
    p = make(T=3, HV=2)
    inputs = [t.double().requires_grad_() for t in (p["a"] / 4, p["b"], p["A_log"], p["dt_bias"])]

    def call(a, b, A_log, dt_bias):
        return tidegate.ops.gdn_gating_fwd(a, b, A_log, dt_bias, beta_scale=2.0, layout="TND")

    assert torch.autograd.gradcheck(call, inputs, nondet_tol=0.0)


def test_checkpoint_has_the_same_bits():
    p = make()
    call = lambda a, b: tidegate.ops.gdn_gating_fwd(a, b, p["A_log"], layout="TND")  # noqa: E731
    a1, b1, a2, b2 = leaves(p["a"], p["b"], p["a"], p["b"])
    sum(t.square().sum() for t in call(a1, b1)).backward()
    sum(t.square().sum() for t in checkpoint(call, a2, b2, use_reentrant=False)).backward()
    assert_bits("da", a2.grad, a1.grad)
    assert_bits("db", b2.grad, b1.grad)


@pytest.mark.parametrize("shape", [(0, 5, 3), (2, 0, 3), (2, 5, 0)])
def test_empty(shape):
    a, b, A_log = leaves(torch.randn(shape), torch.randn(shape), torch.randn(shape[2]))
    g, beta = tidegate.ops.gdn_gating_fwd(a, b, A_log)
    (g.sum() + beta.sum()).backward()
    assert g.shape == beta.shape == shape and not A_log.grad.any()
