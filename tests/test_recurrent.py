"""recurrent_gated_delta_rule on pools: values, prefill followed by decode, verification and roll-back."""

import subprocess
import sys

import golden
import pytest
import torch
from compare import assert_bits, assert_close
from delta_rule_case import INPUTS, LAYOUTS, case, make

import tidegate
from tidegate import recurrent_gated_delta_rule as rule


def tokens(p, first, last, layout="TND"):
    return [LAYOUTS[layout](p[name][:, first:last]) for name in INPUTS]


def pool_of(p, slots, order=None, v_first=False, dtype=torch.float32):
    """A random pool with the problem's states in the slots named by order."""
    states = p["h0"].mT if v_first else p["h0"]
    pool = torch.randn(slots, *states.shape[1:])
    pool[list(range(len(states))) if order is None else order] = states
    return pool.to(dtype)


def pool_truth(p, pool, slots, accepted, has_initial):
    """o in fp64, with a row of slots per sequence; the pool is changed. -1 is the null slot."""
    wide, o = {name: p[name].double() for name in INPUTS}, torch.zeros_like(p["v"], dtype=torch.float64)
    for n, row in enumerate(slots):
        start = row[accepted[n] - 1]
        if start == -1:
            continue
        S = pool[start] * has_initial[n]
        for i, t in enumerate(range(p["cu"][n], p["cu"][n + 1])):
            token = [x[:, t : t + 1] for x in wide.values()]
            o[:, t : t + 1], states = golden.gated_delta_rule(*token, [0, 1], S[None], p["k"].shape[-1] ** -0.5)
            S = states[0]
            if row[i] != -1:
                pool[row[i]] = S
    return o


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("layout", ["TND", "NTD"])
def test_values(isa, dtype, layout, v_first):
    p, (o, final) = case((3, 0, 1, 9), HK=2, K=20, V=36, dtype=dtype)
    pool, order = pool_of(p, 6, [4, 0, 1, 5], v_first), [4, 0, 1, 5]
    before = pool.clone()
    got = rule(
        *tokens(p, 0, 13, layout),
        pool,
        state_indices=torch.tensor(order, dtype=torch.int32),
        cu_seqlens=torch.tensor(p["cu"]),
        state_v_first=v_first,
        layout=layout,
    )
    assert_close("o", got, LAYOUTS[layout](o), 5e-7)
    assert_close("state", (pool.mT if v_first else pool)[order], final, 1e-6)
    assert_bits("other slots", pool[[2, 3]], before[[2, 3]])
    assert_bits("empty sequence", pool[0], before[0])


def test_a_decode_step_needs_no_boundaries(isa):
    p, (o, final) = case((1,) * 5, HK=2, K=20, V=36)
    pool, out = pool_of(p, 5), torch.empty(5, 4, 36)
    result = rule(*tokens(p, 0, 5), pool, state_indices=torch.arange(5), out=out)
    assert result is out
    assert_close("o", out.transpose(0, 1), o, 5e-7)
    assert_close("state", pool, final, 1e-6)


def test_slots_of_every_kind(isa):
    """Slots per token, accepted counts, null slots and fresh starts."""
    p = make([3, 2, 4, 1], HK=2, K=20, V=36)
    slots = [[3, 0, 9, -1], [-1, 1, 2, 8], [1, 2, -1, 6], [7, 5, 4, -1]]
    accepted, fresh = [2, 1, 1, 3], [True, True, False, True]
    pool = torch.randn(10, 4, 20, 36)
    wide = pool.double()
    want = pool_truth(p, wide, slots, accepted, fresh)
    got = rule(
        *tokens(p, 0, 10),
        pool,
        state_indices=torch.tensor(slots),
        cu_seqlens=torch.tensor(p["cu"]),
        num_accepted_tokens=torch.tensor(accepted),
        has_initial_state=torch.tensor(fresh),
    )
    assert_close("o", got.transpose(0, 1), want, 5e-7)
    assert_close("pool", pool, wide, 1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prefill_then_decode_is_one_long_prefill(dtype):
    """For every split point 0 .. 130, within the bound of the fused operator."""
    p, (o, final) = case((130,), K=32, V=32, dtype=dtype)
    for split in range(131):
        pool = p["h0"].clone()
        at = torch.tensor([0])
        first = tidegate.ops.chunk_gated_delta_rule_pool(*tokens(p, 0, split), pool, state_indices=at, layout="TND")
        steps = [rule(*tokens(p, t, t + 1), pool, state_indices=at) for t in range(split, 130)]
        assert_close(f"o, split {split}", torch.cat([first, *steps]).transpose(0, 1), o, 1e-6)
        assert_close(f"state, split {split}", pool, final, 1e-6)


@pytest.mark.parametrize("v_first", [False, True])
@pytest.mark.parametrize("storage", [torch.float32, torch.bfloat16])
def test_roll_back_to_every_length(isa, storage, v_first):
    """Verify 16 tokens, keep a of them, go on from there: the bits of plain decoding."""
    M, p = 16, make([33], HK=2, K=20, V=36)
    start, options = pool_of(p, 1, v_first=v_first, dtype=storage), {"state_v_first": v_first}
    plain, states, o = start.clone(), [], []
    for t in range(33):
        o.append(rule(*tokens(p, t, t + 1), plain, state_indices=torch.tensor([0]), **options))
        states.append(plain[0].clone())
    o = torch.cat(o)
    order = torch.randperm(M)[None]
    cu = torch.tensor([0, M])
    for accepted in range(1, M + 1):
        pool = torch.randn(M, *start.shape[1:]).to(storage)
        pool[order[0, 0]] = start[0]
        first = rule(*tokens(p, 0, M), pool, state_indices=order, cu_seqlens=cu, **options)
        assert_bits("o", first, o[:M])
        for t in range(M):
            assert_bits("state", pool[order[0, t]], states[t])
        kept = {"num_accepted_tokens": torch.tensor([accepted]), **options}
        second = rule(*tokens(p, accepted, accepted + M), pool, state_indices=order, cu_seqlens=cu, **kept)
        assert_bits("o", second, o[accepted : accepted + M])
        assert_bits("state", pool[order[0, M - 1]], states[accepted + M - 1])


def test_gate_per_channel(isa):
    """A gate per key channel is one matrix of decays; with equal channels it is the gate of the head."""
    p = make([7], HK=1, K=20, V=36)
    inputs = tokens(p, 0, 7, "BSND")
    g = inputs[3]
    gk = g[..., None].expand(*g.shape, 20)
    want = tidegate.fused_recurrent_gated_delta_rule(*inputs[:3], g, beta=inputs[4], initial_state=p["h0"])
    got = tidegate.fused_recurrent_gated_delta_rule(*inputs[:3], gk=gk, beta=inputs[4], initial_state=p["h0"])
    assert_close("o", got[0], want[0], 5e-7)
    S, key = p["h0"][0].double(), p["k"][0].double()
    gates = -torch.rand(1, 7, 2, 20)
    o, final = tidegate.fused_recurrent_gated_delta_rule(
        *inputs[:3], gk=gates, beta=inputs[4], initial_state=p["h0"], output_final_state=True
    )
    for t in range(7):
        S = S * gates[0, t].double().exp()[..., None]
        d = p["beta"][:, t, None].double() * (p["v"][:, t].double() - torch.einsum("hkv,k->hv", S, key[t]))
        S = S + key[t][None, :, None] * d[:, None]
        assert_close("o", o[0, t], 20**-0.5 * torch.einsum("hkv,k->hv", S, p["q"][0, t].double()), 5e-7)
    assert_close("state", final[0], S, 1e-6)


def test_everything_inside_is_the_separate_operators(isa):
    p = make([1] * 6, HK=2, K=20, V=36)
    a, b, A_log, dt_bias = torch.randn(6, 4), torch.randn(6, 4), torch.rand(4) - 2, torch.randn(4)
    g, beta = tidegate.ops.gdn_gating_fwd(a, b, A_log, dt_bias, beta_scale=2.0, layout="TND")
    q, k, v = tokens(p, 0, 6)[:3]
    raw, ready = pool_of(p, 6), pool_of(p, 6)
    at = torch.arange(6)
    options = {"A_log": A_log, "dt_bias": dt_bias, "beta_sigmoid": True, "beta_scale": 2.0, "use_qk_l2norm": True}
    got = rule(3 * q, 2 * k, v, a, b, raw, state_indices=at, **options)
    q, k = (tidegate.ops.l2norm_fwd(t)[0] for t in (3 * q, 2 * k))
    assert_close("o", got, rule(q, k, v, g, beta, ready, state_indices=at), 5e-7)
    assert_close("state", raw, ready, 1e-6)


def test_states_of_another_pool_are_not_touched_by_a_bad_call():
    p = make([1, 1], K=20, V=36)
    pool = pool_of(p, 3)
    before = pool.clone()
    for wrong in ([0, 3], [1, 1], [0, -2]):
        with pytest.raises(ValueError, match="recurrent_gated_delta_rule: state_indices"):
            rule(*tokens(p, 0, 2), pool, state_indices=torch.tensor(wrong))
    with pytest.raises(TypeError, match="state_indices: expected dtype int32 or int64"):
        rule(*tokens(p, 0, 2), pool, state_indices=torch.tensor([0.0, 1.0]))
    q, k, _, g, beta = tokens(p, 0, 2)
    with pytest.raises(ValueError, match="state: expected memory of its own, got an overlap with v"):
        rule(q, k, pool[0, :, :2].transpose(0, 1), g, beta, pool, state_indices=torch.tensor([0, 1]))
    assert_bits("pool", pool, before)


def test_steps_and_prompts_in_one_call(isa):
    """Short sequences token by token, long ones in chunks; a sequence has the bits that it has alone."""
    p, (o, final) = case((1, 70, 3, 0, 17, 1), HK=2, K=20, V=36)
    order = [4, 0, 1, 5, 2, 3]
    pool, cu = pool_of(p, 6, order), p["cu"]
    start = pool.clone()
    got = rule(*tokens(p, 0, 92), pool, state_indices=torch.tensor(order), cu_seqlens=torch.tensor(cu))
    assert_close("o", got.transpose(0, 1), o, 1e-6)
    assert_close("state", pool[order], final, 1e-6)
    for n, slot in enumerate(order):
        alone, cut = start.clone(), tokens(p, cu[n], cu[n + 1])
        one = {"state_indices": torch.tensor([slot]), "cu_seqlens": torch.tensor([0, cu[n + 1] - cu[n]])}
        assert_bits("o", rule(*cut, alone, **one), got[cu[n] : cu[n + 1]])
        assert_bits("state", alone[slot], pool[slot])


def test_compiled_first_and_into_given_memory():
    """In a process that made no eager call before."""
    program = """
import torch
import tidegate
q, k, v = torch.randn(2, 1, 8), torch.randn(2, 1, 8), torch.randn(2, 2, 8)
pool, o, slots = torch.zeros(3, 2, 8, 8), torch.empty(2, 2, 8), torch.tensor([0, 2])
step = lambda pool, o: tidegate.recurrent_gated_delta_rule(
    q, k, v, None, torch.ones(2, 2), pool, state_indices=slots, out=o)
torch.compile(step, fullgraph=True, backend="eager")(pool, o)
assert pool[0].any() and not pool[1].any()
"""
    subprocess.run([sys.executable, "-c", program], check=True)
