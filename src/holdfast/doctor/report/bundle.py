"""`holdfast doctor --bundle FILE`: an archive for a bug report, with keys, prompts and home paths removed.

Holds the diagnosis, the beginning and the end of each log, this machine if it was checked, and versions; each line goes
through redact.py. It is written under another name and appears complete, readable by its owner alone.
"""

from __future__ import annotations

import errno
import io
import os
import platform
import tarfile
import time
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

import holdfast
from holdfast.doctor.findings import Diagnosis
from holdfast.doctor.logs.line import LONGEST, bare, read_line
from holdfast.doctor.logs.source import blocks
from holdfast.doctor.report.redact import Redactor, redacted
from holdfast.doctor.report.text import without_keys
from holdfast.errors import ConfigurationError
from holdfast.units import shorten

FIRST_LINES = 1000
LAST_LINES = 4000
UNWRITABLE = "HFD91"
OWNER_ONLY = 0o600


def write_bundle(
    path: str, sources: Sequence[str], diagnosis: Diagnosis, machine: Mapping[str, object] | None = None
) -> list[str]:
    """The names of what is in it. Raises a ConfigurationError (HFD91) where it cannot be written, and leaves nothing.

    Standard input was read once and is left out.
    """
    target = Path(path)
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    try:
        if target.exists():
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        try:
            with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, OWNER_ONLY), "wb") as file:
                names = _write(file, sources, diagnosis, machine)
            _appear(partial, target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error
    return names


def _write(
    file: io.BufferedWriter, sources: Sequence[str], diagnosis: Diagnosis, machine: Mapping[str, object] | None
) -> list[str]:
    content = {
        "diagnosis.json": _redacted_json(msgspec.to_builtins(without_keys(diagnosis))),
        "versions.txt": f"holdfast {holdfast.__version__}\npython {platform.python_version()}\n"
        f"{platform.system()} {platform.machine()}\n".encode(),
    }
    if machine is not None:
        content["machine.json"] = _redacted_json(dict(machine))
    for at, source in enumerate(source for source in sources if source != "-"):
        content[f"log-{at}.txt"] = "\n".join(excerpt(source)).encode("utf-8", "replace")
    with tarfile.open(fileobj=file, mode="w:gz") as archive:
        for name, part in content.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime, entry.mode = len(part), int(time.time()), OWNER_ONLY
            archive.addfile(entry, io.BytesIO(part))
    return list(content)


def _appear(partial: Path, target: Path) -> None:
    """Under its name, unless somebody has taken that meanwhile."""
    try:
        os.link(partial, target)
    except OSError as error:
        if error.errno == errno.EEXIST:
            raise
        partial.rename(target)  # A disk without links.


def _unwritable(path: str, error: OSError) -> ConfigurationError:
    folder = shorten(str(Path(path).parent))
    needed, fix = {
        errno.EEXIST: ("a file that does not exist yet", "another name: --bundle report.tar.gz"),
        errno.ENOENT: (f"an existing folder: {folder}", f"mkdir -p {folder}"),
        errno.ENOSPC: (f"free space on the disk of {folder}", "a path on another disk"),
    }.get(error.errno or 0, (f"write permission in {folder}", "a folder of your own: --bundle ~/report.tar.gz"))
    return ConfigurationError(
        f"the archive {shorten(path)} cannot be written",
        code=UNWRITABLE,
        needed=needed,
        found=error.strerror or str(error),
        fix=fix,
        field="bundle",
    )


def _redacted_json(document: object) -> bytes:
    return msgspec.json.format(msgspec.json.encode(_clean(document)), indent=2)


def excerpt(source: str) -> Iterator[str]:
    """The first and the last lines, in bounded memory."""
    redactor, last = Redactor(), deque[str](maxlen=LAST_LINES)
    left_out, stamped = 0, False
    for at, line in enumerate(_lines(source)):
        if at < FIRST_LINES:
            stamped = stamped or bool(read_line(line, 0).level)
            yield redactor.line(line)
            continue
        left_out += len(last) == LAST_LINES
        last.append(line)
    if left_out:
        yield f"[... {left_out} lines left out ...]"
        redactor = Redactor(in_doubt=stamped)
    yield from (redactor.line(line) for line in last)


def _lines(source: str) -> Iterator[str]:
    rest = b""
    for block in blocks(source):
        *whole, rest = (rest + block).split(b"\n")
        yield from map(_line, whole)
        rest = rest[: LONGEST * 16]
    if rest:
        yield _line(rest)


def _line(raw: bytes) -> str:
    return bare(raw[:LONGEST].decode("utf-8", "replace")).rstrip("\r")


def _clean(value: object) -> object:
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {str(key): _clean(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in value]
    return value
