"""Digests of a GPU engine's dense weights by name, expert by expert wherever each of them lies: to find out which of
two engines has others than it should, and where. And what two runs of the same answers differ in."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from many_streams import Answers

from holdfast.engine.core.loop import EngineCore
from holdfast.execution.layers.experts import DenseStack, ExpertWeights, PlacedStack
from holdfast.execution.streaming.pinned_memory import as_device_memory

PIECE_WORDS, PLACES = 1 << 20, 65521
"""At a time, so that it takes little memory beside an engine's."""


def digest(tensor: torch.Tensor) -> int:
    """Of its words and the place of each, computed where it lies."""
    words, total = tensor.reshape(-1).view(torch.int32), torch.zeros((), dtype=torch.int64, device=tensor.device)
    for first in range(0, len(words), PIECE_WORDS):
        part = words[first : first + PIECE_WORDS].long()
        total += (part * (torch.arange(first, first + len(part), device=part.device) % PLACES + 1)).sum()
    return int(total)


def weight_digests(core: EngineCore, *, by_host: bool = False) -> dict[str, int]:
    """`by_host`: experts that wait are read by the host's cores, not by the GPU over the link."""
    decoder: Any = core.runner.decoder  # type: ignore[attr-defined]
    with torch.inference_mode():
        found = {name: digest(tensor) for name, tensor in _named(decoder, by_host)}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return found


def _named(decoder: Any, by_host: bool) -> Iterator[tuple[str, torch.Tensor]]:
    yield "embed", decoder._embed.weight
    yield "final_norm", decoder._final_norm.weight
    for number, layer in enumerate(decoder._layers):
        weights = layer.weights
        parts = {"qkv": weights.qkv.weight, "o": weights.o.weight, "query_norm": weights.query_norm}
        parts |= {"key_norm": weights.key_norm, "attn_norm": weights.attn_norm.weight}
        parts |= {"mlp_norm": weights.mlp_norm.weight, "router": weights.mlp.router.weight}
        for name, tensor in parts.items():
            if tensor is not None:
                yield f"{number}.{name}", tensor
        for stack, matrices in enumerate(_experts(decoder, number, weights.mlp, by_host)):
            for expert, matrix in enumerate(matrices):
                yield f"{number}.{'down' if stack else 'gate_up'}.{expert}", matrix


def _experts(decoder: Any, layer: int, weights: ExpertWeights, by_host: bool) -> Iterator[list[torch.Tensor]]:
    """By stack, those of all experts in their order."""
    for number, stack in enumerate((*weights.gate_up, weights.down)):
        if isinstance(stack, DenseStack):
            yield list(stack.weight)
            continue
        assert isinstance(stack, PlacedStack)
        placed, at = decoder.experts, decoder.experts._number[layer]
        piece, (first, nbytes) = placed._pieces[at], placed._bounds[at][number]
        if not by_host:
            piece = as_device_memory(piece, placed._device)
        wait = piece[first : first + nbytes].view(placed.waiting(layer), -1)
        stay = [] if stack.resident is None else stack.resident.weight  # type: ignore[attr-defined]
        yield [stay[place] if place >= 0 else wait[-1 - place] for place in placed.places[at].tolist()]


def differing(one: dict[str, int], other: dict[str, int]) -> list[str]:
    return [name for name in one | other if one.get(name) != other.get(name)]


def first_differences(one: Answers, other: Answers) -> dict[str, int]:
    """By stream, in the order in which they are added: which token is the first that differs; none where all agree."""
    found = {}
    for name in reversed(one):
        pairs = zip(one[name], other[name], strict=False)
        at = next((place for place, (token, same) in enumerate(pairs) if token != same), None)
        if at is not None or len(one[name]) != len(other[name]):
            found[name] = min(len(one[name]), len(other[name])) if at is None else at
    return found
