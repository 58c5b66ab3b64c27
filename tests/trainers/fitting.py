"""Runs of Hugging Face's Trainer, plain and sharded, on the same small data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import longspan
from longspan.comm.mesh import MeshGroups
from longspan.plan.shape import Tuning
from tests.models import build
from tests.train.chats import WORDS

PAD, IGNORED = 0, -100


class Samples(torch.utils.data.Dataset[dict[str, Any]]):
    """Sequences of very different lengths, with labels on a different part of each."""

    def __init__(self, count: int, seed: int, longest: int = 23) -> None:
        g = torch.Generator().manual_seed(seed)
        self.samples = []
        for at in range(count):
            n = int(torch.randint(5, longest + 1, (1,), generator=g))
            ids = torch.randint(3, 61, (n,), generator=g)
            labels = ids.clone()
            labels[: at % 4 * n // 5] = IGNORED
            self.samples.append({"input_ids": ids, "labels": labels, "attention_mask": torch.ones_like(ids)})

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, at: int) -> dict[str, Any]:
        return self.samples[at]


def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Pad to the longest."""
    n = max(len(s["input_ids"]) for s in samples)
    fill = {"input_ids": PAD, "labels": IGNORED, "attention_mask": 0}
    return {
        key: torch.stack([torch.nn.functional.pad(s[key], (0, n - len(s[key])), value=value) for s in samples])
        for key, value in fill.items()
    }


def arguments(out: Path, **changes: Any) -> Any:
    """Return arguments for twenty steps of four sequences."""
    from transformers import TrainingArguments

    options: dict[str, Any] = {
        "output_dir": str(out), "max_steps": 20, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4,
        "learning_rate": 3e-3, "lr_scheduler_type": "linear", "warmup_steps": 3, "logging_steps": 1,
        "max_grad_norm": 0.5,
        "report_to": "none", "use_cpu": True, "save_strategy": "no", "disable_tqdm": True, "seed": 7,
        "logging_nan_inf_filter": False, "dataloader_pin_memory": False,
    }  # fmt: skip
    return TrainingArguments(**(options | changes))


def quiet() -> None:
    """Print only warnings."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    from transformers.trainer_callback import PrinterCallback

    PrinterCallback.on_log = lambda *_, **__: None  # type: ignore[method-assign]


def plain(
    out: Path, family: Any = "Llama", lora: bool = False, resume: str | None = None, **changes: Any
) -> list[dict[str, Any]]:
    """Return the log of one process. Its evaluation is one batch, so that the loss is the mean over all tokens."""
    from transformers import Trainer

    quiet()
    trainer = Trainer(
        _model(family, lora),
        arguments(out, **{**changes, "per_device_eval_batch_size": 10}),
        collate,
        Samples(64, 1),  # type: ignore[arg-type]
        Samples(10, 2),  # type: ignore[arg-type]
    )
    trainer.train(resume_from_checkpoint=resume)
    return list(trainer.state.log_history)


def sharded(mesh: dict[str, int], out: Path, changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the log of a sharded trainer, by `longspan.trainer`, on a mesh."""
    with as_launched():
        trainer = made(mesh, out, **changes)
        trainer.train(resume_from_checkpoint=changes.get("resume_from_checkpoint"))
    return list(trainer.state.log_history)


def sharded_alone(out: Path, lora: bool = False, **changes: Any) -> list[dict[str, Any]]:
    """Return the log of a sharded trainer on one process without a process group."""
    from transformers import Trainer

    quiet()
    sp = longspan.SequenceSharding(MeshGroups("cpu"))
    options = {"per_device_eval_batch_size": 10, **changes}
    trainer = longspan.trainer(Trainer)(
        _model("Llama", lora), arguments(out, **options), collate, Samples(64, 1), Samples(10, 2), sp=sp
    )  # type: ignore[call-arg, arg-type]
    trainer.train(resume_from_checkpoint=changes.get("resume_from_checkpoint"))
    return list(trainer.state.log_history)


@contextlib.contextmanager
def as_launched() -> Iterator[None]:
    """Set torchrun's environment of this rank, which accelerate reads."""
    mine, world = str(dist.get_rank()), str(dist.get_world_size())
    with pytest.MonkeyPatch.context() as patch:
        for name in ("RANK", "LOCAL_RANK"):
            patch.setenv(name, mine)
        for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            patch.setenv(name, world)
        yield


def made(
    mesh: dict[str, int], out: Path, family: Any = "Llama", lora: bool = False, fsdp: bool = True, **changes: Any
) -> Any:
    """Return a sharded trainer."""
    from transformers import Trainer

    quiet()
    sp = longspan.SequenceSharding(longspan.init_mesh(**mesh))
    batch = {
        name: changes.pop(name, 4) // sp.data_size
        for name in ("per_device_train_batch_size", "per_device_eval_batch_size")
    }
    changes.pop("resume_from_checkpoint", None)
    mine = ("callbacks", "compute_metrics", "compute_loss_func", "memory", "logits", "kernel", "tensor_style",
            "shared_prefixes", "elastic", "experts", "optimizer_cls_and_kwargs", "loss_by_position")  # fmt: skip
    own = {name: changes.pop(name) for name in mine if name in changes}
    return longspan.trainer(Trainer)(
        _model(family, lora), arguments(out, **batch, **changes), collate, Samples(64, 1), Samples(10, 2),
        sp=sp, fsdp=fsdp, **own,
    )  # type: ignore[call-arg, arg-type]  # fmt: skip


def _model(family: Any, lora: bool) -> Any:
    """Return a model of a family, or the one that a function makes."""
    model = family() if callable(family) else build(family)
    if not lora:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], lora_dropout=0.0))


def tuned_model(model: Any, tuning: Tuning | None) -> Any:
    """Return a model that trains the weights that the planner is told of."""
    if tuning is None:
        return model
    if tuning.quantize:
        from longspan.hf.weights.quantized import nf4

        quantized = {"quantization_config": nf4(torch.float32), "device_map": {"": "cpu"}}
        model = type(model).from_pretrained(None, config=model.config, state_dict=model.state_dict(), **quantized)
    if tuning.lora is None:
        for name, p in model.named_parameters():
            p.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in tuning.freeze))
        return model
    import peft

    return peft.get_peft_model(
        model, peft.LoraConfig(r=tuning.lora, target_modules=list(tuning.targets) or "all-linear")
    )


COMMON: dict[str, Any] = {
    "max_steps": 4, "learning_rate": 3e-3, "logging_steps": 1, "report_to": "none", "use_cpu": True,
    "save_strategy": "no",
    "disable_tqdm": True, "seed": 7, "gradient_checkpointing": False, "bf16": False, "dataloader_pin_memory": False,
    "max_length": 64,
}  # fmt: skip


def sentence(at: int, least: int = 3, most: int = 17) -> str:
    g = torch.Generator().manual_seed(at)
    n = int(torch.randint(least, most, (1,), generator=g))
    return " ".join(WORDS[int(i)] for i in torch.randint(len(WORDS), (n,), generator=g))
