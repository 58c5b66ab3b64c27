"""Recurrent layers on a sharded sequence, forward and backward, next to one process; and Mamba-2 next to ringmaster.

    python -m benchmarks.mixers                      # methods of sharded linear attention, over lengths
    python -m benchmarks.mixers --what layers        # models of one hybrid layer against transformers on one process
    python -m benchmarks.mixers --what ringmaster    # a Mamba-2 model against axolotl-ringmaster

The methods: state passing, all-to-all by heads, and states in turn (a ring). One process computes the whole sequence,
on rank 0 in the same rounds. Outputs and gradients are compared with its first. `of one / P` is CPU seconds of the
busiest rank over those of one process divided by the ranks. `own tokens` is each rank's work without any passing, as if
its tokens were the whole sequence: what ranks cost each other on shared cores, and small tensors, is in it. `messages`
are state passing's collectives alone, of the same size. Goal: state passing at most 1.15 of own tokens, and messages.

A layer is measured as a step of a model that has one: embedding, mixer, MLP, head and the sum of gradients, messages
included. Goal: at most 1.15 of one / P, or of own tokens.

ringmaster needs `pip install --no-deps axolotl-ringmaster==0.2.7`, in an environment of its own. It wires transformers'
Mamba-2 (torch code on a CPU). Tokens are cut before the step, and one all-reduce sums all gradients. Goal: time and
memory at most 1.0 of its.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import longspan
from benchmarks import common
from benchmarks.hf_step_vs_alst import MALLOC, MIB, rss_rise
from longspan import exchange
from longspan.comm.collectives import P2PMessage, all_gather, post, wait_for
from longspan.comm.mesh import MeshGroups, group_name
from longspan.mixers.mixer import Tokens
from longspan.mixers.plain_torch import LinearAttention
from longspan.mixers.state_passing import depend
from tests.counting import count_sent

GOAL = 1.15
HEADS, DIM = 4, 64  # of queries, keys and values
RULES = ("decay", "delta rule")  # both with a decay per head and token
ONE, OWN, MESSAGES = "one process", "own tokens", "messages"
OPS = {"state_passing": ("all_gather", "reduce_scatter"), "by_heads": ("all_to_all",), "states_in_turn": ("p2p",)}
Method = Callable[[dict[str, Tensor], longspan.SequenceSharding], Tensor]


def main(
    what: Literal["methods", "layers", "ringmaster"] = "methods",
    ranks: tuple[int, ...] = (2, 4),
    tokens: tuple[int, ...] = (4096, 8192, 16384, 32768),
    repeats: int = 5,
    name: str = "",
) -> None:
    """Compare methods, layers, or a model with ringmaster's."""
    more = {"layers": ["transformers"], "ringmaster": ["transformers", "axolotl-ringmaster"]}
    packages = ["longspan", "torch", *more.get(what, [])]
    env = common.environment(packages)
    if what == "methods":
        rows = [row for world in ranks for row in common.run_ranks(measure_all, world, tokens, repeats)]
        title, text = "Linear attention on a sharded sequence", describe(rows)
    elif what == "layers":
        rows = [row for world in ranks for row in common.run_ranks(measure_layers, world, tokens, repeats)]
        title, text = "Hybrid layers on a sharded sequence", describe_layers(rows)
    else:
        rows = [measure_models(world, n, repeats) for world in ranks for n in tokens]
        title, text = "A Mamba-2 model: longspan against ringmaster", describe_models(rows)
    common.write_report(name or f"mixers-{what}", title, env, text, rows)


# --- the methods of linear attention ----------------------------------------------------------------


def state_passing(tokens: dict[str, Tensor], sp: longspan.SequenceSharding) -> Tensor:
    """Run linear attention as longspan does: one all-gather of the states, whatever the length."""
    out = longspan.linear_attention(**tokens, sp=sp)
    assert isinstance(out, Tensor)
    return out


def by_heads(tokens: dict[str, Tensor], sp: longspan.SequenceSharding) -> Tensor:
    """Send all tokens by all-to-all to a rank that has their heads, and back (Ulysses)."""
    by_name = {name: x if x.dim() == 4 else x.unsqueeze(3) for name, x in tokens.items()}
    packed = exchange.seq_to_heads(torch.cat(list(by_name.values()), 3), sp.group)
    parts = packed.split([x.shape[3] for x in by_name.values()], 3)
    whole = {name: x if name in "qkv" else x.squeeze(3) for name, x in zip(by_name, parts, strict=True)}
    out = state_passing(whole, longspan.SequenceSharding(MeshGroups("cpu")))
    return exchange.heads_to_seq(out, sp.group)


def states_in_turn(tokens: dict[str, Tensor], sp: longspan.SequenceSharding) -> Tensor:
    """Send a state from rank to rank, one after the other: LASP-1 (arXiv:2404.02882)."""
    local = LinearAttention().local(Tokens(**tokens), None, receives=sp.rank > 0)
    transition = torch.ones(1) if local.transition is None else local.transition
    before: Tensor = _StateOfPreviousRank.apply(local.state, transition, sp)  # type: ignore[no-untyped-call]
    return depend(local.finish(before if sp.rank else None), before)  # the first rank's backward receives, too


class _StateOfPreviousRank(torch.autograd.Function):
    """Return the state before my tokens; send the next rank `transition . before + state`."""

    @staticmethod
    def forward(ctx: Any, state: Tensor, transition: Tensor, sp: longspan.SequenceSharding) -> Tensor:
        before = torch.zeros_like(state)
        if sp.rank > 0:
            wait_for(post([], [P2PMessage(before, sp.rank - 1, 0)], sp.group))
        if sp.rank < sp.size - 1:
            moved = transition @ before if transition.shape[-1] > 1 else transition * before
            wait_for(post([P2PMessage(state + moved, sp.rank + 1, 0)], [], sp.group))
        ctx.sp = sp
        ctx.save_for_backward(transition, before)
        return before

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dbefore: Tensor) -> tuple[Tensor, Tensor, None]:
        sp, (transition, before) = ctx.sp, ctx.saved_tensors
        dafter = torch.zeros_like(before)
        if sp.rank < sp.size - 1:
            wait_for(post([], [P2PMessage(dafter, sp.rank + 1, 0)], sp.group))
        matrix = transition.shape[-1] > 1
        if sp.rank > 0:
            moved = transition.mT @ dafter if matrix else transition * dafter
            wait_for(post([P2PMessage(dbefore + moved, sp.rank - 1, 0)], [], sp.group))
        dtransition = dafter @ before.mT if matrix else (dafter * before).sum_to_size(transition.shape)
        return dafter, dtransition, None


METHODS: dict[str, tuple[str, Method]] = {
    "state_passing": ("state passing", state_passing),
    "by_heads": ("by heads", by_heads),
    "states_in_turn": ("states in turn", states_in_turn),
}


def measure_all(tokens: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    """Measure every rule at every length; run by every rank."""
    return [
        {"ranks": dist.get_world_size(), "rule": rule, "tokens": n, **measure(rule, n, repeats)}
        for rule in RULES
        for n in tokens
    ]


def measure(rule: str, n: int, repeats: int) -> dict[str, Any]:
    """Return the bytes and times of every method."""
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=dist.get_world_size()))
    alone = longspan.SequenceSharding(MeshGroups("cpu"))
    whole, grad = inputs(rule, n)
    mine = {name: sp.shard(x).clone().requires_grad_() for name, x in whole.items()}
    my_grad = sp.shard(grad).clone()
    if dist.get_rank():
        whole = {}
    expected = forward_backward(whole, alone, grad) if whole else []
    sent = {}
    for method, (label, function) in METHODS.items():
        with count_sent() as log:
            found = forward_backward(mine, sp, my_grad, function)
        sent[method] = sum(size for op, size in common.most_sent(log).items() if op in OPS[method])
        for i, x in enumerate(found):
            gathered = sp.gather(x.contiguous(), dim=1, length=n)
            if (error := common.relative_error(gathered, expected[i] if whole else gathered)) > 1e-4:
                raise RuntimeError(f"{label}: tensor {i} is off by {error:.1e}")
    del expected
    runs: dict[str, Callable[[], object]] = {
        label: lambda function=function: forward_backward(mine, sp, my_grad, function)
        for label, function in METHODS.values()
    }
    runs[ONE] = lambda: whole and forward_backward(whole, alone, grad)
    runs[OWN] = lambda: forward_backward(mine, alone, my_grad)
    runs[MESSAGES] = lambda: send_summary(rule, sp)
    wall, cpu = common.alternate(runs, repeats, max_over_ranks=True)
    return {"sent": sent, "formula": formulas(rule, n, sp.size), "wall": wall, "cpu": cpu}


def inputs(rule: str, n: int) -> tuple[dict[str, Tensor], Tensor]:
    """Return the tokens and the gradient of the output, the same on every rank."""
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(1, n, HEADS, DIM) for _ in range(4))
    tokens = {"q": q, "k": F.normalize(k, dim=-1), "v": v, "decay": -0.1 * torch.rand(1, n, HEADS)}
    if rule == "delta rule":
        tokens["beta"] = torch.rand(1, n, HEADS)
    return {name: x.requires_grad_() for name, x in tokens.items()}, grad


def forward_backward(
    tokens: dict[str, Tensor], sp: longspan.SequenceSharding, grad: Tensor, method: Method = state_passing
) -> list[Tensor]:
    out = method(tokens, sp)
    return [out.detach(), *torch.autograd.grad(out, list(tokens.values()), grad)]


def send_summary(rule: str, sp: longspan.SequenceSharding) -> None:
    """Send what state passing sends, forward and backward."""
    summary = torch.zeros(1, 1, HEADS, DIM, DIM + columns(rule))
    for _ in range(2):
        all_gather(summary, group_name(sp.group))


def columns(rule: str) -> int:
    """Columns of a transition, sent with each state: one factor per key, or a matrix."""
    return DIM if rule == "delta rule" else 1


def formulas(rule: str, n: int, ranks: int) -> dict[str, int]:
    """Return the fp32 bytes that the rank with most sends, forward and backward."""
    state = 4 * HEADS * DIM * DIM
    gates = 1 + (rule == "delta rule")
    return {
        "state_passing": 2 * (ranks - 1) * (state + 4 * HEADS * DIM * columns(rule)),
        "by_heads": 2 * 4 * n * HEADS * (4 * DIM + gates) // ranks * (ranks - 1) // ranks,
        "states_in_turn": state * min(2, ranks - 1),
    }


def describe(rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        wall, cpu = ({name: common.median(times) for name, times in row[clock].items()} for clock in ("wall", "cpu"))
        for name in (*(label for label, _ in METHODS.values()), ONE, OWN, MESSAGES):
            method = next((key for key, (label, _) in METHODS.items() if label == name), None)
            bytes_sent = ["", ""]
            if method is not None:
                sent, formula = row["sent"][method], row["formula"][method]
                bytes_sent = [f"{sent:,}", "=" if sent == formula else f"{formula:,}"]
            part = "" if name == ONE else f"{share(row, name):.3f}"
            line = [str(row["ranks"]), row["rule"], f"{row['tokens']:,}", name]
            cells.append([*line, f"{wall[name]:.4f}", f"{cpu[name]:.4f}", part, *bytes_sent])
    worst = max(rows, key=lambda row: of_own(row) - of_own(row, MESSAGES))
    most, beside = of_own(worst), of_own(worst, MESSAGES)
    sizes = {(row["ranks"], row["rule"]): set() for row in rows}
    for row in rows:
        sizes[row["ranks"], row["rule"]].add(row["sent"]["state_passing"])
    grows = [key for key, found in sizes.items() if len(found) > 1]
    header = ["P", "rule", "tokens", "method", "seconds", "CPU s", "of one / P", "bytes sent", "formula"]
    return "\n".join(
        [
            common.table(header, cells),
            "",
            f"- state passing takes at most {most:.3f} of the CPU time of own tokens, {beside:.3f} of it for messages",
            f"  (goal: {GOAL} + messages; {worst['ranks']} ranks, {worst['rule']}, {worst['tokens']:,} tokens); by",
            f"  case, without messages: {', '.join(f'{of_own(row) - of_own(row, MESSAGES):.2f}' for row in rows)}.",
            f"- bytes that state passing sends grow with the length: {grows or 'never'}.",
            "- seconds: of the slowest rank, medians over rounds. CPU s: of the busiest rank. of one / P: the median",
            "  over rounds of P x CPU s over one process's in the same round.",
            "- bytes sent: of the rank that sends most, both passes; `=` where the formula agrees to the byte.",
            f"- fp32, batch 1, {HEADS} heads, key and value dims {DIM}.",
        ]
    )


def share(row: dict[str, Any], name: str) -> float:
    """Return P times the busiest rank's CPU time over one process's, the median over rounds."""
    return row["ranks"] * common.paired_ratio(row["cpu"][name], row["cpu"][ONE])


def of_own(row: dict[str, Any], name: str = METHODS["state_passing"][0]) -> float:
    """Return the busiest rank's CPU time over that of each rank's own tokens, the median over rounds."""
    return common.paired_ratio(row["cpu"][name], row["cpu"][OWN])


# --- models of one layer, against one process --------------------------------------------------------

SIZES: dict[str, Any] = {"hidden_size": 256, "num_hidden_layers": 1, "intermediate_size": 512, "vocab_size": 256,
                         "num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}  # fmt: skip
LAYERS: dict[str, dict[str, Any]] = {
    "Qwen3_5": {
        "layer_types": ["linear_attention"], "head_dim": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8,
        "linear_key_head_dim": 64, "linear_value_head_dim": 64,
    },
    "Bamba": {
        "attn_layer_indices": [], "mamba_n_heads": 8, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 64,
        "mamba_chunk_size": 64,
    },
}  # fmt: skip
SHARDED = "longspan"


def measure_layers(tokens: tuple[int, ...], repeats: int) -> list[dict[str, Any]]:
    """Measure every layer at every length; run by every rank."""
    return [
        {"ranks": dist.get_world_size(), "layer": layer, "tokens": n, **measure_layer(layer, n, repeats)}
        for layer in LAYERS
        for n in tokens
    ]


def measure_layer(layer: str, n: int, repeats: int) -> dict[str, Any]:
    """Compare the loss and gradients with one process's, then time alternating steps."""
    sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=dist.get_world_size()))
    sharded = longspan.parallelize(one_layer(layer), sp, fsdp=False)
    plain, own = one_layer(layer), one_layer(layer)
    torch.manual_seed(1)
    ids = torch.randint(0, SIZES["vocab_size"], (1, n))
    batch, part = {"input_ids": ids, "labels": ids}, sp.shard(ids).clone()
    runs: dict[str, Callable[[], object]] = {
        SHARDED: lambda: train_step(sharded, **batch),
        ONE: lambda: dist.get_rank() == 0 and train_step(plain, input_ids=ids, labels=ids),
        OWN: lambda: train_step(own, input_ids=part, labels=part),
    }
    runs[SHARDED]()
    runs[ONE]()
    truth = sharded if dist.get_rank() else plain  # one process is rank 0
    expected = dict(truth.named_parameters())
    errors = [common.relative_error(p.grad, expected[name].grad) for name, p in sharded.named_parameters()]
    if max(errors) > 1e-3:
        raise RuntimeError(f"{layer}: gradients differ by {max(errors):.1e}, so times cannot be compared")
    wall, cpu = common.alternate(runs, repeats, max_over_ranks=True)
    return {"grad_error": max(errors), "wall": wall, "cpu": cpu}


def one_layer(layer: str) -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    config = getattr(transformers, {"Qwen3_5": "Qwen3_5TextConfig"}.get(layer, f"{layer}Config"))
    torch.manual_seed(0)
    return getattr(transformers, f"{layer}ForCausalLM")(config(**SIZES, **LAYERS[layer])).train()


def train_step(model: Any, **batch: Any) -> None:
    model.zero_grad(set_to_none=True)
    model(**batch).loss.backward()


def describe_layers(rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        wall, cpu = ({name: common.median(times) for name, times in row[clock].items()} for clock in ("wall", "cpu"))
        of_one = row["ranks"] * common.paired_ratio(row["cpu"][SHARDED], row["cpu"][ONE])
        own = common.paired_ratio(row["cpu"][SHARDED], row["cpu"][OWN])
        line = [str(row["ranks"]), row["layer"], f"{row['tokens']:,}"]
        cells.append([*line, *(f"{clock[name]:.3f}" for name in (SHARDED, ONE, OWN) for clock in (wall, cpu)),
                      f"{of_one:.3f}", f"{own:.3f}"])  # fmt: skip
    header = ["P", "layer of", "tokens", *(f"{name} {unit}" for name in (SHARDED, ONE, OWN) for unit in ("s", "CPU s")),
              "of one / P", "of own"]  # fmt: skip
    return "\n".join(
        [
            common.table(header, cells),
            "",
            f"- goal: at most {GOAL}, messages included, of one process's CPU time divided by P, or of own tokens',",
            "  whose tensors are as small and whose ranks share the cores.",
            f"- one layer of {', '.join(LAYERS)}: {', '.join(f'{key} {value}' for key, value in SIZES.items())}; fp32.",
            f"- largest relative difference of a parameter's gradient: {max(row['grad_error'] for row in rows):.1e}.",
        ]
    )


# --- a Mamba-2 model, against ringmaster ------------------------------------------------------------

PEERS = ("longspan", "ringmaster")
MAMBA2 = {"hidden_size": 256, "num_hidden_layers": 4, "num_heads": 8, "head_dim": 64, "n_groups": 1, "state_size": 64,
          "chunk_size": 64, "vocab_size": 256, "use_cache": False}  # fmt: skip


class MambaStep:
    """One library's model and its part of the batch; calling it runs forward, backward and the sum of gradients."""

    def __init__(self, library: str, tokens: int) -> None:
        import transformers

        transformers.utils.logging.set_verbosity_error()
        torch.manual_seed(0)
        self.model: Any = transformers.Mamba2ForCausalLM(transformers.Mamba2Config(**MAMBA2)).train()
        ids = torch.randint(0, MAMBA2["vocab_size"], (1, tokens))
        batch = {"input_ids": ids, "labels": ids.clone()}
        self.summed = library == "longspan"
        if self.summed:
            sp = longspan.SequenceSharding(longspan.init_mesh(ulysses=dist.get_world_size()))
            self.model = longspan.parallelize(self.model, sp, fsdp=False, memory="fastest")
            self.batch: Any = batch
        else:
            ringmaster: Any = importlib.import_module("ringmaster")
            group = dist.new_group(list(range(dist.get_world_size())))
            ringmaster.wire_recurrent_layers(self.model, group=group)
            cut = importlib.import_module("ringmaster.shard").shard_batch
            self.batch, _ = cut(
                batch, cp_rank=dist.get_rank(), cp_size=dist.get_world_size(), load_balance="contiguous"
            )
            self.batch["num_items_in_batch"] = torch.tensor(tokens - 1)  # so that gradients of ranks add up

    def __call__(self) -> None:
        self.model.zero_grad(set_to_none=True)
        self.model(**self.batch).loss.backward()
        if not self.summed:
            grads = [p.grad for p in self.model.parameters()]
            flat = torch.cat([grad.flatten() for grad in grads])
            dist.all_reduce(flat)
            for grad, total in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
                grad.copy_(total.view_as(grad))


def measure_models(ranks: int, tokens: int, repeats: int) -> dict[str, Any]:
    row = {"ranks": ranks, "tokens": tokens, **common.run_ranks(time_models, ranks, tokens, repeats)}
    row["memory"] = {name: common.run_ranks(measure_memory, ranks, name, tokens, repeats, env=MALLOC) for name in PEERS}
    return row


def time_models(tokens: int, repeats: int) -> dict[str, Any]:
    """Compare gradients, then time alternating steps."""
    steps = {name: MambaStep(name, tokens) for name in PEERS}
    grads = []
    for step in steps.values():
        step()
        grads.append({name: p.grad.clone() for name, p in step.model.named_parameters()})
    errors = {name: common.relative_error(grads[0][name], x) for name, x in grads[1].items()}
    if max(errors.values()) > 1e-3:
        raise RuntimeError(f"the gradients differ, so times cannot be compared: {errors}")
    wall, cpu = common.alternate(dict(steps), repeats)
    return {"grad_error": max(errors.values()), "wall": wall, "cpu": cpu}


def measure_memory(library: str, tokens: int, repeats: int) -> dict[str, float]:
    """Return the peak MiB of a step above the level before it, the largest over ranks."""
    step = MambaStep(library, tokens)
    rises = []
    for number in range(repeats + 1):
        step.model.zero_grad(set_to_none=True)  # a step's own gradients belong to its rise
        rise = rss_rise(step)
        rises += [rise] if number else []  # the first allocates gloo's buffers
    step.model.zero_grad(set_to_none=True)
    mine = torch.tensor([common.median(rises), common.memory_rise(step)], dtype=torch.float64)
    dist.all_reduce(mine, op=dist.ReduceOp.MAX)
    return dict(zip(("rss_rise_mib", "tensor_peak_mib"), (mine / MIB).tolist(), strict=True))


def describe_models(rows: list[dict[str, Any]]) -> str:
    cells = []
    for row in rows:
        line = [str(row["ranks"]), f"{row['tokens']:,}"]
        for clock in ("wall", "cpu"):
            ours, theirs = (row[clock][name] for name in PEERS)
            line += [f"{common.median(ours):.3f}", f"{common.paired_ratio(ours, theirs):.3f}"]
        for key in ("rss_rise_mib", "tensor_peak_mib"):
            ours, theirs = (row["memory"][name][key] for name in PEERS)
            line += [f"{ours:.0f}", f"{ours / theirs:.3f}"]
        cells.append(line)
    header = ["P", "tokens", "step s", "of ringmaster", "CPU s", "of ringmaster", "peak RSS rise MiB", "of ringmaster",
              "tensor peak MiB", "of ringmaster"]  # fmt: skip
    error = max(row["grad_error"] for row in rows)
    return "\n".join(
        [
            common.table(header, cells),
            "",
            "- goal: at most 1.0. A ratio is the median over rounds of longspan's time over ringmaster's.",
            f"- Mamba-2: {', '.join(f'{key} {value}' for key, value in MAMBA2.items())}; fp32, batch 1.",
            f"- largest relative difference of a parameter's gradient: {error:.1e}.",
        ]
    )


if __name__ == "__main__":
    common.command(main, __doc__)
