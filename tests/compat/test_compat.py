"""Only `compat` uses private and version-bound names, and each has a fallback or a clear error if it is gone."""

from __future__ import annotations

import ast
import re
import sys
import tomllib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from transformers import PreTrainedConfig, PreTrainedModel, masking_utils

import longspan
from longspan.attn.mask import Mask
from longspan.compat import torch_api, torch_attention, torch_checkpoint, transformers_api
from longspan.compat.versions import TESTED
from longspan.core.errors import LongspanError
from longspan.hf.checks import version
from longspan.hf.forward import registry
from tests.models import build, sharding
from tests.pool import RankPool

pytestmark = [pytest.mark.versions, pytest.mark.oldest]

ROOT = Path(__file__).parents[2]
SOURCES = Path(longspan.__file__).parent

#: Public names that some versions lack, or that belong to the inside of a library.
VERSION_BOUND = {
    "all_gather_into_tensor", "all_gather_single", "reduce_scatter_tensor", "reduce_scatter_single",
    "activation_checkpointing_enable", "gradient_checkpointing_enable", "set_force_sum_reduction_for_comms",
    "queue_callback", "causal_mask_function", "bidirectional_mask_function", "load_balancing_loss_func",
    "AuxRequest", "BlockMask", "create_block_mask",
}  # fmt: skip


def _is_private(name: str) -> bool:
    return name.startswith("_") and not (name.startswith("__") and name.endswith("__")) and name != "_"


def _own_names(tree: ast.Module) -> set[str]:
    """Return private names that a module defines: functions, classes, variables, attributes of `self`."""
    own = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            own.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            own.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            own.add(node.attr)
    return own


def private_names(source: str) -> list[str]:
    """Return every private or version-bound name that a module uses and does not define, as `line: name`."""
    tree = ast.parse(source)
    own = _own_names(tree)

    def is_foreign(name: str) -> bool:
        return (_is_private(name) and name not in own) or name in VERSION_BOUND

    def found() -> Iterator[tuple[int, str]]:
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom | ast.Import):
                names = [part for alias in node.names for part in alias.name.split(".")]
                names += (node.module or "").split(".") if isinstance(node, ast.ImportFrom) else []
                yield from ((node.lineno, name) for name in names if is_foreign(name))
            elif isinstance(node, ast.Attribute) and is_foreign(node.attr):
                of_python = isinstance(node.value, ast.Name) and node.value.id in sys.stdlib_module_names
                if not of_python:  # os._exit
                    yield node.lineno, node.attr
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and "attr" in node.func.id:
                texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
                yield from ((node.lineno, name) for name in texts if is_foreign(name))

    return [f"{line}: {name}" for line, name in sorted(found())]


def test_no_other_module_uses_a_private_name_of_torch_or_transformers() -> None:
    used = {}
    for path in sorted(SOURCES.rglob("*.py")):
        name = path.relative_to(SOURCES).as_posix()
        if not name.startswith("compat/"):
            used[name] = private_names(path.read_text())
    assert {name: names for name, names in used.items() if names} == {}


def test_private_names_of_others_are_found() -> None:
    for line in (
        "from torch.distributed.checkpoint._nested_dict import flatten_state_dict",
        "from torch.distributed.checkpoint.filesystem import _StorageInfo",
        "import torch.distributed._tensor",
        "torch.ops.aten._scaled_dot_product_flash_attention(q, k, v)",
        "mesh['ring', 'ulysses']._flatten('sequence')",
        "local = getattr(p, '_local_tensor', p)",
        "if hasattr(dist, 'all_gather_single'): pass",
        "engine.queue_callback(self._finish)",
        "from transformers.masking_utils import causal_mask_function",
        "class A:\n    def f(self): return self._version",
    ):
        assert private_names(line), line
    for line in (
        "os._exit(1)",
        "class A:\n    def f(self): self._x = 1; return self._x",
        "def _f(): pass\nmodule._f()",
        "x.__dict__, type(x).__name__",
        "from torch.distributed.tensor import DTensor",
    ):
        assert private_names(line) == [], line


def _docstrings(path: Path) -> dict[str, str]:
    """Return the docstrings of a module's public functions, classes and constants."""
    tree = ast.parse(path.read_text())
    docs = {n.name: ast.get_docstring(n) or "" for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    for node, after in zip(tree.body, tree.body[1:], strict=False):
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Name) and isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            docs[target.id] = str(after.value.value)
    return {name: text for name, text in docs.items() if not name.startswith("_")}


@pytest.mark.parametrize("module", ["torch_api", "torch_checkpoint", "transformers_api", "older_mixers", "friends_api"])
def test_every_docstring_has_the_consequence_of_a_missing_name(module: str) -> None:
    docs = _docstrings(SOURCES / "compat" / f"{module}.py")
    assert docs and [name for name, text in docs.items() if "When gone" not in " ".join(text.split())] == []


def test_tested_versions_are_those_of_the_constraints() -> None:
    """The oldest that pyproject.toml allows, and the newest that constraints.txt pins."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = "\n".join([*project["dependencies"], *project["optional-dependencies"]["hf"]])
    pinned = (ROOT / "constraints.txt").read_text()
    for library, versions in TESTED.items():
        floor, top = (
            re.search(rf"^{library}>=([\d.]+)", wanted, re.M),
            re.search(rf"^{library}==(\d+\.\d+)", pinned, re.M),
        )
        assert floor is not None and top is not None
        assert versions == (floor[1], top[1])
    major, minor = TESTED["transformers"][1].split(".")
    assert f"<{major}.{int(minor) + 1}\n" in wanted + "\n"


def test_a_cache_is_accepted_by_either_name() -> None:
    cache, other = object(), object()
    for given, found in (
        ({}, None),
        ({"cache": None, "past_key_values": cache}, cache),
        ({"cache": cache}, cache),
        ({"cache": cache, "past_key_values": cache}, cache),
        ({"cache": cache, "past_key_values": other}, (cache, other)),
    ):
        assert transformers_api.take_cache(given) == found and not given
    assert transformers_api.cache_name(lambda x, past_key_values: x) == "past_key_values"
    assert transformers_api.cache_name(lambda x, cache: x) == "cache"


# ---------------------------------------------------------------------------------------------------------------------
# A version without a name.

_TORCH, _TRANSFORMERS = "torch 2.11 to 2.13", "transformers 5.5 to 5.24"
_MESH = torch.distributed.device_mesh.DeviceMesh

GONE: dict[str, tuple[Any, str, Callable[[], Any], str]] = {
    "groups": (dist.distributed_c10d, "_resolve_process_group", lambda: torch_api.find_group("0"), _TORCH),
    "mesh": (_MESH, "_flatten", lambda: torch_api.flatten_mesh(_MESH.__new__(_MESH), "all"),
             "only one of data, ring and ulysses"),
    "engine": (torch.autograd.Variable, "_execution_engine", lambda: torch_api.when_backward_ends(lambda: None),
               "longspan.parallelize(..., fsdp=True)"),
    "cast": (torch.nn.Module, "_apply", lambda: torch_api.before_casting(torch.nn.Linear(1, 1), print), _TORCH),
    "masks": (masking_utils, "bidirectional_mask_function", lambda: transformers_api.mask_function("bidirectional"),
              _TRANSFORMERS),
    "config": (PreTrainedConfig, "_attn_implementation",
               lambda: transformers_api.set_attention(PreTrainedConfig(), "longspan"), _TRANSFORMERS),
    "registry": (PreTrainedModel, "is_backend_compatible",
                 lambda: transformers_api.uses_registry(PreTrainedModel.__new__(PreTrainedModel)), _TRANSFORMERS),
    "model": (PreTrainedModel, "_from_config",
              lambda: transformers_api.new_model(PreTrainedModel, PreTrainedConfig()), _TRANSFORMERS),
}  # fmt: skip


@pytest.mark.parametrize("what", GONE)
def test_a_missing_name_is_an_error_with_versions_that_have_it(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    where, name, call, hint = GONE[what]
    monkeypatch.delattr(where, name)
    with pytest.raises(LongspanError) as error:
        call()
    message = str(error.value)
    assert name in message and hint in message, message
    assert re.search(r"^(torch|transformers) \d+\.\d+", message), message


def test_a_missing_module_or_attribute_is_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for module, call in (
        ("torch.distributed.checkpoint._nested_dict", lambda: torch_checkpoint.flat_names({})),
        ("torch.nn.attention.flex_attention", torch_attention.flex),
    ):
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, module, None)
            patch.delattr(torch.nn.attention, "flex_attention", raising=False)
            with pytest.raises(LongspanError, match=f"has no {re.escape(module)}, .*torch 2.11 to 2.13"):
                call()
    with pytest.raises(LongspanError, match=r"no aten::_no_such, .*torch 2.11 to 2.13, or kernel='eager'"):
        torch_attention._aten("_no_such")(1, scale=2)


def test_a_tensor_without_versions_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.zeros(2)
    before = torch_api.version_of(x)
    x[:1].add_(1)
    assert torch_api.version_of(x) > before
    monkeypatch.setattr(torch_api, "_HAS_VERSIONS", False)
    with pytest.raises(LongspanError, match=r"Tensor\._version"):
        torch_api.version_of(x)


# ---------------------------------------------------------------------------------------------------------------------
# A version newer than the tested ones.


def _parallelized_untested(ring: int, **changes: Any) -> list[str]:
    """Parallelize twice on a version that counts as untested; return the warnings and the error."""
    sp = sharding(ring=ring)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        patch.setitem(TESTED, "transformers", ("5.5", "5.4"))
        patch.setattr(version, "_checked", set())
        for name, value in changes.items():
            patch.setattr(f"longspan.hf.forward.{name}", value)
        try:
            for _ in range(2):
                longspan.parallelize(build("Llama"), sp, fsdp=False)
            error = ""
        except LongspanError as raised:
            error = str(raised)
    return [*(str(w.message) for w in caught if "newer than" in str(w.message)), error]


def _other_name(forward: Any) -> str:
    return {"cache": "past_key_values", "past_key_values": "cache"}[transformers_api.cache_name(forward)]


def _without_padding(request: registry.MaskRequest, info: Any) -> Mask:
    return Mask(causal=request.causal, window=request.window, chunk_size=request.chunk_size)


@pytest.mark.skipif(
    not hasattr(masking_utils, "remap_positions_for_packed_sequence"),
    reason="transformers before 5.23 counts chunks from the start of the row, whatever position ids say",
)
def test_an_untested_version_is_named_and_checked_once(pool2: RankPool) -> None:
    warning = (
        f"transformers {transformers.__version__} is newer than 5.4, the newest version that longspan was tested with"
    )
    for ring in (1, 2):
        assert pool2.run(_parallelized_untested, ring) == [[warning, ""], [""]]
    for changes, what in (
        ({"binding.cache_name": _other_name}, r"Llama4Text|did not use its cache|passes .*cache"),
        ({"registry._mask": _without_padding}, r"logits of Llama with padding differ by"),
    ):
        errors = [texts[-1] for texts in pool2.run(partial(_parallelized_untested, 2, **changes))]
        assert all(e.startswith(f"{warning}. A check of small models failed") and re.search(what, e) for e in errors)


# ---------------------------------------------------------------------------------------------------------------------
# Operators, by their schemas.

_QKV, _ENDS = "query key value", "cum_seq_q cum_seq_k max_q max_k"
_GRADS = f"grad_out {_QKV} out logsumexp"
SCHEMAS = {
    "flash_cpu": (f"{_QKV} dropout_p is_causal", "attn_mask scale", 2),
    "flash_cpu_backward": (f"{_GRADS} dropout_p is_causal", "attn_mask scale", 3),
    "flash_cuda": (f"{_QKV} dropout_p is_causal return_debug_mask", "scale", 9),
    "flash_cuda_backward": (f"{_GRADS} {_ENDS} dropout_p is_causal philox_seed philox_offset", "scale", 3),
    "flash_varlen": (
        f"{_QKV} {_ENDS} dropout_p is_causal return_debug_mask", "scale window_size_left window_size_right", 5,
    ),
    "flash_varlen_backward": (
        f"{_GRADS} {_ENDS} dropout_p is_causal rng_state unused", "scale window_size_left window_size_right", 3,
    ),
    "cudnn": (f"{_QKV} attn_bias compute_log_sumexp dropout_p is_causal return_debug_mask", "scale", 9),
    "cudnn_backward": (
        f"{_GRADS} philox_seed philox_offset attn_bias {_ENDS} dropout_p is_causal", "scale", 3,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SCHEMAS)
def test_operators_have_the_described_schemas(name: str) -> None:
    """A newer torch may add keywords; positional arguments must keep their places."""
    positional, keywords, results = SCHEMAS[name]
    schema = getattr(torch_attention, name).default._schema
    assert [x.name for x in schema.arguments if not x.kwarg_only] == positional.split()
    assert [x.name for x in schema.arguments if x.kwarg_only][: len(keywords.split())] == keywords.split()
    assert len(schema.returns) == results


def test_flex_and_trees_are_those_of_torch() -> None:
    assert callable(torch_attention.flex().BlockMask) and callable(torch_attention.flex().flex_attention)
    assert torch_api.tree_leaves({"a": [1, (2,)], "b": 3}) == [1, 2, 3]
