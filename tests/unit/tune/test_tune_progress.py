"""What a search says while it goes on, and one that was interrupted and goes on with what a file has of it."""

from __future__ import annotations

import contextlib
import io
import itertools
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest

import holdfast
from holdfast.cli.commands import tune
from holdfast.cli.main import parse_command_line
from holdfast.errors import ConfigurationError
from holdfast.hardware import Processor
from holdfast.hardware.nvidia import NvidiaGpu, NvidiaMachine
from holdfast.tune import record
from holdfast.tune.configuration import Axis, ServerConfiguration
from holdfast.tune.progress import TuneProgress
from holdfast.tune.record import TrialRecord, _read, recorded_trial_s
from holdfast.tune.space.pruning import configuration_at
from holdfast.tune.trial import BETTER, UNCONFIRMED, Stage, Trial, TuneOutcome
from holdfast.tune.tuner import Tuner

TRIAL_S = 10.0
GPU = NvidiaGpu(index=0, uuid="GPU-1", name="H200", total_bytes=1, free_bytes=1)
AXES = (Axis("max_num_seqs", (8, 16, None, 64, 128)), Axis("max_num_batched_tokens", (128, None, 1024)))
POINTS = sorted(itertools.product(range(5), range(3)), key=lambda point: point != (2, 1))
ASKED = {"model": "m", "slo": "ttft=1s", "trial_s": TRIAL_S}


class Places(NamedTuple):
    configurations: list[ServerConfiguration]
    points: list[tuple[int, ...]]
    same_as: dict[tuple[int, ...], int]


PLACES = Places([configuration_at(AXES, at) for at in POINTS], POINTS, {at: place for place, at in enumerate(POINTS)})


class Run:
    """One call of the command: so many trials are made before Ctrl-C."""

    def __init__(self, path: Path | None = None, *, interrupt_after: float = float("inf"), trials: int = 40) -> None:
        self.made = 0
        self._interrupt_after, self._now_s = interrupt_after, 0.0
        self.said = io.StringIO()
        earlier = None if path is None else TrialRecord(path, ASKED)
        self.reused = 0 if earlier is None else len(earlier.trials)

        def clock() -> float:
            return self._now_s + (0.0 if earlier is None else earlier.taken_s)

        progress = TuneProgress(self.said, used_s=clock, budget_s=trials * TRIAL_S)
        told = progress.told(self.measure if earlier is None else earlier.kept(self.measure))
        self.outcome: TuneOutcome = Tuner(
            lambda *pace: PLACES, told, budget_s=trials * TRIAL_S, speed=1.0, clock=clock
        ).run()

    def measure(self, configuration: ServerConfiguration, *, speed: float, stage: Stage, climb: float = 1.0) -> Trial:
        if self.made >= self._interrupt_after:
            raise KeyboardInterrupt
        self.made += 1
        self._now_s += TRIAL_S
        goodput = 7.0 - 0.5 * abs(AXES[0].values.index(configuration.value("max_num_seqs")) - 1)
        return Trial(
            configuration=configuration, stage=stage, speed=speed, climb=climb, goodput=goodput,
            good_share=goodput / 10, requests=100, measured_s={"ttft p99": 0.2},
            times_limit=10 / goodput, seconds=TRIAL_S,
        )  # fmt: skip


@pytest.mark.parametrize("interrupt_after", [1, 4, 12, 13, 14])
def test_an_interrupted_search_goes_on_where_it_was(tmp_path: Path, interrupt_after: int) -> None:
    whole = Run()
    assert whole.outcome.verdict == BETTER
    first = Run(tmp_path / "trials", interrupt_after=interrupt_after)
    assert first.outcome.interrupted
    second = Run(tmp_path / "trials")
    assert second.outcome.kept == whole.outcome.kept
    assert second.outcome.verdict == BETTER
    assert second.made == len(second.outcome.trials) - second.reused
    # Half a round is measured again: the other half would be of another hour.
    assert interrupt_after - 1 <= second.reused <= interrupt_after
    confirmations = [trial for trial in first.outcome.trials if trial.stage == "confirmation"]
    assert (second.reused < interrupt_after) == bool(len(confirmations) % 2)
    assert len(second.outcome.trials) == len(whole.outcome.trials)


def test_time_that_an_earlier_run_has_spent_counts(tmp_path: Path) -> None:
    Run(tmp_path / "trials", trials=5)
    again = Run(tmp_path / "trials", trials=5)
    assert again.made == 0
    assert again.outcome.verdict == UNCONFIRMED
    more = Run(tmp_path / "trials", trials=40)
    assert more.outcome.verdict == BETTER


def test_what_is_lacking_of_time_is_said() -> None:
    outcome = Run(trials=5).outcome
    assert outcome.verdict == UNCONFIRMED
    assert outcome.needed_s is not None
    assert Run(trials=int(outcome.needed_s / TRIAL_S)).outcome.verdict == BETTER


def test_a_file_of_another_search_or_of_anything_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trials"
    Run(path, interrupt_after=3)
    assert recorded_trial_s(path) == TRIAL_S
    with pytest.raises(ConfigurationError, match="another search") as caught:
        TrialRecord(path, ASKED | {"slo": "ttft=2s"})
    assert "slo ttft=1s" in str(caught.value.needed)
    assert len(TrialRecord(path, ASKED).trials) == 3  # It was left as it is.
    path.write_text(path.read_text() + '{"configuration": {"chan')
    assert len(TrialRecord(path, ASKED).trials) == 3
    for text in ("a letter\n", '{"tune": 99, "asked": {}}\n', "[]\n"):
        path.write_text(text)
        with pytest.raises(ConfigurationError, match="not a file of trials"):
            TrialRecord(path, ASKED)
        assert path.read_text() == text
    assert recorded_trial_s(path) is None
    (tmp_path / "empty").touch()
    assert TrialRecord(tmp_path / "empty", ASKED).trials == []
    with pytest.raises(ConfigurationError, match="cannot be written"):
        TrialRecord(path / "below a file", ASKED)


@contextlib.contextmanager
def no_file_above(limit_bytes: int) -> Iterator[None]:
    """As on a disk that becomes full: what is beyond is not written, and a write says so."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_trials_survive_a_disk_that_is_full_when_a_search_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "trials"
    Run(path, interrupt_after=3)
    before = path.read_bytes()
    with no_file_above(len(before) // 2), pytest.raises(ConfigurationError, match="cannot be written"):
        TrialRecord(path, ASKED)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_becomes_full_ends_no_search(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path, made = tmp_path / "trials", Run(interrupt_after=4).outcome.trials
    measured = {trial.configuration: trial for trial in made}
    assert len(measured) == 4
    kept = TrialRecord(path, ASKED).kept(lambda configuration, **_: measured[configuration])

    def keep(trial: Trial) -> None:
        assert kept(trial.configuration, speed=trial.speed, stage=trial.stage) == trial

    keep(made[0])
    with no_file_above(path.stat().st_size + 10):
        keep(made[1])
        keep(made[2])
    assert [line.levelname for line in caplog.records] == ["WARNING"]
    assert "the search goes on" in caplog.text
    assert _read(path, ASKED) == made[:1]  # Half a line is left out.
    keep(made[3])
    assert _read(path, ASKED) == made


def test_a_trial_of_another_pace_is_made_again(tmp_path: Path) -> None:
    there, wanted = (Trial(configuration=ServerConfiguration(), stage="search", speed=2.0, climb=c) for c in (1.0, 2.0))
    path = tmp_path / "trials"
    for climb, trial in ((1.0, there), (2.0, wanted)):
        kept = TrialRecord(path, ASKED).kept(lambda *_, trial=trial, **__: trial)
        assert kept(trial.configuration, speed=2.0, stage="search", climb=climb) == trial
    assert _read(path, ASKED) == [there, wanted]


def test_what_a_server_said_may_have_any_letters_and_a_file_may_be_cut_off_in_each(tmp_path: Path) -> None:
    path = tmp_path / "trials"
    said = Trial(configuration=ServerConfiguration(), stage="search", speed=1.0, died="one\u2028two\x85three\x0cfour é")
    kept = TrialRecord(path, ASKED)
    for speed in (1.0, 2.0):
        trial = msgspec.structs.replace(said, speed=speed)
        kept.kept(lambda *_, trial=trial, **__: trial)(said.configuration, speed=speed, stage="search")
    whole = path.read_bytes()
    assert [trial.died for trial in _read(path, ASKED)] == [said.died] * 2
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert len(_read(path, ASKED)) == max(0, whole[:length].count(b"\n") - 1)


def test_a_file_of_trials_is_never_put_in_the_place_of_a_device_or_a_link(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(record, "_replace", lambda path, data: None)  # Root could do it.
        with pytest.raises(ConfigurationError, match="not a file of trials"):
            TrialRecord(Path(os.devnull), ASKED)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "trials")
    Run(link, interrupt_after=2)
    assert link.is_symlink()
    assert len(_read(tmp_path / "trials", ASKED)) == 2


def cpu(model: str, cores: int) -> Processor:
    return Processor(model=model, cores=cores, features=frozenset())


def resumed(tmp_path: Path, *more: str) -> None:
    traffic = tmp_path / "traffic.jsonl"
    traffic.write_text('{"start_time": 1, "prompt_tokens": 9, "completion_tokens": 8}\n')
    asked = ["tune", "smollm2", "--traffic", str(traffic), "--slo", "ttft=1s", "--resume", str(tmp_path / "trials")]
    _, arguments = parse_command_line([*asked, *more])
    tune._record(arguments, tune._trial_settings(arguments))


@pytest.mark.parametrize(
    ("changed", "value", "needed", "found"),
    [
        ("processor", lambda: cpu("Old", 4), "processor New, 8 cores", "processor Old, 4 cores"),
        ("processor", lambda: cpu("New", 4), "processor New, 8 cores", "processor New, 4 cores"),
        ("probe", lambda: NvidiaMachine(gpus=(GPU, GPU)), "gpus 1 x H200", "gpus 2 x H200"),
        ("version_of", lambda engine, words: "2.0", "engine_version 1.0", "engine_version 2.0"),
    ],
)
def test_trials_of_another_machine_or_version_are_refused_with_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: str, value: object, needed: str, found: str
) -> None:
    monkeypatch.setattr(record, "processor", lambda: cpu("New", 8))
    monkeypatch.setattr(record, "probe", lambda: NvidiaMachine(gpus=(GPU,)))
    monkeypatch.setattr(record, "version_of", lambda engine, words: "1.0")
    monkeypatch.setattr(record, "program", lambda engine: [engine])
    resumed(tmp_path, "--engine", "vllm")
    resumed(tmp_path, "--engine", "vllm", "--minutes", "99")
    monkeypatch.setattr(record, changed, value)
    with pytest.raises(ConfigurationError, match="another search") as caught:
        resumed(tmp_path, "--engine", "vllm")
    assert (caught.value.needed, caught.value.found) == (needed, found)
    assert "another file" in str(caught.value.fix)


def test_trials_of_other_clients_or_another_holdfast_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    resumed(tmp_path)
    with pytest.raises(ConfigurationError, match="another search") as caught:
        resumed(tmp_path, "--workers", "2")
    assert (caught.value.needed, caught.value.found) == ("workers 1", "workers 2")
    version = holdfast.__version__
    monkeypatch.setattr(holdfast, "__version__", "0.0.7")
    with pytest.raises(ConfigurationError, match="another search") as caught:
        resumed(tmp_path)
    assert (caught.value.needed, caught.value.found) == (f"holdfast {version}", "holdfast 0.0.7")
    TrialRecord(tmp_path / "old", ASKED)
    with pytest.raises(ConfigurationError, match="another search") as caught:
        TrialRecord(tmp_path / "old", ASKED | {"workers": 1})
    assert caught.value.needed == "workers not recorded"


def test_progress_tells_stages_and_the_time_that_is_used() -> None:
    said = Run().said.getvalue().splitlines()
    assert said[0] == "holdfast: the default at the traffic's own pace"
    assert said[1].startswith("  1  0:10 of 6:40  default, 1x: the default: 6.")
    assert "holdfast: the best once more" in said
    assert said.count("holdfast: the best in turns with the default, to prove the gain") == 1
    assert said[-1].lstrip().startswith(str(len(Run().outcome.trials)))
    quiet = TuneProgress(None, used_s=lambda: 0.0, budget_s=1.0)
    quiet.say("nothing")
    assert quiet.told(len) is len  # type: ignore[comparison-overlap, arg-type]


def test_a_log_that_is_not_there_is_had_from_where_servers_write_it(tmp_path: Path) -> None:
    """The access log goes to standard error."""
    _, arguments = parse_command_line(["tune", "smollm2", "--traffic", str(tmp_path / "no.log"), "--slo", "ttft=1s"])
    with pytest.raises(ConfigurationError) as caught:
        tune.tuned(arguments)
    assert "holdfast serve MODEL 2> access.log" in str(caught.value.fix)
