"""Schemas of all operators, as the native library defines them (tests compare the two)."""

SCHEMAS = """
causal_conv1d_fwd(Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, Tensor? cu_seqlens=None,
    *, str? activation=None, int head_num=0, bool output_final_state=False, int state_len=0, str layout="BSND") ->
    (Tensor y, Tensor final_state)
causal_conv1d_fwd.out(Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, Tensor?
    cu_seqlens=None, *, str? activation=None, int head_num=0, str layout="BSND", Tensor(a!) y, Tensor(b!)?
    final_state=None) -> ()
causal_conv1d_bwd(Tensor dy, Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, Tensor?
    dfinal_state=None, Tensor? cu_seqlens=None, *, str? activation=None, int head_num=0, str layout="BSND") ->
    (Tensor dx, Tensor dweight, Tensor dbias, Tensor dinitial_state)
causal_conv1d_bwd.out(Tensor dy, Tensor x, Tensor weight, Tensor? bias=None, Tensor? initial_state=None, Tensor?
    dfinal_state=None, Tensor? cu_seqlens=None, *, str? activation=None, int head_num=0, str layout="BSND",
    Tensor(a!)? dx=None, Tensor(b!)? dweight=None, Tensor(c!)? dbias=None, Tensor(d!)? dinitial_state=None) -> ()
causal_conv1d_update(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias=None, *, Tensor? cu_seqlens=None,
    Tensor? cache_indices=None, Tensor? has_initial_state=None, Tensor? num_accepted_tokens=None, Tensor?
    cache_seqlens=None, int pad_slot_id=-1, str state_anchor="tail", str? activation=None, int head_num=0, str
    layout="TND") -> Tensor y
causal_conv1d_update.out(Tensor x, Tensor(a!) conv_state, Tensor weight, Tensor? bias=None, *, Tensor?
    cu_seqlens=None, Tensor? cache_indices=None, Tensor? has_initial_state=None, Tensor? num_accepted_tokens=None,
    Tensor? cache_seqlens=None, int pad_slot_id=-1, str state_anchor="tail", str? activation=None, int head_num=0,
    str layout="TND", Tensor(b!) y) -> ()
chunk_gated_delta_rule_fwd(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state=None, Tensor?
    cu_seqlens=None, Tensor? A_log=None, Tensor? dt_bias=None, Tensor? snapshot_at=None, *, float? scale=None, bool
    output_final_state=False, bool use_qk_l2norm=False, bool beta_sigmoid=False, float beta_scale=1.0, bool
    state_v_first=False, str precision="fp32", str layout="BSND", str? out_layout=None, int time_segments=1, bool
    save_states=False, bool zero_row_safe=False) -> (Tensor o, Tensor final_state, Tensor snapshots)
chunk_gated_delta_rule_fwd.out(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? initial_state=None,
    Tensor? cu_seqlens=None, Tensor? A_log=None, Tensor? dt_bias=None, Tensor? snapshot_at=None, *, float?
    scale=None, bool use_qk_l2norm=False, bool beta_sigmoid=False, float beta_scale=1.0, bool state_v_first=False,
    str precision="fp32", str layout="BSND", str? out_layout=None, int time_segments=1, Tensor(a!) o, Tensor(b!)?
    final_state=None, Tensor(c!)? snapshots=None) -> ()
chunk_gated_delta_rule_bwd(Tensor? do, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta,
    Tensor? initial_state=None, Tensor? cu_seqlens=None, Tensor? A_log=None, Tensor? dt_bias=None, Tensor?
    states=None, *, float? scale=None, bool use_qk_l2norm=False, bool beta_sigmoid=False, float beta_scale=1.0, bool
    state_v_first=False, bool zero_row_safe=False, str layout="BSND", str? out_layout=None, int needs=255) ->
    (Tensor dq, Tensor dk, Tensor dv, Tensor dg, Tensor dbeta, Tensor dh0, Tensor dA_log, Tensor ddt_bias)
chunk_gated_delta_rule_bwd.out(Tensor? do, Tensor? dfinal_state, Tensor q, Tensor k, Tensor v, Tensor g, Tensor
    beta, Tensor? initial_state=None, Tensor? cu_seqlens=None, Tensor? A_log=None, Tensor? dt_bias=None, Tensor?
    states=None, *, float? scale=None, bool use_qk_l2norm=False, bool beta_sigmoid=False, float beta_scale=1.0, bool
    state_v_first=False, bool zero_row_safe=False, str layout="BSND", str? out_layout=None, Tensor(a!)? dq=None,
    Tensor(b!)? dk=None, Tensor(c!)? dv=None, Tensor(d!)? dg=None, Tensor(e!)? dbeta=None, Tensor(f!)? dh0=None,
    Tensor(g!)? dA_log=None, Tensor(h!)? ddt_bias=None) -> ()
chunk_gated_delta_rule_pool(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, *, Tensor
    state_indices, Tensor? cu_seqlens=None, Tensor? has_initial_state=None, Tensor? A_log=None, Tensor?
    dt_bias=None, int null_slot=-1, float? scale=None, bool use_qk_l2norm=False, bool beta_sigmoid=False, float
    beta_scale=1.0, bool state_v_first=False, str precision="fp32", str layout="BSND", str? out_layout=None) ->
    Tensor o
chunk_gated_delta_rule_pool.out(Tensor q, Tensor k, Tensor v, Tensor g, Tensor beta, Tensor(a!) state, *, Tensor
    state_indices, Tensor? cu_seqlens=None, Tensor? has_initial_state=None, Tensor? A_log=None, Tensor?
    dt_bias=None, int null_slot=-1, float? scale=None, bool use_qk_l2norm=False, bool beta_sigmoid=False, float
    beta_scale=1.0, bool state_v_first=False, str precision="fp32", str layout="BSND", str? out_layout=None,
    Tensor(b!) o) -> ()
recurrent_gated_delta_rule(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor(a!) state, *, Tensor
    state_indices, Tensor? gk=None, Tensor? cu_seqlens=None, Tensor? num_accepted_tokens=None, Tensor?
    has_initial_state=None, Tensor? A_log=None, Tensor? dt_bias=None, int null_slot=-1, float? scale=None, bool
    use_qk_l2norm=False, bool beta_sigmoid=False, float beta_scale=1.0, bool state_v_first=False, str layout="TND")
    -> Tensor o
recurrent_gated_delta_rule.out(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor(a!) state, *, Tensor
    state_indices, Tensor? gk=None, Tensor? cu_seqlens=None, Tensor? num_accepted_tokens=None, Tensor?
    has_initial_state=None, Tensor? A_log=None, Tensor? dt_bias=None, int null_slot=-1, float? scale=None, bool
    use_qk_l2norm=False, bool beta_sigmoid=False, float beta_scale=1.0, bool state_v_first=False, str layout="TND",
    Tensor(b!) o) -> ()
recurrent_gated_delta_rule_fwd(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor? initial_state=None,
    Tensor? cu_seqlens=None, Tensor? A_log=None, Tensor? dt_bias=None, Tensor? gk=None, *, float? scale=None, bool
    output_final_state=False, bool use_qk_l2norm=False, bool beta_sigmoid=False, float beta_scale=1.0, bool
    state_v_first=False, str layout="BSND") -> (Tensor o, Tensor final_state)
recurrent_gated_delta_rule_fwd.out(Tensor q, Tensor k, Tensor v, Tensor? g, Tensor beta, Tensor? initial_state=None,
    Tensor? cu_seqlens=None, Tensor? A_log=None, Tensor? dt_bias=None, Tensor? gk=None, *, float? scale=None, bool
    use_qk_l2norm=False, bool beta_sigmoid=False, float beta_scale=1.0, bool state_v_first=False, str layout="BSND",
    Tensor(a!) o, Tensor(b!)? final_state=None) -> ()
gdn_packed_decode(Tensor mixed, Tensor? z, Tensor? a, Tensor? b, Tensor(a!) conv_state, Tensor conv_weight, Tensor?
    conv_bias, Tensor A_log, Tensor? dt_bias, Tensor(b!) state, Tensor norm_weight, *, Tensor state_indices, Tensor?
    conv_indices=None, int HK, int HV, int K, int V, Tensor? cu_seqlens=None, Tensor? num_accepted_tokens=None, int
    null_slot=-1, float? scale=None, float eps=1e-6, str activation="silu", str norm_rounding="hf", str
    projection="qkv", bool state_v_first=False) -> Tensor y
gdn_packed_decode.out(Tensor mixed, Tensor? z, Tensor? a, Tensor? b, Tensor(a!) conv_state, Tensor conv_weight,
    Tensor? conv_bias, Tensor A_log, Tensor? dt_bias, Tensor(b!) state, Tensor norm_weight, *, Tensor state_indices,
    Tensor? conv_indices=None, int HK, int HV, int K, int V, Tensor? cu_seqlens=None, Tensor?
    num_accepted_tokens=None, int null_slot=-1, float? scale=None, float eps=1e-6, str activation="silu", str
    norm_rounding="hf", str projection="qkv", bool state_v_first=False, Tensor(c!) y) -> ()
gdn_segment_map(Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? cu_seqlens=None, Tensor? A_log=None, Tensor?
    dt_bias=None, *, bool use_qk_l2norm=False, bool beta_sigmoid=False, float beta_scale=1.0, str precision="fp32",
    str layout="BSND") -> (Tensor phi, Tensor s)
gdn_segment_map.out(Tensor k, Tensor v, Tensor g, Tensor beta, Tensor? cu_seqlens=None, Tensor? A_log=None, Tensor?
    dt_bias=None, *, bool use_qk_l2norm=False, bool beta_sigmoid=False, float beta_scale=1.0, str precision="fp32",
    str layout="BSND", Tensor(a!) phi, Tensor(b!) s) -> ()
gdn_segment_combine(Tensor phi1, Tensor s1, Tensor phi2, Tensor s2) -> (Tensor phi, Tensor s)
gdn_segment_combine.out(Tensor phi1, Tensor s1, Tensor phi2, Tensor s2, *, Tensor(a!) phi, Tensor(b!) s) -> ()
gdn_gating_fwd(Tensor a, Tensor b, Tensor A_log, Tensor? dt_bias=None, *, float beta_scale=1.0, ScalarType?
    beta_dtype=None, str layout="BSND") -> (Tensor g, Tensor beta)
gdn_gating_fwd.out(Tensor a, Tensor b, Tensor A_log, Tensor? dt_bias=None, *, float beta_scale=1.0, str
    layout="BSND", Tensor(a!) g, Tensor(b!) beta) -> ()
gdn_gating_bwd(Tensor dg, Tensor dbeta, Tensor a, Tensor b, Tensor A_log, Tensor? dt_bias=None, *, float
    beta_scale=1.0, str layout="BSND") -> (Tensor da, Tensor db, Tensor dA_log, Tensor ddt_bias)
gdn_gating_bwd.out(Tensor dg, Tensor dbeta, Tensor a, Tensor b, Tensor A_log, Tensor? dt_bias=None, *, float
    beta_scale=1.0, str layout="BSND", Tensor(a!)? da=None, Tensor(b!)? db=None, Tensor(c!)? dA_log=None,
    Tensor(d!)? ddt_bias=None) -> ()
l2norm_fwd(Tensor x, *, float eps=1e-6, ScalarType? out_dtype=None) -> (Tensor y, Tensor rstd)
l2norm_fwd.out(Tensor x, *, float eps=1e-6, Tensor(a!) y, Tensor(b!) rstd) -> ()
l2norm_bwd(Tensor dy, Tensor x, Tensor rstd, *, bool zero_row_safe=False) -> Tensor dx
l2norm_bwd.out(Tensor dy, Tensor x, Tensor rstd, *, bool zero_row_safe=False, Tensor(a!) dx) -> ()
rms_norm_gated_fwd(Tensor x, Tensor z, Tensor? weight, *, float eps=1e-6, str activation="silu", str rounding="hf",
    str? out_memory=None) -> (Tensor y, Tensor rstd)
rms_norm_gated_fwd.out(Tensor x, Tensor z, Tensor? weight, *, float eps=1e-6, str activation="silu", str
    rounding="hf", Tensor(a!) y, Tensor(b!) rstd) -> ()
rms_norm_gated_bwd(Tensor dy, Tensor x, Tensor z, Tensor? weight, Tensor rstd, *, str activation="silu", str
    rounding="hf") -> (Tensor dx, Tensor dz, Tensor dweight)
rms_norm_gated_bwd.out(Tensor dy, Tensor x, Tensor z, Tensor? weight, Tensor rstd, *, str activation="silu", str
    rounding="hf", Tensor(a!)? dx=None, Tensor(b!)? dz=None, Tensor(c!)? dweight=None) -> ()
rms_norm_fwd(Tensor x, Tensor weight, *, float eps=1e-6) -> (Tensor y, Tensor rstd)
rms_norm_fwd.out(Tensor x, Tensor weight, *, float eps=1e-6, Tensor(a!) y, Tensor(b!) rstd) -> ()
rms_norm_bwd(Tensor dy, Tensor x, Tensor weight, Tensor rstd) -> (Tensor dx, Tensor dweight)
rms_norm_bwd.out(Tensor dy, Tensor x, Tensor weight, Tensor rstd, *, Tensor(a!)? dx=None, Tensor(b!)? dweight=None)
    -> ()
swiglu_fwd(Tensor gate, Tensor up) -> Tensor y
swiglu_fwd.out(Tensor gate, Tensor up, *, Tensor(a!) y) -> ()
swiglu_bwd(Tensor dy, Tensor gate, Tensor up) -> (Tensor dgate, Tensor dup)
swiglu_bwd.out(Tensor dy, Tensor gate, Tensor up, *, Tensor(a!)? dgate=None, Tensor(b!)? dup=None) -> ()
partial_rope_fwd(Tensor x, Tensor cos, Tensor sin, *, str layout="BNSD", str rounding="hf") -> Tensor y
partial_rope_fwd.out(Tensor x, Tensor cos, Tensor sin, *, str layout="BNSD", str rounding="hf", Tensor(a!) y) -> ()
partial_rope_bwd(Tensor dy, Tensor cos, Tensor sin, *, str layout="BNSD", str rounding="hf") -> Tensor dx
partial_rope_bwd.out(Tensor dy, Tensor cos, Tensor sin, *, str layout="BNSD", str rounding="hf", Tensor(a!) dx) ->
    ()
mrope_cos_sin(Tensor position_ids, Tensor inv_freq, int[] section, *, float scaling=1.0, ScalarType dtype=float) ->
    (Tensor cos, Tensor sin)
seqlens(Tensor? cu_seqlens=None, Tensor? seq_idx=None, Tensor? position_ids=None, *, SymInt tokens) -> Tensor
chunk_local_cumsum(Tensor g, int chunk_size, Tensor? cu_seqlens=None, *, bool reverse=False, float scale=1.0, float?
    floor=None, ScalarType? out_dtype=None, str layout="BSND") -> Tensor out
chunk_local_cumsum.out(Tensor g, int chunk_size, Tensor? cu_seqlens=None, *, bool reverse=False, float scale=1.0,
    float? floor=None, str layout="BSND", Tensor(a!) out) -> ()
chunk_scaled_dot_kkt(Tensor k, Tensor? gc, Tensor beta, Tensor? cu_seqlens=None, *, int chunk_size=64, ScalarType?
    inter_dtype=None, str layout="BSND") -> Tensor A0
chunk_scaled_dot_kkt.out(Tensor k, Tensor? gc, Tensor beta, Tensor? cu_seqlens=None, *, int chunk_size=64, str
    layout="BSND", Tensor(a!) A0) -> ()
solve_tril(Tensor A0, Tensor? cu_seqlens=None, *, ScalarType? inter_dtype=None, str layout="BSND") -> Tensor A
solve_tril.out(Tensor A0, Tensor? cu_seqlens=None, *, str layout="BSND", Tensor(a!) A) -> ()
recompute_w_u(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor gc, Tensor? cu_seqlens=None, *, ScalarType?
    inter_dtype=None, str layout="BSND") -> (Tensor w, Tensor u)
recompute_w_u.out(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor gc, Tensor? cu_seqlens=None, *, str
    layout="BSND", Tensor(a!) w, Tensor(b!) u) -> ()
chunk_gated_delta_rule_fwd_h(Tensor k, Tensor w, Tensor u, Tensor gc, Tensor? initial_state=None, Tensor?
    cu_seqlens=None, *, int chunk_size=64, bool output_final_state=False, bool state_v_first=False, int?
    num_chunks=None, ScalarType? inter_dtype=None, str layout="BSND") -> (Tensor h, Tensor v_new, Tensor
    final_state)
chunk_gated_delta_rule_fwd_h.out(Tensor k, Tensor w, Tensor u, Tensor gc, Tensor? initial_state=None, Tensor?
    cu_seqlens=None, *, int chunk_size=64, bool state_v_first=False, str layout="BSND", Tensor(a!) h, Tensor(b!)
    v_new, Tensor(c!)? final_state=None) -> ()
chunk_fwd_o(Tensor q, Tensor k, Tensor v_new, Tensor h, Tensor gc, Tensor? cu_seqlens=None, *, float? scale=None,
    int chunk_size=64, str layout="BSND") -> Tensor o
chunk_fwd_o.out(Tensor q, Tensor k, Tensor v_new, Tensor h, Tensor gc, Tensor? cu_seqlens=None, *, float?
    scale=None, int chunk_size=64, str layout="BSND", Tensor(a!) o) -> ()
chunk_bwd_dv_local(Tensor q, Tensor k, Tensor do, Tensor gc, Tensor? cu_seqlens=None, *, float? scale=None, int
    chunk_size=64, ScalarType? inter_dtype=None, str layout="BSND") -> Tensor dv
chunk_bwd_dv_local.out(Tensor q, Tensor k, Tensor do, Tensor gc, Tensor? cu_seqlens=None, *, float? scale=None, int
    chunk_size=64, str layout="BSND", Tensor(a!) dv) -> ()
chunk_gated_delta_rule_bwd_dhu(Tensor q, Tensor k, Tensor w, Tensor do, Tensor dv, Tensor gc, Tensor?
    dfinal_state=None, Tensor? cu_seqlens=None, *, float? scale=None, int chunk_size=64, bool state_v_first=False,
    int? num_chunks=None, ScalarType? inter_dtype=None, str layout="BSND") -> (Tensor dh, Tensor dh0, Tensor dv2)
chunk_gated_delta_rule_bwd_dhu.out(Tensor q, Tensor k, Tensor w, Tensor do, Tensor dv, Tensor gc, Tensor?
    dfinal_state=None, Tensor? cu_seqlens=None, *, float? scale=None, int chunk_size=64, bool state_v_first=False,
    str layout="BSND", Tensor(a!) dh, Tensor(b!) dh0, Tensor(c!) dv2) -> ()
chunk_bwd_dqkwg(Tensor q, Tensor k, Tensor v_new, Tensor gc, Tensor h, Tensor do, Tensor dh, Tensor dv2, Tensor?
    cu_seqlens=None, *, float? scale=None, int chunk_size=64, ScalarType? inter_dtype=None, str layout="BSND") ->
    (Tensor dq, Tensor dk, Tensor dw, Tensor dg)
chunk_bwd_dqkwg.out(Tensor q, Tensor k, Tensor v_new, Tensor gc, Tensor h, Tensor do, Tensor dh, Tensor dv2, Tensor?
    cu_seqlens=None, *, float? scale=None, int chunk_size=64, str layout="BSND", Tensor(a!) dq, Tensor(b!) dk,
    Tensor(c!) dw, Tensor(d!) dg) -> ()
prepare_wy_repr_bwd_da(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dw, Tensor du, Tensor gc, Tensor?
    cu_seqlens=None, *, ScalarType? inter_dtype=None, str layout="BSND") -> Tensor dA
prepare_wy_repr_bwd_da.out(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dw, Tensor du, Tensor gc, Tensor?
    cu_seqlens=None, *, str layout="BSND", Tensor(a!) dA) -> ()
prepare_wy_repr_bwd_full(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dA, Tensor dw, Tensor du, Tensor gc,
    Tensor? cu_seqlens=None, *, ScalarType? inter_dtype=None, str layout="BSND") -> (Tensor dk, Tensor dv, Tensor
    dbeta, Tensor dg)
prepare_wy_repr_bwd_full.out(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dA, Tensor dw, Tensor du, Tensor gc,
    Tensor? cu_seqlens=None, *, str layout="BSND", Tensor(a!) dk, Tensor(b!) dv, Tensor(c!) dbeta, Tensor(d!) dg) ->
    ()
prepare_wy_repr_bwd(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dw, Tensor du, Tensor gc, Tensor?
    cu_seqlens=None, *, ScalarType? inter_dtype=None, str layout="BSND") -> (Tensor dk, Tensor dv, Tensor dbeta,
    Tensor dg)
prepare_wy_repr_bwd.out(Tensor k, Tensor v, Tensor beta, Tensor A, Tensor dw, Tensor du, Tensor gc, Tensor?
    cu_seqlens=None, *, str layout="BSND", Tensor(a!) dk, Tensor(b!) dv, Tensor(c!) dbeta, Tensor(d!) dg) -> ()
linear_fwd(Tensor x, Tensor weight, Tensor? bias=None) -> Tensor y
linear_bwd(Tensor dy, Tensor x, Tensor weight, *, int needs=7) -> (Tensor dx, Tensor dweight, Tensor dbias)
moe_route_fwd(Tensor logits, Tensor? replay_ids=None, *, int top_k, bool renormalise=True, ScalarType?
    logits_rounding=None, ScalarType? weights_dtype=None, bool output_probs=False) -> (Tensor weights, Tensor ids,
    Tensor probs)
moe_route_fwd.out(Tensor logits, Tensor? replay_ids=None, *, bool renormalise=True, ScalarType?
    logits_rounding=None, Tensor(a!) ids, Tensor(b!) weights, Tensor(c!)? probs=None) -> ()
moe_route_bwd(Tensor? dweights, Tensor? dprobs, Tensor logits, Tensor ids, *, bool renormalise=True, ScalarType?
    logits_rounding=None) -> Tensor dlogits
moe_route_bwd.out(Tensor? dweights, Tensor? dprobs, Tensor logits, Tensor ids, *, bool renormalise=True, ScalarType?
    logits_rounding=None, Tensor(a!) dlogits) -> ()
moe_init_routing(Tensor ids, *, int num_experts, str ids_convention="plain") -> (Tensor counts, Tensor src, Tensor
    pos)
moe_init_routing.out(Tensor ids, *, str ids_convention="plain", Tensor(a!) counts, Tensor(b!) src, Tensor(c!) pos)
    -> ()
moe_permute(Tensor x, Tensor src, Tensor pos) -> Tensor y
moe_permute.out(Tensor x, Tensor src, Tensor pos, *, Tensor(a!) y) -> ()
moe_unpermute_fwd(Tensor y, Tensor pos, Tensor? weights=None) -> Tensor out
moe_unpermute_fwd.out(Tensor y, Tensor pos, Tensor? weights=None, *, Tensor(a!) out) -> ()
moe_unpermute_bwd(Tensor dout, Tensor y, Tensor pos, Tensor? weights=None) -> (Tensor dy, Tensor dweights)
moe_unpermute_bwd.out(Tensor dout, Tensor y, Tensor pos, Tensor? weights=None, *, Tensor(a!)? dy=None, Tensor(b!)?
    dweights=None) -> ()
grouped_matmul_fwd(Tensor x, Tensor weight, Tensor groups, Tensor? bias=None, *, str weight_axes="nk", str
    group_list="counts", ScalarType? out_dtype=None) -> Tensor y
grouped_matmul_fwd.out(Tensor x, Tensor weight, Tensor groups, Tensor? bias=None, *, str weight_axes="nk", str
    group_list="counts", Tensor(a!) y) -> ()
grouped_matmul_bwd(Tensor dy, Tensor x, Tensor weight, Tensor groups, *, str weight_axes="nk", str
    group_list="counts", int needs=7) -> (Tensor dx, Tensor dweight, Tensor dbias)
grouped_matmul_bwd.out(Tensor dy, Tensor x, Tensor weight, Tensor groups, *, str weight_axes="nk", str
    group_list="counts", bool accumulate=False, Tensor(a!)? dx=None, Tensor(b!)? dweight=None, Tensor(c!)?
    dbias=None) -> ()
quantize(Tensor x, *, int axis=-1) -> (Tensor q, Tensor scale)
quantize.out(Tensor x, *, int axis=-1, Tensor(a!) q, Tensor(b!) scale) -> ()
grouped_matmul_swiglu_quant(Tensor x, Tensor weight, Tensor groups, Tensor weight_scale, Tensor x_scale, Tensor?
    smooth_scale=None, *, str weight_axes="nk", str group_list="counts") -> (Tensor q, Tensor q_scale)
grouped_matmul_swiglu_quant.out(Tensor x, Tensor weight, Tensor groups, Tensor weight_scale, Tensor x_scale, Tensor?
    smooth_scale=None, *, str weight_axes="nk", str group_list="counts", Tensor(a!) q, Tensor(b!) q_scale) -> ()
grouped_matmul_quant(Tensor x, Tensor weight, Tensor groups, Tensor weight_scale, Tensor x_scale, *, str
    weight_axes="nk", str group_list="counts", ScalarType out_dtype=float32) -> Tensor y
grouped_matmul_quant.out(Tensor x, Tensor weight, Tensor groups, Tensor weight_scale, Tensor x_scale, *, str
    weight_axes="nk", str group_list="counts", Tensor(a!) y) -> ()
moe_experts_quant(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor down, Tensor
    down_scale, *, str weight_axes="nk", str ids_convention="plain") -> Tensor out
moe_experts_quant.out(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor gate_up_scale, Tensor down,
    Tensor down_scale, *, str weight_axes="nk", str ids_convention="plain", Tensor(a!) out) -> ()
moe_experts_fwd(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, Tensor? shared_gate=None, Tensor?
    shared_up=None, Tensor? shared_down=None, Tensor? shared_router=None, Tensor? gate_up_lora_a=None, Tensor?
    gate_up_lora_b=None, Tensor? down_lora_a=None, Tensor? down_lora_b=None, *, str weight_axes="nk", bool
    interleaved=False, str ids_convention="plain", float gate_up_lora_scale=1.0, float down_lora_scale=1.0, bool
    round_y=False, bool save_hidden=False) -> (Tensor out, Tensor hidden)
moe_experts_fwd.out(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, Tensor? shared_gate=None,
    Tensor? shared_up=None, Tensor? shared_down=None, Tensor? shared_router=None, Tensor? gate_up_lora_a=None, Tensor?
    gate_up_lora_b=None, Tensor? down_lora_a=None, Tensor? down_lora_b=None, *, str weight_axes="nk", bool
    interleaved=False, str ids_convention="plain", float gate_up_lora_scale=1.0, float down_lora_scale=1.0, bool
    round_y=False, Tensor(a!) out, Tensor(b!)? hidden=None) -> ()
moe_experts_bwd(Tensor dout, Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, Tensor?
    shared_gate=None, Tensor? shared_up=None, Tensor? shared_down=None, Tensor? shared_router=None, Tensor?
    gate_up_lora_a=None, Tensor? gate_up_lora_b=None, Tensor? down_lora_a=None, Tensor? down_lora_b=None, Tensor?
    hidden=None, *, str weight_axes="nk", bool interleaved=False, str ids_convention="plain", float
    gate_up_lora_scale=1.0, float down_lora_scale=1.0, int needs=4095) -> (Tensor dx, Tensor dweights, Tensor dgate_up,
    Tensor ddown, Tensor dshared_gate, Tensor dshared_up, Tensor dshared_down, Tensor dshared_router, Tensor
    dgate_up_lora_a, Tensor dgate_up_lora_b, Tensor ddown_lora_a, Tensor ddown_lora_b)
moe_experts_bwd.out(Tensor dout, Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, Tensor?
    shared_gate=None, Tensor? shared_up=None, Tensor? shared_down=None, Tensor? shared_router=None, Tensor?
    gate_up_lora_a=None, Tensor? gate_up_lora_b=None, Tensor? down_lora_a=None, Tensor? down_lora_b=None, Tensor?
    hidden=None, *, str weight_axes="nk", bool interleaved=False, str ids_convention="plain", float
    gate_up_lora_scale=1.0, float down_lora_scale=1.0, Tensor(a!)? dx=None, Tensor(b!)? dweights=None, Tensor(c!)?
    dgate_up=None, Tensor(d!)? ddown=None, Tensor(e!)? dshared_gate=None, Tensor(f!)? dshared_up=None, Tensor(g!)?
    dshared_down=None, Tensor(h!)? dshared_router=None, Tensor(i!)? dgate_up_lora_a=None, Tensor(j!)?
    dgate_up_lora_b=None, Tensor(k!)? ddown_lora_a=None, Tensor(l!)? ddown_lora_b=None) -> ()
about() -> str
chunk_size() -> int
set_isa(str name) -> ()
"""

# A line that is not indented begins a schema.
SCHEMAS = SCHEMAS.strip().replace("\n    ", " ").split("\n")
