"""`holdfast kv-store`: what servers keep of prefixes in the folder of --kv-store: listed, proven, pruned. Works while
they run."""

from __future__ import annotations

import argparse
import contextlib
import shlex
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.output import say, say_json
from holdfast.config.setting import require_memory
from holdfast.errors import ConfigurationError, printable
from holdfast.units import counted, format_ago, format_bytes, parse_bytes, parse_duration, shorten

if TYPE_CHECKING:
    from holdfast.prefix_store.inspection import StoreInspection

HELP = """List, verify and prune the KV pages of prefixes that servers keep in the folder of --kv-store. Works while
they run: what is pruned is computed again when it is wanted."""

USAGE = "holdfast kv-store ls|verify|prune DIR [options]"

EXAMPLES = """examples:
  holdfast kv-store ls DIR                         models, pages, space, last use
  holdfast kv-store verify DIR                     read every page and check it
  holdfast kv-store verify DIR --forget            and forget those that are damaged
  holdfast kv-store prune DIR --size 20GiB         the least recently used leave, of all models
  holdfast kv-store prune DIR --older-than 7d      what was not used for a week
  holdfast kv-store prune DIR --model llama        pages of one model, by its name or its id
  holdfast kv-store prune DIR --all                everything

exit codes: 0 done, 1 verify found damaged pages, or there is none of the model of --model, 2 no KV store there, or it
cannot be used
"""

BAR_AFTER_S = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    program = parser.prog  # Else argparse names them by the usage line, which is no command.
    commands = parser.add_subparsers(dest="action", required=True, metavar="ls|verify|prune", prog=program)
    listing = commands.add_parser("ls", allow_abbrev=False, help="list models, pages, space and last use")
    verify = commands.add_parser("verify", allow_abbrev=False, help="read every page and check it")
    prune = commands.add_parser("prune", allow_abbrev=False, help="remove pages")
    for one in (listing, verify, prune):
        one.add_argument("folder", metavar="DIR", help="as in --kv-store DIR")
        one.add_argument("--json", action="store_true", help="print JSON")
    verify.add_argument("--forget", action="store_true", help="remove damaged pages from the index")
    prune.add_argument(
        "--size", metavar="SIZE", help="only so many that no more is left, the least recently used first: 20GiB"
    )
    prune.add_argument("--older-than", metavar="TIME", help="only pages that were not used for so long: 12h, 7d")
    prune.add_argument("--model", metavar="NAME", help="only pages of models with this in their name or id")
    prune.add_argument("--all", action="store_true", help="all pages")


def run(arguments: argparse.Namespace) -> int:
    from holdfast.prefix_store.inspection import StoreInspection

    actions: dict[str, Callable[[StoreInspection, argparse.Namespace], int]]
    actions = {"ls": _list, "verify": _verify, "prune": _prune}
    if arguments.action == "prune":
        _check_prune(arguments)
    with StoreInspection(Path(arguments.folder).expanduser()) as store:
        return actions[arguments.action](store, arguments)


def _list(store: StoreInspection, arguments: argparse.Namespace) -> int:
    listing = store.listing()
    if arguments.json:
        say_json(asdict(listing))
        return 0
    rows = [("ID", "MODEL", "PAGE", "PAGES", "SIZE", "LAST USED", "")]
    for model in listing.models:
        state = "in use" if model.in_use else ""
        size = (format_bytes(model.page_bytes), str(model.pages), format_bytes(model.nbytes))
        rows.append((model.name[:12], printable(model.label) or "-", *size, format_ago(model.newest_use_s), state))
    today = f"{format_bytes(listing.written_today_bytes)} written today"
    if not listing.models:
        say([f"no pages; {today}"])
    else:
        say(_table(rows))
        say([f"{format_bytes(listing.total_bytes)} in all; {today}"])
    say(f"{name} is damaged, and begins anew when its model is served" for name in listing.damaged)
    return 0


def _verify(store: StoreInspection, arguments: argparse.Namespace) -> int:
    with _late_bar("verify") as progress:
        verified = store.verify(forget=arguments.forget, progress=progress)
    bad = sum(one.bad for one in verified)
    if arguments.json:
        say_json({"bad": bad, "models": [asdict(one) for one in verified]})
        return 1 if bad else 0
    rows = [("ID", "MODEL", "PAGES", "GOOD", "BAD", "GONE")]
    for one in verified:
        numbers = (str(one.pages), str(one.good), str(one.bad), str(one.gone))
        rows.append((one.name[:12], printable(one.label) or "-", *numbers))
    say(_table(rows) if verified else ["no pages"])
    if bad and arguments.forget:
        say([f"{counted(bad, 'damaged page')} forgotten"])
    elif bad:
        say([f"{counted(bad, 'damaged page')}; servers never use them; --forget frees their space"])
    return 1 if bad else 0


def _meant(arguments: argparse.Namespace) -> str:
    """The choice as it was written, without --all; where there is none, an example."""
    chosen = (("--size", arguments.size), ("--older-than", arguments.older_than), ("--model", arguments.model))
    return " ".join(f"{flag} {shlex.quote(value)}" for flag, value in chosen if value is not None) or "--size 20GiB"


def _check_prune(arguments: argparse.Namespace) -> None:
    chosen = [arguments.size, arguments.older_than, arguments.model]
    if arguments.all == any(one is not None for one in chosen):
        raise ConfigurationError(
            "what is to be pruned is not clear",
            needed="--all alone, or some of --size, --older-than and --model",
            found="--all with others" if arguments.all else "none of them",
            fix=f"holdfast kv-store prune {shlex.quote(arguments.folder)} {_meant(arguments)}",
        )


def _prune(store: StoreInspection, arguments: argparse.Namespace) -> int:
    unused, size = arguments.older_than, arguments.size
    result = store.prune(
        size_bytes=None if size is None else _size_left(size),
        unused_s=None if unused is None else _unused_s(unused),
        model=arguments.model,
    )
    if arguments.json:
        say_json(asdict(result))
        return 0
    freed, left = format_bytes(result.freed_bytes), format_bytes(result.left_bytes)
    say([f"{counted(result.pages, 'page')} removed, {freed} freed, {left} left"])
    return 0


def _size_left(written: str) -> int:
    """A number whose unit was forgotten would empty the store; 0 says that it should be, and 0.5 does not."""
    nbytes = parse_bytes(written, field="--size")
    is_zero = not any(one.isdecimal() and int(one) for one in written)
    return 0 if is_zero else require_memory("--size", written, nbytes)


def _unused_s(written: str) -> float:
    unused_s, bare = parse_duration(written, field="--older-than"), written.strip()
    if unused_s == 0 or not bare.replace(".", "", 1).isdigit():
        return unused_s
    raise ConfigurationError(
        f"--older-than: {shorten(written)!r} is not valid: {counted(unused_s, 'second')}?",
        needed="a time as a number with its unit: 90s, 12h, 7d",
        found=shorten(written),
        fix=f"--older-than {shorten(bare)}d",
        field="--older-than",
    )


@contextlib.contextmanager
def _late_bar(label: str) -> Iterator[Callable[[int, int], None]]:
    """On standard error, where it takes longer than people wait without asking."""
    from holdfast.checkpoints.sources.download_progress import byte_progress

    began = time.monotonic()
    with contextlib.ExitStack() as bar:
        shown: list[Callable[[int], None]] = []

        def update(done: int, total: int) -> None:
            if not shown and time.monotonic() - began > BAR_AFTER_S:
                shown.append(bar.enter_context(byte_progress(label, total, progress=True)))
            for show in shown:
                show(done)

        yield update


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
