"""Expert parallelism in training: parts with experts of one's own, adapters, FSDP2 beside it, and what goes wrong."""

import importlib
import os
import pathlib
import signal
import sys
import time

import pytest
import torch
import torch.distributed as dist

pytest.importorskip("transformers.distributed.expert_parallel")

from compare import error  # noqa: E402
from ep_ranks import run_ranks  # noqa: E402

import tidegate  # noqa: E402
from tidegate.errors import ExpertParallelError  # noqa: E402

pytestmark = pytest.mark.skipif(tidegate.isa() == "fallback", reason="needs the native library")
E, K, H, WIDTH = 6, 2, 32, 16


def leaves(*tensors):
    return [t.detach().clone().requires_grad_() for t in tensors]


def make(rank, tokens):
    generator = torch.Generator().manual_seed(5)
    gate_up, down = torch.randn(E, 2 * WIDTH, H, generator=generator) / 6, torch.randn(E, H, WIDTH, generator=generator)
    generator.manual_seed(rank)
    x, dout = (torch.randn(tokens, H, generator=generator) for _ in range(2))
    ids = torch.randint(-1, E, (tokens, K), generator=generator)
    return x, ids, torch.rand(tokens, K, generator=generator), gate_up, down, dout


def buffer_of(group=None, **changes):
    sizes = dict(experts=E, slots=K, row_bytes=4 * H, max_tokens=64, timeout=20.0) | changes
    return tidegate.ep.Buffer(group, **sizes)


def parts(rank, ranks):
    """dispatch, experts written in torch, combine: gradients against the whole layer."""
    buffer = buffer_of(dist.device_mesh.init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",)))
    x, ids, weights, gate_up, down, dout = make(rank, tokens=0 if rank == 1 else 9)
    mine = slice(buffer.expert_begin[rank], buffer.expert_begin[rank + 1])
    results = []
    for whole in (True, False):
        given = leaves(x, weights, gate_up[mine], down[mine])
        if whole:
            out = tidegate.ep.experts(buffer, given[0], ids, *given[1:])
        else:
            rows, handle = tidegate.ep.dispatch(buffer, given[0], ids, given[1])
            ys = []
            for e, part in enumerate(rows.split(handle.expert_rows.tolist())):
                gate, up = (part @ given[2][e].T).chunk(2, dim=-1)
                ys.append((torch.nn.functional.silu(gate) * up) @ given[3][e].T)
            out = tidegate.ep.combine(buffer, torch.cat(ys), handle, rows=rows)
        out.backward(dout)
        results.append([out.detach(), *[t.grad for t in given]])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    # A shared expert's output, one number for every row, int8 rows.
    handle = buffer.dispatch(x, ids, weights)
    rows = buffer.expand(handle)
    shared = buffer.combine(rows, handle, shared_x=x)[0]
    torch.testing.assert_close(shared, buffer.combine(rows, handle)[0] + x)
    handle = buffer.dispatch(x, ids, int8=True)
    quantised, scales = buffer.expand(handle)
    assert quantised.dtype == torch.int8
    torch.testing.assert_close(quantised * scales[:, None], rows, rtol=0, atol=rows.abs().max().item() / 200)
    smooth = torch.rand(E, H, generator=torch.Generator().manual_seed(1)) + 0.5
    quantised, scales = buffer.expand(buffer.dispatch(x, ids, int8=True, smooth_scale=smooth))
    want = tidegate.quantize(rows * smooth[buffer.expert_begin[rank] + handle.row_expert[:, 0].long()])
    assert torch.equal(quantised, want[0]) and torch.equal(scales, want[1])
    same = tidegate.ep.npu_moe_distribute_dispatch_v2(x, ids, buffer, ranks, rank, E, scales=smooth, quant_mode=2)
    assert torch.equal(same[0], quantised) and torch.equal(same[1], scales)
    npu(buffer, x, ids, weights)
    assert buffer.waited_microseconds.shape == (ranks,)
    assert buffer.window_bytes > 0


def npu(buffer, x, ids, weights):
    """The names and arguments of torch_npu."""
    sizes = (buffer, buffer.ranks, buffer.rank, E)
    rows, scales, info, counts, received, _, row_weights = tidegate.ep.npu_moe_distribute_dispatch_v2(
        x, ids, *sizes, expert_scales=weights, expert_token_nums_type=0
    )
    assert counts.tolist() == info.expert_rows.cumsum(0).tolist() and scales.numel() == 0
    ends = [((info.row_expert[:, 0] < e) | ((info.row_expert[:, 0] == e) & (info.row_rank <= r))).sum().item()
            for e in range(len(counts)) for r in range(buffer.ranks)]  # fmt: skip
    assert received.tolist() == ends and torch.equal(row_weights, info.row_weights[:, 0])
    out = tidegate.ep.npu_moe_distribute_combine_v2(rows, ids, info, received, weights, *sizes, shared_expert_x=x)
    torch.testing.assert_close(out, x + x * (weights * (ids >= 0)).sum(1, keepdim=True))
    # Time waited is added up, for the rank that comes late.
    waited = torch.full((buffer.ranks,), 5)
    dist.barrier()
    if buffer.rank == 1:
        time.sleep(0.2)
    info = tidegate.ep.npu_moe_distribute_dispatch_v2(x, ids, *sizes, performance_info=waited)[2]
    tidegate.ep.npu_moe_distribute_combine_v2(rows, ids, info, received, weights, *sizes, performance_info=waited)
    assert (waited >= 5).all() and (buffer.rank == 1 or waited[1] > 50_000), waited
    with pytest.raises(ValueError, match=r"performance_info: expected torch.int64 \[3\], got torch.float32 \[2\]"):
        tidegate.ep.npu_moe_distribute_dispatch_v2(x, ids, *sizes, performance_info=torch.zeros(2))
    with pytest.raises(ValueError, match="npu_moe_distribute_dispatch_v2: ep_world_size: expected 3 "):
        tidegate.ep.npu_moe_distribute_dispatch_v2(x, ids, buffer, 2, buffer.rank, E)
    with pytest.raises(ValueError, match="shared_expert_rank_num: expected 0, got 1"):
        tidegate.ep.npu_moe_distribute_dispatch_v2(x, ids, *sizes, shared_expert_rank_num=1)


def test_parts_have_the_gradients_of_the_whole(tmp_path):
    run_ranks(3, tmp_path / "ranks", parts)


def errors(rank, ranks):
    mesh = dist.device_mesh.init_device_mesh("cpu", (1, ranks), mesh_dim_names=("dp", "ep"))
    assert tidegate.ep.ep_enabled(mesh)
    assert not tidegate.ep.ep_enabled(mesh["dp"])
    with pytest.raises(ValueError, match="expected 1 dimension, got 2"):
        buffer_of(mesh)
    with pytest.raises(TypeError, match="expected a model or a mesh"):
        tidegate.ep.ep_enabled(3)
    buffer = buffer_of(mesh["ep"])
    x, ids, weights, *_ = make(rank, tokens=4)
    # One rank wants a gradient: it would wait for the others in backward.
    with pytest.raises(ExpertParallelError, match="disagree: needs_backward is"):
        tidegate.ep.dispatch(buffer, x.requires_grad_(rank == 1), ids, weights)
    with pytest.raises(ExpertParallelError, match="disagree"):  # poisoned
        tidegate.ep.dispatch(buffer, x, ids, weights)
    dist.barrier()
    buffer.reset()
    if rank == 0:
        with pytest.raises(
            ValueError, match=r"x: expected at most 64 tokens .*, got 65; a buffer for them has windows of"
        ):
            buffer.dispatch(torch.zeros(65, H), torch.zeros(65, K, dtype=torch.int32))
    else:
        with pytest.raises(ExpertParallelError, match="rank 0 failed: ep_dispatch: x: expected at most 64 tokens"):
            buffer.dispatch(x, ids)
    dist.barrier()
    buffer.reset()
    if rank == 0:
        with pytest.raises(ValueError, match=r"ep_dispatch: smooth_scale: expected shape \[6, 32\], got \[5, 32\]"):
            buffer.dispatch(x, ids, int8=True, smooth_scale=torch.ones(5, H))
    else:
        with pytest.raises(ExpertParallelError, match="rank 0 failed: ep_dispatch: smooth_scale: expected shape"):
            buffer.dispatch(x, ids, int8=True, smooth_scale=torch.ones(E, H))
    dist.barrier()
    buffer.reset()
    with pytest.raises(TypeError, match="ids: expected dtype int32 or int64, got dtype float32"):
        buffer.dispatch(x, ids.float())


def test_errors(tmp_path):
    run_ranks(2, tmp_path / "ranks", errors)


def killed(rank, ranks, when, folder):
    buffer = buffer_of()
    x, ids, weights, gate_up, down, dout = make(rank, tokens=5)
    mine = slice(buffer.expert_begin[rank], buffer.expert_begin[rank + 1])
    given = leaves(x, weights, gate_up[mine], down[mine])
    begin = time.monotonic()
    try:
        out = tidegate.ep.experts(buffer, given[0], ids, *given[1:])
        if when == "backward" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        out.backward(dout)
        if when == "next step" and rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        tidegate.ep.experts(buffer, given[0], ids, *given[1:])
    except ExpertParallelError as failure:
        pathlib.Path(folder, f"text{rank}").write_text(f"{time.monotonic() - begin}\n{failure}")
    os._exit(0)  # gloo would wait for the dead


@pytest.mark.parametrize("when", ["backward", "next step"])
def test_a_killed_rank_is_named_by_all_others(when, tmp_path):
    with pytest.raises(FileNotFoundError):  # nobody leaves a result
        run_ranks(3, tmp_path / "ranks", killed, when, str(tmp_path))
    for rank in (0, 2):
        seconds, text = (tmp_path / f"text{rank}").read_text().split("\n", 1)
        assert float(seconds) < 10  # the timeout is 20
        assert "rank 1" in text and "process gone" in text, text
    assert not [f for f in os.listdir("/dev/shm") if "tidegate" in f]


def example(name):
    sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "examples"))
    return importlib.import_module(name)


def fsdp_and_lora(rank, ranks, folder):
    lora = example("expert_parallel_lora")
    lora.STEPS = 2
    if rank == 0:
        lora.checkpoint(folder)
    dist.barrier()
    tidegate.ep.register()
    load = lora.Qwen3_5MoeForCausalLM.from_pretrained
    model = lora.distribute(lora.with_adapters(load(folder, dtype=torch.float32)), ranks, ep=2)
    assert tidegate.ep.ep_enabled(model) and tidegate.ep.ep_enabled(model._mesh_manager)
    losses = lora.train(model, [rank])
    gradients = {n: p.grad.full_tensor() for n, p in model.named_parameters() if p.grad is not None}
    tidegate.ep.unregister()
    alone = lora.with_adapters(load(folder, dtype=torch.float32))
    wanted = lora.train(alone, list(range(ranks)))
    assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < 1e-4
    assert gradients.keys() == {n for n, p in alone.named_parameters() if p.grad is not None}
    assert all("lora_" in n and error(gradients[n], alone.get_parameter(n).grad) < 1e-3 for n in gradients)


def test_fsdp2_on_the_other_dimension_and_lora(tmp_path):
    pytest.importorskip("peft")
    run_ranks(4, tmp_path / "ranks", fsdp_and_lora, str(tmp_path / "model"))


def lora_on_experts(rank, ranks):
    import tiny_models
    from peft import LoraConfig, get_peft_model

    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]

    def adapted(model, begin, end):
        """Adapters for some experts, with the numbers that they would have among all experts."""
        model = get_peft_model(model, LoraConfig(r=2, lora_alpha=4, target_parameters=names))
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for key, parameter in model.named_parameters():
                if "lora_A" in key:
                    parameter.copy_(torch.randn(4, 2, parameter.shape[1], generator=generator)[begin:end].flatten(0, 1))
                elif "lora_B" in key:  # [d2, r * experts], the expert is the fastest axis
                    whole = torch.randn(parameter.shape[0], 2, 4, generator=generator)
                    parameter.copy_(whole[..., begin:end].flatten(1))
        return model

    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    ids = [tiny_models.tokens(1, 12 + r, seed=r) for r in range(ranks)]
    spread = tidegate.ep.parallelize(tiny_models.build("qwen3_5_moe", layers=2), mesh)
    assert tidegate.ep.ep_enabled(spread)
    spread = adapted(spread, 2 * rank, 2 * rank + 2)
    spread(input_ids=ids[rank], labels=ids[rank], use_cache=False).loss.backward()
    alone = adapted(tiny_models.build("qwen3_5_moe", layers=2), 0, 4)
    for tokens in ids:
        alone(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    for name, parameter in spread.named_parameters():
        if "lora_" in name:
            want = alone.get_parameter(name).grad
            mine = slice(2 * rank, 2 * rank + 2)
            want = (
                want.view(4, 2, -1)[mine].flatten(0, 1)
                if "lora_A" in name
                else want.view(-1, 2, 4)[..., mine].flatten(1)
            )
            assert error(parameter.grad, want) < 1e-4, name


def patched_afterwards(rank, ranks):
    """A patch leaves experts that are spread over ranks where they are; the rest of the model is ours."""
    import tiny_models

    mesh = dist.device_mesh.init_device_mesh("cpu", (ranks,), mesh_dim_names=("ep",))
    ids = tiny_models.tokens(1, 12 + rank, seed=rank)
    want = tiny_models.logits(tiny_models.build("qwen3_5_moe"), ids)
    model = tidegate.ep.parallelize(tiny_models.build("qwen3_5_moe"), mesh)
    calls, call = [], tidegate.ep.functions.call
    tidegate.ep.functions.call = lambda name, *arguments: calls.append(name) or call(name, *arguments)
    assert error(tiny_models.logits(model, ids), want) < 1e-5 and calls == ["experts"] * 4  # one a layer
    handle = tidegate.patch(model)
    assert handle.report().only(op="gdn_layer", status="installed")
    assert error(tiny_models.logits(model, ids), want) < 1e-5 and calls == ["experts"] * 8
    handle.undo()
    assert error(tiny_models.logits(model, ids), want) < 1e-5 and calls == ["experts"] * 12


def test_a_patch_after_experts_were_spread(tmp_path):
    run_ranks(2, tmp_path / "ranks", patched_afterwards)


def test_lora_on_the_experts(tmp_path):
    pytest.importorskip("peft")
    run_ranks(2, tmp_path / "ranks", lora_on_experts)


def test_names_of_the_registry():
    """From Transformers 5.23 on: a name of its own and the default. Others are stock, and afterwards all are."""
    expert_parallel = importlib.import_module("transformers.distributed.expert_parallel")
    if not hasattr(expert_parallel, "EPImplementationInterface"):
        pytest.skip("this Transformers asks no registry how tokens reach the experts")
    names = lambda: dict(expert_parallel.EPImplementationInterface().items())  # noqa: E731
    before = names()
    for _ in range(2):  # again changes settings only
        tidegate.ep.register()
        changed = {name for name, value in names().items() if before.get(name) is not value}
        assert changed == {"auto", "tidegate"} and names()["auto"] is names()["tidegate"]
    tidegate.ep.unregister()
    assert names() == before
