"""Prompts and parameters of a call of `LLM` as lists of the same length. Knows no engine."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdfast.engine.offline.pooling import Prompt
from holdfast.errors import RequestError
from holdfast.records import SamplingParams


def as_list(prompts: Prompt | Sequence[Prompt] | None) -> list[Prompt]:
    if prompts is None:
        raise RequestError("there are no prompts", field="prompts")
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not isinstance(prompts, Collection):
        raise RequestError(
            f"prompts has the type {type(prompts).__name__}",
            needed="a string, token ids, or a list of them",
            field="prompts",
        )
    numbers = [entry for entry in prompts if isinstance(entry, int)]
    if numbers and len(numbers) == len(prompts):
        return [numbers]
    if numbers:
        raise RequestError("token ids and prompts are mixed in one list", field="prompts")
    return [entry for entry in prompts if not isinstance(entry, int)]


def one_each(params: SamplingParams | Sequence[SamplingParams], count: int) -> list[SamplingParams]:
    if isinstance(params, SamplingParams):
        return [params] * count
    if isinstance(params, Mapping) or not all(isinstance(one, SamplingParams) for one in params):
        raise RequestError(
            "sampling_params contains something other than SamplingParams",
            needed="SamplingParams, or a list of them",
            found=type(params).__name__,
            fix="SamplingParams(temperature=0)",
            field="sampling_params",
        )
    if len(params) != count:
        raise RequestError(
            f"got {count} prompts and {len(params)} sampling_params",
            needed="one for all prompts, or one for each",
            field="sampling_params",
        )
    return list(params)
