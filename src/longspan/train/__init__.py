"""`longspan train`: from a model, a text and a context length to a trained Hugging Face folder.

`config` is what can be asked for, `inputs` turns it into a model, a tokenizer and data (and refuses what cannot be),
`loop` trains. Importing this package does not import torch: the command line builds its help from `TrainConfig`.
"""

from longspan.train.config import TrainConfig
from longspan.train.job import run

__all__ = ["TrainConfig", "run"]
