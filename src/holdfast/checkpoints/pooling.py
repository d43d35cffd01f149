"""How the files of an embedding model ask for its hidden states to become one vector: sentence-transformers' modules
or a GGUF header's pooling type. Reads, and judges nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from holdfast.checkpoints.bounded_files import read_json, read_small
from holdfast.errors import CheckpointError

MODULES = "modules.json"
POOLING_CONFIG = "1_Pooling/config.json"
"""Where sentence-transformers writes it; of files at the hub the one that is fetched."""
LAST = "last"
_MODES = {
    "lasttoken": LAST, "last_token": LAST, "mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max",
    "mean_sqrt_len_tokens": "mean_sqrt_len", "weightedmean_tokens": "weightedmean",
}  # fmt: skip
_GGUF = {1: "mean", 2: "cls", 3: LAST}
_OTHERS = ("Transformer", "Pooling", "Normalize")


def folder_pooling(folder: Path) -> str:
    """`last`, or in the field's words what else is asked for; `last` where nothing is said."""
    raw = read_small(folder / MODULES)
    try:
        modules = [] if raw is None else json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{folder / MODULES} is not JSON", found=str(error)) from error
    kinds = [one for one in modules if isinstance(one, dict)] if isinstance(modules, list) else []
    names = {str(one.get("type", "")).rpartition(".")[2]: str(one.get("path", "")) for one in kinds}
    more = [name for name in names if name not in _OTHERS]
    if "Pooling" not in names:
        return " and ".join(more) or LAST
    asked = read_json(folder / Path(names["Pooling"] or POOLING_CONFIG).parts[0] / "config.json")
    how = f"one that {names['Pooling'] or '1_Pooling'}/config.json should say, which is not there"
    return " and ".join([how if asked is None else _mode(asked), *more]) if more or asked is None else _mode(asked)


def _mode(asked: dict[str, Any]) -> str:
    """Both spellings: a name, or one switch for each."""
    named = asked.get("pooling_mode")
    if named is None:
        told = [name.removeprefix("pooling_mode_") for name, value in asked.items() if value is True]
        modes = [_MODES[name] for name in told if name in _MODES]
    else:
        modes = [_MODES.get(str(one), str(one)) for one in (named if isinstance(named, list) else [named])]
    return " with ".join(modes) or "mean"  # sentence-transformers' own default.


def gguf_pooling(pooling_type: object) -> str:
    return _GGUF.get(pooling_type, LAST) if isinstance(pooling_type, int) else LAST
