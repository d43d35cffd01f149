"""Settings of the engine: the model, its limits and its memory. vLLM's names; `LLM(...)` takes the same."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from holdfast.config import nodes as nodes_config
from holdfast.config import unsupported
from holdfast.config.parts import executors
from holdfast.config.parts import offload as offload_config
from holdfast.config.parts import quantization as quantization_names
from holdfast.config.setting import (
    Origin,
    build,
    choice,
    flag,
    memory,
    number,
    optional,
    setting,
    table,
    text,
    tokens_or_auto,
    whole,
)
from holdfast.config.tuning import LEAST_VOCABULARY, MOST_LOGPROBS, or_auto
from holdfast.errors import ConfigurationError

GPU_SEQUENCES, CPU_SEQUENCES = 256, 64
GPU_STEP_TOKENS, CPU_STEP_TOKENS = 8192, 512
DEFAULT_UTILIZATION = 0.9
MOST_ENGINES = 256

LEAST_HANG_TIMEOUT_S = 5.0
"""A quarter of it must be longer than the time between two heartbeats of an engine with nothing to do."""

REFUSED: Mapping[str, str] = unsupported.ENGINE
"""vLLM's names for what is not there. Naming one is an error with this reason, never silence."""

KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8", "fp8_e4m3", "fp8_e5m2")


def kv_dtype(field: str, value: Any) -> str:
    """fp8 is vLLM's other name for fp8_e4m3, and the one kept."""
    written = value.strip().lower() if isinstance(value, str) else value
    try:
        found = str(choice(*KV_DTYPES)(field, written if written in KV_DTYPES else value))
    except ConfigurationError as error:
        if (error.fix or "").startswith("leave it out"):  # Other engines' types of few bits: int8, q8_0, nvfp4.
            error.fix = f"{field} fp8, which takes half of bfloat16's bytes and a quarter of float32's"
        raise
    return "fp8" if found == "fp8_e4m3" else found


def _config_overrides(field: str, value: Any) -> dict[str, Any]:
    if callable(value):
        raise ConfigurationError(
            f"{field}: a function is not supported: the model's config is data here",
            needed="a dict of the keys that are to be others",
            fix=f'{field}={{"max_position_embeddings": 8192}}',
            field="hf_overrides",
        )
    return table(field, value)


def _attention_backend(field: str, value: Any) -> str:
    if isinstance(value, str) and value.upper() == "TORCH_SDPA":
        return "torch"
    return str(choice("auto", "compiled", "torch")(field, value))


def _served_for(*taken: str) -> Callable[[str, Any], str]:
    def parse(field: str, value: Any) -> str:
        if value in ("classify", "reward"):
            raise ConfigurationError(
                f"{field} {value} is not supported: a classifier is recognized by its architecture",
                needed="a model whose architecture ends with ForSequenceClassification",
                fix=f"leave {field} out",
                field=field.lstrip("-").replace("-", "_"),
            )
        return str(choice(*taken)(field, value))

    return parse


def _told(field: str, value: Any) -> int:
    """-1 is the whole vocabulary, and so is any number that is as large as one."""
    number = whole(-1, 1 << 24)(field, value)
    return -1 if number >= LEAST_VOCABULARY else whole(-1, MOST_LOGPROBS)(field, number)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    model: str | None = setting(
        None,
        "a folder (config.json, safetensors, tokenizer), a .gguf file, a hub id (owner/name) or a built-in name; "
        "default: the built-in SmolLM2-135M-Instruct",
        optional(text),
        flags=("-m", "--model-path"),
        metavar="MODEL",
    )
    revision: str | None = setting(None, "branch, tag or commit of a hub id", optional(text))
    tokenizer: str | None = setting(
        None, "tokenizer to use instead of the model's: a folder, file or hub id", optional(text)
    )
    download_dir: str | None = setting(
        None,
        "folder for what is downloaded from the hub, laid out as its cache; default: the cache that HF_HOME names",
        optional(text),
        metavar="FOLDER",
    )
    hf_overrides: Mapping[str, Any] | None = setting(
        None,
        'values to use instead of those in the model\'s config.json: JSON such as {"rope_theta": 1000000}',
        optional(_config_overrides),
        metavar="JSON",
    )
    rope_scaling: Mapping[str, Any] | None = setting(
        None, "same as rope_scaling in --hf-overrides", optional(table), metavar="JSON"
    )
    rope_theta: float | None = setting(
        None, "same as rope_theta in --hf-overrides", optional(number(1.0, 1e12)), metavar="NUMBER"
    )
    tokenizer_mode: str = setting(
        "auto", "auto: the tokenizer that comes with the model", or_auto("tokenizer_mode", choice("auto"), "auto")
    )
    skip_tokenizer_init: bool = setting(False, "do not load a tokenizer: token ids in, token ids out", flag)
    chat_template: str | None = setting(
        None, "chat template to use instead of the model's: a file, or the Jinja text itself", optional(text)
    )
    generation_config: str = setting(
        "auto",
        "default sampling parameters: auto (from the model's generation_config.json; of a GGUF file without any "
        "llama.cpp's), vllm (the API's own defaults), or a folder with such a file",
        text,
        metavar="SOURCE",
    )
    override_generation_config: Mapping[str, Any] | None = setting(
        None,
        'override single values of the generation config: JSON such as {"temperature": 0.5}',
        optional(table),
        metavar="JSON",
    )
    runner: str = setting(
        "auto",
        "what the model is for: auto (as its files say), generate or pooling; pooling: /v1/score and /v1/rerank "
        "compare embeddings, also those of a model that was not trained to embed",
        _served_for("auto", "generate", "pooling"),
    )
    convert: str = setting(
        "auto", "auto, none, or embed (same as --runner pooling)", _served_for("auto", "none", "embed")
    )
    task: str = setting(
        "auto",
        "older name of --runner: auto, generate, or embed or score (same as --runner pooling)",
        _served_for("auto", "generate", "embed", "embedding", "score"),
    )
    load_format: str = setting(
        "auto",
        "weight format: auto, safetensors, gguf, bitsandbytes (same as --quantization bitsandbytes), or dummy (random "
        "weights in the model's real shapes)",
        or_auto("load_format", choice("auto", "safetensors", "gguf", "bitsandbytes", "dummy"), "auto"),
    )
    quantization: str | None = setting(
        None,
        "how the weights are quantized: auto (as the checkpoint says), or awq, gptq, compressed-tensors, fp8, "
        "bitsandbytes, mxfp4 or gguf to check it; fp8 and int4 quantize an unquantized checkpoint while loading",
        optional(quantization_names.method),
        flags=("-q",),
        metavar="METHOD",
    )
    device: str = setting(
        "auto", "device to run on: auto (a GPU if there is one), cuda or cpu", choice("auto", "cpu", "cuda")
    )
    dtype: str = setting(
        "auto",
        "data type for weights and activations: auto (the fastest safe one on this device), float32, bfloat16 or "
        "float16",
        choice("auto", "float32", "bfloat16", "float16", "half", "float"),
    )
    kv_cache_dtype: str = setting(
        "auto",
        "data type of the KV cache: auto (same as dtype, or fp8 if the checkpoint says so), float32, bfloat16, "
        "float16, fp8 (e4m3: twice the tokens of bfloat16) or fp8_e5m2",
        kv_dtype,
    )
    calculate_kv_scales: bool = setting(
        False,
        "calibrate the scales of an FP8 KV cache at start even if the checkpoint has them; without any that is done "
        "anyway",
        flag,
    )
    expand_weights: str = setting(
        "auto",
        "dequantize quantized weights at load: auto (when there is memory to spare and it is faster), always or never",
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
        "maximum number of sequences in a batch; default: 256 on a GPU, 64 on a CPU, fewer if memory is short",
        optional(whole(1, 4096)),
    )
    max_num_batched_tokens: int | None = setting(
        None,
        "maximum number of tokens in one step; longer prompts are prefilled in chunks of this size; default: 8192 on a "
        "GPU, 512 on a CPU",
        optional(whole(1, 1 << 20)),
    )
    gpu_memory_utilization: float = setting(
        DEFAULT_UTILIZATION,
        "fraction of the device's memory to use; on a CPU, of the RAM that is free at start",
        number(0.01, 1.0, usual=DEFAULT_UTILIZATION),
    )
    ram: int | None = setting(
        None,
        "maximum RAM the server may use, all its engines together, such as 6GiB, default: gpu_memory_utilization of the"
        " free RAM; with a GPU, "
        "what layers, experts and KV blocks that wait beside it may take, the server's own processes on top, default: "
        "0.9 of the free RAM less these",
        optional(memory),
        metavar="SIZE",
    )
    vram: int | None = setting(
        None,
        "maximum GPU memory the server may use, such as 22GiB; default: gpu_memory_utilization of it",
        optional(memory),
        metavar="SIZE",
    )
    nvme_path: str | None = setting(
        None,
        "folder on a fast disk for layers that do not fit in RAM, which are read for every step; the file has no name, "
        "and is gone when the server ends",
        optional(text),
        metavar="DIR",
    )
    nvme: int | None = setting(
        None, "maximum size of that file, such as 40GiB; default: what is free there", optional(memory), metavar="SIZE"
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
    kv_cache_memory_bytes: int | None = setting(
        None,
        "size of the KV cache, such as 4GiB; default: all that is left of the budget on a GPU, at most 4 GiB on a CPU",
        optional(memory),
        metavar="SIZE",
    )
    block_size: int = setting(16, "tokens in one KV block", whole(1, 256))
    enable_prefix_caching: bool = setting(True, "reuse the KV cache of shared prompt prefixes", flag)
    kv_ram: int | None = offload_config.kv_ram_setting()
    kv_offloading_size: float | None = offload_config.kv_offloading_size_setting()
    swap_space: float | None = offload_config.swap_space_setting()
    idle_release: float | None = offload_config.idle_release_setting()
    yield_to_neighbours: bool = offload_config.yield_to_neighbours_setting()
    kv_store: str | None = offload_config.kv_store_setting()
    kv_store_size: int | None = offload_config.kv_store_size_setting()
    kv_store_daily_writes: int | None = offload_config.kv_store_daily_writes_setting()
    enable_chunked_prefill: bool = setting(
        True, "prefill long prompts in chunks, batched with decoding; always on", flag
    )
    max_logprobs: int = setting(
        MOST_LOGPROBS,
        "log-probabilities of other tokens that a request may ask for with each token, 20 at most; -1: of a prompt's"
        " tokens, on a CPU, also those of the whole vocabulary (prompt_logprobs: -1), in 728 MiB more of memory",
        or_auto("max_logprobs", _told, MOST_LOGPROBS),
    )
    scheduling_policy: str = setting("fcfs", "fcfs, or priority (lower values first)", choice("fcfs", "priority"))
    max_queued_requests: int = setting(
        1024,
        "maximum number of waiting requests, besides those running; more get 429 with Retry-After",
        whole(0, 1 << 20),
    )
    engine_hang_timeout: float | None = setting(
        None,
        "seconds after which an engine process that does not respond is killed and restarted, with every stream "
        "resumed; after a quarter of that time /health returns 503. 0: never; default: 60, more if steps take long",
        optional(number(0, 86400)),
        metavar="SECONDS",
    )
    attention_backend: str = setting(
        "auto",
        "attention backend on a CPU: auto, compiled (kernels built at install) or torch",
        or_auto("attention_backend", _attention_backend, "auto"),
    )
    enable_sleep_mode: bool = setting(
        False, "let /sleep release the engine's memory until /wake_up; LLM.sleep works without this", flag
    )
    enforce_eager: bool = setting(False, "do not capture CUDA graphs on a GPU; there are none on a CPU", flag)
    seed: int | None = setting(
        None,
        "random seed from which requests without their own get theirs, so that runs are reproducible",
        optional(whole(0, 2**62)),
    )
    enable_lora: bool = setting(False, "serve LoRA adapters along with the model", flag)
    max_loras: int | None = setting(
        None, "maximum number of adapters in one batch; default: 1; needs --enable-lora", optional(whole(1, 1024))
    )
    max_lora_rank: int | None = setting(
        None, "maximum LoRA rank; default: 16; needs --enable-lora", optional(whole(1, 1024))
    )
    max_cpu_loras: int | None = setting(
        None,
        "maximum number of adapters kept in RAM, including those in use; others are read again when requested; "
        "default: max_loras",
        optional(whole(1, 1 << 16)),
    )
    lora_dtype: str = setting(
        "auto",
        "data type of LoRA weights: auto, or the value of dtype, which is the same",
        choice("auto", "float32", "bfloat16", "float16"),
    )
    threads: int | None = setting(
        None,
        "number of CPU threads, of each engine where there are several; default: one for each physical core that may be"
        " used, divided among engines",
        optional(whole(1, 1024)),
    )
    tensor_parallel_size: int = setting(
        1,
        "number of ranks to split each layer over: processes of this machine, which share its cores, or have a GPU"
        " each",
        whole(1),
        flags=("-tp", "--tp-size", "--tensor-parallel"),
    )
    disable_custom_all_reduce: bool = executors.disable_custom_all_reduce_setting()
    pipeline_parallel_size: int = setting(
        1,
        "number of stages that the layers are divided into, by bytes: processes of this machine, -tp of them each, or"
        " GPUs",
        whole(1),
        flags=("-pp", "--pp-size"),
    )
    distributed_executor_backend: str | None = executors.distributed_executor_backend_setting()
    nnodes: int = nodes_config.nnodes_setting()
    node_rank: int = nodes_config.node_rank_setting()
    master_addr: str = nodes_config.master_addr_setting()
    master_port: int = nodes_config.master_port_setting()
    node_addr: str | None = nodes_config.node_addr_setting()
    node_secret: str | None = nodes_config.node_secret_setting()
    node_secret_file: str | None = nodes_config.node_secret_file_setting()
    node_timeout: float = nodes_config.node_timeout_setting()
    enable_expert_parallel: bool = setting(
        False, "give each rank of -tp whole experts, not a part of every one", flag, flags=("-ep",)
    )
    expert_placement_strategy: Literal["linear", "round_robin"] = setting(
        "linear", "whole experts of a rank: neighbours, or dealt in turns", choice("linear", "round_robin")
    )
    data_parallel_size: int = setting(
        1,
        "number of engines, each with the whole model, behind one API: on a CPU they share its memory and cores, on"
        " GPUs each has its own",
        whole(1, MOST_ENGINES),
        flags=("-dp", "--dp-size"),
    )
    data_parallel_size_local: int | None = setting(
        None, "engines of this machine; all of data_parallel_size are", optional(whole(0)), flags=("-dpl",)
    )

    def __post_init__(self) -> None:
        unsupported.check_engines_here(self.data_parallel_size, self.data_parallel_size_local)
        nodes_config.check_nodes(self)
        executors.check_executor(self)
        if self.engine_hang_timeout is not None and 0 < self.engine_hang_timeout < LEAST_HANG_TIMEOUT_S:
            raise ConfigurationError(
                f"engine_hang_timeout is {self.engine_hang_timeout:g} s, but a healthy engine may be silent that long",
                needed=f"{LEAST_HANG_TIMEOUT_S:g} or more, or 0 for never",
                found=f"{self.engine_hang_timeout:g}",
                fix=f"--engine-hang-timeout {LEAST_HANG_TIMEOUT_S:g}",
                field="engine_hang_timeout",
            )
        offload_config.check_budgets(self)
        offload_config.check_offload(self, None if self.nvme_path is None else "nvme_path")
        offload_config.check_kv_tiers(self)
        self._check_lora()
        if self.load_format == "bitsandbytes" and self.quantization not in (None, "bitsandbytes", "nf4"):
            raise ConfigurationError(
                f"load_format is bitsandbytes, but quantization is {self.quantization}",
                needed="the same format in both",
                fix="leave --load-format out",
                field="load_format",
            )

    def _check_lora(self) -> None:
        given = [name for name in ("max_loras", "max_lora_rank", "max_cpu_loras") if getattr(self, name) is not None]
        if given and not self.enable_lora:
            raise ConfigurationError(
                f"{given[0]} is a LoRA setting, but LoRA is not enabled",
                needed="enable_lora as well",
                fix="--enable-lora",
                field=given[0],
            )
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.lora_places:
            raise ConfigurationError(
                f"max_cpu_loras is {self.max_cpu_loras}, less than max_loras, {self.lora_places}",
                needed=f"{self.lora_places} or more",
                fix="leave max_cpu_loras out",
                field="max_cpu_loras",
            )

    @property
    def config_overrides(self) -> Mapping[str, Any]:
        """What is not as the model's config.json says."""
        older = {"rope_scaling": self.rope_scaling, "rope_theta": self.rope_theta}
        return {**{name: value for name, value in older.items() if value is not None}, **(self.hf_overrides or {})}

    @property
    def overriding_settings(self) -> tuple[str, ...]:
        """Which of them ask for that."""
        return tuple(name for name in ("rope_scaling", "rope_theta", "hf_overrides") if getattr(self, name))

    @property
    def pooling(self) -> bool | None:
        """Whether embeddings are what the model is served for; None: its files say."""
        if self.runner == "pooling" or self.convert == "embed" or self.task in ("embed", "embedding", "score"):
            return True
        return False if "generate" in (self.runner, self.task) else None

    @property
    def asked_quantization(self) -> str | None:
        """As --quantization names it; vLLM's older commands say it with --load-format."""
        return "bitsandbytes" if self.load_format == "bitsandbytes" else self.quantization

    @property
    def lora_places(self) -> int:
        """Adapters in one step; 0: there are none."""
        return (self.max_loras or 1) if self.enable_lora else 0

    @property
    def lora_rank(self) -> int:
        return self.max_lora_rank or 16

    @property
    def lora_copies(self) -> int:
        """Kept in RAM behind those places, which are in RAM themselves on a CPU."""
        kept = self.max_cpu_loras or self.lora_places
        return kept if self.device == "cuda" else kept - self.lora_places

    @property
    def kv_ram_bytes(self) -> int | None:
        """For KV blocks that leave a GPU; 0: none, or there is no GPU. None: nothing was said."""
        return offload_config.kv_ram_bytes(self) if self.device == "cuda" else 0

    @property
    def budgets(self) -> Mapping[str, int | None]:
        """By tier; None: not set."""
        return {"ram": self.ram, "vram": self.vram}

    @property
    def sequences(self) -> int:
        """At the same time, no more than a step has tokens. `auto` has become a device by the time this is asked."""
        usual = GPU_SEQUENCES if self.device == "cuda" else CPU_SEQUENCES
        return self.max_num_seqs or min(usual, self.max_num_batched_tokens or usual)

    @property
    def step_tokens(self) -> int:
        usual = GPU_STEP_TOKENS if self.device == "cuda" else CPU_STEP_TOKENS
        return self.max_num_batched_tokens or max(usual, self.max_num_seqs or 0)

    @staticmethod
    def from_arguments(**arguments: Any) -> EngineConfig:
        """From Python, as `LLM` takes them. A name that is not known is an error with the nearest one."""
        refused = {**REFUSED, **_of_servers(arguments)}
        return build(EngineConfig, arguments, refused=refused, origin=lambda name: Origin(str))


def _of_servers(names: Iterable[str]) -> dict[str, str]:
    """Those of them that a server has, and `LLM` has not."""
    from holdfast.config.server import REFUSED as SERVER_REFUSED
    from holdfast.config.server import ServerConfig

    theirs = {field.name for field in fields(ServerConfig)} | SERVER_REFUSED.keys()
    own = {field.name for field in fields(EngineConfig)}
    return dict.fromkeys(
        (theirs - own) & {*names}, "it is a setting of holdfast serve; LLM opens no port and writes no log"
    )
