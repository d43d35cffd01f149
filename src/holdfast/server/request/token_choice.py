"""How a body wants its tokens searched for and told of: beam search, log-probabilities, biases. Knows nothing of
prompts and of structured output.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from holdfast.engine.requests.beam_search import one_token
from holdfast.errors import RequestError
from holdfast.records import SamplingParams
from holdfast.records.beams import BeamSearchParams
from holdfast.records.sampling import MAX_LOGPROBS, WHOLE_VOCABULARY
from holdfast.server.request.logprob_budget import check_told, told_entries
from holdfast.server.schema.fields import unsupported
from holdfast.server.schema.requests import Common
from holdfast.server.settings import ServerSettings

_NOT_WITH_BEAMS = (
    "stop", "stop_token_ids", "min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
    "allowed_token_ids", "bad_words", "structured_outputs", "prompt_logprobs",
    "logprob_token_ids",
)  # fmt: skip


def check_logprobs(count: int | None, field: str, most: int) -> None:
    """`most`: that this server allows; -1 is of prompts."""
    most = MAX_LOGPROBS if most == WHOLE_VOCABULARY else most
    if count == -1:
        named = "" if field == "prompt_logprobs" else ", or logprob_token_ids for the tokens that matter"
        raise RequestError(
            f"{field} is -1, the whole vocabulary, which is greater than max allowed: {most}",
            needed=f"from 0 to {most}",
            found="-1",
            fix=f"{field}: {most}{named}",
            field=field,
        )
    if count is not None and not 0 <= count <= most:
        raise RequestError(f"{field} is {count}; it must be between 0 and {most}", field=field)


def shown_logprobs(body: Common, asked: int | None, most: int) -> int | None:
    """Of each token, beside itself. All that were asked for by their ids, and the chosen one among them, as in vLLM.
    `most`: that this server allows."""
    named = body.logprob_token_ids
    if not named:
        return asked
    if asked is None:
        raise RequestError("logprob_token_ids needs logprobs", needed="logprobs", field="logprob_token_ids")
    most = MAX_LOGPROBS - 1 if most == WHOLE_VOCABULARY else min(most, MAX_LOGPROBS - 1)
    if len(named) > most:
        raise RequestError(f"logprob_token_ids has {len(named)} ids; at most {most}", field="logprob_token_ids")
    return len(named) + 1


def check_prompt_logprobs(body: Common, settings: ServerSettings) -> None:
    """-1 becomes as many as the vocabulary has, where the server allows that."""
    most = settings.max_logprobs
    if body.prompt_logprobs == most == WHOLE_VOCABULARY:
        body.prompt_logprobs = settings.vocabulary
    else:
        check_logprobs(body.prompt_logprobs, "prompt_logprobs", most)
    if body.prompt_logprobs is not None and body.stream:
        raise unsupported("prompt_logprobs", "it cannot be streamed; leave stream out")


def prompt_logprob_entries(
    body: Common, prompts: list[list[int]], params: SamplingParams, settings: ServerSettings, *, echoed: bool
) -> int:
    if params.prompt_logprobs is None:
        return 0
    # An echo shows them in OpenAI's shape; what is not a stream, in vLLM's.
    copies = int(echoed) + int(not body.stream)
    field = "logprobs" if echoed else "prompt_logprobs"
    lengths, limit = [len(prompt) for prompt in prompts], told_entries(settings.max_logprobs)
    return check_told(lengths, params.prompt_logprobs, copies, field, limit)


def check_bias_ids(keys: Iterable[str]) -> None:
    wrong = [key for key in keys if not (key.isascii() and key.isdigit() and len(key) < 10)]
    if wrong:
        shown = ", ".join(repr(key[:50]) for key in wrong[:3]) + (", ..." if len(wrong) > 3 else "")
        said = "is not a token id" if len(wrong) == 1 else "are not token ids"
        raise RequestError(f"logit_bias: {shown} {said}", field="logit_bias")


def beams_of(body: Common, params: SamplingParams) -> BeamSearchParams | None:
    """What would choose other tokens than a search does is refused, where vLLM passes it over."""
    if not body.use_beam_search:
        return None
    for name in _NOT_WITH_BEAMS:
        if getattr(params, name) not in (None, [], {}, 0, 1.0):
            raise unsupported(name, "it cannot be combined with use_beam_search")
    beams = BeamSearchParams(
        beam_width=params.n,
        max_tokens=params.max_tokens or 0,
        ignore_eos=params.ignore_eos,
        temperature=body.temperature or 0.0,
        length_penalty=body.length_penalty,
        include_stop_str_in_output=params.include_stop_str_in_output,
    )
    one_token(beams if params.max_tokens is not None else replace(beams, max_tokens=1))
    return beams
