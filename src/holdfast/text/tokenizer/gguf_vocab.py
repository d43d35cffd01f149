"""A GGUF header's vocabulary turned into a tokenizers pipeline, equal to the one the model was trained with.

Owns the rules by which `tokenizer.ggml.*` names a splitting, merging and decoding scheme. Knows nothing of files,
chat templates or of how the ids are used.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, normalizers, processors
from tokenizers.models import BPE

from holdfast.errors import CheckpointError
from holdfast.text.tokenizer.files.loader import MAX_TOKEN_CHARS, MAX_TOKENS, VOCABULARY_ABSURD, refusing
from holdfast.text.tokenizer.pretokenizers import BYTE_LEVEL_SCHEMES, ByteLevelScheme
from holdfast.units import shorten

KIND_UNKNOWN = "HF234"
MAX_CUT_CHARS = 1 << 30
"""Characters compared to find merges by score, which grow with the square of a token's length: seconds."""

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Values of tokenizer.ggml.token_type that change how a token is matched."""

_PHI3_KEEPS_SPACE = ("<unk>", "<s>", "<|endoftext|>")
"""Phi-3's other marks swallow the white space behind them, which a GGUF header has no word for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFVocabulary:
    """The pipeline and the tokens with a role, as text."""

    backend: Tokenizer
    bos_token: str | None
    eos_token: str | None
    unk_token: str | None
    pad_token: str | None


def build(metadata: Mapping[str, Any]) -> GGUFVocabulary:
    """Raises CheckpointError naming the key that is missing, contradictory or not supported."""
    model = metadata.get("tokenizer.ggml.model")
    tokens = _list_of(metadata, "tokenizer.ggml.tokens", str)
    _check_sizes(tokens)
    roles = {
        role: _role(metadata, f"tokenizer.ggml.{key}_token_id", tokens)
        for role, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
    }
    with refusing(_no_tokenizer):  # as for merges and tokens that do not belong together
        if model == "gpt2":
            scheme = _byte_level_scheme(metadata)
            backend, add_bos = _byte_level(metadata, tokens, scheme), scheme.add_bos
        elif model == "llama":
            backend, add_bos = _sentencepiece(metadata, tokens, roles["unk"]), True
        else:
            raise CheckpointError(
                f"the GGUF header names tokenizer {model!r}, which is not supported",
                code=KIND_UNKNOWN,
                needed="tokenizer.ggml.model gpt2 or llama",
                found=repr(model),
                fix="use a folder with tokenizer.json instead",
            )
        _add_added_tokens(backend, metadata, tokens, roles)
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    add_eos = bool(metadata.get("tokenizer.ggml.add_eos_token", False))
    set_ends(backend, roles["bos"] if add_bos else None, roles["eos"] if add_eos else None)
    return GGUFVocabulary(
        backend=backend,
        bos_token=roles["bos"],
        eos_token=roles["eos"],
        unk_token=roles["unk"],
        pad_token=roles["pad"],
    )


def _no_tokenizer(problem: BaseException) -> CheckpointError:
    return CheckpointError(
        "no tokenizer can be built from the GGUF header's vocabulary",
        found=shorten(str(problem), 200),
        fix="download the file again",
    )


def _check_sizes(tokens: Sequence[str]) -> None:
    longest = max(map(len, tokens))
    if len(tokens) > MAX_TOKENS or longest > MAX_TOKEN_CHARS:
        raise CheckpointError(
            "the GGUF header's vocabulary is not plausible",
            code=VOCABULARY_ABSURD,
            needed=f"at most {MAX_TOKENS} tokens of at most {MAX_TOKEN_CHARS} characters",
            found=f"{len(tokens)} tokens, the longest of {longest} characters",
        )


def set_ends(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """What `add_special_tokens` puts around a text, replacing whatever the pipeline did before."""
    around = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    missing = next((token for token, index in around if index is None), None)
    if missing is not None:
        raise CheckpointError(
            f"the BOS or EOS token {shorten(missing)!r} is not in the vocabulary",
            needed="bos_token and eos_token of tokenizer_config.json among the tokens of tokenizer.json",
            found=shorten(missing),
            fix="correct them, or set add_bos_token and add_eos_token to false",
        )
    # Given as a list: a token with spaces or colons in it would be torn apart in the one-string form.
    single = [*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=None, special_tokens=around)


def keeps_length(normalizer: normalizers.Normalizer | None) -> bool:
    """Whether a text is never shorter for it: there is none, or it spells spaces as SentencePiece does."""
    if normalizer is None:
        return True
    spelled = json.loads(normalizer.__getstate__())
    steps = spelled["normalizers"] if spelled["type"] == "Sequence" else [spelled]
    plain = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    return all(step["type"] == "Prepend" or step == plain for step in steps)


def _byte_level_scheme(metadata: Mapping[str, Any]) -> ByteLevelScheme:
    name = metadata.get("tokenizer.ggml.pre", "default")
    scheme = BYTE_LEVEL_SCHEMES.get(name) if isinstance(name, str) else None
    if scheme is None:
        raise CheckpointError(
            f"the GGUF header names pre-tokenizer {name!r}, which is not supported",
            code=KIND_UNKNOWN,
            needed="tokenizer.ggml.pre one of " + ", ".join(BYTE_LEVEL_SCHEMES),
            found=repr(name),
            fix="use a folder with tokenizer.json instead",
        )
    return scheme


def _byte_level(metadata: Mapping[str, Any], tokens: Sequence[str], scheme: ByteLevelScheme) -> Tokenizer:
    merges = [_pair(merge) for merge in _list_of(metadata, "tokenizer.ggml.merges", str)]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, fuse_unk=False, ignore_merges=scheme.whole_pieces))
    if scheme.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = scheme.split()
    backend.decoder = decoders.ByteLevel()
    return backend


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    if not left or not right or " " in right:
        raise CheckpointError(
            "tokenizer.ggml.merges contains an invalid merge",
            needed="two tokens separated by one space",
            found=repr(merge[:80]),
        )
    return left, right


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], unk_token: str | None) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in metadata:
        merges = [_pair(merge) for merge in _list_of(metadata, "tokenizer.ggml.merges", str)]
    else:
        scores = _list_of(metadata, "tokenizer.ggml.scores", (int, float), length=len(tokens))
        merges = _merges_by_score(tokens, scores, _kinds(metadata, tokens), vocabulary)
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    add_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    # Before every stretch of text between marks, and before a text that begins with a space too, as SentencePiece does.
    spell_space = normalizers.Replace(" ", "▁")
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spell_space]) if add_space else spell_space
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(
    tokens: Sequence[str], scores: Sequence[float], kinds: Sequence[int], vocabulary: Mapping[str, int]
) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose product scores best, so every way to make a token is a merge of its rank.

    Marks and bytes are made by no merge: text that reads like one stays text.
    """
    if sum(len(token) ** 2 for token in tokens) > MAX_CUT_CHARS:
        raise CheckpointError(
            "the tokens of the GGUF header's vocabulary are too long to be plausible",
            code=VOCABULARY_ABSURD,
            fix="download the file again",
        )
    made = [index for index, kind in enumerate(kinds) if kind not in (UNKNOWN, CONTROL, BYTE)]
    made.sort(key=scores.__getitem__, reverse=True)
    merges = []
    for token in map(tokens.__getitem__, made):
        for cut in range(len(token) - 1, 0, -1):
            left = token[:cut]
            if left in vocabulary and (right := token[cut:]) in vocabulary:
                merges.append((left, right))
    return merges


def _kinds(metadata: Mapping[str, Any], tokens: Sequence[str]) -> list[int]:
    if metadata.get("tokenizer.ggml.token_type") is None:
        return [NORMAL] * len(tokens)
    return _list_of(metadata, "tokenizer.ggml.token_type", int, length=len(tokens))


def _add_added_tokens(
    backend: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], roles: Mapping[str, str | None]
) -> None:
    """Tokens matched whole before anything is cut: control tokens and roles are special, user-defined ones are not."""
    special = {token for token in roles.values() if token is not None}
    swallowing = metadata.get("general.architecture") == "phi3" and metadata.get("tokenizer.ggml.model") == "llama"
    added: list[AddedToken] = []
    for token, kind in zip(tokens, _kinds(metadata, tokens), strict=True):
        marked = kind in (CONTROL, UNKNOWN) or token in special
        if token and (marked or kind == USER_DEFINED):
            swallows = swallowing and token not in _PHI3_KEEPS_SPACE
            added.append(AddedToken(token, normalized=False, special=marked, rstrip=swallows))
    backend.add_tokens(added)


def _list_of(
    metadata: Mapping[str, Any], key: str, kind: type | tuple[type, ...], *, length: int | None = None
) -> list[Any]:
    values = metadata.get(key)
    if values is None:
        raise CheckpointError(f"the GGUF header has no {key}", needed=key, fix="use a GGUF file with its tokenizer")
    listed = values if isinstance(values, list) else []
    if not listed or not all(issubclass(found, kind) for found in set(map(type, listed))):
        raise CheckpointError(f"{key} in the GGUF header is empty or of the wrong type")
    if length is not None and len(listed) != length:
        raise CheckpointError(
            f"{key} in the GGUF header is not as long as the vocabulary", needed=f"{length}", found=f"{len(listed)}"
        )
    return listed


def _role(metadata: Mapping[str, Any], key: str, tokens: Sequence[str]) -> str | None:
    index = metadata.get(key)
    if index is None:
        return None
    if not isinstance(index, int) or not 0 <= index < len(tokens):
        raise CheckpointError(
            f"{key} in the GGUF header is not in the vocabulary",
            needed=f"0 to {len(tokens) - 1}",
            found=repr(index),
        )
    return tokens[index]
