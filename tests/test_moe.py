"""Router, grouped products and experts through torch: values and gradients against fp64, compiling, modules."""

import golden_moe
import pytest
import torch
from compare import assert_bits, assert_close, error, leaves

import tidegate
from tidegate import moe


def gradients(call, tensors, dy):
    tensors = leaves(*tensors)
    y = call(*tensors)
    y.backward(dy.to(y.dtype))
    return [y.detach(), *[t.grad for t in tensors]]


def make_experts(T=17, H=64, width=32, E=8, k=2, J=0, dtype=torch.float32, wdtype=None):
    wdtype = wdtype or dtype
    ids = torch.randint(-1, E, (T, k))
    floats = [torch.randn(T, H).to(dtype), torch.rand(T, k), torch.randn(E, 2 * width, H).to(wdtype) / 8]
    floats.append(torch.randn(E, H, width).to(wdtype) / 6)
    if J:
        floats += [torch.randn(*s).to(wdtype) / 8 for s in ((J, H), (J, H), (H, J), (H,))]
    return ids, floats


def as_stored(t):
    return t


def as_view(t):
    return t.transpose(1, 2)


def as_turned(t):
    return t.transpose(1, 2).contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("J", [0, 24])
@pytest.mark.parametrize("form", [as_stored, as_view, as_turned])
def test_experts_and_their_gradients(dtype, J, form):
    """2I == H: a layout guessed from sizes would be wrong."""
    ids, floats = make_experts(J=J, dtype=dtype)
    dy = torch.randn(17, 64).to(dtype)

    def call(x, w, gate_up, down, *shared):
        axes = "nk" if form is as_stored else "kn"
        return tidegate.moe_experts(x, ids, w, form(gate_up), form(down), *shared, weight_axes=axes)

    got = gradients(call, floats, dy)
    truth = gradients(lambda x, w, *p: golden_moe.experts(x, ids, w, *p), [f.double() for f in floats], dy)
    plain = gradients(lambda x, w, *p: golden_moe.experts(x, ids, w, *p), [f.float() for f in floats], dy)
    names = "out dx dweights dgate_up ddown dshared_gate dshared_up dshared_down dshared_router".split()
    for name, x, want, loops in zip(names, got, truth, plain, strict=False):
        assert x.dtype == (torch.float32 if name == "dweights" else dtype)
        if dtype == torch.float32:
            # Plain torch is no better than plain torch: the largest error is a promise of the native kernels.
            assert_close(name, x, want, 1e-6, None if tidegate.isa() == "fallback" else loops)
        else:
            assert error(x, want) < 3e-3, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [as_stored, as_turned])
@pytest.mark.parametrize("which", ["both", "gate_up", "down"])
def test_lora_is_the_merged_weight(dtype, form, which):
    ids, floats = make_experts(dtype=dtype)
    dy, scales = torch.randn(17, 64).to(dtype), (1.5, -0.5)
    shapes = ((8, 5, 64), (8, 64, 5), (8, 3, 32), (8, 64, 3))
    factors = [torch.randn(*s).to(dtype) / 6 for s in shapes]
    factors = factors if which == "both" else factors[:2] if which == "gate_up" else factors[2:]

    def pairs(a, b=None, c=None, d=None):
        first = (a, b, scales[0]) if which != "down" else None
        second = (c, d, scales[1]) if which == "both" else (a, b, scales[1]) if which == "down" else None
        return first, second

    def call(x, w, gate_up, down, *lora):
        axes, (first, second) = "nk" if form is as_stored else "kn", pairs(*lora)
        options = dict(weight_axes=axes, gate_up_lora=first, down_lora=second)
        return tidegate.moe_experts(x, ids, w, form(gate_up), form(down), **options)

    def merged(x, w, gate_up, down, *lora):
        added = [
            w if p is None else w + p[2] * (p[1] @ p[0]) for w, p in zip((gate_up, down), pairs(*lora), strict=True)
        ]
        return golden_moe.experts(x, ids, w, *added)

    got = gradients(call, [*floats, *factors], dy)
    truth = gradients(merged, [f.double() for f in (*floats, *factors)], dy)
    for i, (x, want) in enumerate(zip(got, truth, strict=True)):
        assert error(x, want) < (2e-6 if dtype == torch.float32 else 3.5e-3), i


def test_only_needed_gradients_are_computed():
    ids, floats = make_experts()
    seen = []
    real = torch.ops.tidegate.moe_experts_bwd

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is real.default:
                seen.append(kwargs["needs"])
            return func(*args, **(kwargs or {}))

    x = floats[0].clone().requires_grad_()
    with Watch():
        tidegate.moe_experts(x, ids, *floats[1:]).sum().backward()
    assert seen == [1]


@pytest.mark.parametrize("renormalise", [True, False])
def test_route_and_its_gradient(renormalise):
    logits, dw = torch.randn(50, 64), torch.randn(50, 8)
    z, truth_z = leaves(logits, logits.double())
    ids, w = tidegate.moe_route(z, 8, renormalise)
    truth_ids, truth_w, _ = golden_moe.route(truth_z, 8, renormalise)
    assert torch.equal(ids.long(), truth_ids)
    assert_close("weights", w.detach(), truth_w.detach(), 3e-7)
    w.backward(dw)
    truth_w.backward(dw.double())
    assert_close("dlogits", z.grad, truth_z.grad, 1e-6)
    again, same, probs = tidegate.moe_route(logits, 8, renormalise, replay_ids=ids, return_probs=True)
    assert torch.equal(again, ids)
    assert_bits("weights", same, w.detach())
    assert_close("probs", probs, truth_z.detach().softmax(-1), 3e-7)


def test_ties_take_the_lowest_id_in_any_batch():
    logits = (torch.randn(512, 512) * 4).round().div(4).bfloat16()
    ids, _ = tidegate.moe_route(logits, 10)
    assert torch.equal(ids.long(), golden_moe.route(logits.double(), 10)[0])
    for t in (0, 100, 511):
        assert torch.equal(tidegate.moe_route(logits[t : t + 1], 10)[0], ids[t : t + 1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_grouped_matmul_and_its_gradients(dtype):
    counts = torch.tensor([3, 0, 20, 1])
    floats = [torch.randn(26, 40).to(dtype), torch.randn(4, 30, 40).to(dtype) / 6, torch.randn(4, 30).to(dtype)]
    dy = torch.randn(26, 30).to(dtype)
    truth = gradients(lambda x, w, b: golden_moe.grouped_matmul(x, w, counts, b), [f.double() for f in floats], dy)
    calls = {
        "nk": lambda x, w, b: tidegate.grouped_matmul(x, w, counts, b),
        "view": lambda x, w, b: tidegate.grouped_matmul(
            x, w.mT, counts.cumsum(0), b, weight_axes="kn", group_list="cumsum"
        ),
        "kn": lambda x, w, b: tidegate.grouped_matmul(x, w.mT.contiguous(), counts, b, weight_axes="kn"),
    }
    for form, call in calls.items():
        for name, x, want in zip(("y", "dx", "dweight", "dbias"), gradients(call, floats, dy), truth, strict=True):
            assert_close(f"{form} {name}", x, want, 1e-6)


def test_gradcheck():
    ids, floats = make_experts(4, 5, 3, 3, 2, 2, torch.float64)
    floats[1] = floats[1].double()
    assert torch.autograd.gradcheck(lambda x, w, *p: tidegate.moe_experts(x, ids, w, *p), leaves(*floats))
    factors = [torch.randn(*s).double() for s in ((3, 2, 5), (3, 6, 2), (3, 1, 3), (3, 5, 1))]

    def low_rank(x, gate_up, down, a, b, c, d):
        lora = dict(gate_up_lora=(a, b, 0.5), down_lora=(c, d, 2.0))
        return tidegate.moe_experts(x, ids, floats[1], gate_up, down, **lora)

    assert torch.autograd.gradcheck(low_rank, leaves(floats[0], *floats[2:4], *factors))
    counts = torch.tensor([2, 0, 1])
    x, w, b = leaves(torch.randn(4, 5).double(), torch.randn(3, 2, 5).double(), torch.randn(3, 2).double())
    assert torch.autograd.gradcheck(lambda *t: tidegate.grouped_matmul(t[0], t[1], counts, t[2]), (x, w, b))
    (z,) = leaves(torch.randn(3, 6).double())
    for renormalise in (True, False):
        assert torch.autograd.gradcheck(lambda z: tidegate.moe_route(z, 2, renormalise)[1], (z,))  # noqa: B023


def test_low_rank_factors_without_a_scale():
    ids, floats = make_experts(4, 5, 3, 3, 2, 2, torch.float32)
    a, b = torch.randn(3, 2, 5), torch.randn(3, 6, 2)
    for lora, got in (((a, b), "2 items"), (a, "Tensor")):
        with pytest.raises(ValueError, match=f"gate_up_lora: expected .a, b, scale., got {got}"):
            tidegate.moe_experts(floats[0], ids, *floats[1:4], gate_up_lora=lora)


def test_permute_and_back():
    ids = torch.randint(-1, 5, (30, 3))
    counts, src, pos = tidegate.ops.moe_init_routing(ids, num_experts=5)
    assert torch.equal(counts, torch.stack([(ids == e).sum() for e in range(5)]))
    x, w = leaves(torch.randn(30, 8), torch.rand(30, 3))
    y = tidegate.ops.moe_permute(x, src, pos)
    routed = int(counts.sum())
    assert torch.equal(y[:routed], x[src[:routed] // 3]) and not y[routed:].any()
    out = tidegate.ops.moe_unpermute_fwd(y, pos, w)
    kept = (ids >= 0).float()
    torch.testing.assert_close(out, x * (w * kept).sum(1, keepdim=True))
    out.sum().backward()
    torch.testing.assert_close(x.grad, (w * kept).sum(1, keepdim=True).expand(30, 8).detach())
    torch.testing.assert_close(w.grad, (x.sum(1, keepdim=True) * kept).detach())


def test_compiled_with_dynamic_tokens():
    ids, floats = make_experts(T=9)
    layer = torch.compile(lambda x, i, w: tidegate.moe_experts(x, i, w, *floats[2:]), fullgraph=True, dynamic=True)
    for T in (9, 5, 1):
        want = tidegate.moe_experts(floats[0][:T], ids[:T], floats[1][:T], *floats[2:])
        assert_bits("out", layer(floats[0][:T], ids[:T], floats[1][:T]), want)


class Peer:
    """Transformers' experts module, tiny."""

    def __new__(cls, implementation, dtype=torch.float32):
        pytest.importorskip("transformers.models.qwen3_5_moe")
        from transformers import Qwen3_5MoeTextConfig
        from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts

        config = Qwen3_5MoeTextConfig(hidden_size=64, moe_intermediate_size=32, num_experts=8, num_experts_per_tok=2)
        config._experts_implementation = implementation
        module = Qwen3_5MoeExperts(config)
        torch.manual_seed(1)
        for p in module.parameters():
            torch.nn.init.normal_(p, std=0.1)
        return module.to(dtype)


def test_transformers_experts_module():
    tuple(Peer("eager").parameters())
    moe.register_experts()
    moe.register_experts()
    x, ids, w = torch.randn(20, 64), torch.stack([torch.randperm(8)[:2] for _ in range(20)]), torch.rand(20, 2)
    results = {}
    for implementation in ("eager", moe.NAME):
        module = Peer(implementation)
        inputs = leaves(x, w)
        module(inputs[0], ids, inputs[1]).square().sum().backward()
        grads = [t.grad for t in (*inputs, *module.parameters())]
        results[implementation] = [module(x, ids, w).detach(), *grads]
    for name, got, want in zip("out dx dw dgate_up ddown".split(), results[moe.NAME], results["eager"], strict=True):
        assert error(got, want) < 1e-6, name
    module = Peer(moe.NAME)
    module._is_expert_parallel = True
    foreign = ids.clone()
    foreign[0] = 8
    assert not module(x, foreign, w)[0].any()


@pytest.mark.parametrize(
    "flag, value, text",
    [
        ("has_gate", False, "has_gate: expected True, got False"),
        ("has_bias", True, "has_bias: expected False, got True"),
        ("has_post_expert_norm", True, "has_post_expert_norm: expected False, got True"),
        ("is_concatenated", False, "is_concatenated: expected True, got False"),
        ("act_fn", torch.nn.GELU(), "act_fn: expected SiLU, got GELU"),
    ],
)
def test_modules_that_are_not_supported_are_refused(flag, value, text):
    module = Peer("eager")
    setattr(module, flag, value)
    assert moe.why_not(module) == text
    with pytest.raises(ValueError, match=text):
        moe.experts_forward(module, torch.randn(2, 64), torch.zeros(2, 2, dtype=torch.int64), torch.rand(2, 2))


@pytest.mark.parametrize("trains", [False, True])
def test_a_list_in_place_of_a_tensor(trains):
    gate_up, down = torch.randn(2, 8, 8, requires_grad=trains), torch.randn(2, 8, 4)
    arguments = [torch.randn(3, 8), torch.zeros(3, 2, dtype=torch.int64), torch.rand(3, 2), gate_up, down]
    for i, name in enumerate(("x", "ids", "weights", "gate_up", "down")):
        wrong = [a.tolist() if j == i else a for j, a in enumerate(arguments)]
        with pytest.raises(TypeError, match=f"moe_experts.*: {name}: expected type Tensor, got type list"):
            tidegate.moe_experts(*wrong)
