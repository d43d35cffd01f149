"""The loop with a step planned ahead, over the real runner: the same tokens as without, whatever ends an answer.

The runner of this device computes a step before `submit` returns, so nothing is gained here by planning ahead; that
nothing is lost either is what other devices will stand on.
"""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Iterator
from dataclasses import replace

import msgspec
import pytest

from holdfast.config import EngineConfig
from holdfast.engine.core import masks
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.core.structured_outputs import StructuredOutputManager
from holdfast.engine.startup.build import build_core, find_model
from holdfast.errors import DoesNotFitError, EngineError
from holdfast.kvcache import KVCache
from holdfast.records import (
    EngineOutput,
    Failure,
    FinishReason,
    Request,
    SamplingParams,
    StepFailure,
    StructuredOutputsParams,
)
from holdfast.records.structured import Vocabulary
from holdfast.scheduler import Scheduler
from holdfast.text.structured.client import GrammarService

Answers = dict[str, tuple[list[int], FinishReason | None]]


VOCABULARY = 4096
"""Few, so that a step takes little time; hundreds of them are still words that the forms below allow."""


@pytest.fixture(scope="module")
def built(tiny_model, tmp_path_factory: pytest.TempPathFactory):
    folder = tmp_path_factory.mktemp("small-vocabulary")
    shape = json.loads((tiny_model / "config.json").read_text()) | {"vocab_size": VOCABULARY}
    (folder / "config.json").write_text(json.dumps(shape))
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        threads=1,
        max_num_seqs=6,
        max_num_batched_tokens=64,
        max_model_len=256,
        kv_cache_memory_bytes=4 << 20,
    )
    core, _ = build_core(config, find_model(config), lambda stage, done, total: None)
    yield core
    core.close()


def core_with(built: EngineCore, steps_ahead: int, blocks: int) -> EngineCore:
    limits = replace(built.scheduler.limits, max_steps_in_flight=steps_ahead + 1)
    return EngineCore(
        Scheduler(limits, KVCache(built.scheduler.kv.layout, blocks)), built.runner, steps_ahead=steps_ahead
    )


def ask(place: int, **params: object) -> Request:
    """Prompts longer than a step, prompts with shared beginnings, greedy and sampled."""
    prompt = [*range(300, 300 + 37 * (place % 3)), place + 10]
    chosen = {"max_tokens": 30 + place, "temperature": place % 2, "top_k": 10, "seed": place} | params
    return Request(request_id=str(place), prompt_token_ids=prompt, params=SamplingParams(**chosen))  # type: ignore[arg-type]


def run(
    core: EngineCore, requests: list[Request], abort_after: dict[str, int], failed: set[str] | None = None
) -> Answers:
    """`abort_after`: tokens a request may give before it is aborted; what comes later must not come. `failed`: gets
    those that failed; None: none may."""
    answers: Answers = {request.request_id: ([], None) for request in requests}
    late = list(requests)
    aborted: set[str] = set()
    steps = 0
    while late or core.has_work:
        if late and steps % 3 == 0:
            core.add(late.pop(0))
            # It enters with the next step, however long compiling takes.
            if isinstance(core.structured_output, StructuredOutputManager):
                while not all(form.filled for form in core.structured_output._compiling.values()):
                    core.structured_output._workers.poll(0.1)
        for output in core.step():
            assert output.request_id not in aborted
            if output.failure is not None:
                assert failed is not None
                failed.add(output.request_id)
            tokens, _ = answers[output.request_id]
            tokens.extend(output.token_ids)
            answers[output.request_id] = (tokens, output.finish_reason)
            if len(tokens) == abort_after.get(output.request_id):
                core.abort(output.request_id)
                aborted.add(output.request_id)
        core.scheduler.check_invariants()
        steps += 1
    assert core.scheduler.steps_in_flight == 0
    assert core.stats().blocks_used == 0
    return answers


@pytest.mark.parametrize("blocks", [120, 14], ids=["room for all", "preemptions"])
def test_tokens_are_those_of_the_plain_loop(built, blocks) -> None:
    requests = [ask(place) for place in range(12)]
    abort_after = {"3": 1, "5": 7, "8": 20}
    plain = run(core_with(built, 0, blocks), requests, abort_after)
    assert all(
        len(tokens) == abort_after.get(name, 30 + int(name)) and (reason is None) == (name in abort_after)
        for name, (tokens, reason) in plain.items()
    )
    ahead = core_with(built, 1, blocks)
    assert run(ahead, requests, abort_after) == plain
    assert (ahead.stats().preemptions_total > 0) == (blocks == 14)

    # Now each ends at a token of its own in the middle: when it is seen, the next step is already planned.
    def stopping(place: int) -> Request:
        token = plain[str(place)][0][5]
        if place % 3 == 0:
            return msgspec.structs.replace(ask(place), eos_token_ids=(token,))
        return ask(place, stop_token_ids=[token], min_tokens=place % 4)

    def stopped_late(name: str) -> bool:
        return int(name) % 3 != 0 and int(name) % 4 != 0

    stopped = [stopping(place) for place in range(12) if str(place) not in abort_after]
    expected = run(core_with(built, 0, blocks), stopped, {})
    for name, (_, reason) in expected.items():
        # min_tokens keeps the token away where it would have come, and it may never come again.
        assert reason is FinishReason.STOP or stopped_late(name)
    assert run(core_with(built, 1, blocks), stopped, {}) == expected


LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"
TOKENS = [
    b"",
    b"",
    b"</s>",
    *("".join(LETTERS[at // 36**place % 36] for place in range(4)).encode() for at in range(3, VOCABULARY)),
]
FORMS = ["[a-m]+", "([a-z][0-9]?)+", "[0-9a-f]{80,400}"]


@pytest.fixture(scope="module")
def service() -> Iterator[GrammarService]:
    made = GrammarService(lambda: Vocabulary(TOKENS, {"</s>": 2}), [2], len(TOKENS))
    made.start()
    yield made
    made.close()


def formed(core: EngineCore, service: GrammarService) -> EngineCore:
    rows = core.scheduler.limits.max_num_seqs
    core.structured_output = StructuredOutputManager(
        lambda: service.address, rows=rows, vocab_size=len(TOKENS), eos_ids=(2,)
    )
    return core


def held(place: int, **params: object) -> Request:
    """Every third is free."""
    if place % 3 == 0:
        return ask(place, **params)
    form = StructuredOutputsParams(regex=FORMS[place % len(FORMS)])
    return msgspec.structs.replace(ask(place, structured_outputs=form, **params), eos_token_ids=(2,))


@pytest.mark.parametrize("blocks", [120, 13], ids=["room for all", "preemptions"])
def test_answers_with_a_form_are_those_of_the_plain_loop(built, service, blocks, monkeypatch) -> None:
    requests, abort_after = [held(place) for place in range(12)], {"3": 1, "5": 7, "8": 20}
    plain = run(formed(core_with(built, 0, blocks), service), requests, abort_after)
    for place in range(12):
        tokens = plain[str(place)][0]
        text = b"".join(TOKENS[token] for token in tokens).decode()
        assert place % 3 == 0 or re.fullmatch(FORMS[place % len(FORMS)].replace("{80,400}", "*"), text)
    # On a busy machine masks may be late: rows are sent back with room for all too, and so few run that all have room.
    for _ in range(5):
        ahead = formed(core_with(built, 1, blocks), service)
        assert run(ahead, requests, abort_after) == plain
        if ahead.stats().preemptions_total > 0 or blocks != 13:
            break
    assert ahead.stats().preemptions_total > 0 or blocks != 13
    # Some masks are late: their rows are computed once more, when the step that goes on from them is not planned yet.
    calls, real = itertools.count(), masks.StepMasks.rows
    monkeypatch.setattr(masks.StepMasks, "rows", lambda step: {} if next(calls) % 5 == 1 else real(step))
    assert run(formed(core_with(built, 1, blocks), service), requests, abort_after) == plain


@pytest.mark.parametrize("steps_ahead", [0, 1])
def test_answers_are_the_same_while_the_pool_is_resized(built, service, steps_ahead) -> None:
    """At random, as often as not to so few pages that some must wait."""
    requests, blocks = [held(place) for place in range(12)], built.runner.kv.blocks
    plain = run(formed(core_with(built, 0, 120), service), requests, {})
    core, dice, sizes = formed(core_with(built, steps_ahead, 120), service), random.Random(), set[int]()
    least, step = core.scheduler.least_blocks, core.step

    def resized() -> list[EngineOutput]:
        if dice.random() < 0.3:
            sizes.add(size := dice.randint(least, 120))
            core.resize_kv(size)
            core.runner.kv.pages[size:].fill_(float("nan"))
        return step()

    core.step = resized
    try:
        assert run(core, requests, {}) == plain
        assert core.scheduler.kv.blocks_total + 1 in sizes
        with pytest.raises(DoesNotFitError, match="so many pages"):
            core.resize_kv(least - 1)
    finally:
        built.runner.resize_kv(blocks)


def test_answers_with_a_form_are_in_every_step(built, service, monkeypatch) -> None:
    """Beside free ones, and though one comes with each step. On a busy machine masks are late now and then: the best of
    a few runs counts."""
    rows, real = list[int](), type(built.runner).submit

    def submit(runner, plan, masks=None):
        rows.append(len(plan.rows))
        return real(runner, plan, masks)

    monkeypatch.setattr(type(built.runner), "submit", submit)
    for _ in range(5):
        rows.clear()
        run(formed(core_with(built, 1, 120), service), [held(place, max_tokens=60) for place in range(6)], {})
        if rows.count(6) > 30:
            break
    assert rows.count(6) > 30


def test_tokens_after_a_failure_are_left_to_the_scheduler(built, service, monkeypatch) -> None:
    """A row of a step fails while the next is launched: the others go on as if nothing had been."""
    requests = [held(place) for place in range(5)]
    plain = run(formed(core_with(built, 0, 120), service), requests, {})
    core = formed(core_with(built, 1, 120), service)
    calls, injected, real = itertools.count(), list[StepFailure](), type(built.runner).submit

    def submit(runner, plan, masks=None):
        step = real(runner, plan, masks)
        victims = [row for row in plan.rows if row.samples and core.scheduler._running[-1].slot == row.slot]
        # On a busy machine a mask is late now and then, and the last one is not in that step: then in the next.
        if next(calls) >= 20 and victims and not injected:
            injected.append(StepFailure(slot=victims[0].slot, failure=Failure.of(EngineError("no memory"))))
            step._result = msgspec.structs.replace(step.result(), failures=list(injected))
        return step

    monkeypatch.setattr(type(built.runner), "submit", submit)
    failed = set[str]()
    answers = run(core, requests, {}, failed)
    assert len(failed) == 1
    assert {name: answer for name, answer in answers.items() if name not in failed} == {
        name: answer for name, answer in plain.items() if name not in failed
    }
