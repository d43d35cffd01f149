"""The user's cache folder, a lock between processes, and hashing. Knows nothing of what is cached."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from holdfast.errors import ModelError
from holdfast.units import MIB

_HASH_CHUNK_BYTES = 4 * MIB


def cache_folder() -> Path:
    """$HOLDFAST_CACHE, else $XDG_CACHE_HOME/holdfast, else ~/.cache/holdfast. Not created here."""
    if own := os.environ.get("HOLDFAST_CACHE"):
        return Path(own).expanduser()
    if shared := os.environ.get("XDG_CACHE_HOME"):
        return Path(shared).expanduser() / "holdfast"
    return Path.home() / ".cache" / "holdfast"


def models_folder() -> Path:
    """Where built-in models are kept; created when missing."""
    folder = cache_folder() / "models"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unusable(folder, error) from error
    return folder


def unusable(folder: Path, error: OSError) -> ModelError:
    return ModelError(
        f"the cache folder {folder} cannot be used: {error.strerror or error}",
        code="HF201",
        needed="a writable folder with space for the model",
        fix="set HOLDFAST_CACHE to another folder",
    )


@contextlib.contextmanager
def locked(path: Path, *, waiting: Callable[[], None]) -> Iterator[None]:
    """Holds the lock file `path` alone among all processes; `waiting` is called once if somebody else has it.

    The file is gone afterwards. Because its last holder unlinks it, a waiter may wake up with a lock on a file
    that no longer has a name; it then starts over with the one that has.
    """
    told = False
    while True:
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        except OSError as error:
            raise unusable(path.parent, error) from error
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    waiting()
                    told = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if _same_file(descriptor, path):
                try:
                    yield
                finally:
                    path.unlink(missing_ok=True)
                return
        finally:
            os.close(descriptor)


def _same_file(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return False


def sha256_of(path: Path, *, progress: Callable[[int], None] | None = None) -> str:
    """`progress` hears the bytes done so far."""
    digest, done = hashlib.sha256(), 0
    with open(path, "rb") as file:
        while chunk := file.read(_HASH_CHUNK_BYTES):
            digest.update(chunk)
            done += len(chunk)
            if progress is not None:
                progress(done)
    return digest.hexdigest()
