"""Of a plan that does not fit, each engine's command: of the first remedy that this engine runs.

Knows no engine by itself: whether one takes a command is what the command says. llama.cpp always needs a GGUF that is
made or found first, so that a file to be made does not pass a remedy over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.planner.advice.remedy import Remedy
from holdfast.planner.compat.gpu_kernels import lacks_engine
from holdfast.planner.compat.vllm_release import Vllm
from holdfast.planner.engines.command import Command
from holdfast.planner.engines.commands import ENGINES
from holdfast.planner.inputs.question import Question
from holdfast.planner.models.model_sources import without_weights


@dataclass(frozen=True, slots=True)
class RemedyCommands:
    commands: dict[str, Command]
    """By engine; of one that runs no remedy, why it does not run the best. Empty: there is nothing to run."""
    best: int | None
    """Which remedy: the first that the engine runs that was asked for, or else Holdfast; where it runs none, the first
    that any engine does."""


def remedy_commands(asked: Question, ways: Sequence[Remedy], vllm: Vllm) -> RemedyCommands:
    gpus, engine = [device.gpu for device in asked.machine.devices], asked.engine
    offered = {index: way.commands(vllm) for index, way in enumerate(ways) if way.fit.fits}
    taken: dict[str, int] = {}
    for name in ENGINES:
        # Another card's command helps nobody whose card the engine refuses, unless that engine is wanted.
        elsewhere = name != engine and lacks_engine(name, gpus) is not None
        there = {index: of[name] for index, of in offered.items() if not elsewhere or ways[index].kind != "bigger_gpu"}
        found = _first(ways, there, any_file=bool(without_weights(asked.model)))
        if found is not None:
            taken[name] = found
    best = taken.get(engine or "holdfast")
    if best is None and engine is None:
        best = min(taken.values(), default=None)
    if best is None:
        return RemedyCommands({}, None)
    of_each = {name: taken.get(name, best) for name in ENGINES}
    return RemedyCommands(
        {name: replace(offered[index][name], remedy=index + 1) for name, index in of_each.items()}, best
    )


def _first(ways: Sequence[Remedy], commands: Mapping[int, Command], *, any_file: bool) -> int | None:
    """That can be taken as it is; else one for which a file has to be made, as for llama.cpp in any case. `any_file`:
    of the model that was asked for there is none yet, and another model is no answer to that."""
    runs = {index: command for index, command in commands.items() if command.text and not command.lacks}
    any_file = any_file or all(command.engine == "llama.cpp" for command in runs.values())
    ready = [index for index, command in runs.items() if any_file or (ways[index].available and command.available)]
    return next(iter(ready or runs), None)
