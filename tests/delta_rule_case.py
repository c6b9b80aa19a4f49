"""Problems of the gated delta rule, their truth, and calls in every layout. Tensors are head-major, as in golden.py."""

import functools

import golden
import torch
import torch.nn.functional as F

import tidegate

PACKED = [2049, 1011, 513, 256, 128, 65, 32, 16, 7, 4, 5, 1]
INPUTS = ("q", "k", "v", "g", "beta")
LAYOUTS = {  # from [H, T, ...]
    "NTD": lambda t: t,
    "TND": lambda t: t.transpose(0, 1),
    "BNSD": lambda t: t[None],
    "BSND": lambda t: t.transpose(0, 1)[None],
}
BACK = LAYOUTS | {"BNSD": lambda t: t[0], "BSND": lambda t: t[0].transpose(0, 1)}


def make(lengths, HK=1, G=2, K=32, V=32, dtype=torch.float32, initial=True, beta=1.0, slowest=0.01, seed=0):
    """Keys have a part in common, so that they correlate; heads forget at rates from `slowest` to 1."""
    random = torch.Generator().manual_seed(seed)
    normal = functools.partial(torch.randn, generator=random)
    T, N, HV = sum(lengths), len(lengths), HK * G
    unit = lambda: F.normalize(normal(HK, T, K) + 0.5 * normal(HK, 1, K), dim=-1).to(dtype)  # noqa: E731
    rate = torch.logspace(torch.tensor(slowest).log10(), 0, HV)[:, None]
    return {
        "q": unit(),
        "k": unit(),
        "v": normal(HV, T, V).to(dtype),
        "g": -rate * torch.rand(HV, T, generator=random),
        "beta": (beta * torch.rand(HV, T, generator=random)).to(dtype),
        "h0": normal(N, HV, K, V) if initial else None,
        "cu": golden.cu_from_lengths(lengths),
    }


def truth(p, scale=None):
    """o and the final states in fp64."""
    wide = {name: p[name].double() for name in INPUTS}
    N, HV, K, V = len(p["cu"]) - 1, p["v"].shape[0], p["k"].shape[-1], p["v"].shape[-1]
    h0 = torch.zeros(N, HV, K, V).double() if p["h0"] is None else p["h0"].double()
    return golden.gated_delta_rule(*wide.values(), p["cu"], h0, K**-0.5 if scale is None else scale)


@functools.cache
def case(lengths, **sizes):
    """A problem and its truth, made once for all instruction sets. Not to be changed."""
    p = make(lengths, **sizes)
    return p, truth(p)


def run(p, layout="NTD", out_layout=None, **options):
    """o, the final state and the snapshots of a packed call; o head-major again."""
    inputs = [LAYOUTS[layout](p[name]) for name in INPUTS]
    o, final, snapshots = tidegate.ops.chunk_gated_delta_rule_fwd(
        *inputs,
        p["h0"],
        cu_seqlens=torch.tensor(p["cu"]),
        output_final_state=True,
        layout=layout,
        out_layout=out_layout,
        **options,
    )
    return {"o": BACK[out_layout or layout](o), "final": final, "snapshots": snapshots}


def cut(p, n, tokens=None):
    """Sequence n of a problem as a problem of its own; its first tokens if so said."""
    first, last = p["cu"][n], p["cu"][n + 1]
    last = last if tokens is None else first + tokens
    part = {name: p[name][:, first:last] for name in INPUTS}
    return part | {"h0": None if p["h0"] is None else p["h0"][n : n + 1], "cu": [0, last - first]}
