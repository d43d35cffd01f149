"""One sequence while the scheduler has it: its tokens, how far they are computed, and what is in flight.

    tokens     [ prompt ......... | output .... ]┆ s ┆        s: sampled in flight, not known yet
               [ computed ...... | in flight .. ]┆   ┆
                                                └ length = known + sampling_in_flight
               pending = length - computed - in_flight: what the next row may compute

It knows its own numbers and nothing of pages, budgets or other sequences.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from holdfast.kvcache import SequenceBlocks, Tier
from holdfast.records import FinishReason, Request, Row, SequenceStart
from holdfast.records.sampling import MAX_LOGPROBS, SCORED_ENTRIES


class Status(enum.Enum):
    WAITING = "waiting"
    """Has never run. It holds no pages, but those that it waits for where they come from RAM or disk."""
    RUNNING = "running"
    """Has a slot and pages."""
    PREEMPTED = "preempted"
    """Had to give its pages back and waits again; what was sampled in flight still counts."""
    FINISHED = "finished"


@dataclass(slots=True, eq=False, kw_only=True)
class Sequence:
    request: Request
    book: SequenceBlocks
    order: tuple[int, float, int]
    """Priority, arrival, number: who is smaller goes first. No two are equal."""
    longest: int
    """The length at which it ends whatever is sampled: its own limit or the model's."""
    tokens: list[int] = field(init=False)
    """Known: the prompt, then the output."""
    prompt_length: int = field(init=False)
    ends: frozenset[int] = field(init=False)
    """eos and stop ids."""
    status: Status = Status.WAITING
    slot: int = -1
    """Of the runner, while RUNNING."""
    adapter_place: int = -1
    """Of the runner's places for LoRA adapters, while RUNNING with one."""
    computed: int = 0
    """Tokens whose KV is computed and applied."""
    in_flight: int = 0
    """Tokens scheduled behind them, not applied yet."""
    rows_in_flight: int = 0
    """Rows of plans not applied yet; goes on counting through a preemption."""
    sampling_in_flight: int = 0
    """Of these rows, those that sample."""
    prompt_logprobs_sent: int = field(init=False)
    """Positions of the prompt whose log-probabilities have gone out, of those that shall: always the first."""
    scored: int = field(init=False)
    """With those that rows in flight will tell."""
    to_score: int = field(init=False)
    """How many there are in all: one less than the prompt has tokens, or none."""
    fetches: int = 0
    """How often it has waited for pages from RAM or disk since it entered the line."""
    looked_whole: bool = False
    """All of it was looked for in the pool since it entered the line, and was not there."""
    passed: int = 0
    """Others that started before it although they came later, because all of them was in the pool."""
    computes: set[Tier] = field(default_factory=set)
    """What could have been fetched for it from there since then is computed: that is sooner."""
    cached_tokens: int = 0
    """Of the prompt, found in the prefix cache when it was first admitted."""
    fetched_tokens: int = 0
    """Of these, what came from tiers below the pool."""
    scheduled_s: float | None = None
    first_token_s: float | None = None

    def __post_init__(self) -> None:
        self.tokens = [*self.request.prompt_token_ids, *self.request.output_token_ids]
        self.prompt_length = len(self.request.prompt_token_ids)
        self.prompt_logprobs_sent = self.scored = self.request.prompt_logprobs_sent
        self.to_score = 0 if self.request.params.prompt_logprobs is None else self.prompt_length - 1
        self.ends = frozenset(self.request.eos_token_ids) | frozenset(self.request.params.stop_ids)

    @property
    def scheduled(self) -> int:
        """The position at which its next row starts."""
        return self.computed + self.in_flight

    @property
    def pending(self) -> int:
        """Tokens that could be computed now; 0 when the last token it may have is already in flight."""
        length = len(self.tokens) + self.sampling_in_flight
        return 0 if length >= self.longest else length - self.computed - self.in_flight

    @property
    def constrained(self) -> bool:
        """Its answer must follow a grammar, which is advanced with each of its tokens."""
        return self.request.params.structured_outputs is not None

    @property
    def cacheable(self) -> list[int]:
        """The tokens among which a cached prefix may be looked for: positions that are still to be scored must be
        computed."""
        return (
            self.tokens if self.prompt_logprobs_sent >= self.to_score else self.tokens[: self.prompt_logprobs_sent + 1]
        )

    def start(self) -> SequenceStart:
        """What a runner is told when it takes its slot."""
        request = self.request
        return SequenceStart(
            self.slot,
            request.request_id,
            list(self.tokens),
            self.prompt_length,
            request.params,
            tuple(sorted(self.ends)) if request.params.min_tokens else (),
            request.bad_word_ids,
            embed=request.embed,
            adapter=request.adapter,
            adapter_place=self.adapter_place,
        )

    def tokens_at_once(self, start: int) -> int:
        """The most of a step from there on: fewer where each is told with a whole vocabulary."""
        told = self.request.params.prompt_logprobs or 0
        if told <= MAX_LOGPROBS or start >= self.to_score:
            return len(self.tokens)
        return max(1, SCORED_ENTRIES // (told + 1))

    def row(self, start: int, count: int, samples: bool) -> Row:
        first, end = max(start, self.scored), min(start + count, self.to_score)
        scores = (first, end) if first < end else (0, 0)
        return Row(self.slot, start, count, samples, *scores)

    def take(self, token: int) -> tuple[FinishReason | None, int | None]:
        """Adds a sampled token. Says whether it ends the sequence, and the stop id that did so."""
        output_before = len(self.tokens) - self.prompt_length
        self.tokens.append(token)
        return self.ending(token, output_before)

    def ending(self, token: int, output_before: int) -> tuple[FinishReason | None, int | None]:
        """Of the last token, when `output_before` tokens of output stand before it."""
        if token in self.ends and output_before >= self.request.params.min_tokens:
            return FinishReason.STOP, None if token in self.request.eos_token_ids else token
        if len(self.tokens) >= self.longest:
            return FinishReason.LENGTH, None
        return None, None
