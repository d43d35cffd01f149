"""Rows of the table of remedies that change more than settings: more GPUs, bigger ones, RAM as a second tier, and
another model at last.

Each yields candidates; what fits is found by the search in remedies.py. Tiers are an estimate until the engine has
them, and say so.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from holdfast.hardware import gpus
from holdfast.hardware.gpus import Gpu
from holdfast.planner.advice.expert_offload import expert_tiers
from holdfast.planner.advice.offload import RAM_SHARE, place, placed_tiers
from holdfast.planner.advice.quantized_remedies import SMALLER_KV, bits, quality_price, smaller_kv, variants
from holdfast.planner.advice.remedy import (
    LEAST_CONTEXT,
    USUAL_UTILIZATION,
    Change,
    Remedy,
    also,
    attempts,
    is_absolute,
    model_setting,
    planned,
    with_settings,
    without_hand,
)
from holdfast.planner.advice.search import first_that_fits, that_fit
from holdfast.planner.advice.throughput import NVME_GB_S, shown_rate
from holdfast.planner.compat.gpu_kernels import lacks_engine
from holdfast.planner.engines.command import written_size
from holdfast.planner.fit.count import least_bytes
from holdfast.planner.fit.expert_placement import ExpertPlacement, place_larger
from holdfast.planner.fit.placement import can_stream, may_stream, pinned_room
from holdfast.planner.fit.placement import place as place_layers
from holdfast.planner.fit.search import Plan, Question, describe_devices, fit
from holdfast.planner.inputs.machine import NVME_LIMIT_BYTES, Asked, machine_of
from holdfast.planner.inputs.question import Device, Machine, PlannedModel
from holdfast.planner.models.model_sources import MADE_WHILE_LOADING
from holdfast.planner.models.quantize import quantized_as
from holdfast.planner.models.variants import GGUF_TYPES, Variant, longer_models, smaller_models
from holdfast.planner.sizing.default_limits import RAM_STEP_BYTES
from holdfast.planner.sizing.kv_cost import largest
from holdfast.planner.sizing.sharded_weights import parallel_sizes
from holdfast.units import GIB, MIB, counted, format_bytes

LARGEST_TENSOR_PARALLEL, STAGES = 8, (2, 3, 4, 6, 8, 12, 16)
RAM_STEPS_TRIED = 8
"""What a larger budget holds takes a little more itself."""
RAM_SIZES_GIB = (4, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
ONLY_HOLDFAST_MAKES = frozenset(MADE_WHILE_LOADING["holdfast"]) - frozenset(MADE_WHILE_LOADING["vllm"])
BIGGER = 1.05
"""Cards of one size report a little more or less."""
SMALLER_MODELS_TRIED, LONGER_MODELS_TRIED = 6, 24
CONTEXT_STEP = 256
"""Of contexts that are tried beside layers in RAM."""
_WHOLE = 99
"""Bits of weights that stay as they are."""
TIERS_NOTE = (
    "an estimate of what a server with offloading would need and reach, not something to run: Holdfast streams layers"
    " of models that it runs on one GPU, and planned again this does not fit. llama.cpp computes such layers on the"
    " CPU; vLLM 0.26 accepted its offload flags but did not apply them unless VLLM_USE_V2_MODEL_RUNNER=0"
)


def _models(found: Plan, *, one_gpu: bool = False) -> list[tuple[Variant | None, Question]]:
    """As it is, and quantized: most bits first, of as many bits those that are published. A GGUF only where llama.cpp
    is planned for, or the GPUs run nothing else: others would have to make one. What only Holdfast makes while it loads
    it, on `one_gpu` alone."""
    devices = [device.gpu for device in found.question.machine.devices]
    any_type = found.question.engine == "llama.cpp" or lacks_engine("vllm", devices) is not None
    others = [one for one in variants(found) if any_type or one.method not in GGUF_TYPES]
    if not one_gpu:
        others = [one for one in others if one.published or one.model.made_as not in ONLY_HOLDFAST_MAKES]
    others.sort(key=lambda one: (-bits(one), not one.published))
    return [(None, found.question), *((one, replace(found.question, model=one.model)) for one in others)]


def _alone(device: Device) -> bool:
    """No second chip goes into a Mac."""
    return device.unified if device.gpu is None else device.gpu.alone


def more_gpus(found: Plan, offered: Sequence[Remedy]) -> Iterator[Iterable[Change]]:
    """The fewest that hold it as it is, and quantized where that takes fewer. Not of several nodes."""
    before, devices = len(offered), found.question.machine.devices
    fixed = any(_alone(device) or (device.gpu is not None and device.gpu.of_laptop) for device in devices)
    if found.question.machine.kind == "gpu" and not fixed and found.question.settings.nodes == 1:
        for variant, question in _models(found):
            below = len(offered[-1].fit.ranks) if len(offered) > before else None
            yield _layouts(question, variant, below)


def _layouts(question: Question, variant: Variant | None, below: int | None) -> Iterator[Change]:
    devices = question.machine.devices
    smallest = min(devices, key=lambda device: device.free_bytes)
    sizes = parallel_sizes(question.model.spec, LARGEST_TENSOR_PARALLEL)
    alike = len({device.name for device in devices}) == 1
    before = str(len(devices)) if alike else describe_devices(devices)
    what = "" if variant is None else f", {variant.label}"
    for tensor, stages in [(size, 1) for size in sizes] + [(sizes[-1], stages) for stages in STAGES]:
        count = tensor * stages
        if count <= len(devices) or (below is not None and count >= below):
            continue
        # As flags name them: whole ones of the catalogue's where it knows the GPU, within a budget that was set.
        named: dict[str, object] = {} if smallest.gpu is None else {"gpu": f"{smallest.gpu.key}x{count}"}
        size = smallest.free_bytes if smallest.gpu is None else None
        size = size if smallest.budget_bytes is None else _named_budget(smallest.budget_bytes, question)
        named |= {} if size is None else {"vram": f"{written_size(size)}x{count}"}
        parallel = {"tensor_parallel_size": tensor}
        if stages != question.settings.pipeline_parallel:
            parallel["pipeline_parallel_size"] = stages
        more = replace(question, machine=_machine(question, named))
        for extra in attempts(more):
            yield Change(
                more,
                {"gpus": count, **named, **parallel, **model_setting(variant), **extra},
                f"{count} x {smallest.name} instead of {before}{what}{also(extra)}",
            )


def _named_budget(budget: int, question: Question) -> int:
    """As --vram has it: what the GPU has, where the budget is a share of that."""
    share = question.settings.utilization
    return budget if share is None else -int(-budget // share)


def _machine(question: Question, named: Mapping[str, object]) -> Machine:
    """The machine that `holdfast plan` would make of --gpu and --vram; its RAM stays."""
    words = {name: str(value) for name, value in named.items()}
    made, machine, share = (
        machine_of(Asked(gpu=words.get("gpu"), vram=words.get("vram"))).machine,
        question.machine,
        question.settings.utilization,
    )
    if share is not None:
        devices = (
            device if device.budget_bytes is None else replace(device, budget_bytes=int(device.budget_bytes * share))
            for device in made.devices
        )
        made = replace(made, devices=tuple(devices))
    return replace(
        made,
        ram_bytes=machine.ram_bytes,
        nvme_bytes=machine.nvme_bytes,
        nvme_limit_bytes=machine.nvme_limit_bytes,
        nvme_path=machine.nvme_path,
        host=machine.host,
    )


def left_to_the_plan(found: Plan, offered: Sequence[Remedy]) -> Iterator[list[Change]]:
    """Without what was set by hand of layers or experts in RAM, or what refuses these: all on the GPU, or as many as
    fit."""
    question, undone = without_hand(found.question)
    if question is found.question or not can_stream(question):
        return
    what = f"{found.question.settings.offload.flags} left out"
    whole = fit(question)
    if whole.fits:
        yield [Change(question, undone, f"{what}: all layers on the GPU", fit=whole)]
        return
    change = _streamed(None, question)
    if change is not None:
        yield [replace(change, settings={**undone, **change.settings}, text=f"{what}: {change.text}")]


def tiers_here(found: Plan, offered: Sequence[Remedy]) -> Iterator[list[Change]]:
    """On the GPU and in RAM, as this engine serves it: RAM costs less than a GPU, also where it has to be had. With KV
    in fewer bits where that alone is lacking; of as many bits of weights the one that moves least, the fastest first;
    and a shorter context where RAM holds the layers of nothing else of this model."""
    question, undone = without_hand(found.question)
    if len(question.machine.devices) > 1:
        yield from _one_of_several(question, undone)
        return
    whole, smaller = _in_ram(None, question), smaller_kv(found)
    changes = [] if whole is not None or smaller is None else [_in_ram(None, question, smaller)]
    by_bits: dict[int, Change] = {} if whole is None else {_WHOLE: whole}
    for variant, other in _models(replace(found, question=question), one_gpu=True)[1:]:
        assert variant is not None
        if bits(variant) not in by_bits:
            change = _in_ram(variant, other) or (None if smaller is None else _in_ram(variant, other, smaller))
            by_bits |= {} if change is None else {bits(variant): change}
    fastest = sorted(by_bits.items(), key=lambda one: _moved(one[1]))
    # What is slower as it is needs no remedy: it runs. Nor is a disk that is there read for more bits.
    first = fastest[0][1] if fastest else None
    changes += [
        change
        for size, change in fastest
        if change is first or (size != _WHOLE and change.tiers is not None and not change.tiers.nvme_bytes)
    ]
    if whole is None:
        changes.append(_shorter_in_ram(question))
    for one in changes:
        yield [] if one is None else [replace(one, settings={**undone, **one.settings})]


def _one_of_several(question: Question, undone: Mapping[str, object]) -> Iterator[list[Change]]:
    """On the largest alone, as a server does that is told nothing of ranks, with layers in RAM: several hold no more
    than the smallest of them lets them. Not where sizes or numbers of machines were set, or RAM is not known."""
    settings, devices = question.settings, question.machine.devices
    largest_gpu = max(devices, key=lambda device: device.free_bytes)
    left_open = settings.tensor_parallel in (None, 1) and settings.pipeline_parallel == 1
    if pinned_room(question) is None or not left_open or settings.nodes * settings.data_parallel > 1:
        return
    others = tuple(device for device in devices if device is not largest_gpu)
    machine = replace(question.machine, devices=(largest_gpu,), aside=(*question.machine.aside, *others))
    alone = with_settings(replace(question, machine=machine), tensor_parallel=None)
    change = _in_ram(None, alone)
    if change is not None:
        of_catalogue = largest_gpu.gpu is not None and not largest_gpu.measured
        named: dict[str, object] = {"gpu": largest_gpu.gpu.key} if largest_gpu.gpu and of_catalogue else {}
        if largest_gpu.budget_bytes is not None:
            named["vram"] = written_size(_named_budget(largest_gpu.budget_bytes, question))
        which = "one" if any(device.name == largest_gpu.name for device in others) else "the"
        text = f"{which} {largest_gpu.name} alone, with layers in RAM: {change.text}"
        yield [replace(change, settings={**undone, **named, **change.settings}, text=text)]


def _moved(change: Change) -> int:
    return 0 if change.tiers is None else change.tiers.moved_bytes


def _in_ram(variant: Variant | None, question: Question, kv: str | None = None) -> Change | None:
    """None: no engine runs it so, or RAM does not hold what the GPU does not. `kv`: stored in fewer bits."""
    if kv is not None:
        question = with_settings(question, kv_cache_dtype=kv)
    found = first_that_fits([variant], lambda one: _tiered(one, question))
    change = None if found is None else found[1]
    if change is None or not change.available or "nvme" in change.settings or change.tiers is None:
        return None
    if kv is None:
        return change
    price = "; ".join(one for one in (change.price, SMALLER_KV) if one)
    return replace(
        change, settings={**change.settings, "kv_cache_dtype": kv}, text=f"KV in {kv}, {change.text}", price=price
    )


def _shorter_in_ram(question: Question) -> Change | None:
    """The longest context, in whole steps, with which RAM holds the layers that do not stay; None: it was left open, or
    none is of use."""
    asked = question.settings.max_model_len
    if asked is None or question.traffic is not None or not may_stream(question):
        return None

    def change(steps: int) -> Change | None:
        return _in_ram(None, with_settings(question, max_model_len=steps * CONTEXT_STEP))

    steps = largest(LEAST_CONTEXT // CONTEXT_STEP, (asked - 1) // CONTEXT_STEP, lambda count: change(count) is not None)
    found, length = change(steps), steps * CONTEXT_STEP
    if found is None:
        return None
    settings = {**found.settings, "max_model_len": length}
    return replace(found, settings=settings, text=f"a context of {counted(length, 'token')}, {found.text}")


def tiers(found: Plan, offered: Sequence[Remedy]) -> Iterator[list[Change]]:
    """The variant that moves least, of those that do not fit without tiers, on a disk only where RAM holds none; none
    after one that runs here."""
    if any(way.kind == "tiers" for way in offered):
        return
    question, undone = without_hand(found.question)
    one_gpu = len(question.machine.devices) == 1
    models = _models(replace(found, question=question), one_gpu=one_gpu)
    changes = that_fit(models, lambda one: _tiered(*one))
    ways = [("nvme" in change.settings, change.tiers.moved_bytes, change) for _, change in changes if change.tiers]
    least = [change for *_, change in sorted(ways, key=lambda way: way[:2])[:1]]
    yield [replace(change, settings={**undone, **change.settings}) for change in least]


def _tiered(variant: Variant | None, question: Question) -> Change | None:
    short = fit(question)
    if not short.fits and may_stream(question):
        return _streamed(variant, question)
    placed = None if short.fits else place(short)
    if placed is None or not placed.resident_layers or not placed.moved_bytes:
        return None
    free = -int(-placed.ram_bytes / RAM_SHARE // 1)
    stated = question.machine.ram_bytes is not None
    disk = f", {format_bytes(placed.nvme_bytes)} on NVMe at {NVME_GB_S:g} GB/s (assumed)" if placed.nvme_bytes else ""
    return Change(
        question,
        ({} if stated else {"ram_bytes": free}) | model_setting(variant),
        f"{placed.resident_layers} of {placed.layers} layers{'' if variant is None else f' of {variant.label}'} on the"
        f" GPU, {format_bytes(placed.ram_bytes)} in RAM{disk}"
        + ("" if placed.one is None else f", about {placed.one.tokens_per_s:.1f} tokens/s for one stream")
        + ("" if stated else f"; it needs {format_bytes(free)} of free RAM"),
        available=False,
        note=TIERS_NOTE,
        tiers=placed,
        fit=short,
    )


def _streamed(variant: Variant | None, question: Question) -> Change | None:
    """As this engine does it by itself; with a disk where RAM is too small."""
    placed, disk_named = place_larger(question), {}
    if placed is not None and placed.ram_short_bytes and not question.machine.nvme_bytes:
        placed = place_layers(replace(question, machine=replace(question.machine, nvme_bytes=NVME_LIMIT_BYTES)))
        disk_named = {} if placed is None else {"nvme": f"{-(-placed.streamed.file_bytes // GIB)}GiB"}
    if placed is None or not placed.fits:
        return None
    free = placed.free_ram_bytes
    if isinstance(placed, ExpertPlacement):
        held, stays = expert_tiers(placed), f"{placed.resident_experts:,} of {placed.all_experts:,} experts"
    else:
        held = placed_tiers(placed)
        stays = f"{held.resident_layers} of {held.layers} layers"
    stated, folder = pinned_room(question) is not None, question.machine.nvme_path
    given = "--nvme-path DIR, a folder on that disk" if folder is None else f"--nvme-path {shlex.quote(folder)}"
    disk = f", {format_bytes(held.nvme_bytes)} on NVMe at {NVME_GB_S:g} GB/s (assumed)" if held.nvme_bytes else ""
    return Change(
        question,
        ({} if stated else {"ram_bytes": free}) | disk_named | model_setting(variant),
        f"{stays}{'' if variant is None else f' of {variant.label}'} on the GPU,"
        f" {format_bytes(held.ram_bytes)} in RAM{disk}"
        + ("" if held.one is None else f", about {shown_rate(held.one.tokens_per_s)} tokens/s for one stream")
        + ("" if stated else f"; it needs {format_bytes(free)} of free RAM"),
        note=("" if variant is None else f"{quality_price(variant)}. ")
        + "holdfast serve does this by itself where a model does not fit on the GPU"
        + (f", given {given}" if held.nvme_bytes else ""),
        tiers=held,
        fit=placed.plan,
        price=None if variant is None else quality_price(variant),
    )


def bigger_gpu(found: Plan, offered: Sequence[Remedy]) -> Iterator[Iterable[Change]]:
    """The smallest that holds it as it is, and the smallest for the fewest bits where that is smaller; of those that
    are easily had where one of them does. Of a chip with the machine's RAM, the same with more, then others such. Not
    of several nodes."""
    if found.question.machine.kind != "gpu" or found.question.settings.nodes > 1:
        return
    one_gpu = len(found.question.machine.devices) == 1
    before, (whole, *quantized) = len(offered), _models(found, one_gpu=one_gpu)
    if any(way.available and way.meets_request and way.kind == "quantization" for way in offered):
        quantized = []  # Fewer bits fit the GPU that is there.
    last = quantized[-1:]
    published = [one for one in quantized if one[0] and one[0].published and bits(one[0]) == bits(last[0][0] or one[0])]
    for variant, question in (whole, *(published[:1] or last)):
        most = offered[-1].fit.ranks[0].device.total_bytes if len(offered) > before else None
        yield _bigger(question, variant, most)


def _bigger(question: Question, variant: Variant | None, below_bytes: int | None) -> Iterator[Change]:
    devices = question.machine.devices
    first, alone = devices[0].gpu, _alone(devices[0])
    chip = _chip(first) if alone and first is not None else None
    many = 1 if alone else len(devices)
    own = max(device.total_bytes for device in devices)
    least = max(least_bytes(question) // many, int(own * BIGGER))
    what = "" if variant is None else f" with {variant.label}"

    def nearness(gpu: Gpu) -> tuple[object, ...]:
        return chip is not None and _chip(gpu) != chip, not gpu.common, gpu.usable_bytes, -gpu.bandwidth_gb_s

    for gpu in sorted(gpus.entries(), key=nearness):
        if (
            gpu.vendor != ("nvidia" if first is None else first.vendor)
            or gpu.usable_bytes <= least
            or (gpu.compute_capability is not None and gpu.compute_capability < (8, 0))  # Too old.
            or gpu.unified != alone
            or (alone and not gpu.alone)
            or (below_bytes is not None and gpu.usable_bytes >= below_bytes)
        ):
            continue
        count, better = many, _with_gpus(question, gpu, many)
        if better[1] is not None and len(better[1].ranks) < many:
            count = len(better[1].ranks)
            better = _with_gpus(question, gpu, count)
        if better[1] is not None:
            settings = {**better[0], **model_setting(variant)}
            yield Change(question, settings, f"{f'{count} x ' if count > 1 else ''}{gpu.name}{what}", fit=better[1])


def _with_gpus(question: Question, gpu: Gpu, count: int) -> tuple[dict[str, object], Plan | None]:
    """A budget in bytes was meant for the smaller GPU: it becomes the usual share of this one."""
    number = f"x{count}" if count > 1 else ""
    named: dict[str, object] = {"gpu": f"{gpu.key}{number}"}
    if is_absolute(question):
        named["vram"] = f"{int(gpu.usable_bytes * USUAL_UTILIZATION) // MIB}MiB{number}"
    return named, planned(replace(question, machine=_machine(question, named)))


def _chip(gpu: Gpu) -> str:
    """Without its size: m3-max of m3-max-36."""
    return gpu.key.rstrip("0123456789").removesuffix("-")


def more_ram(found: Plan, offered: Sequence[Remedy]) -> Iterator[list[Change]]:
    """Of a budget that was set, the least that does, as serve advises it; else the next size that machines have. Of
    several nodes it is of each, and what the one that lacks most needs."""
    device, machine, nodes = found.question.machine.devices[0], found.question.machine, found.question.settings.nodes
    sizes = [size * GIB for size in RAM_SIZES_GIB if size * GIB > device.total_bytes // nodes]
    if device.budget_bytes is not None:
        least = -(-(device.budget_bytes // nodes + found.short_bytes) // RAM_STEP_BYTES)
        sizes = [(least + more) * RAM_STEP_BYTES for more in range(RAM_STEPS_TRIED)]
    changes = []
    for ram in sizes if device.kind == "cpu" else ():
        # As --ram makes it: all of it is ours.
        every = ram * nodes
        other = Device(index=0, name=device.name, kind="cpu", total_bytes=every, free_bytes=every, budget_bytes=every)
        question = replace(found.question, machine=replace(machine, devices=(other,)))
        where = f" on each of {nodes} nodes" if nodes > 1 else ""
        before = format_bytes(found.ranks[0].budget_bytes // nodes)
        text = f"{format_bytes(ram)} of usable RAM{where} instead of {before}"
        changes.append(Change(question, {"ram_bytes": ram}, text))
    yield changes


def smaller_model(found: Plan, offered: Sequence[Remedy]) -> Iterator[Iterable[Change]]:
    """The next of its own series that fits, else of its kin."""
    models = smaller_models(found.question.model, _free_bytes(found))
    mine = found.question.model.spec.parameters / 1e9
    yield _instead(
        found,
        islice(models, SMALLER_MODELS_TRIED),
        lambda model: f"{model.spec.parameters / 1e9:.1f} billion parameters instead of {mine:.1f}",
    )


def longer_model(found: Plan, offered: Sequence[Remedy]) -> Iterator[Iterable[Change]]:
    """For requests that this model cannot read: one that can, of its kin and near its size where that fits."""
    assert found.question.traffic is not None
    models = longer_models(found.question.model, found.question.traffic.length, _free_bytes(found))
    mine = found.question.model.spec.max_position
    yield _instead(
        found,
        islice(models, LONGER_MODELS_TRIED),
        lambda model: f"a context length of {model.spec.max_position:,} tokens instead of {mine:,}",
    )


def _free_bytes(found: Plan) -> int:
    return sum(device.free_bytes for device in found.question.machine.devices)


def _instead(found: Plan, models: Iterable[PlannedModel], why: Callable[[PlannedModel], str]) -> Iterator[Change]:
    """Each quantized as this one was to be."""
    made_as = found.question.model.made_as
    kept = "" if made_as is None else f", in {made_as.upper()} too"
    for model, other in that_fit(models, lambda one: one if made_as is None else quantized_as(one, made_as)):
        yield Change(replace(found.question, model=other), {"model": model.name}, f"{model.name}{kept}: {why(model)}")
