"""Check that a transformers model can be sharded, and find the modules that families name differently.

A model is accepted if tokens mix only in attention layers that go through transformers' registry, positions come from
outside, and the loss is per token or per row. Anything else is refused, naming the layer and the reason. `longspan
verify` measures whether the rest is exact.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from longspan.attn.kernels.base import KernelRequest
from longspan.attn.kernels.choice import AnyKernel, choose_kernel
from longspan.attn.mask import Mask
from longspan.attn.score import Scores
from longspan.compat.reading import INDEXED, attention_layers, decoder_layers, mixer_layers, text_modules
from longspan.compat.transformers_api import (
    calls_registry,
    is_hybrid,
    makes_positions,
    router_loss,
    uses_registry,
)
from longspan.core.errors import LongspanError, see
from longspan.core.validation import format_value
from longspan.hf.model.pretrained import kind_of, without_dropout
from longspan.hf.model.vision import core_of, encoders_of
from longspan.losses.load_balancing import balance, balance_sums

HELP = f"it cannot be sharded in this version {see('LS201')}"

# Layers that mix tokens without the attention registry.
_MIXERS = re.compile(
    r"Mamba|DeltaNet|LinearAttention|LightningAttention|Rwkv|RWKV|LSTM|Recurrent|ShortConv|Hyena|Retention|SSM"
)

# Values of a config's `layer_types`: of attention, and, in families with known recurrent layers, of other layers.
_ATTENTION_TYPES = {"full_attention", "sliding_attention", "chunked_attention"}
_MIXER_TYPES = {"linear_attention", "conv", "hybrid", "hybrid_sliding", "moe", "mlp"}

# And of attention to chosen keys, by `model_type`.
_CHOOSING_TYPES = {
    **{family: {"indexed_attention"} for family in INDEXED},
    "deepseek_v4": {"compressed_sparse_attention", "heavily_compressed_attention"},
    "minimax_m3_vl_text": {"minimax_m3_sparse"},
    "qwen4_exp_text": {"indexed_attention"},
}

# Attention to another sequence, by the name of the module or of its class.
_CROSS = re.compile(r"(^|\.)(encoder_attn|cross_?attn|cross_?attention|EncDecAttention)$")

_CLASSIFIERS = ("ForSequenceClassification", "ForTokenClassification")
_VISION_LOSS = "ForConditionalGeneration"  # that of a causal language model

_REFUSED_CONFIG = {
    "alibi": f"every attention layer of {{name}} adds ALiBi biases to its scores; {HELP}",
    "trigram_input": f"the embeddings of {{name}} join each token with its neighbours (trigram_input=True); {HELP}",
    "token_dropout": "{name} scales its embeddings by the share of mask tokens in the whole row (token_dropout=True), "
    "and a rank has only a part of the row; set token_dropout=False in the config",
    "output_attentions": "{name} has output_attentions=True in its config; attention weights are never made here, set "
    "it False",
}
"""Entries of a config that must not be true, and why."""

_REFUSED_LAYERS: tuple[tuple[Callable[[str, nn.Module], object], str], ...] = (
    (lambda path, m: makes_positions(m), f"makes positions of its own from tokens or mask, which are cut here; {HELP}"),
    (
        lambda path, m: _CROSS.search(path) or "CrossAttention" in _kind(m) or getattr(m, "is_cross_attention", False),
        f"is cross attention: it looks at another sequence than its own, with a length of its own; {HELP}",
    ),
    (
        lambda path, m: _kind(m).endswith("Pooler") or path.rpartition(".")[2] == "pooler",
        "looks at the first token, which one rank alone holds; take a model without it (add_pooling_layer=False)",
    ),
)
"""By path and module, what a layer must not be, and why."""

# Config keys of the attention dropout probability.
_DROPOUT_KEYS = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob", "attn_dropout")


def transformers_model(model: nn.Module) -> PreTrainedModel:
    """Return the transformers model: `model` itself, or the one in a PEFT wrapper."""
    unwrap: Any = getattr(model, "get_base_model", None)
    inner = model if unwrap is None else unwrap()
    if not isinstance(inner, PreTrainedModel):
        raise LongspanError(
            f"parallelize needs a transformers model (or a PEFT model around one), got {type(model).__name__}; in a "
            f"custom model, call longspan.attention and shard its batch with longspan.shard_batch"
        )
    return inner


def final_norm(model: nn.Module) -> list[nn.Module]:
    """Return the last norm next to the decoder layers and after them, or an empty list."""
    last = decoder_layers(model)[-1:]
    for owner in model.modules():
        children = list(owner.children())
        lists = [i for i, child in enumerate(children) if isinstance(child, nn.ModuleList) and last == list(child)[-1:]]
        if last and lists:
            after = children[lists[-1] + 1 :]
            norms = [m for m in after if "Norm" in type(m).__name__ and list(m.parameters())]
            return norms[-1:]
    return []


def layers_without_backward(model: PreTrainedModel) -> int:
    """Return how many first decoder layers have no backward, as neither they nor the embeddings are trained."""
    layers, head = decoder_layers(model), model.get_output_embeddings()
    behind = [m for m in (*layers, *final_norm(model), head) if m is not None]
    tied = None if head is None else model.get_input_embeddings().weight
    after = {p for module in behind for p in module.parameters() if p is not tied}
    if any(p.requires_grad and p not in after for p in model.parameters()):
        return 0
    trained = (i for i, layer in enumerate(layers) if any(p.requires_grad for p in layer.parameters()))
    return next(trained, len(layers))


def decoder_of(model: PreTrainedModel) -> nn.Module:
    """Return the child that contains the layers; its output goes into the model's head."""
    layers = set(decoder_layers(model))
    decoder: nn.Module = next(child for child in model.children() if not layers.isdisjoint(child.modules()))
    return decoder


def innermost_decoder(model: PreTrainedModel) -> nn.Module:
    """Return the innermost model that runs all layers: the head of OPT calls it past the model around it."""
    layers = set(decoder_layers(model))
    inner = [m for m in model.modules() if isinstance(m, PreTrainedModel) and m is not model]
    return next((m for m in reversed(inner) if layers <= set(m.modules())), None) or decoder_of(model)


def heads_of(config: Any) -> tuple[int, int]:
    """Return the query and KV heads of an attention layer of a Hugging Face config."""
    text = config.get_text_config()
    return text.num_attention_heads, getattr(text, "num_key_value_heads", None) or text.num_attention_heads


def is_masked_lm(model: PreTrainedModel) -> bool:
    """Return whether the logits at a token predict that token (BERT), so labels are not shifted."""
    return bool(model.loss_type == "ForMaskedLM")


def attention_dropout(model: PreTrainedModel) -> tuple[str, float, str] | None:
    """Return name, probability and config key of the first layer with attention dropout or layerdrop, or None."""
    config = model.config.get_text_config()
    for path, module in model.named_modules():
        p = getattr(module, "layerdrop", None)
        if isinstance(p, float) and p > 0:
            return f"{path} ({type(module).__name__})", p, "layerdrop"
    for path, layer in attention_layers(model).items():
        for name in ("attention_dropout", "attn_dropout", "dropout"):
            value = getattr(layer, name, None)
            p = value.p if isinstance(value, nn.Dropout) else value
            if isinstance(p, int | float) and p > 0:
                return path, float(p), next((k for k in _DROPOUT_KEYS if hasattr(config, k)), name)
    return None


def switch_dropout_off(model: PreTrainedModel) -> None:
    """Set every dropout of the model to 0: in modules, in attributes of layers, and in the config."""
    without_dropout(model.config)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in list(vars(module).items()):
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def draws(module: nn.Module) -> bool:
    """Return whether a layer draws random numbers in training: by dropout, dropped paths, or a router's jitter."""
    numbers = (value for name, value in vars(module).items() if "drop" in name or "jitter" in name)
    return (isinstance(module, nn.Dropout) and module.p > 0) or any(isinstance(p, float) and p > 0 for p in numbers)


def refuse_dropout(dropout: tuple[str, float, str] | None) -> None:
    """Raise if the result of `attention_dropout` is not None."""
    if dropout is not None:
        layer, p, key = dropout
        what = "layerdrop" if key == "layerdrop" else "attention dropout"
        raise LongspanError(
            f"layer {layer} has {what} {p}, which would depend on the number of ranks; switch the model's dropout off "
            f"by longspan.parallelize(..., dropout=0.0) (train: `dropout: 0`), set {key}=0.0 in the config that "
            f"the model is made from, or call model.eval()",
            code="LS202",
        )


def router_top_k(model: PreTrainedModel) -> int | None:
    """Return the experts per token of a mixture of experts whose router loss longspan can compute, else None.

    The family's own load-balancing loss must agree with `longspan.losses.load_balancing` on a small example.
    """
    theirs = router_loss(model)
    top_k = getattr(model, "num_experts_per_tok", None)
    if theirs is None or not isinstance(top_k, int) or not hasattr(model, "router_aux_loss_coef"):
        return None
    draw = torch.Generator().manual_seed(0)
    logits = tuple(torch.randn(12, 5, generator=draw) for _ in range(2))
    real = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1], [1, 1, 1, 0]])
    for mask in (None, real):
        try:
            value = theirs(logits, 5, 2, mask)
        except Exception:  # a function of another form may raise anything
            return None
        ours = balance(balance_sums(logits, 2, mask))
        if not isinstance(value, Tensor) or not torch.allclose(value.double(), ours, rtol=1e-5):
            return None
    return top_k


# ---------------------------------------------------------------------------------------------------------------------
# Checks.


def check_model(
    model: PreTrainedModel, device: torch.device, ring_size: int, kernel: AnyKernel, recompute_all_to_all: bool = False
) -> None:
    """Refuse a model that would not compute the same when its sequence is sharded; it may be on the meta device.

    To recompute the all-to-all, the kernel must return log-sum-exps.
    """
    name, modality, text = type(model).__name__, kind_of(model.config), model.config.get_text_config()
    try:
        _check_family(model, name)
        _check_indexers(model, name, kernel)
        for path, layer in attention_layers(model).items():
            # Autocast or a policy may change the dtype later, so assume one that flash attention supports.
            sinks = getattr(layer, "sinks", None)
            softcap = getattr(layer, "attn_logit_softcapping", None) or getattr(text, "attn_logit_softcapping", None)
            scores = Scores(softcap=softcap, sinks=sinks if isinstance(sinks, Tensor) else None)
            request = KernelRequest(
                Mask(), scores, device, ring=ring_size, dtype=torch.bfloat16, lse=recompute_all_to_all
            )
            try:
                choose_kernel(kernel, request)
            except LongspanError as error:
                raise LongspanError(f"layer {path}: {error}") from error
    except LongspanError as error:
        if modality is None or modality in str(error):
            raise
        raise LongspanError(f"{name} is {modality} that cannot be sharded: {error}") from error


def _check_family(model: PreTrainedModel, name: str) -> None:
    if getattr(model.config, "is_encoder_decoder", False):
        raise LongspanError(
            f"{name} is an encoder-decoder: the cross attention of its decoder looks at another sequence than its own, "
            f"with a length of its own; {HELP}"
        )
    _check_modules(model, name)
    _check_config(model, name)
    layers, mixers = attention_layers(model), mixer_layers(model)
    undeclared = (is_hybrid(model) or core_of(model) is not None) and all(map(calls_registry, layers.values()))
    if not (layers or mixers) or not (uses_registry(model) or undeclared):
        which = f"layer {next(iter(layers))} of {name}" if layers else name
        raise LongspanError(f"{which} does not go through transformers' attention registry; {HELP}")
    losses = (None, "ForCausalLM", "ForMaskedLM", *_CLASSIFIERS)
    if model.loss_type not in losses and not (model.loss_type == _VISION_LOSS and core_of(model) is not None):
        raise LongspanError(
            f"{name} has the loss {model.loss_type}; longspan.parallelize takes causal and masked language models, and "
            f"classifiers of sequences and tokens"
        )
    if model.loss_type == "ForSequenceClassification" and not isinstance(getattr(model, "score", None), nn.Module):
        raise LongspanError(
            f"{name} pools hidden states of its tokens, of which each rank holds a part, before its head; classifiers "
            f"can be sharded whose head `score` scores every token, and that take the last one's (Llama, Qwen, GPT-2)"
        )
    by_rule = bool(encoders_of(model))  # checked with `position_ids`
    if layers and not by_rule and "position_ids" not in inspect.signature(model.forward).parameters:
        raise LongspanError(
            f"{name} takes no position_ids: it counts the tokens itself, and each rank holds a part of them; {HELP}"
        )


def _check_modules(model: PreTrainedModel, name: str) -> None:
    attends = attention_layers(model)
    # Convolutions inside attention (Inkling's, of keys) do not learn of their batch.
    mixers = {n: m for n, m in mixer_layers(model).items() if not any(n.startswith(a + ".") for a in attends)}
    within = {part for mixer in mixers.values() for part in mixer.modules()}
    # The family's own name may sound like a mixer: that of Mamba's norms, or of Kimi-Linear's attention.
    family = name.split("For")[0] if is_hybrid(model) else ""
    for path, module in text_modules(model):
        if isinstance(module, PreTrainedModel):
            continue
        layer = f"layer {path} ({_kind(module)}) of {name}"
        for applies, reason in _REFUSED_LAYERS:
            if applies(path, module):
                raise LongspanError(f"{layer} {reason}")
        by_name = _MIXERS.search(_kind(module).removeprefix(family)) and not any(
            other.startswith(path + ".") for other in mixers
        )
        by_class = isinstance(module, nn.Conv1d | nn.Conv2d | nn.RNNBase)
        if (by_name or by_class) and module not in within:
            raise LongspanError(
                f"{layer} mixes tokens without going through attention; {HELP}; if it calls a recurrent function, "
                f"register that with longspan.register_mixer"
            )


def _kind(module: nn.Module) -> str:
    return type(module).__name__


def _check_config(model: PreTrainedModel, name: str) -> None:
    config = model.config.get_text_config()
    known = _ATTENTION_TYPES | _CHOOSING_TYPES.get(config.model_type, set())
    for index, kind in enumerate(getattr(config, "layer_types", None) or []):
        if kind not in known and not (kind in _MIXER_TYPES and is_hybrid(model)):
            raise LongspanError(f"layer {index} of {name} is of the type {kind}; {HELP}")
    always = {"bloom": "alibi", "mpt": "alibi"}.get(config.model_type)
    for key, reason in _REFUSED_CONFIG.items():
        if getattr(config, key, False) or getattr(model.config, key, False) or key == always:
            raise LongspanError(reason.format(name=name))
    if getattr(config, "output_router_logits", False) and router_top_k(model) is None:
        raise LongspanError(no_router_loss(name))


def _check_indexers(model: PreTrainedModel, name: str, kernel: AnyKernel) -> None:
    config = model.config.get_text_config()
    types = set(getattr(config, "layer_types", None) or ()) & _CHOOSING_TYPES.get(config.model_type, set())
    if not types:
        return
    if kernel != "auto":
        raise LongspanError(
            f"kernel={format_value(kernel)}: layers of {name} attend to the tokens that an indexer chooses, which one "
            f"kernel does; leave `kernel` out"
        )
    layers = attention_layers(model).items()
    shared = next((path for path, m in layers if getattr(m, "is_kv_shared_layer", False)), None)
    if shared is not None:
        raise LongspanError(f"layer {shared} of {name} reads latent vectors of a layer before it; {HELP}")
    key = next(key for key in ("index_topk", "index_topk_blocks", "indexer_budget") if hasattr(config, key))
    top_k = getattr(config, key)
    if not isinstance(top_k, int) or top_k < 1:
        raise LongspanError(
            f"{key}={format_value(top_k)} in the config of {name}: each query attends to so many, at least 1; set it "
            f"as it was when the model was trained"
        )


def no_router_loss(name: str) -> str:
    """Return the error for `output_router_logits=True` on a model whose router loss is unknown."""
    return (
        f"output_router_logits=True asks {name} for an auxiliary loss over all tokens, and it is not the "
        f"load-balancing loss that longspan knows how to sum over the ranks; set output_router_logits=False"
    )
