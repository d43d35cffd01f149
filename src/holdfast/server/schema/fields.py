"""Which fields of a request body are honoured, which change nothing, and which are refused by name.

No field is silently ignored. A body's top-level fields are of four kinds:

  honoured   fields of the Structs in `requests.py`
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

_TEXT_ONLY = "only text input and output are supported"
_PAGES_STAY = "KV cache transfer is not implemented"
WHY = {
    **REFUSED,
    "functions": "it is deprecated by OpenAI; send tools",
    "function_call": "it is deprecated by OpenAI; send tool_choice",
    "audio": _TEXT_ONLY,
    "modalities": _TEXT_ONLY,
    "mm_processor_kwargs": _TEXT_ONLY,
    "bootstrap_host": _PAGES_STAY,
    "bootstrap_port": _PAGES_STAY,
    "kv_transfer_params": _PAGES_STAY,
    "documents": "chat templates receive only messages and tools",
    "prediction": "speculative decoding is not implemented",
    "prompt_embeds": "prompts must be text or token ids",
    "reasoning_effort": "pass what the model's chat template supports in chat_template_kwargs",
    "thinking_token_budget": "max_tokens limits reasoning and answer together",
    "verbosity": "max_tokens limits the length of the answer",
    "repetition_detection": "use frequency_penalty, presence_penalty or repetition_penalty",
    "structural_tag": "send it in response_format or structured_outputs",
    "truncate_prompt_tokens": "prompts are never truncated",
    "vllm_xargs": "they are for custom code in vLLM",
    "web_search_options": "there is no web search",
    "store": "responses are not stored",
    "service_tier": "there is only one service tier",
    "suffix": "fill-in-the-middle is not implemented",
    "length_penalty": NO_BEAMS,
    "logits_processors": "code sent in a request is never run",
    "return_tokens_as_token_ids": "use return_token_ids",
    "prompt_cache_retention": "the prefix cache evicts the least recently used blocks",
    "tools": "only /v1/chat/completions has tools",
    "tool_choice": "only /v1/chat/completions has tools",
}

FIXES = {
    "use_beam_search": "send n with logprobs, and keep the completion with the largest sum of logprobs",
    "best_of": "send n with logprobs, and keep the completion with the largest sum of logprobs",
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
            f"{name} is not a field of this endpoint: it belongs to {' and '.join(homes)}",
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
