"""When a load sends: levels of phases, arrivals of an open loop, prompts of chosen lengths."""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import time

import msgspec
import pytest
import uvloop

from holdfast.bench.client.drive import PreparedRequests, _until
from holdfast.bench.load.inputs import parse_lengths, parse_share, read_prompts, read_replay
from holdfast.bench.load.load import COMPLETIONS, Arrival, LengthRange, Load, WorkerShare
from holdfast.bench.load.profile import (
    Phase,
    arrival_times,
    default_profile,
    level_at,
    next_time_above,
    span,
    steps_profile,
)
from holdfast.bench.load.prompts import RequestMaker
from holdfast.bench.target import Target, check_lengths
from holdfast.errors import ConfigurationError

PROFILE = default_profile(10, 20, 5)


def test_load_rises_stays_and_falls() -> None:
    levels = [level_at(PROFILE, at_s) for at_s in (-1, 0, 5, 10, 29, 32.5, 35, 99)]
    assert levels == pytest.approx([0, 0, 0.5, 1, 1, 0.5, 0, 0])
    assert span(PROFILE, "peak") == (10, 30)
    assert [phase.name for phase in default_profile(0, 5, 0)] == ["peak"]


def test_a_slot_waits_until_the_level_is_above_its_own() -> None:
    assert next_time_above(PROFILE, 0.5, 0) == pytest.approx(5)
    assert next_time_above(PROFILE, 0.5, 12) == 12
    assert next_time_above(PROFILE, 0.5, 33) is None
    assert next_time_above(PROFILE, 0.0, 0) == pytest.approx(0, abs=1e-6)
    assert next_time_above(steps_profile((1, 4), 3), 0.5, 0) == pytest.approx(3)


def test_constant_arrivals_are_evenly_spaced_and_as_many_as_the_rate_says() -> None:
    times = list(arrival_times((Phase("peak", 10),), 4, arrivals="constant"))
    assert len(times) == 40
    assert {round(later - earlier, 9) for earlier, later in itertools.pairwise(times)} == {0.25}


def test_a_ramp_sends_half_as_many_and_more_and_more() -> None:
    times = list(arrival_times((Phase("up", 10, 0, 1), Phase("peak", 10)), 8, arrivals="constant"))
    assert len([at for at in times if at <= 10]) == 40
    assert len(times) == 120
    assert len([at for at in times if at < 5]) == pytest.approx(10, abs=1)


def test_poisson_arrivals_vary_as_much_as_their_mean() -> None:
    times = list(arrival_times((Phase("peak", 1000),), 5, seed=3))
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert len(times) == pytest.approx(5000, rel=0.05)
    assert statistics.stdev(gaps) == pytest.approx(statistics.mean(gaps), rel=0.1)
    assert times == list(arrival_times((Phase("peak", 1000),), 5, seed=3))


def test_bursts_come_together() -> None:
    times = list(arrival_times((Phase("peak", 10),), 4, arrivals="bursts", burst=8))
    assert sorted(set(times)) == pytest.approx([2, 4, 6, 8, 10])
    assert len(times) == 40


def bodies(load: Load, count: int) -> list[dict[str, object]]:
    maker = RequestMaker(load)
    return [json.loads(maker.conversation(number).ask().body) for number in range(count)]


def test_prompts_have_their_length_and_none_begins_as_another() -> None:
    load = Load(url="", model="m", prompt=LengthRange(50, 50), words_per_token=0.5, template_tokens=10.0)
    found = [body["messages"][0]["content"].split() for body in bodies(load, 20)]  # type: ignore[index]
    assert {len(words) for words in found} == {20}
    assert len({tuple(words[:4]) for words in found}) == 20
    assert bodies(load, 3) == bodies(load, 3)


def test_a_share_of_prompts_begins_with_one_of_the_prefixes() -> None:
    load = Load(url="", path=COMPLETIONS, prompt=LengthRange(60, 60), prefix_tokens=40, prefix_share=0.5, prefixes=2)
    found = [tuple(str(body["prompt"]).split()[:40]) for body in bodies(load, 200)]
    shared = [start for start in found if found.count(start) > 1]
    assert len(shared) == pytest.approx(100, abs=25)
    assert len(set(shared)) == 2


def test_requests_carry_schemas_adapters_and_cancellations() -> None:
    load = Load(url="", model="m", schema={"type": "object"}, schema_share=0.5, adapters=("a", "b"), cancel_share=0.5)
    maker = RequestMaker(load)
    asked = [maker.conversation(number).ask() for number in range(100)]
    found = [json.loads(request.body) for request in asked]
    structured = [body for body in found if "response_format" in body]
    assert 30 < len(structured) < 70
    assert not any("ignore_eos" in body for body in structured)
    assert {body["model"] for body in found} == {"a", "b"}
    assert 30 < sum(request.cancel_after is not None for request in asked) < 70


def test_requests_of_a_closed_loop_are_made_before_it_begins() -> None:
    load = Load(url="http://x", concurrency=5, requests=8)
    prepared = PreparedRequests(load, WorkerShare(1, 2))
    prepared.fill()
    taken = [prepared.take() for _ in range(5)]
    assert [one and one.ask().number for one in taken] == [1, 3, 5, 7, None]
    assert PreparedRequests(load, WorkerShare()).take() is not None  # Where there was no time to make them.


def test_requests_that_the_server_would_refuse_are_refused_before_the_run() -> None:
    target = Target(url="http://x", model="m", max_model_len=1000)
    load = Load(url="http://x", prompt=LengthRange(10, 900), output=LengthRange(1, 100))
    check_lengths(load, target)
    with pytest.raises(ConfigurationError, match="longer than the server's context") as refused:
        check_lengths(msgspec.structs.replace(load, prompt=LengthRange(10, 901)), target)
    assert str(refused.value.fix).startswith("--prompt 900,")
    with pytest.raises(ConfigurationError):
        check_lengths(msgspec.structs.replace(load, replay=(Arrival(0, 9, 9), Arrival(1, 999, 2))), target)
    check_lengths(msgspec.structs.replace(load, prompts=("p",), prompt=LengthRange(9999, 9999)), target)
    for known in ({"lengths": ((9, 9), (999, 2))}, {"replay": (Arrival(0, 999, 2),)}):  # Prompts are made of these.
        with pytest.raises(ConfigurationError):
            check_lengths(msgspec.structs.replace(load, prompts=("p",), **known), target)
    check_lengths(msgspec.structs.replace(load, prompt=LengthRange(9999, 9999)), Target(url="http://x", model="m"))


def test_a_conversation_repeats_what_was_said() -> None:
    load = Load(url="", model="m", turns=2, prompt=LengthRange(5, 5))
    conversation = RequestMaker(load).conversation(0)
    first = json.loads(conversation.ask().body)["messages"]
    conversation.answered("well")
    second = json.loads(conversation.ask().body)["messages"]
    assert second[:2] == [*first, {"role": "assistant", "content": "well"}]
    assert len(second) == 3


def test_lengths_and_shares_as_people_write_them() -> None:
    assert parse_lengths("100-1k", field="prompt") == LengthRange(100, 1000)
    assert parse_lengths("32", field="prompt") == LengthRange(32, 32)
    assert parse_share("5%", field="x") == parse_share("0.05", field="x") == 0.05
    for wrong in ("0", "9-2", "few"):
        with pytest.raises(ConfigurationError):
            parse_lengths(wrong, field="prompt")
    with pytest.raises(ConfigurationError):
        parse_share("105%", field="headroom")


def test_prompts_of_files(tmp_path) -> None:
    path = tmp_path / "prompts"
    path.write_text('plain words\n{"prompt": "p"}\n{"body": {"messages": [{"role": "user", "content": "c"}]}}\n')
    assert read_prompts(str(path)) == ("plain words", "p", [{"role": "user", "content": "c"}])
    path.write_text(json.dumps([{"conversations": [{"from": "human", "value": "shared"}]}]))
    assert read_prompts(str(path)) == ("shared",)
    for wrong in ("", '{"neither": 1}'):
        path.write_text(wrong)
        with pytest.raises(ConfigurationError):
            read_prompts(str(path))


def test_a_log_is_replayed_at_its_own_times(tmp_path) -> None:
    path = tmp_path / "access.log"
    rows = [
        {"time": "2026-11-17T10:00:05Z", "duration_s": 1.0, "prompt_tokens": 7, "completion_tokens": 3},
        {"time": "2026-11-17T10:00:02Z", "duration_s": 0.5, "prompt_tokens": 9, "completion_tokens": 2},
        {"time": "2026-11-17T10:00:03Z", "duration_s": 0.5, "status": 503, "prompt_tokens": 1, "completion_tokens": 0},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = read_replay(str(path), speed=2.0)
    assert [(one.at_s, one.prompt_tokens, one.output_tokens) for one in found] == [(0.0, 9, 2), (1.25, 7, 3)]
    path.write_text('{"prompt_tokens": 7, "completion_tokens": 3}\n')
    with pytest.raises(ConfigurationError) as refused:
        read_replay(str(path))
    assert refused.value.code == "HF163"


def test_nothing_is_sent_before_its_time() -> None:
    async def early() -> list[float]:
        found = []
        for at in range(20):
            moment = time.monotonic() + 0.001 + at * 0.0001
            await _until(moment)
            found.append(moment - time.monotonic())
        return found

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        assert max(runner.run(early())) <= 0
