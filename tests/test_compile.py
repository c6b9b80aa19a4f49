"""torch.compile of several operators at once: training, decoding in place, and a token count that changes."""

import pytest
import torch
from compare import assert_all_bits, assert_close, leaves

import tidegate
from tidegate.causal_conv1d import causal_conv1d_fn

B, T, H, K = 2, 11, 3, 16


@pytest.fixture(scope="module")
def backend():
    """inductor where it can compile torch's own operators (it needs a C++ compiler), else aot_eager."""
    try:
        torch.compile(lambda x: (x.sin() + 1).cumsum(0))(torch.ones(64))
        return "inductor"
    except Exception:
        return "aot_eager"
    finally:
        torch._dynamo.reset()


def layer(x, conv_weight, block_weight, a, b, A_log, dt_bias, z, norm_weight, cos, sin):
    """Everything of a linear-attention layer but the projections and the rule, with torch's operators in between."""
    h = tidegate.rms_norm(x, block_weight)
    y, _ = tidegate.ops.causal_conv1d_fwd(h, conv_weight, activation="silu", head_num=2 * H)
    q, k = tidegate.partial_rope(tidegate.ops.l2norm_fwd(y[:, :H])[0], y[:, H:], cos, sin)
    g, beta = tidegate.ops.gdn_gating_fwd(a, b, A_log, dt_bias)
    o = (q * k) * (g.exp() * beta).transpose(1, 2)[..., None]
    return tidegate.rms_norm_gated(o.transpose(1, 2), z, norm_weight)


def problem():
    shapes = [(B, T, 2 * H * K), (2 * H * K, 4), (2 * H * K,), (B, T, H), (B, T, H), (H,), (H,), (B, T, H, K), (K,)]
    tensors = [torch.randn(s) for s in shapes]
    angle = torch.rand(B, T, 4)
    return tensors, torch.cat([angle, angle], -1).cos(), torch.cat([angle, angle], -1).sin()


def train(call):
    tensors, cos, sin = problem()
    inputs = leaves(*tensors)
    y = call(*inputs, cos, sin)
    y.backward(torch.cos(torch.arange(y.numel()).float()).view(y.shape))
    return {"y": y.detach(), **{f"gradient {i}": t.grad for i, t in enumerate(inputs)}}


def test_training_step(backend):
    torch.manual_seed(1)
    want = train(layer)
    torch.manual_seed(1)
    got = train(torch.compile(layer, fullgraph=True, backend=backend))
    for name, value in want.items():
        assert_close(name, got[name], value, 1e-6)


def test_decode_step_writes_in_place(backend):
    def step(x, pool, weight, slots):
        return tidegate.ops.causal_conv1d_update(x * 2, pool, weight, cache_indices=slots, layout="BSND") + pool.sum()

    x, weight, slots = torch.randn(3, 1, 8), torch.randn(8, 4), torch.tensor([4, -1, 2])
    pools = [torch.randn(6, 8, 3) for _ in range(1)]
    pools.append(pools[0].clone())
    compiled = torch.compile(step, fullgraph=True, backend=backend)
    for _ in range(3):
        want, got = step(x, pools[0], weight, slots), compiled(x, pools[1], weight, slots)
        assert_close("y", got, want, 1e-6)
        assert_all_bits({"pool": pools[1]}, {"pool": pools[0]})


def test_token_count_may_change_without_recompiling():
    def call(x, weight, cu):
        cu = tidegate.ops.seqlens(cu, None, None, tokens=x.shape[0])
        return tidegate.ops.causal_conv1d_fwd(
            x, weight, cu_seqlens=cu, activation="silu", head_num=2, output_final_state=True, layout="TND"
        )

    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        for tokens in (7, 9, 64, 33):
            results = []
            x, weight = torch.randn(tokens, 8), torch.randn(8, 4)
            for run in (call, compiled):
                inputs = leaves(x, weight)
                y, final = run(*inputs, torch.tensor([0, 3, tokens]))
                (y.sum() + final.sum()).backward()
                results.append({"y": y, "final": final, "dx": inputs[0].grad, "dw": inputs[1].grad})
            assert_all_bits(results[1], results[0])


def test_packed_function_compiles():
    x, weight = torch.randn(2, 8, 12), torch.randn(8, 4)
    ids = torch.tensor([[0] * 5 + [1] * 7, [3] * 10 + [-1] * 2], dtype=torch.int32)
    compiled = torch.compile(causal_conv1d_fn, fullgraph=True, backend="aot_eager")
    want = causal_conv1d_fn(x, weight, seq_idx=ids, activation="silu")
    assert_all_bits({"y": compiled(x, weight, seq_idx=ids, activation="silu")}, {"y": want})
