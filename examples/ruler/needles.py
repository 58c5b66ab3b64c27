"""RULER's needle tasks (Hsieh et al. 2024, arXiv:2404.06654) for lm-evaluation-harness, made without a network.

As `niah_single_1`, `niah_multikey_1` and `niah_multivalue` of RULER, with repeated sentences as the haystack and words
of its own as keys. Documents are as long as the tokenizer's tokens say. `--metadata` has the lengths:

    python -m longspan.lm_eval run --model longspan --model_args pretrained=MODEL,ring=2,ulysses=2 \\
        --include_path examples/ruler --tasks longspan_needles --metadata '{"max_seq_lengths": [4096, 32768]}'
"""

from __future__ import annotations

import functools
import random
from typing import Any

NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
NEEDLE = "One of the special magic numbers for {key} is: {value}.\n"
ASK = (
    "Some special magic numbers are hidden within the following text. Make sure to memorize them. I will quiz you "
    "about the numbers afterwards.\n{text}What are all the special magic numbers for {key} mentioned in the provided "
    "text?"
)
ANSWER = "The special magic numbers for {key} mentioned in the provided text are"
COLOURS = ("amber", "azure", "coral", "crimson", "golden", "ivory", "jade", "olive", "scarlet", "silver", "teal")
THINGS = (
    "anchor",
    "basket",
    "candle",
    "ladder",
    "lantern",
    "mirror",
    "pebble",
    "ribbon",
    "saddle",
    "trumpet",
    "violin",
)
ANSWER_TOKENS = 128
"""Room that is left for what the model writes."""


def documents(
    tokenizer: Any, length: int, keys: int, values: int, samples: int, seed: int = 42
) -> list[dict[str, Any]]:
    """So many documents of at most `length` tokens, answer included, as near to it as whole lines allow.

    Args:
        tokenizer: counts the tokens.
        length: of a document with its question, and room for the answer.
        keys: that are hidden; one is asked for.
        values: of the key that is asked for.
        samples: documents.
        seed: of keys, values and places.

    Raises:
        ValueError: where not even the question fits.
    """
    draw = random.Random(f"{seed} {length} {keys} {values}")
    made = []
    for _ in range(samples):
        names = [f"{c}-{t}" for c, t in draw.sample([(c, t) for c in COLOURS for t in THINGS], keys)]
        numbers = [str(n) for n in draw.sample(range(1_000_000, 10_000_000), values + keys - 1)]
        needles = [NEEDLE.format(key=names[0], value=n) for n in numbers[:values]]
        needles += [NEEDLE.format(key=k, value=n) for k, n in zip(names[1:], numbers[values:], strict=True)]
        places = [draw.random() for _ in needles]
        written = functools.partial(_written, names[0], needles, places)
        answer = ANSWER.format(key=names[0])
        least = len(tokenizer.encode(answer)) + ANSWER_TOKENS
        lines = _most(lambda n, written=written, least=least: len(tokenizer.encode(written(n))) + least <= length)
        if lines is None:
            raise ValueError(f"{length} tokens are too few for {len(needles)} needles, their question and an answer")
        made.append({"input": written(lines), "gen_prefix": answer, "outputs": numbers[:values], "max_length": length})
    return made


def _written(key: str, needles: list[str], places: list[float], lines: int) -> str:
    """The needles at their places among so many lines of noise, and the question."""
    text = [NOISE] * lines
    for place, needle in sorted(zip(places, needles, strict=True), reverse=True):
        text.insert(int(place * (lines + 1)), needle)
    return ASK.format(text="".join(text), key=key)


def _most(fits: Any) -> int | None:
    """The largest number that fits; None where 0 does not."""
    if not fits(0):
        return None
    low, high = 0, 1
    while fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _dataset(keys: int, values: int, **metadata: Any) -> dict[str, Any]:
    import datasets
    from transformers import AutoTokenizer

    name = metadata.get("tokenizer") or metadata.get("pretrained")
    if not name:
        raise ValueError("documents are measured in tokens: give --model_args pretrained=... or tokenizer=...")
    tokenizer = AutoTokenizer.from_pretrained(name)
    lengths, samples = metadata.get("max_seq_lengths", [4096]), metadata.get("samples", 50)
    rows = [row for length in lengths for row in documents(tokenizer, length, keys, values, samples)]
    return {"test": datasets.Dataset.from_list(rows)}


single = functools.partial(_dataset, 1, 1)
multikey = functools.partial(_dataset, 4, 1)
multivalue = functools.partial(_dataset, 1, 4)


def process_results(doc: dict[str, Any], results: list[str]) -> dict[str, float]:
    """RULER's `string_match_all`: the part of the values that the answer has."""
    return {"recall": sum(value in results[0] for value in doc["outputs"]) / len(doc["outputs"])}
