"""`Load`: everything a client process must know of a run, as one record that travels to it."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from holdfast.bench.load.profile import Arrivals, Phase

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class LengthRange(msgspec.Struct, frozen=True):
    """Tokens, drawn evenly between the two."""

    low: int
    high: int


class Arrival(msgspec.Struct, frozen=True):
    """One request of a log."""

    at_s: float
    prompt_tokens: int
    output_tokens: int


class Load(msgspec.Struct, frozen=True, kw_only=True):
    url: str
    """Scheme, host and port, perhaps a path before /v1."""
    path: str = CHAT
    model: str = ""
    headers: dict[str, str] = {}
    certificate: str = ""
    """A file with what is trusted beside the system's own; "insecure": anything."""
    phases: tuple[Phase, ...] = ()
    concurrency: int | None = None
    """Closed loop: so many at once at level 1. In an open loop the most that are sent at once, where set."""
    rate: float | None = None
    """Open loop, in requests a second at level 1; inf: all at once."""
    arrivals: Arrivals = "poisson"
    burst: int = 8
    burstiness: float = 1.0
    requests: int | None = None
    """The run ends once so many were sent."""
    first_request: int = 0
    """The number of the first of an open loop: prompts go by numbers, arrivals are drawn by it."""
    replay: tuple[Arrival, ...] = ()
    """Sent at these times, whatever rate and phases say."""
    speed: float = 1.0
    """How many times as fast as in the log these are; they are so already."""
    timeout_s: float = 600.0
    seed: int = 0
    # What is asked.
    prompt: LengthRange = LengthRange(256, 256)
    output: LengthRange = LengthRange(128, 128)
    prompts: tuple[Any, ...] = ()
    """Texts or lists of messages, taken in turn instead of made-up ones."""
    lengths: tuple[tuple[int, int], ...] = ()
    """Tokens of prompt and output, taken in turn instead of drawn ones."""
    words_per_token: float = 1.0
    template_tokens: float = 0.0
    """What the server adds to a prompt; found out before a run."""
    token_ids: bool = False
    """Prompts are lists of token ids, which /v1/completions of some servers takes."""
    prefix_tokens: int = 0
    prefix_share: float = 1.0
    prefixes: int = 1
    turns: int = 1
    think_s: float = 0.0
    cancel_share: float = 0.0
    schema: dict[str, Any] | None = None
    schema_share: float = 1.0
    adapters: tuple[str, ...] = ()
    adapters_in_turn: bool = False
    ignore_eos: bool = True
    extra_body: dict[str, Any] = {}

    @property
    def loop(self) -> Literal["closed", "open", "replay"]:
        if self.replay:
            return "replay"
        return "open" if self.rate is not None else "closed"


class WorkerShare(msgspec.Struct, frozen=True):
    """Which part of a load a process takes: of an open loop every `count`-th request from `index` on, of a closed one
    its share of the concurrency."""

    index: int = 0
    count: int = 1
    start_s: float = 0.0
    """When the run begins, on the clock that all processes of a machine share."""
