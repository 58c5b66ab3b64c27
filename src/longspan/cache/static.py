"""Decode steps of constant shapes: one new token per row, with the same operators and arguments at every length.

A CUDA graph replays kernels with the arguments of their capture. So keys and values are read over the whole capacity,
and what changes from token to token is on the device: the slot of the new token, and the slots that it sees. The host
writes these numbers before each replay; sampling and stopping stay outside of the graph. After a fixed number of
tokens, an ordinary step frees what windows no longer see, and the next one makes room and is captured anew.

All ranks capture at the same tokens: a capture also runs the step, whose collectives every rank must enter.

Shape suffixes: B batch, h my query heads, K my KV heads, G query heads of a KV head, T slots (capacity), D head_dim of
q and k, V of v.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from longspan.attn.kernels import flash
from longspan.attn.kernels.base import KEYS, KernelRequest, SoftmaxAccumulator, refusal
from longspan.attn.kernels.choice import Choice
from longspan.attn.score import Scores
from longspan.cache.attend import first_visible_token
from longspan.compat.torch_api import flatten_tree
from longspan.compat.torch_attention import flash_varlen
from longspan.core.errors import LongspanError

if TYPE_CHECKING:
    from longspan.attn.mask import Mask
    from longspan.cache.attend import CacheStep
    from longspan.cache.layer_cache import LayerCache

_FIRST, _MOST = 256, 4096
"""Tokens from one capture to the next: doubled each time. A capture costs about as much as three ordinary steps."""

Capture = Callable[[Callable[[], list[Any]]], Callable[[], list[Any]]]
"""Turns a function into one that repeats its work on the device and returns the same tensors."""


def capture_cuda_graph(run: Callable[[], list[Any]]) -> Callable[[], list[Any]]:
    """Run a function once, and capture it in a CUDA graph.

    Raises:
        LongspanError: it cannot be captured: it waits for the device, for example.
    """
    caches = torch.is_autocast_cache_enabled()
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(False)  # cast weights would be freed before a replay
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries allocate and communicators connect at first use, not in a capture
            run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        try:  # other threads (NCCL's watchdog, copies) may use the device meanwhile
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                out = run()
        except RuntimeError as error:
            raise LongspanError(
                f"a decode step of this model cannot be captured in a CUDA graph ({error}); leave cuda_graph out"
            ) from error
    finally:
        torch.set_autocast_cache_enabled(caches)

    def replay() -> list[Any]:
        graph.replay()
        return out

    return replay


class StaticDecode:
    """The decode steps of one cache.

    Args:
        device: of the model.
        capture: for tests, another one.

    Attributes:
        index: the new token's index in the sequence, int64 [1], on the device.
    """

    def __init__(self, device: torch.device, capture: Capture = capture_cuda_graph) -> None:
        self.index = torch.zeros(1, dtype=torch.int64, device=device)
        self._capture, self._room = capture, _FIRST // 2
        self._next, self._left = -1, 0  # the token that continues the captured steps, and how many more may follow
        self._starts: tuple[int, ...] = ()
        self._step: CacheStep | None = None
        self._forget()

    def _forget(self) -> None:
        self._slots: dict[Any, Slots] = {}
        self._kernels: dict[Any, Any] = {}
        self._inputs: dict[str, Tensor] = {}
        self._others: dict[str, Any] = {}
        self._replay: Callable[[], list[Any]] | None = None

    def begin(self, step: CacheStep, stores: Sequence[LayerCache], starts: tuple[int, ...] | None) -> CacheStep:
        """Return the step as one of constant shapes, or as it is after the last token that has room.

        Args:
            step: the next forward.
            stores: of all layers.
            starts: the first real token of each row; None for another forward than one new token per row.
        """
        if starts is None or (step.past == self._next and not self._left):
            self._next = -1
            self._forget()  # frees a graph's memory
            return step
        placement, rank = step.kv_placement, step.sp.ring_rank
        if step.past != self._next or len(starts) != len(self._starts):
            self._forget()
            self._left = self._room = min(_MOST, 2 * self._room)
            ahead = copy.deepcopy(placement)
            ahead.grow(self._left - 1)
            for store in stores:  # and a slot for a token of another rank
                store.make_room(ahead.count(rank, store.start) - store.count + 1)
        self._next, self._left, self._starts = step.past + 1, self._left - 1, starts
        for store in stores:
            store.count += len(step.local_spans)
        self._step = step  # without this object: a cycle would keep a graph's memory
        self.index.fill_(step.past)
        for slots in self._slots.values():
            slots.update(step, starts)
        return replace(step, static=self, kernels=self._kernels)

    def slots(self, layer: LayerCache, mask: Mask) -> Slots:
        """Return the slots of layers with one mask and capacity, on the device."""
        key = mask.window, mask.chunk_size, layer.layout
        if key not in self._slots:
            assert self._step is not None
            self._slots[key] = Slots(*key, self.index.new_zeros(1 + 2 * len(self._starts)))
            self._slots[key].update(self._step, self._starts)
        return self._slots[key]

    def kernel(self, request: KernelRequest) -> tuple[Any, Choice]:
        """Return what computes the attention of a lone query, and its description."""
        unknown = [name for name in request.options if name not in FormulaDecode.computes]
        if unknown:
            raise LongspanError(f"cuda_graph=True cannot do {' or '.join(unknown)}; leave cuda_graph out")
        fits = refusal(flash.FLASH, request) is None
        kernel: Any = FlashDecode() if fits else FormulaDecode()
        return kernel, Choice(kernel.name, "a lone query in a step of constant shapes (cuda_graph=True)")

    def forward(self, forward: Callable[..., Any], inputs: dict[str, Any], cache: Any) -> Any:
        """Return the output of the model's own forward for these inputs: capture it, or copy the inputs and replay."""
        tensors = {name: x for name, x in inputs.items() if isinstance(x, Tensor)}
        others = {name: x for name, x in inputs.items() if not (isinstance(x, Tensor) or x is cache)}
        info = others.pop("longspan")
        same = others == self._others and tensors.keys() == self._inputs.keys()
        same = same and all(x.shape == self._inputs[name].shape for name, x in tensors.items())
        if self._replay is not None and same:
            for name, x in tensors.items():
                self._inputs[name].copy_(x)
        else:
            self._others, self._inputs = others, {name: x.clone() for name, x in tensors.items()}

            def run() -> list[Any]:
                for slots in self._slots.values():
                    slots.derived.clear()
                step = replace(info.step, masks={}, stored_layers=set())
                out = forward(**{**inputs, **self._inputs, "longspan": replace(info, step=step)})
                leaves, self._rebuild = flatten_tree(out)
                return [_CACHE if x is cache else x for x in leaves]  # a graph must not keep its cache alive

            self._replay = self._capture(run)
        leaves = (x.clone() if isinstance(x, Tensor) else x for x in self._replay())
        return self._rebuild([cache if x is _CACHE else x for x in leaves])


_CACHE = object()


@dataclass(eq=False)
class Slots:
    """The slots of some layers: where the new token goes, and which ones it sees.

    `derived` holds what was computed from the numbers in this forward.
    """

    window: int | None  # of the mask, as `chunk_size`
    chunk_size: int | None
    layout: tuple[int, int, int]  # of the layers: their first token, its slot, and their capacity
    # Int64 [1 + 2 B], on the device: the slot of the new token (one that nobody sees, if another rank of the ring holds
    # the token); of each row the first slot that it sees, and the end of those.
    numbers: Tensor

    def __post_init__(self) -> None:
        self.derived: dict[Any, Any] = {}

    def update(self, step: CacheStep, starts: tuple[int, ...]) -> None:
        """Copy the numbers of a step to the device, without waiting."""
        placement, rank, (first_token, first_slot, _) = step.kv_placement, step.sp.ring_rank, self.layout
        end = first_slot + placement.count(rank, first_token)
        visible = (start + first_visible_token(step.past - start, None, self.chunk_size) for start in starts)
        first = first_visible_token(step.past, self.window, None)
        begins = [end - placement.count(rank, max(first_token, first, token)) for token in visible]
        numbers = torch.tensor([end - len(step.local_spans), *begins, *[end] * len(begins)])
        self.numbers.copy_(numbers.pin_memory() if self.numbers.is_cuda else numbers, non_blocking=True)

    @property
    def new(self) -> Tensor:
        """The slot of the new token, int64 [1]."""
        return self.numbers[:1]

    @property
    def spans(self) -> Tensor:
        """The visible slots of each row, from and to, int64 [2, B]."""
        return self.numbers[1:].view(2, -1)

    def visible(self) -> Tensor:
        """Return which slots each row sees, bool [B, T]."""
        if "visible" not in self.derived:
            at, (start, stop) = torch.arange(self.layout[2], device=self.numbers.device), self.spans[..., None]
            self.derived["visible"] = (at >= start) & (at < stop)
        mask: Tensor = self.derived["visible"]
        return mask

    def sequences(self, heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return a sequence for each row and KV head, of keys packed as they are stored: `cu_seqlens` of the queries,
        of the keys, and the number of keys that are used, int32.
        """
        if heads not in self.derived:
            start, stop = self.spans
            n, device = len(start) * heads, start.device
            rows = torch.arange(0, n * self.layout[2], self.layout[2], device=device).view(-1, heads)
            begins = torch.zeros(n + 1, dtype=torch.int32, device=device)
            begins[:n] = (rows + start[:, None]).flatten()
            used = (stop - start)[:, None].expand(-1, heads).flatten().int()
            self.derived[heads] = torch.arange(n + 1, dtype=torch.int32, device=device), begins, used
        found: tuple[Tensor, Tensor, Tensor] = self.derived[heads]
        return found


class FlashDecode:
    """Flash attention, which reads the slots that are used and splits them over the GPU."""

    name = "flash"

    def accumulate(
        self, into: SoftmaxAccumulator, q_BhND: Tensor, k_BKTD: Tensor, v_BKTV: Tensor, slots: Slots, scores: Scores
    ) -> None:
        """Add the attention of one query per row."""
        scale, v_dim = scores.scale_of(k_BKTD.shape[3]), v_BKTV.shape[3]
        q, k, v = flash.padded(q_BhND, k_BKTD, v_BKTV)
        (B, h), (K, T, D) = q.shape[:2], k.shape[1:]
        ends_q, begins_k, used = slots.sequences(K)
        out, lse, *_ = flash_varlen(
            q.reshape(B * K, h // K, D), *(x.reshape(B * K * T, 1, D) for x in (k, v)), ends_q, begins_k, 1, T, 0.0,
            False, False, scale=scale, window_size_left=-1, window_size_right=-1, seqused_k=used,
        )  # fmt: skip
        lse = lse.transpose(0, 1).reshape(B, h, 1)
        # A sequence without keys, as of a ring rank that holds none in the window, has the log-sum-exp inf.
        into.add(out.reshape(B, h, 1, D)[..., :v_dim], lse.masked_fill(lse == torch.inf, -torch.inf))


class FormulaDecode:
    """The formula in fp32: for CPUs, fp32, wide heads and softcaps."""

    name = "formula"
    computes = frozenset({"window", "chunk_size", "documents", KEYS, "softcap", "sinks"})

    def accumulate(
        self, into: SoftmaxAccumulator, q_BhND: Tensor, k_BKTD: Tensor, v_BKTV: Tensor, slots: Slots, scores: Scores
    ) -> None:
        """Add the attention of one query per row."""
        wide = torch.promote_types(q_BhND.dtype, torch.float32)
        (B, h, _, D), K = q_BhND.shape, k_BKTD.shape[1]
        q_BKGD = q_BhND.reshape(B, K, h // K, D).to(wide) * scores.scale_of(D)
        s_BKGT = q_BKGD @ k_BKTD.to(wide).transpose(2, 3)
        if scores.softcap is not None:
            s_BKGT = scores.softcap * (s_BKGT / scores.softcap).tanh()
        s_BKGT = s_BKGT.masked_fill(~slots.visible()[:, None, None], -torch.inf)
        lse_BKG = s_BKGT.logsumexp(3)
        p_BKGT = (s_BKGT - lse_BKG.clamp(min=torch.finfo(wide).min)[..., None]).exp()
        out = p_BKGT @ v_BKTV.to(wide)
        into.add(out.reshape(B, h, 1, -1), lse_BKG.reshape(B, h, 1))
