"""A plan as commands to run, for Holdfast, vLLM, SGLang and llama.cpp, with what must be known of each.

Decides nothing: the numbers come out of a Fit. Whether Holdfast itself would take its command is asked of its own
settings, so that what is said here cannot be older than the engine. vLLM's is in vllm_command.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from holdfast.config.engine import CPU_STEP_TOKENS, GPU_STEP_TOKENS, REFUSED, EngineConfig
from holdfast.config.setting import Origin, build
from holdfast.errors import ConfigurationError
from holdfast.planner.compat.architectures import sglang_since
from holdfast.planner.compat.gpu_kernels import build_note, lacks_engine, lacks_fp8_kv, lacks_gguf_types, lacks_method
from holdfast.planner.compat.vllm_release import Vllm, parse_vllm
from holdfast.planner.engines.command import (
    ROUNDING,
    Command,
    line,
    named_dtype,
    parallel,
    shown_gpus,
    total_is_known,
    written_size,
)
from holdfast.planner.engines.fp8_loading import Whole, loaded_whole
from holdfast.planner.engines.vllm_command import vllm_command
from holdfast.planner.fit.search import DEFAULT_UTILIZATION, Fit
from holdfast.planner.fit.search import fit as fit_again
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.models.model_sources import holdfast_source, llama_source, near_gguf, torch_source
from holdfast.planner.models.quantize import quantized_as
from holdfast.units import format_bytes

ENGINES = ("holdfast", "vllm", "sglang", "llama.cpp")
UNKNOWN_ENGINE = "HF146"
LLAMA_KV_TYPES: Mapping[str, str] = {"float32": "f32", "bfloat16": "f16", "float16": "f16", "fp8": "q8_0"}
"""Of the same size, or the nearest it has."""
LLAMA_MOST_SLOTS, LLAMA_ROUND_TOKENS = 64, 256
HELD_BEFORE_KV = ("weights", "rotary", "padding", "adapters")
SGLANG_LEAST_FRACTION, SGLANG_MOST_FRACTION = 0.05, 0.95


def parse_engine(text: str) -> tuple[str, Vllm]:
    """`holdfast`, `sglang`, `llama.cpp`, or `vllm` with a version and a runner behind it."""
    name = text.strip().lower()
    if name.startswith("vllm"):
        return "vllm", parse_vllm(name.removeprefix("vllm"))
    name = {"llama-cpp": "llama.cpp", "llamacpp": "llama.cpp", "llama-server": "llama.cpp"}.get(name, name)
    if name not in ENGINES:
        raise ConfigurationError(
            f"unknown engine {text}",
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
    found = (
        holdfast_command(fit, sequences),
        vllm_command(fit, sequences, version),
        _sglang_command(fit, sequences),
        _llama_command(fit, sequences),
    )
    shown = shown_gpus(fit)
    return {one.engine: replace(one, text=shown + one.text) if one.text else one for one in found}


# Holdfast


def holdfast_command(fit: Fit, sequences: int) -> Command:
    settings = _holdfast_settings(fit, sequences)
    source = holdfast_source(fit.question.model)
    flags = {"--" + name.replace("_", "-"): value for name, value in settings.items()}
    lacks = (*source.lacks, *_holdfast_problems(fit, settings))
    return Command(
        engine="holdfast",
        text=line("holdfast serve", source.name, flags),
        available=source.ready and not lacks,
        notes=(*source.notes, *lacks),
        lacks=lacks,
    )


def _holdfast_settings(fit: Fit, sequences: int) -> dict[str, object]:
    asked = fit.question.settings
    flags: dict[str, object] = {"max_model_len": fit.limits.max_model_len, "max_num_seqs": sequences}
    usual = GPU_STEP_TOKENS if fit.question.machine.kind == "gpu" else CPU_STEP_TOKENS
    if fit.limits.max_num_batched_tokens != usual:
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
    if asked.expand_weights != "auto":
        flags["expand_weights"] = asked.expand_weights
    flags |= parallel(fit, "tensor_parallel_size", "pipeline_parallel_size")
    if asked.max_loras:
        flags |= {"enable_lora": True, "max_loras": asked.max_loras, "max_lora_rank": asked.max_lora_rank}
    return flags | dict(fit.serve_settings)


def _holdfast_problems(fit: Fit, settings: Mapping[str, object]) -> list[str]:
    """Why this version of Holdfast would refuse it, as it says so itself."""
    spec, problems = fit.question.model.spec, []
    device = {"device": "cuda"} if fit.question.machine.kind == "gpu" else {}
    for values in ({**settings}, device):
        try:
            build(EngineConfig, {name: str(value) for name, value in values.items()}, refused=REFUSED, origin=_spelled)
        except ConfigurationError as error:
            problems.append(f"Holdfast does not support this yet: {error.message}")
    lacking = lacks_engine("holdfast", [rank.device.gpu for rank in fit.ranks])
    if lacking is not None:
        problems.append(lacking)
    if fit.question.machine.kind == "gpu" and fit.kv_dtype not in (fit.dtype, "fp8"):  # That one is refused above.
        problems.append(f"on a GPU Holdfast stores KV in dtype, {fit.dtype}: not in {fit.kv_dtype}")
    if not spec.runnable:
        problems.append(f"Holdfast cannot run this model yet: it lacks {', '.join(spec.unsupported)}")
    return problems


def _spelled(name: str) -> Origin:
    return Origin(lambda field: "--" + field.replace("_", "-"))


# SGLang


def _sglang_command(fit: Fit, sequences: int) -> Command:
    source = torch_source(fit.question.model, "sglang")
    on_gpu = fit.question.machine.kind == "gpu"
    known = on_gpu and all(total_is_known(rank.device) for rank in fit.ranks)
    flags: dict[str, object] = {
        **({"--mem-fraction-static": f"{sglang_fraction(fit):g}"} if known else {"--max-total-tokens": fit.kv_tokens}),
        "--context-length": fit.limits.max_model_len,
        "--max-running-requests": sequences,
        "--chunked-prefill-size": fit.limits.max_num_batched_tokens,
    }
    dtype = named_dtype(fit)
    if dtype is not None:
        flags["--dtype"] = dtype
    if fit.kv_dtype == "fp8":
        flags["--kv-cache-dtype"] = "fp8_e4m3"
    flags |= source.flags
    flags |= parallel(fit, "--tp-size", "--pp-size")
    asked = fit.question.settings
    if asked.max_loras:
        flags |= {"--enable-lora": True, "--lora-target-modules": "all", "--max-lora-rank": asked.max_lora_rank}
        flags["--max-loras-per-batch"] = asked.max_loras
    if not on_gpu:
        flags["--device"] = "cpu"
    text = line("python -m sglang.launch_server --model-path", source.name, flags)
    if not on_gpu:
        notes = ("on a CPU SGLang needs its own build", *source.notes)
        return Command(engine="sglang", text=text, available=False, notes=notes)
    memory = "mem-fraction-static is weights and KV over total memory; the rest is for activations and CUDA graphs"
    if not known:
        memory = "--vram does not give the GPU's total memory, so the KV pool is set in tokens instead of a fraction"
    gpus = [rank.device.gpu for rank in fit.ranks]
    whole = loaded_whole(fit, "SGLang") if source.makes_fp8 else Whole()
    checks = (
        lacks_engine("sglang", gpus), lacks_method(fit.question.model, gpus), lacks_gguf_types(fit.question.model),
        lacks_fp8_kv(fit.kv_dtype, gpus),
        f"it stores KV in dtype, {fit.dtype}, or in fp8: not in {fit.kv_dtype}"
        if fit.kv_dtype not in (fit.dtype, "fp8") else None,
        whole.lacking,
    )  # fmt: skip
    lacking = [one for one in checks if one is not None]
    known_of_it = (sglang_since(fit.question.model.spec.architecture), build_note("sglang", gpus), whole.note)
    notes = (memory, *source.notes, *(one for one in known_of_it if one is not None), *lacking)
    return Command(
        engine="sglang", text=text, available=source.ready and not lacking, notes=notes, lacks=tuple(lacking)
    )


def sglang_fraction(fit: Fit) -> float:
    """Weights and KV pool of the tightest rank over its total, rounded down."""
    found = []
    for rank in fit.ranks:
        held = sum(term.nbytes for term in rank.terms if term.name in HELD_BEFORE_KV)
        found.append((held + max(0, rank.room_bytes)) / rank.device.total_bytes if rank.device.total_bytes else 0.0)
    fraction = math.floor(min(found) * 100 + ROUNDING) / 100
    return min(SGLANG_MOST_FRACTION, max(SGLANG_LEAST_FRACTION, fraction))


# llama.cpp


def _llama_command(planned: Fit, sequences: int) -> Command:
    on_gpu = planned.question.machine.kind == "gpu"
    source = llama_source(planned.question.model, planned.weights_dtype)
    notes = list(source.notes)
    fit = _as_llama_takes_it(planned)
    if planned.fits and not fit.fits:
        short = f"as llama.cpp allocates memory, it is {format_bytes(fit.short_bytes)} short"
        return Command(engine="llama.cpp", text="", available=False, notes=(*notes, short), lacks=(short,))
    slots, each = _llama_slots(fit, sequences)
    flags: dict[str, object] = {**source.flags, "-c": each * slots, "-np": slots}
    if on_gpu:
        flags["-ngl"] = len(fit.question.model.spec.layers) + 1
    kv_type = LLAMA_KV_TYPES[fit.kv_dtype]
    if kv_type != "f16":
        flags |= {"-ctk": kv_type, "-ctv": kv_type}
    if kv_type == "q8_0":
        flags["-fa"] = "on"
    if fit.tensor_parallel * fit.pipeline_parallel > 1:
        flags["-sm"] = "layer"
        notes.append("it splits whole layers over the GPUs instead of each layer")
    if slots > 1:
        notes.append(f"-c is shared by all slots: {each:,} tokens each")
    text = line("llama-server", source.name, flags)
    return Command(engine="llama.cpp", text=text, available=source.ready, notes=tuple(notes))


def _as_llama_takes_it(planned: Fit) -> Fit:
    """The plan, split alike, with llama.cpp's own terms and the GGUF that it would be given."""
    question = planned.question
    if question.machine.kind != "gpu" or question.engine == "llama.cpp":
        return planned
    settings = replace(
        question.settings,
        tensor_parallel=planned.tensor_parallel,
        pipeline_parallel=planned.pipeline_parallel,
        stages_open=False,
    )
    try:
        model = _as_gguf(question.model)
        return fit_again(replace(question, engine="llama.cpp", settings=settings, model=model))
    except ConfigurationError:
        return planned


def _as_gguf(model: PlannedModel) -> PlannedModel:
    """Of what llama.cpp does not read the type that is named instead."""
    quantization = model.spec.quantization
    if model.format == "gguf" or quantization is None or quantization.method == "mxfp4":
        return model
    plain = replace(
        model, spec=replace(model.spec, quantization=None), stored=None, canonical=None, format="none", made_as=None
    )
    return quantized_as(plain, near_gguf(quantization))


def _llama_slots(fit: Fit, sequences: int) -> tuple[int, int]:
    """How many, and the context of each, which is set aside whole: as many as the traffic asks for, with as much as
    that leaves, unless a length was asked for."""
    length, traffic = fit.limits.max_model_len, fit.question.traffic
    whole = int(fit.concurrency(length)) if length else 1
    slots = max(1, min(sequences, whole, LLAMA_MOST_SLOTS))
    if traffic is None or fit.question.settings.max_model_len is not None or slots >= sequences:
        return slots, length
    slots = max(1, min(sequences, int(fit.concurrency(traffic.length)), LLAMA_MOST_SLOTS))
    return slots, min(length, max(traffic.length, fit.kv_tokens // slots // LLAMA_ROUND_TOKENS * LLAMA_ROUND_TOKENS))
