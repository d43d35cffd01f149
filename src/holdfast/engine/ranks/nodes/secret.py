"""The secret that nodes of one engine have: where it comes from, and the key that both sides of a connection prove to
have (execution/parallel/sockets/key_proof.py).

The head proves it first, to anybody who calls: a stranger has something to try guesses on. So a guess takes as long as
scrypt does, and a secret has 16 characters at least.
"""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
import stat
from dataclasses import replace
from pathlib import Path

from holdfast.config import EngineConfig
from holdfast.config.nodes import MAKE_SECRET
from holdfast.errors import ConfigurationError

log = logging.getLogger("holdfast")

HEAD, AGENT = b"holdfast head", b"holdfast node"
MOST_FILE_BYTES = 4096


def new_secret() -> str:
    return secrets.token_urlsafe(24)


def derive_key(secret: str) -> bytes:
    """About 50 ms and 16 MiB: once, before anybody calls, and not for each who does. All nodes derive the same: there
    is nothing they share but this."""
    return hashlib.scrypt(secret.encode(), salt=b"holdfast nodes", n=1 << 14, r=8, p=1, dklen=32)


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
            fix="HOLDFAST_NODE_SECRET=SECRET in the environment of all nodes, or --node-secret-file FILE;"
            f" {MAKE_SECRET} makes one",
            field="node_secret_file",
        )
    return replace(config, node_secret=new_secret()), True


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            lines = file.read(MOST_FILE_BYTES).decode().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"the node secret cannot be read: {error}", needed="a text file", field="node_secret_file"
        ) from None
    if mode & stat.S_IRWXO:
        log.warning("the node secret in %s is open to all users (mode %04o): chmod 600 %s", path, mode, path)
    return lines[0].strip() if lines else ""
