"""`longspan train`: from a model, a text and a context length to a trained Hugging Face folder.

- `config`: the flags; `job`: starts the ranks; `resolve`: what the machine and the data decide (`--memory auto`).
- `inputs`: model config, tokenizer, data and checkpoint, and what a resumed run must have in common.
- `loop`: trains; `optimizer`, `metrics`, `evaluation`, `outputs`, `trackers`: its parts.

Importing this package does not import torch, as the command line builds its help from `TrainConfig`.
"""

from longspan.train.config import TrainConfig
from longspan.train.job import run

__all__ = ["TrainConfig", "run"]
