"""Settings of a plan: the model, the machine it is for, limits and traffic. What is left out is left to the plan.

vLLM's names; `holdfast.plan(...)` takes the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.config.engine import DEFAULT_UTILIZATION, kv_dtype
from holdfast.config.nodes import nnodes_setting
from holdfast.config.parts import offload as offload_config
from holdfast.config.parts.quantization import as_planned
from holdfast.config.setting import (
    Origin,
    build,
    choice,
    flag,
    number,
    optional,
    setting,
    text,
    tokens_or_auto,
    whole,
)
from holdfast.errors import ConfigurationError
from holdfast.units import parse_tokens, shorten

_CONTRADICTION = "HF143"
MAX_REQUESTS = 1 << 20


def _amount(field: str, value: Any) -> str | int:
    """As it was written: who reads it knows what is too much."""
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ConfigurationError(
            f"{field}: {shorten(value)!r} is not valid",
            needed="a size, such as 22GiB",
            fix="write it as 22GiB, or in bytes",
            field=field,
        )
    return value


def _kv_dtype(field: str, value: Any) -> str:
    """Both kinds of fp8 take the same bytes."""
    return "fp8" if (found := kv_dtype(field, value)).startswith("fp8") else found


def _tokens(field: str, value: Any) -> int:
    if isinstance(value, str):
        value = parse_tokens(value, field=field)
    return int(whole(0, 1 << 27)(field, value))


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanConfig:
    model: str | None = setting(
        None,
        "a folder, a .gguf file, a built-in name, a catalogue name (llama-3.1-8b) or a hub id (owner/name, of which "
        "only headers are read); default: the built-in SmolLM2-135M-Instruct",
        optional(text),
        flags=("-m", "--model-path"),
        metavar="MODEL",
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub id", optional(text))
    quantization: str | None = setting(
        None,
        "plan as if quantized: awq, gptq, int4, int8, fp8, nf4, or a GGUF type such as Q4_K_M",
        optional(as_planned),
        flags=("-q",),
        metavar="METHOD",
    )
    gpu: str | None = setting(
        None,
        "GPUs to plan for: rtx4090, h100-80x2, or different ones separated by commas; default: this machine",
        optional(text),
        metavar="NAME",
    )
    vram: str | int | None = setting(
        None,
        "usable memory of each GPU, such as 22GiB or 22GiBx2; with --gpu: the budget on it",
        optional(_amount),
        metavar="SIZE",
    )
    ram: str | int | None = setting(
        None,
        "RAM of the machine that the whole server may use; without a GPU for the model, with one for what does not fit "
        "there, less the server's own processes",
        optional(_amount),
        metavar="SIZE",
    )
    nvme_path: str | None = setting(
        None,
        "folder on a fast disk of this machine for layers that do not fit in RAM, as serve takes it: what is free "
        "there is planned with",
        optional(text),
        metavar="DIR",
    )
    nvme: str | int | None = setting(
        None,
        "disk space to use for offload tiers; with --nvme-path: at most so much of what is free there",
        optional(_amount),
        metavar="SIZE",
    )
    offload: bool = offload_config.offload_setting()
    gpu_layers: int | None = offload_config.gpu_layers_setting()
    cpu_offload_gb: float = offload_config.cpu_offload_gb_setting()
    offload_backend: str = offload_config.offload_backend_setting()
    offload_group_size: int = offload_config.offload_group_size_setting()
    offload_num_in_group: int = offload_config.offload_num_in_group_setting()
    offload_prefetch_step: int = offload_config.offload_prefetch_step_setting()
    cpu_moe: bool = offload_config.cpu_moe_setting()
    n_cpu_moe: int = offload_config.n_cpu_moe_setting()
    override_tensor: tuple[str, ...] = offload_config.override_tensor_setting()
    cpu_compute: str = offload_config.cpu_compute_setting()
    device: str = setting(
        "auto", "device of this machine to plan for: auto, cpu or cuda", choice("auto", "cpu", "cuda")
    )
    dtype: str = setting(
        "auto",
        "data type for weights and activations: auto, float32, bfloat16 or float16",
        choice("auto", "float32", "bfloat16", "float16", "half", "float"),
    )
    kv_cache_dtype: str = setting(
        "auto", "data type of the KV cache: auto (same as dtype), float32, bfloat16, float16 or fp8", _kv_dtype
    )
    expand_weights: str = setting(
        "auto",
        "dequantize quantized weights in RAM: auto (when there is memory to spare and it is faster), always or never",
        choice("auto", "always", "never"),
    )
    max_model_len: int | None = setting(
        None,
        "maximum context length in tokens: 8192, 32k (32,000), 32K (32,768), or auto: what the model and memory allow",
        optional(tokens_or_auto),
        flags=("-c", "--ctx-size", "--context-length"),
        metavar="TOKENS",
    )
    max_num_seqs: int | None = setting(
        None,
        "maximum number of sequences in a batch; default: the traffic's peak, else 256 (64 on a CPU)",
        optional(whole(1, MAX_REQUESTS)),
    )
    max_num_batched_tokens: int | None = setting(
        None, "maximum number of tokens in one step; default: 8,192 (512 on a CPU)", optional(whole(1, 1 << 22))
    )
    gpu_memory_utilization: float | None = setting(
        None,
        f"fraction of a GPU's memory to use; on a CPU, of the free RAM; default: {DEFAULT_UTILIZATION}",
        optional(number(0.01, 1.0, usual=DEFAULT_UTILIZATION)),
    )
    tensor_parallel_size: int | None = setting(
        None,
        "number of GPUs to split each layer over; default: the fewest that hold the model",
        optional(whole(1, 1024)),
        flags=("-tp", "--tp-size"),
    )
    pipeline_parallel_size: int | None = setting(
        None,
        "number of pipeline stages; default: 1, or without -tp as many as it takes to fit",
        optional(whole(1, 1024)),
        flags=("-pp", "--pp-size"),
    )
    nnodes: int = nnodes_setting()
    data_parallel_size: int | None = setting(
        None,
        "number of replicas, each on GPUs of its own (-tp 1 unless it is set); what is planned is one of them",
        optional(whole(1, 1024)),
        flags=("-dp", "--dp-size"),
    )
    rope_scaling: str | None = setting(
        None,
        "positions stretched by YaRN, as vLLM takes it:"
        ' {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}',
        optional(text),
        metavar="JSON",
    )
    spec_method: str | None = setting(
        None,
        "speculative decoding whose weights and KV are counted: mtp (the model's own draft layers)",
        optional(choice("mtp")),
    )
    speculative_config: str | None = setting(
        None,
        "what guesses tokens beside the model, as vLLM takes it; its weights and KV are counted:"
        ' {"model": "qwen3-0.6b", "num_speculative_tokens": 5}, or {"method": "mtp"}',
        optional(text),
        metavar="JSON",
        flags=("-sc",),
    )
    language_model_only: bool = setting(
        False, "text alone: keep no memory for images; their encoder's weights are counted all the same", flag
    )
    enable_expert_parallel: bool = setting(
        False,
        "give each GPU, or rank on a CPU, of a tensor-parallel group whole experts instead of a part of every one",
        flag,
        flags=("-ep",),
    )
    enforce_eager: bool = setting(False, "capture no CUDA graphs, and count none", flag)
    block_size: int = setting(16, "tokens in one KV block", whole(1, 4096))
    enable_lora: bool = setting(False, "reserve memory for LoRA adapters", flag)
    max_loras: int | None = setting(
        None, "maximum number of adapters in GPU memory at once; implies --enable-lora", optional(whole(1, 4096))
    )
    max_lora_rank: int | None = setting(
        None, "maximum LoRA rank; default: 16; needs --enable-lora", optional(whole(1, 4096))
    )
    concurrency: int | None = setting(
        None,
        "number of concurrent requests that must fit; overrides the peak found in --traffic",
        optional(whole(1, MAX_REQUESTS)),
    )
    prompt: int | None = setting(None, "prompt tokens of each of them", optional(_tokens), metavar="TOKENS")
    output: int | None = setting(None, "output tokens of each of them", optional(_tokens), metavar="TOKENS")
    traffic: str | None = setting(
        None,
        "plan for real traffic: an access log or JSON lines with prompt_tokens and completion_tokens, or the "
        "address of a server's /metrics; - reads standard input",
        optional(text),
        metavar="FILE|URL",
    )

    def __post_init__(self) -> None:
        self._check_requests()
        disk = next((name for name in ("nvme_path", "nvme") if getattr(self, name) is not None), None)
        offload_config.check_offload(self, disk)
        if self.max_lora_rank is not None and not self.enable_lora and self.max_loras is None:
            raise ConfigurationError(
                "--max-lora-rank is a LoRA setting, but LoRA is not enabled",
                code=_CONTRADICTION,
                needed="--enable-lora or --max-loras as well",
                fix="--enable-lora",
                field="max_lora_rank",
            )

    def _check_requests(self) -> None:
        if self.traffic is not None and (self.prompt is not None or self.output is not None):
            raise ConfigurationError(
                "--traffic and --prompt with --output both set the lengths of requests",
                code=_CONTRADICTION,
                fix="leave one of the two out; --concurrency goes with both",
                field="prompt" if self.prompt is not None else "output",
            )
        if (self.prompt is None) != (self.output is None):
            missing = "output" if self.output is None else "prompt"
            raise ConfigurationError(
                "--prompt and --output go together: the KV cache holds both",
                code=_CONTRADICTION,
                needed=f"--{missing} TOKENS",
                fix=f"--{missing} 300",
                field=missing,
            )
        if self.concurrency is not None and self.traffic is None and self.prompt is None and self.max_model_len is None:
            raise ConfigurationError(
                "--concurrency sets the number of requests, but nothing sets their length",
                code=_CONTRADICTION,
                needed="--prompt and --output, or --max-model-len",
                fix="--prompt 1000 --output 300",
                field="concurrency",
            )
        if self.prompt == 0 and self.output == 0:
            raise ConfigurationError(
                "--prompt and --output are both 0",
                needed="at least one token",
                fix="--prompt 1000",
                field="prompt",
                code=_CONTRADICTION,
            )

    @staticmethod
    def from_arguments(**arguments: Any) -> PlanConfig:
        """From Python. A name that is not known is an error with the nearest one."""
        return build(PlanConfig, arguments, refused={}, origin=lambda name: Origin(str))
