"""Answers held to a form by a real engine: always of that form, beside free ones that notice nothing, and through all
that may happen to a request on its way."""

from __future__ import annotations

import itertools
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from deadlines import PATIENCE_S
from pydantic import BaseModel, ConfigDict, Field

from holdfast import LLM, GuidedDecodingParams, SamplingParams, StructuredOutputsParams
from holdfast.engine.core import masks, structured_outputs
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.core.structured_outputs import StructuredOutputManager
from holdfast.errors import GrammarError, RequestError
from holdfast.records import EngineOutput, Request

COLOURS = ["red", "green", "blue"]


class Address(BaseModel):
    model_config = ConfigDict(extra="forbid")
    street: str = Field(max_length=10)
    number: int = Field(ge=0, le=999)


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=8)
    age: int = Field(ge=0, le=120)
    tags: list[str] = Field(max_length=2)
    address: Address | None


class Short(BaseModel):
    model_config = ConfigDict(extra="forbid")
    name: str = Field(max_length=6)
    age: int = Field(ge=0, le=120)


def held(**state: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**state)


@pytest.fixture(scope="module")
def tiny(tiny_model: Path) -> LLM:
    """Random weights: it never writes anything sensible of its own accord. In float32, so that steps of other sizes
    give the same tokens on any device."""
    with LLM(
        str(tiny_model),
        load_format="dummy",
        tokenizer="smollm2",
        max_model_len=512,
        max_num_seqs=6,
        threads=1,
        kv_cache_memory_bytes="16MiB",
        dtype="float32",
    ) as llm:
        yield llm


def ask(llm: LLM, params: list[SamplingParams], prompt: str = "Tell me of somebody.") -> list[Any]:
    return [output.outputs[0] for output in llm.generate([prompt] * len(params), params, use_tqdm=False)]


def test_smollm2_at_temperature_one_always_has_the_form() -> None:
    with LLM("smollm2", max_model_len=512, max_num_seqs=8, kv_cache_memory_bytes="96MiB") as llm:
        manager = [
            held(json=Short, disable_any_whitespace=True), held(choice=COLOURS), held(regex=r"\d{4}-\d{2}-\d{2}"),
            held(grammar='root ::= "(" root ")" | [a-z]{1,4}'),
        ]  # fmt: skip
        params = [
            SamplingParams(max_tokens=80, seed=seed, temperature=1.0, structured_outputs=state)
            for seed in range(6)
            for state in manager
        ]
        answers = ask(llm, params, "Extract user info from: Alice is 30 years old.")
        for asked, answer in zip(params, answers, strict=True):
            assert asked.structured_outputs is not None
            if asked.structured_outputs.kind == "grammar" and answer.finish_reason == "length":
                assert re.fullmatch(r"\(+[a-z]{0,4}\)*", answer.text)
                continue
            assert answer.finish_reason == "stop"
            assert_form(asked.structured_outputs, answer.text)


def assert_form(state: StructuredOutputsParams, text: str) -> None:
    if state.kind == "json":
        Short.model_validate_json(text, strict=True)
    elif state.kind == "choice":
        assert text in COLOURS
    elif state.kind == "regex":
        assert re.fullmatch(r"\d{4}-\d{2}-\d{2}", text)
    else:
        opened = len(text) - len(text.lstrip("("))
        assert re.fullmatch(rf"\({{{opened}}}[a-z]{{1,4}}\){{{opened}}}", text)


def test_a_random_model_writes_valid_json_or_says_that_it_was_cut(tiny: LLM) -> None:
    schema = Person.model_json_schema()
    params = [
        SamplingParams(max_tokens=140, seed=seed, temperature=1.5, structured_outputs=held(json=schema))
        for seed in range(8)
    ]
    answers = ask(tiny, params)
    for answer in answers:
        if answer.finish_reason == "stop":
            Person.model_validate_json(answer.text, strict=True)
        else:
            assert (answer.finish_reason, len(answer.token_ids)) == ("length", 140)
    assert any(answer.finish_reason == "stop" for answer in answers)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verdicts come in time, however long a worker has to wait for a processor: else an end is a token more."""
    monkeypatch.setattr(structured_outputs, "VERDICT_S", PATIENCE_S)
    monkeypatch.setattr(structured_outputs, "VERDICT_CPU_S", PATIENCE_S)


@pytest.mark.usefixtures("patient")
def test_the_end_of_the_form_is_the_end_and_no_token_is_wasted(tiny: LLM) -> None:
    (answer,) = ask(tiny, [SamplingParams(max_tokens=20, structured_outputs=held(choice=["red"]))])
    assert (answer.text, answer.finish_reason) == ("red", "stop")
    assert tiny.get_tokenizer().decode(answer.token_ids) == "red"
    # The form is complete with the very last token that may be sampled.
    (exact,) = ask(tiny, [SamplingParams(max_tokens=len(answer.token_ids), structured_outputs=held(choice=["red"]))])
    assert (exact.text, exact.finish_reason) == ("red", "stop")
    (cut,) = ask(tiny, [SamplingParams(max_tokens=3, structured_outputs=held(regex="[a-z]{60}"))])
    assert cut.finish_reason == "length"


@pytest.mark.usefixtures("patient")
def test_older_names_and_a_bound_on_the_end(tiny: LLM) -> None:
    """ignore_eos and min_tokens cannot lengthen what is complete; an end that may come is held back by min_tokens."""
    params = [
        SamplingParams(max_tokens=20, ignore_eos=True, guided_decoding=GuidedDecodingParams(choice=["blue"])),
        SamplingParams(max_tokens=30, min_tokens=9, structured_outputs=held(choice=["blue"])),
        SamplingParams(max_tokens=30, min_tokens=9, seed=1, structured_outputs=held(regex="a*")),
        SamplingParams(max_tokens=9, ignore_eos=True, logit_bias={2: 100.0}, structured_outputs=held(regex="a*")),
    ]
    complete, early, late, ended = ask(tiny, params)
    assert (complete.text, complete.finish_reason) == ("blue", "stop")
    assert (early.text, early.finish_reason) == ("blue", "stop")
    assert len(late.token_ids) >= 9
    assert re.fullmatch("a*", late.text)
    assert (ended.text, ended.finish_reason, ended.token_ids) == ("", "stop", [2])


@pytest.mark.usefixtures("patient")
def test_verdicts_that_are_late_change_no_answer(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor do they fail one whose end is forbidden, or does not count."""
    forms = [held(choice=["red"]), held(regex="a{2,3}"), held(regex="a*")]
    wishes: list[dict[str, Any]] = [{}, {"ignore_eos": True}, {"min_tokens": 9}, {"ignore_eos": True, "min_tokens": 9}]
    params = [
        SamplingParams(max_tokens=20, seed=seed, structured_outputs=form, **wish)
        for seed, (form, wish) in enumerate(itertools.product(forms, wishes))
    ]
    in_time = ask(tiny, params)
    monkeypatch.setattr(StructuredOutputManager, "_wait_for_verdicts", lambda *_: None)
    for asked, expected, late in zip(params, in_time, ask(tiny, params), strict=True):
        assert (late.token_ids, late.text) == (expected.token_ids, expected.text), asked
        assert late.finish_reason == expected.finish_reason


FREE = [
    SamplingParams(max_tokens=12, temperature=0.0),
    SamplingParams(max_tokens=12, seed=7, temperature=0.9, top_p=0.9, logprobs=2),
    SamplingParams(max_tokens=12, seed=8, repetition_penalty=1.3, min_tokens=5),
]


def test_free_answers_are_the_same_beside_held_ones(tiny: LLM) -> None:
    alone = [ask(tiny, [params])[0] for params in FREE]
    manager = [held(json=Short), held(regex="[0-9]{20}"), held(choice=COLOURS)]
    beside = [SamplingParams(max_tokens=40, seed=3, structured_outputs=state) for state in manager]
    mixed = ask(tiny, [params for pair in zip(FREE, beside, strict=True) for params in pair])
    for expected, found in zip(alone, mixed[::2], strict=True):
        assert (found.token_ids, found.text, found.finish_reason) == (
            expected.token_ids,
            expected.text,
            expected.finish_reason,
        )
    # Sums of a larger step are rounded elsewhere.
    assert mixed[2].cumulative_logprob == pytest.approx(alone[1].cumulative_logprob, abs=1e-3)
    Short.model_validate_json(mixed[1].text)
    assert re.fullmatch("[0-9]{20}", mixed[3].text)
    assert mixed[5].text in COLOURS


def test_every_other_option_works_within_the_form(tiny: LLM) -> None:
    state = held(regex="[ab]{12}")
    vocabulary = tiny.get_tokenizer().get_vocab()
    params = [
        SamplingParams(max_tokens=20, temperature=0.0, structured_outputs=state),
        SamplingParams(max_tokens=20, seed=1, top_k=3, structured_outputs=state),
        SamplingParams(max_tokens=20, seed=2, top_p=0.3, min_p=0.1, structured_outputs=state),
        SamplingParams(max_tokens=20, seed=3, frequency_penalty=2.0, repetition_penalty=2.0, structured_outputs=state),
        SamplingParams(max_tokens=20, seed=4, logit_bias={vocabulary["a"]: 100.0}, structured_outputs=state),
        SamplingParams(max_tokens=20, seed=5, allowed_token_ids=[vocabulary["b"], 2], structured_outputs=state),
        SamplingParams(max_tokens=20, seed=6, bad_words=["bb"], structured_outputs=state),
        SamplingParams(max_tokens=20, seed=7, stop=["aa", "bb"], structured_outputs=state),
    ]
    answers = ask(tiny, params)
    for answer in answers[:7]:
        assert re.fullmatch("[ab]{12}", answer.text), answer
    assert answers[4].text == "a" * 12
    assert answers[5].text == "b" * 12
    assert answers[7].stop_reason in ("aa", "bb")


def test_log_probabilities_are_of_the_raw_logits(tiny: LLM) -> None:
    free = SamplingParams(max_tokens=1, temperature=0.0, logprobs=3)
    state = free.replace(structured_outputs=held(choice=COLOURS))
    plain, bound = ask(tiny, [free, state])
    best = [token for token, entry in plain.logprobs[0].items() if entry.rank <= 3]
    told = bound.logprobs[0]
    assert {token: told[token] for token in best} == {token: plain.logprobs[0][token] for token in best}
    assert told[bound.token_ids[0]].rank > 3


def test_several_answers_each_have_a_matcher(tiny: LLM) -> None:
    params = SamplingParams(n=4, max_tokens=40, seed=5, temperature=20.0, structured_outputs=held(regex="[0-9]{6,9}"))
    (output,) = tiny.generate(["Count."], params, use_tqdm=False)
    texts = [answer.text for answer in output.outputs]
    assert len(set(texts)) == 4
    assert all(re.fullmatch("[0-9]{6,9}", text) for text in texts)


def test_pages_run_out_and_forms_hold(tiny_model: Path) -> None:
    with LLM(
        str(tiny_model),
        load_format="dummy",
        tokenizer="smollm2",
        max_model_len=128,
        max_num_seqs=6,
        threads=1,
        kv_cache_memory_bytes="250KiB",
        block_size=8,
        dtype="float32",
    ) as llm:
        params = [
            SamplingParams(max_tokens=90, seed=seed, structured_outputs=held(regex="([0-9][a-z]){40}"))
            for seed in range(6)
        ]
        together = ask(llm, params)
        assert llm.get_stats().preemptions_total > 0
        assert [ask(llm, [one])[0].text for one in params[:2]] == [answer.text for answer in together[:2]]
        assert all(re.fullmatch("([0-9][a-z]){40}", answer.text) for answer in together)


@pytest.mark.parametrize(
    ("params", "code"),
    [
        ({"structured_outputs": held(regex="[0-9]{5}"), "allowed_token_ids": [5000]}, "HF363"),
        ({"structured_outputs": held(regex=".*a.{60}b.*c.{60}")}, "HF362"),
    ],
)
def test_bad_luck_ends_one_answer_and_no_other(tiny: LLM, params: dict[str, Any], code: str) -> None:
    failed, fine = ask(tiny, [SamplingParams(max_tokens=100, seed=1, **params), FREE[0]])
    assert (failed.finish_reason, failed.stop_reason) == ("error", code)
    assert fine.token_ids == ask(tiny, [FREE[0]])[0].token_ids


def test_what_cannot_be_held_is_refused_before_anything_is_computed(tiny: LLM) -> None:
    steps = tiny.get_stats().steps_total
    for state in (held(regex="("), held(json={"type": "frob"}), held(grammar="start: <|nosuch|>")):
        with pytest.raises(GrammarError):
            ask(tiny, [FREE[0], SamplingParams(structured_outputs=state)])
    assert tiny.get_stats().steps_total == steps


def test_without_a_tokenizer_there_are_no_forms(tiny_model: Path) -> None:
    with (
        LLM(
            str(tiny_model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=64,
            max_num_seqs=1,
            kv_cache_memory_bytes="4MiB",
        ) as llm,
        pytest.raises(RequestError, match="tokenizer"),
    ):
        llm.generate([[1, 2]], SamplingParams(structured_outputs=held(regex="a")), use_tqdm=False)


def test_an_answer_goes_on_where_another_engine_left_it(tiny: LLM) -> None:
    """As a request comes to a new engine process: with the tokens that have gone out."""
    params = SamplingParams(max_tokens=40, seed=9, structured_outputs=held(json=Short, disable_any_whitespace=True))
    (whole,) = ask(tiny, [params])
    core, prompt = tiny._engine(), tiny.get_tokenizer().encode("Tell me of somebody.")
    for sent in (1, len(whole.token_ids) // 2, len(whole.token_ids) - 1):
        request = Request(
            request_id=f"resumed-{sent}",
            prompt_token_ids=prompt,
            params=params,
            eos_token_ids=(2,),
            output_token_ids=whole.token_ids[:sent],
        )
        found = [token for output in run(core, request) for token in output.token_ids]
        assert whole.token_ids[:sent] + found == whole.token_ids
    wrong = Request(request_id="wrong", prompt_token_ids=prompt, params=params, output_token_ids=[5000, 5000])
    outputs = run(core, wrong)
    assert outputs[-1].failure is not None
    assert outputs[-1].failure.kind == "GrammarError"


def run(core: EngineCore, request: Request) -> list[EngineOutput]:
    core.add(request)
    outputs: list[EngineOutput] = []
    while core.has_work:
        outputs += core.step()
    return outputs


def test_memory_worker_ofs_goes_with_their_requests(tiny: LLM) -> None:
    ask(tiny, [SamplingParams(max_tokens=5, structured_outputs=held(regex="[0-9]+"))] * 3)
    manager = tiny._engine().structured_output
    assert isinstance(manager, StructuredOutputManager)
    assert not manager._states
    assert not manager.compiling


def workers(llm: LLM) -> list[psutil.Process]:
    """Processes that fill masks, of those that run answers now."""
    assert llm._structured is not None
    return psutil.Process(llm._structured.service.pid).children()


def request(llm: LLM, name: str, params: SamplingParams) -> Request:
    prompt = llm.get_tokenizer().encode("Tell me of somebody.")
    return Request(request_id=name, prompt_token_ids=prompt, params=params, eos_token_ids=(2,))


def opened(llm: LLM, core: EngineCore, *requests: Request) -> list[psutil.Process]:
    """Requests that have come as far as their first mask, and the processes that fill the others."""
    for one in requests:
        core.add(one)
    assert isinstance(core.structured_output, StructuredOutputManager)
    deadline_s = time.monotonic() + PATIENCE_S
    while not all(state.filled for state in core.structured_output._compiling.values()):
        core.structured_output._workers.poll(0.1)
        assert time.monotonic() < deadline_s
    found = workers(llm)
    assert found
    return found


def test_nobody_waits_for_a_mask_that_does_not_come(tiny: LLM) -> None:
    """A free answer is written to its end while the processes that fill the masks of two others stand still; then these
    go on, with the tokens they would have had anyway."""
    manager = [held(regex="[a-z]{12}"), held(json=Short)]
    params = [SamplingParams(max_tokens=30, seed=4, structured_outputs=state) for state in manager]
    expected = [ask(tiny, [one])[0].token_ids for one in params]
    core = tiny._engine()
    stopped = opened(tiny, core, *(request(tiny, name, one) for name, one in zip(("1st", "2nd"), params, strict=True)))
    for process in stopped:
        process.suspend()
    core.add(request(tiny, "free", SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)))
    tokens: dict[str, list[int]] = {"1st": [], "2nd": [], "free": []}
    while len(tokens["free"]) < 40:
        for output in core.step():
            tokens[output.request_id] += output.token_ids
    assert len(tokens["1st"]) == len(tokens["2nd"]) == 1
    for process in stopped:
        process.resume()
    while core.has_work:
        for output in core.step():
            tokens[output.request_id] += output.token_ids
    assert [tokens["1st"], tokens["2nd"]] == expected


@pytest.mark.parametrize("what", ["worker", "service"])
def test_answers_go_on_when_what_fills_their_masks_is_killed(tiny: LLM, what: str) -> None:
    state = held(regex="([0-9][a-z]){12}")
    params = [SamplingParams(max_tokens=40, seed=seed, structured_outputs=state) for seed in (1, 2)]
    expected = [ask(tiny, [one])[0].token_ids for one in params]
    core, tokens = tiny._engine(), dict[str, list[int]](one=[], two=[])
    pids = [process.pid for process in opened(tiny, core, *map(request, [tiny] * 2, tokens, params))]
    assert tiny._structured is not None
    service = tiny._structured.service.pid
    killed = False
    while core.has_work:
        for output in core.step():
            assert output.failure is None
            tokens[output.request_id] += output.token_ids
        if len(tokens["one"]) > 3 and not killed:
            killed = True
            for pid in pids if what == "worker" else [service]:
                os.kill(pid, signal.SIGKILL)
    assert killed
    assert list(tokens.values()) == expected
    deadline_s = time.monotonic() + PATIENCE_S
    while (tiny._structured.service.pid == service) != (what == "worker"):  # A thread notices, and replaces it.
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_masks_that_take_too_long_in_all_end_their_own_answer(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(masks, "MASK_CPU_S", 0.0)
    monkeypatch.setattr(masks, "MASK_CPU_S_A_TOKEN", 0.0)
    failed, fine = ask(tiny, [SamplingParams(max_tokens=30, structured_outputs=held(regex="[a-z]{20}")), FREE[0]])
    assert (failed.finish_reason, failed.stop_reason) == ("error", "HF362")
    assert fine.finish_reason == "length"


def test_rows_that_are_late_write_the_same_answer(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    params = [SamplingParams(max_tokens=12, seed=seed, structured_outputs=held(regex="[a-z ]*")) for seed in range(3)]
    expected = [answer.token_ids for answer in ask(tiny, params)]
    calls, real = itertools.count(), masks.StepMasks.rows

    def rows(step: masks.StepMasks, *busy: Any) -> dict[int, Any]:
        found = real(step, *busy)
        turn = next(calls)
        return {slot: words for slot, words in found.items() if (slot + turn) % 3}

    monkeypatch.setattr(masks.StepMasks, "rows", rows)
    assert [answer.token_ids for answer in ask(tiny, params)] == expected
