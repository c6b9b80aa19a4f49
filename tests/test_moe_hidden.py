"""gate and up that a forward of the experts keeps for its backward: the same bits, and only where something trains."""

import pytest
import torch
from compare import assert_bits, leaves
from torch.utils.checkpoint import checkpoint

import tidegate

T, H, WIDTH, E, SLOTS = 17, 64, 32, 8, 2
SHAPE = (T * SLOTS, 2, WIDTH)
SCALES = 1.5, -0.5


def make(dtype, shared=True, lora=True):
    """ids, and the thirteen tensors of the operator without them."""
    ids = torch.randint(-1, E, (T, SLOTS))
    scaled = lambda *shape: (torch.randn(*shape) / 8).to(dtype)  # noqa: E731
    floats = [torch.randn(T, H).to(dtype), torch.rand(T, SLOTS), scaled(E, 2 * WIDTH, H), scaled(E, H, WIDTH)]
    floats += [scaled(24, H), scaled(24, H), scaled(H, 24), scaled(H)] if shared else [None] * 4
    factors = ((E, 5, H), (E, 2 * WIDTH, 5), (E, 3, WIDTH), (E, H, 3))
    return ids, floats + ([scaled(*s) for s in factors] if lora else [None] * 4)


def experts(ids, floats):
    x, w, *weights = floats
    low_rank = [
        None if weights[i] is None else (weights[i], weights[i + 1], s) for i, s in zip((6, 8), SCALES, strict=True)
    ]
    return tidegate.moe_experts(x, ids, w, *weights[:6], gate_up_lora=low_rank[0], down_lora=low_rank[1])


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """What the operators of the experts were told: save_hidden of forwards, the shape of hidden of backwards."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if function is torch.ops.tidegate.moe_experts_fwd.default:
            self.seen.append(kwargs.get("save_hidden", False))
        if function is torch.ops.tidegate.moe_experts_bwd.default:
            hidden = kwargs.get("hidden", args[14] if len(args) > 14 else None)
            self.seen.append(None if hidden is None else tuple(hidden.shape))
        return function(*args, **kwargs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("lora", [False, True])
def test_gradients_have_the_bits_of_a_backward_without_it(dtype, shared, lora):
    ids, floats = make(dtype, shared, lora)
    dout = torch.randn(T, H).to(dtype)
    trained = leaves(*floats)
    with Watch() as watch:
        experts(ids, trained).backward(dout)
    assert watch.seen == [True, SHAPE]
    scales = dict(gate_up_lora_scale=SCALES[0], down_lora_scale=SCALES[1])
    want = tidegate.ops.moe_experts_bwd(dout, floats[0], ids, *floats[1:], **(scales if lora else {}))
    for i, (leaf, gradient) in enumerate(zip(trained, want, strict=True)):
        if leaf is not None:
            assert_bits(f"gradient {i}", leaf.grad, gradient)


def test_nothing_is_kept_where_nothing_trains():
    ids, floats = make(torch.bfloat16)
    with Watch() as watch:
        experts(ids, floats)
        with torch.no_grad():
            experts(ids, leaves(*floats))
        router = (
            floats[:7] + leaves(floats[7]) + floats[8:]
        )  # of the shared expert: the others' gate and up stay unused
        experts(ids, router).sum().backward()
    assert watch.seen == [False, False, False, None]


def test_fp64_keeps_nothing():
    ids, floats = make(torch.float64)
    floats = [f.double() for f in floats]
    out, hidden = tidegate.ops.moe_experts_fwd(floats[0], ids, *floats[1:], save_hidden=True)
    assert hidden.dtype == torch.float32 and hidden.shape == (0,)
    with pytest.raises(ValueError, match="moe_experts_bwd: hidden: expected none with float64, got a tensor"):
        tidegate.ops.moe_experts_bwd(out, floats[0], ids, *floats[1:], torch.zeros(SHAPE))
    with pytest.raises(ValueError, match="moe_experts_fwd: hidden: expected none with float64, got a tensor"):
        tidegate.ops.moe_experts_fwd.out(floats[0], ids, *floats[1:], out=out, hidden=torch.zeros(SHAPE))


def kept_shapes(call):
    """Shapes of the tensors that a graph holds after a forward."""
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        out = call()
    return out, shapes


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_keeps_nothing(reentrant):
    ids, floats = make(torch.bfloat16, lora=False)
    plain, again = leaves(*floats), leaves(*floats)
    out, shapes = kept_shapes(lambda: experts(ids, plain))
    assert SHAPE in shapes
    out.sum().backward()
    out, shapes = kept_shapes(lambda: checkpoint(lambda *f: experts(ids, f), *again, use_reentrant=reentrant))
    assert SHAPE not in shapes
    out.sum().backward()
    for x, y in zip(plain, again, strict=True):
        if x is not None:
            assert_bits("gradient", x.grad, y.grad)


def test_rows_are_the_places_of_the_routing():
    ids, floats = make(torch.float32, shared=False, lora=False)
    ids[:3] = -1
    counts, src, _ = tidegate.ops.moe_init_routing(ids, num_experts=E)
    x, w, gate_up, down = floats[:4]
    _, hidden = tidegate.ops.moe_experts_fwd(x, ids, w, gate_up, down, save_hidden=True)
    routed = int(counts.sum())
    for row, pair in zip(hidden[:routed], src[:routed].tolist(), strict=True):
        want = gate_up[ids.view(-1)[pair]] @ x[pair // SLOTS]
        torch.testing.assert_close(row.flatten(), want, rtol=0, atol=1e-5)
    assert not hidden[routed:].any()


def test_compiled_with_dynamic_tokens():
    ids, floats = make(torch.bfloat16, lora=False)
    weights = leaves(*floats[2:])
    layer = torch.compile(
        lambda x, i, w: experts(i, [x, w, *weights]), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for tokens in (17, 9, 5):
        results = []
        for call in (layer, lambda x, i, w: experts(i, [x, w, *weights])):
            x, w = leaves(floats[0][:tokens], floats[1][:tokens])
            results.append(torch.autograd.grad(call(x, ids[:tokens], w).sum(), [x, w, weights[0], weights[1]]))
        for got, want in zip(*results, strict=True):
            assert_bits("gradient", got, want)
