"""The parsers of `serve` and `plan`, made once: each has hundreds of flags, and reading words leaves no trace in it."""

from __future__ import annotations

import argparse
from functools import cache

from holdfast.cli.commands import plan, serve


@cache
def serve_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    serve.add_arguments(parser)
    return parser


@cache
def plan_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    plan.add_arguments(parser)
    return parser
