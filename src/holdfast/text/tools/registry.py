"""The families by name, and which of them a chat template speaks. One line here for a new family."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from holdfast.text.tools import generic, hermes, llama3, mistral
from holdfast.text.tools.call_format import ToolCallFormat
from holdfast.text.tools.parser import CallReader


def _long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def _nine_characters() -> str:
    """Mistral's templates take no other."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class Dialect:
    name: str
    reader: type[CallReader]
    call_format: ToolCallFormat
    make_id: Callable[[], str] = _long_id

    def form_in(self, template: str | None) -> ToolCallFormat:
        """How calls are written by a model with this template."""
        if self.call_format is mistral.LISTED and template is not None and mistral.ARGS in template:
            return mistral.NAMED
        return self.call_format


HERMES = Dialect(name="hermes", reader=hermes.HermesReader, call_format=hermes.FORMAT)
LLAMA3 = Dialect(name="llama3_json", reader=llama3.Llama3Reader, call_format=llama3.FORMAT)
MISTRAL = Dialect(name="mistral", reader=mistral.MistralReader, call_format=mistral.LISTED, make_id=_nine_characters)
GENERIC = Dialect(name="json", reader=generic.GenericReader, call_format=generic.FORMAT)

DIALECTS: Mapping[str, Dialect] = MappingProxyType(
    {
        "hermes": HERMES,
        "qwen": HERMES,
        "qwen2": HERMES,
        "qwen2_5": HERMES,
        "qwen3": HERMES,
        "qwen3_json": HERMES,
        "granite4": HERMES,
        "llama3_json": LLAMA3,
        "llama4_json": LLAMA3,
        "llama3": LLAMA3,
        "mistral": MISTRAL,
        "json": GENERIC,
    }
)
"""By vLLM's names where it has one."""

_OTHER_FORMS = ("<function=", "<arg_key>", "<invoke", "<parameter")
"""Between <tool_call> and </tool_call> these templates write something else than JSON."""


def dialect_of(template: str | None) -> Dialect | None:
    """The family whose marks a chat template writes; None: none that is known here."""
    if template is None or any(mark in template for mark in _OTHER_FORMS):
        return None
    if hermes.OPEN in template:
        return HERMES
    if mistral.CALLS in template:
        return MISTRAL
    if llama3.PYTHON_TAG in template or ('"parameters": ' in template and "ipython" in template):
        return LLAMA3
    return None
