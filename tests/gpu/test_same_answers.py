"""What the GPU answers is what the CPU and transformers answer, with real weights and in bfloat16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from holdfast import LLM, SamplingParams

QUESTIONS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain how a refrigerator works to a child.",
    "List three prime numbers greater than ten and say why they are prime.",
    "Translate 'good morning' into French.",
    "Once upon a time there was a dragon who",
]


def texts(**settings: Any) -> tuple[list[str], str]:
    with LLM("smollm2", max_model_len=2048, kv_cache_memory_bytes=256 << 20, **settings) as llm:
        messages = [[{"role": "user", "content": question}] for question in QUESTIONS]
        outputs = llm.chat(messages, SamplingParams(temperature=0.0, max_tokens=48), use_tqdm=False)
        return [output.outputs[0].text for output in outputs], "\n".join(llm.info.decisions)


def test_the_built_in_model_says_on_a_gpu_what_it_says_on_a_cpu() -> None:
    there, decisions = texts(device="cuda", dtype="float32")
    here, _ = texts(device="cpu", dtype="float32")
    print(decisions)
    print(there)
    assert there == here
    assert there[0] == "The capital of France is Paris."


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_built_in_model_in_half_the_width(dtype: str) -> None:
    found, _ = texts(device="cuda", dtype=dtype)
    print(found)
    assert found[0] == "The capital of France is Paris."


@pytest.mark.parametrize("architecture", ["Llama", "Mistral"])
def test_logits_in_bfloat16_are_as_good_as_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    """Both held against the same weights in float32: what bfloat16 costs us is what it costs them."""
    more = {"sliding_window": 100} if architecture == "Mistral" else {}
    config = getattr(transformers, f"{architecture}Config")(
        vocab_size=8192,
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        max_position_embeddings=2048,
        head_dim=64,
        **more,
    )
    torch.manual_seed(1)
    kind = getattr(transformers, f"{architecture}ForCausalLM")
    kind(config).to(torch.bfloat16).save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(2)
    lengths = [1, 2, 7, 33, 64, 100, 129, 250, 300, 511, 700, 900, 1024, 1300, 1500, 1900] * 2
    prompts = [torch.randint(3, 8192, (length,), generator=generator).tolist() for length in lengths]
    with LLM(str(tmp_path), device="cuda", vram="4GiB", max_model_len=2048, skip_tokenizer_init=True) as llm:
        assert llm.info.dtype == "bfloat16"
        params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=params, use_tqdm=False)
    # Loaded and not converted, which would round the rotary frequencies.
    wide, half = (
        kind.from_pretrained(tmp_path, dtype=dtype).cuda().eval() for dtype in (torch.float32, torch.bfloat16)
    )
    ours, theirs = list[float](), list[float]()
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt], device="cuda")
        with torch.inference_mode():
            exact, rounded = (model(ids).logits[0, -1].double().log_softmax(-1) for model in (wide, half))
        logprobs = output.outputs[0].logprobs
        assert logprobs is not None
        found = logprobs[0]
        ours.append(sum(abs(one.logprob - float(exact[token])) for token, one in found.items()) / len(found))
        theirs.append(sum(abs(float(rounded[token] - exact[token])) for token in found) / len(found))
    mine, others = (sum(errors) / len(errors) for errors in (ours, theirs))
    print(f"{architecture}: mean error {mine:.5f}, transformers {others:.5f}; worst {max(ours):.5f}, {max(theirs):.5f}")
    assert mine < 1.2 * others
    assert max(ours) < 1.5 * max(theirs)
