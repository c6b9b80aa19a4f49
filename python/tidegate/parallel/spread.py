"""Parameters of which a rank holds a part: experts under expert parallelism, shards of FSDP2, tensor parallelism.

What has become of their gradients depends on who holds the other parts: experts have met the tokens of all ranks that
they are spread over, and FSDP2 has reduced its shards itself.
"""

import torch
import torch.distributed as dist

from tidegate.errors import SequenceParallelError


def _mesh(tensor):
    """Of a DTensor; asked so because importing its class takes a while."""
    return getattr(tensor, "device_mesh", None)


def _expert_mesh(module):
    """The mesh that a module's experts are spread over, or None. Adapters around them (PEFT) are spread as they are."""
    while isinstance(getattr(module, "base_layer", None), torch.nn.Module):
        module = module.base_layer
    if "_ep_mesh" in module.__dict__:
        return module._ep_mesh
    sharded = getattr(module, "_is_expert_parallel", False)  # by a style of Transformers
    return next(filter(None, map(_mesh, module.parameters())), None) if sharded else None


def _experts(model):
    """The mesh of every parameter of spread experts."""
    found = {}
    for module in model.modules():
        mesh = _expert_mesh(module)
        if mesh is not None:
            found.update(dict.fromkeys(module.parameters(), mesh))
    return found


def unreduced(model, group):
    """The trained parameters, each with whether its gradient lacks the tokens of the other ranks of a group."""
    ranks, experts, found = set(dist.get_process_group_ranks(group)), _experts(model), []
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        mesh = experts.get(p, _mesh(p))
        common = set() if mesh is None else ranks & set(mesh.mesh.flatten().tolist())
        if len(common) > 1 and p not in experts:
            raise SequenceParallelError(
                f"reduce_gradients: {name} is sharded over ranks {sorted(common)} of this group, and FSDP2 has reduced "
                "its gradient: leave the call out, with grad_reduction='mean'"
            )
        if 1 < len(common) < len(ranks):
            raise SequenceParallelError(
                f"reduce_gradients: {name}: expected experts that are spread over all ranks of this group, or over "
                f"ranks outside of it, got ranks {sorted(common)} of {sorted(ranks)}"
            )
        found.append((p, len(common) <= 1))
    return found


def local(tensor):
    """This rank's part of a tensor, as a view."""
    return tensor if _mesh(tensor) is None else tensor.to_local()


def tensor_parallel(model, group):
    """The name of a parameter under tensor parallelism over ranks of a group, or None: it wants all tokens on each."""
    ranks = set(dist.get_process_group_ranks(group))
    for name, p in model.named_parameters():
        if "tp" in (getattr(_mesh(p), "mesh_dim_names", None) or ()):
            if len(ranks & set(dist.get_process_group_ranks(_mesh(p).get_group("tp")))) > 1:
                return name
    return None
