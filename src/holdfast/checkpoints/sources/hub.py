"""Fetches a model from the Hugging Face hub or a mirror of it: only the files that are needed.

huggingface_hub does the work and reads HF_TOKEN, HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE; here its many ways
to fail become ours. It is imported only when a hub id is asked for.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import os
import sys
from collections.abc import Callable, Collection, Iterator
from functools import partial
from pathlib import Path

from holdfast.checkpoints.files import ModelFiles
from holdfast.checkpoints.formats import safetensors
from holdfast.checkpoints.pooling import POOLING_CONFIG
from holdfast.checkpoints.sources.download_progress import say
from holdfast.checkpoints.sources.select_files import EMBEDDING_MARK, INDEX_NAME, choose_weights
from holdfast.errors import CheckpointError, ModelAccessError, ModelError, ModelNotFoundError
from holdfast.units import format_bytes, shorten

SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    EMBEDDING_MARK,
    POOLING_CONFIG,
    INDEX_NAME,
)


def download(
    repo: str,
    *,
    revision: str | None = None,
    wanted: str | None = None,
    progress: bool = True,
    cache: Path | None = None,
) -> Path:
    """The snapshot's folder in the hub's cache, complete for our purpose; `wanted`: which of several GGUF models;
    `cache`: a folder in its place."""
    with our_errors(repo, revision):
        import huggingface_hub
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return _cached(repo, revision, wanted, cache)
        try:
            info = huggingface_hub.HfApi(endpoint=endpoint()).model_info(repo, revision=revision, files_metadata=True)
        except Exception as error:
            # An unreachable hub is no reason to refuse what is already here; a hub that says no is.
            if not _unreachable(error):
                raise
            with contextlib.suppress(huggingface_hub.errors.LocalEntryNotFoundError):
                return _cached(repo, revision, wanted, cache)
            raise
        sizes = {sibling.rfilename: sibling.size or 0 for sibling in info.siblings or []}
        names = choose(sizes, repo, wanted)
        total = sum(sizes[name] for name in names)
        say(
            f"{repo}: {len(names)} files, {format_bytes(total)}, in {cache or constants.HF_HUB_CACHE}",
            progress=progress,
        )
        with _bars(progress):
            folder = huggingface_hub.snapshot_download(
                repo,
                revision=revision,
                allow_patterns=[glob.escape(name) for name in names],
                endpoint=endpoint(),
                cache_dir=cache,
            )
    return Path(folder)


def cached_unless_reachable(
    repo: str, revision: str | None, wanted: str | None, ask: Callable[[], ModelFiles], cache: Path | None = None
) -> ModelFiles | Path:
    """What `ask` finds at the hub; the folder of an earlier download where the hub cannot be asked."""
    with our_errors(repo, revision):
        import huggingface_hub
        from huggingface_hub import constants

        if constants.HF_HUB_OFFLINE:
            return _cached(repo, revision, wanted, cache)
        try:
            return ask()
        except Exception as error:
            if not _unreachable(error):
                raise
            with contextlib.suppress(huggingface_hub.errors.LocalEntryNotFoundError):
                return _cached(repo, revision, wanted, cache)
            raise


def choose(names: Collection[str], repo: str, wanted: str | None = None) -> list[str]:
    """Of a repository's files, those we need: its safetensors, else one GGUF model, and the small files."""
    top = [name for name in names if "/" not in name]
    small = [name for name in names if name in SMALL_FILES]
    choice = choose_weights(names, repo, wanted)
    if choice.format == "none" and "config.json" not in small:
        raise CheckpointError(
            f"{repo} is not a model this engine can open",
            needed="config.json with *.safetensors, or one .gguf file",
            found=shorten(", ".join(sorted(top)) or "no files"),
        )
    return small + list(choice.weights)


def _cached(repo: str, revision: str | None, wanted: str | None, cache: Path | None = None) -> Path:
    """What an earlier download left, with no word to the network."""
    import huggingface_hub

    look = partial(huggingface_hub.snapshot_download, repo, revision=revision, local_files_only=True, cache_dir=cache)
    if wanted is not None:
        endings = ("",) if wanted.endswith(".gguf") else (".gguf", "-?????-of-?????.gguf")
        spellings = [glob.escape(spelling) for spelling in (wanted, wanted.upper(), wanted.lower())]
        folder = Path(look(allow_patterns=[f"*{spelling}{end}" for spelling in spellings for end in endings]))
    else:
        try:
            patterns = [*SMALL_FILES, "*.safetensors"]
            folder = Path(look(allow_patterns=patterns, ignore_patterns=["consolidated*", "*/*"]))
        except huggingface_hub.errors.LocalEntryNotFoundError:
            folder = Path(look(allow_patterns=["*.gguf"], ignore_patterns=["*/*"]))
    # Only newer versions of the library notice what an interrupted download left.
    missing = _missing(folder)
    if missing is not None:
        raise ModelAccessError(
            f"{repo} is incomplete in the hub's cache, and the hub was not contacted",
            code="HF223",
            needed="config.json and every file of weights, or a .gguf file",
            found=f"{missing} in {folder}",
            fix=f"with access to the hub and HF_HUB_OFFLINE unset: holdfast pull {repo}",
        )
    return folder


def _missing(folder: Path) -> str | None:
    """What a model in that folder lacks; None when it can be opened."""
    if any(folder.glob("*.gguf")) or any(folder.glob("*/*.gguf")):
        return None
    if not (folder / "config.json").is_file():
        return "no config.json"
    index = folder / INDEX_NAME
    if index.is_file():
        try:
            safetensors.shards_of_index(index)
        except CheckpointError as error:
            return error.found or error.message
        return None
    # exists() follows the cache's links: one whose blob never came counts as missing.
    return None if any(file.exists() for file in folder.glob("*.safetensors")) else "no weights"


def endpoint() -> str | None:
    """The library reads HF_ENDPOINT once, when it is imported, which may have been long before us."""
    return os.environ.get("HF_ENDPOINT") or None


@contextlib.contextmanager
def _bars(progress: bool) -> Iterator[None]:
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    silent = not (progress and sys.stderr.isatty()) and not are_progress_bars_disabled()
    if silent:
        disable_progress_bars()
    try:
        yield
    finally:
        if silent:
            enable_progress_bars()


@contextlib.contextmanager
def our_errors(repo: str, revision: str | None) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        raise _translated(error, repo, revision) from error


def _translated(error: Exception, repo: str, revision: str | None) -> ModelError:
    from huggingface_hub import constants, errors

    said = shorten(" ".join(str(error).split()), limit_chars=300)
    status = getattr(getattr(error, "response", None), "status_code", None)
    where = endpoint() or constants.ENDPOINT
    if isinstance(error, errors.GatedRepoError) or status == 403 or getattr(error, "hub_code", None) == "GatedRepo":
        return _no_access(repo, "is gated: its owner must grant you access first", said)
    if isinstance(error, errors.RevisionNotFoundError):
        return ModelNotFoundError(
            f"{repo} has no revision {revision!r}", needed="a branch, a tag or a commit", found=said
        )
    if isinstance(error, errors.RepositoryNotFoundError) or status == 404:
        return ModelNotFoundError(
            f"{where} has no model {repo}, or it is private and the token cannot see it",
            needed="owner/name as the hub spells it" + ("" if _has_token() else ", or a token"),
            found=said,
            fix="holdfast models; for a private one: hf auth login, or set HF_TOKEN",
        )
    if status == 401:
        return _no_access(repo, "was refused: the hub does not accept the token", said)
    if isinstance(error, errors.LocalEntryNotFoundError | errors.OfflineModeIsEnabled):
        return ModelAccessError(
            f"{repo} is incomplete in the hub's cache, and the hub cannot be reached",
            code="HF223",
            needed=f"the model in {constants.HF_HUB_CACHE} (HF_HOME is {constants.HF_HOME})",
            found="HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else said,
            fix=f"unset HF_HUB_OFFLINE and run: holdfast pull {repo}",
        )
    if isinstance(error, errors.HFValidationError):
        return ModelNotFoundError(f"{repo!r} is not a hub id", needed="owner/name", found=said)
    if "Consistency check failed" in said or _torn(error):
        return CheckpointError(
            f"the download of {repo} from {where} is corrupt; it was not kept",
            code="HF231",
            found=said,
            fix=f"holdfast pull {repo}",
        )
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EDQUOT):
        return ModelError(
            f"{repo} cannot be saved in {constants.HF_HUB_CACHE}: {error.strerror}",
            code="HF201",
            fix="free some space, or set HF_HOME to another folder",
        )
    return ModelAccessError(
        f"{repo} cannot be downloaded from {where}",
        code="HF222",
        found=f"{type(error).__name__}: {said}",
        fix="check the network, HF_ENDPOINT and the proxy settings; a model in a local folder needs none of them",
    )


def _no_access(repo: str, why: str, said: str) -> ModelAccessError:
    from huggingface_hub import constants

    return ModelAccessError(
        f"{repo} {why}",
        needed="a token with access" + (" (the current one has none)" if _has_token() else " (none is set)"),
        found=f"{said} (HF_HOME is {constants.HF_HOME})",
        fix=f"request access at {endpoint() or constants.ENDPOINT}/{repo}, then: hf auth login, or set HF_TOKEN",
    )


def _has_token() -> bool:
    from huggingface_hub import get_token

    return get_token() is not None


def _unreachable(error: Exception) -> bool:
    """No answer at all, or a hub in trouble. By name: the library's HTTP client changed between its versions."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:
        return bool(status >= 500)
    return any(word in type(error).__name__ for word in ("Connect", "Timeout", "Network", "OfflineMode"))


def _torn(error: BaseException | None) -> bool:
    while error is not None:
        if type(error).__name__ in ("RemoteProtocolError", "IncompleteRead", "ChunkedEncodingError"):
            return True
        error = error.__cause__ or error.__context__
    return False
