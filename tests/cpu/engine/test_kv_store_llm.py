"""Through `LLM`, with a store of KV pages on disk: after a restart tokens are those of an engine without one, whatever
comes from the disk, with LoRA adapters, windows, structured output and little room for pages."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from lora_adapters import write_adapter

from holdfast import LLM, LoRARequest, SamplingParams, StructuredOutputsParams

GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
SHARED = [(41 * place * place + 7) % 290 + 3 for place in range(60)]
PROMPTS = [SHARED[: 30 + 6 * number] + [(number * 13 + place) % 200 + 3 for place in range(9)] for number in range(6)]
SIZES = {
    "vocab_size": 300, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("models")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).float().save_pretrained(base / "llama")
    config = transformers.MistralConfig(**SIZES, sliding_window=24)
    transformers.MistralForCausalLM(config).float().save_pretrained(base / "mistral")
    write_adapter(base / "adapter", base / "llama", seed=1)
    return base


def lives(model: Path, store: Path, ask: Callable[[LLM], list[list[int]]], **settings: Any) -> None:
    """Without a store; then with one, in two lives: equal tokens, and in the second pages from the disk."""
    usual: dict[str, Any] = {
        "skip_tokenizer_init": True, "max_model_len": 128, "max_num_seqs": 4, "block_size": 8, "device": "cpu",
        "dtype": "float32", "kv_cache_memory_bytes": "512KiB",
    }  # fmt: skip
    usual |= settings
    alone = LLM(str(model), **usual)
    expected = ask(alone)
    alone.close()
    for life in range(2):
        llm = LLM(str(model), **usual, kv_store=str(store), kv_store_size="32MiB")
        for _ in range(2):  # What is asked twice is written.
            assert ask(llm) == expected
        (disk,) = llm.get_stats().kv_tiers
        assert (disk.hit_tokens_total > 0) == (life > 0)
        llm.close()


def answers(found: list[Any]) -> list[list[int]]:
    return [list(one.outputs[0].token_ids) for one in found]


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_tokens_are_the_same_after_a_restart(name: str, folder: Path, tmp_path: Path) -> None:
    asked = [{"prompt_token_ids": one} for one in PROMPTS]
    lives(folder / name, tmp_path, lambda llm: answers(llm.generate(asked, GREEDY, use_tqdm=False)))


def test_pages_over_the_budget_of_a_day_are_counted(folder: Path, tmp_path: Path) -> None:
    budget = {"kv_store": str(tmp_path), "kv_store_size": "32MiB", "kv_store_daily_writes": "1MiB", "device": "cpu"}
    llm = LLM(str(folder / "llama"), skip_tokenizer_init=True, max_model_len=512, block_size=32, **budget)
    prompts = [{"prompt_token_ids": [number] * 400} for number in range(3, 13)]
    for _ in range(2):
        llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
    for _ in range(200):  # Written behind.
        use = llm.get_stats().kv_store
        assert use is not None
        if use.dropped_writes_total:
            break
        llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
    assert use.dropped_writes_total > 0
    before = use.dropped_writes_total  # From here on pages are not even brought.
    for _ in range(3):
        llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
    use = llm.get_stats().kv_store
    assert use is not None
    assert use.dropped_writes_total == sum(use.dropped_by_reason.values()) > before
    assert use.dropped_by_reason["write budget"] > 0
    assert use.missed_by_reason["checksum"] == 0
    assert 0 < use.written_today_bytes <= 1 << 20
    llm.close()


def test_an_adapters_pages_are_its_own(folder: Path, tmp_path: Path) -> None:
    asked = [{"prompt_token_ids": one} for one in PROMPTS]
    adapter = LoRARequest("adapter", 1, str(folder / "adapter"))

    def ask(llm: LLM) -> list[list[int]]:
        which = [adapter if number % 2 else None for number in range(len(asked))]
        return answers(llm.generate(asked, GREEDY, use_tqdm=False, lora_request=which))

    lives(folder / "llama", tmp_path, ask, enable_lora=True)


def test_structured_output_over_pages_from_disk(tmp_path: Path) -> None:
    prompt = "Pick a colour, and say nothing else. The colours of the flag are red, green and blue. " * 3
    params = SamplingParams(
        temperature=0,
        max_tokens=12,
        structured_outputs=StructuredOutputsParams(regex="(red|green|blue)( and red)?"),
    )

    def ask(llm: LLM) -> list[list[int]]:
        return answers(llm.generate([prompt, prompt + "Now: "], params, use_tqdm=False))

    settings = {"skip_tokenizer_init": False, "max_model_len": 512, "kv_cache_memory_bytes": "32MiB"}
    lives(Path("smollm2"), tmp_path, ask, **settings)
