"""`holdfast doctor --bundle FILE`: an archive for a bug report, with nothing in it that nobody should read.

Holds the diagnosis, the beginning and the end of each log, and the version; each line went through redact.py.
"""

from __future__ import annotations

import io
import platform
import tarfile
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

import holdfast
from holdfast.doctor.lines import LONGEST, bare
from holdfast.doctor.reading import blocks
from holdfast.doctor.records import Diagnosis
from holdfast.doctor.redact import redacted
from holdfast.errors import ConfigurationError
from holdfast.units import shorten

FIRST_LINES = 1000
LAST_LINES = 4000
UNWRITABLE = "HFD91"


def write_bundle(path: str, sources: Sequence[str], diagnosis: Diagnosis) -> None:
    """Raises a ConfigurationError (HFD91) where it cannot be written. Standard input was read once and is left out."""
    try:
        with Path(path).open("xb") as file, tarfile.open(fileobj=file, mode="w:gz") as archive:
            _add(archive, "diagnosis.json", redacted_document(diagnosis))
            _add(archive, "versions.txt", _versions().encode())
            for at, source in enumerate(source for source in sources if source != "-"):
                _add(archive, f"log-{at}.txt", "\n".join(excerpt(source)).encode("utf-8", "replace"))
    except OSError as error:
        raise ConfigurationError(
            f"the archive {shorten(path)} cannot be written", code=UNWRITABLE, needed="a file that is not there yet",
            found=str(error), fix="another name: --bundle report.tar.gz", field="bundle",
        ) from error  # fmt: skip


def redacted_document(diagnosis: Diagnosis) -> bytes:
    return msgspec.json.format(msgspec.json.encode(_clean(msgspec.to_builtins(diagnosis))), indent=2)


def excerpt(source: str) -> Iterator[str]:
    """The first and the last lines, in bounded memory."""
    last: deque[str] = deque(maxlen=LAST_LINES)
    left_out = 0
    for at, raw in enumerate(_lines(source)):
        line = redacted(bare(raw[:LONGEST].decode("utf-8", "replace")))
        if at < FIRST_LINES:
            yield line
            continue
        left_out += len(last) == LAST_LINES
        last.append(line)
    if left_out:
        yield f"[... {left_out} lines left out ...]"
    yield from last


def _lines(source: str) -> Iterator[bytes]:
    rest = b""
    for block in blocks(source):
        *whole, rest = (rest + block).split(b"\n")
        yield from whole
        rest = rest[-LONGEST * 16 :]
    if rest:
        yield rest


def _clean(value: object) -> object:
    if isinstance(value, str):
        return redacted(value)
    if isinstance(value, dict):
        return {str(key): _clean(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in value]
    return value


def _versions() -> str:
    python = f"python {platform.python_version()}"
    return f"holdfast {holdfast.__version__}\n{python}\n{platform.system()} {platform.machine()}\n"


def _add(archive: tarfile.TarFile, name: str, content: bytes) -> None:
    entry = tarfile.TarInfo(name)
    entry.size = len(content)
    archive.addfile(entry, io.BytesIO(content))
