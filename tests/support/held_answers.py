"""Answers that are held to a form, of tiny random models: a vocabulary of letters, and an engine that has grammars."""

from __future__ import annotations

from typing import Any

from holdfast.engine.core.loop import EngineCore
from holdfast.engine.core.structured_outputs import StructuredOutputManager
from holdfast.records import EngineOutput, SamplingParams, StructuredOutputsParams
from holdfast.records.structured import Vocabulary
from holdfast.text.structured.client import GrammarService

LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
TOKENS = [b"", b"", b"</s>", *(LETTERS[at % 36].encode() * (1 + at // 36) for at in range(200))]
VOCABULARY = Vocabulary(TOKENS, {"</s>": 2})
PARAMS = [
    SamplingParams(max_tokens=5, temperature=0.0, structured_outputs=StructuredOutputsParams(regex="[a-c]{3,5}")),
    SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True),
    SamplingParams(
        max_tokens=4, seed=3, frequency_penalty=1.0, logprobs=2, allowed_token_ids=list(range(2, 30)),
        structured_outputs=StructuredOutputsParams(regex="([a-m][0-9]?)+"),
    ),
    SamplingParams(max_tokens=4, seed=4, allowed_token_ids=list(range(3, 60, 2)), ignore_eos=True),
]  # fmt: skip


def with_forms(core: EngineCore, vocab_size: int, services: list[GrammarService]) -> EngineCore:
    """`services`: to which the one that is started is added; to be closed."""
    service = GrammarService(lambda: VOCABULARY, [2], vocab_size)
    services.append(service)
    service.start()
    manager: Any = StructuredOutputManager(
        lambda: service.address, rows=core.scheduler.limits.max_num_seqs, vocab_size=vocab_size, eos_ids=(2,)
    )
    core.structured_output = manager
    return core


def text_of(tokens: list[int]) -> str:
    return b"".join(TOKENS[token] for token in tokens if token != 2).decode()


def raw_of(outputs: list[EngineOutput]) -> list[list[int]]:
    """Of each token those that were most likely, whatever the form forbids."""
    return [list(entry.token_ids) for output in outputs for entry in output.logprobs or []]
