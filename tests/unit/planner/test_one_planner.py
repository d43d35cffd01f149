"""`holdfast plan` and `holdfast serve` are one planner on a CPU: the same terms, pool, context and refusals."""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoints import LAYOUTS, StoredTensor
from holdfast.config import EngineConfig
from holdfast.errors import DoesNotFitError
from holdfast.footprint.cpu import FRONT_BYTES
from holdfast.hardware import Memory, Processor
from holdfast.models import ModelSpec, from_config
from holdfast.planner import make_cpu_plan
from holdfast.planner.advice.remedies import ways_out
from holdfast.planner.fit.search import Plan, Question, fit
from holdfast.planner.inputs.question import Device, Machine, PlannedModel, Settings, Traffic
from holdfast.planner.report.answer import answer
from holdfast.units import GIB, MIB, format_bytes

FREE_BYTES = 21 * GIB
ARM = frozenset({"asimd", "asimddp"})
PROCESSORS = [(ARM, True), (ARM, False), (frozenset({"avx2"}), True), (frozenset({"amx_bf16"}), True)]
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 49152, "hidden_size": 576,
    "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 100000.0, "tie_word_embeddings": True,
    "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
}  # fmt: skip
"""SmolLM2-135M's."""


def stored_as(spec: ModelSpec, layout: str, tmp_path: Any) -> dict[str, StoredTensor]:
    """Matrices so, vectors in float32, as GGUF files and folders of safetensors have them."""
    found = {}
    for tensor in spec.tensors:
        kind = layout if len(tensor.shape) == 2 else "F32" if LAYOUTS[layout].block_elements > 1 else layout
        size = LAYOUTS[kind].bytes_for(tensor.shape) or 0
        found[tensor.name] = StoredTensor(tensor.name, tensor.shape, kind, tmp_path, 0, size)
    return found


@pytest.fixture(scope="module", params=["Q4_1", "BF16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PlannedModel:
    """The built-in model's GGUF, and a folder of safetensors."""
    spec = from_config(CONFIG)
    stored = stored_as(spec, request.param, tmp_path_factory.mktemp("model"))
    kind = "gguf" if request.param == "Q4_1" else "safetensors"
    return PlannedModel(name="m", spec=spec, origin="folder", stored=stored, canonical=stored, format=kind)


def planned(
    model: PlannedModel, features: frozenset[str], kernels: bool, traffic: Traffic | None = None, **settings: Any
) -> Plan:
    ram = settings.pop("ram", None)
    device = Device(
        index=0, name="cpu", kind="cpu", total_bytes=ram or FREE_BYTES, free_bytes=ram or FREE_BYTES, budget_bytes=ram
    )
    machine = Machine(devices=(device,), cpu_features=features, compiled_kernels=kernels)
    return fit(Question(model=model, machine=machine, settings=Settings(**settings), traffic=traffic))


def served(model: PlannedModel, features: frozenset[str], kernels: bool, **settings: Any) -> Plan:
    memory = Memory(total_bytes=FREE_BYTES, available_bytes=FREE_BYTES, limited_by="machine")
    processor = Processor(model="", cores=2, features=features)
    config = EngineConfig.from_arguments(**settings)
    return make_cpu_plan(
        model.spec, model.canonical, config, memory, processor, compiled_kernels=kernels, front_bytes=FRONT_BYTES
    )


def assert_same(found: Plan, plan: Plan) -> None:
    (rank,) = found.ranks
    assert found.fits
    assert rank.budget_bytes == plan.budget_bytes
    assert {**{term.name: term.nbytes for term in rank.terms}, "kv_pool": rank.pool_bytes} == dict(plan.terms)
    assert found.limits == plan.limits
    assert found.kv_tokens == (plan.engine.blocks - 1) * plan.engine.layout.block_tokens
    assert (found.dtype, found.kv_dtype) == (plan.dtype, plan.kv_dtype)
    assert found.weights_bytes == plan.terms["weights"]
    assert rank.unused_bytes == plan.budget_bytes - sum(plan.terms.values())


SETTINGS: list[dict[str, Any]] = [
    {},
    {"max_model_len": 2048},
    {"max_model_len": 300, "max_num_seqs": 1},
    {"max_num_seqs": 4, "max_num_batched_tokens": 64},
    {"dtype": "bfloat16"},
    {"dtype": "float32", "kv_cache_dtype": "float16"},
    {"dtype": "float32", "kv_cache_dtype": "fp8"},
]


@pytest.mark.parametrize(
    ("model", "features", "kernels", "settings"),
    [
        # Each processor with each settings, and each of both with each model; all three in long runs.
        pytest.param(
            kind,
            *PROCESSORS[processor],
            SETTINGS[number],
            id=f"{kind}-{processor}-{SETTINGS[number]}",
            marks=pytest.mark.long if (processor + number) % 2 == (kind == "BF16") else (),
        )
        for kind in ("Q4_1", "BF16")
        for processor in range(len(PROCESSORS))
        for number in range(len(SETTINGS))
    ],
    indirect=["model"],
)
def test_plan_and_serve_give_the_same_numbers(
    model: PlannedModel, features: frozenset[str], kernels: bool, settings: dict[str, Any]
) -> None:
    for ram in (None, 300 * MIB, 640 * MIB, 700 * MIB, GIB, 2 * GIB, 6 * GIB):
        asked = settings if ram is None else {**settings, "ram": ram}
        found = planned(model, features, kernels, **asked)
        if found.fits:
            assert_same(found, served(model, features, kernels, **asked))
            continue
        with pytest.raises(DoesNotFitError, match="fit") as refused:
            served(model, features, kernels, **asked)
        assert f": {format_bytes(found.short_bytes)} short" in str(refused.value.found)
        advised = re.search(r"--max-model-len (\d+)", str(refused.value.fix))
        assert advised is None or int(advised[1]) == found.longest_tokens


@pytest.mark.parametrize("more", [None, 2 * MIB, 40 * MIB, 100 * MIB, 200 * MIB, 2 * GIB])
def test_the_command_of_a_plan_serves_its_numbers(model: PlannedModel, more: int | None) -> None:
    """Its settings are those that were planned with: other limits would leave another pool."""
    least = 300 * MIB + planned(model, ARM, True, ram=300 * MIB).short_bytes
    found = planned(model, ARM, True, ram=None if more is None else least + more)
    command = shlex.split(answer(found.question).commands["holdfast"].text)[3:]
    flags = dict(zip(command[::2], command[1::2], strict=True))
    asked = {name.removeprefix("--").replace("-", "_"): value for name, value in flags.items()}
    assert found.fits
    assert int(asked["max_num_seqs"]) == found.limits.max_num_seqs
    assert_same(found, served(model, ARM, True, **asked))


def test_the_cases_that_differed(model: PlannedModel) -> None:
    """Of the built-in model on Arm: contexts, pools and shortages of plan and serve were two sets of numbers."""
    if model.format != "gguf":
        return
    assert planned(model, ARM, True, ram=1416 * MIB).limits.max_model_len == 8192
    assert planned(model, ARM, True).ranks[0].pool_bytes <= 4 * GIB
    assert planned(model, ARM, True, ram=992 * MIB).fits


def test_a_context_that_is_of_use_to_nobody_is_neither_served_nor_advised(model: PlannedModel) -> None:
    """Limits are set, so that nothing but the context can give way."""
    limits = {"max_num_seqs": 64, "max_num_batched_tokens": 512}
    least = planned(model, ARM, True, ram=300 * MIB, **limits)
    enough = 300 * MIB + least.short_bytes + 2 * MIB
    assert planned(model, ARM, True, ram=enough, **limits).limits.max_model_len >= 512
    tight = enough - 8 * MIB
    with pytest.raises(DoesNotFitError, match="short") as unset:
        served(model, ARM, True, ram=tight, **limits)
    assert "--ram" in str(unset.value.fix)
    with pytest.raises(DoesNotFitError, match="short") as asked:
        served(model, ARM, True, ram=tight, max_model_len=4096, **limits)
    assert all(int(length) >= 512 for length in re.findall(r"--max-model-len (\d+)", str(asked.value.fix)))
    assert "--ram" in str(asked.value.fix)
    assert served(model, ARM, True, ram=tight, max_model_len=64, **limits).limits.max_model_len == 64


@pytest.mark.parametrize("ram", [None, 3 * GIB])
def test_traffic_is_served_with_the_settings_that_the_plan_names(model: PlannedModel, ram: int | None) -> None:
    """The default pool is 4 GiB: more must be said."""
    asked = {} if ram is None else {"ram": ram}
    for concurrency, length in ((4, 2000), (64, 3000), (64, 500)):
        traffic = Traffic(concurrency=concurrency, prompt_tokens=length, output_tokens=0)
        found = planned(model, ARM, True, traffic, **asked)
        assert found.fits == (ram is None or concurrency * length < 40_000)
        if found.fits:
            limits = {"max_model_len": found.limits.max_model_len, "max_num_seqs": found.limits.max_num_seqs}
            assert_same(found, served(model, ARM, True, **asked, **limits, **found.serve_settings))
            assert found.concurrency(length) >= concurrency


def test_weights_are_not_expanded_at_the_cost_of_context(model: PlannedModel) -> None:
    """Around the budget from which there is room to spare, in serve as in plan."""
    long = replace(model, spec=replace(model.spec, max_position=1 << 20))
    features = frozenset({"avx2"})
    lengths = [served(long, features, False, ram=size * MIB).limits.max_model_len for size in range(1900, 2500, 40)]
    assert lengths == sorted(lengths)


def test_half_precision_is_kept_where_products_are_compiled_and_that_is_said(tmp_path: Path) -> None:
    """A name of the catalogue is counted as its published file would be, and that as serve would load it."""
    spec = from_config(CONFIG)
    stored = stored_as(spec, "BF16", tmp_path)
    file = PlannedModel(name="m", spec=spec, origin="folder", stored=stored, canonical=stored, format="safetensors")
    named = PlannedModel(name="m", spec=spec, origin="catalogue")
    for kernels, dtype in ((True, "bfloat16"), (False, "float32")):
        plan = served(file, ARM, kernels, ram=2 * GIB)
        for model in (file, named):
            found = planned(model, ARM, kernels, ram=2 * GIB)
            assert found.weights_bytes == plan.terms["weights"]
            assert (found.dtype, found.weights_dtype) == ("float32", dtype)
        said = {decision.field: decision.value for decision in plan.decisions}
        assert said.get("weights") == (dtype if kernels else None)


def test_the_pool_holds_the_longest_context_that_is_said(model: PlannedModel) -> None:
    """Where a longer one was asked for: its own tables would leave less, but nobody will have those."""
    whole = planned(model, ARM, True, ram=2 * GIB)
    tight = sum(term.nbytes for term in whole.ranks[0].terms) + 120 * MIB
    found = planned(model, ARM, True, ram=tight, max_model_len=8192)
    assert not found.fits
    assert 0 < found.longest_tokens < 8192
    assert found.kv_tokens >= found.longest_tokens
    assert found.concurrency(found.longest_tokens) >= 1
    assert planned(model, ARM, True, ram=tight, max_model_len=found.longest_tokens).fits


def test_both_advise_the_same_smaller_kv(model: PlannedModel) -> None:
    whole = planned(model, ARM, True, ram=2 * GIB)
    tight = sum(term.nbytes for term in whole.ranks[0].terms) + 220 * MIB
    found = planned(model, ARM, True, ram=tight, max_model_len=8192)
    (way,) = [way for way in ways_out(found) if way.kind == "kv_cache_dtype"]
    with pytest.raises(DoesNotFitError) as refused:
        served(model, ARM, True, ram=tight, max_model_len=8192)
    assert way.flags == "--kv-cache-dtype float16"
    assert way.flags in str(refused.value.fix)
