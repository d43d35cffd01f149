"""How often a regular expression repeats what it repeats: counts within counts multiply, and each factor is work for
every mask. Reads just enough of the syntax to see groups, classes and counts, in one pass whose cost is linear whatever
a client has sent, and refuses nothing else."""

from __future__ import annotations

from holdfast.errors import GrammarError

MOST = 100_000
"""Characters that counts in each other may stand for: `([a-z]{1,63}\\.){1,127}` has 8,001."""
MAX_DIGITS = 9


def check_repeats(regex: str, named: str) -> None:
    """`named`: what the client calls it."""
    product = too_many(regex)
    if product is not None:
        raise GrammarError(
            f"{named}: nested repetitions multiply to {product:,}",
            code="HF362",
            needed=f"at most {MOST:,}",
            found=f"{product:,}",
            fix="use smaller repetition counts",
            field=named,
        )


def too_many(regex: str) -> int | None:
    """What counts within counts come to, where that is more than is taken; one count alone may be what it likes."""
    outer, inner, last = list[int](), 1, 1
    worst, place, length = 1, 0, len(regex)
    while place < length:
        character = regex[place]
        if character == "(":
            place = _behind_flags(regex, place + 1)
            outer.append(inner)
            inner = last = 1
            continue
        if character == "{" and (count := _count_at(regex, place)) is not None:
            times, place = count
            if last > 1:
                worst = max(worst, times * last)
            # Beyond the limit the exact product does not matter, and its digits must not grow with the pattern.
            last = min(times * last, MOST * MOST)
            inner = max(inner, last)
            continue
        if character == ")":
            last = inner
            inner = max(inner, outer.pop()) if outer else inner
            place += 1
            continue
        last = 1
        behind = _behind_escape(regex, place) if character == "\\" else _behind_class(regex, place)
        if behind is None:
            break  # It is not closed: the compiler refuses it, and no count can follow.
        place = behind
    return worst if worst > MOST else None


def _behind_escape(regex: str, place: int) -> int | None:
    r"""Of `\d` and the like, and of `\p{Letter}`."""
    if regex[place + 1 : place + 2] in ("p", "P", "x", "u", "U") and regex[place + 2 : place + 3] == "{":
        closing = regex.find("}", place)
        return None if closing < 0 else closing + 1
    return place + 2


def _behind_class(regex: str, place: int) -> int | None:
    """Of `[a-z]`, where a bracket that comes first is itself; of any other character, the next place."""
    if regex[place] != "[":
        return place + 1
    place += 2 if regex.startswith("[^", place) else 1
    place += regex.startswith("]", place)
    while place < len(regex):
        if regex[place] == "]":
            return place + 1
        if regex.startswith("[:", place) and (closing := regex.find(":]", place + 2, place + 16)) > 0:
            place = closing + 2
        else:
            place += 2 if regex[place] == "\\" else 1
    return None


def _count_at(regex: str, place: int) -> tuple[int, int] | None:
    """The larger number of `{3}`, `{3,}` or `{3,5}`, and the place behind it; None: it is no count."""
    closing = regex.find("}", place, place + 2 * MAX_DIGITS + 3)
    least, _, most = regex[place + 1 : closing].partition(",")
    if closing < 0 or not _is_number(least) or not (_is_number(most) or not most):
        return None
    return max(int(least), int(most or 0), 1), closing + 1


def _is_number(text: str) -> bool:
    return 0 < len(text) <= MAX_DIGITS and text.isascii() and text.isdigit()


def _behind_flags(regex: str, place: int) -> int:
    """Behind `?:`, `?i:`, `?<name>` and `?P<name>`, whose characters repeat nothing."""
    if not regex.startswith("?", place):
        return place
    end = place + 1
    while end < len(regex) and (regex[end].isalnum() or regex[end] in "_-<>"):
        end += 1
    return end + regex.startswith(":", end)
