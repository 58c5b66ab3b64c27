"""Only `compat` uses private and version-bound names; the versions of transformers, and the schemas of operators."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import longspan
from longspan.compat import torch_api, torch_attention, transformers_api, versions

pytestmark = pytest.mark.versions

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


def test_the_version_of_transformers_is_that_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyproject.toml's bounds and constraints.txt's pin are those of the warning."""
    major, minor = map(int, versions.TRANSFORMERS.split("."))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert f"transformers>={major}.{minor},<{major}.{minor + 1}" in extras["hf"]
    assert f"\ntransformers=={major}.{minor}." in (ROOT / "constraints.txt").read_text()
    monkeypatch.setattr(versions, "version", lambda _: f"{major}.{minor}.9")
    assert versions.untested() is None
    for other in (f"{major}.{minor}1.0", f"{major}.{minor - 1}.3"):
        monkeypatch.setattr(versions, "version", lambda _, other=other: other)
        assert f"transformers {other} is installed" in str(versions.untested())


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


def test_writes_to_a_tensor_are_counted() -> None:
    x = torch.zeros(2)
    before = torch_api.version_of(x)
    x[:1].add_(1)
    assert torch_api.version_of(x) > before


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


def test_flex_is_that_of_torch() -> None:
    assert callable(torch_attention.flex().BlockMask) and callable(torch_attention.flex().flex_attention)
