"""`holdfast models`: lists what is built in, what is cached, and which families are known. Fetches nothing."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

HELP = "list the models that are built in, cached and known"
EXAMPLES = """\
  holdfast models                  a table
  holdfast models --json           the same for programs
  holdfast models --verify         hash what is cached; ends with 1 if something is wrong
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    name: str
    kind: Literal["builtin", "hub"]
    state: Literal["cached", "not fetched", "wrong", "unchecked"]
    size_bytes: int
    path: str
    licence: str | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--verify", action="store_true", help="hash cached built-in models, open the others' headers")


def run(arguments: argparse.Namespace) -> int:
    listed = _builtins(verify=arguments.verify) + _hub(verify=arguments.verify)
    if arguments.json:
        print(json.dumps(_document(listed), indent=2))
    else:
        _print_table(listed)
    wrong = [entry for entry in listed if entry.state == "wrong"]
    for entry in wrong:
        print(f"{entry.name} is wrong or torn; fetch it again: holdfast pull {entry.name}", file=sys.stderr)
    return 1 if wrong else 0


def _builtins(*, verify: bool) -> list[Listed]:
    from holdfast.checkpoints import builtin

    listed = []
    for entry in builtin.BUILTINS:
        path = builtin.cached_path(entry)
        state: Literal["cached", "not fetched", "wrong", "unchecked"]
        if not path.exists():
            state = "not fetched"
        elif verify:
            state = "cached" if builtin.verify(entry) else "wrong"
        else:
            state = "cached" if builtin.is_cached(entry) else "unchecked"
        listed.append(
            Listed(
                name=entry.name,
                kind="builtin",
                state=state,
                size_bytes=entry.size,
                path=str(path),
                licence=entry.licence,
            )
        )
    return listed


def _hub(*, verify: bool) -> list[Listed]:
    """What the hub's cache holds, read from its folders: importing its library takes longer than all the rest."""
    listed = []
    for folder in sorted(_hub_cache().glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in sorted((folder / "snapshots").glob("*")):
            listed.append(
                Listed(
                    name=name,
                    kind="hub",
                    state=_snapshot_state(snapshot, name) if verify else "cached",
                    size_bytes=sum(file.stat().st_size for file in snapshot.rglob("*") if file.is_file()),
                    path=str(snapshot),
                )
            )
    return listed


def _hub_cache() -> Path:
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()


def _snapshot_state(snapshot: Path, name: str) -> Literal["cached", "wrong", "unchecked"]:
    from holdfast.checkpoints import from_path, open_checkpoint
    from holdfast.errors import ModelError

    try:
        files = from_path(snapshot, name=name, kind="hub")
        if files.format == "none":
            return "unchecked"
        open_checkpoint(files).close()
    except ModelError:
        return "wrong"
    return "cached"


def _document(listed: list[Listed]) -> dict[str, object]:
    from holdfast.checkpoints import DEFAULT_MODEL, ENGINE_LAYOUTS
    from holdfast.models import FAMILIES, known_architectures, known_gguf_architectures

    return {
        "default": DEFAULT_MODEL,
        "models": [asdict(entry) for entry in listed],
        "families": sorted(FAMILIES),
        "architectures": list(known_architectures()),
        "gguf_architectures": list(known_gguf_architectures()),
        "layouts": sorted(ENGINE_LAYOUTS),
    }


def _print_table(listed: list[Listed]) -> None:
    from rich.console import Console
    from rich.table import Table

    from holdfast.checkpoints import ENGINE_LAYOUTS
    from holdfast.models import known_architectures, known_gguf_architectures
    from holdfast.units import format_bytes

    table = Table("name", "kind", "state", "size", "where", box=None, header_style="bold")
    for entry in listed:
        # A path must stay whole, so that it can be copied: rich may fold it but not cut it.
        table.add_row(entry.name, entry.kind, entry.state, format_bytes(entry.size_bytes), entry.path)
    table.columns[-1].overflow = "fold"
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 200)
    console.print(table)
    console.print()
    console.print("Known architectures: " + ", ".join(known_architectures()))
    console.print("Known in GGUF:       " + ", ".join(known_gguf_architectures()))
    console.print("Stored as:           " + ", ".join(sorted(ENGINE_LAYOUTS)))
