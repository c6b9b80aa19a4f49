"""What is found by structure, what is refused, and faults that the self-test must catch."""

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

import tiny_models as tiny  # noqa: E402
from test_patch_models import T32, stock  # noqa: E402

import tidegate  # noqa: E402
from tidegate.errors import NothingPatchedError, SelfTestError  # noqa: E402
from tidegate.patch import norms, rope, selftest  # noqa: E402


def foreign(module):
    """A module's class under another name and from nowhere: all that remains is structure."""
    kind = type(module)
    module.__class__ = type("Mixer", (nn.Module,), dict(kind.__dict__) | {"__module__": "elsewhere"})
    return module


def faulty(module, forward):
    """A module whose class computes something else; the family still looks known."""
    module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})
    return module


def test_a_renamed_family_is_found():
    model = tiny.build("qwen3_5", layers=2)
    foreign(tiny.linear_layers(model)[0])
    row = tidegate.patch(model).report().only(op="gdn_layer")[0]
    assert row.status == "installed" and row.mechanism[0] in "RJ" and row.reason == "unknown family"
    ids = tiny.tokens()
    assert tiny.relative(tiny.logits(model, ids), tiny.logits(stock("qwen3_5", layers=2), ids)) < T32
    tidegate.unpatch(model)
    with pytest.raises(NothingPatchedError, match="discovery is off"):
        tidegate.patch(model, options={"discovery": False})
    row = tidegate.patch(model, check="off", strict=False).report().only(op="gdn_layer")[0]
    assert row.status == "refused" and "must be tested" in row.reason


def test_other_gates_are_refused():
    model = tiny.build("qwen3_5", layers=2)
    layer = tiny.linear_layers(model)[0]
    layer.dt_bias = nn.Parameter(torch.zeros(4 * 16))  # a gate for every channel
    with pytest.raises(NothingPatchedError, match="KDA"):
        tidegate.patch(model)


class RMSNorm(nn.Module):
    """The name only: the mean is subtracted."""

    def __init__(self, width=16):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), 1e-6

    def forward(self, x):
        return nn.functional.layer_norm(x, x.shape[-1:], self.weight, None, self.eps)


class Llama(RMSNorm):
    def forward(self, x):
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * n.to(x.dtype)


class Late(RMSNorm):
    def forward(self, x):
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (self.weight.float() * n).to(x.dtype)


class Centred(RMSNorm):
    def forward(self, x):
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return ((1.0 + self.weight.float()) * n).to(x.dtype)


class RoundedOffset(RMSNorm):
    def forward(self, x):
        n = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + self.eps)
        return (1.0 + self.weight) * n.to(x.dtype)


@pytest.mark.parametrize(
    "kind, found",
    [(Llama, "w, rounded before"), (Late, "w, rounded after"), (Centred, "1 + w, rounded after"), (RMSNorm, None)],
)
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_norms_are_told_apart_by_running_them(kind, found, weight):
    """Weights of 0 or 1 must not mislead: the comparison brings its own."""
    module = nn.Sequential(kind(), nn.Linear(16, 16))
    nn.init.constant_(module[0].weight, weight)
    row = tidegate.patch(module, strict=False).report().only(op="rmsnorm")[0]
    assert (row.status, row.reason) == (("installed", found) if found else ("refused", row.reason))
    if found:
        x = torch.randn(3, 16)
        assert tiny.relative(module[0](x), kind.forward(module[0], x)) < T32 or weight == 0.0
    else:
        assert "computes none of" in row.reason


def test_an_offset_rounded_too_early_is_refused():
    row = tidegate.patch(nn.Sequential(RoundedOffset(64)), strict=False).report()[0]
    assert row.status == "refused"


def test_grouped_norms_and_layer_norms_are_left_alone():
    grouped = Late()
    grouped.group_size = 4
    report = tidegate.patch(nn.Sequential(grouped, nn.LayerNorm(16), Late()), strict=False).report()
    assert [(row.path, row.status) for row in report] == [("0", "refused"), ("2", "installed")]


def double_beta(self, hidden_states, cache_params=None, attention_mask=None, **kwargs):
    x = hidden_states
    self.in_proj_b, original = nn.Linear(32, self.num_v_heads, bias=False), self.in_proj_b
    self.in_proj_b.weight.data = 2 * original.weight.data
    try:
        return type(self).__mro__[1].forward(self, x, cache_params, attention_mask=attention_mask, **kwargs)
    finally:
        self.in_proj_b = original


@pytest.mark.parametrize("strict", [True, False])
def test_a_layer_that_writes_twice_as_much_is_caught(strict, monkeypatch):
    """The family is known and the parts fit: only the numbers tell."""
    model = tiny.build("qwen3_5", layers=2)
    faulty(tiny.linear_layers(model)[0], double_beta)
    monkeypatch.setattr(selftest, "stock_forward", lambda module: type(module).forward)
    if "fla" in tidegate.report():
        pytest.skip("the original cannot run beside FLA without a GPU")
    if strict:
        with pytest.raises(SelfTestError, match="layers.0.linear_attn: self-test.*differs by"):
            tidegate.patch(model)
    else:
        row = tidegate.patch(model, strict=False).report().only(op="gdn_layer")[0]
        assert row.status == "refused" and "differs by" in row.reason


def test_a_gate_of_another_kind_is_caught():
    model = tiny.build("qwen3_5", layers=2)
    norm = tiny.linear_layers(model)[0].norm
    norm.__class__ = type("Gated", (type(norm),), {"forward": lambda self, x, gate: sigmoid_gated(self, x, gate)})
    with pytest.raises(SelfTestError, match="differs by"):
        tidegate.patch(model, ops="gated_rmsnorm")
    assert not tidegate.report(model)


def sigmoid_gated(self, x, gate):
    return tidegate.rms_norm_gated(x, gate, self.weight, self.variance_epsilon, "sigmoid")


def test_a_rotation_of_another_width_is_caught():
    model = tiny.build("qwen3_5", layers=2)
    attention = next(m for m in model.modules() if hasattr(m, "q_norm"))
    original = rope.that_names(type(attention).forward, (rope.NAME,))

    def narrow(q, k, cos, sin, unsqueeze_dim=1):
        width = cos.shape[-1] // 2
        rotated = rope.innermost(original.__globals__[rope.NAME])(q, k, cos[..., :width], sin[..., :width])
        return rotated

    attention.__class__ = type("Narrow", (type(attention),), {"forward": None})
    type(attention).forward = rope.with_globals(original, {rope.NAME: narrow})
    with pytest.raises(SelfTestError, match="channels"):
        tidegate.patch(model, ops="rope")


@pytest.mark.parametrize("width", [64, 256])
@pytest.mark.parametrize("form", ["default", "positional", "tokens first"])
def test_partial_rotation(width, form):
    """64 of 256 channels and all of them, against the model's own function, with gradients."""
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    theirs = rope.innermost(module.apply_rotary_pos_emb)
    q, k = torch.randn(2, 4, 9, 256, requires_grad=True), torch.randn(2, 2, 9, 256, requires_grad=True)
    angle = torch.randn(2, 9, width // 2).repeat(1, 1, 2)
    cos, sin = angle.cos(), angle.sin()
    weights = torch.randn(2, 4, 9, 256), torch.randn(2, 2, 9, 256)
    results = []
    for function in (rope.apply_rotary_pos_emb, theirs):
        if form == "tokens first":
            out = function(q.transpose(1, 2), k.transpose(1, 2), cos, sin, unsqueeze_dim=2)
            out = tuple(t.transpose(1, 2) for t in out)
        else:
            out = function(q, k, cos, sin, *([1] if form == "positional" else []))
        loss = sum((t * w).sum() for t, w in zip(out, weights, strict=True))
        results.append((*out, *torch.autograd.grad(loss, (q, k))))
    assert all(tiny.relative(got, wanted) < T32 for got, wanted in zip(*results, strict=True))


def test_a_million_values_of_the_gated_norm():
    """Default: Transformers' roundings, at most 1 ulp away. FP32: at most 0.51 ulp from the truth."""
    module = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    norm = module.Qwen3NextRMSNormGated(128).bfloat16()
    norm.weight.data.normal_()
    x, gate = torch.randn(8192, 128).bfloat16(), torch.randn(8192, 128).bfloat16()
    with torch.no_grad():
        theirs = norm(x, gate)
        ours = norms._gated_forward("variance_epsilon", "hf")(norm, x, gate)
        wide = norms._gated_forward("variance_epsilon", "fp32")(norm, x, gate)
    xd, wd = x.double(), norm.weight.double()
    truth = wd * xd * torch.rsqrt(xd.square().mean(-1, keepdim=True) + 1e-6) * nn.functional.silu(gate.double())
    bits = lambda t: t.view(torch.int16).int()  # noqa: E731
    same_sign = torch.signbit(ours) == torch.signbit(theirs)
    assert ((bits(ours) - bits(theirs)).abs() <= 1)[same_sign].all() and (ours[~same_sign].abs() < 1e-30).all()
    ulp = torch.exp2(torch.floor(torch.log2(truth.abs().clamp(min=2.0**-120))) - 7)
    assert ((wide.double() - truth).abs() / ulp).max() <= 0.51
