"""The families by name, and which of them a chat template speaks. One line here for a new family."""

from __future__ import annotations

import secrets
import string
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from holdfast.text.tools.call_format import ToolCallFormat
from holdfast.text.tools.families import generic, hermes, listed, llama3, mistral, pythonic, xml_calls
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
XML = Dialect(name="qwen3_coder", reader=xml_calls.XmlReader, call_format=hermes.FORMAT)
SEED = Dialect(name="seed_oss", reader=xml_calls.SeedReader, call_format=xml_calls.SEED)
GRANITE = Dialect(name="granite", reader=listed.GraniteReader, call_format=listed.GRANITE)
PHI = Dialect(name="phi4_mini_json", reader=listed.PhiReader, call_format=listed.PHI)
JAMBA = Dialect(name="jamba", reader=listed.JambaReader, call_format=listed.JAMBA)
XLAM = Dialect(name="xlam", reader=listed.XlamReader, call_format=generic.FORMAT)
PYTHONIC = Dialect(name="pythonic", reader=pythonic.PythonicReader, call_format=generic.FORMAT)
OLMO = Dialect(name="olmo3", reader=pythonic.OlmoReader, call_format=generic.FORMAT)
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
        "qwen3_coder": XML,
        "qwen3_xml": XML,
        "mimo": XML,
        "seed_oss": SEED,
        "granite": GRANITE,
        "phi4_mini_json": PHI,
        "jamba": JAMBA,
        "hunyuan_a13b": JAMBA,
        "xlam": XLAM,
        "pythonic": PYTHONIC,
        "llama4_pythonic": PYTHONIC,
        "olmo3": OLMO,
        "json": GENERIC,
    }
)
"""By vLLM's names where it has one."""

_OTHER_FORMS = ("<arg_key>", "<invoke", "<parameter ")
"""Between <tool_call> and </tool_call> these templates write something that is not read here."""
_BY_MARK: tuple[tuple[str, Dialect], ...] = (
    (xml_calls.SEED_OPEN, SEED),
    (xml_calls.FUNCTION, XML),
    (hermes.OPEN, HERMES),
    (mistral.CALLS, MISTRAL),
    (listed.GRANITE_MARK, GRANITE),
    (listed.JAMBA_OPEN, JAMBA),
    (pythonic.OLMO_OPEN, OLMO),
    ("func_name1(", PYTHONIC),
    (llama3.PYTHON_TAG, LLAMA3),
)
"""The first whose mark a template has."""


def dialect_of(template: str | None) -> Dialect | None:
    """The family whose marks a chat template writes; None: none that is known here."""
    if template is None or any(mark in template for mark in _OTHER_FORMS):
        return None
    found = next((dialect for mark, dialect in _BY_MARK if mark in template), None)
    if found is None and '"parameters": ' in template and "ipython" in template:
        return LLAMA3
    return found
