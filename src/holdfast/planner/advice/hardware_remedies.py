"""Ways out that change more than settings: more GPUs, bigger ones, RAM as a second tier, and a smaller model at last.

Each is planned before it is offered. Tiers are physics until the engine has them, and say so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from holdfast.errors import ConfigurationError, HoldfastError
from holdfast.hardware import gpus
from holdfast.hardware.gpus import Gpu
from holdfast.planner.advice.offload import NVME_GB_S, RAM_SHARE, place
from holdfast.planner.advice.remedy import (
    USUAL_UTILIZATION,
    Remedy,
    first_that_fits,
    model_setting,
    planned,
    said,
    with_settings,
)
from holdfast.planner.compat.gpu_kernels import lacks_engine
from holdfast.planner.engines.command import written_size
from holdfast.planner.fit.count import least_bytes
from holdfast.planner.fit.search import Fit, Question, fit
from holdfast.planner.inputs.machine import Asked, machine_of
from holdfast.planner.inputs.question import Device, Machine, PlannedModel
from holdfast.planner.models.quantize import quantized_as
from holdfast.planner.models.variants import GGUF_TYPES, Variant, longer_models, smaller_models
from holdfast.planner.sizing.default_limits import RAM_STEP_BYTES
from holdfast.planner.sizing.sharded_weights import parallel_sizes
from holdfast.units import GIB, MIB, format_bytes

LARGEST_TENSOR_PARALLEL, STAGES = 8, (2, 3, 4, 6, 8, 12, 16)
RAM_STEPS_TRIED = 8
"""What a larger budget holds takes a little more itself."""
RAM_SIZES_GIB = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
SMALLER_MODELS_TRIED, LONGER_MODELS_TRIED = 6, 24
TIERS_NOTE = (
    "an estimate of what a server with offloading would need and reach, not something to run: Holdfast has no"
    " offloading yet, and planned again this does not fit. llama.cpp computes such layers on the CPU instead; "
    "vLLM 0.26 accepted its offload flags but did not apply them unless VLLM_USE_V2_MODEL_RUNNER=0"
)


def more_gpus(found: Fit, variants: Sequence[Variant]) -> Iterator[Remedy]:
    """The fewest that hold it as it is, and quantized where that takes fewer. No second chip goes into a Mac."""
    devices = found.question.machine.devices
    if found.question.machine.kind != "gpu" or any(_alone(device.unified, device.gpu) for device in devices):
        return
    fewest = None
    for variant in (None, *_offered(found, variants)):
        question = found.question if variant is None else replace(found.question, model=variant.model)
        way = _fewest_gpus(found, question, variant, fewest)
        if way is not None:
            yield way
            fewest = len(way.fit.ranks)


def _alone(unified: bool, gpu: Gpu | None) -> bool:
    return unified if gpu is None else gpu.alone


def _offered(found: Fit, variants: Sequence[Variant]) -> list[Variant]:
    """A GGUF only to those who ask for llama.cpp, or have GPUs for nothing else: others would have to make one."""
    gpus = [device.gpu for device in found.question.machine.devices]
    if found.question.engine == "llama.cpp" or lacks_engine("vllm", gpus) is not None:
        return list(variants)
    return [one for one in variants if one.method not in GGUF_TYPES]


def _fewest_gpus(found: Fit, question: Question, variant: Variant | None, below: int | None) -> Remedy | None:
    devices = question.machine.devices
    smallest = min(devices, key=lambda device: device.free_bytes)
    sizes = parallel_sizes(question.model.spec, LARGEST_TENSOR_PARALLEL)
    layouts = [(size, 1) for size in sizes] + [(sizes[-1], stages) for stages in STAGES]
    for tensor, stages in layouts:
        count = tensor * stages
        if count <= len(devices) or (below is not None and count >= below):
            continue
        changed = with_settings(question, tensor_parallel=tensor, pipeline_parallel=stages)
        machine, named = _as_many(question.machine, smallest, count)
        more = first_that_fits(replace(changed, machine=machine))
        if more is None:
            continue
        parallel = {"tensor_parallel_size": tensor}
        if stages != question.settings.pipeline_parallel:
            parallel["pipeline_parallel_size"] = stages
        what = "" if variant is None else f", {variant.label}"
        return Remedy(
            kind="more_gpus",
            change=f"{count} x {smallest.name} instead of {len(devices)}{what}{said(more[1])}",
            settings={"gpus": count, **named, **parallel, **model_setting(variant), **more[1]},
            fit=more[0],
        )
    return None


def _as_many(machine: Machine, device: Device, count: int) -> tuple[Machine, dict[str, object]]:
    """So many of that device, as the flags that come with them name them: whole ones of the catalogue's where it knows
    the GPU, within a budget that was set."""
    named: dict[str, object] = {}
    size = device.budget_bytes
    if device.gpu is not None:
        named["gpu"] = f"{device.gpu.key}x{count}"
    elif size is None:
        size = device.free_bytes
    if size is not None:
        named["vram"] = f"{written_size(size)}x{count}"
    return _named(machine, named), named


def _named(machine: Machine, named: Mapping[str, object]) -> Machine:
    """The machine that `holdfast plan` would make of --gpu and --vram; RAM beside it stays."""
    made = machine_of(Asked(gpu=_text(named.get("gpu")), vram=_text(named.get("vram")))).machine
    return replace(made, ram_bytes=machine.ram_bytes, nvme_bytes=machine.nvme_bytes)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def tiered(found: Fit, variants: Sequence[Variant]) -> Iterator[Remedy]:
    """The variant that moves least, of those that do not fit without tiers."""
    ways = []
    for variant in (None, *_offered(found, variants)):
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
        stated = question.machine.ram_bytes is not None
        ram = "" if stated else f"; it needs {format_bytes(-int(-tiers.ram_bytes / RAM_SHARE // 1))} of free RAM"
        settings: dict[str, object] = {} if stated else {"ram_bytes": -int(-tiers.ram_bytes / RAM_SHARE // 1)}
        disk = f", {format_bytes(tiers.nvme_bytes)} on NVMe at {NVME_GB_S:g} GB/s (assumed)" if tiers.nvme_bytes else ""
        change = f"{tiers.resident_layers} of {tiers.layers} layers{what} on the GPU, "
        ways.append(
            Remedy(
                kind="tiers",
                change=change + f"{format_bytes(tiers.ram_bytes)} in RAM{disk}{speed}{ram}",
                settings=settings | model_setting(variant),
                fit=short,
                tiers=tiers,
                available=False,
                note=TIERS_NOTE,
            )
        )
    yield from sorted(ways, key=lambda way: way.tiers.moved_bytes if way.tiers else 0)[:1]


def bigger_gpu(found: Fit, variants: Sequence[Variant]) -> Iterator[Remedy]:
    """The smallest that holds it as it is, and the smallest for the fewest bits where that is smaller; of those that
    are easily had where one of them does. Of a chip with the machine's RAM, the same with more, then others such."""
    if found.question.machine.kind != "gpu":
        return
    most = None
    for variant in (None, *_offered(found, variants)[-1:]):
        question = found.question if variant is None else replace(found.question, model=variant.model)
        way = _smallest_gpu(question, variant, most)
        if way is not None:
            yield way
            most = way.fit.ranks[0].device.total_bytes


def _smallest_gpu(question: Question, variant: Variant | None, below_bytes: int | None) -> Remedy | None:
    devices = question.machine.devices
    here = max(device.total_bytes for device in devices)
    vendor = devices[0].gpu.vendor if devices[0].gpu is not None else "nvidia"
    alone = _alone(devices[0].unified, devices[0].gpu)
    chip = _chip(devices[0].gpu) if alone else None
    many = 1 if alone else len(devices)
    least = least_bytes(question) // many

    def nearness(gpu: Gpu) -> tuple[object, ...]:
        return chip is not None and _chip(gpu) != chip, not gpu.common, gpu.usable_bytes, -gpu.bandwidth_gb_s

    for gpu in sorted(gpus.entries(), key=nearness):
        if gpu.vendor != vendor or gpu.usable_bytes <= max(here, least) or _old(gpu):
            continue
        if gpu.unified != alone or (alone and not _alone(gpu.unified, gpu)):
            continue
        if below_bytes is not None and gpu.usable_bytes >= below_bytes:
            continue
        absolute = any(device.budget_bytes is not None for device in devices)
        named = _bigger(gpu, many, absolute=absolute)
        better = planned(replace(question, machine=_named(question.machine, named)))
        if better is not None and len(better.ranks) < many:
            named = _bigger(gpu, len(better.ranks), absolute=absolute)
            better = planned(replace(question, machine=_named(question.machine, named)))
        if better is not None:
            count = len(better.ranks)
            what = "" if variant is None else f" with {variant.label}"
            return Remedy(
                kind="bigger_gpu",
                change=f"{f'{count} x ' if count > 1 else ''}{gpu.name}{what}",
                settings={**named, **model_setting(variant)},
                fit=better,
            )
    return None


def _bigger(gpu: Gpu, count: int, *, absolute: bool) -> dict[str, object]:
    """A budget in bytes was meant for the smaller GPU: it becomes the usual share of this one."""
    number = f"x{count}" if count > 1 else ""
    named: dict[str, object] = {"gpu": f"{gpu.key}{number}"}
    if absolute:
        named["vram"] = f"{int(gpu.usable_bytes * USUAL_UTILIZATION) // MIB}MiB{number}"
    return named


def _chip(gpu: Gpu | None) -> str | None:
    """Without its size: m3-max of m3-max-36."""
    return None if gpu is None else gpu.key.rstrip("0123456789").removesuffix("-")


def _old(gpu: Gpu) -> bool:
    return gpu.compute_capability is not None and gpu.compute_capability < (8, 0)


def more_ram(found: Fit) -> Iterator[Remedy]:
    """Of a budget that was set, the least that does, as serve advises it; else the next size that machines have."""
    device = found.question.machine.devices[0]
    if device.kind != "cpu":
        return
    sizes = [size * GIB for size in RAM_SIZES_GIB if size * GIB > device.total_bytes]
    if device.budget_bytes is not None:
        least = -(-(device.budget_bytes + found.short_bytes) // RAM_STEP_BYTES)
        sizes = [(least + more) * RAM_STEP_BYTES for more in range(RAM_STEPS_TRIED)]
    for ram in sizes:
        other = Device(
            index=0, name=device.name, kind="cpu", total_bytes=ram, free_bytes=ram, budget_bytes=ram
        )  # As --ram makes it: all of it is ours.
        better = planned(replace(found.question, machine=replace(found.question.machine, devices=(other,))))
        if better is not None:
            yield Remedy(
                kind="more_ram",
                change=f"{format_bytes(ram)} of usable RAM instead of {format_bytes(found.ranks[0].budget_bytes)}",
                settings={"ram_bytes": ram},
                fit=better,
            )
            return


def smaller_model(found: Fit) -> Iterator[Remedy]:
    """The next of its own series that fits, else of its kin. Quantized as this one was to be."""
    question = found.question
    budget = sum(device.free_bytes for device in question.machine.devices)
    for tried, model in enumerate(smaller_models(question.model, budget)):
        if tried == SMALLER_MODELS_TRIED:
            return
        better = _instead(question, model)
        if better is not None:
            mine, its = question.model.spec.parameters / 1e9, model.spec.parameters / 1e9
            yield Remedy(
                kind="smaller_model",
                change=f"{model.name}{_kept(question)}: {its:.1f} billion parameters instead of {mine:.1f}",
                settings={"model": model.name},
                fit=better,
            )
            return


def _instead(question: Question, model: PlannedModel) -> Fit | None:
    """Planned with that model, quantized as this one was to be."""
    made_as = question.model.made_as
    try:
        return planned(replace(question, model=model if made_as is None else quantized_as(model, made_as)))
    except HoldfastError:
        return None


def _kept(question: Question) -> str:
    made_as = question.model.made_as
    return "" if made_as is None else f", in {made_as.upper()} too"


def longer_model(found: Fit) -> Iterator[Remedy]:
    """For requests that this model cannot read: one that can, of its kin and near its size where that fits."""
    question = found.question
    assert question.traffic is not None
    budget = sum(device.free_bytes for device in question.machine.devices)
    for model in islice(longer_models(question.model, question.traffic.length, budget), LONGER_MODELS_TRIED):
        better = _instead(question, model)
        if better is not None:
            context = model.spec.max_position
            yield Remedy(
                kind="longer_model",
                change=f"{model.name}{_kept(question)}: a context length of {context:,} tokens instead of"
                f" {question.model.spec.max_position:,}",
                settings={"model": model.name},
                fit=better,
            )
            return
