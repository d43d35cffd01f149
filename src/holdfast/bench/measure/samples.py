"""What the server and the machine say of themselves while the load runs, once a second, in a thread of this process.

    /metrics   running, waiting, KV use, preemptions, prefix hits, under any engine's names; resident memory
    /memory    ours: what is held by tier, and the KV cache that was touched
    psutil     of a server on this machine: what its processes hold, and what the machine has left
    NVML       VRAM of its processes, what the GPUs have left, power

Each source that does not answer is left out, and is not an error. Judges nothing.
"""

from __future__ import annotations

import contextlib
import importlib
import ipaddress
import json
import re
import shlex
import threading
import time
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

import msgspec

from holdfast.bench.client.wire import trusted
from holdfast.doctor.probe.metrics_page import OK, client_for, get, read_metrics
from holdfast.hardware import nvidia
from holdfast.hardware.probe import memory, resident

EVERY_S = 1.0
_RESIDENT = re.compile(rb"^process_resident_memory_bytes(?:\{.*\})? +([0-9.e+]+)", re.MULTILINE)
_QUEUED = re.compile(
    rb"^(?:vllm|sglang):(?:request_)?queue_time_seconds_(sum|count)(?:\{.*\})? +([0-9.e+-]+)", re.MULTILINE
)
_RESTARTS = re.compile(rb"^holdfast:engine_restarts_total(?:\{.*\})? +([0-9.e+]+)", re.MULTILINE)
_INTERPRETER = re.compile(r"(?:.*/)?python[\d.]*")
POOLS = ("weights", "kv_pool", "kv_ram")
"""Terms of /memory that are taken for good."""
SAME_SIZE = 0.05
"""A GPU's memory by NVML and by CUDA differ by less."""
METRICS = ("running", "waiting", "kv_share", "preemptions", "tokens", "prefix_asked", "prefix_found")


class ServerSample(msgspec.Struct, frozen=True, kw_only=True):
    """None: nobody said."""

    at_s: float
    """On the clock of the client processes."""
    running: float | None = None
    waiting: float | None = None
    kv_share: float | None = None
    preemptions: float | None = None
    tokens: float | None = None
    prefix_asked: float | None = None
    prefix_found: float | None = None
    queue_seconds: float | None = None
    """That requests have waited in the server's queue since it started, and how many of them."""
    queued: float | None = None
    engine_restarts: float | None = None
    """Of Holdfast, whose requests outlive them."""
    ram_bytes: int | None = None
    kv_touched_bytes: int = 0
    """Of RAM, the part of the KV cache that was ever written: it grows to what was planned, and stays."""
    vram_bytes: int | None = None
    ram_free_share: float | None = None
    """Of the machine or the container that the server runs in."""
    vram_free_share: float | None = None
    """Of the fullest GPU that the server uses."""
    power_w: float | None = None
    ram_pools_bytes: int = 0
    """Of RAM, weights and pools, which are planned; without the KV cache of a CPU, which `kv_touched_bytes` has."""
    vram_pools_bytes: int = 0
    gpu_by_size: bool = False
    """NVML names no process of the server: what is said of the GPU is that of the only one that /memory can mean."""

    @property
    def steady_ram_bytes(self) -> int | None:
        return None if self.ram_bytes is None else self.ram_bytes - self.kv_touched_bytes


class ServerSampler:
    """Between `start` and `stop` in a thread; `samples` grows."""

    def __init__(self, url: str, key: str | None, *, every_s: float = EVERY_S, certificate: str = "") -> None:
        self.samples: list[ServerSample] = []
        self.engine: str | None = None
        self.settings: dict[str, str] = {}
        """Of vLLM's cache_config_info."""
        self._url, self._every_s = url.rstrip("/").removesuffix("/v1"), every_s
        self._client = client_for(key, trusted(certificate))
        self._pages = {"metrics": True, "memory": True}
        self.local = is_local(url)
        self._pids = server_pids(url) if self.local else []
        self.command = next((found for pid in self._pids if (found := command_of(pid))), None)
        """How the server was started, where it runs on this machine."""
        self.same_process: bool | None = None
        """At the end, whether a process of the beginning listens and no engine was restarted behind it; None: not
        to be seen."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._ended.set()
        self._thread.join(30)
        self.samples.append(self.read())  # A short run has one at least, and the end of a long one is known.
        self._client.close()
        if self._pids:
            self.same_process = not set(self._pids).isdisjoint(server_pids(self._url))
        if restarted(self.samples):
            self.same_process = False

    def _run(self) -> None:
        due_s = time.monotonic()
        while not self._ended.wait(max(0.0, due_s - time.monotonic())):
            due_s = max(due_s + self._every_s, time.monotonic())
            self.samples.append(self.read())

    def read(self) -> ServerSample:
        found: dict[str, Any] = {"at_s": time.monotonic()}
        found |= self._metrics()
        ledger = self._memory()
        if self._pids:
            found |= self._processes(ledger)
        found |= {name: value for name, value in ledger.items() if name not in ("ram_free_share", "vram_free_share")}
        # What is free on this machine now counts more than what was at its start.
        found = ledger | found
        found.pop("total_bytes", None)
        return ServerSample(**found)

    def _page(self, name: str) -> bytes | None:
        if not self._pages[name]:
            return None
        reply = get(self._client, f"{self._url}/{name}")
        self._pages[name] = reply.status in (
            OK,
            0,
            503,
        )  # Silence and trouble may pass; a page that is not there stays so.
        return reply.body if reply.status == OK else None

    def _metrics(self) -> dict[str, Any]:
        body = self._page("metrics")
        if body is None:
            return {}
        page = read_metrics(body, 0.0)
        self.engine, self.settings = self.engine or page.engine, dict(page.settings) or self.settings
        found: dict[str, Any] = {name: page.figures[name] for name in METRICS if name in page.figures}
        waits: dict[bytes, float] = {}
        for kind, value in _QUEUED.findall(body):
            waits[kind] = waits.get(kind, 0.0) + float(value)
        if len(waits) == 2:
            found |= {"queue_seconds": waits[b"sum"], "queued": waits[b"count"]}
        if restarts := _RESTARTS.findall(body):
            found["engine_restarts"] = sum(map(float, restarts))
        held = _RESIDENT.search(body)
        return found | ({"ram_bytes": int(float(held[1]))} if held else {})

    def _memory(self) -> dict[str, Any]:
        body = self._page("memory")
        found: dict[str, Any] = {}
        with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
            ledger = json.loads(body or b"{}")
            tier = ledger["tiers"][0]
            held, total = int(tier["measured_bytes"]), int(tier["total_bytes"])
            name = "vram" if tier["tier"] == "vram" else "ram"
            found[f"{name}_bytes"] = held
            found["total_bytes"] = int(tier["total_bytes"])
            found[f"{name}_free_share"] = max(0.0, (int(tier["free_bytes"]) - held) / total)
            found |= pools_of(ledger["terms"], touched=name == "ram")
            if name == "ram":
                terms = {term["term"]: term["measured_bytes"] for term in ledger["terms"]}
                found["kv_touched_bytes"] = int(terms.get("kv_pool") or 0)
        return found

    def _processes(self, ledger: dict[str, Any]) -> dict[str, Any]:
        held = [found.now_bytes for pid in self._pids if (found := resident(pid)) is not None]
        if not held:
            return {}
        machine = memory()
        free = machine.available_bytes / machine.total_bytes
        described = (ledger["total_bytes"], ledger["vram_bytes"]) if "vram_bytes" in ledger else None
        return {"ram_free_share": free, "ram_bytes": sum(held)} | gpu_reading(self._pids, described=described)


def restarted(samples: Sequence[ServerSample]) -> bool:
    """Whether the server says that its engine was restarted meanwhile."""
    told = [sample.engine_restarts for sample in samples if sample.engine_restarts is not None]
    return bool(told) and told[-1] > told[0]


def prefix_hit_share(samples: Sequence[ServerSample]) -> float | None:
    """Of what was looked up in the prefix cache from the first sample to the last; None: the server does not tell, or
    nothing was."""
    asked = [(sample.prefix_asked, sample.prefix_found) for sample in samples]
    known = [(every, found) for every, found in asked if every is not None and found is not None]
    if not known or known[-1][0] <= known[0][0]:
        return None
    return (known[-1][1] - known[0][1]) / (known[-1][0] - known[0][0])


def pools_of(terms: Sequence[dict[str, Any]], *, touched: bool) -> dict[str, int]:
    """`touched`: the KV cache is in RAM, and counted by what was written of it."""
    found: dict[str, int] = {}
    for term in terms:
        if term["term"] in POOLS and not (touched and term["term"] == "kv_pool"):
            name = f"{'vram' if term['tier'] == 'vram' else 'ram'}_pools_bytes"
            found[name] = found.get(name, 0) + int(term["measured_bytes"] or 0)
    return found


def gpu_reading(pids: Sequence[int], nvml: Any = None, *, described: tuple[int, int] | None = None) -> dict[str, Any]:
    """VRAM that these processes hold, what the fullest of their GPUs has left, and the power of these GPUs. In a
    container NVML may name processes by ids of the machine outside: then of the GPU that is `described` (its bytes in
    all, and held by the server), if there is one alone that it can be."""
    found = nvidia.probe(nvml=nvml)
    mine = [gpu for gpu in found.gpus if any(process.pid in pids for process in gpu.processes)]
    if not mine:
        return {} if described is None else _of_the_described(found.gpus, described, nvml)
    held = sum(process.nbytes or 0 for gpu in mine for process in gpu.processes if process.pid in pids)
    free = min(gpu.free_bytes / gpu.total_bytes for gpu in mine)
    reading: dict[str, Any] = {"vram_free_share": free} | ({"vram_bytes": held} if held else {})
    power = _power_w([gpu.uuid for gpu in mine], nvml)
    return reading | ({"power_w": power} if power is not None else {})


def _of_the_described(gpus: Sequence[nvidia.NvidiaGpu], described: tuple[int, int], nvml: Any) -> dict[str, Any]:
    total, held = described
    alike = [
        gpu
        for gpu in gpus
        if abs(gpu.total_bytes - total) <= SAME_SIZE * total and gpu.total_bytes - gpu.free_bytes >= held
    ]
    if len(alike) != 1:
        return {}
    power = _power_w([alike[0].uuid], nvml)
    reading: dict[str, Any] = {"vram_free_share": alike[0].free_bytes / alike[0].total_bytes, "gpu_by_size": True}
    return reading | ({"power_w": power} if power is not None else {})


def _power_w(uuids: Sequence[str], nvml: Any) -> float | None:
    with contextlib.suppress(Exception):  # Some GPUs do not tell, and drivers differ in how they say so.
        library = importlib.import_module("pynvml") if nvml is None else nvml
        library.nvmlInit()
        try:
            handles = [library.nvmlDeviceGetHandleByUUID(uuid) for uuid in uuids]
            return float(sum(library.nvmlDeviceGetPowerUsage(handle) for handle in handles)) / 1e3
        finally:
            library.nvmlShutdown()
    return None


def is_local(url: str) -> bool:
    host = urlsplit(url).hostname or ""
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"


def command_of(pid: int) -> str | None:
    """None: it is gone, or its words say nothing of a server. A program that an interpreter runs is named by itself."""
    import psutil

    from holdfast.doctor.command.parse import parse_command

    try:
        words = psutil.Process(pid).cmdline()
    except (psutil.Error, OSError):
        return None
    if len(words) > 1 and _INTERPRETER.fullmatch(words[0]) and not words[1].startswith("-"):
        words = [words[1].rsplit("/", 1)[-1], *words[2:]]
    elif words and _INTERPRETER.fullmatch(words[0]):
        words = [words[0].rsplit("/", 1)[-1], *words[1:]]
    text = shlex.join(words)
    return text if parse_command(text) is not None else None


def server_pids(url: str) -> list[int]:
    """Who listens there, with all its children; empty where the system does not say."""
    import psutil

    parts = urlsplit(url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    pids: set[int] = set()
    with contextlib.suppress(psutil.Error, OSError):
        for one in psutil.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN and one.laddr and one.laddr.port == port and one.pid:
                pids.add(one.pid)
                with contextlib.suppress(psutil.Error):
                    pids |= {child.pid for child in psutil.Process(one.pid).children(recursive=True)}
    return sorted(pids)
