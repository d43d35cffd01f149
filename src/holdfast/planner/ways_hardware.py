"""Ways out that change more than settings: more GPUs, bigger ones, RAM as a second tier, and a smaller model at last.

Each is planned before it is offered. Tiers are physics until the engine has them, and say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from holdfast.errors import ConfigurationError
from holdfast.hardware import gpus
from holdfast.hardware.gpus import Gpu
from holdfast.planner.alternatives import GGUF_TYPES, Variant, smaller_models
from holdfast.planner.fit import Fit, Question, fit
from holdfast.planner.question import Device, Machine
from holdfast.planner.tiers import place
from holdfast.planner.way import WayOut, first_that_fits, model_setting, planned, said, with_settings
from holdfast.planner.weights import parallel_sizes
from holdfast.units import GIB, format_bytes

LARGEST_TENSOR_PARALLEL, STAGES = 8, (2, 3, 4, 6, 8, 12, 16)
RAM_SIZES_GIB = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
SMALLER_MODELS_TRIED = 6
TIERS_NOTE = (
    "Holdfast has no tiers yet: this is what the link allows. llama.cpp computes such layers on the CPU instead; "
    "vLLM 0.26 took its offload flags and did not apply them unless VLLM_USE_V2_MODEL_RUNNER=0"
)


def more_gpus(found: Fit, variants: Sequence[Variant]) -> Iterator[WayOut]:
    """The fewest that hold it as it is, and quantized where that takes fewer."""
    if found.question.machine.kind != "gpu":
        return
    fewest = None
    for variant in (None, *_of_safetensors(variants)):
        question = found.question if variant is None else replace(found.question, model=variant.model)
        way = _fewest_gpus(found, question, variant, fewest)
        if way is not None:
            yield way
            fewest = len(way.fit.ranks)


def _of_safetensors(variants: Sequence[Variant]) -> list[Variant]:
    return [variant for variant in variants if variant.method not in GGUF_TYPES]


def _fewest_gpus(found: Fit, question: Question, variant: Variant | None, below: int | None) -> WayOut | None:
    devices = question.machine.devices
    smallest = min(devices, key=lambda device: device.free_bytes)
    sizes = parallel_sizes(question.model.spec, LARGEST_TENSOR_PARALLEL)
    layouts = [(size, 1) for size in sizes] + [(sizes[-1], stages) for stages in STAGES]
    for tensor, stages in layouts:
        count = tensor * stages
        if count <= len(devices) or (below is not None and count >= below):
            continue
        changed = with_settings(question, tensor_parallel=tensor, pipeline_parallel=stages)
        more = first_that_fits(replace(changed, machine=_machine(question.machine, smallest, count)))
        if more is None:
            continue
        parallel = {"tensor_parallel_size": tensor, **({"pipeline_parallel_size": stages} if stages > 1 else {})}
        what = "" if variant is None else f", {variant.label}"
        return WayOut(
            kind="more_gpus",
            change=f"{count} x {smallest.name} instead of {len(devices)}{what}{said(more[1])}",
            settings={"gpus": count, **parallel, **model_setting(variant), **more[1]},
            fit=more[0],
        )
    return None


def _machine(machine: Machine, device: Device, count: int) -> Machine:
    return replace(machine, devices=tuple(replace(device, index=index) for index in range(count)))


def tiered(found: Fit, variants: Sequence[Variant]) -> Iterator[WayOut]:
    """The variant that moves least, of those that do not fit without tiers."""
    ways = []
    for variant in (None, *_of_safetensors(variants)):
        question = found.question if variant is None else replace(found.question, model=variant.model)
        try:
            short = fit(question)
        except ConfigurationError:
            continue
        tiers = None if short.fits else place(short)
        if tiers is None or not tiers.resident_layers or not tiers.moved_bytes:
            continue
        what = "" if variant is None else f" of {variant.label}"
        speed = "" if tiers.one is None else f", about {tiers.one.tokens_per_s:.1f} tokens/s for one stream"
        ram = "" if question.machine.ram_bytes is not None else "; --ram was not stated"
        change = f"{tiers.resident_layers} of {tiers.layers} layers{what} on the GPU, "
        ways.append(
            WayOut(
                kind="tiers",
                change=change + f"{format_bytes(tiers.ram_bytes)} in RAM{speed}{ram}",
                settings={"ram_bytes": tiers.ram_bytes, **model_setting(variant)},
                fit=short,
                tiers=tiers,
                available=False,
                note=TIERS_NOTE,
            )
        )
    yield from sorted(ways, key=lambda way: way.tiers.moved_bytes if way.tiers else 0)[:1]


def bigger_gpu(found: Fit, variants: Sequence[Variant]) -> Iterator[WayOut]:
    """The smallest that holds it as it is, and the smallest for the fewest bits where that is smaller."""
    if found.question.machine.kind != "gpu":
        return
    most = None
    for variant in (None, *_of_safetensors(variants)[-1:]):
        question = found.question if variant is None else replace(found.question, model=variant.model)
        way = _smallest_gpu(question, variant, most)
        if way is not None:
            yield way
            most = way.fit.ranks[0].device.total_bytes


def _smallest_gpu(question: Question, variant: Variant | None, below_bytes: int | None) -> WayOut | None:
    devices = question.machine.devices
    here = max(device.total_bytes for device in devices)
    vendor = devices[0].gpu.vendor if devices[0].gpu is not None else "nvidia"
    for gpu in sorted(gpus.entries(), key=lambda one: (one.usable_bytes, -one.bandwidth_gb_s)):
        if gpu.vendor != vendor or gpu.unified or gpu.usable_bytes <= here or _old(gpu):
            continue
        if below_bytes is not None and gpu.usable_bytes >= below_bytes:
            return None
        better = planned(replace(question, machine=_machine(question.machine, device_of(gpu), len(devices))))
        if better is not None:
            count = len(better.ranks)
            what = "" if variant is None else f" with {variant.label}"
            return WayOut(
                kind="bigger_gpu",
                change=f"{f'{count} x ' if count > 1 else ''}{gpu.name}{what}",
                settings={"gpu": gpu.key if count == 1 else f"{gpu.key}x{count}", **model_setting(variant)},
                fit=better,
            )
    return None


def _old(gpu: Gpu) -> bool:
    return gpu.compute_capability is not None and gpu.compute_capability < (8, 0)


def device_of(gpu: Gpu, index: int = 0) -> Device:
    """A catalogue GPU with all its memory free."""
    return Device(
        index=index, name=gpu.name, kind="gpu", total_bytes=gpu.usable_bytes, free_bytes=gpu.usable_bytes, gpu=gpu,
        unified=gpu.unified,
    )  # fmt: skip


def more_ram(found: Fit) -> Iterator[WayOut]:
    device = found.question.machine.devices[0]
    if device.kind != "cpu":
        return
    for size in RAM_SIZES_GIB:
        if size * GIB <= device.total_bytes:
            continue
        other = replace(device, total_bytes=size * GIB, free_bytes=size * GIB, budget_bytes=None)
        better = planned(replace(found.question, machine=replace(found.question.machine, devices=(other,))))
        if better is not None:
            yield WayOut(
                kind="more_ram",
                change=f"{size} GiB of free RAM instead of {format_bytes(device.free_bytes)}",
                settings={"ram_bytes": size * GIB},
                fit=better,
            )
            return


def smaller_model(found: Fit) -> Iterator[WayOut]:
    """The largest that fits, of the same kin where there is one."""
    question = found.question
    budget = sum(device.free_bytes for device in question.machine.devices)
    for tried, model in enumerate(smaller_models(question.model, budget)):
        if tried == SMALLER_MODELS_TRIED:
            return
        better = planned(replace(question, model=model))
        if better is not None:
            mine, its = question.model.spec.parameters / 1e9, model.spec.parameters / 1e9
            yield WayOut(
                kind="smaller_model",
                change=f"{model.name}: {its:.1f} billion parameters instead of {mine:.1f}",
                settings={"model": model.name},
                fit=better,
            )
            return
