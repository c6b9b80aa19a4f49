"""A big model made short for a check: the first layers, and the first words of the vocabulary."""

import contextlib

from torch import nn
from torch.nn.functional import linear

from tidegate.check.run import text_model

BIG = 200e6  # parameters; a smaller model is run as it is
WORDS = 1024


def _kind(layer):
    names = tuple((name, type(module).__name__) for name, module in layer.named_modules())
    return names, tuple(parameter.shape for parameter in layer.parameters())


def _first_words(head):
    def forward(x):
        weight, bias = (None if p is None else p[:WORDS].to(x.dtype) for p in (head.weight, head.bias))
        return linear(x, weight, bias)  # a copy of the model in fp32 comes by here too

    return forward


@contextlib.contextmanager
def shortened(model):
    """As many layers as it takes to have every kind of layer, for a block. Yields a note about it."""
    owner = text_model(model)
    if owner is None or sum(parameter.numel() for parameter in model.parameters()) < BIG:
        yield ""
        return
    layers = owner.layers
    kinds = [_kind(layer) for layer in layers]
    count = max(kinds.index(kind) for kind in kinds) + 1
    head = model.get_output_embeddings()
    plain = type(head) is nn.Linear and "forward" not in head.__dict__
    try:
        owner.layers = nn.ModuleList(list(layers)[:count])
        if plain:
            head.forward = _first_words(head)
        yield f" (the first {count} of {len(layers)} layers, which are of all kinds, and {WORDS} words)"
    finally:
        owner.layers = layers
        if plain:
            del head.forward
