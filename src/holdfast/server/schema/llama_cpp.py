"""The body of llama.cpp's own /completion, typed, its fields that are taken without being done, and what its clients
ask for in chats. Meaning is given in `request/llama_cpp.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import msgspec

from holdfast.server.schema.requests import PROMPT_SCHEMA, Common, Small


class NativeBody(msgspec.Struct, kw_only=True):
    prompt: Annotated[Any, msgspec.Meta(extra_json_schema=PROMPT_SCHEMA)]
    model: str | None = None
    stream: bool = False
    n_predict: Small | None = None
    """-1: to the end of the context; 0: the prompt is computed and kept in the prefix cache, and nothing said."""
    max_tokens: Small | None = None
    """The same, by OpenAI's name."""
    temperature: float | None = None
    """Below 0 is greedy, as 0 is."""
    top_k: Small | None = None
    top_p: float | None = None
    min_p: float | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    """-1: any."""
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    logit_bias: list[list[float | bool | str]] | dict[str, float | bool] | None = None
    """Pairs of a token id, or a text, and a number; false: never."""
    grammar: str | None = None
    json_schema: dict[str, Any] | str | bool | None = None
    n_probs: Small | None = None
    return_tokens: bool = False
    cache_prompt: bool | None = None
    """The prefix cache is always on; `cache_salt` keeps prompts apart."""
    cache_salt: Annotated[str, msgspec.Meta(max_length=256)] = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeOptions:
    """What only llama.cpp's answers have."""

    return_tokens: bool
    prompt: str
    """Of the first prompt, as text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaMembers:
    """What llama.cpp's answers have beside OpenAI's members, as far as it was asked for."""

    timings: bool
    progress: bool
    prompt: str | None
    """Of `__verbose`."""


def llama_members(body: Common, prompt: str | None) -> LlamaMembers | None:
    if not (body.timings_per_token or body.return_progress or body.verbose):
        return None
    return LlamaMembers(
        timings=bool(body.timings_per_token),
        progress=bool(body.return_progress),
        prompt=(prompt or "") if body.verbose else None,
    )


HARMLESS_NATIVE = frozenset({"id_slot", "slot_id", "n_cache_reuse", "timings_per_token", "t_max_prompt_ms", "n_indent"})
"""Of llama.cpp's slots, or of how it shows its work."""

NEUTRAL: dict[str, tuple[float, ...]] = {
    "mirostat": (0,),
    "typical_p": (1,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "top_n_sigma": (-1, 0),
    "n_keep": (0, -1),
    "min_keep": (0,),
    "t_max_predict_ms": (0,),
}
"""Ways of sampling that are not there, and the values that switch them off, which many clients always send."""
COMPANIONS = frozenset(
    {
        "mirostat_tau", "mirostat_eta", "dynatemp_exponent", "xtc_threshold", "dry_base", "dry_allowed_length",
        "dry_penalty_last_n", "dry_sequence_breakers",
    }
)  # fmt: skip
"""Numbers that say nothing while those are off."""
