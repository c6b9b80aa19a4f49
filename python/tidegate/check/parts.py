"""Which part of a layer lets samples see each other: the convolution, the recurrent state or full attention.

Every token mixer is called alone with the input it had in the packed batch, so that a leak of an earlier layer does not
count. In linear attention the two carriers are told apart by the decay: with a huge dt_bias the state forgets
everything and only the convolution can leak; without decay the state keeps everything, and a change further back than
the convolution reaches can arrive through the state alone.
"""

import torch
from torch.func import functional_call

CACHES = ("past_key_values", "cache_params")  # filled by the first run
FORGET, KEEP = 1e5, -1e5  # dt_bias: softplus gives 1e5 or 0, times exp(A_log), which is 0.01 and more in these models


def capture(text_model, call):
    """(layer index, mixer, args, kwargs) of every token mixer that runs during call()."""
    calls, hooks = [], []
    for i, layer in enumerate(text_model.layers):
        for name in ("linear_attn", "self_attn"):
            mixer = getattr(layer, name, None)
            if mixer is not None:
                note = lambda module, args, kwargs, i=i: calls.append((i, module, args, kwargs))  # noqa: E731
                hooks.append(mixer.register_forward_pre_hook(note, with_kwargs=True))
    try:
        call()
    finally:
        for hook in hooks:
            hook.remove()
    return calls


def _runner(mixer, args, kwargs):
    """run(x, dt_bias) -> the mixer's output [T,H] for other hidden states."""

    def run(x, dt_bias=None):
        inputs, named = args, {name: None if name in CACHES else value for name, value in kwargs.items()}
        if "hidden_states" in named:
            named["hidden_states"] = x
        else:
            inputs = (x, *args[1:])
        changed = {} if dt_bias is None else {"dt_bias": torch.full_like(mixer.dt_bias, dt_bias)}
        with torch.no_grad():
            out = functional_call(mixer, changed, inputs, named)
        return (out[0] if isinstance(out, tuple) else out)[0]

    return run


def _leaks(run, x, spans, reach, tolerance, **options):
    """Whether new values in one sample, but for its last `reach` tokens, change the output of any other sample."""
    base = run(x, **options)
    for begin, end in spans:
        if end - reach <= begin:
            continue
        changed = x.clone()
        changed[:, begin : end - reach] = torch.randn_like(changed[:, begin : end - reach])
        difference = (run(changed, **options) - base).abs()
        difference[begin:end] = 0
        if difference.max() > tolerance * base.abs().max():
            return True
    return False


def leaking_parts(calls, spans, tolerance=0.0):
    """{part: layers that leak} for the parts that the model has."""
    found = {}
    for i, mixer, args, kwargs in calls:
        x = (kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]).detach()
        run = _runner(mixer, args, kwargs)
        if hasattr(mixer, "dt_bias") and hasattr(mixer, "A_log"):
            width = max((m.kernel_size[0] for m in mixer.modules() if isinstance(m, torch.nn.Conv1d)), default=1)
            tests = {"conv": (0, {"dt_bias": FORGET}), "state": (width - 1, {"dt_bias": KEEP})}
        else:
            tests = {"attention": (0, {})}
        for part, (reach, options) in tests.items():
            layers = found.setdefault(part, [])
            if _leaks(run, x, spans, reach, tolerance, **options):
                layers.append(i)
    return found
