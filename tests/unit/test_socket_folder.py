"""Folders of sockets go with the process that made them; those of a killed one with the next that starts."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import socket_folder
from holdfast.socket_folder import SocketFolder, remove_abandoned


@pytest.fixture(autouse=True)
def _own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(socket_folder, "YOUNG_S", 0.0)


def test_it_is_its_owners_alone_and_goes() -> None:
    folder = SocketFolder()
    assert stat.S_IMODE(folder.path.stat().st_mode) == 0o700
    (folder.path / "0.sock").touch()
    folder.remove()
    folder.remove()
    assert not folder.path.exists()


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path) -> None:
    code = (
        "import os, signal, tempfile\n"
        f"tempfile.tempdir = {str(tmp_path)!r}\n"
        "from holdfast.socket_folder import SocketFolder\n"
        "folder = SocketFolder()\n"
        "(folder.path / 'grammars.sock').touch()\n"
        "print(folder.path, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = Path(subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout.strip())
    assert killed.is_dir()
    used = SocketFolder()
    notes, elsewhere = tmp_path / "holdfast-notes", tmp_path / "elsewhere"
    notes.mkdir()
    (notes / "todo.txt").touch()
    elsewhere.mkdir()
    os.symlink(elsewhere, tmp_path / "holdfast-link")
    (tmp_path / "holdfast-file").touch()
    assert remove_abandoned() == [killed.name]
    assert used.path.is_dir()
    used.remove()
    assert {each.name for each in tmp_path.iterdir()} == {
        "holdfast-notes",
        "elsewhere",
        "holdfast-link",
        "holdfast-file",
    }


def test_a_folder_that_was_just_made_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket_folder, "YOUNG_S", 60.0)
    (tmp_path / "holdfast-new").mkdir()
    assert remove_abandoned() == []
