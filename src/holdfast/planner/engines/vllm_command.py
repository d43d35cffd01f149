"""A plan as vLLM's command: the flags that its version has, and lengths that its version's own sizing holds.

    V0 engine, to 0.7     a step must hold a whole prompt unless prompts are chunked; says so or is told to chunk
    V1 engine, since 0.8  chunks by itself; V2 model runner since 0.26

How it cuts memory is in vllm_release.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from holdfast.engine_profiles.profile import profile
from holdfast.errors import ConfigurationError
from holdfast.planner.compat import vllm_release
from holdfast.planner.compat.gpu_kernels import (
    build_note,
    lacks_capability,
    lacks_engine,
    lacks_gguf_types,
    lacks_method,
)
from holdfast.planner.compat.vllm_overhead import non_torch_bytes
from holdfast.planner.compat.vllm_release import ReleaseTerms, Vllm
from holdfast.planner.compat.vllm_weights import (
    absorbed_bytes,
    beside_weights,
    expert_kernel,
    left_out_bytes,
    rounding_bytes,
)
from holdfast.planner.engines.command import ROUNDING, Command, line, named_dtype, parallel, total_is_known
from holdfast.planner.engines.fp8_loading import loaded_whole
from holdfast.planner.engines.layer_partition import partition
from holdfast.planner.engines.vllm_features import (
    can_chunk,
    features_since,
    lacks_features,
    lacks_fp8_units,
    leaves_v1,
    lora_rank,
)
from holdfast.planner.engines.vllm_kv import KeptKV, expands_latents, fp8_by_default, kept_kv, most_tokens
from holdfast.planner.fit.count import stored_bytes
from holdfast.planner.fit.search import Plan, Rank, fit
from holdfast.planner.models.model_sources import ModelSource, torch_source
from holdfast.planner.sizing.draft_cost import draft_ranks
from holdfast.planner.sizing.terms import adapters_bytes, gpu_terms
from holdfast.units import GIB, format_bytes

USUAL_BLOCK_TOKENS = 16
NO_IMAGES = '{"image": 0, "video": 0}'
"""For --limit-mm-per-prompt: vLLM then tries none when it starts. Of releases that have --language-model-only too."""
MARLIN_CAPABILITY = (8, 0)


@dataclass(frozen=True, slots=True)
class Sized:
    """What this version is told, and what it would then have."""

    fit: Plan
    kept: KeptKV
    length: int
    kv_bytes: int
    chunked: bool
    """It must be told to chunk prompts."""
    planned_length: int
    """Before this version was asked."""
    in_one_step: bool = False
    """It cannot chunk prompts: the steps that it needs were planned too."""

    @property
    def rank(self) -> Rank:
        return tightest(self.fit)

    @property
    def tokens(self) -> int:
        """As it prints them."""
        return self.kept.printed_tokens(self.kv_bytes, max(1, self.length))


def tightest(found: Plan) -> Rank:
    if not found.stage_ends:
        return min(found.ranks, key=lambda one: one.room_bytes)
    # Of stages that are not even the one that holds the fewest tokens, which is what all of them have.
    length = max(1, found.limits.max_model_len)
    return min(found.ranks, key=lambda one: (one.kv.held_tokens(one.room_bytes, length), one.room_bytes))


def vllm_command(found: Plan, sequences: int, vllm: Vllm) -> Command:
    source = torch_source(found.question.model, "vllm")
    if found.question.machine.kind != "gpu":
        return _on_a_cpu(found, sequences, vllm, source)
    sized = _sized(found, vllm)
    known, step = all(total_is_known(rank.device) for rank in found.ranks), sized.fit.limits.max_num_batched_tokens
    in_bytes = not known and vllm.has("kv-pool-in-bytes")
    settings = {
        "gpu_memory_utilization": f"{vllm_utilization(sized.fit):g}" if known else None,
        "kv_cache_memory_bytes": _room_bytes(sized.fit, vllm) if in_bytes else None,
        "max_model_len": sized.length,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": max(step, sequences),
        "enable_chunked_prefill": True if sized.chunked and sized.length > step else None,
        **_others(sized.fit, source, vllm),
    }
    text = line("vllm", source.name, settings, vllm.oldest)
    if vllm.runner != vllm.default_runner and vllm.has("model-runner-v2"):
        text = f"VLLM_USE_V2_MODEL_RUNNER={int(vllm.runner == 'v2')} {text}"
    elif vllm.runner == "v0" != vllm.default_runner:
        text = f"VLLM_USE_V1=0 {text}"
    at_once = source.makes_fp8 and not vllm.has("fp8-made-by-matrix")
    note, too_large = loaded_whole(sized.fit, "vLLM before 0.16") if at_once else (None, None)
    text = partition("vllm", sized.fit) + text
    problems = _problems(sized, vllm, source, too_large)
    # A context of no tokens at all can be asked of nobody: only why is said.
    notes = _notes(sized, vllm, source, note) if sized.length else [_kv_said(sized, vllm)]
    return Command(
        engine="vllm",
        text=text if sized.length else "",
        available=source.ready and not problems,
        notes=(*notes, *problems),
        lacks=tuple(problems),
        kv_tokens=sized.tokens,
        max_model_len=sized.length,
        reasons=sized.kept.reasons,
    )


def _on_a_cpu(found: Plan, sequences: int, vllm: Vllm, source: ModelSource) -> Command:
    """There its share of memory would be of the whole machine: the KV pool is set instead, in whole GiB."""
    room, length = max(0, found.ranks[0].room_bytes), found.limits.max_model_len
    space = max(1, room // GIB)
    if found.question.settings.max_model_len is None:
        length = min(length, found.ranks[0].kv.longest(space * GIB, length))
    step = max(found.limits.max_num_batched_tokens, sequences, length if vllm.runner == "v0" else 0)
    limits = {"max_model_len": length, "max_num_seqs": sequences, "max_num_batched_tokens": step}
    command = line("vllm", source.name, {**limits, **_others(found, source, vllm)}, vllm.oldest)
    notes = ["on a CPU vLLM needs its own build, and uses bf16"]
    if room < GIB:
        notes.append(f"it sets the KV cache in whole GiB, and this plan has {format_bytes(room)} for it")
    text = f"VLLM_CPU_KVCACHE_SPACE={space} {command}"
    return Command(engine="vllm", text=text, available=False, notes=(*notes, *source.notes))


# What it is told


def _sized(found: Plan, vllm: Vllm) -> Sized:
    """A length that was asked for stays, and is said to be refused where it would be; one that was left to us becomes
    what this version holds."""
    planned, asked = found.limits.max_model_len, found.question.settings.max_model_len is not None
    cap = most_tokens(found.question.model.spec, vllm)
    if cap is not None and not asked:
        found = replace(found, limits=replace(found.limits, max_model_len=min(planned, cap)))
    chunks = vllm.runner == "v0" and found.limits.max_model_len > found.limits.max_num_batched_tokens
    whole = chunks and not can_chunk(found, vllm)
    if whole:
        found, chunks = _in_one_step(found), False
    available = vllm_kv_bytes(found, vllm)
    kept, length = kept_kv(found, tightest(found), vllm), found.limits.max_model_len
    if not asked:
        length = min(length, kept.cost.longest(max(0, available), length))
    return Sized(found, kept, length, available, chunks, planned, whole)


def _in_one_step(found: Plan) -> Plan:
    """Planned again with steps that hold a whole prompt, whose activations take more."""
    question, length = found.question, found.limits.max_model_len
    for _ in range(2):
        settings = replace(question.settings, max_num_batched_tokens=length)
        try:
            again = fit(replace(question, settings=replace(settings, tensor_parallel=found.tensor_parallel)))
        except ConfigurationError:
            return found
        if question.settings.max_model_len is not None or again.limits.max_model_len >= length:
            break
        length = again.limits.max_model_len
        if length < 1:
            return found
    return replace(again, limits=replace(again.limits, max_model_len=min(length, again.limits.max_model_len)))


def vllm_utilization(found: Plan) -> float:
    """Its share of the total that is our budget, rounded down: it refuses to start when less than that is free. Of
    devices whose total is known."""
    shares = [rank.budget_bytes / rank.device.total_bytes for rank in found.ranks if rank.device.total_bytes]
    return max(0.01, math.floor(min(shares) * 100 + ROUNDING) / 100)


def _others(found: Plan, source: ModelSource, vllm: Vllm) -> dict[str, object]:
    """None: as it is by itself."""
    asked = found.question.settings
    kv_dtype = vllm.value("kv-fp8") if found.kv_dtype == "fp8" else None
    if kv_dtype is None and asked.kv_cache_dtype != "auto" and fp8_by_default(found, vllm):
        kv_dtype = found.kv_dtype
    made = source.flags.get("--quantization") == "bitsandbytes"
    return {
        "dtype": named_dtype(found),
        "kv_cache_dtype": kv_dtype,
        "block_size": None if asked.block_tokens == USUAL_BLOCK_TOKENS else asked.block_tokens,
        **source.flags,
        "load_format": "bitsandbytes" if made and vllm.has("bitsandbytes-needs-load-format") else None,
        "enforce_eager": True if not asked.graphs or (made and vllm.has("bitsandbytes-needs-eager")) else None,
        **parallel(found),
        # Of one rank it would change nothing.
        "enable_expert_parallel": True
        if asked.expert_parallel and found.tensor_parallel * asked.data_parallel > 1
        else None,
        **_stretching(found, vllm),
        "speculative_config": _speculation(found),
        "limit_mm_per_prompt": NO_IMAGES if asked.text_only and _sees(found) else None,
        "enable_lora": True if asked.max_loras else None,
        "max_loras": asked.max_loras or None,
        "max_lora_rank": (lora_rank(asked.max_lora_rank, vllm) or asked.max_lora_rank) if asked.max_loras else None,
    }


def _sees(found: Plan) -> bool:
    return any(tensor.part == "vision" for tensor in found.question.model.spec.tensors)


def _speculation(found: Plan) -> str | None:
    asked, model = found.question.settings, found.question.model
    if asked.speculative_config is None:
        method = asked.spec_method
        return None if method is None else json.dumps({"method": method, "num_speculative_tokens": 1})
    written = json.loads(asked.speculative_config)
    if model.draft is not None and "/" not in written["model"]:
        written["model"] = model.draft.name
    if model.draft is not None and draft_ranks(model, found.tensor_parallel) < found.tensor_parallel:
        written["draft_tensor_parallel_size"] = 1
    return json.dumps({"num_speculative_tokens": 1, **written})


def _stretching(found: Plan, vllm: Vllm) -> dict[str, object]:
    """Of positions, in a flag of its own until overrides of the config took its place."""
    written, spec = found.question.settings.rope_scaling, found.question.model.spec
    if written is None:
        return {}
    if vllm.has("rope-scaling-flag"):
        return {"rope_scaling": written}
    parameters = {"rope_theta": spec.rope.theta, **json.loads(written)}
    return {"hf_overrides": json.dumps({"rope_parameters": parameters})}


# What it makes of it


def vllm_terms(found: Plan, vllm: Vllm) -> ReleaseTerms:
    """Of the tightest rank, in vLLM's categories: rotary tables, padding, absorbed matrices and rounding are in its
    weights, our logits of its peak; its buffers are made before it measures."""
    rank, spec, stages = tightest(found), found.question.model.spec, found.pipeline_parallel
    gpu, ranks = rank.device.gpu, found.tensor_parallel
    step = gpu_terms(
        spec,
        found.limits,
        dtype=found.dtype,
        weights_bytes=0,
        tensor_parallel=ranks,
        layers=found.stage_layers[rank.stage],
        last_stage=rank.stage == stages - 1,
        vendor="nvidia" if gpu is None else gpu.vendor,
        graphs=found.question.settings.graphs,
        sorts=vllm.has("sorts-vocabulary"),
    )
    sizes = {term.name: term.nbytes for term in step}
    return ReleaseTerms(
        weights=stored_bytes(found.question, ranks, found.stage_layers[rank.stage])
        + _own_bytes(found, rank, vllm)
        + _bytes_of(rank, "draft"),
        peak_activation=sum(sizes.get(name, 0) for name in ("activations", "encoder", "logits")),
        non_torch=non_torch_bytes(gpu, ranks * stages, vllm),
        graphs=sizes.get("graphs", 0) + sizes.get("hip_graphs", 0),
    )


def _bytes_of(rank: Rank, *names: str) -> int:
    return sum(term.nbytes for term in rank.terms if term.name in names)


def _own_bytes(found: Plan, rank: Rank, vllm: Vllm) -> int:
    """What it keeps beside the checkpoint's bytes, and adapters in slots of the rank that it takes."""
    model, settings = found.question.model, found.question.settings
    kernel = expert_kernel(rank.device.gpu, vllm, adapters=settings.max_loras > 0)
    dtype, ranks, layers = found.dtype, found.tensor_parallel, found.stage_layers[rank.stage]
    beside = beside_weights(model, kernel, dtype=dtype, tensor_parallel=ranks, layers=layers)
    kept = rounding_bytes(model, dtype=dtype, tensor_parallel=ranks, layers=layers)
    if not expands_latents(model.spec, vllm):
        kept += absorbed_bytes(model, vllm, dtype=dtype, tensor_parallel=ranks, layers=layers)
    gpu = rank.device.gpu
    if gpu is not None and (gpu.compute_capability or (0, 0)) >= MARLIN_CAPABILITY:
        kept -= left_out_bytes(model, dtype=dtype, tensor_parallel=ranks, layers=layers)
    taken = lora_rank(settings.max_lora_rank, vllm) or settings.max_lora_rank
    return beside.total + kept + adapters_bytes(model.spec, dtype, layers, settings.max_loras, taken, ranks)


def _room_bytes(found: Plan, vllm: Vllm) -> int:
    """What our budget leaves for KV beside what vLLM keeps and the plan did not count."""
    counted = ("weights", "rotary", "padding", "adapters")
    left = [
        rank.room_bytes
        + _bytes_of(rank, *counted)
        - stored_bytes(found.question, found.tensor_parallel, found.stage_layers[rank.stage])
        - _own_bytes(found, rank, vllm)
        for rank in found.ranks
    ]
    return max(0, min(left))


def vllm_kv_bytes(found: Plan, vllm: Vllm) -> int:
    rank = tightest(found)
    if not total_is_known(rank.device):
        return _room_bytes(found, vllm)
    requested = vllm_release.requested_bytes(rank.device.total_bytes, vllm_utilization(found))
    return vllm_release.kv_bytes(requested, vllm_terms(found, vllm), vllm)


def _problems(sized: Sized, vllm: Vllm, source: ModelSource, too_large: str | None) -> list[str]:
    """Why it would not run."""
    found, model, least = sized.fit, sized.fit.question.model, profile("vllm").data["gpus"]
    gpus = [rank.device.gpu for rank in found.ranks]
    indexed = any(layer.latent is not None and layer.latent.index_dim for layer in model.spec.layers)
    fp8_kv = sized.kept.kv_dtype == "fp8" and vllm.runner != "v0"
    problems = [
        *lacks_features(found, source, vllm),
        lacks_engine("vllm", gpus, vllm.at),
        lacks_fp8_units(found, vllm),
        lacks_method(model, gpus, "vllm"),
        lacks_gguf_types(model),
        lacks_capability("sparse attention with an indexer", gpus, least["index"]) if indexed else None,
        lacks_capability("an FP8 KV cache", gpus, least["fp8-kv"]) if fp8_kv else None,
        too_large,
        *_lacks_settings(found, vllm),
        *_lacks_length(sized, vllm),
    ]
    return [problem for problem in problems if problem is not None]


def _lacks_length(sized: Sized, vllm: Vllm) -> Iterator[str]:
    """Of a context that was asked for: what it says, or that it says nothing and cannot. Of one that was left to us:
    that it is too short for what must fit."""
    kept, length, traffic = sized.kept, sized.length, sized.fit.question.traffic
    if not length:
        yield "its KV cache does not hold a single sequence"
    elif traffic is not None and length < traffic.length:
        yield f"requests reach {traffic.length:,} tokens, but it holds {length:,}"
    if kept.most_tokens is not None and length > kept.most_tokens:
        yield f"it would refuse: User-specified max_model_len ({length}) is greater than {kept.most_tokens}"
    refused = vllm_release.refusal(sized.kv_bytes, kept.checked, length, vllm) if length else None
    if refused is not None:
        yield f"it would refuse: {refused}"
    elif length and kept.cost.sequence_bytes(length) > sized.kv_bytes:
        held = kept.cost.longest(max(0, sized.kv_bytes), length)
        yield f"it would start, but its KV cache does not hold a sequence of {length:,} tokens: {held:,} at most"


def _lacks_settings(found: Plan, vllm: Vllm) -> Iterator[str]:
    """What was planned with and it cannot be told."""
    settings = found.question.settings
    if found.kv_dtype not in (found.dtype, "fp8"):
        yield f"it stores KV in dtype, {found.dtype}, or in fp8: not in {found.kv_dtype}"
    sizes = vllm.value("block-tokens")
    if settings.block_tokens not in sizes:
        yield f"its KV blocks hold {', '.join(map(str, sizes))} tokens: not {settings.block_tokens}"
    if settings.max_loras and lora_rank(settings.max_lora_rank, vllm) is None:
        yield f"it does not support adapters of rank {settings.max_lora_rank}"


def _notes(sized: Sized, vllm: Vllm, source: ModelSource, loading: str | None) -> list[str]:
    found, asked = sized.fit, sized.fit.question.settings
    pool = _kv_said(sized, vllm) if total_is_known(sized.rank.device) else _unknown_total(found, vllm)
    shorter = wider = gguf = graphs = None
    if sized.length < sized.planned_length:
        why = ": without chunked prefill, a step must hold a whole prompt" if sized.in_one_step else ""
        shorter = f"this version holds {sized.length:,} tokens of the plan's {sized.planned_length:,}{why}"
    if asked.max_loras and lora_rank(asked.max_lora_rank, vllm) not in (asked.max_lora_rank, None):
        wider = f"it has no slots of rank {asked.max_lora_rank}: the next larger rank is used and counted"
    if found.question.model.format == "gguf":
        needed = "; it needs the package vllm-gguf-plugin" if vllm.has("gguf-by-plugin") else ""
        gguf = f"its GGUF support is experimental and slower than its own formats{needed}"
    if not vllm.subtracts_graphs:
        graphs = f"about {format_bytes(vllm_terms(found, vllm).graphs)} more are used than allowed"
        graphs = f"it does not reserve memory for CUDA graphs: {graphs}"
    notes = [
        vllm.unknown, pool, *source.notes, *sized.kept.reasons, shorter, loading, _few_at_once(sized),
        leaves_v1(found, sized.kept.kv_dtype, vllm), *features_since(found, source, vllm), wider,
        build_note("vllm", [rank.device.gpu for rank in found.ranks]), gguf, graphs,
    ]  # fmt: skip
    return [note for note in notes if note is not None]


def _kv_said(sized: Sized, vllm: Vllm) -> str:
    if sized.kv_bytes < 0:
        short = format_bytes(-sized.kv_bytes)
        return f"{vllm.name} is {short} short before any KV: it allocates more than its fraction"
    kept, length, windows = sized.kept, max(1, sized.length), ""
    if kept.cost.windows and not kept.counts_sequences:
        held = max(0, sized.kv_bytes) / kept.cost.sequence_bytes(length)
        windows = f", it prints, as if no layer had a window; {held:.1f} sequences of {length:,} tokens"
    pool = f"{format_bytes(sized.kv_bytes)}: {sized.tokens:,} tokens{windows}"
    return f"{vllm.name} would give the KV cache about {pool}"


def _few_at_once(sized: Sized) -> str | None:
    """Of the traffic that the plan holds at once."""
    traffic = sized.fit.question.traffic
    if traffic is None or not 0 < traffic.length <= sized.length:
        return None
    held = int(max(0, sized.kv_bytes) / sized.kept.cost.sequence_bytes(traffic.length))
    if held >= traffic.concurrency:
        return None
    return f"of the traffic's {traffic.concurrency:,} requests it holds {held:,} at once: the others wait"


def _unknown_total(found: Plan, vllm: Vllm) -> str:
    budget = format_bytes(min(rank.budget_bytes for rank in found.ranks))
    if not vllm.has("kv-pool-in-bytes"):
        return f"set --gpu-memory-utilization to {budget} over the GPU's total, which --vram does not give; --gpu does"
    return (
        f"--vram does not give the GPU's total, so the KV pool is set in bytes instead of a fraction. vLLM still needs"
        f" its default fraction, {vllm.default_utilization:g}, free when it starts: on a larger GPU set"
        f" --gpu-memory-utilization to {budget} over its total"
    )
