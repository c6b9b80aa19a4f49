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


def limited(self, x):
    return self.down_proj(silu(self.gate_proj(x)).clamp(max=10) * self.up_proj(x).clamp(-10, 10))


def dropped(self, x):
    return self.down_proj(nn.functional.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x), 0.1, self.training))


def swapped(self, x):
    return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))


def added(self, x, residual=None):
    y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return y if residual is None else y + residual


@native
@pytest.mark.parametrize("other", [limited, dropped, swapped, added])
def test_forwards_that_do_something_else_are_refused(other):
    """Most of them cannot be told apart on a few random rows."""
    mlp = nn.Sequential(type("Other", (Mlp,), {"forward": other})())
    with pytest.raises(NothingPatchedError, match="its forward is not"):
        tidegate.patch(mlp, ops=("swiglu",))
    assert "forward" not in vars(mlp[0])


@native
def test_other_activations_are_refused():
    with pytest.raises(NothingPatchedError, match="activation is gelu, not SiLU"):
        tidegate.patch(nn.Sequential(Mlp(nn.functional.gelu)), ops=("swiglu",))
    hooked, calls = Mlp(nn.SiLU()), []
    hooked.act_fn.register_forward_hook(lambda *args: calls.append(0))
    with pytest.raises(NothingPatchedError, match="SiLU has hooks"):
        tidegate.patch(nn.Sequential(hooked), ops=("swiglu",))
    assert not calls


@native
def test_arguments_by_any_name_and_scripted_neighbours():
    class Named(Mlp):
        def forward(self, hidden_state):
            down = self.down_proj(self.act_fn(self.gate_proj(hidden_state)) * self.up_proj(hidden_state))
            return down

    model = nn.ModuleList([Named(nn.SiLU()), torch.jit.script(nn.Sequential(nn.ReLU()))])
    x = torch.randn(3, 24)
    want = model[0](x)
    with tidegate.patch(model, ops=("swiglu",)):
        assert_close("y", model[0](hidden_state=x).detach(), want.detach().double(), 1e-5)
        with pytest.raises(TypeError):
            model[0](x, x)


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
