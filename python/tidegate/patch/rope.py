"""Rotary embedding: the attention's own forward, calling our rotation instead of the global function."""

import torch

from tidegate._native import ops
from tidegate.errors import SelfTestError
from tidegate.patch import selftest
from tidegate.patch.code import innermost, that_names, with_globals
from tidegate.patch.gdn_families import family_of
from tidegate.patch.resolve import named_modules
from tidegate.patch.site import ForwardSite, Site, foreign_forward

NAME = "apply_rotary_pos_emb"


def _rotate(x, cos, sin, layout):
    if cos.dim() == 3 and cos.shape[0] != x.shape[0]:  # one row of tables for all
        cos, sin = cos.expand(x.shape[0], -1, -1), sin.expand(x.shape[0], -1, -1)
    # Tables wider than x: the model computes in their type and rounds once.
    wider = cos.dtype == torch.float32 and x.dtype in (torch.bfloat16, torch.float16)
    if not wider:
        cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return ops.partial_rope_fwd(x, cos, sin, layout=layout, rounding="fp32" if wider else "hf")


def apply_rotary_pos_emb(q, k, cos, sin, position_ids=None, unsqueeze_dim=1):
    """Rotates the first cos.shape[-1] channels of q and k. An int in the place of position_ids is unsqueeze_dim."""
    if isinstance(position_ids, int):
        unsqueeze_dim = position_ids
    layout = {1: "BNSD", 2: "BSND"}[unsqueeze_dim]
    return _rotate(q, cos, sin, layout), _rotate(k, cos, sin, layout)


def _compare(site, original):
    @torch.no_grad()
    def test():
        module = site.module
        dtype, head = selftest.type_of(module), module.head_dim
        generator = torch.Generator().manual_seed(2)
        make = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        errors = []
        for width in {head, head // 2 // 2 * 2}:
            q, k, angle = make(2, 3, 5, head).to(dtype), make(2, 1, 5, head).to(dtype), make(2, 5, width // 2)
            angle = torch.cat((angle, angle), -1)
            cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
            try:
                expected = original(q, k, cos, sin)
            except RuntimeError:  # a model that rotates whole heads
                continue
            exact = original(*(t.float() for t in (q, k, cos, sin)))
            got = apply_rotary_pos_emb(q, k, cos, sin)
            errors += [
                selftest.judge(f"{width} of {head} channels", *row) for row in zip(got, expected, exact, strict=True)
            ]
        if not errors:
            raise SelfTestError("self-test: the model's rotation takes none of the usual tables")
        return selftest.summary(errors, dtype)

    return test


def find(root, options):
    sites = []
    for path, module in named_modules(root):
        forward = that_names(type(module).forward, (NAME,))
        if forward is None or not isinstance(getattr(module, "head_dim", None), int):
            continue
        family, other = family_of(module), foreign_forward(module)
        reason = f"forward already replaced by {other}" if other is not None else None
        if family == "qwen4_exp":
            reason = "indexed attention is left as it is"
        elif family is None and not options.on("discovery"):
            reason = "unknown family, and discovery is off"
        if reason is not None:
            sites.append(Site(path, "rope", module).refuse(reason))
            continue
        original = innermost(forward.__globals__[NAME])
        replaced = with_globals(forward, {NAME: apply_rotary_pos_emb})
        about = dict(known=family is not None, test_key=(original, module.head_dim, selftest.key(module)[1]))
        site = ForwardSite(path, "rope", module, "R:globals", replaced, **about)
        site.test = _compare(site, original)
        sites.append(site)
    return sites


find.ops = ("rope",)
