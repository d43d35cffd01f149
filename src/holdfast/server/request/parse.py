"""From a request's body to what the engine is asked: token ids and SamplingParams.

Owns defaults, prompts and what must be refused before the engine is asked; whether a request fits model and context
is the engine's own door's to say. Knows nothing of HTTP and of how answers look.
"""

from __future__ import annotations

import contextlib
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from holdfast.engine.interface import Engine
from holdfast.errors import GrammarError, RequestError, UnknownModelError, UnsupportedOptionError
from holdfast.records import AdapterRef, SamplingParams
from holdfast.records.beams import BeamSearchParams
from holdfast.server.request.chat import chat_prompt, final_answer
from holdfast.server.request.json_body import decode_object
from holdfast.server.request.output_parser import OutputParserConfig
from holdfast.server.request.structured_output import form_of
from holdfast.server.request.token_choice import (
    beams_of,
    check_bias_ids,
    check_logprobs,
    check_prompt_logprobs,
    prompt_logprob_entries,
    shown_logprobs,
)
from holdfast.server.request.workers.template_workers import TemplateWorkers
from holdfast.server.request.workers.tokenize_pool import TokenizePool, Truncation, check_ids, encode_within
from holdfast.server.schema.fields import (
    check_fields,
    check_members,
    convert,
    honoured_fields,
    ignore_or_refuse,
    unsupported,
)
from holdfast.server.schema.ignored import IGNORED
from holdfast.server.schema.llama_cpp import LlamaMembers, llama_members
from holdfast.server.schema.pooling import PoolingCommon
from holdfast.server.schema.requests import ChatBody, Common, CompletionBody, StreamOptions, TokenId
from holdfast.server.settings import ServerSettings
from holdfast.units import shorten

if TYPE_CHECKING:
    from holdfast.text.tokenizer.tokenizer import Tokenizer

BytesOf = Callable[[int], bytes | None]

COMPLETION_MAX_TOKENS = 16
"""OpenAI's default for /v1/completions; a chat may use the rest of the context."""
TO_THE_END = -1
"""Of max_tokens, as llama.cpp's clients and LM Studio's write that there is no limit but the context."""
MAX_PROMPTS = 1024

_CHAT_FIELDS = honoured_fields(ChatBody)
_COMPLETION_FIELDS = honoured_fields(CompletionBody)
_SAMPLING_NAMES = (
    "n", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "presence_penalty",
    "frequency_penalty", "repetition_penalty", "seed", "stop", "stop_token_ids", "ignore_eos",
    "skip_special_tokens", "include_stop_str_in_output", "prompt_logprobs", "allowed_token_ids",
    "bad_words", "spaces_between_special_tokens", "logprob_token_ids",
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """Everything settled: the engine can be called, and the answer can be given its shape."""

    answer_id: str
    engine_id: str
    """Unique, whatever id the client asked for."""
    created: int
    model: str
    prompts: list[list[int]]
    prompt_field: str
    """What they were made of, as the client called it."""
    echoes: list[str] | None
    """Texts to put before the answers, one a prompt: of a chat, the answer that its messages have begun."""
    echoes_alone: bool
    """max_tokens: 0: the prompt is all that is wanted."""
    first_tokens: list[str] | None
    """The text of the first token of each prompt, where logprobs are echoed: it has none, and is shown all the same."""
    prompt_logprob_entries: int
    """Log-probabilities of its prompts that are held for it."""
    params: SamplingParams
    default_max_tokens: bool
    """Whether max_tokens is a default, which gives way where the context has less left."""
    logprobs: int | None
    bytes_of: BytesOf | None
    stream: bool
    include_usage: bool
    continuous_usage: bool
    priority: int
    cache_salt: str
    adapter: AdapterRef | None = None
    """The LoRA adapter that the request named in the model's place."""
    with_token_ids: bool
    """Whether ids are shown beside the text."""
    tokens_as_ids: bool
    """Whether logprobs name tokens by their ids (`token_name`)."""
    prompt_text: str | None
    """A chat's prompt as the template has rendered it, where it is to be shown."""
    reading: OutputParserConfig | None
    """How an answer's text is to be read; None: it is content and nothing else."""
    beams: BeamSearchParams | None = None
    """Of a beam search, which has as many beams as answers."""
    members: LlamaMembers | None = None
    """What llama.cpp's clients have asked for beside OpenAI's members."""
    options: object | None = None
    """Of an API other than OpenAI's chats and completions: what its ResponseFormatter must know."""


async def read_chat(
    raw: bytes,
    engine: Engine,
    settings: ServerSettings,
    *,
    workers: TemplateWorkers,
    pool: TokenizePool,
    request_id: str | None = None,
) -> GenerationRequest:
    """`request_id`: as the client named its request outside of the body."""
    given = decode_object(raw)
    return await chat_request(
        given, len(raw), engine, settings, workers=workers, pool=pool, request_id=request_id, endless=True
    )


async def chat_request(
    given: dict[str, Any],
    size_bytes: int,
    engine: Engine,
    settings: ServerSettings,
    *,
    workers: TemplateWorkers,
    pool: TokenizePool,
    request_id: str | None = None,
    prefix: str = "chatcmpl",
    endless: bool = False,
) -> GenerationRequest:
    """`given`: as it was sent, or as another API's body was translated. `size_bytes`: of the raw body. `prefix`: of the
    answer's id. `endless`: whether max_tokens may be -1."""
    fields = check_fields(given, _CHAT_FIELDS)
    body: ChatBody = convert(fields, ChatBody)
    _check_inner(fields, stream=body.stream)
    model = served_model(body.model, settings)
    tokenizer = tokenizer_of(engine, "messages")
    if body.max_completion_tokens is not None:
        body.max_tokens = body.max_completion_tokens  # OpenAI's newer name, and as in vLLM it wins.
    default_tokens = settings.chat_max_tokens
    if endless and body.max_tokens == TO_THE_END:
        body.max_tokens = default_tokens = None
    if body.top_logprobs and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", field="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    check_logprobs(logprobs, "top_logprobs", settings.max_logprobs)
    logprobs = shown_logprobs(body, logprobs, settings.max_logprobs)
    check_prompt_logprobs(body, settings)
    params = _sampling(body, settings, logprobs=logprobs, max_tokens=default_tokens)
    _check_places(params.n, engine, settings, "n")
    cut = truncation_of(body, engine.info.max_model_len, body.max_tokens)
    chat = await chat_prompt(body, fields.get("tools"), tokenizer, engine, settings, size_bytes, workers, pool, cut)
    reading = chat.reading
    try:
        if reading is not None:
            params, reading = await pool.run(
                partial(reading.adjusted, params, tokenizer, engine.structured), size_bytes
            )
        await _check_structured(params, engine)
        for arguments in reading.strict_arguments if reading is not None else ():
            assert engine.structured is not None
            with contextlib.suppress(GrammarError):  # Then no text has them.
                await engine.structured.check(arguments)
    except RequestError as error:
        if reading is not None and reading.use is not None and error.field == "grammar":
            # The client sent no grammar: it was made of these.
            error.field, error.message = "tools", f"tools: {error.message.removeprefix('grammar: ')}"
        raise
    echoes = [final_answer(body)] if body.echo else None
    return _ask(
        body,
        prefix,
        model,
        [chat.ids],
        params,
        settings,
        logprobs,
        echoes=echoes,
        bytes_of=tokenizer.bytes_of,
        prompt_text=chat.text if body.return_prompt_text else None,
        members=llama_members(body, chat.text),
        reading=reading,
        request_id=request_id,
    )


async def read_completion(
    raw: bytes, engine: Engine, settings: ServerSettings, *, pool: TokenizePool, request_id: str | None = None
) -> GenerationRequest:
    fields = check_fields(decode_object(raw), _COMPLETION_FIELDS)
    if isinstance(fields.get("logprobs"), bool):  # As a chat has it: of the tokens themselves, and the likeliest.
        fields["logprobs"] = 1 if fields["logprobs"] else None
    body: CompletionBody = convert(fields, CompletionBody)
    _check_inner(fields, stream=body.stream)
    return await completion_request(body, engine, settings, pool, size_bytes=len(raw), request_id=request_id)


async def completion_request(
    body: CompletionBody,
    engine: Engine,
    settings: ServerSettings,
    pool: TokenizePool,
    *,
    size_bytes: int,
    default_tokens: int | None = COMPLETION_MAX_TOKENS,
    request_id: str | None = None,
) -> GenerationRequest:
    """`size_bytes`: of the raw body. `default_tokens`: of an answer, where the body does not say; None: no limit."""
    model = served_model(body.model, settings)
    if body.max_tokens == TO_THE_END:
        body.max_tokens = default_tokens = None
    check_logprobs(body.logprobs, "logprobs", settings.max_logprobs)
    check_prompt_logprobs(body, settings)
    if body.echo and body.logprobs is not None and body.stream and (body.n or 1) > 1:
        raise unsupported("echo", "echo with logprobs and n cannot be streamed; leave stream out")
    if engine.tokenizer is None:
        _refuse_text(body)
    alone = body.echo and body.max_tokens == 0
    if alone:
        body.max_tokens = 1
    if alone and body.logprob_token_ids:
        raise unsupported("logprob_token_ids", "no output tokens are generated")
    if body.echo and body.prompt_logprobs is None:
        body.prompt_logprobs = body.logprobs
    body.logprobs = shown_logprobs(body, body.logprobs, settings.max_logprobs)
    params = _sampling(body, settings, logprobs=body.logprobs, max_tokens=default_tokens)
    if params.structured_outputs is not None:
        await _check_structured(params, engine)
    context = engine.info.max_model_len
    cut = truncation_of(body, context, body.max_tokens)
    texts, prompts = split_prompts(body.prompt, context, truncation=cut)
    _check_places(len(texts or prompts) * params.n, engine, settings, "prompt")
    if texts is not None:
        encode = partial(
            encode_within,
            context,
            tokenizer_of(engine, "prompt"),
            field="prompt",
            add_special_tokens=body.add_special_tokens is not False,
            truncation=cut,
        )
        given = texts
        prompts = await pool.run(lambda: [encode(text) for text in given], size_bytes)
    if body.echo and (texts is None or cut is not None):
        texts = [tokenizer_of(engine, "echo").decode(prompt) for prompt in prompts]
    if not all(prompts):
        raise RequestError("prompt: a prompt has no tokens", field="prompt")
    firsts = None
    if body.echo and body.logprobs is not None:
        as_ids = _tokens_as_ids(body, settings)
        decode = tokenizer_of(engine, "echo").decode
        firsts = [token_name(prompt[0]) if as_ids else decode([prompt[0]]) for prompt in prompts]
    echoes = texts if body.echo else None
    return _ask(
        body,
        "cmpl",
        model,
        prompts,
        params,
        settings,
        body.logprobs,
        echoes=echoes,
        alone=alone,
        first_tokens=firsts,
        members=llama_members(body, body.prompt if isinstance(body.prompt, str) else None),
        request_id=request_id,
    )


def _check_inner(fields: dict[str, Any], *, stream: bool) -> None:
    """What objects inside of a body have that is not known. An empty one says nothing, also where it has no place."""
    options = fields.get("stream_options")
    if options and not stream:
        raise RequestError("stream_options needs stream: true", field="stream_options")
    check_members(options, StreamOptions, "stream_options")
    if isinstance(options, dict) and options.get("include_obfuscation"):
        ignore_or_refuse("stream_options.include_obfuscation")


async def _check_structured(params: SamplingParams, engine: Engine) -> None:
    wanted = params.structured_outputs
    if wanted is None:
        return
    if engine.structured is None:
        tokenizer_of(engine, "structured_outputs")
    assert engine.structured is not None
    await engine.structured.check(wanted)


def _refuse_text(body: CompletionBody) -> None:
    """Without a tokenizer: what would be passed over in silence, because it needs text."""
    for name in ("stop", "echo", "logprobs", "include_stop_str_in_output"):
        if getattr(body, name) not in (None, False):
            raise unsupported(name, "this server runs without a tokenizer (--skip-tokenizer-init)")
    if body.return_token_ids is False:
        raise unsupported("return_token_ids", "without a tokenizer the output can only be token ids")
    body.return_token_ids = True


def _check_places(answers: int, engine: Engine, settings: ServerSettings, field: str) -> None:
    """More than the engine can ever hold is the request's own fault; an engine full of others' work is not."""
    if settings.max_queued_requests is None:
        return
    places = engine.info.max_num_seqs + settings.max_queued_requests
    if answers > places:
        raise RequestError(
            f"the request asks for {answers} completions at once; the limit of this server is {places}",
            needed=f"{answers} completions",
            found=f"{engine.info.max_num_seqs} running and {settings.max_queued_requests} queued at most",
            fix="send fewer prompts in one request, or a smaller n",
            field=field,
        )
    engine.check_room(answers)


def token_name(token_id: int) -> str:
    """vLLM's, where tokens are to be told apart whose text is the same, or is none."""
    return f"token_id:{token_id}"


def truncation_of(body: Common | PoolingCommon, context: int, max_tokens: int | None) -> Truncation | None:
    """None: a prompt that is too long is refused. `max_tokens`: that the answer shall have, if it was said."""
    keep = body.truncate_prompt_tokens
    if keep is None:
        return None
    room = max(context - max(max_tokens or 0, 1), 0)
    if keep > context - (max_tokens or 0):
        raise RequestError(
            f"truncate_prompt_tokens is {keep}; the context of {context} tokens leaves {room} for the prompt",
            needed=f"at most {room}",
            found=str(keep),
            fix="truncate_prompt_tokens: -1 keeps as many as fit",
            field="truncate_prompt_tokens",
        )
    return Truncation(room if keep < 0 else keep, body.truncation_side or "left")


def split_prompts(
    prompt: Any,
    context: int,
    *,
    field: str = "prompt",
    most: int = MAX_PROMPTS,
    truncation: Truncation | None = None,
) -> tuple[list[str] | None, list[list[int]]]:
    """Texts, or lists of token ids: OpenAI's four ways to write a prompt. Too many ids are not even looked at."""
    kept = truncation.of if truncation is not None else list[int]
    if isinstance(prompt, str):
        return [prompt], []
    if not isinstance(prompt, list) or not prompt:
        raise RequestError(
            f"{field}: expected a string, or a non-empty list of strings, token ids or lists of token ids",
            field=field,
        )
    if isinstance(prompt[0], int):
        prompt = kept(prompt)
        check_ids(len(prompt), context, field)
        return None, [convert(prompt, list[TokenId], field)]
    if len(prompt) > most:
        raise RequestError(f"{field}: {len(prompt)} prompts in one request; at most {most}", field=field)
    if isinstance(prompt[0], str):
        return convert(prompt, list[str], field), []
    listed = [kept(ids) if isinstance(ids, list) else ids for ids in prompt]
    for ids in listed:
        if isinstance(ids, list):
            check_ids(len(ids), context, field)
    return None, convert(listed, list[list[TokenId]], field)


def served_model(model: str | None, settings: ServerSettings) -> str:
    """The name to answer with, as in vLLM: the first of the model's own whichever was asked for, or the adapter's."""
    if model is not None and settings.adapter(model) is not None:
        return model
    if model is not None and model not in settings.served_model_names:
        ignored = IGNORED.get()
        if settings.any_model_name and not ignored.strict:
            ignored.add("model", why=f"another model is served here, {settings.served_model_names[0]}, and answers")
            return settings.served_model_names[0]
        raise UnknownModelError(
            f"the model {shorten(model)!r} does not exist",
            found=shorten(", ".join(settings.all_names)),
            fix="use one of the served names, or leave model out",
            field="model",
        )
    return settings.served_model_names[0]


def tokenizer_of(engine: Engine, field: str) -> Tokenizer:
    if engine.tokenizer is None:
        raise RequestError(f"{field}: this server runs without a tokenizer; send token ids", field=field)
    return engine.tokenizer


def no_priority() -> UnsupportedOptionError:
    return UnsupportedOptionError(
        "priority is not supported here: requests are served first come, first served",
        fix="leave priority out, or serve with --scheduling-policy priority",
        field="priority",
    )


def _tokens_as_ids(body: Common, settings: ServerSettings) -> bool:
    asked = body.return_tokens_as_token_ids
    return settings.tokens_as_ids if asked is None else asked


def _sampling(
    body: Common, settings: ServerSettings, *, logprobs: int | None, max_tokens: int | None
) -> SamplingParams:
    values: dict[str, Any] = {"max_tokens": max_tokens, **settings.default_sampling}
    for name in _SAMPLING_NAMES:
        value = getattr(body, name)
        if value is not None:
            values[name] = value
    if body.max_tokens is None and values["max_tokens"] is not None:
        # A default that nobody sent refuses nothing.
        values["max_tokens"] = max(values["max_tokens"], values.get("min_tokens", 0))
    if body.logit_bias:
        check_bias_ids(body.logit_bias)
        values["logit_bias"] = {int(key): bias for key, bias in body.logit_bias.items()}
    values["structured_outputs"] = form_of(body, settings.structured_outputs)
    return SamplingParams(**values, logprobs=logprobs)


def _ask(
    body: Common,
    prefix: str,
    model: str,
    prompts: list[list[int]],
    params: SamplingParams,
    settings: ServerSettings,
    logprobs: int | None,
    *,
    echoes: list[str] | None = None,
    alone: bool = False,
    first_tokens: list[str] | None = None,
    bytes_of: BytesOf | None = None,
    reading: OutputParserConfig | None = None,
    prompt_text: str | None = None,
    members: LlamaMembers | None = None,
    request_id: str | None = None,
) -> GenerationRequest:
    if body.priority and settings.scheduling_policy != "priority":
        raise no_priority()
    options = body.stream_options
    forced = body.stream and settings.force_include_usage
    usage = forced or (options is not None and bool(options.include_usage))
    # As in vLLM what the server forces is in every chunk.
    continuous = forced or (usage and options is not None and bool(options.continuous_usage_stats))
    unique = uuid.uuid4().hex
    return GenerationRequest(
        answer_id=f"{prefix}-{request_id or body.request_id or unique}",
        engine_id=f"{prefix}-{unique}",
        created=int(time.time()),
        model=model,
        prompts=prompts,
        prompt_field="messages" if isinstance(body, ChatBody) else "prompt",
        echoes=echoes,
        echoes_alone=alone,
        first_tokens=first_tokens,
        prompt_logprob_entries=prompt_logprob_entries(body, prompts, params, settings, echoed=first_tokens is not None),
        params=params,
        default_max_tokens=body.max_tokens is None,
        bytes_of=bytes_of,
        logprobs=logprobs,
        stream=body.stream,
        include_usage=usage,
        continuous_usage=continuous,
        priority=body.priority,
        cache_salt=body.cache_salt,
        adapter=settings.adapter(model),
        with_token_ids=bool(body.return_token_ids),
        tokens_as_ids=_tokens_as_ids(body, settings),
        prompt_text=prompt_text,
        members=members,
        reading=reading,
        beams=beams_of(body, params),
    )
