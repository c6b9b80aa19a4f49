"""tidegate.chunk_gated_delta_rule: results, warnings and exceptions of the function in flash-linear-attention."""

import pytest
import torch
import torch.nn.functional as F
from compare import assert_bits, assert_close
from delta_rule_case import INPUTS, LAYOUTS, case, make, truth

import tidegate
from tidegate import chunk_gated_delta_rule as rule
from tidegate import fla

CU = torch.tensor([0, 5, 5, 70], dtype=torch.int32)


def problem(lengths=(5, 0, 65), **sizes):
    """q, k, v, g, beta as [1, T, H, D], the states of the sequences, and the truth."""
    p, (o, final) = case(lengths, HK=2, K=20, V=36, **sizes)
    return [LAYOUTS["BSND"](p[name]) for name in INPUTS], p["h0"], (LAYOUTS["BSND"](o), final)


def test_names():
    assert tidegate.chunk_gdn is rule and fla.chunk_gated_delta_rule is rule and fla.chunk_gdn is rule


def test_results(isa, dtype):
    inputs, h0, (o, final) = problem(dtype=dtype)
    got = rule(*inputs, initial_state=h0, output_final_state=True, cu_seqlens=CU)
    assert got[0].dtype == dtype and got[1].dtype == torch.float32
    assert_close("o", got[0], o, 1e-6)
    assert_close("final state", got[1], final, 1e-6)
    alone = rule(*inputs, None, h0, cu_seqlens=CU)
    assert alone[1] is None
    assert_bits("o", alone[0], got[0])
    assert_bits("o", rule(*inputs, 20**-0.5, h0, cu_seqlens=CU.long(), precision="fp32")[0], got[0])
    assert_bits("o", rule(*inputs, cu_seqlens_cpu=CU)[0], rule(*inputs)[0])  # as in FLA
    assert_bits("o", rule(*inputs, initial_state=h0, cu_seqlens=CU, cu_seqlens_cpu=CU.long())[0], got[0])
    assert_close("o", rule(*inputs, scale=1, initial_state=h0, cu_seqlens=CU)[0], o * 20**0.5, 1e-6)


def test_rows_without_boundaries(isa):
    inputs, h0, _ = problem((70, 70))
    want = rule(*inputs, initial_state=h0, output_final_state=True, cu_seqlens=torch.tensor([0, 70, 140]))
    rows = [t.view(2, 70, *t.shape[2:]) for t in (t.contiguous() for t in inputs)]
    got = rule(*rows, initial_state=h0, output_final_state=True)
    assert_bits("o", got[0].view(want[0].shape), want[0])
    assert_bits("final state", got[1], want[1])


@pytest.mark.parametrize("negative", [False, True])
def test_everything_inside(isa, negative):
    p = make([70], HK=2, K=20, V=36)
    raw = p | {"q": p["q"] * 3, "k": p["k"] * 2, "g": torch.randn(4, 70), "beta": torch.randn(4, 70)}
    A_log, dt_bias = torch.rand(4) - 2, torch.randn(4)
    o, final = rule(
        *[LAYOUTS["BSND"](raw[name]) for name in INPUTS],
        initial_state=p["h0"],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        allow_neg_eigval=negative,
        use_gate_in_kernel=True,
        A_log=A_log,
        dt_bias=dt_bias,
    )
    wide = {name: raw[name].double() for name in INPUTS}
    wide["q"], wide["k"] = F.normalize(wide["q"], dim=-1), F.normalize(wide["k"], dim=-1)
    wide["g"] = -A_log.double().exp()[:, None] * F.softplus(wide["g"] + dt_bias.double()[:, None])
    wide["beta"] = (2 if negative else 1) * wide["beta"].sigmoid()
    want = truth(p | wide)
    assert_close("o", o, LAYOUTS["BSND"](want[0]), 1e-6)
    assert_close("final state", final, want[1], 1e-6)


def test_gate_parameters_count_only_with_the_gate_inside():
    inputs, _, _ = problem()
    want = rule(*inputs, cu_seqlens=CU)[0]
    got = rule(*inputs, cu_seqlens=CU, use_gate_in_kernel=False, A_log=torch.ones(4), dt_bias=torch.ones(4))[0]
    assert_bits("o", got, want)


def test_state_v_first_and_its_old_name():
    inputs, h0, _ = problem()
    want = rule(*inputs, initial_state=h0, output_final_state=True, cu_seqlens=CU)
    flipped = {"initial_state": h0.mT.contiguous(), "output_final_state": True, "cu_seqlens": CU}
    got = rule(*inputs, state_v_first=True, **flipped)
    with pytest.warns(DeprecationWarning, match="transpose_state_layout"):
        old = rule(*inputs, transpose_state_layout=True, **flipped)
    for o, final in (got, old):
        assert_bits("o", o, want[0])
        assert_bits("final state", final.mT, want[1])
    with pytest.raises(ValueError, match="transpose_state_layout: expected none with state_v_first"):
        rule(*inputs, state_v_first=True, transpose_state_layout=True, **flipped)


def test_chunk_hints():
    inputs, _, _ = problem()
    want = rule(*inputs, cu_seqlens=CU)[0]
    for size in (16, 32, 64):
        chunks = torch.tensor([[n, c] for n, length in enumerate((5, 0, 65)) for c in range(-(-length // size))])
        assert_bits("o", rule(*inputs, cu_seqlens=CU, chunk_indices=chunks, chunk_size=size)[0], want)
        with pytest.raises(ValueError, match="chunk_indices: expected the chunk list of cu_seqlens"):
            rule(*inputs, cu_seqlens=CU, chunk_indices=chunks.flip(0), chunk_size=size)


@pytest.mark.parametrize("dynamic", [False, True])
def test_hints_compile(dynamic):
    inputs, h0, _ = problem()
    torch._dynamo.reset()
    compiled = torch.compile(rule, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    chunks = torch.tensor([[0, 0], [2, 0], [2, 1], [2, 2]])
    want = rule(*inputs, cu_seqlens=CU)[0]
    for hint in ({"chunk_indices": chunks, "chunk_size": 32}, {"cu_seqlens_cpu": CU.long()}):
        assert_bits("o", compiled(*inputs, cu_seqlens=CU, **hint)[0], want)
    with pytest.raises(RuntimeError, match="chunk_indices: expected the chunk list of cu_seqlens, got another one"):
        compiled(*inputs, cu_seqlens=CU, chunk_indices=chunks.flip(0), chunk_size=32)
    with pytest.raises(RuntimeError, match="cu_seqlens_cpu: expected the values of cu_seqlens, got others"):
        compiled(*inputs, cu_seqlens=CU, cu_seqlens_cpu=CU + torch.tensor([0, 1, 1, 0]))
    old = {"initial_state": h0.mT.contiguous(), "cu_seqlens": CU, "transpose_state_layout": True}
    assert_bits("o", compiled(*inputs, **old)[0], rule(*inputs, initial_state=h0, cu_seqlens=CU)[0])


class Context:
    def __init__(self, cu_seqlens):
        self.cu_seqlens = cu_seqlens


ERRORS = {
    "head counts of q and k": (ValueError, {"q": torch.ones(1, 70, 4, 20)}),
    "value heads no multiple of key heads": (ValueError, {"v": torch.ones(1, 70, 3, 36)}),
    "boundaries with two rows": (ValueError, {"rows": 2}),
    "number of states": (ValueError, {"initial_state": torch.zeros(2, 4, 20, 36)}),
    "boundaries not from 0": (ValueError, {"cu_seqlens": torch.tensor([1, 70])}),
    "boundaries decreasing": (ValueError, {"cu_seqlens": torch.tensor([0, 60, 50, 70])}),
    "boundaries short": (ValueError, {"cu_seqlens": torch.tensor([0, 69])}),
    "two boundaries": (ValueError, {"cu_seqlens_cpu": torch.tensor([0, 70])}),
    "other boundaries": (ValueError, {"cu_seqlens_cpu": torch.tensor([0, 6, 6, 70])}),
    "list of boundaries": (TypeError, {"cu_seqlens": [0, 70]}),
    "list as second boundaries": (TypeError, {"cu_seqlens_cpu": [0, 70]}),
    "text as chunk list": (TypeError, {"chunk_indices": "0"}),
    "short rows of a chunk list": (ValueError, {"chunk_indices": torch.tensor([[0], [2], [2]])}),
    "chunk list without boundaries": (ValueError, {"chunk_indices": torch.tensor([[0, 0]]), "cu_seqlens": None}),
    "chunk list with an unknown sequence": (ValueError, {"chunk_indices": torch.tensor([[0, 0], [2, 0], [3, 0]])}),
    "chunk list with one too many": (ValueError, {"chunk_indices": torch.tensor([[0, 0], [2, 0], [2, 1], [2, 2]])}),
    "text as context": (TypeError, {"cp_context": "context"}),
    "chunk size": (ValueError, {"chunk_size": 128}),
    "chunk list": (ValueError, {"chunk_indices": torch.tensor([[0, 0]])}),
    "chunk list of another size": (ValueError, {"chunk_indices": torch.tensor([[0, 0], [2, 0]]), "chunk_size": 64}),
    "head_first": (DeprecationWarning, {"head_first": False}),
    "negative eigenvalues without sigmoid": (ValueError, {"allow_neg_eigval": True}),
    "gate without A_log": (AssertionError, {"use_gate_in_kernel": True}),
    "context with a state": (AssertionError, {"cp_context": Context(CU), "initial_state": torch.zeros(3, 4, 20, 36)}),
    "context with a final state": (AssertionError, {"cp_context": Context(CU), "output_final_state": True}),
    "context without boundaries": (AssertionError, {"cp_context": Context(None)}),
    "context": (ValueError, {"cp_context": Context(CU)}),
    "unknown argument": (TypeError, {"cu_seqlen": CU}),
    "precision": (ValueError, {"precision": "fp16"}),
    "dtype of v": (TypeError, {"v": torch.ones(1, 70, 4, 36, dtype=torch.bfloat16)}),
    "dtype of g": (TypeError, {"g": torch.ones(1, 70, 4, dtype=torch.int64)}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_errors(name):
    kind, changes = ERRORS[name]
    inputs, _, _ = problem()
    call = dict(zip(INPUTS, inputs, strict=True)) | {"cu_seqlens": CU} | changes
    rows = call.pop("rows", 1)
    call |= {k: call[k].expand(rows, *call[k].shape[1:]) for k in INPUTS}
    with pytest.raises(kind) as caught:
        rule(**call)
    assert caught.type is kind
