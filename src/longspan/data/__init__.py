"""From text to batches: documents are read as a stream, tokenised on the way and packed to the context.

`source` reads documents, `tokens` turns them into ids, which `rounds` shares out over the ranks, `stream` packs the ids
into sequences of one length and deals the sequences out to the data ranks. The order of sequences depends on the data
and the seed, never on the mesh.
"""

from longspan.data.rounds import ROUNDS_AHEAD, rounds, together
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
    "deal",
    "load_tokenizer",
    "prefetch",
    "rounds",
    "together",
]
