"""How a command's engine cuts layers into pipeline stages: evenly, or as a variable before the command tells it. What
is wrong with such a variable, and the one that makes a command fit GPUs that differ. Finds no cut itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.doctor.build_finding import changed, found
from holdfast.doctor.command.parse import ServerCommand
from holdfast.doctor.findings import Evidence, Finding, Fix
from holdfast.errors import ConfigurationError

if TYPE_CHECKING:
    from holdfast.planner.advice.remedy import Remedy
    from holdfast.planner.fit.search import Question
    from holdfast.planner.report.answer import PlanAnswer


def with_own_cut(command: ServerCommand, question: Question) -> Question:
    """As its engine cuts it; evenly where what it is told is not a cut, which `ill_cut` says."""
    from holdfast.planner.engines.layer_partition import as_told, evenly

    try:
        return as_told(question, command.engine, command.environment)
    except ConfigurationError:
        return evenly(question)


def ill_cut(command: ServerCommand, question: Question) -> Finding | None:
    """A variable that names other stages, or other layers, than the command and the model have."""
    from holdfast.planner.engines.layer_partition import as_told, variable_of

    try:
        as_told(question, command.engine, command.environment)
    except ConfigurationError as error:
        variable = variable_of(command.engine)
        assert variable is not None, "it was read"
        return found(
            "bad_flag",
            "not_memory",
            "high",
            what=error.message,
            why=f"it needs {error.needed}: the engine refuses to start",
            evidence=[Evidence(line=f"{variable}={error.found}", source="command")],
            fixes=[changed(command, {variable: None}, "layers are cut evenly then")],
        )
    return None


def other_cut(command: ServerCommand, told: PlanAnswer) -> list[Fix]:
    """Of a command that does not fit as its engine cuts it: the cut that fits, of the same GPUs; none there is."""
    from holdfast.planner.advice.remedy import planned, with_settings
    from holdfast.planner.engines.command import shown_gpus
    from holdfast.planner.engines.commands import commands
    from holdfast.planner.engines.layer_partition import said, variable_of

    variable, cut = variable_of(command.engine), told.question.settings.stage_cut
    if variable is None or cut is None or told.question.settings.pipeline_parallel == 1:
        return []
    fit = planned(with_settings(told.question, stage_cut=None))
    if fit is None or not fit.stage_ends or command.environment.get(variable) == said(fit):
        return []
    # The largest GPU is the first stage's, wherever the machine has it.
    order = dict(word.split("=", 1) for word in shown_gpus(fit).split())
    if order.keys() & command.environment.keys():
        return []  # What numbers its GPUs have is its own.
    if commands(fit, sequences=fit.limits.max_num_seqs, vllm=told.vllm)[command.engine].lacks:
        return []
    layers = " and ".join(said(fit).split(","))
    why = f"{layers} layers in its stages, by what their GPUs hold; planned: it fits"
    price = "a stage with more layers takes longer"
    return [changed(command, {**order, variable: said(fit)}, why, price, basis="planned")]


def without_own_cut(command: ServerCommand, way: Remedy) -> dict[str, str | None]:
    """With a change that has other stages or layers than the command tells its engine of: that is left out."""
    from holdfast.planner.engines.layer_partition import variable_of

    variable = variable_of(command.engine)
    told = variable is not None and variable in command.environment
    return {variable: None} if told and variable is not None and not way.fit.stage_ends else {}
