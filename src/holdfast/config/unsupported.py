"""vLLM's settings (0.8 to 0.32) that are none of Holdfast's: why each is refused, and which of their values are not.

Data, and the rule of what asks for nothing. Knows neither flags nor files; which settings there are is `engine`'s and
`server`'s to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_ONE_DEVICE = "only one device is supported so far"
_ONE_MACHINE = "only one machine is supported so far"
_NO_OFFLOAD = "weight offloading is not supported yet"
_TEXT_ONLY = "only text input and output are supported"
_NO_CODE = "code named in a setting is never run"
_AS_IT_IS = "a model's config is used as it is"
_ONE_SERVER = "one server generates and embeds: /v1/embeddings and LLM.embed are always there"
_POOLED = "embeddings are the last token's hidden state, normalized to length 1"
_GRAPHS = "CUDA graphs are captured as needed; see enforce_eager"
_KERNELS = "Holdfast uses its own kernels, chosen for the hardware"
_NO_MAMBA = "Mamba and other state-space models are not supported"
_NO_MOE_CHOICE = "experts run on one device, with one implementation"
_NO_TRACES = "tracing is not supported; /metrics and the access log have the times of each request"
_FILES = "files are read as they are stored, tensor by tensor"
_STEPS = "there is one way to build a batch; see max_num_batched_tokens and max_num_seqs"
_NEVER_LOGGED = "the content of requests and responses is never logged"
_FORMS = "there is one structured output backend; see structured_outputs_config, and structured_outputs in a request"


def _each(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


def _names(written: str) -> frozenset[str]:
    return frozenset(written.split())


ENGINE: Mapping[str, str] = {
    "quantization_config": "a checkpoint's own is read; --quantization fp8 and int4 have no options",
    "allow_deprecated_quantization": "every format that is read is read without it",
    "quantization_param_path": "scales are read from the checkpoint",
    "kv_cache_dtype_skip_layers": "all layers keep keys and values in one type; see kv_cache_dtype",
    "swap_space": "the KV cache is not swapped to RAM yet; a preempted request is recomputed",
    **_each(
        _NO_OFFLOAD,
        "cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_num_in_group offload_params "
        "offload_prefetch_step",
    ),
    **_each("KV cache offloading is not supported yet", "kv_offloading_size kv_offloading_backend"),
    **_each(
        _ONE_DEVICE,
        "fully_sharded_loras distributed_executor_backend enable_expert_parallel disable_custom_all_reduce "
        "all2all_backend data_parallel_rank data_parallel_start_rank data_parallel_size_local data_parallel_address "
        "data_parallel_rpc_port data_parallel_backend data_parallel_hybrid_lb data_parallel_external_lb "
        "data_parallel_multi_port_external_lb data_parallel_supervisor_port decode_context_parallel_size "
        "prefill_context_parallel_size cp_kv_cache_interleave_size dcp_kv_cache_interleave_size dcp_comm_backend "
        "dcp_q_replicate dp_sync_interval dp_supervisor_probe_failure_threshold dp_supervisor_probe_interval_s "
        "dp_supervisor_probe_timeout_s enable_dbo dbo_decode_token_threshold dbo_prefill_token_threshold ubatch_size "
        "disable_nccl_for_dp_synchronization enable_nccl_comm_suspend enable_eplb eplb_config enable_elastic_ep "
        "elastic_ep_max_dp_size enable_ep_weight_filter expert_placement_strategy enable_batch_sharded_sampling "
        "enable_hc_sp distributed_timeout_seconds cpu_distributed_timeout_seconds enable_scale_out",
    ),
    **_each(
        _ONE_MACHINE,
        "nnodes node_rank master_addr master_port worker_use_ray engine_use_ray ray_workers_use_nsight",
    ),
    "device_ids": "the first device that CUDA_VISIBLE_DEVICES shows is used",
    **_each("threads are placed by the system; see taskset and numactl", "numa_bind numa_bind_nodes numa_bind_cpus"),
    **_each(
        _TEXT_ONLY,
        "default_mm_loras limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type "
        "mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend "
        "mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin mm_hasher_algorithm mm_tensor_ipc mm_ipc_gpu_memory_gb mm_processor_device "
        "mm_device_do_normalize media_io_kwargs video_pruning_rate video_pruning_method allowed_local_media_path "
        "allowed_media_domains interleave_mm_strings skip_mm_profiling enable_mm_embeds disable_mm_preprocessor_cache "
        "disable_chunked_mm_input language_model_only enable_mm_processor_stats enable_tower_connector_lora "
        "enable_shm_tensor_arena ec_transfer_config ec_manager_config",
    ),
    **_each("speculative decoding is not supported yet",
            "speculative_config spec_method spec_model spec_tokens num_lookahead_slots per_request_spec_decode_metrics"
            " speculative_model num_speculative_tokens"),
    "trust_remote_code": "code in a model folder is never run; model families are part of Holdfast",
    **_each("code in a model folder is never run", "code_revision model_class_overrides"),
    **_each(_NO_CODE, "logits_processors logits_processor_pattern worker_cls worker_extension_cls scheduler_cls "
                      "io_processor_plugin additional_config"),
    **_each(_AS_IT_IS, "hf_overrides hf_config_path config_format diffusion_config engram_config"),
    **_each(_AS_IT_IS + "; set it in the model's config.json", "rope_scaling rope_theta"),
    "model_impl": "model families are part of Holdfast",
    "tokenizer_revision": "name the tokenizer by a folder or file, or pin the model with revision",
    **_each("text is tokenized in the API server, in its own threads",
            "tokenizer_pool_size tokenizer_pool_type tokenizer_pool_extra_config renderer_num_workers"),
    "hf_token": "HF_TOKEN in the environment is read",
    "download_dir": "downloads go to the caches that HF_HOME and HOLDFAST_CACHE name",
    "ignore_patterns": "only the files that are needed are downloaded",
    **_each(_FILES, "model_loader_extra_config pt_load_map_location safetensors_load_strategy "
                    "safetensors_prefetch_block_size safetensors_prefetch_num_threads max_parallel_loading_workers "
                    "weight_transfer_config"),
    "use_tqdm_on_load": "loading logs one line per stage",
    "max_logprobs": "a request may ask for up to 20",
    "logprobs_mode": "log-probabilities are those of the raw logits (raw_logprobs)",
    **_each(_GRAPHS, "compilation_config optimization_level cudagraph_capture_sizes max_cudagraph_capture_size "
                     "cuda_graph_sizes enable_layerwise_nvtx_tracing performance_mode"),
    "max_seq_len_to_capture": "decode steps are captured at any length",
    **_each(_KERNELS, "kernel_config attention_config linear_backend moe_backend gdn_prefill_backend "
                      "kda_decode_backend kda_prefill_backend sparse_indexer_topk_backend ir_op_priority "
                      "enable_flashinfer_autotune enable_flash_late_interaction disable_cascade_attn use_fp64_gumbel "
                      "jit_monitor_mode jit_monitor_verbose"),
    **_each(_NO_MAMBA, "mamba_backend mamba_block_size mamba_cache_dtype mamba_cache_mode mamba_cache_philox_rounds "
                       "mamba_ssm_cache_dtype mamba_ssu_algorithm use_replayssm replayssm_buffer_len "
                       "enable_mamba_cache_stochastic_rounding enable_mamba_shared_prefix_checkpoint"),
    **_each(_NO_MOE_CHOICE, "enable_return_routed_experts enable_moe_shared_loras enable_mixed_moe_lora_format"),
    "async_scheduling": "steps overlap where that helps: always on a GPU, never on a CPU",
    **_each("sliding-window layers keep their window, as trained", "disable_sliding_window swa_bounded_replay"),
    **_each("layers with the same attention type share a block table, each type has its own",
            "disable_hybrid_kv_cache_manager kv_sharing_fast_prefill"),
    **_each(_ONE_SERVER, "runner convert task"),
    **_each(_POOLED, "pooler_config override_pooler_config"),
    "enable_prompt_embeds": "prompts are text or token ids",
    "kv_transfer_config": "KV blocks stay where they were computed",
    "kv_events_config": "KV block events are not published; /metrics has their figures",
    "num_gpu_blocks_override": "the KV cache is sized by measurement; see kv_cache_memory_bytes",
    "device_memory_utilization": "it is called gpu_memory_utilization",
    **_each("there is one prefix cache, with prefixes kept while there is room; cache_salt in a request separates them",
            "prefix_caching_hash_algo prefix_cache_retention_interval prefix_match_unit"),
    "preemption_mode": "a preempted request is recomputed",
    **_each(_STEPS, "long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_partial_prefills "
                    "max_long_partial_prefills num_scheduler_steps multi_step_stream_outputs scheduler_delay_factor "
                    "disable_async_output_proc use_v2_block_manager max_num_scheduled_tokens max_num_active_seqs "
                    "prefill_schedule_interval scheduler_reserve_full_isl watermark watermark_config"),
    **_each("it is called max_queued_requests", "max_num_queued_reqs max_num_queued_tokens"),
    "stream_interval": "a stream has one event per token",
    **_each("adapters change layers of the model; they cannot add tokens or heads",
            "lora_extra_vocab_size max_lora_cls_labels long_lora_scaling_factors lora_target_modules "
            "specialize_active_lora"),
    **_each("only LoRA adapters are supported", "enable_prompt_adapter max_prompt_adapters "
                                                      "max_prompt_adapter_token"),
    **_each(_FORMS, "guided_decoding_backend guided_decoding_disable_fallback guided_decoding_disable_any_whitespace "
                    "guided_decoding_disable_additional_properties"),
    **_each("reasoning is separated from the answer by reasoning_parser", "enable_reasoning reasoning_config"),
    **_each(_NO_TRACES, "otlp_traces_endpoint collect_detailed_traces enable_trace_replay profiler_config"),
    **_each("older metric names are always present", "show_hidden_metrics_for_version"),
    **_each("/metrics has all there is", "kv_cache_metrics kv_cache_metrics_sample cudagraph_metrics "
                                          "enable_mfu_metrics custom_histogram_buckets enable_per_request_metrics "
                                          "aggregate_engine_logging enable_logging_iteration_details logging_config"),
    **_each("sleep releases all memory", "sleep_mode_offload_cudagraph sleep_preserve_parameter_names "
                                           "enable_cumem_allocator"),
    **_each("a dead engine is restarted, and its requests continue", "enable_fault_tolerance fault_tolerance_config"),
    **_each("responses contain tokens, log-probabilities and nothing else from the sampler",
            "return_sampling_mask aux_output_config"),
}  # fmt: skip

SERVER: Mapping[str, str] = {
    "enable_ssl_refresh": "certificates are read once; restart the server, or renew them in a proxy in front",
    "uds": "it listens on an address and a port; a proxy in front may listen on a Unix socket",
    "root_path": "paths are fixed; let the proxy in front strip its prefix",
    **_each(_NO_CODE, "middleware tool_parser_plugin reasoning_parser_plugin"),
    **_each("there is one log: see --log-level", "uvicorn_log_level log_config_file"),
    "disable_access_log_for_endpoints": "probes (/health, /ping, /metrics) are never in the access log, all others are",
    **_each(_NEVER_LOGGED, "enable_log_requests max_log_len enable_log_outputs enable_log_deltas"),
    "log_error_stack": "an error's stack trace is always in the log, and never in a response",
    "return_tokens_as_token_ids": "tokens are shown as text; return_token_ids in a request adds their ids",
    "tool_server": "tools are run by the client",
    "exclude_tools_when_tool_choice_none": "tools that may not be called are never shown to the model",
    "tool_strict_level": "strict in a tool's definition is honoured as given",
    "chat_template_content_format": "the content format is detected from the chat template",
    "default_chat_template_kwargs": "send chat_template_kwargs in the request",
    "trust_request_mm_kwargs": _TEXT_ONLY,
    **_each("the request line and headers may have up to 64 KiB", "h11_max_incomplete_event_size h11_max_header_count"),
    "sse_keep_alive_interval": "a stream's headers are sent at once, and its events as tokens are generated",
    "headless": "only one machine is supported so far",
    **_each("it speaks HTTP only", "grpc grpc_port"),
    "tokens_only": "see skip_tokenizer_init",
    "disable_frontend_multiprocessing": "the API server and the engine are two processes; LLM in Python is one",
    "enable_offline_docs": "/docs works offline",
    "shutdown_timeout": "it is called drain_timeout",
    "fail_on_environ_validation": "an unknown HOLDFAST_NAME variable is always an error",
    **_each("it speaks OpenAI's API", "cohere_format cohere_is_reasoning_model anthropic_disabled_thinking_effort "
                                      "fingerprint_mode fingerprint_value"),
}  # fmt: skip

_NO = frozenset({"none", "null", "false", "no", "off", "0", "0.0", ""})
_NO_MEDIA = frozenset({'{"image":0}', '{"video":0}', '{"image":0,"video":0}', "image=0", "{}"})
DONE_ANYWAY: Mapping[str, frozenset[str]] = {
    "runner": frozenset({"auto", "generate"}),
    "task": frozenset({"auto", "generate"}),
    "convert": frozenset({"auto", "none"}),
    "max_logprobs": frozenset({"20"}),
    "logprobs_mode": frozenset({"raw_logprobs"}),
    "async_scheduling": _NO | {"true", "yes", "on", "1"},
    "guided_decoding_backend": frozenset({"auto", "guidance"}),
    "guided_decoding_disable_fallback": frozenset({"true", "1"}) | _NO,
    "model_impl": frozenset({"auto"}),
    "config_format": frozenset({"auto", "hf"}),
    "chat_template_content_format": frozenset({"auto"}),
    "exclude_tools_when_tool_choice_none": frozenset({"true", "1"}),
    "enable_reasoning": frozenset({"true", "1"}),
    "disable_custom_all_reduce": frozenset({"true", "1"}) | _NO,
    "disable_cascade_attn": frozenset({"true", "1"}),
    "disable_chunked_mm_input": frozenset({"true", "1"}) | _NO,
    "skip_mm_profiling": frozenset({"true", "1"}) | _NO,
    "language_model_only": frozenset({"true", "1"}) | _NO,
    "limit_mm_per_prompt": _NO_MEDIA | _NO,
    "use_tqdm_on_load": frozenset({"true", "1"}),
    "log_error_stack": frozenset({"true", "1"}),
    "enable_offline_docs": frozenset({"true", "1"}) | _NO,
    "allow_deprecated_quantization": frozenset({"true", "1"}) | _NO,
    "use_v2_block_manager": frozenset({"true", "1"}),
    "performance_mode": frozenset({"balanced"}),
    "worker_cls": frozenset({"auto"}),
    # Settings of a server. What an LLM in Python does by itself: it logs neither.
    "disable_log_stats": frozenset({"true"}),
    "disable_log_requests": frozenset({"true"}),
    **dict.fromkeys(
        ("nnodes", "data_parallel_size_local", "decode_context_parallel_size", "prefill_context_parallel_size",
         "stream_interval", "num_scheduler_steps", "max_num_partial_prefills", "max_long_partial_prefills"),
        frozenset({"1"}),
    ),
}  # fmt: skip
"""Values that ask for what is done anyway; a name that is not here asks for nothing with `_NO`."""

SWITCHES = frozenset(
    name
    for name in (*ENGINE, *SERVER)
    if name.startswith(("enable_", "disable_", "use_", "return_", "skip_", "exclude_", "allow_deprecated", "trust_"))
) | _names(
    """async_scheduling fully_sharded_loras log_error_stack headless grpc language_model_only
    mm_encoder_only mm_device_do_normalize interleave_mm_strings numa_bind dcp_q_replicate data_parallel_hybrid_lb
    data_parallel_external_lb data_parallel_multi_port_external_lb kv_cache_metrics cudagraph_metrics
    aggregate_engine_logging jit_monitor_verbose sleep_mode_offload_cudagraph specialize_active_lora
    scheduler_reserve_full_isl long_prefill_token_threshold_adaptive kv_sharing_fast_prefill swa_bounded_replay
    tokens_only fail_on_environ_validation cohere_is_reasoning_model ray_workers_use_nsight worker_use_ray
    engine_use_ray multi_step_stream_outputs guided_decoding_disable_fallback guided_decoding_disable_any_whitespace
    guided_decoding_disable_additional_properties"""
) - {"disable_access_log_for_endpoints"}
"""Flags without a value."""
LISTS = _names(
    """allowed_media_domains cudagraph_capture_sizes cuda_graph_sizes numa_bind_nodes numa_bind_cpus device_ids
    lora_target_modules ignore_patterns collect_detailed_traces custom_histogram_buckets sleep_preserve_parameter_names
    kv_cache_dtype_skip_layers logits_processors middleware disable_access_log_for_endpoints"""
)
"""Flags with any number of them."""
SHORT: Mapping[str, tuple[str, ...]] = {
    "compilation_config": ("-O", "-cc"),
    "speculative_config": ("-sc",),
    "nnodes": ("-n",),
    "node_rank": ("-r",),
    "data_parallel_size_local": ("-dpl",),
    "data_parallel_rank": ("-dpn",),
    "data_parallel_start_rank": ("-dpr",),
    "data_parallel_address": ("-dpa",),
    "data_parallel_rpc_port": ("-dpp",),
    "data_parallel_backend": ("-dpb",),
    "decode_context_parallel_size": ("-dcp",),
    "prefill_context_parallel_size": ("-pcp",),
    "enable_expert_parallel": ("-ep",),
    "attention_config": ("-ac",),
}
"""Further spellings."""

_BACKENDS = _names("flash_attn flashinfer triton_attn flex_attention cpu_attn xformers")
"""vLLM's kernels of attention, as some write them; in capitals any name is one of vLLM's."""


def asks_nothing(name: str, value: Any) -> bool:
    """Whether a setting that is refused was given as what is done anyway, in whatever form it was written."""
    if isinstance(value, list | tuple):
        return len(value) == 0
    if isinstance(value, dict):
        return not any(value.values())
    written = str(value).lower().replace(" ", "")
    return written in DONE_ANYWAY.get(name, _NO) or value is None


def refused_value(name: str, value: Any) -> str | None:
    """The reason against a value of vLLM's for a setting that is there; None: the setting's own parser judges it."""
    if name != "attention_backend" or not isinstance(value, str) or value.upper() == "TORCH_SDPA":
        return None
    return _KERNELS if value.isupper() or value in _BACKENDS else None
