"""The job as a whole: check the input once, start the ranks, compare, print."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from longspan import launch
from longspan.checked import check_processes
from longspan.verify.config import VerifyConfig

if TYPE_CHECKING:
    from longspan.heartbeat import Heartbeat
    from longspan.verify.report import Report


def run(config: VerifyConfig) -> int:
    """Verify on data x ring x ulysses ranks, started here or by torchrun, and print the report.

    Returns:
        The exit code: 0 if everything agrees, 1 if something does not. The same on every rank.

    Raises:
        LongspanError: on bad input.
        longspan.launch.RankFailed: if a rank dies.
    """
    config.check()
    launch.check_nproc(config.ranks, config.nproc, config.mesh)
    if not launch.under_torchrun():
        check_processes(config.ranks, config.mesh)
    from longspan.verify.inputs import load_model_config, make_batch
    from longspan.verify.report import print_json, print_table

    if not launch.under_torchrun():  # what can be refused is refused before any rank starts
        make_batch(config, load_model_config(config))
    report: Report = launch.launch(_verify_rank, config, nproc=config.ranks)
    if launch.is_first_rank():
        print_json(report) if config.json else print_table(report)
    return report.exit_code


def _verify_rank(config: VerifyConfig) -> Report:
    with _stdout_to_stderr(), launch.joined(config.timeout) as heart:
        return worker(config, heart)


@contextmanager
def _stdout_to_stderr() -> Iterator[None]:
    """What libraries write to stdout (gloo greets there, from C++) goes to stderr: stdout is for the report."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def worker(config: VerifyConfig, heart: Heartbeat | None = None) -> Report:
    """Verify on this rank; every rank of the job calls it and returns the same report.

    Raises:
        LongspanError: on bad input, if the ranks were not given the same, or do not hold the same weights.
    """
    import torch

    from longspan import agreement
    from longspan.huggingface import check_model
    from longspan.mesh import SequenceSharding, init_mesh
    from longspan.rendezvous import meet
    from longspan.verify.inputs import build_model, load_model_config, make_batch
    from longspan.verify.runs import Link, check_same_weights, make_report, shard_model, sharded_parts, unsharded_runs

    config.check()
    peers = meet(config.timeout) if heart is None else heart.peers
    with agreement.refusing_together(peers, alive=heart is not None):
        model_config = load_model_config(config)
        whole_BS = make_batch(config, model_config)
    facts = {**agreement.settings(config), **agreement.versions(), **agreement.model_facts(model_config)}
    agreement.agree(peers, facts, alive=heart is not None)
    peers.init_process_group("cuda" if torch.cuda.is_available() else "cpu")
    mesh = init_mesh(data=config.data_degree, ring=config.ring, ulysses=config.ulysses)
    sp = SequenceSharding(mesh, config.layout, ring_impl=config.ring_impl)
    link = Link.of(sp)
    batch_BS = {name: x.to(sp.device) for name, x in whole_BS.items()}
    model = build_model(config, model_config).to(sp.device)
    check_model(model, sp, config.kernel)  # before the long runs, not after them
    check_same_weights(model, link)
    references = unsharded_runs(model, batch_BS, config, link)
    model = shard_model(model, config, sp)
    mine = slice(sp.data_rank * config.batch, (sp.data_rank + 1) * config.batch)
    out = model(**{name: x[mine] for name, x in batch_BS.items()})
    out.loss.backward()
    return make_report(config, sp, link, references, dict(sharded_parts(config, sp, model, out)))
