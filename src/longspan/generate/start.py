"""Start generate and score on a rank: compare the inputs, make the process group, load the model."""

from __future__ import annotations

import sys
import zlib
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from longspan.comm.mesh import SequenceSharding, make_sharding
from longspan.generate.config import ModelFlags
from longspan.hf.loading import load_sharded
from longspan.hf.pretrained import base_of, is_adapter
from longspan.hf.weights.origin import Origin
from longspan.ranks import agreement, launch

if TYPE_CHECKING:
    from collections.abc import Callable

    from longspan.generate.prompt import Prompt
    from longspan.ranks.heartbeat import Heartbeat

Flags = TypeVar("Flags", bound=ModelFlags)


def start(
    config: Flags, heartbeat: Heartbeat, opened: Prompt | None, open_text: Callable[[Flags], Prompt]
) -> tuple[Prompt, SequenceSharding, Any]:
    """Return the prompt, the sharding and the parallelized model. Collective.

    `opened` is the prompt opened by the launcher; None if each rank opens it by `open_text(config)`.

    Raises:
        LongspanError: on every rank: if `open_text` raises, ranks have different inputs, or the model cannot be loaded
            or sharded.
    """
    prompt = agreement.open_together(heartbeat, lambda: open_text(config) if opened is None else opened, _facts)
    config = prompt.flags
    heartbeat.at("loading", unlimited=True)
    if launch.is_first_rank():
        print(f"loading {config.model}", file=sys.stderr, flush=True)
    with launch.stdout_to_stderr():
        from transformers import AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar

        disable_progress_bar()
        sp = make_sharding(config.parallel)
        own = prompt.model_config.dtype or torch.float32
        dtype = {"auto": own, "fp32": torch.float32, "bf16": torch.bfloat16}[config.dtype]
        # From the opened config, whose RoPE scaling may differ from the folder's.
        base, adapter = base_of("--model", config.model), config.model if is_adapter(config.model) else None
        origin = Origin(
            AutoModelForCausalLM, prompt.model_config, dtype, base, label=f"--model {config.model}", adapter=adapter
        )
        model = load_sharded(
            origin, sp, fsdp=config.fsdp, kernel=config.kernel, tensor_style=config.parallel.tensor_style
        )
    return prompt, sp, model.eval()


def _facts(prompt: Prompt) -> dict[str, Any]:
    return {
        **agreement.settings(prompt.flags),
        **agreement.model_facts(prompt.model_config),
        "tokens of the text": f"{prompt.tokens} #{zlib.crc32(prompt.ids.tobytes()):08x}",
    }
