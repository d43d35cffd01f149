"""The works that are timed, the same token ids for every engine, and what physics would allow for each of them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from benchmarks.machine import Limits
from holdfast.models import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    stream_prompt: int = 32
    stream_output: int = 128
    prefill_prompt: int = 1500
    many_requests: int = 32
    many_prompt: int = 128
    many_output: int = 128
    sharing_requests: int = 16
    sharing_prefix: int = 1000
    sharing_own: int = 32
    sharing_output: int = 32


FULL = Sizes()
QUICK = Sizes(
    stream_output=16,
    prefill_prompt=256,
    many_requests=4,
    many_prompt=32,
    many_output=8,
    sharing_requests=4,
    sharing_prefix=300,
    sharing_own=16,
    sharing_output=4,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    name: str
    prompts: list[list[int]]
    output_tokens: int
    counts: Literal["prompt", "output", "seconds"]
    """What the row shows: prompt or output tokens a second, or the seconds themselves."""

    def value(self, seconds: float) -> float:
        if self.counts == "seconds":
            return seconds
        if self.counts == "prompt":
            return sum(len(prompt) for prompt in self.prompts) / seconds
        return len(self.prompts) * self.output_tokens / seconds


ROWS: dict[str, str] = {
    "one stream": "tok/s",
    "prefill": "tok/s",
    "many at once": "tok/s",
    "sharing, cold": "s",
    "sharing, hot": "s",
}


def make_round(sizes: Sizes, vocabulary: int, seed: int) -> list[Work]:
    """New ids in every round, so that no engine finds a prompt in its cache except where that is what is measured."""
    draw = random.Random(seed)

    def ids(count: int) -> list[int]:
        return [draw.randrange(100, vocabulary - 100) for _ in range(count)]

    prefix = ids(sizes.sharing_prefix)

    def sharing() -> list[list[int]]:
        return [prefix + ids(sizes.sharing_own) for _ in range(sizes.sharing_requests)]

    many = [ids(sizes.many_prompt) for _ in range(sizes.many_requests)]
    return [
        Work(name="one stream", prompts=[ids(sizes.stream_prompt)], output_tokens=sizes.stream_output, counts="output"),
        Work(name="prefill", prompts=[ids(sizes.prefill_prompt)], output_tokens=1, counts="prompt"),
        Work(name="many at once", prompts=many, output_tokens=sizes.many_output, counts="output"),
        Work(name="sharing, cold", prompts=sharing(), output_tokens=sizes.sharing_output, counts="seconds"),
        Work(name="sharing, hot", prompts=sharing(), output_tokens=sizes.sharing_output, counts="seconds"),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """What the ceilings need to know of the model, and nothing more."""

    layers: int
    attention_width: int
    vocabulary: int
    body_parameters: int
    head_parameters: int
    stored_bytes: int

    @staticmethod
    def of(spec: ModelSpec, stored_bytes: int) -> ModelShape:
        hidden, width, kv_width = spec.hidden_size, spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        layer = 2 * hidden * (width + kv_width) + 3 * hidden * spec.intermediate_size
        return ModelShape(
            layers=len(spec.layers),
            attention_width=width,
            vocabulary=spec.vocab_size,
            body_parameters=len(spec.layers) * layer,
            head_parameters=hidden * spec.vocab_size,
            stored_bytes=stored_bytes,
        )


def ceilings(sizes: Sizes, shape: ModelShape, limits: Limits) -> dict[str, float]:
    """The best each row could be if the weights were read once a step, as small as the file stores them, and every
    multiplication ran at the measured fp32 rate. (An engine that multiplies in int8 may pass an arithmetic ceiling.)"""
    read, rate = limits["read_gb_per_s"] * 1e9, limits["fp32_gflop_per_s"] * 1e9

    def attention_flop(queries: int, context_before: int) -> float:
        seen = queries * context_before + queries * (queries + 1) / 2
        return 4.0 * shape.layers * shape.attention_width * seen

    def prefill_s(tokens: int, context_before: int = 0) -> float:
        """The head is needed for the last position alone."""
        products = 2.0 * (shape.body_parameters * tokens + shape.head_parameters)
        return (products + attention_flop(tokens, context_before)) / rate

    def decode_s(sequences: int, context: int, tokens: int) -> float:
        arithmetic = 2.0 * (shape.body_parameters + shape.head_parameters) + attention_flop(1, context)
        return tokens * max(sequences * arithmetic / rate, shape.stored_bytes / read)

    stream_s = prefill_s(sizes.stream_prompt) + decode_s(1, sizes.stream_prompt, sizes.stream_output - 1)
    many_s = sizes.many_requests * prefill_s(sizes.many_prompt) + decode_s(
        sizes.many_requests, sizes.many_prompt + sizes.many_output // 2, sizes.many_output - 1
    )
    hot_s = sizes.sharing_requests * prefill_s(sizes.sharing_own, sizes.sharing_prefix) + decode_s(
        sizes.sharing_requests, sizes.sharing_prefix + sizes.sharing_own, sizes.sharing_output - 1
    )
    return {
        "one stream": sizes.stream_output / stream_s,
        "prefill": sizes.prefill_prompt / prefill_s(sizes.prefill_prompt),
        "many at once": sizes.many_requests * sizes.many_output / many_s,
        "sharing, cold": hot_s + prefill_s(sizes.sharing_prefix),
        "sharing, hot": hot_s,
    }
