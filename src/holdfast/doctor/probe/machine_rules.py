"""What is wrong with a machine before anything is started on it. Asks nothing: judges the facts of machine.py."""

from __future__ import annotations

import re
from collections.abc import Iterator

from holdfast.doctor.build_finding import found
from holdfast.doctor.findings import Diagnosis, Evidence, Finding, Fix
from holdfast.doctor.probe.machine import MachineFacts
from holdfast.units import GIB, MIB, format_bytes, shorten

SHARED_SHARE = 0.95
"""A GPU of which less is free is shared with somebody."""
WORTH_NAMING_BYTES = 512 * MIB
SHM_LEAST_BYTES = GIB
"""What several ranks pass each other goes through /dev/shm; 64 MiB is what containers have unless told."""
RAM_LEAST_BYTES, DISK_LEAST_BYTES = 2 * GIB, 10 * GIB
USUAL_UTILIZATION = 0.90
_NO_LIBRARY = re.compile(r"(?i)library ?not ?found")


def diagnose_machine(facts: MachineFacts) -> Diagnosis:
    every = [
        *_no_driver(facts),
        *_driver(facts),
        *_holders(facts),
        *_visible(facts),
        *_links(facts),
        *_shm(facts),
        *_ram(facts),
        *_disk(facts),
    ]
    return Diagnosis(engine=None, engine_version=None, command=None, phase=None, healthy=not every, findings=every)


def _evidence(*lines: str) -> list[Evidence]:
    return [Evidence(line=line, source="machine") for line in lines]


def _no_driver(facts: MachineFacts) -> Iterator[Finding]:
    """A card that no driver answers for, as after an upgrade; a machine without cards lacks nothing."""
    if facts.every.gpus or not facts.cards:
        return
    why, fixes = _unanswered(facts)
    count = "an NVIDIA card sits" if len(facts.cards) == 1 else f"{len(facts.cards)} NVIDIA cards sit"
    seen = [*(f"PCI {place}: NVIDIA" for place in facts.cards[:4]), facts.every.reason, facts.module or ""]
    yield found(
        "driver_too_old",
        "not_memory",
        "high",
        what=f"{count} in this machine, and no driver answers: servers here see no GPU",
        why=why,
        evidence=_evidence(*filter(None, seen)),
        fixes=fixes,
    )


def _unanswered(facts: MachineFacts) -> tuple[str, list[Fix]]:
    """Why no driver answers for a card that is there, and what helps."""
    without_libraries = _NO_LIBRARY.search(facts.every.reason) is not None
    if facts.container and (without_libraries or facts.module is not None):
        return "this is a container that was started without the GPUs: the host's driver is not passed on to it", [
            Fix(
                command="docker run --gpus all IMAGE ...",
                why="start it with the GPUs; the host needs the NVIDIA"
                " container toolkit. In Kubernetes: nvidia.com/gpu in resources.limits",
            ),
            Fix(command="nvidia-smi -L", why="on the host: whether the driver answers there"),
        ]
    if facts.module is not None and without_libraries:
        return "the kernel's module is loaded, and the libraries of the driver (libnvidia-ml.so.1) are not found", [
            Fix(
                command="ldconfig -p | grep -E 'libnvidia-ml|libcuda'",
                why="whether they are there; if not, install the driver's libraries of the module's own version",
            ),
        ]
    if facts.module is not None:
        return (
            "the kernel's module is loaded and does not answer: after an upgrade its libraries are of another version",
            [
                Fix(command="sudo reboot", why="load the module that belongs to the installed libraries"),
                Fix(command="sudo dmesg | grep -iE 'nvrm|xid' | tail", why="see what the module itself says"),
            ],
        )
    return "no kernel module of NVIDIA's is loaded: none is installed for this kernel, or it failed to load", [
        Fix(command="sudo modprobe nvidia", why="load it, or see why it does not load"),
        Fix(
            command="dkms status; mokutil --sb-state",
            why="whether it was built for this kernel (uname -r), and"
            " whether Secure Boot refuses it for want of a signature",
        ),
        Fix(
            why="where there is none: install the driver (sudo ubuntu-drivers install; sudo dnf install nvidia-driver),"
            " then reboot"
        ),
    ]


def _driver(facts: MachineFacts) -> Iterator[Finding]:
    """CUDA of one major version runs on any driver of that version; of a newer one on none."""
    built, runs = facts.torch_cuda, facts.every.cuda
    if built is None or runs is None or not built.split(".")[0].isdecimal() or int(built.split(".")[0]) <= runs[0]:
        return
    newest = ".".join(map(str, runs))
    yield found(
        "driver_too_old",
        "not_memory",
        "high",
        what=f"torch was built for CUDA {built}, and the driver runs CUDA up to {newest}",
        why="a driver runs programs of its own major version of CUDA and of older ones",
        evidence=_evidence(f"driver {facts.every.driver}: CUDA {newest}", f"torch: CUDA {built}"),
        fixes=[
            Fix(why="update the driver"),
            Fix(
                command=f"pip install torch --index-url https://download.pytorch.org/whl/cu{runs[0]}{runs[1]}",
                why="or a torch that was built for this driver",
            ),
        ],
    )


def _holders(facts: MachineFacts) -> Iterator[Finding]:
    """Who holds a GPU's memory before we have started anything."""
    for gpu in facts.every.gpus:
        held = gpu.total_bytes - gpu.free_bytes
        if gpu.unified or gpu.free_bytes >= SHARED_SHARE * gpu.total_bytes or held < WORTH_NAMING_BYTES:
            continue
        share = gpu.free_bytes / gpu.total_bytes
        who = [
            f"{shorten(one.name)} (pid {one.pid})" + ("" if one.nbytes is None else f": {format_bytes(one.nbytes)}")
            for one in gpu.processes[:4]
        ]
        fixes = [Fix(command=f"kill {gpu.processes[0].pid}", why="end it, if nobody needs it")] if gpu.processes else []
        if share > 0.1:
            most = int(share * 100 - 1) / 100
            fixes.append(
                Fix(
                    changes={"--gpu-memory-utilization": f"{most:g}"},
                    price="as much less KV",
                    why=f"or use what is free: {most:g} of this GPU",
                )
            )
        if not gpu.processes:
            why = "the driver names no process, as inside a container: nvidia-smi on the host shows it"
        else:
            why = "what others hold is not there for a server; vLLM refuses to start where less than its share is free"
        yield found(
            "other_process_on_gpu",
            "configuration_overshoot",
            "high" if share < USUAL_UTILIZATION else "medium",
            what=f"GPU {gpu.index} has {format_bytes(gpu.free_bytes)} of {format_bytes(gpu.total_bytes)} free:"
            f" {who[0] if who else 'somebody'} holds {format_bytes(held)}",
            why=why,
            evidence=_evidence(*(who or [f"{format_bytes(held)} in use"])),
            fixes=fixes,
            numbers={"free_bytes": float(gpu.free_bytes), "total_bytes": float(gpu.total_bytes)},
        )


def _visible(facts: MachineFacts) -> Iterator[Finding]:
    listed = facts.environment.get("CUDA_VISIBLE_DEVICES")
    there, seen = len(facts.every.gpus), len(facts.nvidia.gpus)
    if listed is None or seen >= there:
        return
    wrong = "names no GPU" in facts.nvidia.reason or "named twice" in facts.nvidia.reason or seen == 0
    yield found(
        "tensor_parallel_unused",
        "not_memory",
        "high" if wrong else "low",
        what=f"CUDA_VISIBLE_DEVICES={listed} shows {seen} of {there} GPUs",
        why=facts.nvidia.reason or "a program sees only those that it lists",
        evidence=_evidence(f"CUDA_VISIBLE_DEVICES={listed}"),
        fixes=[Fix(command="unset CUDA_VISIBLE_DEVICES", why="all of them are seen then")],
    )


def _links(facts: MachineFacts) -> Iterator[Finding]:
    if len(facts.nvidia.gpus) < 2:
        return
    off = {name: value for name, value in facts.environment.items() if name in ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE")}
    if any(value == "1" for value in off.values()):
        lines = [f"{name}={value}" for name, value in off.items() if value == "1"]
        yield found(
            "gpu_topology",
            "not_memory",
            "medium",
            what=f"{' and '.join(lines)}: GPUs may not read each other's memory directly",
            why="each exchange between ranks goes through the CPU then; set as a remedy once, and often left behind",
            evidence=_evidence(*lines),
            fixes=[Fix(command=f"unset {' '.join(line.split('=')[0] for line in lines)}", why="let NCCL choose")],
        )
    far = sorted({link for row in facts.links for link in row} & {"SYS", "NODE"})
    if far and not any(link.startswith("NV") for row in facts.links for link in row):
        yield found(
            "gpu_topology",
            "not_memory",
            "low",
            what=f"GPUs are joined through the CPU ({', '.join(far)}), without NVLink",
            why="tensor parallelism exchanges activations twice a layer: over such links it is slow",
            evidence=_evidence(*(f"GPU {number}: {' '.join(row)}" for number, row in enumerate(facts.links))),
            fixes=[Fix(why="--pipeline-parallel-size exchanges far less; or one server on each GPU")],
        )


def _shm(facts: MachineFacts) -> Iterator[Finding]:
    if facts.shm_bytes is None or facts.shm_bytes >= SHM_LEAST_BYTES or len(facts.nvidia.gpus) < 2:
        return
    yield found(
        "shm_too_small",
        "not_memory",
        "high",
        what=f"/dev/shm has {format_bytes(facts.shm_bytes)}, and several GPUs pass each other data through it",
        why="a container has 64 MiB of it unless it is told otherwise; NCCL and worker processes need more",
        evidence=_evidence(f"/dev/shm {format_bytes(facts.shm_bytes)}"),
        fixes=[Fix(why="docker run --ipc=host, or --shm-size 16g; in Kubernetes an emptyDir with medium: Memory")],
    )


def _ram(facts: MachineFacts) -> Iterator[Finding]:
    memory = facts.memory
    if memory.available_bytes >= RAM_LEAST_BYTES:
        return
    yield found(
        "host_ram_oom",
        "does_not_fit",
        "medium",
        what=f"{format_bytes(memory.available_bytes)} of RAM are free ({memory.limited_by})",
        why="loading a model passes through RAM: a process that finds none is killed without a word",
        evidence=_evidence(*(facts.holders or (f"{format_bytes(memory.total_bytes)} in all",))),
        fixes=[Fix(why="end what holds it, or raise the container's memory limit")],
    )


def _disk(facts: MachineFacts) -> Iterator[Finding]:
    for disk in facts.disks:
        if disk.free_bytes < DISK_LEAST_BYTES and disk.what != "temporary files":
            yield found(
                "other",
                "not_memory",
                "low",
                what=f"{format_bytes(disk.free_bytes)} are free for {disk.what}: a download may be torn by that",
                why="most models are larger",
                evidence=_evidence(f"{disk.path}: {format_bytes(disk.free_bytes)} free"),
                fixes=[Fix(why="free some, or set HF_HOME or HOLDFAST_CACHE to a larger disk")],
            )
