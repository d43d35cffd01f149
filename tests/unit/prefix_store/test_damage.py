"""Whatever becomes of the files, a page is served as it was written, or not at all."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from prefix_pages import DEADLINE_S, PAGE_BYTES, file_of, key_of, opened, page_of, put, served, until

from holdfast.prefix_store.files.checksum import page_check

KEYS = [key_of(number) for number in range(8)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With eight pages in the order of their slots."""
    store = opened(tmp_path / "store")
    for key in KEYS:
        put(store, [key])
    store.close(DEADLINE_S)
    return tmp_path / "store"


def change(path: Path, offset: int, edit: Callable[[bytes], bytes], nbytes: int = 1) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(nbytes)
        file.seek(offset)
        file.write(edit(old))


def flip(path: Path, bit: int) -> None:
    change(path, bit // 8, lambda old: bytes([old[0] ^ (1 << bit % 8)]))


def test_every_flipped_bit_of_a_page_is_found() -> None:
    draws = random.Random(1)
    page = bytearray(draws.randbytes(70_003))
    right = page_check(memoryview(page), b"identity")
    assert page_check(memoryview(bytes(page)), b"identity") == right
    assert page_check(memoryview(page), b"identitz") != right
    # The highest bits of two words are what sums of products see worst.
    pairs = [[63, 64 * 5 + 63], [31, 63], [70_003 * 8 - 1], [0]]
    pairs += [[32 * word + 31, 32 * (word + 7) + 31] for word in range(500)]
    pairs += [[draws.randrange(len(page) * 8) for _ in range(draws.randint(1, 4))] for _ in range(200)]
    for bits in pairs:
        for bit in bits:
            page[bit // 8] ^= 1 << bit % 8
        assert page_check(memoryview(page), b"identity") != right
        for bit in bits:
            page[bit // 8] ^= 1 << bit % 8
    assert page_check(memoryview(page), b"identity") == right


def test_swapped_words_and_rows_are_found() -> None:
    words = np.frombuffer(random.Random(2).randbytes(1 << 18), "<u8").copy()
    right = page_check(words.view(np.uint8).data, b"")
    for first, second, count in ((0, 1, 1), (5, 8197, 1), (0, 8192, 8192)):
        other = words.copy()
        other[first : first + count] = words[second : second + count]
        other[second : second + count] = words[first : first + count]
        assert page_check(other.view(np.uint8).data, b"") != right


def test_damage_is_said_at_once_and_then_counted(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for page in (2, 4, 5):
        flip(file_of(folder, "pages"), (page * PAGE_BYTES + 77) * 8)
    os.truncate(file_of(folder, "pages"), 7 * PAGE_BYTES)
    store = opened(folder)
    served(store, KEYS[2:3])
    served(store, KEYS[4:])
    (first,) = caplog.messages
    assert f"KV store {folder}: 1 page read and not as written (checksum: 1)" in first
    assert f"holdfast kv-store verify {folder} [HFW11]" in first
    monkeypatch.setattr(store._health, "_tell_damage_at", 0.0)  # A minute later.
    until(lambda: len(caplog.messages) > 1)
    assert "3 pages read and not as written (checksum: 2, truncated: 1)" in caplog.messages[1]
    store.close(DEADLINE_S)


def test_a_flipped_bit_is_a_miss_once_and_then_forgotten(folder: Path) -> None:
    flip(file_of(folder, "pages"), (2 * PAGE_BYTES + 77) * 8 + 3)
    store = opened(folder)
    assert store.has(KEYS) == 8
    assert served(store, KEYS) == [*KEYS[:2], *KEYS[3:]]
    assert store.stats().missed == {"checksum": 1}
    assert store.has(KEYS) == 2
    assert put(store, KEYS[2:3]) == [True]
    assert served(store, KEYS) == KEYS
    store.close(DEADLINE_S)
    store = opened(folder)
    assert served(store, KEYS) == KEYS
    store.close(DEADLINE_S)


def test_a_bad_page_is_forgotten_for_the_next_process_too(folder: Path) -> None:
    flip(file_of(folder, "pages"), 8)
    store = opened(folder)
    served(store, KEYS)
    store.close(DEADLINE_S)
    store = opened(folder)
    assert store.has(KEYS) == 0
    assert store.has(KEYS[1:]) == 7
    store.close(DEADLINE_S)


@pytest.mark.parametrize("seed", range(40))
def test_flipped_bits_of_the_index(folder: Path, seed: int) -> None:
    index, draws = file_of(folder, "index"), random.Random(seed)
    for _ in range(draws.randint(1, 12)):
        flip(index, draws.randrange(index.stat().st_size * 8) if seed % 2 else draws.randrange(8192 * 8, 8704 * 8))
    store = opened(folder)
    served(store, KEYS)  # Asserts that what is served is right.
    put(store, [*KEYS, key_of(50)])
    served(store, [*KEYS, key_of(50)])
    store.close(DEADLINE_S)
    store = opened(folder)
    assert set(served(store, [*KEYS, key_of(50)])) >= {key_of(50)}
    store.close(DEADLINE_S)


@pytest.mark.parametrize("name", ["control", "lock", "index", "pages"])
@pytest.mark.parametrize("content", [b"", b"\xff" * 20_000, bytes(20_000)])
def test_a_file_of_other_content(folder: Path, name: str, content: bytes) -> None:
    path = folder / name if name in ("control", "lock") else file_of(folder, name)
    path.write_bytes(content)
    store = opened(folder)
    served(store, KEYS)
    put(store, KEYS)
    assert served(store, KEYS) == KEYS
    store.close(DEADLINE_S)


@pytest.mark.parametrize("while_open", [False, True])
def test_truncated_pages(folder: Path, while_open: bool) -> None:
    store = opened(folder)
    if not while_open:
        store.close(DEADLINE_S)
    os.truncate(file_of(folder, "pages"), 3 * PAGE_BYTES + 100)
    if not while_open:
        store = opened(folder)
    assert served(store, KEYS) == KEYS[:3]
    assert store.stats().missed == {"truncated": 5}
    assert all(put(store, KEYS[3:]))
    assert served(store, KEYS) == KEYS
    store.close(DEADLINE_S)


@pytest.mark.parametrize("while_open", [False, True])
def test_a_truncated_index(folder: Path, while_open: bool) -> None:
    store = opened(folder, beat_s=0.01 if while_open else 1)
    if not while_open:
        store.close(DEADLINE_S)
    os.truncate(file_of(folder, "index"), 8192 + 3 * 64 + 5)
    if while_open:
        served(store, KEYS)
        put(store, [key_of(number) for number in range(20, 30)])
    else:
        store = opened(folder)
        assert served(store, KEYS) == KEYS[:3]
        assert all(put(store, KEYS[3:]))
        assert served(store, KEYS) == KEYS
    store.close(DEADLINE_S)
    store = opened(folder)
    served(store, [*KEYS, *(key_of(number) for number in range(20, 30))])
    store.close(DEADLINE_S)


def test_lost_numbers_of_the_folder_are_counted_again(folder: Path) -> None:
    """Pages of other models count, too."""
    store = opened(folder, pages=8, model=b"another")
    os.truncate(folder / "control", 0)
    assert put(store, [key_of(50)], model=b"another") == [True]
    store.close(DEADLINE_S)
    assert sum(file.stat().st_blocks for file in folder.glob("*.pages")) * 512 == 8 * PAGE_BYTES


def test_pages_in_each_others_place(folder: Path) -> None:
    pages = file_of(folder, "pages")
    content = pages.read_bytes()
    pages.write_bytes(content[PAGE_BYTES : 2 * PAGE_BYTES] + content[:PAGE_BYTES] + content[2 * PAGE_BYTES :])
    store = opened(folder)
    assert served(store, KEYS) == KEYS[2:]
    store.close(DEADLINE_S)


def test_an_index_that_names_the_wrong_key(folder: Path) -> None:
    index = file_of(folder, "index")
    change(index, 8192, lambda old: KEYS[1].ljust(32, b"\0"), 32)
    change(index, 8192 + 64, lambda old: KEYS[0].ljust(32, b"\0"), 32)
    store = opened(folder)
    assert served(store, KEYS) == KEYS[2:]
    store.close(DEADLINE_S)


def test_a_torn_page(folder: Path) -> None:
    """Half of the old page and half of another, as a crash leaves them."""
    change(file_of(folder, "pages"), 4096, lambda old: page_of(b"other")[4096:], 4096)
    store = opened(folder)
    assert served(store, KEYS) == KEYS[1:]
    store.close(DEADLINE_S)


def test_the_files_of_another_model_or_page_size_under_this_ones_name(folder: Path, tmp_path: Path) -> None:
    for settings in ({"model": b"other"}, {"page_bytes": 2 * PAGE_BYTES, "size_bytes": 64 * PAGE_BYTES}):
        other = opened(tmp_path / "other", **settings)
        assert other.has(KEYS) == 0
        put(other, KEYS, settings.get("page_bytes", PAGE_BYTES))
        other.close(DEADLINE_S)
        for ending in ("index", "pages"):
            shutil.copy(file_of(tmp_path / "other", ending), file_of(folder, ending))
        store = opened(folder)
        assert store.has(KEYS) == 0
        assert served(store, KEYS) == []
        assert all(put(store, KEYS))
        assert served(store, KEYS) == KEYS
        store.close(DEADLINE_S)
        shutil.rmtree(tmp_path / "other")


def test_files_that_were_removed_while_in_use(folder: Path) -> None:
    store = opened(folder)
    file_of(folder, "index").unlink()
    until(lambda: store.stats().failing is not None)
    assert put(store, [key_of(50)]) == [False]
    assert store.stats().dropped == {"store failing": 1}
    store.close(DEADLINE_S)
    store = opened(folder)
    assert put(store, KEYS) == [True] * 8
    store.close(DEADLINE_S)
