"""How fast a configuration can be, and about how fast it will be: bytes and operations over what the device has.

    step = max(bytes read / bandwidth, operations / rate) + all-reduces / link + what every step costs on top
    with layers that are streamed: no less than their bytes / the link to the host, and what of them is on a disk / its
    rate; all of this overlaps. Of few tokens less, where the host's cores compute some of their MLPs
    with experts over VRAM and RAM: expert_speed.py
    attention = 4 x columns x tokens seen: a window's at most, none of recurrent layers, of latents while decoding in
                the width of the latent, which every head reads

Knows catalogue rates only; a device without them has no throughput here. Counts for an engine of the usual kind: paged
KV, captured graphs, one process a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from holdfast.footprint.identity_key import Same
from holdfast.hardware.gpus import Gpu
from holdfast.models import ModelSpec, TensorSpec
from holdfast.planner.advice.expert_speed import ExpertSpeed, MlpSpeed, expert_speed, mlp_speed
from holdfast.planner.fit.count import streamed_on_gpu
from holdfast.planner.fit.network import GB, network_s
from holdfast.planner.fit.search import Plan
from holdfast.planner.sizing.kv_cost import KVCost
from holdfast.planner.sizing.sharded_weights import DTYPE_BYTES, Weight, rank_bytes, weights_of

NVME_GB_S = 3.0
"""Assumed of a disk that was not measured: large reads of an ordinary NVMe drive on PCIe 3 or 4; good ones do twice."""
BATCHES = (1, 8, 32)
ALL_REDUCES_A_LAYER = 2
"""After attention, and after the MLP."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Shares of what the makers state that are reached, and the time of a step in which nothing else happens."""

    bandwidth: float
    compute: float
    link: float
    host: float
    """Of the link to the host, which layers come over."""
    cores: float
    """Of the host's, of what is taken to be reached where it computes experts."""
    step_s: float
    sequence_s: float
    """Of every sequence of a step: sampling it and answering it."""
    all_reduce_s: float
    """Each, before its first byte."""


# An H200 (4.8 TB/s, 989 TFLOP/s stated) copied 4.1 to 4.3 TB/s and multiplied at 752 TFLOP/s. On it vLLM 0.26 decoded
# one stream of an 8B model in 4.98 ms, 3.5 of them for its weights, and of a 0.6B model in 2.6 ms, 0.3 of them for
# weights: 1.5 to 2.3 ms a step go to launches, sampling and Python, and each of 64 streams at once added 10 to 22 us.
# It prefilled at 0.67 of the stated rate with the 8B model and at 0.43 with the small one. Pinned copies reached 54.9
# of 63 GB/s; over PCIe 4 others see 24 to 25 of 31.5. Layers of a 70B model in int4 came at 55.3 GB/s while steps were
# computed, which took no time beside it up to 32 sequences.
LOW = Efficiency(
    bandwidth=0.75, compute=0.40, link=0.60, host=0.70, cores=0.5, step_s=2.5e-3, sequence_s=25e-6, all_reduce_s=30e-6
)
EXPECTED = Efficiency(
    bandwidth=0.90, compute=0.65, link=0.80, host=0.82, cores=1.0, step_s=1.5e-3, sequence_s=10e-6, all_reduce_s=12e-6
)
HIGH = Efficiency(
    bandwidth=0.92, compute=0.76, link=0.87, host=0.88, cores=2.0, step_s=0.3e-3, sequence_s=2e-6, all_reduce_s=6e-6
)
STATED = Efficiency(
    bandwidth=1.0, compute=1.0, link=1.0, host=1.0, cores=2.5, step_s=0.3e-3, sequence_s=2e-6, all_reduce_s=6e-6
)
"""The makers' figures: where nothing was measured, no less can be said to be out of reach."""

EVIDENCE = "six measurements of vLLM 0.26 on one H200: dense models of 0.6B and 8B in bf16"
STREAMING_EVIDENCE = (
    f"{EVIDENCE}; three of Holdfast there with 40 to 42 of 80 layers streamed, two of them with MLPs on its 16 cores"
)
EXPERTS_EVIDENCE = (
    f"{EVIDENCE}; three of Holdfast there with experts over VRAM and RAM, whose host had 16 cores with AMX"
)
MEASURED_GPU = "h200"
UNPROVEN_SHARE = 0.8
"""Of the low end, for each thing by which a plan differs from what was measured."""


@dataclass(frozen=True, slots=True)
class Estimate:
    tokens_per_s: float
    low: float
    high: float


def shown_rate(tokens_per_s: float) -> str:
    """For people: two digits of a small one."""
    return f"{tokens_per_s:,.0f}" if tokens_per_s >= 10 else f"{tokens_per_s:.2g}"


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeRate:
    batch: int
    estimate: Estimate
    """Of all sequences together."""
    limited_by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Throughput:
    context_tokens: int
    """What every sequence is taken to hold while it decodes."""
    one: DecodeRate
    at_traffic: DecodeRate | None
    """At the traffic's concurrency, as far as memory holds it."""
    largest: DecodeRate
    """With as many sequences of usual length as memory and max_num_seqs allow."""
    full_length: DecodeRate
    """The same of sequences as long as max_model_len."""
    batches: tuple[DecodeRate, ...]
    """One sequence and a few numbers of them, as far as max_num_seqs goes: where experts wait in RAM, each has its own
    limit."""
    prefill: Estimate
    prefill_limited_by: str
    prompt_tokens: int
    """Of the prompts that `prefill` is for."""
    evidence: str
    """What the estimates were held against, and what of this plan was not among it."""

    def side_by_side(self, fit: Plan) -> tuple[tuple[int, DecodeRate], ...]:
        """(tokens of each sequence, rate): of usual ones and of those of full length, as far as several fit, once where
        these are the same."""
        usual, full = (fit.usual_tokens, self.largest), (fit.limits.max_model_len, self.full_length)
        return tuple(one for one in ((usual,) if usual[0] == full[0] else (usual, full)) if one[1].batch > 1)


@dataclass(frozen=True, slots=True)
class Reads:
    """Bytes of weights that a step of one stage reads on one rank."""

    dense: int
    experts: tuple[tuple[int, float], ...]
    """(bytes of all experts, share that one token meets) of each kind."""

    def bytes_for(self, tokens: int) -> float:
        """Tokens choose experts as if by lot: with more of them, more experts are met, each read once."""
        return self.dense + self.of_experts(tokens)

    def of_experts(self, tokens: int) -> float:
        return sum(size * (1 - (1 - share) ** tokens) for size, share in self.experts)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """What a step costs on one rank of a pipeline stage."""

    reads: Reads
    kv: KVCost
    parameters: float
    """That one token meets, on this rank, and that are multiplied in 16 bits."""
    fp8_parameters: float
    """Those that are multiplied in FP8, with activations in it too."""
    layers: int
    attention: Attention
    gpu: Gpu
    moved_bytes: int = 0
    """Of layers that come to the GPU in every step, with all of their experts."""
    read_bytes: int = 0
    """Of these, from a disk."""
    experts: ExpertSpeed | None = None
    """None: all experts stay on the GPU, or come with their layers."""
    mlps: MlpSpeed | None = None
    """None: the GPU computes all of the layers that are streamed."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Columns on this rank that meet every token they see, summed over layers that see as far: (window, columns)."""

    decoding: tuple[tuple[int | None, float], ...]
    prompts: tuple[tuple[int | None, float], ...]

    def of_token(self, context: int) -> float:
        """Operations of the next token behind a context."""
        return 4 * sum(columns * min(context, window or context) for window, columns in self.decoding)

    def of_prompt(self, prompt: int) -> float:
        """Operations of a prompt's average token: without a window it sees half of the prompt."""
        return 4 * sum(columns * _seen(prompt, window) for window, columns in self.prompts)


def _seen(prompt: int, window: int | None) -> float:
    if window is None or prompt <= window:
        return prompt / 2
    return window - window * window / (2 * prompt)


def throughput(fit: Plan) -> Throughput | None:
    """None: the rates of these devices are not known, or nothing fits on them."""
    stages = _stages(Same(fit))
    if stages is None or not fit.fits:
        return None
    traffic = fit.question.traffic
    context, new = usual_context(fit), unproven(fit)
    most, full = (
        max(1, min(fit.limits.max_num_seqs, int(fit.concurrency(max(1, tokens)))))
        for tokens in (fit.usual_tokens, fit.limits.max_model_len)
    )

    def rate(work: StepWork) -> Estimate:
        """Of a device or a model that was not measured, the makers' figures are not out of reach."""
        low, high = UNPROVEN_SHARE ** len(new), STATED if new else HIGH
        expected, lowest, highest = (work.tokens / _step_s(fit, stages, work, one) for one in (EXPECTED, LOW, high))
        return Estimate(expected, lowest * low, highest)

    def decode(batch: int, held: int = context) -> DecodeRate:
        work = StepWork(batch, held)
        return DecodeRate(batch=batch, estimate=rate(work), limited_by=_limit(fit, stages, work))

    prompt = max(1, traffic.prompt_tokens if traffic is not None else fit.usual_tokens)
    prefill = StepWork(fit.limits.max_num_batched_tokens, prompt=prompt)
    return Throughput(
        context_tokens=context,
        one=decode(1),
        at_traffic=decode(min(most, traffic.concurrency)) if traffic is not None else None,
        largest=decode(most),
        full_length=decode(full, fit.limits.max_model_len),
        batches=tuple(decode(batch) for batch in BATCHES if batch <= fit.limits.max_num_seqs),
        prefill=rate(prefill),
        prefill_limited_by=_limit(fit, stages, prefill),
        prompt_tokens=prompt,
        evidence=_evidence(fit) + (f"; not covered by them, so the interval is wider: {', '.join(new)}" if new else ""),
    )


def _evidence(fit: Plan) -> str:
    settings = fit.question.settings
    if settings.experts_wait:
        return EXPERTS_EVIDENCE
    return STREAMING_EVIDENCE if settings.streamed_layers else EVIDENCE


def usual_context(fit: Plan) -> int:
    """What a sequence holds on average while it decodes."""
    traffic = fit.question.traffic
    return fit.usual_tokens // 2 if traffic is None else traffic.prompt_tokens + traffic.output_tokens // 2


def step_seconds(fit: Plan, batch: int, context: int, efficiency: Efficiency) -> float | None:
    """Of one decoding step, whether or not memory holds it; None: the rates are not known."""
    stages = _stages(Same(fit))
    return None if stages is None else _step_s(fit, stages, StepWork(batch, context), efficiency)


def no_throughput_reason(fit: Plan) -> str:
    if not fit.fits:
        return "it does not fit"
    unknown = next((rank.device.name for rank in fit.ranks if rank.device.gpu is None), fit.ranks[0].device.name)
    return f"bandwidth and compute of {unknown} are not known"


def unproven(fit: Plan) -> tuple[str, ...]:
    """By what this plan differs from everything that was measured."""
    spec, kinds = fit.question.model.spec, {layer.kind for layer in fit.question.model.spec.layers}
    keys = [rank.device.gpu.key for rank in fit.ranks if rank.device.gpu is not None]
    differs = {
        "several GPUs": len(fit.ranks) > 1,
        "experts": any(layer.experts is not None for layer in spec.layers),
        "quantized weights": spec.quantization is not None or fit.question.model.format == "gguf",
        **{f"{kind} layers": kind in kinds for kind in ("window", "latent", "state")},
    }
    return (*[key for key in keys if key != MEASURED_GPU][:1], *(name for name, new in differs.items() if new))


@lru_cache(maxsize=8)
def _stages(key: Same[Plan]) -> list[Stage] | None:
    """Once for all batches and efficiencies that are asked of a plan."""
    fit = key.held
    if any(rank.device.gpu is None or rank.device.gpu.bandwidth_gb_s <= 0 for rank in fit.ranks):
        return None
    spec, ranks = fit.question.model.spec, fit.tensor_parallel
    weights = weights_of(fit.question.model, dtype=fit.weights_as)
    layers = fit.stage_layers
    stages, streamed = [], streamed_on_gpu(fit.question) if fit.own is None else fit.own.streamed
    for index in range(fit.pipeline_parallel):
        of_stage = [rank for rank in fit.ranks if rank.stage == index]
        slowest = min(of_stage, key=lambda rank: rank.device.gpu.bandwidth_gb_s if rank.device.gpu else 0.0)
        assert slowest.device.gpu is not None
        own = set(layers[index])
        last = index == fit.pipeline_parallel - 1
        met = [
            (_met(spec, tensor), _in_fp8(spec, tensor, slowest.device.gpu))
            for tensor in spec.tensors
            if tensor.part == "text" and (tensor.layer in own or (last and _is_head(fit, tensor.name)))
        ]
        stages.append(
            Stage(
                reads=stage_reads(fit, weights, index),
                kv=slowest.kv,
                parameters=sum(size for size, fp8 in met if not fp8) / ranks,
                fp8_parameters=sum(size for size, fp8 in met if fp8) / ranks,
                layers=len(own),
                attention=_attention(spec, layers[index], ranks),
                gpu=slowest.device.gpu,
                moved_bytes=0 if streamed is None else streamed.moved_bytes,
                read_bytes=0 if streamed is None else streamed.read_bytes,
                experts=expert_speed(fit),
                mlps=None if streamed is None else mlp_speed(fit, streamed),
            )
        )
    return stages


def host_gain(fit: Plan, batch: int = 1) -> float:
    """How many times as fast such a step is expected to be because the host's cores compute MLPs of streamed layers; 1:
    they compute none."""
    stages = _stages(Same(fit))
    return 1.0 if stages is None else max(_gain(stage, StepWork(batch), EXPECTED) for stage in stages)


def _gain(stage: Stage, work: StepWork, efficiency: Efficiency) -> float:
    if stage.mlps is None:
        return 1.0
    link = max(1.0, stage.gpu.host_link.gb_s * GB * efficiency.host)
    return stage.mlps.gain(work.tokens, link, efficiency.cores)


def _met(spec: ModelSpec, tensor: TensorSpec) -> float:
    """Parameters of this tensor that one token meets."""
    experts = spec.layers[tensor.layer].experts if tensor.layer is not None else None
    if not tensor.experts or experts is None:
        return tensor.elements
    return tensor.elements * experts.per_token / tensor.experts


def _in_fp8(spec: ModelSpec, tensor: TensorSpec, gpu: Gpu) -> bool:
    """Where weights are FP8 and the GPU multiplies it, engines turn activations into it too; else they unpack."""
    quantization = spec.quantization
    if quantization is None or quantization.method != "fp8" or not gpu.fp8 or not tensor.linear:
        return False
    return quantization.converts(tensor.hf_name, tensor.experts)


def _attention(spec: ModelSpec, layers: Iterable[int], ranks: int) -> Attention:
    decoding: dict[int | None, float] = {}
    prompts: dict[int | None, float] = {}
    for index in layers:
        layer = spec.layers[index]
        if not layer.attends:
            continue
        columns = spec.heads * (spec.head_dim if layer.head_dim is None else layer.head_dim) / ranks
        # Decoding over a latent, scores meet rank + rope columns of it and the sum its rank, for every head.
        latent = layer.latent
        absorbed = columns if latent is None else spec.heads * (latent.rank + latent.rope_dim / 2) / ranks
        decoding[layer.window] = decoding.get(layer.window, 0.0) + absorbed
        prompts[layer.window] = prompts.get(layer.window, 0.0) + columns
    return Attention(tuple(decoding.items()), tuple(prompts.items()))


def _is_head(fit: Plan, name: str) -> bool:
    return name == ("embed" if fit.question.model.spec.tied_embeddings else "head")


def stage_reads(fit: Plan, weights: list[Weight], stage: int = 0) -> Reads:
    """An embedding that is not also the head gives one row a token, and an image encoder nothing while decoding."""
    spec = fit.question.model.spec
    dense: list[Weight] = []
    experts: dict[float, list[Weight]] = {}
    for weight in weights:
        tensor = weight.tensor
        if tensor is not None and (tensor.part == "vision" or (tensor.name == "embed" and not spec.tied_embeddings)):
            continue
        if tensor is not None and tensor.experts and tensor.layer is not None:
            described = spec.layers[tensor.layer].experts
            per_token = tensor.experts if described is None else described.per_token
            experts.setdefault(min(1.0, per_token / tensor.experts), []).append(weight)
        else:
            dense.append(weight)

    def share(of: list[Weight]) -> int:
        return rank_bytes(of, spec, tensor_parallel=fit.tensor_parallel, layers=fit.stage_layers[stage])

    return Reads(share(dense), tuple((share(of), met) for met, of in sorted(experts.items())))


def kv_read_bytes(kv: KVCost, context: int) -> int:
    """What one sequence's next token reads."""
    windows = sum(min(window, context) * size for window, size in kv.windows)
    return context * kv.growing_bytes + windows + kv.fixed_bytes


@dataclass(frozen=True, slots=True)
class StepWork:
    """What a step computes: a token of each of so many sequences, or as many tokens of prompts."""

    tokens: int
    context: int = 0
    """Of each sequence, while decoding."""
    prompt: int | None = None
    """Length of the prompts; None: it decodes."""


def _parts(fit: Plan, stage: Stage, work: StepWork, efficiency: Efficiency) -> Mapping[str, float]:
    """Seconds of one stage's step, by what they are spent on; where experts wait in RAM, in the sooner way."""
    copied = _parts_of(fit, stage, work, efficiency)
    experts = stage.experts
    if experts is None:
        return copied
    link = max(1.0, stage.gpu.host_link.gb_s * GB * efficiency.host)
    copied = {**copied, "host": experts.waiting_bytes / link}
    if not experts.is_few(work.tokens):
        return copied
    # Those that wait are not read by the GPU where the host computes; what it reads of the others hides some of that.
    read = stage.reads.bytes_for(work.tokens)
    waiting = copied["weights"] * experts.waiting_bytes * experts.met(work.tokens) / read
    staying = copied["weights"] * stage.reads.of_experts(work.tokens) / read - waiting
    ways = [copied, {**copied, "over_link": experts.link_s(work.tokens, link), "host": 0.0}]
    if experts.host:
        fetched = experts.fetched(work.tokens, link, efficiency.cores)
        computed_s = experts.host_s(work.tokens, efficiency.cores) * (1 - fetched)
        both = max(computed_s, experts.link_s(work.tokens, link) * fetched)
        cores = max(0.0, both - staying) + experts.trips_s()
        ways.append({**copied, "weights": copied["weights"] - waiting, "cores": cores, "host": 0.0})
    return min(ways, key=_stage_s)


def _parts_of(fit: Plan, stage: Stage, work: StepWork, efficiency: Efficiency) -> Mapping[str, float]:
    """With all that is read on the GPU. In a step full of prompts KV is written, hardly read."""
    bandwidth = stage.gpu.bandwidth_gb_s * GB * efficiency.bandwidth
    # Engines do attention in 16 bits, whatever the weights are in.
    half = stage.gpu.half_tflops * 1e12 * efficiency.compute
    fp8 = (stage.gpu.fp8_tflops or stage.gpu.half_tflops) * 1e12 * efficiency.compute
    seen, decoding = stage.attention, work.tokens if work.prompt is None else 0
    attention = seen.of_token(work.context) if work.prompt is None else seen.of_prompt(work.prompt)
    return {
        "weights": stage.reads.bytes_for(work.tokens) / bandwidth,
        "KV": decoding * kv_read_bytes(stage.kv, work.context) / bandwidth,
        "compute": work.tokens * ((2 * stage.parameters + attention) / half + 2 * stage.fp8_parameters / fp8),
        "link": _link_s(fit, stage, work.tokens, efficiency),
        "launches": efficiency.step_s + decoding * efficiency.sequence_s,
        "host": stage.moved_bytes
        / max(1.0, stage.gpu.host_link.gb_s * GB * efficiency.host)
        / _gain(stage, work, efficiency),
        "disk": stage.read_bytes / (NVME_GB_S * GB * efficiency.link),
        "cores": 0.0,
        "over_link": 0.0,
    }


def _stage_s(parts: Mapping[str, float]) -> float:
    return max(_computing_s(parts), parts["host"], parts["disk"])


def _computing_s(parts: Mapping[str, float]) -> float:
    reading = max(parts["weights"] + parts["KV"], parts["compute"])
    return reading + parts["cores"] + parts["over_link"] + parts["link"] + parts["launches"]


def _link_s(fit: Plan, stage: Stage, tokens: int, efficiency: Efficiency) -> float:
    """All-reduces in a ring, over the link between the GPUs, or through the host where there is none."""
    ranks, link = fit.tensor_parallel, stage.gpu.peer_link or stage.gpu.host_link
    if ranks == 1 or link.gb_s <= 0:
        return 0.0
    message = tokens * fit.question.model.spec.hidden_size * DTYPE_BYTES[fit.dtype] * 2 * (ranks - 1) / ranks
    each = message / (link.gb_s * GB * efficiency.link) + efficiency.all_reduce_s
    return stage.layers * ALL_REDUCES_A_LAYER * each


def _slowest(fit: Plan, stages: list[Stage], work: StepWork, efficiency: Efficiency) -> Mapping[str, float]:
    """Prompts follow one another through the stages, so the slowest stage sets the pace. Decoding, stages work at the
    same time on parts of the batch: a token of all sequences takes as many turns as there are stages."""
    part = work if work.prompt is not None else replace(work, tokens=-(-work.tokens // len(stages)))
    return max((_parts(fit, stage, part, efficiency) for stage in stages), key=_stage_s)


def _step_s(fit: Plan, stages: list[Stage], work: StepWork, efficiency: Efficiency) -> float:
    turns, answers = (len(stages), work.tokens) if work.prompt is None else (1, 0)
    return turns * _stage_s(_slowest(fit, stages, work, efficiency)) + network_s(fit, work.tokens, answers)


LIMITS = {
    "weights": "memory bandwidth: reading weights",
    "KV": "memory bandwidth: reading KV",
    "compute": "compute",
    "link": "the link between the GPUs",
    "launches": "kernel launches and sampling",
    "host": "the link to the host: weights that are copied",
    "cores": "the host's cores and memory: experts that wait in RAM",
    "over_link": "the link to the host: experts that kernels read over it",
    "disk": "the disk: layers that are read from it",
}
STREAMING = ("host", "disk")


def _limit(fit: Plan, stages: list[Stage], work: StepWork) -> str:
    """Reading and computing overlap: only the longer of the two can be the limit."""
    parts = _slowest(fit, stages, work, EXPECTED)
    waits = max(STREAMING, key=lambda name: parts[name])
    if parts[waits] > _computing_s(parts):
        return LIMITS[waits]
    hidden = ("compute",) if parts["compute"] < parts["weights"] + parts["KV"] else ("weights", "KV")
    return LIMITS[max((name for name in parts if name not in (*hidden, *STREAMING)), key=lambda name: parts[name])]
