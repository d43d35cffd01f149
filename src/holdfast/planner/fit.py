"""Whether one configuration fits, term by term and rank by rank. Pure: the same question gives the same answer.

    budget = what the device may use          room = budget - every term but KV
    needed = KV of the sequences asked for    fits = room >= needed on every rank

A model that this engine runs on a CPU is counted by host.py, as `serve` counts it. It tries nothing else: ways out
are in ways_out.py, what to make of it in answer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache

from holdfast.config.engine import CPU_SEQUENCES, CPU_STEP_TOKENS, GPU_SEQUENCES, GPU_STEP_TOKENS
from holdfast.errors import ConfigurationError
from holdfast.models import ModelSpec
from holdfast.observability.decisions import Decision
from holdfast.planner import terms as byte_terms
from holdfast.planner.footprint import Limits
from holdfast.planner.host import Hosted, host, least_tokens, runs_here
from holdfast.planner.kv import KVCost, kv_cost
from holdfast.planner.question import KV_ELEMENT_BYTES, Device, Machine, PlannedModel, Settings, Traffic
from holdfast.planner.same import Same
from holdfast.planner.terms import Term
from holdfast.planner.weights import (
    Weight,
    check_parallel,
    parallel_sizes,
    rank_bytes,
    stage_layers,
    total_bytes,
    weights_of,
)
from holdfast.units import format_bytes

DEFAULT_UTILIZATION = 0.9
USEFUL_TOKENS = 4096
"""A model that cannot hold one sequence of this length (or of its own shorter context) is not said to fit."""
TOO_FEW_DEVICES, CONTEXT_TOO_LONG = "HF133", "HF111"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    model: PlannedModel
    machine: Machine
    settings: Settings = field(default_factory=Settings)
    traffic: Traffic | None = None
    decisions: tuple[Decision, ...] = ()
    """Made on the way to this question: which files, which GPUs, which traffic."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rank:
    """One device's share."""

    device: Device
    stage: int
    budget_bytes: int
    terms: tuple[Term, ...]
    kv: KVCost
    null_bytes: int = 0
    """Of the pool, and of no sequence: the page that stands for none."""
    most_kv_bytes: int | None = None
    """Sequences get no more of the pool, where the engine would not take all that is left; None: all of it."""

    @property
    def room_bytes(self) -> int:
        """For sequences in the KV pool; negative when not even the rest fits."""
        left = self.budget_bytes - sum(term.nbytes for term in self.terms) - self.null_bytes
        return left if self.most_kv_bytes is None else min(left, self.most_kv_bytes)

    @property
    def pool_bytes(self) -> int:
        """Of the KV pool as it would be allocated."""
        return max(0, self.room_bytes) + self.null_bytes

    @property
    def unused_bytes(self) -> int:
        """Of the budget, beside terms and pool."""
        return max(0, self.budget_bytes - sum(term.nbytes for term in self.terms) - self.pool_bytes)

    @property
    def uncertain_bytes(self) -> int:
        """How far the estimated terms may be off together, either way."""
        return int(sum(term.nbytes * term.uncertainty for term in self.terms))


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    question: Question
    dtype: str
    kv_dtype: str
    tensor_parallel: int
    pipeline_parallel: int
    utilization: float
    limits: Limits
    """max_model_len is what would be served: as asked, or what the model allows and memory holds."""
    ranks: tuple[Rank, ...]
    weights_bytes: int
    """Of the whole model, over all ranks once."""
    required_tokens: int
    """Of each sequence that must fit beside the others: the traffic's, else one of the context that was asked for."""
    required_sequences: int
    fits: bool
    short_bytes: int
    """Of the rank that lacks most; 0 when it fits."""
    longest_tokens: int
    """The longest sequence that memory holds, within the model's own context."""
    decisions: tuple[Decision, ...]
    serve_settings: Mapping[str, object] = field(default_factory=dict)
    """What `holdfast serve` must be told beside what was asked for, so as to do this."""

    @property
    def kv_bytes_per_token(self) -> int:
        """Over all layers and ranks as stored: what one more token costs once windows are full."""
        return sum(rank.kv.growing_bytes for rank in self.ranks)

    @property
    def kv_bytes_fixed_per_sequence(self) -> int:
        return sum(rank.kv.window_bytes + rank.kv.fixed_bytes for rank in self.ranks)

    @property
    def kv_tokens(self) -> int:
        return min(rank.kv.tokens(rank.room_bytes, max(1, self.limits.max_model_len)) for rank in self.ranks)

    def concurrency(self, tokens: int) -> float:
        """Sequences of that length that the tightest rank holds."""
        return max(0.0, min(rank.kv.concurrency(rank.room_bytes, tokens) for rank in self.ranks))

    def needed_bytes(self, rank: Rank) -> int:
        """KV that must fit on this rank."""
        asked = self.question.settings.max_model_len
        return _needed(rank, self.required_sequences, self.required_tokens, asked)

    @property
    def uncertain_bytes(self) -> int:
        return max(rank.uncertain_bytes for rank in self.ranks)

    @property
    def usual_tokens(self) -> int:
        """Length of a sequence to count with where many run at once: the traffic's, else an ordinary one."""
        traffic = self.question.traffic
        return max(1, traffic.length if traffic is not None else min(self.limits.max_model_len, USEFUL_TOKENS))

    @property
    def useful_sequences(self) -> int:
        """As many at once as was asked for; else sequences of the usual length that memory holds, at least one."""
        if self.question.settings.max_num_seqs is not None:
            return self.question.settings.max_num_seqs
        return max(1, min(self.limits.max_num_seqs, int(self.concurrency(self.usual_tokens))))


def fit(question: Question) -> Fit:
    """With no tensor-parallel size given: the smallest that does what is asked. Where neither traffic nor context is
    stated, that is the model's whole context, or else the longest there is: more memory never gives a shorter one."""
    settings, spec = question.settings, question.model.spec
    if settings.tensor_parallel is not None:
        return _fit(question, settings.tensor_parallel, "set")
    most = max(1, len(question.machine.devices) // settings.pipeline_parallel)
    found: list[Fit] = []
    for size in _sizes(Same(spec), most):
        found.append(_fit(question, size, "planner"))
        enough = _is_stated(question) or found[-1].longest_tokens == spec.max_position
        if found[-1].fits and enough:
            return found[-1]
    return max(found, key=lambda one: (one.fits, one.longest_tokens, -one.short_bytes, -one.tensor_parallel))


# Ways out plan the same models dozens of times: what does not depend on memory is counted once.


@lru_cache(maxsize=64)
def _sizes(key: Same[ModelSpec], most: int) -> tuple[int, ...]:
    return parallel_sizes(key.held, most)


@lru_cache(maxsize=64)
def _weights(key: Same[PlannedModel], dtype: str) -> tuple[Weight, ...]:
    return tuple(weights_of(key.held, dtype=dtype))


@lru_cache(maxsize=64)
def _whole_bytes(key: Same[PlannedModel], dtype: str) -> int:
    return total_bytes(_weights(key, dtype))


@lru_cache(maxsize=1024)
def _held_bytes(key: Same[PlannedModel], dtype: str, tensor_parallel: int, stage: int, stages: int) -> int:
    weights = _weights(key, dtype)
    return rank_bytes(weights, key.held.spec, tensor_parallel=tensor_parallel, stage=stage, stages=stages)


def _is_stated(question: Question) -> bool:
    """What must fit was said, and is not left to us."""
    return question.settings.max_model_len is not None or question.traffic is not None


def _fit(question: Question, tensor_parallel: int, source: str) -> Fit:
    model, machine, settings = question.model, question.machine, question.settings
    spec = model.spec
    _check(question, tensor_parallel)
    decisions = list(question.decisions)
    dtype = compute_dtype(question)
    kv_dtype = dtype if settings.kv_cache_dtype == "auto" else settings.kv_cache_dtype
    limits = _limits(question, decisions)
    if len(machine.devices) > 1 or tensor_parallel > 1:
        decisions.append(_parallel_decision(question, tensor_parallel, source))
    utilization = DEFAULT_UTILIZATION if settings.utilization is None else settings.utilization
    if machine.kind == "cpu" and runs_here(model, settings):
        return _hosted(question, kv_dtype, utilization, limits, decisions)
    stages = settings.pipeline_parallel
    ranks = []
    for stage, layers in enumerate(stage_layers(len(spec.layers), stages)):
        held = _held_bytes(Same(model), dtype, tensor_parallel, stage, stages)
        cost = kv_cost(
            spec,
            element_bytes=KV_ELEMENT_BYTES[kv_dtype],
            state_bytes=KV_ELEMENT_BYTES[dtype],
            tensor_parallel=tensor_parallel,
            layers=layers,
            block_tokens=settings.block_tokens,
            step_tokens=limits.max_num_batched_tokens,
        )
        for index in range(tensor_parallel):
            device = machine.devices[stage * tensor_parallel + index]
            budget = device_budget(device, utilization)
            if device.kind == "cpu":
                found = byte_terms.cpu_terms(
                    spec, limits, dtype=dtype, weights_bytes=held, block_tokens=settings.block_tokens,
                    max_loras=settings.max_loras, max_lora_rank=settings.max_lora_rank,
                )  # fmt: skip
            else:
                found = byte_terms.gpu_terms(
                    spec, limits, dtype=dtype, weights_bytes=held, tensor_parallel=tensor_parallel, layers=layers,
                    last_stage=stage == stages - 1, max_loras=settings.max_loras, max_lora_rank=settings.max_lora_rank,
                )  # fmt: skip
            ranks.append(Rank(device=device, stage=stage, budget_bytes=budget, terms=tuple(found), kv=cost))
    return _judge(
        question,
        dtype,
        kv_dtype,
        tensor_parallel,
        utilization,
        limits,
        tuple(ranks),
        _whole_bytes(Same(model), dtype),
        decisions,
    )


def _hosted(question: Question, kv_dtype: str, utilization: float, limits: Limits, decisions: list[Decision]) -> Fit:
    """On a CPU, by this engine."""
    model, settings, device = question.model, question.settings, question.machine.devices[0]
    budget = device_budget(device, utilization)
    found = host(model, question.machine, settings, limits, budget_bytes=budget, traffic=question.traffic)
    sequences, tokens = _required(question, least_tokens(model, settings))
    needed = max(sequences * found.kv.sequence_bytes(tokens), found.kv.sequence_bytes(settings.max_model_len or 0))
    page = found.room.layout.page_bytes
    rank = Rank(
        device=device,
        stage=0,
        budget_bytes=budget,
        terms=found.terms,
        kv=found.kv,
        null_bytes=page,
        # Where it does not fit, loading may lack more than the pool does.
        most_kv_bytes=(found.pages - 1) * page if found.fits else needed - found.short_bytes,
    )
    served = settings.max_model_len or (found.length if found.fits else found.longest_tokens)
    return Fit(
        question=question,
        dtype=found.room.choices.dtype,
        kv_dtype=kv_dtype,
        tensor_parallel=1,
        pipeline_parallel=1,
        utilization=utilization,
        limits=replace(limits, max_model_len=served),
        ranks=(rank,),
        weights_bytes=found.room.weights_bytes,
        required_tokens=tokens,
        required_sequences=sequences,
        fits=found.fits,
        short_bytes=found.short_bytes,
        longest_tokens=found.longest_tokens,
        decisions=(*decisions, *found.decisions, *_length_decisions(question, served, found)),
        serve_settings=found.flags,
    )


def _length_decisions(question: Question, served: int, found: Hosted) -> tuple[Decision, ...]:
    if question.settings.max_model_len is not None:
        return ()
    if question.traffic is not None and served < found.longest_tokens:
        reason = f"memory holds {found.longest_tokens:,}; a shorter one leaves room for the traffic"
        return (Decision("max_model_len", f"{served:,}", reason, "planner"),)
    return (_length_decision(served, question.model.spec.max_position),)


def _length_decision(served: int, allowed: int) -> Decision:
    held = served >= allowed
    reason = (
        "what the model allows, and memory holds it"
        if held
        else f"the model allows {allowed:,}; memory holds {served:,}"
    )
    return Decision("max_model_len", f"{served:,}", reason, "planner")


def _judge(
    question: Question,
    dtype: str,
    kv_dtype: str,
    tensor_parallel: int,
    utilization: float,
    limits: Limits,
    ranks: tuple[Rank, ...],
    weights_bytes: int,
    decisions: list[Decision],
) -> Fit:
    spec, settings = question.model.spec, question.settings
    longest = min(rank.kv.longest(rank.room_bytes, spec.max_position) for rank in ranks)
    sequences, tokens = _required(question, min(spec.max_position, USEFUL_TOKENS))
    short = max(_needed(rank, sequences, tokens, settings.max_model_len) - rank.room_bytes for rank in ranks)
    served = settings.max_model_len
    if served is None:
        served = longest
        decisions.append(_length_decision(served, spec.max_position))
    return Fit(
        question=question,
        dtype=dtype,
        kv_dtype=kv_dtype,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=settings.pipeline_parallel,
        utilization=utilization,
        limits=replace(limits, max_model_len=served),
        ranks=ranks,
        weights_bytes=weights_bytes,
        required_tokens=tokens,
        required_sequences=sequences,
        fits=short <= 0,
        short_bytes=max(0, short),
        longest_tokens=longest,
        decisions=tuple(decisions),
    )


def _required(question: Question, useful_tokens: int) -> tuple[int, int]:
    """Sequences that must fit side by side, and the tokens of each."""
    if question.traffic is not None:
        return question.traffic.concurrency, question.traffic.length
    return 1, question.settings.max_model_len or useful_tokens


def _needed(rank: Rank, sequences: int, tokens: int, one_of: int | None) -> int:
    """KV of the sequences asked for, and of one that is as long as the context that was asked for."""
    return max(sequences * rank.kv.sequence_bytes(tokens), 0 if one_of is None else rank.kv.sequence_bytes(one_of))


def _check(question: Question, tensor_parallel: int) -> None:
    spec, settings, devices = question.model.spec, question.settings, question.machine.devices
    check_parallel(spec, tensor_parallel, settings.pipeline_parallel)
    wanted = tensor_parallel * settings.pipeline_parallel
    if wanted > len(devices):
        raise ConfigurationError(
            f"{tensor_parallel} x {settings.pipeline_parallel} ranks need {wanted} devices",
            code=TOO_FEW_DEVICES,
            needed=f"{wanted} devices",
            found=f"{len(devices)}: {', '.join(device.name for device in devices)}",
            fix=f"--gpu with x{wanted}, or a smaller -tp or -pp",
            field="tensor_parallel_size",
        )
    if settings.max_model_len is not None and settings.max_model_len > spec.max_position:
        raise ConfigurationError(
            f"max_model_len is {settings.max_model_len:,}, but the model was made for {spec.max_position:,} tokens",
            code=CONTEXT_TOO_LONG,
            needed=f"at most {spec.max_position:,}",
            found=f"{settings.max_model_len:,}",
            fix=f"--max-model-len {spec.max_position}, or leave it out",
            field="max_model_len",
        )


def compute_dtype(question: Question) -> str:
    """What the engine would compute in, and keep plain weights in."""
    asked = {"half": "float16", "float": "float32"}.get(question.settings.dtype, question.settings.dtype)
    if asked != "auto":
        return asked
    stored, device = question.model.spec.stored_dtype, question.machine.devices[0]
    if device.kind == "cpu":
        fast = question.machine.cpu_features & {"amx_bf16", "avx512_bf16", "bf16"}
        return "bfloat16" if fast and stored != "float32" else "float32"
    if stored == "float16" or (device.gpu is not None and not device.gpu.bf16):
        return "float16"
    return "bfloat16"


def _limits(question: Question, decisions: list[Decision]) -> Limits:
    settings, spec = question.settings, question.model.spec
    on_gpu = question.machine.kind == "gpu"
    sequences = settings.max_num_seqs
    if sequences is None:
        sequences = GPU_SEQUENCES if on_gpu else CPU_SEQUENCES
        reason, source = "the default", "default"
        if question.traffic is not None:
            sequences, reason, source = question.traffic.concurrency, "the traffic's peak", "traffic"
        decisions.append(Decision("max_num_seqs", str(sequences), reason, source))
    step = settings.max_num_batched_tokens or (GPU_STEP_TOKENS if on_gpu else CPU_STEP_TOKENS)
    return Limits(
        max_model_len=settings.max_model_len or spec.max_position, max_num_seqs=sequences, max_num_batched_tokens=step
    )


def _parallel_decision(question: Question, tensor_parallel: int, source: str) -> Decision:
    devices, used = len(question.machine.devices), tensor_parallel * question.settings.pipeline_parallel
    if used == devices:
        what = "it" if _is_stated(question) else "it with as long a context"
        reason = "all GPUs" if source == "set" else f"fewer GPUs do not hold {what}"
    elif source == "set":
        reason = f"as asked: {devices - used} of {devices} GPUs stay empty"
    else:
        what = "it" if _is_stated(question) else "it with as long a context"
        reason = f"the fewest GPUs that hold {what}, of {devices}"
    return Decision("tensor_parallel_size", str(tensor_parallel), reason, source)


def device_budget(device: Device, utilization: float) -> int:
    """What may be used: an absolute budget as it is, else a share of a GPU's total, or of the RAM that is free. Never
    more than is free."""
    if device.budget_bytes is not None:
        return min(device.budget_bytes, device.free_bytes)
    if device.kind == "cpu":
        return int(device.free_bytes * utilization)
    return min(int(device.total_bytes * utilization), device.free_bytes)


def describe_budget(rank: Rank, utilization: float) -> str:
    device = rank.device
    if device.budget_bytes is not None:
        return f"{format_bytes(rank.budget_bytes)}, as set"
    of = device.free_bytes if device.kind == "cpu" else device.total_bytes
    return f"{utilization:g} of {format_bytes(of)} = {format_bytes(rank.budget_bytes)}"
