"""How often a regular expression repeats what it repeats: counts within counts multiply, and each factor is work for
every mask. Reads just enough of the syntax to see groups, classes and counts, and refuses nothing else."""

from __future__ import annotations

import re

from holdfast.errors import GrammarError

MOST = 100_000
"""Characters that counts in each other may stand for: `([a-z]{1,63}\\.){1,127}` has 8,001."""

_PART = re.compile(
    r"""(?P<escape>\\(?:[pPxuU]\{[^}]*\}|.))
    |(?P<klass>\[\^?\]?(?:\\.|\[:\w+:\]|[^\]\\])*\])
    |(?P<count>\{(?P<least>\d{1,9})(?:,(?P<most>\d{0,9}))?\})
    |(?P<open>\((?:\?(?:P?<\w+>|[a-zA-Z-]*:|[a-zA-Z-]+(?=\))))?)
    |(?P<close>\))
    |(?P<other>.)""",
    re.VERBOSE | re.DOTALL,
)


def check_repeats(regex: str, named: str) -> None:
    """`named`: what the client calls it."""
    product = too_many(regex)
    if product is not None:
        raise GrammarError(
            f"{named}: repetitions within each other come to {product:,}",
            code="HF362", needed=f"at most {MOST:,}", found=f"{product:,}", fix="smaller repetitions", field=named,
        )  # fmt: skip


def too_many(regex: str) -> int | None:
    """What counts within counts come to, where that is more than is taken; one count alone may be what it likes."""
    waiting, inner, last = list[int](), 1, 1
    worst = 1
    for found in _PART.finditer(regex):
        kind = found.lastgroup
        if found["count"] is not None:
            times = max(int(found["least"]), int(found["most"] or 0), 1)
            if last > 1:
                worst = max(worst, times * last)
            last *= times
            inner = max(inner, last)
        elif kind == "open":
            waiting.append(inner)
            inner = last = 1
        elif kind == "close":
            last = inner
            inner = max(inner, waiting.pop()) if waiting else inner
        else:
            last = 1
    return worst if worst > MOST else None
