"""Models larger than a GPU: the driver with stand-ins for its workers, and the workers with stand-ins for engines."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.append(str(Path(__file__).resolve().parents[3]))

from benchmarks import tier_worker, tiers
from benchmarks.tier_worker import Work

import holdfast
from holdfast.engine.startup.progress import LoadProgress
from holdfast.records import ExpertUse, LinkUse

WORKER = """
import json, os, sys, time
engine, work = sys.argv[1], json.load(open(sys.argv[2]))
print("a warning")
if engine == "vllm" and os.environ["PYTHONPATH"] != "/site":
    sys.exit("not there")
speed, nvml = 6.0, 26043 if engine == "vllm" else 8000
if engine == "llama.cpp":
    assert os.path.exists(work["model"])
    speed, nvml = {29: (5.0, 9000), 30: (4.0, 8192), 31: (3.0, 8000)}[work["settings"]["ncmoe"]]
for prompt in work["prompts"]:
    print(json.dumps({"prompt": prompt, "tok_per_s": 100 * speed, "nvml_mib": nvml - 500}), flush=True)
for sequences, _, _ in work["batches"]:
    if work["settings"].get("ncmoe") == 31 and sequences == 32:
        sys.exit("out of memory")
    if work["settings"].get("cpu_compute") == "off":
        time.sleep(60)
    found = {"batch": sequences, "decode_tok_per_s": sequences * speed, "nvml_mib": nvml}
    print(json.dumps(found), flush=True)
"""


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    (tmp_path / "worker.py").write_text(WORKER)
    (tmp_path / "models" / "qwen3-30b-a3b-q4k").mkdir(parents=True)
    (tmp_path / "models" / "qwen3-30b-a3b-q4k" / "model.gguf").touch()
    monkeypatch.setattr(tiers, "WORKER", tmp_path / "worker.py")
    monkeypatch.setattr(tiers, "machine", lambda: "a machine")
    return tmp_path


def measured(folder: Path, *words: str) -> tuple[bool, list[dict[str, Any]]]:
    """Whether all went well, and the lines of this run in the file."""
    out = folder / "tiers.jsonl"
    before = len(out.read_text().splitlines()) if out.exists() else 0
    asked = tiers.options([*words, "--models", str(folder / "models"), "--out", str(out), "--commit", "abc"])
    well = tiers.measure(asked)
    lines = [json.loads(line) for line in out.read_text().splitlines()[before:]]
    assert (lines[0]["commit"], lines[0]["machine"]) == ("abc", "a machine")
    return well, lines[1:]


def test_a_row_of_tiers_beside_another_differs_in_nothing_else() -> None:
    """Else the two are no comparison."""
    zipf = tiers.ROWS["qwen3-30b-a3b-q4k-zipf"]
    for name in ("llama-8b-bf16", "llama-70b-int4"):
        whole, link = tiers.ROWS[name], tiers.ROWS[f"{name}-link"]
        assert link == whole._replace(settings=whole.settings | {"cpu_compute": "off"}, vllm=None)
    assert zipf._replace(skew=0.0) == tiers.EXPERTS
    assert zipf.skew > 0
    assert ([batch[0] for batch in zipf.batches], zipf.prompts[0]) == ([1, 8, 32], 512)


def test_llama_cpp_is_compared_at_the_best_setting_within_the_budget(bench: Path) -> None:
    """Of 8 GiB: the fastest takes more, the slowest is not the best. One that fails is named."""
    words = ("qwen3-30b-a3b-q4k", "--llama", str(bench))
    well, lines = measured(bench, *words, "--ncmoe", "29,30,31", "--engines", "holdfast,llama.cpp")
    assert not well
    assert [line["batch"] for line in lines if line.get("engine") == "holdfast" and "batch" in line] == [1, 8, 32]
    (failed,) = [line for line in lines if "failed" in line]
    assert failed == {"row": "qwen3-30b-a3b-q4k", "engine": "llama.cpp", "ncmoe": 31, "failed": "ended with 1"}
    assert lines[-1] == {
        "row": "qwen3-30b-a3b-q4k", "ratios_to": "llama.cpp", "ncmoe": 30, "nvml_mib": 8192, "within_budget": True,
        "ratios": {"prompt of 512": 1.5, "1": 1.5, "8": 1.5, "32": 1.5},
    }  # fmt: skip
    well, lines = measured(bench, *words, "--ncmoe", "29", "--engines", "llama.cpp")
    assert well
    assert all(line.get("engine") != "holdfast" for line in lines)
    assert (lines[-1]["within_budget"], lines[-1]["ncmoe"]) == (True, 30), "what the file has of before counts too"


def test_vllm_has_its_own_packages_and_its_ratios_say_that_it_took_more(bench: Path) -> None:
    well, lines = measured(bench, "llama-70b-int4", "--vllm", "/site")
    assert well
    assert lines[-1] == {
        "row": "llama-70b-int4", "ratios_to": "vllm", "vram_gib": 24, "nvml_mib": 26043, "within_budget": False,
        "ratios": {"1": 1.0, "8": 1.0, "32": 1.0},
    }  # fmt: skip


def test_what_is_not_done_in_time_is_ended_and_said(bench: Path) -> None:
    well, lines = measured(bench, "llama-8b-bf16-link", "llama-8b-bf16", "--limit-s", "0.5")
    assert not well
    assert [line.get("failed") for line in lines] == ["no time was left"] * 2


def test_what_cannot_run_is_refused_before_anything_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        ["llama-70b-q4k", "--engines", "llama.cpp"],
        ["llama-70b-int4-link", "--engines", "vllm", "--vllm", "/site"],
        ["llama-70b-q4k", "--write"],
    ):
        with pytest.raises(SystemExit):
            tiers.options(words)
    said = capsys.readouterr().err
    assert "nothing to run for llama-70b-q4k" in said
    assert "nothing to run for llama-70b-int4-link" in said
    assert "--models FOLDER" in said


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What stands in for a driver says that 7,123 MiB are in use."""
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 7123; exec sleep 60\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")


LLAMA_BATCHED_BENCH = """#!/bin/sh
echo "main: n_kv_max = 8192"
case "$*" in *"-ngl 99 -ncmoe 31 -c 8192"*"-npp 128 -ntg 16 -npl 1,8,1 "*) ;; *) echo "refused: $*" >&2; exit 3;; esac
echo '{"n_kv_max": 8192, "pp": 128, "tg": 16, "pl": 1, "t_pp": 1.0, "t_tg": 0.25, "speed_tg": 64.107, "t": 1.25}'
echo '{"n_kv_max": 8192, "pp": 128, "tg": 16, "pl": 8, "t_pp": 3.0, "t_tg": 1.25, "speed_tg": 101.88, "t": 4.25}'
echo '{"n_kv_max": 8192, "pp": 128, "tg": 16, "pl": 1, "t_pp": 1.0, "t_tg": 0.25, "speed_tg": 1.0, "t": 1.25}'
"""


def test_what_llama_cpp_prints_of_experts_on_its_cores_is_read(tmp_path: Path, gpu: None) -> None:
    (tmp_path / "llama-batched-bench").write_text(LLAMA_BATCHED_BENCH)
    (tmp_path / "llama-bench").write_text("""#!/bin/sh\necho '[{"n_prompt": 512, "n_gen": 0, "avg_ts": 478.18}]'\n""")
    for name in ("llama-batched-bench", "llama-bench"):
        (tmp_path / name).chmod(0o755)
    work = Work("m.gguf", False, {"ngl": 99, "ncmoe": 31}, [(1, 128, 16), (8, 128, 16)], [512], str(tmp_path))
    found = list(tier_worker.llama(work))
    assert found == [
        {"batch": 1, "tok_per_s": 12.8, "decode_tok_per_s": 64.107, "nvml_mib": 7123},
        {"batch": 8, "tok_per_s": 30.118, "decode_tok_per_s": 101.88, "nvml_mib": 7123},
        {"prompt": 512, "tok_per_s": 478.18, "nvml_mib": 7123},
    ]
    with pytest.raises(SystemExit, match=r"ended with 3:\nrefused: "):
        list(tier_worker.llama(work._replace(batches=[(64, 128, 16)])))


class Answers:
    """Stands in for an LLM: each step takes 10 ms, of which 9 are its 450 MB over the link."""

    def __init__(self, clock: list[float], **settings: Any) -> None:
        self.clock, self.settings, self.steps = clock, settings, 0
        decisions = ["streamed_layers = 40 of 80", "cpu_compute = off"]
        self.info = SimpleNamespace(decisions=decisions, memory=None)

    def generate(self, prompts: list[dict[str, list[int]]], params: Any, use_tqdm: bool) -> list[Any]:
        assert not use_tqdm
        assert all(0 <= token <= 120000 for prompt in prompts for token in prompt["prompt_token_ids"])
        self.clock[0] += 0.01 * params.max_tokens
        self.steps += params.max_tokens
        output = SimpleNamespace(token_ids=[5] * params.max_tokens)
        return [SimpleNamespace(outputs=[output]) for _ in prompts]

    def get_stats(self) -> Any:
        steps = self.steps
        link = LinkUse(
            copied_bytes=450_000_000 * steps, busy_s=0.0096 * steps, stalled_s=0.008 * steps, possible_bytes_per_s=5e10
        )
        used = ExpertUse(pairs=8 * steps, hits=6 * steps, host_s=0.001 * steps)
        return SimpleNamespace(steps_total=steps, links=[link], experts=used)

    def close(self) -> None:
        self.clock[0] = -1.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found = [0.0]
    monkeypatch.setattr(tier_worker, "time", SimpleNamespace(perf_counter=lambda: found[0]))
    return found


def test_holdfasts_figures_leave_prompts_out(clock: list[float], monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    monkeypatch.setattr(tier_worker, "RamWatch", lambda: SimpleNamespace(told=lambda: {"ram_mib": 1}))
    monkeypatch.setattr(LoadProgress, "__call__", LoadProgress.__call__)  # What listens to it is gone after the test.
    made = list[Answers]()

    def llm(model: str, **settings: Any) -> Answers:
        made.append(Answers(clock, model=model, **settings))
        return made[0]

    monkeypatch.setattr(holdfast, "LLM", llm)
    ready, prompt, batch = tier_worker.holdfast(Work("f", True, {"vram": "8GiB"}, [(8, 128, 24)], [512]))
    assert ready["decisions"] == ["streamed_layers = 40 of 80", "cpu_compute = off"]
    assert made[0].settings["load_format"] == "dummy"
    assert (prompt["prompt"], prompt["tok_per_s"], prompt["gb"]) == (512, 51200.0, 0.45)
    assert batch["decode_tok_per_s"] == pytest.approx(8 * 20 / 0.2)
    assert (batch["gb_per_step"], batch["link_busy"], batch["link_bound"]) == (0.45, 0.96, 0.9)
    assert (batch["expert_hits"], batch["host_computed"]) == (0.75, 0.1)
    assert clock[0] == -1.0, "it was closed"


def test_vllm_is_asked_for_the_same_work(clock: list[float], monkeypatch: pytest.MonkeyPatch, gpu: None) -> None:
    for name in tier_worker.VLLM_ENVIRONMENT:
        monkeypatch.setenv(name, "")
    seen = dict[str, Any]()

    def llm(**settings: Any) -> Answers:
        seen.update(settings, runner=os.environ["VLLM_USE_V2_MODEL_RUNNER"])
        return Answers(clock)

    peer = SimpleNamespace(LLM=llm, SamplingParams=holdfast.SamplingParams, __version__="0.26.0")
    monkeypatch.setitem(sys.modules, "vllm", peer)
    monkeypatch.setattr(tier_worker.subprocess, "check_output", lambda _: str(96 << 30))
    row = tiers.ROWS["llama-70b-int4"]
    assert row.vllm is not None
    ready, batch = tier_worker.vllm(Work("f", True, row.vllm, [(8, 128, 24)], []))
    assert (ready["version"], seen["runner"], seen["gpu_memory_utilization"]) == ("0.26.0", "0", 0.25)
    assert (seen["offload_backend"], seen["load_format"], seen["max_num_seqs"]) == ("prefetch", "dummy", 32)
    assert batch["decode_tok_per_s"] == pytest.approx(8 * 20 / 0.2)
