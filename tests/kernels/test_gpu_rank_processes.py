"""Ranks on GPUs as the engine starts them, as processes: opened, joined, loaded, measured, and then steps; and one that
is killed. Kernels run in Triton's interpreter; what CUDA IPC itself does needs a GPU: tests/gpu/test_ranks.py."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fake_rank_gpus
import psutil
import pytest
import torch
from adapted_answers import require_adapted
from quantized_files import Format, fp8, write_quantized
from tiny_gpu import Tiny, prompt, run, tokens_of

from holdfast.checkpoints import match, open_checkpoint
from holdfast.config import EngineConfig
from holdfast.config.unsupported import RANK_GPUS
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.process.fault_injection import RANK_NO_MEMORY
from holdfast.engine.ranks.following import AskedPlaces
from holdfast.engine.ranks.gpu import together
from holdfast.engine.ranks.gpu.follower import GpuFollower
from holdfast.engine.ranks.gpu.runner import RankedGpuRunner
from holdfast.engine.ranks.gpu.together import _settled
from holdfast.engine.ranks.group import RankGroup
from holdfast.engine.ranks.messages import Measured
from holdfast.engine.startup.build import _build_on_gpu, find_model
from holdfast.engine.startup.engine_info import EngineInfo
from holdfast.errors import RANK_WITHOUT_MEMORY, EngineDiedError, EngineError
from holdfast.execution.parallel.gpu.link import GpuRankLink
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.models import from_config
from holdfast.planner.serve.gpu_plan import make_gpu_plan
from holdfast.records import SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its ranks have no GPU")
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


Started = tuple[Tiny, EngineCore, EngineInfo]


@contextmanager
def started(folder: Path, staged: bool, made: Format | None = None, **more: Any) -> Iterator[Started]:
    """`made`: how the model's matrices are quantized."""
    (folder / "model").mkdir()
    tiny = Tiny(folder / "model", architecture="Llama", num_hidden_layers=2 if staged else 1)
    if made is not None:
        write_quantized(tiny.folder, folder / "quantized", made)
        tiny.folder = folder / "quantized"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(RANK_GPUS, "0,0")
        if staged:
            patch.setenv(fake_rank_gpus.STAGED, "1")
        fake_rank_gpus.install(patch)
        fake_rank_gpus.start_ranks_here(patch, folder)
        config = EngineConfig(
            model=str(tiny.folder), device="cuda", dtype="float32", max_model_len=96, max_num_seqs=4,
            max_num_batched_tokens=16, kv_cache_memory_bytes=1 << 20, skip_tokenizer_init=True,
            **{"pipeline_parallel_size" if staged else "tensor_parallel_size": 2},
            **({"enable_lora": True, "max_lora_rank": 8} if made is None else {}), **more,
        )  # fmt: skip
        model = find_model(config, progress=False, text=False)
        gpu = NvidiaGpu(
            index=0, uuid="GPU-0", name="fake", total_bytes=fake_rank_gpus.TOTAL_BYTES,
            free_bytes=fake_rank_gpus.FREE_BYTES, capability=(9, 0),
        )  # fmt: skip
        dummy = config.load_format == "dummy"
        stored = None if dummy else match(model.spec, open_checkpoint(model.files))
        plan = make_gpu_plan(model.spec, stored, config, [gpu], name="tiny")
        core, info = _build_on_gpu(config, model, lambda *_: None, plan, None, None)
        yield tiny, core, info
        core.runner.close()


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    with started(tmp_path_factory.mktemp("ranks"), staged=False) as found:
        yield found


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Started]:
    with started(tmp_path_factory.mktemp("stages"), staged=True) as found:
        yield found


@pytest.mark.long
def test_two_stages_start_and_say_what_one_rank_says(stages: Started, tmp_path: Path) -> None:
    tiny, core, info = stages
    assert isinstance(core.runner, RankedGpuRunner)
    rows = info.memory.ranks
    assert [row.weights_bytes for row in rows] == [row.planned_weights_bytes for row in rows]
    assert [(row.device, row.first_layer, row.layers) for row in rows] == [("GPU 0", 0, 1), ("GPU 0", 1, 1)]
    assert any(line.startswith("stage_lines = CUDA IPC (hardware): ranks of one GPU map") for line in info.decisions)
    assert not any(line.startswith("all_reduce") for line in info.decisions), "a stage is one rank"
    prompts = [prompt(1, 18), prompt(2, 3)]
    found = run(core, prompts, [GREEDY, GREEDY])
    for one, outputs in zip(prompts, found, strict=True):
        tiny.assert_greedy(one, tokens_of(outputs))
    require_adapted(tiny, core, tmp_path)


@pytest.mark.long
def test_stages_whose_gpus_map_nothing_of_one_another_hand_on_through_ram(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the real ends of lines, their memory and their sockets."""
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    monkeypatch.setenv(fake_rank_gpus.NODES, "1")
    with started(tmp_path, staged=True) as (tiny, core, info):
        told = "stage_lines = sockets, through pinned memory (hardware): not over CUDA IPC: NCCL_P2P_DISABLE is set"
        assert any(line.startswith(told) for line in info.decisions), info.decisions
        [tier] = info.memory.below
        assert [(term.term, term.planned_bytes > 0) for term in tier.terms] == [("node_lines", True)]
        prompts = [prompt(1, 18), prompt(2, 3)]
        for one, outputs in zip(prompts, run(core, prompts, [GREEDY, GREEDY]), strict=True):
            tiny.assert_greedy(one, tokens_of(outputs))


@pytest.mark.long
def test_a_stage_that_is_killed_while_it_is_awaited_is_named(stages: Started) -> None:
    """The last test of these stages."""
    require_named(stages[1])


@pytest.mark.long
def test_two_processes_start_and_say_what_one_says(engine: Started, tmp_path: Path) -> None:
    tiny, core, info = engine
    assert isinstance(core.runner, RankedGpuRunner)
    rows = info.memory.ranks
    assert [row.weights_bytes for row in rows] == [row.planned_weights_bytes for row in rows]
    assert [(row.device, row.heads, row.layers) for row in rows] == [("GPU 0", 2, len(tiny.spec.layers))] * 2
    assert [row.pid for row in rows] == [os.getpid(), *core.runner.pids]
    assert "all_reduce = CUDA IPC (hardware): ranks of one GPU map one another's memory" in info.decisions
    prompts = [prompt(1, 18), prompt(2, 3)]
    found = run(core, prompts, [GREEDY, GREEDY])
    for one, outputs in zip(prompts, found, strict=True):
        tiny.assert_greedy(one, tokens_of(outputs))
    require_adapted(tiny, core, tmp_path)


@pytest.mark.long
def test_a_rank_that_is_killed_while_it_is_awaited_is_named(engine: Started) -> None:
    """The last test of this engine."""
    require_named(engine[1])


@pytest.mark.long
@pytest.mark.parametrize(
    ("staged", "more"), [(False, {}), (False, {"load_format": "dummy"}), (True, {"load_format": "dummy"})], ids=str
)
def test_rounded_weights_and_pages_in_fp8(staged: bool, more: dict[str, str], tmp_path: Path) -> None:
    """As they are planned; all ranks find the scales of pages before the heaviest step."""
    made = Format({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8(), "fp8")
    with started(tmp_path, staged, made, kv_cache_dtype="fp8", **more) as (_, core, info):
        rows = info.memory.ranks
        assert [row.weights_bytes for row in rows] == [row.planned_weights_bytes for row in rows]
        assert [one for one in info.decisions if one.startswith("kv_cache_scales = keys ")]
        assert any("FP8" in one for one in info.decisions if one.startswith("weights")), info.decisions
        prompts = [prompt(1, 18), prompt(2, 3)]
        found = [tokens_of(outputs) for outputs in run(core, prompts, [GREEDY, GREEDY])]
        again = [tokens_of(outputs) for outputs in run(core, prompts[:1], [GREEDY])]
    assert [len(tokens) for tokens in found] == [4, 4]
    assert again == found[:1]


def require_named(core: EngineCore) -> None:
    """Stopped first: rank 0 has sent the step, and waits on what stands for the GPU."""
    assert isinstance(core.runner, RankedGpuRunner)
    [other] = core.runner.pids
    steps = 0

    def strike() -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(other, signal.SIGSTOP)
            threading.Timer(1.0, os.kill, (other, signal.SIGKILL)).start()

    began_s = time.monotonic()
    with pytest.raises(EngineDiedError, match=rf"rank 1 \(pid {other}\) has ended: signal SIGKILL"):
        run(core, [prompt(1, 5)], [SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)], between=strike)
    assert 0.9 < time.monotonic() - began_s < 30
    with pytest.raises(EngineDiedError, match="signal SIGKILL"):
        core.check_ranks()  # As is asked for while there is nothing to do.
    core.runner.close()
    assert not psutil.pid_exists(other)


def test_ranks_of_a_start_that_fails_leave_when_nothing_reads_their_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 fails in the heaviest step, beside another one that is in it; no process is left."""
    order, groups = list[str](), list[Any]()
    start, close = together.start_group, RankGroup.close

    def kept_group(*given: Any, **named: Any) -> Any:
        groups.append(start(*given, **named))
        return groups[-1]

    def failed(*_: Any) -> Any:
        raise RuntimeError("made to fail in the heaviest step")

    def finished(device: torch.device) -> None:
        [other] = groups[0].pids
        assert psutil.Process(other).status() != psutil.STATUS_ZOMBIE, "it holds what is read"
        order.append("rank 0's GPU is waited for")

    def told(name: str, act: Any) -> Any:
        return lambda own: (order.append(name), act(own))

    monkeypatch.setattr(together, "start_group", kept_group)
    monkeypatch.setattr(together, "profile_gpu_rank", failed)
    monkeypatch.setattr(together, "finish", finished)
    monkeypatch.setattr(RankGroup, "close", told("ranks leave", close))
    for name in ("give_up", "leave"):
        monkeypatch.setattr(GpuRankLink, name, told(name, getattr(GpuRankLink, name)))
    with pytest.raises(RuntimeError, match="made to fail"), started(tmp_path, staged=False, load_format="dummy"):
        pass
    before = order.index("rank 0's GPU is waited for")
    assert order[:before] == ["give_up"]
    assert "ranks leave" in order[before:]
    assert order[-1] == "leave"
    assert not any(psutil.pid_exists(pid) for pid in groups[0].pids)


def test_a_rank_that_ended_before_ranks_were_joined_is_not_awaited() -> None:
    told = list[str]()
    collectives: Any = SimpleNamespace(give_up=lambda: told.append("give up"))
    late, usual = GpuRankLink(), GpuRankLink()
    late.give_up()
    late.join(collectives)
    assert told == ["give up"]
    usual.join(collectives)
    assert told == ["give up"]
    usual.give_up()
    assert told == ["give up"] * 2


@pytest.mark.parametrize("failed", [False, True])
def test_ranks_leave_when_nothing_reads_their_memory_any_more(failed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were launched, and that nobody reads. What has failed reads nothing."""
    order = list[str]()

    def synchronize(device: torch.device) -> None:
        order.append(f"{device} is waited for")
        if failed:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def told(*names: str) -> Any:
        return SimpleNamespace(**{name: lambda name=name: order.append(name) for name in names})

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    runner, group, link = told("close"), told("close"), told("give_up", "leave")
    runner.device, group.size, group.settled_adapters = torch.device("cuda", 1), 2, lambda waited_s: []
    group.spread = SimpleNamespace(nodes=1)
    RankedGpuRunner(runner, group, link).close()
    assert order == ["give_up", "cuda:1 is waited for", "close", "close", "leave"]


def test_stages_on_gpus_that_differ_have_the_pool_that_each_gpu_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    """By what each rank measured, held against its own part: the first has most of the weights."""
    spec = from_config({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 32000, "hidden_size": 4096,
        "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    })  # fmt: skip
    gpus = [
        NvidiaGpu(index=at, uuid=f"GPU-{at}", name="fake", total_bytes=gib << 30, free_bytes=gib << 30,
                  capability=(8, 9)) for at, gib in enumerate((24, 12))
    ]  # fmt: skip
    monkeypatch.setenv(RANK_GPUS, "0,1")
    plan = make_gpu_plan(spec, None, EngineConfig(device="cuda", pipeline_parallel_size=2), gpus, name="uneven")
    assert plan.engine.rank_weights[0] > 2 * plan.engine.rank_weights[1]

    def settled(rank: int, more_bytes: int) -> int:
        """Blocks, where this rank took so much more than planned."""
        measured = []
        for at, share in enumerate(plan.stage_ranks):
            terms = {term.name: term.nbytes for term in share.terms}
            terms["activations"] += more_bytes if at == rank else 0
            held = sum(terms.values())
            free = gpus[at].total_bytes - held
            measured.append(Measured(terms, 0, 0, 0, free_bytes=free, own_bytes=held, kv_bytes=0))
        return _settled(plan, measured).engine.blocks

    assert settled(0, 0) == plan.engine.blocks
    for rank, share in enumerate(plan.stage_ranks):
        page = plan.engine.layout_of(rank).page_bytes
        assert settled(rank, share.left_bytes - share.pool_bytes) == plan.engine.blocks, "the budget has it"
        assert settled(rank, share.left_bytes - share.pool_bytes + 50 * page) == plan.engine.blocks - 50


def follower_with(runner: Any) -> Any:
    follower: Any = object.__new__(GpuFollower)
    follower._member, follower._asked = SimpleNamespace(runner=runner), AskedPlaces()
    follower._serves = True
    return follower


def step_of(follower: Any, plan: Any) -> None:
    with follower._shortage_named(in_step=True):
        follower._execute(plan)


def test_a_rank_without_memory_says_so_by_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever else fails stays what it is. On purpose: once."""

    def runner(error: Exception | None) -> Any:
        def submit(plan: Any) -> Any:
            if error is not None:
                raise error
            return SimpleNamespace(adapters=[])

        return SimpleNamespace(check=lambda: None, submit=submit)

    plan: Any = SimpleNamespace(fetches=[])
    for shortage in (
        torch.OutOfMemoryError("CUDA out of memory. Tried"),
        RuntimeError("CUDA error: out of memory\nat"),
    ):
        with pytest.raises(EngineError, match="out of GPU memory in a step") as caught:
            step_of(follower_with(runner(shortage)), plan)
        assert (caught.value.code, caught.value.found) == (RANK_WITHOUT_MEMORY, str(shortage).splitlines()[0])
    with pytest.raises(EngineError, match="out of memory in a step"):
        step_of(follower_with(runner(MemoryError())), plan)
    with pytest.raises(RuntimeError, match="an illegal address"):
        step_of(follower_with(runner(RuntimeError("an illegal address"))), plan)
    lacking = tmp_path / "lacking"
    monkeypatch.setenv(RANK_NO_MEMORY, str(lacking))
    step_of(follower_with(runner(None)), plan)
    lacking.touch()
    with pytest.raises(EngineError, match="out of GPU memory in a step") as caught:
        step_of(follower_with(runner(None)), plan)
    assert caught.value.code == RANK_WITHOUT_MEMORY
    step_of(follower_with(runner(None)), plan)


@pytest.mark.long
def test_a_rank_without_memory_ends_all_of_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the words of the rank, with its number: not as a death, or as one that does not come."""
    lacking, steps = tmp_path / "lacking", itertools.count(1)
    monkeypatch.setenv(RANK_NO_MEMORY, str(lacking))
    with started(tmp_path, staged=False) as (_, core, _):
        assert isinstance(core.runner, RankedGpuRunner)
        [other] = core.runner.pids
        params = [SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True)]
        with pytest.raises(EngineError, match="rank 1: out of GPU memory in a step") as caught:
            run(core, [prompt(1, 5)], params, between=lambda: lacking.touch() if next(steps) == 3 else None)
        assert caught.value.code == RANK_WITHOUT_MEMORY
    assert not psutil.pid_exists(other)
