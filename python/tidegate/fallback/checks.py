"""What the kernels of the fallback check beyond sizes and types: values, options, memory. Texts as the native ones."""

import math

import torch

from tidegate._contracts import LAYOUTS

ACTIVATIONS = {None: None, "": None, "silu": "silu", "swish": "silu", "sigmoid": "sigmoid"}


STRIDED = ("conv_state", "rstd", "ids", "pos")  # outputs with any inner stride
TURNED = {  # outputs whose last two dimensions may stand the other way round in memory
    (op, name)
    for op, names in {
        "grouped_matmul_bwd": "dweight",
        "moe_experts_bwd": "dgate_up ddown dshared_gate dshared_up dshared_down dgate_up_lora_a dgate_up_lora_b "
        "ddown_lora_a ddown_lora_b",
        "quantize": "q",
    }.items()
    for name in names.split()
}


def refuse(op, name, expected, got):
    raise ValueError(f"{op}: {name}: expected {expected}, got {got}")


def wide(x):
    """The dtype of sums, states and statistics."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def choice(op, name, value, allowed):
    """value, which must be one of a few words; `allowed` is how the words are listed: "a, b or c"."""
    if value not in allowed.replace(" or ", ", ").split(", "):
        refuse(op, name, allowed, value)
    return value


def activation(op, value, conv):
    """None, silu or sigmoid; the convolution knows no sigmoid, the norm's gate must have one."""
    found = ACTIVATIONS.get(value, "unknown")
    if conv and found not in (None, "silu"):
        refuse(op, "activation", "None, silu or swish", value)
    if not conv and found not in ("silu", "sigmoid"):
        refuse(op, "activation", "silu, swish or sigmoid", value or None)
    return found


def finite(op, name, value, low=None):
    """A number that is finite, and not below `low` if that is given."""
    if not math.isfinite(value) or (low is not None and value < low):
        refuse(op, name, "a finite number" + (f" >= {low}" if low is not None else ""), value)
    return value


def offsets(op, cu_seqlens, tokens):
    """cu_seqlens as a checked list."""
    cu = cu_seqlens.tolist()
    if len(cu) < 2:
        refuse(op, "cu_seqlens", "at least 2 entries", len(cu))
    if cu[0] != 0:
        refuse(op, "cu_seqlens[0]", 0, cu[0])
    for i in range(1, len(cu)):
        if cu[i] < cu[i - 1]:
            refuse(op, f"cu_seqlens[{i}]", f">= {cu[i - 1]}", cu[i])
        if cu[i] > tokens:
            refuse(op, f"cu_seqlens[{i}]", f"<= {tokens} (tokens)", cu[i])
    if cu[-1] != tokens:
        refuse(op, f"cu_seqlens[{len(cu) - 1}]", f"{tokens} (tokens)", cu[-1])
    return cu


def entries(op, name, values, count):
    """An index tensor with one entry per sequence as a list; None stays None."""
    if values is None:
        return None
    if values.dim() != 1 or len(values) != count:
        refuse(op, name, f"{count} entries (one per sequence)", values.numel())
    return values.tolist()


def head_major(x, layout):
    """[B,H,T,...] from any layout."""
    order = LAYOUTS[layout]
    x = x if "B" in order else x[None]
    return x.transpose(1, 2) if order.endswith("T,H") else x


def from_head_major(x, layout):
    order = LAYOUTS[layout]
    x = x.transpose(1, 2) if order.endswith("T,H") else x
    return x if "B" in order else x[0]


def _elements(x):
    """Byte offsets of all elements, as a flat tensor."""
    at = torch.zeros((), dtype=torch.int64)
    for size, stride in zip(x.shape, x.stride(), strict=True):
        at = at[..., None] + torch.arange(size) * stride
    return at.flatten() * x.element_size() + x.data_ptr()


def _overlap(x, y):
    if x.numel() == 0 or y.numel() == 0:
        return False
    spans = []
    for t in (x, y):
        reach = [stride * (size - 1) for size, stride in zip(t.shape, t.stride(), strict=True)]
        first = t.data_ptr() + sum(min(r, 0) for r in reach) * t.element_size()
        spans.append((first, t.data_ptr() + (sum(max(r, 0) for r in reach) + 1) * t.element_size()))
    if spans[0][0] >= spans[1][1] or spans[1][0] >= spans[0][1]:
        return False
    x, y = (  # byte by byte, now that they are neighbours: columns of one buffer are apart
        (_elements(t)[:, None] + torch.arange(t.element_size())).flatten() for t in (x, y)
    )
    return bool(torch.isin(x, y).any())


def memory(op, given, written, in_place=()):
    """Outputs have an element for every index, rows without gaps, and memory of their own."""
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    for name in written:
        x = tensors.get(name)
        if x is None or x.numel() == 0:
            continue
        turned = x.dim() > 1 and x.stride(-2) == 1 and (op, name) in TURNED
        if name not in STRIDED and not turned and x.dim() > 1 and x.shape[-1] > 1 and x.stride(-1) != 1:
            if x.stride(-1) != 0:
                refuse(op, name, "inner stride 1", x.stride(-1))
        for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
            if size > 1 and stride == 0:
                refuse(op, name, "an output without repeated elements", f"stride 0 in dimension {dim}")
        for other, y in tensors.items():
            same = x.data_ptr() == y.data_ptr() and x.shape == y.shape and x.stride() == y.stride()
            if other != name and not (same and other in in_place) and _overlap(x, y):
                refuse(op, name, "memory of its own", f"an overlap with {other}")
