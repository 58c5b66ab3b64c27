"""Checkpoints to resume from (torch's Distributed Checkpoint), and Hugging Face folders to use.

folder.py     names of folders; write, put in place, remove; full disks, disks that ranks do not share, two runs
damage.py     how a damaged checkpoint is detected; which checkpoint to resume from
saving.py     save, at once or in a thread
loading.py    load, on any mesh
exporting.py  Hugging Face folders: a model, or a PEFT adapter
tensors.py    torch's tensor files with checksums, and their index
identity.py   compare a run and its model with those of a checkpoint
ranks.py      the ranks that save or load together; NaN and infinity are neither saved nor loaded
"""

from longspan.checkpoint.damage import Checkpoint, newest_undamaged, newest_verified, read_verified
from longspan.checkpoint.exporting import check_mergeable, check_replaceable, export, exported_step
from longspan.checkpoint.folder import MARKER, RunLock, check_shared, complete_steps, step_path
from longspan.checkpoint.loading import load, load_weights
from longspan.checkpoint.ranks import Ranks
from longspan.checkpoint.saving import Saver, save
from longspan.core.errors import DiskFull

__all__ = [
    "MARKER",
    "Checkpoint",
    "DiskFull",
    "Ranks",
    "RunLock",
    "Saver",
    "check_mergeable",
    "check_replaceable",
    "check_shared",
    "complete_steps",
    "export",
    "exported_step",
    "load",
    "load_weights",
    "newest_undamaged",
    "newest_verified",
    "read_verified",
    "save",
    "step_path",
]
