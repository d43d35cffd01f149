"""Prompts as vectors: which request that is to an engine, and how its bytes are read. No tensors.

A decoder's vector of a text is the normed hidden state of its last token, scaled to length 1: vLLM's default for such
models. So it is a request that ends where its first token would have been sampled.
"""

from __future__ import annotations

import array
import math
import sys

from holdfast.errors import NotFiniteError, StepMemoryError
from holdfast.records import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput, SamplingParams

PARAMS = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, seed=0)
"""Of a request that wants no answer."""


def embedding_too_long(found: str, context: int) -> str:
    """vLLM's words, by which clients and routers know the error. One token of the context is kept free."""
    free = f", and takes prompts of up to {context - 1}" if found == f"{context} tokens" else ""
    return (
        f"This model's maximum context length is {context} tokens{free}. However, you requested {found} in the input "
        "for embedding generation. Please reduce the length of the input prompt."
    )


def floats(embedding: bytes) -> array.array[float]:
    """From float32 in little-endian order, as engines tell it; in no more memory than that."""
    found = array.array("f", embedding)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def numbers(embedding: bytes) -> list[float]:
    return floats(embedding).tolist()


def shortened(embedding: bytes, dimensions: int) -> bytes:
    """The first numbers, at length 1 again: what models trained for it (Matryoshka) lose little by."""
    kept = array.array("f", numbers(embedding)[:dimensions])
    length = math.sqrt(math.fsum(value * value for value in kept))
    if length > 0:
        kept = array.array("f", (value / length for value in kept))
    if sys.byteorder == "big":
        kept.byteswap()
    return kept.tobytes()


def finite(embedding: bytes) -> bool:
    """Such that JSON has them all."""
    return all(map(math.isfinite, numbers(embedding)))


def pooled(output: RequestOutput, embedding: bytes | None) -> bytes:
    """What came of a prompt; raises where the machine had no memory for it, or no numbers came of it."""
    if embedding is None and output.outputs[0].stop_reason == NotFiniteError.code:
        raise NotFiniteError(f"the embedding of prompt {output.request_id} contains NaN or infinite values")
    if embedding is None:
        raise StepMemoryError(
            f"out of memory while embedding prompt {output.request_id}",
            fix="try again, or embed fewer prompts at a time",
        )
    return embedding


def embedding_output(output: RequestOutput, embedding: bytes | None) -> EmbeddingRequestOutput:
    """As `LLM.embed` gives it."""
    return EmbeddingRequestOutput(
        request_id=output.request_id,
        outputs=EmbeddingOutput(embedding=numbers(pooled(output, embedding))),
        prompt_token_ids=output.prompt_token_ids,
        num_cached_tokens=output.num_cached_tokens,
    )
