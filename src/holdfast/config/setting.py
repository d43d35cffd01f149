"""How one setting is declared, parsed and explained. Knows no particular setting.

A setting is a dataclass field made by `setting()`: its default, its help and its parser stand where it is
declared, and flags, environment, files and Python arguments all go through the same parser.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from holdfast.config.tuning import TUNING, taken_value
from holdfast.config.unsupported import asks_nothing
from holdfast.errors import ConfigurationError
from holdfast.units import GIB, MIB, parse_bytes, parse_tokens, shorten

Parser = Callable[[str, Any], Any]
"""(field, what was written) -> value, or ConfigurationError. Takes text and already typed values alike."""

T = TypeVar("T")

LEAST_MEMORY_BYTES = MIB
"""Whoever asks for less forgot the unit."""
_NUMBER_TYPES = {"fp16": "float16", "f16": "float16", "bf16": "bfloat16", "fp32": "float32", "f32": "float32"}
"""As other programs spell them."""


def setting(default: Any, help: str, parse: Parser, *, flags: tuple[str, ...] = (), metavar: str | None = None) -> Any:
    """`flags`: further spellings beside --the-field-name."""
    metadata = {"help": help, "parse": parse, "flags": flags, "metavar": metavar}
    if isinstance(default, list | dict):
        raise TypeError("defaults are immutable: use a tuple")
    return dataclasses.field(default=default, metadata=metadata)


def flag_name(field: str) -> str:
    return "--" + field.replace("_", "-")


def environment_name(field: str) -> str:
    return "HOLDFAST_" + field.upper()


def text(field: str, value: Any) -> str:
    if not isinstance(value, str):
        raise _wrong(field, value, "a string")
    return value


def flag(field: str, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "1", "yes", "on"):
        return True
    if isinstance(value, str) and value.lower() in ("false", "0", "no", "off"):
        return False
    raise _wrong(field, value, "true or false")


def texts(field: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list | tuple) and all(isinstance(entry, str) for entry in value):
        return tuple(value)
    raise _wrong(field, value, "a string or a list of strings")


def texts_or_tables(field: str, value: Any) -> tuple[str, ...]:
    """Tables of a file as JSON, in which they can also be written as texts."""
    entries = [value] if isinstance(value, str | dict) else value
    if not isinstance(entries, list | tuple):
        raise _wrong(field, value, "a string or an object, or a list of them")
    return texts(field, [json.dumps(entry) if isinstance(entry, dict) else entry for entry in entries])


def listed(field: str, value: Any) -> tuple[str, ...]:
    """From a JSON list as vLLM takes it, from texts with commas, or as it is in Python and files."""
    if not isinstance(value, str):
        return texts(field, value)
    if not value.lstrip().startswith("["):
        return tuple(part.strip() for part in value.split(",") if part.strip())
    try:
        return texts(field, json.loads(value))
    except (ValueError, RecursionError):
        raise _wrong(field, value, 'a JSON list, such as ["https://a.example"]') from None


def table(field: str, value: Any) -> dict[str, Any]:
    """From JSON, or as it is in Python and TOML."""
    found = value
    if isinstance(value, str):
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            found = None
    if not isinstance(found, dict) or not all(isinstance(name, str) for name in found):
        raise _wrong(field, value, 'a JSON object, such as {"temperature": 0.5}')
    return found


def whole(low: int, high: int = 2**31) -> Parser:
    def parse(field: str, value: Any) -> int:
        try:
            number = int(value) if not isinstance(value, bool) and float(value) == int(value) else None
        except (TypeError, ValueError, OverflowError):
            number = None
        if number is None or not low <= number <= high:
            # The nearest that is allowed is not what was meant: the default comes first.
            fix = "leave it out" if number is None else f"leave it out, or {field} {low if number < low else high}"
            raise _wrong(field, value, f"a whole number from {low:,} to {high:,}", fix)
        return number

    return parse


def number(low: float, high: float, *, usual: float | None = None) -> Parser:
    """`usual`: of a share, what to advise instead of a number that is not valid."""

    def parse(field: str, value: Any) -> float:
        try:
            found = float(value) if not isinstance(value, bool) else None
        except (TypeError, ValueError):
            found = None
        if found is None or not low <= found <= high:
            # Written in percent; as such, less than ten is of no use and was mistyped otherwise.
            percent = found is not None and usual is not None and 10 <= found <= 100 * high
            meant = found / 100 if found is not None and percent else usual
            fix = "leave it out" if meant is None else f"{field} {meant:g}"
            raise _wrong(field, value, f"a number from {low:g} to {high:g}", fix)
        return found

    return parse


def gibibytes(most: int) -> Parser:
    """A bare number, as vLLM takes it; a size with its unit is what it comes to."""

    def parse(field: str, value: Any) -> float:
        try:
            found = float(value) if not isinstance(value, bool) else None
        except (TypeError, ValueError):
            found = None
        if found is None or not 0 <= found <= most:
            try:
                meant = parse_bytes(value) / GIB if found is None and isinstance(value, str) else most + 1.0
            except (ConfigurationError, OverflowError):
                meant = most + 1.0
            fix = f"{field} {meant:g}" if meant <= most else "leave it out"
            raise _wrong(field, value, f"a number of GiB, without the unit, from 0 to {most:,}", fix)
        return found

    return parse


def choice(*options: str) -> Parser:
    def parse(field: str, value: Any) -> str:
        if value not in options:
            raise _wrong(field, value, "one of " + ", ".join(options), _nearest(field, value, options))
        return str(value)

    return parse


def _nearest(field: str, value: Any, options: tuple[str, ...]) -> str:
    written = str(value).lower()
    known = _NUMBER_TYPES.get(written, written)
    near = [known] if known in options else difflib.get_close_matches(known, options, n=1)
    return f"did you mean {field} {near[0]}?" if near else f"leave it out, or {field} {options[0]}"


def memory(field: str, value: Any) -> int:
    """A size that something is kept in."""
    return require_memory(field, value, size(field, value))


def require_memory(field: str, written: Any, nbytes: int) -> int:
    """`nbytes`, unless it is a number whose unit was forgotten."""
    bare = str(written).strip()
    number = float(bare) if bare.replace(".", "", 1).isdecimal() else None
    if nbytes >= LEAST_MEMORY_BYTES or (nbytes > 0 and number is None):
        return nbytes
    meant = f"{bare}GiB" if number is not None and 0 < number < 10_000 else "22GiB"
    raise ConfigurationError(
        f"{field}: {shorten(written)!r} is not valid: {nbytes:,} bytes?",
        needed="at least 1 MiB, as a number with its unit",
        found=shorten(written),
        fix=f"{field} {meant}" if field.startswith("--") else f"write {meant}",
        field=field,
    )


def size(field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _wrong(field, value, "a size, such as 4GiB")
    return parse_bytes(value, field=field)


def tokens_or_auto(field: str, value: Any) -> int | None:
    if value == "auto" or str(value).strip() == "-1":  # vLLM's number for it.
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise _wrong(field, value, "a number of tokens, such as 8192 or 32K, or auto")
    count = parse_tokens(value, field=field)
    if not 1 <= count <= 1 << 27:
        fix = f"leave it out, or {field} auto: what the model and memory allow"
        raise _wrong(field, value, "from 1 to 134,217,728 tokens", fix)
    return count


def optional(parse: Parser) -> Parser:
    return lambda field, value: None if value is None else parse(field, value)


@dataclasses.dataclass(frozen=True, slots=True)
class Origin:
    """Where a value was written, and how names are spelled there: an error speaks as the person who wrote it."""

    spelled: Callable[[str], str]
    place: str = ""
    """In front of a message: `settings.toml, line 3: `."""


def build(
    kind: type[T],
    values: Mapping[str, Any],
    *,
    refused: Mapping[str, str],
    origin: Callable[[str], Origin],
) -> T:
    """A config of `kind` out of named values. `refused`: known names whose feature is not there, with the reason;
    given at values that ask for nothing, or for what is done anyway, they are taken as not given."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    refuse(refusals(values, refused, origin))
    parsed: dict[str, Any] = {}
    for name, value in values.items():
        source = origin(name)
        if name in refused or (name in TUNING and name not in fields):
            continue
        if name not in fields:
            raise unknown_name(name, fields, source)
        parsed[name] = fields[name].metadata["parse"](source.place + source.spelled(name), value)
    return kind(**parsed)


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """One setting that cannot be honoured."""

    written: str
    """As the person who gave it spelled it, behind its place."""
    reason: str
    name: str
    fix: str | None = None
    problem: str = "is not supported"

    @property
    def sentence(self) -> str:
        return f"{self.written} {self.problem}" + (f": {self.reason}" if self.reason else "")


def refusals(values: Mapping[str, Any], refused: Mapping[str, str], origin: Callable[[str], Origin]) -> list[Refusal]:
    """Of those that are known and not there, each that asks for something."""
    return [
        Refusal(origin(name).place + origin(name).spelled(name), refused[name], name)
        for name, value in values.items()
        if name in refused and not asks_nothing(name, value) and taken_value(name, value) is None
    ]


def without_effect(values: Mapping[str, Any], origin: Callable[[str], Origin]) -> str | None:
    """One line about all settings of vLLM's that were taken and do nothing; None: there are none."""
    found: list[str] = []
    for name, value in values.items():
        written, reason = origin(name).spelled(name), taken_value(name, value)
        if reason is not None:
            found.append(f"{written} {shorten(value)} ({reason})")
        elif name in TUNING and value is not None and str(value).lower() not in ("", "false", "none"):
            found.append(f"{written} ({TUNING[name]})")
    return "taken without effect: " + "; ".join(found) if found else None


def refuse(found: Sequence[Refusal]) -> None:
    """All of them in one error: a command with twelve is put right in one round."""
    if not found:
        return
    first = found[0]
    if len(found) == 1:
        spelled = first.written.rpartition(": ")[2]
        raise ConfigurationError(first.sentence, fix=first.fix or f"leave {spelled} out", field=first.name)
    lines = "".join(f"\n  {one.sentence}" + (f"; {one.fix}" if one.fix else "") for one in found)
    words = ", ".join(one.written.rpartition(": ")[2] for one in found)
    error = ConfigurationError(
        f"{len(found)} settings cannot be honoured:{lines}", fix=f"leave out {words}", field=first.name
    )
    error.settings = tuple(one.name for one in found)
    raise error


def unknown_name(name: str, known: Iterable[str], source: Origin) -> ConfigurationError:
    near = difflib.get_close_matches(name, list(known), n=1)
    return ConfigurationError(
        f"{source.place}{source.spelled(name)} is not a setting of Holdfast",
        fix=f"did you mean {source.spelled(near[0])}?" if near else "see holdfast serve --help",
        field=name,
    )


def _wrong(field: str, value: Any, needed: str, fix: str | None = None) -> ConfigurationError:
    return ConfigurationError(
        f"{field}: {value!r} is not valid", needed=needed, found=repr(value), fix=fix, field=field
    )
