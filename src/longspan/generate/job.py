"""The job of `longspan generate`: check the config, start the ranks, generate, print the report."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from longspan.generate.config import GenerateConfig, ModelFlags
from longspan.hf.pretrained import check_names
from longspan.ranks import launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from longspan.generate.prompt import Prompt

Flags = TypeVar("Flags", bound=ModelFlags)


def run(config: GenerateConfig) -> int:
    """Generate on ranks started here or by torchrun, and return the exit code 0; raise as `launch.launch`."""
    report = launch_ranks(config, open_fitting_prompt, _generate_rank)
    if launch.is_first_rank():
        print(json.dumps(report)) if config.json else print(format_report(report), file=sys.stderr)
    return 0


def launch_ranks(
    config: Flags, open_text: Callable[[Flags], Prompt], entry: Callable[[Flags, Prompt | None], dict[str, Any]]
) -> dict[str, Any]:
    """Check the config, open the text, and return the first rank's result of `entry(config, text)` on every rank.

    Under torchrun the ranks open the text after the rendezvous, so `entry` gets None.
    """

    def opened(config: Flags) -> Prompt:
        check_names(config.model.model, None, config.tokenizer)
        return open_text(config)

    report: dict[str, Any] = launch.launch(
        entry, config, launch.open_first(config, opened), nproc=config.parallel.ranks
    )
    return report


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


def _generate_rank(config: GenerateConfig, prompt: Prompt | None) -> dict[str, Any]:
    with launch.joined(config.timeouts.timeout, config.timeouts.start_timeout) as watch:
        from longspan.generate.rank import generate

        return generate(config, watch, prompt)


def format_report(report: dict[str, Any]) -> str:
    """Return the report as lines of text."""
    offloaded, speed = report.get("device_cache_bytes"), report["tokens_per_s"]
    reused = f" ({report['reused_tokens']:,} from --cache-dir)" if report["reused_tokens"] else ""
    lines = [
        f"prompt  {report['prompt_tokens']:,} tokens{reused}, {report['prefill_tokens_per_s']:,.0f} tokens/s; first "
        f"token after {report['first_token_s']:.2f} s",
        f"new     {report['new_tokens']:,} tokens, ended by {report['ended_by']}"
        + ("" if speed is None else f"; {speed:,.1f} tokens/s"),
        f"cache   {_bytes(max(report['cache_bytes']))}{' in host memory' if offloaded else ''} per rank for "
        f"{report['cached_tokens']:,} tokens",
    ]
    if report["state_bytes"]:
        lines.append(f"        {_bytes(report['state_bytes'])} of it states of recurrent layers")
    if offloaded:
        lines.append(f"        {_bytes(max(offloaded))} of it at once on the device")
    return "\n".join(lines)


def _bytes(count: int) -> str:
    return f"{count / 1e9:.3f} GB" if count >= 1e7 else f"{count:,} bytes"
