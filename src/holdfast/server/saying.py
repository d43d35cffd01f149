"""What a client is told in one sentence: what is wrong, and what helps. Clients and logs show nothing but `message`."""

from __future__ import annotations

from holdfast.errors import HoldfastError, UnknownModelError

MOST_FIX_CHARS = 200
"""A longer advice stands in `holdfast.fix` alone."""


def helpful(error: HoldfastError) -> str:
    """The message, and behind it the fix where it is short and not in it already."""
    said = error.message.rstrip(".")
    if isinstance(error, UnknownModelError) and error.found:
        said += f"; served: {error.found}"
    fix = (error.fix or "").rstrip(".")
    if not fix or len(fix) > MOST_FIX_CHARS or fix in said:
        return said
    return f"{said}; {fix}"
