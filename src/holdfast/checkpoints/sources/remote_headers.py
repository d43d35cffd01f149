"""Headers of a model at the hub, without its weights: what a plan needs, in a few requests and kilobytes.

    model_info ─► names and sizes ─► choose ─► config, generation config, index ─► header of each file, by range

Gives the records that files on this machine give. How pieces are fetched is in http_ranges.py, how the hub's errors
become ours in hub.py; formats are read by the same readers as ever.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from holdfast.checkpoints.bounded_files import parse_table
from holdfast.checkpoints.files import GGUFHeader, ModelFiles, StoredTensor
from holdfast.checkpoints.formats import gguf, safetensors
from holdfast.checkpoints.sources import hub
from holdfast.checkpoints.sources.http_ranges import RangeClient
from holdfast.checkpoints.sources.select_files import INDEX_NAME, FileChoice, choose_weights
from holdfast.errors import CheckpointError, ModelAccessError
from holdfast.units import KIB, MIB

MAX_CONFIG_BYTES = 16 * MIB
MAX_GGUF_HEADER_BYTES = 64 * MIB
"""Of one file; those with the largest vocabularies have about 16 MiB."""
_AT_ONCE = 8
_SILENT_S = 30.0
_SILENT_UNTIL: dict[str, float] = {}
"""Hubs that did not answer in time: one question may need a model several times, and waits for it once."""
_FIRST_GGUF_BYTES, _LARGEST_GGUF_STEP_BYTES = 64 * KIB, 4 * MIB

_Answer = TypeVar("_Answer")
_Item = TypeVar("_Item")


def ask_headers(repo: str, *, revision: str | None, wanted: str | None, patience_s: float | None = None) -> ModelFiles:
    """What the hub holds under that id; `wanted` is a GGUF's quantization or name. Downloads no weights, keeps nothing.

    `patience_s`: TimeoutError where the hub has not said by then which files it has; None: as its library waits.
    Honours HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE. Raises CheckpointError (torn, hostile, only pickles, several to
    choose from), and what the hub's library raises: see `hub.our_errors`.
    """
    import huggingface_hub
    from huggingface_hub import constants
    from huggingface_hub.utils import build_hf_headers  # type: ignore[attr-defined]

    if constants.HF_HUB_OFFLINE:
        raise ModelAccessError(
            f"{repo} is on the hub, but offline mode is set",
            code="HF223",
            needed="access to the hub",
            found="HF_HUB_OFFLINE is set",
            fix="unset HF_HUB_OFFLINE, or use a folder, a .gguf file or a catalogue model",
        )
    home = hub.endpoint() or constants.ENDPOINT
    api = huggingface_hub.HfApi(endpoint=home)
    # Longer than our own patience: the thread that asks ends after it, and two clocks do not race.
    limit_s = None if patience_s is None else 2 * patience_s + 1
    info = _first_answer(
        lambda: api.model_info(repo, revision=revision, files_metadata=True, timeout=limit_s), home, patience_s
    )
    sizes = {sibling.rfilename: sibling.size for sibling in info.siblings or []}
    headers = build_hf_headers(library_name="holdfast")
    with RangeClient(headers, endpoint=home, timeout_s=constants.HF_HUB_DOWNLOAD_TIMEOUT) as client:
        found = _Repository(repo, info.sha or revision or "main", home, sizes, client).read(wanted)
    return replace(found, name=repo if wanted is None else f"{repo}:{wanted}")


def _first_answer(ask: Callable[[], _Answer], home: str, patience_s: float | None) -> _Answer:
    """On a thread of its own: to look up the name of a host may take any time, which no client's timeout bounds."""
    if patience_s is None:
        return ask()
    silent = TimeoutError(f"{home} has not responded within {patience_s:g} s (raise HF_HUB_ETAG_TIMEOUT for more)")
    if time.monotonic() < _SILENT_UNTIL.get(home, 0.0):
        raise silent
    answers: queue.SimpleQueue[_Answer | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(ask())
        except Exception as error:
            answers.put(error)

    threading.Thread(target=work, name="hub", daemon=True).start()
    try:
        answer = answers.get(timeout=patience_s)
    except queue.Empty:
        _SILENT_UNTIL[home] = time.monotonic() + _SILENT_S
        raise silent from None
    if isinstance(answer, Exception):
        raise answer
    return answer


class _Repository:
    """One commit of one repository."""

    def __init__(self, repo: str, commit: str, home: str, sizes: dict[str, int | None], client: RangeClient) -> None:
        self.repo, self.commit, self.home, self.sizes, self.client = repo, commit, home, sizes, client

    def read(self, wanted: str | None) -> ModelFiles:
        choice = choose_weights(self.sizes, self.repo, wanted)
        if choice.format == "gguf":
            return self._gguf(choice)
        if "config.json" not in self.sizes:
            raise CheckpointError(
                f"{self.repo}: not a model: config.json is missing",
                needed="config.json with *.safetensors, or .gguf files",
            )
        config, generation_config, index = _at_once(
            self._small, ["config.json", "generation_config.json", INDEX_NAME if choice.weights else ""]
        )
        names = choice.weights
        if index is not None:
            names = safetensors.parse_index(index, self._path(INDEX_NAME))
            safetensors.check_all_there(self._path(INDEX_NAME), names, self.sizes)
        return ModelFiles(
            name=self.repo,
            kind="hub",
            path=self._path(),
            weights=tuple(map(self._path, names)),
            format="safetensors" if names else "none",
            config=self._table("config.json", config),
            generation_config=self._table("generation_config.json", generation_config),
            tensors=safetensors.merge(_at_once(self._safetensors_header, names)),
            remote=True,
            revision=self.commit,
            chosen=choice.reason,
        )

    def _gguf(self, choice: FileChoice) -> ModelFiles:
        parts = len(choice.weights) > 1
        headers = _at_once(lambda name: self._gguf_header(name, part=parts), choice.weights)
        header = gguf.join_parts(headers) if parts else headers[0]
        template = header.metadata.get("tokenizer.chat_template")
        return ModelFiles(
            name=self.repo,
            kind="hub",
            path=header.path,
            weights=tuple(map(self._path, choice.weights)),
            format="gguf",
            header=header,
            chat_template=template if isinstance(template, str) and template else None,
            remote=True,
            revision=self.commit,
            chosen=choice.reason,
        )

    def _path(self, name: str = "") -> Path:
        """A name for messages; the prefix keeps it from ever being taken for a file here."""
        return Path(f"hub:{self.repo}", name)

    def _url(self, name: str) -> str:
        import huggingface_hub

        return huggingface_hub.hf_hub_url(self.repo, name, revision=self.commit, endpoint=self.home)

    def _small(self, name: str) -> bytes | None:
        if name not in self.sizes:
            return None
        limit = safetensors.MAX_HEADER_BYTES if name == INDEX_NAME else MAX_CONFIG_BYTES
        return self.client.whole(self._url(name), limit_bytes=limit)

    def _table(self, name: str, raw: bytes | None) -> dict[str, Any] | None:
        return None if raw is None else parse_table(raw, str(self._path(name)))

    def _safetensors_header(self, name: str) -> dict[str, StoredTensor]:
        source = _Source(self, name)
        # Eight bytes say how long the header is, so that not one byte of weights is asked for.
        start = source.next(8)
        return safetensors.parse_header(self._path(name), source.file_bytes, _rereading(start, source.next))

    def _gguf_header(self, name: str, *, part: bool) -> GGUFHeader:
        source = _Source(self, name)
        start = source.next(_FIRST_GGUF_BYTES)

        def more(count: int) -> bytes:
            if source.position + count > MAX_GGUF_HEADER_BYTES:
                raise CheckpointError(
                    f"{self._path(name)}: the GGUF header is implausibly large", needed=f"{MAX_GGUF_HEADER_BYTES} bytes"
                )
            return source.next(max(count, min(source.position, _LARGEST_GGUF_STEP_BYTES)))

        return gguf.parse_header(self._path(name), source.file_bytes, _rereading(start, more), part=part)


class _Source:
    """Reads one file from its start; knows its size once something was read."""

    def __init__(self, repository: _Repository, name: str) -> None:
        self.repository, self.name = repository, name
        self.url, self.position = repository._url(name), 0
        self.file_bytes = repository.sizes[name] or 0

    def next(self, count: int) -> bytes:
        piece = self.repository.client.piece(self.url, self.position, count)
        listed = self.repository.sizes[self.name]
        found = piece.file_bytes if piece.file_bytes is not None else listed
        if found is None:
            raise ModelAccessError(
                f"{self.repository.repo}: the hub does not say how large {self.name} is", code="HF222"
            )
        if listed is not None and found != listed:
            raise self._torn(f"{listed} bytes, as the hub lists it", f"{found} bytes")
        if len(piece.data) < min(count, found - self.position):
            raise self._torn(f"{count} bytes at {self.position}", f"{len(piece.data)} bytes")
        self.file_bytes, self.url = found, piece.url
        self.position += len(piece.data)
        return piece.data

    def _torn(self, needed: str, found: str) -> CheckpointError:
        return CheckpointError(
            f"{self.repository.repo}: {self.name} from {self.repository.home} is truncated",
            code="HF231",
            needed=needed,
            found=found,
            fix="try again; if it persists, the mirror in HF_ENDPOINT has a truncated copy",
        )


def _rereading(start: bytes, more: Callable[[int], bytes]) -> Callable[[int], bytes]:
    """Gives what was read already first."""
    waiting = [start]

    def read(count: int) -> bytes:
        if waiting:
            return waiting.pop()
        return more(count) if count else b""

    return read


def _at_once(ask: Callable[[_Item], _Answer], items: Iterable[_Item]) -> list[_Answer]:
    """The answers in order, several asked for at a time; the first error ends it."""
    listed = list(items)
    if not listed:
        return []
    pool = ThreadPoolExecutor(min(_AT_ONCE, len(listed)), thread_name_prefix="holdfast-headers")
    try:
        return list(pool.map(ask, listed))
    finally:
        pool.shutdown(cancel_futures=True)
