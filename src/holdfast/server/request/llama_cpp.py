"""From the body of llama.cpp's /completion to what the engine is asked: its names become those of /v1/completions.

What a request leaves out is the server's default, as everywhere, not llama.cpp's own.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from holdfast.engine.interface import Engine
from holdfast.errors import RequestError
from holdfast.server.request.json_body import decode_object
from holdfast.server.request.parse import GenerationRequest, completion_request, tokenizer_of
from holdfast.server.request.workers.tokenize_pool import TokenizePool
from holdfast.server.schema.fields import check_fields, convert, honoured_fields, unsupported
from holdfast.server.schema.llama_cpp import COMPANIONS, HARMLESS_NATIVE, NEUTRAL, NativeBody, NativeOptions
from holdfast.server.schema.requests import CompletionBody
from holdfast.server.settings import ServerSettings

_FIELDS = honoured_fields(NativeBody)
MOST_BIASED_CHARS = 200
"""Of a text that is named by itself: words, not documents."""
NEVER = -100.0
"""The least bias: what llama.cpp writes as false."""
_COUNTS: dict[int | None, int | None] = {-1: None, 0: 1}
"""Of n_predict: to the end of the context, and nothing but the prompt."""
_NAMES = {"max_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "logprobs": "n_probs"}
"""Of /v1/completions, and here."""


async def read_native(
    raw: bytes, engine: Engine, settings: ServerSettings, *, pool: TokenizePool, request_id: str | None = None
) -> GenerationRequest:
    given = decode_object(raw)
    for name, values in NEUTRAL.items():
        value = given.pop(name, None)
        if value is not None and value not in values:
            raise unsupported(name, "this way of sampling is not implemented")
    for name in HARMLESS_NATIVE | COMPANIONS:
        given.pop(name, None)
    if "prompt" in given:
        given["prompt"] = _without_media(given["prompt"])
    body: NativeBody = convert(check_fields(given, _FIELDS), NativeBody)
    wanted = body.n_predict if body.n_predict is not None else body.max_tokens
    as_completion = CompletionBody(
        prompt=body.prompt,
        model=body.model,
        stream=body.stream,
        max_tokens=_COUNTS.get(wanted, wanted),
        temperature=None if body.temperature is None else max(body.temperature, 0.0),
        top_k=body.top_k,
        top_p=body.top_p,
        min_p=body.min_p,
        repetition_penalty=body.repeat_penalty,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        seed=None if body.seed == -1 else body.seed,
        stop=body.stop or None,
        ignore_eos=body.ignore_eos,
        logit_bias=_biases(body.logit_bias, engine),
        grammar=body.grammar,
        json_schema=body.json_schema,
        logprobs=body.n_probs or None,
        cache_salt=body.cache_salt,
        return_token_ids=True,  # Counted answer by answer.
    )
    try:
        ask = await completion_request(
            *(as_completion, engine, settings, pool),
            size_bytes=len(raw),
            default_tokens=settings.chat_max_tokens if wanted is None else None,
            request_id=request_id,
        )
    except RequestError as error:
        field, error.field = error.field or "", _NAMES.get(error.field or "", error.field)
        if field in _NAMES and error.message.startswith(field):
            error.message = f"{error.field}{error.message.removeprefix(field)}"
        raise
    text = body.prompt if isinstance(body.prompt, str) else ""
    # 0: only the prompt is wanted in the cache, which costs a token that nobody sees.
    return replace(ask, echoes_alone=wanted == 0, options=NativeOptions(return_tokens=body.return_tokens, prompt=text))


def _biases(given: Any, engine: Engine) -> dict[str, float] | None:
    """A text in place of an id means every token of it."""
    if given is None:
        return None
    pairs = list(given.items()) if isinstance(given, dict) else given
    if not all(len(pair) == 2 and not isinstance(pair[1], str) for pair in pairs):
        raise RequestError("logit_bias: expected pairs of a token id, or a text, and a number", field="logit_bias")
    found: dict[str, float] = {}
    for token, bias in pairs:
        ids = [token]
        if isinstance(token, str) and not token.isdigit():
            if len(token) > MOST_BIASED_CHARS:
                raise RequestError(
                    f"logit_bias: a text of {len(token)} characters; at most {MOST_BIASED_CHARS}", field="logit_bias"
                )
            ids = tokenizer_of(engine, "logit_bias").encode(token, add_special_tokens=False)
        value = NEVER if bias is False else float(bias)
        found |= {str(one).removesuffix(".0"): value for one in ids}
    return found


def _without_media(prompt: Any) -> Any:
    """llama.cpp's prompts as objects, of text and images, as the text they have: one, or several in a list."""
    if isinstance(prompt, list):
        return [_text_of(one) for one in prompt] if any(isinstance(one, dict) for one in prompt) else prompt
    return _text_of(prompt)


def _text_of(prompt: Any) -> Any:
    if not isinstance(prompt, dict) or not isinstance(prompt.get("prompt_string"), str):
        return prompt
    if prompt.get("multimodal_data"):
        raise unsupported("multimodal_data", "only text input is supported")
    return prompt["prompt_string"]
