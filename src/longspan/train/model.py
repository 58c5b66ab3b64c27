"""The model and the tokenizer of a run. Each rank reads the rows of its shards alone; LoRA is put on before that."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy
from transformers import AutoModelForSequenceClassification
from trl import get_peft_config

from longspan.compat.reading import tower_modules
from longspan.core.errors import LongspanError, require
from longspan.core.memory import Memory
from longspan.hf.loading import load_sharded
from longspan.hf.model.pretrained import (
    base_of,
    first_line,
    has_tokenizer,
    is_adapter,
    language_model_class,
    load_processor,
    read_adapter,
    read_model_config,
    takes_pictures,
    without_dropout,
)
from longspan.hf.model.prompts import BYTES, load_tokenizer
from longspan.hf.model.support import transformers_model
from longspan.hf.weights.origin import Origin, with_adapter
from longspan.plan.from_model import weights_named
from longspan.train.arguments import KERNELS, Arguments

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding

KEY, TEACHER = "model_name_or_path", "teacher_model_name_or_path"
_WEIGHTS = (".safetensors", ".bin", ".index.json")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def name_of(arguments: Arguments) -> str:
    """Return the folder or name of the model; a revision of the hub's is fetched to a folder."""
    return _found(KEY, arguments.model.model_name_or_path, arguments.model.model_revision)


def _found(key: str, name: str | None, revision: str | None) -> str:
    if name is None:
        raise LongspanError(
            f"train needs `{key}`: a name or folder of a Hugging Face model, of a LoRA adapter, or a folder or file "
            "with nothing but a config.json, for random weights"
        )
    if revision not in (None, "main") and not Path(name).exists():
        from huggingface_hub import snapshot_download

        try:
            return str(snapshot_download(name, revision=revision))
        except (OSError, ValueError) as error:  # also those of huggingface_hub
            key = f"{key.removesuffix('name_or_path')}revision"
            raise LongspanError(f"{key}: {revision} of {name} cannot be fetched: {first_line(error)}") from error
    return str(name)


def is_random(name: str) -> bool:
    """Return whether a folder or file has a config and no weights."""
    path = Path(name)
    if path.is_dir():
        return not is_adapter(name) and not any(file.name.endswith(_WEIGHTS) for file in path.iterdir())
    return path.is_file()


def read_config(arguments: Arguments, context: int) -> Any:
    """Return the model's config with the values of `model_init_kwargs`; raise if it has too few positions."""
    config = read_model_config(KEY, name_of(arguments), context, arguments.training.model_init_kwargs, weights=False)
    if arguments.ours.dropout is not None or arguments.trainer.reference:  # rewards would be noise
        config = without_dropout(config)
    if arguments.method == "reward":
        config.num_labels = 1
    return config


def origin_of(arguments: Arguments, config: Any) -> Origin:
    """Return the source of the model's weights."""
    model, training = arguments.model, arguments.training
    if training.trust_remote_code:
        raise LongspanError("trust_remote_code: longspan shards models of transformers alone; leave it out")
    if model.load_in_8bit or (model.load_in_4bit and (model.bnb_4bit_quant_type, model.use_peft) != ("nf4", True)):
        raise LongspanError(
            "weights of 8 bits, of fp4, or quantized ones without LoRA are not supported; use `load_in_4bit: true` "
            "with `use_peft: true`"
        )
    if model.load_in_4bit:
        require("load_in_4bit", "bitsandbytes", "accelerate")
    name = name_of(arguments)
    auto = AutoModelForSequenceClassification if arguments.method == "reward" else language_model_class(config)
    dtype = _DTYPES.get(str(model.dtype)) or config.dtype or torch.float32
    computed = torch.bfloat16 if training.bf16 else torch.float32
    return Origin(
        auto,
        config,
        dtype,
        None if is_random(name) else base_of(KEY, name),
        training.seed,
        f"{KEY} {name}",
        strict=arguments.method != "reward",  # its head is new
        four_bits=computed if model.load_in_4bit else None,
    )


def teacher_of(arguments: Arguments, student: Any, context: int) -> Origin | None:
    """Return the source of the teacher's weights, or None; `student`: the config of the model that it teaches.

    Raises:
        LongspanError: if none is given, its positions end before the context, or it has another vocabulary.
    """
    training = arguments.training
    if not arguments.trainer.teacher:
        return None
    name = _found(TEACHER, training.teacher_model_name_or_path, getattr(training, "teacher_model_revision", None))
    config = read_model_config(TEACHER, name, context, training.teacher_model_init_kwargs, weights=False)
    sizes = [each.get_text_config().vocab_size for each in (config, student)]
    if sizes[0] != sizes[1]:
        raise LongspanError(
            f"{TEACHER} {name}: its vocabulary has {sizes[0]:,} tokens and the model's {sizes[1]:,}, so their "
            "predictions cannot be compared; give a teacher with the model's tokenizer"
        )
    base = None if is_random(name) else base_of(TEACHER, name)
    return Origin(
        language_model_class(config),
        config,
        _DTYPES.get(str(arguments.model.dtype)) or config.dtype or torch.float32,
        base,
        training.seed,
        f"{TEACHER} {name}",
        adapter=name if is_adapter(name) else None,
    )


def prepare_of(arguments: Arguments, *, images: bool) -> Callable[[Any], Any]:
    """Return the function that freezes weights of a loaded model, or puts LoRA on it.

    A vision tower is frozen unless the data has `images`.
    """
    ours, model_arguments, name = arguments.ours, arguments.model, name_of(arguments)
    if is_adapter(name) and arguments.trainer.reference:
        raise LongspanError(
            f"{KEY} {name}: {arguments.method} compares with the model before training, and without its LoRA that is "
            "the base model; merge the adapter first (peft.PeftModel.from_pretrained(base, adapter).merge_and_unload())"
        )
    if ours.freeze and (model_arguments.use_peft or is_adapter(name)):
        raise LongspanError("freeze: LoRA freezes all weights of the model; choose by lora_target_modules instead")
    if model_arguments.use_peft:
        require("use_peft", "peft")

    def prepare(model: Any) -> Any:
        tower = tower_modules(model)
        if is_adapter(name):
            model = _continued(model, name)
        elif model_arguments.use_peft:
            model = _with_lora(model, arguments)
        else:
            for parameter in weights_named(model, ours.freeze):
                model.get_parameter(parameter).requires_grad_(False)
        for module in () if images else tower:
            module.requires_grad_(False)
        if not any(p.requires_grad for p in model.parameters()):
            raise LongspanError(f"freeze: {' '.join(ours.freeze)} freezes all weights; leave some to train")
        return model.train()

    return prepare


def _with_lora(model: Any, arguments: Arguments) -> Any:
    import peft

    config: Any = get_peft_config(arguments.model)
    if isinstance(config.target_modules, str) and config.target_modules.isidentifier():
        # TRL makes a string of a list of one name, and PEFT takes a string for a pattern.
        config.target_modules = {config.target_modules}
    name = name_of(arguments)
    # PEFT records it; absolute, as the adapter is used in other working directories.
    model.name_or_path = str(Path(name).absolute()) if Path(name).exists() else name
    config.base_model_name_or_path = model.name_or_path
    if arguments.method == "reward":
        config.task_type = "SEQ_CLS"
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(arguments.training.seed)  # equal on every rank
            return peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    except Exception as error:  # PEFT raises any kind
        raise LongspanError(f"use_peft: LoRA cannot be put on the model: {first_line(error)}") from error


def _continued(model: Any, name: str) -> Any:
    """Return the model with the LoRA of a folder, which is trained further."""
    settings = json.loads(read_adapter(name)[0])
    if settings.get("peft_type") != "LORA" or settings.get("modules_to_save"):
        raise LongspanError(
            f"{KEY} {name} is no plain LoRA, which alone is trained further; merge it first "
            "(peft.PeftModel.from_pretrained(base, adapter).merge_and_unload().save_pretrained(folder))"
        )
    return with_adapter(model, name, model.config.name_or_path, inference_mode=False)


def _frozen(model: Any) -> Any:
    return model.requires_grad_(False).eval()


def load(
    arguments: Arguments, origin: Origin, sp: SequenceSharding, memory: Memory, *, images: bool, frozen: bool = False
) -> Any:
    """Return the sharded model, or a `frozen` one that it is compared with. Collective."""
    ours, bf16 = arguments.ours, arguments.training.bf16
    sharded = sp.shards_weights(fsdp=ours.shard_weights, cpu_offload=memory.cpu_offload)
    reduced = torch.bfloat16 if ours.grad_dtype == "bf16" else torch.float32
    mixed = sharded and (bf16 or reduced == torch.bfloat16)
    if frozen and sharded and bf16:  # FSDP would cast it each time
        origin = dataclasses.replace(origin, dtype=torch.bfloat16)
    attention = arguments.model.attn_implementation
    model = load_sharded(
        origin,
        sp,
        prepare=_frozen if frozen else prepare_of(arguments, images=images),
        whole=_computes_with_weights(arguments),
        fsdp=ours.shard_weights,
        mp_policy=MixedPrecisionPolicy(torch.bfloat16 if bf16 else None, reduced) if mixed else None,
        kernel=KERNELS[attention] if attention in KERNELS and ours.kernel == "auto" else ours.kernel,
        memory=memory,
        tensor_style=ours.parallel.tensor_style,
        experts=ours.parallel.experts,
    )
    inner: Any = transformers_model(model)
    inner.is_loaded_in_4bit = inner.is_quantized = False  # or TRL would cast the sharded adapter
    return model


def _computes_with_weights(arguments: Arguments) -> bool:
    """Return whether PEFT copies weights of the base model, or computes with them."""
    model = arguments.model
    copies = model.lora_modules_to_save or arguments.method == "reward"  # the head
    return bool(model.use_dora or (model.use_peft and copies))


def tokenizer_of(arguments: Arguments, config: Any) -> Any:
    """Return the tokenizer: that of `tokenizer`, the model's, or its base model's, or bytes for random weights."""
    name, ours = name_of(arguments), arguments.ours
    folder = str(Path(name).parent) if Path(name).is_file() else name
    found = ours.tokenizer or (folder if has_tokenizer(folder) else base_of(KEY, name) if is_adapter(name) else None)
    if found is None and not is_random(name):
        found = folder  # raises, and says what to give
    tokenizer = load_tokenizer(found or BYTES)
    size = config.get_text_config().vocab_size
    if len(tokenizer) > size:
        raise LongspanError(
            f"the tokenizer {found or BYTES} has {len(tokenizer)} ids, the model's vocabulary only {size}; use the "
            f"model's own tokenizer, or a config with vocab_size {len(tokenizer)} or more"
        )
    return tokenizer


def processor_of(config: Any, name: str, tokenizer: Any) -> Any:
    """Return the processor of a vision-language model, which reads the images of chats, with our tokenizer."""
    if not takes_pictures(config):
        raise LongspanError(
            f"the data has images, and the model ({config.model_type}) has no vision tower that longspan shards; give "
            "a vision-language model, or data without `images`",
            code="LS505",
        )
    processor = load_processor(name)
    tokenizer.chat_template = processor.chat_template = tokenizer.chat_template or processor.chat_template
    processor.tokenizer = tokenizer
    return processor
