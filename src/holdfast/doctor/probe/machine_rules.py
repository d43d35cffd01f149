"""What is wrong with a machine before anything is started on it: the facts of machine.py as the numbers and words of
rules/data/probe_machine.toml. Asks nothing.
"""

from __future__ import annotations

import re

from holdfast.doctor.build_finding import judged
from holdfast.doctor.findings import Diagnosis
from holdfast.doctor.probe.machine import MachineFacts
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.units import format_bytes, shorten

SHOWN = 4
"""Cards and processes that are named."""
_NO_LIBRARY = re.compile(r"(?i)library ?not ?found")
_WRONG_LIST = re.compile(r"names no GPU|named twice")
_PATHS = ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")


def diagnose_machine(facts: MachineFacts) -> Diagnosis:
    numbers, words = _numbers(facts), _words(facts)
    found = list(judged("driver", numbers, words, source="machine"))
    for gpu in facts.every.gpus:
        found += judged("gpu", *_of_gpu(gpu), source="machine")
    found += judged("machine", numbers, words, source="machine")
    for disk in facts.disks:
        sizes = {"disk_bytes": float(disk.free_bytes), "temporary": float(disk.what == "temporary files")}
        named = {"disk": format_bytes(disk.free_bytes), "use": disk.what, "path": disk.path}
        found += judged("disk", sizes, named, source="machine")
    return Diagnosis(engine=None, engine_version=None, command=None, phase=None, healthy=not found, findings=found)


def _numbers(facts: MachineFacts) -> dict[str, float]:
    """Without those that are not known."""
    links = {link for row in facts.links for link in row}
    built = (facts.torch_cuda or "").split(".")[0]
    numbers = {
        "gpus": len(facts.every.gpus),
        "visible": len(facts.nvidia.gpus),
        "listed": "CUDA_VISIBLE_DEVICES" in facts.environment,
        "list_is_wrong": _WRONG_LIST.search(facts.nvidia.reason) is not None,
        "cards": len(facts.cards),
        "module": facts.module is not None,
        "container": facts.container,
        "no_library": _NO_LIBRARY.search(facts.every.reason) is not None,
        "torch_major": int(built) if built.isdecimal() else None,
        "cuda_major": None if facts.every.cuda is None else facts.every.cuda[0],
        "paths_off": len(_paths_off(facts)) or None,
        "far_links": len(links & {"SYS", "NODE"}),
        "nvlinks": any(link.startswith("NV") for link in links),
        "shm_bytes": facts.shm_bytes,
        "ram_bytes": facts.memory.available_bytes,
    }
    return {name: float(value) for name, value in numbers.items() if value is not None}


def _words(facts: MachineFacts) -> dict[str, object]:
    cards = [f"PCI {place}: NVIDIA" for place in facts.cards[:SHOWN]]
    off = _paths_off(facts)
    words: dict[str, object] = {
        "cards_sit": "an NVIDIA GPU is installed"
        if len(facts.cards) == 1
        else f"{len(facts.cards)} NVIDIA GPUs are installed",
        "unanswered": "\n".join(filter(None, [*cards, facts.every.reason, facts.module])),
        "driver": facts.every.driver,
        "cuda": ".".join(map(str, facts.every.cuda or ())),
        "cuda_short": "".join(map(str, facts.every.cuda or ())),
        "torch_cuda": facts.torch_cuda,
        "visible_devices": facts.environment.get("CUDA_VISIBLE_DEVICES"),
        "paths_off_lines": "\n".join(f"{name}=1" for name in off),
        "paths_off_words": " and ".join(f"{name}=1" for name in off),
        "paths_off_names": " ".join(off),
        "far": ", ".join(sorted({link for row in facts.links for link in row} & {"SYS", "NODE"})),
        "links": "\n".join(f"GPU {number}: {' '.join(row)}" for number, row in enumerate(facts.links)),
        "shm": format_bytes(facts.shm_bytes or 0),
        "ram": format_bytes(facts.memory.available_bytes),
        "ram_limit": facts.memory.limited_by,
        "ram_holders": "\n".join(facts.holders) or f"{format_bytes(facts.memory.total_bytes)} in total",
    }
    return words | ({"reason": facts.nvidia.reason} if facts.nvidia.reason else {})


def _paths_off(facts: MachineFacts) -> list[str]:
    return [name for name, value in facts.environment.items() if name in _PATHS and value == "1"]


def _of_gpu(gpu: NvidiaGpu) -> tuple[dict[str, float], dict[str, object]]:
    """Who holds its memory before we have started anything."""
    held, share = gpu.total_bytes - gpu.free_bytes, gpu.free_bytes / gpu.total_bytes
    who = [
        f"{shorten(one.name)} (pid {one.pid})" + ("" if one.nbytes is None else f": {format_bytes(one.nbytes)}")
        for one in gpu.processes[:SHOWN]
    ]
    numbers = {
        "free_bytes": float(gpu.free_bytes),
        "total_bytes": float(gpu.total_bytes),
        "held_bytes": float(held),
        "share": share,
        "most": int(share * 100 - 1) / 100,
        "unified": float(gpu.unified),
        "processes": float(len(who)),
    }
    words: dict[str, object] = {
        "index": gpu.index,
        "free": format_bytes(gpu.free_bytes),
        "total": format_bytes(gpu.total_bytes),
        "held": format_bytes(held),
        "who": "\n".join(who),
        "first": who[0] if who else "",
        "pid": gpu.processes[0].pid if who else "",
    }
    return numbers, words
