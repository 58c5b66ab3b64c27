"""From text to batches: documents are read as a stream, tokenised, and packed into sequences of one length.

- `readers`, `source`: documents from files or a dataset, shuffled.
- `tokens`: documents to token ids; `rounds`: the ranks share this work.
- `stream`: ids to sequences, sequences to the batches of each data rank.

The order of the sequences depends on the data and the seed, never on the mesh.
"""

from longspan.data.rounds import ROUNDS_AHEAD, check_same_text, merge_rounds, rounds
from longspan.data.source import PYDOC, DocumentSource
from longspan.data.stream import Sequence, SequenceStream, StepBatch, deal, prefetch
from longspan.data.tokens import BYTES, TextTokenizer, load_tokenizer

__all__ = [
    "BYTES",
    "PYDOC",
    "ROUNDS_AHEAD",
    "DocumentSource",
    "Sequence",
    "SequenceStream",
    "StepBatch",
    "TextTokenizer",
    "check_same_text",
    "deal",
    "load_tokenizer",
    "merge_rounds",
    "prefetch",
    "rounds",
]
