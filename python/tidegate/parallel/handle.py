"""tidegate.parallel.sequence_parallel: one call after tidegate.patch, and what it returns."""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tidegate.errors import SequenceParallelError
from tidegate.packed import support
from tidegate.parallel import choice, inputs, spread, whole
from tidegate.parallel.agree import ANY, agree, fingerprint
from tidegate.parallel.link import Link, Traffic, group_of
from tidegate.parallel.model import OP, parallel_forward
from tidegate.parallel.plan import SpPlan, split
from tidegate.patch import resolve as modules
from tidegate.patch.engine import existing_handle
from tidegate.patch.site import ForwardSite


def _heads(root, options):
    """The head counts of a model's layers, once it is known that all of them can run on a shard."""
    found, kv = set(), 0
    texts = list(support.text_models(root))
    if not texts:
        raise SequenceParallelError(f"found no text model with linear attention in {type(root).__name__}")
    for path, text in texts:
        why = support.structure_refusal(text, options) or support.state_refusal(text)
        for i, layer in enumerate(text.layers):
            mixer = getattr(layer, "linear_attn", None)
            if mixer is None:
                kv = min(filter(None, (kv, text.config.num_key_value_heads)))
                continue
            if not why and not mixer._tidegate.sites["gdn_layer"].mechanism.startswith("I"):
                why = f"layers.{i}.linear_attn runs the model's own code; leave the option gdn_layer on"
            if not why and not support.hands_keywords_on(layer):
                why = f"layers.{i} keeps arguments from its linear attention in this release of Transformers"
            found.add((mixer.num_k_heads, mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim))
        if why:
            raise SequenceParallelError(f"{path or type(text).__name__} cannot run sequence-parallel: {why}")
    return choice.Heads(*min(found, default=(0, 0, 0, 0)), kv)  # those with the fewest key heads say what is possible


class SequenceParallel:
    """Sequence parallelism of one model over one group. `shard`, `gather` and `reduce_gradients` are for loops that
    compute their own loss; `undo` puts the model back."""

    def __init__(
        self, root: torch.nn.Module, link: Link | None, mode: str, attention: str, grad_reduction: str | None
    ) -> None:
        self.model, self.link, self.mode, self.grad_reduction = root, link, mode, grad_reduction
        self.on = link is not None and link.size > 1 and mode != "off"
        self.plan = None  # of the last step
        self.why = f"mode={mode!r}" if mode != "auto" else ""
        self._agreed = True
        self._site = None
        if not self.on:
            return
        error = None
        try:
            self._look_at(root, attention)
        except Exception as problem:  # the other ranks must not wait for this one
            error = problem
        agree(link, error, {"settings": fingerprint(f"{mode} {attention} {grad_reduction}".encode())})
        self.costs = choice.measure(link, self.heads, self.dtype) if mode == "auto" and self.heads.HK else None
        self._site = ForwardSite("", OP, root, "I:wrapper", parallel_forward)
        self._site.parallel = self
        self._patched.sites.append(self._site)
        self._site.install(self._patched.settings, self._patched)
        self._site.reason = self.report()

    def _look_at(self, root, attention):
        """What the model has, once it is known that it can run so."""
        record = root.__dict__.get("_tidegate")
        if record is not None and OP in record.sites:
            raise SequenceParallelError("the model is sequence-parallel already: undo() the first one")
        self._patched = existing_handle(root)
        if self._patched is None:
            raise SequenceParallelError("the model is not patched: call tidegate.patch(model) first")
        options = self._patched.settings.options
        self.padding_free = options.padding_free
        name = spread.tensor_parallel(root, self.link.group)
        if name is not None:
            raise SequenceParallelError(
                f"{name} is under tensor parallelism over ranks of this group, which wants the same tokens on each"
            )
        self.heads = _heads(root, options)
        self.attention = choice.attention_mode(attention, self.heads, self.link.size)
        refused = choice.refusal(self.mode, self.heads, self.link.size)
        if refused:
            raise SequenceParallelError(refused)
        self.dtype = next((p.dtype for p in root.parameters() if p.is_floating_point()), torch.float32)

    # Steps

    def shard(self, batch: Mapping[str, Any], starts: Sequence[int] | None = None) -> dict[str, Any]:
        """This rank's part of a batch that all ranks have: keyword arguments for the model, with the plan of the step.

        starts: where shards begin in the flat row of real tokens, ranks + 1 numbers; equal shards if it is not given.
        """
        if not self.on:
            return dict(batch)
        error, facts = None, {}
        try:
            found, starts = self._read(batch, starts)
            facts = self._facts(found, starts)
        except Exception as problem:  # whatever it is, the other ranks must not wait for this one
            error = problem
        wants_gradient = self._agree(error, facts)
        self.plan = plan = self._plan(found, starts)
        own = plan.own
        local = {name: x[:, own.begin : own.end] for name, x in found.tokens.items()}
        if found.items is not None and "num_items_in_batch" not in found.others:
            local["num_items_in_batch"] = found.items
        positions = found.positions[..., own.begin : own.end]
        if not own.tokens:  # models do not run on nothing; layers and the loss leave this row out
            positions = torch.nn.functional.pad(positions, (0, 1))
            for name in local.keys() & {"input_ids", "inputs_embeds"}:
                local[name] = local[name].new_zeros(1, 1, *local[name].shape[2:])
        embeds = local.get("inputs_embeds")
        if wants_gradient and not embeds.requires_grad:  # else this rank would miss messages of the backward
            local["inputs_embeds"] = embeds.detach().requires_grad_()
        return {**found.others, **local, "position_ids": positions, "sequence_parallel": plan}

    def _read(self, batch, starts):
        found = inputs.read(batch, self.padding_free, self._why_not)
        if torch.is_grad_enabled() and self.grad_reduction is None and self._trained():
            whole.gradient_scale(None)
        tokens = found.cu[-1]
        starts = split(found.cu, self.link.size) if starts is None else tuple(int(s) for s in starts)
        rising = all(a <= b for a, b in zip(starts, starts[1:], strict=False))
        if len(starts) != self.link.size + 1 or starts[0] != 0 or starts[-1] != tokens or not rising:
            raise SequenceParallelError(
                f"starts: expected {self.link.size + 1} rising numbers from 0 to {tokens}, got {list(starts)}"
            )
        return found, starts

    def _why_not(self):
        return next((why for _, text in support.text_models(self.model) if (why := support.state_refusal(text))), "")

    def _trained(self):
        return any(p.requires_grad for p in self.model.parameters())

    def _facts(self, found, starts):
        ids = found.tokens.get("input_ids")
        labels = found.tokens.get("shift_labels")
        embeds = found.tokens.get("inputs_embeds")
        return {
            "settings": fingerprint(f"{self.mode} {self.attention} {self.grad_reduction}".encode()),
            "batch rows": found.shape[0],
            "tokens": found.cu[-1],
            "boundaries of sequences": fingerprint(found.cu),
            "input_ids": 0 if ids is None else fingerprint(ids.flatten().tolist()),
            "labels": 0 if labels is None else fingerprint(labels.flatten().tolist()),
            "position_ids": fingerprint(found.positions.flatten().tolist()),
            "cuts of the shards": fingerprint(starts),
            "data type": 0 if embeds is None else 1 + _DTYPES.index(embeds.dtype),
            "grad mode": int(torch.is_grad_enabled()),
            "parameters that need gradients": fingerprint(p.requires_grad for p in self.model.parameters()),
            "arguments": fingerprint(",".join(_plain(*item) for item in sorted(found.others.items())).encode()),
            ANY: int(embeds is not None and embeds.requires_grad and torch.is_grad_enabled()),
        }

    def _agree(self, error, facts):
        self._agreed = True
        return agree(self.link, error, facts)

    def _plan(self, found, starts):
        plan = SpPlan(self.link, starts, found.cu)
        linear = "chain" if self.mode == "auto" else self.mode
        if self.costs is not None:
            longest, groups = max(s.tokens for s in plan.shards), len(plan.groups(self.heads.HK))
            element = self.dtype.itemsize
            linear, self.why = choice.choose(self.heads, longest, self.link.size, groups, element, self.costs)
        scale = {None: None, "sum": 1, "mean": self.link.size}[self.grad_reduction]
        return SpPlan(self.link, starts, found.cu, linear, self.attention, scale, tuple(found.shape), found.kept)

    @contextlib.contextmanager
    def step(self) -> Iterator["SequenceParallel"]:
        """Around everything that a rank does for a step: an error before its forward is raised on all ranks."""
        self._agreed = not self.on
        try:
            yield self
        except Exception as error:
            if not self._agreed:
                self._agree(error, {})
            raise

    # Results

    def gather(self, x: torch.Tensor, dim: int = 1, plan: SpPlan | None = None) -> torch.Tensor:
        """The shards of a tensor of the last step as a whole, without padding; see tidegate.parallel.gather."""
        return whole.gather(x, plan or self.plan, dim) if self.on else x

    def restore(self, x: torch.Tensor, fill: float = 0, plan: SpPlan | None = None) -> torch.Tensor:
        """Gathered tokens [1, T, ...] in the shape [B, T, ...] of the batch that was given."""
        return whole.restore(x, plan or self.plan, fill) if self.on else x

    def reduce_gradients(self) -> None:
        """Sums (or averages) the gradients of parameters over the ranks, where neither FSDP2 nor DDP does it.

        Experts that are spread over these ranks have the tokens of all of them already; for a mean they are divided.
        """
        if not self.on:
            return
        trained = spread.unreduced(self.model, self.link.group)
        there = torch.tensor([p.grad is not None for p, _ in trained], dtype=torch.int32)
        self.link.sum(there, "gradients", dist.ReduceOp.MAX)
        for (parameter, lacks), wanted in zip(trained, there.tolist(), strict=True):
            if not wanted:
                continue
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            gradient = spread.local(parameter.grad)
            if lacks:
                self.link.sum(gradient, "gradients")
            if self.grad_reduction == "mean":
                gradient /= self.link.size

    # About

    @property
    def traffic(self) -> dict[str, Traffic]:
        """What this rank has sent so far, by purpose."""
        return {} if self.link is None else self.link.traffic

    def report(self) -> str:
        """What runs, and why."""
        if not self.on:
            return "off: " + ("mode='off'" if self.mode == "off" else "one process")
        mode = self.plan.linear if self.plan else self.mode
        return f"{self.link.size} ranks; linear attention by {mode}, full attention by {self.attention}; {self.why}"

    def undo(self) -> None:
        """The model as it was."""
        if self._site is not None:
            self._site.undo()
            with contextlib.suppress(ValueError):
                self._patched.sites.remove(self._site)
        self.on, self._site = False, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.undo()

    def __deepcopy__(self, memo):
        return self  # a copied model computes with the same ranks


def _plain(name, value):
    """An argument by its name, and by its value where that is a number or a text, as num_items_in_batch is."""
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else None
    return f"{name}={value}" if isinstance(value, (int, float, str)) else name


_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def sequence_parallel(
    model: torch.nn.Module,
    group_or_mesh: "dist.ProcessGroup | DeviceMesh | None" = None,
    mode: str = "auto",
    *,
    attention: str = "auto",
    grad_reduction: str | None = None,
) -> SequenceParallel:
    """Cuts the tokens of every forward of a patched model among the ranks of a group; see docs/sequence-parallel.md.

    mode: how linear attention goes: "heads", "chain", "scan", "auto" (the cheapest as measured here), or "off".
    attention: "heads", "ring" or "auto". grad_reduction: what becomes of parameter gradients over these ranks, "mean"
    or "sum"; only training needs it. Without a group of more than one process the model is left alone.
    """
    for name, value, known in (
        ("mode", mode, ("auto", "off", *choice.LINEAR)),
        ("attention", attention, ("auto", *choice.ATTENTION)),
        ("grad_reduction", grad_reduction, (None, "mean", "sum")),
    ):
        if value not in known:
            raise ValueError(f"sequence_parallel: {name}: expected one of {known}, got {value!r}")
    group = group_of(group_or_mesh)
    root = modules.core(model)
    return SequenceParallel(root, None if group is None else Link(group), mode, attention, grad_reduction)
