"""`holdfast list`: the models on this machine, with size, format and when they were used last. Fetches nothing."""

from __future__ import annotations

import argparse
from typing import Any

from holdfast.cli.output import say, say_json
from holdfast.errors import printable

HELP = """List the models on this machine: those of the hub's cache, built-in ones that were fetched, and folders and
files that were served. `holdfast models` shows what else there is."""

USAGE = "holdfast list [TEXT] [--json]"

EXAMPLES = """examples:
  holdfast list                    all, the last used first
  holdfast list qwen               those with that in their name
  holdfast list --json             for programs

exit codes: 0 listed, also where there is none
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("text", nargs="?", default="", metavar="TEXT", help="only names that contain this")
    parser.add_argument("--json", action="store_true", help="print JSON: one list of objects")


def run(arguments: argparse.Namespace) -> int:
    from holdfast.checkpoints.sources.stored_models import stored_models
    from holdfast.cli.servers.background import serving
    from holdfast.cli.servers.registry import running_servers

    running = running_servers()
    rows: list[dict[str, Any]] = []
    for model in stored_models():
        if arguments.text.lower() in model.name.lower():
            servers = serving(running, model)
            rows.append(
                {
                    "name": model.name,
                    "kind": model.kind,
                    "format": model.format,
                    "size_bytes": model.size_bytes,
                    "used_s": model.used_s,
                    "complete": model.complete,
                    "path": str(model.path),
                    "served_at": [server.url for server in servers],
                }
            )
    if arguments.json:
        say_json(rows)
    else:
        say(_table(rows))
    return 0


def _table(rows: list[dict[str, Any]]) -> list[str]:
    from holdfast.units import format_ago, format_bytes

    if not rows:
        return ["no model is on this machine yet; holdfast pull smollm2 fetches the built-in one (88 MiB)"]
    head = ("NAME", "FORMAT", "SIZE", "LAST USED", "WHERE")
    table = [head]
    for row in rows:
        state = ", ".join(f"served at {url}" for url in row["served_at"]) or row["kind"]
        state = state if row["complete"] else "incomplete: holdfast pull completes it"
        table.append(
            (printable(row["name"]), row["format"], format_bytes(row["size_bytes"]), format_ago(row["used_s"]), state)
        )
    widths = [max(len(line[column]) for line in table) for column in range(len(head))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in table]
