"""Tensors for samples of operators; see samples.py."""

import torch


def floats(*shape, dtype=torch.float32, grad=True):
    return torch.randn(shape).to(dtype).requires_grad_(grad)


def data(*shape, dtype=torch.float32):
    """Inputs of operators without a gradient."""
    return floats(*shape, dtype=dtype, grad=False)
