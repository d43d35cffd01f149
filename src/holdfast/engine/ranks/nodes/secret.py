"""The secret that nodes of one engine have: where it comes from, and how each side proves to the other that it knows
it without saying it.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import replace
from pathlib import Path

from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError

HEAD, AGENT = b"holdfast head", b"holdfast node"
MOST_FILE_BYTES = 4096


def new_secret() -> str:
    return secrets.token_urlsafe(24)


def proof(secret: str, side: bytes, first: bytes, second: bytes) -> bytes:
    """`first`, `second`: what the agent and the head have drawn for this connection alone."""
    return hmac.digest(secret.encode(), side + b"\0" + first + second, "sha256")


def with_secret(config: EngineConfig) -> tuple[EngineConfig, bool]:
    """The same settings with the secret itself; and whether it was made here, so that others must be told."""
    if config.nnodes == 1 or config.node_secret is not None:
        return config, False
    if config.node_secret_file is not None:
        return replace(config, node_secret=_read(Path(config.node_secret_file)), node_secret_file=None), False
    if config.node_rank > 0:
        raise ConfigurationError(
            f"node {config.node_rank} has no secret to join the head with",
            needed="the secret that the head has, or has printed",
            fix="HOLDFAST_NODE_SECRET=SECRET in the environment, or --node-secret-file FILE",
            field="node_secret_file",
        )
    return replace(config, node_secret=new_secret()), True


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            lines = file.read(MOST_FILE_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"the node secret cannot be read: {error}", needed="a text file", field="node_secret_file"
        ) from None
    return lines[0].strip() if lines else ""
