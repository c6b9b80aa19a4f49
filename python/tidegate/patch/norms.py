"""Row norms: found by their structure; what exactly they compute is decided by running them.

Of a block norm four things can differ: whether the factor is w or 1 + w, and whether the row is rounded before or after
it. A name says nothing about that, and a mean of the weights even less.
"""

import functools
import inspect

import torch
from torch import nn

from tidegate._native import ops
from tidegate.errors import SelfTestError
from tidegate.patch import selftest
from tidegate.patch.gdn_families import family_of
from tidegate.patch.resolve import named_modules, unreadable
from tidegate.patch.site import ForwardSite, Site, call_original, foreign_forward

EPS_NAMES = ("eps", "variance_epsilon", "epsilon")
OPEN = 100.0  # sigmoid is 1 there, exactly: the gated norm without its gate
SAME_BITS = (
    0.98  # of bf16 results; another rounding rule changes a tenth of them, another order of a sum one in a thousand
)


def eps_name(module):
    """The one attribute that holds a norm's epsilon, or None."""
    found = [name for name in EPS_NAMES if isinstance(getattr(module, name, None), float)]
    return found[0] if len(found) == 1 else None


def _is_row_norm(module, arguments):
    parameters = dict(module.named_parameters(recurse=False))
    if set(parameters) != {"weight"} or parameters["weight"].dim() != 1 or next(module.children(), None) is not None:
        return False
    if eps_name(module) is None or next(module.buffers(recurse=False), None) is not None:
        return False
    given = list(inspect.signature(type(module).forward).parameters.values())[1:]
    given = [p for p in given if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return len(given) == arguments


def _zero_centred(x, weight, eps):
    return ops.rms_norm_fwd(x, weight, eps=eps)[0]


def _plain(x, weight, eps, rounding):
    gate = torch.full((x.shape[-1],), OPEN, dtype=x.dtype, device=x.device).expand(x.shape)  # one row in memory
    return ops.rms_norm_gated_fwd(x, gate, weight, eps=eps, activation="sigmoid", rounding=rounding)[0]


KINDS = {
    "1 + w, rounded after": _zero_centred,
    "w, rounded after": functools.partial(_plain, rounding="fp32"),
    "w, rounded before": functools.partial(_plain, rounding="hf"),
}
KNOWN = {"olmo_hybrid": "w, rounded after"}  # the other families we know: 1 + w


@torch.no_grad()
def kind_of(module):
    """Which of KINDS a norm is, by running it on random rows in fp32 and bf16. SelfTestError if it is none of them."""
    generator = torch.Generator().manual_seed(0)
    width, eps = module.weight.shape[0], getattr(module, eps_name(module))
    x, weight = torch.randn(64, width, generator=generator), torch.randn(width, generator=generator)
    matching = []
    for kind, compute in KINDS.items():
        fits = True
        for dtype in (torch.float32, torch.bfloat16):
            twin = selftest.plain_copy(module, dtype)
            twin.weight.copy_(weight)
            expected = twin.forward(x.to(dtype))
            got = compute(x.to(dtype), twin.weight, eps)
            fits &= expected.dtype == got.dtype and expected.shape == got.shape
            fits = fits and selftest.error(got, expected) <= (selftest.FP32_LIMIT if dtype == torch.float32 else 0.01)
            fits = fits and (dtype == torch.float32 or float((got == expected).float().mean()) >= SAME_BITS)
        if fits:
            matching.append(kind)
    if len(matching) != 1:
        raise SelfTestError(f"computes none of: {'; '.join(KINDS)}" if not matching else f"fits {matching}")
    return matching[0]


@functools.cache
def _norm_forward(kind, eps):
    compute = KINDS[kind]

    def forward(self, x):
        return compute(x, self.weight, getattr(self, eps))

    return forward


@functools.cache
def _gated_forward(eps, rounding):
    def forward(self, hidden_states, gate=None):
        if gate is None:
            return call_original(self, "gated_rmsnorm", hidden_states)
        return ops.rms_norm_gated_fwd(
            hidden_states,
            gate.to(hidden_states.dtype),
            self.weight,
            eps=getattr(self, eps),
            activation=getattr(self, "activation", "silu"),
            rounding=rounding,
        )[0]

    return forward


def _compare(site, arguments):
    """The self-test of a norm in its own type."""

    @torch.no_grad()
    def test():
        module, dtype = site.module, site.module.weight.dtype
        generator = torch.Generator().manual_seed(1)
        rows = [torch.randn(64, module.weight.shape[0], generator=generator).to(dtype) for _ in range(arguments)]
        original, reference = selftest.plain_copy(module), selftest.plain_copy(module, torch.float32)
        results = (
            selftest.trial_copy(site).forward(*rows),
            original.forward(*rows),
            reference.forward(*map(_float, rows)),
        )
        return selftest.summary([selftest.judge("random rows", *results)], dtype)

    return test


def _float(x):
    return x.float()


def _refusal(module, options):
    """Why a norm is not taken before anything is known about what it computes."""
    if getattr(module, "group_size", None) is not None:
        return "normalises groups of channels"
    other = foreign_forward(module)
    if other is not None:
        return f"forward already replaced by {other}"
    if family_of(module) is None and not options.on("discovery"):
        return "unknown family, and discovery is off"
    return None


def find(root, options):
    """Block norms."""
    sites, kinds = [], {}
    for path, module in named_modules(root):
        if not _is_row_norm(module, 1) or isinstance(module, nn.LayerNorm):
            continue
        reason, family, key = _refusal(module, options), family_of(module), selftest.key(module)
        if reason is None and unreadable(module):
            kinds[key] = KNOWN.get(family, "1 + w, rounded after"), None
        elif reason is None and key not in kinds:
            try:
                kinds[key] = kind_of(module), None
            except (SelfTestError, RuntimeError, TypeError, ValueError) as error:
                kinds[key] = None, str(error)
        kind, reason = (None, reason) if reason is not None else kinds[key]
        if reason is not None:
            sites.append(Site(path, "rmsnorm", module).refuse(reason))
            continue
        about = dict(known=family is not None, reason=kind, test_key=key)
        site = ForwardSite(path, "rmsnorm", module, "I:norm", _norm_forward(kind, eps_name(module)), **about)
        site.test = _compare(site, 1)
        sites.append(site)
    return sites


def find_gated(root, options):
    """Norms with a gate."""
    sites = []
    rounding = "fp32" if options.gated_rmsnorm_fp32 else "hf"
    for path, module in named_modules(root):
        if not _is_row_norm(module, 2):
            continue
        reason = _refusal(module, options)
        if reason is None and getattr(module, "activation", "silu") not in ("silu", "swish", "sigmoid"):
            reason = f"activation is {module.activation}, not silu or sigmoid"
        if reason is not None:
            sites.append(Site(path, "gated_rmsnorm", module).refuse(reason))
            continue
        about = dict(known=family_of(module) is not None, reason=f"rounding {rounding}", test_key=selftest.key(module))
        forward = _gated_forward(eps_name(module), rounding)
        site = ForwardSite(path, "gated_rmsnorm", module, "I:norm", forward, **about)
        site.test = _compare(site, 2)
        sites.append(site)
    return sites


find.ops, find_gated.ops = ("rmsnorm",), ("gated_rmsnorm",)
