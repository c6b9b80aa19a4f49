"""Expert parallelism over several nodes: one row for every (token, node), over torch.distributed.

A token goes once to every node that holds one of its experts, to one of the ranks there, which then deals it out inside
its node through a Buffer. Neighbouring tokens go to different ranks: more connections fill a link better. On the way
back results return unsummed ("exact": the bits of one process) or summed up by node ("fast": one row for every token
and node, rounded once more).
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tidegate.ep.agreement import Agreement, gather_facts
from tidegate.ep.buffer import Buffer, group_of, node_id
from tidegate.ep.checks import check_buffer, check_combine, check_dispatch, check_redispatch, check_static_shape

tidegate_ops = torch.ops.tidegate


def nodes_of(group, node=None):
    """The names of the nodes that the ranks of a group are on. Collective."""
    names = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, node_id(node), group=group)
    return names


class NodesHandle:
    """Where the tokens of this rank went, and the handle of those that came here."""

    def __init__(self, buffer, inner, tokens, sent, received, pairs, pair_rank, weights, order):
        self.buffer, self.inner, self.tokens, self.weights = buffer, inner, tokens, weights
        self.order = order  # int64 [T,K]: the slots of a token in the order of their experts
        # As they were at the dispatch, like those that travelled: the caller may change his.
        self.given_weights = None if weights is None else weights.detach().clone()
        self.serial, self.life = buffer.dispatches, buffer.life  # the same on all ranks
        self.sent = sent  # by rank: the tokens that went there
        self.received = received  # by rank: how many came from there
        self.pairs = pairs  # bool [tokens that came, K]: pairs of experts of this node
        self.pair_rank = pair_rank  # int64 [T,K]: the rank that a pair's token went to, -1: nobody

    def __getattr__(self, name):  # expert_rows, row_expert, row_weights, ...: those of the rows that came here
        return getattr(self.__dict__["inner"], name)


class NodesBuffer:
    """As Buffer, for a group whose ranks are on several nodes. Names of nodes must be right: see node_id.

    combine: "exact" or "fast".
    """

    def __init__(
        self,
        group: "dist.ProcessGroup | DeviceMesh | None" = None,
        *,
        experts: int,
        slots: int,
        row_bytes: int,
        max_tokens: int,
        expert_begin: Sequence[int] | None = None,
        combine: str = "exact",
        node: str | None = None,
        **options: Any,
    ) -> None:
        self.mode = combine
        self.group = group_of(group)
        self.rank, self.ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.agreement = Agreement(self.group)
        self.dispatches = self.life = 0  # so far, and resets
        self.experts, self.slots, self.row_bytes, self.max_tokens = experts, slots, row_bytes, max_tokens
        even = [r * experts // self.ranks for r in range(self.ranks + 1)] if isinstance(experts, int) else []
        self.expert_begin = even if expert_begin is None else list(expert_begin)
        facts = dict(experts=experts, slots=slots, row_bytes=row_bytes, max_tokens=max_tokens)
        facts |= dict(expert_begin=self.expert_begin, combine=combine, **options)

        def checked_node():
            check_buffer(self.ranks, **facts)
            return node_id(node)

        names = gather_facts("ep_nodes", self.group, facts, checked_node)
        self.nodes = list(dict.fromkeys(names))  # in the order of their first ranks
        members = [[r for r in range(self.ranks) if names[r] == name] for name in self.nodes]
        self.node = self.nodes.index(names[self.rank])
        # My tokens for a node go to its ranks in turn, beginning with that of my index; those for my node stay here.
        index = members[self.node].index(self.rank)
        self.partners = [ranks[index % len(ranks) :] + ranks[: index % len(ranks)] for ranks in members]
        self.partners[self.node] = [self.rank]
        # An expert's node, and its number among the experts of that node.
        self.node_of = torch.empty(experts, dtype=torch.int32)
        self.number_of = torch.empty(experts, dtype=torch.int32)
        local_begin = []
        for n, ranks in enumerate(members):
            begin = [0]
            for r in ranks:
                mine = slice(self.expert_begin[r], self.expert_begin[r + 1])
                count = self.expert_begin[r + 1] - self.expert_begin[r]
                self.node_of[mine] = n
                self.number_of[mine] = torch.arange(begin[-1], begin[-1] + count, dtype=torch.int32)
                begin.append(begin[-1] + count)
            local_begin.append(begin)
        own = (self.node_of == self.node).nonzero()[:, 0]  # in the order of their numbers
        self.node_experts = own if len(own) else torch.tensor([0])  # a buffer has at least one
        groups = [dist.new_group([dist.get_global_rank(self.group, r) for r in ranks]) for ranks in members]
        most = max(len(ranks) for ranks in members) * -(-max_tokens // len(members[self.node]))  # from one node
        self.local = Buffer(
            groups[self.node],
            experts=max(local_begin[self.node][-1], 1),
            slots=slots,
            row_bytes=row_bytes,
            max_tokens=most * len(members),
            expert_begin=local_begin[self.node] if local_begin[self.node][-1] else None,
            node_id=names[self.rank],
            **options,
        )

    @property
    def local_experts(self) -> int:
        """How many experts this rank holds."""
        return self.expert_begin[self.rank + 1] - self.expert_begin[self.rank]

    @property
    def is_open(self) -> bool:
        """Whether it has windows: not after close()."""
        return self.local.is_open

    def close(self) -> None:
        """Gives the windows of this node back."""
        self.local.close()

    def reset(self) -> None:
        """Collective, after a failure: new windows. Handles from before do not work any more."""
        self.agreement.meet()
        self.life += 1
        self.local.reset()

    def _all_to_all(self, rows, sent, received):
        """Rows to ranks, `sent` rows for each; what came, `received` rows from each."""
        out = rows.new_empty((sum(received), *rows.shape[1:]))
        dist.all_to_all_single(out, rows.contiguous(), received, sent, group=self.group)
        return out

    def _prepare(self, x, ids, weights, mask, int8, smooth_scale, static_shape):
        """Everything before the first exchange: (x as it travels, pair_rank, by rank: tokens, what goes with them)."""
        check_dispatch(self, x, ids, weights, mask, int8, smooth_scale)
        if mask is not None:
            ids = ids.masked_fill(~(mask if mask.dim() == 2 else mask[:, None]), -1)
        if ids.numel() and (ids.min() < -1 or ids.max() >= self.experts):
            raise ValueError(
                f"ep_dispatch: ids: expected -1 or 0..{self.experts - 1}, got {int(ids.min())} to {int(ids.max())}"
            )
        if static_shape:
            check_static_shape(self, ids)
        known = ids.clamp(min=0).long()
        numbers = self.number_of[known]
        turn = torch.arange(x.shape[0])
        partner = torch.stack([torch.tensor(ranks)[turn % len(ranks)] for ranks in self.partners], 1)
        pair_rank = torch.where(ids < 0, -1, partner.gather(1, self.node_of[known].long()))
        w = torch.ones(ids.shape) if weights is None else weights.detach().float()
        x, scale = tidegate_ops.quantize(x) if int8 and smooth_scale is None else (x, torch.ones(x.shape[0]))
        w = torch.cat([w, scale[:, None]], 1).view(torch.int32)
        sent, lists = [], []
        for r in range(self.ranks):
            here = pair_rank == r
            tokens = here.any(1).nonzero()[:, 0]
            sent.append(tokens)
            lists.append(torch.cat([numbers.masked_fill(~here, -1)[tokens], w[tokens]], 1))
        return x, pair_rank, sent, lists

    def _forward(self, x, handle_lists, received):
        """One row for every token and node."""
        rows = x[torch.cat(handle_lists)] if handle_lists else x[:0]
        return self._all_to_all(rows, [len(t) for t in handle_lists], received)

    def dispatch(
        self,
        x: torch.Tensor,
        ids: torch.Tensor,
        weights: torch.Tensor | None = None,
        mask: torch.Tensor | None = None,
        int8: bool = False,
        needs_backward: bool = False,
        smooth_scale: torch.Tensor | None = None,
        static_shape: bool = False,
    ) -> NodesHandle:
        """As Buffer.dispatch, between nodes too."""
        with self.agreement.checking():
            dx_wanted = needs_backward and x.requires_grad
            x, pair_rank, sent, lists = self._prepare(x, ids, weights, mask, int8, smooth_scale, static_shape)
        counts = [len(t) for t in sent]
        received, tokens = self.agreement.compare(
            "ep_dispatch",
            counts,
            len(x),
            operator="dispatch",
            slots=ids.shape[1],
            row_bytes=x.shape[1] * x.element_size(),
            dtype=x.dtype,
            int8=int8,
            smooth_scale=smooth_scale is not None,
            static_shape=static_shape,
            needs_backward=needs_backward,
            dx_wanted=dx_wanted,
        )
        self.dispatches += 1
        slots = [ids.shape[1], ids.shape[1], 1]
        numbers, w, scale = (
            part.contiguous() for part in self._all_to_all(torch.cat(lists), counts, received).split(slots, 1)
        )
        rows = self._forward(x, sent, received)
        inner = self.local.dispatch(
            rows,
            numbers,
            w.view(torch.float32),
            int8=int8,
            needs_backward=needs_backward,
            x_scale=scale.view(torch.float32)[:, 0] if x.dtype == torch.int8 else None,
            smooth_scale=None if smooth_scale is None else smooth_scale[self.node_experts],
            # A node without experts gets no row; the one expert that its buffer has is nobody's.
            static_shape=static_shape and bool((self.node_of == self.node).any()),
            static_tokens=sum(tokens),
        )
        order = ids.argsort(dim=1, stable=True)
        return NodesHandle(self, inner, x.shape[0], sent, received, numbers >= 0, pair_rank, weights, order)

    def expand(
        self, handle: NodesHandle, out: torch.Tensor | None = None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The rows that came here, as Buffer.expand."""
        return self.local.expand(handle.inner, out)

    def redispatch(self, x: torch.Tensor, handle: NodesHandle) -> torch.Tensor:
        """Other rows along the way of a handle, as Buffer.redispatch."""
        with self.agreement.checking():
            check_redispatch(self, x, handle)
        row_bytes = x.shape[1] * x.element_size()
        terms = dict(operator="redispatch", handle=handle.serial, row_bytes=row_bytes, dtype=x.dtype)
        self.agreement.compare("ep_dispatch", **terms)
        return self.local.redispatch(self._forward(x, handle.sent, handle.received), handle.inner)

    def _values(self, row_values, handle):
        """One number for every pair: [T,K]."""
        _, values = self.local.combine(None, handle.inner, row_values=row_values)
        back = self._all_to_all(values, handle.received, [len(t) for t in handle.sent])
        out = torch.zeros(handle.pair_rank.shape)
        return out.index_add_(0, torch.cat(handle.sent), back)  # a pair has one node, the others gave 0

    def _exact(self, y, handle, weights, shared_x):
        rows = self.local.collect(y, handle.inner)[handle.pairs.view(-1)]
        counts = [int(part.sum()) for part in handle.pairs.split(handle.received)]
        here = [handle.pair_rank[tokens] == r for r, tokens in enumerate(handle.sent)]
        back = self._all_to_all(rows, counts, [int(pairs.sum()) for pairs in here])
        pos = torch.full(handle.pair_rank.shape, -1, dtype=torch.int32)
        first = 0
        for tokens, pairs in zip(handle.sent, here, strict=True):
            places = pos[tokens]
            places[pairs] = torch.arange(first, first + int(pairs.sum()), dtype=torch.int32)
            pos[tokens] = places
            first += int(pairs.sum())
        weights = None if weights is None else weights.gather(1, handle.order)
        return self._sum(back, pos.gather(1, handle.order), weights, shared_x)

    def _fast(self, y, handle, weighted, shared_x, needs_backward):
        rows = self.local.combine(y, handle.inner, weighted=weighted, needs_backward=needs_backward)[0]
        back = self._all_to_all(rows, handle.received, [len(t) for t in handle.sent])
        pos = torch.full((handle.tokens, self.ranks), -1, dtype=torch.int32)
        first = 0
        for r, tokens in enumerate(handle.sent):
            pos[tokens, r] = torch.arange(first, first + len(tokens), dtype=torch.int32)
            first += len(tokens)
        return self._sum(back, pos, None, shared_x)

    @staticmethod
    def _sum(rows, pos, weights, shared_x):
        """In fp32, in the order of pos, rounded once; shared_x is one more slot."""
        if shared_x is not None:
            last = torch.arange(rows.shape[0], rows.shape[0] + pos.shape[0], dtype=torch.int32)
            rows, pos = torch.cat([rows, shared_x]), torch.cat([pos, last[:, None]], 1)
            weights = None if weights is None else torch.cat([weights.float(), torch.ones(pos.shape[0], 1)], 1)
        return tidegate_ops.moe_unpermute_fwd(rows, pos, weights)

    def combine(
        self,
        y: torch.Tensor | None,
        handle: NodesHandle,
        weighted: bool = True,
        weights: torch.Tensor | None = None,
        shared_x: torch.Tensor | None = None,
        row_values: torch.Tensor | None = None,
        needs_backward: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [T,H], pair_values [T,K]), as Buffer.combine; in fast mode weights are those given to dispatch."""
        with self.agreement.checking():
            check_combine(self, y, handle, weighted, weights, shared_x, row_values)
        self.agreement.compare(
            "ep_combine",
            operator="combine",
            handle=handle.serial,
            row_bytes=0 if y is None else y.shape[1] * y.element_size(),
            dtype=None if y is None else y.dtype,
            needs_backward=needs_backward,
            row_values=row_values is not None,
            weighted=weighted,
        )
        out = torch.empty(0)
        if y is not None:
            used = (handle.given_weights if weights is None else weights.detach()) if weighted else None
            out = (
                self._exact(y, handle, used, shared_x)
                if self.mode == "exact"
                else self._fast(y, handle, weighted, shared_x, needs_backward)
            )
        return out, self._values(row_values, handle) if row_values is not None else torch.empty(0)
