"""Whether layers could be written to the folder of --nvme-path: asked before anything is fetched, also where all stay
in memory, since tomorrow less of it may be free. Knows nothing of how large they are.
"""

from __future__ import annotations

import os
import shlex
import shutil
import tempfile
from pathlib import Path

from holdfast.errors import ConfigurationError
from holdfast.planner.serve.streamed import disk_room

ELSEWHERE = "--nvme-path /var/tmp"


def check_layer_folder(folder: str) -> None:
    try:
        os.listdir(folder)  # So that a file is told from a folder.
        tempfile.TemporaryFile(dir=folder).close()  # Permissions do not tell of a disk that is read-only.
    except OSError as error:
        missing = isinstance(error, FileNotFoundError) and _may_be_made(Path(folder))
        raise ConfigurationError(
            f"--nvme-path: {error.strerror or error}: {folder}",
            needed="a folder on a fast disk, in which files can be written",
            fix=ELSEWHERE + (f", or first: mkdir -p {shlex.quote(folder)}" if missing else ""),
            field="nvme_path",
        ) from error
    disk_room(folder, None)  # It refuses what lies in memory.


def _may_be_made(folder: Path) -> bool:
    """Not in /proc, whose size is nothing."""
    parent = next(one for one in folder.absolute().parents if one.exists())
    return parent.is_dir() and os.access(parent, os.W_OK) and shutil.disk_usage(parent).total > 0
