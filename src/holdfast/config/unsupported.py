"""vLLM's settings (0.8 to 0.32) that would change answers or promise what is not there: why each is refused, and which
of their values are not.

Data, and the rule of what asks for nothing. Knows neither flags nor files; which settings there are is `engine`'s and
`server`'s to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.config.tuning import TUNING
from holdfast.errors import ConfigurationError

NOT_WITH_RANKS = "HF138"
RANK_GPUS = "HOLDFAST_RANK_GPUS"
"""The visible GPU of each rank, by its place: 0,1, which is what ranks have without it. One may be named for several
ranks, which then share it: that shows whether they are right, and is slow. No setting: it is about this machine."""

_NOT_DIVIDED = "contexts are not divided over devices, and the number of ranks stays as it is"
_ENGINES_HERE = "engines of -dp are processes of this machine, numbered from 0"
_OWN_BALANCER = (
    "all engines of -dp are behind one API; for a balancer of your own start a server for each, without -dp, and with "
    "CUDA_VISIBLE_DEVICES on GPUs"
)
_TEXT_ONLY = "only text input and output are supported"
_NO_CODE = "code named in a setting is never run"
_AS_IT_IS = "a model's config.json is used; see hf_overrides"
_POOLED = "embeddings are the last token's hidden state, normalized to length 1"
_NO_MOE_CHOICE = "experts run on one device, with one implementation"
_PLACED_ONCE = "experts stay on the rank that they were placed on, each on one; see --expert-placement-strategy"
_NO_TRACES = "tracing is not supported; /metrics and the access log have the times of each request"
_FORMS = "there is one structured output backend; see structured_outputs_config, and structured_outputs in a request"


def _each(reason: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), reason)


def _names(written: str) -> frozenset[str]:
    return frozenset(written.split())


ENGINE: Mapping[str, str] = {
    "quantization_config": "a checkpoint's own is read; --quantization fp8 and int4 have no options",
    "quantization_param_path": "scales are read from the checkpoint",
    "kv_cache_dtype_skip_layers": "all layers keep keys and values in one type; see kv_cache_dtype",
    **_each(
        _NOT_DIVIDED,
        "decode_context_parallel_size prefill_context_parallel_size enable_elastic_ep elastic_ep_max_dp_size "
        "enable_scale_out",
    ),
    **_each(_OWN_BALANCER, "data_parallel_rank data_parallel_external_lb data_parallel_multi_port_external_lb"),
    **_each(_ENGINES_HERE, "data_parallel_start_rank data_parallel_backend"),
    **_each("it is called --distributed-executor-backend ray", "worker_use_ray engine_use_ray"),
    "device_ids": "devices that CUDA_VISIBLE_DEVICES shows are used, by ranks from the first on",
    **_each(_TEXT_ONLY, "mm_encoder_only ec_transfer_config ec_manager_config"),
    "model_class_overrides": "code in a model folder is never run",
    **_each(_NO_CODE, "logits_processors logits_processor_pattern worker_cls worker_extension_cls scheduler_cls "
                      "io_processor_plugin"),
    **_each(_AS_IT_IS, "hf_config_path config_format diffusion_config engram_config"),
    "tokenizer_revision": "name the tokenizer by a folder or file, or pin the model with revision",
    "hf_token": "HF_TOKEN in the environment is read",
    "weight_transfer_config": "weights are read once, from files",
    "logprobs_mode": "log-probabilities are those of the raw logits (raw_logprobs)",
    **_each(_PLACED_ONCE, "enable_eplb eplb_config num_redundant_experts"),
    **_each(_NO_MOE_CHOICE, "enable_return_routed_experts enable_moe_shared_loras enable_mixed_moe_lora_format"),
    "disable_sliding_window": "sliding-window layers keep their window, as trained",
    **_each(_POOLED, "pooler_config override_pooler_config"),
    "enable_prompt_embeds": "prompts are text or token ids",
    "kv_transfer_config": "KV blocks stay where they were computed",
    "kv_events_config": "KV block events are not published; /metrics has their figures",
    **_each("whole layers are kept in RAM, or their experts, not tensors by their names; see --gpu-layers, "
            "--cpu-offload-gb, --offload-group-size and --n-cpu-moe", "cpu_offload_params offload_params"),
    "device_memory_utilization": "it is called gpu_memory_utilization",
    **_each("it is called max_queued_requests", "max_num_queued_reqs max_num_queued_tokens"),
    **_each("adapters change layers of the model; they cannot add tokens or heads",
            "max_lora_cls_labels long_lora_scaling_factors lora_target_modules"),
    **_each("only LoRA adapters are supported", "enable_prompt_adapter max_prompt_adapters max_prompt_adapter_token"),
    **_each(_FORMS, "guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties"),
    "reasoning_config": "reasoning is separated from the answer by reasoning_parser",
    **_each(_NO_TRACES, "otlp_traces_endpoint collect_detailed_traces enable_trace_replay"),
    "profiler_config": "a server records no profile; LLM does: start_profile and stop_profile",
    **_each("/metrics has all there is", "custom_histogram_buckets enable_per_request_metrics logging_config"),
    "sleep_preserve_parameter_names": "sleep releases all memory",
    **_each("responses contain tokens, log-probabilities and nothing else from the sampler",
            "return_sampling_mask aux_output_config"),
}  # fmt: skip

SERVER: Mapping[str, str] = {
    "enable_ssl_refresh": "certificates are read once; restart the server, or renew them in a proxy in front",
    **_each(_NO_CODE, "middleware tool_parser_plugin reasoning_parser_plugin"),
    "log_config_file": "there is one log: see --log-level",
    "tool_server": "tools are run by the client",
    "tool_strict_level": "strict in a tool's definition is honoured as given",
    **_each("it speaks HTTP only", "grpc grpc_port"),
    "tokens_only": "see skip_tokenizer_init",
    **_each("it speaks OpenAI's API", "cohere_format cohere_is_reasoning_model anthropic_disabled_thinking_effort "
                                      "fingerprint_mode fingerprint_value"),
}  # fmt: skip

_NO = frozenset({"none", "null", "false", "no", "off", "0", "0.0", ""})
_POOLED_SO = _NO | {
    "{}", '{"pooling_type":"last"}', '{"seq_pooling_type":"last"}', '{"pooling_type":"last","normalize":true}',
    '{"task":"embed"}', '{"pooling_type":"last","use_activation":true}',
}  # fmt: skip
DONE_ANYWAY: Mapping[str, frozenset[str]] = {
    "logprobs_mode": frozenset({"raw_logprobs"}),
    "config_format": frozenset({"auto", "hf"}),
    "worker_cls": frozenset({"auto"}),
    **dict.fromkeys(("pooler_config", "override_pooler_config"), _POOLED_SO),
    # Settings of a server. What an LLM in Python does by itself: it logs neither.
    "disable_log_stats": frozenset({"true", "false"}),
    "disable_log_requests": frozenset({"true", "false"}),
    "data_parallel_backend": frozenset({"mp"}),
    "data_parallel_rank": frozenset(),  # 0 too is one of several servers.
    **dict.fromkeys(("decode_context_parallel_size", "prefill_context_parallel_size"), frozenset({"1"})),
}
"""Values that ask for what is done anyway; a name that is not here asks for nothing with `_NO`."""

SWITCHES = frozenset(
    name
    for name in (*ENGINE, *SERVER, *TUNING)
    if name.startswith(("enable_", "disable_", "use_", "return_", "skip_", "exclude_", "allow_deprecated", "trust_"))
) | _names(
    """async_scheduling fully_sharded_loras log_error_stack grpc language_model_only
    mm_encoder_only mm_device_do_normalize interleave_mm_strings numa_bind dcp_q_replicate data_parallel_hybrid_lb
    data_parallel_external_lb data_parallel_multi_port_external_lb kv_cache_metrics cudagraph_metrics
    aggregate_engine_logging jit_monitor_verbose sleep_mode_offload_cudagraph specialize_active_lora
    scheduler_reserve_full_isl long_prefill_token_threshold_adaptive kv_sharing_fast_prefill swa_bounded_replay
    tokens_only fail_on_environ_validation cohere_is_reasoning_model ray_workers_use_nsight worker_use_ray
    engine_use_ray multi_step_stream_outputs guided_decoding_disable_fallback guided_decoding_disable_any_whitespace
    guided_decoding_disable_additional_properties per_request_spec_decode_metrics"""
)
"""Flags without a value."""
LISTS = _names(
    """cpu_offload_params offload_params
    allowed_media_domains cudagraph_capture_sizes cuda_graph_sizes numa_bind_nodes numa_bind_cpus device_ids
    lora_target_modules ignore_patterns collect_detailed_traces custom_histogram_buckets sleep_preserve_parameter_names
    kv_cache_dtype_skip_layers logits_processors middleware"""
)
"""Flags with any number of them."""
SHORT: Mapping[str, tuple[str, ...]] = {
    "compilation_config": ("-O", "-cc"),
    "speculative_config": ("-sc",),
    "data_parallel_rank": ("-dpn",),
    "data_parallel_start_rank": ("-dpr",),
    "data_parallel_address": ("-dpa",),
    "data_parallel_rpc_port": ("-dpp",),
    "data_parallel_backend": ("-dpb",),
    "decode_context_parallel_size": ("-dcp",),
    "prefill_context_parallel_size": ("-pcp",),
    "attention_config": ("-ac",),
}
"""Further spellings."""


def asks_nothing(name: str, value: Any) -> bool:
    """Whether a setting that is refused was given as what is done anyway, in whatever form it was written."""
    if isinstance(value, list | tuple):
        return len(value) == 0
    if isinstance(value, dict):
        return not any(value.values())
    written = str(value).lower().replace(" ", "")
    return written in DONE_ANYWAY.get(name, _NO) or value is None


def check_engines_here(engines: int, local: int | None) -> None:
    """`local`: how many of them are of this machine; None: nothing was said."""
    if local not in (None, engines):
        raise ConfigurationError(
            f"data_parallel_size_local is {local}, of {engines}: engines are on one machine so far",
            needed=f"{engines}, as data_parallel_size",
            fix="leave data_parallel_size_local out",
            field="data_parallel_size_local",
        )
