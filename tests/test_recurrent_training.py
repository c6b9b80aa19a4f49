"""Training through the recurrence: it has the gradients of the chunk form."""

import pytest
import torch
from compare import assert_bits, assert_close
from delta_rule_case import INPUTS, make
from test_delta_rule_training import gradients, incoming, wanted

import tidegate


def test_the_recurrence_has_the_gradients_of_the_chunk_form():
    p = make([300, 40], K=16, V=16, initial=True)
    want = gradients(p)
    leaves = {name: p[name].detach().clone().requires_grad_() for name in wanted(p)}
    q, k, v, g, beta = (leaves[name].transpose(0, 1)[None] for name in INPUTS)
    o, ht = tidegate.fused_recurrent_gated_delta_rule(
        q,
        k,
        v,
        g=g,
        beta=beta,
        initial_state=leaves["h0"],
        output_final_state=True,
        cu_seqlens=torch.tensor(p["cu"]),
    )
    do, dht = incoming(p)
    torch.autograd.backward([o, ht], [do.transpose(0, 1)[None], dht])
    for name, leaf in leaves.items():
        assert_bits(name, leaf.grad, want[name])


def test_the_recurrence_without_decay_or_boundaries():
    """Token-major without boundaries every token is a sequence; without g nothing is forgotten."""
    p = make([6], K=16, V=16, initial=False)
    q, k, v, _, beta = (p[name].transpose(0, 1).contiguous().requires_grad_() for name in INPUTS)
    state = torch.randn(6, 2, 16, 16)
    o, _ = tidegate.ops.recurrent_gated_delta_rule_fwd(q, k, v, None, beta, state, layout="TND")
    got = torch.autograd.grad(o.square().sum(), (q, k, v, beta))
    each = dict(cu_seqlens=torch.arange(7), layout="TND")
    o, _, _ = tidegate.ops.chunk_gated_delta_rule_fwd(q, k, v, torch.zeros(6, 2), beta, state, **each)
    for x, y in zip(got, torch.autograd.grad(o.square().sum(), (q, k, v, beta)), strict=True):
        assert_close("gradient", x, y, 1e-6)


def test_gates_of_channels_have_no_gradient():
    p = make([6], K=16, V=16, initial=False)
    q, k, v, g, beta = (p[name].transpose(0, 1)[None].requires_grad_() for name in INPUTS)
    o, _ = tidegate.fused_recurrent_gated_delta_rule(q, k, v, gk=torch.zeros(1, 6, 2, 16), beta=beta)
    with pytest.raises(RuntimeError, match="recurrent_gated_delta_rule_fwd: gk: expected None where a gradient"):
        o.sum().backward()
