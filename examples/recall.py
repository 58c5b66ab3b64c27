"""Train a small Llama to find needles, then limit each rank's memory: one rank against four.

    python examples/recall.py [--mib 32] [--png recall.png] [--save FOLDER] [--quick]

1. Train. A document of noise contains needles, each a key and four values. After the document comes a key, and the
   model must answer with its values. The length doubles as soon as the model succeeds: up to 1,024 tokens on one rank,
   beyond that on four.
2. Limit. Each process may allocate `--mib` MiB more than it holds (by a control group, or RLIMIT_DATA). Search for the
   longest document that one rank can be asked about. With a longer one, the kernel kills the rank or refuses memory.
3. Ask four ranks, each under the same limit, about documents up to four times as long, at nine depths. The document is
   read once into a `longspan.ShardedCache`, which is cropped after each question. Then transformers on one process,
   without a limit, answers the questions about the first document of each length, with the same words.

The ranks are forked processes on this machine; on several machines or GPUs, use torchrun.
"""

import argparse
import contextlib
import copy
import ctypes
import gc
import multiprocessing
import multiprocessing.connection
import os
import resource
import signal
import socket
import time
import warnings
from pathlib import Path

import torch
import transformers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM

import longspan
import longspan.checkpoint

KEYS, VALUES, NOISE = (1, 33), (33, 97), (97, 128)  # tokens, from and to
WIDTH = 4  # values of a needle
DEPTHS = 9
MIB = 2**20
GROUPS = (  # version 1 and 2 of control groups: the hierarchy, the file that sets a limit
    (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
    (Path("/sys/fs/cgroup"), "memory.max"),
)
NO_MEMORY = 77  # exit code of a rank that was refused memory

Found = tuple[list[float], list[list[int]]]  # recall at each depth; the answers about one document


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=32, help="MiB that a process may allocate under the limit")
    parser.add_argument("--ranks", type=int, default=4, help="half of them in a ring, two for Ulysses")
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument(
        "--head-dim", type=int, default=128, help="wide, so that a token's keys and values outweigh its id"
    )
    parser.add_argument(
        "--first", type=int, default=32, help="tokens of the first document; above 32, resume from the model in --save"
    )
    parser.add_argument("--trained-to", type=int, default=8192, help="tokens of the longest documents in training")
    parser.add_argument("--minutes", type=float, default=15, help="most minutes of training")
    parser.add_argument("--documents", type=int, default=4, help="documents per length")
    parser.add_argument("--within", type=int, default=512, help="precision of the search, in tokens")
    parser.add_argument("--chunk", type=int, default=1024, help="tokens read at a time")
    parser.add_argument("--png", type=Path, help="draw recall by depth and length")
    parser.add_argument("--save", type=Path, default=Path("runs/recall"), help="folder for the trained model")
    parser.add_argument("--model", type=Path, help="a folder written by --save; do not train")
    parser.add_argument("--quick", action="store_true", help="a toy: seconds, nearly no training, 2 ranks")
    args = parser.parse_args()
    if args.quick:
        args.ranks, args.trained_to, args.minutes, args.documents = 2, 64, 0.05, 1
        args.mib, args.within = 24, 2048
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "0")  # torch's record of the last 2,000 collectives takes 5 MiB
    with contextlib.suppress(AttributeError):  # not glibc
        for name, value in ((-3, 65536), (-1, 65536), (-8, 1)):  # return freed memory to the system at once
            ctypes.CDLL(None).mallopt(name, value)
    if args.model is None:
        args.model = args.save
        for ranks, lengths in (
            (1, doubled(args.first, min(1024, args.trained_to))),
            (args.ranks, doubled(max(2048, args.first), args.trained_to)),
        ):
            if lengths:
                run_ranks(train, ranks, args, lengths)

    longest = search(args)
    reach = args.ranks * longest
    one = answered(args, 1, reach)
    print(
        f"\nunder a limit of {args.mib} MiB one rank reads at most {longest:,} tokens; {reach:,} {format_value(one)}\n",
        flush=True,
    )
    table, equal, asked = {}, 0, 0
    for n in (reach,) if args.quick else (reach // 16, reach // 8, reach // 4, reach // 2, reach):
        start = time.perf_counter()
        found = answered(args, args.ranks, n, args.documents)
        print(
            f"{args.ranks} ranks: {n:,} tokens {format_value(found)}, {time.perf_counter() - start:.0f} s", flush=True
        )
        if found is not None:
            table[n], answered_first = found
            expected = run_ranks(plainly, 1, args, n)
            equal += sum(a == b for a, b in zip(answered_first, expected, strict=True))
            asked += len(expected)
    print("\n" + render(table))
    print(f"\n{equal} of {asked} answers equal those of transformers on one process without a limit")
    if args.png:
        draw(table, longest, args)
        print(f"\n{args.png}")


def doubled(first: int, last: int) -> list[int]:
    lengths = []
    while first <= last:
        lengths.append(first)
        first *= 2
    return lengths


# --- documents


def document(n: int, needles: int, draw: torch.Generator, at_depths: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise `[n]` with needles in it, and the needles in order, `[needles, 1 + WIDTH]`: key and values.

    No value occurs twice. The needles are at random places, or with `at_depths` evenly spaced from start to end.
    """
    ids = torch.randint(*NOISE, (n,), generator=draw)
    keys = KEYS[0] + torch.randperm(KEYS[1] - KEYS[0], generator=draw)[:needles]
    values = VALUES[0] + torch.randperm(VALUES[1] - VALUES[0], generator=draw)[: needles * WIDTH]
    each = torch.cat([keys[:, None], values.view(needles, WIDTH)], 1)
    room = n - each.numel()
    if at_depths:
        gaps = torch.linspace(0, room, needles).long()
    else:
        gaps = torch.randint(0, room + 1, (needles,), generator=draw).sort().values
    for i, gap in enumerate(gaps.tolist()):
        start = gap + i * (WIDTH + 1)
        ids[start : start + WIDTH + 1] = each[i]
    return ids, each


def lesson(rows: int, n: int, draw: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Return documents followed by a question about each needle, `[rows, n]`, and labels: the values of the answers.

    In half of them the needles are evenly spaced, as in the evaluation; otherwise none would end right before its
    question.
    """
    needles = min(DEPTHS, n // 16)
    tail = needles * (WIDTH + 1)
    ids, labels = torch.empty(rows, n, dtype=torch.int64), torch.full((rows, n), -100)
    for row in range(rows):
        at_depths = bool(torch.rand((), generator=draw) < 0.5)
        ids[row, : n - tail], each = document(n - tail, needles, draw, at_depths)
        asked = each[torch.randperm(needles, generator=draw)]
        ids[row, n - tail :] = asked.flatten()
        asked[:, 0] = -100
        labels[row, n - tail :] = asked.flatten()
    return ids, labels


# --- on every rank


def sharding(ranks: int) -> longspan.SequenceSharding:
    ulysses = min(2, ranks)
    return longspan.SequenceSharding(longspan.init_mesh(ring=ranks // ulysses, ulysses=ulysses, device_type="cpu"))


def train(ranks: int, args: argparse.Namespace, lengths: list[int]) -> bool:
    sp = sharding(ranks)
    if ranks == 1:
        torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    if lengths[0] == 32:  # the first lesson
        config = LlamaConfig(
            vocab_size=NOISE[1],
            hidden_size=args.hidden,
            intermediate_size=args.hidden,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=args.head_dim,
            max_position_embeddings=2**20,
            rope_parameters={"rope_type": "default", "rope_theta": 1e8},  # most of a head turns too slowly to matter
            initializer_range=args.hidden**-0.5,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )
        model = LlamaForCausalLM(config)
    else:
        model = LlamaForCausalLM.from_pretrained(args.model)
    config = copy.deepcopy(model.config)  # before it is sharded
    model = longspan.parallelize(model.train(), sp)
    rate = 3e-3 if lengths[0] == 32 else 1e-3
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    draw = torch.Generator().manual_seed(lengths[0])
    start, step = time.perf_counter(), 0
    for n in lengths:
        known, steps = 0.0, 0
        enough = 0.9 if n == 32 else 0.95  # short documents teach the task, longer ones refine it
        while known < enough and not over(start, args.minutes, sp):
            ids, labels = lesson(max(1, 4096 // n), n, draw)
            log_p = longspan.token_logprobs(model, {"input_ids": ids, "labels": labels}, gather=True)
            asked = log_p[:, :-1][labels[:, 1:] != -100]
            loss = -asked.mean()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = rate * min(1.0, (step + 1) / 50)
            optimizer.step()
            optimizer.zero_grad()
            step, steps = step + 1, steps + 1
            right = (asked.detach().exp() > 0.5).view(-1, WIDTH).all(1)  # a needle is known if all its values are
            known = 0.9 * known + 0.1 * float(right.float().mean())
        if sp.rank == 0:
            took = time.perf_counter() - start
            print(f"{ranks} rank(s), {n:,} tokens: {steps} steps, knows {known:.2f}, {took:.0f} s", flush=True)
        longspan.checkpoint.export(args.model, model, config, None, torch.float32)
    return True


def over(start: float, minutes: float, sp: longspan.SequenceSharding) -> bool:
    """Return whether the time is up, by the first rank's clock."""
    up = torch.tensor(float(time.perf_counter() - start > 60 * minutes))
    if sp.group is not None:
        torch.distributed.broadcast(up, group=sp.group, group_src=0)
    return bool(up)


def ask(ranks: int, args: argparse.Namespace, n: int, documents: int) -> Found:
    """Return the share of correct answers at each depth, and the answers about the first document, of `n` tokens."""
    sp = sharding(ranks)
    model = longspan.parallelize(LlamaForCausalLM.from_pretrained(args.model).eval(), sp)
    draw = torch.Generator().manual_seed(n)
    answers(model, 4 * args.chunk, args, draw)  # allocate caches of libraries before the limit
    limit(args.mib * MIB)
    found = [answers(model, n, args, draw) for _ in range(documents)]
    right = [[float(answer == expected) for answer, expected in about] for about in found]
    return torch.tensor(right).mean(0).tolist(), [answer for answer, _ in found[0]]


def answers(model, n: int, args: argparse.Namespace, draw: torch.Generator) -> list[tuple[list[int], list[int]]]:
    """Return, for each depth of a document of `n` tokens, the model's answer and the right one."""
    document_ids, needles = document(n, DEPTHS, draw, at_depths=True)
    prompt = torch.cat([document_ids, needles[0, :1]])[None]
    del document_ids
    settings = GenerationConfig(
        max_new_tokens=WIDTH, do_sample=False, eos_token_id=None, pad_token_id=0, prefill_chunk_size=args.chunk
    )
    cache = longspan.ShardedCache(model, room=n + WIDTH + 1)
    found = []
    for needle in needles:
        prompt[0, n] = needle[0]
        out = model.generate(prompt, generation_config=settings, past_key_values=cache)
        found.append((out[0, n + 1 :].tolist(), needle[1:].tolist()))
        del out
        cache.crop(n)
    return found


def plainly(ranks: int, args: argparse.Namespace, n: int) -> list[list[int]]:
    """Return the answers about the first document of `ask`, by transformers alone."""
    draw = torch.Generator().manual_seed(n)
    document(4 * args.chunk, DEPTHS, draw, at_depths=True)
    ids, needles = document(n, DEPTHS, draw, at_depths=True)
    model, found = LlamaForCausalLM.from_pretrained(args.model).eval(), []
    settings = GenerationConfig(max_new_tokens=WIDTH, do_sample=False, eos_token_id=None, pad_token_id=0)
    for needle in needles:
        out = model.generate(torch.cat([ids, needle[:1]])[None], generation_config=settings)
        found.append(out[0, n + 1 :].tolist())
    return found


def limit(nbytes: int) -> None:
    """Limit the bytes that this process may allocate from now on."""
    gc.collect()
    gc.freeze()  # else a later collection writes to every object that was forked, which copies its page
    for root, name in GROUPS:
        controllers = root / "cgroup.controllers"
        if (root / name).exists() or (controllers.exists() and "memory" in controllers.read_text().split()):
            group = root / f"longspan-recall-{os.getpid()}"
            with contextlib.suppress(OSError):
                group.mkdir()
                (group / name).write_text(str(nbytes))
                (group / "cgroup.procs").write_text(str(os.getpid()))
                return
    held = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmData"))
    resource.setrlimit(resource.RLIMIT_DATA, (int(held.split()[1]) * 1024 + nbytes, resource.RLIM_INFINITY))


# --- one rank and several, with and without enough memory


def search(args: argparse.Namespace) -> int:
    """Return the longest document that one rank can be asked about under the limit."""
    good, bad = 0, 4 * args.chunk
    bad = max(bad, args.within)
    while answered(args, 1, bad) is not None:
        good, bad = bad, 2 * bad
    while bad - good > args.within:
        middle = (good + bad) // 2 // args.within * args.within
        if middle in (good, bad):
            break
        good, bad = (good, middle) if answered(args, 1, middle) is None else (middle, bad)
    if not good:
        raise SystemExit(f"{args.mib} MiB are too few for {bad:,} tokens on one rank; give more with --mib")
    return good


def answered(args: argparse.Namespace, ranks: int, n: int, documents: int = 1) -> Found | None:
    found = run_ranks(ask, ranks, args, n, documents)
    if ranks == 1:
        print(f"1 rank: {n:,} tokens {format_value(found)}", flush=True)
    return found


def format_value(found: Found | None) -> str:
    return "fail: out of memory" if found is None else f"complete, recall {sum(found[0]) / DEPTHS:.2f}"


def run_ranks(body, ranks: int, *args):
    """Run `body(ranks, *args)` on forked gloo ranks. Return the first one's value, or None if any ran out of memory."""
    fork = multiprocessing.get_context("fork")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    receiver, sender = fork.Pipe(duplex=False)
    processes = [fork.Process(target=rank_main, args=(body, rank, ranks, port, sender, args)) for rank in range(ranks)]
    for process in processes:
        process.start()
    sender.close()
    ended = []
    while len(ended) < ranks and not any(ended):
        multiprocessing.connection.wait([process.sentinel for process in processes], 0.2)
        ended = [process.exitcode for process in processes if process.exitcode is not None]
    for process in processes:
        if any(ended):
            process.kill()  # it would wait for the rank that ended
        process.join()
        for root, _ in GROUPS:
            with contextlib.suppress(OSError):
                (root / f"longspan-recall-{process.pid}").rmdir()
    if any(ended):
        if not {-signal.SIGKILL, NO_MEMORY} & set(ended):
            raise SystemExit(f"a rank has failed with exit code {next(filter(None, ended))}")
        return None
    return receiver.recv()


def rank_main(body, rank: int, ranks: int, port: int, sender, args) -> None:
    if ranks > 1:
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank, "WORLD_SIZE": ranks}
        os.environ.update(
            {name: str(value) for name, value in {**address, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": ranks}.items()}
        )
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        value = body(ranks, *args)
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "allocate memory" in str(error):
            os._exit(NO_MEMORY)
        raise
    if rank == 0:
        sender.send(value)
    if ranks > 1:
        torch.distributed.destroy_process_group()


# --- results


def render(table: dict[int, list[float]]) -> str:
    lines = ["| tokens | " + " | ".join(f"{100 * i / (DEPTHS - 1):.0f} %" for i in range(DEPTHS)) + " | all |"]
    lines.append("|" + "--:|" * (DEPTHS + 2))
    for n, found in table.items():
        lines.append(f"| {n:,} | " + " | ".join(f"{x:.2f}" for x in found) + f" | {sum(found) / DEPTHS:.2f} |")
    return "\n".join(lines)


def draw(table: dict[int, list[float]], longest: int, args: argparse.Namespace) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    fig, ax = plt.subplots(figsize=(6.4, 3.6))
    grid = torch.tensor(list(table.values())).T
    shown = ax.imshow(grid, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
    for (row, column), x in [((r, c), float(grid[r, c])) for r in range(grid.shape[0]) for c in range(grid.shape[1])]:
        ax.text(column, row, f"{x:.2f}", ha="center", va="center", fontsize=8)
    beyond = sum(n <= longest for n in table) - 0.5
    ax.axvline(beyond, color="black", linewidth=2)
    ax.set_xticks(range(len(table)), [f"{n:,}" for n in table])
    ax.set_yticks(range(DEPTHS), [f"{100 * i / (DEPTHS - 1):.0f} %" for i in range(DEPTHS)])
    ax.set_xlabel(f"tokens on {args.ranks} ranks of {args.mib} MiB; right of the line one rank is out of memory")
    ax.set_ylabel("depth of the needle")
    fig.colorbar(shown, label="recall")
    fig.tight_layout()
    args.png.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(args.png, dpi=130)


if __name__ == "__main__":
    main()
