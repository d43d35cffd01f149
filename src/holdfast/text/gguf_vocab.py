"""A GGUF header's vocabulary turned into a tokenizers pipeline, equal to the one the model was trained with.

Owns the rules by which `tokenizer.ggml.*` names a splitting, merging and decoding scheme. Knows nothing of files,
chat templates or of how the ids are used.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from holdfast.errors import CheckpointError

VOCABULARY_ABSURD = "HF233"
MAX_TOKENS = 1 << 21
"""Eight times the largest vocabulary known."""
MAX_TOKEN_CHARS = 1024
MAX_CUT_CHARS = 1 << 30
"""Characters compared to find merges by score, which grow with the square of a token's length: seconds."""

UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4
"""Values of tokenizer.ggml.token_type that change how a token is matched."""

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEFAULT_SPLITS = (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
)
"""What the format's own tools cut by, one after the other, where a header says "default" or nothing."""
_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ByteLevelScheme:
    """How one family of byte-level vocabularies cuts text before merging."""

    split: Callable[[], Any]
    whole_pieces: bool = False
    """A piece that is itself a token is taken whole, whatever its merges say."""
    nfc: bool = False
    add_bos: bool = False
    """Where the header does not say."""


def _gpt2_split() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm_split() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_split()])


def _regex_split(*patterns: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            *(pre_tokenizers.Split(Regex(pattern), behavior="isolated") for pattern in patterns),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


_GPT2 = ByteLevelScheme(split=_gpt2_split)
_LLAMA3 = ByteLevelScheme(split=lambda: _regex_split(_LLAMA3_SPLIT), whole_pieces=True, add_bos=True)
BYTE_LEVEL_SCHEMES: dict[str, ByteLevelScheme] = {
    "default": ByteLevelScheme(split=lambda: _regex_split(*_DEFAULT_SPLITS)),
    "gpt-2": _GPT2,
    "smollm": ByteLevelScheme(split=_smollm_split),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": ByteLevelScheme(split=lambda: _regex_split(_QWEN2_SPLIT), nfc=True),
}


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
    try:
        if model == "gpt2":
            scheme = _byte_level_scheme(metadata)
            backend, add_bos = _byte_level(metadata, tokens, scheme), scheme.add_bos
        elif model == "llama":
            backend, add_bos = _sentencepiece(metadata, tokens, roles["unk"]), True
        else:
            raise CheckpointError(
                f"the GGUF header names tokenizer {model!r}, which is not supported",
                needed="tokenizer.ggml.model gpt2 or llama",
                found=repr(model),
                fix="use a folder with tokenizer.json instead",
            )
        _add_added_tokens(backend, metadata, tokens, roles)
    except CheckpointError:
        raise
    except Exception as problem:  # the library raises bare Exception for merges and tokens that do not belong together
        raise CheckpointError(
            "the GGUF header's vocabulary does not make a tokenizer", found=str(problem), fix="fetch the file again"
        ) from problem
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


def _check_sizes(tokens: Sequence[str]) -> None:
    longest = max(map(len, tokens))
    if len(tokens) > MAX_TOKENS or longest > MAX_TOKEN_CHARS:
        raise CheckpointError(
            "the GGUF header's vocabulary is absurdly large",
            code=VOCABULARY_ABSURD,
            needed=f"at most {MAX_TOKENS} tokens of at most {MAX_TOKEN_CHARS} characters",
            found=f"{len(tokens)} tokens, the longest of {longest} characters",
        )


def set_ends(backend: Tokenizer, bos: str | None, eos: str | None) -> None:
    """What `add_special_tokens` puts around a text, replacing whatever the pipeline did before."""
    around = [(token, backend.token_to_id(token)) for token in (bos, eos) if token is not None]
    # Given as a list: a token with spaces or colons in it would be torn apart in the one-string form.
    single = [*([bos] if bos is not None else []), "$A", *([eos] if eos is not None else [])]
    backend.post_processor = processors.TemplateProcessing(single=single, pair=None, special_tokens=around)


def _byte_level_scheme(metadata: Mapping[str, Any]) -> ByteLevelScheme:
    name = metadata.get("tokenizer.ggml.pre", "default")
    scheme = BYTE_LEVEL_SCHEMES.get(name) if isinstance(name, str) else None
    if scheme is None:
        raise CheckpointError(
            f"the GGUF header names pre-tokenizer {name!r}, which is not supported",
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
            "tokenizer.ggml.merges holds something that is no merge",
            needed="two tokens with one space between",
            found=repr(merge[:80]),
        )
    return left, right


def _sentencepiece(metadata: Mapping[str, Any], tokens: Sequence[str], unk_token: str | None) -> Tokenizer:
    vocabulary = {token: index for index, token in enumerate(tokens)}
    if "tokenizer.ggml.merges" in metadata:
        merges = [_pair(merge) for merge in _list_of(metadata, "tokenizer.ggml.merges", str)]
    else:
        scores = _list_of(metadata, "tokenizer.ggml.scores", (int, float), length=len(tokens))
        merges = _merges_by_score(vocabulary, tokens, scores)
    backend = Tokenizer(BPE(vocab=vocabulary, merges=merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    add_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="▁", prepend_scheme="first" if add_space else "never", split=False
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if add_space:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    return backend


def _merges_by_score(
    vocabulary: Mapping[str, int], tokens: Sequence[str], scores: Sequence[float]
) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose product scores best, so every way to make a token is a merge of its rank."""
    if sum(len(token) ** 2 for token in tokens) > MAX_CUT_CHARS:
        raise CheckpointError(
            "the tokens of the GGUF header's vocabulary are absurdly long",
            code=VOCABULARY_ABSURD,
            fix="fetch the file again",
        )
    ranked: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        ways = []
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in vocabulary and right in vocabulary:
                ways.append((left, right))
        ways.sort(key=lambda way: (vocabulary[way[0]], vocabulary[way[1]]))
        ranked.extend((score, len(left), len(right), left, right) for left, right in ways)
    ranked.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in ranked]


def _add_added_tokens(
    backend: Tokenizer, metadata: Mapping[str, Any], tokens: Sequence[str], roles: Mapping[str, str | None]
) -> None:
    """Tokens matched whole before anything is cut: control tokens and roles are special, user-defined ones are not."""
    kinds = metadata.get("tokenizer.ggml.token_type")
    special = {token for token in roles.values() if token is not None}
    added: list[AddedToken] = []
    if kinds is None:
        kinds = [CONTROL if token in special else 1 for token in tokens]
    else:
        kinds = _list_of(metadata, "tokenizer.ggml.token_type", int, length=len(tokens))
    for token, kind in zip(tokens, kinds, strict=True):
        if not token:
            continue
        if kind in (CONTROL, UNKNOWN) or token in special:
            added.append(AddedToken(token, normalized=False, special=True))
        elif kind == USER_DEFINED:
            added.append(AddedToken(token, normalized=False, special=False))
    backend.add_tokens(added)


def _list_of(
    metadata: Mapping[str, Any], key: str, kind: type | tuple[type, ...], *, length: int | None = None
) -> list[Any]:
    values = metadata.get(key)
    if values is None:
        raise CheckpointError(f"the GGUF header has no {key}", needed=key, fix="use a file with its tokenizer inside")
    listed = values.tolist() if hasattr(values, "tolist") else list(values)
    if not listed or not all(isinstance(value, kind) for value in listed):
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
            f"{key} in the GGUF header is outside the vocabulary",
            needed=f"0 to {len(tokens) - 1}",
            found=repr(index),
        )
    return tokens[index]
