"""Beam search over an engine that generates one token at a time: which beams go on, and which are the best at the end.

    beams ─► one token each, with the likeliest 2 x width ─► expand ─► beams ...

Owns vLLM's rules: an end completes a beam beside those that go on, and scores are divided by the length of prompt and
output. Asking the engine is the caller's; a prefix that beams share is found in the prefix cache.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.errors import RequestError
from holdfast.records import Logprob, SamplingParams
from holdfast.records.beams import BeamSearchParams, BeamSearchSequence
from holdfast.records.sampling import MAX_LOGPROBS

MAX_WIDTH = MAX_LOGPROBS // 2


def one_token(params: BeamSearchParams) -> SamplingParams:
    """What every beam is asked at every step."""
    if not 1 <= params.beam_width <= MAX_WIDTH:
        raise RequestError(
            f"beam search of width {params.beam_width} is not possible here",
            needed=f"from 1 to {MAX_WIDTH} beams: each step needs twice as many logprobs",
            found=str(params.beam_width),
            field="n",
        )
    if params.max_tokens < 1:
        raise RequestError("max_tokens of a beam search must be at least 1", needed="1", field="max_tokens")
    return SamplingParams(
        max_tokens=1,
        temperature=params.temperature,
        logprobs=2 * params.beam_width,
        ignore_eos=True,
        detokenize=False,
        seed=0,
    )


@dataclass(slots=True)
class BeamSearch:
    """Of one prompt. `beams` are those to ask for a next token, until there are none or enough steps were done."""

    prompt_length: int
    params: BeamSearchParams
    ends: Collection[int]
    beams: list[BeamSearchSequence] = field(default_factory=lambda: [BeamSearchSequence(tokens=[], logprobs=[])])
    _completed: list[BeamSearchSequence] = field(default_factory=list)

    def expand(self, likeliest: Sequence[Mapping[int, Logprob]]) -> None:
        """`likeliest`: for each of `beams`, tokens that may follow it."""
        candidates = []
        for beam, found in zip(self.beams, likeliest, strict=True):
            for token, entry in found.items():
                # The chosen one first, as everywhere.
                told = {token: entry} | {other: value for other, value in found.items() if other != token}
                longer = BeamSearchSequence(
                    tokens=[*beam.tokens, token],
                    logprobs=[*beam.logprobs, told],
                    cum_logprob=beam.cum_logprob + entry.logprob,
                )
                if token not in self.ends or self.params.ignore_eos:
                    candidates.append(longer)
                    continue
                longer.finish_reason, longer.stop_reason = "stop", token
                if not self.params.include_stop_str_in_output:
                    longer.tokens.pop()
                self._completed.append(longer)
        # Their scores are final. All of them would be as many lists of log-probabilities as there are steps.
        self._completed = self._best_of(self._completed)
        candidates.sort(key=lambda beam: -beam.cum_logprob)
        self.beams = candidates[: self.params.beam_width]

    def best(self) -> list[BeamSearchSequence]:
        """The likeliest first; those that have not come to an end among them."""
        for beam in self.beams:
            beam.finish_reason = "length"
        return self._best_of([*self._completed, *self.beams])

    def _best_of(self, beams: list[BeamSearchSequence]) -> list[BeamSearchSequence]:
        return sorted(beams, key=self._score, reverse=True)[: self.params.beam_width]

    def _score(self, beam: BeamSearchSequence) -> float:
        ended = bool(beam.tokens) and beam.tokens[-1] in self.ends
        length = self.prompt_length + len(beam.tokens) - ended
        return float(beam.cum_logprob / max(length, 1) ** self.params.length_penalty)
