"""Folders that a store may use: its owner's alone, and for nothing else."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest
from prefix_pages import DEADLINE_S, PAGE_BYTES, opened, put

from holdfast.errors import ConfigurationError
from holdfast.prefix_store.files.calls import Calls
from holdfast.prefix_store.files.folder import Control, StoreFolder
from holdfast.prefix_store.inspection import StoreInspection


def test_what_is_made_is_for_the_owner_alone(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        store = opened(tmp_path / "a" / "store")
        put(store, [b"key"])
        store.close(DEADLINE_S)
    finally:
        os.umask(old)
    assert stat.S_IMODE((tmp_path / "a" / "store").stat().st_mode) == 0o700
    assert {stat.S_IMODE(file.stat().st_mode) for file in (tmp_path / "a" / "store").iterdir()} == {0o600}


def test_an_empty_folder_is_closed_to_others(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o755)
    opened(tmp_path / "store").close(DEADLINE_S)
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777, 0o702])
def test_a_folder_that_others_can_write_is_refused(tmp_path: Path, mode: int) -> None:
    (tmp_path / "store").mkdir()
    (tmp_path / "store").chmod(mode)
    with pytest.raises(ConfigurationError, match="can be written by others") as caught:
        opened(tmp_path / "store")
    assert caught.value.code == "HF180"
    assert caught.value.fix == f"chmod 700 {tmp_path / 'store'}"


@pytest.mark.parametrize(("mode", "warned"), [(0o777, True), (0o703, True), (0o1777, False), (0o775, False)])
def test_a_folder_above_that_all_can_write_is_warned_of(
    tmp_path: Path, mode: int, warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(mode)
    opened(tmp_path / "open" / "a" / "store").close(DEADLINE_S)
    assert [f"all users can write {tmp_path / 'open'}," in said for said in caplog.messages] == [True] * warned


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ConfigurationError, match="HF180") as caught:
        opened(tmp_path)
    assert caught.value.fix == f"--kv-store {tmp_path / 'kv-store'}"
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("")
    with pytest.raises(ConfigurationError, match="HF180"):
        opened(tmp_path / "store")


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_folder_of_another_user_is_refused(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir(mode=0o700)
    os.chown(tmp_path / "store", 12345, 12345)
    with pytest.raises(ConfigurationError, match="belongs to another user"):
        opened(tmp_path / "store")
    (tmp_path / "store" / "lock").write_bytes(b"")
    with pytest.raises(ConfigurationError, match="run it as user 12345"):
        StoreInspection(tmp_path / "store")


@pytest.mark.skipif(os.geteuid() != 0, reason="giving files away needs root")
def test_a_link_of_another_user_is_refused_and_an_own_one_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    opened(tmp_path / "link").close(DEADLINE_S)
    os.lchown(tmp_path / "link", 12345, 12345)
    with pytest.raises(ConfigurationError, match="link that belongs to another"):
        opened(tmp_path / "link")


def test_links_in_place_of_files_are_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "store").mkdir(mode=0o700)
    (tmp_path / "store" / "lock").write_bytes(b"")
    (tmp_path / "store" / "control").symlink_to(tmp_path / "mine")
    store = opened(tmp_path / "store")
    assert put(store, [b"key"]) == [False]
    store.close(DEADLINE_S)
    assert (tmp_path / "mine").read_text() == "mine"


def test_a_store_smaller_than_a_page_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="HF181"):
        opened(tmp_path / "store", size_bytes=PAGE_BYTES - 1)


def test_numbers_that_are_half_written_are_not_taken_without_the_lock(tmp_path: Path) -> None:
    folder, other = (StoreFolder(tmp_path / "store", Calls(), create=True) for _ in range(2))
    with folder.locked():
        folder.set_control(Control(total_bytes=5))
    other.look()
    control = tmp_path / "store" / "control"
    whole = control.read_bytes()
    control.write_bytes(whole[:-1] + b"x")
    other.look()
    assert other.seen.total_bytes == 5
    assert other.changed()
    control.write_bytes(whole)
    other.look()
    assert not other.changed()
    for one in (folder, other):
        one.close()
