"""Real configs, cut to the fields that give a model its shape, against the parameter counts that were published.

The counts are those of the hub's safetensors metadata or of model cards; tied heads count once.
"""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.models import ModelSpec, catalogue, describe_config


def build(architecture: str, numbers: str, **more: Any) -> ModelSpec:
    """`numbers`: hidden, intermediate, layers, heads, kv heads, vocabulary."""
    names = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    values = [int(number) for number in numbers.split()]
    config = dict(zip((*names, "vocab_size"), values, strict=True))
    return describe_config({"architectures": [architecture], "max_position_embeddings": 131_072, **config, **more})


TIED: dict[str, Any] = {"tie_word_embeddings": True}
DEEPSEEK_V3: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 2048,
    "first_k_dense_replace": 3,
    "num_nextn_predict_layers": 1,
}
DEEPSEEK_V2_LITE: dict[str, Any] = {
    **DEEPSEEK_V3,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": None,
}
SIGLIP: dict[str, Any] = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "image_size": 896,
    "patch_size": 14,
    "vision_use_head": False,
}


def gemma3(**text: Any) -> ModelSpec:
    return describe_config(
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": SIGLIP}
    )


LLAMA, QWEN2, QWEN3, GEMMA2 = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Gemma2ForCausalLM"
COUNTS: list[tuple[str, ModelSpec, int]] = [
    ("Llama-2-7B", build(LLAMA, "4096 11008 32 32 32 32000"), 6_738_415_616),
    ("Llama-2-13B", build(LLAMA, "5120 13824 40 40 40 32000"), 13_015_864_320),
    ("Llama-2-70B", build(LLAMA, "8192 28672 80 64 8 32000"), 68_976_648_192),
    ("Llama-3.1-8B", build(LLAMA, "4096 14336 32 32 8 128256"), 8_030_261_248),
    ("Llama-3.1-70B", build(LLAMA, "8192 28672 80 64 8 128256"), 70_553_706_496),
    ("Llama-3.1-405B", build(LLAMA, "16384 53248 126 128 8 128256"), 405_853_388_800),
    ("Llama-3.2-1B", build(LLAMA, "2048 8192 16 32 8 128256", **TIED), 1_235_814_400),
    ("Llama-3.2-3B", build(LLAMA, "3072 8192 28 24 8 128256", **TIED), 3_212_749_824),
    ("SmolLM2-135M", build(LLAMA, "576 1536 30 9 3 49152", **TIED), 134_515_008),
    ("Yi-34B", build(LLAMA, "7168 20480 60 56 8 64000"), 34_388_917_248),
    ("Mistral-7B-v0.1", build("MistralForCausalLM", "4096 14336 32 32 8 32000"), 7_241_732_096),
    ("Mistral-Nemo", build("MistralForCausalLM", "5120 14336 40 32 8 131072", head_dim=128), 12_247_782_400),
    ("SmolLM3-3B", build("SmolLM3ForCausalLM", "2048 11008 36 16 4 128256"), 3_075_098_624),
    ("Mixtral-8x7B", build("MixtralForCausalLM", "4096 14336 32 32 8 32000", num_local_experts=8), 46_702_792_704),
    (
        "Phi-3.5-MoE",
        build(
            "PhiMoEForCausalLM",
            "4096 6400 32 32 8 32064",
            num_local_experts=16,
            attention_bias=True,
            lm_head_bias=True,
        ),
        41_873_153_344,
    ),
    ("Qwen2.5-0.5B", build(QWEN2, "896 4864 24 14 2 151936", **TIED), 494_032_768),
    ("Qwen2.5-7B", build(QWEN2, "3584 18944 28 28 4 152064"), 7_615_616_512),
    ("Qwen2.5-72B", build(QWEN2, "8192 29568 80 64 8 152064"), 72_706_203_648),
    ("Qwen3-0.6B", build(QWEN3, "1024 3072 28 16 8 151936", head_dim=128, **TIED), 596_049_920),
    ("Qwen3-8B", build(QWEN3, "4096 12288 36 32 8 151936", head_dim=128), 8_190_735_360),
    (
        "Qwen3-30B-A3B",
        build(
            "Qwen3MoeForCausalLM",
            "2048 6144 48 32 4 151936",
            head_dim=128,
            num_experts=128,
            num_experts_per_tok=8,
            moe_intermediate_size=768,
        ),
        30_532_122_624,
    ),
    ("gemma-2b", build("GemmaForCausalLM", "2048 16384 18 8 1 256000", head_dim=256), 2_506_172_416),
    ("gemma-2-9b", build(GEMMA2, "3584 14336 42 16 8 256000", head_dim=256), 9_241_705_984),
    ("gemma-2-27b", build(GEMMA2, "4608 36864 46 32 16 256000", head_dim=128), 27_227_128_320),
    (
        "gemma-3-1b",
        build("Gemma3ForCausalLM", "1152 6912 26 4 1 262144", head_dim=256, sliding_window=512),
        999_885_952,
    ),
    (
        "gemma-3-4b",
        gemma3(hidden_size=2560, intermediate_size=10240, num_hidden_layers=34, sliding_window=1024),
        4_300_079_472,
    ),
    ("phi-2", build("PhiForCausalLM", "2560 10240 32 32 32 51200", partial_rotary_factor=0.4), 2_779_683_840),
    ("Phi-3-mini", build("Phi3ForCausalLM", "3072 8192 32 32 32 32064"), 3_821_079_552),
    ("phi-4", build("Phi3ForCausalLM", "5120 17920 40 40 10 100352"), 14_659_507_200),
    (
        "DeepSeek-V2-Lite",
        build("DeepseekV2ForCausalLM", "2048 10944 27 16 16 102400", **DEEPSEEK_V2_LITE),
        15_706_484_224,
    ),
    ("DeepSeek-V3", build("DeepseekV3ForCausalLM", "7168 18432 61 128 128 129280", **DEEPSEEK_V3), 671_026_419_200),
    (
        "gpt-oss-20b",
        build("GptOssForCausalLM", "2880 2880 24 64 8 201088", head_dim=64, num_local_experts=32),
        20_914_757_184,
    ),
    ("Command-R", build("CohereForCausalLM", "8192 22528 40 64 64 256000"), 34_980_831_232),
    ("starcoder2-3b", build("Starcoder2ForCausalLM", "3072 12288 30 24 2 49152"), 3_030_371_328),
    ("stablelm-2-1.6b", build("StableLmForCausalLM", "2048 5632 24 32 32 100352", use_qkv_bias=True), 1_644_515_328),
    ("OLMo-2-7B", build("Olmo2ForCausalLM", "4096 11008 32 32 32 100352"), 7_298_617_344),
    (
        "OLMoE-1B-7B",
        build("OlmoeForCausalLM", "2048 1024 16 16 16 50304", num_experts=64, num_experts_per_tok=8),
        6_919_161_856,
    ),
    ("internlm2.5-7b", build("InternLM2ForCausalLM", "4096 14336 32 32 8 92544"), 7_737_708_544),
    ("Baichuan2-7B", build("BaichuanForCausalLM", "4096 11008 32 32 32 125696"), 7_505_973_248),
    ("EXAONE-3.5-7.8B", build("ExaoneForCausalLM", "4096 14336 32 32 8 102400"), 7_818_448_896),
    (
        "gpt2",
        describe_config(
            {"architectures": ["GPT2LMHeadModel"], "n_embd": 768, "n_head": 12, "n_layer": 12}
            | {"n_positions": 1024, "vocab_size": 50257}
        ),
        124_439_808,
    ),
    (
        "falcon-7b",
        describe_config(
            {"architectures": ["FalconForCausalLM"], "hidden_size": 4544, "num_attention_heads": 71}
            | {"num_hidden_layers": 32, "vocab_size": 65024, "multi_query": True}
        ),
        6_921_720_704,
    ),
    (
        "bloom-560m",
        describe_config(
            {"architectures": ["BloomForCausalLM"], "hidden_size": 1024, "n_layer": 24, "n_head": 16}
            | {"vocab_size": 250880}
        ),
        559_214_592,
    ),
    (
        "glm-4-9b-chat",
        describe_config(
            {"architectures": ["ChatGLMModel"], "hidden_size": 4096, "ffn_hidden_size": 13696, "num_layers": 40}
            | {"num_attention_heads": 32, "multi_query_attention": True, "multi_query_group_num": 2}
            | {"kv_channels": 128, "padded_vocab_size": 151552, "seq_length": 131072, "add_qkv_bias": True}
        ),
        9_399_951_360,
    ),
    ("pythia-1.4b", build("GPTNeoXForCausalLM", "2048 8192 24 16 16 50304", rotary_pct=0.25), 1_414_647_808),
]


@pytest.mark.parametrize(("spec", "published"), [case[1:] for case in COUNTS], ids=[case[0] for case in COUNTS])
def test_parameters_are_as_published(spec: ModelSpec, published: int) -> None:
    assert spec.parameters == published


def named(name: str) -> ModelSpec:
    return next(spec for known, spec, _ in COUNTS if known == name)


@pytest.mark.parametrize(
    ("name", "active"),
    [
        ("Llama-3.1-8B", 8_030_261_248),
        ("Mixtral-8x7B", 12_879_925_248),
        ("Qwen3-30B-A3B", 3_353_032_704),
        ("DeepSeek-V3", 37_552_297_472),
        ("gpt-oss-20b", 4_187_440_704),
    ],
)
def test_active_parameters(name: str, active: int) -> None:
    """13B, 3.3B, 37B and (with embeddings, which the card leaves out) 3.6B by the model cards."""
    assert named(name).active_parameters == active


def growing_elements(spec: ModelSpec) -> int:
    """KV of one more token once all windows are full."""
    return sum(spec.kv_elements(layer) for layer in spec.layers if layer.window is None)


def fixed_elements(spec: ModelSpec) -> int:
    """What a sequence holds at most in windows, and always in recurrent states."""
    windows = sum(layer.window * spec.kv_elements(layer) for layer in spec.layers if layer.window is not None)
    states = [layer.state for layer in spec.layers if layer.state is not None]
    return windows + sum(state.recurrent_elements + state.convolution_elements for state in states)


@pytest.mark.parametrize(
    ("name", "per_token", "fixed"),
    [
        ("Llama-3.1-8B", 128 * 1024 // 2, 0),
        ("Llama-3.1-70B", 320 * 1024 // 2, 0),
        ("Mistral-7B-v0.1", 0, 4096 * 65_536),
        ("DeepSeek-V3", 61 * 576, 0),
        ("gpt-oss-20b", 12 * 2 * 8 * 64, 12 * 128 * 2 * 8 * 64),
        ("gemma-2-9b", 21 * 2 * 8 * 256, 21 * 4096 * 2 * 8 * 256),
        ("gemma-3-4b", 5 * 2 * 4 * 256, 29 * 1024 * 2 * 4 * 256),
        ("falcon-7b", 32 * 2 * 64, 0),
    ],
)
def test_kv_elements(name: str, per_token: int, fixed: int) -> None:
    spec = named(name)
    assert (growing_elements(spec), fixed_elements(spec)) == (per_token, fixed)


@pytest.mark.parametrize(
    ("name", "element_bytes", "per_token"),
    [
        ("deepseek-v3", 2, 61 * 1152), ("deepseek-v3", 1, 61 * 576),
        # Public engines keep 132 bytes a token of the index (128 of FP8 and a scale), and in FP8 656 of the latent.
        ("deepseek-v3.2", 2, 61 * (1152 + 132)), ("deepseek-v3.2", 1, 61 * (656 + 132)),
        ("glm-5", 2, 78 * (1152 + 132)), ("glm-5", 1, 78 * (656 + 132)),
    ],
)  # fmt: skip
def test_kv_bytes_of_latents_and_their_index(name: str, element_bytes: int, per_token: int) -> None:
    assert describe_config(catalogue.find(name).config).kv_bytes_per_token(element_bytes) == per_token


def test_draft_layers_are_counted_apart() -> None:
    """14B of multi-token prediction: the embedding and the head are stored once more with it."""
    spec = named("DeepSeek-V3")
    draft = sum(tensor.elements for tensor in spec.tensors if tensor.part == "draft")
    assert draft == 13_463_426_304
    assert sum(tensor.elements for tensor in spec.tensors) == spec.parameters + draft


def test_a_recurrent_layer_costs_the_same_however_long_the_sequence() -> None:
    more = {"num_experts": 512, "num_experts_per_tok": 10, "moe_intermediate_size": 512}
    shared = {"shared_expert_intermediate_size": 512}
    spec = build("Qwen3NextForCausalLM", "2048 5120 48 16 2 151936", head_dim=256, **more, **shared)
    assert spec.parameters == 79_674_391_296
    assert [layer.kind for layer in spec.layers[:4]] == ["state", "state", "state", "full"]
    assert growing_elements(spec) == 12 * 2 * 2 * 256
    assert fixed_elements(spec) == 36 * (32 * 128 * 128 + 8192 * 3)


def test_llama4_attends_within_chunks() -> None:
    spec = build("Llama4ForCausalLM", "5120 8192 48 40 8 202048", intermediate_size_mlp=16384, num_local_experts=16)
    assert [layer.window for layer in spec.layers[:4]] == [8192, 8192, 8192, None]
    assert spec.layers[0].chunked
    assert not spec.layers[3].chunked
    assert growing_elements(spec) == 12 * 2 * 8 * 128
