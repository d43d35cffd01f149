"""From the bytes of a tokenizer.json to the library's tokenizer: read within bounds, checked, and only then built.

What the library gets is what was checked, written anew; the vocabulary alone goes through as it stands in the file, and
is looked at when it has been built. Knows nothing of roles, templates or GGUF.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer

from holdfast.checkpoints.bounded_files import read_small
from holdfast.errors import CheckpointError
from holdfast.text.tokenizer.files.step_growth import check_steps
from holdfast.units import MIB, shorten

VOCABULARY_ABSURD = "HF233"
MAX_FILE_BYTES = 128 * MIB
"""Four times the largest that is known."""
MAX_TOKENS = 1 << 21
"""Eight times the largest vocabulary known; what has a row for each id has at most so many."""
MAX_TOKEN_CHARS = 1024
MAX_WORD_CHARS = 1000
"""Of WordPiece, which takes the square of a word's length."""
MAX_AFFIX_CHARS = 64
"""What BPE puts before or behind each character to look it up."""


class _File(msgspec.Struct, kw_only=True):
    """What tokenizer.json holds. Padding and truncation are left out: they would change lengths unseen."""

    model: msgspec.Raw
    version: Any = "1.0"
    added_tokens: Any = None
    normalizer: Any = None
    pre_tokenizer: Any = None
    post_processor: Any = None
    decoder: Any = None


class _Model(msgspec.Struct):
    vocab: Any = None


def load_tokenizer(path: Path) -> Tokenizer:
    """Raises CheckpointError for what is torn, foreign or hostile."""
    raw = read_small(path, MAX_FILE_BYTES)
    if raw is None:
        raise CheckpointError(f"{path.name} has disappeared", needed="the file that existed a moment ago")
    try:
        found = msgspec.json.decode(raw, type=_File)
    except (msgspec.DecodeError, ValueError, RecursionError) as problem:
        raise _unreadable(path, problem) from problem
    pipeline = msgspec.structs.asdict(found)
    _check_added(found.added_tokens)
    with refusing(lambda problem: _unreadable(path, problem)):
        _check_stored(found.model, path.name)
    check_steps(pipeline)
    given = {name: value for name, value in pipeline.items() if value is not None}
    with refusing(lambda problem: _unreadable(path, problem)):
        backend = Tokenizer.from_str(msgspec.json.encode(given).decode())
        check_vocabulary(backend.get_vocab(with_added_tokens=True), path.name)
        _check_model(backend.model)
    _check_template_ids(found.post_processor, backend)
    return backend


@contextmanager
def refusing(refusal: Callable[[BaseException], Exception]) -> Iterator[None]:
    """What the library raises becomes `refusal`. It also panics, which is no Exception and must not get through."""
    try:
        yield
    except CheckpointError:
        raise
    except Exception as problem:  # it raises bare Exception for torn or foreign files
        raise refusal(problem) from problem
    except BaseException as problem:
        if type(problem).__name__ != "PanicException":
            raise
        raise refusal(problem) from problem


def check_vocabulary(vocabulary: Mapping[str, int], where: str) -> None:
    """Everything that has a place for each token is as large as the greatest id, not as the count of tokens."""
    greatest = max(vocabulary.values(), default=0)
    longest = max(map(len, vocabulary), default=0)
    if greatest >= MAX_TOKENS or longest > MAX_TOKEN_CHARS:
        raise CheckpointError(
            f"the vocabulary of {where} is not plausible",
            code=VOCABULARY_ABSURD,
            needed=f"ids below {MAX_TOKENS}, and tokens of at most {MAX_TOKEN_CHARS} characters",
            found=f"{len(vocabulary)} tokens, the largest id {greatest}, the longest of {longest} characters",
            fix="download the model's tokenizer again; its ids must be consecutive",
        )


def _unreadable(path: Path, problem: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{path.name} cannot be read as a tokenizer", found=shorten(str(problem), 200), fix="download the file again"
    )


def _check_stored(model: msgspec.Raw, where: str) -> None:
    """Before anything is built: some models are trees of characters, and the library goes down them by recursion."""
    stored = msgspec.json.decode(model, type=_Model).vocab
    if isinstance(stored, list):  # Unigram's: tokens with scores, whose ids are their places
        stored = {entry[0]: place for place, entry in enumerate(stored) if isinstance(entry, list) and entry}
    if isinstance(stored, dict):
        texts = {name: index for name, index in stored.items() if isinstance(name, str) and isinstance(index, int)}
        check_vocabulary(texts, where)


def _check_added(tokens: Any) -> None:
    """Before anything is built: the library runs them through the normalizer."""
    for token in tokens if isinstance(tokens, list) else ():
        content, index = (token.get("content"), token.get("id")) if isinstance(token, dict) else (None, None)
        long = isinstance(content, str) and len(content) > MAX_TOKEN_CHARS
        if long or (isinstance(index, int) and index >= MAX_TOKENS):
            check_vocabulary({str(content): index if isinstance(index, int) else 0}, "tokenizer.json (added_tokens)")


def _check_model(model: Any) -> None:
    word = getattr(model, "max_input_chars_per_word", 0)
    affixes = [getattr(model, name, None) or "" for name in ("continuing_subword_prefix", "end_of_word_suffix")]
    if word > MAX_WORD_CHARS or any(len(affix) > MAX_AFFIX_CHARS for affix in affixes):
        raise CheckpointError(
            "the model in tokenizer.json would take far too long to tokenize a text",
            code=VOCABULARY_ABSURD,
            needed=f"max_input_chars_per_word up to {MAX_WORD_CHARS}, prefix and suffix up to {MAX_AFFIX_CHARS}",
            found=f"{word}, and {max(map(len, affixes))} characters",
            fix="download the model's tokenizer again",
        )


def _check_template_ids(processor: Any, backend: Tokenizer) -> None:
    """What is put around a text must be in the vocabulary: else every request would be refused."""
    unknown = next((index for index in _template_ids(processor) if backend.id_to_token(index) is None), None)
    if unknown is not None:
        raise CheckpointError(
            f"the post_processor in tokenizer.json adds the token {unknown}, which is not in the vocabulary",
            code=VOCABULARY_ABSURD,
            needed="a token id in the vocabulary",
            found=str(unknown),
            fix="download the model's tokenizer again",
        )


def _template_ids(processor: Any) -> Iterator[int]:
    if not isinstance(processor, dict):
        return
    inner = processor.get("processors")
    for one in inner if isinstance(inner, list) else ():
        yield from _template_ids(one)
    tokens = processor.get("special_tokens")
    for token in tokens.values() if isinstance(tokens, dict) else ():
        ids = token.get("ids") if isinstance(token, dict) else None
        yield from (index for index in (ids if isinstance(ids, list) else ()) if isinstance(index, int))
    for name in ("sep", "cls"):
        pair = processor.get(name)
        if isinstance(pair, list) and len(pair) == 2 and isinstance(pair[1], int):
            yield pair[1]
