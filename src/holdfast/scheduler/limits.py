"""What the scheduler may do in one step and in all. Decided elsewhere, checked here, never changed afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from holdfast.errors import ConfigurationError

Policy = Literal["fcfs", "priority"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    max_num_seqs: int
    """Sequences that run at once; each has a slot of the runner."""
    max_num_batched_tokens: int
    """Tokens computed in one step."""
    max_model_len: int
    """Prompt and answer together, in tokens."""
    prompt_tokens_beside: int | None = None
    """Of prompts, in a step in which answers go on as well, each of which waits for the whole step. None: as many as
    the step has left."""
    policy: Policy = "fcfs"
    max_steps_in_flight: int = 1
    """2: the next step is planned while one is still being executed. More: those of a pipeline, whose stages each have
    one."""
    apart: bool = False
    """Of a pipeline: a sequence is in one step at a time from its first token on, because what is sampled is not known
    before the last stage is done. Answers are divided among as many steps as may be in flight."""
    max_loras: int = 0
    """LoRA adapters that run at once; each has a place of the runner."""

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} is {getattr(self, name)}", needed="1 or more", field=name)
        if self.prompt_tokens_beside is not None and self.prompt_tokens_beside < 1:
            raise ConfigurationError(
                f"prompt_tokens_beside is {self.prompt_tokens_beside}", needed="1 or more", field="prompt_tokens_beside"
            )
        if self.policy not in ("fcfs", "priority"):
            raise ConfigurationError(f"unknown policy {self.policy!r}", needed="fcfs or priority", field="policy")
        if self.max_steps_in_flight < 1 or (self.max_steps_in_flight > 2 and not self.apart):
            raise ConfigurationError(
                f"max_steps_in_flight is {self.max_steps_in_flight}", needed="1 or 2", field="max_steps_in_flight"
            )
        # With fewer tokens than sequences, those who decode could keep one who prefills from ever getting a token.
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigurationError(
                "a step needs at least one token for every running sequence",
                needed=f"max_num_batched_tokens of at least {self.max_num_seqs} (max_num_seqs)",
                found=str(self.max_num_batched_tokens),
                fix="raise max_num_batched_tokens or lower max_num_seqs",
                field="max_num_batched_tokens",
            )
