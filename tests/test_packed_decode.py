"""gdn_packed_decode: the bits of the separate operators, the truth of their formulas, and prompts followed by steps."""

import golden
import pytest
import torch
from compare import assert_bits, assert_close

import tidegate

HK, HV, K, V, W = 2, 4, 24, 40, 4
D = 2 * HK * K + HV * V
SIZES = {"HK": HK, "HV": HV, "K": K, "V": V}


def make_layer(dtype=torch.float32, slots=6, length=W - 1):
    return {
        "conv_state": torch.randn(slots, D, length).to(dtype),
        "conv_weight": (torch.randn(D, W) / 2).to(dtype),
        "conv_bias": torch.randn(D).to(dtype),
        "A_log": torch.rand(HV),
        "dt_bias": torch.randn(HV),
        "state": torch.randn(slots, HV, K, V),
        "norm_weight": torch.randn(V).to(dtype),
    }


def make_tokens(count, dtype=torch.float32):
    sizes = {"mixed": D, "z": HV * V, "a": HV, "b": HV}
    return {name: torch.randn(count, width).to(dtype) for name, width in sizes.items()}


def interleaved(tokens):
    """The same tokens as Qwen3-Next projects them."""
    T, G = len(tokens["mixed"]), HV // HK
    q, k, v = tokens["mixed"].split([HK * K, HK * K, HV * V], 1)
    parts = [t.reshape(T, HK, -1) for t in (q, k, v, tokens["z"])]
    ba = [tokens[name].reshape(T, HK, G) for name in ("b", "a")]
    return {"mixed": torch.cat(parts, 2).flatten(1), "z": None, "a": None, "b": torch.cat(ba, 2).flatten(1)}


def step(layer, tokens, slots, **options):
    return tidegate.gdn_packed_decode(**tokens, **layer, state_indices=torch.tensor(slots), **SIZES, **options)


def separately(layer, tokens, slots, cu_seqlens=None, **options):
    """The operators one after the other; options are those of pools."""
    ops, T = tidegate.ops, len(tokens["mixed"])
    cu = torch.arange(T + 1) if cu_seqlens is None else cu_seqlens
    rows = torch.tensor(slots) if not isinstance(slots[0], list) else torch.tensor(slots)[:, 0]
    x = ops.causal_conv1d_update(
        tokens["mixed"],
        layer["conv_state"],
        layer["conv_weight"],
        layer["conv_bias"],
        cu_seqlens=cu,
        cache_indices=rows,
        activation="silu",
        **options,
    )
    q, k, v = (t.view(T, -1, n) for t, n in zip(x.split([HK * K, HK * K, HV * V], 1), (K, K, V), strict=True))
    g, beta = ops.gdn_gating_fwd(tokens["a"], tokens["b"], layer["A_log"], layer["dt_bias"], layout="TND")
    o = tidegate.recurrent_gated_delta_rule(
        q,
        k,
        v,
        g,
        beta,
        layer["state"],
        state_indices=torch.tensor(slots),
        cu_seqlens=cu,
        use_qk_l2norm=True,
        **options,
    )
    return ops.rms_norm_gated_fwd(o, tokens["z"].view(T, HV, V), layer["norm_weight"])[0].flatten(1)


def copies(layer):
    return {name: t.clone() for name, t in layer.items()}


@pytest.mark.parametrize("projection", ["qkv", "qkvz_ba"])
def test_bits_of_the_separate_operators(isa, dtype, projection):
    one = make_layer(dtype)
    other, slots = copies(one), [4, 0, 1, 5]
    for _ in range(3):
        tokens = make_tokens(4, dtype)
        given = tokens if projection == "qkv" else interleaved(tokens)
        y = step(one, given, slots, projection=projection)
        assert_bits("y", y, separately(other, tokens, slots))
        for name in ("conv_state", "state"):
            assert_bits(name, one[name], other[name])


def test_verification_and_roll_back(isa):
    """Steps of 4 tokens with every count of accepted ones, the convolution's rows included."""
    for accepted in range(1, 5):
        one = make_layer(slots=8, length=W - 1 + 3)
        other, slots = copies(one), [[4, 0, 1, 5], [2, 7, 6, 3]]
        cu = torch.tensor([0, 4, 8])
        for counts in ([1, 1], [accepted, 5 - accepted]):
            tokens, options = make_tokens(8), {"cu_seqlens": cu, "num_accepted_tokens": torch.tensor(counts)}
            assert_bits("y", step(one, tokens, slots, **options), separately(other, tokens, slots, **options))
            for name in ("conv_state", "state"):
                assert_bits(name, one[name], other[name])


def test_null_rows_and_out(isa):
    layer, tokens = make_layer(), make_tokens(3)
    before, out = copies(layer), torch.ones(3, HV * V)
    assert step(layer, tokens, [0, 3, 0], null_slot=0, out=out) is out
    assert not out[[0, 2]].any() and out[1].any()
    others = [0, 1, 2, 4, 5]
    for name in ("conv_state", "state"):
        assert_bits(name, layer[name][others], before[name][others])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values(isa, dtype):
    """Against the formulas in fp64, each fed with what the operator before it handed over."""
    layer, tokens, slots = make_layer(dtype), make_tokens(3, dtype), [1, 5, 2]
    wide, inputs = ({k: t.double() for k, t in d.items()} for d in (layer, tokens))
    y = step(layer, tokens, slots, norm_rounding="fp32")
    conv = wide["conv_state"].clone()
    x = golden.causal_conv1d_update(inputs["mixed"], conv, wide["conv_weight"], wide["conv_bias"], [0, 1, 2, 3], slots)
    x = x.to(dtype).double()
    q, k, v = (
        t.view(3, -1, n).transpose(0, 1) for t, n in zip(x.split([HK * K, HK * K, HV * V], 1), (K, K, V), strict=True)
    )
    g, beta = golden.gdn_gating_fwd(inputs["a"].T, inputs["b"].T, wide["A_log"], wide["dt_bias"])
    q, k, beta = golden.l2norm_fwd(q)[0], golden.l2norm_fwd(k)[0], beta.to(dtype).double()
    o, states = golden.gated_delta_rule(q, k, v, g, beta, [0, 1, 2, 3], wide["state"][slots], K**-0.5)
    o = o.transpose(0, 1).to(dtype).double()
    want = golden.rms_norm_gated_fwd(o, inputs["z"].view(3, HV, V), wide["norm_weight"])[0].flatten(1)
    assert_close("conv_state", layer["conv_state"], conv, 0.0)
    # Where a conv output or o lies between two numbers of 16 bits, kernel and formula may round to different ones.
    assert_close("y", y, want, 5e-7 if dtype == torch.float32 else 3e-4)
    assert_close("state", layer["state"][slots], states, 1e-6 if dtype == torch.float32 else 1e-4)


def test_a_prompt_then_steps_is_one_prompt(isa):
    """The conv tail and the state of a prompt's operators are what a step starts from."""
    layer, tokens = make_layer(), make_tokens(9)
    whole, parts = copies(layer), copies(layer)
    want = separately(whole, tokens, [2], cu_seqlens=torch.tensor([0, 9]))
    prompt = {name: t[:5] for name, t in tokens.items()}
    got = [separately(parts, prompt, [2], cu_seqlens=torch.tensor([0, 5]))]
    for t in range(5, 9):
        got.append(step(parts, {name: x[t : t + 1] for name, x in tokens.items()}, [2]))
    assert_bits("y", torch.cat(got), want)
    for name in ("conv_state", "state"):
        assert_bits(name, parts[name], whole[name])
