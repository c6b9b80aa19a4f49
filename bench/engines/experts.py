"""What engines share for items with experts."""

from reference import SAMPLED


def made(x, name, make):
    """What an engine makes of the weights, once for all inputs of an item."""
    if name not in x["made"]:
        x["made"][name] = make()
    return x["made"][name]


def sampled(results):
    """Gradients as they are compared: those of weights for a few experts."""
    return {n: r[:SAMPLED] if n in ("dgate_up", "ddown") else r for n, r in results.items()}
