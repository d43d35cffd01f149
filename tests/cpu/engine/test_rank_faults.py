"""Ranks that end, stop or are left in the middle of a step: whoever waited for them says so, and nothing is left."""

from __future__ import annotations

import gc
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from deadlines import PATIENCE_S
from held_signals import hears_no_interrupt
from rank_engines import GREEDY, PROMPTS, make, tokens

from holdfast import LLM, SamplingParams
from holdfast.engine.process.fault_injection import RANK_NO_MEMORY
from holdfast.engine.ranks.following import NO_ROOM
from holdfast.engine.ranks.together import LoadedRanks
from holdfast.errors import RANK_WITHOUT_MEMORY, DoesNotFitError, EngineDiedError, EngineError, EngineHungError

pytestmark = pytest.mark.usefixtures("forked_starts")

SPARE_BYTES = 64 << 20
LONG = SamplingParams(temperature=0.0, max_tokens=400, ignore_eos=True)


def children_of(llm) -> list[int]:
    return list(llm._core.runner.pids)


def hit_at_step(llm, step: int, action) -> None:
    """Calls `action` once, when rank 0 is in the middle of that step: the others have its plan."""
    runner, count = llm._core.runner._runner, 0
    submit = runner.submit

    def counted(plan, masks=None):
        nonlocal count
        count += 1
        if count == step:
            action()
        return submit(plan, masks)

    runner.submit = counted


def shared_memory() -> list[str]:
    """Of ranks, that this process maps or has open."""
    gc.collect()
    maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "holdfast-ranks" in line]
    links = [str(link.resolve()) for link in Path("/proc/self/fd").glob("*") if link.is_symlink()]
    return maps + [link for link in links if "holdfast-ranks" in link]


def test_a_rank_that_is_killed_is_named_and_none_is_left(tiny_model) -> None:
    before = shared_memory()
    with make(tiny_model, 2) as llm:
        [other] = children_of(llm)
        hit_at_step(llm, 5, lambda: os.kill(other, signal.SIGKILL))
        began_s = time.monotonic()
        with pytest.raises(EngineDiedError, match=rf"rank 1 \(pid {other}\) has ended: signal SIGKILL"):
            llm.generate(PROMPTS, LONG, use_tqdm=False)
        assert time.monotonic() - began_s < PATIENCE_S / 2
    assert not psutil.pid_exists(other)
    assert len(shared_memory()) == len(before)


def test_a_rank_that_is_stopped_is_named_and_ended(tiny_model) -> None:
    with make(tiny_model, 2, engine_hang_timeout=5) as llm:
        [other] = children_of(llm)
        hit_at_step(llm, 5, lambda: os.kill(other, signal.SIGSTOP))
        began_s = time.monotonic()
        with pytest.raises(EngineHungError, match=rf"rank 1 \(pid {other}\) has not come"):
            llm.generate(PROMPTS, LONG, use_tqdm=False)
        assert 3 < time.monotonic() - began_s < PATIENCE_S / 2
    assert not psutil.pid_exists(other)


def test_a_rank_that_gets_no_memory_at_start_is_refused_with_what_it_needs(tiny_model, monkeypatch) -> None:
    """The system gives it no more addresses than it has by then, as under ulimit -v."""
    back_kv, others = LoadedRanks.back_kv, list[int]()

    def short(ranks: LoadedRanks, *given: int) -> None:
        assert ranks.group is not None
        if not others:
            others.extend(ranks.group.pids)
            held = psutil.Process(others[0]).memory_info().vms
            resource.prlimit(others[0], resource.RLIMIT_AS, (held + SPARE_BYTES, held + SPARE_BYTES))
        back_kv(ranks, *given)

    monkeypatch.setattr(LoadedRanks, "back_kv", short)
    began_s = time.monotonic()
    with pytest.raises(DoesNotFitError, match="rank 1: out of memory while it started") as caught:
        make(tiny_model, 2, kv_cache_memory_bytes="1GiB")
    assert time.monotonic() - began_s < PATIENCE_S / 2
    assert caught.value.code == NO_ROOM
    assert "KV pool 512" in str(caught.value.needed)
    assert "free on its machine" in str(caught.value.found)
    assert not psutil.pid_exists(others[0])


def test_a_rank_that_gets_no_memory_for_another_pool_is_a_fault_and_no_refusal(
    tiny_model, tmp_path, monkeypatch
) -> None:
    """Also before the first step: all ranks end, whoever asked for that pool."""
    lacking = tmp_path / "lacking"
    monkeypatch.setenv(RANK_NO_MEMORY, str(lacking))
    with make(tiny_model, 2) as llm:
        lacking.touch()
        with pytest.raises(EngineError, match="rank 1: out of memory while serving") as caught:
            llm._core.set_pool(llm._core.scheduler.kv.blocks_total)
    assert caught.value.code == RANK_WITHOUT_MEMORY


@pytest.fixture(scope="module")
def pair(tiny_model) -> Iterator[LLM]:
    """Of those tests here that leave it well."""
    with make(tiny_model, 2) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(pair: LLM) -> list[list[int]]:
    return tokens(pair)


def test_a_step_that_is_left_in_the_middle_is_left_by_all(pair: LLM, expected, monkeypatch) -> None:
    """Ctrl-C while the first rank computes: the next prompts are answered as ever, by the same processes."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    before, runner = children_of(pair), pair._core.runner._runner
    assert all(hears_no_interrupt(pid) for pid in before)  # It reaches all of a terminal.
    monkeypatch.setattr(runner, "submit", runner.submit)  # It is put back.
    for _ in range(2):
        hit_at_step(pair, 4, interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.generate(PROMPTS, LONG, use_tqdm=False)
        assert tokens(pair, PROMPTS, GREEDY) == expected
    assert children_of(pair) == before


@pytest.mark.parametrize("shown", [True, False])
def test_a_plan_that_is_left_while_it_is_sent_is_left_by_all(pair: LLM, expected, shown: bool, monkeypatch) -> None:
    """Ctrl-C when the others have the plan already and the first rank has not begun, or when it is not shown yet."""
    word, count = pair._core.runner._group._segment.mail, 0
    post = word.post

    def interrupted(value: int) -> None:
        nonlocal count
        count += 1
        if shown or count != 4:
            post(value)
        if count == 4:
            raise KeyboardInterrupt

    monkeypatch.setattr(word, "post", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pair.generate(PROMPTS, LONG, use_tqdm=False)
    assert count >= 4
    assert tokens(pair, PROMPTS, GREEDY) == expected
