"""Processes for the tests of expert parallelism, and the Qwen3.5-MoE block that they share."""

import datetime
import multiprocessing
import traceback

import torch
import torch.distributed as dist
from ranks import PRELOAD


def _run(function, rank, ranks, folder, arguments, errors):
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=ranks,
            timeout=datetime.timedelta(seconds=60),
        )
        result = function(rank, ranks, *arguments)
        torch.save(result, f"{folder}/result{rank}")
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        errors.put((rank, traceback.format_exc()))
        raise


def run_ranks(ranks, folder, function, *arguments):
    """function(rank, ranks, *arguments) in as many processes of a gloo group; the results by rank."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    folder.mkdir()
    errors = context.SimpleQueue()
    processes = [
        context.Process(target=_run, args=(function, rank, ranks, str(folder), arguments, errors), daemon=True)
        for rank in range(ranks)
    ]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
        process.kill()
    if not errors.empty():
        rank, text = errors.get()
        raise AssertionError(f"rank {rank}: {text}")
    return [torch.load(f"{folder}/result{rank}") for rank in range(ranks)]


class Layers(torch.nn.Module):
    """A block under the name that the model's plan has for it."""

    def __init__(self, block):
        super().__init__()
        layer = torch.nn.Module()
        layer.mlp = block
        self.layers = torch.nn.ModuleList([layer])


def make_block(experts, dtype, skewed=False):
    import tiny_models
    from transformers.models.qwen3_5_moe import modeling_qwen3_5_moe as modeling

    config = tiny_models.config_of("qwen3_5_moe", num_experts=experts, num_experts_per_tok=3)
    torch.manual_seed(0)
    block = modeling.Qwen3_5MoeSparseMoeBlock(config)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn_like(parameter) / 4)
        if skewed:  # every token prefers expert 1, most of them the first three
            block.gate.weight[:3] += torch.tensor([[2.0], [5.0], [3.0]])
    return config, block.to(dtype)


def make_tokens(counts, width, dtype):
    generator = torch.Generator().manual_seed(7)
    x, dout = (torch.randn(sum(counts), width, generator=generator) for _ in range(2))
    return [list(t.to(dtype).split(counts)) for t in (x + 0.5, dout)]


def spread(block, config, mesh):
    """The block under the expert-parallel plan of its model."""
    from transformers.distributed import expert_parallel

    plan = config.base_model_ep_plan
    if hasattr(expert_parallel, "EPImplementation"):  # from 5.23 on the caller has put in the numbers of layers
        plan = {name.replace("*", "0"): style for name, style in plan.items()}
    # Nobody else holds a rank's tokens.
    alone = dist.device_mesh.init_device_mesh("cpu", (mesh.size(), 1), mesh_dim_names=("ep", "tp"))["tp"]
    expert_parallel.apply_expert_parallelism(Layers(block), mesh, alone, plan)


def step(block, x, dout):
    """Output, gradient of x and of every parameter; those of experts as a whole."""
    block.zero_grad()
    x = x[None].detach().clone().requires_grad_()
    out = block(x)
    out.backward(dout[None])
    found = {"out": out.detach()[0], "dx": x.grad[0]}
    for name, parameter in block.named_parameters():
        gradient = parameter.grad
        found[name] = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient.clone()
    return found
