"""Pack sequences with shared prefixes into one row that contains each prefix once: `longspan.pack_tree`.

A branching token predicts a different token in each branch, and a row has one label per token. So a node ends one token
before its sequences diverge, and each child begins with a copy of the branching token, at the same position: every
token keeps one label, and the model's head and loss are as for any other row. A copy costs one token per child.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from longspan.compat.torch_api import to_device
from longspan.core.errors import LongspanError
from longspan.core.validation import LARGEST_COUNT, check_choice, check_number
from longspan.losses.cross_entropy import IGNORE

Ids = Sequence[int] | Tensor
"""Token ids of one sequence."""


class TreePack(dict[str, Tensor]):
    """A batch of one row, for `model(**pack)`, `longspan.shard_batch` and `longspan.token_logprobs`.

    Its entries are `input_ids`, `position_ids` (along each path), `tin` and `tout` (as of `longspan.TreeMask`),
    `shift_labels` and `loss_weights`, all `[1, n]`.

    Attributes:
        paths: for each sequence the places of its tokens in the row, int64 [tokens].
        starts: for each sequence its first token that belongs to the completion.
    """

    def __init__(self, entries: dict[str, Tensor], paths: list[Tensor], starts: list[int]) -> None:
        super().__init__(entries)
        self.paths, self.starts = paths, starts

    def to(self, device: torch.device | str) -> TreePack:
        """Return the same pack on a device."""
        entries = {name: x.to(device) for name, x in self.items()}
        return TreePack(entries, [path.to(device) for path in self.paths], self.starts)

    def completions(self, x: Tensor) -> Tensor:
        """Return the values of `x [1, n]` at the tokens that predict each completion: `[sequences, longest]`.

        `x` is for example the result of `longspan.token_logprobs(model, pack, gather=True)`. Padding is 0, and so
        is the first token of a sequence without a prompt, which nothing predicts. Differentiable: a shared token gets
        the sum of its sequences' gradients.
        """
        rows = []
        for path, start in zip(self.paths, self.starts, strict=True):
            found = x[0, path[max(0, start - 1) : -1]]
            rows.append(found if start else torch.cat([found.new_zeros(1), found]))
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def pack_tree(
    prompts: Sequence[Ids],
    completions: Sequence[Ids],
    masks: Sequence[Ids] | None = None,
    *,
    count: Literal["each", "once"] = "each",
    shortest: int = 1,
) -> TreePack:
    """Pack completions into one row that contains each shared prefix once.

    Args:
        prompts: token ids, one sequence for each completion. Equal prompts are found, and so are common prefixes of
            different ones (a system prompt, the turns of a chat, an agent's rollout up to where another branches off).
            A prompt may be empty.
        completions: token ids that follow each prompt: one answer, or all turns after the prompt.
        masks: for each completion 1 where a token is trained and 0 where it is not (a tool's output); default all.
        count: how a token that several sequences share and train counts in the loss: "each" once per sequence, so that
            loss and gradients are those of the separate sequences; "once" a single time.
        shortest: repeat shorter prefixes instead of sharing them: each node costs calls of the attention kernel.

    Returns:
        A `TreePack`: `model(**pack).loss` is the mean over the trained tokens of all sequences, and
        `pack.completions(longspan.token_logprobs(model, pack, gather=True))` their log-probabilities.

    Raises:
        LongspanError: for empty completions, and masks that do not fit them.
        ValueError: for lists of different lengths.
    """
    check_number("shortest", shortest, 1, LARGEST_COUNT, whole=True)
    check_choice("count", count, ("each", "once"))
    sequences, trained, starts = [], [], []
    for i, given in enumerate(zip(prompts, completions, completions if masks is None else masks, strict=True)):
        prompt, completion, mask = (x.tolist() if isinstance(x, Tensor) else list(x) for x in given)
        mask = [1] * len(completion) if masks is None else mask
        if not completion:
            raise LongspanError(f"completions[{i}] is empty; leave the sequence out")
        if len(mask) != len(completion) or not set(mask) <= {0, 1}:
            raise LongspanError(f"masks[{i}] must have a 0 or 1 for each of the {len(completion)} completion tokens")
        sequences.append(prompt + completion)
        trained.append([0] * len(prompt) + mask)
        starts.append(len(prompt))
    entries, paths = pack_rows(sequences, trained, shortest)
    if count == "once":
        entries["loss_weights"].clamp_(max=1)
    return TreePack(entries, paths, starts)


@dataclass(frozen=True, eq=False)
class PackedRows:
    """The rows of a batch as one row that contains each shared prefix once."""

    entries: dict[str, Any]  # the batch for the model
    at: Tensor  # place of each of the batch's tokens in the row, int64 `[B, n]`; 0 for padding
    labelled: Tensor  # whether the token predicts a labelled one, bool `[B, n]`; padding predicts nothing

    def unpack(self, x: Tensor) -> Tensor:
        """Return `[B, n]`, the value of `x [1, tokens]` at each token of the batch; 0 where no label is predicted."""
        at, labelled = (to_device(each, x.device) for each in (self.at, self.labelled))
        return torch.where(labelled, x[0, at], 0)


def pack_batch(batch: Mapping[str, Any]) -> PackedRows:
    """Pack the rows of a batch of `input_ids`, `labels` and `attention_mask`; raise for other batches."""
    known = ("input_ids", "labels", "attention_mask", "position_ids")
    ids, labels, mask, positions = (batch.get(name) for name in known)
    others = {name: x for name, x in batch.items() if name not in known and x is not None}
    wrong = next((name for name, x in others.items() if isinstance(x, Tensor) and x.dim()), None)
    if wrong is not None or ids is None or labels is None:
        what = "has no input_ids or no labels" if wrong is None else f"has `{wrong}`"
        raise LongspanError(f"shared_prefixes=True takes a batch of {', '.join(known)}, and this one {what}")
    real = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask.bool()
    count = real.cumsum(-1) - 1
    trained = labels != IGNORE
    for name, differs in (
        ("labels", trained & (labels != ids)),
        ("labels", trained & ~real),
        ("position_ids", real & (count != (count if positions is None else positions))),
        ("attention_mask", real[:, 1:] & ~real[:, :-1] & (count[:, 1:] > 0)),
    ):
        if bool(differs.any()):
            rule = {"labels": "be the tokens or -100", "position_ids": "count each row's tokens from 0"}
            raise LongspanError(
                f"shared_prefixes=True: `{name}` must {rule.get(name, 'have its zeros at the ends of the rows')}"
            )
    sequences, uses = ([x[b, real[b]].tolist() for b in range(len(ids))] for x in (ids, trained.int()))
    entries, paths = pack_rows(sequences, uses, shortest=1)
    at = torch.zeros_like(ids)
    at[real] = torch.cat(paths).to(ids.device)
    del entries["loss_weights"]
    labelled = torch.nn.functional.pad(trained, (0, 1))[:, 1:] & real
    return PackedRows(others | {name: x.to(ids.device) for name, x in entries.items()}, at, labelled)


def pack_rows(
    sequences: list[list[int]], trained: list[list[int]], shortest: int
) -> tuple[dict[str, Tensor], list[Tensor]]:
    """Return the entries of a `TreePack`, and its `paths`.

    `trained` is 1 for each token whose prediction is trained, else 0; `shortest` the fewest tokens of a node that
    several sequences share.
    """
    order = sorted(range(len(sequences)), key=sequences.__getitem__)  # those that begin alike are neighbours
    ids = [torch.tensor(sequences[i]) for i in order]
    counts = [torch.tensor(trained[i]) for i in order]
    parents, columns = list[int](), list[Tensor]()
    paths = [[torch.zeros(0, dtype=torch.int64)] for _ in order]
    work, n = [(0, len(order), 0, -1)], 0  # neighbours [first, stop) from token `at` on, below a node
    while work:
        first, stop, at, parent = work.pop()
        shared = _shared(ids[first], ids[stop - 1])
        if shared == len(ids[stop - 1]):  # all are equal
            end = shared
        else:
            following = [int(x[shared]) if len(x) > shared else -1 for x in ids[first:stop]]
            borders = [i for i in range(1, stop - first) if following[i] != following[i - 1]]
            end = shared - 1 if shared - 1 - at >= shortest else at
            below = (end, len(parents)) if end > at else (at, parent)
            groups = zip([0, *borders], [*borders, stop - first], strict=True)
            work += [(first + a, first + b, *below) for a, b in reversed(list(groups))]
        if end == at:
            continue
        tokens = ids[first][at : end + 1]
        uses = torch.stack([x[at + 1 : end + 1] for x in counts[first:stop]]).sum(0)
        if len(tokens) == end - at:  # of a leaf the last token predicts nothing
            tokens, uses = torch.cat([tokens, tokens[:1]]), torch.cat([uses, uses.new_zeros(1)])
        labels = tokens[1:].masked_fill(uses == 0, IGNORE)
        number = torch.full_like(labels, len(parents))
        columns.append(torch.stack([tokens[:-1], torch.arange(at, end), number, labels, uses]))
        parents.append(parent)
        for path in paths[first:stop]:
            path.append(torch.arange(n, n + end - at))
        n += end - at
    behind = list(range(1, len(parents) + 1))  # number of the node behind the descendants of each
    for node in reversed(range(len(parents))):
        if parents[node] >= 0:
            behind[parents[node]] = max(behind[parents[node]], behind[node])
    tokens, positions, tin, labels, uses = torch.cat(columns, 1)[:, None]
    entries = {"input_ids": tokens, "position_ids": positions, "tin": tin, "tout": torch.tensor(behind)[tin]}
    entries |= {"shift_labels": labels, "loss_weights": uses.float()}
    found = dict(zip(order, map(torch.cat, paths), strict=True))
    return entries, [found[i] for i in range(len(sequences))]


def _shared(a: Tensor, b: Tensor) -> int:
    """Return the length of the common prefix."""
    n = min(len(a), len(b))
    differ = a[:n] != b[:n]
    return int(differ.int().argmax()) if bool(differ.any()) else n
