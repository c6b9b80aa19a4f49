"""Problems of the stages of the chunked delta rule, forward and backward: inputs, the operators in a row, the golden
functions in a row, and the token recurrence."""

import golden
import golden_backward
import torch

import tidegate

LENGTHS = [2049, 1011, 513, 256, 128, 65, 32, 16, 7, 4, 5, 1]
SHORT = [65, 0, 1, 17, 130, 4]
FLOOR = -104.0
GRADIENTS = ("dq", "dk", "dv", "dg", "dbeta", "dh0")


def make(lengths=SHORT, HK=1, G=2, K=24, V=20, dtype=torch.float32, beta_max=1.0):
    """Head-major inputs: keys that share a component, every third head forgets fast, the others hardly."""
    T, HV = sum(lengths), HK * G
    rate = torch.tensor([1.0 if h % 3 == 2 else 0.01 for h in range(HV)])[:, None]
    unit = lambda *shape: torch.nn.functional.normalize(torch.randn(shape) + 0.3, dim=-1)  # noqa: E731
    return {
        "q": unit(HK, T, K).to(dtype),
        "k": unit(HK, T, K).to(dtype),
        "v": torch.randn(HV, T, V).to(dtype),
        "g": -rate * torch.rand(HV, T),
        "beta": (torch.rand(HV, T) * beta_max).to(dtype),
        "h0": torch.randn(len(lengths), HV, K, V) * 0.3,
        "lengths": lengths,
    }


def to_layout(t, layout):
    """Head-major without a batch -> layout."""
    t = t.transpose(0, 1).contiguous() if layout in ("BSND", "TND") else t
    return t[None] if layout in ("BSND", "BNSD") else t


def from_layout(t, layout):
    t = t[0] if layout in ("BSND", "BNSD") else t
    return t.transpose(0, 1) if layout in ("BSND", "TND") else t


def run(p, C=64, layout="NTD", scale=0.25, v_first=False, given=None, inter_dtype=None):
    """All stages in a row; `given` replaces the inputs of later stages. Results head-major."""
    ops, cu = tidegate.ops, torch.tensor(golden.cu_from_lengths(p["lengths"]))
    at = {"cu_seqlens": cu, "layout": layout}
    inter = {**at, "inter_dtype": inter_dtype}
    q, k, v, g, beta = (to_layout(p[name], layout) for name in ("q", "k", "v", "g", "beta"))
    h0 = p["h0"].mT.contiguous() if v_first else p["h0"]
    r = {}

    def value(name):
        return to_layout(given[name], layout) if given else r[name]

    r["gc"] = ops.chunk_local_cumsum(g, C, **at, floor=FLOOR)
    r["A0"] = ops.chunk_scaled_dot_kkt(k, value("gc"), beta, **inter, chunk_size=C)
    r["A"] = ops.solve_tril(value("A0"), **inter)
    r["w"], r["u"] = ops.recompute_w_u(k, v, beta, value("A"), value("gc"), **inter)
    states = {"chunk_size": C, "output_final_state": True, "state_v_first": v_first}
    r["h"], r["v_new"], ht = ops.chunk_gated_delta_rule_fwd_h(
        k, value("w"), value("u"), value("gc"), h0, **inter, **states
    )
    r["o"] = ops.chunk_fwd_o(q, k, value("v_new"), value("h"), value("gc"), **at, scale=scale, chunk_size=C)
    return {name: from_layout(t, layout) for name, t in r.items()} | {"ht": ht.mT if v_first else ht}


def chain(p, C=64, scale=0.25, dtype=torch.float64, given=None, gc=None):
    """The same in golden functions; gc replaces the sum of the gates."""
    q, k, v, g, beta, h0 = (p[name].to(dtype) for name in ("q", "k", "v", "g", "beta", "h0"))
    cu, r = golden.cu_from_lengths(p["lengths"]), {}
    value = lambda name: given[name].to(dtype) if given else r[name]  # noqa: E731
    r["gc"] = golden.chunk_local_cumsum(g, cu, C, floor=FLOOR) if gc is None else gc.to(dtype)
    r["A0"] = golden.chunk_scaled_dot_kkt(k, value("gc"), beta, cu, C)
    r["A"] = golden.solve_tril(value("A0"), cu)
    r["w"], r["u"] = golden.recompute_w_u(k, v, beta, value("A"), value("gc"), cu, C)
    r["h"], r["v_new"], r["ht"] = golden.chunk_gated_delta_rule_fwd_h(k, value("w"), value("u"), value("gc"), cu, C, h0)
    r["o"] = golden.chunk_fwd_o(q, k, value("v_new"), value("h"), value("gc"), scale, cu, C)
    return r


def recurrence(p, scale=0.25):
    inputs = [p[name].double() for name in ("q", "k", "v", "g", "beta")]
    o, ht = golden.gated_delta_rule(*inputs, golden.cu_from_lengths(p["lengths"]), p["h0"].double(), scale)
    return {"o": o, "ht": ht}


def make_backward(*args, **kwargs):
    """The same with gradients of o and of the final states."""
    p = make(*args, **kwargs)
    return p | {"do": torch.randn_like(p["v"]), "dht": torch.randn_like(p["h0"]) * 0.3}


def run_backward(p, C=64, layout="NTD", scale=0.25, v_first=False, given=None, inter_dtype=None, forward=None):
    """All backward stages in a row after `forward`, which is what run() returned; `given` replaces the inputs of later
    stages. Results head-major; "dk1", "dg1" are those of chunk_bwd_dqkwg, "dk2", "dg2" those of prepare_wy_repr_bwd."""
    ops, cu = tidegate.ops, torch.tensor(golden.cu_from_lengths(p["lengths"]))
    at = {"cu_seqlens": cu, "layout": layout, "inter_dtype": inter_dtype}
    scaled = {**at, "scale": scale, "chunk_size": C}
    f = {name: to_layout(t, layout) for name, t in (forward or run(p, C, layout, scale)).items() if name != "ht"}
    q, k, v, beta, do = (to_layout(p[name], layout) for name in ("q", "k", "v", "beta", "do"))
    gc, A, dht = f["gc"], f["A"], p["dht"].mT.contiguous() if v_first else p["dht"]
    r = {}

    def value(name):
        return to_layout(given[name], layout) if given else r[name]

    r["dv1"] = ops.chunk_bwd_dv_local(q, k, do, gc, **scaled)
    r["dh"], dh0, r["dv2"] = ops.chunk_gated_delta_rule_bwd_dhu(
        q, k, f["w"], do, value("dv1"), gc, dht, **scaled, state_v_first=v_first
    )
    r["dq"], r["dk1"], r["dw"], r["dg1"] = ops.chunk_bwd_dqkwg(
        q, k, f["v_new"], gc, f["h"], do, value("dh"), value("dv2"), **scaled
    )
    wy = [k, v, beta, A, value("dw"), value("dv2"), gc]
    r["dA"] = ops.prepare_wy_repr_bwd_da(*wy, **at)
    r["dk2"], r["dv"], r["dbeta"], r["dg2"] = ops.prepare_wy_repr_bwd_full(*wy[:4], value("dA"), *wy[4:], **at)
    both = ops.prepare_wy_repr_bwd(*wy, **at)
    r |= dict(zip(("dk", "dv_both", "dbeta_both", "dg_both"), both, strict=True))
    r["dg"] = ops.chunk_local_cumsum(r["dg1"] + r["dg_both"], C, reverse=True, cu_seqlens=cu, layout=layout)
    r = {name: from_layout(t, layout) for name, t in r.items()} | {"dh0": dh0.mT if v_first else dh0}
    # A gate at its floor does not move the sum.
    return r | {"dk": r["dk1"] + r["dk"], "dg": r["dg"].masked_fill(p["g"] <= FLOOR, 0)}


def chain_backward(p, C=64, scale=0.25, dtype=torch.float64, given=None, forward=None):
    """The same in golden functions."""
    q, k, v, beta, do, dht = (p[name].to(dtype) for name in ("q", "k", "v", "beta", "do", "dht"))
    cu, r = golden.cu_from_lengths(p["lengths"]), {}
    f = {name: t.to(dtype) for name, t in (forward or chain(p, C, scale, dtype)).items()}
    gc, A, value = f["gc"], f["A"], lambda name: given[name].to(dtype) if given else r[name]
    r["dv1"] = golden_backward.chunk_bwd_dv_local(q, k, do, gc, scale, cu, C)
    r["dh"], r["dh0"], r["dv2"] = golden_backward.chunk_gated_delta_rule_bwd_dhu(
        q, k, f["w"], do, value("dv1"), gc, dht, scale, cu, C
    )
    r["dq"], r["dk1"], r["dw"], r["dg1"] = golden_backward.chunk_bwd_dqkwg(
        q, k, f["v_new"], gc, f["h"], do, value("dh"), value("dv2"), scale, cu, C
    )
    wy = [k, v, beta, A, value("dw"), value("dv2"), gc]
    r["dA"] = golden_backward.prepare_wy_repr_bwd_da(*wy, cu, C)
    r["dk2"], r["dv"], r["dbeta"], r["dg2"] = golden_backward.prepare_wy_repr_bwd_full(
        *wy[:4], value("dA"), *wy[4:], cu, C
    )
    dg = golden.chunk_local_cumsum(r["dg1"] + r["dg2"], cu, C, reverse=True)
    return r | {"dk": r["dk1"] + r["dk2"], "dg": dg.masked_fill(p["g"] <= FLOOR, 0)}


def recurrence_backward(p, scale=0.25):
    """Gradients of the token recurrence by autograd."""
    inputs = [p[name].double().requires_grad_() for name in ("q", "k", "v", "g", "beta", "h0")]
    o, ht = golden.gated_delta_rule(*inputs[:5], golden.cu_from_lengths(p["lengths"]), inputs[5], scale)
    ((o * p["do"].double()).sum() + (ht * p["dht"].double()).sum()).backward()
    return dict(zip(GRADIENTS, (t.grad for t in inputs), strict=True))
