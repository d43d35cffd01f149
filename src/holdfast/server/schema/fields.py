"""Which fields of a request body are honoured, which change nothing, and which are refused by name.

No field is silently ignored. A body's top-level fields are of four kinds:

  honoured   fields of the Structs in `protocol`
  harmless   bookkeeping that has no effect on an answer by its own definition: accepted, any value
  quiet      accepted only with the value that asks for nothing (`tools: []`, `store: false`)
  the rest   refused: a known name with "not supported", an unknown one with "unknown field"

`null` always means "left out", as in OpenAI's own clients.
"""

from __future__ import annotations

import difflib
import re
from functools import cache
from typing import Any

import msgspec

from holdfast.errors import RequestError, UnsupportedOptionError
from holdfast.records.sampling import NO_BEAMS, REFUSED
from holdfast.server.schema.auxiliary import EmbeddingBody
from holdfast.server.schema.requests import ChatBody, CompletionBody

HARMLESS = frozenset({"user", "metadata", "safety_identifier", "prompt_cache_key"})

# name -> values beside null that ask for nothing
QUIET: dict[str, tuple[Any, ...]] = {
    "store": (False,),
    "service_tier": ("auto", "default"),
    "parallel_tool_calls": (True, False),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"], []),
    "logits_processors": ([],),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1.0,),
    "return_tokens_as_token_ids": (False,),
    "include_reasoning": (True,),
    "prompt_cache_retention": ("in_memory", "in-memory"),
}

# Known to OpenAI or vLLM, with no value that asks for nothing.
UNSUPPORTED = frozenset(
    {
        "audio", "bootstrap_host", "bootstrap_port", "documents", "kv_transfer_params", "mm_processor_kwargs",
        "prediction", "prompt_embeds", "reasoning_effort", "repetition_detection", "structural_tag",
        "thinking_token_budget",
        "truncate_prompt_tokens", "verbosity", "vllm_xargs", "web_search_options",
    }
)  # fmt: skip

_TEXT_ONLY = "only text goes in and out"
_PAGES_STAY = "KV pages stay where they were computed"
WHY = {
    **REFUSED,
    "functions": "they are OpenAI's older form; send tools",
    "function_call": "it is OpenAI's older form; send tool_choice",
    "audio": _TEXT_ONLY,
    "modalities": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "bootstrap_host": _PAGES_STAY,
    "bootstrap_port": _PAGES_STAY,
    "kv_transfer_params": _PAGES_STAY,
    "documents": "templates are given messages and tools alone",
    "prediction": "there is no speculative decoding yet",
    "prompt_embeds": "prompts are texts or token ids",
    "reasoning_effort": "how long a model thinks is its own; what its template takes goes into chat_template_kwargs",
    "thinking_token_budget": "how long a model thinks is its own; max_tokens bounds thoughts and answer together",
    "verbosity": "how much a model says is its own; max_tokens bounds it",
    "repetition_detection": "see frequency_penalty, presence_penalty and repetition_penalty",
    "structural_tag": "it stands in response_format or structured_outputs",
    "truncate_prompt_tokens": "a prompt is taken whole or refused",
    "vllm_xargs": "they are for code of other servers",
    "web_search_options": "nothing is fetched",
    "store": "answers are not kept",
    "service_tier": "there is one",
    "suffix": "a text is gone on with at its end only",
    "length_penalty": NO_BEAMS,
    "logits_processors": "code out of a request is never run",
    "return_tokens_as_token_ids": "return_token_ids shows ids beside the texts",
    "prompt_cache_retention": "cached prompts are kept as long as there is room",
    "tools": "they belong to /v1/chat/completions",
    "tool_choice": "it belongs to /v1/chat/completions",
}

FIXES = {
    "use_beam_search": "send n with logprobs, and keep the answer whose log-probabilities have the largest sum",
    "best_of": "send n with logprobs, and keep the answer whose log-probabilities have the largest sum",
}

_MISSING = re.compile(r"Object missing required field `(\w+)`")


def check_fields(body: dict[str, Any], honoured: frozenset[str]) -> dict[str, Any]:
    """The honoured part of a body, without nulls; raises on the first field that could not be honoured."""
    kept = {}
    for name, value in body.items():
        if value is None or name in HARMLESS:
            continue
        if name in honoured:
            kept[name] = value
        elif name in QUIET:
            _check_quiet(name, value)
        elif name in UNSUPPORTED:
            raise unsupported(name, WHY.get(name, ""), FIXES.get(name))
        else:
            raise _unknown(name, honoured)
    return kept


def _unknown(name: str, honoured: frozenset[str]) -> RequestError:
    homes = [path for path, names in _homes().items() if name in names]
    if homes:
        return RequestError(
            f"{name} is not a field of this path: it belongs to {' and '.join(homes)}",
            fix=f"leave {name} out, or send it to {homes[0]}",
            field=name,
        )
    shown = name if len(name) <= 100 else name[:100] + "..."
    near = difflib.get_close_matches(shown, honoured, n=1)
    fix = f"did you mean {near[0]}?" if near else f"leave {shown} out"
    return RequestError(f"unknown field {shown!r}", fix=fix, field=shown)


@cache
def _homes() -> dict[str, frozenset[str]]:
    return {
        "/v1/chat/completions": honoured_fields(ChatBody),
        "/v1/completions": honoured_fields(CompletionBody),
        "/v1/embeddings": honoured_fields(EmbeddingBody),
    }


def _check_quiet(name: str, value: Any) -> None:
    # Compared with type, because in Python True == 1.
    if not any(type(value) is type(quiet) and value == quiet for quiet in QUIET[name]):
        raise unsupported(name, WHY.get(name, ""), FIXES.get(name))


def unsupported(name: str, why: str = "", fix: str | None = None) -> UnsupportedOptionError:
    reason = f": {why}" if why else ""
    return UnsupportedOptionError(f"{name} is not supported here{reason}", fix=fix or f"leave {name} out", field=name)


def honoured_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


def convert(body: Any, kind: Any, where: str = "") -> Any:
    """To the typed body, or an error that names the field; `where`: the one that `body` itself is."""
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        text = str(error)
        what, _, path = text.partition(" - at `")
        field = where + path.rstrip("`").removeprefix("$").removeprefix("." if not where else "") or None
        missing = _MISSING.fullmatch(what)
        if missing is not None:
            # The place is where the field is not; what a client looks for is the field.
            name = f"{field}.{missing[1]}" if field else missing[1]
            raise RequestError(f"{name} is missing", needed=name, field=name) from None
        raise RequestError(f"{field or 'the body'}: {what[:1].lower()}{what[1:]}", field=field) from None
