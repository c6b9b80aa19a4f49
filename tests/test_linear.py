"""linear: values and gradients against fp64, bits whatever the batch, and linear layers of patched models."""

import math

import pytest
import tiny_models
import torch
from compare import assert_bits, assert_close, error, leaves

import tidegate
from tidegate.linear import rows_served, torch_is_slow
from tidegate.options import PatchOptions
from tidegate.patch import linear as sites

TYPES = (torch.float32, torch.bfloat16, torch.float16)


def problem(dtype, shape=(2, 5, 96), N=40):
    return torch.randn(shape).to(dtype), torch.randn(N, shape[-1]).to(dtype) / 8, torch.randn(N).to(dtype)


def results(call, tensors, dy):
    tensors = leaves(*tensors)
    y = call(*tensors)
    return [y.detach(), *torch.autograd.grad(y, tensors, dy.to(y.dtype))]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(96,), (1, 96), (2, 5, 96), (3, 1, 7, 130)])
def test_values_and_gradients(dtype, shape):
    tensors = problem(dtype, shape)
    dy = torch.randn(*shape[:-1], 40).to(dtype)
    torch_linear = torch.nn.functional.linear
    got = results(tidegate.linear, tensors, dy)
    truth = results(torch_linear, [t.double() for t in tensors], dy)
    for name, x, want in zip(("y", "dx", "dweight", "dbias"), got, truth, strict=True):
        assert x.dtype == dtype
        assert_close(name, x, want, 1e-6)


@pytest.mark.skipif(tidegate.isa() == "fallback", reason="plain torch does not promise equal bits")
@pytest.mark.parametrize("dtype", TYPES)
def test_a_row_has_the_same_bits_in_every_batch(dtype):
    x, weight, bias = problem(dtype, (70, 96))
    whole = tidegate.linear(x, weight, bias)
    for rows in (slice(0, 1), slice(3, 7), slice(60, 70)):
        assert_bits("y", tidegate.linear(x[rows], weight, bias), whole[rows])


def test_only_what_is_needed_has_a_gradient():
    x, weight, bias = problem(torch.float32)
    weight.requires_grad_()
    tidegate.linear(x, weight, bias).sum().backward()
    assert weight.grad is not None and x.grad is None and bias.grad is None
    assert tidegate.linear(torch.randn(0, 96), weight).shape == (0, 40)


def test_strides():
    x, weight, _ = problem(torch.bfloat16, (6, 96))
    turned = weight.T.contiguous().T
    apart = torch.randn(6, 200).bfloat16()[:, 3:99]
    assert error(tidegate.linear(x, turned), tidegate.linear(x, weight)) < 4e-3
    assert_bits("y", tidegate.linear(apart, weight), tidegate.linear(apart.contiguous(), weight))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (dict(weight=torch.randn(40, 95)), "weight: expected [N, 96], got [40, 95]"),
        (dict(weight=torch.randn(40)), "weight: expected [N, 96], got [40]"),
        (dict(bias=torch.randn(41)), "bias: expected [40], got [41]"),
        (dict(x=torch.tensor(1.0)), "x: expected at least 1 dimension"),
    ],
)
def test_wrong_shapes(change, text):
    x, weight, bias = problem(torch.float32)
    with pytest.raises(ValueError, match="linear_fwd") as caught:
        tidegate.linear(**(dict(x=x, weight=weight, bias=bias) | change))
    assert text in str(caught.value)


def test_where_torch_is_fast_it_is_left_alone(monkeypatch):
    model = tiny_models.build("qwen3_5", dtype=torch.bfloat16, layers=2)
    monkeypatch.setattr(sites, "rows_served", lambda dtype: 0)
    assert sites.find(model, PatchOptions()) == []
    assert rows_served(torch.float32) == 0
    assert not torch_is_slow(torch.float32)


@pytest.mark.skipif(tidegate.isa() == "fallback", reason="patch leaves linear layers to torch")
def test_linear_layers_of_a_model(monkeypatch):
    """Patched and stock model are equally far from fp32, forward and backward."""
    monkeypatch.setattr(sites, "rows_served", lambda dtype: math.inf if dtype == torch.bfloat16 else 0)
    stock = tiny_models.build("qwen3_5", dtype=torch.bfloat16)
    truth = tiny_models.build("qwen3_5").requires_grad_()
    truth.load_state_dict({name: value.float() for name, value in stock.state_dict().items()})
    patched = tiny_models.build("qwen3_5", dtype=torch.bfloat16)
    handle = tidegate.patch(patched, ops=("linear",))
    count = sum(isinstance(m, torch.nn.Linear) for m in patched.modules())
    assert len(handle.report().only(op="linear", status="installed")) == count
    ids = tiny_models.tokens(1, 70)
    outputs = {}
    for name, model in (("truth", truth), ("stock", stock), ("patched", patched)):
        out = model(input_ids=ids, labels=ids, use_cache=False)
        out.loss.backward()
        outputs[name] = out.logits.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert error(outputs["patched"][0], outputs["truth"][0]) <= 2 * error(outputs["stock"][0], outputs["truth"][0])
    for name, want in outputs["truth"][1].items():
        ours, theirs = (error(outputs[which][1][name], want) for which in ("patched", "stock"))
        assert ours <= 2 * theirs + 1e-3, f"{name}: {ours:.2g}, stock {theirs:.2g}"
    before = stock(input_ids=ids, use_cache=False).logits
    handle.undo()
    assert_bits("logits", patched(input_ids=ids, use_cache=False).logits, before)


@pytest.mark.skipif(tidegate.isa() == "fallback", reason="patch leaves linear layers to torch")
def test_autocast_runs_the_original(monkeypatch):
    monkeypatch.setattr(sites, "rows_served", lambda dtype: math.inf if dtype == torch.bfloat16 else 0)
    layer = torch.nn.Sequential(torch.nn.Linear(8, 8).bfloat16())
    with tidegate.patch(layer, ops=("linear",)), torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.randn(2, 8)).dtype == torch.bfloat16


@pytest.mark.skipif(tidegate.isa() == "fallback", reason="patch leaves linear layers to torch")
def test_few_rows_without_gradients(monkeypatch):
    """Ours up to the limit, torch's above it and where something trains; all of them close to fp64."""
    monkeypatch.setattr(sites, "rows_served", lambda dtype: 4 if dtype == torch.bfloat16 else 0)
    calls = []
    monkeypatch.setattr(sites, "linear", lambda *args: calls.append(args) or tidegate.linear(*args))
    model = torch.nn.Sequential(torch.nn.Linear(96, 40).bfloat16())
    x = torch.randn(5, 96).bfloat16()
    with tidegate.patch(model, ops=("linear",)):
        for rows, trains, ours in ((4, False, True), (5, False, False), (4, True, False), (0, False, True)):
            calls.clear()
            with torch.set_grad_enabled(trains):
                y = model(x[:rows])
            assert len(calls) == ours and y.requires_grad == trains
            assert y.shape == (rows, 40)
            truth = torch.nn.functional.linear(x[:rows].double(), *(p.double() for p in model.parameters()))
            if rows:
                assert_close("y", y.detach(), truth, 1e-6)
        model.requires_grad_(False)
        calls.clear()
        model(x[:4])
        assert len(calls) == 1  # frozen weights and plain inputs: nothing trains


class Quantised(torch.Tensor):
    """As packages that quantise put it into a layer: bf16 by its type, another function by its arithmetic."""


@pytest.mark.skipif(tidegate.isa() == "fallback", reason="patch leaves linear layers to torch")
def test_tensor_subclasses_and_exported_graphs_keep_torch(monkeypatch):
    monkeypatch.setattr(sites, "rows_served", lambda dtype: 4 if dtype == torch.bfloat16 else 0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8).bfloat16(), torch.nn.Linear(8, 8).bfloat16())
    model[0].weight = torch.nn.Parameter(model[0].weight.detach().as_subclass(Quantised), requires_grad=False)
    handle = tidegate.patch(model, ops=("linear",))
    assert [row.path for row in handle.report().only(op="linear", status="installed")] == ["1"]
    handle.undo()
    plain = torch.nn.Sequential(torch.nn.Linear(8, 8).bfloat16()).requires_grad_(False)
    with tidegate.patch(plain, ops=("linear",)), torch.no_grad():
        rows = {0: torch.export.Dim("rows", min=2, max=512)}
        exported = torch.export.export(plain, (torch.randn(3, 8).bfloat16(),), dynamic_shapes=(rows,))
    x = torch.randn(100, 8).bfloat16()
    assert_bits("y", exported.module()(x), plain(x))
