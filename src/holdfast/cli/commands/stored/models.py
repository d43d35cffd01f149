"""`holdfast models`: lists what is built in, what is cached, and which families are known. Fetches nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from holdfast.cli.output import say, say_json
from holdfast.errors import HoldfastError, printable

if TYPE_CHECKING:
    from holdfast.checkpoints.sources.builtin import BuiltinModel

HELP = "list the models that are built in, cached and known"
EXAMPLES = """\
  holdfast models                  a table
  holdfast models --json           as JSON
  holdfast models --known          names and shapes that `holdfast plan` knows without a network
  holdfast models --verify         check cached files and print the result of each; exits with 1 if one is wrong
"""

State = Literal["cached", "not fetched", "wrong", "unchecked"]


@dataclass(frozen=True, slots=True)
class BuiltinCheck:
    """What was done to one file, and what it gave."""

    file: str
    how: Literal["sha256", "header"]
    right: bool
    said: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    name: str
    kind: Literal["builtin", "hub"]
    state: State
    size_bytes: int
    path: str
    licence: str | None = None
    makers: str | None = None
    source: str | None = None
    """Of a built-in model: who made it, and where it is fetched from."""
    accept: str | None = None
    """What `holdfast pull --accept-licence` must be given before it is fetched."""
    checks: tuple[BuiltinCheck, ...] = ()
    """Only after --verify."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--known", action="store_true", help="list the models of the plan catalogue instead")
    parser.add_argument("--verify", action="store_true", help="hash cached built-in models, read the others' headers")


def run(arguments: argparse.Namespace) -> int:
    if arguments.known:
        return _known(as_json=arguments.json)
    listed = _builtins(verify=arguments.verify) + _hub(verify=arguments.verify)
    if arguments.json:
        say_json(_document(listed))
    else:
        say(_table(listed), colour=True)
        checks = (check for entry in listed for check in entry.checks)
        say(f"{'right' if check.right else 'WRONG'}: {check.file}: {check.said}" for check in checks)
    wrong = [entry for entry in listed if entry.state == "wrong"]
    for entry in wrong:
        name = printable(entry.name)
        print(f"{name} is corrupt or truncated; download it again: holdfast pull {name}", file=sys.stderr)
    return 1 if wrong else 0


def _known(*, as_json: bool) -> int:
    from holdfast.models import catalogue

    listed = [
        {
            "name": entry.name,
            "hub_id": entry.hub_id,
            "parameters": entry.parameters or _counted_parameters(entry.config),
            "quantization": (entry.config.get("quantization_config") or {}).get("quant_method"),
            "aliases": list(entry.aliases),
        }
        for entry in sorted(catalogue.entries(), key=lambda entry: entry.name)
    ]
    if as_json:
        say_json(listed)
        return 0
    width = max(len(str(row["name"])) for row in listed)
    say([f"{'name':<{width}}  {'billions':>8}  {'stored as':<18}  hub id"])
    for row in listed:
        billions = "?" if row["parameters"] is None else f"{int(str(row['parameters'])) / 1e9:,.1f}"
        say([f"{row['name']:<{width}}  {billions:>8}  {row['quantization'] or '-':<18}  {row['hub_id']}"])
    return 0


def _counted_parameters(config: Mapping[str, Any]) -> int | None:
    """Of a shape without a published figure: a variant that was padded when it was quantized has one of its own."""
    from holdfast.models.registry import describe_config

    try:
        return describe_config(config).parameters
    except HoldfastError:
        return None


def _builtins(*, verify: bool) -> list[Listed]:
    from holdfast.checkpoints.sources import builtin

    listed = []
    for entry in builtin.BUILTINS:
        path = builtin.cached_path(entry)
        state: State
        checks: tuple[BuiltinCheck, ...] = ()
        if not path.exists():
            state = "not fetched"
        elif verify:
            right = builtin.verify(entry)
            state = "cached" if right else "wrong"
            checks = (BuiltinCheck(str(path), "sha256", right, _hashed(entry, path, right=right)),)
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
                makers=entry.makers,
                source=entry.source,
                accept=entry.terms.name if entry.terms is not None else None,
                checks=checks,
            )
        )
    return listed


def _hashed(entry: BuiltinModel, path: Path, *, right: bool) -> str:
    if right:
        return f"hashed, sha256 {entry.sha256}"
    if path.stat().st_size != entry.size:
        return f"{path.stat().st_size:,} bytes; expected {entry.size:,}"
    return f"hash mismatch: not sha256 {entry.sha256}"


def _hub(*, verify: bool) -> list[Listed]:
    """What the hub's cache holds, read from its folders: importing its library takes longer than all the rest."""
    from holdfast.checkpoints.sources.stored_models import hub_cache

    listed = []
    state: State
    checks: tuple[BuiltinCheck, ...]
    for folder in sorted(hub_cache().glob("models--*--*")):
        name = folder.name.removeprefix("models--").replace("--", "/", 1)
        for snapshot in sorted((folder / "snapshots").glob("*")):
            state, checks = _check_snapshot(snapshot, name) if verify else ("cached", ())
            listed.append(
                Listed(
                    name=name,
                    kind="hub",
                    state=state,
                    checks=checks,
                    size_bytes=sum(file.stat().st_size for file in snapshot.rglob("*") if file.is_file()),
                    path=str(snapshot),
                )
            )
    return listed


def _check_snapshot(snapshot: Path, name: str) -> tuple[State, tuple[BuiltinCheck, ...]]:
    """By their headers: nothing here says what their hashes must be."""
    from holdfast.checkpoints import from_path, open_checkpoint
    from holdfast.errors import ModelError

    try:
        files = from_path(snapshot, name=name, kind="hub")
        if files.format == "none":
            return "unchecked", ()
        open_checkpoint(files).close()
    except ModelError as error:
        return "wrong", (BuiltinCheck(str(snapshot), "header", False, error.message),)
    said = "header read: every tensor lies within the file; not hashed"
    return "cached", tuple(BuiltinCheck(str(path), "header", True, said) for path in files.weights)


def _document(listed: list[Listed]) -> dict[str, object]:
    from holdfast.checkpoints import DEFAULT_MODEL, ENGINE_LAYOUTS
    from holdfast.config.parts.quantization import READ_FORMATS
    from holdfast.models import known_architectures, runnable_architectures, runnable_gguf_architectures

    return {
        "default": DEFAULT_MODEL,
        "models": [asdict(entry) for entry in listed],
        "architectures": list(runnable_architectures()),
        "gguf_architectures": list(runnable_gguf_architectures()),
        "layouts": sorted(ENGINE_LAYOUTS),
        "quantizations": list(READ_FORMATS),
        "plannable_architectures": list(known_architectures()),
    }


def _table(listed: list[Listed]) -> list[str]:
    from rich.console import Console
    from rich.table import Table

    from holdfast.checkpoints import ENGINE_LAYOUTS
    from holdfast.config.parts.quantization import READ_FORMATS
    from holdfast.models import known_architectures, runnable_architectures, runnable_gguf_architectures
    from holdfast.units import format_bytes

    table = Table("name", "kind", "state", "size", "licence", "where", box=None, header_style="bold")
    for entry in listed:
        # A path must stay whole, so that it can be copied: rich may fold it but not cut it.
        name, path = printable(entry.name), printable(entry.path)
        table.add_row(name, entry.kind, entry.state, format_bytes(entry.size_bytes), entry.licence or "-", path)
    table.columns[-1].overflow = "fold"
    console = Console(highlight=False, soft_wrap=not sys.stdout.isatty(), width=None if sys.stdout.isatty() else 200)
    with console.capture() as captured:
        console.print(table)
        console.print()
        for entry in listed:
            if entry.source is not None:
                console.print(f"{entry.name}: made by {entry.makers}; fetched from {entry.source}")
            if entry.accept is not None and entry.state == "not fetched":
                console.print(
                    f"  its licence is accepted with: holdfast pull {entry.name} --accept-licence {entry.accept}"
                )
        console.print()
        console.print("Supported architectures: " + ", ".join(runnable_architectures()))
        console.print("In GGUF files:           " + ", ".join(runnable_gguf_architectures()))
        console.print("Tensor types:            " + ", ".join(sorted(ENGINE_LAYOUTS)))
        console.print("Quantized safetensors:   " + ", ".join(READ_FORMATS))
        planned = len(known_architectures())
        console.print(f"`holdfast plan` knows {planned} architectures; --json lists them.")
    return captured.get().splitlines()
