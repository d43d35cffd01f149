"""How much longer a text may become on its way through a tokenizer's steps, told from tokenizer.json before it is run.

A step that puts ten characters for one is harmless; eight of them in a row make a gigabyte of ten characters, and the
library ends the process when it finds no memory. So the factors of all steps are multiplied, and a product beyond a
bound is refused. Factors are of bytes, for the worst text. Steps that only compose or decompose characters, change case
or leave something out are not counted: doing so again changes nothing more.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from holdfast.errors import CheckpointError
from holdfast.text.tokenizer.files.regex_cost import check_pattern
from holdfast.text.tokenizer.files.regex_syntax import PatternError
from holdfast.units import shorten

GROWS = "HF235"
PATTERN = "HF236"
MAX_GROWTH = 512
"""Published tokenizers stay below 300 by this count (mT5's), and below 20 on any real text."""
MAX_STEPS = 64
MAX_TEMPLATE_PIECES = 64
MAX_TEMPLATE_IDS = 256
_SEQUENCES = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}

Step = Mapping[str, Any]


def check_steps(pipeline: Mapping[str, Any]) -> None:
    """`pipeline`: tokenizer.json without its vocabulary. Raises CheckpointError that names the step."""
    before = [*_steps(pipeline, "normalizer"), *_steps(pipeline, "pre_tokenizer")]
    for steps in (before, list(_steps(pipeline, "decoder"))):
        _check_count(steps)
        product, grown = 1.0, []
        for where, step in steps:
            factor = _factor(where, step)
            product *= factor
            if factor > 1:
                grown.append(f"{where} ({factor:.3g})")
            if not product <= MAX_GROWTH:
                raise _grows(f"{where} may make the text too long", " x ".join(grown))
    _check_processor(pipeline.get("post_processor"))


def _steps(pipeline: Mapping[str, Any], stage: str) -> Iterator[tuple[str, Step]]:
    """One by one, each with its place for people: normalizer 3 (Replace)."""
    inner = _SEQUENCES[stage]

    def flat(step: Any, depth: int) -> Iterator[Step]:
        if step is None:
            return
        if not isinstance(step, dict) or depth > MAX_STEPS:
            raise CheckpointError(f"the {stage} in tokenizer.json cannot be read", needed="an object with a type")
        if isinstance(step.get(inner), list):
            for one in step[inner]:
                yield from flat(one, depth + 1)
        else:
            yield step

    for number, step in enumerate(flat(pipeline.get(stage), 0), 1):
        yield f"{stage} {number} ({shorten(step.get('type'), 30)})", step


def _check_count(steps: list[tuple[str, Step]]) -> None:
    if len(steps) > MAX_STEPS:
        raise _grows(f"tokenizer.json has {len(steps)} steps", f"{len(steps)} steps")


def _grows(message: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"tokenizer.json is rejected: {message}",
        code=GROWS,
        needed=f"at most {MAX_STEPS} steps that make the text at most {MAX_GROWTH} times as long",
        found=shorten(found, 200),
        fix="use the tokenizer.json of the model's publisher",
    )


# ---- normalizers, pre-tokenizers, decoders


def _factor(where: str, step: Step) -> float:
    kind = step.get("type")
    shortest = _shortest_match(where, step["pattern"]) if "pattern" in step else 0
    known = _FACTORS.get(kind) if isinstance(kind, str) else None
    if callable(known):
        return known(step, shortest)
    return known or 1.0


def _shortest_match(where: str, pattern: Any) -> int:
    """Bytes of text that the pattern takes at least."""
    if isinstance(pattern, dict) and isinstance(pattern.get("String"), str):
        return _bytes(pattern["String"])
    if not isinstance(pattern, dict) or not isinstance(pattern.get("Regex"), str):
        return 0
    try:
        return check_pattern(pattern["Regex"])
    except PatternError as problem:
        raise CheckpointError(
            f"tokenizer.json is rejected: the regular expression of {where} may not terminate, or is not supported",
            code=PATTERN,
            needed="a pattern without backreferences, with one way through each loop",
            found=f"{problem}: {shorten(pattern['Regex'])}",
            fix="use the tokenizer.json of the model's publisher",
        ) from problem


def _bytes(text: Any) -> int:
    return len(text.encode("utf-8", "replace")) if isinstance(text, str) else 0


def _replace(step: Step, shortest: int) -> float:
    put = _bytes(step.get("content"))
    return max(1.0, put / shortest) if shortest else 1.0 + put


def _precompiled(step: Step, shortest: int) -> float:
    """SentencePiece's table: length of a search tree, the tree, and what is put, each text ended by a zero."""
    try:
        raw = base64.b64decode(step.get("precompiled_charsmap") or "", validate=True)
    except (binascii.Error, ValueError, TypeError):
        raw = b""
    tree = int.from_bytes(raw[:4], "little")
    if len(raw) < 4 or tree > len(raw) - 4:  # The library would take memory for a tree of that size.
        raise CheckpointError(
            "the precompiled_charsmap in tokenizer.json cannot be used",
            needed="a base64 table of the size in its header",
            found=f"{len(raw)} bytes, {tree} of them for the search tree",
            fix="download the file again",
        )
    return max(1.0, float(max(map(len, raw[4 + tree :].split(b"\0")))))


def _metaspace(step: Step, shortest: int) -> float:
    mark = _bytes(step.get("replacement") or step.get("str_rep"))
    return max(1.0, 2.0 * mark)  # For each space, and before each piece.


def _byte_level(step: Step, shortest: int) -> float:
    return 4.0 if step.get("add_prefix_space", True) else 2.0


_FACTORS: dict[str, float | Callable[[Step, int], float]] = {
    "Replace": _replace,
    "Prepend": lambda step, shortest: 1.0 + _bytes(step.get("prepend")),
    "Precompiled": _precompiled,
    "BertNormalizer": 2.0,  # spaces around each Chinese character
    "ByteLevel": _byte_level,
    "Metaspace": _metaspace,
    "WordPiece": 2.0,
    "BPEDecoder": 2.0,
    "CTC": 2.0,
}
"""Factors of steps that make a text longer, by the names that tokenizer.json uses."""


# ---- post-processors


def _check_processor(step: Any, depth: int = 0) -> int:
    """Counts what is put around a text, in all processors together."""
    if not isinstance(step, dict):
        return 0
    if depth > MAX_STEPS:
        raise _grows("the post_processor is nested too deeply", f"more than {MAX_STEPS}")
    inner = step.get("processors")
    if isinstance(inner, list):
        if len(inner) > MAX_STEPS:
            raise _grows(f"the post_processor has {len(inner)} steps", f"{len(inner)} steps")
        added = sum(_check_processor(one, depth + 1) for one in inner)
    else:
        added = _check_template(step)
    if added > MAX_TEMPLATE_IDS:
        raise _grows(f"the post_processor adds {added} tokens to a text", f"{added} tokens")
    return added


def _check_template(step: Step) -> int:
    tokens = step.get("special_tokens")
    sizes = {
        name: len(token["ids"])
        for name, token in (tokens.items() if isinstance(tokens, dict) else ())
        if isinstance(token, dict) and isinstance(token.get("ids"), list)
    }
    most = 0
    for name in ("single", "pair"):
        pieces = step.get(name)
        if not isinstance(pieces, list):
            continue
        texts = [piece["Sequence"].get("id") for piece in pieces if _has(piece, "Sequence")]
        marks = [piece["SpecialToken"].get("id") for piece in pieces if _has(piece, "SpecialToken")]
        if len(pieces) > MAX_TEMPLATE_PIECES or len(set(map(str, texts))) < len(texts):
            raise _grows("the template of the post_processor repeats the text", f"{len(texts)} texts in {name}")
        most = max(most, sum(sizes.get(mark, 1) for mark in marks if isinstance(mark, str)))
    return most


def _has(piece: Any, name: str) -> bool:
    return isinstance(piece, dict) and isinstance(piece.get(name), dict)
