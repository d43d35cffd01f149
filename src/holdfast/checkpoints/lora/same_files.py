"""One adapter on several machines (nodes), each of which has files of its own: the same to the byte, or it is refused.

    head         digest: of its files when they are looked at, which goes to all nodes with a path
    other nodes  find_same: what lies at that path, held against the digest

Its messages name files, never folders: they may reach a client.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import BinaryIO

from holdfast.checkpoints.bounded_files import open_file, reason
from holdfast.checkpoints.lora.adapter import CONFIG, WEIGHTS, changed, stamp, stamp_of
from holdfast.errors import AdapterError, CheckpointError
from holdfast.units import MIB

OTHER_FILES = "HF379"
PIECE_BYTES = MIB
"""That are read at a time."""
_FILES = (CONFIG, WEIGHTS)


def shared_path(given: str, folder: Path) -> str:
    """Where other nodes look for what lies in `folder` here, all links followed. By the path as it was given, since a
    link may lead elsewhere on each node; but not by one that goes up, which links would take to another folder."""
    path = Path(given).absolute()
    return str(folder if ".." in path.parts else path)


def digest(folder: Path, name: str, stamped: str) -> str:
    """Of all bytes of the files that have this stamp. Raises AdapterError where they change meanwhile."""
    found = []
    for file in _FILES:
        try:
            with open_file(folder / file) as opened:
                found.append(f"{_size(opened)}.{_hash(opened)}")
        except (OSError, CheckpointError) as error:
            raise changed(name) from error
    if stamp(folder) != stamped:
        raise changed(name)
    return "-".join(found)


def find_same(path: str, expected: str, name: str) -> tuple[Path, str]:
    """On another node than the head: the folder, all links followed, and the stamp of its files. Raises AdapterError
    where they are not those of this digest."""
    try:
        folder = Path(path).resolve(strict=True)
    except (OSError, RuntimeError, ValueError) as error:
        raise _refused(f"the folder of {name} that the head named cannot be opened", reason(error)) from error
    states = []
    for file, known in zip(_FILES, expected.split("-"), strict=True):
        size, _, content = known.partition(".")
        try:
            with open_file(folder / file) as opened:
                states.append(os.fstat(opened.fileno()))
                # Where that tells them apart already, nothing is read.
                same = _size(opened) == int(size) and _hash(opened) == content
        except (OSError, CheckpointError) as error:  # The latter of what is no file; it says where that lies.
            why = reason(error) if isinstance(error, OSError) else "not a file"
            raise _refused(f"{file} of {name} cannot be read", why) from error
        if not same:
            raise _refused(
                f"{file} of {name} is another one than on the head",
                f"{states[-1].st_size:,} bytes, and {int(size):,} on the head"
                if states[-1].st_size != int(size)
                else f"as many bytes ({int(size):,}), and not the same",
            )
    return folder, stamp_of(states)


def _size(file: BinaryIO) -> int:
    return os.fstat(file.fileno()).st_size


def _hash(file: BinaryIO) -> str:
    found = hashlib.blake2b(digest_size=16)
    while piece := file.read(PIECE_BYTES):
        found.update(piece)
    return found.hexdigest()


def _refused(said: str, found: str) -> AdapterError:
    return AdapterError(
        said,
        code=OTHER_FILES,
        needed="the same files, byte for byte, at the same path on all nodes",
        found=found,
        fix="copy the adapter's folder from the head to the same path on that node",
        field="model",
    )
