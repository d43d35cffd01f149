"""The sampler of a rank that does not sample: it has a place for the tokens of the one that does, and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import torch

from holdfast.errors import EngineError
from holdfast.execution.gpu.sampling import FoundLogprobs, FoundScores, Work
from holdfast.records import SequenceStart, TokenMasks


class FollowingSampler:
    """`rows`: most that sample in a step."""

    def __init__(self, rows: int, device: torch.device) -> None:
        self.sampled = torch.zeros(rows, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        return self.sampled.nbytes

    def start(self, start: SequenceStart) -> None:
        """Parameters are the first rank's business."""

    def prepare(self, slots: list[int]) -> Work:
        """However the first rank chooses them, tokens come once: with the step, or behind it."""
        return Work.DRAW

    def sample(self, logits: torch.Tensor, slots: torch.Tensor, lengths: torch.Tensor, work: Work) -> None:
        """The tokens come from the first rank."""

    def logprobs(self, logits: torch.Tensor, slots: list[int]) -> FoundLogprobs | None:
        return None

    def score(self, logits: torch.Tensor, targets: torch.Tensor, first: int, slots: list[int]) -> None:
        """The first rank has them."""

    def scores(self, slots: list[int], lengths: list[int], targets: torch.Tensor) -> FoundScores | None:
        return None

    def mask(self, slots: list[int], masks: TokenMasks | None, busy: Callable[[], bool]) -> list[int]:
        raise EngineError("a rank that does not sample was asked for masks")
