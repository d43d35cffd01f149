"""Whole models in GGUF files of the denser kinds: transformers with the very numbers of the file says the same, whether
matrices are expanded, kept and multiplied by torch, or kept and multiplied by compiled kernels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy
import pytest
import torch
from quantized_blocks import NEW_KINDS, drawn

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import gguf as gguf_files
from holdfast.execution import native
from holdfast.execution.layers.linear import QuantizedLinear
from holdfast.execution.runner import Runner, RunnerLimits
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import load_weights
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.models import ModelSpec, TensorSpec, from_gguf
from holdfast.records import Row, SamplingParams, SequenceStart, StepPlan, TableWrite

CPU = torch.device("cpu")
PROMPT = [(index * 37) % 300 for index in range(33)]
SPREAD = 0.05
"""Of the weights, about."""
MIXED = {"q": "Q4_K", "k": "Q5_0", "v": "Q6_K", "o": "IQ4_NL", "gate": "Q5_K", "up": "Q3_K", "down": "Q6_K"}


def kind_of(file: str, name: str) -> str:
    return MIXED.get(name.rpartition(".")[2], "Q8_0") if file == "mixed" else file


def turned(tensor: TensorSpec, rows: numpy.ndarray) -> numpy.ndarray:
    """Rows as GGUF keeps llama's q and k: the halves of a head taken in turns."""
    if tensor.gguf_turn != "unpermute_rope":
        return rows
    halves = rows.reshape(tensor.heads, 2, -1, *rows.shape[1:])
    return numpy.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)


def write_model(oracle: Any, path: Path, file: str) -> dict[str, torch.Tensor]:
    """The file, and its numbers by the names that transformers gives them."""
    config, numbers = oracle.model.config, dict(oracle.model.state_dict())
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
    for seed, tensor in enumerate(oracle.spec.tensors):
        if len(tensor.shape) == 1:
            writer.add_tensor(tensor.gguf_name, turned(tensor, numbers[tensor.hf_name].numpy()))
            continue
        kind = kind_of(file, tensor.name)
        _, rough = drawn(kind, 4, tensor.shape[1], seed, scale=1.0)
        raw, exact = drawn(kind, *tensor.shape, seed, scale=SPREAD / float(rough.std()))
        numbers[tensor.hf_name] = torch.from_numpy(exact)
        writer.add_tensor(tensor.gguf_name, turned(tensor, raw), raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return numbers


def logits_after(spec: ModelSpec, weights: Weights, prompt: list[int]) -> torch.Tensor:
    groups, places = form_groups([layer.window for layer in spec.layers])
    layout = KVLayout(
        groups=groups,
        block_tokens=16,
        layers_per_page=places,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=4,
    )
    runner = Runner(
        spec, weights, layout, RunnerLimits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64), CPU
    )
    runner.back_kv(5)
    captured: list[torch.Tensor] = []
    original = runner._sampler.sample

    def capture(logits: torch.Tensor, *rest: Any) -> Any:
        captured.append(logits.clone())
        return original(logits, *rest)

    runner._sampler.sample = capture  # type: ignore[method-assign]
    start = SequenceStart(0, "r", prompt, len(prompt), SamplingParams(temperature=0.0))
    rows = [Row(0, 0, len(prompt), True)]
    runner.execute(StepPlan(step_id=0, starts=[start], table_writes=[TableWrite(0, 0, 0, [1, 2, 3])], rows=rows))
    return captured[0][0].log_softmax(-1)


@pytest.mark.parametrize("file", [*NEW_KINDS, "mixed"])
@pytest.mark.parametrize("length", [1, 33])
def test_models_equal_transformers_with_the_same_numbers(
    file: str, length: int, oracles: Callable[..., Any], tmp_path: Path
) -> None:
    oracle = oracles("Llama", hidden_size=256, intermediate_size=512, num_hidden_layers=2, attention_bias=True)
    state = {name: value.clone() for name, value in oracle.model.state_dict().items()}
    numbers = write_model(oracle, tmp_path / "model.gguf", file)
    header = gguf_files.read_header(tmp_path / "model.gguf")
    spec = from_gguf(header.metadata, header.tensors)
    try:
        oracle.model.load_state_dict(numbers)
        with torch.inference_mode():
            expected = oracle.logits(PROMPT[:length])[-1].log_softmax(-1)
    finally:
        oracle.model.load_state_dict(state)
    assert float(expected.std()) > 0.1, "answers that say nothing would all be alike"
    ways = [(True, False, 1e-3), (False, False, 1e-3), *([(False, True, 5e-3)] if native.available() else [])]
    for expand, compiled, tolerance in ways:
        with Checkpoint(header.tensors, "gguf") as checkpoint:
            weights = load_weights(
                spec, checkpoint, dtype=torch.float32, device=CPU, expand=expand, compiled=compiled, pack=False
            )
        assert isinstance(weights.embed, QuantizedLinear) == (not expand and not compiled)
        found = logits_after(spec, weights, PROMPT[:length])
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=0)
        assert int(found.argmax()) == int(expected.argmax())
