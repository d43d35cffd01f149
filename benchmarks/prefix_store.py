"""Rates of the store of KV pages against raw reads of the same disk, and how long it takes to open.

    python benchmarks/prefix_store.py FOLDER [--gib 4] [--page 2MiB] [--json FILE] [--beside-layers]

--beside-layers: instead, layers of a step that come from the same disk: alone, and while pages are read without an end,
in turns and as if neither knew of the other, three times each; the rate of both, and the longest wait for a layer.
FOLDER is on the disk to be measured; what is written there is removed. Raw reads are O_DIRECT, pages of the same size,
as many at once as the store has threads. Page caches are not involved, so nothing needs to be dropped between runs.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import mmap
import os
import random
import resource
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from holdfast.execution.link.disk_turns import turns_of
from holdfast.execution.streaming.disk.layer_file import LayerFile
from holdfast.prefix_store import PrefixStore, Ticket
from holdfast.prefix_store.files.checksum import page_check
from holdfast.prefix_store.files.index import RECORD
from holdfast.prefix_store.reading import DEPTH
from holdfast.units import GIB, format_bytes, parse_bytes

MODEL = b"benchmark"
AT_ONCE_BYTES = 256 << 20
"""Asked for in one read of the store: a prefix of that size."""
OPENED = (1_000, 51_200, 400_000, 1_600_000)
"""Numbers of pages that a store is opened with: 51,200 of 2 MiB are 100 GiB."""
LAYERS, LAYER_BYTES, LAYERS_S, ROUNDS = 16, 64 << 20, 4.0, 3
"""Read from the disk in turn for so long, alone and with pages in each way so many times: what differs between equal
ones is noise."""
BESIDE_BYTES = 64 << 20
"""Of pages, asked for in one read meanwhile: a server has places for no more."""


def key_of(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=20).digest()


def rate(nbytes: int, work: Callable[[], None]) -> dict[str, float]:
    """GB/s, and seconds of CPU for a GB."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"gb_s": nbytes / seconds / 1e9, "cpu_s_per_gb": cpu_s / nbytes * 1e9}


def raw_reads(path: Path, page_bytes: int, order: Sequence[int]) -> None:
    file = os.open(path, os.O_RDONLY | os.O_DIRECT)
    buffers = [memoryview(mmap.mmap(-1, page_bytes)) for _ in range(DEPTH)]

    def read(thread: int) -> None:
        for slot in order[thread::DEPTH]:
            assert os.preadv(file, [buffers[thread]], slot * page_bytes) == page_bytes

    with ThreadPoolExecutor(DEPTH) as threads:
        list(threads.map(read, range(DEPTH)))
    os.close(file)


def write_all(store: PrefixStore, keys: Sequence[bytes], page: memoryview) -> None:
    """As fast as its queue takes them."""
    for number, key in enumerate(keys):
        page[:8] = number.to_bytes(8, "little")
        while not store.write(key, page):
            time.sleep(0.001)
    while store.stats().queued_bytes:
        time.sleep(0.001)


def read_all(store: PrefixStore, keys: Sequence[bytes], page_bytes: int, memory: Sequence[memoryview]) -> None:
    """One prefix after the other, two on their way, as a server asks."""
    at_once = len(memory[0]) // page_bytes
    tickets: list[Ticket] = []
    good: list[int] = []
    for turn, first in enumerate(range(0, len(keys), at_once)):
        if turn >= 2:
            tickets[turn - 2].wait()
        views = [memory[turn % 2][at * page_bytes : (at + 1) * page_bytes] for at in range(at_once)]
        pages = list(zip(keys[first : first + at_once], views, strict=False))
        tickets.append(store.read(pages, lambda result: good.append(sum(result.valid))))
    for ticket in tickets:
        ticket.wait()
    assert sum(good) == len(keys)


class _Opened:
    def __init__(self, folder: Path, settings: dict[str, Any]) -> None:
        self._store = PrefixStore.open(folder, **settings)

    def rate(self, keys: Sequence[bytes], page_bytes: int) -> dict[str, float]:
        at_once = max(1, AT_ONCE_BYTES // page_bytes)
        memory = [memoryview(mmap.mmap(-1, at_once * page_bytes)) for _ in range(2)]
        for one in memory:
            one[:] = bytes(len(one))  # A server's has been touched long ago, too.
        return rate(len(keys) * page_bytes, lambda: read_all(self._store, keys, page_bytes, memory))

    def close(self) -> None:
        self._store.close(60)


def measure_rates(folder: Path, nbytes: int, page_bytes: int) -> dict[str, dict[str, float]]:
    keys = [key_of(number) for number in range(nbytes // page_bytes)]
    nbytes = len(keys) * page_bytes
    page = memoryview(mmap.mmap(-1, page_bytes))
    page[:] = random.Random(1).randbytes(page_bytes)
    settings: dict[str, Any] = {"size_bytes": 2 * nbytes, "page_bytes": page_bytes, "model": MODEL}
    found = {}
    with_room = PrefixStore.open(folder / "store", **settings)
    print(with_room.how)
    found["store: write"] = rate(nbytes, lambda: write_all(with_room, keys, page))
    with_room.close(60)
    (pages_file,) = (folder / "store").glob("*.pages")
    shuffled = random.Random(2).sample(range(len(keys)), len(keys))
    for turn in ("first", "second"):
        found[f"raw: in order, {turn}"] = rate(nbytes, lambda: raw_reads(pages_file, page_bytes, range(len(keys))))
        found[f"raw: at random, {turn}"] = rate(nbytes, lambda: raw_reads(pages_file, page_bytes, shuffled))
        with contextlib.closing(_Opened(folder / "store", settings)) as opened:
            found[f"store: in order, {turn}"] = opened.rate(keys, page_bytes)
            found[f"store: at random, {turn}"] = opened.rate([keys[at] for at in shuffled], page_bytes)
    turns = 1 + GIB // page_bytes

    def check() -> None:
        for _ in range(turns):
            page_check(page, b"")

    found["checksum alone"] = rate(turns * page_bytes, check)
    return found


def read_layers(file: LayerFile, memory: Sequence[mmap.mmap]) -> tuple[float, float]:
    """Bytes a second, and the longest wait for one; the next is on its way meanwhile, as in a step."""
    coming, number, longest_s = [list(file.read(layer, memory[layer])) for layer in range(2)], 0, 0.0
    began_s = last_s = time.perf_counter()
    while last_s - began_s < LAYERS_S:
        for piece in coming[number % 2]:
            piece.result()
        now_s = time.perf_counter()
        longest_s, last_s = max(longest_s, now_s - last_s), now_s
        coming[number % 2] = list(file.read((number + 2) % LAYERS, memory[number % 2]))
        number += 1
    for piece in (*coming[0], *coming[1]):
        piece.result()
    return number * LAYER_BYTES / (last_s - began_s), longest_s


def _read_until(
    over: threading.Event, store: PrefixStore, keys: Sequence[bytes], page_bytes: int, memory: Sequence[memoryview]
) -> None:
    while not over.is_set():
        read_all(store, keys, page_bytes, memory)


def measure_beside_layers(folder: Path, nbytes: int, page_bytes: int) -> dict[str, float]:
    keys = [key_of(number) for number in range(nbytes // page_bytes)]
    part = max(1, BESIDE_BYTES // page_bytes)
    pages = [memoryview(mmap.mmap(-1, part * page_bytes)) for _ in range(2)]
    settings: dict[str, Any] = {"size_bytes": 2 * nbytes, "page_bytes": page_bytes, "model": MODEL}
    with contextlib.closing(LayerFile(folder, LAYERS, LAYER_BYTES)) as file:
        memory = [mmap.mmap(-1, LAYER_BYTES) for _ in range(2)]
        memory[0][:] = random.Random(4).randbytes(LAYER_BYTES)
        for layer in range(LAYERS):
            file.write(layer, memory[0])
        store = PrefixStore.open(folder / "store", **settings)
        pages[0][:page_bytes] = random.Random(1).randbytes(page_bytes)
        write_all(store, keys, pages[0][:page_bytes])
        store.close(60)
        found = {}
        for turn in range(1, ROUNDS + 1):
            for how in ("alone", "unordered", "in turns"):
                turns, over = turns_of(folder.stat().st_dev) if how == "in turns" else None, threading.Event()
                store = PrefixStore.open(folder / "store", **settings, turns=turns)
                beside = threading.Thread(target=_read_until, args=(over, store, keys, page_bytes, pages))
                if how != "alone":
                    beside.start()
                rate, longest_s = read_layers(file, memory)
                pages_rate = store.stats().bytes_read / LAYERS_S
                over.set()
                if how != "alone":
                    beside.join()
                store.close(60)
                found[f"{how}, {turn}: layers, GB/s"] = rate / 1e9
                found[f"{how}, {turn}: longest wait, s"] = longest_s
                found[f"{how}, {turn}: pages, GB/s"] = pages_rate / 1e9
    return found


def measure_opening(folder: Path) -> dict[str, float]:
    """Seconds, by number of pages. The pages themselves are holes: an index is what is read."""
    found = {}
    for pages in OPENED:
        path = folder / f"open{pages}"
        settings: dict[str, Any] = {"size_bytes": pages * 4096 * 2, "page_bytes": 4096, "model": MODEL}
        PrefixStore.open(path, **settings).close(5)
        (index,) = path.glob("*.index")
        records = np.zeros(pages, RECORD)
        records["key"] = np.frombuffer(random.Random(3).randbytes(32 * pages), "V32")
        records["check"], records["generation"], records["used"] = 1, 1, 1
        with index.open("r+b") as file:
            file.seek(8192)
            file.write(records.tobytes())
        began = time.perf_counter()
        store = PrefixStore.open(path, **settings)
        found[f"open with {pages:,} pages: s"] = time.perf_counter() - began
        keys = [bytes(key) for key in records["key"][: min(pages, 10_000)].tolist()]
        began = time.perf_counter()
        assert store.has(keys) == len(keys)
        found[f"has, of {pages:,} pages: us a key"] = (time.perf_counter() - began) / len(keys) * 1e6
        store.close(5)
        shutil.rmtree(path)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--gib", type=float, default=4.0)
    parser.add_argument("--page", type=parse_bytes, default="2MiB")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--beside-layers", action="store_true")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    rates, nbytes = dict[str, dict[str, float]](), int(arguments.gib * GIB)
    try:
        if arguments.beside_layers:
            others = measure_beside_layers(folder, nbytes, arguments.page)
        else:
            rates, others = measure_rates(folder, nbytes, arguments.page), measure_opening(folder)
    finally:
        shutil.rmtree(folder)
    print(f"{arguments.gib} GiB in pages of {format_bytes(arguments.page)}, {os.cpu_count()} cores")
    for name, values in rates.items():
        print(f"{name:<26} {values['gb_s']:6.2f} GB/s  {values['cpu_s_per_gb']:6.3f} s of CPU for a GB")
    for name, value in others.items():
        print(f"{name:<38} {value:8.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rates": rates, "others": others}, indent=2) + "\n")


if __name__ == "__main__":
    main()
