"""Whether the pages there are do for one more, and for all who have theirs to go on. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Line

from holdfast.kvcache import Found, KVCache
from holdfast.scheduler.sequence import Sequence


def set_aside(kv: KVCache, running: Line[Sequence], fetching: Iterable[Sequence], step_tokens: int) -> int:
    """Pages to leave for these (and one more) when somebody is admitted: a block each to grow into, and what their
    prompts still need. `fetching`: who waits with pages, and will run."""
    waiting = list(fetching)
    prefills = [other for other in running if other.pending > 1] + waiting
    promised = sum(kv.blocks_owed(other.book.held, len(other.tokens), step_tokens) for other in prefills)
    return len(kv.layout.groups) * (len(running) + len(waiting) + 1) + promised


def may_fetch(
    kv: KVCache, sequence: Sequence, found: Found, running: Line[Sequence], fetching: Line[Sequence], step_tokens: int
) -> bool:
    """Whether there are pages for what it would wait for, and for the rest of its prompt."""
    if not running and not fetching:
        return found.wanted + len(kv.layout.groups) <= kv.blocks_available
    wanted = found.wanted + kv.blocks_owed(found.held, len(sequence.tokens), step_tokens)
    return wanted + set_aside(kv, running, fetching, step_tokens) <= kv.blocks_available
