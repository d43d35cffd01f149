"""A plan as commands to run, for Holdfast, vLLM, SGLang and llama.cpp, with what must be known of each.

Decides nothing: the numbers come out of a Plan. Whether Holdfast itself would take its command is asked of its own
settings, so that what is said here cannot be older than the engine. vLLM's is in vllm_command.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from holdfast.config.engine import CPU_STEP_TOKENS, GPU_STEP_TOKENS, REFUSED, EngineConfig
from holdfast.config.parts.offload import MOST_LAYERS
from holdfast.config.setting import Origin, build
from holdfast.engine_profiles.profile import profile, spelled_release
from holdfast.errors import ConfigurationError
from holdfast.footprint.streamed import AHEAD
from holdfast.planner.compat.gpu_kernels import (
    build_note,
    lacks_capability,
    lacks_engine,
    lacks_gguf_types,
    lacks_method,
)
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
from holdfast.planner.engines.fp8_loading import loaded_whole
from holdfast.planner.engines.layer_partition import partition
from holdfast.planner.engines.nodes import machines_meant, machines_said, on_nodes
from holdfast.planner.engines.vllm_command import USUAL_BLOCK_TOKENS, vllm_command
from holdfast.planner.fit.placement import length_to_set
from holdfast.planner.fit.search import DEFAULT_UTILIZATION, Plan
from holdfast.planner.fit.search import fit as fit_again
from holdfast.planner.inputs.machine import NVME_LIMIT_BYTES
from holdfast.planner.inputs.question import Machine, PlannedModel
from holdfast.planner.models.model_sources import ModelSource, holdfast_source, llama_source, near_gguf, torch_source
from holdfast.planner.models.quantize import as_plain, quantized_as
from holdfast.planner.serve.refused_settings import refuse_ranks_on
from holdfast.planner.sizing.dtype import is_fp8
from holdfast.units import GIB, MIB, format_bytes

ENGINES = ("holdfast", "vllm", "sglang", "llama.cpp")
UNKNOWN_ENGINE = "HF146"
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


def commands(fit: Plan, *, sequences: int, vllm: Vllm | None = None) -> dict[str, Command]:
    """`sequences`: how many may run at once, which is seldom what the engine's own default is."""
    version = parse_vllm("") if vllm is None else vllm
    found: tuple[Command, ...] = (
        holdfast_command(fit, sequences),
        vllm_command(fit, sequences, version),
        _sglang_command(fit, sequences),
        _llama_command(fit, sequences),
    )
    if fit.question.settings.offloads and fit.question.machine.kind == "gpu":
        found = (found[0], *(_without_streaming(one) for one in found[1:]))
    return {one.engine: _where(one, fit) for one in found}


def _where(command: Command, fit: Plan) -> Command:
    """On its GPUs, and its machines: of those that are only meant, each has the GPUs that it needs."""
    asked = fit.question.settings.nodes
    nodes = machines_meant(fit) if command.engine == "holdfast" else asked
    shown = shown_gpus(fit) if nodes == asked else ""
    return on_nodes(replace(command, text=shown + command.text) if command.text else command, nodes)


def _without_streaming(command: Command) -> Command:
    said = "this plan keeps layers or experts in RAM as Holdfast does; without that it does not fit"
    return Command(engine=command.engine, text="", available=False, notes=(said,), lacks=(said,))


# Holdfast


def holdfast_command(fit: Plan, sequences: int) -> Command:
    source = holdfast_source(fit.question.model)
    chosen = {"quantization": source.flags.get("--quantization"), **_holdfast_settings(fit, sequences)}
    nodes = machines_meant(fit)
    settings = {name: value for name, value in chosen.items() if value is not None}
    settings |= {"nnodes": nodes} if nodes > 1 else {}
    lacks = (*source.lacks, *_holdfast_problems(fit, settings))
    return Command(
        engine="holdfast",
        text=line("holdfast", source.name, settings),
        available=source.ready and not lacks,
        notes=(*machines_said(fit, nodes), *source.notes, *_shorter(fit, settings), *lacks),
        lacks=lacks,
    )


def _shorter(fit: Plan, settings: Mapping[str, object]) -> tuple[str, ...]:
    """Where a context that is set is not the one that was planned."""
    length = fit.limits.max_model_len
    if settings["max_model_len"] == length:
        return ()
    return (f"--max-model-len left out is what memory holds, {length:,} here; one that is set has some to spare",)


def _holdfast_settings(fit: Plan, sequences: int) -> dict[str, object]:
    """None: as it is by itself."""
    asked, device, step = fit.question.settings, fit.ranks[0].device, fit.limits.max_num_batched_tokens
    usual = GPU_STEP_TOKENS if fit.question.machine.kind == "gpu" else CPU_STEP_TOKENS
    # What is planned is one engine on all machines; --ram is all engines' on one.
    shared = None if device.budget_bytes is None else device.budget_bytes * asked.data_parallel // asked.nodes
    budget = None if shared is None else written_size(shared if device.kind == "cpu" else device.budget_bytes or 0)
    by_default = budget is not None or fit.utilization == DEFAULT_UTILIZATION
    return {
        "max_model_len": length_to_set(fit),
        "max_num_seqs": sequences,
        "max_num_batched_tokens": None if step == usual else step,
        "ram" if device.kind == "cpu" else "vram": budget,
        "gpu_memory_utilization": None if by_default else f"{fit.utilization:g}",
        "dtype": None if asked.dtype == "auto" else fit.dtype,
        "kv_cache_dtype": None if fit.kv_dtype == fit.dtype else fit.kv_dtype,
        "block_size": None if asked.block_tokens == USUAL_BLOCK_TOKENS else asked.block_tokens,
        "expand_weights": None if asked.expand_weights == "auto" else asked.expand_weights,
        **_offload_settings(fit),
        **parallel(fit),
        **({"device": "cpu"} if fit.own is not None and fit.own.rank_count > 1 else {}),
        "enable_expert_parallel": True if _deals_experts_out(fit) else None,
        "enable_lora": True if asked.max_loras else None,
        "max_loras": asked.max_loras or None,
        "max_lora_rank": asked.max_lora_rank if asked.max_loras else None,
        **fit.serve_settings,
    }


def _deals_experts_out(fit: Plan) -> bool:
    """Among ranks: of one rank the flag would change nothing."""
    if fit.own is not None:
        return any(one.experts for one in fit.own.shards)
    return fit.question.settings.expert_parallel and fit.tensor_parallel > 1


def _offload_settings(fit: Plan) -> dict[str, object]:
    """What was asked for by hand, and what the plan's layers and experts in RAM or on a disk need to be there."""
    settings, machine = fit.question.settings, fit.question.machine
    asked, offloads = settings.offload, settings.offloads and machine.kind == "gpu"
    # Of a plan --ram is the machine's; of `serve`, what tiers may take of it.
    budget = (machine.pinned_bytes or 0) // MIB * MIB if offloads else 0
    group, number = asked.groups or (None, None)
    folder, on_disk = machine.nvme_path or "DIR", settings.layers_on_disk or settings.embedding_on_disk
    on_disk = on_disk or (machine.kind == "cpu" and settings.streamed_layers)
    reads_disk = on_disk and (offloads or machine.kind == "cpu")
    alone = fit.ranks[0].device.budget_bytes is None and not asked.by_hand  # `serve` takes --ram alone for a CPU's.
    return {
        "gpu_layers": "all" if asked.gpu_layers == MOST_LAYERS else asked.gpu_layers,
        "cpu_offload_gb": f"{asked.cpu_bytes / GIB:g}" if asked.cpu_bytes else None,
        "offload_group_size": group,
        "offload_num_in_group": number,
        "offload_prefetch_step": None if asked.ahead == AHEAD else asked.ahead,
        "cpu_moe": True if asked.expert_layers == MOST_LAYERS else None,
        "n_cpu_moe": asked.expert_layers if 0 < asked.expert_layers < MOST_LAYERS else None,
        "override_tensor": ",".join(asked.overrides) or None,
        "cpu_compute": None if asked.cpu_compute else "off",
        **({"device": "cuda" if alone else None, "ram": written_size(budget)} if budget else {}),
        **({"nvme_path": folder, "nvme": _disk_limit(machine)} if reads_disk else {}),
    }


def _disk_limit(machine: Machine) -> str | None:
    """As it was set, so that a server keeps to it too."""
    limit = machine.nvme_limit_bytes
    if limit is None or limit >= NVME_LIMIT_BYTES:  # So large a disk stands for one of which nothing is known.
        return None
    return f"{limit // GIB}GiB" if limit % GIB == 0 else written_size(limit)


def _holdfast_problems(fit: Plan, settings: Mapping[str, object]) -> list[str]:
    """Why this version of Holdfast would refuse it, as it says so itself."""
    spec, problems = fit.question.model.spec, []
    on_gpu = fit.question.machine.kind == "gpu"
    try:
        written = {name: str(value) for name, value in settings.items()}
        config = build(EngineConfig, written, refused=REFUSED, origin=_spelled)
        if on_gpu:
            tensor, pipeline = fit.tensor_parallel, fit.pipeline_parallel
            asked = replace(config, device="cuda", tensor_parallel_size=tensor, pipeline_parallel_size=pipeline)
            refuse_ranks_on(_of_the_ranks(fit), asked, spec, fit.question.model.canonical)
    except ConfigurationError as error:
        problems.append(f"Holdfast does not support this yet: {error.message}")
    if fit.question.settings.expert_parallel and fit.question.settings.data_parallel > 1 and on_gpu:
        problems.append("Holdfast does not divide experts over engines yet: each of -dp has the whole model")
    lacking = lacks_engine("holdfast", [rank.device.gpu for rank in fit.ranks])
    if lacking is not None:
        problems.append(lacking)
    if on_gpu and fit.kv_dtype != fit.dtype and not is_fp8(fit.kv_dtype):
        problems.append(f"on a GPU Holdfast stores KV in dtype, {fit.dtype}, or in fp8: not in {fit.kv_dtype}")
    if not spec.runnable:
        problems.append(f"Holdfast cannot run this model yet: it lacks {', '.join(spec.unsupported)}")
    return problems


def _of_the_ranks(fit: Plan) -> Machine:
    """The machine with those GPUs alone that the plan takes."""
    return replace(fit.question.machine, devices=tuple(rank.device for rank in fit.ranks), aside=())


def _spelled(name: str) -> Origin:
    return Origin(lambda field: "--" + field.replace("_", "-"))


# SGLang


def _sglang_command(fit: Plan, sequences: int) -> Command:
    source = torch_source(fit.question.model, "sglang")
    on_gpu = fit.question.machine.kind == "gpu"
    known = on_gpu and all(total_is_known(rank.device) for rank in fit.ranks)
    asked, own = fit.question.settings, profile("sglang")
    lora = {"enable_lora": True, "lora_target_modules": "all", "max_lora_rank": asked.max_lora_rank}
    settings: dict[str, object] = {
        "gpu_memory_utilization": f"{sglang_fraction(fit):g}" if known else None,
        "kv_tokens": None if known else fit.kv_tokens,
        "max_model_len": fit.limits.max_model_len,
        "max_num_seqs": sequences,
        "max_num_batched_tokens": fit.limits.max_num_batched_tokens,
        "dtype": named_dtype(fit),
        "kv_cache_dtype": own.data["kv-types"].get(fit.kv_dtype),
        **source.flags,
        **parallel(fit),
        **(lora | {"max_loras": asked.max_loras} if asked.max_loras else {}),
        "device": None if on_gpu else "cpu",
    }
    text = partition("sglang", fit) + line("sglang", source.name, settings)
    if not on_gpu:
        notes = ("on a CPU SGLang needs its own build", *source.notes)
        return Command(engine="sglang", text=text, available=False, notes=notes)
    memory = "mem-fraction-static is weights and KV over total memory; the rest is for activations and CUDA graphs"
    if not known:
        memory = "--vram does not give the GPU's total memory, so the KV pool is set in tokens instead of a fraction"
    gpus = [rank.device.gpu for rank in fit.ranks]
    note, too_large = loaded_whole(fit, "SGLang") if source.makes_fp8 else (None, None)
    checks = (
        lacks_engine("sglang", gpus), lacks_method(fit.question.model, gpus), lacks_gguf_types(fit.question.model),
        lacks_capability("an FP8 KV cache", gpus, own.data["gpus"]["fp8-kv"]) if fit.kv_dtype == "fp8" else None,
        f"it stores KV in dtype, {fit.dtype}, or in fp8: not in {fit.kv_dtype}"
        if fit.kv_dtype not in (fit.dtype, "fp8") else None,
        too_large,
    )  # fmt: skip
    lacking = [one for one in checks if one is not None]
    architecture = fit.question.model.spec.architecture
    first = own.since("architectures", architecture)
    since = None if first is None else f"{architecture} is in SGLang since {spelled_release(first)}"
    known_of_it = (since, build_note("sglang", gpus), note)
    notes = (memory, *source.notes, *(one for one in known_of_it if one is not None), *lacking)
    return Command(
        engine="sglang", text=text, available=source.ready and not lacking, notes=notes, lacks=tuple(lacking)
    )


def sglang_fraction(fit: Plan) -> float:
    """Weights and KV pool of the tightest rank over its total, rounded down."""
    found = []
    for rank in fit.ranks:
        held = sum(term.nbytes for term in rank.terms if term.name in HELD_BEFORE_KV)
        found.append((held + max(0, rank.room_bytes)) / rank.device.total_bytes if rank.device.total_bytes else 0.0)
    fraction = math.floor(min(found) * 100 + ROUNDING) / 100
    return min(SGLANG_MOST_FRACTION, max(SGLANG_LEAST_FRACTION, fraction))


# llama.cpp


_LLAMA_DRAFT = {"-m": "-md", "-hf": "-hfd"}
"""Of a draft model in place of the model. Of a repository it takes no file's name, but its quantization."""


def _llama_command(planned: Plan, sequences: int) -> Command:
    on_gpu = planned.question.machine.kind == "gpu"
    source = llama_source(planned.question.model, planned.weights_dtype)
    notes = list(source.notes)
    fit = _as_llama_takes_it(planned)
    if planned.fits and not fit.fits:
        short = f"as llama.cpp allocates memory, it is {format_bytes(fit.short_bytes)} short"
        return Command(engine="llama.cpp", text="", available=False, notes=(*notes, short), lacks=(short,))
    slots, each = _llama_slots(fit, sequences)
    kv_type = profile("llama.cpp").data["kv-types"][fit.kv_dtype]
    split = fit.tensor_parallel * fit.pipeline_parallel > 1
    settings: dict[str, object] = {
        **source.flags,
        "max_model_len": each * slots,
        "max_num_seqs": slots,
        "n_gpu_layers": len(fit.question.model.spec.layers) + 1 if on_gpu else None,
        "cache_type_k": None if kv_type == "f16" else kv_type,
        "cache_type_v": None if kv_type == "f16" else kv_type,
        "flash_attn": "on" if kv_type == "q8_0" else None,
        "split_mode": "layer" if split and on_gpu else None,
    }
    draft = planned.question.model.draft
    drafted = ModelSource(name="", flags={}) if draft is None else llama_source(draft, planned.weights_dtype)
    settings |= {_LLAMA_DRAFT[flag]: value for flag, value in drafted.flags.items() if flag in _LLAMA_DRAFT}
    notes += drafted.notes
    if split and on_gpu:
        notes.append("it splits whole layers over the GPUs instead of each layer")
    if slots > 1:
        notes.append(f"-c is shared by all slots: {each:,} tokens each")
    text = line("llama.cpp", source.name, settings)
    return Command(engine="llama.cpp", text=text, available=source.ready and drafted.ready, notes=tuple(notes))


def _as_llama_takes_it(planned: Plan) -> Plan:
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
    return quantized_as(as_plain(model), near_gguf(quantization))


def _llama_slots(fit: Plan, sequences: int) -> tuple[int, int]:
    """How many, and the context of each, which is set aside whole: as many as the traffic asks for, with as much as
    that leaves, unless a length was asked for."""
    length, traffic = fit.limits.max_model_len, fit.question.traffic
    whole = int(fit.concurrency(length)) if length else 1
    slots = max(1, min(sequences, whole, LLAMA_MOST_SLOTS))
    if traffic is None or fit.question.settings.max_model_len is not None or slots >= sequences:
        return slots, length
    slots = max(1, min(sequences, int(fit.concurrency(traffic.length)), LLAMA_MOST_SLOTS))
    return slots, min(length, max(traffic.length, fit.kv_tokens // slots // LLAMA_ROUND_TOKENS * LLAMA_ROUND_TOKENS))
