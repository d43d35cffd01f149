"""`Planner`: the plan of one combination of settings on this machine, as the server itself would make it: with layers
and experts in RAM or on a disk where a model is too large. Refuses what the server would refuse; measures nothing.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from holdfast.config.engine import EngineConfig
from holdfast.config.plan import PlanConfig
from holdfast.errors import HoldfastError
from holdfast.footprint.cpu import KV_STORE_USUAL_BYTES
from holdfast.hardware import compiled_kernels
from holdfast.planner.api import question_of
from holdfast.planner.engines.layer_partition import as_told
from holdfast.planner.fit.expert_placement import place_larger, place_larger_by_hand, wants_offload
from holdfast.planner.fit.placement import may_stream
from holdfast.planner.fit.result import Plan
from holdfast.planner.fit.search import fit
from holdfast.planner.inputs.question import Question
from holdfast.planner.serve.ranks import refuse_with_ranks
from holdfast.planner.serve.streamed import least_streamed
from holdfast.planner.sizing.default_limits import check_step
from holdfast.tune.configuration import ServerConfiguration

PARALLEL_SIZES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")
_OF_A_QUESTION = (*PARALLEL_SIZES, "quantization", "nvme_path")
"""Settings that change the model or the machine of a question; the others are only its limits."""
_LIMITS = {
    "max_num_seqs": "max_num_seqs",
    "max_num_batched_tokens": "max_num_batched_tokens",
    "max_model_len": "max_model_len",
    "kv_cache_dtype": "kv_cache_dtype",
    "gpu_memory_utilization": "utilization",
}
"""By our names, as a question calls them."""


class Planner:
    """Plans of one model on this machine. `settings`: what holds for every server."""

    def __init__(self, model: str, *, engine: str, settings: Mapping[str, Any]) -> None:
        self._model, self._engine = model, engine
        # Neither engine takes several GPUs by itself; a question without sizes would look for the fewest that do.
        self._settings = dict.fromkeys(PARALLEL_SIZES, 1) | dict(settings)
        self._questions: dict[tuple[tuple[str, Any], ...], Question | HoldfastError] = {}

    def plan(self, configuration: ServerConfiguration) -> Plan:
        """Raises where it is refused; `fits` says the rest."""
        changes = dict(configuration.changes)
        question = self._question(tuple((name, changes[name]) for name in _OF_A_QUESTION if name in changes))
        settings: dict[str, Any] = {of: changes[name] for name, of in _LIMITS.items() if name in changes}
        if "kv_store" in changes:
            settings["kv_store_size"] = KV_STORE_USUAL_BYTES
        question = replace(question, settings=replace(question.settings, **settings))
        if self._engine == "holdfast":
            check_step(question.settings.max_num_seqs, question.settings.max_num_batched_tokens)
            self._check(question, changes)
        return _placed(question)

    def _question(self, changes: tuple[tuple[str, Any], ...]) -> Question:
        """Once for all that differ in limits only; a refusal too."""
        if changes not in self._questions:
            try:
                config = PlanConfig.from_arguments(model=self._model, **self._settings | dict(changes))
                question = replace(question_of(config), engine=self._engine)
                # A trial is started without a variable of its own: what is set here reaches its server.
                self._questions[changes] = as_told(question, self._engine, os.environ)
            except HoldfastError as error:
                self._questions[changes] = error
        found = self._questions[changes]
        if isinstance(found, HoldfastError):
            raise found
        return found

    def _check(self, question: Question, changes: Mapping[str, Any]) -> None:
        """Settings that `holdfast serve` refuses together, before it plans."""
        known = {field.name for field in fields(EngineConfig)}
        asked = {name: value for name, value in self._settings.items() if name in known} | dict(changes)
        asked["device"] = "cuda" if question.machine.kind == "gpu" else "cpu"
        config = EngineConfig.from_arguments(**asked | {"model": self._model})
        stored = question.model.canonical
        refuse_with_ranks(config, question.model.spec, stored, compiled_kernels=compiled_kernels())


def _placed(question: Question) -> Plan:
    """On the device, or with layers or experts that wait in RAM or on a disk, as far as that fits there."""
    if wants_offload(question):
        by_hand = place_larger_by_hand(question)
        assert by_hand is not None
        return by_hand.plan
    found, machine = fit(question), question.machine
    if found.fits:
        return found
    if machine.kind == "cpu" and machine.nvme_path is not None:
        streamed = least_streamed(found)
        file = None if streamed is None or streamed.own is None else streamed.own.streamed
        fits = streamed is not None and file is not None and file.file_bytes <= (machine.nvme_bytes or 0)
        return streamed if streamed is not None and fits else found
    if question.engine == "holdfast" and len(found.ranks) == question.settings.data_parallel == 1:
        # Of several GPUs an engine takes one, which layers come to as if it were alone.
        question = replace(question, machine=replace(machine, devices=(found.ranks[0].device,), aside=()))
    placed = place_larger(question) if may_stream(question) else None
    return placed.plan if placed is not None and placed.fits else found
