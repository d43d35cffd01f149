"""Rates of the store of KV pages against raw reads of the same disk, and how long it takes to open.

    python benchmarks/prefix_store.py FOLDER [--gib 4] [--page 2MiB] [--json FILE]

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
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

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
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(dir=arguments.folder))
    try:
        rates = measure_rates(folder, int(arguments.gib * GIB), arguments.page)
        opening = measure_opening(folder)
    finally:
        shutil.rmtree(folder)
    print(f"{arguments.gib} GiB in pages of {format_bytes(arguments.page)}, {os.cpu_count()} cores")
    for name, values in rates.items():
        print(f"{name:<26} {values['gb_s']:6.2f} GB/s  {values['cpu_s_per_gb']:6.3f} s of CPU for a GB")
    for name, value in opening.items():
        print(f"{name:<38} {value:8.3f}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"rates": rates, "opening": opening}, indent=2) + "\n")


if __name__ == "__main__":
    main()
