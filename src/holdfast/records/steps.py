"""What the scheduler asks of a runner for one step, and what comes back.

A runner keeps static buffers with one *slot* a running sequence:

    slot ─► token ids    [slot, position]        filled at SequenceStart, then by the runner's own sampler
         ─► block tables [group][slot, index]    filled by TableWrite
         ─► sampling parameters [slot]           filled at SequenceStart

So a plan carries changes, not state; the next step can be planned before this one's token has reached the
host, because the runner feeds a sampled id from its own buffer. Plans are executed strictly in order.
Pages and slots that a plan frees may be handed out by the very next plan for the same reason.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from holdfast.records.lora import AdapterRef
from holdfast.records.outputs import Failure, TokenLogprobs
from holdfast.records.sampling import SamplingParams

if TYPE_CHECKING:
    import numpy
    import numpy.typing


class SequenceStart(msgspec.Struct, frozen=True, array_like=True):
    """A sequence takes a slot (first time, or again after a preemption). Read before the plan's rows."""

    slot: int
    request_id: str
    token_ids: list[int]
    """Everything known: the prompt, then the output so far."""
    prompt_length: int
    params: SamplingParams
    banned_until_min_tokens: tuple[int, ...] = ()
    """Ends (eos and stop ids) that may not be sampled while the output is shorter than params.min_tokens."""
    bad_word_ids: list[list[int]] = []
    """Spellings whose last token may not be sampled where those before it end the output."""
    adapter: AdapterRef | None = None
    adapter_place: int = -1
    """Of the runner's places for LoRA adapters, the one that has it; -1: none is needed."""
    embed: bool = False
    """Not a token is wanted of it but what its last token has become: see StepResult.embeddings."""


class TableWrite(msgspec.Struct, frozen=True, array_like=True):
    """`blocks` go to entries first, first+1, ... of the slot's table of one KV group."""

    slot: int
    group: int
    first: int
    blocks: list[int]


class Row(msgspec.Struct, frozen=True, array_like=True):
    """Compute positions start .. start+count-1 of a slot; `samples`: the last one yields the next token."""

    slot: int
    start: int
    count: int
    samples: bool
    score_from: int = 0
    score_to: int = 0
    """Of positions score_from .. score_to-1, all of them computed by this row: how likely the known token behind each
    was. Equal: of none."""

    @property
    def scored(self) -> int:
        return self.score_to - self.score_from


class BlockCopy(msgspec.Struct, frozen=True, array_like=True):
    """One page to move. `before_step`: within the pool, and the step's rows may read it. Else it is moved between tiers
    while steps go on, and told of when it is over: what comes to the pool is read by nobody before, nor written; what
    leaves it is as the rows of this step have left it, and stays so until then."""

    copy_id: int
    source_tier: int
    source: int
    target_tier: int
    target: int
    before_step: bool
    key: bytes = b""
    """Of a page in the disk store, which has no number."""


class AdapterFetch(msgspec.Struct, frozen=True, array_like=True):
    """Bring this LoRA adapter to a place that nobody computes with, while steps go on."""

    place: int
    adapter: AdapterRef


class AdapterArrival(msgspec.Struct, frozen=True, array_like=True):
    """What was to be brought to a place is there, or why it will not be."""

    place: int
    failure: Failure | None = None


class StepPlan(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    step_id: int
    starts: list[SequenceStart] = []
    table_writes: list[TableWrite] = []
    rows: list[Row] = []
    copies: list[BlockCopy] = []
    fetches: list[AdapterFetch] = []
    """A plan may have these alone, or nothing: then adapters are waited for, and only a little."""

    @property
    def token_count(self) -> int:
        return sum(row.count for row in self.rows)


class StepFailure(msgspec.Struct, frozen=True, kw_only=True):
    """A row that could not be done even alone: nobody knows what the pages it should have filled hold."""

    slot: int
    """Of that row."""
    failure: Failure
    earlier_too: bool = False
    """What it came from may be in pages that were filled before, by this row's sequence or by others with the same
    beginning: nothing of it is to be read again."""


class StepResult(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Entry i belongs to the i-th row of the plan that samples; it means nothing where that row failed."""

    step_id: int
    token_ids: list[int] = []
    logprobs: list[TokenLogprobs | None] = []
    """Empty when no row asked for them, else as long as token_ids."""
    prompt_logprobs: list[list[TokenLogprobs]] = []
    """Entry i belongs to the i-th row of the plan that scores: one for each of its positions, none where it failed."""
    embeddings: list[bytes] = []
    """Empty when no row asked for one, else as long as token_ids: float32, of length 1, and nothing for other rows."""
    finished_copies: list[int] = []
    failed_copies: list[int] = []
    """Of pages between tiers, in all plans so far: those that are over since the last result."""
    host_pages: int = 0
    """Of the tier in RAM that may be used by now; 0: as many as before."""
    loading_s: float = 0.0
    """Since the last result, in which the link brought pages from RAM; 0: nobody measured it."""
    adapters: list[AdapterArrival] = []
    """Of all that were to be brought since the first plan: those that are there since the last result."""
    failures: list[StepFailure] = []
    late: list[int] = []
    """Slots whose rows were computed and whose tokens mean nothing: their masks were not there in time. The last token
    of each is computed once more, and sampled from, in a later step."""


class TokenMasks(Protocol):
    """Beside a plan: which tokens the rows may sample whose answers follow a grammar. Filled while the step runs."""

    @property
    def slots(self) -> Sequence[int]:
        """Of these rows."""

    def rows(self, busy: Callable[[], bool] = ...) -> dict[int, numpy.typing.NDArray[numpy.int32]]:
        """By slot, [vocabulary / 32]: bit t % 32 of word t // 32 is token t. Waits for them, but no longer than an
        answer may hold up others: what is missing then is late. While the device is `busy` with the step nobody is held
        up. Valid until the step is applied."""


class Verdict(enum.Enum):
    """What a token means for an answer that must follow a grammar."""

    GOES_ON = "goes on"
    COMPLETE = "complete"
    """With this token; nothing may follow."""
    ENDED = "ended"
    """By this token, which is the model's own end and no part of the text."""
    OVER = "over"
    """It was complete before this token, which is nobody's: that was known too late."""
