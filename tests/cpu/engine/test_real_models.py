"""The further built-in models against transformers in float32 on the same files, and answers that make sense.

Long: half a gigabyte is fetched where it is not cached, and the reference takes four bytes for every weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gguf_reference import reference_from_gguf

from holdfast import LLM, SamplingParams
from holdfast.checkpoints import locate
from holdfast.checkpoints.sources import builtin
from holdfast.errors import RequestError

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

TOKENS = 24
TOLERANCE = 2e-3
"""Of log-probabilities of the 20 likeliest: the weights are expanded to float32, so only the order of sums differs."""
QWEN = "qwen2.5-coder-0.5b"
GEMMA = "gemma-3-270m"

QUESTIONS = [
    "Write a Python function that reverses a string.",
    "What does `git rebase` do?",
    "Translate to SQL: all users older than 30.",
    "Erkläre kurz, was eine Schleife ist.",
    "用一句话解释递归。",
]
BEGINNINGS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4, 5, 6, 7,",
    "Die Hauptstadt von Deutschland ist",
    "Once upon a time, in a small village by the sea,",
]


@pytest.fixture(scope="module", params=[QWEN, GEMMA])
def name(request: pytest.FixtureRequest) -> str:
    entry = builtin.find(request.param)
    assert entry is not None
    if builtin.must_be_accepted(entry):
        # Agreeing to a licence is for whoever runs the tests.
        pytest.skip(f"{entry.name} is not cached, and its licence is not accepted: {builtin.ACCEPT_VARIABLE}")
    return entry.name


@pytest.fixture(scope="module")
def llm(name: str) -> Iterator[LLM]:
    settings: dict[str, Any] = {"dtype": "float32", "expand_weights": "always", "kv_cache_memory_bytes": "256MiB"}
    with LLM(name, max_model_len=1024, max_num_seqs=8, **settings) as made:
        yield made


@pytest.fixture(scope="module")
def reference(name: str) -> Any:
    return reference_from_gguf(locate(name).path)


def prompts_of(llm: LLM, name: str) -> list[list[int]]:
    tokenizer = llm.get_tokenizer()
    if name == GEMMA:
        return [tokenizer.encode(text) for text in BEGINNINGS]
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    return [tokenizer.apply_chat_template(chat, add_generation_prompt=True) for chat in chats]


def test_greedy_tokens_and_logits_are_those_of_transformers(llm: LLM, reference: Any, name: str) -> None:
    prompts = prompts_of(llm, name)
    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=20, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    worst = 0.0
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + answer.token_ids])).logits[0]
        expected = logits[len(prompt) - 1 : -1].log_softmax(-1)
        assert answer.token_ids == expected.argmax(-1).tolist(), output.prompt_token_ids
        for position, entry in enumerate(answer.logprobs):
            for token, found in entry.items():
                worst = max(worst, abs(found.logprob - expected[position, token].item()))
    print(f"{name}: largest difference of a log-probability over {len(prompts)} prompts: {worst:.2e}")
    assert worst < TOLERANCE


def test_answers_make_sense(llm: LLM, name: str) -> None:
    params = SamplingParams(temperature=0, max_tokens=64)
    if name == GEMMA:
        # A small base model: it goes on with what it is given, and knows few facts.
        counted, code = llm.generate([BEGINNINGS[2], BEGINNINGS[1]], params)
        assert counted.outputs[0].text.startswith(" 8, 9, 10, 11, 12")
        assert "if n == 0:\n        return 0" in code.outputs[0].text
        return
    (output,) = llm.chat([{"role": "user", "content": QUESTIONS[0]}], params)
    text = output.outputs[0].text
    assert "def " in text
    assert "[::-1]" in text or "reversed(" in text, text


def test_a_base_model_refuses_chat_and_says_what_helps(llm: LLM, name: str) -> None:
    if name != GEMMA:
        pytest.skip("it has a chat template")
    with pytest.raises(RequestError) as caught:
        llm.chat([{"role": "user", "content": "hello"}], SamplingParams(max_tokens=1))
    assert caught.value.code == "HF303"
    assert "--chat-template" in str(caught.value)
