"""The built-in model against transformers in float32 on the same file: first tokens, logits, and whole answers.

Compiled products round activations to 16 bits. How far that may take log-probabilities is measured here too, by running
transformers itself with activations rounded by the same rule: nothing in the engine may round more than that.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
from gguf_reference import reference_from_gguf

from holdfast import LLM, SamplingParams
from holdfast.checkpoints import locate
from holdfast.execution import native
from holdfast.hardware import processor

QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Name three colours.",
    "What is 2 plus 2?",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "Explain gravity to a child in one sentence.",
    "List two animals that can fly.",
    "What do bees make?",
    "Finish the sentence: The quick brown fox",
]
FEW = 2
"""Of them, but in long runs; and for what is computed beside with rounded activations."""
TOKENS = 12
TOLERANCE = 3e-4
"""Of log-probabilities of the 20 likeliest, 30 layers deep: the largest difference. Float32 sums in another order:
6e-5 seen."""
BEYOND_ROUNDING = 1.25
"""What the root mean square of differences may be, over that of transformers with rounded activations: the same rule
gives other errors from the second layer on, of the same size. 7.7e-4 and 7.8e-4 seen."""
BLOCK, LARGEST = 32, 32600
"""As native/digits.c rounds: 32 activations to whole numbers with one scale."""


# What is expanded is held against transformers in tests/cpu/execution, where models are small.
@pytest.fixture(scope="module", params=["as chosen", pytest.param("expanded to float32", marks=pytest.mark.long)])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    expand = "always" if request.param == "expanded to float32" else "auto"
    if expand == "always" and torch.cuda.is_available():
        pytest.skip("a CPU setting")
    settings = {"dtype": "float32", "max_model_len": 1024, "max_num_seqs": 16, "expand_weights": expand}
    with LLM(kv_cache_memory_bytes="128MiB", **settings) as made:
        made.rounds = expand == "auto" and native.available() and processor().fast_block_products
        yield made


@pytest.fixture(scope="module")
def reference():
    return reference_from_gguf(locate(None).path)


@contextlib.contextmanager
def rounded_activations(model: torch.nn.Module) -> Iterator[None]:
    """What every product of the model is given, rounded as the compiled ones round it."""

    def round_inputs(_: torch.nn.Module, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        (x,) = inputs
        blocks = x.reshape(-1, BLOCK)
        scale = blocks.abs().amax(1, keepdim=True) / LARGEST
        return ((blocks / scale).round().mul(scale).reshape(x.shape),)

    linears = [module for module in model.modules() if isinstance(module, torch.nn.Linear)]
    hooks = [linear.register_forward_pre_hook(round_inputs) for linear in linears]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def test_the_capital_of_france(llm) -> None:
    (output,) = llm.chat([{"role": "user", "content": QUESTIONS[0]}], SamplingParams(temperature=0, max_tokens=32))
    assert output.outputs[0].text == "The capital of France is Paris."
    assert output.outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("count", [FEW, pytest.param(len(QUESTIONS), marks=pytest.mark.long)])
def test_answers_against_transformers(llm, reference, count: int) -> None:
    tokenizer = llm.get_tokenizer()
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS[:count]]
    prompts = [tokenizer.apply_chat_template(chat, tokenize=True, add_generation_prompt=True) for chat in chats]
    params = SamplingParams(temperature=0, max_tokens=TOKENS, logprobs=20, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    found, rounding = [], []
    for prompt, output in zip(prompts, outputs, strict=True):
        answer = output.outputs[0]
        expected = scores(reference, prompt, answer.token_ids)
        assert answer.token_ids == expected.argmax(-1).tolist(), output.prompt_token_ids
        places = [(place, token) for place, entry in enumerate(answer.logprobs) for token in entry]
        told = torch.tensor([answer.logprobs[place][token].logprob for place, token in places])
        at = torch.tensor(places).unbind(1)
        found.append(told - expected[at])
        if llm.rounds and len(rounding) < FEW:
            with rounded_activations(reference):
                rounding.append(scores(reference, prompt, answer.token_ids)[at] - expected[at])
    away = torch.cat(found)
    print(f"{len(prompts)} answers: off by {away.abs().max():.2e} at most, {away.std():.2e} usually")
    if not llm.rounds:
        assert away.abs().max() < TOLERANCE
        return
    least = torch.cat(rounding)
    print(f"rounded activations alone: {least.abs().max():.2e} and {least.std():.2e}")
    assert away.square().mean().sqrt() < BEYOND_ROUNDING * least.square().mean().sqrt()
    assert away.abs().max() < 2 * least.abs().max()


def scores(model: torch.nn.Module, prompt: list[int], answer: list[int]) -> torch.Tensor:
    """Log-probabilities of what may follow, at each place of the answer."""
    with torch.inference_mode():
        logits = model(torch.tensor([prompt + answer])).logits[0]
    return logits[len(prompt) - 1 : -1].log_softmax(-1)
