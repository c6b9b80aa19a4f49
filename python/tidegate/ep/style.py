"""Expert parallelism of Transformers models: the parallel style that their plans name, and who has it."""

import functools

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from tidegate import moe
from tidegate.ep import functions
from tidegate.ep.buffer import Buffer
from tidegate.ep.nodes import NodesBuffer, nodes_of

STYLE, SHARDS = "ep_dispatch_experts", "grouped_gemm"
NAME, DEFAULT = "tidegate", "auto"  # of DistributedConfig.ep_implementation
MAX_TOKENS = 32768  # of a rank in one call; costs address space only

_stock = {}  # the styles that ours stand in for, and what "auto" meant
_settings = {"max_tokens": MAX_TOKENS, "timeout": 60.0, "combine": "exact"}
_buffers = {}  # one for all layers of equal sizes


def _registry():
    try:
        from transformers.distributed.expert_parallel import EpDispatchExpertsParallel, MoEParamShard
        from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    except ImportError as error:
        raise RuntimeError(
            f"tidegate.ep: expected a Transformers with the parallel style {STYLE} (5.22 or later), got {error}"
        ) from error
    return ALL_PARALLEL_STYLES, EpDispatchExpertsParallel, MoEParamShard


def chunk_begin(experts, ranks):
    """Where each rank's experts begin when torch cuts a dimension into chunks: the last ranks may have fewer."""
    step = -(-experts // ranks)
    return [min(r * step, experts) for r in range(ranks + 1)]


def _buffer(mesh, experts, slots, row_bytes):
    key = (mesh.get_group(), experts, slots, row_bytes, *_settings.values())
    if key not in _buffers:
        options = {name: value for name, value in _settings.items() if name != "combine"}
        options |= dict(experts=experts, slots=slots, row_bytes=row_bytes)
        options["expert_begin"] = chunk_begin(experts, mesh.size())
        if len(set(nodes_of(mesh.get_group()))) == 1:
            _buffers[key] = Buffer(mesh, **options)
        else:
            _buffers[key] = NodesBuffer(mesh, combine=_settings["combine"], **options)
    return _buffers[key]


def _mark(module, experts, mesh):
    """An experts module that holds the experts of this rank only."""
    begin, rank = chunk_begin(experts, mesh.size()), mesh.get_local_rank()
    module._ep_experts, module._ep_mesh = experts, mesh
    module.num_experts = begin[rank + 1] - begin[rank]
    module._is_expert_parallel = True


def _layer(module, experts_forward, mesh, hidden, ids, weights):
    """The local experts between dispatch and combine: ours in one piece if they can run the module, else its own."""
    buffer = _buffer(mesh, module._ep_experts, ids.shape[-1], hidden.shape[-1] * hidden.element_size())
    if moe.why_not(module) is None:  # the same on every rank, so that all make the same exchanges
        axes = "kn" if getattr(module, "is_transposed", False) else "nk"
        return functions.experts(buffer, hidden, ids, weights, module.gate_up_proj, module.down_proj, weight_axes=axes)
    rows, handle = functions.dispatch(buffer, hidden, ids, weights)
    y = rows
    if handle.rows > 0:  # as top-1 with unit weights; the routing weights come with the combine
        y = experts_forward(rows, handle.row_expert.long(), torch.ones(handle.rows, 1, dtype=rows.dtype))
    return functions.combine(buffer, y.to(hidden.dtype), handle, rows=rows)


def _run(module, experts_forward, mesh, tp_mesh, hidden, ids, weights):
    """The layer for the tokens of this rank; ranks of tensor parallelism hold the same ones, and each takes a part."""
    if tp_mesh is None or tp_mesh.size() == 1:
        return _layer(module, experts_forward, mesh, hidden, ids, weights)
    tokens, width = hidden.shape
    parts = (
        DTensor.from_local(t, tp_mesh, [Replicate()], run_check=False).redistribute(tp_mesh, [Shard(0)]).to_local()
        for t in (hidden, ids, weights)
    )
    out = _layer(module, experts_forward, mesh, *parts).contiguous()
    return DTensor.from_local(out, tp_mesh, [Shard(0)], shape=(tokens, width), stride=(width, 1)).full_tensor()


def _implementation():
    """For releases in which a style asks a registry how tokens reach the experts (5.23 and later), else None."""
    try:
        from transformers.distributed.expert_parallel import EPImplementation, EPImplementationInterface
    except ImportError:
        return None, None

    class TidegateEP(EPImplementation):
        """Our dispatch and combine around the experts of one module."""

        def __init__(self, experts, ep_mesh, tp_mesh):
            super().__init__(experts, ep_mesh, tp_mesh)
            self.experts = experts

        def __call__(self, hidden_states, top_k_index, top_k_weights):
            given = (hidden_states, top_k_index, top_k_weights)
            return _run(self.experts, self.experts_forward, self.ep_mesh, self.tp_mesh, *given)

    return TidegateEP, EPImplementationInterface


def _styles():
    _, dispatch_style, shard_style = _registry()

    class TidegateExperts(dispatch_style):
        """The experts' forward between our dispatch and combine, where the style itself does both (5.22)."""

        def install_forward(self, module, ep_mesh, *, tp_mesh=None):
            experts_forward = module.forward

            def ep_forward(hidden_states, top_k_index, top_k_weights):
                given = (hidden_states, top_k_index, top_k_weights)
                given = (t.to_local() if isinstance(t, DTensor) else t for t in given)
                with self.context_around_forward(module, ep_mesh):
                    return _run(module, experts_forward, ep_mesh, tp_mesh, *given)

            module.forward = ep_forward
            return module

    class TidegateShard(shard_style):
        """As the stock style, without its rule that the ranks divide the experts."""

        def shard_param(self, module, param, mesh):
            from torch.distributed.tensor import distribute_tensor

            whole = module._parameters.get(param)
            if whole is None:
                return
            if self.shards_expert_dim and hasattr(module, "num_experts"):
                _mark(module, whole.shape[0], mesh)
            module._parameters[param] = torch.nn.Parameter(
                distribute_tensor(whole, mesh, [self.placement], src_data_rank=None),
                requires_grad=whole.requires_grad,
            )

    return TidegateExperts(), TidegateShard


def register(max_tokens: int = MAX_TOKENS, timeout: float = 60.0, combine: str = "exact") -> None:
    """Expert-parallel plans of models built from now on use Tidegate; again changes the settings.

    The plan of Qwen3.5-MoE, Qwen3-Next and others names the style "ep_dispatch_experts" for their experts: this is
    what it then means, so nothing in the model or its plan changes. From Transformers 5.23 on it is what
    DistributedConfig.ep_implementation is by default ("auto"), and has the name "tidegate" there. Buffers are made at
    the first forward. combine: how results return from other nodes, "exact" or "fast" (see NodesBuffer).
    """
    styles, _, _ = _registry()
    experts, shard = _styles()
    if not _stock:
        _stock.update({name: styles[name] for name in (STYLE, SHARDS)})
    _settings.update(max_tokens=max_tokens, timeout=timeout, combine=combine)
    implementation, implementations = _implementation()
    if implementation is None:
        styles.register(STYLE, experts)
    else:
        _stock.setdefault(DEFAULT, implementations()[DEFAULT])
        for name in (NAME, DEFAULT):
            implementations.register(name, implementation)
    stock = _stock[SHARDS]
    styles.register(SHARDS, shard(stock.placement, shards_expert_dim=stock.shards_expert_dim))


def unregister() -> None:
    """The stock styles again, for models built from now on; closes all buffers."""
    if _stock:
        styles, _, _ = _registry()
        _, implementations = _implementation()
        if DEFAULT in _stock:
            implementations.register(DEFAULT, _stock.pop(DEFAULT))
            del implementations._global_mapping[NAME]  # the registry has no call for it
        for name, style in _stock.items():
            styles.register(name, style)
        _stock.clear()
    for buffer in _buffers.values():
        buffer.close()
    _buffers.clear()


def parallelize(
    model: torch.nn.Module, mesh: DeviceMesh, max_tokens: int = MAX_TOKENS, timeout: float = 60.0
) -> torch.nn.Module:
    """Spreads the experts of a model over a mesh of one dimension, as plain parameters: for models without a plan, and
    for adapters on the experts (PEFT's target_parameters), which want plain tensors. Returns the model.

    Every rank has the whole model at first and keeps its own experts. Gradients of everything else are the caller's
    to reduce, as in data parallelism.
    """
    _settings.update(max_tokens=max_tokens, timeout=timeout)
    found = [m for m in model.modules() if hasattr(m, "num_experts") and moe.why_not(m) is None]
    if not found:
        raise ValueError(f"ep.parallelize: expected a model with packed experts, got {type(model).__name__} without")
    for module in found:
        begin, rank = chunk_begin(module.gate_up_proj.shape[0], mesh.size()), mesh.get_local_rank()
        _mark(module, module.gate_up_proj.shape[0], mesh)
        for name in ("gate_up_proj", "down_proj"):
            whole = module._parameters[name]
            local = whole.detach()[begin[rank] : begin[rank + 1]].clone()
            module._parameters[name] = torch.nn.Parameter(local, requires_grad=whole.requires_grad)
        module.forward = functools.partial(_layer, module, module.forward, mesh)
    return model


def _mesh_has_ep(mesh):
    names = mesh.mesh_dim_names or ()
    return "ep" in names and mesh.size(names.index("ep")) > 1


def ep_enabled(model_or_mesh: object) -> bool:
    """Whether experts are spread over several processes: a mesh with a dimension "ep" of more than one rank.

    The mesh is the one given, or those of a model's parameters.
    """
    if isinstance(model_or_mesh, DeviceMesh):
        return _mesh_has_ep(model_or_mesh)
    if isinstance(model_or_mesh, torch.nn.Module):
        meshes = [p.device_mesh for p in model_or_mesh.parameters() if isinstance(p, DTensor)]
        meshes += [m._ep_mesh for m in model_or_mesh.modules() if "_ep_mesh" in m.__dict__]
        return any(_mesh_has_ep(mesh) for mesh in meshes)
    if hasattr(model_or_mesh, "get_mesh"):  # Transformers' pair of meshes
        return _mesh_has_ep(model_or_mesh.get_mesh("ep"))
    raise TypeError(f"ep_enabled: expected a model or a mesh, got type {type(model_or_mesh).__name__}")
