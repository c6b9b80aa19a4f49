"""dispatch and combine under the names and arguments of torch_npu. group_ep is a tidegate.ep.Buffer.

Inference only, as there. What torch_npu calls assist info is our handle. Arguments that it reserves, and dedicated
ranks for shared experts, are refused.
"""

from contextlib import contextmanager

import torch

from tidegate.ep.buffer import Buffer, Handle


def _refuse(op, **arguments):
    for name, (value, expected) in arguments.items():
        if value not in expected:
            raise ValueError(f"{op}: {name}: expected {' or '.join(map(repr, expected))}, got {value!r}")


def _check_group(op, buffer, ep_world_size, ep_rank_id, moe_expert_num):
    for name, value, expected in (
        ("ep_world_size", ep_world_size, buffer.ranks),
        ("ep_rank_id", ep_rank_id, buffer.rank),
        ("moe_expert_num", moe_expert_num, buffer.experts),
    ):
        if value != expected:
            raise ValueError(f"{op}: {name}: expected {expected} (of the buffer), got {value}")


@contextmanager
def _count_waiting(op, buffer, performance_info):
    """Adds the microseconds waited for each rank inside to performance_info."""
    if performance_info is None:
        yield
        return
    if performance_info.dtype != torch.int64 or performance_info.shape != (buffer.ranks,):
        got = f"{performance_info.dtype} {list(performance_info.shape)}"
        raise ValueError(f"{op}: performance_info: expected torch.int64 [{buffer.ranks}], got {got}")
    before = buffer.waited_microseconds
    yield
    performance_info += buffer.waited_microseconds - before


@torch.no_grad()
def npu_moe_distribute_dispatch_v2(
    x: torch.Tensor,
    expert_ids: torch.Tensor,
    group_ep: Buffer,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    scales: torch.Tensor | None = None,
    x_active_mask: torch.Tensor | None = None,
    expert_scales: torch.Tensor | None = None,
    performance_info: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    expert_shard_type: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    quant_mode: int = 0,
    global_bs: int = 0,
    expert_token_nums_type: int = 1,
    comm_alg: str = "",
) -> tuple[torch.Tensor, torch.Tensor, Handle, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(expand_x, dynamic_scales, assist_info_for_combine, expert_token_nums, ep_recv_counts, tp_recv_counts,
    expand_scales)."""
    op = "npu_moe_distribute_dispatch_v2"
    _check_group(op, group_ep, ep_world_size, ep_rank_id, moe_expert_num)
    _refuse(
        op,
        group_tp=(group_tp, ("",)),
        tp_world_size=(tp_world_size, (0, 1)),
        tp_rank_id=(tp_rank_id, (0,)),
        expert_shard_type=(expert_shard_type, (0,)),
        shared_expert_rank_num=(shared_expert_rank_num, (0,)),
        quant_mode=(quant_mode, (0, 2)),
        expert_token_nums_type=(expert_token_nums_type, (0, 1)),
    )
    if global_bs and global_bs < x.shape[0]:
        raise ValueError(f"{op}: global_bs: expected 0 or at least {x.shape[0]} (tokens here), got {global_bs}")
    options = dict(int8=quant_mode == 2, smooth_scale=scales)
    with _count_waiting(op, group_ep, performance_info):
        handle = group_ep.dispatch(x, expert_ids, expert_scales, x_active_mask, **options)
    rows = group_ep.expand(handle)
    rows, dynamic_scales = rows if quant_mode == 2 else (rows, torch.empty(0))
    counts = handle.expert_rows
    # By expert, then rank: where the rows of each pair of them end.
    by_rank = torch.bincount(
        handle.row_expert[:, 0] * group_ep.ranks + handle.row_rank, minlength=len(counts) * group_ep.ranks
    )
    return (
        rows,
        dynamic_scales,
        handle,
        counts.cumsum(0) if expert_token_nums_type == 0 else counts,
        by_rank.cumsum(0).to(torch.int32),
        torch.empty(0, dtype=torch.int32),
        handle.row_weights[:, 0],
    )


@torch.no_grad()
def npu_moe_distribute_combine_v2(
    expand_x: torch.Tensor,
    expert_ids: torch.Tensor,
    assist_info_for_combine: Handle,
    ep_send_counts: torch.Tensor,
    expert_scales: torch.Tensor,
    group_ep: Buffer,
    ep_world_size: int,
    ep_rank_id: int,
    moe_expert_num: int,
    *,
    x_active_mask: torch.Tensor | None = None,
    shared_expert_x: torch.Tensor | None = None,
    group_tp: str = "",
    tp_world_size: int = 0,
    tp_rank_id: int = 0,
    shared_expert_num: int = 1,
    shared_expert_rank_num: int = 0,
    global_bs: int = 0,
    comm_quant_mode: int = 0,
    comm_alg: str = "",
    ori_x: torch.Tensor | None = None,
    const_expert_alpha_1: torch.Tensor | None = None,
    const_expert_alpha_2: torch.Tensor | None = None,
    const_expert_v: torch.Tensor | None = None,
    performance_info: torch.Tensor | None = None,
) -> torch.Tensor:
    """x: the sum over slots of expert_scales times the experts' results, plus shared_expert_x."""
    op = "npu_moe_distribute_combine_v2"
    _check_group(op, group_ep, ep_world_size, ep_rank_id, moe_expert_num)
    _refuse(
        op,
        group_tp=(group_tp, ("",)),
        tp_world_size=(tp_world_size, (0, 1)),
        tp_rank_id=(tp_rank_id, (0,)),
        shared_expert_rank_num=(shared_expert_rank_num, (0,)),
        comm_quant_mode=(comm_quant_mode, (0,)),
    )
    with _count_waiting(op, group_ep, performance_info):
        out, _ = group_ep.combine(
            expand_x,
            assist_info_for_combine,
            weights=expert_scales,
            shared_x=shared_expert_x,
            ori_x=ori_x,
            alpha1=const_expert_alpha_1,
            alpha2=const_expert_alpha_2,
            v=const_expert_v,
        )
    return out
