"""What a job shows its model: images and videos, by their numbers of patches."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from longspan.core.errors import LongspanError
from longspan.core.validation import LARGEST_COUNT, check_number

if TYPE_CHECKING:
    from longspan.plan.models.tower import Tower


@dataclass(frozen=True)
class Pictures:
    """Equal images, or the frames of a video, in each sequence of a job.

    Attributes:
        kind: "image" or "video".
        units: images, or frames as the tower sees them (`Tower.frames` of the video each).
        height: of each, in patches.
        width: of each, in patches.
    """

    kind: str
    units: int
    height: int
    width: int

    @property
    def patches(self) -> int:
        """Patches of a unit."""
        return self.height * self.width

    def rows(self, tower: Tower) -> int:
        """Return the embeddings of a unit."""
        return self.patches // tower.merge**2

    def runs(self, tower: Tower) -> int:
        """Return the runs of placeholders, each between a start and an end token."""
        return 1 if self.kind == "video" and not tower.marks_frames else self.units

    def tokens(self, tower: Tower) -> int:
        """Return the tokens of all units, start and end tokens included."""
        return self.units * self.rows(tower) + 2 * self.runs(tower)

    def flag(self, tower: Tower) -> str:
        """Return the flag of `longspan plan`; `read_pictures` reads it."""
        of_video = self.kind == "video"
        number, side = self.units * (tower.frames if of_video else 1), tower.patch
        return f"--{'video' if of_video else 'images'} {number}x{self.height * side}x{self.width * side}"


def read_pictures(flag: str, text: str, tower: Tower) -> Pictures:
    """Return the pictures of a flag: "256x448x448" is 256 images, or frames of a video, of 448 x 448 pixels.

    Sides are rounded to what an embedding covers, as transformers' processors do; frames are filled up.

    Args:
        flag: "--images" or "--video".
        text: of the flag: a number, height and width in pixels.
        tower: of the model.
    """
    if not re.fullmatch(r"\d+x\d+x\d+", text):
        raise LongspanError(f"{flag} {text} is not NUMBERxHEIGHTxWIDTH, such as 256x448x448 (sizes in pixels)")
    number, *sides = (int(part) for part in text.split("x"))
    for size in (number, *sides):
        check_number(f"a number of {flag} {text}", size, 1, LARGEST_COUNT, whole=True)
    covered = tower.patch * tower.merge
    height, width = (max(1, round(side / covered)) * tower.merge for side in sides)
    if flag == "--video":
        return Pictures("video", math.ceil(number / tower.frames), height, width)
    return Pictures("image", number, height, width)
