"""What several methods' configs say alike: bits, blocks, and lists of modules. Each is refused by its field's name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from holdfast.models.fields import MAX_WIDTH, Fields
from holdfast.models.quantization.unquantized_modules import Exceptions, UntamedPattern

_MAX_PATTERNS = 65536


def bits_of(table: Fields, name: str, allowed: Iterable[int]) -> int:
    bits = table.integer(name, high=64)
    if bits not in allowed:
        raise table.wrong(name, " or ".join(str(known) for known in allowed), bits)
    return bits


def block_of(table: Fields, name: str) -> tuple[int, int]:
    value: Any = table.values.get(name)
    if value is None:
        return (0, 0)
    good = isinstance(value, list) and len(value) == 2
    if not good or any(
        isinstance(size, bool) or not isinstance(size, int) or not 0 < size < MAX_WIDTH for size in value
    ):
        raise table.wrong(name, "two sizes, rows and columns", value)
    return (value[0], value[1])


def modules_of(table: Fields, name: str) -> tuple[str, ...]:
    value: Any = table.values.get(name)
    if value is None:
        return ()
    if isinstance(value, Mapping | str) or not isinstance(value, list) or len(value) > _MAX_PATTERNS:
        raise table.wrong(name, "a list of module names", value)
    if any(not isinstance(pattern, str) or len(pattern) > 1024 for pattern in value):
        raise table.wrong(name, "a list of module names", value)
    check_patterns(table, name, tuple(value))
    return tuple(value)


def check_patterns(table: Fields, name: str, written: tuple[str, ...]) -> None:
    try:
        Exceptions.read(written)
    except UntamedPattern as error:
        needed = "patterns that can be read, few of them with repeats, and no repeat of a group"
        raise table.wrong(name, needed, f"{error} among {len(written)} entries") from error
