"""The plan that serve makes before anything is loaded: without torch, in a container's limits, handed to the engine."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast import hardware
from holdfast.checkpoints import StoredTensor
from holdfast.cli.main import main
from holdfast.config import EngineConfig
from holdfast.engine.process import protocol
from holdfast.engine.startup import build, plan_lines
from holdfast.errors import ConfigurationError, DoesNotFitError, UnknownArchitectureError
from holdfast.hardware import Memory, Processor, gpus
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.planner import make_cpu_plan
from holdfast.planner.serve.gpu_plan import make_gpu_plan

MIB = 1 << 20

WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ImportError("blocked by the test: " + name)
        return None

sys.meta_path.insert(0, NoTorch())
from holdfast.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def serve(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, "serve", *arguments, "--port", "0"],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


@pytest.fixture
def config(tiny_model: Path) -> EngineConfig:
    return EngineConfig(model=str(tiny_model), load_format="dummy", skip_tokenizer_init=True, threads=1)


def test_the_front_refuses_without_torch(tiny_arguments: list[str]) -> None:
    done = serve(*tiny_arguments, "--max-model-len", "2048", "--kv-cache-memory-bytes", "512KiB")
    assert done.returncode == 2
    assert "[HF110]" in done.stderr
    assert "520.00 KiB short" in done.stderr
    assert "--max-model-len 1008" in done.stderr  # 64 pages of 8 KiB, one of them the null page
    assert "leave --kv-cache-memory-bytes out" in done.stderr
    assert "--kv-cache-memory-bytes 2MiB" in done.stderr  # 129 pages and more
    assert "others hold" not in done.stderr  # The user's own pool is too small, whoever holds memory.


def test_a_budget_of_another_device_is_refused_by_name(
    tiny_arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Where no torch is loaded either: the test above is of that."""
    assert main(["serve", *tiny_arguments, "--vram", "22GiB", "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "--ram" in said
    assert "vram" in said


def test_a_containers_limit_is_the_budget(
    config: EngineConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the kernel would kill is refused, with the numbers of the control group."""
    folder = tmp_path / "sys/fs/cgroup/box"
    folder.mkdir(parents=True)
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n")
    (folder / "memory.current").write_text(str(100 * MIB))
    monkeypatch.setattr(build, "memory", lambda: hardware.memory(tmp_path))
    model = build.find_model(config)

    (folder / "memory.max").write_text(str(300 * MIB))
    with pytest.raises(DoesNotFitError) as caught:
        build.plan_model(config, model)
    assert "180.00 MiB of budget" in str(caught.value.found)  # 0.9 of what the group has left

    (folder / "memory.max").write_text(str(1000 * MIB))
    plan = build.plan_model(config, model)
    assert plan.device.limited_by == "control group"
    assert sum(plan.terms.values()) <= plan.budget_bytes == int(0.9 * 900 * MIB)
    assert "control group" in plan_lines.plan_line(model.files.name, plan)


def test_who_holds_memory_is_said_when_it_is_short(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    free = Memory(total_bytes=16 << 30, available_bytes=200 * MIB, limited_by="machine")
    monkeypatch.setattr(build, "memory", lambda: free)
    monkeypatch.setattr(build, "memory_holders", lambda: ("postgres (pid 7) 15.00 GiB",))
    model = build.find_model(config)
    with pytest.raises(DoesNotFitError, match="postgres"):
        build.plan_model(config, model)
    with pytest.raises(DoesNotFitError) as caught:
        build.plan_model(dataclasses.replace(config, ram=150 * MIB), model)
    assert "postgres" not in str(caught.value)  # the budget is the user's own


def test_nobody_is_blamed_for_a_pool_that_was_set_too_small(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free = Memory(total_bytes=16 << 30, available_bytes=8 << 30, limited_by="machine")
    monkeypatch.setattr(build, "memory", lambda: free)
    monkeypatch.setattr(plan_lines, "memory_holders", lambda: ("postgres (pid 7) 8.00 GiB",))
    model = build.find_model(config)
    small = dataclasses.replace(config, max_model_len=2048, kv_cache_memory_bytes=512 << 10)
    with pytest.raises(DoesNotFitError) as caught:
        build.plan_model(small, model)
    assert "postgres" not in str(caught.value)
    assert "--kv-cache-memory-bytes 2MiB" in str(caught.value.fix)
    with pytest.raises(DoesNotFitError, match="holds no block") as none:
        build.plan_model(dataclasses.replace(small, kv_cache_memory_bytes=1 << 10), model)
    assert str(none.value.fix).startswith("--kv-cache-memory-bytes 2MiB")
    enough = build.plan_model(dataclasses.replace(small, kv_cache_memory_bytes=2 * MIB), model)
    assert enough.limits.max_model_len == 2048
    shorter = build.plan_model(dataclasses.replace(small, max_model_len=None), model)
    assert shorter.engine.short
    plan_lines.warn_if_short(shorter)
    assert not caplog.records
    plan_lines.warn_if_short(
        dataclasses.replace(shorter, decisions=tuple(one for one in shorter.decisions if one.field != "kv_pool"))
    )
    assert "memory is short; others hold: postgres" in caplog.text


def test_a_family_that_does_not_run_is_said_before_how_to_fetch_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("deepseek-v3", "deepseek-ai/DeepSeek-V3"):
        with pytest.raises(UnknownArchitectureError, match="cannot run it yet"):
            build.find_model(EngineConfig(model=name))


def test_the_plan_travels_to_the_engine_process_whole(config: EngineConfig) -> None:
    plan = build.plan_model(config, build.find_model(config), front_bytes=5)
    sent = protocol.encode(protocol.Init(dataclasses.asdict(config), plan))
    heard = protocol.decode_to_engine(sent)
    assert isinstance(heard, protocol.Init)
    assert heard.plan == plan
    assert heard.plan.terms["front"] == 5


def test_the_table_names_every_term_and_the_limits(config: EngineConfig) -> None:
    model = build.find_model(config)
    plan = build.plan_model(config, model, front_bytes=7 * MIB)
    assert "budget" in plan_lines.plan_line(model.files.name, plan)
    said = "\n".join(plan_lines.plan_details(plan))
    for name in (*plan.terms, "sum", "context 2,048 tokens", "64 sequences", "512 tokens per step"):
        assert name in said
    assert "measured" not in said


def test_a_plan_with_files_and_a_known_gpu_reaches_the_engine_whole(config: EngineConfig, tmp_path: Path) -> None:
    """Tensors of the files stay in the front: the engine process opens them itself."""
    spec = build.find_model(config).spec
    stored = {
        tensor.name: StoredTensor(tensor.name, tensor.shape, "F32", tmp_path, 0, 4 * tensor.elements)
        for tensor in spec.tensors
    }
    known = gpus.find("h100-80")
    gpu = NvidiaGpu(
        index=1, uuid="GPU-1", name="H100", total_bytes=80 << 30, free_bytes=70 << 30, capability=(9, 0), known=known
    )
    machine = Memory(total_bytes=8 << 30, available_bytes=4 << 30, limited_by="machine")
    plans = (
        make_cpu_plan(spec, stored, config, machine, Processor(model="", cores=1, features=frozenset({"avx2"}))),
        make_gpu_plan(spec, stored, dataclasses.replace(config, device="cuda"), [gpu]),
    )
    for plan in plans:
        heard = protocol.decode_to_engine(protocol.encode(protocol.Init({}, plan)))
        assert isinstance(heard, protocol.Init)
        assert heard.plan == plan
        assert heard.plan.terms == plan.terms


def test_a_pool_that_cannot_be_is_not_offered(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing is left beside the rest, a smaller pool does not help either."""
    free = Memory(total_bytes=16 << 30, available_bytes=8 << 30, limited_by="machine")
    monkeypatch.setattr(build, "memory", lambda: free)
    model = build.find_model(config)
    large = dataclasses.replace(config, ram=393 * MIB, kv_cache_memory_bytes=1 << 30, max_num_batched_tokens=8192)
    with pytest.raises(DoesNotFitError, match="a KV pool of") as caught:
        build.plan_model(large, model)
    assert "--kv-cache-memory-bytes" not in str(caught.value.fix)
    assert str(caught.value.fix).startswith("--ram ")


def test_what_was_lowered_for_want_of_memory_is_marked(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    free = Memory(total_bytes=16 << 30, available_bytes=8 << 30, limited_by="machine")
    monkeypatch.setattr(build, "memory", lambda: free)
    model = build.find_model(config)

    def lowered(ram: int) -> set[str]:
        plan = build.plan_model(dataclasses.replace(config, ram=ram, kv_cache_memory_bytes=None), model)
        return {decision.field for decision in plan.decisions if decision.lowered}

    assert lowered(6 << 30) == set()
    assert lowered(420 * MIB) == {"max_num_seqs", "max_num_batched_tokens"}


def test_missing_weights_are_to_be_downloaded_first_of_all(tiny_model: Path, tmp_path: Path) -> None:
    """Random ones run, and answer nonsense: never the first advice."""
    (tmp_path / "config.json").write_bytes((tiny_model / "config.json").read_bytes())
    with pytest.raises(ConfigurationError, match="no weight files") as caught:
        build.find_model(EngineConfig(model=str(tmp_path)))
    assert str(caught.value.fix).startswith("download the weights")
