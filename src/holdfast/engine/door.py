"""Where a request comes in: checked against model and context, unfolded into one Request an answer. No tensors.

What passes here can be computed: a bad one is refused before it costs anybody anything.
"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.errors import ContextLengthError, RequestError
from holdfast.models import ModelSpec
from holdfast.records import Request, SamplingParams


@dataclass(slots=True)
class Door:
    spec: ModelSpec
    max_model_len: int
    seeds: random.Random
    """Draws for requests that bring no seed."""
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
    ) -> list[Request]:
        prompt = list(prompt_token_ids)
        self._check_ids(prompt, params)
        params = params.replace(max_tokens=self._output_limit(len(prompt), params))
        seed = self.seeds.getrandbits(62) if params.seed is None else params.seed
        arrival_s = time.monotonic()
        return [
            Request(
                request_id=request_id if params.n == 1 else f"{request_id}#{index}",
                prompt_token_ids=prompt,
                # Each answer has random numbers of its own, and they repeat when the seed does.
                params=params.replace(n=1, seed=_nth_seed(seed, index)),
                arrival_s=arrival_s,
                priority=priority,
                cache_salt=cache_salt,
                eos_token_ids=() if params.ignore_eos else self.spec.eos_token_ids,
            )
            for index in range(params.n)
        ]

    def _check_ids(self, prompt: list[int], params: SamplingParams) -> None:
        vocabulary = self.spec.vocab_size
        if not prompt:
            raise RequestError("the prompt is empty", needed="at least one token", found="none", field="prompt")
        if min(prompt) < 0 or max(prompt) >= vocabulary:
            wrong = next(token for token in prompt if not 0 <= token < vocabulary)
            raise RequestError(
                f"the prompt holds token id {wrong}, outside the vocabulary",
                needed=f"ids from 0 to {vocabulary - 1}",
                found=str(wrong),
                field="prompt",
            )
        for field, ids in (("logit_bias", params.logit_bias or {}), ("stop_token_ids", params.stop_ids)):
            for token in ids:
                if not 0 <= token < vocabulary:
                    raise RequestError(
                        f"{field} names token id {token}, outside the vocabulary",
                        needed=f"ids from 0 to {vocabulary - 1}",
                        found=str(token),
                        field=field,
                    )

    def _output_limit(self, prompt_length: int, params: SamplingParams) -> int:
        left = self.max_model_len - prompt_length
        if left < 1:
            raise ContextLengthError(
                f"the prompt has {prompt_length} tokens, but the context is {self.max_model_len} tokens "
                "and one must be left for the answer",
                needed=f"{prompt_length + 1} tokens",
                found=f"{self.max_model_len} tokens",
                fix="shorten the prompt, or serve with a larger --max-model-len",
                field="prompt",
            )
        if params.max_tokens is None:
            return left
        if params.max_tokens > left and not self.clamp_output:
            raise ContextLengthError(
                f"the prompt has {prompt_length} tokens and max_tokens asks for {params.max_tokens} more: "
                f"{prompt_length + params.max_tokens} in all, but the context is {self.max_model_len} tokens",
                needed=f"{prompt_length + params.max_tokens} tokens",
                found=f"{self.max_model_len} tokens",
                fix=f"max_tokens of at most {left}, or a shorter prompt",
                field="max_tokens",
            )
        limit = min(params.max_tokens, left)
        if params.min_tokens > limit:
            raise ContextLengthError(
                f"min_tokens asks for {params.min_tokens} tokens, but only {limit} can be given",
                needed=f"{params.min_tokens} tokens",
                found=f"{limit} tokens",
                field="min_tokens",
            )
        return limit


def _nth_seed(seed: int, index: int) -> int:
    """The first answer uses the seed as it is; the others one far from every seed a user would choose."""
    return seed if index == 0 else (seed + index * 0x9E3779B97F4A7C15 + 2**63) % 2**64 - 2**63
