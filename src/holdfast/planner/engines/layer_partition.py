"""The variable that tells vLLM and SGLang how many layers each pipeline stage has: what one says of a model, and what a
plan writes before a command. Chooses no cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from holdfast.engine_profiles.profile import profile
from holdfast.errors import ConfigurationError
from holdfast.planner.fit.result import Plan
from holdfast.planner.inputs.question import Question
from holdfast.planner.sizing.stages import PP_NOT_POSSIBLE
from holdfast.units import counted, shorten


def variable_of(engine: str) -> str | None:
    """None: it has none."""
    named = profile(engine).data.get("stage-layers-variable")
    return None if named is None else str(named)


def as_told(question: Question, engine: str, environment: Mapping[str, str]) -> Question:
    """A question of a command that is run as it is, with these variables before it: such an engine cuts layers evenly
    unless it is told. Of other engines as it is. Raises ConfigurationError for what the engine would not start with."""
    variable = variable_of(engine)
    if variable is None:
        return question
    written = environment.get(variable)
    return evenly(question) if written is None else _with_cut(question, _read(question, variable, written))


def evenly(question: Question) -> Question:
    """As engines cut layers that are told nothing."""
    return _with_cut(question, ())


def _with_cut(question: Question, cut: tuple[int, ...]) -> Question:
    return replace(question, settings=replace(question.settings, stage_cut=cut))


def _read(question: Question, variable: str, written: str) -> tuple[int, ...]:
    layers, stages = len(question.model.spec.layers), question.settings.pipeline_parallel
    words = [word.strip() for word in written.split(",")]
    cut = tuple(int(word) for word in words) if all(word.isdecimal() for word in words) else ()
    if len(cut) != stages or sum(cut) != layers or 0 in cut:
        raise ConfigurationError(
            f"{variable} does not say how many layers each stage has",
            code=PP_NOT_POSSIBLE,
            needed=f"{counted(stages, 'number')} with commas between them, {counted(layers, 'layer')} together",
            found=shorten(written, 60),
            fix=f"leave {variable} out: layers are cut evenly then",
            field="pipeline_parallel_size",
        )
    return cut


def said(cut: Plan) -> str:
    """The layers of each stage as such a variable has them."""
    return ",".join(str(len(one)) for one in cut.stage_layers)


def partition(engine: str, fit: Plan) -> str:
    """Before a command, the variable with the layers of each stage; empty: as many as the engine gives it by itself."""
    return f"{variable_of(engine)}={said(fit)} " if fit.stage_ends else ""
