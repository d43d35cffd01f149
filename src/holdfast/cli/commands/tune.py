"""`holdfast tune`: the settings of a server that answer the most of a traffic in time, found by measurement. Words in,
a report or JSON out; the work is in the room `tune`.

Exit codes: 0 a command to keep that holds the SLO, 1 none held it, 2 usage error, 3 no server ran, 4 none left the
headroom, so that nothing is kept, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import sys
import time
from functools import cache
from typing import TYPE_CHECKING, Any

from holdfast.cli.commands.bench import sigterm_as_ctrl_c
from holdfast.cli.output import say, say_error, say_json
from holdfast.errors import ConfigurationError, HoldfastError, ModelError
from holdfast.units import counted, format_duration, shorten

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from holdfast.bench.load.load import Arrival
    from holdfast.tune.measure import TrialSettings
    from holdfast.tune.progress import TuneProgress
    from holdfast.tune.record import TrialRecord
    from holdfast.tune.result import TuneResult
    from holdfast.tune.space.kv_tiers import CommonPrefixes

HELP = """Find the settings of a server that answer the most of your traffic within an SLO.

The planner rules out what cannot fit or cannot be best; the rest is measured: a server is started with the settings,
the busiest part of the traffic is replayed, and the best few are measured again in turns with the default. Ends with
the command to keep and its gain, or says that nothing is better than the default."""

USAGE = "holdfast tune MODEL --traffic FILE --slo ttft=500ms,itl=50ms [--minutes N] [--engine vllm] [options]"

EXAMPLES = """examples:
  holdfast tune smollm2 --traffic access.log --slo ttft=500ms,itl=50ms      half an hour, by replaying a log
  holdfast tune MODEL --traffic t.jsonl --slo e2e.p95=20s --minutes 120     more time: smaller gains can be proven
  holdfast tune MODEL --traffic t.jsonl --slo ttft=1s --lossy               also an FP8 KV cache and quantized weights
  holdfast tune MODEL --traffic t.jsonl --slo ttft=1s --speed 2             how it would be with twice the traffic
  holdfast tune MODEL --traffic t.jsonl --slo ttft=1s --engine vllm --serve-flags "--enforce-eager"
  holdfast tune MODEL --traffic t.jsonl --slo ttft=1s --resume tune.trials  may be interrupted, and run again to go on
  holdfast tune MODEL --traffic t.jsonl --slo ttft=1s --json > tuned.json   for programs (docs/tune.md)

environment: HOLDFAST_API_KEY for a server with a key
exit codes: 0 a command to keep, 1 no configuration held the SLO, 2 usage error, 3 no server ran,
  4 none left the headroom free and nothing is kept (HF167), 130 interrupted
"""
KEEP, MISSED, UNUSABLE, NOT_RUNNING, TOO_TIGHT, INTERRUPTED = 0, 1, 2, 3, 4, 130
TRIALS_WANTED, SHORTEST_TRIAL_S, LONGEST_TRIAL_S = 50, 8.0, 30.0
"""A trial's length where none is set: so that about so many fit, with time to start servers, within these."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="MODEL", help="as holdfast serve takes it")
    parser.add_argument(
        "--traffic", required=True, metavar="FILE", help="access log or JSON lines with times and tokens"
    )
    parser.add_argument(
        "--slo", required=True, metavar="SLO", help="ttft=500ms,itl=50ms; p99 where nothing else is said"
    )
    parser.add_argument("--engine", choices=("holdfast", "vllm"), default="holdfast", help="default: holdfast")
    parser.add_argument("--minutes", type=_positive, default=30.0, metavar="N", help="for all of it (default: 30)")
    parser.add_argument("--trial", metavar="TIME", help="of traffic in one trial (default: 8s to 30s, by --minutes)")
    parser.add_argument(
        "--speed", default="auto", metavar="X", help="of the replay; auto: until the default no longer holds"
    )
    parser.add_argument(
        "--lossy", action="store_true", help="try also what changes answers: KV type, quantized weights"
    )
    parser.add_argument("--nvme-path", metavar="DIR", help="try also layers on this disk (holdfast)")
    parser.add_argument("--kv-store", metavar="DIR", help="try also KV of prefixes on this disk (holdfast)")
    parser.add_argument(
        "--prefix-tokens", type=int, default=0, metavar="N", help="tokens that prompts begin with in common"
    )
    parser.add_argument(
        "--prefix-share", default="100%", metavar="SHARE", help="of prompts that do so (default: 100%%)"
    )
    parser.add_argument("--prefixes", type=int, default=1, metavar="K", help="number of such beginnings (default: 1)")
    parser.add_argument("--serve-flags", default="", metavar='"FLAGS"', help="of every server; what they set stays")
    parser.add_argument("--headroom", default="5%", metavar="SHARE", help="RAM and VRAM to stay free (default: 5%%)")
    parser.add_argument("--max-errors", default="0.1%", metavar="SHARE", help="of requests (default: 0.1%%)")
    parser.add_argument("--endpoint", default="/v1/chat/completions", metavar="PATH", help="or /v1/completions")
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="client processes (default: 1)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts")
    parser.add_argument(
        "--resume", metavar="FILE", help="keep trials in this file, and go on with those that are in it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON (docs/tune.md)")
    parser.add_argument("--quiet", action="store_true", help="no progress on standard error")


def _positive(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < float("inf"):
            return float(text)
    raise argparse.ArgumentTypeError("must be a number above 0")


def run(arguments: argparse.Namespace) -> int:
    from holdfast.tune.report import lines

    if "://" in arguments.model:
        raise ConfigurationError(
            "an address was given, and tune starts the servers that it compares itself",
            needed="a model",
            found=shorten(arguments.model),
            fix=f"holdfast tune MODEL; a server that runs is measured by holdfast bench {shorten(arguments.model)}",
            field="model",
        )
    try:
        with sigterm_as_ctrl_c():
            result, error = tuned(arguments)
    except ModelError as error:  # 1 would say that there is a command.
        say_error(error)
        return UNUSABLE
    if arguments.json:
        import msgspec

        say_json(json.loads(msgspec.json.encode(result)))
    else:
        say(lines(result))
        if error is not None:
            say_error(error)
    if result.interrupted and not arguments.quiet:
        again = "the same command goes on" if arguments.resume else "--resume FILE keeps trials, to go on with later"
        print(f"holdfast: {again}", file=sys.stderr)
    if result.interrupted:
        return INTERRUPTED
    if error is not None:
        return TOO_TIGHT
    if result.command is None:
        return NOT_RUNNING
    return KEEP if result.held else MISSED


def _arrivals(source: str, prefix_tokens: int) -> tuple[Arrival, ...]:
    """A prompt that is shorter than what prompts have in common is made as long as that. What helps where it cannot be
    replayed is another file: there are no flags for a load here."""
    from holdfast.bench.load.inputs import read_replay
    from holdfast.bench.load.load import Arrival

    least = prefix_tokens + 1
    try:
        return tuple(Arrival(one.at_s, max(least, one.prompt_tokens), one.output_tokens) for one in read_replay(source))
    except ConfigurationError as error:
        error.fix = (
            "--traffic FILE with what a server wrote (holdfast serve MODEL 2> access.log), or with lines such as"
            ' {"start": 12.5, "prompt_tokens": 200, "completion_tokens": 50}'
        )
        raise


def tuned(arguments: argparse.Namespace) -> tuple[TuneResult, HoldfastError | None]:
    """What was found, and why nothing is kept of it although servers ran."""
    from holdfast.tune.configuration import DEFAULT, program
    from holdfast.tune.measure import ServerTrials
    from holdfast.tune.result import make_result
    from holdfast.tune.space.axes import space_of
    from holdfast.tune.space.headroom import no_headroom
    from holdfast.tune.space.plans import Planner
    from holdfast.tune.space.pruning import PrunedAgainst, Survivors, most_goodput, survivors
    from holdfast.tune.trial import NO_HEADROOM
    from holdfast.tune.tuner import Tuner

    began_s, speed = time.monotonic(), _speed(arguments.speed)
    _check_disks(arguments)
    settings = _trial_settings(arguments)
    program(arguments.engine)
    asked = settings_of_flags(settings.flags, arguments.engine)
    _check_no_store(asked, arguments.engine)
    planner = Planner(arguments.model, engine=arguments.engine, settings=planned_settings(asked))
    default = planner.plan(DEFAULT)
    _check_lengths(settings.arrivals, default.question.model.spec.max_position)
    record, trials = _record(arguments, settings), ServerTrials(settings)

    def used_s() -> float:
        return time.monotonic() - began_s + (0.0 if record is None else record.taken_s)

    progress = _progress(arguments, settings, record, used_s)
    space = space_of(
        default, settings.arrivals, engine=arguments.engine, lossy=arguments.lossy, nvme_path=arguments.nvme_path,
        kv_store=arguments.kv_store, fixed=frozenset(asked),
    )  # fmt: skip

    @cache
    def choices(*pace: float) -> Survivors:
        against = PrunedAgainst(
            arrivals=trials.replay(*pace), engine=arguments.engine, headroom=settings.headroom,
            prefixes=settings.prefixes, most_ranks=space.most_ranks,
        )  # fmt: skip
        found = survivors(space.axes, planner, against)
        progress.say(f"{len(found.servers):,} of {found.combinations:,} configurations are worth a run")
        return found

    tuner = Tuner(
        choices,
        progress.told(trials if record is None else record.kept(trials)),
        budget_s=60 * arguments.minutes - used_s(),
        clock=used_s,
        speed=speed,
        most_goodput=lambda place, *pace: most_goodput(
            choices(*pace).servers[place].plan, trials.replay(*pace), settings.seconds, pace[1]
        ),
    )
    outcome = tuner.run()
    progress.end()
    error = None
    if outcome.verdict == NO_HEADROOM:
        error = no_headroom(outcome.trials, settings.headroom, planner, settings.arrivals, model=arguments.model)
    result = make_result(
        outcome, choices(*outcome.pace), model=arguments.model, engine=arguments.engine, flags=settings.flags,
        source=shorten(arguments.traffic), arrivals=settings.arrivals, replay=trials.replay(*outcome.pace),
        trial_s=settings.seconds, objectives=settings.objectives, headroom=settings.headroom, lossy=arguments.lossy,
        seconds=used_s(), left_out=space.left_out, error=error,
    )  # fmt: skip
    return result, error


def _trial_settings(arguments: argparse.Namespace) -> TrialSettings:
    from holdfast.bench.load.inputs import parse_share
    from holdfast.bench.measure.objectives import parse_slo
    from holdfast.tune.measure import START_LIMIT_S, TrialSettings

    prefixes = _prefixes(arguments)
    return TrialSettings(
        engine=arguments.engine,
        model=arguments.model,
        objectives=parse_slo(arguments.slo),
        headroom=parse_share(arguments.headroom, field="headroom"),
        error_share=parse_share(arguments.max_errors, field="max-errors"),
        flags=tuple(shlex.split(arguments.serve_flags)),
        arrivals=_arrivals(arguments.traffic, prefixes.tokens),
        seconds=_trial_s(arguments),
        start_limit_s=min(START_LIMIT_S, 60 * arguments.minutes),
        endpoint=arguments.endpoint,
        prefixes=prefixes,
        workers=arguments.workers,
        seed=arguments.seed,
        api_key=os.environ.get("HOLDFAST_API_KEY"),
    )


def _record(arguments: argparse.Namespace, settings: TrialSettings) -> TrialRecord | None:
    """Where trials are kept; with those of an earlier run of the same."""
    from hashlib import sha256
    from pathlib import Path

    import msgspec

    from holdfast.tune.record import TrialRecord, measured_on

    if arguments.resume is None:
        return None
    asked = {
        "model": arguments.model,
        "engine": arguments.engine,
        "slo": arguments.slo,
        "traffic": sha256(msgspec.json.encode(settings.arrivals)).hexdigest()[:16],
        "prefixes": settings.prefixes,
        "trial_s": settings.seconds,
        "serve_flags": sha256(arguments.serve_flags.encode()).hexdigest()[:16],  # They may hold a key.
        "endpoint": arguments.endpoint,
        "headroom": settings.headroom,
        "max_errors": settings.error_share,
        "seed": arguments.seed,
        "workers": arguments.workers,
        **measured_on(arguments.engine),
    }
    return TrialRecord(Path(arguments.resume), asked)


def _progress(
    arguments: argparse.Namespace, settings: TrialSettings, record: TrialRecord | None, used_s: Callable[[], float]
) -> TuneProgress:
    from holdfast.tune.progress import TuneProgress

    progress = TuneProgress(None if arguments.quiet else sys.stderr, used_s=used_s, budget_s=60 * arguments.minutes)
    minutes, seconds = f"{arguments.minutes:g}", format_duration(settings.seconds)
    progress.say(f"up to {minutes} minutes, in trials of {seconds} of traffic; Ctrl-C ends it with what is known")
    if record is not None and record.trials:
        progress.say(f"{counted(len(record.trials), 'trial')} of an earlier run are in {arguments.resume}")
    return progress


def settings_of_flags(flags: Sequence[str], engine: str) -> dict[str, Any]:
    """What these flags set, by our names: a server has them once, so that what is set here is not varied."""
    from holdfast.doctor.command.parse import parse_command

    command = parse_command(f"{engine} serve MODEL {shlex.join(flags)}")
    assert command is not None
    found: dict[str, Any] = {flag.name.replace("-", "_"): flag.value if flag.values else True for flag in command.flags}
    if engine == "holdfast" and found.keys() & {"kv_offloading_size", "swap_space"}:
        found.setdefault("kv_ram", None)  # The same by other names.
    return found


def planned_settings(asked: Mapping[str, Any]) -> dict[str, Any]:
    """What the planner knows of them."""
    from dataclasses import fields

    from holdfast.config.plan import PlanConfig

    known = {field.name for field in fields(PlanConfig)}
    return {name: value for name, value in asked.items() if name in known}


def _prefixes(arguments: argparse.Namespace) -> CommonPrefixes:
    from holdfast.bench.load.inputs import parse_share
    from holdfast.tune.space.kv_tiers import CommonPrefixes

    share = parse_share(arguments.prefix_share, field="prefix-share")
    if arguments.prefix_tokens < 0 or arguments.prefixes < 1:
        raise ConfigurationError(
            "--prefix-tokens and --prefixes: that is not a number of tokens, or of beginnings",
            needed="0 tokens or more, and 1 beginning or more",
            found=f"{arguments.prefix_tokens} and {arguments.prefixes}",
            fix="--prefix-tokens 1000 --prefixes 20",
            field="prefix-tokens",
        )
    return CommonPrefixes(arguments.prefix_tokens, share, arguments.prefixes) if share else CommonPrefixes()


def _check_no_store(asked: Mapping[str, Any], engine: str) -> None:
    """One that all trials share would have the pages of every prompt after two of them."""
    named = asked.get("kv_store") or os.environ.get("HOLDFAST_KV_STORE")
    if engine == "holdfast" and named is not None:
        raise ConfigurationError(
            "a KV store that all trials share cannot be measured: all send the same prompts, and would find them",
            needed="a store of its own for each trial",
            found=f"--kv-store {shorten(named)} "
            + ("in --serve-flags" if "kv_store" in asked else "by HOLDFAST_KV_STORE"),
            fix=f"--kv-store {shorten(named)} --prefix-tokens 1000 as flags of holdfast tune, or leave it out",
            field="serve-flags",
        )


def _check_disks(arguments: argparse.Namespace) -> None:
    """A folder that would be of no use is refused, not ignored."""
    for name in ("nvme_path", "kv_store"):
        flag = f"--{name.replace('_', '-')}"
        if getattr(arguments, name) is not None and arguments.engine != "holdfast":
            raise ConfigurationError(
                f"{flag} is a setting of Holdfast, and {arguments.engine} has none like it",
                needed="--engine holdfast",
                found=f"--engine {arguments.engine}",
                fix=f"leave {flag} out",
                field=name,
            )
    if arguments.kv_store is not None and not arguments.prefix_tokens:
        raise ConfigurationError(
            "--kv-store keeps what prompts have in common, and those that are replayed have nothing in common",
            needed="how many tokens prompts share, and how many such beginnings there are: a log does not say it",
            fix="--prefix-tokens 1000 --prefixes 20, or leave --kv-store out",
            field="kv_store",
        )
    if arguments.kv_store is not None:
        _check_store(arguments.kv_store)


def _check_store(folder: str) -> None:
    """By making one as trials do: rights, read-only disks and names of files are all found by that."""
    from pathlib import Path

    from holdfast.tune.measure import own_store

    own = shlex.quote(str(Path(folder, "kv-store")))
    try:
        with own_store(Path(folder)):
            pass
    except OSError as error:
        raise ConfigurationError(
            f"--kv-store: in {shorten(folder)} the stores of trials cannot be made",
            needed="a folder on the disk to measure that this user can write, or a name where one can be made",
            found=error.strerror or str(error),
            fix=f'sudo install -d -m 700 -o "$(id -un)" {own}, and name that one',
            field="kv_store",
        ) from error


def _speed(text: str) -> float | None:
    if text == "auto":
        return None
    try:
        return _positive(text)
    except argparse.ArgumentTypeError as error:
        raise ConfigurationError(
            f"--speed: {shorten(text)!r} {error}", needed="a number, or auto", fix="--speed 2", field="speed"
        ) from error


def _trial_s(arguments: argparse.Namespace) -> float:
    from pathlib import Path

    from holdfast.tune.record import recorded_trial_s
    from holdfast.units import parse_duration

    if arguments.trial is None:
        earlier = None if arguments.resume is None else recorded_trial_s(Path(arguments.resume))
        return earlier or min(LONGEST_TRIAL_S, max(SHORTEST_TRIAL_S, 60 * float(arguments.minutes) / TRIALS_WANTED))
    found = parse_duration(arguments.trial, field="trial")
    if not 0 < found < 60 * arguments.minutes:
        raise ConfigurationError(
            "--trial: a trial must be shorter than all of them",
            needed=f"less than --minutes {arguments.minutes:g}",
            found=shorten(arguments.trial),
            fix="--trial 20s",
            field="trial",
        )
    return float(found)


def _check_lengths(arrivals: Sequence[Arrival], context: int) -> None:
    from holdfast.tune.space.axes import longest

    if (needed := longest(arrivals)) > context:
        raise ConfigurationError(
            "--traffic has requests that this model cannot answer",
            needed=f"{needed:,} tokens of prompt and output",
            found=f"a context of {context:,} tokens",
            fix="a model with a longer context, or a file without these requests",
            field="traffic",
        )
