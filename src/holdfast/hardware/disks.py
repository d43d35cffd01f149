"""Which disk something lies on. Knows no files."""

from __future__ import annotations

import os
from pathlib import Path


def whole_disk(device: int, root: Path = Path("/")) -> str:
    """`device`: as `st_dev` has it. Partitions of one disk, and volumes over it alone, have the same answer; what the
    system has no block device for (an overlay, a subvolume of btrfs) is a disk of its own."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        folder = (root / "sys/dev/block" / number).resolve(strict=True)
        while len(below := sorted((folder / "slaves").glob("*"))) == 1:
            folder = below[0].resolve(strict=True)
        return str(folder.parent if (folder / "partition").exists() else folder)
    except OSError:
        return number
