"""Shard the experts of a model over ranks: a token's row is sent to its expert's rank, computed there, and sent back.

Experts belong to the tensor axis (`longspan.hf.forward.tensor`), or to a group of neighbouring ranks of data x
sequence (`longspan.parallelize(..., experts=8)`). In the second case weights at rest are sharded exactly as FSDP2
shards them without `experts`, so optimizers, clipping and checkpoints see no difference. What differs is the gather:
instead of all experts, a rank gathers those that it computes, from the ranks at its place in the other groups.

    rank                     0       1       2       3         8 experts, 4 ranks, experts=2
    at rest (FSDP2)         0 1     2 3     4 5     6 7
    computes               0 1 4 5 2 3 6 7 0 1 4 5 2 3 6 7     ranks 0 and 2 gather from each other, 1 and 3, too
    sends tokens           ranks 0 and 1        ranks 2 and 3

With one group of all ranks nothing is gathered. transformers' own `DistributedConfig(ep_size=...)` is not used: it
loads the model onto a mesh of its own, needs experts that divide evenly, and knows neither LoRA nor memory options.

Shape suffixes: N tokens, K experts per token, D hidden, R rows (one per token and expert).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard
from transformers import PreTrainedModel

from longspan.comm.collectives import all_to_all_rows
from longspan.comm.mesh import SequenceSharding
from longspan.comm.tensor import TensorGroup
from longspan.compat.torch_api import PlacementOn, not_compiled, own_parameters, replace_shards
from longspan.core.errors import LongspanError
from longspan.core.experts import ExpertLayout, Experts, divisors, most_ranks
from longspan.core.validation import LARGEST_JOB, check_number
from longspan.hf.model.support import decoder_of
from longspan.memory.checkpointing import EXPERTS, LayerCall


@dataclass(frozen=True)
class Route:
    """Which rows of one call of the experts go to which rank.

    Attributes:
        slots: the slot of each row (`ExpertLayout.slots`); `ExpertParallel.nowhere` for a row without an expert.
        send, receive: rows to each rank, and from each rank.
        received: `[ranks, held]`, the rows from each rank for each expert of this rank.
        most: rows of this rank's fullest expert.
    """

    slots: Tensor
    send: list[int]
    receive: list[int]
    received: Tensor
    most: int


class ExpertParallel:
    """Replace the `forward` of a layer's experts: `(hidden [N, D], index [N, K], weights [N, K])`.

    Outputs are weighted on the token's rank, so the gradients of the routing weights are complete there. Llama-4's
    experts are called with `routed [E * N, D]` instead: a row per expert and token, zero if the token does not go to
    the expert.

    `layout` is of the experts over the ranks of `group`, which send each other rows. While `module` runs, dim 0 of its
    weights is the experts that this rank holds: `held`, its `num_experts`. `outermost` is the module that is called
    with the arguments of `forward`: `module`, or an adapter around it.
    """

    def __init__(
        self, module: Any, group: TensorGroup, layout: ExpertLayout, held: int, outermost: nn.Module | None = None
    ) -> None:
        self.module, self.group, self.layout = module, group, layout
        self.compute: Any = module.forward
        self.weights = [name for name, _ in module.named_parameters(recurse=False)]
        self.nowhere = group.size * layout.held
        self.layer_call: LayerCall | None = None  # of the checkpointed layer that runs
        self.route: Route | None = None  # of the tile that runs
        self.recording = False
        module.num_experts = held
        self.routed = len(inspect.signature(module.forward).parameters) == 1  # Llama-4's
        forward = self._forward_routed if self.routed else self._forward
        module.forward = not_compiled(forward)  # on the instance: hooks stay
        setattr(module, EXPERTS, self)
        # Before other hooks, which may gather weights.
        (outermost or module).register_forward_pre_hook(not_compiled(self._stop_here), prepend=True)

    # --- routes

    def once(self, compute: Callable[[], Any]) -> Any:
        """Return what `compute` returns; the recomputation of a checkpointed layer returns the forward's."""
        return compute() if self.layer_call is None else self.layer_call.once(compute)

    def slots_of(self, run: Callable[[Tensor], Any], tile: Tensor) -> Tensor:
        """Run `run(tile)` up to its call of the experts, and return the slots of that call's rows."""
        self.recording = True
        try:
            with torch.no_grad():
                run(tile)
        except _Stopped as stopped:
            return stopped.slots
        finally:
            self.recording = False
        raise LongspanError(
            f"an MLP did not call its {type(self.module).__name__}, so it cannot run in tiles; use tiled=False"
        )

    def _stop_here(self, _: nn.Module, args: tuple[Any, ...]) -> None:
        if self.recording:
            raise _Stopped(self._slots(*args))

    def _slots(self, rows: Tensor, index_NK: Tensor | None = None, *_: Any) -> Tensor:
        """Return the slot of each row, in a small integer dtype: it may be saved until the backward."""
        if index_NK is None:
            numbers = torch.arange(len(rows), device=rows.device)
            slots = self.layout.slots(numbers // max(1, len(rows) // self.layout.experts))
            # Experts have no bias, so rows of zeros stay zeros.
            slots = slots.where(rows.detach().ne(0).any(-1), self.nowhere)
        else:
            slots = self.layout.slots(index_NK.reshape(-1))
        return slots.to(torch.uint8 if self.nowhere < 1 << 8 else torch.int32)  # type: ignore[no-any-return]

    def exchange(self, slots: Sequence[Tensor], most: int = 1) -> list[Route]:
        """Return the routes of this rank's next calls; the ranks send each other the numbers of rows. Collective.

        One all-to-all, then one wait of the host: gloo and NCCL must be told how many rows to receive. `slots` are
        those of each call, for at most `most` calls. If another rank has more calls, this one adds calls without rows.
        """
        size, held, device = self.group.size, self.layout.held, slots[0].device
        counts = torch.full((size, most, held), -1, device=device)  # -1: no such call
        for call, of_rows in enumerate(slots):
            found = torch.zeros(self.nowhere + 1, dtype=torch.int64, device=device)
            found.scatter_add_(0, of_rows.long(), torch.ones_like(of_rows, dtype=torch.int64))
            counts[:, call] = found[:-1].view(size, held)
        received = all_to_all_rows(counts, [1] * size, [1] * size, self.group.name)
        sent_rows, received_rows = counts.clamp(min=0), received.clamp(min=0)
        per_call = [sent_rows.sum(2), received_rows.sum(2), received_rows.sum(0).amax(1)[None]]
        *rows, fullest, called = torch.cat([*per_call, received.amax((0, 2))[None]]).tolist()
        send, receive = ([list(of_call) for of_call in zip(*part, strict=True)] for part in (rows[:size], rows[size:]))
        calls = max(len(slots), sum(number >= 0 for number in called))
        padded = [*slots, *[slots[0][:0]] * (calls - len(slots))]
        return [
            Route(padded[call], send[call], receive[call], received_rows[:, call], fullest[call])
            for call in range(calls)
        ]

    # --- one call

    def _forward(self, hidden_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
        route = self._route(hidden_ND, index_NK)
        order = route.slots.argsort(stable=True)
        out_RD = self._through(hidden_ND[order // index_NK.shape[1]], route, self._experts)
        back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        out_NKD = out_RD[back].view(*index_NK.shape, out_RD.shape[1])
        return (out_NKD * weights_NK[..., None]).sum(1).to(hidden_ND.dtype)

    def _forward_routed(self, routed_RD: Tensor) -> Tensor:
        route = self._route(routed_RD)
        rows = route.slots.argsort(stable=True)[: sum(route.send)]
        out_RD = self._through(routed_RD[rows], route, self._bucketed)
        return torch.zeros_like(routed_RD).index_add(0, rows, out_RD)

    def _route(self, *args: Tensor) -> Route:
        if self.route is not None:
            return self.route
        route: Route = self.once(lambda: self.exchange([self._slots(*args)])[0])
        return route

    def _through(self, rows_RD: Tensor, route: Route, compute: Callable[[Tensor, Tensor, Route], Tensor]) -> Tensor:
        """Send rows, sorted by slot, to the experts' ranks, compute, and receive the outputs in the same order.

        Gradients go back by the same two all-to-alls, reversed.
        """
        send, receive, group = route.send, route.receive, self.group.name
        place = torch.arange(self.layout.held, device=rows_RD.device).repeat(self.group.size)
        numbers = place.repeat_interleave(route.received.reshape(-1), output_size=sum(receive))
        out_RD = compute(all_to_all_rows(rows_RD, send, receive, group), numbers, route)
        return all_to_all_rows(out_RD, receive, send, group)

    def _bucketed(self, rows_RD: Tensor, expert: Tensor, route: Route) -> Tensor:
        """Compute with experts that take equal numbers of rows: pad with zeros."""
        order, counts, most = expert.argsort(stable=True), route.received.sum(0), max(1, route.most)
        place = torch.arange(len(order), device=order.device) - (counts.cumsum(0) - counts)[expert[order]]
        at = torch.empty_like(order).scatter(0, order, expert[order] * most + place)
        padded = rows_RD.new_zeros(self.module.num_experts * most, rows_RD.shape[1]).index_add(0, at, rows_RD)
        return self.compute(padded)[at]  # type: ignore[no-any-return]

    def _experts(self, rows_RD: Tensor, expert: Tensor, _: Route) -> Tensor:
        if len(rows_RD):
            out: Tensor = self.compute(rows_RD, expert[:, None], torch.ones_like(expert[:, None], dtype=rows_RD.dtype))
            return out
        # No token was received: give the weights a gradient of zeros, as on the other ranks.
        weights: list[Tensor] = [getattr(self.module, name) for name in self.weights]
        return rows_RD + sum(w.flatten()[:0].sum() for w in weights)


class _Stopped(Exception):
    """End a run of an MLP before its experts compute; `slots` are those of their rows."""

    def __init__(self, slots: Tensor) -> None:
        super().__init__()
        self.slots = slots


class ExpertTiles:
    """Plan the tiles of an MLP whose experts may be on several ranks: implements `longspan.memory.tiles.TiledExperts`.

    The MLP first runs for all tiles up to its experts, so that one all-to-all sends the numbers of rows of all tiles.
    Ranks of other replicas may have more or fewer tokens, and so tiles: at most `most`. If the MLP `draws` random
    numbers, its second run would draw others, so each tile sends its numbers by itself.
    """

    def __init__(self, mlp: nn.Module, most: int, *, draws: bool) -> None:
        self.mlp, self.most, self.draws = mlp, most, draws

    @functools.cached_property
    def experts(self) -> list[ExpertParallel]:
        found = (module.__dict__.get(EXPERTS) for module in self.mlp.modules())
        return [experts for experts in found if isinstance(experts, ExpertParallel)]

    def routes(self, run: Callable[[Tensor], Any], tiles: Sequence[Tensor]) -> Sequence[Route | None]:
        if not self.experts:
            return [None] * len(tiles)
        first, *others = self.experts

        def planned() -> Sequence[Route | None]:
            if others or self.draws:
                count = torch.tensor(len(tiles), device=tiles[0].device)
                return [None] * int(first.group.largest(count))
            with self._without_shared():
                return first.exchange([first.slots_of(run, tile) for tile in tiles], self.most)

        routes: Sequence[Route | None] = first.once(planned)
        return routes

    @contextlib.contextmanager
    def along(self, route: Route) -> Iterator[None]:
        (experts,) = self.experts
        experts.route = route
        try:
            yield
        finally:
            experts.route = None

    @contextlib.contextmanager
    def unsaved(self) -> Iterator[None]:
        calls = [experts.layer_call for experts in self.experts]
        for experts in self.experts:
            experts.layer_call = None
        try:
            yield
        finally:
            for experts, call in zip(self.experts, calls, strict=True):
                experts.layer_call = call

    @contextlib.contextmanager
    def _without_shared(self) -> Iterator[None]:
        """Skip the experts that all tokens share: some families compute them before the others."""
        shared = {name: child for name, child in self.mlp.named_children() if name.startswith("shared_expert")}
        for name in shared:
            setattr(self.mlp, name, nn.Identity())
        try:
            yield
        finally:
            for name, child in shared.items():
                setattr(self.mlp, name, child)


# ---------------------------------------------------------------------------------------------------------------------
# Experts over data x sequence.


@dataclass(frozen=True)
class ExpertGroups:
    """How `ExpertSharding` changes a model."""

    counts: dict[str, int]  # experts of each module that stacks them, by its path
    adapters: dict[str, str]  # the path of PEFT's outermost module around each, if there is one
    size: int = 1  # ranks of a group

    def fewest(self, path: str) -> int:
        """Return the fewest experts that a rank needs: PEFT mistakes a single one for a plain matrix."""
        return 2 if path in self.adapters else 1


def expert_groups(
    model: PreTrainedModel, experts: Experts, *, ranks: int, tensor: int = 1, fsdp: bool = True
) -> ExpertGroups | None:
    """Check `experts` of `parallelize` over the `ranks` of data x sequence; return the groups, None for groups of one
    rank.
    """
    if experts != "auto":
        check_number("experts", experts, 1, LARGEST_JOB, whole=True)
    if experts == 1:
        return None
    found = _stacked_experts(model)
    if experts == "auto":
        if tensor > 1 or not fsdp or isinstance(found, str):
            return None
        size = min(most_ranks(count, ranks, found.fewest(path)) for path, count in found.counts.items())
        if size == 1:
            return None
        PlacementOn.check()
        return dataclasses.replace(found, size=size)
    fits = ", ".join(map(str, divisors(ranks)))
    for applies, reason in (
        (tensor > 1, f"and `tensor={tensor}`: a tensor axis shards experts by itself; leave out one of them"),
        (not fsdp, "shards weights, and `fsdp=False` replicates them; leave one out"),
        (isinstance(found, str), f"cannot shard {type(model).__name__}: {found}; leave it out"),
        (ranks % experts, f"does not divide the number of ranks of data x sequence, {ranks}; use {fits}"),
    ):
        if applies:
            raise LongspanError(f"`experts={experts}` {reason}")
    assert isinstance(found, ExpertGroups)
    for path, count in found.counts.items():
        layout, fewest = ExpertLayout(count, ranks, experts), found.fewest(path)
        if layout.fits(fewest):
            continue
        why = f"would leave a rank without any of the {count} experts in {path}"
        if layout.fits():
            why = f"gives each rank one of the {count} experts in {path}, and PEFT's LoRA needs {fewest} or more"
        raise LongspanError(f"`experts={experts}` {why}; use `experts={most_ranks(count, ranks, fewest)}`")
    PlacementOn.check()
    return dataclasses.replace(found, size=experts)


def _stacked_experts(model: PreTrainedModel) -> ExpertGroups | str:
    """Return the modules whose weights stack experts, and adapters around them, or why they cannot be sharded."""
    found = ExpertGroups({}, {})
    modules = dict(model.named_modules())
    decoder = set(decoder_of(model).modules())  # ranks may run a vision tower differently often
    for path, module in modules.items():
        weights = dict(module.named_parameters(recurse=False))
        count = getattr(module, "num_experts", None)
        stacks = isinstance(count, int) and any(p.dim() == 3 and len(p) == count for p in weights.values())
        if module not in decoder or not stacks:
            continue
        needed = [p for p in inspect.signature(module.forward).parameters.values() if p.kind is not p.VAR_KEYWORD]
        inside = [name for name, _ in module.named_parameters() if name not in weights]
        if inside or len(needed) not in (1, 3) or any(len(p) != count for p in weights.values()):
            return f"layer {path} ({type(module).__name__}) does not store or call experts as transformers does"
        outer = path
        while outer.endswith(".base_layer"):
            outer = outer.removesuffix(".base_layer")
            for name, _ in modules[outer].named_parameters():
                kind, *_, own = name.split(".")
                if kind not in ("base_layer", "lora_A", "lora_B") or (kind != "base_layer" and own != "weight"):
                    return f"layer {outer} has the adapter weight {name}, and only LoRA's A and B are sharded with it"
            found.adapters[path] = outer
        assert count is not None
        found.counts[path] = count
    return found if found.counts else "it has no layer whose weights stack experts"


class ExpertSharding:
    """Shard a model's experts over groups of data x sequence, before FSDP and while it is applied. Collective.

    Each rank's experts are all that the modules of `model` then hold.
    """

    def __init__(self, model: nn.Module, sp: SequenceSharding, groups: ExpertGroups) -> None:
        self.sp, self.groups = sp, groups
        mesh = sp.expert_mesh(groups.size)
        self.group = TensorGroup.of(mesh.get_group("experts"))
        # FSDP gathers each expert's weights, and sums its gradients, over the ranks that hold the same experts; the sum
        # is divided by the number of all ranks (`average_gradients`).
        self.placement = PlacementOn(mesh["replicas"])
        self.whole: dict[str, torch.Size] = {}
        self.layouts = dict[str, ExpertLayout]()
        for path in groups.counts:
            module: Any = model.get_submodule(path)
            layout = ExpertLayout(module.num_experts, sp.fsdp_size, groups.size)
            adapter = groups.adapters.get(path)
            if adapter is not None:
                AdapterExperts(model.get_submodule(adapter), layout, self.group.rank)
            outermost = None if adapter is None else model.get_submodule(adapter)
            ExpertParallel(module, self.group, layout, layout.held, outermost)
            mine = torch.tensor(layout.of(self.group.rank)).clamp_(max=layout.experts - 1)  # padding: any, unused
            for name, p in list(module.named_parameters(recurse=False)):
                self.layouts[f"{path}.{name}"], self.whole[f"{path}.{name}"] = layout, p.shape
                held = nn.Parameter(p.detach()[mine.to(p.device)], requires_grad=p.requires_grad)
                held.__dict__.update(p.__dict__)
                own_parameters(module)[name] = held
                self.placement.add(held)

    def finish(self, model: nn.Module) -> None:
        """After FSDP: let each weight at rest be this rank's part of the whole one, as FSDP would shard it."""
        rank = self.sp.data_rank * self.sp.size + self.sp.rank
        assert self.sp.fsdp_mesh is not None
        weights = dict[tuple[nn.Module, str], DTensor]()
        for name, shape in self.whole.items():
            path, _, own = name.rpartition(".")
            module, size = model.get_submodule(path), self.layouts[name].shard_size
            shard: Any = module.get_parameter(own)
            local = shard.to_local()[: max(0, min(size, shape[0] - rank * size))]
            stride = torch.empty(shape, device="meta").stride()
            weights[module, own] = DTensor.from_local(
                local, self.sp.fsdp_mesh, [Shard(0)], run_check=False, shape=shape, stride=stride
            )
        replace_shards(model, weights)


class AdapterExperts:
    """Show PEFT's LoRA around experts only those of this rank, while it runs.

    A's rows are ordered by expert, B's columns by LoRA rank. Both are small: FSDP gathers them whole, and sums their
    gradients.
    """

    def __init__(self, outermost: nn.Module, layout: ExpertLayout, rank: int) -> None:
        self.experts = layout.experts
        self.mine = torch.tensor(layout.of(rank)).clamp_(max=layout.experts - 1)
        self.linears: list[tuple[nn.Module, bool]] = []  # and whether it is an A
        self.hidden: list[list[Any]] = []
        adapter: Any = outermost
        while hasattr(adapter, "base_layer"):
            adapter.num_experts = layout.held
            self.linears += [(linear, True) for linear in adapter.lora_A.values()]
            self.linears += [(linear, False) for linear in adapter.lora_B.values()]
            adapter = adapter.base_layer
        outermost.register_forward_pre_hook(not_compiled(self._show))
        outermost.register_forward_hook(not_compiled(self._hide), always_call=True)

    def _show(self, *_: Any) -> None:
        self.hidden.append([own_parameters(linear)["weight"] for linear, _ in self.linears])
        for (linear, is_a), weight in zip(self.linears, self.hidden[-1], strict=True):
            self.mine = mine = self.mine.to(weight.device)  # a copy makes the host wait
            if is_a:
                part = weight.unflatten(0, (self.experts, -1)).index_select(0, mine).flatten(0, 1)
            else:
                part = weight.unflatten(1, (-1, self.experts)).index_select(2, mine).flatten(1, 2)
            own_parameters(linear)["weight"] = part

    def _hide(self, *_: Any) -> None:
        if self.hidden:
            for (linear, _is_a), weight in zip(self.linears, self.hidden.pop(), strict=True):
                own_parameters(linear)["weight"] = weight
