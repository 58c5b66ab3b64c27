"""Checkpoints to resume from (torch's Distributed Checkpoint, as safetensors), and Hugging Face folders to use.

folder.py   what a checkpoint is on disk: names, marker, removal; two runs in one folder
damage.py   how a damaged checkpoint is detected; which checkpoint to resume from
saving.py   save, at once or in the background
loading.py  load, on any mesh
export.py   Hugging Face folders: a model, or a PEFT adapter
ranks.py    the ranks that save or load together; NaN and infinity are neither saved nor loaded
"""

from longspan.checkpoint.damage import Checkpoint, checkpoint_to_resume, newest_undamaged, read_verified
from longspan.checkpoint.export import export
from longspan.checkpoint.folder import MARKER, locked, step_path
from longspan.checkpoint.loading import load, load_weights
from longspan.checkpoint.ranks import Ranks
from longspan.checkpoint.saving import Saver, save
from longspan.core.errors import DiskFull

__all__ = [
    "MARKER",
    "Checkpoint",
    "DiskFull",
    "Ranks",
    "Saver",
    "checkpoint_to_resume",
    "export",
    "load",
    "load_weights",
    "locked",
    "newest_undamaged",
    "read_verified",
    "save",
    "step_path",
]
