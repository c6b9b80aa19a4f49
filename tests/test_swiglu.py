"""swiglu: values and gradients against fp64, and gated MLPs of patched models."""

import pytest
import torch
from compare import assert_bits, assert_close, leaves
from torch import nn
from torch.nn.functional import silu

import tidegate
from tidegate.errors import NothingPatchedError
from tidegate.patch import swiglu as sites

native = pytest.mark.skipif(tidegate.isa() == "fallback", reason="patch leaves MLPs to torch")


def results(call, tensors, dy):
    tensors = leaves(*tensors)
    y = call(*tensors)
    return [y.detach(), *torch.autograd.grad(y, tensors, dy.to(y.dtype))]


@pytest.mark.parametrize("shape", [(96,), (1, 3584), (2, 5, 131), (0, 8)])
def test_values_and_gradients(isa, dtype, shape):
    tensors = [(3 * torch.randn(shape)).to(dtype), torch.randn(shape).to(dtype)]
    dy = torch.randn(shape).to(dtype)
    got = results(tidegate.swiglu, tensors, dy)
    truth = results(lambda gate, up: silu(gate) * up, [t.double() for t in tensors], dy)
    for name, value, want in zip(("y", "dgate", "dup"), got, truth, strict=True):
        assert value.dtype == dtype and value.shape == want.shape
        if value.numel():
            assert_close(name, value, want, 1e-6)


def test_halves_of_one_projection():
    both = torch.randn(7, 2, 40).bfloat16()
    gate, up = both.unbind(1)
    assert_bits("y", tidegate.swiglu(gate, up), tidegate.swiglu(gate.contiguous(), up.contiguous()))


class Mlp(nn.Module):
    def __init__(self, act=silu, dtype=torch.float32):
        super().__init__()
        self.gate_proj, self.up_proj = nn.Linear(24, 40, bias=False), nn.Linear(24, 40, bias=False)
        self.down_proj, self.act_fn = nn.Linear(40, 24, bias=False), act
        self.to(dtype)

    def forward(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Swapped(Mlp):
    def forward(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


@native
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gated_mlp_keeps_its_answers_and_gradients(dtype):
    mlp, x = nn.Sequential(Mlp(dtype=dtype)), torch.randn(3, 5, 24).to(dtype)
    want, truth = mlp(x), nn.Sequential(Mlp())
    truth.load_state_dict(mlp.state_dict())
    handle = tidegate.patch(mlp, ops=("swiglu",))
    assert [row.path for row in handle.report().only(op="swiglu", status="installed")] == ["0"]
    got, exact = mlp(x), truth(x.float())
    for out in (got, exact):
        out.float().square().sum().backward()
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert_close("y", got.detach().float(), exact.detach().double(), limit)
    for mine, theirs in zip(mlp.parameters(), truth.parameters(), strict=True):
        assert_close("gradient", mine.grad.float(), theirs.grad.double(), 3 * limit)
    handle.undo()
    assert_bits("y", mlp(x), want)


@native
def test_other_activations_are_refused_and_swapped_ones_fail_the_test():
    gelu = nn.Sequential(Mlp(nn.functional.gelu))
    with pytest.raises(NothingPatchedError, match="activation is gelu, not SiLU"):
        tidegate.patch(gelu, ops=("swiglu",))
    swapped = nn.Sequential(Swapped())
    with pytest.raises(NothingPatchedError, match="differs by"):
        tidegate.patch(swapped, ops=("swiglu",))
    assert "forward" not in swapped[0].__dict__ and "forward" not in gelu[0].__dict__


@native
def test_projections_of_other_types_are_left_to_torch(monkeypatch):
    gate, up = torch.randn(3, 8), torch.randn(3, 8).bfloat16()
    assert_bits("y", sites.product(gate, up), silu(gate) * up)
    wide = torch.randn(3, 8, dtype=torch.float64)
    assert_bits("y", sites.product(wide, wide), silu(wide) * wide)


@native
def test_every_mlp_of_a_model():
    tiny = pytest.importorskip("tiny_models")
    model = tiny.build("qwen3_5", layers=4)
    rows = tidegate.patch(model).report().only(op="swiglu", status="installed")
    assert [row.path for row in rows] == [f"model.layers.{i}.mlp" for i in range(4)]
