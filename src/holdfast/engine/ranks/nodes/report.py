"""What a node says of itself when it joins, and what the head compares: version, sizes, the checkpoint's files."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import secrets
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from holdfast.checkpoints import ModelFiles
from holdfast.config import EngineConfig
from holdfast.config.nodes import WRONG_NODES
from holdfast.engine.ranks.nodes.messages import NodeReport
from holdfast.errors import ConfigurationError
from holdfast.hardware import compiled_kernels, memory, processor
from holdfast.hardware.nvidia import NvidiaGpu, probe
from holdfast.planner.serve.shares.gpu_ranks import gpus_of_ranks
from holdfast.records import Failure
from holdfast.units import shorten

HEADER_BYTES = 1 << 20
"""Of a file of weights: names, shapes and places of its tensors are there, or the beginning of them."""
AGENT = secrets.token_hex(16)
MOST_NAMED = 3
"""Files that a message names."""
MOST_LISTED = 128
"""Entries of a checkpoint: all of them are heard before the secret is proven (wire.py), whatever their names are."""
NAME_CHARS, SENTENCE_CHARS = 255, 2000
"""Of what another machine says, that logs and errors repeat."""


def report_of(
    config: EngineConfig, files: ModelFiles, host: str = "", checkpoint: dict[str, str] | None = None
) -> NodeReport:
    """`host`: empty of a node that has yet to join, which may not know it. `checkpoint`: its digests, where they have
    been made. Raises what is wrong with this node: fewer GPUs than it has ranks."""
    machine = memory()
    return NodeReport(
        node=config.node_rank,
        nodes=config.nnodes,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        version=own_version(),
        sources=sources_digest(),
        checkpoint=digests_for(config, files) if checkpoint is None else checkpoint,
        host=host,
        name=platform.node()[:255],
        agent=AGENT,
        pid=os.getpid(),
        cores=config.threads or processor().cores,
        total_bytes=machine.total_bytes,
        free_bytes=machine.available_bytes,
        kernels=compiled_kernels(),
        gpus=_gpus_of(config),
    )


def _gpus_of(config: EngineConfig) -> list[NvidiaGpu]:
    """Of this node's ranks, with what is free on them now."""
    if config.device != "cuda":
        return []
    ranks = config.tensor_parallel_size * config.pipeline_parallel_size // config.nnodes
    found = gpus_of_ranks(probe().gpus, ranks, nodes=config.nnodes)
    return [replace(gpu, name=gpu.name[:NAME_CHARS], processes=gpu.processes[:MOST_NAMED]) for gpu in found]


def own_version() -> str:
    return str(sys.modules["holdfast"].__version__)  # Which imports all of this, and is imported by nobody below it.


@functools.cache
def sources_digest() -> str:
    """Of all Python files of this installation. What is compiled is left out: that differs between machines."""
    folder, found = Path(str(sys.modules["holdfast"].__file__)).parent, hashlib.blake2b(digest_size=8)
    for path in sorted(folder.rglob("*.py")):
        found.update(f"{path.relative_to(folder)}\0".encode() + hashlib.blake2b(path.read_bytes()).digest())
    return found.hexdigest()


def other_protocol(version: str, head_version: str, protocol: int, head_protocol: int) -> ConfigurationError:
    """Of a node that could not understand what its head says."""
    # Each is the word of another machine on one of the two sides, which may have proven nothing yet.
    ours, theirs = (shorten(said) or "of another version" for said in (head_version, version))
    return ConfigurationError(
        f"holdfast {theirs} of this node and holdfast {ours} of the head do not understand each other",
        code=WRONG_NODES,
        needed=f"holdfast {ours} (protocol {head_protocol})",
        found=f"holdfast {theirs} (protocol {protocol})",
        fix="install the same version of Holdfast on all nodes",
        field="nnodes",
    )


def shown_report(report: NodeReport) -> NodeReport:
    """With texts that logs and errors may repeat. Names of files are compared as they are."""
    return msgspec.structs.replace(
        report,
        name=shorten(report.name, NAME_CHARS),
        host=shorten(report.host, NAME_CHARS),
        version=shorten(report.version),
        sources=shorten(report.sources),
        gpus=[replace(gpu, name=shorten(gpu.name), uuid=shorten(gpu.uuid)) for gpu in report.gpus],
    )


def shown_failure(failure: Failure) -> Failure:
    """Of another machine, with texts that logs and errors may repeat."""
    said = {name: text for name, text in msgspec.structs.asdict(failure).items() if text is not None}
    return msgspec.structs.replace(failure, **{name: shorten(text, SENTENCE_CHARS) for name, text in said.items()})


def digests_for(config: EngineConfig, files: ModelFiles) -> dict[str, str]:
    return checkpoint_digests(files, dummy=config.load_format == "dummy")


def checkpoint_digests(files: ModelFiles, *, dummy: bool) -> dict[str, str]:
    """Of what makes two checkpoints the same as far as sizes and headers tell. `dummy`: only of the config. Of many
    files a few neighbours have one entry, the same ones on all nodes whose files have the same names."""
    settings = msgspec.json.encode(files.config, order="deterministic")
    found = {"config": hashlib.blake2b(settings, digest_size=16).hexdigest()}
    weights = () if dummy else sorted(files.weights, key=lambda path: path.name)
    each = max(1, -(-len(weights) // MOST_LISTED))
    for first in range(0, len(weights), each):
        together = weights[first : first + each]
        more = f" and {len(together) - 1} more" if len(together) > 1 else ""
        found[together[0].name + more] = _digest(together)
    return found


def _digest(paths: Sequence[Path]) -> str:
    found, nbytes = hashlib.blake2b(digest_size=16), 0
    for path in paths:
        with path.open("rb") as file:
            header, size = file.read(HEADER_BYTES), path.stat().st_size
        found.update(f"{path.name}\0{size}\0".encode() + hashlib.blake2b(header).digest())
        nbytes += size
    return f"{nbytes:,} bytes, {found.hexdigest()}"


def refuse_unequal(head: NodeReport, node: NodeReport, ranks: range) -> None:
    """Raises ConfigurationError for what of a node is not as it is on the head."""
    who = f"node {node.node} ({node.name}, {named_ranks(ranks)})"
    for field, words in (
        ("nodes", "nnodes"),
        ("tensor_parallel_size", "tensor_parallel_size"),
        ("pipeline_parallel_size", "pipeline_parallel_size"),
        ("version", "holdfast's version"),
    ):
        ours, theirs = getattr(head, field), getattr(node, field)
        if ours != theirs:
            raise _unequal(f"{who} has another {words} than the head", f"{words} {ours}", str(theirs))
    if head.sources != node.sources:
        raise _unequal(
            f"{who} has holdfast {node.version} as the head has, but other files of it",
            f"Holdfast's own files with digest {head.sources}",
            node.sources or "none",
        )
    if not node.kernels:
        raise _unequal(f"{who} has no compiled kernels", "an installation with a C compiler", "none")
    _refuse_other_files(who, head.checkpoint, node.checkpoint)


def _refuse_other_files(who: str, ours: dict[str, str], theirs: dict[str, str]) -> None:
    different = [name for name in sorted({*ours, *theirs}) if ours.get(name) != theirs.get(name)]
    if not different:
        return
    shown = different[:MOST_NAMED]
    more = f" and {len(different) - MOST_NAMED} more" if len(different) > MOST_NAMED else ""
    needed, found = (
        "; ".join(f"{shorten(name, NAME_CHARS)}: {shorten(side.get(name, 'no such file'))}" for name in shown) + more
        for side in (ours, theirs)
    )
    raise _unequal(f"{who} has another checkpoint than the head", needed, found)


def named_ranks(ranks: range) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks[0]} to {ranks[-1]}"


def _unequal(message: str, needed: str, found: str) -> ConfigurationError:
    return ConfigurationError(
        message,
        code=WRONG_NODES,
        needed=needed,
        found=found[:1000],
        fix="start all nodes with the same files, version and sizes",
        field="nnodes",
    )
