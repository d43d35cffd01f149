"""Weights of quantized models as this engine holds them: a plan counts what would be allocated, to the byte."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast.checkpoints import StoredTensor
from holdfast.config.engine import EngineConfig
from holdfast.errors import ConfigurationError
from holdfast.footprint import cpu as footprint
from holdfast.footprint.cpu import Limits
from holdfast.footprint.gpu import activations_bytes
from holdfast.footprint.identity_key import Same
from holdfast.footprint.rounded import workspace_bytes
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.hardware import Processor
from holdfast.hardware.nvidia import NvidiaGpu
from holdfast.hardware.probe import KERNEL_VARIANTS
from holdfast.models import QuantSpec, catalogue, describe_config
from holdfast.planner.fit.result import Plan
from holdfast.planner.fit.search import Question, fit
from holdfast.planner.inputs.question import Device, PlannedModel
from holdfast.planner.models.quantize import as_plain, quantized_as
from holdfast.planner.models.variants import planned
from holdfast.planner.serve.gpu_plan import make_gpu_plan
from holdfast.planner.sizing.engine_weights import described, engine_weights, held_or_not
from holdfast.units import GIB, MIB

Ask = Callable[..., Question]


def known(name: str) -> PlannedModel:
    found = planned(catalogue.find(name))
    assert found is not None
    return found


def by_hand(model: PlannedModel, layout: ScaledLayout) -> int:
    """Of a dense llama: linear layers in this layout, the rest in two bytes."""
    total = 0
    for tensor in model.spec.tensors:
        quantized = tensor.linear and tensor.name != "head"
        total += layout.bytes_for(*tensor.shape) if quantized else 2 * tensor.elements
    return total


@pytest.mark.parametrize(
    ("name", "method", "layout"),
    [
        ("llama-3.1-8b-awq", None, ScaledLayout(codes="int4", scales="float16", group=128, zeros=True)),
        ("llama-3.1-8b", "awq", ScaledLayout(codes="int4", scales="float16", group=128, zeros=True)),
        ("llama-3.1-8b", "int4", ScaledLayout(codes="int4", scales="float16", group=128)),
        ("llama-3.1-8b", "fp8", ScaledLayout(codes="fp8")),
        ("llama-3.1-8b-w4a16", None, ScaledLayout(codes="int4", scales="bfloat16", group=128)),
        ("qwen3-8b-fp8", None, ScaledLayout(codes="fp8", group=128, group_rows=128)),
    ],
)
def test_the_plan_of_a_gpu_counts_the_layouts(ask: Ask, name: str, method: str | None, layout: ScaledLayout) -> None:
    question = ask(name, "rtx4090")
    if method is not None:
        question = replace(question, model=quantized_as(question.model, method))
    found = fit(question)
    terms = {term.name: term.nbytes for term in found.ranks[0].terms}
    assert terms["weights"] == found.weights_bytes == by_hand(question.model, layout)


def test_experts_are_counted_in_their_stacks(ask: Ask) -> None:
    question = ask("qwen3-30b-a3b", "rtx4090")
    model = quantized_as(question.model, "int4")
    layout = ScaledLayout(codes="int4", scales="float16", group=128)
    expected = 0
    for tensor in question.model.spec.tensors:
        *stacked, rows, columns = tensor.shape if len(tensor.shape) > 1 else (1, 1, 1)
        quantized = tensor.linear and tensor.name != "head"
        many = stacked[0] if stacked else 1
        expected += layout.bytes_for(many * rows, columns) if quantized else 2 * tensor.elements
    assert fit(replace(question, model=model)).weights_bytes == expected
    assert expected < 17 * GIB, "it fits on 24 GB"


def test_what_is_made_while_loading_is_made_of_the_files_that_are_there(ask: Ask) -> None:
    """A bias that only the files know of is counted."""
    spec = describe_config(catalogue.find("qwen2.5-0.5b").config)
    stored = {
        tensor.name: StoredTensor(tensor.name, tensor.shape, "BF16", __file__, 0, 2 * tensor.elements)  # type: ignore[arg-type]
        for tensor in spec.tensors
    }
    folder = PlannedModel(name="./m", spec=spec, origin="folder", stored=stored, canonical=stored, format="safetensors")
    for method in ("fp8", "int4"):
        weights = engine_weights(Same(quantized_as(folder, method)))
        assert weights is not None
        assert weights.stored is stored
        assert weights.quantize == method
        assert weights.nbytes(dtype="bfloat16") == footprint.weights_bytes(
            spec,
            stored,
            dtype="bfloat16",
            expand=False,
            quantize=method,  # type: ignore[arg-type]
        )


def test_plans_say_how_fp8_is_multiplied(ask: Ask) -> None:
    for gpu, value in (("rtx3090", "weight-only"), ("rtx4090", "fp8"), ("a100-80", "weight-only"), ("h200", "fp8")):
        (said,) = (one for one in fit(ask("llama-3.1-8b-fp8", gpu)).decisions if one.field == "products")
        assert said.value == value
    for name, gpu in (("llama-3.1-8b-awq", "rtx3090"), ("llama-3.1-8b", "rtx3090"), ("llama-3.1-8b-fp8", "mi300x")):
        assert not [one for one in fit(ask(name, gpu)).decisions if one.field == "products"]


@pytest.mark.parametrize("name", ["int8", "w8a8"])
def test_w8a8_has_room_for_inputs_in_eight_bits(ask: Ask, name: str) -> None:
    """Codes of a step's inputs beside its sums, as FP8 has them."""
    question = ask("llama-3.1-8b", "rtx4090")
    activations = {}
    for method in (name, "fp8", "int4"):
        ranks = fit(replace(question, model=quantized_as(question.model, method))).ranks
        activations[method] = next(term.nbytes for term in ranks[0].terms if term.name == "activations")
    assert activations[name] == activations["fp8"] > activations["int4"]


SIZES = (None, "fp8", "int8", "awq", "int4", "nf4", "Q4_K_M")


def test_sizes_in_the_docs_are_counted(ask: Ask) -> None:
    """Rows of the table of sizes, in its order."""
    page = (Path(__file__).parents[3] / "docs" / "quantization.md").read_text()
    table = [
        line.split(" | ")
        for line in page.partition("What the weights take")[2].splitlines()
        if line.startswith("|") and "GiB" in line
    ]
    assert len(table) == len(SIZES)
    for column, name in enumerate(("llama-3.1-8b", "qwen3-30b-a3b", "llama-3.1-70b"), start=1):
        question = ask(name, "b200")
        for row, method in zip(table, SIZES, strict=True):
            model = question.model if method is None else quantized_as(question.model, method)
            assert row[column].strip(" |") == f"{fit(replace(question, model=model)).weights_bytes / GIB:.2f} GiB"


GPU = NvidiaGpu(index=0, uuid="GPU-0", name="RTX 3090", total_bytes=24 * GIB, free_bytes=23 * GIB, capability=(8, 6))


def served(name: str, gpu: NvidiaGpu = GPU, **settings: object) -> Plan:
    config = EngineConfig.from_arguments(device="cuda", load_format="dummy", **settings)
    return make_gpu_plan(known(name).spec, None, config, [gpu], name=name)


def test_a_server_plans_as_plan_does(ask: Ask) -> None:
    for name, method in (("llama-3.1-8b-awq", None), ("llama-3.1-8b", "int4"), ("llama-3.1-8b", "fp8")):
        question = ask(name, "rtx3090")
        if method is not None:
            question = replace(question, model=quantized_as(question.model, method))
        plan = served(name) if method is None else served(name, quantization=method)
        # The head of a catalogue's checkpoint is as wide as the dtype that is computed in.
        assert plan.terms["weights"] == fit(question).weights_bytes
        assert plan.engine.quantize == method
        assert plan.loading_bytes > plan.terms["weights"]


def test_how_weights_are_held_is_a_decision_with_its_reason() -> None:
    def said(plan: Plan) -> dict[str, tuple[str, str]]:
        return {one.field: (str(one.value), one.reason) for one in plan.decisions}

    awq = served("llama-3.1-8b-awq", quantization="awq_marlin")
    assert awq.engine.weights_format == "AWQ int4 g128"
    assert said(awq)["weights"][0].startswith("AWQ int4 g128, 5.")
    assert said(awq)["quantization"][0] == "awq"
    assert "products" not in said(awq)
    made = served("llama-3.1-8b", quantization="fp8")
    value, reason = said(made)["products"]
    assert value == "weight-only"
    assert "RTX 3090: compute capability 8.6 has no FP8 arithmetic (8.9 has)" in reason
    assert "while they are loaded" in said(made)["quantization"][1]
    newer = served("qwen3-8b-fp8", replace(GPU, name="L4", capability=(8, 9)), quantization="fp8")
    assert said(newer)["products"][0] == "fp8"
    assert newer.engine.weights_format == "FP8 128x128"


def test_a_tile_for_expansion_is_counted_where_weights_are_quantized() -> None:
    limits = Limits(max_model_len=4096, max_num_seqs=8, max_num_batched_tokens=512)
    settings = {"max_model_len": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 512}
    spec = known("llama-3.2-3b").spec
    for quantize, rounded in ((None, False), ("int4", False), ("fp8", True)):
        plan = served("llama-3.2-3b", quantization=quantize, **settings)
        expected = activations_bytes(spec, limits, dtype="bfloat16", quantized=quantize is not None, rounded=rounded)
        assert plan.terms["activations"] == expected, "of a GPU that is not known, inputs may be rounded"


def test_inputs_have_a_workspace_only_where_they_are_rounded(ask: Ask) -> None:
    def activations(gpu: str) -> int:
        limits = {"max_model_len": 4096, "max_num_seqs": 8, "max_num_batched_tokens": 512}
        found = fit(ask("llama-3.1-8b-fp8", gpu, **limits))
        return next(term.nbytes for term in found.ranks[0].terms if term.name == "activations")

    assert activations("rtx4090") - activations("rtx3090") == workspace_bytes(512, 14336, 4096, 2)


def test_on_a_cpu_they_are_expanded_only_where_there_is_room(ask: Ask, cpu: Callable[..., Device]) -> None:
    for free, how in ((48, "quantized"), (200, "expanded")):
        found = fit(ask("llama-3.1-8b-awq", device=cpu(free, free)))
        assert found.fits
        (decision,) = (one for one in found.decisions if one.field == "weights")
        assert decision.value == how
        assert found.engine.expand_weights == (how == "expanded")
    # Inputs of FP8 are rounded too, which belongs to the product: expanding would change it.
    rounded = ask("llama-3.1-8b-fp8", device=cpu(200, 200))
    assert not fit(rounded).engine.expand_weights
    made = replace(rounded, model=quantized_as(known("llama-3-8b"), "int4"))
    for question in (rounded, made):
        with pytest.raises(ConfigurationError, match="expand_weights is always, but these weights are not expanded"):
            fit(replace(question, settings=replace(question.settings, expand_weights="always")))


def test_compiled_products_read_codes_as_they_are(ask: Ask, cpu: Callable[..., Device]) -> None:
    """With room for expanded weights they stay quantized, and no tile is held for their expansion: on x86 all of them,
    on Arm those that are multiplied as whole numbers."""

    def planned(name: str, features: set[str], expand: str = "auto") -> tuple[bool, int]:
        question = ask(name, device=cpu(400, 400), expand_weights=expand, dtype="float32", max_model_len=2048)
        machine = replace(question.machine, cpu_features=frozenset(features), compiled_kernels=True)
        found = fit(replace(question, machine=machine))
        activations = next(term.nbytes for term in found.ranks[0].terms if term.name == "activations")
        return found.engine.expand_weights, activations

    _, plain = planned("llama-3.1-8b", {"avx2", "fma", "f16c", "bmi2"})
    assert planned("llama-3.1-8b-awq", {"avx2", "fma", "f16c", "bmi2"}) == (False, plain)
    assert planned("llama-3.1-8b-fp8", {"avx2", "fma", "f16c", "bmi2"}) == (False, plain)
    assert planned("llama-3.1-8b-awq", {"asimddp"}) == (False, plain)
    arm = Processor(model="", cores=1, features=frozenset({"asimddp"}))
    x86 = Processor(model="", cores=1, features=KERNEL_VARIANTS["avx2"])
    assert arm.fast_code_products(whole_numbers=True)
    assert not arm.fast_code_products(whole_numbers=False), "in floats there, which expanded weights beat"
    assert x86.fast_code_products(whole_numbers=False)


def test_codes_that_are_multiplied_as_whole_numbers() -> None:
    whole = [ScaledLayout(codes="int4", zeros=True), ScaledLayout(codes="int8"), ScaledLayout(codes="mxfp4")]
    others = [ScaledLayout(codes="int8", zeros=True), ScaledLayout(codes="nf4"), ScaledLayout(codes="fp8")]
    assert [layout.whole_numbers for layout in whole] == [True] * 3
    assert [layout.whole_numbers for layout in others] == [False] * 3
    assert not ScaledLayout(codes="int8", group_rows=24).whole_numbers


def test_names_of_kernels_are_planned_as_their_formats() -> None:
    plain, awq = known("llama-3.1-8b"), known("llama-3.1-8b-awq")
    for written, method in (("awq_marlin", "awq"), ("gptq_bitblas", "gptq"), ("fp8_per_tensor", "fp8")):
        assert quantized_as(plain, written).made_as == method
    for written in ("awq", "awq_marlin", "moe_wna16"):
        assert quantized_as(awq, written) is awq
    with pytest.raises(ConfigurationError, match="is already quantized"):
        quantized_as(awq, "gptq_marlin")
    with pytest.raises(ConfigurationError, match="only says how a checkpoint is stored"):
        quantized_as(plain, "moe_wna16")


def test_what_the_engine_cannot_hold_is_planned_for_others() -> None:
    """Rows of 8,208 columns are no whole pieces of 32; unquantized they are fine."""
    awq = {"quant_method": "awq", "bits": 4, "group_size": 16}
    config = {**catalogue.find("llama-3.2-1b").config, "quantization_config": awq}
    spec = held_or_not(describe_config({**config, "intermediate_size": 8208}), None)
    assert [reason.partition(" ")[0] for reason in spec.unsupported] == ["quantization_config:"]
    model = PlannedModel(name="m", spec=spec, origin="folder")
    assert as_plain(model).spec.runnable
    assert held_or_not(describe_config(config), None).runnable


def test_on_a_cpu_what_decoding_and_rounding_take_is_counted(ask: Ask, cpu: Callable[..., Device]) -> None:
    def activations(name: str, expand: str = "never") -> int:
        limits = {"max_model_len": 2048, "max_num_seqs": 4, "max_num_batched_tokens": 256, "dtype": "bfloat16"}
        found = fit(ask(name, device=cpu(200, 200), expand_weights=expand, **limits))
        return next(term.nbytes for term in found.ranks[0].terms if term.name == "activations")

    plain, awq, fp8 = (activations(name) for name in ("llama-3.1-8b", "llama-3.1-8b-awq", "llama-3.1-8b-fp8"))
    assert awq - plain == 12 * MIB, "a tile of codes on its way to numbers"
    # Two copies in float32 of the widest input, 256 tokens of 14,336 columns, and the pieces that are rounded.
    assert fp8 - awq == 2 * 256 * 14336 * 4 + 24 * MIB
    assert activations("llama-3.1-8b-awq", "always") == plain


@pytest.mark.parametrize(
    ("quantization", "text"),
    [
        (QuantSpec(method="awq", bits=4, group_size=64), "AWQ int4 g64"),
        (QuantSpec(method="gptq", bits=8, group_size=32, activation_order=True), "GPTQ int8 g32 in act-order"),
        (QuantSpec(method="fp8", bits=8, granularity="block", block=(128, 128)), "FP8 128x128"),
        (QuantSpec(method="fp8", bits=8, granularity="channel"), "FP8"),
        (QuantSpec(method="bitsandbytes", bits=4, group_size=64), "bitsandbytes nf4 g64"),
        (QuantSpec(method="mxfp4", bits=4, group_size=32), "MXFP4 g32"),
        (
            QuantSpec(method="fp8", bits=8, granularity="channel", others=(QuantSpec(method="int4", bits=4),)),
            "FP8 and INT4",
        ),
    ],
)
def test_formats_in_words(quantization: QuantSpec, text: str) -> None:
    assert described(quantization) == text
