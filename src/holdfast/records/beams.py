"""Beam search as vLLM's scripts ask for it and get it. What is done: `engine.requests.beam_search`."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from holdfast.records.outputs import Logprob


@dataclass(slots=True, kw_only=True)
class BeamSearchParams:
    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    """Of the one token a step that is sampled beside the likeliest ones."""
    length_penalty: float = 1.0
    """A beam's log-probability is divided by its length, prompt included, to this power."""
    include_stop_str_in_output: bool = False


@dataclass(slots=True, kw_only=True)
class BeamSearchSequence:
    tokens: list[int]
    """From `LLM.beam_search` with the prompt's, as in vLLM."""
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None


@dataclass(slots=True, kw_only=True)
class BeamSearchOutput:
    """The best first."""

    sequences: list[BeamSearchSequence]


class RequestOutputKind(enum.Enum):
    """How answers come while they grow. `LLM` gives them whole, in vLLM and here."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2
