"""One sequence to generate, as it crosses from the front to the engine: token ids only, no text."""

from __future__ import annotations

import msgspec

from holdfast.records.lora import AdapterRef
from holdfast.records.sampling import SamplingParams


class Request(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """`params.n` is already unfolded (one Request an answer) and `params.seed` already drawn at the door,
    so that a request resumed by another engine process goes on with the same random numbers."""

    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    arrival_s: float = 0.0
    """time.monotonic() of the front."""
    priority: int = 0
    """Smaller runs earlier; only under the priority policy."""
    cache_salt: str = ""
    """Requests share cached prefixes only with the same salt."""
    eos_token_ids: tuple[int, ...] = ()
    """The model's own ends; empty when the request ignores them."""
    output_token_ids: list[int] = []
    """Already generated, by an engine that died: they count as output for limits, penalties and seeds."""
    bad_word_ids: list[list[int]] = []
    """The spellings of params.bad_words, as token ids."""
    costly_grammar: bool = False
    """The grammar of its answer takes long to compile or to follow: it is kept apart from others'."""
    embed: bool = False
    """Wants its prompt as a vector, and no answer."""
    progress: bool = False
    """Wants to be told after each step how much of its prompt is computed."""
    prompt_logprobs_sent: int = 0
    """Entries that have gone out already, from an engine that died."""
    adapter: AdapterRef | None = None
    """The LoRA adapter it is computed with."""

    @property
    def adapter_salt(self) -> str:
        """Keys and values of one adapter are no other's, nor the model's own."""
        return "" if self.adapter is None else self.adapter.salt

    @property
    def max_tokens(self) -> int:
        """The front has settled it against the context before the request gets here."""
        assert self.params.max_tokens is not None
        return self.params.max_tokens
