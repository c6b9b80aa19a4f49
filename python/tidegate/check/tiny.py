"""Tiny random models of the known families: what `tidegate check <family>` and the tests run."""

import torch

VOCABULARY = 97
_COMMON = dict(
    vocab_size=VOCABULARY,
    hidden_size=32,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    linear_conv_kernel_dim=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    pad_token_id=0,
    bos_token_id=None,
    eos_token_id=None,
)
_DENSE = dict(intermediate_size=48)
_MOE = dict(moe_intermediate_size=16, shared_expert_intermediate_size=16, num_experts=4, num_experts_per_tok=2)
_ROPE = dict(rope_theta=10000.0, rope_type="default", partial_rotary_factor=0.5)
_MROPE = dict(_ROPE, mrope_section=[2, 1, 1], mrope_interleaved=True)
_INDEXER = dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=16, indexer_budget=64, indexer_compress_ratio=4)


def _layers(count, other="full_attention"):
    return [other if (i + 1) % 4 == 0 or (i + 1 == count and count < 4) else "linear_attention" for i in range(count)]


def _sizes(family, layers):
    size = dict(_COMMON, num_hidden_layers=layers, layer_types=_layers(layers))
    if family == "qwen3_5":
        return size | _DENSE | dict(rope_parameters=dict(_MROPE))
    if family == "qwen3_5_moe":
        return size | _MOE | dict(rope_parameters=dict(_MROPE))
    if family == "qwen3_next":
        return size | _DENSE | _MOE | dict(rope_parameters=dict(_ROPE), partial_rotary_factor=0.5)
    if family == "olmo_hybrid":
        size.pop("head_dim")
        return size | _DENSE | dict(rope_parameters=None)
    size |= _MOE | dict(rope_parameters=dict(_MROPE), hc_count=2, hc_lowrank=8, output_gate_type="sigmoid")
    return size | _INDEXER | dict(layer_types=_layers(layers, "indexed_attention"))


class UnknownFamily(LookupError):
    """This Transformers does not have the family."""


CONFIGS = {
    "qwen3_5": "Qwen3_5TextConfig",
    "qwen3_5_moe": "Qwen3_5MoeTextConfig",
    "qwen3_next": "Qwen3NextConfig",
    "olmo_hybrid": "OlmoHybridConfig",
    "qwen4_exp": "Qwen4ExpTextConfig",
}


def config_of(family, layers=4, **changes):
    """The configuration of a tiny text model; raises UnknownFamily where this Transformers does not know it."""
    import transformers

    if not hasattr(transformers, CONFIGS[family]):
        raise UnknownFamily(f"Transformers {transformers.__version__} has no {family}")
    return getattr(transformers, CONFIGS[family])(**(_sizes(family, layers) | changes))


def build(family, seed=0, dtype=torch.float32, layers=4, config=None, **changes):
    """A tiny ...ForCausalLM in eval mode, with weights large enough that every part of a layer matters."""
    import transformers

    config = config_of(family, layers, **changes) if config is None else config
    name = type(config).__name__.removesuffix("Config").removesuffix("Text") + "ForCausalLM"
    torch.manual_seed(seed)
    model = getattr(transformers, name)(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("norm.weight"):
                parameter.add_(0.3 * torch.randn_like(parameter))
            elif parameter.dim() >= 2:
                parameter.mul_(3)  # the initial 0.02 leaves every nonlinearity in its linear part
    return model.to(dtype)
