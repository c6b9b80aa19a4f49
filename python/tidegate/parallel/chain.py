"""The delta rule over shards, state by state: a rank starts from the state its left neighbour ends with.

The heads are cut into groups and the ranks work like an assembly line: when a rank has finished a group, it sends that
group's states (K V numbers a head) and goes on with the next group, while its neighbour begins. Nothing is computed
twice, and a shard that begins on the grid of chunks has the bits of one process. The backward runs the other way.
"""

import torch
from torch.autograd.function import once_differentiable

from tidegate.parallel import rule


def _state(inputs, options, keys):
    """An empty state of a range of key heads, [1,heads,K,V]; fp32, or fp64 for fp64."""
    q, _, v, _, _, A_log, _ = inputs
    heads = (keys[1] - keys[0]) * (len(A_log) // q.shape[options.head_dim])
    return q.new_empty(1, heads, q.shape[-1], v.shape[-1], dtype=rule.wide(q))


class ChainRule(torch.autograd.Function):
    """ChainRule.apply(plan, options, q, k, v, a, b, A_log, dt_bias) -> o [1,T,HV,V]"""

    @staticmethod
    def forward(ctx, plan, options, *inputs):
        link, own, HK = plan.link, plan.own, inputs[0].shape[options.head_dim]
        groups = plan.groups(HK)
        trains = any(ctx.needs_input_grad)
        o = inputs[2].new_empty(1, own.tokens, len(inputs[5]), inputs[2].shape[-1])
        # In the order of use, and asked for before anything is computed.
        coming = [
            link.receive(_state(inputs, options, keys), plan.left, i) if own.takes else None
            for i, keys in enumerate(groups)
        ]
        sends, kept = [], []
        for i, keys in enumerate(groups):
            for part in sorted(plan.parts, key=lambda part: part.takes):  # what waits for nobody goes first
                state = coming[i].wait() if part.takes else None
                found, final, saved = rule.forward(options, rule.cut(options, inputs, part, keys), part, state, trains)
                rule.place(o, part, keys, HK).copy_(found)
                kept += [state, saved if trains else None]
                if part.gives:
                    sends.append(link.send(final, plan.right, "state", i))
        for send in sends:
            send.wait()
        ctx.plan, ctx.options, ctx.groups = plan, options, groups
        ctx.save_for_backward(*inputs, *kept)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        plan, options, groups = ctx.plan, ctx.options, ctx.groups
        saved = ctx.saved_tensors  # once: recomputation allows no second look
        inputs, kept = saved[:7], saved[7:]
        link, own, HK = plan.link, plan.own, inputs[0].shape[options.head_dim]
        gradients = rule.Gradients(options, inputs, ctx.needs_input_grad[2:])
        coming = [
            link.receive(_state(inputs, options, keys), plan.right, i) if own.gives else None
            for i, keys in enumerate(groups)
        ]
        parts = sorted(plan.parts, key=lambda part: part.takes)
        pairs = iter(zip(kept[::2], kept[1::2], strict=True))
        saved = {(i, part.begin): next(pairs) for i in range(len(groups)) for part in parts}
        sends = []
        for i, keys in enumerate(groups):
            for part in sorted(parts, key=lambda part: part.gives):
                dfinal = coming[i].wait() if part.gives else None
                needs = gradients.needs | ({"h0"} if part.takes else set())
                found = rule.backward(
                    options,
                    rule.cut(options, inputs, part, keys),
                    part,
                    *saved[i, part.begin],
                    rule.place(do, part, keys, HK),
                    dfinal,
                    needs,
                )
                if part.takes:
                    sends.append(link.send(found["h0"], plan.left, "state", i))
                gradients.add(found, part, keys)
        for send in sends:
            send.wait()
        return None, None, *gradients.result()
