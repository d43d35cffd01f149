"""Prompts that are not answered, named as vLLM names them: what is asked of them, and what comes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.errors import RequestError, UnsupportedOptionError

DONE = "an embedding is the last token's hidden state, scaled to length 1"


@dataclass(slots=True, kw_only=True)
class PoolingParams:
    dimensions: int | None = None
    """Only the first numbers, at length 1 again."""
    normalize: bool | None = None
    use_activation: bool | None = None
    """Its newer name."""
    task: str | None = None
    truncate_prompt_tokens: int | None = None
    extra_kwargs: dict[str, Any] | None = None
    requires_token_ids: bool = False
    skip_reading_prefix_cache: bool | None = None
    softmax: bool | None = None
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None

    def clone(self) -> PoolingParams:
        return PoolingParams(**{name: getattr(self, name) for name in self.__slots__})

    def check(self, size: int) -> None:
        """`size`: how many numbers the model's embeddings have."""
        for name, good in (
            ("normalize", (None, True)), ("use_activation", (None, True)), ("task", (None, "embed")),
            ("truncate_prompt_tokens", (None,)), ("softmax", (None, False)), ("step_tag_id", (None,)),
            ("returned_token_ids", (None, [])), ("extra_kwargs", (None, {})),
        ):  # fmt: skip
            value: Any = getattr(self, name)
            if value not in good:
                raise UnsupportedOptionError(
                    f"{name}={value!r} is not supported: {DONE}", fix=f"leave {name} out", field=name
                )
        if self.dimensions is not None and not 1 <= self.dimensions <= size:
            raise RequestError(
                f"dimensions is {self.dimensions}; the embeddings of this model have {size}",
                needed=f"from 1 to {size}",
                found=str(self.dimensions),
                field="dimensions",
            )


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
    data: Any
    """An embedding, or chances of labels: a torch.Tensor of one dimension."""


@dataclass(slots=True, kw_only=True)
class PoolingRequestOutput:
    request_id: str
    outputs: PoolingOutput
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    finished: bool = True
