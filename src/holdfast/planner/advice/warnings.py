"""What a plan is warned of, each with a code, a reason in numbers and what to set instead.

A warning never changes the plan. What is offered as a fix has been planned, or is arithmetic on the plan. Rules of
thumb that people know are in rules_of_thumb.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.models import ModelSpec
from holdfast.planner.advice.remedy import MOST_UTILIZATION, USUAL_UTILIZATION, planned, too_long, with_settings
from holdfast.planner.fit.search import Fit
from holdfast.planner.inputs.question import Device
from holdfast.units import GIB, counted, format_bytes

ALL_MEMORY = "HFW20"
ABOVE_SAFE = "HFW21"
KV_STARVES = "HFW22"
DESKTOP_CARD = "HFW23"
SHARED_CARD = "HFW24"
TOO_MANY_SEQUENCES = "HFW25"
CONTEXT_BEYOND_TRAFFIC = "HFW26"
IDLE_GPUS = "HFW27"
NO_KV = "HFW28"
NEIGHBOURS = "HFW29"
WITHIN_ERROR = "HFW30"
NOT_COUNTED = "HFW31"
NO_FP8 = "HFW32"
NO_BF16 = "HFW33"
TRAFFIC_BEYOND_CONTEXT = "HFW34"
PEAK_UNKNOWN = "HFW35"
LENGTHS_UNKNOWN = "HFW36"
ANSWERS_UNKNOWN = "HFW37"
INPUTS_NOT_COUNTED = "HFW38"
ADAPTERS_IN_PART = "HFW39"
UNCHECKED_SPLIT = "HFW40"

DESKTOP_UTILIZATION, SHARED_UTILIZATION = 0.85, 0.80
DESKTOP_CARD_BYTES = 25 * GIB
"""Cards up to 24 GB are those that desktops run on."""
DESKTOP_BYTES = 2 * GIB
"""What a desktop with a browser holds of a GPU; of 24 GB about 22 are left."""
STARVED_GAIN = 2
"""Utilization is too low when the usual one would give the KV pool that many times as much."""
SEQUENCES_TOO_MANY, CONTEXT_TOO_LONG = 4, 2
"""Times what KV holds, and times the traffic's P99."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWarning:
    code: str
    message: str
    field: str | None = None
    fix: str | None = None


def warnings(fit: Fit) -> tuple[PlanWarning, ...]:
    return (
        *_unknown_peak(fit),
        *_unknown_lengths(fit),
        *_longer_traffic(fit),
        *_utilization(fit),
        *_starved(fit),
        *_desktop(fit),
        *_neighbours(fit),
        *_no_kv(fit),
        *_sequences(fit),
        *_context(fit),
        *_idle(fit),
        *_margin(fit),
        *_model(fit),
        *_number_types(fit),
    )


def _shares(fit: Fit) -> bool:
    """Whether the budget is a share of the memory, rather than set in bytes."""
    return all(rank.device.budget_bytes is None for rank in fit.ranks)


def _utilization(fit: Fit) -> Iterator[PlanWarning]:
    if not _shares(fit) or fit.utilization <= MOST_UTILIZATION:
        return
    left = min(rank.device.total_bytes - rank.budget_bytes for rank in fit.ranks)
    if fit.utilization >= 0.995:
        yield PlanWarning(
            code=ALL_MEMORY,
            message=f"utilization {fit.utilization:g} leaves nothing for fragmentation, the driver and other processes:"
            " the first peak runs out of memory",
            field="gpu_memory_utilization",
            fix=f"--gpu-memory-utilization {USUAL_UTILIZATION:g}",
        )
        return
    yield PlanWarning(
        code=ABOVE_SAFE,
        message=f"utilization {fit.utilization:g} leaves {format_bytes(left)} for everything that cannot be predicted;"
        f" above {MOST_UTILIZATION:g} startup and peaks become unreliable",
        field="gpu_memory_utilization",
        fix=f"--gpu-memory-utilization {MOST_UTILIZATION:g} or less",
    )


def _starved(fit: Fit) -> Iterator[PlanWarning]:
    """Low because somebody wanted to leave room; the room comes out of the KV pool."""
    if not _shares(fit) or fit.utilization >= USUAL_UTILIZATION or fit.question.machine.kind != "gpu":
        return
    usual = planned(with_settings(fit.question, utilization=USUAL_UTILIZATION))
    if usual is None:
        return
    now = max(0, min(rank.room_bytes for rank in fit.ranks))
    then = min(rank.room_bytes for rank in usual.ranks)
    if then < STARVED_GAIN * now:
        return
    yield PlanWarning(
        code=KV_STARVES,
        message=f"utilization {fit.utilization:g} starves the KV pool: {format_bytes(now)} where"
        f" {USUAL_UTILIZATION:g} would give {format_bytes(then)}; the weights take the same either way",
        field="gpu_memory_utilization",
        fix=f"--gpu-memory-utilization {USUAL_UTILIZATION:g}",
    )


def _may_have_desktop(device: Device) -> bool:
    """A consumer card of which we do not know, or know, that something else is on it."""
    if device.kind != "gpu" or device.total_bytes > DESKTOP_CARD_BYTES or device.unified:
        return False
    consumer = any(word in device.name.lower() for word in ("geforce", "rtx", "gtx", "radeon rx", "arc"))
    return consumer and not device.measured


def _desktop(fit: Fit) -> Iterator[PlanWarning]:
    if not _shares(fit) or fit.utilization <= DESKTOP_UTILIZATION or not fit.fits:
        return
    device = next((rank.device for rank in fit.ranks if _may_have_desktop(rank.device)), None)
    if device is None:
        return
    free = device.total_bytes - DESKTOP_BYTES
    smaller = planned(with_settings(fit.question, utilization=DESKTOP_UTILIZATION))
    held = "" if smaller is not None else "; at that utilization this plan does not fit"
    without = f". Without a monitor {fit.utilization:g} is fine" if fit.utilization <= MOST_UTILIZATION else ""
    yield PlanWarning(
        code=DESKTOP_CARD,
        message=f"a desktop on {device.name} takes 1 to 2 GB of it: about {format_bytes(free)} stay free, and"
        f" {DESKTOP_UTILIZATION:g} is the utilization to start with{held}{without}",
        field="gpu_memory_utilization",
        fix=f"--gpu-memory-utilization {DESKTOP_UTILIZATION:g}" if smaller is not None else None,
    )


def _neighbours(fit: Fit) -> Iterator[PlanWarning]:
    for rank in fit.ranks:
        device = rank.device
        who = f" ({', '.join(device.held_by)})" if device.held_by else ""
        wanted = device.budget_bytes
        if wanted is None:
            wanted = int(device.total_bytes * fit.utilization) if device.kind == "gpu" else 0
        if wanted > device.free_bytes:
            lost = format_bytes(wanted - device.free_bytes)
            yield PlanWarning(
                code=NEIGHBOURS,
                message=f"{device.name} has {format_bytes(device.free_bytes)} free: {lost} less than"
                f" requested{who}. vLLM refuses to start like this",
                field="gpu_memory_utilization",
                fix="stop what holds the memory" if device.held_by else "find what holds the rest",
            )
        elif device.held_by and _shares(fit) and fit.utilization > SHARED_UTILIZATION:
            yield PlanWarning(
                code=SHARED_CARD,
                message=f"{device.name} is shared{who}: what the others allocate later is not available to the server",
                field="gpu_memory_utilization",
                fix=f"--gpu-memory-utilization {SHARED_UTILIZATION:g}, or isolate the GPU",
            )


def _no_kv(fit: Fit) -> Iterator[PlanWarning]:
    rank = min(fit.ranks, key=lambda one: one.room_bytes)
    if fit.kv_tokens > 0:
        return
    loading = fit.lacks_for_loading(rank)
    first, second, *_ = sorted(rank.loading if loading else rank.terms, key=lambda term: -term.nbytes)
    what = "it cannot even be loaded, so the KV pool has 0 tokens" if loading else "the KV pool has 0 tokens"
    yield PlanWarning(
        code=NO_KV,
        message=f"{what}: nothing is left of {format_bytes(rank.budget_bytes)}; {first.name} would take"
        f" {format_bytes(first.nbytes)}, {second.name} {format_bytes(second.nbytes)}",
    )


def _sequences(fit: Fit) -> Iterator[PlanWarning]:
    """Only what somebody set: a default is a ceiling that nobody expects to reach."""
    asked = fit.question.settings.max_num_seqs
    if asked is None or not fit.fits or too_long(fit.question):
        return
    tokens = fit.question.traffic.length if fit.question.traffic is not None else fit.limits.max_model_len
    held = int(fit.concurrency(tokens)) if tokens else 0
    if asked <= SEQUENCES_TOO_MANY * max(1, held):
        return
    yield PlanWarning(
        code=TOO_MANY_SEQUENCES,
        message=f"max_num_seqs is {asked}, but KV holds {counted(held, 'sequence')} of {counted(tokens, 'token')}: a"
        " burst of long ones will be preempted and recomputed",
        field="max_num_seqs",
        fix=f"--max-num-seqs {max(1, held)}",
    )


def _context(fit: Fit) -> Iterator[PlanWarning]:
    traffic, asked = fit.question.traffic, fit.question.settings.max_model_len
    if traffic is None or asked is None or asked <= CONTEXT_TOO_LONG * traffic.length:
        return
    enough = -(-traffic.length // 256) * 256
    shorter = planned(with_settings(fit.question, max_model_len=enough))
    yield PlanWarning(
        code=CONTEXT_BEYOND_TRAFFIC,
        message=f"max_model_len is {asked:,}, but 99 of 100 requests end within {counted(traffic.length, 'token')}",
        field="max_model_len",
        fix=f"--max-model-len {enough}" if shorter is not None else None,
    )


def _unknown_peak(fit: Fit) -> Iterator[PlanWarning]:
    traffic = fit.question.traffic
    if traffic is None or traffic.peak_known:
        return
    held = "" if too_long(fit.question) else f"; memory holds {int(fit.concurrency(max(1, traffic.length)))}"
    yield PlanWarning(
        code=PEAK_UNKNOWN,
        message=f"{traffic.source} does not show how many requests ran at once at its peak: this plan is for"
        f" {traffic.concurrency}{held}",
        field="concurrency",
        fix="--concurrency with the peak of this traffic",
    )


def _unknown_lengths(fit: Fit) -> Iterator[PlanWarning]:
    traffic = fit.question.traffic
    if traffic is None:
        return
    if traffic.at_least:
        told = traffic.prompt_tokens + traffic.output_tokens
        yield PlanWarning(
            code=LENGTHS_UNKNOWN,
            message=f"more than 1 in 100 requests of {traffic.source} are longer than its histograms show:"
            f" P99 is at least {counted(told, 'token')}, and this plan is for the whole context of"
            f" {traffic.length:,}",
            field="traffic",
            fix="a log with the lengths of requests, or set --concurrency, --prompt and --output",
        )
    if traffic.without_output:
        some = "none" if traffic.without_output == traffic.requests else "not all"
        yield PlanWarning(
            code=ANSWERS_UNKNOWN,
            message=f"{some} of {counted(traffic.requests, 'request')} of {traffic.source} have an output length:"
            f" {traffic.without_output:,} of them are counted without output",
            field="traffic",
            fix="lines with completion_tokens, or set --concurrency, --prompt and --output",
        )


def _longer_traffic(fit: Fit) -> Iterator[PlanWarning]:
    traffic, served = fit.question.traffic, fit.limits.max_model_len
    if too_long(fit.question):
        yield _longer_than_the_model(fit)
        return
    if traffic is None or traffic.length <= served or not fit.fits:
        return
    model = fit.question.model.spec.max_position
    able = served < traffic.length <= model and fit.longest_tokens >= traffic.length
    yield PlanWarning(
        code=TRAFFIC_BEYOND_CONTEXT,
        message=f"requests of this traffic reach {counted(traffic.length, 'token')}, but the context is {served:,}:"
        " longer ones will be refused",
        field="max_model_len",
        fix=f"--max-model-len {traffic.length}" if able else None,
    )


def _longer_than_the_model(fit: Fit) -> PlanWarning:
    assert fit.question.traffic is not None
    return PlanWarning(
        code=TRAFFIC_BEYOND_CONTEXT,
        message=f"requests of this traffic reach {counted(fit.question.traffic.length, 'token')}, but the model's"
        f" context length is {fit.question.model.spec.max_position:,}: more memory does not help",
        field="prompt",
        fix="shorter requests, or a model with a longer context",
    )


def _idle(fit: Fit) -> Iterator[PlanWarning]:
    devices = fit.question.machine.devices
    idle = len(devices) - len(fit.ranks)
    if fit.question.settings.tensor_parallel is None or not idle:
        return
    every = planned(with_settings(fit.question, tensor_parallel=None))
    size = every.tensor_parallel if every is not None and every.tensor_parallel > fit.tensor_parallel else None
    yield PlanWarning(
        code=IDLE_GPUS,
        message=f"tensor_parallel_size is {fit.tensor_parallel} on a machine with {len(devices)} GPUs:"
        f" {idle} {'is' if idle == 1 else 'are'} unused",
        field="tensor_parallel_size",
        fix=f"-tp {size}" if size is not None else "-tp for more memory, or a second server on the other GPUs",
    )


def _margin(fit: Fit) -> Iterator[PlanWarning]:
    """It fits by less than our estimates may be off."""
    if not fit.fits:
        return
    spare = min(rank.room_bytes + rank.unused_bytes - fit.needed_bytes(rank) for rank in fit.ranks)
    if not 0 <= spare < fit.uncertain_bytes:
        return
    yield PlanWarning(
        code=WITHIN_ERROR,
        message=f"it fits with {format_bytes(spare)} to spare, but the estimated terms may be off by"
        f" {format_bytes(fit.uncertain_bytes)}",
        fix="the safe configuration below leaves that margin",
    )


def _model(fit: Fit) -> Iterator[PlanWarning]:
    spec = fit.question.model.spec
    if spec.not_counted:
        yield PlanWarning(code=NOT_COUNTED, message=f"not counted: {', '.join(spec.not_counted)}")
    inputs = _not_counted_inputs(spec)
    if inputs:
        yield PlanWarning(
            code=INPUTS_NOT_COUNTED,
            message=f"for {inputs} at most the weights of their encoders are counted: the config does not say how large"
            " inputs may be, so encoder activations, and what engines reserve for them, are not counted",
            fix="not needed for text only; for other inputs leave 1 to 5 GB free: --gpu-memory-utilization",
        )
    if fit.question.settings.max_loras and any(layer.experts is not None for layer in spec.layers):
        yield PlanWarning(
            code=ADAPTERS_IN_PART,
            message="adapters are counted for attention and dense layers; slots for experts, which some engines also"
            " allocate, are not",
            field="max_loras",
        )
    if fit.question.model.unchecked and fit.tensor_parallel > 1:
        yield PlanWarning(
            code=UNCHECKED_SPLIT,
            message=f"the split over {fit.tensor_parallel} GPUs relies on catalogue shapes that were not checked"
            " against a public copy; quantized models are sometimes padded for it",
            field="tensor_parallel_size",
            fix=f"plan what is published: holdfast plan {fit.question.model.name}, if the hub can be reached",
        )


def _not_counted_inputs(spec: ModelSpec) -> str:
    """Of which it is not known how large they are; empty: of none."""
    towers = " ".join(spec.not_counted)
    seen = any(tensor.part == "vision" for tensor in spec.tensors) or "vision tower" in towers
    found = [*(["images"] if seen and spec.encoder is None else []), *(["sound"] if "audio tower" in towers else [])]
    return " and ".join(found)


def _number_types(fit: Fit) -> Iterator[PlanWarning]:
    for gpu in dict.fromkeys(rank.device.gpu for rank in fit.ranks if rank.device.gpu is not None):
        if fit.kv_dtype == "fp8" and not gpu.fp8:
            yield PlanWarning(
                code=NO_FP8,
                message=f"{gpu.name} has no FP8 units: an FP8 KV cache saves memory there, not time, and not every"
                " engine has kernels for it",
                field="kv_cache_dtype",
            )
        if fit.dtype == "bfloat16" and not gpu.bf16:
            yield PlanWarning(
                code=NO_BF16,
                message=f"{gpu.name} does not support bfloat16",
                field="dtype",
                fix="--dtype float16",
            )


def safe_utilization(fit: Fit) -> float:
    """What to start with: less on a card that may be shared, never more than was asked for or is usual."""
    most = min(fit.utilization, USUAL_UTILIZATION)
    for rank in fit.ranks:
        if rank.device.held_by:
            most = min(most, SHARED_UTILIZATION)
        elif _may_have_desktop(rank.device):
            most = min(most, DESKTOP_UTILIZATION)
    return most
