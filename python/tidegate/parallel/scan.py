"""The delta rule over shards at once: every rank reduces its tokens to the map S -> phi S + s that they are to a state.

All maps (K K + K V numbers a head, fp32) go to all ranks in one exchange; each folds those in front of it to its own
first state. It costs about 2.3 times the operations of the rule and waits for nobody: for many ranks and few heads,
where a chain would leave ranks idle. The backward needs the K V numbers of D = dLoss/dS only, as the phis are kept.
"""

import torch
from torch.autograd.function import once_differentiable

from tidegate._native import ops
from tidegate.parallel import rule


def _carry(phi, state, s):
    """phi state + s, for matrices of all heads."""
    return ops.gdn_segment_combine(phi, state, phi, s)[1]


def _fold(ranks, phis, terms):
    """The state, or the gradient of one, after these ranks: earlier ones are carried through later ones."""
    state = None
    for r in ranks:
        state = terms[r] if state is None else _carry(phis[r], state, terms[r])
    return state[None].contiguous()


class ScanRule(torch.autograd.Function):
    """ScanRule.apply(plan, options, q, k, v, a, b, A_log, dt_bias) -> o [1,T,HV,V]"""

    @staticmethod
    def forward(ctx, plan, options, *inputs):
        q, _, v, _, _, A_log, _ = inputs
        HK, K, V = q.shape[options.head_dim], q.shape[-1], v.shape[-1]
        trains = any(ctx.needs_input_grad)
        o = v.new_empty(1, plan.own.tokens, len(A_log), V)
        maps = q.new_zeros(len(A_log), K, K + V, dtype=rule.wide(q)) if plan.straddles else None
        kept = {}

        def run(part, state):
            found, final, saved = rule.forward(options, rule.cut(options, inputs, part, (0, HK)), part, state, trains)
            rule.place(o, part, (0, HK), HK).copy_(found)
            kept[part.begin] = state, saved if trains else None
            return final

        for part in plan.parts:
            if part.takes and part.gives:
                _, k, v, a, b, A, dt = rule.cut(options, inputs, part, (0, HK))
                phi, s = ops.gdn_segment_map(k, v, a, b, A_log=A, dt_bias=dt, **options.keywords)
                maps[..., :K], maps[..., K:] = phi[0], s[0]
            elif not part.takes:
                final = run(part, None)
                if part.gives:
                    maps[..., K:] = final[0]
        later = []
        if plan.straddles:
            maps = plan.link.all_gather(maps, "state")
            phis, terms = maps[..., :K].contiguous(), maps[..., K:].contiguous()
            later = [phis[r].mT.contiguous() for r in plan.after] if trains else []
        for part in plan.parts:
            if part.takes:
                run(part, _fold(plan.before, phis, terms))
        ctx.plan, ctx.options = plan, options
        ctx.save_for_backward(*inputs, *later, *(x for part in plan.parts for x in kept[part.begin]))
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx, do):
        plan, options = ctx.plan, ctx.options
        saved = ctx.saved_tensors  # once: recomputation allows no second look
        inputs, kept = saved[:7], saved[7:]
        later = dict(zip(plan.after, kept[: len(plan.after)], strict=True))
        kept = kept[len(plan.after) :]
        saved = {part.begin: kept[2 * i : 2 * i + 2] for i, part in enumerate(plan.parts)}
        HK = inputs[0].shape[options.head_dim]
        gradients = rule.Gradients(options, inputs, ctx.needs_input_grad[2:])

        def run(part, dfinal, needs):
            pieces, wanted = rule.cut(options, inputs, part, (0, HK)), rule.place(do, part, (0, HK), HK)
            return rule.backward(options, pieces, part, *saved[part.begin], wanted, dfinal, needs)

        q, v = inputs[0], inputs[2]
        local = q.new_zeros(len(inputs[5]), q.shape[-1], v.shape[-1], dtype=rule.wide(q))
        for part in plan.parts:
            if part.takes and part.gives:  # what would come out if nothing came in from the right
                local = run(part, None, {"h0"})["h0"][0]
            elif not part.gives:
                found = run(part, None, gradients.needs | ({"h0"} if part.takes else set()))
                gradients.add(found, part, (0, HK))
                local = found["h0"][0] if part.takes else local
        if plan.straddles:
            terms = plan.link.all_gather(local, "state")
        for part in plan.parts:
            if part.gives:
                dfinal = _fold(plan.after[::-1], later, terms)
                gradients.add(run(part, dfinal, gradients.needs), part, (0, HK))
        return None, None, *gradients.result()
