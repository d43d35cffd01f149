"""LoRA adapters of a model that several ranks, or stages, compute with the runners of GPUs: each has its part of both
factors, answers are those of one rank, and an adapter that one rank cannot read is none's. Where there is no GPU in
Triton's interpreter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gpu_thread_ranks import CPU, GpuThreadRanks, checkpoint_of
from gpu_thread_stages import GpuThreadStages
from lora_adapters import write_adapter
from tiny_gpu import Tiny, prompt

from holdfast.config import EngineConfig
from holdfast.engine.core.loop import EngineCore
from holdfast.engine.requests.adapters import Adapters
from holdfast.errors import AdapterError
from holdfast.execution.batch import as_planned
from holdfast.execution.lora.files import AdapterFiles
from holdfast.execution.lora.slots import LoraLimits
from holdfast.execution.runner import Runner, RunnerLimits
from holdfast.footprint.lora import gpu_bytes
from holdfast.kvcache import KVCache
from holdfast.records import AdapterRef, Failure, Request, SamplingParams
from holdfast.scheduler import Scheduler, SchedulerLimits

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its ranks have the CPU's collectives")

LIMITS = RunnerLimits(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=96, max_loras=2)
LORA = LoraLimits(max_loras=2, max_rank=8, cached=1)
BLOCKS = 48
GREEDY = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
Said = dict[str, tuple[list[int], Failure | None]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("lora-ranks") / "model", architecture="Llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def refs(model: Tiny) -> list[AdapterRef]:
    """More than there are places; one changes a part of the products alone, among them that of one stage."""
    base, known = model.folder.parent, Adapters(model.spec, "tiny", EngineConfig(enable_lora=True, max_lora_rank=8))
    write_adapter(base / "all", model.folder, seed=1, rank=7)
    write_adapter(base / "some", model.folder, seed=2, rank=3, modules=("self_attn.k_proj", "mlp.up_proj"))
    write_adapter(base / "last", model.folder, seed=3, rank=5, modules=("mlp.down_proj", "self_attn.o_proj"))
    return [known.load(name, str(base / name), anywhere=True) for name in ("all", "some", "last")]


def core_of(runner: Any, layout: Any, stages: int = 1) -> EngineCore:
    limits = SchedulerLimits(
        max_num_seqs=4, max_num_batched_tokens=24, max_model_len=96, max_loras=2, apart=stages > 1,
        max_steps_in_flight=2 if stages == 1 else stages,
    )  # fmt: skip
    return EngineCore(Scheduler(limits, KVCache(layout, BLOCKS, True)), runner, steps_ahead=1)


def said(core: EngineCore, adapters: list[AdapterRef | None]) -> Said:
    """Of one prompt with each: nothing cached of one is another's."""
    found: Said = {}
    for number, adapter in enumerate(adapters):
        found[str(number)] = ([], None)
        core.add(Request(request_id=str(number), prompt_token_ids=prompt(1, 9), params=GREEDY, adapter=adapter))
    while core.has_work:
        for output in core.step():
            tokens, failure = found[output.request_id]
            found[output.request_id] = ([*tokens, *output.token_ids], output.failure or failure)
        core.scheduler.check_invariants()
    return found


def of_one(model: Tiny, adapters: list[AdapterRef | None]) -> Said:
    """Which test_gpu_lora holds against merged weights."""
    runner = Runner(model.spec, model.weights(CPU), model.layout(), LIMITS, CPU, lora=LORA)
    runner.back_kv(BLOCKS)
    return said(core_of(runner, model.layout()), adapters)


@pytest.fixture(params=["ranks", pytest.param("stages", id="stages"), pytest.param("both", marks=pytest.mark.long)])
def several(request: pytest.FixtureRequest, model: Tiny) -> Any:
    """Two ranks, two stages, or two ranks in each of two; and their engine."""
    if request.param == "ranks":
        ranks: Any = GpuThreadRanks(model, checkpoint_of(model), 2, LIMITS, BLOCKS, LORA)
        yield core_of(ranks, model.layout()), ranks
    else:
        each = 2 if request.param == "both" else 1
        ranks = GpuThreadStages(model, checkpoint_of(model), [1, 2], each, LIMITS, BLOCKS, LORA)
        yield core_of(ranks.ranked, ranks.layout, 2), ranks
    ranks.close()


@pytest.mark.usefixtures("few_programs")
def test_answers_are_those_of_one_rank(
    several: tuple[EngineCore, Any], model: Tiny, refs: list[AdapterRef], monkeypatch: pytest.MonkeyPatch
) -> None:
    core, ranks = several
    for runner in ranks.runners:
        planned = gpu_bytes(runner.spec, as_planned(LIMITS), dtype="float32", places=2, max_rank=8)
        assert runner.adapters_bytes == planned, "as planned"
    assert sum(one.adapters_bytes for one in ranks.runners) < 2.2 * gpu_bytes(
        model.spec, as_planned(LIMITS), dtype="float32", places=2, max_rank=20
    )
    expected = of_one(model, [*refs, None])
    broken, read = ranks.runners[-1]._adapters.places._files, AdapterFiles.read

    def refusing(files: AdapterFiles, ref: AdapterRef, *given: Any) -> Any:
        if files is broken and ref == refs[0]:
            raise AdapterError("the disk is gone", field="model")
        return read(files, ref, *given)

    monkeypatch.setattr(AdapterFiles, "read", refusing)
    found = said(core, [*refs, None])
    assert found["0"][1] is not None
    assert found["0"][1].message == f"rank {len(ranks.runners) - 1}: the disk is gone"
    assert [found[name] for name in "123"] == [expected[name] for name in "123"]
    monkeypatch.undo()
    assert said(core, refs[:1])["0"] == expected["0"], "once it can be read, all have it"
    assert len({str(tokens) for tokens, _ in expected.values()}) == 4


@pytest.mark.long
@pytest.mark.usefixtures("few_programs")
def test_the_heaviest_step_has_adapters_on_all_ranks(several: tuple[EngineCore, Any]) -> None:
    _, ranks = several
    if isinstance(ranks, GpuThreadRanks):
        ranks.together(lambda rank: ranks.runners[rank].profile_run())
        assert ranks.collectives[0].calls == ranks.collectives[1].calls
        return
    ranks.together(lambda runner: runner.profile_run())
    ranks.together(lambda runner: runner._load_kernels())  # What is launched of a device alone.
    assert not any(line.lying for line in ranks.lines.values())
