"""Warnings about a plan, as a table: a code, the setting it is about, a reason in numbers and what to set instead.

A warning never changes the plan. What is offered as a fix has been planned, or is arithmetic on the plan. Rules of
thumb that people know are in rules_of_thumb.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.footprint.gpu import MOST_EXCHANGE_RANKS
from holdfast.hardware.gpus import Gpu
from holdfast.planner.advice.remedy import (
    USUAL_UTILIZATION,
    is_absolute,
    planned,
    too_long,
    with_settings,
    without_hand,
)
from holdfast.planner.advice.throughput import shown_rate, throughput
from holdfast.planner.engines.nodes import machines_meant, machines_said
from holdfast.planner.fit.expert_placement import ExpertPlacement, place_larger
from holdfast.planner.fit.placement import Placement, may_stream, pinned_room
from holdfast.planner.fit.search import Plan, Question, fit
from holdfast.planner.inputs.question import MOST_UTILIZATION, Device
from holdfast.planner.sizing.dtype import is_fp8
from holdfast.units import GIB, counted, format_bytes

DESKTOP_UTILIZATION, SHARED_UTILIZATION = 0.85, 0.80
DESKTOP_CARD_BYTES = 25 * GIB
"""Cards up to 24 GB are those that desktops run on."""
DESKTOP_BYTES = 2 * GIB
"""What a desktop with a browser holds of a GPU; of 24 GB about 22 are left."""
STARVED_GAIN = 2
"""Utilization is too low when the usual one would give the KV pool that many times as much."""
SEQUENCES_TOO_MANY, CONTEXT_TOO_LONG = 4, 2
"""Times what KV holds, and times the traffic's P99."""
ALL_OF_IT = 0.995
WORTH = 1.05
"""Times the tokens a second without what was set by hand; less is within what two estimates of a machine differ by."""
OR_STATED = "or set --concurrency, --prompt and --output"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWarning:
    code: str
    message: str
    field: str | None = None
    fix: str | None = None


Said = tuple[str, str | None]
"""A message, and a fix."""


def _shares(fit: Plan) -> bool:
    """Whether the budget is a share of the memory, rather than set in bytes."""
    return not is_absolute(fit.question)


def _at(share: float) -> str:
    return f"--gpu-memory-utilization {share:g}"


def _all_memory(fit: Plan) -> Iterator[Said]:
    if _shares(fit) and fit.utilization >= ALL_OF_IT:
        yield (
            f"utilization {fit.utilization:g} leaves nothing for fragmentation, the driver and other processes:"
            f" the first peak runs out of memory",
            _at(USUAL_UTILIZATION),
        )


def _above_safe(fit: Plan) -> Iterator[Said]:
    if _shares(fit) and MOST_UTILIZATION < fit.utilization < ALL_OF_IT:
        left = format_bytes(min(rank.device.total_bytes - rank.budget_bytes for rank in fit.ranks))
        yield (
            f"utilization {fit.utilization:g} leaves {left} for everything that cannot be predicted;"
            f" above {MOST_UTILIZATION:g} startup and peaks become unreliable",
            f"{_at(MOST_UTILIZATION)} or less",
        )


def _kv_starves(fit: Plan) -> Iterator[Said]:
    """Low because somebody wanted to leave room; the room comes out of the KV pool."""
    low = _shares(fit) and fit.utilization < USUAL_UTILIZATION and fit.question.machine.kind == "gpu"
    usual = planned(with_settings(fit.question, utilization=USUAL_UTILIZATION)) if low else None
    now = max(0, min(rank.room_bytes for rank in fit.ranks))
    then = -1 if usual is None else min(rank.room_bytes for rank in usual.ranks)
    if then >= STARVED_GAIN * now:
        yield (
            f"utilization {fit.utilization:g} starves the KV pool: {format_bytes(now)} where"
            f" {USUAL_UTILIZATION:g} would give {format_bytes(then)}; the weights take the same either way",
            _at(USUAL_UTILIZATION),
        )


def _may_have_desktop(device: Device) -> bool:
    """A consumer card of which we do not know, or know, that something else is on it."""
    small = device.kind == "gpu" and device.total_bytes <= DESKTOP_CARD_BYTES and not device.unified
    consumer = any(word in device.name.lower() for word in ("geforce", "rtx", "gtx", "radeon rx", "arc"))
    return small and consumer and not device.measured


def _beside_a_desktop(device: Device) -> float:
    """Of a small card a desktop leaves less than the usual share."""
    return min(DESKTOP_UTILIZATION, int(100 * (device.total_bytes - DESKTOP_BYTES) / device.total_bytes) / 100)


def _desktop_card(fit: Plan) -> Iterator[Said]:
    device = next((rank.device for rank in fit.ranks if _may_have_desktop(rank.device)), None)
    share = DESKTOP_UTILIZATION if device is None else _beside_a_desktop(device)
    if device is None or not _shares(fit) or fit.utilization <= share or not fit.fits:
        return
    smaller = planned(with_settings(fit.question, utilization=share))
    held = "" if smaller is not None else "; at that utilization this plan does not fit"
    without = f". Without a monitor {fit.utilization:g} is fine" if fit.utilization <= MOST_UTILIZATION else ""
    yield (
        f"a desktop on {device.name} takes 1 to 2 GB of it: about"
        f" {format_bytes(device.total_bytes - DESKTOP_BYTES)} stay free, and {share:g} is the"
        f" utilization to start with{held}{without}",
        None if smaller is None else _at(share),
    )


def _lacking(fit: Plan, device: Device) -> int:
    """Bytes that others hold of what is to be used."""
    share = int(device.total_bytes * fit.utilization) if device.kind == "gpu" else 0
    return (share if device.budget_bytes is None else device.budget_bytes) - device.free_bytes


def _holders(device: Device) -> str:
    return f" ({', '.join(device.held_by)})" if device.held_by else ""


def _neighbours(fit: Plan) -> Iterator[Said]:
    for device in (rank.device for rank in fit.ranks):
        if (lost := _lacking(fit, device)) > 0:
            fix = "stop what holds the memory" if device.held_by else "find what holds the rest"
            yield (
                f"{device.name} has {format_bytes(device.free_bytes)} free: {format_bytes(lost)} less than"
                f" requested{_holders(device)}. vLLM refuses to start like this",
                fix,
            )


def _shared_card(fit: Plan) -> Iterator[Said]:
    for device in (rank.device for rank in fit.ranks):
        shared = device.held_by and _shares(fit) and fit.utilization > SHARED_UTILIZATION
        if shared and _lacking(fit, device) <= 0:
            yield (
                f"{device.name} is shared{_holders(device)}: what the others allocate later is not available to"
                f" the server",
                f"{_at(SHARED_UTILIZATION)}, or isolate the GPU",
            )


def _no_kv(fit: Plan) -> Iterator[Said]:
    rank = min(fit.ranks, key=lambda one: one.room_bytes)
    if fit.kv_tokens <= 0:
        loading = fit.lacks_for_loading(rank)
        first, second, *_ = sorted(rank.loading if loading else rank.terms, key=lambda term: -term.nbytes)
        what = "it cannot even be loaded, so the KV pool has 0 tokens" if loading else "the KV pool has 0 tokens"
        yield (
            f"{what}: nothing is left of {format_bytes(rank.budget_bytes)}; {first.name} would take"
            f" {format_bytes(first.nbytes)}, {second.name} {format_bytes(second.nbytes)}",
            None,
        )


def _too_many_sequences(fit: Plan) -> Iterator[Said]:
    """Only what somebody set: a default is a ceiling that nobody expects to reach."""
    asked, traffic = fit.question.settings.max_num_seqs, fit.question.traffic
    if asked is None or not fit.fits or too_long(fit.question):
        return
    tokens = traffic.length if traffic is not None else fit.limits.max_model_len
    held = int(fit.concurrency(tokens)) if tokens else 0
    if asked > SEQUENCES_TOO_MANY * max(1, held):
        yield (
            f"max_num_seqs is {asked}, but KV holds {counted(held, 'sequence')} of {counted(tokens, 'token')}: a"
            f" burst of long ones will be preempted and recomputed",
            f"--max-num-seqs {max(1, held)}",
        )


def _context_beyond_traffic(fit: Plan) -> Iterator[Said]:
    traffic, asked = fit.question.traffic, fit.question.settings.max_model_len
    if traffic is not None and asked is not None and asked > CONTEXT_TOO_LONG * traffic.length:
        enough = -(-traffic.length // 256) * 256
        shorter = planned(with_settings(fit.question, max_model_len=enough))
        yield (
            f"max_model_len is {asked:,}, but 99 of 100 requests end within {counted(traffic.length, 'token')}",
            None if shorter is None else f"--max-model-len {enough}",
        )


def _peak_unknown(fit: Plan) -> Iterator[Said]:
    traffic = fit.question.traffic
    if traffic is not None and not traffic.peak_known:
        held = "" if too_long(fit.question) else f"; memory holds {int(fit.concurrency(max(1, traffic.length)))}"
        yield (
            f"{traffic.source} does not show how many requests ran at once at its peak: this plan is for"
            f" {traffic.concurrency}{held}",
            "--concurrency with the peak of this traffic",
        )


def _lengths_unknown(fit: Plan) -> Iterator[Said]:
    traffic = fit.question.traffic
    if traffic is not None and traffic.at_least:
        known = counted(traffic.prompt_tokens + traffic.output_tokens, "token")
        yield (
            f"more than 1 in 100 requests of {traffic.source} are longer than its histograms show: P99 is at"
            f" least {known}, and this plan is for the whole context of {traffic.length:,}",
            f"a log with the lengths of requests, {OR_STATED}",
        )


def _outputs_unknown(fit: Plan) -> Iterator[Said]:
    traffic = fit.question.traffic
    if traffic is not None and traffic.without_output:
        some = "none" if traffic.without_output == traffic.requests else "not all"
        yield (
            f"{some} of {counted(traffic.requests, 'request')} of {traffic.source} have an output length:"
            f" {traffic.without_output:,} of them are counted without output",
            f"lines with completion_tokens, {OR_STATED}",
        )


def _longer_than_the_model(fit: Plan) -> Iterator[Said]:
    traffic, allowed = fit.question.traffic, fit.question.model.spec.max_position
    if traffic is not None and too_long(fit.question):
        yield (
            f"requests of this traffic reach {counted(traffic.length, 'token')}, but the model's context length"
            f" is {allowed:,}: more memory does not help",
            "shorter requests, or a model with a longer context",
        )


def _traffic_beyond_context(fit: Plan) -> Iterator[Said]:
    traffic, served = fit.question.traffic, fit.limits.max_model_len
    if traffic is not None and traffic.length > served and fit.fits and not too_long(fit.question):
        fix = f"--max-model-len {traffic.length}" if fit.longest_tokens >= traffic.length else None
        yield (
            f"requests of this traffic reach {counted(traffic.length, 'token')}, but the context is {served:,}:"
            f" longer ones will be refused",
            fix,
        )


def _idle_gpus(fit: Plan) -> Iterator[Said]:
    devices = len(fit.question.machine.devices)
    idle = devices - len(fit.ranks)
    if fit.question.settings.tensor_parallel is not None and idle:
        every = planned(with_settings(fit.question, tensor_parallel=None))
        size = fit.tensor_parallel if every is None else every.tensor_parallel
        fix = (
            f"-tp {size}" if size > fit.tensor_parallel else "-tp for more memory, or a second server on the other GPUs"
        )
        stages = f" and pipeline_parallel_size {fit.pipeline_parallel}" if fit.pipeline_parallel > 1 else ""
        yield (
            f"tensor_parallel_size is {fit.tensor_parallel}{stages} on a machine with {devices} GPUs:"
            f" {idle} {'is' if idle == 1 else 'are'} unused",
            fix,
        )


def _within_error(fit: Plan) -> Iterator[Said]:
    """It fits by less than our estimates may be off."""
    spare = min(rank.room_bytes + rank.unused_bytes - fit.needed_bytes(rank) for rank in fit.ranks)
    if fit.fits and 0 <= spare < fit.uncertain_bytes:
        yield (
            f"it fits with {format_bytes(spare)} to spare, but the estimated terms may be off by"
            f" {format_bytes(fit.uncertain_bytes)}",
            "the safe configuration below leaves that margin",
        )


def _not_counted(fit: Plan) -> Iterator[Said]:
    if fit.question.model.spec.not_counted:
        yield f"not counted: {', '.join(fit.question.model.spec.not_counted)}", None


def _inputs_not_counted(fit: Plan) -> Iterator[Said]:
    """Of which it is not known how large they are."""
    if fit.question.settings.text_only:
        return
    spec = fit.question.model.spec
    towers = " ".join(spec.not_counted)
    seen = any(tensor.part == "vision" for tensor in spec.tensors) or "vision tower" in towers
    inputs = [*(["images"] if seen and spec.encoder is None else []), *(["sound"] if "audio tower" in towers else [])]
    if inputs:
        yield (
            f"for {' and '.join(inputs)} at most the weights of their encoders are counted: the config does not"
            " say how large inputs may be, so encoder activations, and what engines reserve for them, are not"
            " counted",
            'for text only, vLLM tries fewer with --limit-mm-per-prompt \'{"image": 0, "video": 0}\'; for other'
            " inputs leave 1 to 5 GB free: --gpu-memory-utilization",
        )


def _adapters_in_part(fit: Plan) -> Iterator[Said]:
    experts = any(layer.experts is not None for layer in fit.question.model.spec.layers)
    if fit.question.settings.max_loras and experts:
        yield (
            "adapters are counted for attention and dense layers; slots for experts, which some engines also"
            " allocate, are not",
            None,
        )


def _unchecked_split(fit: Plan) -> Iterator[Said]:
    if fit.question.model.unchecked and fit.tensor_parallel > 1:
        yield (
            f"the split over {fit.tensor_parallel} GPUs relies on catalogue shapes that were not checked against a"
            " public copy; quantized models are sometimes padded for it",
            f"plan what is published: holdfast plan {fit.question.model.name}, if the hub can be reached",
        )


def _beyond_one_machine(fit: Plan) -> Iterator[Said]:
    """Of ranks of ours, which no more than a few of one machine were tried with."""
    settings, engine = fit.question.settings, fit.question.engine
    each, meant = len(fit.ranks) // settings.nodes, machines_said(fit, machines_meant(fit))
    if fit.question.machine.kind != "gpu" or engine not in (None, "holdfast") or each <= MOST_EXCHANGE_RANKS:
        return
    if meant:
        message, fix = meant[0].split("; ", 1)
        yield f"{len(fit.ranks)} GPUs are {message}", fix
        return
    stages = each // MOST_EXCHANGE_RANKS
    split = with_settings(fit.question, tensor_parallel=MOST_EXCHANGE_RANKS, pipeline_parallel=stages)
    able = each % MOST_EXCHANGE_RANKS == 0 and planned(split) is not None
    yield (
        f"{each} ranks on one machine: no more than {MOST_EXCHANGE_RANKS} of one map one another's memory, and with"
        " more, whose sums are NCCL's, Holdfast was never tried",
        f"-tp {MOST_EXCHANGE_RANKS} -pp {stages}" if able else None,
    )


def _gpus(fit: Plan) -> list[Gpu]:
    return list(dict.fromkeys(rank.device.gpu for rank in fit.ranks if rank.device.gpu is not None))


def _no_fp8(fit: Plan) -> Iterator[Said]:
    for gpu in _gpus(fit) if is_fp8(fit.kv_dtype) else ():
        if not gpu.fp8:
            yield (
                f"{gpu.name} has no FP8 units: an FP8 KV cache saves memory there, not time, and not every engine"
                f" has kernels for it",
                None,
            )


def _no_bf16(fit: Plan) -> Iterator[Said]:
    for gpu in _gpus(fit) if fit.dtype == "bfloat16" else ():
        if not gpu.bf16:
            yield f"{gpu.name} does not support bfloat16", "--dtype float16"


WITHIN_ERROR, NO_KV = "HFW30", "HFW28"
RULES = (
    ("HFW35", "concurrency", _peak_unknown),
    ("HFW36", "traffic", _lengths_unknown),
    ("HFW37", "traffic", _outputs_unknown),
    ("HFW34", "prompt", _longer_than_the_model),
    ("HFW34", "max_model_len", _traffic_beyond_context),
    ("HFW20", "gpu_memory_utilization", _all_memory),
    ("HFW21", "gpu_memory_utilization", _above_safe),
    ("HFW22", "gpu_memory_utilization", _kv_starves),
    ("HFW23", "gpu_memory_utilization", _desktop_card),
    ("HFW29", "gpu_memory_utilization", _neighbours),
    ("HFW24", "gpu_memory_utilization", _shared_card),
    (NO_KV, None, _no_kv),
    ("HFW25", "max_num_seqs", _too_many_sequences),
    ("HFW26", "max_model_len", _context_beyond_traffic),
    ("HFW27", "tensor_parallel_size", _idle_gpus),
    (WITHIN_ERROR, None, _within_error),
    ("HFW31", None, _not_counted),
    ("HFW38", None, _inputs_not_counted),
    ("HFW39", "max_loras", _adapters_in_part),
    ("HFW40", "tensor_parallel_size", _unchecked_split),
    ("HFW41", "tensor_parallel_size", _beyond_one_machine),
    ("HFW32", "kv_cache_dtype", _no_fp8),
    ("HFW33", "dtype", _no_bf16),
)
"""A code, the setting that it is about, and what it says of a plan."""


def warnings(fit: Plan) -> tuple[PlanWarning, ...]:
    return tuple(
        PlanWarning(code=code, message=message, field=field, fix=fix)
        for code, field, check in RULES
        for message, fix in check(fit)
    )


def safe_utilization(fit: Plan) -> float:
    """What to start with: less on a card that may be shared, never more than was asked for or is usual."""
    most = min(fit.utilization, USUAL_UTILIZATION)
    for rank in fit.ranks:
        if rank.device.held_by:
            most = min(most, SHARED_UTILIZATION)
        elif _may_have_desktop(rank.device):
            most = min(most, _beside_a_desktop(rank.device))
    return most


def faster_without(question: Question, placed: Placement | ExpertPlacement) -> str | None:
    """Without what was set by hand of layers or experts in RAM. `placed`: as was asked for. None: it does not run so,
    or is as fast, or RAM is not known that the other takes."""
    left, rate = without_hand(question)[0], throughput(placed.plan) if placed.fits else None
    if rate is None or pinned_room(question) is None:
        return None
    found = fit(left)
    if not found.fits:
        other = place_larger(left) if may_stream(left) else None
        if other is None or not other.fits:
            return None
        found = other.plan
    faster = throughput(found)
    if faster is None or faster.one.estimate.tokens_per_s < WORTH * rate.one.estimate.tokens_per_s:
        return None
    shown, length = shown_rate(faster.one.estimate.tokens_per_s), found.limits.max_model_len
    context = "" if length == placed.plan.limits.max_model_len else f", with a context of {length:,}"
    return f"leave {question.settings.offload.flag} out: about {shown} tokens/s of one sequence{context}"
