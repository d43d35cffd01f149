"""`holdfast rm`: removes a downloaded model from its cache, after asking. Never what is elsewhere or served."""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.cli.output import say
from holdfast.errors import ConfigurationError, ModelError, ModelNotFoundError
from holdfast.units import format_bytes, shorten

if TYPE_CHECKING:
    from holdfast.checkpoints.sources.stored_models import StoredModel

HELP = """Remove downloaded models: of the hub's cache (all revisions), or built-in ones. Asks first."""

USAGE = "holdfast rm MODEL ... [--yes]"

EXAMPLES = """examples:
  holdfast rm smollm2                  asks, then says how much space is free again
  holdfast rm owner/name:Q4_K_M        one GGUF of several
  holdfast rm owner/name --yes         without asking, for scripts

exit codes: 0 removed, 1 no such model, failed or not confirmed, 2 it is being served, or --yes is needed
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("models", nargs="+", metavar="MODEL", help="as `holdfast list` names it")
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask")


def run(arguments: argparse.Namespace) -> int:
    chosen = [_found(name) for name in arguments.models]  # All are found before the first is removed.
    if not arguments.yes and not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise ConfigurationError(
            "there is nobody to ask",
            needed="--yes, or a terminal",
            fix=f"holdfast rm {' '.join(arguments.models)} --yes",
        )
    code = 0
    for model in chosen:
        if arguments.yes or _confirmed(model):
            freed = _removed_alone(model)
            say([f"removed {model.name}: {format_bytes(freed)} freed"])
        else:
            say([f"kept {model.name}"])
            code = 1
    return code


def _found(name: str) -> StoredModel:
    from holdfast.checkpoints.sources.stored_models import stored_models
    from holdfast.cli.servers.background import identity

    here = stored_models()
    wanted = identity(name)
    model = next((one for one in here if wanted in (one.name, identity(one.name))), None)
    if model is None:
        several = [one.name for one in here if one.name.startswith(f"{wanted}:")]
        raise ModelNotFoundError(
            f"{shorten(name)} is not on this machine",
            found=shorten(", ".join(several or [one.name for one in here]) or "no model", 400),
            fix=f"holdfast rm {several[0]}" if several else "holdfast list",
        )
    if not model.remove:
        raise ConfigurationError(
            f"{model.name} is a {'folder' if model.path.is_dir() else 'file'} of yours, not a download",
            needed="a model of the hub's or Holdfast's cache",
            fix=f"remove it yourself: {model.path}",
        )
    _require_unserved(model)
    return model


def _require_unserved(model: StoredModel) -> None:
    from holdfast.cli.servers.background import serving
    from holdfast.cli.servers.registry import running_servers

    servers = serving(running_servers(), model)
    if servers:
        raise ConfigurationError(
            f"{model.name} is being served at {servers[0].url} (pid {servers[0].pid})",
            fix=f"holdfast stop {servers[0].pid}",
        )


def _confirmed(model: StoredModel) -> bool:
    where = model.remove[0] if len(model.remove) == 1 else model.path
    print(
        f"Remove {model.name} ({format_bytes(model.size_bytes)}, {where})? [y/N] ", end="", file=sys.stderr, flush=True
    )
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _removed_alone(model: StoredModel) -> int:
    """While `run` starts no server. A person may have thought about the question for long: one may have begun."""
    from holdfast.cli.servers.registry import starting_alone

    with contextlib.ExitStack() as alone:
        with contextlib.suppress(OSError):  # Without a folder for it `run` starts none either.
            alone.enter_context(starting_alone())
        _require_unserved(model)
        return _remove(model)


def _remove(model: StoredModel) -> int:
    """The bytes that are free again."""
    from holdfast.checkpoints.sources.stored_models import freed_by

    before = freed_by(model.remove)
    try:
        for path in model.remove:
            _delete(path)
    except OSError as error:
        raise ModelError(
            f"{model.name} cannot be removed: {error.strerror or error}",
            code="HF201",
            found=str(error.filename or model.path),
            fix="check who owns the cache",
        ) from error
    return before - freed_by(model.remove)


def _delete(path: Path) -> None:
    """A link goes, not what it points to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
