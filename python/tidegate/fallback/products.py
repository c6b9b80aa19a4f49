"""Products with the weights of groups in plain torch. Weights are widened one group at a time."""

import torch

from tidegate.fallback.checks import choice, refuse, wide


def group_offsets(op, groups, rows, group_list):
    """Where groups begin and end, as a list with one entry more than groups."""
    counts = choice(op, "group_list", group_list, "counts or cumsum") == "counts"
    ends = [0]
    for g, value in enumerate(groups.tolist()):
        least, most = (0, rows - ends[-1]) if counts else (ends[-1], rows)
        if value < least:
            refuse(op, f"groups[{g}]", f">= {least}", value)
        if value > most:
            refuse(op, f"groups[{g}]", f"<= {most} (of {rows} rows)", value)
        ends.append(ends[-1] + value if counts else value)
    return ends


def matrices(op, name, weight, weight_axes):
    """weight as [G,N,K], a view; of the strides of N and K one must be 1, as the native kernels need it."""
    choice(op, "weight_axes", weight_axes, "nk or kn")
    one_step(op, name, weight)
    return weight if weight_axes == "nk" else weight.mT


def one_step(op, name, t):
    if t.numel() and 1 not in (*t.stride()[-2:], *t.shape[-2:]):
        refuse(op, name, "stride 1 in one of the last two dimensions", f"{t.stride(-2)} and {t.stride(-1)}")


def laid_as(value, t):
    """value in the memory order of t: a matrix whose rows are its inner dimension in memory stays that way."""
    turned = t.dim() >= 2 and t.stride(-1) != 1 and t.stride(-2) == 1
    return value.mT.contiguous().mT if turned else value.contiguous()


def check_needs(op, needs, results):
    if not 0 <= needs < 1 << results:
        refuse(op, "needs", f"0 to {(1 << results) - 1} (a bit for every result)", needs)


def grouped_matmul_fwd(x, weight, groups, bias=None, weight_axes="nk", group_list="counts", out_dtype=None):
    op = "grouped_matmul_fwd"
    weight = matrices(op, "weight", weight, weight_axes)
    ends = group_offsets(op, groups, x.shape[0], group_list)
    y = x.new_zeros(x.shape[0], weight.shape[1], dtype=wide(x))
    for g, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
        y[a:b] = x[a:b].to(y.dtype) @ weight[g].to(y.dtype).T
        if bias is not None:
            y[a:b] += bias[g].to(y.dtype)
    return y.to(out_dtype or x.dtype)


def grouped_matmul_bwd(
    dy, x, weight, groups, weight_axes="nk", group_list="counts", needs=7, rounded=True, accumulate=False
):
    op, given = "grouped_matmul_bwd", weight
    check_needs(op, needs, 3)
    weight = matrices(op, "weight", weight, weight_axes)
    ends = group_offsets(op, groups, dy.shape[0], group_list)
    d, xw = dy.to(wide(x)), x.to(wide(x))
    dx, dweight = torch.zeros_like(xw), torch.zeros(weight.shape, dtype=d.dtype)
    dbias = d.new_zeros(weight.shape[:2])
    for g, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
        if needs & 1:
            dx[a:b] = d[a:b] @ weight[g].to(d.dtype)
        if needs & 2:
            dweight[g] = d[a:b].T @ xw[a:b]
        dbias[g] = d[a:b].double().sum(0)
    results = dx, dweight if weight_axes == "nk" else dweight.mT, dbias
    if rounded:
        results = dx.to(x.dtype), laid_as(results[1].to(weight.dtype), given), dbias.to(weight.dtype)
    return tuple(t if needs >> i & 1 else weight.new_empty(0) for i, t in enumerate(results))


def linear_shapes(op, x, weight, bias=None, dy=None, **_options):
    """In the words of the native operator, which does not know N before it has a matrix."""
    if x.dim() < 1:
        refuse(op, "x", "at least 1 dimension", "none")
    if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
        refuse(op, "weight", f"[N, {x.shape[-1]}]", list(weight.shape))
    if bias is not None and bias.shape != weight.shape[:1]:
        refuse(op, "bias", list(weight.shape[:1]), list(bias.shape))


def linear_fwd(x, weight, bias=None):
    one_step("linear_fwd", "weight", weight)
    y = x.to(wide(x)) @ weight.to(wide(x)).T
    return (y if bias is None else y + bias.to(y.dtype)).to(x.dtype)


def linear_bwd(dy, x, weight, needs=7):
    check_needs("linear_bwd", needs, 3)
    one_step("linear_bwd", "weight", weight)
    rows, d = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
    groups = torch.tensor([len(rows)])
    dx, dweight, dbias = grouped_matmul_bwd(d, rows, weight[None], groups, needs=needs)
    nothing = weight.new_empty(0)
    dx = dx.view(x.shape) if needs & 1 else x.new_empty(0)
    return dx, dweight[0] if needs & 2 else nothing, dbias[0] if needs & 4 else nothing
