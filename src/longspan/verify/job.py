"""The job as a whole: check the input once, start the ranks, compare, print."""

from __future__ import annotations

from typing import TYPE_CHECKING

from longspan.core.validation import check_processes
from longspan.hf.pretrained import check_names
from longspan.ranks import launch
from longspan.verify.config import VerifyConfig

if TYPE_CHECKING:
    import torch

    from longspan.checkpoint import Ranks
    from longspan.ranks.heartbeat import Heartbeat
    from longspan.verify.inputs import Inputs
    from longspan.verify.report import Report


def run(config: VerifyConfig) -> int:
    """Verify on data x ring x ulysses ranks, started here or by torchrun, and print the report.

    Returns:
        The exit code: 0 if everything agrees, 1 if something does not. The same on every rank.

    Raises:
        LongspanError: on bad input.
        longspan.ranks.launch.RankFailed: if a rank dies.
    """
    config.check()
    launch.check_nproc(config.parallel.ranks, config.nproc, config.parallel.flags)
    if not launch.under_torchrun():
        check_names(config.model, config.config, config.data, config.tokenizer)
        check_processes(config.parallel.ranks, config.parallel.flags)
    from longspan.checkpoint import Ranks
    from longspan.verify.inputs import open_inputs, open_resumed
    from longspan.verify.report import print_json, print_table

    if not launch.under_torchrun():  # what can be refused is refused before any rank starts
        open_inputs(config) if config.resume is None else open_resumed(config, Ranks(), content=False)
    report: Report = launch.launch(_verify_rank, config, nproc=config.parallel.ranks)
    if launch.is_first_rank():
        print_json(report) if config.json else print_table(report)
    return report.exit_code


def _verify_rank(config: VerifyConfig) -> Report:
    with launch.stdout_to_stderr(), launch.joined(config.timeout, config.start_timeout) as heart:
        return worker(config, heart)


def worker(config: VerifyConfig, heart: Heartbeat | None = None) -> Report:
    """Verify on this rank; every rank of the job calls it and returns the same report.

    Raises:
        LongspanError: on bad input, a checkpoint that is damaged, if the ranks were not given the same, or do not hold
            the same weights.
    """
    import torch

    from longspan import checkpoint
    from longspan.checkpoint import Ranks
    from longspan.comm.mesh import make_sharding
    from longspan.verify.inputs import model_origin
    from longspan.verify.runs import Link, logits_part, make_models, make_report, sharded_parts, unsharded_runs

    inputs, ranks = _agreed_inputs(config, heart)
    sp = make_sharding(config.parallel)
    link = Link.of(sp)
    batch_BS = {name: x.to(sp.device) for name, x in inputs.batch_BS.items()}
    alone = Ranks.alone()

    def load(whole: torch.nn.Module) -> None:
        if inputs.checkpoint is not None:
            checkpoint.load_weights(inputs.checkpoint, whole, alone)

    models = make_models(model_origin(config, inputs.model_config), config, sp, link, load)
    references = unsharded_runs(models.whole, batch_BS, config, link)
    model = models.shard()
    del models
    if inputs.checkpoint is not None:  # once more, now as `train --resume` reads them: each rank its shards
        checkpoint.load_weights(inputs.checkpoint, model, ranks)
    mine = slice(sp.data_rank * config.batch, (sp.data_rank + 1) * config.batch)
    out = model(**{name: x[mine] for name, x in batch_BS.items()})
    out.loss.backward()
    parts = dict(sharded_parts(sp, model, out.loss))
    with torch.no_grad():  # in training none are made
        out = model(**{name: x[mine] for name, x in batch_BS.items() if name != "labels"})
    parts["logits"] = logits_part(config, sp, out.logits)
    return make_report(config, sp, link, references, parts, inputs.checkpoint)


def _agreed_inputs(config: VerifyConfig, heart: Heartbeat | None) -> tuple[Inputs, Ranks]:
    """What is to be verified, once it is known to be alike on every rank; the process group; and who reads files."""
    import torch

    from longspan.checkpoint import Ranks
    from longspan.ranks import agreement
    from longspan.ranks.rendezvous import meet
    from longspan.verify.inputs import open_inputs, open_resumed

    config.check()
    alive = heart is not None
    peers = meet(config.timeout, config.start_timeout) if heart is None else heart.peers
    inputs = None
    with agreement.refusing_together(peers, alive=alive):
        if config.resume is None:
            inputs = open_inputs(config)
    facts = {**agreement.settings(config), **agreement.versions()}
    if inputs is not None:
        facts |= agreement.model_facts(inputs.model_config)
    agreement.agree(peers, facts, alive=alive)
    peers.init_process_group("cuda" if torch.cuda.is_available() else "cpu")
    ranks = Ranks.apart()
    # Its files are shared out over the ranks, which takes a process group; its marker is compared between them.
    return inputs if inputs is not None else open_resumed(config, ranks), ranks
