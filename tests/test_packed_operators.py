"""Convolution and delta rule over random splits: packed calls have the bits of separate ones."""

import random

import pytest
import torch
from compare import assert_bits, leaves

import tidegate

LENGTHS = (0, 1, 2, 3, 4, 63, 64, 65, 127, 128, 129)


def splits(seed, count=4):
    """Random lists of lengths; every length occurs in one of them."""
    rng = random.Random(seed)
    rest = rng.sample(LENGTHS, len(LENGTHS))
    return [rest[i::count] + rng.choices(LENGTHS[:6], k=2) for i in range(count)]


def spans(lengths):
    ends = torch.tensor(lengths).cumsum(0).tolist()
    return [slice(end - length, end) for length, end in zip(lengths, ends, strict=True)]


def cu_of(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def relative(got, want):
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("channels", [16, None], ids=["C=16", "C=T"])
def test_convolution(activation, bias, channels):
    for lengths in splits(1):
        tokens = sum(lengths)
        width = channels or tokens
        x, dy = torch.randn(1, tokens, width), torch.randn(1, tokens, width)
        weight, offset = torch.randn(width, 4), torch.randn(width) if bias else None

        def run(x, dy, cu, weight, offset, activation=activation):
            x = x.detach().clone().requires_grad_()
            y, state = tidegate.ops.causal_conv1d_fwd(
                x, weight, offset, cu_seqlens=cu, activation=activation, output_final_state=True
            )
            (y * dy).sum().backward()
            return y, state, x.grad

        packed, separate = leaves(weight, offset), leaves(weight, offset)
        got = run(x, dy, cu_of(lengths), *packed)
        for n, span in enumerate(spans(lengths)):
            want = run(x[:, span], dy[:, span], None, *separate)
            for name, one, part in (("y", want[0], got[0][:, span]), ("dx", want[2], got[2][:, span])):
                assert_bits(name, part, one)
            assert_bits("state", got[1][n : n + 1], want[1])
        for one, other in zip(packed, separate, strict=True):
            assert one is None or relative(one.grad, other.grad) <= 1e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_delta_rule(dtype):
    for lengths in splits(2):
        tokens = sum(lengths)
        q, k = (torch.randn(1, tokens, 2, 16, dtype=dtype) for _ in range(2))
        v, do = (torch.randn(1, tokens, 4, 16, dtype=dtype) for _ in range(2))
        g, beta = -torch.rand(1, tokens, 4), torch.rand(1, tokens, 4).to(dtype)
        states = torch.randn(len(lengths), 4, 16, 16)

        def run(tensors, state, do, cu):
            inputs = leaves(*tensors)
            o, final = tidegate.chunk_gated_delta_rule(
                *inputs, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True, cu_seqlens=cu
            )
            ((o * do).sum() + final.square().sum()).backward()
            return o, final, [x.grad for x in inputs]

        got = run((q, k, v, g, beta), states, do, cu_of(lengths))
        for n, span in enumerate(spans(lengths)):
            part = [x[:, span] for x in (q, k, v, g, beta)]
            want = run(part, states[n : n + 1], do[:, span], None)
            assert_bits("o", got[0][:, span], want[0])
            assert_bits("state", got[1][n : n + 1], want[1])
            for name, one, whole in zip(("dq", "dk", "dv", "dg", "dbeta"), want[2], got[2], strict=True):
                assert_bits(name, whole[:, span], one)
