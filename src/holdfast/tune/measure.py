"""One trial for real: a server is started with the configuration, the traffic is replayed, the server is stopped.

A server that does not start, or dies under the load, is a result with the doctor's cause, and not an error.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path

import msgspec

from holdfast.bench.load.load import Arrival, Load
from holdfast.bench.load.profile import PEAK, Phase
from holdfast.bench.measure.objectives import Objective
from holdfast.bench.measure.verdict import SERVER_PROCESS, Allowed
from holdfast.bench.own_server import free_port, launched
from holdfast.bench.result import BenchResult
from holdfast.bench.run import RunOptions, run_bench
from holdfast.bench.target import calibrated, find_target
from holdfast.doctor.diagnosis.diagnose import diagnose
from holdfast.errors import EngineError
from holdfast.tune.configuration import ServerConfiguration, start_words
from holdfast.tune.replay import replayed
from holdfast.tune.space.kv_tiers import STORE, CommonPrefixes
from holdfast.tune.trial import Stage, Trial, trial_of
from holdfast.units import shorten

START_LIMIT_S = 900.0
LATE_TIMES, LEAST_TIMEOUT_S, MOST_TIMEOUT_S = 3.0, 10.0, 120.0
"""A request that takes so many times what the SLO allows it is given up: it counts for nothing, and the next trial
waits."""
SAID_CHARS = 300


class TrialSettings(msgspec.Struct, frozen=True, kw_only=True):
    engine: str
    model: str
    flags: tuple[str, ...] = ()
    launcher: tuple[str, ...] = ()
    """Words before the server's command: `taskset -c 0,1`."""
    arrivals: tuple[Arrival, ...]
    """Of the whole file, the first at 0."""
    seconds: float
    """While requests come."""
    start_limit_s: float = START_LIMIT_S
    """A server that takes longer to be ready counts as one that does not start."""
    objectives: tuple[Objective, ...]
    headroom: float = 0.05
    error_share: float = 0.001
    endpoint: str = "/v1/chat/completions"
    token_ids: bool = False
    """Prompts of ids, for a server without a tokenizer: to an endpoint for completions."""
    prefixes: CommonPrefixes = CommonPrefixes()
    workers: int = 1
    seed: int = 0
    api_key: str | None = None


class ServerTrials:
    """Called once a trial."""

    def __init__(self, settings: TrialSettings) -> None:
        self.settings = settings
        self.replay = cache(lambda speed, climb=1.0: replayed(settings.arrivals, settings.seconds, speed, climb))

    def __call__(self, configuration: ServerConfiguration, *, speed: float, stage: Stage, climb: float = 1.0) -> Trial:
        settings, began_s, port = self.settings, time.monotonic(), free_port()
        with contextlib.ExitStack() as stack:
            try:
                started = stack.enter_context(with_empty_store(configuration))
            except OSError as error:  # The disk is full, or gone: what was measured before is worth a report.
                return Trial(
                    configuration=configuration, stage=stage, speed=speed, climb=climb,
                    died=f"no folder for its KV store: {error}",
                    seconds=time.monotonic() - began_s,
                )  # fmt: skip
            words = start_words(started, engine=settings.engine, model=settings.model, flags=settings.flags, port=port)
            server = stack.enter_context(launched([*settings.launcher, *words], port, kept=False))
            try:
                server.wait_until_ready(settings.start_limit_s)
                result = self._run(server.url, speed, climb)
            except EngineError as error:  # It does not start, or does not answer a first request.
                died, of_memory = cause_of(server.log, error.message)
                return Trial(
                    configuration=configuration, stage=stage, speed=speed, climb=climb,
                    died=died, died_of_memory=of_memory, seconds=time.monotonic() - began_s,
                )  # fmt: skip
            process = next((check for check in result.verdict.checks if check.name == SERVER_PROCESS), None)
            gone = server.ended or (process is not None and not process.passed)
            died, of_memory = cause_of(server.log, "the server ended under the load") if gone else ("", False)
        return trial_of(
            result, configuration, stage=stage, speed=speed, climb=climb, offered_s=settings.seconds,
            objectives=settings.objectives, error_share=settings.error_share,
            seconds=time.monotonic() - began_s, died=died, died_of_memory=of_memory,
        )  # fmt: skip

    def _run(self, url: str, speed: float, climb: float) -> BenchResult:
        settings = self.settings
        key = settings.api_key
        target = find_target(url, key, None)
        load = Load(
            url=url,
            path=settings.endpoint,
            model=target.model,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            phases=(Phase(PEAK, float("inf")),),
            replay=self.replay(speed, climb),
            token_ids=settings.token_ids,
            prefix_tokens=settings.prefixes.tokens,
            prefix_share=settings.prefixes.share,
            prefixes=settings.prefixes.count,
            timeout_s=timeout_of(settings.objectives, settings.arrivals),
            seed=settings.seed,
        )
        allowed = Allowed(objectives=settings.objectives, headroom=settings.headroom, error_share=settings.error_share)
        options = RunOptions(allowed=allowed, workers=settings.workers, api_key=key, advise=False)
        return run_bench(target, calibrated(load), options)


@contextlib.contextmanager
def with_empty_store(configuration: ServerConfiguration) -> Iterator[ServerConfiguration]:
    """The same with a folder of its own for pages on the disk, inside the one that is named, which may be where a disk
    is mounted: every trial sends the same prompts, and would find there what the one before it has computed. It is gone
    afterwards."""
    folder = configuration.value(STORE)
    if folder is None:
        yield configuration
        return
    with own_store(Path(str(folder))) as own:
        changes = (*((name, value) for name, value in configuration.changes if name != STORE), (STORE, own))
        yield ServerConfiguration(changes)


@contextlib.contextmanager
def own_store(named: Path) -> Iterator[str]:
    """Raises OSError where there can be none."""
    named = named.absolute()
    named.mkdir(mode=0o700, parents=True, exist_ok=True)  # As a server's own is, which refuses one that others write.
    with tempfile.TemporaryDirectory(prefix="tune-", dir=named, ignore_cleanup_errors=True) as own:
        yield own


def timeout_of(objectives: Sequence[Objective], arrivals: Sequence[Arrival]) -> float:
    outputs = max(one.output_tokens for one in arrivals)
    allowed = {one.metric: one.seconds for one in objectives}
    gap_s = allowed.get("tpot", allowed.get("itl"))
    whole_s = allowed.get("e2e", MOST_TIMEOUT_S if gap_s is None else allowed.get("ttft", 10.0) + gap_s * outputs)
    return min(MOST_TIMEOUT_S, max(LEAST_TIMEOUT_S, LATE_TIMES * whole_s))


def cause_of(log: Path, otherwise: str) -> tuple[str, bool]:
    """As the doctor says it of the server's log; where it finds nothing, what was seen from here. And whether it is a
    matter of memory, as far as is known."""
    found = diagnose([str(log)])
    if not found.findings:
        return otherwise, True
    first = found.findings[0]
    return shorten(f"{first.code}: {first.what}", SAID_CHARS), first.root_cause != "not_memory"
