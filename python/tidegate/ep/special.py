"""Gradients of special experts. They stay at home, so nothing is exchanged here."""

import torch

tidegate_ops = torch.ops.tidegate


def special_bwd(buffer, handle, dout, weights, ori_x, alpha1, alpha2, v):
    """(dori_x, dalpha1, dalpha2, dv, dweights fp32 [T,K]) of a combine; every row as it is in any batch."""
    copies = handle.ids - (buffer.experts + buffer.zero_experts)
    constant = copies - buffer.copy_experts >= 0
    number = (copies[constant] - buffer.copy_experts).long()  # of the const expert of each such pair
    tokens, slots = copies.shape
    weights = torch.ones(tokens, slots) if weights is None else weights.detach().float()
    # A pair's result is of_token * ori_x + of_v * v.
    of_token, of_v = (copies >= 0).float(), torch.zeros(tokens, slots)
    # <dout, ori_x>, and <dout, v> with a row of v for every pair that has one.
    places = torch.arange(tokens, dtype=torch.int32)[:, None].expand(tokens, slots)
    pos = torch.cat([places[:, :1], torch.full_like(places, -1)], 1)
    rows = ori_x
    if len(number):
        of_token[constant], of_v[constant] = alpha1.float()[number], alpha2.float()[number]
        rows = torch.cat([ori_x, v[number]])
        pos[:, 1:][constant] = torch.arange(tokens, len(rows), dtype=torch.int32)
    dots = torch.zeros(pos.shape)
    tidegate_ops.moe_unpermute_bwd.out(dout, rows, pos, torch.ones_like(dots), dweights=dots)
    with_token, with_v = dots[:, :1], dots[:, 1:]
    # Not 0 * <dout, ori_x> for the other pairs: a token that is not finite has a gradient of 0 there.
    dweights = torch.where(copies >= 0, of_token * with_token + of_v * with_v, 0.0)
    dori_x = tidegate_ops.moe_unpermute_fwd(dout, places.masked_fill(copies < 0, -1), weights * of_token)

    def by_expert(like, values):
        if like is None:
            return None
        total = torch.zeros(like.shape, dtype=torch.promote_types(like.dtype, torch.float32))
        return total.index_add_(0, number, values().to(total.dtype)).to(like.dtype)

    dalpha1 = by_expert(alpha1, lambda: (weights * with_token)[constant])
    dalpha2 = by_expert(alpha2, lambda: (weights * with_v)[constant])
    dv = by_expert(v, lambda: (weights * of_v)[constant][:, None] * dout[constant.nonzero()[:, 0]])
    return dori_x, dalpha1, dalpha2, dv, dweights
