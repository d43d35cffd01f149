"""Digests of a GPU engine's dense weights by name, expert by expert wherever each of them lies: to find out which of
two engines has others than it should, and where; as the GPU reads them, as copies bring them and as the host reads
them. And what two runs of the same answers differ in."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from many_streams import Answers

from holdfast.engine.core.loop import EngineCore
from holdfast.execution.layers.experts import DenseStack, ExpertWeights, PlacedStack
from holdfast.execution.streaming.pinned_memory import as_device_memory

PIECE_WORDS, PLACES = 1 << 20, 65521
"""At a time, so that it takes little memory beside an engine's."""
PAGE, SAMPLE = 4096, 32
"""In bytes."""


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


def as_copied(core: EngineCore) -> Iterator[tuple[str, torch.Tensor]]:
    """Experts that wait, each layer's in its slot, where a step of many tokens has them; valid until the next is asked
    for. Between steps only."""
    experts: Any = core.runner.decoder.experts  # type: ignore[attr-defined]
    if experts is None:
        return
    for at, layer in enumerate(experts._layers):
        experts._ask(layer)
        slot = experts._slot(layer)
        experts._copies.wait(slot.copied)
        for number, (first, nbytes) in enumerate(experts._bounds[at]):
            wait = slot.tensor[first : first + nbytes].view(experts.waiting(layer), -1)
            for expert, place in enumerate(experts.places[at].tolist()):
                if place < 0:
                    yield f"{layer}.{'down' if number else 'gate_up'}.{expert}", wait[-1 - place]


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


class KnownWeights:
    """Of an engine whose experts all stay: what others of the same model are held against. `others`: bytes that may be
    found where they do not belong."""

    def __init__(self, core: EngineCore, others: Mapping[str, torch.Tensor] | None = None) -> None:
        decoder: Any = core.runner.decoder  # type: ignore[attr-defined]
        assert decoder.experts is None
        with torch.inference_mode():
            self._bytes = {name: as_bytes(tensor).cpu() for name, tensor in _named(decoder, False)}
            self.digests = {name: digest(tensor) for name, tensor in _named(decoder, False)}
        self.others = dict(others or {})

    def wrong(self, core: EngineCore, most: int = 8) -> list[str]:
        """What is not as it should be, seen in each way that it can be; `most` tensors of each."""
        decoder: Any = core.runner.decoder  # type: ignore[attr-defined]
        ways = {"as the GPU reads it": _named(decoder, False)}
        if decoder.experts is not None:
            waiting = ((name, tensor) for name, tensor in _named(decoder, True) if tensor.device.type == "cpu")
            ways |= {"as copies bring it": as_copied(core), "as the host reads it": waiting}
        lines = list[str]()
        with torch.inference_mode():
            for way, named in ways.items():
                found = [line for name, tensor in named if (line := self._told(name, tensor))]
                lines += [f"{way}: {line}" for line in found[:most]]
                lines += [f"{way}: {len(found) - most} more"] if len(found) > most else []
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        return lines

    def _told(self, name: str, tensor: torch.Tensor) -> str:
        """Nothing where it is as it should be."""
        if tensor.device.type == "cpu":
            if torch.equal(as_bytes(tensor), self._bytes[name]):
                return ""
        elif digest(tensor) == self.digests[name]:
            return ""
        return f"{name} at {tensor.data_ptr():#x}: {self.difference(as_bytes(tensor).cpu(), self._bytes[name])}"

    def difference(self, found: torch.Tensor, wanted: torch.Tensor) -> str:
        """Where, how much, and what lies there instead."""
        places = (found != wanted).nonzero().view(-1)
        if not len(places):
            return "no byte differs when it is read once more"
        first, last = int(places[0]), int(places[-1])
        pages = places.div(PAGE, rounding_mode="floor").unique()
        zeros = int((found[places] == 0).sum())
        said = f"{len(places)} of {len(found)} bytes from {first} to {last}, in {len(pages)} pages, {zeros} are 0"
        sample = found[first // 4 * 4 :][:SAMPLE].numpy().tobytes()
        if not any(sample):
            return said
        for name, kept in {**self._bytes, **self.others}.items():
            if (at := kept.numpy().tobytes().find(sample)) >= 0:
                return f"{said}; the first are those of {name} from its byte {at} on"
        return f"{said}; the first are of no tensor that is known: {sample.hex()}"


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
