"""`longspan verify`: does the sharded run compute what one process computes, on your model and your machines?

The same batch runs through the Hugging Face model on one process (in fp64, and in the verified dtype) and through the
sharded model on all ranks. Loss, logits and every gradient are compared with fp64; the sharded run's error may be a few
times that of the unsharded run in the same dtype.

- `config`: the flags.
- `inputs`: the model and the batch, with pictures for a vision-language model.
- `runs`: the unsharded runs and the sharded one; `diffusion`: those of a transformer of diffusers.
- `judge`: errors of tensors, and their limits.
- `report`: the output.

Importing this package does not import torch, as the command line builds its help from `VerifyConfig`.
"""

from longspan.verify.config import VerifyConfig
from longspan.verify.job import run, worker

__all__ = ["VerifyConfig", "run", "worker"]
