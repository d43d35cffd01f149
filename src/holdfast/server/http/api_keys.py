"""Who has a key: from settings and from a file that may change while the server runs. Knows nothing of HTTP.

A key is compared by its SHA-256 and with every key there is, so that the time it takes tells nothing of any of them.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from holdfast.errors import ConfigurationError

log = logging.getLogger("holdfast.server")

LOOK_S = 1.0
"""Between two looks at the file: a key that was taken out of it is refused after so long at most."""
MAX_FILE_BYTES = 1 << 20
KEYS_UNREADABLE = "HF152"

Stamp = tuple[int, int, int]
"""Of a file's state: when it was written, how long it is, which file it is."""
_READ_ONCE = (0, 0, 0)
"""Of a pipe, such as a shell's <(command): reading it again would wait for ever."""


class Keys:
    """None given: everybody may come in."""

    def __init__(
        self, keys: Iterable[str] = (), file: Path | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Raises ConfigurationError when the file cannot be read or holds no key."""
        self._set = [_digest(key.encode()) for key in keys]
        self._file = file
        self._clock = clock
        self._looked_s = clock()
        self._stamp: Stamp | None = None
        self._read: list[bytes] = []
        if file is not None:
            self._stamp, self._read = _stamp(file), _keys_in(file)
            if not self._read:
                raise ConfigurationError(
                    f"{file} contains no API key", code=KEYS_UNREADABLE, needed="one key per line", field="api_key_file"
                )

    @property
    def asked_for(self) -> bool:
        return bool(self._set) or self._file is not None

    def fit(self, given: bytes) -> bool:
        """Whether `given` is one of them. Looks at the file first, now and then."""
        self._look()
        digest, found = _digest(given), False
        for key in (*self._set, *self._read):
            found |= hmac.compare_digest(digest, key)
        return found

    def _look(self) -> None:
        now_s = self._clock()
        if self._file is None or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        try:
            stamp = _stamp(self._file)
            if stamp in (self._stamp, _READ_ONCE):
                return
            self._read = _keys_in(self._file)
            self._stamp = stamp
        except ConfigurationError as error:
            if isinstance(error.__cause__, FileNotFoundError):
                # Whoever takes the file away means its keys. One that is replaced in order is never gone.
                if self._read:
                    log.error("%s was deleted: its API keys are no longer valid", self._file)
                self._stamp, self._read = None, []
                return
            # Half a deployment must not lock everybody out: the keys that were read stay until others can be.
            log.error("keeping the previous API keys: %s", error.message)
            return
        log.info("read %d API keys from %s", len(self._read), self._file)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _stamp(path: Path) -> Stamp:
    try:
        found = os.stat(path)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    if not stat.S_ISREG(found.st_mode):
        return _READ_ONCE
    return found.st_mtime_ns, found.st_size, found.st_ino


def _keys_in(path: Path) -> list[bytes]:
    """One a line; empty lines and those that begin with # are passed over."""
    try:
        with path.open("rb") as file:
            text = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise _unreadable(path, error.strerror or str(error)) from error
    if len(text) > MAX_FILE_BYTES:
        raise _unreadable(path, f"it is larger than {MAX_FILE_BYTES} bytes")
    lines = (line.strip() for line in text.splitlines())
    return [_digest(line) for line in lines if line and not line.startswith(b"#")]


def _unreadable(path: Path, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"cannot read the API keys in {path}: {why}",
        code=KEYS_UNREADABLE,
        needed="a file with one key per line",
        fix="--api-key-file FILE, readable by the user that runs the server",
        field="api_key_file",
    )
