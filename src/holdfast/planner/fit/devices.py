"""Chooses which GPUs are used, largest first, and writes the `Decision`s about them: parallel size, unused
GPUs, dtypes.

A share is no larger than the smallest GPU's, so adding a small GPU to a large one can cost more than it brings. Chooses
no limits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from holdfast.footprint.cpu import Limits
from holdfast.footprint.identity_key import Same
from holdfast.observability.decisions import Decision
from holdfast.planner.fit.count import count_plan as counted_fit
from holdfast.planner.fit.count import counted_for, plain_type
from holdfast.planner.fit.result import Plan, describe_devices, device_budget
from holdfast.planner.inputs.question import Device, Question
from holdfast.planner.sizing.dtype import chosen_dtype, chosen_kv_dtype, outgrows_half
from holdfast.planner.sizing.engine_weights import engine_weights
from holdfast.planner.sizing.sharded_weights import AS_STORED
from holdfast.planner.sizing.terms import encoder_images
from holdfast.units import counted, format_bytes


def largest_first(question: Question, tensor_parallel: int, lowest: Limits) -> Question:
    """With the devices in the order in which so many ranks take them. One rank has the device that holds most: what it
    keeps beside the weights is not the same on every GPU. Those of several nodes stay where they are."""
    machine, utilization = question.machine, question.utilization
    if question.settings.nodes > 1:
        return question
    ranks = tensor_parallel * question.settings.pipeline_parallel
    if not _differ(machine.devices) or tensor_parallel == len(machine.devices):
        return question
    devices = sorted(machine.devices, key=lambda device: -device_budget(device, utilization))
    if ranks > 1:
        return _with_order(question, devices)

    def alone(device: Device) -> tuple[int, int]:
        found = counted_fit(_with_order(question, [device]), 1, lowest)
        return found.longest_tokens, -found.short_bytes

    first = max(devices, key=alone)
    return _with_order(question, [first, *(device for device in devices if device is not first)])


def _differ(devices: Sequence[Device]) -> bool:
    """In anything but their places. A plan asks this of the same few devices hundreds of times."""
    return len(devices) > 1 and any(_traits(device) != _traits(devices[0]) for device in devices[1:])


def _traits(device: Device) -> tuple[object, ...]:
    kind = None if device.gpu is None else device.gpu.key
    return (
        device.name,
        kind,
        device.total_bytes,
        device.free_bytes,
        device.budget_bytes,
        device.measured,
        device.held_by,
        device.unified,
    )


def without_wider(question: Question) -> Question | None:
    """Without GPUs that have no bfloat16, where they would make the others compute in float32; None: there is no such
    choice."""
    machine, settings = question.machine, question.settings
    if machine.kind != "gpu" or settings.dtype != "auto" or not outgrows_half(question.model.spec):
        return None
    able = tuple(device for device in machine.devices if device.gpu is None or device.gpu.bf16)
    least = (settings.tensor_parallel or 1) * settings.pipeline_parallel
    if len(able) == len(machine.devices) or len(able) < least:
        return None
    others = tuple(device for device in machine.devices if device not in able)
    return replace(question, machine=replace(machine, devices=able, aside=(*machine.aside, *others)))


def wider_left_out(found: Plan) -> Decision:
    machine = found.question.machine
    left = describe_devices([device for device in machine.aside if device.gpu is not None and not device.gpu.bf16])
    reason = f"left out: {left}, which has no bfloat16: with it all GPUs would use float32, and hold less"
    return Decision("gpus", describe_devices([rank.device for rank in found.ranks]), reason, "planner")


def _with_order(question: Question, devices: list[Device]) -> Question:
    return replace(question, machine=replace(question.machine, devices=tuple(devices)))


def parallel_size(found: Plan) -> Decision:
    question = found.question
    devices, used = len(question.machine.devices), len(found.ranks)
    what = "it" if question.stated else "it with that context length"
    if question.settings.tensor_parallel is not None:
        return Decision("tensor_parallel_size", str(found.tensor_parallel), _as_set(found), "set")
    if not found.fits:
        reason = f"it does not fit; of {devices} GPUs this split holds the most"
    elif found.pipeline_parallel > 1:
        reason = f"the fewest GPUs in each of {found.pipeline_parallel} stages that hold {what}, of {devices}"
    elif used == devices:
        reason = f"fewer GPUs do not hold {what}"
    else:
        reason = f"the fewest GPUs that hold {what}, of {devices}"
    return Decision("tensor_parallel_size", str(found.tensor_parallel), reason, "planner")


def _as_set(found: Plan) -> str:
    """Which GPUs so many are: of a stage, of a replica, or of all."""
    question, stages, each = found.question, found.pipeline_parallel, counted(found.tensor_parallel, "GPU")
    devices, used = len(question.machine.devices), len(found.ranks)
    every = f"all {devices} GPUs" if stages > 1 else "all GPUs"
    every = f"the {counted(devices, 'GPU')} of each replica" if question.settings.data_parallel > 1 else every
    left = f"{devices - used} of {devices} GPUs {'is' if devices - used == 1 else 'are'} unused"
    if stages > 1:
        return f"{each} in each of {stages} stages: {every if used == devices else left}"
    return every if used == devices else f"as set: {left}"


def set_stages(found: Plan) -> Iterator[Decision]:
    """Where a number of them was asked for: which layers are on which GPUs."""
    if found.pipeline_parallel == 1 or found.own is not None:  # Ranks of this engine on a CPU have rows of their own.
        return
    said = list[str]()
    for index, layers in enumerate(found.stage_layers):
        used = [str(rank.device.index) for rank in found.ranks if rank.stage == index]
        which = f"layer {layers[0]}" if len(layers) == 1 else f"layers {layers[0]} to {layers[-1]}"
        said.append(f"{which} on {'GPU' if len(used) == 1 else 'GPUs'} {', '.join(used)}")
    yield Decision("pipeline_parallel_size", str(found.pipeline_parallel), "; ".join(said), "set")


def whole_experts(found: Plan) -> Decision:
    """What dealing experts out whole comes to with these sizes. On GPUs engines of --data-parallel-size do it together;
    here each is by itself."""
    settings, on_gpu = found.question.settings, found.question.machine.kind == "gpu"
    ranks, engines = max(found.tensor_parallel, settings.ranks), settings.data_parallel
    together, device = ranks * (engines if on_gpu else 1), "GPU" if on_gpu else "rank"
    if together == 1:
        reason = (
            f"experts are dealt out among the {device}s of -tp, and one has all of them; -tp 2 or more divides them"
        )
        if found.pipeline_parallel > 1:
            reason += "; -pp divides layers, and no experts"
        if engines > 1:
            reason += "; engines of -dp share nothing"
        return Decision("enable_expert_parallel", "without effect", reason, "set")
    count = max(layer.experts.count for layer in found.question.model.spec.layers if layer.experts is not None)
    each = f"{count // together}" if count % together == 0 else f"{count // together} or {count // together + 1}"
    who, without = f"{together} {device}s", "a part of every one"
    if on_gpu and engines > 1:
        who, without = f"the {together} {device}s of {engines} replicas", "every replica has all of them"
    elif found.pipeline_parallel > 1:
        who = f"the {ranks} {device}s of a stage"
    reason = f"each of {who} has {each} of the {count} experts of a layer, whole; without it, {without}"
    return Decision("enable_expert_parallel", each, reason, "set")


def stages(found: Plan) -> Decision:
    """Where they were left to us, and one does not do."""
    devices, size = len(found.question.machine.devices), found.tensor_parallel
    which = "the fewest stages that do" if found.question.stated else "stages that leave the longest context"
    reason = f"tensor parallelism alone does not fit it on the {devices} GPUs: {which}, of {counted(size, 'GPU')} each"
    return Decision("pipeline_parallel_size", str(found.pipeline_parallel), reason, "planner")


def of_whole_machines(found: Plan, alone: Plan) -> Plan:
    """Says why it is in stages, where `alone`, without, would fit too."""
    size, stages = found.tensor_parallel, found.pipeline_parallel
    devices = len(found.question.machine.devices)
    why = f"of {devices}, as many as most machines have; each layer over {alone.tensor_parallel} would fit too"
    reason = f"the fewest stages of {counted(size, 'GPU')} that leave as long a context"
    sizes = (
        Decision("tensor_parallel_size", str(size), why, "planner"),
        Decision("pipeline_parallel_size", str(stages), reason, "planner"),
    )
    said = [two for one in found.decisions for two in (sizes if one.field == "tensor_parallel_size" else (one,))]
    return replace(found, decisions=tuple(said))


def left_out(found: Plan) -> Iterator[Decision]:
    """Of GPUs that differ."""
    question, used = found.question, [rank.device for rank in found.ranks]
    rest = question.machine.devices[len(used) :]
    if not rest or not _differ(question.machine.devices):
        return
    if question.settings.tensor_parallel is not None:
        why = "as many as requested"
    elif not found.fits:
        why = "with the others it would not fit either"
    elif question.stated:
        why = "they are enough"
    else:
        why = "the others would not make the context longer"
    sizes = " and ".join(dict.fromkeys(f"{device.name} ({format_bytes(device.total_bytes)})" for device in rest))
    reason = f"the largest: {why}; left out: {sizes}; commands make only the GPUs used visible to the engine"
    yield Decision("gpus", describe_devices(used), reason, "planner")


def loading(found: Plan) -> Iterator[Decision]:
    """Where it takes more than the budget has, before anything is served."""
    for rank in found.ranks:
        if rank.loading_short_bytes:
            sums = " + ".join(f"{term.name} {format_bytes(term.nbytes)}" for term in rank.loading)
            short, budget = format_bytes(rank.loading_short_bytes), format_bytes(rank.budget_bytes)
            held = "staging is its largest tensor as stored, freed once it is loaded"
            reason = f"{sums}: {short} more than the budget of {budget}; {held}"
            yield Decision("loading", format_bytes(rank.loading_bytes), reason, "planner")


def engine(found: Plan) -> Iterator[Decision]:
    """Where memory is counted as llama.cpp takes it."""
    question, rank = found.question, found.ranks[0]
    if rank.device.kind != "gpu" or counted_for(question, rank.device, len(found.ranks)) != "llama.cpp":
        return
    said = "a buffer for steps of 512 tokens with their logits, and no CUDA graphs; other engines use more or less"
    why, source = ("as set", "set") if question.engine == "llama.cpp" else ("it is the engine for GGUF", "model")
    yield Decision("engine", "llama.cpp", f"{why}: memory is counted as llama.cpp allocates it, {said}", source)


def products(found: Plan) -> Iterator[Decision]:
    """How this engine multiplies weights of eight bits on a GPU that is known."""
    question, rank = found.question, found.ranks[0]
    held, gpu = engine_weights(Same(question.model)), rank.device.gpu
    if gpu is None or gpu.compute_capability is None or held is None or not held.quantized:
        return
    if counted_for(question, rank.device, len(found.ranks)) == "holdfast":
        yield from held.products(gpu.compute_capability, rank.device.name)


def weights(found: Plan) -> Iterator[Decision]:
    """Where a file has plain numbers of another type than they are kept in."""
    model, kept = found.question.model, found.weights_as
    stored = plain_type(Same(model)) if model.format == "gguf" else None
    if stored is None or kept in (stored, AS_STORED) or model.stored is None:
        return
    size = format_bytes(sum(tensor.nbytes for tensor in model.stored.values()))
    reason = f"the file's {stored} is converted to dtype, as Holdfast and vLLM load it; llama.cpp keeps"
    yield Decision("weights", f"{format_bytes(found.weights_bytes)} in {kept}", f"{reason} {stored}: {size}", "model")


def encoder(found: Plan) -> Iterator[Decision]:
    """What is kept for images, where the config tells how large they are."""
    spec, step = found.question.model.spec, found.limits.max_num_batched_tokens
    kept = sum(term.nbytes for term in found.ranks[0].terms if term.name == "encoder")
    if spec.encoder is None or not kept:
        return
    images = counted(encoder_images(spec, found.limits), "image")
    reason = (
        f"{images} of {spec.encoder.patches:,} patches at once, beyond the activations, and the"
        f" {spec.encoder.tokens:,} tokens of each image: as many as engines reserve for a step of {step:,} tokens;"
        " not needed for text only (--language-model-only)"
    )
    yield Decision("encoder", format_bytes(kept), reason, "model")


def number_types(found: Plan) -> Iterator[Decision]:
    """Where they were left to us."""
    asked = found.question.settings
    if asked.dtype == "auto":
        yield chosen_dtype(found.question, len(found.ranks))
    if asked.kv_cache_dtype == "auto":
        yield chosen_kv_dtype(found.question, len(found.ranks))
