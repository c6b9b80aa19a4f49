"""Linear layers in 16 bits: every call where torch has no product for the type, else inference with few rows."""

import functools
import math

import torch

from tidegate import _native
from tidegate.errors import SelfTestError
from tidegate.linear import linear, rows_served
from tidegate.patch.resolve import is_sharded, named_modules
from tidegate.patch.site import ForwardSite, Site, call_original, foreign_forward

OP = "linear"
TESTED_ROWS = 64  # of a weight: a vocabulary's worth of them would take longer than the rest of the patch


def _is_plain(weight):
    """Whole and unquantised: packages put subclasses of tensors into layers that look like others."""
    return type(weight) in (torch.Tensor, torch.nn.Parameter)


@functools.cache
def forward(most):
    """A forward that serves calls of up to `most` rows without gradients; without a limit, those that train too."""

    def forward(self, input):
        weight = self.weight
        if input.dtype != weight.dtype or input.device != weight.device or not _is_plain(weight):
            return call_original(self, OP, input)  # autocast, offloading, sharding and quantising know what to do
        if most < math.inf:
            trains = torch.is_grad_enabled() and (input.requires_grad or weight.requires_grad)
            # An exported graph must not depend on the number of rows.
            if trains or torch.compiler.is_exporting() or input.numel() > most * weight.shape[1]:
                return call_original(self, OP, input)
        return linear(input, weight, self.bias)

    return forward


def _test(module):
    """Against fp32, beside torch's own error."""

    def test():
        with torch.no_grad():
            weight = module.weight[:TESTED_ROWS]
            bias = None if module.bias is None else module.bias[:TESTED_ROWS]
            generator = torch.Generator().manual_seed(0)
            x = torch.randn(3, weight.shape[1], generator=generator).to(weight.dtype)
            truth = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
            scale = truth.abs().max().clamp(min=1e-30)
            ours = (linear(x, weight, bias).float() - truth).abs().max() / scale
            theirs = (torch.nn.functional.linear(x, weight, bias).float() - truth).abs().max() / scale
        if not ours <= 2 * theirs + 1e-6:
            raise SelfTestError(f"error {ours:.1e} against fp32, torch's own {theirs:.1e}")
        return f"err {ours:.1e}"

    return test


def find(root, options):
    sites = []
    if _native.fallback:  # plain torch is what the layer has already
        return sites
    for path, module in named_modules(root):
        if not isinstance(module, torch.nn.Linear) or not (_is_plain(module.weight) or is_sharded(module.weight)):
            continue
        most = rows_served(module.weight.dtype)
        if most == 0:
            continue
        if type(module).forward is not torch.nn.Linear.forward:
            continue  # a quantised or otherwise special layer does what it does
        other = foreign_forward(module)
        if other is not None:
            sites.append(Site(path, OP, module).refuse(f"forward already replaced by {other}"))
            continue
        key = (OP, module.weight.dtype, tuple(module.weight.shape))
        sites.append(ForwardSite(path, OP, module, "I:product", forward(most), test=_test(module), test_key=key))
    return sites


find.ops = (OP,)
