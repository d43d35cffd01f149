"""Which engine a prompt goes to: what is cached and how much there is to do, both in tokens."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.data_parallel import router as router_module
from holdfast.engine.data_parallel.router import (
    COARSE,
    FINE_BLOCKS,
    MOST_BLOCKS,
    ROUTER_BYTES,
    EngineLoad,
    Route,
    Router,
    prefix_blocks,
)

BLOCK = 16
IDLE = EngineLoad(places=64)


class Taken(Router):
    """Of engines that refuse nothing."""

    def choose(self, prompt: Sequence[int], loads: Mapping[int, EngineLoad], salt: str = "") -> Route:
        route = super().choose(prompt, loads, salt)
        self.remember(route)
        return route


def router(engines: int = 2, cache_tokens: int = 1 << 20) -> Router:
    made = Taken(BLOCK, engines)
    for number in range(engines):
        made.set_cache(number, cache_tokens)
    return made


def words(seed: int, count: int) -> list[int]:
    return random.Random(seed).choices(range(1000), k=count)


def test_equals_take_turns() -> None:
    made = router(3)
    assert [made.choose(words(seed, 40), dict.fromkeys(range(3), IDLE)).engine for seed in range(6)] == [0, 1, 2] * 2


def test_a_conversation_stays_where_its_beginning_is_cached() -> None:
    made, said = router(), words(1, 100)
    assert made.choose(said, {0: IDLE, 1: IDLE}) == Route(0, 0)
    assert made.choose(words(2, 100), {0: IDLE, 1: IDLE}).engine == 1
    for turn in range(3, 9):
        said = said + words(turn, 50)
        # Whole blocks of what it was before.
        assert made.choose(said, {0: IDLE, 1: IDLE}) == Route(0, (len(said) - 50) // BLOCK * BLOCK)


def test_what_was_only_asked_is_not_remembered() -> None:
    made, prompt = Router(BLOCK, 2), words(1, 100)
    made.set_cache(0, 1 << 20)
    route = made.choose(prompt, {0: IDLE})
    assert made.choose(prompt, {0: IDLE}).saved_tokens == 0
    made.remember(route)
    assert made.choose(prompt, {0: IDLE}).saved_tokens == 96


def test_what_is_no_prompt_is_sent_on_to_be_refused() -> None:
    for odd in ([1 << 70] * 20, [0.5] * 20, ["a"] * 20):
        assert router().choose(odd, {0: IDLE, 1: IDLE}) == Route(0, 0)  # type: ignore[arg-type]


def test_memory_is_bounded_however_large_the_pools_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_module, "MOST_BLOCKS", 100)
    made, first = router(2, 1 << 40), words(1, 30 * BLOCK)
    for seed in range(1, 4):
        made.choose(words(seed, 30 * BLOCK), {0: IDLE})
    assert made.choose(first, {0: IDLE}).saved_tokens < 29 * BLOCK
    assert sum(len(held._tokens) for held in made._prompts.values()) <= 50


def test_blocks_take_what_is_planned_for_them() -> None:
    made, blocks = router(1), 0
    tracemalloc.start()
    for seed in range(200):
        made.choose(words(seed, 100 * BLOCK), {0: IDLE})
        blocks += 100
    held, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held / blocks < ROUTER_BYTES / MOST_BLOCKS


def test_of_a_prompt_that_is_cached_whole_the_last_block_is_computed() -> None:
    made, prompt = router(), words(1, 4 * BLOCK)
    made.choose(prompt, {0: IDLE})
    assert made.choose(prompt, {0: IDLE}).saved_tokens == 3 * BLOCK


def test_tokens_saved_are_weighed_against_tokens_that_wait() -> None:
    prompt = words(1, 641)
    for waiting, chosen in ((639, 0), (641, 1)):
        made = router()
        made.choose(prompt, {0: IDLE})
        loads = {0: EngineLoad(waiting_tokens=waiting, sequences=1, places=64), 1: IDLE}
        assert made.choose(prompt, loads).engine == chosen, waiting


def test_running_sequences_weigh_less_than_waiting_prompts() -> None:
    loads = {0: EngineLoad(running_tokens=800, places=9), 1: EngineLoad(waiting_tokens=101, places=9)}
    assert router().choose([1, 2, 3], loads).engine == 0
    loads[0] = EngineLoad(running_tokens=816, places=9)
    assert router().choose([1, 2, 3], loads).engine == 1


def test_an_engine_without_a_place_is_the_last_choice() -> None:
    made, prompt = router(), words(1, 1000)
    made.choose(prompt, {0: IDLE})
    full, busy = EngineLoad(sequences=4, places=4), EngineLoad(waiting_tokens=5000, sequences=3, places=4)
    assert made.choose(prompt, {0: full, 1: busy}).engine == 1


def test_other_salts_share_nothing() -> None:
    made, prompt = router(), words(1, 100)
    made.choose(prompt, {0: IDLE}, salt="a")
    assert made.choose(prompt, {0: IDLE}, salt="b").saved_tokens == 0
    assert made.choose(prompt, {0: IDLE}, salt="a").saved_tokens == 96


def test_what_is_forgotten_or_evicted_saves_nothing() -> None:
    made, first = router(cache_tokens=20 * BLOCK), words(1, 10 * BLOCK + 1)
    made.choose(first, {0: IDLE})
    made.choose(words(2, 15 * BLOCK), {0: IDLE})
    # The end of a prompt goes before its beginning.
    assert made.choose(first, {0: IDLE}).saved_tokens == 5 * BLOCK
    made.forget(0)
    assert made.choose(first, {0: IDLE}).saved_tokens == 0
    made.set_cache(0, 0)
    assert made.choose(first, {0: IDLE}).saved_tokens == 0


def test_an_engine_that_may_not_be_chosen_is_not() -> None:
    made, prompt = router(), words(1, 1000)
    made.choose(prompt, {0: IDLE})
    assert made.choose(prompt, {1: EngineLoad(waiting_tokens=10**6, places=1)}).engine == 1


@given(st.lists(st.integers(0, 3), max_size=80), st.lists(st.integers(0, 3), max_size=80))
def test_hashes_are_equal_as_long_as_beginnings_are(one: list[int], other: list[int]) -> None:
    pairs = list(zip(prefix_blocks(one, 4), prefix_blocks(other, 4), strict=False))
    for place, (left, right) in enumerate(pairs, 1):
        assert (left == right) == (one[: place * 4] == other[: place * 4])
    assert len(prefix_blocks(one, 4)) == len(one) // 4


def test_the_end_of_a_long_prompt_is_looked_at_in_coarse_blocks() -> None:
    fine, coarse = FINE_BLOCKS * BLOCK, COARSE * BLOCK
    prompt = words(1, fine + 10 * coarse + 5)
    blocks = prefix_blocks(prompt, BLOCK)
    assert [tokens for _, tokens in blocks] == [BLOCK] * FINE_BLOCKS + [coarse] * 10
    made = router()
    made.choose(prompt, {0: IDLE})
    assert made.choose(prompt, {0: IDLE}).saved_tokens == fine + 10 * coarse
    assert made.choose(prompt[: fine + coarse + 9] + words(2, 900), {0: IDLE}).saved_tokens == fine + coarse


def test_many_conversations_are_spread_and_stay() -> None:
    """Sixteen of them over four engines, each with its own history: every engine has some, and hardly one moves."""
    made, drawn = router(4), random.Random(3)
    said = {user: words(user, 200) for user in range(16)}
    home: dict[int, int] = {}
    loads = dict.fromkeys(range(4), IDLE)
    moved = 0
    for _ in range(400):
        user = drawn.randrange(16)
        route = made.choose(said[user], loads)
        moved += home.get(user, route.engine) != route.engine
        home[user] = route.engine
        said[user] = said[user] + words(drawn.randrange(10**6), 30)
        loads = {
            number: EngineLoad(running_tokens=drawn.randrange(4) * 300, sequences=1, places=64) for number in range(4)
        }
    assert set(home.values()) == {0, 1, 2, 3}
    assert moved <= 8
