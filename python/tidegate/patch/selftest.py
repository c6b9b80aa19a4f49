"""Compares a replacement with what it replaces, on random input, before it is installed.

Both run on copies: no hook fires, no state of the model or of the random generators changes.
"""

import contextlib
import copy
import types

import torch

from tidegate.errors import SelfTestError
from tidegate.patch.code import argument_names, global_names, innermost, parts, that_names, with_globals
from tidegate.patch.gdn_ops import NAMES
from tidegate.patch.site import MISSING, RECORD, Record

FP32_LIMIT = 1e-5  # between two fp32 computations of one function, relative to the largest value
GLOBAL_NAMES = {name for names in NAMES.values() for name in names}
_HOOKS = ("_hf_hook", "_old_forward", "forward", RECORD)


def key(module):
    """Equal for modules that compute the same function of their parameters and input."""
    tensors = tuple((name, tuple(p.shape), p.dtype) for name, p in module.named_parameters())
    kinds = (int, float, str, bool, type(None))
    values = tuple(
        (path, name, value)
        for path, child in module.named_modules()
        for name, value in sorted(child.__dict__.items())
        if isinstance(value, kinds) and name not in ("layer_idx", "training")
    )
    return type(module), tensors, values


@contextlib.contextmanager
def surroundings():
    """Keeps from the tests what a caller may have set for tensors of his own: default device and type, autocast."""
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.float32)
        with torch.device("cpu"), torch.autocast("cpu", enabled=False), torch.no_grad():
            yield
    finally:
        torch.set_default_dtype(before)


def plain_copy(module, dtype=None):
    """A copy in eval mode without hooks, whose forwards are those of its classes."""
    memo = {}  # what is in it is not copied: hooks may hold a trainer with all its data
    for child in module.modules():
        for name, value in child.__dict__.items():
            if name in _HOOKS and value:  # not an empty one, which may be shared with others
                memo[id(value)] = MISSING
            elif name.endswith("_hooks") and isinstance(value, dict):
                memo[id(value)] = type(value)()
            elif isinstance(value, torch.Tensor) and not value.is_leaf:  # as pruning leaves them
                memo[id(value)] = value.detach().clone()
    twin = copy.deepcopy(module, memo)
    for child in twin.modules():
        for name in _HOOKS:
            child.__dict__.pop(name, None)
    twin.requires_grad_(False)
    return twin.eval() if dtype is None else twin.eval().to(dtype)


def type_of(module):
    """The floating type of a module's matrices: single vectors may be wider than what they are used with."""
    return next((p.dtype for p in module.parameters() if p.dim() == 2 and p.is_floating_point()), torch.float32)


def trial_copy(site):
    """A plain copy with the site's replacement installed on it, without a handle."""
    twin = plain_copy(site.module)
    trial = site.copy_to(twin, {})
    trial._install()
    record = Record(twin)
    record.sites[site.op] = trial
    setattr(twin, RECORD, record)
    return twin


def error(got, expected):
    """Largest difference relative to the largest expected value."""
    got, expected = got.double(), expected.double()
    worst = (got - expected).abs().max() / expected.abs().max().clamp(min=1e-30)
    return float(worst) if bool(torch.isfinite(worst)) else float("inf")


def rms_error(got, expected):
    """Root of the mean squared difference relative to that of the expected values."""
    got, expected = got.double(), expected.double()
    value = (got - expected).square().mean().sqrt() / expected.square().mean().sqrt().clamp(min=1e-30)
    return float(value) if bool(torch.isfinite(value)) else float("inf")


def judge(case, ours, original, reference):
    """The error of ours; too large is a SelfTestError.

    In 16 bits that is: more than twice the original's own, and a quarter of
    a rounding step, because some cases have only a few dozen values.
    """
    if ours.shape != original.shape or ours.dtype != original.dtype:
        raise SelfTestError(
            f"self-test, {case}: expected {list(original.shape)} {original.dtype}, got {list(ours.shape)} {ours.dtype}"
        )
    limit, got = FP32_LIMIT, error(ours, original)
    if original.dtype in (torch.bfloat16, torch.float16):
        limit = 2 * rms_error(original, reference) + torch.finfo(original.dtype).eps / 4
        got = rms_error(ours, reference)
    if not got <= limit:
        raise SelfTestError(f"self-test, {case}: the result differs by {got:.1e}, allowed are {limit:.1e}")
    return got


def summary(errors, dtype):
    return f"err {max(errors):.1e} ({str(dtype).removeprefix('torch.')})"


def stock_forward(module):
    """A layer's own forward on torch's functions: not through packages that want a GPU, and without their messages."""
    forward = type(module).forward
    names = GLOBAL_NAMES & global_names(forward)
    original = that_names(forward, names) if names else None
    if original is None:
        return forward
    return with_globals(original, {name: innermost(original.__globals__[name]) for name in names})


def make_cache(module):
    """An empty cache for one layer, of the class that the layer's release uses; None if it cannot be made."""
    for part in parts(type(module).forward):
        for name, value in part.__globals__.items():
            if name.endswith("DynamicCache") and isinstance(value, type) and name != "DynamicCache":
                return value(types.SimpleNamespace(layer_types=["linear_attention"], num_hidden_layers=1))
    try:
        from transformers.cache_utils import Cache, LinearAttentionLayer

        return Cache(layers=[LinearAttentionLayer()])
    except (ImportError, TypeError):
        return None


def of_layer(site):
    """The self-test of a linear-attention layer: lengths around a chunk's edge, padding, decode, packing."""

    def test():
        module = site.module
        dtype = type_of(module)
        ours, original = trial_copy(site), plain_copy(module)
        reference = original if dtype == torch.float32 else plain_copy(module, torch.float32)
        for twin in (ours, original, reference):
            twin.layer_idx = 0  # of a cache with one layer
        generator = torch.Generator().manual_seed(0)
        width = getattr(module, "hidden_size", None) or next(p.shape[1] for p in module.parameters() if p.dim() == 2)
        x = torch.randn(2, 70, width, generator=generator).to(dtype)
        stock = stock_forward(original)
        call = {
            "ours": lambda x, **kwargs: ours.forward(x, **kwargs),
            "original": lambda x, **kwargs: stock(original, x, **kwargs),
            "reference": lambda x, **kwargs: stock(reference, x.float(), **kwargs),
        }

        def run(case, x, **kwargs):
            return judge(case, *(call[who](x, **kwargs) for who in ("ours", "original", "reference")))

        errors = [run(f"{tokens} tokens", x[:1, :tokens]) for tokens in (1, 3)]
        mask = torch.ones(2, 70, dtype=torch.long)
        mask[0, :5] = 0
        errors.append(run("70 tokens, one row padded on the left", x, attention_mask=mask))
        errors += _with_cache(module, call, x[:1])
        if getattr(site, "packs", False):
            found = _packed(call, x[:1])
            site.tokenwise = found is not None
            errors.append(found or 0.0)
        return summary(errors, dtype)

    def quiet():
        with torch.no_grad():
            return test()

    return quiet


def _with_cache(module, call, x):
    caches = {who: make_cache(module) for who in call}
    if None in caches.values():
        return []
    errors = []
    position = {"cache_position": x} if "cache_position" in argument_names(type(module).forward) else {}
    for case, part in (("prompt with a cache", x[:, :9]), ("one token after it", x[:, 9:10])):
        results = [call[who](part, cache_params=cache, **position) for who, cache in caches.items()]
        errors.append(judge(case, *results))
    return errors


def _packed(call, x):
    lengths = (24, 46)
    parts = x.split(lengths, 1)
    packed = dict(
        cu_seq_lens_q=torch.tensor([0, 24, 70], dtype=torch.int32),
        seq_idx=torch.arange(2, dtype=torch.int32).repeat_interleave(torch.tensor(lengths))[None],
    )
    separate = [torch.cat([call[who](part) for part in parts], 1) for who in ("original", "reference")]
    whole, alone = (call["original"](row)[:, : lengths[0]] for row in (x, parts[0]))
    if x.dtype == torch.float32 and error(whole, alone) > FP32_LIMIT:  # inputs of its products share a scale
        return None
    return judge("packed 24 and 46 tokens", call["ours"](x, **packed), *separate)
