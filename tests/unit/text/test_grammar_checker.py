"""Grammars checked in worker processes: what explodes is refused within its limits, costs nobody else anything, and
nothing of it is left."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
from deadlines import PATIENCE_S
from small_vocabulary import END, SIZE, VOCABULARY

from holdfast.errors import EngineError, GrammarError, OverloadedError, RequestError
from holdfast.records.structured import LARGE_BYTES, MAX_GRAMMAR_CHARS, MAX_SCHEMA_BYTES, StructuredOutputsParams
from holdfast.text.structured import checker as module
from holdfast.text.structured.checker import QUICK, SLOW, Abandoned, CheckLane, GrammarChecker, is_cheap
from holdfast.text.structured.client import GrammarService, WorkerConnection, check_has_bytes
from holdfast.text.structured.text_matcher import TextMatcher
from holdfast.text.structured.wire import Marker, WorkerLimits
from holdfast.units import MIB


def form(**given: Any) -> StructuredOutputsParams:
    return StructuredOutputsParams(**given)


def intersection(count: int, name: str = "A") -> StructuredOutputsParams:
    """A few hundred bytes whose states double with each part."""
    parts = " & ".join(f"/.*a.{{{at}}}/" for at in range(1, count + 1))
    return form(grammar=f"start: {name}\n{name}: {parts}")


@pytest.fixture(scope="module")
def service() -> Iterator[GrammarService]:
    made = GrammarService(lambda: VOCABULARY, [END], SIZE)
    yield made
    made.close()


@pytest.fixture
def checker(service: GrammarService) -> GrammarChecker:
    return GrammarChecker(service)


def references(count: int) -> dict[str, Any]:
    """A chain as long as a schema may be: the library descends it by recursion."""
    return {**{f"{at}": {"items": {"$ref": f"#/{at + 1}"}} for at in range(count)}, f"{count}": {}, "$ref": "#/0"}


def longest_chain() -> dict[str, Any]:
    count = 100
    while len(json.dumps(references(count + 100), separators=(",", ":"))) < MAX_SCHEMA_BYTES:
        count += 100
    return references(count)


def product(parts: int, ways: int) -> dict[str, Any]:
    properties = [[{"properties": {f"p{part}_{way}": {}}} for way in range(ways)] for part in range(parts)]
    return {"allOf": [{"anyOf": each} for each in properties]}


def chain_of_rules() -> str:
    count = MAX_GRAMMAR_CHARS // 22
    return "start: r0\n" + "\n".join(f'r{at}: "a" r{at + 1}' for at in range(count)) + f'\nr{count}: "b"'


def doubling() -> str:
    return "\n".join(f"r{at} ::= r{at + 1} r{at + 1}" for at in range(60)) + '\nr60 ::= "a"\nroot ::= r0'


def many_copies() -> str:
    """Of a long rule: 60 KB that would be 1.4 GB written out."""
    return "root ::= " + "long " * 10_000 + '\nlong ::= "' + "x" * 10_000 + '"'


BOMBS: dict[str, dict[str, Any]] = {
    "references": {"json": longest_chain()},
    "product": {"json": product(20, 3)},
    "rules": {"grammar": chain_of_rules()},
    "nested repetitions": {"regex": "((a{1,100}){1,100}){1,100}"},
    "repetition": {"regex": "(.{0,300}[abc]){0,300}"},
    "long": {"regex": "a{1,1000000}"},
    "states": {"regex": ".*a.{60}b.*c.{60}"},
    "ambiguous": {"grammar": 'start: (x x x)*\nx: y|z|\ny: start\nz: "a"*'},
    "doubling": {"grammar": doubling()},
    "many copies": {"grammar": many_copies()},
    "items": {"json": {"items": {"items": {"maxItems": 10**9, "minItems": 10**8}, "minItems": 10**8}}},
    "letters": {"json": {"type": "string", "minLength": 10**9, "maxLength": 2 * 10**9}},
    "intersection": {"grammar": intersection(29).grammar},
    "patterns": {"json": {"allOf": [{"type": "string", "pattern": f".*a.{{{at}}}"} for at in range(1, 30)]}},
    "remainders": {"json": {"type": "integer", "multipleOf": 999_999}},
    "open brackets": {"grammar": "start: " + "[" * 65_000},
    "open strings": {"grammar": "start: " + '"\\' * 32_000},
    "open groups": {"grammar": "start: " + "(" * 65_000},
    "stars": {"grammar": 'root ::= "a"' + "*" * 60_000},
    "wide count": {"grammar": 'root ::= "a"{1,' + " " * 60_000},
    "open class": {"regex": "[" * 16_000},
    "named classes": {"regex": "[" + "[:a:]" * 3_000},
    "closed rest": {"regex": "[:" * 8_000},
}


# A tenth of the time that a server allows, and half of the memory. Not behind all other work of the machine.
SMALL = replace(SLOW, cpu_s=2.0, memory_bytes=SLOW.memory_bytes // 2, niceness=0, wait_s=PATIENCE_S)


@pytest.mark.parametrize("slow", [SMALL, pytest.param(SLOW, marks=pytest.mark.long)], ids=["small", "as served"])
@pytest.mark.parametrize("name", BOMBS)
def test_what_would_explode_is_refused_or_harmless(service: GrammarService, name: str, slow: CheckLane) -> None:
    try:
        cost = GrammarChecker(service, slow=slow).check(form(**BOMBS[name]))
    except GrammarError as error:
        assert error.code in ("HF361", "HF362"), error  # noqa: PT017
    else:
        assert cost.held_bytes <= slow.memory_bytes * 2
    assert service.pid is not None
    deadline_s = time.monotonic() + PATIENCE_S
    while psutil.Process(service.pid).children():  # Nothing of it is left, whatever it was doing.
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_what_is_ordinary_is_cheap(checker: GrammarChecker) -> None:
    properties = {f"field_{at}": {"type": "string"} for at in range(12)}
    for params in (form(json={"type": "object", "properties": properties}), form(regex="[a-z]+"), form(choice=["a"])):
        assert is_cheap(checker.check(params))


def test_an_explosion_is_given_up_by_the_quick_lane_and_then_by_the_slow_one(service: GrammarService) -> None:
    lane = CheckLane(places=1, cpu_s=0.05, memory_bytes=16 * MIB, niceness=0, wait_s=PATIENCE_S, most_waiting=9)
    checker = GrammarChecker(service, quick=lane, slow=lane)
    for _ in range(2):
        with pytest.raises(GrammarError, match="takes more than") as caught:
            checker.check(intersection(29))
        assert (caught.value.code, caught.value.field) == ("HF362", "grammar")
        assert "0.05 s of CPU time" in str(caught.value)


def test_a_grammar_the_quick_lane_has_no_room_for_is_checked_by_the_slow_one(service: GrammarService) -> None:
    tight = CheckLane(places=1, cpu_s=0.0, memory_bytes=MIB, niceness=0, wait_s=PATIENCE_S, most_waiting=9)
    assert GrammarChecker(service, quick=tight).check(form(json_object=True)).cpu_s > 0


def test_ordinary_grammars_pass_while_explosions_wait(service: GrammarService) -> None:
    """Fifty bombs keep the slow lane busy; whoever comes with an ordinary grammar is served meanwhile."""
    checker = GrammarChecker(service, quick=replace(QUICK, cpu_s=0.1, niceness=0, wait_s=PATIENCE_S))
    endings: list[type[BaseException]] = []
    stop = threading.Event()

    def bomb(number: int) -> None:
        try:
            checker.check(intersection(29, f"A{number}"), stop.is_set)
        except BaseException as error:
            endings.append(type(error))

    threads = [threading.Thread(target=bomb, args=[number]) for number in range(50)]
    for thread in threads:
        thread.start()
    done = 0
    for number in range(10):
        checker.check(form(regex=f"[a-z]{{{number + 1}}}"))
        done += 1
    in_time = len(endings) < 50
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert done == 10
    assert in_time, "all bombs were over before the ordinary ones were done"
    assert {*endings} <= {GrammarError, OverloadedError, Abandoned}


def test_few_may_wait_for_the_slow_lane(service: GrammarService) -> None:
    full = CheckLane(places=0, cpu_s=1.0, memory_bytes=MIB, niceness=0, wait_s=PATIENCE_S, most_waiting=0)
    with pytest.raises(OverloadedError, match="already waiting"):
        GrammarChecker(service, slow=full).check(form(choice=["x" * LARGE_BYTES]))


def test_nobody_compiles_for_those_who_have_gone(service: GrammarService, checker: GrammarChecker) -> None:
    gone = threading.Event()
    threading.Timer(0.2, gone.set).start()
    with pytest.raises(Abandoned):
        checker.check(intersection(29), gone.is_set)
    assert service.pid is not None
    deadline_s = time.monotonic() + PATIENCE_S
    while psutil.Process(service.pid).children():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_the_same_grammar_is_looked_at_once_and_refused_each_time(service: GrammarService) -> None:
    checker = GrammarChecker(service)
    assert checker.known(form(regex="a+")) is None
    found = checker.check(form(regex="a+"))
    with pytest.raises(GrammarError, match="unclosed group"):
        checker.check(form(regex="("))
    checker._connect = None  # type: ignore[method-assign, assignment]
    assert checker.check(form(regex="a+")) is found is checker.known(form(regex="a+"))
    with pytest.raises(GrammarError, match="unclosed group"):
        checker.known(form(regex="("))


def test_a_service_that_was_killed_is_started_again(service: GrammarService) -> None:
    checker = GrammarChecker(service)
    checker.check(form(regex="x1"))
    first = service.pid
    assert first is not None
    os.kill(first, signal.SIGKILL)
    checker.check(form(regex="x2"))
    assert service.pid != first


def test_a_service_that_hangs_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FIRST_WORD_S", 0.3)
    service = GrammarService(lambda: VOCABULARY, [END], SIZE)
    try:
        checker = GrammarChecker(service)
        service.start()
        pid = service.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with pytest.raises(EngineError, match="did not respond"):
            checker.check(form(regex="y1"))
        monkeypatch.setattr(module, "FIRST_WORD_S", PATIENCE_S)
        checker.check(form(regex="y1"))
        assert service.pid != pid
    finally:
        service.close()


def test_workers_end_with_their_service_and_the_service_with_its_owner() -> None:
    service = GrammarService(lambda: VOCABULARY, [END], SIZE)
    service.start()
    pid = service.pid
    assert pid is not None
    os.kill(pid, signal.SIGINT)  # Ctrl-C reaches all of a terminal: the service goes on, which has hardly begun.
    worker = WorkerConnection(service.address, WorkerLimits(MIB, 1, 0))
    while not worker.met:
        worker.receive()
    assert service.pid == pid
    processes = [psutil.Process(pid), *psutil.Process(pid).children()]
    assert len(processes) == 2
    service.close()
    assert psutil.wait_procs(processes, PATIENCE_S)[1] == []


def test_a_tokenizer_without_bytes_is_refused() -> None:
    from tokenizers import Tokenizer as Backend
    from tokenizers import models

    from holdfast.text.tokenizer.tokenizer import Tokenizer

    backend = Backend(models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    with pytest.raises(RequestError, match="does not map each token to bytes"):
        check_has_bytes(Tokenizer(backend))


def test_a_text_follows_a_schema_or_does_not(service: GrammarService, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("holdfast.text.structured.text_matcher.ANSWER_S", PATIENCE_S)
    checker = GrammarChecker(service)
    texts = TextMatcher(service, checker)
    schema = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
    schema |= {"required": ["city"], "additionalProperties": False}
    assert not texts.accepts('{"city": "Rome"}', form(json=schema))  # Nobody has checked it yet.
    checker.check(form(json=schema))
    monkeypatch.setattr("holdfast.text.structured.text_matcher.MAX_CPU_S", PATIENCE_S)
    expected = {
        '{"city": "Zürich"}': True,
        '{\n  "city": "Rome",\n  "days": 3\n}': True,
        '{"city":"日本"}': True,
        '{"city": 1}': False,
        "{}": False,
        '{"city": "Rome"': False,
        '{"city": "Rome"} ok': False,
        "": False,
    }
    assert {text: texts.accepts(text, form(json=schema)) for text in expected} == expected
    with pytest.raises(GrammarError):
        checker.check(form(json={"type": "object", "not": {}}))
    assert not texts.accepts("{}", form(json={"type": "object", "not": {}}))


def test_lanes_hold_what_the_plan_counts() -> None:
    from holdfast.footprint.structured_output import CHECKS_BYTES

    assert QUICK.places * QUICK.memory_bytes + SLOW.places * SLOW.memory_bytes == CHECKS_BYTES


def test_tenants_take_turns(service: GrammarService) -> None:
    """One with many grammars that explode keeps another waiting for the one that is at work, and not for all."""
    one = CheckLane(places=1, cpu_s=0.2, memory_bytes=12 * MIB, niceness=0, wait_s=PATIENCE_S, most_waiting=99)
    checker, stop, ended = GrammarChecker(service, quick=one, slow=one), threading.Event(), list[str]()

    def ask(params: StructuredOutputsParams, tenant: str) -> None:
        with contextlib.suppress(GrammarError, Abandoned):
            checker.check(params, stop.is_set, tenant)
        ended.append(tenant)

    threads = [threading.Thread(target=ask, args=[intersection(29, f"T{at}"), "greedy"]) for at in range(90)]
    for thread in threads:
        thread.start()
    ask(form(regex="[0-9]{7}"), "other")
    assert ended.count("greedy") < 45  # Many more than are done before it asks, on however busy a machine.
    stop.set()
    for thread in threads:
        thread.join(PATIENCE_S)


def test_a_worker_killed_by_somebody_else_refuses_nothing(service: GrammarService) -> None:
    checker, killed, over = GrammarChecker(service), threading.Event(), threading.Event()
    assert service.pid is not None
    before = {child.pid for child in psutil.Process(service.pid).children()}

    def kill_one() -> None:
        while not (killed.is_set() or over.is_set()):
            for child in psutil.Process(service.pid).children():
                if child.pid not in before:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()
                        killed.set()

    thread = threading.Thread(target=kill_one)
    thread.start()
    try:
        deadline_s, last = time.monotonic() + PATIENCE_S, 200
        while not killed.is_set():  # A worker may be done before it is found.
            assert time.monotonic() < deadline_s
            properties = {f"k{at}": {"type": "string"} for at in range(last)}
            checker.check(form(json={"type": "object", "properties": properties}))
            last += 1
    finally:
        over.set()
        thread.join(PATIENCE_S)


def test_descriptors_of_any_number_and_none_left_behind(service: GrammarService) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, hard), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    try:
        GrammarChecker(service).check(form(regex="[0-9]{9}"))
        before = len(os.listdir("/proc/self/fd"))
        for _ in range(5):
            with pytest.raises(OSError, match="No such file"):
                WorkerConnection("/nonexistent/socket", WorkerLimits(MIB, 1, 0), marked=True)
        assert len(os.listdir("/proc/self/fd")) == before
    finally:
        for file in files:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_marker_is_never_read_torn() -> None:
    writer = Marker()
    reader, stop = Marker(writer.descriptor), threading.Event()

    def write() -> None:
        while not stop.is_set():
            writer.begin(7, opening=False)
            writer.done()

    thread = threading.Thread(target=write)
    began_s = time.monotonic()
    thread.start()
    try:
        for _ in range(200_000):
            doing = reader.read()
            assert doing is None or (doing.number == 7 and doing.began_s >= began_s and doing.cpu_s > 0)
    finally:
        stop.set()
        thread.join(PATIENCE_S)
