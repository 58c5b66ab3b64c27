"""`longspan verify`: does the sharded run compute what one process computes, on your model and your machines?

The same batch goes through the pristine Hugging Face model on one process (twice: in fp64, and in the dtype asked for)
and through the parallelized one on all ranks. Loss, logits and every gradient are compared with fp64, and the sharded
run may be off by no more than a few times what the unsharded run in the same dtype is off.

`config` is what can be asked for, `inputs` makes the model and the batch, `runs` runs them without and with sharding,
`compare` measures and judges, `report` prints. Importing this package does not import torch: the command line builds
its help from `VerifyConfig`.
"""

from longspan.verify.config import VerifyConfig
from longspan.verify.job import run, worker

__all__ = ["VerifyConfig", "run", "worker"]
