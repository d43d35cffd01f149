"""Flags to change after a run that failed: a command for the concurrency that was safe and the lengths that were asked,
planned for this machine before it is named. Measures nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from holdfast.bench.client.answers import TimedAnswer
from holdfast.bench.measure.load_points import LoadPoint
from holdfast.bench.measure.samples import ServerSample
from holdfast.errors import HoldfastError
from holdfast.units import MIB

P99 = 99
ENGINES = ("holdfast", "vllm", "sglang", "llama.cpp")
BUDGET_SHARE = 0.9
"""Of what is free without the server, as a server of ours takes by itself."""


def advice(
    model: str,
    *,
    url: str,
    ended: bool = False,
    engine: str | None,
    asked: tuple[int, int],
    local: bool,
    answers: Sequence[TimedAnswer],
    samples: Sequence[ServerSample],
    safe: LoadPoint | None,
    peak_in_flight: int,
    too_few: bool = False,
    command: str | None = None,
) -> list[str]:
    """Of a run that failed. Where nothing can be planned, why. `asked`: tokens of prompts and outputs, for a server
    that does not count them. `ended`: the server did, during the run. `too_few`: answers to tell any load by.
    `command`: how the server was started; its other flags are kept."""
    good = [answer for answer in answers if answer.good]
    why = f"why: holdfast doctor {url}, or holdfast doctor LOGFILE of its log"
    if ended:
        return ["why it ended: holdfast doctor LOGFILE, of its log; restart it with a fix: holdfast rescue -- COMMAND"]
    if not good:
        return [f"no flags can be told: nothing was answered; {why}"]
    if too_few:
        return ["no flags can be told of so few requests: a longer --peak, or more --requests"]
    if safe is None:
        return [f"no flags can be told: not even the lowest load passed; {why}"]
    fewer = safe.at_once < peak_in_flight
    found = [f"send at most {safe.at_once} requests at once to one server, or add servers"] if fewer else []
    if not local:
        return [*found, "no flags can be planned here: the server is on another machine; there: holdfast plan MODEL"]
    if engine not in ENGINES:
        return [*found, "no flags can be told: the server does not say which engine it is"]
    prompt = int(np.percentile([answer.prompt_tokens for answer in good], P99))
    output = int(np.percentile([answer.output_tokens for answer in good], P99))
    lengths = (prompt or asked[0], output or asked[1])
    planned = planned_flags(model, engine=engine, at_once=safe.at_once, lengths=lengths, samples=samples)
    return found + [said + with_own_flags(command, text) for said, text in planned]


def planned_flags(
    model: str, *, engine: str, at_once: int, lengths: tuple[int, int], samples: Sequence[ServerSample]
) -> list[tuple[str, str]]:
    """What is said, and the command behind it, or nothing."""
    from holdfast.planner.api import plan

    prompt, output = lengths
    traffic: dict[str, Any] = {"concurrency": at_once, "prompt": prompt, "output": output, "max_num_seqs": at_once}
    try:
        answer = plan(model, engine=engine, **traffic)
        if not answer.fits and (without := _without_the_server(samples)):
            answer = plan(model, engine=engine, **traffic, **without)
    except HoldfastError as error:
        return [(f"no flags can be planned: {error.message}", "")]
    said = f"{at_once} x {prompt + output:,} tokens"
    command = answer.commands.get(engine)
    if answer.fits and command is not None and command.text:
        return [(f"planned to hold {said}: ", command.text)]
    if command is not None and command.text:
        return [(f"{said} do not fit as they are; planned to fit ({answer.commands_of}): ", command.text)]
    return [(f"{said} do not fit on this machine, and no setting changes that: holdfast plan {model} says more", "")]


def with_own_flags(own: str | None, planned: str) -> str:
    """The server's own command with what was planned changed in it, so that its key, its port and all else stay."""
    from holdfast.doctor.command.parse import parse_command

    started, wanted = parse_command(own or ""), parse_command(planned)
    if started is None or wanted is None or started.engine != wanted.engine or started.model != wanted.model:
        return planned
    return started.with_changes(
        {f"--{flag.name}": flag.value or "" for flag in wanted.flags} | dict(wanted.environment)
    )


def _without_the_server(samples: Sequence[ServerSample]) -> dict[str, Any]:
    """What it holds now is free once it is started anew. Of a GPU the planner asks the driver itself: who holds its
    memory is left to people."""
    from holdfast.hardware.probe import memory

    held = next((sample.ram_bytes for sample in reversed(samples) if sample.ram_bytes is not None), None)
    if held is None or any(sample.vram_bytes is not None for sample in samples):
        return {}
    return {"ram": f"{int(BUDGET_SHARE * (memory().available_bytes + held)) // MIB}MiB"}
