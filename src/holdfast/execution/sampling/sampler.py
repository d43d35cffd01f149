"""Chooses the next token of every sampling row, all rows at once. Knows logits and parameters, not the model.

The order of work is vLLM's: log-probabilities of the raw logits; then what the answer's grammar and the request allow,
bans, biases, penalties; then greedy, or temperature, min_p, top_k, top_p and one draw. A row's draw takes one number
that depends on (seed, position in the output) alone, and walks the kept tokens in the order of their ids: neighbours
cannot change it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy
import numpy.typing
import torch

from holdfast.execution import native
from holdfast.execution.batch import SlotBuffers
from holdfast.execution.sampling.nonfinite import NO_TOKEN
from holdfast.records import SamplingParams, SequenceStart, TokenLogprobs
from holdfast.records.sampling import MAX_BAD_WORD_TOKENS

FIRST_LOOK = 64
"""Likeliest tokens looked at to find where top_k and top_p end; where they do not tell, the whole row is sorted."""

Integers = numpy.typing.NDArray[numpy.int64]
Masks = Mapping[int, numpy.typing.NDArray[numpy.int32]]
"""By slot: a bit for each token that may be sampled."""


@dataclass(frozen=True)
class _Slot:
    params: SamplingParams
    prompt_length: int
    banned: torch.Tensor | None
    """Ends that may not be sampled before params.min_tokens."""
    biased: tuple[torch.Tensor, torch.Tensor] | None
    """Ids and what is added to their logits. Made once: a row may bring a thousand."""
    allowed: torch.Tensor | None = None
    """The only ids that may be sampled."""
    bad_words: tuple[tuple[list[int], int], ...] = ()
    """Tokens, and the one that may not follow them."""

    @property
    def seed(self) -> int:
        return self.params.seed or 0

    @functools.cached_property
    def penalized(self) -> bool:
        params = self.params
        return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)

    @functools.cached_property
    def plain(self) -> bool:
        """The likeliest token, and nothing told of it: what a step of one stream should not spend time on."""
        untouched = self.banned is None and self.biased is None and self.allowed is None and not self.bad_words
        return self.params.greedy and self.params.logprobs is None and untouched and not self.penalized


def uniforms(seeds: Integers, positions: Integers) -> numpy.typing.NDArray[numpy.float64]:
    """One number in [0, 1) for each (seed, position): splitmix64's mixing of both, 52 bits of it."""

    def mix(x: numpy.typing.NDArray[numpy.uint64]) -> numpy.typing.NDArray[numpy.uint64]:
        x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        return x ^ (x >> numpy.uint64(31))

    golden = numpy.uint64(0x9E3779B97F4A7C15)
    state = mix(seeds.astype(numpy.uint64) + golden)
    state = mix(state + (positions.astype(numpy.uint64) + numpy.uint64(1)) * golden)
    return (state >> numpy.uint64(12)).astype(numpy.float64) * 2.0**-52


class Sampler:
    """Keeps the parameters of each slot; the token ids it needs for penalties are the runner's."""

    def __init__(self, buffers: SlotBuffers, vocab_size: int) -> None:
        self._buffers, self._vocab_size = buffers, vocab_size
        self._slots: dict[int, _Slot] = {}

    def start(self, start: SequenceStart) -> None:
        biases = {
            token: bias for token, bias in (start.params.logit_bias or {}).items() if 0 <= token < self._vocab_size
        }
        banned = start.banned_until_min_tokens
        self._slots[start.slot] = _Slot(
            start.params,
            start.prompt_length,
            torch.tensor(banned) if banned else None,
            (torch.tensor(list(biases)), torch.tensor(list(biases.values()))) if biases else None,
            torch.tensor(sorted(set(start.params.allowed_token_ids))) if start.params.allowed_token_ids else None,
            tuple((word[:-1], word[-1]) for word in start.bad_word_ids),
        )

    def sample(
        self, logits: torch.Tensor, slots: Integers, lengths: Integers, masks: Masks | None = None
    ) -> tuple[Integers, list[TokenLogprobs | None]]:
        """Changes `logits` [rows, vocabulary] (float32). `lengths`: tokens known to each row before this one. NO_TOKEN
        for a row whose best logit is infinite or no number."""
        rows = [self._slots[slot] for slot in slots.tolist()]
        if not masks and logits.device.type == "cpu" and all(row.plain for row in rows):
            return _greedy(logits.numpy()), []
        positions = lengths - numpy.array([row.prompt_length for row in rows], dtype=numpy.int64)
        wanted = [index for index, row in enumerate(rows) if row.params.logprobs is not None]
        raw = logits[wanted] if wanted else None
        if masks:
            keep_allowed(logits, slots, masks)
        self._adjust(logits, rows, slots, lengths, positions)
        chosen = likeliest(logits)
        best = logits.gather(1, chosen[:, None])[:, 0]
        broken = ~(best < float("inf"))  # Nor is a number that is none.
        drawn = [index for index, row in enumerate(rows) if not row.params.greedy]
        if drawn:
            everyone = len(drawn) == len(rows)
            scores = logits if everyone else logits[drawn]
            seeds = numpy.array([rows[index].seed for index in drawn], dtype=numpy.int64)
            numbers = torch.from_numpy(uniforms(seeds, positions[drawn])).to(logits.device)
            chosen[drawn] = draw(scores, [rows[index].params for index in drawn], numbers)
        tokens: Integers = torch.where(broken, NO_TOKEN, chosen).cpu().numpy()
        if raw is None:
            return tokens, []
        counts = [rows[index].params.logprobs or 0 for index in wanted]
        found = iter(logprobs(raw, chosen[wanted], counts, [rows[index].params.logprob_token_ids for index in wanted]))
        return tokens, [next(found) if row.params.logprobs is not None else None for row in rows]

    def score(self, logits: torch.Tensor, slots: list[int], targets: torch.Tensor) -> list[TokenLogprobs]:
        """Of tokens of prompts: how likely each was after what stands before it."""
        counts = [self._slots[slot].params.prompt_logprobs or 0 for slot in slots]
        with native.torch_threads():  # Rows of whole vocabularies, as many as a step has tokens.
            return logprobs(logits, targets, counts)

    def _adjust(
        self, logits: torch.Tensor, rows: list[_Slot], slots: Integers, lengths: Integers, positions: Integers
    ) -> None:
        """Bans, biases and penalties, on the rows that have any."""
        for index, row in enumerate(rows):
            if row.allowed is not None:
                allowed = row.allowed.to(logits.device)
                kept = logits[index].index_select(0, allowed)
                logits[index].fill_(float("-inf"))
                logits[index].index_copy_(0, allowed, kept)
            if row.bad_words:
                output = self._buffers.tokens[slots[index], row.prompt_length : lengths[index]]
                forbidden = forbidden_after(output[-MAX_BAD_WORD_TOKENS:].tolist(), row.bad_words)
                logits[index, forbidden] = float("-inf")
            if row.banned is not None and positions[index] < row.params.min_tokens:
                logits[index].index_fill_(0, row.banned.to(logits.device), float("-inf"))
            if row.biased is not None:
                ids, biases = row.biased
                logits[index].index_add_(0, ids.to(logits.device), biases.to(logits))
        penalized = [index for index, row in enumerate(rows) if row.penalized]
        if penalized:
            known = self._buffers.tokens[slots[penalized], : lengths[penalized].max()]
            prompts = numpy.array([rows[index].prompt_length for index in penalized], dtype=numpy.int64)
            params = [rows[index].params for index in penalized]
            penalize(logits, numpy.array(penalized), known, lengths[penalized], prompts, params)


def keep_allowed(logits: torch.Tensor, slots: Integers, masks: Masks) -> None:
    """-inf for every token that the mask of a row leaves out; rows without a mask stay as they are."""
    rows = [row for row, slot in enumerate(slots.tolist()) if slot in masks]
    if not rows:
        return
    words = numpy.stack([masks[int(slots[row])] for row in rows])
    bits = numpy.unpackbits(words.view(numpy.uint8), axis=1, bitorder="little", count=logits.shape[1])
    left_out = torch.from_numpy(bits).to(logits.device) == 0
    for row, out in zip(rows, left_out, strict=True):
        logits[row].masked_fill_(out, float("-inf"))


def forbidden_after(output: list[int], bad_words: Sequence[tuple[list[int], int]]) -> list[int]:
    """The last tokens of bad words whose other tokens end the output."""
    return [last for before, last in bad_words if not before or output[-len(before) :] == before]


def penalize(
    logits: torch.Tensor,
    rows: Integers,
    known: numpy.typing.NDArray[numpy.int32],
    lengths: Integers,
    prompts: Integers,
    params: list[SamplingParams],
) -> None:
    """These rows in place, all at once: repetition over prompt and output, presence and frequency over the output.

    known [rows, longest]: their token ids, of which the first `lengths` count and the first `prompts` are prompt.
    """
    columns = numpy.arange(known.shape[1])
    seen = columns < lengths[:, None]
    # One number for each (row, token) lets one sort find every distinct token of every row.
    pairs = numpy.arange(len(rows))[:, None] * logits.shape[1] + known

    def where(found: Integers) -> tuple[Integers, torch.Tensor, torch.Tensor]:
        row, token = numpy.divmod(found, logits.shape[1])
        return row, torch.from_numpy(rows[row]).to(logits.device), torch.from_numpy(token).to(logits.device)

    def column(values: list[float], row: Integers) -> torch.Tensor:
        return torch.from_numpy(numpy.array(values, dtype=numpy.float32)[row]).to(logits.device)

    if any(param.repetition_penalty != 1.0 for param in params):
        row, at_row, at_token = where(_distinct(pairs[seen])[0])
        scores, penalty = logits[at_row, at_token], column([param.repetition_penalty for param in params], row)
        logits[at_row, at_token] = torch.where(scores > 0, scores / penalty, scores * penalty)
    if any(param.frequency_penalty or param.presence_penalty for param in params):
        found, counts = _distinct(pairs[seen & (columns >= prompts[:, None])])
        row, at_row, at_token = where(found)
        often = torch.from_numpy(counts.astype(numpy.float32)).to(logits.device)
        amounts = column([param.frequency_penalty for param in params], row) * often
        logits[at_row, at_token] -= amounts + column([param.presence_penalty for param in params], row)


def _distinct(values: Integers) -> tuple[Integers, Integers]:
    """Each value once, sorted, and how often it is there. As numpy.unique has it, which imports masked arrays: 20 ms of
    a start."""
    ordered = numpy.sort(values)
    begins = numpy.flatnonzero(numpy.diff(ordered, prepend=-1))  # Of whole numbers that are not negative.
    return ordered[begins], numpy.diff(begins, append=len(ordered))


def draw(scores: torch.Tensor, params: list[SamplingParams], numbers: torch.Tensor) -> torch.Tensor:
    """One token id a row, by inverting the cumulated chances at `numbers`. Changes `scores`."""
    scores /= _column([param.temperature for param in params], scores)
    chances = scores.softmax(-1)
    filtered = [index for index, param in enumerate(params) if param.top_k or param.top_p < 1 or param.min_p]
    if filtered:
        floors = torch.zeros((len(params), 1), dtype=chances.dtype, device=chances.device)
        rest = _find_floors(chances, floors, filtered, params, min(FIRST_LOOK, chances.shape[1]))
        if rest:
            _find_floors(chances, floors, rest, params, chances.shape[1])
        chances.masked_fill_(chances < floors, 0)
    cumulated = chances.cumsum(-1, dtype=torch.float64)
    targets = numbers[:, None] * cumulated[:, -1:]
    # The first token whose cumulated chance passes the target: never one without a chance.
    return torch.searchsorted(cumulated, targets, right=True)[:, 0].clamp_(max=scores.shape[1] - 1)


def _find_floors(
    chances: torch.Tensor, floors: torch.Tensor, rows: list[int], params: list[SamplingParams], look: int
) -> list[int]:
    """The chance a token must have to pass min_p, top_k and then top_p; ties with the last one kept pass too.

    Sorts only the `look` likeliest tokens, and returns the rows for which these did not tell.
    """
    vocabulary = chances.shape[1]
    best = _likeliest_chances(chances if len(rows) == len(chances) else chances[rows], look)
    ranks = torch.tensor([params[row].top_k or vocabulary for row in rows], device=chances.device)[:, None]
    shares = _column([params[row].top_p for row in rows], chances)
    floor = best[:, :1] * _column([params[row].min_p for row in rows], chances)
    by_rank = best.gather(1, ranks.clamp(max=look) - 1)
    floor = torch.where(ranks < vocabulary, torch.maximum(floor, by_rank), floor)
    # top_p counts in shares of what the others keep: all of it lies in `best`, or nothing was left out.
    inside = (floor > best[:, -1:]) | torch.tensor(look == vocabulary)
    masses = best.masked_fill(best < floor, 0).cumsum(-1, dtype=torch.float64)
    wanted = shares * torch.where(inside, masses[:, -1:], 1.0)
    by_share = best.gather(1, (masses < wanted).sum(-1, keepdim=True).clamp_(max=look - 1))
    told = (ranks <= look) | (ranks >= vocabulary)
    told &= inside | (shares >= 1) | ((floor == 0) & (masses[:, -1:] >= wanted))
    floors[rows] = torch.where(shares < 1, torch.maximum(floor, by_share), floor)
    return [row for row, done in zip(rows, told[:, 0].tolist(), strict=True) if not done]


def _likeliest_chances(chances: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` largest of each row, largest first."""
    if count == chances.shape[1] and chances.device.type == "cpu":
        # Sorting values alone, numpy is several times as fast as torch, which always sorts indices along.
        return torch.from_numpy(numpy.sort(chances.numpy(), axis=-1)[:, ::-1].copy())
    return chances.topk(count).values


def _column(values: list[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]


def _greedy(logits: numpy.typing.NDArray[numpy.float32]) -> Integers:
    """The likeliest token of each row; NO_TOKEN where its logit is infinite or no number."""
    chosen: Integers = logits.argmax(-1)
    if len(chosen) == 1 and logits[0, chosen[0]] < numpy.inf:
        return chosen
    best = logits[numpy.arange(len(chosen)), chosen]
    return numpy.where(best < numpy.inf, chosen, NO_TOKEN)


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """argmax of each row, the first of equals. Where there are vectors on the host numpy's is the one that uses them:
    9.0 and 1.1 ms of CPU time for 32 rows of 151,936 (torch's and numpy's, Skylake)."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(-1))
    return logits.argmax(-1)


def logprobs(
    raw: torch.Tensor, chosen: torch.Tensor, counts: list[int], named: Sequence[list[int] | None] = ()
) -> list[TokenLogprobs]:
    """Of the raw logits: the chosen token, the likeliest `counts` of each row, and the chosen one's rank. `named`: the
    tokens of a row that are told instead of its likeliest."""
    scores = raw.log_softmax(-1)
    own = scores.gather(1, chosen[:, None])
    ranks, tokens, told = (scores >= own).sum(-1).tolist(), chosen.tolist(), own[:, 0].tolist()
    most = min(max(counts), scores.shape[1])
    best = scores.topk(most) if most else None
    best_ids, best_values = ([], []) if best is None else (best.indices.tolist(), best.values.tolist())
    results = []
    for index, count in enumerate(counts):
        ids, values = [tokens[index]], [told[index]]
        asked = named[index] if named else None
        if asked:
            ids += asked
            values += scores[index, asked].tolist()
        elif best is not None:
            ids += best_ids[index][:count]
            values += best_values[index][:count]
        results.append(TokenLogprobs(ids, values, ranks[index]))
    return results
