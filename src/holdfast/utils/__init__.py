"""Where vLLM keeps small helpers that scripts import: its parser of arguments, and a name for a request."""

from __future__ import annotations

import uuid

from holdfast.utils.argparse_utils import FlexibleArgumentParser

__all__ = ["FlexibleArgumentParser", "random_uuid"]


def random_uuid() -> str:
    return uuid.uuid4().hex
