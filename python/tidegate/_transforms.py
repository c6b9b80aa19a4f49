"""Transforms of torch that our operators do not have, refused by name instead of by accident."""

import functools

import torch
from torch.autograd import forward_ad


def refuse_transforms(name, kernel):
    """The kernel without forward mode: torch would drop the tangents and go on, as if all derivatives were zero.

    And without the transforms of torch.func that differentiate: register_autograd has none, and does not say so.
    """

    @functools.wraps(kernel)
    def guarded(*args, **kwargs):
        # Negative outside of dual_level and torch.func.jvp: an ordinary call pays for one comparison.
        if forward_ad._current_level >= 0 and torch._C._is_fwd_grad_enabled():
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor) and forward_ad.unpack_dual(value).tangent is not None:
                    raise NotImplementedError(
                        f"forward-mode AD is not supported by tidegate::{name}: an input has a tangent"
                    )
        try:
            return kernel(*args, **kwargs)
        except RuntimeError as error:
            if "functorch transforms" not in str(error):
                raise
            raise NotImplementedError(
                f"torch.func.grad, vjp and jacrev are not supported by tidegate::{name}: use torch.autograd.grad"
            ) from None

    return guarded
