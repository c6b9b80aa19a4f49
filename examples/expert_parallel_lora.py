"""Training with expert parallelism, FSDP2 and LoRA together: a small Qwen3.5-MoE on four processes.

    torchrun --nproc-per-node 4 examples/expert_parallel_lora.py

Two processes share the experts (ep), FSDP2 shards everything over what is left: dense weights over all four, experts
over the two that hold the same ones. Adapters are on attention and the shared expert; the rest is frozen.
"""

import torch
import torch.distributed as dist
from expert_parallel import SIZES, checkpoint, shared_folder
from peft import LoraConfig, inject_adapter_in_model
from transformers import Qwen3_5MoeForCausalLM
from transformers.distributed import DistributedConfig

import tidegate

STEPS = 5
TARGETS = ["q_proj", "v_proj", "in_proj_qkv", "shared_expert.up_proj", "shared_expert.down_proj"]


def with_adapters(model):
    torch.manual_seed(1)
    model = inject_adapter_in_model(LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS), model)
    with torch.no_grad():  # B starts at zero: give every adapter a gradient from the first step on
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0.0, 0.02)
    return model


def distribute(model, ranks, ep):
    plan = DistributedConfig(fsdp_size=ranks, ep_size=ep)
    plan, _, meshes = type(model).prepare_distribute_model(plan)
    return type(model).maybe_distribute_model(model, plan, meshes)


def batch(rank, step):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(1, SIZES["vocab_size"], (2, 24), generator=generator)


def train(model, batches):
    """Mean loss of every step over some batches; with several processes each has one."""
    adapters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(adapters, lr=1.0)
    losses = []
    for step in range(STEPS):
        optimizer.zero_grad()
        total = 0.0
        for rank in batches:
            ids = batch(rank, step)
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss / len(batches)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        if dist.is_initialized() and len(batches) == 1:
            dist.all_reduce(total)
            total /= dist.get_world_size()
        losses.append(round(float(total), 5))
    return losses


def main():
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    folder = shared_folder()
    if rank == 0:
        checkpoint(folder)
    dist.barrier()
    tidegate.ep.register()
    model = with_adapters(Qwen3_5MoeForCausalLM.from_pretrained(folder, dtype=torch.float32))
    model = distribute(model, ranks, ep=2)
    losses = train(model, [rank])
    if rank == 0:
        print("expert parallel:", tidegate.ep.ep_enabled(model))
        print("losses on", ranks, "processes:", losses)
        alone = with_adapters(Qwen3_5MoeForCausalLM.from_pretrained(folder, dtype=torch.float32))
        wanted = train(alone, list(range(ranks)))
        print("losses in one process:", wanted)
        assert max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) < 1e-3
        assert losses[-1] < losses[0]
    tidegate.ep.unregister()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
