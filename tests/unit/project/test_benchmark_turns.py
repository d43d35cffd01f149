"""The driver of side-by-side rows on a GPU, with stand-ins for its workers: turns, order, deaths, the end of time."""

from __future__ import annotations

import json
import sys
import time
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks import gpu_peers, gpu_turns, gpu_worker, llama_programs

# Obeys the protocol of gpu_worker.py and computes nothing; the model says how it behaves. Values tell turn and engine.
STAND_IN = """
import json, os, sys, time
engine, model, *more = sys.argv[1:]
journal = os.path.join(os.path.dirname(__file__), "journal")
def note(text):
    with open(journal, "a") as file:
        file.write(text + "\\n")
if engine == "files":
    sys.exit(note("files " + model))
rows, go = more
if model == "never":
    sys.exit("no such engine")
note("start " + engine)
settings = json.loads(os.environ["HOLDFAST_BENCHMARK_SETTINGS"])
if "max_num_batched_tokens" in settings:
    with open(os.path.join(os.path.dirname(__file__), "settings"), "w") as file:
        json.dump(settings, file)
open(go + ".ready", "w").close()
for turn, asked in enumerate(rows.split("/")):
    while not os.path.exists(f"{go}.{turn}"):
        time.sleep(0.001)
    if turn == 1 and model == "dies":
        sys.exit("out of memory")
    if turn == 1 and model == "hangs":
        note("asleep")
        time.sleep(60)
    note(f"turn {turn} {engine}")
    if os.environ.get("PYTHONPATH", "").startswith("/earlier"):
        note("by " + os.environ["PYTHONPATH"].split(os.pathsep)[0])
    found = {"engine": engine, "version": "1", "model": model, "ready_s": 1.0}
    for row in asked.split(","):
        value = (turn + 1) * (10 if engine == "holdfast" else 5)
        found[row] = {"out_tok_per_s": float(value), "in_tok_per_s": float(value) * 100}
    print(json.dumps(found), flush=True)
    os.unlink(f"{go}.{turn}")
"""


class Bench:
    def __init__(self, folder: Path) -> None:
        self.folder, self.out = folder, folder / "out.json"

    def run(self, first: str, second: str, *flags: str, third: str = "") -> dict[str, Any]:
        (self.folder / "pairs.toml").write_text(
            f"""
            [pair]
            rows = ["one_stream", "one_stream_again", "prefill"]
            sides = [
              {{ engine = "holdfast", model = "{first}", kv_gib = 2 }},
              {{ engine = "vllm", model = "{second}", kv_gib = 1 }},
              {third}
            ]
            """
        )
        work = ["--comparisons", str(self.folder / "pairs.toml"), "--out", str(self.out), "--commit", "abc"]
        gpu_turns.main(["pair", *work, "--files", str(self.folder), "--work", str(self.folder / "work"), *flags])
        found: dict[str, Any] = json.loads(self.out.read_text())
        assert (found["commit"], sorted(found)) == ("abc", ["commit", "comparisons", "date", "machine"])
        pair: dict[str, Any] = found["comparisons"]["pair"]
        return pair

    def jump(self, monkeypatch: pytest.MonkeyPatch, to_s: float) -> None:
        """A clock that stands still until a worker hangs, and then shows a later time."""
        journal = self.folder / "journal"

        def monotonic() -> float:
            return to_s if journal.exists() and "asleep\n" in journal.read_text() else 0.0

        monkeypatch.setattr(gpu_turns, "time", SimpleNamespace(monotonic=monotonic, sleep=time.sleep))

    def journal(self) -> list[str]:
        return (self.folder / "journal").read_text().splitlines()


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Bench:
    (tmp_path / "worker.py").write_text(STAND_IN)
    monkeypatch.setattr(gpu_turns, "WORKER", tmp_path / "worker.py")
    monkeypatch.setattr(gpu_turns, "machine", lambda: "a machine")
    monkeypatch.setattr(gpu_turns, "POLL_S", 0.001)
    return Bench(tmp_path)


def test_each_side_has_its_turns_alone_in_an_order_that_alternates(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    pair = bench.run("good+awq", "good+awq", "--rounds", "3")
    journal = bench.journal()
    assert journal[0] == "files good+awq"
    assert sorted(journal[1:3]) == ["start holdfast", "start vllm"]
    turns = ["turn 0 holdfast", "turn 0 vllm", "turn 1 vllm", "turn 1 holdfast", "turn 2 holdfast", "turn 2 vllm"]
    assert journal[3:] == turns
    stream, prefill = pair["rows"]["one_stream"], pair["rows"]["prefill"]
    assert stream["values"] == {"holdfast": [10, 10, 20, 20, 30, 30], "vllm": [5, 5, 10, 10, 15, 15]}
    assert prefill["medians"] == {"holdfast": 2000, "vllm": 1000}
    assert prefill["ratios"] == {"holdfast": 2.0}
    assert pair["sides"]["vllm"]["settings"]["kv_cache_memory_bytes"] == 2**30
    assert "| 2,000.0 (1,000.0 to 3,000.0; 3) | 1,000.0 (500.0 to 1,500.0; 3) | 2.00 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("dies", "ended with 1: out of memory"),
        ("never", "ended with 1: no such engine"),
        ("hangs", "no answer in turn 2 before its time was over"),
    ],
)
def test_a_worker_that_fails_is_named_and_the_others_go_on(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str, said: str
) -> None:
    bench.jump(monkeypatch, to_s=200)
    pair = bench.run(model, "good", "--rounds", "3", "--turn-s", "120", "--limit-s", "570")
    assert pair["sides"]["holdfast"]["failure"] == said
    assert f"FAILED: pair: holdfast: {said}" in capsys.readouterr().out
    assert pair["rows"]["prefill"]["values"]["vllm"] == [500, 1000, 1500]
    assert len(pair["rows"]["prefill"]["values"].get("holdfast", [])) == (0 if model == "never" else 1)


def test_it_ends_in_time_with_what_there_is(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.jump(monkeypatch, to_s=600)
    pair = bench.run("hangs", "good", "--rounds", "9", "--limit-s", "570")
    assert pair["rows"]["prefill"]["values"] == {"holdfast": [1000], "vllm": [500, 1000]}


def test_a_side_has_rows_settings_and_another_side_of_its_own(bench: Bench) -> None:
    more = 'rows = ["prefill"], settings = { max_num_batched_tokens = 16384 }, against = "vllm"'
    third = f'{{ engine = "holdfast", name = "longer steps", model = "good", kv_gib = 1, {more} }}'
    pair = bench.run("good", "good", "--rounds", "1", third=third)
    assert pair["rows"]["one_stream"]["ratios"] == {"holdfast": 2}
    assert pair["rows"]["prefill"]["ratios"] == {"holdfast": 2, "longer steps": 2}
    settings = {"kv_cache_memory_bytes": 2**30, "max_num_batched_tokens": 16384}
    assert pair["sides"]["longer steps"]["settings"] == settings
    asked = json.loads((bench.folder / "settings").read_text())
    assert asked == settings


def test_a_side_may_be_an_earlier_commit_s(bench: Bench) -> None:
    third = '{ engine = "holdfast", name = "before", model = "good", kv_gib = 1, before = true }'
    bench.run("good", "good", "--rounds", "1", "--before", "/earlier", third=third)
    assert [line for line in bench.journal() if line.startswith("by")] == ["by /earlier/src"]
    with pytest.raises(SystemExit, match="before: --before names no tree"):
        bench.run("good", "good", "--rounds", "1", third=third)


def test_only_files_are_written_where_that_is_asked(bench: Bench) -> None:
    bench.out.write_text('{"commit": "abc", "date": "", "machine": "", "comparisons": {"pair": {}}}')
    bench.run("good+awq", "other", "--write-only")
    assert bench.journal() == ["files good+awq", "files other"]


def test_every_comparison_names_rows_models_and_variants_that_there_are() -> None:
    names = list(tomllib.loads(gpu_turns.COMPARISONS.read_text()))
    sides = gpu_turns.sides(gpu_turns.COMPARISONS, names)
    there = {(side.comparison, side.name) for side in sides}
    assert len(there) == len(sides)
    for side in sides:
        assert not side.against or (side.comparison, side.against) in there
        model, plus, variant = side.model.partition("+")
        assert model in gpu_worker.SHAPES
        assert variant in gpu_worker.WRITERS or not plus  # Dummies.
        for row in side.rows:
            assert row in gpu_worker.ROWS
            assert gpu_turns.usual(row) in gpu_peers.ROWS
    with pytest.raises(SystemExit, match="llama-9b: not among llama-8b-fp8"):
        gpu_turns.sides(gpu_turns.COMPARISONS, ["llama-9b"])


def test_llama_programs_take_turns_on_rows_of_the_same_lengths(tmp_path: Path) -> None:
    single = [{"n_prompt": 1500, "n_gen": 0, "avg_ts": 9457}, {"n_prompt": 0, "n_gen": 128, "avg_ts": 293.5}]
    together = [{"pp": 128, "tg": 128, "pl": streams, "t": 2.0} for streams in (1, 8, 32)]
    for program, printed in (
        ("llama-bench", json.dumps(single)),
        ("llama-batched-bench", "\n".join(map(json.dumps, together))),
    ):
        (tmp_path / program).write_text(f"#!/bin/sh\necho $0 $* >&2\ncat <<'END'\n{printed}\nEND\n")
        (tmp_path / program).chmod(0o755)
    side, ours = reversed(gpu_turns.sides(gpu_turns.COMPARISONS, ["llama-8b-q4k"]))
    around = gpu_turns.Surroundings(work=tmp_path, files=tmp_path, llama=tmp_path)
    programs = gpu_turns.LlamaPrograms(side, around)
    assert programs.ready()
    programs.turn(0, time.monotonic() + 60)
    assert programs.measured.values == {
        "decode_128": [293.5],
        "streams_1_128": [64],
        "streams_8_128": [512],
        "streams_32": [2048],
        "prompt_1500": [9457],
    }
    assert ours.rows == side.rows
    for row, streams in (("streams_1_128", 1), ("streams_8_128", 8), ("streams_32", 32)):
        assert gpu_worker.ROWS[row] == (streams, (128, 128), (128, 128))
    (tmp_path / "llama-bench").write_text("#!/bin/sh\necho no GPU >&2; exit 3\n")
    with pytest.raises(gpu_turns.FailedError, match="llama-bench ended with 3: no GPU"):
        programs.turn(1, time.monotonic() + 60)
    assert llama_programs.read_llama_bench('[{"n_prompt": 0, "n_gen": 64, "avg_ts": 7}]') == {"one stream": 7}
