"""causal_conv1d_update: every mode against the truth; rows it does not own stay as they are."""

import golden
import pytest
import torch
from compare import assert_bits, assert_close, flushed_denormals

import tidegate

D = 70
update = tidegate.ops.causal_conv1d_update

# name: (state length, keyword arguments); sequences of 1, 3, 0 and 2 tokens
MODES = {
    "tail": (3, {}),
    "tail, longer state": (6, {}),
    "head": (6, {"state_anchor": "head"}),
    "circular": (8, {"cache_seqlens": [0, 9, 4, 70]}),
    "speculative": (6, {"num_accepted_tokens": [1, 3, 0, 4]}),
    "fresh rows": (4, {"has_initial_state": [True, False, False, True]}),
    "fresh circular rows": (5, {"has_initial_state": [False, False, True, True], "cache_seqlens": [0, 0, 4, 7]}),
}
LENGTHS = [1, 3, 0, 2]
SLOTS = [5, 0, 1, 2]


def make(S, dtype=torch.float32, lengths=LENGTHS):
    cu = golden.cu_from_lengths(lengths)
    return {
        "x": torch.randn(cu[-1], D).to(dtype),
        "pool": torch.randn(7, D, S).to(dtype),
        "weight": (torch.randn(D, 4) * 0.5).to(dtype),
        "bias": torch.randn(D).to(dtype),
        "cu": cu,
    }


def tensors(options):
    return {k: torch.tensor(v) if isinstance(v, list) else v for k, v in options.items()}


def truth(p, slots, options, dtype, activation="silu"):
    q = {k: v.to(dtype) for k, v in p.items() if k != "cu"}
    pool = q["pool"].clone()
    renamed = {{"num_accepted_tokens": "num_accepted"}.get(k, k): v for k, v in options.items()}
    y = golden.causal_conv1d_update(
        q["x"], pool, q["weight"], q["bias"], p["cu"], slots, activation=activation, **renamed
    )
    return y, pool


@pytest.mark.parametrize("mode", MODES)
def test_matches_golden(isa, dtype, mode):
    S, options = MODES[mode]
    for activation in (None, "silu"):
        p = make(S, dtype)
        pool = p["pool"].clone()
        y = update(
            p["x"],
            pool,
            p["weight"],
            p["bias"],
            cu_seqlens=torch.tensor(p["cu"]),
            cache_indices=torch.tensor(SLOTS),
            activation=activation,
            **tensors(options),
        )
        want, want_pool = truth(p, SLOTS, options, torch.float64, activation)
        plain, _ = truth(p, SLOTS, options, torch.float32, activation)
        assert_close("y", y, want, 2e-7, plain)
        assert_bits("pool", pool, want_pool.to(dtype))


def test_every_acceptance_length():
    """A prompt, a verify step of four tokens, and a second one that continues after each possible acceptance."""
    p = make(6, lengths=[16])
    x, want = p["x"], golden.causal_conv1d_fwd(p["x"].double(), p["weight"].double(), p["bias"].double())[0]
    step = {"activation": "silu", "layout": "BSND"}
    for accepted in (1, 2, 3, 4):
        pool = torch.full((1, D, 6), float("nan"))
        fresh = {"has_initial_state": torch.tensor([False]), "state_anchor": "head"}
        y = [update(x[None, :6], pool, p["weight"], p["bias"], **fresh, **step)]
        for first, n in ((6, 1), (6 + accepted, accepted)):
            counts = torch.tensor([n], dtype=torch.int32)
            row = x[None, first : first + 4]
            y.append(update(row, pool, p["weight"], p["bias"], num_accepted_tokens=counts, **step))
        kept = 6 + accepted
        truth = torch.cat([want[:6], want[6:10], want[kept : kept + 4]])
        assert_close(f"{accepted} accepted", torch.cat(y, 1)[0], truth, 2e-7)


def test_circular_roll_back():
    p = make(8, lengths=[12])
    want = golden.causal_conv1d_fwd(p["x"].double(), p["weight"].double())[0]
    pool = torch.zeros(1, D, 8)
    for first, last in ((0, 5), (3, 8), (8, 9), (7, 12)):  # each step may start before the end of the one before
        row = p["x"][None, first:last]
        y = update(row, pool, p["weight"], cache_seqlens=torch.tensor([first]), activation="silu", layout="BSND")
        assert_close(f"tokens {first} to {last}", y[0], want[first:last], 2e-7)


def test_decode_has_the_bits_of_prefill(isa):
    p = make(4, torch.bfloat16, lengths=[65])
    state = p["pool"][:1].clone()
    want, final = tidegate.ops.causal_conv1d_fwd(
        p["x"][None], p["weight"], p["bias"], state, activation="silu", output_final_state=True
    )
    got = [
        update(p["x"][None, t : t + 1], state, p["weight"], p["bias"], activation="silu", layout="BSND")
        for t in range(65)
    ]
    assert_bits("y", torch.cat(got, 1), want)
    assert_bits("state", state, final)


def test_batch_and_threads_do_not_change_bits(isa):
    x, weight = torch.randn(70, 1, 600), torch.randn(600, 4)
    pool, slots = torch.randn(90, 600, 3), torch.randperm(90)[:70]
    torch.set_num_threads(1)
    states = pool.clone()
    want = update(x, states, weight, cache_indices=slots, layout="BSND")
    for threads in (2, 3, 8):
        torch.set_num_threads(threads)
        again = pool.clone()
        assert_bits("y", update(x, again, weight, cache_indices=slots, layout="BSND"), want)
        assert_bits("pool", again, states)
    for n in (0, 31, 69):
        row = pool.clone()
        one = update(x[n : n + 1], row, weight, cache_indices=slots[n : n + 1], layout="BSND")
        assert_bits("y", one, want[n : n + 1])
        assert_bits("row", row[slots[n]], states[slots[n]])


def test_pools_of_any_strides(dtype):
    p = make(4, dtype)
    options = {"cu_seqlens": torch.tensor(p["cu"]), "cache_indices": torch.tensor(SLOTS, dtype=torch.int32)}
    want_pool = p["pool"].clone()
    want = update(p["x"], want_pool, p["weight"], **options)
    token_major = p["pool"].transpose(1, 2).contiguous().transpose(1, 2)
    window = torch.randn(9, D + 3, 7).to(dtype)
    window[1:8, 2 : D + 2, 3:7] = p["pool"]
    around = window.clone()
    for name, pool in (("token-major", token_major), ("window", window[1:8, 2 : D + 2, 3:7])):
        assert_bits(name, update(p["x"], pool, p["weight"], **options), want)
        assert_bits(name, pool, want_pool)
    around[1:8, 2 : D + 2, 3:7] = want_pool
    assert_bits("memory around the window", window, around)


def test_head_major_output():
    p = make(3)
    options = {"cu_seqlens": torch.tensor(p["cu"]), "cache_indices": torch.tensor([4, -1, 1, 2])}
    want = update(p["x"], p["pool"].clone(), p["weight"], **options)
    got = update(p["x"], p["pool"].clone(), p["weight"], head_num=7, **options)
    assert_bits("y", got, golden.to_head_major(want, 7))


@pytest.mark.parametrize("pad", [-1, 3, 99])
def test_skipped_sequences(pad):
    p = make(4)
    slots = [5, pad, 1, 2]
    p["pool"][[0, 3, 4, 6]] = float("nan")  # rows of nobody
    p["x"][1:4] = float("nan")  # tokens of the skipped sequence
    pool = p["pool"].clone()
    options = {"cu_seqlens": torch.tensor(p["cu"]), "cache_indices": torch.tensor(slots), "pad_slot_id": pad}
    y = update(p["x"], pool, p["weight"], **options)
    assert not y[1:4].any() and torch.isfinite(y).all()
    live = [5, 1, 2]
    want_pool = p["pool"].clone()
    golden.causal_conv1d_update(p["x"], want_pool, p["weight"], None, p["cu"], slots, pad)
    assert_bits("pool", pool, want_pool)
    assert torch.isfinite(pool[live]).all()


def test_nan_stays_in_its_row_and_channel():
    p = make(3, lengths=[4, 4])
    options = {"cu_seqlens": torch.tensor(p["cu"])}
    clean = p["pool"].clone()
    want = update(p["x"], clean, p["weight"], **options)
    pool = p["pool"].clone()
    pool[0, 11, 0] = float("nan")  # the oldest sample of a row: only the first token reads it
    got = update(p["x"], pool, p["weight"], **options)
    assert torch.isnan(got[0, 11])
    got[0, 11] = want[0, 11]
    assert_bits("y", got, want)
    assert_bits("pool", pool, clean)


def test_flushed_denormals_do_not_matter(isa):
    x, pool, weight = torch.randn(2, 3, D) * 2e-39, torch.randn(2, D, 3) * 2e-39, torch.randn(D, 4)
    want_pool = pool.clone()
    want = update(x, want_pool, weight, layout="BSND")
    assert want.any()
    with flushed_denormals():
        got = update(x, pool, weight, layout="BSND")
    assert_bits("y", got, want)
    assert_bits("pool", pool, want_pool)
