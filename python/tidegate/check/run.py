"""Runs a model for a check without leaving traces: modes, random numbers and gradients stay as they were."""

import contextlib

import torch
from torch import nn

# rms errors, relative to the rms of the values: two computations of some layers that round at different places.
# Gradients pass every layer twice and get ten times that.
LIMITS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 2e-2, torch.bfloat16: 5e-2}
GRADIENTS = 10


def text_model(model):
    """The module that owns the token embeddings and the layers, or None."""
    for module in model.modules():
        if isinstance(getattr(module, "layers", None), nn.ModuleList) and hasattr(module, "embed_tokens"):
            return module
    return None


def vocabulary(model):
    return model.get_input_embeddings().weight.shape[0]


def require_weights(op, model):
    """Fails for a model without weights. A hook of accelerate brings those that are offloaded, and meta until then."""
    empty = next((name for name, parameter in model.named_parameters() if parameter.is_meta), None)
    if empty is not None and not any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise ValueError(f"{op}: model: expected weights, got none: {empty} is on the meta device")


def limit_of(model):
    """The limit for the narrowest floating type among the parameters."""
    return max(LIMITS.get(parameter.dtype, 5e-2) for parameter in model.parameters())


@contextlib.contextmanager
def undisturbed(model, seed):
    """Evaluation mode and seeded random numbers for a block. Module.eval() is not called: it may re-install kernels."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for module, _ in modes:
                module.training = False
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def random_ids(model, length):
    return torch.randint(0, vocabulary(model), (length,))


def logits_of(model, ids, **kwargs):
    """Logits [T,V] of one row."""
    with torch.no_grad():
        return first_row(model(input_ids=ids[None], **kwargs))


def first_row(out):
    """Logits of the first row of a batch; of a model without a head its hidden states."""
    logits = getattr(out, "logits", None)
    return (out.last_hidden_state if logits is None else logits)[0]


def gradients_of(model, ids, parameters, **kwargs):
    """Logits of one row, the gradient with respect to its embeddings [T,H], and those of parameters.

    What is differentiated is a sum over tokens of a fixed function of the token's logits, so that the parts of a packed
    row add up to the whole.
    """
    embeddings = model.get_input_embeddings()(ids[None]).detach().requires_grad_()
    with torch.enable_grad():
        logits = first_row(model(inputs_embeds=embeddings, **kwargs))
        weights = torch.randn(logits.shape[-1], generator=torch.Generator().manual_seed(0))
        loss = (logits.float() * weights).sum() / logits.shape[-1] ** 0.5
        wanted = [embeddings, *parameters]
        found = torch.autograd.grad(loss, wanted, allow_unused=True)
    zeros = [torch.zeros_like(x) if g is None else g for x, g in zip(wanted, found, strict=True)]
    return logits.detach(), zeros[0][0], zeros[1:]


def middle_error_of(got, expected):
    """The error of the middle one of the tokens [T,V], relative to the rms of all values; inf if it is not a number."""
    got, expected = got.double(), expected.double()
    errors = (got - expected).square().mean(-1).sqrt().nan_to_num(float("inf"))
    return float(errors.median() / expected.square().mean().sqrt())


def error_of(got, expected):
    """rms of the difference, relative to that of the expected values. Lists are taken as one long tensor: gradients of
    decays are small differences of large sums, so that some have few right digits in anybody's fp32."""
    pairs = zip(got, expected, strict=True) if isinstance(got, (list, tuple)) else [(got, expected)]
    difference = scale = 0.0
    for one, other in pairs:
        difference += float((one.double() - other.double()).square().sum())
        scale += float(other.double().square().sum())
    if not difference < float("inf"):  # NaN too
        return float("inf")
    return (difference / scale) ** 0.5 if scale > 0 else float(difference > 0)
