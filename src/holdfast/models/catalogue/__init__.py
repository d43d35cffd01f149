"""Shapes of widely served models, for planning one that is not on this machine. Owns the JSON files beside it.

An entry holds what defines the shape in the model's public config.json, under the same names; what it means is the
families' business (`models.registry`), and what is stored on disk or on the hub always outranks it.

A file is a list of entries: `name`, `hub_id`, `aliases`, `parameters` (as published, tied tensors once, without
draft layers; left out where no exact figure is known), `checked` (a public text whose figures were compared with
ours; left out where none was found), `context_checked` (another, of the context alone, where the first one is older
than what the maker says now), `config`, and for a quantized variant `like`: the entry whose config it changes.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from holdfast.errors import ConfigurationError
from holdfast.units import shorten

UNKNOWN_MODEL = "HF142"
_NAMES_SHOWN = 5
_NAME_LIMIT_CHARS = 200
_SEPARATORS = re.compile(r"[\s_:-]+")


@dataclass(frozen=True, slots=True, kw_only=True)
class CatalogueEntry:
    name: str
    hub_id: str
    aliases: tuple[str, ...]
    config: Mapping[str, Any]
    """As config.json has it; read it, do not write to it."""
    parameters: int | None
    """As published; None: no exact figure is known."""
    source: str
    """Where the maker publishes the config; it decides, and nobody asked it for this entry."""
    checked: str | None
    """A public text that gives the same figures; None: nobody compared them yet."""
    context_checked: str | None = None
    """Where the context was compared with another text than the rest."""

    @property
    def provenance(self) -> str:
        """What the shapes rest on, in words; no more than was done."""
        if self.checked is None:
            return f"not checked against a public copy yet; see {self.source}"
        context = "" if self.context_checked is None else f"; the context against {self.context_checked}"
        return f"checked against {self.checked}{context}"

    @property
    def quantized(self) -> bool:
        return self.config.get("quantization_config") is not None


def entries() -> tuple[CatalogueEntry, ...]:
    return _catalogue()[0]


def lookup(name: str) -> CatalogueEntry | None:
    """By name, alias or hub id, however cased and separated: `llama3.1:8b` and `Llama-3.1-8B` are the same."""
    return _catalogue()[1].get(_normal(name))


def find(name: str) -> CatalogueEntry:
    """Like `lookup`, but an unknown name is refused, with the nearest known ones."""
    found = lookup(name)
    if found is None:
        raise _unknown(name)
    return found


def _normal(name: str) -> str:
    return _SEPARATORS.sub("", name.casefold().strip()[:_NAME_LIMIT_CHARS].removesuffix(":latest"))


def _unknown(name: str) -> ConfigurationError:
    known, by_name = _catalogue()
    close = difflib.get_close_matches(_normal(name), by_name, n=3 * _NAMES_SHOWN, cutoff=0.5)
    nearest = list(dict.fromkeys(by_name[match].name for match in close))[:_NAMES_SHOWN]
    shown = shorten(name)
    return ConfigurationError(
        f"no model named {shown} is in the catalogue",
        code=UNKNOWN_MODEL,
        needed=("a known model, the closest: " + ", ".join(nearest))
        if nearest
        else f"one of {len(known)} known models",
        found=shown,
        fix="use a hub id (owner/name), a folder or a .gguf file",
        field="model",
    )


@cache
def _catalogue() -> tuple[tuple[CatalogueEntry, ...], dict[str, CatalogueEntry]]:
    rows: list[dict[str, Any]] = []
    for path in sorted(Path(__file__).parent.glob("*.json")):
        rows += json.loads(path.read_bytes())
    by_name = {row["name"]: row for row in rows}
    known = tuple(_entry(row, by_name) for row in rows)
    return known, _names(known)


def _entry(row: Mapping[str, Any], by_name: Mapping[str, Mapping[str, Any]]) -> CatalogueEntry:
    base = by_name[row["like"]]["config"] if "like" in row else {}
    return CatalogueEntry(
        name=row["name"],
        hub_id=row["hub_id"],
        aliases=tuple(row.get("aliases", ())),
        config=MappingProxyType({**base, **row["config"]}),
        parameters=row.get("parameters"),
        source=f"https://huggingface.co/{row['hub_id']}/blob/main/config.json",
        checked=row.get("checked"),
        context_checked=row.get("context_checked"),
    )


def _names(known: tuple[CatalogueEntry, ...]) -> dict[str, CatalogueEntry]:
    """Every declared name, and the last part of hub ids: `Llama-3.1-8B-Instruct` without its maker."""
    names: dict[str, CatalogueEntry] = {}
    for entry in known:
        declared = (entry.name, entry.hub_id, *entry.aliases)
        for name in (*declared, *(name.rpartition("/")[2] for name in declared)):
            other = names.setdefault(_normal(name), entry)
            if other is not entry:
                raise ValueError(f"catalogue: {name!r} names both {other.name} and {entry.name}")
    return names
