"""One model computed by several ranks, held against transformers: whatever the division, tokens are those of the model,
with chunks, windows, prefixes that are found again, and preemptions."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy_runs import assert_model_s_answers, few_answers, layout_of, make_core, tight_blocks
from quantized_files import write_quantized
from quantized_formats import FORMATS
from safetensors.torch import load_file, save_file
from thread_ranks import ThreadRanks, assert_same_of_ranks
from tiny_gguf import write_tiny_gguf

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import safetensors
from holdfast.checkpoints.formats.gguf import read_header
from holdfast.execution import native
from holdfast.execution.runner import Runner, RunnerLimits
from holdfast.execution.weights.load import load_weights
from holdfast.models import ModelSpec, from_config, from_gguf
from holdfast.models.shards import shard_spec
from holdfast.planner.sizing.shards import divide

pytestmark = pytest.mark.skipif(not native.available(), reason="ranks wait for one another by compiled code")

EXPERTS = {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
GEMMA3: dict[str, Any] = {
    "head_dim": 24,
    "sliding_window": 9,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-bias": ("Llama", {"mlp_bias": True, "attention_bias": True}),
    "nine-heads": ("Llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}),
    "qwen2": ("Qwen2", {"num_attention_heads": 14, "hidden_size": 112, "tie_word_embeddings": True}),
    "gemma3": ("Gemma3", GEMMA3),
    "phi3": ("Phi3", {}),
    "olmo2": ("Olmo2", {"num_key_value_heads": 2}),
    "granite": ("Granite", {"embedding_multiplier": 3.0, "residual_multiplier": 0.4, "logits_scaling": 1.7}),
    "starcoder2": ("Starcoder2", {"norm_epsilon": 1e-4}),
    "qwen3-moe": ("Qwen3Moe", {**EXPERTS, "head_dim": 24, "norm_topk_prob": True, "mlp_only_layers": [0]}),
    "qwen2-moe": ("Qwen2Moe", {**EXPERTS, "shared_expert_intermediate_size": 40, "decoder_sparse_step": 2}),
}
SIZES = {
    "llama-bias": (2, 4),
    "nine-heads": (2, 3, 4, 5),
    "qwen2": (2, 4),
    "gemma3": (2, 4),
    "olmo2": (2, 4),
    "qwen3-moe": (2, 4),
}
DEAR = {("nine-heads", 3), ("nine-heads", 4), ("nine-heads", 5), ("olmo2", 2)}
"""Whose division others of the same family show too."""


@pytest.mark.parametrize(
    ("name", "size"),
    [
        pytest.param(name, size, marks=pytest.mark.long if (name, size) in DEAR else ())
        for name in FAMILIES
        for size in SIZES.get(name, (2,))
    ],
)
def test_ranks_say_what_the_model_says(name: str, size: int, oracles: Callable[..., Any]) -> None:
    architecture, settings = FAMILIES[name]
    oracle = oracles(architecture, **settings)
    blocks = tight_blocks(oracle.spec)
    limits = RunnerLimits(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=100)
    ranks = ThreadRanks(oracle.spec, oracle.checkpoint, limits, blocks, size=size)
    assert_model_s_answers(make_core(ranks.runner, ranks.layout, blocks, sequences=4, length=100), oracle)
    whole = load_weights(oracle.spec, oracle.checkpoint(), dtype=torch.float32, device=torch.device("cpu"), expand=True)
    # Each has its share, and what is small and needed by all.
    assert max(ranks.weights_bytes) < 0.75 * whole.nbytes
    ranks.close()


def test_ranks_that_compute_other_bits_choose_the_same_experts(oracles: Callable[..., Any]) -> None:
    """As with other numbers of threads: of experts that are all but equal, all ranks take those of the first."""
    oracle = oracles("Qwen3Moe", **{**EXPERTS, "head_dim": 24, "norm_topk_prob": True})
    limits = RunnerLimits(max_num_seqs=2, max_num_batched_tokens=24, max_model_len=64)

    def said(turned: bool) -> list[list[int]]:
        ranks = ThreadRanks(oracle.spec, oracle.checkpoint, limits, 60, size=2)
        with torch.inference_mode():
            for layer in ranks.runners[1]._decoder.weights.layers if turned else ():
                router = layer.mlp.router
                getattr(router, "_router", router).weight.neg_()
        found = few_answers(make_core(ranks.runner, ranks.layout, 60))
        ranks.close()
        return found

    assert said(turned=True) == said(turned=False)


@pytest.mark.parametrize(("expand", "compiled"), [(False, True), (False, False), (True, False)])
def test_blocks_of_gguf_are_divided(expand: bool, compiled: bool, tmp_path: Path) -> None:
    """Several kinds of blocks, heads in interleaved order, an MLP of three blocks for two ranks."""
    write_tiny_gguf(tmp_path / "tiny.gguf")
    header = read_header(tmp_path / "tiny.gguf")
    spec = from_gguf(header.metadata, header.tensors)
    assert_same_of_ranks(spec, lambda: Checkpoint(header.tensors, "gguf"), size=2, expand=expand, compiled=compiled)


def test_blocks_of_gguf_are_divided_among_four(tmp_path: Path) -> None:
    """Two KV heads on two of them each."""
    write_tiny_gguf(tmp_path / "tiny.gguf", hidden=128, inner=160)
    header = read_header(tmp_path / "tiny.gguf")
    spec = from_gguf(header.metadata, header.tensors)
    assert_same_of_ranks(spec, lambda: Checkpoint(header.tensors, "gguf"), size=4, expand=False, compiled=True)


def test_codes_are_divided_among_four(oracles: Callable[..., Any], tmp_path: Path) -> None:
    oracle = oracles("Llama", hidden_size=128, head_dim=32, intermediate_size=192, num_hidden_layers=2)
    write_quantized(oracle.folder, tmp_path, FORMATS["awq"])
    spec = from_config(json.loads((tmp_path / "config.json").read_text()))

    def opened() -> Checkpoint:
        return Checkpoint(safetensors.read_headers(sorted(tmp_path.glob("*.safetensors"))), "safetensors")

    assert_same_of_ranks(spec, opened, size=4, expand=False, compiled=True)


DIVIDED = (
    "awq", "gptq", "w4a16-asymmetric", "w8a16", "w8a8-dynamic", "w8a8-static", "w8a8-tensor-zeros", "fp8-channel",
    "fp8", "fbgemm-bounded", "fp8-weights-only", "fp8-tensor-static", "fp8-block", "fp8-static", "fp8-powers", "nf4",
    "llm-int8", "gptq-ordered", "gptq-8-asymmetric-ordered", "w4a16-ordered",
)  # fmt: skip
USUAL = {
    ("awq", True),
    ("gptq-ordered", True),
    ("gptq-ordered", False),
    ("w8a8-dynamic", True),
    ("w8a8-dynamic", False),
    ("fp8-channel", True),
    ("fp8-powers", True),
}


@pytest.mark.parametrize(
    ("name", "compiled"),
    [
        pytest.param(name, compiled, marks=() if (name, compiled) in USUAL else pytest.mark.long)
        for name in DIVIDED
        for compiled in (True, False)
    ],
)
def test_codes_and_their_scales_are_divided(
    name: str, compiled: bool, oracles: Callable[..., Any], tmp_path: Path
) -> None:
    """Three groups of an MLP's columns for two ranks. What a row of inputs is divided by is the whole row's."""
    oracle = oracles("Llama", hidden_size=128, intermediate_size=192, num_hidden_layers=2)
    write_quantized(oracle.folder, tmp_path, FORMATS[name])
    spec = from_config(json.loads((tmp_path / "config.json").read_text()))

    def opened() -> Checkpoint:
        return Checkpoint(safetensors.read_headers(sorted(tmp_path.glob("*.safetensors"))), "safetensors")

    made = FORMATS[name]
    rounded = made.inputs != "plain"
    ordered = name.endswith("-ordered")  # Down and o take inputs of both ranks, which they gather.
    asks = ordered or (rounded and made.static is None and not made.input_group)
    assert_same_of_ranks(spec, opened, size=2, expand=False, compiled=compiled, rounded=rounded, in_python=asks)


@pytest.mark.parametrize(("size", "compiled"), [(2, False), pytest.param(2, True, marks=pytest.mark.long), (4, True)])
def test_columns_in_act_order_mean_what_they_mean_to_one(
    size: int, compiled: bool, oracles: Callable[..., Any], tmp_path: Path
) -> None:
    """Groups of o and down are of inputs that lie on all ranks: tokens are those of the plain numbers in float32."""
    oracle = oracles("Llama", hidden_size=128, head_dim=32, intermediate_size=192, num_hidden_layers=2)
    means = write_quantized(oracle.folder, tmp_path / "codes", FORMATS["gptq-ordered"])
    spec = from_config(json.loads((tmp_path / "codes" / "config.json").read_text()))
    source = {name: one for file in oracle.folder.glob("*.safetensors") for name, one in load_file(file).items()}
    (tmp_path / "plain").mkdir()
    numbers = source | {name: torch.from_numpy(value).contiguous() for name, value in means.items()}
    save_file(numbers, tmp_path / "plain" / "model.safetensors", metadata={"format": "pt"})

    def opened(folder: str) -> Checkpoint:
        return Checkpoint(safetensors.read_headers(sorted((tmp_path / folder).glob("*.safetensors"))), "safetensors")

    limits = RunnerLimits(max_num_seqs=2, max_num_batched_tokens=24, max_model_len=64)
    plain = load_weights(oracle.spec, opened("plain"), dtype=torch.float32, device=torch.device("cpu"), expand=True)
    one = Runner(oracle.spec, plain, layout_of(oracle.spec), limits, torch.device("cpu"))
    one.back_kv(60)
    loading = {"expand": False, "compiled": compiled}
    ranks = ThreadRanks(spec, lambda: opened("codes"), limits, 60, size=size, **loading)
    orders = [runner._decoder.weights.layers[0].mlp.down.order for runner in ranks.runners]
    assert torch.equal(torch.cat(orders).sort().values, torch.arange(192, dtype=torch.int32))
    assert any(int(order.max() - order.min()) >= len(order) for order in orders), "inputs of other ranks"
    assert few_answers(make_core(ranks.runner, ranks.layout, 60)) == few_answers(make_core(one, one.layout, 60))
    ranks.close()


@pytest.mark.long
@pytest.mark.parametrize("name", ["fp8-blocks", "w8a8-static", "awq"])
def test_codes_of_experts_are_divided(name: str, oracles: Callable[..., Any], tmp_path: Path) -> None:
    """Where what comes into an expert's last matrix has a scale for every group of columns, or a stored one."""
    oracle = oracles("Qwen3Moe", **{**EXPERTS, "moe_intermediate_size": 96, "head_dim": 32, "num_hidden_layers": 2})
    write_quantized(oracle.folder, tmp_path, FORMATS[name])
    spec = from_config(json.loads((tmp_path / "config.json").read_text()))

    def opened() -> Checkpoint:
        return Checkpoint(safetensors.read_headers(sorted(tmp_path.glob("*.safetensors"))), "safetensors")

    rounded = FORMATS[name].inputs != "plain"
    assert_same_of_ranks(spec, opened, size=2, expand=False, compiled=True, rounded=rounded)


@pytest.mark.parametrize("made", ["int4", "fp8"])
def test_weights_are_quantized_by_ranks_as_by_one(made: str, oracles: Callable[..., Any]) -> None:
    """While they are loaded: scales are of whole rows and groups, of which a rank has some columns."""
    oracle = oracles("Llama", hidden_size=128, head_dim=64, intermediate_size=192, num_hidden_layers=2)
    loading = {"quantize": made, "compiled": True, "expand": False}
    asks = made == "fp8"
    assert_same_of_ranks(oracle.spec, oracle.checkpoint, size=2, rounded=asks, in_python=asks, **loading)


@pytest.mark.parametrize("name", ["awq", "w8a8-dynamic"])
def test_dummies_of_codes_are_parts_of_those_of_one(name: str) -> None:
    settings = {"architectures": ["LlamaForCausalLM"], "vocab_size": 300, "hidden_size": 128, "intermediate_size": 192}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    spec = from_config({**settings, **heads, "quantization_config": FORMATS[name].config})
    shards = divide(spec, None, 2)

    def matrices(own: ModelSpec) -> list[torch.Tensor]:
        """Of o, down and qkv, as numbers."""
        weights = load_weights(own, None, dtype=torch.float32, device=torch.device("cpu"), expand=False, whole=spec)
        (layer,) = weights.layers
        found = []
        for linear in (layer.o, layer.mlp.down, layer.qkv):
            matrix = getattr(linear, "base", linear).matrix
            found.append(torch.empty((matrix.rows, matrix.columns)))
            matrix.dequantize(0, matrix.rows, found[-1])
        return found

    whole, parts = matrices(spec), [matrices(shard_spec(spec, shard)) for shard in shards]
    for place in (0, 1):
        assert torch.equal(torch.cat([part[place] for part in parts], 1), whole[place])
    queries = [torch.split(one[2], [2 * rows, rows, rows]) for one in parts for rows in [len(one[2]) // 4]]
    assert torch.equal(torch.cat([torch.cat(of_all) for of_all in zip(*queries, strict=True)]), whole[2])
