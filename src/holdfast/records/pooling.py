"""What comes of a prompt that is not answered, named as vLLM names it: classes, scores, numbers as they are."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True, kw_only=True)
class ClassificationOutput:
    """One chance a label, in the order of the model's labels."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


@dataclass(slots=True, kw_only=True)
class ClassificationRequestOutput:
    request_id: str
    outputs: ClassificationOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(slots=True, kw_only=True)
class ScoringOutput:
    """How well two texts belong together."""

    score: float


@dataclass(slots=True, kw_only=True)
class ScoringRequestOutput:
    request_id: str
    outputs: ScoringOutput
    prompt_token_ids: list[int]
    """Of both texts."""
    num_cached_tokens: int = 0
    finished: bool = True


@dataclass(slots=True, kw_only=True)
class PoolingOutput:
    data: list[float]
    """An embedding, or chances of labels."""


@dataclass(slots=True, kw_only=True)
class PoolingRequestOutput:
    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
