"""A plan as commands to run, for Holdfast, vLLM, SGLang and llama.cpp, with what must be known of each.

Decides nothing: the numbers come out of a Fit. Whether Holdfast itself would take its command is asked of its own
settings, so that what is said here cannot be older than the engine.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping
from dataclasses import dataclass

from holdfast.config.engine import REFUSED, EngineConfig
from holdfast.config.setting import Origin, build
from holdfast.errors import ConfigurationError
from holdfast.planner import vllm_sizing
from holdfast.planner.fit import DEFAULT_UTILIZATION, Fit
from holdfast.planner.question import Device
from holdfast.planner.sources import Source, holdfast_source, llama_source, torch_source
from holdfast.planner.vllm_sizing import Terms, Vllm, parse_vllm
from holdfast.units import GIB, MIB, format_bytes

ENGINES = ("holdfast", "vllm", "sglang", "llama.cpp")
UNKNOWN_ENGINE = "HF146"
LLAMA_KV_TYPES: Mapping[str, str] = {"float32": "f32", "bfloat16": "f16", "float16": "f16", "fp8": "q8_0"}
"""Of the same size, or the nearest it has."""
LLAMA_MOST_SLOTS = 64
SGLANG_LEAST_FRACTION, SGLANG_MOST_FRACTION = 0.05, 0.95
ROUNDING = 1e-4
"""Of a hundredth: a budget in whole bytes is a little less than its share."""
VLLM_POOL_IN_BYTES = (0, 11)
"""Since then the KV pool can be set in bytes."""
NON_TORCH_BYTES = int(0.22 * GIB)
"""What vLLM 0.26 printed for it on an H200, without tensor parallelism; 0.3 GiB with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    engine: str
    text: str
    available: bool = True
    """False: this version of the engine does not take it, or something has to be made first; the notes say what."""
    notes: tuple[str, ...] = ()


def parse_engine(text: str) -> tuple[str, Vllm]:
    """`holdfast`, `sglang`, `llama.cpp`, or `vllm` with a version and a runner behind it."""
    name = text.strip().lower()
    if name.startswith("vllm"):
        return "vllm", parse_vllm(name.removeprefix("vllm"))
    name = {"llama-cpp": "llama.cpp", "llamacpp": "llama.cpp", "llama-server": "llama.cpp"}.get(name, name)
    if name not in ENGINES:
        raise ConfigurationError(
            f"no commands are known for {text}",
            code=UNKNOWN_ENGINE,
            needed="one of " + ", ".join(ENGINES) + "; vLLM also by version: vllm==0.26, vllm==0.26:v1",
            found=text,
            fix="--for vllm, or leave it out for all of them",
            field="for",
        )
    return name, parse_vllm("")


def commands(fit: Fit, *, sequences: int, vllm: Vllm | None = None) -> dict[str, Command]:
    """`sequences`: how many may run at once, which is seldom what the engine's own default is."""
    version = parse_vllm("") if vllm is None else vllm
    return {
        "holdfast": holdfast_command(fit, sequences),
        "vllm": _vllm_command(fit, sequences, version),
        "sglang": _sglang_command(fit, sequences),
        "llama.cpp": _llama_command(fit, sequences),
    }


def total_is_known(device: Device) -> bool:
    """--vram alone says what may be used, and not of how much: no share of it can be named."""
    return device.budget_bytes is None or device.gpu is not None or device.measured or device.kind == "cpu"


def written_size(nbytes: int) -> str:
    """As --ram and --vram read it back, to the byte."""
    return f"{nbytes // MIB}MiB" if nbytes % MIB == 0 else str(nbytes)


def _line(program: str, model: str, flags: Mapping[str, object]) -> str:
    parts = [*shlex.split(program), *([model] if model else [])]
    for name, value in flags.items():
        parts += [name] if value is True else [name, str(value)]
    return shlex.join(parts)


# Holdfast


def holdfast_command(fit: Fit, sequences: int) -> Command:
    settings = _holdfast_settings(fit, sequences)
    source = holdfast_source(fit.question.model)
    flags = {"--" + name.replace("_", "-"): value for name, value in settings.items()}
    problems = [*source.notes, *_holdfast_problems(fit, settings)]
    return Command(
        engine="holdfast",
        text=_line("holdfast serve", source.name, flags),
        available=not problems,
        notes=tuple(problems),
    )


def _holdfast_settings(fit: Fit, sequences: int) -> dict[str, object]:
    asked = fit.question.settings
    flags: dict[str, object] = {"max_model_len": fit.limits.max_model_len, "max_num_seqs": sequences}
    if asked.max_num_batched_tokens is not None:
        flags["max_num_batched_tokens"] = fit.limits.max_num_batched_tokens
    device = fit.ranks[0].device
    if device.budget_bytes is not None:
        flags["ram" if device.kind == "cpu" else "vram"] = written_size(device.budget_bytes)
    elif fit.utilization != DEFAULT_UTILIZATION:
        flags["gpu_memory_utilization"] = f"{fit.utilization:g}"
    if asked.dtype != "auto":
        flags["dtype"] = fit.dtype
    if fit.kv_dtype != fit.dtype:
        flags["kv_cache_dtype"] = fit.kv_dtype
    if asked.block_tokens != 16:
        flags["block_size"] = asked.block_tokens
    flags |= _parallel(fit, "tensor_parallel_size", "pipeline_parallel_size")
    if asked.max_loras:
        flags |= {"max_loras": asked.max_loras, "max_lora_rank": asked.max_lora_rank}
    return flags | dict(fit.serve_settings)


def _parallel(fit: Fit, tensor: str, pipeline: str) -> dict[str, object]:
    found: dict[str, object] = {}
    if fit.tensor_parallel > 1:
        found[tensor] = fit.tensor_parallel
    if fit.pipeline_parallel > 1:
        found[pipeline] = fit.pipeline_parallel
    return found


def _holdfast_problems(fit: Fit, settings: Mapping[str, object]) -> list[str]:
    """Why this version of Holdfast would refuse it, as it says so itself."""
    spec, problems = fit.question.model.spec, []
    device = {"device": "cuda"} if fit.question.machine.kind == "gpu" else {}
    for values in ({**settings}, device):
        try:
            build(EngineConfig, {name: str(value) for name, value in values.items()}, refused=REFUSED, origin=_spelled)
        except ConfigurationError as error:
            problems.append(f"Holdfast refuses this yet: {error.message}")
    if not spec.runnable:
        problems.append(f"Holdfast cannot run this model yet: it lacks {', '.join(spec.unsupported)}")
    return problems


def _spelled(name: str) -> Origin:
    return Origin(lambda field: "--" + field.replace("_", "-"))


# vLLM


def vllm_utilization(fit: Fit) -> float:
    """Its share of the total that is our budget, rounded down: it refuses to start when less than that is free. Of
    devices whose total is known."""
    shares = [rank.budget_bytes / rank.device.total_bytes for rank in fit.ranks if rank.device.total_bytes]
    return max(0.01, math.floor(min(shares) * 100 + ROUNDING) / 100)


def _vllm_command(fit: Fit, sequences: int, vllm: Vllm) -> Command:
    settings, source = fit.question.settings, torch_source(fit.question.model, "vllm")
    flags: dict[str, object] = {
        **_vllm_memory(fit, vllm),
        "--max-model-len": fit.limits.max_model_len,
        "--max-num-seqs": sequences,
        "--max-num-batched-tokens": fit.limits.max_num_batched_tokens,
    }
    if settings.dtype != "auto":
        flags["--dtype"] = fit.dtype
    if fit.kv_dtype == "fp8":
        flags["--kv-cache-dtype"] = "fp8"
    flags |= source.flags
    flags |= _parallel(fit, "--tensor-parallel-size", "--pipeline-parallel-size")
    if settings.max_loras:
        flags |= {"--enable-lora": True, "--max-loras": settings.max_loras, "--max-lora-rank": settings.max_lora_rank}
    on_gpu = fit.question.machine.kind == "gpu"
    program = "vllm serve" if vllm.version >= (0, 5) else "python -m vllm.entrypoints.openai.api_server --model"
    text = _line(program, source.name, flags)
    if on_gpu and vllm.version >= (0, 26) and vllm.runner != vllm.default_runner:
        text = f"VLLM_USE_V2_MODEL_RUNNER={int(vllm.runner == 'v2')} {text}"
    if not on_gpu:
        notes = ("on a CPU vLLM needs its own build, and takes bf16", *source.notes)
        return Command(engine="vllm", text=text, available=False, notes=notes)
    able = source.ready and not _lacks_fp8_kernels(fit, source)
    return Command(engine="vllm", text=text, available=able, notes=tuple(_vllm_notes(fit, vllm, source)))


def _vllm_memory(fit: Fit, vllm: Vllm) -> dict[str, object]:
    if all(total_is_known(rank.device) for rank in fit.ranks):
        return {"--gpu-memory-utilization": f"{vllm_utilization(fit):g}"}
    if vllm.version < VLLM_POOL_IN_BYTES:
        return {}
    return {"--kv-cache-memory-bytes": max(0, min(rank.room_bytes for rank in fit.ranks))}


def _lacks_fp8_kernels(fit: Fit, source: Source) -> bool:
    """It makes FP8 on GPUs that multiply it, and on Ampere, where it unpacks it."""
    capabilities = [rank.device.gpu.compute_capability for rank in fit.ranks if rank.device.gpu is not None]
    return source.flags.get("--quantization") == "fp8" and any(
        capability is not None and capability < (8, 0) for capability in capabilities
    )


def vllm_terms(fit: Fit) -> Terms:
    """Of the tightest rank, in vLLM's categories: our logits and buffers are part of its peak."""
    rank = min(fit.ranks, key=lambda one: one.room_bytes)
    ours = {term.name: term.nbytes for term in rank.terms}
    return Terms(
        weights=ours.get("weights", 0) + ours.get("adapters", 0),
        peak_activation=ours.get("activations", 0) + ours.get("logits", 0) + ours.get("buffers", 0),
        non_torch=NON_TORCH_BYTES if fit.tensor_parallel == 1 else int(0.3 * GIB),
        graphs=ours.get("graphs", 0),
    )


def vllm_kv_bytes(fit: Fit, vllm: Vllm) -> int:
    rank = min(fit.ranks, key=lambda one: one.room_bytes)
    if not total_is_known(rank.device):
        return max(0, rank.room_bytes)
    requested = vllm_sizing.requested_bytes(rank.device.total_bytes, vllm_utilization(fit))
    return vllm_sizing.kv_bytes(requested, vllm_terms(fit), vllm)


def _vllm_notes(fit: Fit, vllm: Vllm, source: Source) -> list[str]:
    rank = min(fit.ranks, key=lambda one: one.room_bytes)
    available = vllm_kv_bytes(fit, vllm)
    tokens = vllm_sizing.kv_tokens(available, rank.kv, fit.limits.max_model_len)
    notes = [f"{vllm.name} would give KV about {format_bytes(available)}: {tokens:,} tokens", *source.notes]
    if not total_is_known(rank.device):
        notes[0] = _unknown_total(fit, vllm)
    if vllm.unknown is not None:
        notes.insert(0, vllm.unknown)
    refused = vllm_sizing.refusal(available, rank.kv, fit.limits.max_model_len) if fit.limits.max_model_len else None
    if _lacks_fp8_kernels(fit, source):
        notes.append("its FP8 needs compute capability 8.0")
    if fit.question.model.format == "gguf":
        notes.append("its GGUF support is experimental and slower than its own formats")
    if refused is not None:
        notes.append(f"it would refuse: {refused.message}")
    if not vllm.subtracts_graphs:
        graphs = format_bytes(vllm_terms(fit).graphs)
        notes.append(f"it takes nothing off for graphs: about {graphs} more are used than it was allowed")
    return notes


def _unknown_total(fit: Fit, vllm: Vllm) -> str:
    budget = format_bytes(min(rank.budget_bytes for rank in fit.ranks))
    if vllm.version < VLLM_POOL_IN_BYTES:
        return f"set --gpu-memory-utilization to {budget} over the GPU's total, which --vram does not tell; --gpu does"
    return (
        f"--vram does not tell the GPU's total, so the KV pool is set in bytes instead of a share. vLLM still wants its"
        f" default share free when it starts: on a larger GPU set --gpu-memory-utilization to {budget} over its total"
    )


# SGLang


def _sglang_command(fit: Fit, sequences: int) -> Command:
    source = torch_source(fit.question.model, "sglang")
    known = all(total_is_known(rank.device) for rank in fit.ranks)
    flags: dict[str, object] = {
        **({"--mem-fraction-static": f"{sglang_fraction(fit):g}"} if known else {"--max-total-tokens": fit.kv_tokens}),
        "--context-length": fit.limits.max_model_len,
        "--max-running-requests": sequences,
        "--chunked-prefill-size": fit.limits.max_num_batched_tokens,
    }
    if fit.question.settings.dtype != "auto":
        flags["--dtype"] = fit.dtype
    if fit.kv_dtype == "fp8":
        flags["--kv-cache-dtype"] = "fp8_e4m3"
    flags |= source.flags
    flags |= _parallel(fit, "--tp-size", "--pp-size")
    text = _line("python -m sglang.launch_server --model-path", source.name, flags)
    if fit.question.machine.kind != "gpu":
        notes = ("on a CPU SGLang needs its own build", *source.notes)
        return Command(engine="sglang", text=text, available=False, notes=notes)
    memory = "mem-fraction-static is weights and KV over the whole memory; the rest is for activations and graphs"
    if not known:
        memory = "--vram does not tell the GPU's total, so the KV pool is set in tokens instead of a share"
    notes = (memory, *source.notes)
    able = source.ready
    if _lacks_fp8_kernels(fit, source):
        able, notes = False, (*notes, "its FP8 needs compute capability 8.0")
    return Command(engine="sglang", text=text, available=able, notes=notes)


def sglang_fraction(fit: Fit) -> float:
    """Weights and KV pool of the tightest rank over its total, rounded down."""
    found = []
    for rank in fit.ranks:
        held = sum(term.nbytes for term in rank.terms if term.name in ("weights", "adapters"))
        found.append((held + max(0, rank.room_bytes)) / rank.device.total_bytes if rank.device.total_bytes else 0.0)
    fraction = math.floor(min(found) * 100 + ROUNDING) / 100
    return min(SGLANG_MOST_FRACTION, max(SGLANG_LEAST_FRACTION, fraction))


# llama.cpp


def _llama_command(fit: Fit, sequences: int) -> Command:
    on_gpu = fit.question.machine.kind == "gpu"
    source = llama_source(fit.question.model, fit.dtype)
    notes = list(source.notes)
    whole = int(fit.concurrency(fit.limits.max_model_len)) if fit.limits.max_model_len else 1
    slots = max(1, min(sequences, whole, LLAMA_MOST_SLOTS))
    flags: dict[str, object] = {**source.flags, "-c": fit.limits.max_model_len * slots, "-np": slots}
    if on_gpu:
        flags["-ngl"] = len(fit.question.model.spec.layers) + 1
    kv_type = LLAMA_KV_TYPES[fit.kv_dtype]
    if kv_type != "f16":
        flags |= {"-ctk": kv_type, "-ctv": kv_type}
    if kv_type == "q8_0":
        flags["-fa"] = "on"
    if fit.tensor_parallel * fit.pipeline_parallel > 1:
        flags["-sm"] = "layer"
        notes.append("its GPUs take layers in turn instead of sharing each")
    if slots > 1:
        notes.append(f"-c is shared by all slots: {fit.limits.max_model_len:,} tokens each")
    text = _line("llama-server", source.name, flags)
    return Command(engine="llama.cpp", text=text, available=source.ready, notes=tuple(notes))
