"""Structured output as an attacker asks for it, drawn at random: every grammar is compiled and followed, or refused
with a typed error, within the limits of its worker process. Answers beside it notice nothing, and its memory comes
back."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from random import Random

import numpy
import psutil
import pytest
from deadlines import PATIENCE_S
from hostile_grammars import arguments, broken, gbnf, lark, regex, schema
from small_vocabulary import END, SIZE, VOCABULARY

from holdfast.engine.core.structured_outputs import StructuredOutputManager
from holdfast.errors import GrammarError, HoldfastError, RequestError
from holdfast.records import Failure, Request, SamplingParams
from holdfast.records.steps import Verdict
from holdfast.records.structured import StructuredOutputsParams
from holdfast.text.structured.checker import SLOW, GrammarChecker, is_cheap
from holdfast.text.structured.client import GrammarService
from holdfast.text.structured.syntax.gbnf import lark_of_gbnf
from holdfast.text.structured.syntax.lark_scanner import any_parts, lark_parts
from holdfast.text.structured.syntax.regex_limits import too_many
from holdfast.text.structured.syntax.schemas import closed, patterns, rewritten

Cases = Callable[[int], Iterator[tuple[str, Random]]]
STEPS = 12


@pytest.fixture(scope="module")
def service() -> Iterator[GrammarService]:
    made = GrammarService(lambda: VOCABULARY, [END], SIZE)
    made.start()
    yield made
    made.close()


def params_of(random: Random) -> StructuredOutputsParams | None:
    try:
        return StructuredOutputsParams(**arguments(random))
    except RequestError:
        return None


class Followed:
    """An answer beside a hostile one, which must go on whatever happens: (ab)+."""

    def __init__(self, manager: StructuredOutputManager) -> None:
        self._manager, self._turn = manager, 0
        self._manager.begin(request("canary", StructuredOutputsParams(regex="(ab)+"), costly=False))
        wait_for(manager, "canary")

    def go_on(self, name: str) -> None:
        token = b"ab"[self._turn % 2]
        self._turn += 1
        assert self._manager.advance_grammar("canary", token) is Verdict.GOES_ON, name
        deadline_s = time.monotonic() + PATIENCE_S
        while not self._manager._states["canary"].filled:
            self._manager._workers.poll(0.05)
            assert time.monotonic() < deadline_s, name
        bits = numpy.unpackbits(self._manager._states["canary"].words.view(numpy.uint8), bitorder="little")
        assert bits[b"ab"[self._turn % 2]], name


def request(name: str, params: StructuredOutputsParams, *, costly: bool) -> Request:
    sampling = SamplingParams(max_tokens=10**6, structured_outputs=params)
    return Request(request_id=name, prompt_token_ids=[1], params=sampling, eos_token_ids=(END,), costly_grammar=costly)


def wait_for(manager: StructuredOutputManager, name: str) -> HoldfastError | None:
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        for found, problem in manager.pop_compiled(0.05):
            if found.request_id == name:
                return problem
        assert time.monotonic() < deadline_s, name


def follow(
    manager: StructuredOutputManager,
    params: StructuredOutputsParams,
    costly: bool,
    random: Random,
    canary: Followed,
    name: str,
):
    manager.begin(request("hostile", params, costly=costly))
    problem = wait_for(manager, "hostile")
    if problem is not None:
        assert isinstance(problem, GrammarError), name
        return
    state, deadline_s = manager._states["hostile"], time.monotonic() + PATIENCE_S
    for step in range(STEPS):
        while not state.filled:
            manager._workers.poll(0.05)
            assert time.monotonic() < deadline_s, name
        allowed = numpy.flatnonzero(numpy.unpackbits(state.words.view(numpy.uint8), bitorder="little"))
        verdict = manager.advance_grammar("hostile", int(random.choice(list(allowed))))
        if step % 4 == 0:
            canary.go_on(name)
        if verdict is not Verdict.GOES_ON:
            assert not isinstance(verdict, Failure) or verdict.code in ("HF361", "HF362", "HF363"), (name, verdict)
            break
    manager.forget("hostile")


def attack(service: GrammarService, drawn: Iterator[tuple[str, Random]]) -> dict[str, int]:
    checker = GrammarChecker(service)
    manager = StructuredOutputManager(lambda: service.address, rows=8, vocab_size=SIZE, eos_ids=[END])
    canary, endings = Followed(manager), dict.fromkeys(("malformed", "refused", "followed"), 0)
    pid = service.pid
    assert pid is not None
    before = psutil.Process(pid).memory_info().rss
    for name, random in drawn:
        params = params_of(random)
        if params is None:
            endings["malformed"] += 1
            continue
        try:
            cost = checker.check(params)
        except GrammarError:
            endings["refused"] += 1
            continue
        assert cost.held_bytes <= 2 * SLOW.memory_bytes, name
        endings["followed"] += 1
        follow(manager, params, not is_cheap(cost), random, canary, name)
    canary.go_on("the end")
    manager.close()
    assert service.pid == pid, "the service died"
    assert psutil.Process(pid).memory_info().rss <= before * 1.05
    deadline_s = time.monotonic() + PATIENCE_S
    while psutil.Process(pid).children():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)
    return endings


def test_every_grammar_is_followed_or_refused(service: GrammarService, cases: Cases) -> None:
    endings = attack(service, cases(45))
    assert endings["refused"] > 10
    assert endings["followed"] > 10


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_every_grammar_is_followed_or_refused_for_long(service: GrammarService, cases: Cases) -> None:
    print(attack(service, cases(0)))


READERS: dict[str, Callable[[str], object]] = {
    "regex": too_many,
    "lark": lambda text: sum(len(part) for _, part in lark_parts(text)),
    "any": lambda text: sum(len(part) for _, part in any_parts(text)),
    "gbnf": lark_of_gbnf,
}
SHAPES = ["[", "(", "((", '"\\', "'\\", "/\\", "[\\", "[[:a:]", "{1", "{1,", "\\p{", "(?<"]
SHAPES += ["a::=", "a ", "a*", '""', "//", "<a"]


@pytest.mark.parametrize("reader", READERS)
def test_what_reads_grammars_is_linear(reader: str, cases: Cases) -> None:
    """In the server's own process: 64 KB of anything take less than five seconds of it, where a quadratic reader
    took minutes."""
    texts = [shape * (64_000 // len(shape)) for shape in SHAPES]
    texts += [f"root ::= {shape * (64_000 // len(shape))}" for shape in SHAPES]
    texts += ['root ::= "a"{1,' + " " * 64_000, "root ::= " + "x " * 32_000, 'x ::= "a"\nroot ::= ' + "x " * 32_000]
    for _, random in cases(20):
        text = random.choice([regex, lark, gbnf])(random)
        text = broken(random, text) or "x"
        texts.append((text * (64_000 // len(text) + 1))[:64_000])
    for text in texts:
        began_s = time.process_time()
        with contextlib.suppress(HoldfastError):
            READERS[reader](text)
        assert time.process_time() - began_s < 5.0, text[:80]


def test_what_reads_schemas_is_linear(cases: Cases) -> None:
    many = {"items": {"$ref": "#/$defs/e"}, "type": "array", "uniqueItems": True, "minItems": 9000}
    named = {f"{at}": many for at in range(900)}
    schemas = [{"$defs": {"e": {"enum": [f"{at}" for at in range(9999)]}}, "properties": named}]
    schemas += [found for _, random in cases(60) if isinstance(found := schema(random), dict)]
    for one in schemas:
        began_s = time.process_time()
        rewritten(closed(one))
        for pattern in patterns(one):
            too_many(pattern)
        assert time.process_time() - began_s < 5.0, str(one)[:200]
