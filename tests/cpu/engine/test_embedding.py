"""Prompts as vectors: the real SmolLM2 and tiny models, alone, in company, from cached prefixes and in chunks."""

from __future__ import annotations

import math
from pathlib import Path

import numpy
import pytest
import torch
import transformers

from holdfast import LLM, PoolingParams, SamplingParams
from holdfast.errors import ContextLengthError, RequestError, UnsupportedOptionError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(5)
    path = tmp_path_factory.mktemp("tiny-embedding")
    config = transformers.LlamaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
        initializer_range=0.4,
    )
    transformers.LlamaForCausalLM(config).save_pretrained(path)
    return path


def reference(folder: Path, prompts: list[list[int]]) -> numpy.ndarray:
    """transformers' own last hidden state of the last token, of length 1."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        states = [model.model(torch.tensor([prompt])).last_hidden_state[0, -1] for prompt in prompts]
    return torch.nn.functional.normalize(torch.stack(states), dim=1).numpy()


@pytest.mark.parametrize("backend", ["torch", "auto"])
def test_the_last_tokens_state_of_length_one(folder: Path, backend: str) -> None:
    if backend == "torch" and torch.cuda.is_available():
        pytest.skip("a CPU setting")
    prompts = [[5, 6, 7, 8], [9], list(range(3, 90)), [5, 6, 7, 9]]
    with LLM(
        str(folder),
        dtype="float32",
        skip_tokenizer_init=True,
        attention_backend=backend,
        max_num_batched_tokens=32,
        max_num_seqs=4,
        kv_cache_memory_bytes="4MiB",
    ) as llm:
        outputs = llm.embed([{"prompt_token_ids": prompt} for prompt in prompts], use_tqdm=False)
        found = numpy.array([output.outputs.embedding for output in outputs])
        assert numpy.abs(found - reference(folder, prompts)).max() < 2e-5
        assert [output.prompt_token_ids for output in outputs] == prompts
        assert {output.outputs.hidden_size for output in outputs} == {32}
        # The second time most of it is in the prefix cache, and it is alone.
        again = llm.embed({"prompt_token_ids": prompts[2]}, use_tqdm=False)[0]
        assert again.num_cached_tokens == 80
        assert numpy.abs(numpy.array(again.outputs.embedding) - found[2]).max() < 1e-6
        # Vectors and answers in one batch leave each other alone.
        greedy = SamplingParams(temperature=0, max_tokens=4)
        answers = llm.generate(prompt_token_ids=prompts[:2], sampling_params=greedy, use_tqdm=False)
        assert all(len(answer.outputs[0].token_ids) == 4 for answer in answers)
        stats = llm.get_stats()
        assert (stats.running, stats.waiting, stats.blocks_used) == (0, 0, 0)
        told = {metric.name: metric.value for metric in llm.get_metrics()}  # type: ignore[attr-defined]
        assert told["vllm:prefix_cache_hits"] == stats.prefix_hits_total >= 80
        assert told["vllm:num_requests_running"] == 0


def test_what_cannot_be_embedded(folder: Path) -> None:
    with LLM(str(folder), dtype="float32", skip_tokenizer_init=True, kv_cache_memory_bytes="4MiB") as llm:
        for prompt, error in (([], RequestError), ([3] * 256, ContextLengthError), ([999], RequestError)):
            with pytest.raises(error):
                llm.embed({"prompt_token_ids": prompt}, use_tqdm=False)
        with pytest.raises(UnsupportedOptionError):
            llm.embed([3], pooling_params=PoolingParams(normalize=False))


def test_smollm2_finds_what_belongs_together() -> None:
    with LLM(max_model_len=256, max_num_seqs=4, kv_cache_memory_bytes="32MiB") as llm:
        cat, kitten, tax = (
            output.outputs.embedding
            for output in llm.embed(
                ["The cat sleeps on the sofa.", "A kitten is sleeping on the couch.", "Tax law changed in 1986."],
                use_tqdm=False,
            )
        )
    assert math.isclose(sum(x * x for x in cat), 1.0, abs_tol=1e-5)
    assert len(cat) == 576

    def likeness(left: list[float], right: list[float]) -> float:
        return sum(a * b for a, b in zip(left, right, strict=True))

    assert likeness(cat, kitten) > likeness(cat, tax)
