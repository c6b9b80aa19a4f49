"""Full attention on a shard of tokens: by heads, or block by block with the keys of the shards before it.

Both are causal and keep sequences apart. Blocks are merged by the logarithms of their softmax sums, so a rank never
holds more than its own keys and those of two other ranks.
"""

import torch
from torch.autograd.function import once_differentiable

from tidegate.packed.attention import _backward as block_backward
from tidegate.packed.attention import _forward as block_forward
from tidegate.packed.attention import packed_attention, packed_attention_bwd
from tidegate.parallel.exchange import ToHeads, ToTokens
from tidegate.parallel.plan import fill_up, shares


def attend(plan, query, key, value, scale):
    """query [1,H,T,D], key and value [1,Hkv,T,D] of this rank's tokens -> [1,T,H,D]; padding behind them gets zeros."""
    rows = query.shape[2]
    query, key, value = (x[:, :, : plan.own.tokens] for x in (query, key, value))
    return fill_up(_attend(plan, query, key, value, scale), rows)


def _attend(plan, query, key, value, scale):
    if plan.attention == "ring":
        return Ring.apply(plan, scale, query, key, value).transpose(1, 2)
    H, Hkv = query.shape[1], key.shape[1]
    keys = shares(Hkv, plan.ranks)
    queries = [(first * (H // Hkv), last * (H // Hkv)) for first, last in keys]
    tensors = [x[0].transpose(0, 1) for x in (query, key, value)]
    q, k, v = (x.transpose(0, 1)[None] for x in ToHeads.apply(plan, [queries, keys, keys], *tensors))
    out, _ = packed_attention(q, k, v, plan.whole_cu, scale)
    return ToTokens.apply(plan, queries, H, out[0].transpose(0, 1))[None]


class _Blocks:
    """Keys and values on their way: to every later rank of the last fragment's sequence, from every earlier one of the
    first's. The next block is asked for while the last one is in use."""

    def __init__(self, plan, key, value):
        begin, end = plan.own.last if plan.own.gives else (0, 0)
        self.plan, self.like = plan, key
        mine = torch.cat([key[:, :, begin:end], value[:, :, begin:end]])
        self.sends = [plan.link.send(mine, r, "ring") for r in plan.after]

    def _ask(self, source):
        begin, end = self.plan.shards[source].last
        block = self.like.new_empty(2, self.like.shape[1], end - begin, self.like.shape[-1])
        return self.plan.link.receive(block, source)

    def __iter__(self):
        """(rank, key and value [2,Hkv,L,D]), nearest first."""
        sources = self.plan.before[::-1]
        pending = self._ask(sources[0]) if sources else None
        for i, source in enumerate(sources):
            block = pending.wait()
            pending = self._ask(sources[i + 1]) if i + 1 < len(sources) else None
            yield source, block

    def finish(self):
        for send in self.sends:
            send.wait()


def _merge(out, lse, more, more_lse):
    """Two attention results over different keys as one over both; fp32 [1,H,T,D] and [1,H,T]."""
    both = torch.logaddexp(lse, more_lse)
    return out * (lse - both).exp()[..., None] + more * (more_lse - both).exp()[..., None], both


class Ring(torch.autograd.Function):
    """Ring.apply(plan, scale, q [1,H,T,D], k, v [1,Hkv,T,D]) -> [1,H,T,D]"""

    @staticmethod
    def forward(ctx, plan, scale, q, k, v):
        out, lse = packed_attention(q, k, v, plan.local_cu, scale)
        blocks = _Blocks(plan, k, v)
        if plan.own.takes:
            part = slice(*plan.own.first)
            merged = out[:, :, part].to(lse.dtype), lse[:, :, part]
            for _, block in blocks:
                found = block_forward(q[:, :, part], block[:1], block[1:], 0.0, False, scale=scale)
                merged = _merge(*merged, *found)
            out[:, :, part], lse[:, :, part] = merged
        blocks.finish()
        ctx.plan, ctx.scale = plan, scale
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        plan, scale = ctx.plan, ctx.scale
        q, k, v, out, lse = ctx.saved_tensors
        link, sends = plan.link, []
        blocks = _Blocks(plan, k, v)
        dq, dk, dv = packed_attention_bwd(grad, q, k, v, out, lse, plan.local_cu, scale)
        if plan.own.takes:
            part = slice(*plan.own.first)
            g, query, o, s = (x[:, :, part] for x in (grad, q, out, lse))
            total = dq[:, :, part].to(lse.dtype)
            for source, block in blocks:
                more, dkey, dvalue = block_backward(g, query, block[:1], block[1:], o, s, 0.0, False, scale=scale)
                total += more
                sends.append(link.send(torch.cat([dkey, dvalue]), source, "ring", 1))
            dq[:, :, part] = total
        if plan.own.gives:
            part = slice(*plan.own.last)
            for r in plan.after:
                found = link.receive(k.new_empty(2, k.shape[1], part.stop - part.start, k.shape[-1]), r, 1).wait()
                dk[:, :, part] += found[:1]
                dv[:, :, part] += found[1:]
        blocks.finish()
        for send in sends:
            send.wait()
        return None, None, dq, dk, dv
