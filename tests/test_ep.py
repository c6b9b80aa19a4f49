"""Expert parallelism in several processes: the bits of one process, gradients included; failures; models."""

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers.distributed.expert_parallel")

from ep_ranks import make_block, make_tokens, run_ranks, spread, step  # noqa: E402

import tidegate  # noqa: E402

pytestmark = pytest.mark.skipif(tidegate.isa() == "fallback", reason="needs the native library")

# (experts, tokens of each rank, skewed, dtype) by number of ranks; the last rank of some has no tokens, E=10 on 4 ranks
CASES = {
    1: [(8, [23], False, torch.float32)],
    2: [(8, [14, 9], False, torch.bfloat16), (6, [5, 0], True, torch.float32)],
    3: [(7, [6, 0, 9], False, torch.float32)],
    4: [(10, [5, 7, 0, 3], False, torch.float32), (10, [5, 7, 0, 3], True, torch.bfloat16)],
    8: [(12, [3, 1, 0, 4, 2, 2, 5, 1], False, torch.bfloat16), (5, [2] * 8, True, torch.float32)],
}


def batch_invariant():
    """Rows must not depend on how many there are, which torch's products do not promise."""
    torch.nn.functional.linear = tidegate.linear


def block_step(rank, ranks, experts, counts, skewed, dtype):
    batch_invariant()
    tidegate.ep.register()
    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    config, block = make_block(experts, dtype, skewed)
    assert not tidegate.ep.ep_enabled(block)
    spread(block, config, mesh)
    assert tidegate.ep.ep_enabled(block) == tidegate.ep.ep_enabled(mesh) == (ranks > 1)
    x, dout = make_tokens(counts, config.hidden_size, dtype)
    found = step(block, x[rank], dout[rank])
    with torch.no_grad():  # another way through the library: rows are read in place
        assert torch.equal(block(x[rank][None])[0], found["out"])
    tidegate.ep.unregister()
    return found


def plain_step(rank, ranks, experts, counts, skewed, dtype):
    """The same block in one process without expert parallelism, all tokens at once and rank by rank."""
    batch_invariant()
    config, block = make_block(experts, dtype, skewed)
    block.experts.forward = lambda x, ids, w: tidegate.moe_experts(
        x, ids, w, block.experts.gate_up_proj, block.experts.down_proj, round_y=True
    )
    x, dout = make_tokens(counts, config.hidden_size, dtype)
    return step(block, torch.cat(x), torch.cat(dout)), [step(block, *pair) for pair in zip(x, dout, strict=True)]


@pytest.mark.parametrize("ranks", CASES)
def test_block_has_the_bits_of_one_process(ranks, tmp_path):
    for number, (experts, counts, skewed, dtype) in enumerate(CASES[ranks]):
        case = (experts, counts, skewed, dtype)
        found = run_ranks(ranks, tmp_path / f"ranks{number}", block_step, *case)
        ((whole, parts),) = run_ranks(1, tmp_path / f"plain{number}", plain_step, *case)
        want = dict(whole)
        if dtype == torch.bfloat16:
            # There the gradient of a token is the sum of rounded parts, as between processes; moe_experts rounds once.
            (one,) = run_ranks(1, tmp_path / f"one{number}", block_step, experts, [sum(counts)], skewed, dtype)
            want["dx"] = one["dx"]
        for name in whole:
            if name in ("out", "dx"):
                parts_of = want[name].split(counts)
                assert all(torch.equal(f[name], w) for f, w in zip(found, parts_of, strict=True)), (case, name)
            elif name.startswith("experts."):
                assert all(torch.equal(f[name], whole[name]) for f in found), (case, name)
            else:  # replicated: every rank has the part of its tokens
                assert all(torch.equal(f[name], p[name]) for f, p in zip(found, parts, strict=True)), (case, name)
