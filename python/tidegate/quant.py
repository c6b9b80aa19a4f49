"""int8 experts for inference: weights with a scale a row, tokens with a scale each, sums exact in int32."""

import dataclasses
import gc

import torch
from torch import nn

from tidegate._native import ops
from tidegate.moe import why_not


def quantize(x: torch.Tensor, axis: int = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """(int8 numbers, fp32 scales): q = x / scale, scale = max |x| / 127 along axis (-1 or -2)."""
    return ops.quantize(x, axis=axis)


def grouped_matmul_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor,
    *,
    weight_axes: str = "nk",
    group_list: str = "counts",
    out_dtype: torch.dtype = torch.float32,
) -> torch.Tensor:
    """y[j] = (W_g x[j]) * weight_scale_g * x_scale[j] for the rows of group g; rows outside all groups are 0."""
    return ops.grouped_matmul_quant(
        x, weight, groups, weight_scale, x_scale, weight_axes=weight_axes, group_list=group_list, out_dtype=out_dtype
    )


def grouped_matmul_swiglu_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor,
    smooth_scale: torch.Tensor | None = None,
    *,
    weight_axes: str = "nk",
    group_list: str = "counts",
) -> tuple[torch.Tensor, torch.Tensor]:
    """silu(gate) * up of the product above, quantised again: (q int8 [M,I], q_scale [M])."""
    return ops.grouped_matmul_swiglu_quant(
        x, weight, groups, weight_scale, x_scale, smooth_scale, weight_axes=weight_axes, group_list=group_list
    )


def npu_grouped_matmul_swiglu_quant(
    x: torch.Tensor,
    weight: torch.Tensor,
    group_list: torch.Tensor,
    weight_scale: torch.Tensor,
    x_scale: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    offset: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same under the name and conventions of torch_npu: weight [E,K,N], group_list a cumsum, three results.

    The third, the offset of an asymmetric result, is empty; bias and offset are reserved there and refused here.
    """
    for name, value in (("bias", bias), ("offset", offset)):
        if value is not None:
            raise ValueError(f"npu_grouped_matmul_swiglu_quant: {name}: expected None, got a tensor")
    q, scale = grouped_matmul_swiglu_quant(
        x, weight, group_list, weight_scale, x_scale, weight_axes="kn", group_list="cumsum"
    )
    return q, scale, scale.new_empty((0,))


def moe_experts_quant(
    x: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    gate_up: torch.Tensor,
    gate_up_scale: torch.Tensor,
    down: torch.Tensor,
    down_scale: torch.Tensor,
    *,
    weight_axes: str = "nk",
    ids_convention: str = "plain",
) -> torch.Tensor:
    """moe_experts with int8 weights [E,2I,H], [E,H,I] and scales [E,2I], [E,H]; tokens are quantised on the way."""
    return ops.moe_experts_quant(
        x,
        ids,
        weights,
        gate_up,
        gate_up_scale,
        down,
        down_scale,
        weight_axes=weight_axes,
        ids_convention=ids_convention,
    )


class QuantizedExperts(nn.Module):
    """Stands in for a Transformers experts module: same call, int8 weights as buffers."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.weight_axes = "kn" if getattr(experts, "is_transposed", False) else "nk"
        self.num_experts = getattr(experts, "num_experts", experts.gate_up_proj.shape[0])
        # Releases without the flag always read the number of experts as "not here".
        foreign = getattr(experts, "_is_expert_parallel", True)
        self.ids_convention = "transformers_ep" if foreign else "plain"
        axis = -1 if self.weight_axes == "nk" else -2
        for name in ("gate_up", "down"):
            with torch.no_grad():
                q, scale = quantize(getattr(experts, f"{name}_proj").detach(), axis)
            self.register_buffer(name, q)
            self.register_buffer(f"{name}_scale", scale)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As the module that it stands in for; without gradients."""
        return moe_experts_quant(
            hidden_states,
            top_k_index,
            top_k_weights,
            self.gate_up,
            self.gate_up_scale,
            self.down,
            self.down_scale,
            weight_axes=self.weight_axes,
            ids_convention=self.ids_convention,
        )

    def extra_repr(self) -> str:
        """For print()."""
        return f"int8, {self.num_experts} experts, weight_axes={self.weight_axes}"


def _bytes(module):
    return sum(t.numel() * t.element_size() for t in (*module.parameters(), *module.buffers()))


def _refuse_to_save(*args, **kwargs):
    """Stands in for save_pretrained. Of this module, so that torch.save and copies find it."""
    raise RuntimeError(
        "save_pretrained: expected experts that Transformers knows, got int8 ones of tidegate.quantize_experts, which "
        "would be loaded as experts that were never trained: save before quantising, or after undo(), which needs "
        "keep_original=True"
    )


def _savers(model, parents):
    """The modules with a save_pretrained that would write what the parents hold: in the model, and around it."""
    made = (value for value in gc.get_objects() if nn.Module in type(value).__mro__ and "_modules" in vars(value))
    for module in {id(module): module for module in (*model.modules(), *made)}.values():
        # One of PEFT saves its adapters alone. What somebody else put in the place of save_pretrained is left to him.
        saves = hasattr(type(module), "save_pretrained") and not hasattr(module, "get_base_model")
        untouched = vars(module).get("save_pretrained", _refuse_to_save) is _refuse_to_save
        if saves and untouched and any(id(child) in parents for child in module.modules()):
            yield module


@dataclasses.dataclass
class QuantizedModel:
    """What quantize_experts has replaced."""

    modules: list  # (parent, attribute, name in the model, original or None)
    unsaved: list = dataclasses.field(default_factory=list)  # modules whose save_pretrained refuses
    bytes_before: int = 0
    bytes_after: int = 0

    def undo(self) -> None:
        """Puts the original experts back. Possible only with keep_original=True."""
        for parent, attribute, name, original in self.modules:
            if original is None:
                raise RuntimeError(f"quantize_experts: {name}: the original was not kept: use keep_original=True")
            setattr(parent, attribute, original)
        for module in self.unsaved:
            if not any(isinstance(child, QuantizedExperts) for child in module.modules()):  # of another call
                module.__dict__.pop("save_pretrained", None)
        self.modules, self.unsaved = [], []

    def __str__(self):
        kept = any(original is not None for *_, original in self.modules)
        text = (
            f"{len(self.modules)} experts modules: {self.bytes_before / 2**20:.1f} MiB -> "
            f"{self.bytes_after / 2**20:.1f} MiB int8"
        )
        return text + (" (originals kept: both are in memory)" if kept else " (originals released)")


def quantize_experts(model: nn.Module, *, keep_original: bool = False) -> QuantizedModel:
    """Replaces every experts module (3-D gate_up_proj and down_proj) of a Transformers model by an int8 one.

    For inference: a call that wants a gradient raises. Router, shared expert, norms and attention stay as they are.
    keep_original=True allows undo() and keeps both copies in memory. print() of the result says what memory it took.
    save_pretrained raises from then on, also that of a model around this one: no release of Transformers could load
    the result.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"quantize_experts: model: expected a torch.nn.Module, got {type(model).__name__}")
    found = []
    for path, parent in model.named_modules():
        for attribute, child in parent.named_children():
            if isinstance(child, QuantizedExperts):
                name = f"{path}.{attribute}" if path else attribute
                raise ValueError(f"quantize_experts: {name}: expected experts in a float type, got int8 ones")
            tensors = [getattr(child, n, None) for n in ("gate_up_proj", "down_proj")]
            if all(isinstance(t, torch.Tensor) and t.dim() == 3 for t in tensors):
                name = f"{path}.{attribute}" if path else attribute
                reason = why_not(child)
                if reason is not None:
                    raise ValueError(f"quantize_experts: {name}: {reason}")
                found.append((parent, attribute, name, child))
    if not found:
        raise ValueError("quantize_experts: model: expected experts with 3-D gate_up_proj and down_proj, got none")
    result = QuantizedModel([])
    for i, (parent, attribute, name, child) in enumerate(found):
        replacement = QuantizedExperts(child).train(child.training)
        result.bytes_before += _bytes(child)
        result.bytes_after += _bytes(replacement)
        setattr(parent, attribute, replacement)
        result.modules.append((parent, attribute, name, child if keep_original else None))
        found[i] = None  # one module's weights at a time are in memory twice
        del child
    for module in _savers(model, {id(parent) for parent, *_ in result.modules}):
        module.save_pretrained = _refuse_to_save
        result.unsaved.append(module)
    return result
