"""From text to batches: documents are read as a stream, tokenised, and packed into sequences of one length.

- `readers`, `source`: documents from files or datasets, shuffled; several sources by weight.
- `rows`, `tokenizer`: what a row is, and the ids of documents, with a loss on what the model is to learn.
- `stream`: ids to sequences, sequences to the batches of each data rank.
- `rounds`: the ranks share the work of making ids.

The order of the sequences depends on the data and the seed, never on the mesh.
"""

from longspan.data.readers import KINDS
from longspan.data.rounds import check_same_text, merge_rounds, rounds, shared_sequences
from longspan.data.rows import Document
from longspan.data.source import DocumentSource, Mixture, split_weight
from longspan.data.stream import (
    Sequence,
    SequenceStream,
    StepBatch,
    collate,
    deal,
    prefetch,
)
from longspan.data.tokenizer import Tokenizer
from longspan.hf.prompts import BYTES, PYDOC, load_tokenizer

__all__ = [
    "BYTES",
    "KINDS",
    "PYDOC",
    "Document",
    "DocumentSource",
    "Mixture",
    "Sequence",
    "SequenceStream",
    "StepBatch",
    "Tokenizer",
    "check_same_text",
    "collate",
    "deal",
    "load_tokenizer",
    "merge_rounds",
    "prefetch",
    "rounds",
    "shared_sequences",
    "split_weight",
]
