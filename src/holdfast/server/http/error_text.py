"""What a client is told in one sentence: what is wrong, and what helps. Clients and logs show nothing but `message`."""

from __future__ import annotations

from holdfast.errors import HoldfastError, UnknownModelError

MOST_CHARS = 200
"""What is longer stands in `holdfast.needed` or `holdfast.fix` alone."""


def format_message(error: HoldfastError) -> str:
    """The message, and behind it what is needed and the fix, each where it is short and not said already."""
    said = error.message.rstrip(".")
    if isinstance(error, UnknownModelError) and error.found:
        said += f"; served: {error.found}"
    needed, fix = (error.needed or "").rstrip("."), (error.fix or "").rstrip(".")
    if needed and len(needed) <= MOST_CHARS and needed not in said and needed not in fix:
        said += f"; needed: {needed}"
    if not fix or len(fix) > MOST_CHARS or fix in said:
        return said
    return f"{said}; {fix}"
