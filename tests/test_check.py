"""check and check_isolation: they pass on a patched model, find what is wrong elsewhere, and leave no trace."""

import functools
import re
import time

import pytest
import tiny_models
import torch
from packed_case import packable, packs, patched

import tidegate
from tidegate.check import parts
from tidegate.errors import IsolationError, PackedInputError
from tidegate.patch.site import ForwardSite

pytest.importorskip("transformers")
FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid")


def failed(report):
    return {row.what for row in report.failed()}


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_patched_models_pass(family, capsys):
    model, _ = patched(family)
    report = tidegate.check(model)
    assert report.ok, str(report)
    assert capsys.readouterr().out.strip() == str(report)
    names = {row.what for row in report.rows}
    assert {"patched vs original: logits", "patched vs original: gradients", "padded on the left vs unpadded"} <= names
    assert "with a cache, token by token, vs at once" in names
    note = next(row.note for row in report.rows if row.what.startswith("packed vs separate"))
    assert note.startswith("refused: this model cannot run packed input") != packs(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_isolation_of_patched_models(family):
    report = tidegate.check_isolation(packable(family))
    assert report.ok and {row.what for row in report.rows} >= {"conv keeps samples apart", "state keeps samples apart"}
    assert next(row.error for row in report.rows if row.what == CACHED) <= 2e-5


@pytest.mark.parametrize("arguments, also", [(None, set()), ({}, {"attention"})], ids=["no cache", "default"])
def test_stock_models_leak(arguments, also):
    """With position_ids alone: convolution and state; with the default use_cache full attention too."""
    model = tiny_models.build("qwen3_5")
    with pytest.raises(IsolationError, match="verdict: .* comparisons failed") as caught:
        tidegate.check_isolation(model, inputs=("position_ids",), arguments=arguments)
    found = {row.what.split()[0] for row in caught.value.report.failed() if "keeps samples apart" in row.what}
    assert found == {"conv", "state"} | also
    assert "samples see each other in layers 0, 1, 2" in str(caught.value)


CACHED = "packed, use_cache at its default, vs separate: logits"


def test_a_leak_of_the_default_cache_alone():
    """Full attention of Transformers keeps samples apart by their positions, but not once it fills a cache."""
    model = tiny_models.build("qwen3_5", layer_types=["full_attention"] * 4)
    try:
        model(tiny_models.tokens(1, 3), use_cache=True)
    except ValueError:
        with pytest.raises(IsolationError, match="failed: ValueError") as caught:  # this release has no cache for it
            tidegate.check_isolation(model, inputs=("position_ids",))
        assert failed(caught.value.report) == {CACHED}
        return
    with pytest.raises(IsolationError, match="pass use_cache=False") as caught:
        tidegate.check_isolation(model, inputs=("position_ids",))
    assert failed(caught.value.report) == {CACHED}
    assert CACHED in failed(tidegate.check(model, show=False))
    report = tidegate.check_isolation(model, inputs=("position_ids",), arguments={"use_cache": False})
    assert CACHED not in {row.what for row in report.rows}


def test_a_refusal_of_the_default_cache_is_no_leak():
    model = packable("qwen3_5")

    def refuse(module, args, kwargs):
        if "use_cache" not in kwargs:
            raise PackedInputError("packed input cannot fill a cache")

    model.register_forward_pre_hook(refuse, with_kwargs=True)
    report = tidegate.check_isolation(model)
    assert next(row.note for row in report.rows if row.what == CACHED) == (
        "refused: PackedInputError: packed input cannot fill a cache"
    )


@pytest.mark.parametrize("problem", [RuntimeError("broken"), ValueError("broken")], ids=lambda e: type(e).__name__)
def test_an_error_with_the_default_cache_is_no_refusal(problem):
    model = packable("qwen3_5")

    def fail(module, args, kwargs):
        if "use_cache" not in kwargs:
            raise problem

    model.register_forward_pre_hook(fail, with_kwargs=True)
    with pytest.raises(IsolationError, match=f"failed: {type(problem).__name__}: broken") as caught:
        tidegate.check_isolation(model)
    assert failed(caught.value.report) == {CACHED}


def test_stock_models_are_checked_too():
    report = tidegate.check(tiny_models.build("qwen3_5"), show=False)
    assert "not patched" in str(report) and not report.ok
    assert {"packed vs separate: logits", "conv keeps samples apart", "state keeps samples apart"} <= failed(report)
    assert {"padded on the left vs unpadded", "with a cache, token by token, vs at once"}.isdisjoint(failed(report))


class Mixer(torch.nn.Module):
    """A small linear-attention layer whose parts see the boundaries, or do not."""

    def __init__(self, leaks, size=16):
        super().__init__()
        self.leaks = leaks
        self.conv1d = torch.nn.Conv1d(3 * size, 3 * size, 4, groups=3 * size, bias=False)
        self.in_proj = torch.nn.Linear(size, 3 * size + 2)
        self.A_log, self.dt_bias = (torch.nn.Parameter(torch.rand(1)) for _ in range(2))

    def forward(self, hidden_states, cu_seq_lens_q):
        cu = {part: None if part in self.leaks else cu_seq_lens_q for part in ("conv", "state")}
        qkv, b, a = self.in_proj(hidden_states).split([48, 1, 1], -1)
        qkv, _ = tidegate.ops.causal_conv1d_fwd(qkv.contiguous(), self.conv1d.weight[:, 0], cu_seqlens=cu["conv"])
        q, k, v = (x.unsqueeze(2) for x in qkv.split(16, -1))
        g = -self.A_log.exp() * torch.nn.functional.softplus(a + self.dt_bias)
        options = dict(use_qk_l2norm_in_kernel=True, cu_seqlens=cu["state"])
        return tidegate.chunk_gated_delta_rule(q, k, v, g, b.sigmoid(), **options)[0][:, :, 0]


@pytest.mark.parametrize(
    "leaks", [(), ("conv",), ("state",), ("conv", "state")], ids=lambda leaks: "+".join(leaks) or "-"
)
def test_each_part_is_named_alone(leaks):
    cu = torch.tensor([0, 9, 10, 76], dtype=torch.int32)
    call = (0, Mixer(leaks), (torch.randn(1, 76, 16),), {"cu_seq_lens_q": cu})
    found = parts.leaking_parts([call], [(0, 9), (9, 10), (10, 76)])
    assert found == {part: [0] if part in leaks else [] for part in ("conv", "state")}


def test_a_model_that_refuses():
    model, _ = patched("qwen3_5", options=tidegate.PatchOptions(attention=False))
    with pytest.raises(PackedInputError, match="full attention runs 'sdpa'"):
        tidegate.check_isolation(model)
    report = tidegate.check(model, show=False)
    assert report.ok and "refused: this model cannot run packed input" in str(report)


def test_no_traces(family="qwen3_5"):
    model, handle = patched(family)
    model.train()
    model.model.norm.eval()
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    ids = tiny_models.tokens()
    modes = [module.training for module in model.modules()]
    attributes = {path: list(module.__dict__) for path, module in model.named_modules()}
    random, want = torch.get_rng_state(), tiny_models.logits(model, ids)
    tidegate.check(model, show=False)
    tidegate.check_isolation(model)
    assert torch.equal(torch.get_rng_state(), random) and [m.training for m in model.modules()] == modes
    assert {path: list(module.__dict__) for path, module in model.named_modules()} == attributes
    assert all((parameter.grad == 1).all() for parameter in model.parameters())
    assert torch.equal(tiny_models.logits(model, ids), want)
    assert {row.status for row in handle.report()} <= {"installed", "absent"}
    assert tidegate.patch(model) is handle


def _norm(self, x):
    """Plain weight instead of 1 + weight."""
    wide = x.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6) * self.weight.float()).to(x.dtype)


def _sigmoid_gate(self, x, gate):
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)
    return (self.weight * wide * gate.float().sigmoid()).to(x.dtype)


def _gelu(self, x):
    return self.down_proj(torch.nn.functional.gelu(self.gate_proj(x)) * self.up_proj(x))


def _swapped(self, x):
    return self.down_proj(self.gate_proj(x) * torch.nn.functional.silu(self.up_proj(x)))


def _experts(self, x, index, weights, transposed=False, swapped=False):
    out = torch.zeros_like(x)
    for t, k in [(t, k) for t in range(x.shape[0]) for k in range(index.shape[1])]:
        up = self.gate_up_proj[index[t, k]]
        gate, up = ((up.T if transposed else up) @ x[t]).chunk(2)
        gate, up = (up, gate) if swapped else (gate, up)
        out[t] += weights[t, k] * (self.down_proj[index[t, k]] @ (torch.nn.functional.silu(gate) * up))
    return out


def _narrow_rope(self, x, position_ids):
    return tuple(table[..., : table.shape[-1] // 2] for table in type(self).forward(self, x, position_ids))


def _double_beta(self, x):
    return torch.logit((2 * torch.nn.functional.linear(x, self.weight).sigmoid()).clamp(max=0.999))


FAULTS = {
    "norm offset": ("qwen3_5", r"input_layernorm$", _norm),
    "sigmoid gate": ("qwen3_5", r"linear_attn\.norm$", _sigmoid_gate),
    "GELU": ("qwen3_5", r"\.mlp$", _gelu),
    "gate and up swapped": ("qwen3_5", r"\.mlp$", _swapped),
    "experts transposed": ("qwen3_5_moe", r"experts$", functools.partial(_experts, transposed=True)),
    "experts swapped": ("qwen3_5_moe", r"experts$", functools.partial(_experts, swapped=True)),
    "RoPE width": ("qwen3_5", r"rotary_emb$", _narrow_rope),
    "beta x 2": ("qwen3_5", r"in_proj_b$", _double_beta),
}


def plant(model, pattern, function):
    """Installs a wrong forward as if it were ours, beside the right patch of other parts."""
    handle = tidegate.patch(model, ops=("gdn_layer", "attention"), options=tidegate.PatchOptions(gated_rmsnorm=False))
    for path, module in model.named_modules():
        if re.search(pattern, path):
            site = ForwardSite(path, "swiglu", module, "I:planted", function)
            site.install(handle.settings, handle)
            handle.sites.append(site)
            planted = True
    assert planted


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_found(fault):
    family, pattern, function = FAULTS[fault]
    model = tiny_models.build(family)
    plant(model, pattern, function)
    wrong = {what for what in failed(tidegate.check(model, show=False)) if what.startswith("patched vs original")}
    assert wrong == {"patched vs original: logits", "patched vs original: gradients"}


@pytest.mark.parametrize("fault", ["experts swapped", "beta x 2"])
def test_planted_faults_are_found_in_16_bits(fault):
    family, pattern, function = FAULTS[fault]
    model = tiny_models.build(family).bfloat16()
    plant(model, pattern, function)
    rows = [row for row in tidegate.check(model, show=False).failed() if row.what == "patched vs original: logits"]
    assert rows and "from fp32, that of the original" in rows[0].note


def test_fp32_decides_where_16_bits_take_another_expert(seeds=4):
    """Roundings at different places send tokens to different experts, with logits farther apart than the limit."""
    model = tiny_models.build("qwen3_5_moe").bfloat16()
    tidegate.patch(model)
    reports = [tidegate.check(model, seed=seed, show=False) for seed in range(seeds)]
    assert all(report.ok for report in reports), reports
    assert any("from fp32, that of the original" in row.note for report in reports for row in report.rows)


def test_the_plant_itself_is_no_fault():
    model = tiny_models.build("qwen3_5_moe")
    plant(model, r"experts$", _experts)
    assert tidegate.check(model, show=False).ok


SIZES = dict(
    layers=24,
    hidden_size=1024,
    intermediate_size=3584,
    vocab_size=248320,
    head_dim=256,
    num_attention_heads=8,
    linear_key_head_dim=128,
    linear_value_head_dim=128,
    linear_num_key_heads=16,
    linear_num_value_heads=16,
    tie_word_embeddings=False,
    rope_parameters=dict(rope_theta=1e7, rope_type="default", partial_rotary_factor=0.25, mrope_section=[11, 11, 10]),
)


def billion():
    """A model of the sizes of Qwen3.5-0.8B with a head of its own. Only the layers that are run have memory."""
    import transformers

    config = tiny_models.config_of("qwen3_5", **SIZES)
    with torch.device("meta"):
        model = transformers.Qwen3_5ForCausalLM(config).eval()
    noise = 0.02 * torch.randn(1 << 20)
    for module in (model.model.embed_tokens, model.lm_head, *model.model.layers[:4]):
        module.to_empty(device="cpu")
        for name, parameter in module.named_parameters():
            if parameter.dim() == 1:
                parameter.data.fill_(0.0 if "norm" in name and "linear" not in name else 1.0)
            for part in parameter.data.view(-1).split(noise.numel()) if parameter.dim() > 1 else ():
                part.copy_(noise[: part.numel()])
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.model.norm.to_empty(device="cpu").weight.data.zero_()
    return model


@pytest.mark.parametrize("function", [tidegate.check, tidegate.check_isolation])
def test_a_model_without_weights_is_an_error(function):
    model = tiny_models.build("qwen3_5", layers=1).to("meta")
    with pytest.raises(ValueError, match=f"{function.__name__}: model: expected weights, got none: .*meta device"):
        function(model)


def test_isolation_names_an_unknown_input():
    with pytest.raises(ValueError, match="check_isolation: inputs: expected names from position_ids, .*, got 'foo'"):
        tidegate.check_isolation(tiny_models.build("qwen3_5", layers=1), inputs=("position_ids", "foo"))


@pytest.mark.slow
def test_a_billion_parameters_take_seconds():
    model = billion()
    assert sum(parameter.numel() for parameter in model.parameters()) > 1e9
    tidegate.patch(model)
    for _ in range(2):  # the first may find cold memory
        begin = time.process_time()
        report = tidegate.check(model, show=False)
        seconds = (time.process_time() - begin) / torch.get_num_threads()
        if seconds <= 5:
            break
    assert report.ok, str(report)
    assert "the first 4 of 24 layers" in str(report)
    assert seconds <= 5
