"""Which of several engines a request goes to: the one with the least to compute before and beside it.

    cost of an engine = tokens of the prompt that it has not cached
                      + tokens of prompts that wait there
                      + an eighth of the tokens that its running sequences hold

It remembers which prompts went where, in blocks as engines cache them, and asks nobody: what an engine has evicted
meanwhile is guessed by the size of its KV pool. A wrong guess costs a prefill, and never changes an answer. That a
conversation stays where its beginning is cached follows from the cost. Knows neither processes nor streams.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

RUNNING_SHARE = 1 / 8
"""Of a running sequence's tokens: those behind it wait for a token of it in each step, not for all that it holds. With
2,000 tokens and some 200 to come it costs others about what 250 tokens of a prompt do."""

MOST_BLOCKS = 1 << 18
"""Remembered of all engines together, whatever their KV pools hold: 4 million tokens in blocks of 16."""
ROUTER_BYTES = MOST_BLOCKS * 128
"""32 MiB of the front: 115 to 121 bytes for each of them were measured."""

FINE_BLOCKS, COARSE = 128, 8
"""Blocks that are looked at one by one, and how many together behind them: the last ones of a long prompt are a small
part of it, and nobody shall wait for thousands of hashes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLoad:
    waiting_tokens: int = 0
    """Of prompts without a first token, less what was cached of them."""
    running_tokens: int = 0
    """Prompt and answer of those that have one."""
    sequences: int = 0
    places: int = 1
    """Sequences that run at the same time; more wait for one to end."""

    @property
    def full(self) -> bool:
        return self.sequences >= self.places

    @property
    def tokens(self) -> float:
        return self.waiting_tokens + self.running_tokens * RUNNING_SHARE


Blocks = Sequence[tuple[int, int]]
"""Of a prompt, from its beginning: a hash of each with all before it, and its tokens."""


@dataclass(frozen=True, slots=True)
class Route:
    engine: int
    saved_tokens: int
    """Of the prompt, that are taken to be cached there."""
    blocks: Blocks = field(default=(), compare=False, repr=False)
    """Of the prompt, for `remember`."""


class Router:
    """What is cached of a prompt is found in whole blocks. Of engines that have taken one it is to be told: whoever
    refuses a prompt caches nothing of it."""

    def __init__(self, block_tokens: int, engines: int) -> None:
        self._block_tokens = block_tokens
        self._most_blocks = MOST_BLOCKS // engines
        self._prompts: dict[int, _CachedPrompts] = {}
        self._turns = 0
        self._last_turn: dict[int, int] = {}

    def set_cache(self, engine: int, tokens: int) -> None:
        """How much of prompts the engine caches; 0: nothing."""
        self._prompts.setdefault(engine, _CachedPrompts(self._most_blocks)).resize(tokens)

    def forget(self, engine: int) -> None:
        """Its cache is empty: it was reset, or its process is another."""
        if engine in self._prompts:
            self._prompts[engine].clear()

    def choose(self, prompt: Sequence[int], loads: Mapping[int, EngineLoad], salt: str = "") -> Route:
        """`loads`: of the engines that may be chosen, at least one. `salt`: prompts with another share nothing with
        it. Of equals the one that was chosen longest ago."""
        blocks = prefix_blocks(prompt, self._block_tokens, salt)
        saved = {engine: self._saved(engine, blocks, len(prompt)) for engine in loads}

        def cost(engine: int) -> tuple[bool, float, int, int]:
            load = loads[engine]
            to_compute = len(prompt) - saved[engine] + load.tokens
            return load.full, to_compute, load.sequences, self._last_turn.get(engine, 0)

        chosen = min(loads, key=cost)
        self._turns += 1
        self._last_turn[chosen] = self._turns
        return Route(chosen, saved[chosen], blocks)

    def remember(self, route: Route) -> None:
        """Its engine has taken the prompt."""
        if route.engine in self._prompts:
            self._prompts[route.engine].add(route.blocks)

    def _saved(self, engine: int, blocks: Blocks, prompt_tokens: int) -> int:
        if engine not in self._prompts:
            return 0
        # Of a prompt that is cached whole the last block is computed, for the token behind it.
        whole = (prompt_tokens - 1) // self._block_tokens * self._block_tokens
        return min(self._prompts[engine].found_tokens(blocks), whole)


_WORD_BYTES = 8


def prefix_blocks(prompt: Sequence[int], block_tokens: int, salt: str = "") -> Blocks:
    """Whole blocks, fine ones and coarse ones behind them; hashes are equal only where the beginnings are. None of what
    is no prompt: an engine refuses it, and says why."""
    try:
        written = array("q", prompt).tobytes()
    except (OverflowError, TypeError):
        return []
    fine_end = FINE_BLOCKS * block_tokens
    last, found = hash(salt), list[tuple[int, int]]()
    for begin, end, size in ((0, fine_end, block_tokens), (fine_end, len(prompt), COARSE * block_tokens)):
        for start in range(begin, min(end, len(prompt)) - size + 1, size):
            last = hash((last, written[start * _WORD_BYTES : (start + size) * _WORD_BYTES]))
            found.append((last, size))
    return found


class _CachedPrompts:
    """Blocks that one engine is taken to have, the one longest unused first."""

    def __init__(self, most_blocks: int) -> None:
        self._tokens: OrderedDict[int, int] = OrderedDict()
        self._most_blocks = most_blocks
        self._most = self._held = 0

    def resize(self, tokens: int) -> None:
        self._most = tokens
        self._evict()

    def clear(self) -> None:
        self._tokens.clear()
        self._held = 0

    def found_tokens(self, blocks: Blocks) -> int:
        """Of the blocks that are there, from the first on without a gap."""
        found = 0
        for block, tokens in blocks:
            if block not in self._tokens:
                break
            found += tokens
        return found

    def add(self, blocks: Blocks) -> None:
        """The last ones first: as in an engine, the end of a prompt is evicted before its beginning."""
        for block, tokens in reversed(blocks):
            if block in self._tokens:
                self._tokens.move_to_end(block)
            else:
                self._tokens[block] = tokens
                self._held += tokens
        self._evict()

    def _evict(self) -> None:
        while self._held > self._most or len(self._tokens) > self._most_blocks:
            self._held -= self._tokens.popitem(last=False)[1]
