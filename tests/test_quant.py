"""int8 experts: golden integers, the published conventions, a model's experts replaced, inference only."""

import copy
import functools

import pytest
import tiny_models
import torch
from torch import nn

import tidegate


def golden_quantize(x, axis=-1):
    most = x.float().abs().amax(axis, keepdim=True)
    scale = torch.where(most == 0, torch.ones_like(most), most / 127)
    return torch.round(x.float() / scale).clamp(-127, 127).to(torch.int8), scale.squeeze(axis)


def golden_product(x, x_scale, w, w_scale):
    """x [M,K] and w [N,K] int8: exact sums, then weight scale, then row scale."""
    sums = x.long() @ w.long().T
    return sums.float() * w_scale[None] * x_scale[:, None]


def golden_experts(x, ids, weights, gate_up, gate_up_scale, down, down_scale):
    out = torch.zeros(x.shape, dtype=torch.float64)
    xq, x_scale = golden_quantize(x)
    for t in range(x.shape[0]):
        for s in range(ids.shape[1]):
            e = ids[t, s].item()
            if e < 0:
                continue
            gate, up = (
                golden_product(xq[t : t + 1], x_scale[t : t + 1], gate_up[e], gate_up_scale[e]).double().chunk(2, 1)
            )
            q, scale = golden_quantize((nn.functional.silu(gate) * up).float())
            out[t] += weights[t, s].double() * golden_product(q, scale, down[e], down_scale[e])[0].double()
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("axis", [-1, -2])
def test_quantize(dtype, turned, axis):
    x = torch.randn(3, 20, 33).to(dtype)
    x[1] = 0
    x = x.transpose(1, 2) if turned else x
    q, scale = tidegate.quantize(x, axis)
    want, want_scale = golden_quantize(x, axis)
    assert q.stride() == x.stride()
    assert torch.equal(q, want) and torch.equal(scale, want_scale)


def problem(rows=(3, 0, 5), K=48, N=20, tail=2):
    M = sum(rows) + tail
    x = torch.randint(-127, 128, (M, K), dtype=torch.int8)
    w = torch.randint(-127, 128, (len(rows), N, K), dtype=torch.int8)
    return x, torch.rand(M) * 0.01 + 0.001, w, torch.rand(len(rows), N) * 0.01 + 0.001, torch.tensor(rows)


def test_products_and_their_conventions():
    x, x_scale, w, w_scale, counts = problem()
    cumsum = counts.cumsum(0)
    y = tidegate.grouped_matmul_quant(x, w, counts, w_scale, x_scale)
    want = torch.zeros_like(y)
    for g, (begin, end) in enumerate(zip([0, *cumsum.tolist()], cumsum.tolist(), strict=False)):
        want[begin:end] = golden_product(x[begin:end], x_scale[begin:end], w[g], w_scale[g])
    assert torch.equal(y, want)
    transposed = tidegate.grouped_matmul_quant(
        x, w.transpose(1, 2), cumsum, w_scale, x_scale, weight_axes="kn", group_list="cumsum", out_dtype=torch.bfloat16
    )
    assert torch.equal(transposed, y.bfloat16())
    q, scale = tidegate.grouped_matmul_swiglu_quant(x, w, counts, w_scale, x_scale)
    gate, up = y.double().chunk(2, 1)
    s = (nn.functional.silu(gate) * up).float()
    want_q, want_scale = golden_quantize(s)
    routed = cumsum[-1]
    torch.testing.assert_close(scale[:routed], want_scale[:routed], rtol=1e-6, atol=0)
    ratio = s[:routed] / want_scale[:routed, None]
    tie = (ratio - ratio.floor() - 0.5).abs() < 1e-5 * ratio.abs().clamp(min=1)
    assert ((q[:routed] == want_q[:routed]) | tie).all() and not q[routed:].any()
    named = tidegate.npu_grouped_matmul_swiglu_quant(x, w.transpose(1, 2).contiguous(), cumsum, w_scale, x_scale)
    assert torch.equal(named[0], q) and torch.equal(named[1], scale) and named[2].numel() == 0
    with pytest.raises(ValueError, match="bias: expected None"):
        tidegate.npu_grouped_matmul_swiglu_quant(x, w, cumsum, w_scale, x_scale, bias=w_scale)


def experts_problem(T=9, H=96, inner=40, E=4, k=2):
    x = torch.randn(T, H)
    ids = torch.randint(-1, E, (T, k))
    gate_up = tidegate.quantize(torch.randn(E, 2 * inner, H) * 0.1)
    down = tidegate.quantize(torch.randn(E, H, inner) * 0.1)
    return x, ids, torch.rand(T, k), *gate_up, *down


def test_experts():
    args = experts_problem()
    out = tidegate.moe_experts_quant(*args)
    want = golden_experts(*args)
    assert (out.double() - want).norm() <= 1e-5 * want.norm()
    alone = torch.cat([tidegate.moe_experts_quant(*(a[t : t + 1] for a in args[:3]), *args[3:]) for t in range(9)])
    assert torch.equal(alone, out)


def test_inference_only():
    args = experts_problem()
    with pytest.raises(RuntimeError, match="inference only"):
        tidegate.moe_experts_quant(args[0].requires_grad_(), *args[1:])
    with torch.no_grad():
        tidegate.moe_experts_quant(*args)


class Experts(nn.Module):
    """The parameters and the call of a Transformers experts module."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True

    def __init__(self, E=4, H=64, inner=32):
        super().__init__()
        self.num_experts = E
        self.gate_up_proj = nn.Parameter(torch.randn(E, 2 * inner, H) * 0.1)
        self.down_proj = nn.Parameter(torch.randn(E, H, inner) * 0.1)
        self.act_fn = nn.SiLU()

    def forward(self, x, ids, weights):
        return tidegate.moe_experts(x, ids, weights, self.gate_up_proj, self.down_proj)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"experts": Experts()}) for _ in range(2)])

    def forward(self, x, ids, weights):
        for layer in self.layers:
            x = x + layer["experts"](x, ids, weights)
        return x


@torch.no_grad()
def test_quantize_experts():
    model = Model()
    call = torch.randn(7, 64), torch.randint(0, 4, (7, 2)), torch.rand(7, 2)
    want = model(*call)
    result = tidegate.quantize_experts(model, keep_original=True)
    got = model(*call)
    assert 0 < (got - want).norm() < 0.05 * want.norm()
    assert result.bytes_after < 0.3 * result.bytes_before and "originals kept" in str(result)
    clone = copy.deepcopy(model)
    clone.load_state_dict(model.state_dict())
    assert torch.equal(clone(*call), got)
    result.undo()
    assert torch.equal(model(*call), want)
    result = tidegate.quantize_experts(model)
    assert torch.equal(model(*call), got) and "2 experts modules" in str(result)
    with pytest.raises(RuntimeError, match="original was not kept"):
        result.undo()
    with pytest.raises(ValueError, match="got int8 ones"):
        tidegate.quantize_experts(model)


@torch.no_grad()
@pytest.mark.parametrize("family", ["qwen3_5_moe", "qwen3_next"])
def test_quantize_experts_of_a_transformers_model(family):
    model = tiny_models.build(family)
    names = {name for name, _ in model.named_parameters()}
    ids = tiny_models.tokens(2, 30)
    want = tiny_models.logits(model, ids)
    result = tidegate.quantize_experts(model, keep_original=True)
    assert len(result.modules) == 4 and result.bytes_after < 0.35 * result.bytes_before  # narrow: scales count
    got = tiny_models.logits(model, ids)
    assert 0 < (got - want).norm() < 0.1 * want.norm()
    left = {name for name, _ in model.named_parameters()}
    assert names - left == {n for n in names if ".experts." in n} and left < names
    generated = model.generate(ids[:, :5], max_new_tokens=4, do_sample=False)
    assert generated.shape == (2, 9)
    result.undo()
    assert torch.equal(tiny_models.logits(model, ids), want)


@pytest.mark.parametrize("keep", [False, True])
def test_a_quantised_model_is_not_saved_as_one_of_transformers(tmp_path, keep):
    """It would be loaded with random experts. What keeps the int8 weights as they are goes on working."""
    model = tiny_models.build("qwen3_5_moe", layers=1)  # layers of linear attention cannot be pickled
    ids = tiny_models.tokens(1, 9)
    logits = functools.partial(tiny_models.logits, ids=ids, use_cache=False)
    want = logits(model)
    result = tidegate.quantize_experts(model, keep_original=keep)
    got = logits(model)
    for one in (model, model.model, copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match="save_pretrained: expected experts that Transformers knows"):
            one.save_pretrained(tmp_path / "model")
    assert not list(tmp_path.iterdir())
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(logits(loaded), got)
    if keep:
        result.undo()
        model.save_pretrained(tmp_path / "model")
        assert torch.equal(logits(type(model).from_pretrained(tmp_path / "model")), want)


def test_a_model_around_a_quantised_part_is_not_saved(tmp_path):
    model, other = (tiny_models.build("qwen3_5_moe") for _ in range(2))
    keys = [list(vars(module)) for module in model.modules()]
    parts = [tidegate.quantize_experts(layer, keep_original=True) for layer in model.model.layers[1:3]]
    for one in (model, model.model, copy.deepcopy(model)):
        with pytest.raises(RuntimeError, match="save_pretrained: expected experts that Transformers knows"):
            one.save_pretrained(tmp_path / "model")
    assert not list(tmp_path.iterdir())
    other.save_pretrained(tmp_path / "other")
    parts[0].undo()
    with pytest.raises(RuntimeError, match="save_pretrained"):  # the second part is int8 still
        model.save_pretrained(tmp_path / "model")
    parts[1].undo()
    assert [list(vars(module)) for module in model.modules()] == keys
    model.save_pretrained(tmp_path / "model")
    assert (tmp_path / "model" / "config.json").is_file()


def test_what_cannot_be_quantised_is_named():
    model = tiny_models.build("qwen3_5_moe")
    tidegate.quantize_experts(model)
    with pytest.raises(ValueError, match=r"layers.0.mlp.experts: expected experts in a float type, got int8 ones"):
        tidegate.quantize_experts(model)
    with pytest.raises(TypeError, match="quantize_experts: model: expected a torch.nn.Module, got str"):
        tidegate.quantize_experts("model")


def test_adapters_on_quantised_experts_are_saved(tmp_path):
    peft = pytest.importorskip("peft")
    model = tiny_models.build("qwen3_5_moe")
    model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["out_proj", "o_proj"]))
    tidegate.quantize_experts(model)
    model.save_pretrained(tmp_path / "adapter")
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    with pytest.raises(RuntimeError, match="save_pretrained"):
        model.get_base_model().save_pretrained(tmp_path / "model")


def test_quantize_experts_refuses_what_it_cannot_run():
    model = Model()
    model.layers[1]["experts"].act_fn = nn.GELU()
    with pytest.raises(ValueError, match="layers.1.experts: act_fn: expected SiLU"):
        tidegate.quantize_experts(model)
    assert isinstance(model.layers[0]["experts"], Experts)


def test_the_report_of_a_patch_says_what_was_replaced():
    model = tiny_models.build("qwen3_5_moe")
    handle = tidegate.patch(model)
    states = lambda: {row.status for row in handle.report().only(op="experts")}  # noqa: E731
    assert states() == {"installed"}
    quantised = tidegate.quantize_experts(model, keep_original=True)
    assert states() == {"lost"}
    quantised.undo()
    assert states() == {"installed"}
