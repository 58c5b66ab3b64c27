"""The job of `longspan generate`: open the prompt, start the ranks, generate, print the report."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from longspan.core.formatting import size
from longspan.generate.config import GenerateConfig
from longspan.ranks import launch

if TYPE_CHECKING:
    from longspan.generate.prompt import Prompt


def run(config: GenerateConfig) -> int:
    """Generate on ranks started here or by torchrun, and return the exit code 0; raise as `launch.launch`."""
    from longspan.generate.rank import generate

    report = launch.run(config, open_fitting_prompt, generate)
    if launch.is_first_rank():
        print(json.dumps(report)) if config.json else print(format_report(report), file=sys.stderr)
    return 0


def open_fitting_prompt(config: GenerateConfig) -> Prompt:
    """Return the prompt; raise if it does not fit the model or, by the planner, memory."""
    from longspan.generate.fit import check_memory, choose_weights
    from longspan.generate.prompt import open_prompt
    from longspan.hf.preconditions import check_axes

    prompt = open_prompt(config)
    config, reason = choose_weights(config, prompt.model_config, prompt.tokens)
    check_axes(prompt.origin.on_meta, config.parallel, fsdp=config.fsdp)
    planned = check_memory(config, prompt.model_config, prompt.tokens)
    if launch.is_first_rank():
        weights = "" if reason is None else f"\nweights: {reason}"
        print(f"prompt: {prompt.tokens:,} tokens; {planned}{weights}", file=sys.stderr, flush=True)
    return replace(prompt, flags=config)


def format_report(report: dict[str, Any]) -> str:
    """Return the report as lines of text."""
    offloaded, speed = report.get("device_cache_bytes"), report["tokens_per_s"]
    reused = f" ({report['reused_tokens']:,} from --cache-dir)" if report["reused_tokens"] else ""
    lines = [
        f"prompt  {report['prompt_tokens']:,} tokens{reused}, {report['prefill_tokens_per_s']:,.0f} tokens/s; first "
        f"token after {report['first_token_s']:.2f} s",
        f"new     {report['new_tokens']:,} tokens, ended by {report['ended_by']}"
        + ("" if speed is None else f"; {speed:,.1f} tokens/s"),
        f"cache   {size(max(report['cache_bytes']))}{' in host memory' if offloaded else ''} per rank for "
        f"{report['cached_tokens']:,} tokens",
    ]
    if report["state_bytes"]:
        lines.append(f"        {size(report['state_bytes'])} of it states of recurrent layers")
    if offloaded:
        lines.append(f"        {size(max(offloaded))} of it at once on the device")
    return "\n".join(lines)
