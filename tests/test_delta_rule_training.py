"""Training through chunk_gated_delta_rule: gradients against fp64 autograd of the token recurrence, their bits, and the
ways of torch to train: checkpointing, compile, autocast, gradients of other strides."""

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F
from compare import assert_bits, assert_close
from delta_rule_case import INPUTS, PACKED, cut, make, truth
from torch.utils.checkpoint import checkpoint

import tidegate

BOUND = 3e-6  # of every gradient, before it is rounded
RAW = ("q", "k", "v", "a", "b", "h0", "A_log", "dt_bias")


def incoming(p, seed=1):
    random = torch.Generator().manual_seed(seed)
    do = torch.randn(p["v"].shape, generator=random).to(p["v"].dtype)
    return do, None if p["h0"] is None else 0.3 * torch.randn(p["h0"].shape, generator=random)


def wanted(p):
    return [name for name in (*INPUTS, "h0") if p[name] is not None]


def true_gradients(p):
    """fp64 autograd of the recurrence."""
    wide = {name: p[name].double().requires_grad_() for name in wanted(p)}
    do, dht = incoming(p)
    o, ht = truth({**p, **wide})
    loss = (o * do.double()).sum() + (0 if dht is None else (ht * dht.double()).sum())
    return dict(zip(wide, torch.autograd.grad(loss, list(wide.values())), strict=True))


def gradients(p, through=lambda call: call(), **options):
    """By the public function, token-major and packed; head-major again."""
    leaves = {name: p[name].detach().clone().requires_grad_() for name in wanted(p)}
    rows = [leaves[name].transpose(0, 1)[None] for name in INPUTS]
    do, dht = incoming(p)

    def call():
        return tidegate.chunk_gated_delta_rule(
            *rows,
            initial_state=leaves.get("h0"),
            output_final_state=True,
            cu_seqlens=torch.tensor(p["cu"]),
            **options,
        )

    o, ht = through(call)
    pairs = [(o, do.transpose(0, 1)[None])] + ([] if dht is None else [(ht, dht)])
    torch.autograd.backward(*zip(*pairs, strict=True))
    return {name: leaf.grad for name, leaf in leaves.items()}


@pytest.mark.parametrize("G", [1, 2, 3, 4])
def test_packed_against_autograd(isa, dtype, G):
    p = make(PACKED[3:], HK=1, G=G, K=24, V=40, dtype=dtype, slowest=0.001)
    want = true_gradients(p)
    for name, got in gradients(p).items():
        assert_close(name, got, want[name], BOUND)


def test_every_tail_against_autograd(isa):
    p = make(range(131), K=16, V=16, initial=True)
    want = true_gradients(p)
    for name, got in gradients(p).items():
        assert_close(name, got, want[name], BOUND)


def test_bf16_mode(isa):
    """At most 2x the error of the same computation in plain bf16 torch, and never above the documented bounds."""
    p = make([300, 65, 1], K=64, V=64, dtype=torch.bfloat16, initial=False)
    want = true_gradients(p)
    limits = {"q": 8e-3, "k": 8e-3, "v": 8e-3, "g": 2e-2, "beta": 2e-2}
    for name, got in gradients(p, precision="bf16").items():
        assert_close(name, got, want[name], limits[name] - 2e-3)


def raw_problem(dtype=torch.float64, T=7):
    """Raw projections of two sequences, two value heads on one key head; the parameters of the gates."""
    random = torch.Generator().manual_seed(3)
    sizes = {"q": (1, T, 1, 4), "k": (1, T, 1, 4), "v": (1, T, 2, 3), "a": (1, T, 2), "b": (1, T, 2)}
    sizes |= {"h0": (2, 2, 4, 3), "A_log": (2,), "dt_bias": (2,)}
    return [torch.randn(size, generator=random, dtype=torch.float64).to(dtype) for size in sizes.values()]


def raw_rule(q, k, v, a, b, h0, A_log, dt_bias, T=7, **options):
    return tidegate.chunk_gated_delta_rule(
        q,
        k,
        v,
        a,
        b,
        initial_state=h0,
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=True,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
        cu_seqlens=torch.tensor([0, 3, T]),
        **options,
    )


def test_gradcheck():
    """The fp64 path, numerically: every input, through the norm, the gates and beta formed inside."""
    inputs = [t.requires_grad_() for t in raw_problem()]
    assert torch.autograd.gradcheck(raw_rule, inputs, eps=1e-6, atol=1e-7, rtol=1e-6)


def test_raw_gates_against_the_fp64_path(isa, dtype):
    inputs = raw_problem(dtype)
    inputs[3:] = [t.float() for t in raw_problem()[3:]]
    wide = [t.double().requires_grad_() for t in inputs]
    leaves = [t.clone().requires_grad_() for t in inputs]
    for o, ht in (raw_rule(*wide), raw_rule(*leaves)):
        torch.manual_seed(0)
        (o.double() * torch.randn_like(o.double()).to(dtype)).sum().backward(retain_graph=True)
        (ht.double() * torch.randn_like(ht.double()).float()).sum().backward()
    for name, leaf, truth_leaf in zip(RAW, leaves, wide, strict=True):
        assert leaf.grad.dtype == leaf.dtype
        limit = BOUND if dtype == torch.float32 else 4e-3  # two backward calls add up in the leaf's type
        assert_close(name, leaf.grad, truth_leaf.grad, limit)


def test_packed_has_the_bits_of_separate_calls(isa):
    p = make([65, 0, 1, 300, 64, 7], HK=2, K=20, V=36, dtype=torch.bfloat16)
    all_at_once = gradients(p)
    do, dht = incoming(p)
    for n in range(len(p["cu"]) - 1):
        one = cut(p, n)
        tokens = slice(p["cu"][n], p["cu"][n + 1])
        leaves = {name: one[name].clone().requires_grad_() for name in wanted(one)}
        rows = [leaves[name].transpose(0, 1)[None] for name in INPUTS]
        o, ht = tidegate.chunk_gated_delta_rule(*rows, initial_state=leaves["h0"], output_final_state=True)
        torch.autograd.backward([o, ht], [do[:, tokens].transpose(0, 1)[None], dht[n : n + 1]])
        for name, leaf in leaves.items():
            want = all_at_once[name][n : n + 1] if name == "h0" else all_at_once[name][:, tokens]
            assert_bits(f"{name} of {n}", leaf.grad, want)


def test_threads_do_not_change_bits():
    p = make([150, 300, 20, 1], HK=3, K=32, V=48)
    torch.set_num_threads(1)
    want = gradients(p)
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        for name, got in gradients(p).items():
            assert_bits(name, got, want[name])


def test_checkpointing_has_the_same_bits():
    p = make([300, 40], K=32, V=32, dtype=torch.bfloat16)
    want = gradients(p)
    for name, got in gradients(p, through=lambda call: checkpoint(call, use_reentrant=False)).items():
        assert_bits(name, got, want[name])


@pytest.mark.parametrize("tokens", [40, 600])
def test_compiled_training_has_the_same_bits(tokens):
    inputs = [t.requires_grad_() for t in raw_problem(torch.float32, tokens)]

    def loss(*tensors):
        o, ht = raw_rule(*tensors, T=tokens)
        return o.square().sum() + ht.square().sum()

    want = torch.autograd.grad(loss(*inputs), inputs)
    torch._dynamo.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    for name, got, expected in zip(RAW, torch.autograd.grad(compiled(*inputs), inputs), want, strict=True):
        assert_bits(name, got, expected)


def test_compiled_once_for_all_lengths():
    """As far as torch allows: no state to save, one, and more are cases of their own."""
    count = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()

    @torch.compile(fullgraph=True, dynamic=True, backend=count)
    def loss(q, k, v, g, beta):
        return tidegate.chunk_gated_delta_rule(q, k, v, g, beta)[0].square().sum()

    for tokens in (700, 1500, 900, 300, 40):
        p = make([tokens], K=16, V=16, initial=False)
        rows = [p[name].transpose(0, 1)[None].requires_grad_() for name in INPUTS]
        got = torch.autograd.grad(loss(*rows), rows)
        o, _ = tidegate.chunk_gated_delta_rule(*rows)
        for x, y in zip(got, torch.autograd.grad(o.square().sum(), rows), strict=True):
            assert_bits("gradient", x, y)
        assert tokens < 512 or count.frame_count == 1


class Layer(torch.nn.Module):
    """Projections into the rule, as a model has them."""

    def __init__(self, width=16, heads=2, size=8):
        super().__init__()
        self.size = size
        self.qkv = torch.nn.Linear(width, 3 * heads * size, bias=False)
        self.gates = torch.nn.Linear(width, 2 * heads, bias=False)
        self.A_log = torch.nn.Parameter(torch.zeros(heads))
        self.out = torch.nn.Linear(heads * size, width, bias=False)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (-1, self.size)).chunk(3, dim=-2)
        a, b = self.gates(x).chunk(2, dim=-1)
        o, _ = tidegate.chunk_gated_delta_rule(
            q,
            k,
            v,
            a,
            b,
            use_qk_l2norm_in_kernel=True,
            use_beta_sigmoid_in_kernel=True,
            use_gate_in_kernel=True,
            A_log=self.A_log,
        )
        return self.out(o.flatten(-2))


def test_autocast():
    layer, x = Layer(), torch.randn(2, 40, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    narrow = {name: p.grad.clone() for name, p in layer.named_parameters()}
    layer.zero_grad()
    layer(x).square().sum().backward()
    for name, p in layer.named_parameters():
        assert narrow[name].dtype == torch.float32
        assert F.cosine_similarity(narrow[name].flatten(), p.grad.flatten(), dim=0) > 0.999, name


def test_autocast_with_types_that_differ():
    p = make([20], K=16, V=16, initial=False)
    q, k, v, g, beta = (p[name].transpose(0, 1)[None] for name in INPUTS)
    with pytest.raises(TypeError, match="v: expected dtype float32"):
        tidegate.chunk_gated_delta_rule(q, k, v.bfloat16(), g, beta)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        o, _ = tidegate.chunk_gated_delta_rule(q, k, v.bfloat16(), g, beta)
    assert o.dtype == torch.bfloat16


@pytest.mark.parametrize("form", ["expanded", "transposed", "sliced"])
def test_gradients_of_other_strides(form):
    p = make([70], K=16, V=16, initial=False)
    rows = [p[name].transpose(0, 1)[None].requires_grad_() for name in INPUTS]
    o, _ = tidegate.chunk_gated_delta_rule(*rows)
    do = {
        "expanded": torch.ones(()).expand(o.shape),
        "transposed": torch.randn(*o.shape[:2], o.shape[3], o.shape[2]).transpose(2, 3),
        "sliced": torch.randn(*o.shape[:3], 2 * o.shape[3])[..., ::2],
    }[form]
    got = torch.autograd.grad(o, rows, do, retain_graph=True)
    for x, y in zip(got, torch.autograd.grad(o, rows, do.contiguous()), strict=True):
        assert_bits(form, x, y)


def test_only_wanted_gradients_are_computed():
    p = make([70], K=16, V=16, initial=False)
    rows = [p[name].transpose(0, 1)[None] for name in INPUTS]
    o, _ = tidegate.chunk_gated_delta_rule(*rows)
    assert not o.requires_grad
    asked = []

    class Spy(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "chunk_gated_delta_rule" in str(function):
                asked.append((kwargs or {}).get("needs", (kwargs or {}).get("save_states")))
            return function(*args, **(kwargs or {}))

    with Spy():
        tidegate.chunk_gated_delta_rule(*rows)
        v = rows[2].clone().requires_grad_()
        tidegate.chunk_gated_delta_rule(rows[0], rows[1], v, *rows[3:])[0].sum().backward()
    assert asked == [None, True, 0b100]  # None: as the default, no states


def test_a_tensor_that_changed_is_noticed():
    p = make([20], K=16, V=16, initial=False)
    rows = [p[name].transpose(0, 1)[None].clone().requires_grad_() for name in INPUTS]
    q = rows[0] * 1
    o, _ = tidegate.chunk_gated_delta_rule(q, *rows[1:])
    with torch.no_grad():
        q.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        o.sum().backward()


@pytest.mark.parametrize("safe", [False, True])
def test_zero_rows(safe):
    """Padding rows: by default what came in times 1 / sqrt(eps) = 1000, on request exactly 0."""
    q, k, v, a, b, h0, A_log, dt_bias = raw_problem(torch.float32)
    q[:, 4:6], k[:, 4:6] = 0, 0
    q.requires_grad_(), k.requires_grad_()
    o, _ = raw_rule(q, k, v, a, b, h0, A_log, dt_bias, zero_row_safe=safe)
    o.sum().backward()
    for x in (q, k):
        assert x.grad.isfinite().all() and x.grad[:, :4].any()
        assert x.grad[:, 4:6].any() != safe


def test_the_final_state_alone():
    p = make([70], K=16, V=16)
    rows = [p[name].transpose(0, 1)[None].requires_grad_() for name in INPUTS]
    _, ht = tidegate.chunk_gated_delta_rule(*rows, initial_state=p["h0"], output_final_state=True)
    dq, dk, dv = torch.autograd.grad(ht.sum(), rows[:3], allow_unused=True)
    assert not dq.any() and dk.any() and dv.any()


def test_states_for_a_backward_are_not_snapshots():
    p = make([300], K=16, V=16, initial=False)
    rows = [p[name].transpose(0, 1)[None] for name in INPUTS]
    with pytest.raises(ValueError, match="save_states: expected False with snapshot_at, got True"):
        tidegate.ops.chunk_gated_delta_rule_fwd(*rows, snapshot_at=torch.tensor([[0, 5]]), save_states=True)
    o, _, states = tidegate.ops.chunk_gated_delta_rule_fwd(*rows, save_states=True)
    with pytest.raises(ValueError, match="states: expected at least 1 states, got 0"):
        tidegate.ops.chunk_gated_delta_rule_bwd(o, None, *rows, states=states[:0])
