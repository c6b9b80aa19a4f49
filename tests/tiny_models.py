"""The tiny random models of tidegate.check.tiny, and the batches that tests run through them."""

import inspect

import pytest
import torch

from tidegate.check import tiny
from tidegate.check.tiny import VOCABULARY

FAMILIES = ("qwen3_5", "qwen3_5_moe", "qwen3_next", "olmo_hybrid", "qwen4_exp")


def config_of(family, layers=4, **changes):
    """The configuration of a tiny text model; skips where this Transformers does not know the family."""
    pytest.importorskip("transformers")
    try:
        return tiny.config_of(family, layers, **changes)
    except tiny.UnknownFamily as error:
        pytest.skip(str(error))


def build(family, *args, **kwargs):
    """tiny.build; skips where this Transformers does not know the family."""
    pytest.importorskip("transformers")
    try:
        return tiny.build(family, *args, **kwargs)
    except tiny.UnknownFamily as error:
        pytest.skip(str(error))


def tokens(batch=2, length=40, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(1, VOCABULARY, (batch, length), generator=generator)


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


def relative(got, expected):
    """Largest difference, relative to the largest value."""
    return float((got - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def linear_layers(model):
    """The linear-attention modules of a model."""
    return [module for module in model.modules() if hasattr(module, "A_log") and hasattr(module, "dt_bias")]


def gradients(model, ids, labels=None, **kwargs):
    """Loss and all gradients of a step, by name."""
    model.zero_grad()
    loss = model(ids, labels=ids if labels is None else labels, **kwargs).loss
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def accepts(module, name):
    return name in inspect.signature(module.forward).parameters
