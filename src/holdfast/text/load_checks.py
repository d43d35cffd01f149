"""At load: what silently breaks people later. Looks at model, tokenizer and template together, changes nothing.

HFW01  the vocabulary has ids that the embedding has no row for: a request with one of them would be refused
HFW02  the tokenizer's end of text is not among the ends the model stops at, or there is no end at all
HFW03  the tokenizer begins a text with another token than the model's config names
HFW04  there is no chat template
HFW05  the chat template writes marks that are no tokens of this vocabulary: it belongs to another model
HFW06  the chat template closes an answer with a token the model does not stop at: answers would run on
HFW07  the chat template cannot be rendered
HFW08  the GGUF header does not say how text is cut before merging: tokens may differ from those in training
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.checkpoints.files import ModelFiles
from holdfast.errors import RequestError
from holdfast.models.spec import ModelSpec
from holdfast.text.tokenizer.tokenizer import Tokenizer

_MARKS = re.compile(r"<\|[^|<>\s]{1,40}\|>|<(?:start|end)_of_turn>|\[/?INST\]")
_ANSWER = "An answer made for looking."
_PROBES = (
    [
        {"role": "system", "content": "A system."},
        {"role": "user", "content": "A question."},
        {"role": "assistant", "content": _ANSWER},
    ],
    [{"role": "user", "content": "A question."}, {"role": "assistant", "content": _ANSWER}],
)
"""The second for templates that refuse a system message."""


@dataclass(frozen=True, slots=True)
class TextWarning:
    code: str
    message: str
    fix: str

    def __str__(self) -> str:
        return f"{self.message} [{self.code}]\n  fix:    {self.fix}"


def check_text(spec: ModelSpec, tokenizer: Tokenizer, files: ModelFiles) -> list[TextWarning]:
    """`files` are the model's own, whose generation config names the ends; the tokenizer may come from elsewhere."""
    return [
        *_check_vocabulary(spec, tokenizer),
        *_check_cutting(files),
        *_check_ends(spec, tokenizer, files),
        *_check_template(spec, tokenizer),
    ]


def _check_vocabulary(spec: ModelSpec, tokenizer: Tokenizer) -> Iterator[TextWarning]:
    if tokenizer.ids_end > spec.vocab_size:
        yield TextWarning(
            "HFW01",
            f"the tokenizer has ids up to {tokenizer.ids_end - 1}, but the embedding has {spec.vocab_size} rows",
            "use the tokenizer that came with this model; a fine-tune that added tokens must also resize its embedding",
        )


def _check_cutting(files: ModelFiles) -> Iterator[TextWarning]:
    if files.tokenizer_json is not None or files.header is None:
        return
    metadata = files.header.metadata
    if metadata.get("tokenizer.ggml.model") == "gpt2" and metadata.get("tokenizer.ggml.pre", "default") == "default":
        yield TextWarning(
            "HFW08",
            "the GGUF header names no pre-tokenizer, so the default one is used: "
            "tokens may differ from those the model was trained with",
            "use a newer GGUF file of this model, or a folder with its tokenizer.json",
        )


def _check_ends(spec: ModelSpec, tokenizer: Tokenizer, files: ModelFiles) -> Iterator[TextWarning]:
    source = "generation_config.json" if files.generation_config is not None else "the model's config"
    eos = tokenizer.eos_token_id
    if not spec.eos_token_ids:
        if eos is None:
            message = "neither the model nor the tokenizer has an EOS token: generation stops only at max_tokens"
        else:
            message = f"{source} has no EOS token, but the tokenizer has {tokenizer.eos_token!r} ({eos})"
        yield TextWarning("HFW02", message, "set eos_token_id in generation_config.json, or send stop_token_ids")
    elif eos is not None and eos not in spec.eos_token_ids:
        yield TextWarning(
            "HFW02",
            f"{source} has the EOS token {_named(tokenizer, spec.eos_token_ids)}, "
            f"but the tokenizer has {tokenizer.eos_token!r} ({eos})",
            f"add {eos} to eos_token_id in generation_config.json, or send stop_token_ids: [{eos}]",
        )
    bos = tokenizer.bos_token_id
    if bos is not None and spec.bos_token_id is not None and bos != spec.bos_token_id:
        yield TextWarning(
            "HFW03",
            f"the model's config has the BOS token {_named(tokenizer, (spec.bos_token_id,))}, "
            f"but the tokenizer has {tokenizer.bos_token!r} ({bos})",
            "correct bos_token in tokenizer_config.json or bos_token_id in config.json",
        )


def _check_template(spec: ModelSpec, tokenizer: Tokenizer) -> Iterator[TextWarning]:
    if tokenizer.chat_template is None:
        yield TextWarning(
            "HFW04",
            "the model has no chat template: /v1/chat/completions and chat() will be refused",
            "start with --chat-template FILE.jinja, or use /v1/completions",
        )
        return
    try:
        rendered = _render_probe(tokenizer)
    except RequestError as problem:
        yield TextWarning("HFW07", problem.message, "start with --chat-template FILE.jinja")
        return
    foreign = [mark for mark in dict.fromkeys(_MARKS.findall(rendered)) if _is_foreign(tokenizer, mark)]
    if foreign:
        yield TextWarning(
            "HFW05",
            f"the chat template uses {', '.join(foreign)}, which is not in the vocabulary",
            "use the model's own template: start with --chat-template FILE.jinja",
        )
        return
    closing = _closing_token(tokenizer, rendered)
    if spec.eos_token_ids and closing is not None and closing not in spec.eos_token_ids:
        yield TextWarning(
            "HFW06",
            f"the chat template ends an assistant message with {_named(tokenizer, (closing,))}, "
            f"but the model stops only at {_named(tokenizer, spec.eos_token_ids)}",
            f"add {closing} to eos_token_id in generation_config.json, or send stop_token_ids: [{closing}]",
        )


def _render_probe(tokenizer: Tokenizer) -> str:
    with_system, without_system = _PROBES
    try:
        return str(tokenizer.apply_chat_template(with_system, tokenize=False))
    except RequestError:
        return str(tokenizer.apply_chat_template(without_system, tokenize=False))


def _is_foreign(tokenizer: Tokenizer, mark: str) -> bool:
    if tokenizer.convert_tokens_to_ids(mark) is not None:
        return False
    # Llama 2 and the first Mistrals were trained with [INST] as plain text: no token is missing there.
    return not mark.endswith("INST]") or tokenizer.pieces is None or tokenizer.pieces.byte_level


def _closing_token(tokenizer: Tokenizer, rendered: str) -> int | None:
    """The special token right behind the answer, blanks aside."""
    _, found, behind = rendered.rpartition(_ANSWER)
    if not found or not behind.strip():
        return None
    first = tokenizer.encode(behind.strip(), add_special_tokens=False)[0]
    return first if tokenizer.is_special(first) else None


def _named(tokenizer: Tokenizer, ids: tuple[int, ...]) -> str:
    return ", ".join(f"{tokenizer.convert_ids_to_tokens(index)!r} ({index})" for index in ids)
