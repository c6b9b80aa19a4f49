"""Expert parallelism on one machine: a Qwen3.5-MoE whose experts are spread over the processes.

    torchrun --nproc-per-node 4 examples/expert_parallel.py

The model's own expert-parallel plan is used; `tidegate.ep.register()` makes it run through Tidegate. Every process has
its own prompts; the logits are compared with those of the whole model in one process.
"""

import os
import tempfile

import torch
import torch.distributed as dist
from transformers import Qwen3_5MoeForCausalLM, Qwen3_5MoeTextConfig
from transformers.distributed import DistributedConfig

import tidegate

SIZES = dict(
    vocab_size=256,
    hidden_size=64,
    num_hidden_layers=4,
    layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
    moe_intermediate_size=32,
    shared_expert_intermediate_size=32,
    num_experts=16,
    num_experts_per_tok=4,
    pad_token_id=0,
)


def checkpoint(folder):
    """A small model with random weights, as if it had been downloaded."""
    torch.manual_seed(0)
    Qwen3_5MoeForCausalLM(Qwen3_5MoeTextConfig(**SIZES)).save_pretrained(folder)


def shared_folder():
    """A folder of rank 0 that all ranks know."""
    name = [tempfile.mkdtemp() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(name)
    return name[0]


def load(folder, ranks):
    plan = DistributedConfig(fsdp_size=ranks, ep_size=ranks)
    return Qwen3_5MoeForCausalLM.from_pretrained(folder, distributed_config=plan, dtype=torch.float32)


def main():
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    folder = shared_folder()
    if rank == 0:
        checkpoint(folder)
    dist.barrier()

    tidegate.ep.register(timeout=60.0)
    model = load(folder, ranks).eval()
    prompts = torch.randint(1, SIZES["vocab_size"], (2, 20 + rank), generator=torch.Generator().manual_seed(rank))
    with torch.no_grad():
        logits = model(input_ids=prompts, use_cache=False).logits
        alone = Qwen3_5MoeForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        wanted = alone(input_ids=prompts, use_cache=False).logits
    error = ((logits - wanted).norm() / wanted.norm()).item()
    local = sum(p.to_local().numel() for n, p in model.named_parameters() if ".experts." in n)
    print(
        f"rank {rank}: expert parallel {tidegate.ep.ep_enabled(model)}, {local} expert weights here, "
        f"logits differ from one process by {error:.1e}",
        flush=True,
    )
    assert error < 1e-5
    tidegate.ep.unregister()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
