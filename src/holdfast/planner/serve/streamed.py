"""The plan of a model that is larger than RAM: as few layers as need be are read from a disk for every step."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

from holdfast.config import EngineConfig
from holdfast.errors import ConfigurationError, DoesNotFitError
from holdfast.hardware import filesystem_type
from holdfast.observability.decisions import Decision
from holdfast.planner.fit.placement import STREAMED_TOKENS
from holdfast.planner.fit.result import Plan
from holdfast.planner.fit.search import fit
from holdfast.planner.sizing.kv_cost import largest
from holdfast.units import format_bytes

IN_MEMORY = ("tmpfs", "ramfs")
USUAL_FOLDER = Path("/var/tmp")
"""On a disk of most machines, and everybody may write there; not of most containers with a root that is read-only."""


def with_streamed_layers(found: Plan, config: EngineConfig) -> Plan:
    """`found` does not fit; nor does what is returned, where streaming does not help."""
    assert config.nvme_path is not None
    total, free = _room(config.nvme_path)
    plan, layers = least_streamed(found), len(found.question.model.spec.layers)
    if plan is None:
        return found
    streamed = plan.engine.streamed
    assert streamed is not None
    room = free if config.nvme is None else min(free, config.nvme)
    if streamed.file_bytes > room:
        raise DoesNotFitError(
            f"the layers that do not fit in RAM do not fit in {config.nvme_path} either",
            needed=f"{format_bytes(streamed.file_bytes)} for {len(streamed.layers)} of {layers} layers",
            found=f"{format_bytes(free)} free of {format_bytes(total)}"
            + ("" if config.nvme is None else f", of which --nvme allows {format_bytes(config.nvme)}"),
            fix="--nvme-path on a larger disk, or a larger --nvme or --ram",
            field="nvme_path",
        )
    return plan


def least_streamed(found: Plan) -> Plan | None:
    """With as few layers on a disk as need be, on a CPU; None: it does not fit with all of them there either."""
    question, layers = found.question, len(found.question.model.spec.layers)

    def planned(streamed: int, length: int | None) -> Plan:
        settings = replace(question.settings, streamed_layers=streamed, max_model_len=length)
        return fit(replace(question, settings=settings))

    asked = question.settings.max_model_len
    if not planned(layers, asked).fits:
        return None
    wanted = asked or min(question.model.spec.max_position, STREAMED_TOKENS)
    length = wanted if planned(layers, wanted).fits else None
    resident = largest(0, layers - 1, lambda resident: planned(layers - resident, length).fits)
    plan = planned(layers - resident, asked)
    assert plan.engine.streamed is not None
    streamed = plan.engine.streamed
    reason = "the others fit in RAM; these are read from the disk of --nvme-path for every step"
    value = f"{len(streamed.layers)} of {layers}, {format_bytes(streamed.weights_bytes)}"
    return replace(
        plan, decisions=(*plan.decisions, Decision("streamed_layers", value, reason, "planner", lowered=True))
    )


def disk_room(folder: str, most: int | None) -> int:
    """Bytes that layers may take there; `most`: as --nvme says."""
    free = _room(folder)[1]
    return free if most is None else min(free, most)


def _room(folder: str) -> tuple[int, int]:
    """Bytes of the disk, and those that are free."""
    try:
        os.listdir(folder)  # A file has a disk as well.
        found = shutil.disk_usage(Path(folder))
    except OSError as error:
        raise ConfigurationError(
            f"--nvme-path: {error.strerror or error}: {folder}",
            needed="a folder on a fast disk",
            fix="another --nvme-path" if Path(folder).exists() else f"mkdir -p {folder}",
            field="nvme_path",
        ) from error
    if (kind := filesystem_type(Path(folder))) in IN_MEMORY:
        raise ConfigurationError(
            f"--nvme-path: {folder} is {kind}: what is written there takes the memory that layers shall leave free",
            needed="a folder on a disk",
            found=kind,
            fix=another_folder(folder),
            field="nvme_path",
        )
    return found.total, found.free


def another_folder(folder: str) -> str:
    """What to do where this one does not do."""
    writable = os.access(USUAL_FOLDER, os.W_OK | os.X_OK) and filesystem_type(USUAL_FOLDER) not in IN_MEMORY
    if writable and Path(folder).resolve() != USUAL_FOLDER.resolve():
        return f"--nvme-path {USUAL_FOLDER}"
    return "--nvme-path with a folder of a disk that can be written to, or leave it out"
