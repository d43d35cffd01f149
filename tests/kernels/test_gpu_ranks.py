"""Several ranks with the runners of GPUs: the same tokens as one, with chunks, prefixes, drawn tokens, scored prompts
and masks, whatever a rank has of heads and vocabulary. Where there is no GPU in Triton's interpreter."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from embedded_prompts import assert_same_vectors, embedded
from gpu_thread_ranks import CPU, GpuThreadRanks, checkpoint_of
from held_answers import PARAMS as HELD
from held_answers import raw_of, text_of, with_forms
from msgspec.structs import replace
from quantized_files import Format, compressed, fp8, int8, write_quantized
from quantized_formats import FORMATS
from tiny_gpu import LAYERS, Tiny, prompt, run, tokens_of, told_of

from holdfast.engine.core import masks
from holdfast.engine.core.loop import EngineCore
from holdfast.execution import kv_scales
from holdfast.execution.batch import RunnerLimits
from holdfast.execution.gpu.layers import linear as linear_module
from holdfast.execution.gpu.layers.linear import DividedGpuLinear, GatheredGpuLinear
from holdfast.execution.gpu.layers.quantized_linear import QuantizedGpuLinear
from holdfast.execution.gpu.layers.rounded_linear import RoundedGpuLinear
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import load_weights
from holdfast.kvcache import KVCache
from holdfast.models import from_config
from holdfast.records import SamplingParams
from holdfast.scheduler import Scheduler, SchedulerLimits
from holdfast.text.structured.client import GrammarService

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="its ranks have the CPU's collectives")

SLOTS, STEP, BLOCKS = 4, 16, 64
MOE = {"architecture": "Qwen3Moe", "head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2,
       "moe_intermediate_size": 32, "decoder_sparse_step": 1, "mlp_only_layers": []}  # fmt: skip
GEMMA = {"architecture": "Gemma3", "head_dim": 16, "sliding_window": 9,
         "layer_types": ["full_attention", "sliding_attention"][-LAYERS:]}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)


def ranked(tiny: Tiny, size: int, blocks: int = BLOCKS, **more: Any) -> tuple[EngineCore, GpuThreadRanks]:
    limits = RunnerLimits(max_num_seqs=SLOTS, max_num_batched_tokens=STEP, max_model_len=96)
    ranks = GpuThreadRanks(tiny, checkpoint_of(tiny), size, limits, blocks, **more)
    scheduler = Scheduler(
        SchedulerLimits(
            max_num_seqs=SLOTS, max_num_batched_tokens=STEP, max_model_len=96, policy="fcfs", max_steps_in_flight=2
        ),
        KVCache(tiny.layout(), blocks, True),
    )
    runner: Any = ranks
    return EngineCore(scheduler, runner, steps_ahead=1), ranks


def answers(core: EngineCore, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    return [tokens_of(outputs) for outputs in run(core, prompts, params)]


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        pytest.param({"architecture": "Llama"}, 2, id="llama"),
        pytest.param(MOE, 2, id="moe", marks=pytest.mark.long),
        pytest.param(GEMMA, 2, id="window", marks=pytest.mark.long),
        pytest.param({"architecture": "Qwen2"}, 3, id="bias and shared KV heads"),
        pytest.param({"architecture": "Olmo2"}, 3, id="heads that are normed together, and shared KV heads"),
    ],
)
@pytest.mark.usefixtures("few_programs")
def test_tokens_are_those_of_one_rank(settings: dict[str, Any], size: int, tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, **settings)
    prompts, params = [prompt(1, 18), prompt(2, 3)], [GREEDY, GREEDY]
    core, ranks = ranked(tiny, size)
    found = answers(core, prompts, params)
    for one, tokens in zip(prompts, found, strict=True):
        tiny.assert_greedy(one, tokens)
    assert len({tuple(one.calls) for one in ranks.collectives}) == 1, "all ranks do the same in the same order"
    again = answers(core, [prompts[0]], [GREEDY])
    assert again == found[:1], "with the prefix that is cached"
    ranks.close()


DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic"}
STATIC = {"quant_method": "fp8", "activation_scheme": "static"}
BLOCKS_OF_128 = DYNAMIC | {"weight_block_size": [128, 128]}
INTEGERS = {"num_bits": 8, "type": "int", "symmetric": True}
CODES = {
    "fp8": Format(DYNAMIC, fp8(), "fp8"),
    "int8": Format(
        compressed(
            {**INTEGERS, "strategy": "channel"}, {**INTEGERS, "dynamic": True, "strategy": "token"}, "int-quantized"
        ),
        int8(),
        "int8",
    ),
    "experts in blocks": Format(BLOCKS_OF_128, fp8("block", block=(128, 128), name="weight_scale_inv"), "fp8",
                                input_group=128),
    "experts static": Format(STATIC, fp8(static=0.02), "fp8", 0.02),
}  # fmt: skip


class TinyCodes(Tiny):
    """A model whose matrices are codes: in its files (`made`), or from loading on (`quantize`)."""

    def __init__(self, folder: Path, made: Format | None = None, quantize: Any = None, **settings: Any) -> None:
        (folder / "plain").mkdir()
        super().__init__(folder / "plain", **{"architecture": "Llama"} | settings)
        self.loading = {"expand": False, "quantize": quantize}
        if made is not None:
            write_quantized(self.folder, folder / "quantized", made)
            self.folder = folder / "quantized"
            self.spec = from_config(json.loads((self.folder / "config.json").read_text()))

    def weights(self, device: torch.device) -> Weights:
        return load_weights(self.spec, checkpoint_of(self)(), dtype=torch.float32, device=device, **self.loading)


def assert_as_alone(tiny: TinyCodes, size: int, close: float = 1e-4) -> GpuThreadRanks:
    """Two prompts on so many ranks say what they say on one."""
    prompts, params = [prompt(1, 18), prompt(2, 3)], [replace(GREEDY, max_tokens=2, logprobs=1)] * 2
    core, ranks = ranked(tiny, size, **tiny.loading)
    found = run(core, prompts, params)
    assert len({tuple(one.calls) for one in ranks.collectives}) == 1, "all ranks do the same in the same order"
    ranks.close()
    alone = run(tiny.core(CPU, gpu=True), prompts, params)
    for ours, theirs in zip(found, alone, strict=True):
        assert tokens_of(ours) == tokens_of(theirs)
        for mine, other in zip(ours, theirs, strict=True):
            for one, two in zip(mine.logprobs or [], other.logprobs or [], strict=True):
                assert one.logprobs == pytest.approx(two.logprobs, abs=close)
    return ranks


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("fp8", 2),
        pytest.param("fp8", 4, marks=pytest.mark.long),
        pytest.param("int8", 2, marks=pytest.mark.long),
        pytest.param("quantize", 2, marks=pytest.mark.long),
    ],
)
@pytest.mark.usefixtures("few_programs")
def test_rows_are_rounded_as_one_rank_rounds_them(name: str, size: int, tmp_path: Path) -> None:
    """What comes into o and down: ranks tell each other the largest of each row first."""
    tiny = TinyCodes(tmp_path, CODES.get(name), None if name in CODES else "fp8")
    layers: Any = assert_as_alone(tiny, size).runners[1].decoder._layers
    assert isinstance(layers[0].o, DividedGpuLinear)
    assert isinstance(layers[0].mlp._down, DividedGpuLinear)


@pytest.mark.parametrize(
    "settings",
    [{}, pytest.param({"architecture": "Qwen2", "hidden_size": 128}, marks=pytest.mark.long)],
    ids=["llama", "shared KV heads and bias"],
)
@pytest.mark.usefixtures("few_programs")
def test_columns_in_an_order_of_their_own_take_inputs_of_all_ranks(
    settings: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPTQ in act-order: o and down, in tiles of few rows."""
    monkeypatch.setattr(linear_module, "GATHERED_ROWS", 6)
    tiny = TinyCodes(tmp_path, FORMATS["gptq-ordered"], **settings)
    made: Any = assert_as_alone(tiny, 2).runners[1].decoder._layers
    assert isinstance(made[0].o, GatheredGpuLinear)
    assert isinstance(made[0].mlp._down, GatheredGpuLinear)


@pytest.mark.long
@pytest.mark.parametrize("name", ["experts in blocks", "experts static"])
@pytest.mark.usefixtures("few_programs")
def test_experts_are_rounded_without_asking_others(name: str, tmp_path: Path) -> None:
    """Whose scales are of groups of columns, or stored; attention beside them is as it is."""
    wide = {"hidden_size": 128, "moe_intermediate_size": 256, "head_dim": 128, "initializer_range": 0.08}
    tiny = TinyCodes(tmp_path, CODES[name], **MOE | wide)
    layers: Any = assert_as_alone(tiny, 2).runners[1].decoder._layers
    assert isinstance(layers[0].o, RoundedGpuLinear)


@pytest.mark.long
@pytest.mark.usefixtures("few_programs")
def test_what_is_quantized_while_ranks_load_has_the_groups_of_one(tmp_path: Path) -> None:
    tiny = TinyCodes(tmp_path, None, "int4", hidden_size=128, intermediate_size=256, head_dim=64)
    layers: Any = assert_as_alone(tiny, 2).runners[1].decoder._layers
    assert isinstance(layers[0].o, QuantizedGpuLinear)


@pytest.mark.usefixtures("few_programs")
def test_keys_and_values_in_fp8_have_the_scales_of_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer's scale is that of its largest on any rank, here the second's."""
    monkeypatch.setattr(kv_scales, "SEQUENCES", 1)
    monkeypatch.setattr(kv_scales, "TOKENS", 5)
    tiny, stored = Tiny(tmp_path, architecture="Llama"), torch.float8_e4m3fn
    attention: Any = tiny.model.model.layers[0].self_attn
    with torch.inference_mode():
        for projected in (attention.k_proj, attention.v_proj):
            projected.weight[16:] *= 8
    tiny.model.save_pretrained(tmp_path)
    prompts, params = [prompt(1, 18)], [replace(GREEDY, max_tokens=2)]
    one = tiny.core(CPU, gpu=True, kv_dtype=stored)
    core, ranks = ranked(tiny, 2, kv_dtype=stored)
    wanted: Any = one.runner
    for runner in ranks.runners:
        assert (runner.kv_scales.keys, runner.kv_scales.values) == (wanted.kv_scales.keys, wanted.kv_scales.values)
    assert answers(core, prompts, params) == answers(one, prompts, params)
    ranks.close()


@pytest.mark.usefixtures("few_programs")
def test_drawn_tokens_scores_and_biases_are_those_of_one_rank(tmp_path: Path) -> None:
    """What only the first rank does, the others follow: a row that is biased, one that is drawn, scores of a prompt."""
    tiny = Tiny(tmp_path, architecture="Llama")
    params = [
        SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True, logit_bias={7: 50.0}, logprobs=2),
        SamplingParams(temperature=0.8, seed=5, max_tokens=3, ignore_eos=True, prompt_logprobs=1),
    ]
    prompts = [prompt(3, 4), prompt(4, 6)]
    core, ranks = ranked(tiny, 2)
    found = run(core, prompts, params)
    alone = run(tiny.core(CPU, gpu=True), prompts, params)
    assert [tokens_of(one) for one in found] == [tokens_of(one) for one in alone]
    assert tokens_of(found[0]) == [7, 7, 7]
    for ours, theirs in zip(told_of(found[1]), told_of(alone[1]), strict=True):
        assert ours.token_ids == theirs.token_ids
        assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    assert len({tuple(one.calls) for one in ranks.collectives}) == 1
    ranks.close()


@pytest.mark.usefixtures("few_programs")
def test_answers_that_are_held_to_a_form_are_those_of_one_rank(
    tmp_path: Path, services: list[GrammarService], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the first rank knows masks. One step's are late: its rows are computed once more, on all ranks."""
    tiny = Tiny(tmp_path, architecture="Llama")
    prompts = [prompt(number, 3 + number) for number in range(len(HELD))]
    alone = run(with_forms(tiny.core(CPU, gpu=False), tiny.spec.vocab_size, services), prompts, HELD)
    calls, real = itertools.count(), masks.StepMasks.rows
    monkeypatch.setattr(masks.StepMasks, "rows", lambda step, busy: {} if next(calls) == 1 else real(step, busy))
    core, ranks = ranked(tiny, 2)
    try:
        found = run(with_forms(core, tiny.spec.vocab_size, services), prompts, HELD)
    finally:
        ranks.close()
    assert next(calls) > 2
    assert [tokens_of(one) for one in found] == [tokens_of(one) for one in alone]
    assert re.fullmatch("[a-c]{3,5}", text_of(tokens_of(found[0])))
    assert re.fullmatch("([a-m][0-9]?)*", text_of(tokens_of(found[2])))
    assert raw_of(found[2]) == raw_of(alone[2]), "raw, whatever the form forbids"
    assert len({tuple(one.calls) for one in ranks.collectives}) == 1, "all ranks do the same in the same order"


@pytest.mark.usefixtures("few_programs")
def test_vectors_of_prompts_are_those_of_one_rank(tmp_path: Path) -> None:
    """In chunks, from cached prefixes, and beside an answer."""
    tiny = Tiny(tmp_path, architecture="Llama")
    prompts = [prompt(0, 21), prompt(1, 1)]
    core, ranks = ranked(tiny, 2)
    try:
        here = embedded(core, prompts)
    finally:
        ranks.close()
    there = embedded(tiny.core(CPU, gpu=False), prompts)
    assert_same_vectors(here, there, tiny.spec.hidden_size)
    assert here["again-0"].cached_tokens == there["again-0"].cached_tokens == 20
    assert len({tuple(one.calls) for one in ranks.collectives}) == 1, "all ranks do the same in the same order"


@pytest.mark.usefixtures("few_programs")
def test_answers_survive_a_pool_that_is_too_small(tmp_path: Path) -> None:
    """One of two sequences is preempted and computed again, on all ranks alike."""
    tiny = Tiny(tmp_path, architecture="Llama")
    prompts, params = [prompt(number, 12) for number in range(2)], GREEDY.replace(max_tokens=10)
    core, ranks = ranked(tiny, 2, blocks=9)
    try:
        found = run(core, prompts, [params, params])
    finally:
        ranks.close()
    assert core.stats().preemptions_total > 0
    for one, outputs in zip(prompts, found, strict=True):
        tiny.assert_greedy(one, tokens_of(outputs))


@pytest.mark.usefixtures("few_programs")
def test_the_heaviest_step_is_the_same_on_all_ranks(tmp_path: Path) -> None:
    tiny = Tiny(tmp_path, architecture="Llama")
    _, ranks = ranked(tiny, 2)
    ranks.together(lambda rank: ranks.runners[rank].profile_run())
    calls = [one.calls for one in ranks.collectives]
    assert calls[0]
    assert calls[0] == calls[1]
    ranks.close()
