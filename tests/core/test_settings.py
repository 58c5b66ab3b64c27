"""Values are written as the YAML that they are read from."""

from __future__ import annotations

import yaml

from longspan.core.cache import CacheConfig
from longspan.core.memory import LONGEST
from longspan.core.parallel import ParallelConfig
from longspan.core.settings import changed, to_yaml


def test_only_what_differs_from_the_default_is_written() -> None:
    text = to_yaml({**changed(ParallelConfig(ring=2, layout="contiguous")), "cache": changed(CacheConfig("int8"))})
    assert text == "ring: 2\nlayout: contiguous\ncache: {dtype: int8}\n"
    assert changed(ParallelConfig()) == changed(CacheConfig()) == {}


def test_what_is_written_is_read() -> None:
    texts = [
        "yes",
        "Off",
        "n",
        "null",
        "1e5",
        "007",
        "",
        "a: b",
        "- x",
        "#",
        "{",
        "it's",
        'a "b"',
        "~",
        "ü\n",
        "a/b-c.d",
    ]
    values = {"texts": texts, "memory": changed(LONGEST), "number": 2.5, "whole": 3, "flag": False, "none": None}
    assert yaml.safe_load(to_yaml(values)) == values
