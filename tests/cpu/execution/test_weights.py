"""Loading: formats, turns, fusions and quantized layouts end in the same model; dummies are distinct and stable."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
import transformers

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import gguf as gguf_files
from holdfast.checkpoints.formats import safetensors
from holdfast.execution import native
from holdfast.execution.layers.linear import QuantizedLinear, StackedLinear
from holdfast.execution.runner import Runner, RunnerLimits
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import load_weights
from holdfast.execution.weights.products_by import torch_share
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.models import ModelSpec, from_config, from_gguf
from holdfast.records import Row, SamplingParams, SequenceStart, StepPlan, TableWrite

CPU = torch.device("cpu")


def interleave(weight: numpy.ndarray, heads: int) -> numpy.ndarray:
    """Rows as GGUF keeps llama's q and k: the halves of a head taken in turns."""
    halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_gguf(oracle: Any, path: Path, layouts: Callable[[str], str]) -> None:
    config = oracle.model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(512)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(config.vocab_size)
    state = {name: value.numpy() for name, value in oracle.model.state_dict().items()}
    for tensor in oracle.spec.tensors:
        values = state[tensor.hf_name]
        if tensor.gguf_turn == "unpermute_rope":
            values = interleave(values, tensor.heads)
        layout = "F32" if values.ndim == 1 else layouts(tensor.name)
        kind = gguf.GGMLQuantizationType[layout]
        data = gguf.quants.quantize(values, kind)
        writer.add_tensor(tensor.gguf_name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def logits_after(spec: ModelSpec, weights: Weights, prompt: list[int]) -> torch.Tensor:
    """Log-probabilities after a prompt, by the runner: [vocabulary] in the order of ids."""
    groups, places = form_groups([layer.window for layer in spec.layers])
    layout = KVLayout(
        groups=groups,
        block_tokens=16,
        layers_per_page=places,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=weights.dtype.itemsize,
    )
    limits = RunnerLimits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64)
    runner = Runner(spec, weights, layout, limits, CPU)
    runner.back_kv(5)
    captured = {}
    original = runner._sampler.sample

    def capture(logits: torch.Tensor, *rest: Any) -> Any:
        captured["logits"] = logits.clone()
        return original(logits, *rest)

    runner._sampler.sample = capture  # type: ignore[method-assign]
    runner.execute(
        StepPlan(
            step_id=0,
            starts=[SequenceStart(0, "r", prompt, len(prompt), SamplingParams(temperature=0.0))],
            table_writes=[TableWrite(0, 0, 0, [1, 2, 3])],
            rows=[Row(0, 0, len(prompt), True)],
        )
    )
    return captured["logits"][0].log_softmax(-1)


PROMPT = [(index * 37) % 300 for index in range(33)]
MIXED = {"q": "Q4_0", "k": "Q8_0", "v": "F16", "embed": "Q8_0", "gate": "Q4_1", "up": "BF16", "head": "Q4_1"}
FILES: dict[str, Callable[[str], str]] = {
    "F32": lambda name: "F32",
    "F16": lambda name: "F16",
    "BF16": lambda name: "BF16",
    "Q8_0": lambda name: "Q8_0",
    "Q4_0": lambda name: "Q4_0",
    "Q4_1": lambda name: "Q4_1",
    "mixed": lambda name: MIXED.get(name.rpartition(".")[2], "Q8_0"),
}


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("tied", [False, True], ids=["head", "tied"])
def test_gguf_models_equal_transformers_with_the_same_numbers(
    file: str, tied: bool, oracles: Callable[..., Any], tmp_path: Path
) -> None:
    """Expanded or kept quantized; the oracle gets the very numbers that the file holds."""
    oracle = oracles("Llama", tie_word_embeddings=tied, attention_bias=True)
    write_gguf(oracle, tmp_path / "model.gguf", FILES[file])
    header = gguf_files.read_header(tmp_path / "model.gguf")
    spec = from_gguf(header.metadata, header.tensors)
    expected = as_stored(oracle, FILES[file])
    for expand in (True, False):
        checkpoint = Checkpoint(header.tensors, "gguf")
        weights = load_weights(spec, checkpoint, dtype=torch.float32, device=CPU, expand=expand)
        torch.testing.assert_close(logits_after(spec, weights, PROMPT), expected, atol=1e-4, rtol=0)
        kept = isinstance(weights.embed, QuantizedLinear)
        assert kept == (file.startswith(("Q", "mixed")) and not expand)
        assert (weights.head is weights.embed) == tied
        if file == "mixed" and not expand:
            assert isinstance(weights.layers[0].qkv, StackedLinear)


@pytest.mark.skipif(not native.available(), reason="no compiled kernels")
def test_which_part_of_the_weights_torch_multiplies(oracles: Callable[..., Any], tmp_path: Path) -> None:
    """It decides whose threads compute: none where all lie in blocks, all where none does."""
    oracle, shares = oracles("Llama"), []
    kinds: list[Callable[[str], str]] = [FILES["F32"], FILES["Q8_0"], lambda name: "F32" if "down" in name else "Q8_0"]
    for number, layouts in enumerate(kinds):
        path = tmp_path / f"{number}.gguf"
        write_gguf(oracle, path, layouts)
        header = gguf_files.read_header(path)
        spec, checkpoint = from_gguf(header.metadata, header.tensors), Checkpoint(header.tensors, "gguf")
        weights = load_weights(spec, checkpoint, dtype=torch.float32, device=CPU, expand=False, compiled=True)
        shares.append(torch_share(weights))
    dense, blocks, mixed = shares
    assert (dense, blocks) == (1.0, 0.0)
    assert 0.02 < mixed < 1.0


@torch.inference_mode()
def as_stored(oracle: Any, layouts: Callable[[str], str]) -> torch.Tensor:
    """The oracle's answer with its matrices rounded as the file rounds them."""
    state = {name: value.clone() for name, value in oracle.model.state_dict().items()}
    rounded = dict(state)
    for tensor in oracle.spec.tensors:
        values = state[tensor.hf_name].numpy()
        if values.ndim == 2:
            kind = gguf.GGMLQuantizationType[layouts(tensor.name)]
            rounded[tensor.hf_name] = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(values, kind), kind))
    if oracle.spec.tied_embeddings:
        rounded["lm_head.weight"] = rounded["model.embed_tokens.weight"]
    try:
        oracle.model.load_state_dict(rounded)
        return oracle.logits(PROMPT)[-1].log_softmax(-1)
    finally:
        oracle.model.load_state_dict(state)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_checkpoints_and_activations(
    dtype: torch.dtype, oracles: Callable[..., Any], tmp_path: Path
) -> None:
    """Sharded files in a half type: expanded to float32 exactly, computed in the type itself to its precision."""
    model = copy.deepcopy(oracles("Llama").model).to(dtype)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    exact = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    with torch.inference_mode():
        expected = exact(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)
    spec = from_config(json.loads((tmp_path / "config.json").read_text()))
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 1
    for compute, pack, tolerance in ((torch.float32, False, 1e-4), (torch.float32, True, 1e-4), (dtype, False, 0.5)):
        checkpoint = Checkpoint(safetensors.read_headers(files), "safetensors")
        weights = load_weights(spec, checkpoint, dtype=compute, device=CPU, expand=True, pack=pack)
        found = logits_after(spec, weights, PROMPT)
        torch.testing.assert_close(found.float(), expected, atol=tolerance, rtol=0)


def test_progress_counts_every_tensor_once(oracles: Callable[..., Any]) -> None:
    oracle = oracles("Llama")
    seen: list[tuple[int, int]] = []
    weights = load_weights(
        oracle.spec,
        oracle.checkpoint(),
        dtype=torch.float32,
        device=CPU,
        expand=True,
        progress=lambda done, total: seen.append((done, total)),
    )
    total = len(oracle.spec.tensors)
    assert seen == [(done, total) for done in range(1, total + 1)]
    assert weights.nbytes == 4 * oracle.spec.parameters


def dummy(spec: ModelSpec) -> Weights:
    return load_weights(spec, None, dtype=torch.float32, device=CPU, expand=True)


@pytest.mark.parametrize("tied", [False, True])
def test_dummy_weights_are_stable_distinct_and_spread(tied: bool, oracles: Callable[..., Any]) -> None:
    spec = oracles("Llama", tie_word_embeddings=tied).spec
    weights = dummy(spec)
    logits = logits_after(spec, weights, PROMPT)
    assert torch.equal(logits, logits_after(spec, dummy(spec), PROMPT))
    assert 1.0 < float(logits.std()) < 10.0
    assert not torch.equal(logits_after(spec, weights, PROMPT[::-1]), logits)


def test_swapping_two_dummy_layers_changes_the_tokens(oracles: Callable[..., Any]) -> None:
    """So that a test on dummies notices a layer that is run twice, left out, or in the wrong place."""
    spec = oracles("Llama").spec
    weights = dummy(spec)
    first, second, third = weights.layers
    prompts = [[(index * step) % 300 for index in range(20)] for step in range(1, 9)]
    expected = [int(logits_after(spec, weights, prompt).argmax()) for prompt in prompts]
    assert len(set(expected)) > 4
    for layers in ((second, first, third), (first, third, second), (first, first, third)):
        changed = dataclasses.replace(weights, layers=layers)
        assert [int(logits_after(spec, changed, prompt).argmax()) for prompt in prompts] != expected
