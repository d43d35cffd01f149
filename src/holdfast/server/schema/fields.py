"""Which fields of a request body are honoured, which change nothing, which are refused, and what is unknown.

A body's top-level fields are of five kinds:

  honoured    fields of the Structs in `requests.py`
  harmless    no effect on an answer by their own definition: accepted, any value
  quiet       accepted only with a value that asks for nothing (`functions: []`, `best_of: 1`)
  unsupported would change the answer and cannot be done: refused by name, with the reason
  unknown     ignored and told (`ignored.py`), as vLLM does; with --strict-fields refused

`null` always means "left out", as in OpenAI's own clients.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection
from functools import cache
from typing import Any

import msgspec
import msgspec.inspect

from holdfast.errors import RequestError, UnsupportedOptionError
from holdfast.records.sampling import REFUSED
from holdfast.server.schema.ignored import IGNORED
from holdfast.server.schema.pooling import ClassifyBody, EmbeddingBody, PoolingBody, RerankBody, ScoreBody
from holdfast.server.schema.requests import ChatBody, CompletionBody
from holdfast.units import shorten

HARMLESS: dict[str, str] = {
    **dict.fromkeys(("user", "metadata", "safety_identifier"), "the caller's own bookkeeping"),
    "session_id": "vLLM's name of a conversation; the prefix cache finds what was said before by itself",
    **dict.fromkeys(
        ("prompt_cache_key", "prompt_cache_retention"), "the prefix cache evicts the least recently used blocks"
    ),
    "store": "responses are not stored",
    "service_tier": "there is one tier",
    "verbosity": "a hint to OpenAI's own models; max_tokens limits the length of an answer",
    "prediction": "a hint that makes OpenAI's answers faster and never changes them",
    "stream_interval": "every token has an event of its own, which vLLM's value may only make fewer",
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), "of images and audio, which are refused"),
    **dict.fromkeys(
        ("return_token_offsets", "return_assistant_tokens_mask"), "of vLLM's /render; without effect elsewhere"
    ),
    "routed_experts_prompt_start": "of vLLM's routed_experts, which are not returned",
}
"""Name, and why it makes no difference."""

# name -> values beside null that ask for nothing
QUIET: dict[str, tuple[Any, ...]] = {
    "parallel_tool_calls": (True, False),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"], []),
    "logits_processors": ([],),
    "best_of": (1,),
    "suffix": ("",),
    "include_reasoning": (True,),
    "kv_transfer_params": ({},),
    "ec_transfer_params": ({},),
    "thinking_token_budget": (-1,),
}

# Known to OpenAI or vLLM, with no value that asks for nothing.
UNSUPPORTED = frozenset(
    {
        "audio", "bootstrap_host", "bootstrap_port", "prompt_embeds", "repetition_detection", "structural_tag",
        "web_search_options",
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
    "bootstrap_host": _PAGES_STAY,
    "bootstrap_port": _PAGES_STAY,
    "kv_transfer_params": _PAGES_STAY,
    "ec_transfer_params": _PAGES_STAY,
    "prompt_embeds": "prompts must be text or token ids",
    "thinking_token_budget": "max_tokens limits reasoning and answer together",
    "repetition_detection": "use frequency_penalty, presence_penalty or repetition_penalty",
    "structural_tag": "send it in response_format or structured_outputs",
    "web_search_options": "there is no web search",
    "suffix": "fill-in-the-middle is not implemented",
    "logits_processors": "code sent in a request is never run",
    "tools": "only /v1/chat/completions has tools",
    "tool_choice": "only /v1/chat/completions has tools",
}

FIXES = {
    "best_of": "send n with logprobs, and keep the completion with the largest sum of logprobs",
}

SYNONYMS = {
    "n_predict": "max_tokens",
    "repeat_penalty": "repetition_penalty",
    "regex": "guided_regex",
    "ebnf": "guided_grammar",
}
"""Names that llama.cpp's and SGLang's servers have beside OpenAI's fields, and what they are called here: each
would change the answer, and is read where the other is left out."""

_NUMBER = re.compile(r"\[\d+\]")
_MISSING = re.compile(r"Object missing required field `(\w+)`")


def check_fields(body: dict[str, Any], honoured: frozenset[str]) -> dict[str, Any]:
    """The honoured part of a body, without nulls; raises on the first field that cannot be honoured."""
    kept = {}
    ignored = IGNORED.get()
    for name, value in body.items():
        if value is None:
            continue
        if name in SYNONYMS and name not in honoured and body.get(SYNONYMS[name]) is None:
            name = SYNONYMS[name] if SYNONYMS[name] in honoured else name
        if name in honoured:
            kept[name] = value
        elif name in HARMLESS:
            pass
        elif name in QUIET:
            _check_quiet(name, value)
        elif name in UNSUPPORTED:
            raise unsupported(name, WHY.get(name, ""), FIXES.get(name))
        elif ignored.strict:
            raise _unknown(name, honoured)
        else:
            ignored.add(name, honoured)
    return kept


def check_members(given: Any, kind: type[msgspec.Struct], where: str, *, beside: Collection[str] = ()) -> None:
    """The same for an object inside of a body, which is left as it is: what it has that `kind` has not. `beside`:
    further names that say nothing."""
    if not isinstance(given, dict):
        return  # Told by whoever converts it.
    known = honoured_fields(kind)
    for name, value in given.items():
        if value is not None and name not in known and name not in beside:
            ignore_or_refuse(f"{where}.{name}", known)


def ignore_or_refuse(place: str, known: Collection[str] = ()) -> None:
    """A field inside of a body, by its path, that nothing is done with."""
    ignored = IGNORED.get()
    if ignored.strict:
        shown = shorten(place, 150)
        raise RequestError(f"unknown field {shown}", fix=f"leave {shown} out", field=shown)
    # Of messages and their parts there are many: a place is told without its number.
    ignored.add(_NUMBER.sub("[]", place), known)


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
        "/v1/score": honoured_fields(ScoreBody),
        "/v1/rerank": honoured_fields(RerankBody),
        "/classify": honoured_fields(ClassifyBody),
        "/pooling": honoured_fields(PoolingBody),
    }


def _check_quiet(name: str, value: Any) -> None:
    # Compared with type, because in Python True == 1.
    if not any(type(value) is type(quiet) and value == quiet for quiet in QUIET[name]):
        raise unsupported(name, WHY.get(name, ""), FIXES.get(name))


def unsupported(name: str, why: str = "", fix: str | None = None) -> UnsupportedOptionError:
    reason = f": {why}" if why else ""
    return UnsupportedOptionError(f"{name} is not supported here{reason}", fix=fix or f"leave {name} out", field=name)


@cache
def honoured_fields(kind: type[msgspec.Struct]) -> frozenset[str]:
    return frozenset(field.encode_name for field in msgspec.structs.fields(kind))


def convert(body: Any, kind: Any, where: str = "", *, strict: bool = False) -> Any:
    """To the typed body, or an error that names the field; `where`: the one that `body` itself is. Numbers may come as
    text ("0.5") and switches as "true" or 1, as vLLM takes them, unless it is `strict`."""
    try:
        return msgspec.convert(body, kind, strict=strict)
    except msgspec.ValidationError as error:
        text = str(error)
        what, _, path = text.partition(" - at `")
        field = where + path.rstrip("`").removeprefix("$").removeprefix("." if not where else "") or None
        missing = _MISSING.fullmatch(what)
        if missing is not None:
            # The place is where the field is not; what a client looks for is the field.
            name = f"{field}.{missing[1]}" if field else missing[1]
            raise RequestError(f"{name} is missing", needed=name, field=name) from None
        choices = _choices(kind, path.rstrip("`")) if "enum value" in what else ()
        needed = f"one of {', '.join(choices)}" if choices else None
        raise RequestError(f"{field or 'the body'}: {what[:1].lower()}{what[1:]}", needed=needed, field=field) from None


def _choices(kind: Any, path: str) -> list[str]:
    """The values that a field may have, by its place in a body (`$.tools[0].type`)."""
    types = [msgspec.inspect.type_info(kind)]
    for step in [None, *re.findall(r"\[\w*\.*\]|\.\w+", path)]:
        if step is not None:
            types = [inner for one in types for inner in _inside(one, step)]
        types = [
            inner for one in types for inner in (one.types if isinstance(one, msgspec.inspect.UnionType) else (one,))
        ]
    return [str(value) for one in types if isinstance(one, msgspec.inspect.LiteralType) for value in one.values]


def _inside(one: msgspec.inspect.Type, step: str) -> list[msgspec.inspect.Type]:
    if isinstance(one, msgspec.inspect.StructType) and step.startswith("."):
        return [field.type for field in one.fields if field.encode_name == step[1:]]
    if isinstance(one, msgspec.inspect.ListType) and step.startswith("["):
        return [one.item_type]
    return []
