"""Where the weights of a model that is sharded already come from: files that every rank reads, or the first rank."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.comm.consistency import gather_numbers
from longspan.comm.digests import local_part
from longspan.comm.errors import on_every_rank
from longspan.comm.objects import gather_objects
from longspan.compat.transformers_api import keys_in_model
from longspan.core.errors import LongspanError
from longspan.hf.pretrained import check_weights, first_line, kind_of
from longspan.hf.weights.files import WeightFiles
from longspan.hf.weights.meta_init import put, stub, tied_names
from longspan.hf.weights.shard_slices import box_of, elements, my_box

if TYPE_CHECKING:
    from longspan.comm.mesh import SequenceSharding


@dataclass(frozen=True)
class Origin:
    """What a model is made from.

    Attributes:
        auto: the `AutoModel...` that chooses its class.
        config: its Hugging Face config, which is left as it is.
        dtype: of its weights.
        name: the folder, or the model on the hub, whose weights it has; None if they are drawn from `seed`.
        adapter: the folder of a PEFT adapter to add to it; None for none.
        seed: for random weights.
        said: what it is called in messages.
        strict: whether weights that are missing are refused, and those that are too many named.
        options: of `auto.from_config` and `auto.from_pretrained`.
    """

    auto: Any
    config: Any
    dtype: torch.dtype
    name: str | None = None
    seed: int = 0
    said: str = "the config"
    strict: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)
    adapter: str | None = None

    def build(self) -> Any:
        """The whole model on the CPU, as one process has it. Seeds torch.

        Raises:
            LongspanError: if transformers cannot make such a model of it, or weights are missing.
        """
        torch.manual_seed(self.seed)
        options = {"config": copy.deepcopy(self.config), "dtype": self.dtype, **self.options}
        with self._refusing():
            if self.name is None:
                return self.auto.from_config(**options)
            model, info = self.auto.from_pretrained(self.name, output_loading_info=True, **options)
            self.check(info)
        return self.adapted(model)

    def adapted(self, model: Any) -> Any:
        """Return the model with the adapter that PEFT adds to it; the adapter's weights train like all others.

        Raises:
            LongspanError: if the adapter does not fit the model, or changes more than the model's layers.
        """
        if self.adapter is None:
            return model
        try:
            import peft
        except ImportError as error:
            raise LongspanError(f"{self.adapter} is a PEFT adapter; install peft: pip install peft") from error
        before = list(model.parameters())
        trained = {id(p) for p in before if p.requires_grad}
        try:
            if peft.PeftConfig.from_pretrained(self.adapter).is_prompt_learning:
                raise LongspanError("prompt learning puts tokens before the text, which is not supported")
            # In the model's dtype, not in fp32: FSDP shards a layer's weights in one dtype.
            wrapped = peft.PeftModel.from_pretrained(model, self.adapter, autocast_adapter_dtype=False)
            found = peft.utils.load_peft_weights(self.adapter, device="cpu").keys()
        except Exception as error:  # whatever PEFT raises
            raise LongspanError(
                f"the adapter {self.adapter} cannot be put on its base model {self.name}: {first_line(error)}"
            ) from error
        differ = sorted(found ^ peft.get_peft_model_state_dict(wrapped).keys())
        if differ:
            raise LongspanError(
                f"the adapter {self.adapter} does not fit its base model {self.name}: only one of the two has "
                f"{differ[0]}; check base_model_name_or_path in adapter_config.json"
            )
        known = {id(p) for p in before}
        for p in wrapped.parameters():
            if id(p) in trained or id(p) not in known:
                p.requires_grad_(True)
        return wrapped.get_base_model()

    def on_meta(self) -> Any:
        """The model on the meta device.

        Raises:
            LongspanError: as `build`.
        """
        with self._refusing(), torch.device("meta"):
            return self.auto.from_config(copy.deepcopy(self.config), dtype=self.dtype, **self.options)

    def check(self, info: dict[str, Any]) -> None:
        """Look at what `from_pretrained` says of the weights' names, if this origin is strict."""
        if self.strict:
            check_weights(self.said, info)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except LongspanError:
            raise
        except Exception as error:
            kinds = {"AutoModelForMaskedLM": "masked LM", "AutoModelForCausalLM": "causal LM"}
            wanted = kinds.get(self.auto.__name__, "classifier")
            why = first_line(error)
            if (kind := kind_of(self.config)) is not None:
                why = f"it is {kind} ({self.config.model_type})"
            raise LongspanError(f"{self.said} cannot be made into a {wanted}: {why}") from error


@dataclass(frozen=True)
class Weights:
    """What is to be filled.

    Attributes:
        parameters: sharded by FSDP2, over a tensor group, or both, by their first names in the model as loaded.
        dtypes: that they have when they are loaded, which may not be what they are kept in.
    """

    parameters: Mapping[str, nn.Parameter]
    dtypes: Mapping[str, torch.dtype]


class Files:
    """Files that each rank reads its own rows from.

    Args:
        model: its weights are stubs; parameters are tied, buffers have their values.
        keys: by name, what the files call it; of tied names only one.
        files: None where nothing is read.
    """

    def __init__(self, model: Any, keys: Mapping[str, str], files: WeightFiles | None) -> None:
        self.model = model
        self.files = files
        self.keys = dict(keys)
        for tied in tied_names(model):
            self.keys[tied[0]] = next(keys[name] for name in tied if name in keys)
        for name, x in list(model.named_buffers(remove_duplicate=False)):
            if name in keys:  # FSDP does not shard buffers
                values = torch.zeros(x.shape, dtype=x.dtype)
                put(model, name, values if files is None else values.copy_(files.read(keys[name])))

    @classmethod
    def of(cls, origin: Origin, files: WeightFiles | None, later: bool) -> Files | None:
        """None where the files do not hold the model's weights as they are: transformers has to make it then.

        Raises:
            LongspanError: if a buffer cannot be read.
        """
        if (files is None and not later) or getattr(origin.config, "quantization_config", None) is not None:
            return None
        meta = origin.on_meta()
        own = meta.state_dict()
        groups = [*tied_names(meta), *([name] for name, _ in meta.named_buffers() if name in own)]
        # As a folder has them: of tied weights one.
        shapes = files.shapes() if files is not None else {each[0]: tuple(own[each[0]].shape) for each in groups}
        names = keys_in_model(meta, shapes)
        if names is None or any(name in own and shapes[key] != tuple(own[name].shape) for key, name in names.items()):
            return None
        keys = {name: key for key, name in names.items() if name in own}
        unique = len(keys) == sum(name in own for name in names.values())
        # What is missing, and what is tied and there twice, transformers judges.
        groups = [*tied_names(meta), *([name] for name, _ in meta.named_buffers() if name in own)]
        if not unique or any(sum(name in keys for name in each) != 1 for each in groups):
            return None
        model, info = _hollow(origin, type(meta), {key: (shapes[key], own.get(names[key])) for key in shapes})
        if info["missing_keys"] or info["mismatched_keys"]:
            return None
        if files is not None:
            origin.check(info)
        return cls(model, keys, files)

    def fill(self, weights: Weights, sp: SequenceSharding) -> None:
        """Read this rank's rows. Collective.

        Raises:
            LongspanError: on every rank, if one cannot read.
        """
        files = self.files
        if files is None:
            return

        def read() -> None:
            for name, p in weights.parameters.items():
                assert isinstance(p, DTensor)
                rows, *rest = my_box(p, sp)
                if rows.start < rows.stop:
                    part = files.read(self.keys[name], rows.start, rows.stop)[:, *rest]
                    local_part(p).copy_(part.to(weights.dtypes[name]))

        on_every_rank(read, sp.mesh_group)


def _hollow(
    origin: Origin, kind: Any, tensors: Mapping[str, tuple[tuple[int, ...], Tensor | None]]
) -> tuple[Any, dict[str, Any]]:
    """The model without memory for its weights, by transformers itself: it ties weights, chooses dtypes and makes
    buffers that are in no file.

    Args:
        origin: of the model.
        kind: its class.
        tensors: by the files' keys, shapes, and what they are in the model.

    Returns:
        The model, and what `from_pretrained` says of the keys.
    """
    state = {key: stub(shape, origin.dtype if mine is None else mine.dtype) for key, (shape, mine) in tensors.items()}
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()  # nothing is loaded yet
    try:
        found: tuple[Any, dict[str, Any]] = kind.from_pretrained(
            None,
            config=copy.deepcopy(origin.config),
            state_dict=state,
            dtype=origin.dtype,
            output_loading_info=True,
            **origin.options,
        )
    finally:
        if shown:
            logging.enable_progress_bar()
    return found


@dataclass(frozen=True)
class _Tensor:
    """What a parameter or buffer is on the first rank; `first` is the first of its names."""

    first: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    trained: bool


class FirstRank:
    """The first rank's whole model, whose rows are sent to the others, a parameter at a time.

    Args:
        model: without memory for its parameters, and with buffers.
        whole: the model on the first rank, None on the others.
        parameters: of the model, by name.
    """

    def __init__(self, model: Any, whole: Any, parameters: Mapping[str, _Tensor]) -> None:
        self.model = model
        self.whole = whole
        self.values = None if whole is None else dict(whole.named_parameters())  # an adapter would rename them
        self.parameters = parameters

    @classmethod
    def of(cls, origin: Origin, sp: SequenceSharding) -> FirstRank | None:
        """None where the model has other weights than one made from its config. Collective.

        Raises:
            LongspanError: on every rank, if the first one cannot make the model.
        """
        whole, model = on_every_rank(
            lambda: (_build_apart(origin) if _is_first(sp) else None, origin.on_meta()), sp.mesh_group
        )
        assert sp.mesh_group is not None
        said = gather_objects(None if whole is None else (_parameters(whole), _buffers(whole)), sp.mesh_group)
        parameters, buffers = said[0]
        alike = _parameters(model).keys() == parameters.keys() and _buffers(model).keys() == buffers.keys()
        if not all(row[0] for row in gather_numbers([alike], sp.mesh_group, sp.device)):
            return None
        made: dict[str, nn.Parameter] = {}
        for name, x in parameters.items():
            if x.first == name:
                made[name] = nn.Parameter(stub(x.shape, x.dtype), requires_grad=x.trained)
            put(model, name, made[x.first])
        values = {} if whole is None else dict(whole.named_buffers(remove_duplicate=False))
        for name, x in buffers.items():
            data = values[name].to(sp.device) if values else torch.empty(x.shape, dtype=x.dtype, device=sp.device)
            data = data.clone(memory_format=torch.contiguous_format)  # longrope writes into its buffer in a forward
            dist.broadcast(_bytes(data), group_src=0, group=sp.mesh_group)
            put(model, name, data.cpu())
        return cls(model, whole, parameters)

    def fill(self, weights: Weights, sp: SequenceSharding) -> None:
        """Send, and take, rows. Collective; every rank calls it with the same names."""
        whole = self.values
        for name, p in weights.parameters.items():
            assert isinstance(p, DTensor)
            boxes = [box_of(p, sp, rank, t) for rank in range(sp.world_size) for t in range(sp.tensor_size)]
            most = max(map(elements, boxes))
            mine = torch.empty(most, dtype=self.parameters[name].dtype, device=sp.device)
            sent = None
            if whole is not None:
                values = whole[name].detach().to(sp.device)
                # Some have fewer rows, and all must be of one size.
                parts = (values[box].flatten() for box in boxes)
                sent = [_bytes(y if len(y) == most else torch.cat([y, mine[len(y) :]])) for y in parts]
            dist.scatter(_bytes(mine), sent, group_src=0, group=sp.mesh_group)
            local = local_part(p)
            local.copy_(mine[: local.numel()].view(local.shape))


def _bytes(x: Tensor) -> Tensor:
    """What any backend can send, whatever the dtype."""
    return x.contiguous().view(-1).view(torch.uint8)


def _is_first(sp: SequenceSharding) -> bool:
    return sp.data_rank == sp.rank == sp.tensor_rank == 0


def _build_apart(origin: Origin) -> Any:
    """The other ranks draw no numbers meanwhile, and all go on from the same state."""
    with torch.random.fork_rng(devices=[]):
        return origin.build()


def _parameters(model: nn.Module) -> dict[str, _Tensor]:
    return {
        name: _Tensor(tied[0], tuple(p.shape), p.dtype, p.requires_grad)
        for tied, p in zip(tied_names(model), model.parameters(), strict=True)
        for name in tied
    }


def _buffers(model: nn.Module) -> dict[str, _Tensor]:
    buffers = model.named_buffers(remove_duplicate=False)
    return {name: _Tensor(name, tuple(x.shape), x.dtype, False) for name, x in buffers}
