"""Many answers at once, of all lengths, as an engine in this process computes them."""

from __future__ import annotations

import random
from collections.abc import Callable

from msgspec.structs import replace

from holdfast.engine.core.loop import EngineCore
from holdfast.records import EngineOutput, Request, SamplingParams

STREAMS = 32


def requests() -> list[Request]:
    """Of all lengths, so that chunks, mixed steps and graphs of many sizes alternate; some share their beginning."""
    dice, shared = random.Random(3), list(range(500, 700))
    found = list[Request]()
    for number in range(STREAMS):
        own = [dice.randrange(3, 100_000) for _ in range(dice.randrange(3, 500))]
        params = SamplingParams(temperature=0.7, seed=number, top_k=3, max_tokens=60 + 4 * number, ignore_eos=True)
        name, ids = str(number), [*(shared if number % 4 == 0 else []), *own]
        found.append(Request(request_id=name, prompt_token_ids=ids, params=params))
    return found


Answers = dict[str, list[int]]


Scores = dict[str, list[float]]
"""Log-probabilities of the tokens of each."""


def run(core: EngineCore, between: Callable[[], None] = lambda: None, scores: Scores | None = None) -> Answers:
    """`scores`: to be filled; None: they are not asked for."""
    core.scheduler.reset_prefix_cache()
    waiting = requests()
    if scores is not None:
        waiting = [replace(request, params=replace(request.params, logprobs=0)) for request in waiting]
    answers: Answers = {request.request_id: [] for request in waiting}
    while waiting or core.has_work:
        if waiting:
            core.add(waiting.pop())
        between()
        outputs: list[EngineOutput] = core.step()
        for output in outputs:
            assert output.failure is None, output.failure
            answers[output.request_id] += output.token_ids
            if scores is not None:
                scores.setdefault(output.request_id, []).extend(one.logprobs[0] for one in output.logprobs or [])
    core.scheduler.check_invariants()
    return answers
