"""vLLM's settings that only tune its insides, or concern what no request here has: taken, and said so once at start.

Nothing of an answer depends on one of them. What would change answers, open a door or promise a service that is not
there is `unsupported`'s, which refuses it by name. Data, and the lines that say it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

ONE_MACHINE = "ranks are processes of one machine, and experts stay where they are placed"
KERNELS = "kernels are Holdfast's own, chosen for the hardware"
TEXT_ONLY = "only text is served, and other parts of a message are refused"
GRAPHS = "CUDA graphs are captured as needed; see --enforce-eager"
STEPS = "there is one way to build a batch; see --max-num-batched-tokens and --max-num-seqs"
FILES = "files are read as they are stored, tensor by tensor"
METRICS = "/metrics has all there is"
NO_MAMBA = "it concerns state-space models, which are not served"
NEVER_LOGGED = "the content of requests and responses is never logged"
ONE_PROCESS = "one API server process serves; text is tokenized in its own threads"


def _each(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


TUNING: Mapping[str, str] = {
    "trust_remote_code": "no code of a model folder is ever run; model families are part of Holdfast",
    "code_revision": "no code of a model folder is ever run",
    "model_impl": "model families are part of Holdfast",
    "preemption_mode": "a preempted request is recomputed, or comes back from --kv-ram where that is sooner",
    "kv_offloading_backend": "there is one way for KV blocks to lie in RAM, --kv-ram, and one on disk, --kv-store",
    **_each(
        "tokens are generated one at a time: the answers are the same, without the speed",
        "speculative_config spec_method spec_model spec_tokens num_lookahead_slots speculative_model "
        "num_speculative_tokens per_request_spec_decode_metrics",
    ),
    "fully_sharded_loras": "of each matrix a rank has its part of one factor, and the other whole",
    **_each(
        ONE_MACHINE,
        "all2all_backend cp_kv_cache_interleave_size dcp_kv_cache_interleave_size "
        "dcp_comm_backend dcp_q_replicate "
        "enable_dbo dbo_decode_token_threshold dbo_prefill_token_threshold ubatch_size "
        "enable_nccl_comm_suspend enable_ep_weight_filter "
        "enable_batch_sharded_sampling enable_hc_sp distributed_timeout_seconds cpu_distributed_timeout_seconds ",
    ),
    **_each(
        "engines of -dp are processes of this machine, behind one API, and wait for nothing of each other",
        "data_parallel_address data_parallel_rpc_port data_parallel_supervisor_port data_parallel_hybrid_lb "
        "dp_sync_interval dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s disable_nccl_for_dp_synchronization",
    ),
    "ray_workers_use_nsight": "ranks are started without a profiler; nsys can be attached to their processes",
    **_each("threads are placed by the system; see taskset and numactl", "numa_bind numa_bind_nodes numa_bind_cpus"),
    **_each(
        TEXT_ONLY,
        "default_mm_loras limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type "
        "mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype "
        "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin mm_hasher_algorithm "
        "mm_tensor_ipc mm_ipc_gpu_memory_gb mm_processor_device mm_device_do_normalize media_io_kwargs "
        "video_pruning_rate video_pruning_method allowed_local_media_path allowed_media_domains interleave_mm_strings "
        "skip_mm_profiling enable_mm_embeds disable_mm_preprocessor_cache disable_chunked_mm_input language_model_only "
        "enable_mm_processor_stats enable_tower_connector_lora enable_shm_tensor_arena trust_request_mm_kwargs",
    ),
    **_each(
        ONE_PROCESS,
        "tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config renderer_num_workers "
        "disable_frontend_multiprocessing",
    ),
    "ignore_patterns": "only the files that are needed are downloaded",
    **_each(
        FILES,
        "model_loader_extra_config pt_load_map_location safetensors_load_strategy safetensors_prefetch_block_size "
        "safetensors_prefetch_num_threads max_parallel_loading_workers use_tqdm_on_load",
    ),
    **_each(
        GRAPHS,
        "compilation_config optimization_level cudagraph_capture_sizes max_cudagraph_capture_size cuda_graph_sizes "
        "enable_layerwise_nvtx_tracing performance_mode max_seq_len_to_capture",
    ),
    **_each(
        KERNELS,
        "kernel_config attention_config linear_backend moe_backend gdn_prefill_backend kda_decode_backend "
        "kda_prefill_backend sparse_indexer_topk_backend ir_op_priority enable_flashinfer_autotune "
        "enable_flash_late_interaction disable_cascade_attn use_fp64_gumbel jit_monitor_mode jit_monitor_verbose "
        "additional_config",
    ),
    **_each(
        NO_MAMBA,
        "mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds "
        "mamba_ssm_cache_dtype mamba_ssu_algorithm use_replayssm replayssm_buffer_len "
        "enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint",
    ),
    "async_scheduling": "steps overlap where that helps: always on a GPU, never on a CPU",
    **_each(
        "layers with the same attention type share a block table, each type has its own",
        "disable_hybrid_kv_cache_manager kv_sharing_fast_prefill swa_bounded_replay",
    ),
    "num_gpu_blocks_override": "the KV cache is sized by measurement; see --kv-cache-memory-bytes",
    **_each(
        "there is one prefix cache, kept while there is room",
        "prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit",
    ),
    **_each(
        STEPS,
        "long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_partial_prefills "
        "max_long_partial_prefills num_scheduler_steps multi_step_stream_outputs scheduler_delay_factor "
        "disable_async_output_proc use_v2_block_manager max_num_scheduled_tokens max_num_active_seqs "
        "prefill_schedule_interval scheduler_reserve_full_isl watermark watermark_config",
    ),
    "stream_interval": "a stream has one event per token",
    **_each("adapters are checked when they are loaded", "lora_extra_vocab_size specialize_active_lora"),
    **_each("there is one structured output backend", "guided_decoding_backend guided_decoding_disable_fallback"),
    "enable_reasoning": "reasoning is separated from the answer by --reasoning-parser",
    "show_hidden_metrics_for_version": "older metric names are always present",
    **_each(
        METRICS,
        "kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics enable_mfu_metrics aggregate_engine_logging "
        "enable_logging_iteration_details",
    ),
    **_each("sleep releases all memory", "sleep_mode_offload_cudagraph enable_cumem_allocator"),
    **_each("a dead engine is restarted, and its requests continue", "enable_fault_tolerance fault_tolerance_config"),
    "allow_deprecated_quantization": "every format that is read is read without it",
    **_each(NEVER_LOGGED, "enable_log_requests max_log_len enable_log_outputs enable_log_deltas"),
    "log_error_stack": "an error's stack trace is always in the log, and never in a response",
    "exclude_tools_when_tool_choice_none": "tools that may not be called are never shown to the model",
    **_each("the request line and headers may have up to 64 KiB", "h11_max_incomplete_event_size h11_max_header_count"),
    "sse_keep_alive_interval": "a stream's headers are sent at once, and its events as tokens are generated",
    "enable_offline_docs": "/docs works offline",
    "fail_on_environ_validation": "an unknown HOLDFAST_NAME variable is always an error",
}
"""Names, and what is said of one that was given."""

MOST_LOGPROBS = 20
"""That one token can have beside it."""
LEAST_VOCABULARY = 32_000
"""A --max-logprobs from here on means as many as there are tokens."""
_BACKENDS = frozenset({"flash_attn", "flashinfer", "triton_attn", "flex_attention", "cpu_attn", "xformers"})
"""vLLM's kernels of attention, as some write them; in capitals any name is one of vLLM's."""
_TOOL_FORMATS = frozenset(_each("", """
    apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 dots ernie45 gemma4
    gigachat3 glm4 glm45 glm47 hy_v3 inkling internlm kimi_k2 kimi_k3 lfm2 ling3 longcat minimax minimax_m2 minimax_m3
    muse_glimmer openai poolside_v1 step3 step3p5
"""))  # fmt: skip
_REASONING_FORMATS = frozenset(_each("", """
    cohere_command3 cohere_command4 deepseek_v4 gemma4 glm47 hunyuan_a13b hy_v3 inkling kimi_k3 ling3 mimo
    minimax_m2_append_think minimax_m3 muse_glimmer nemotron_v3 openai_gptoss poolside_v1 step3p5
"""))  # fmt: skip
"""Names of vLLM's parsers for architectures that are not served: the model is refused by its own name. Those of models
that are served and write in a format that is not parsed are not among them: answers would be others."""
_TOKENIZERS = frozenset({"hf", "slow", "mistral", "deepseek_v32", "deepseek_v4", "inkling", "kimi_k3"})
_COUNTS = frozenset(str(count) for count in range(2, 257))
VALUES: Mapping[str, tuple[frozenset[str], str]] = {
    "load_format": (frozenset({"runai_streamer", "fastsafetensors", "instanttensor", "mistral"}), FILES),
    "tokenizer_mode": (_TOKENIZERS, "the tokenizer.json that comes with the model is used"),
    "config_format": (frozenset({"mistral"}), "the model's config.json is read"),
    "tool_call_parser": (_TOOL_FORMATS, "calls in that format are not parsed; the chat template decides the format"),
    "reasoning_parser": (_REASONING_FORMATS, "the chat template decides how reasoning is marked"),
    "enable_chunked_prefill": (frozenset({"false", "0", "no", "off"}), "prompts longer than a step come in chunks"),
    "api_server_count": (_COUNTS, ONE_PROCESS),
    "max_logprobs": (frozenset(), "a request may ask for up to 20: memory is planned for so many"),
}
"""The same of single values, for settings that are there."""


def taken_value(name: str, value: Any) -> str | None:
    """What is said of a value of vLLM's that is read as `auto`; None: the setting's own parser judges it."""
    if isinstance(value, bool | int):
        value = str(value).lower()
    if not isinstance(value, str):
        return None
    if name == "max_logprobs" and value.isdecimal() and MOST_LOGPROBS < int(value) < LEAST_VOCABULARY:
        return VALUES[name][1]
    if name == "attention_backend":
        named = value.upper() != "TORCH_SDPA" and (value.isupper() or value in _BACKENDS)
        return KERNELS if named else None
    known, why = VALUES.get(name, (frozenset(), ""))
    return why if value in known else None


def or_auto(name: str, parse: Callable[[str, Any], Any], auto: Any) -> Callable[[str, Any], Any]:
    """A setting's parser that reads such values as `auto`."""
    return lambda field, value: auto if taken_value(name, value) is not None else parse(field, value)
