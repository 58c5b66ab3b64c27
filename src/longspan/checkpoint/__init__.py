"""Checkpoints: sharded ones to go on from (torch's Distributed Checkpoint), and Hugging Face folders to use.

A run's folder holds `checkpoints/step-00000100/`, made under another name, read back, and renamed when every rank's
files are whole; in it `complete.json`, written last: the step, the place in the data, and every file's checksum.

    folder.py     what a checkpoint is on disk: the marker, checksums, what is complete, what is removed
    ranks.py      what all ranks do together, or refuse together
    disk.py       one writer in a folder, one disk for all ranks, disks that are full
    tensors.py    torch's tensor files with checksums, and their index, which is no pickle
    saving.py     save and load
    background.py save beside the training
    choosing.py   which checkpoint to go on from, its content verified
    identity.py   what a checkpoint keeps of the run that made it, compared; the model's config from it
    exporting.py  Hugging Face folders: a whole model, or a PEFT adapter
"""

from longspan.checkpoint.background import Saver
from longspan.checkpoint.choosing import choose, newest, verify
from longspan.checkpoint.disk import DiskFull, RunLock, check_shared
from longspan.checkpoint.exporting import check_replaceable, export, exported_step
from longspan.checkpoint.folder import MARKER, Checkpoint, complete_steps, latest, step_path
from longspan.checkpoint.ranks import Ranks
from longspan.checkpoint.saving import load, load_weights, save
from longspan.core.system import is_full

__all__ = [
    "MARKER",
    "Checkpoint",
    "DiskFull",
    "Ranks",
    "RunLock",
    "Saver",
    "check_replaceable",
    "check_shared",
    "choose",
    "complete_steps",
    "export",
    "exported_step",
    "is_full",
    "latest",
    "load",
    "load_weights",
    "newest",
    "save",
    "step_path",
    "verify",
]
