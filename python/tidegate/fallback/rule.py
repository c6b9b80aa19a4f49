"""The gated delta rule in plain torch: by chunks, and token by token. Tensors are [R,H,T,...], R runs of one length."""

import torch

CHUNK = 64
# Shorter runs go token by token: n tokens in a call are then n calls, as speculative decoding wants it.
TOKENS = 16
RESET = -104.0  # e^-104 is 0 in fp32: nothing before such a gate counts, not even a NaN


def by_tokens(q, k, v, g, beta, S, scale, gk=None, stored=None, each=None):
    """o and the last state. stored: the type a state has between tokens; each: called with every token's state."""
    out = []
    for t in range(k.shape[2]):
        decay = torch.zeros_like(S[..., :1, :1]) if g is None else g[:, :, t, None, None]
        if gk is not None:
            decay = decay + gk[:, :, t, :, None].clamp(min=RESET)
            reset = (decay <= RESET) | (gk[:, :, t, :, None] <= RESET)
        else:
            reset = decay <= RESET
        S = S.masked_fill(reset, 0) * decay.masked_fill(reset, 0).exp()
        kt, qt = k[:, :, t, None], q[:, :, t, None]
        b = beta[:, :, t, None] if beta.dim() == 4 else beta[:, :, t, None, None]
        d = b * (v[:, :, t, None] - kt @ S)
        S = S + kt.mT @ d
        out.append(scale * (qt @ S))
        if stored is not None:
            S = S.to(stored).to(v.dtype)
        if each is not None:
            each(t, S)
    return torch.cat(out, 2) if out else torch.zeros_like(v), S


def _by_chunks(q, k, v, g, beta, S, scale):
    R, H, T, _ = v.shape
    pad = -T % CHUNK

    def cut(x):
        """[R,H,chunks,CHUNK,...]; the last chunk ends in tokens that do nothing."""
        x = torch.cat([x, x.new_zeros(R, H, pad, *x.shape[3:])], 2) if pad else x
        return x.unflatten(2, (-1, CHUNK))

    q, k, v, beta = cut(q), cut(k), cut(v), cut(beta)[..., None]
    gc = cut(g).double().cumsum(-1)
    above = torch.ones(CHUNK, CHUNK, dtype=torch.bool).triu(1)
    decay = (gc[..., :, None] - gc[..., None, :]).masked_fill(above, float("-inf")).exp().to(v.dtype)
    A = beta * decay * (k @ k.mT)
    P = scale * decay * (q @ k.mT)
    start = gc.exp().to(v.dtype)[..., None]  # from the chunk's start to a token
    end = (gc[..., -1:] - gc).exp().to(v.dtype)[..., None]  # from a token to the chunk's end
    out = []
    for c in range(v.shape[2]):
        kc = k[:, :, c]
        x = beta[:, :, c] * (v[:, :, c] - start[:, :, c] * (kc @ S))
        x = torch.linalg.solve_triangular(A[:, :, c], x, upper=False, unitriangular=True)
        out.append(scale * start[:, :, c] * (q[:, :, c] @ S) + P[:, :, c] @ x)
        S = start[:, :, c, -1:] * S + kc.mT @ (end[:, :, c] * x)
    return torch.cat(out, 2)[:, :, :T], S


def _ordinary(*tensors):
    """No NaN or infinity: a product with 0 is then 0, and the chunk form sees no token from its future."""
    return all(bool(torch.isfinite(x).all()) for x in tensors)


def delta_rule(q, k, v, g, beta, S, scale, gk=None):
    """o [R,H,T,V] and the states after the last token [R,H,K,V]. q, k with the heads of v."""
    plain = g is not None and gk is None and beta.dim() == 3
    if plain and k.shape[2] > TOKENS and _ordinary(q, k, v, g, beta, S) and not bool((g <= RESET).any()):
        return _by_chunks(q, k, v, g, beta, S, scale)
    return by_tokens(q, k, v, g, beta, S, scale, gk)
