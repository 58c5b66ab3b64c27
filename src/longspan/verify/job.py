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
    from longspan.comm.objects import on_every_rank
    from longspan.hf.support import check_model
    from longspan.ranks import agreement
    from longspan.verify import diffusion, runs
    from longspan.verify.inputs import Inputs, model_origin, open_inputs

    config.check()
    if diffusion.config_file(config) is not None:
        return diffusion.worker(config)

    def facts(opened: Inputs) -> dict[str, Any]:
        return agreement.settings(config) | agreement.model_facts(opened.model_config)

    inputs = agreement.open_together(lambda: open_inputs(config), facts)
    sp = make_sharding(config.parallel)
    origin = model_origin(config, inputs.model_config)
    # Fail before the long runs.
    on_every_rank(lambda: check_model(origin.on_meta(), sp.device, sp.ring_size, config.model.kernel), sp.mesh_group)
    references = runs.unsharded_runs(
        lambda: runs.prepared(origin.build()).to(sp.device),
        lambda model: runs.run_unsharded(model, inputs.batch(0, len(inputs.rows), sp.device)),
        config,
        sp.host_group,
    )
    model = runs.load_as_sharded(origin, config, sp)
    mine = inputs.batch(sp.data_rank * config.batch, (sp.data_rank + 1) * config.batch, sp.device)
    mine = runs.as_dtype(mine, model)
    out = model(**mine)
    out.loss.backward()
    parts = {"loss": runs.whole_part(out.loss.detach().reshape(1)), **runs.gradient_parts(model, sp)}
    with torch.no_grad():  # in training, the model returns no logits
        out = model(**{name: x for name, x in mine.items() if name != "labels"})
    parts["logits"] = runs.logits_part(config, sp, out.logits)
    spans = sp.layout.spans(config.tokens, sp.rank)
    return runs.make_report(config, sp, references, parts, {"pictures": inputs.pictures}, spans)
