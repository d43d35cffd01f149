"""How a line of the log looks, in all processes of a server alike. Imports nothing but logging: it is the first thing
that an engine process or a rank needs.
"""

from __future__ import annotations

import logging
import sys

TIME_FORMAT = "%Y-%m-%d %H:%M:%S"


def line_format(name: str) -> logging.Formatter:
    """`name`: who speaks."""
    return logging.Formatter(f"%(asctime)s %(levelname)s {name}: %(message)s", TIME_FORMAT)


def log_as(name: str, level: int = logging.INFO) -> None:
    """Lines of a process that is not the front, to its standard error. Calling it again replaces the name. `level`: of
    our own; libraries have nothing to say below info."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(line_format(name))
    logging.basicConfig(level=max(level, logging.INFO), handlers=[handler], force=True)
    logging.getLogger("holdfast").setLevel(level)
