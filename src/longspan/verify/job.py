"""The job of `longspan verify`: check the config, start the ranks, compare, print."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from longspan.hf.pretrained import check_names
from longspan.ranks import launch
from longspan.verify.config import VerifyConfig

if TYPE_CHECKING:
    from longspan.verify.report import Report


def run(config: VerifyConfig) -> int:
    """Verify on ranks started here or by torchrun, print the report, and return the exit code, on every rank."""
    launch.open_first(config, _open)
    from longspan.verify.report import print_json, print_table

    report: Report = launch.launch(_verify_rank, config, nproc=config.parallel.ranks)
    if launch.is_first_rank():
        print_json(report) if config.json else print_table(report)
    return report.exit_code


def _open(config: VerifyConfig) -> None:
    """Open the inputs, to fail before any rank starts; the ranks open them again."""
    check_names(config.model.model, config.text, config.tokenizer)
    from longspan.verify import diffusion
    from longspan.verify.inputs import open_inputs

    diffusion.open_transformer(config) if diffusion.config_file(config) is not None else open_inputs(config)


def _verify_rank(config: VerifyConfig) -> Report:
    with launch.stdout_to_stderr(), launch.joined(config.timeouts.timeout, config.timeouts.start_timeout):
        return worker(config)


def worker(config: VerifyConfig) -> Report:
    """Verify on this rank; every rank of the job calls it and returns the same report."""
    import torch

    from longspan.comm.mesh import make_sharding
    from longspan.ranks import agreement
    from longspan.verify import diffusion, runs
    from longspan.verify.inputs import Inputs, model_origin, open_inputs
    from longspan.verify.runs import (
        as_dtype,
        gradient_parts,
        logits_part,
        make_models,
        make_report,
        unsharded_runs,
        whole_part,
    )

    config.check()
    if diffusion.config_file(config) is not None:
        return diffusion.worker(config)

    def facts(opened: Inputs) -> dict[str, Any]:
        return agreement.settings(config) | agreement.model_facts(opened.model_config)

    inputs = agreement.open_together(lambda: open_inputs(config), facts)
    sp = make_sharding(config.parallel)
    hosts = sp.host_group
    rows = config.batch * config.parallel.data
    batch_BS = {name: x.to(sp.device) for name, x in inputs.rows(0, rows).items()}
    unsharded, shard = make_models(model_origin(config, inputs.model_config), config, sp)
    references = unsharded_runs(unsharded, lambda model: runs.run_unsharded(model, batch_BS), config, hosts)
    model = shard()
    del unsharded, shard  # free the unsharded weights
    mine_BS = inputs.rows(sp.data_rank * config.batch, (sp.data_rank + 1) * config.batch)
    mine_BS = {name: x.to(sp.device) for name, x in as_dtype(mine_BS, model).items()}
    out = model(**mine_BS)
    out.loss.backward()
    parts = {"loss": whole_part(out.loss.detach().reshape(1)), **gradient_parts(model, sp)}
    with torch.no_grad():  # in training, the model returns no logits
        out = model(**{name: x for name, x in mine_BS.items() if name != "labels"})
    parts["logits"] = logits_part(config, sp, out.logits)
    spans = sp.layout.spans(config.tokens, sp.rank)
    return make_report(config, sp, hosts, references, parts, inputs.describe(), spans)
