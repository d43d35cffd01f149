"""Checks a request against vocabulary and context and makes one `Request` per output. No tensors.

What passes here can be computed: a bad one is refused before it costs anything.
"""

from __future__ import annotations

import operator
import random
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from holdfast.checkpoints.pooling import LAST
from holdfast.engine.requests.embedding import embedding_too_long
from holdfast.errors import ContextLengthError, OverloadedError, RequestError, UnsupportedOptionError
from holdfast.models import ModelSpec
from holdfast.records import AdapterRef, Request, SamplingParams
from holdfast.records.sampling import MAX_LOGPROBS, WHOLE_VOCABULARY
from holdfast.records.structured import StructuredOutputsParams
from holdfast.text.structured.checker import is_cheap
from holdfast.text.structured.client import check_model
from holdfast.text.structured.wire import GrammarCost
from holdfast.text.tokenizer.bad_words import spell_bad_words
from holdfast.text.tokenizer.tokenizer import Tokenizer


@dataclass(slots=True)
class Admission:
    spec: ModelSpec
    max_model_len: int
    seeds: random.Random
    """Draws for requests that bring no seed."""
    tokenizer: Tokenizer | None = None
    """Spells bad words; without one, requests that bring them are refused."""
    grammar_cost: Callable[[StructuredOutputsParams], GrammarCost | None] | None = None
    """Of structured output, which it refuses where it cannot be; None: it is not known."""
    clamp_output: bool = False
    """More max_tokens than the context has left: give what is left (as vLLM's LLM does), or refuse (as servers do)."""

    def admit(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        adapter: AdapterRef | None = None,
        embed: bool = False,
        progress: bool = False,
    ) -> list[Request]:
        """`embed`: not a token is wanted but the prompt as a vector, or as a classifier's scores."""
        if self.spec.classifier is not None and not embed:
            raise UnsupportedOptionError(
                f"this model ({self.spec.architecture}) classifies texts and cannot generate any",
                fix="POST /classify, /score or /rerank; in Python LLM.classify or LLM.score",
            )
        if embed and self.spec.classifier is None and self.spec.pooling != LAST:
            raise UnsupportedOptionError(
                f"this model's files ask for {self.spec.pooling} pooling, which is not supported",
                needed="last-token pooling",
                found=f"{self.spec.pooling} (1_Pooling/config.json and modules.json, or pooling_type of a GGUF file)",
                fix="an embedding model that is pooled by its last token, such as Qwen/Qwen3-Embedding-0.6B",
            )
        if params.prompt_logprobs == WHOLE_VOCABULARY:  # A number by now, where it may be asked for.
            raise RequestError("prompt_logprobs is -1", needed=f"from 0 to {MAX_LOGPROBS}", field="prompt_logprobs")
        # The length first: it bounds what the other checks cost.
        params = params.replace(max_tokens=self._output_limit(len(prompt_token_ids), params, embed))
        prompt = self._whole_ids("prompt", prompt_token_ids)
        self._whole_ids("logit_bias", params.logit_bias or ())
        self._whole_ids("stop_token_ids", params.stop_ids)
        self._whole_ids("allowed_token_ids", params.allowed_token_ids or ())
        self._whole_ids("logprob_token_ids", params.logprob_token_ids or ())
        bad_words = self._spelled(params)
        costly = self._check_grammar(params)
        eos = () if params.ignore_eos else self.spec.eos_token_ids
        self._check_choice(params, bad_words, eos)
        seed = self.seeds.getrandbits(62) if params.seed is None else params.seed
        arrival_s = time.monotonic()
        return [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}#{index}",
                prompt_token_ids=prompt,
                # Each answer has random numbers of its own, and they repeat when the seed does. One of them tells of
                # the prompt; the others may find it in the cache.
                params=params.replace(
                    n=1, seed=_nth_seed(seed, index), prompt_logprobs=None if index else params.prompt_logprobs
                ),
                arrival_s=arrival_s,
                priority=priority,
                cache_salt=cache_salt,
                eos_token_ids=eos,
                bad_word_ids=bad_words,
                adapter=adapter,
                costly_grammar=costly,
                embed=embed,
                progress=progress and index == 0,
            )
            for index in range(params.n)
        ]

    def _spelled(self, params: SamplingParams) -> list[list[int]]:
        if not params.bad_words:
            return []
        if self.tokenizer is None:
            raise RequestError("bad_words needs a tokenizer", fix="leave skip_tokenizer_init out", field="bad_words")
        return spell_bad_words(params.bad_words, self.tokenizer)

    def _check_grammar(self, params: SamplingParams) -> bool:
        """Whether what its answer must look like is costly."""
        wanted = params.structured_outputs
        if wanted is None:
            return False
        field = "structured_outputs"
        if self.tokenizer is None:
            raise RequestError(f"{field} needs a tokenizer", fix="leave skip_tokenizer_init out", field=field)
        check_model(self.tokenizer, self.spec.eos_token_ids)
        cost = None if self.grammar_cost is None else self.grammar_cost(wanted)
        return cost is None or not is_cheap(cost)

    def _check_choice(self, params: SamplingParams, bad_words: list[list[int]], eos: Sequence[int]) -> None:
        """There must be a token left to sample wherever bad words forbid theirs and ends have to wait."""
        forbidden = {word[-1] for word in bad_words}
        if params.min_tokens:
            forbidden |= {*eos, *params.stop_ids}
        allowed = params.allowed_token_ids
        left = self.spec.vocab_size - len(forbidden) if allowed is None else len(set(allowed) - forbidden)
        if left < 1:
            field = "allowed_token_ids" if allowed is not None else "bad_words"
            raise RequestError(
                "bad_words, min_tokens and allowed_token_ids leave no token to sample",
                needed="an allowed token that completes no bad word and, unless min_tokens is 0, is not a stop token",
                found="none",
                field=field,
            )

    def _whole_ids(self, field: str, given: Iterable[object]) -> list[int]:
        """Whole numbers of any library become int; True and 1.0 are mistakes."""
        ids: list[int] = []
        for token in given:
            # Nearly always an int, and there may be very many.
            known = type(token) is int or (hasattr(token, "__index__") and not isinstance(token, bool))
            number = operator.index(token) if known else -1  # type: ignore[arg-type]
            if not 0 <= number < self.spec.vocab_size:
                raise RequestError(
                    f"{field} contains {str(token)[:40]}, which is out of vocabulary: not a token of this model",
                    needed=f"integers from 0 to {self.spec.vocab_size - 1}",
                    found=f"{str(token)[:40]} ({type(token).__name__})",
                    field=field,
                )
            ids.append(number)
        return ids

    def _longer(self) -> str:
        """What helps a prompt that is too long: a larger setting only where the model has more to give."""
        most = self.spec.max_position
        if self.max_model_len < most:
            return f"shorten the prompt, or serve with a larger max_model_len (the model supports up to {most} tokens)"
        return f"shorten the prompt, or use a model with a longer context: this one supports at most {most} tokens"

    def _beyond(self, prompt_length: int, output_length: int) -> str:
        """vLLM's words: clients and routers (LiteLLM) know by them that another model may take the request."""
        return (
            f"This model's maximum context length is {self.max_model_len} tokens. However, you requested "
            f"{prompt_length + output_length} tokens ({prompt_length} in the messages, {output_length} in the "
            "completion). Please reduce the length of the messages or completion."
        )

    def _output_limit(self, prompt_length: int, params: SamplingParams, embed: bool) -> int:
        if prompt_length == 0:
            raise RequestError("the prompt is empty", needed="at least one token", found="none", field="prompt")
        left = self.max_model_len - prompt_length
        if left < 1:
            raise ContextLengthError(
                embedding_too_long(f"{prompt_length} tokens", self.max_model_len)
                if embed
                else self._beyond(prompt_length, params.max_tokens or 1),
                needed=f"{prompt_length + 1} tokens",
                found=f"{self.max_model_len} tokens",
                fix=self._longer(),
                field="prompt",
            )
        if params.max_tokens is None:
            return left
        if params.max_tokens > left and not self.clamp_output:
            raise ContextLengthError(
                self._beyond(prompt_length, params.max_tokens),
                needed=f"{prompt_length + params.max_tokens} tokens",
                found=f"{self.max_model_len} tokens",
                fix=f"lower max_tokens to at most {left}, or shorten the prompt",
                field="max_tokens",
            )
        limit = min(params.max_tokens, left)
        if params.min_tokens > limit:
            raise ContextLengthError(
                f"min_tokens asks for {params.min_tokens} tokens, but at most {limit} can be generated",
                needed=f"{params.min_tokens} tokens",
                found=f"{limit} tokens",
                field="min_tokens",
            )
        return limit


def check_room(answers: int, unfinished: int, max_num_seqs: int, max_queued_requests: int) -> None:
    """Whether so many more answers can be taken, now or ever."""
    most = max_num_seqs + max_queued_requests
    if answers > most:
        raise RequestError(
            f"the request asks for {answers} completions (prompts times n); the limit of this server is {most}",
            needed=f"at most {most} completions",
            found=str(answers),
            fix="send fewer prompts in one request or lower n, or serve with a larger --max-queued-requests",
            field="n",
        )
    if unfinished + answers > most:
        raise OverloadedError(
            f"the queue is full: {unfinished} requests are unfinished",
            needed=f"room for {answers} more",
            found=f"{max_num_seqs} running and {max_queued_requests} waiting at most",
            fix="try again later, or serve with a larger --max-queued-requests",
        )


def _nth_seed(seed: int, index: int) -> int:
    """The first answer uses the seed as it is; the others one far from every seed a user would choose."""
    return seed if index == 0 else (seed + index * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63
