"""Text to token ids and back, with the names transformers uses: what `LLM.get_tokenizer()` returns.

Owns one model's tokenizer and its chat templates. Does not know where files come from beyond ModelFiles, nor any
limit on a text's length: that is the door's business.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, overload

from tokenizers import Tokenizer as Backend

from holdfast.errors import CheckpointError, RequestError, UnsupportedOptionError
from holdfast.text.templates.template import compile_template, missing_template
from holdfast.text.tokenizer import gguf_vocab
from holdfast.text.tokenizer.files.loader import load_tokenizer, refusing
from holdfast.text.tokenizer.token_bytes import TokenPieces, pieces_of
from holdfast.units import shorten

if TYPE_CHECKING:
    from holdfast.checkpoints.files import ModelFiles

TOKENIZER_FAILED = "HF304"
_TENSOR_OPTIONS = (
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_assistant_tokens_mask",
    "sanitize_control_tokens",
    "tokenizer_kwargs",
)
"""Options of transformers' apply_chat_template that make no sense here; refused, not passed to the template."""


class Tokenizer:
    """Never changes but for `chat_template`, and is safe to share between threads."""

    def __init__(
        self,
        backend: Backend,
        *,
        bos_token: str | None = None,
        eos_token: str | None = None,
        unk_token: str | None = None,
        pad_token: str | None = None,
        chat_template: str | None = None,
        named_templates: Mapping[str, str] | None = None,
    ) -> None:
        self._backend = backend
        self.bos_token = bos_token
        self.eos_token = eos_token
        self.unk_token = unk_token
        self.pad_token = pad_token
        self._chat_template = chat_template
        self._named_templates = dict(named_templates or {})
        self.special_ids = frozenset(
            index for index, token in backend.get_added_tokens_decoder().items() if token.special
        )
        self.pieces: TokenPieces | None = pieces_of(backend)
        """Token to bytes; None for decoders that need the whole text."""

    # ---- making one

    @classmethod
    def from_files(cls, files: ModelFiles, *, chat_template: str | None = None) -> Tokenizer:
        """`chat_template` (the text of one) wins over whatever the model brings."""
        if files.tokenizer_json is not None:
            tokenizer = cls.from_tokenizer_json(
                files.tokenizer_json, files.tokenizer_config, chat_template=files.chat_template
            )
        elif files.header is not None:
            tokenizer = cls.from_gguf_metadata(files.header.metadata, chat_template=files.chat_template)
        else:
            raise CheckpointError(
                f"{files.name} has no tokenizer",
                needed="tokenizer.json in the model's folder, or a GGUF file with its vocabulary",
                found=str(files.path),
                fix="add the model's tokenizer.json, or start with skip_tokenizer_init and send token ids",
            )
        if chat_template is not None:
            tokenizer.chat_template = chat_template
        return tokenizer

    @classmethod
    def from_gguf_metadata(cls, metadata: Mapping[str, Any], *, chat_template: str | None = None) -> Tokenizer:
        vocabulary = gguf_vocab.build(metadata)
        prefix = "tokenizer.chat_template."
        named = {
            key.removeprefix(prefix): text
            for key, text in metadata.items()
            if key.startswith(prefix) and isinstance(text, str)
        }
        stored = metadata.get("tokenizer.chat_template")
        return cls(
            vocabulary.backend,
            bos_token=vocabulary.bos_token,
            eos_token=vocabulary.eos_token,
            unk_token=vocabulary.unk_token,
            pad_token=vocabulary.pad_token,
            chat_template=chat_template or (stored if isinstance(stored, str) else None),
            named_templates=named,
        )

    @classmethod
    def from_tokenizer_json(
        cls, path: Path, config: Mapping[str, Any] | None = None, *, chat_template: str | None = None
    ) -> Tokenizer:
        """`config` is tokenizer_config.json: the tokens with a role, and whether a text gets a beginning and an end."""
        backend = load_tokenizer(path)
        settings = dict(config or {})
        roles = {role: _token_text(settings.get(f"{role}_token")) for role in ("bos", "eos", "unk", "pad")}
        if isinstance(settings.get("add_bos_token"), bool):
            add_eos = bool(settings.get("add_eos_token", False))
            gguf_vocab.set_ends(
                backend, roles["bos"] if settings["add_bos_token"] else None, roles["eos"] if add_eos else None
            )
        named = _named_templates(settings.get("chat_template"))
        return cls(
            backend,
            bos_token=roles["bos"],
            eos_token=roles["eos"],
            unk_token=roles["unk"],
            pad_token=roles["pad"],
            chat_template=chat_template or named.get("default"),
            named_templates=named,
        )

    # ---- text and ids

    def encode(self, text: str, add_special_tokens: bool = True, split_special_tokens: bool = False) -> list[int]:
        return self.encode_batch(
            [text], add_special_tokens=add_special_tokens, split_special_tokens=split_special_tokens
        )[0]

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, split_special_tokens: bool = False
    ) -> list[list[int]]:
        """With `split_special_tokens` a text that spells a special token stays text: for what strangers wrote."""
        for text in texts:
            _check_text(text)
        with refusing(_cannot_encode):
            backend = self._plain_backend if split_special_tokens else self._backend
            # Also for one text: the library's form for a single one keeps every other thread waiting until it is done.
            encoded = backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)
        return [each.ids for each in encoded]

    def encode_pair(
        self,
        first: str,
        second: str,
        chat_template: str | None = None,
        variables: Mapping[str, Any] = MappingProxyType({}),
    ) -> list[int]:
        """Two texts as one prompt, as the tokenizer joins them; `chat_template`: as that does, from the roles query and
        document, with `variables`, whose names are none of `apply_chat_template`'s own."""
        _check_text(first)
        _check_text(second)
        if chat_template is not None:
            messages = [{"role": "query", "content": first}, {"role": "document", "content": second}]
            return list(self.apply_chat_template(messages, chat_template=chat_template, **variables))
        with refusing(_cannot_encode):
            encoded = self._backend.encode_batch_fast([(first, second)], add_special_tokens=True)
        return list(encoded[0].ids)

    @cached_property
    def _plain_backend(self) -> Backend:
        """A copy, because the setting is the library's own and other threads may be encoding."""
        plain = Backend.from_str(self._backend.to_str())
        plain.encode_special_tokens = True
        return plain

    def decode(self, token_ids: int | Sequence[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        with refusing(_cannot_decode):
            return self._backend.decode(ids, skip_special_tokens=skip_special_tokens)

    def batch_decode(self, sequences: Sequence[Sequence[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(ids, skip_special_tokens=skip_special_tokens) for ids in sequences]

    def __call__(self, text: str | Sequence[str], add_special_tokens: bool = True) -> dict[str, Any]:
        if isinstance(text, str):
            ids = self.encode(text, add_special_tokens=add_special_tokens)
            return {"input_ids": ids, "attention_mask": [1] * len(ids)}
        rows = self.encode_batch(text, add_special_tokens=add_special_tokens)
        return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}

    # ---- chat

    @property
    def chat_template(self) -> str | None:
        return self._chat_template

    @chat_template.setter
    def chat_template(self, source: str | None) -> None:
        """A template set by hand is used for everything, with tools or without."""
        self._chat_template = source
        self._named_templates = {}

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        return_dict: bool = False,
        **variables: Any,
    ) -> Any:
        """The prompt as token ids, or as text with tokenize=False. Further names go to the template as variables.

        A list of conversations gives a list of prompts. Ids come as a plain list, ready for `prompt_token_ids`;
        return_dict=True wraps them as transformers 5 does by default.
        """
        template = compile_template(self.template_source(chat_template, tools))
        given = self.template_variables(variables)

        def render(messages: Sequence[Mapping[str, Any]]) -> str:
            return template.render(
                messages,
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                variables=given,
            )

        batched = bool(conversation) and isinstance(conversation[0], list | tuple)
        prompts: Any = [render(messages) for messages in conversation] if batched else render(conversation)
        if not tokenize:
            return prompts
        # The template writes its own beginning; adding another would double it.
        encoded = self(prompts, add_special_tokens=False)
        return encoded if return_dict else encoded["input_ids"]

    def template_variables(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """What a template finds by name besides the conversation: `given`, and the tokens with a role."""
        for name in _TENSOR_OPTIONS:
            if given.get(name):
                raise UnsupportedOptionError(f"{name} is not supported", fix=f"leave {name} out", field=name)
        kept = {name: value for name, value in given.items() if name not in _TENSOR_OPTIONS}
        return {**self.special_tokens_map, **kept}

    def template_source(self, given: str | None = None, tools: object = None) -> str:
        """The template that a conversation is rendered with: `given` is one, or the name of one of the model's own."""
        if given is not None:
            return self._named_templates.get(given, given)
        if tools is not None and "tool_use" in self._named_templates:
            return self._named_templates["tool_use"]
        if self._chat_template is None:
            raise missing_template()
        return self._chat_template

    # ---- the vocabulary

    @property
    def backend(self) -> Backend:
        return self._backend

    @property
    def vocab_size(self) -> int:
        """Without tokens added on top, as transformers counts; `len()` counts all."""
        return self._backend.get_vocab_size(with_added_tokens=False)

    def __len__(self) -> int:
        return self._backend.get_vocab_size(with_added_tokens=True)

    @cached_property
    def longest_token_chars(self) -> int:
        """Characters of text that one token can stand for, so that a text's length bounds its tokens from below."""
        longest = max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)
        # A normalizer may draw characters together: canonical composition makes one of up to four.
        return longest if gguf_vocab.keeps_length(self._backend.normalizer) else 4 * longest

    @cached_property
    def ids_end(self) -> int:
        """One above the greatest id that has a token: the embedding needs at least so many rows."""
        return max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1) + 1

    def get_vocab(self) -> dict[str, int]:
        return self._backend.get_vocab(with_added_tokens=True)

    @overload
    def convert_ids_to_tokens(self, ids: int) -> str | None: ...
    @overload
    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]: ...
    def convert_ids_to_tokens(self, ids: int | Sequence[int]) -> str | list[str | None] | None:
        if isinstance(ids, int):
            return self._backend.id_to_token(ids)
        return [self._backend.id_to_token(index) for index in ids]

    def convert_tokens_to_ids(self, tokens: str | Sequence[str]) -> int | list[int | None] | None:
        if isinstance(tokens, str):
            return self._id_of(tokens)
        return [self._id_of(token) for token in tokens]

    def _id_of(self, token: str | None) -> int | None:
        return None if token is None else self._backend.token_to_id(token)

    def bytes_of(self, token_id: int) -> bytes | None:
        """What the token adds to a text, also where that is half a character; None where only whole texts decode."""
        return None if self.pieces is None else self.pieces.bytes_of(token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special_ids

    @property
    def all_special_ids(self) -> list[int]:
        return sorted(self.special_ids)

    @property
    def all_special_tokens(self) -> list[str]:
        return [token for token in map(self._backend.id_to_token, self.all_special_ids) if token is not None]

    @property
    def special_tokens_map(self) -> dict[str, str]:
        roles: dict[Literal["bos_token", "eos_token", "unk_token", "pad_token"], str | None] = {
            "bos_token": self.bos_token,
            "eos_token": self.eos_token,
            "unk_token": self.unk_token,
            "pad_token": self.pad_token,
        }
        return {role: token for role, token in roles.items() if token is not None}

    @property
    def bos_token_id(self) -> int | None:
        return self._id_of(self.bos_token)

    @property
    def eos_token_id(self) -> int | None:
        return self._id_of(self.eos_token)

    @property
    def unk_token_id(self) -> int | None:
        return self._id_of(self.unk_token)

    @property
    def pad_token_id(self) -> int | None:
        return self._id_of(self.pad_token)


def _check_text(text: object) -> None:
    if not isinstance(text, str):
        raise RequestError(f"text must be a string, not {type(text).__name__}", field="prompt")
    try:
        text.encode()
    except UnicodeEncodeError as problem:
        raise RequestError(
            "the text contains half of a surrogate pair, which is not a character",
            found=f"{problem.object[problem.start]!r} at character {problem.start}",
            fix="send valid Unicode",
            field="prompt",
        ) from problem


def _cannot_encode(problem: BaseException) -> RequestError:
    return RequestError(
        "the model's tokenizer fails on this text",
        code=TOKENIZER_FAILED,
        found=shorten(str(problem), 200),
        fix="send other text, or token ids; if it fails on many texts, the model's tokenizer.json is faulty",
        field="prompt",
    )


def _cannot_decode(problem: BaseException) -> RequestError:
    if isinstance(problem, OverflowError | TypeError):
        return RequestError("token ids must be non-negative integers", found=shorten(str(problem)), field="token_ids")
    return RequestError(
        "the model's tokenizer fails on these token ids",
        code=TOKENIZER_FAILED,
        found=shorten(str(problem), 200),
        fix="send other ids; if it fails on many, the model's tokenizer.json is faulty",
        field="token_ids",
    )


def _token_text(token: object) -> str | None:
    """tokenizer_config.json names a token as text or as an object with its content."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_templates(stored: object) -> dict[str, str]:
    """One template, or a list of named ones."""
    if isinstance(stored, str):
        return {"default": stored}
    if not isinstance(stored, list):
        return {}
    return {
        entry["name"]: entry["template"]
        for entry in stored
        if isinstance(entry, Mapping) and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)
    }
