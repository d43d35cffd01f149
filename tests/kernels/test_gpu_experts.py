"""Models with experts on the GPU runner, against transformers and against the CPU runner."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_gguf import write_expert_gguf
from quantized_files import Format, gptq, write_mxfp4, write_quantized
from tiny_gpu import Tiny, prompt, run, tokens_of

from holdfast.checkpoints import locate, open_checkpoint, spec_of
from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import safetensors
from holdfast.errors import EngineError
from holdfast.execution.gpu.layers.experts import ExpertGpuMaker, _planes, _with_planes
from holdfast.execution.gpu.layers.linear import Scratch
from holdfast.execution.layers.experts import DenseStack, ExpertWeights, QuantizedStack, Stack
from holdfast.execution.layers.linear import DenseLinear
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import load_weights
from holdfast.execution.weights.scaled_matrix import ScaledMatrix
from holdfast.footprint import experts as expert_sizes
from holdfast.footprint.scaled_layouts import ScaledLayout
from holdfast.models import ExpertsSpec, from_config
from holdfast.records import SamplingParams

pytestmark = pytest.mark.usefixtures("few_programs")

CPU = torch.device("cpu")
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 3, "moe_intermediate_size": 32}
MODELS: dict[str, dict[str, Any]] = {
    "mixtral": {"architecture": "Mixtral", "num_local_experts": 3},
    "qwen3": {"architecture": "Qwen3Moe", **EXPERTS, "norm_topk_prob": False},
    "qwen2": {"architecture": "Qwen2Moe", **EXPERTS, "shared_expert_intermediate_size": 40},
}


class TinyFile(Tiny):
    """Its experts lie in stacks and stay quantized."""

    def __init__(self, folder: Path, kinds: tuple[str, str, str]) -> None:
        super().__init__(folder, "Mixtral", num_local_experts=3)
        checkpoint = Checkpoint(safetensors.read_headers([folder / "model.safetensors"]), "safetensors")
        parts = dict(zip(("gate", "up", "down"), kinds, strict=True))
        path = folder / "model.gguf"
        write_expert_gguf(self.spec, checkpoint, path, "llama", lambda name: parts.get(name.rpartition(".")[2], "F32"))
        self._files = locate(str(path), revision=None)
        self.spec = spec_of(self._files)

    def weights(self, device: torch.device) -> Weights:
        return load_weights(
            self.spec, open_checkpoint(self._files), dtype=torch.float32, device=device, expand=False
        )  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_greedy_tokens_are_those_of_transformers(model: str, device: torch.device, tmp_path: Path) -> None:
    """Chunks, mixed steps and single tokens; a graph of them where there is a GPU."""
    tiny = Tiny(tmp_path, **MODELS[model])
    lengths = (21, 1, 5) if device.type == "cuda" else (18, 5)
    prompts = [prompt(number, length) for number, length in enumerate(lengths)]
    params = [SamplingParams(temperature=0.0, max_tokens=2 + number, ignore_eos=True) for number in range(len(lengths))]
    for asked, outputs in zip(prompts, run(tiny.core(device, gpu=True), prompts, params), strict=True):
        tiny.assert_greedy(asked, tokens_of(outputs))


@pytest.mark.parametrize(
    "kinds", [("Q8_0", "Q8_0", "Q4_0"), ("Q4_1", "F32", "Q5_0"), ("MXFP4", "MXFP4", "Q8_0")], ids="-".join
)
def test_quantized_experts_say_what_they_say_on_a_cpu(
    kinds: tuple[str, str, str], device: torch.device, tmp_path: Path
) -> None:
    tiny = TinyFile(tmp_path, kinds)
    prompts = [prompt(number, length) for number, length in enumerate((14, 2))]
    params = [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=1)] * 2
    here = run(tiny.core(device, gpu=True), prompts, params)
    there = run(tiny.core(CPU, gpu=False), prompts, params)
    for found, expected in zip(here, there, strict=True):
        assert tokens_of(found) == tokens_of(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            assert one.logprobs[0].logprobs == pytest.approx(other.logprobs[0].logprobs, abs=1e-3)


class TinyCodes(Tiny):
    """Its experts are quantized, in files as their formats have them."""

    def __init__(self, folder: Path, kind: str) -> None:
        experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}
        super().__init__(folder / "plain", "Qwen3Moe", head_dim=16, **experts)
        if kind == "mxfp4":
            write_mxfp4(self.folder, folder / kind)
        else:
            config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True}
            write_quantized(self.folder, folder / kind, Format(config, gptq(symmetric=False, ordered=True)))
        self.folder = folder / kind
        self.spec = from_config(json.loads((self.folder / "config.json").read_text()))

    def weights(self, device: torch.device) -> Weights:
        checkpoint = Checkpoint(safetensors.read_headers((self.folder / "model.safetensors",)), "safetensors")
        found = load_weights(self.spec, checkpoint, dtype=torch.float32, device=device, expand=False)
        experts = found.layers[0].mlp
        assert isinstance(experts, ExpertWeights)
        assert isinstance(experts.down, QuantizedStack)
        return found


@pytest.mark.parametrize("kind", ["mxfp4", "gptq in act-order"])
def test_experts_of_quantized_files_say_what_they_say_on_a_cpu(kind: str, device: torch.device, tmp_path: Path) -> None:
    tiny = TinyCodes(tmp_path, kind)
    prompts = [prompt(number, length) for number, length in enumerate((14, 2))]
    params = [SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True, logprobs=1)] * 2
    here = run(tiny.core(device, gpu=True), prompts, params)
    there = run(tiny.core(CPU, gpu=False), prompts, params)
    for found, expected in zip(here, there, strict=True):
        assert tokens_of(found) == tokens_of(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.logprobs is not None
            assert other.logprobs is not None
            assert one.logprobs[0].logprobs == pytest.approx(other.logprobs[0].logprobs, abs=1e-3)


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("tokens", [8, 9000])
@pytest.mark.parametrize("here", [(), ((0, 1), (2, 3))], ids=["all", "some"])
def test_buffers_are_those_that_are_planned(
    model: str, tokens: int, here: tuple[tuple[int, int], ...], tmp_path: Path
) -> None:
    """To the byte, however experts are kept, and of a rank that has some of them too."""
    tiny = Tiny(tmp_path, **MODELS[model])
    experts = tiny.weights(CPU).layers[-1].mlp
    assert isinstance(experts, ExpertWeights)
    scratch, own = Scratch(torch.float32, CPU), replace(experts.spec, here=here)
    maker = ExpertGpuMaker(tiny.spec.hidden_size, "silu", torch.empty(tokens, 0), scratch)
    buffers = maker.make(replace(experts, spec=own))._buffers
    lines = [tensor for tensor in buffers.lines if tensor is not None]
    kept = [*lines, buffers.logits, buffers.inner, buffers.rows, buffers.shared]
    spec = replace(tiny.spec, layers=tuple(replace(layer, experts=own) for layer in tiny.spec.layers))
    assert sum(tensor.nbytes for tensor in kept) == expert_sizes.gpu_bytes(spec, tokens, 4)


LAYOUTS = {
    "int4": ScaledLayout(codes="int4", scales="float16", group=128, zeros=True),
    "fp8 blocks": ScaledLayout(codes="fp8", group=128, group_rows=128, inputs="fp8"),
    "fp8 static": ScaledLayout(codes="fp8", inputs="fp8", static_inputs=True),
    "int8": ScaledLayout(codes="int8", inputs="int8"),
    "mxfp4": ScaledLayout(codes="mxfp4", scales="uint8", group=32),
    "int4 in act-order": ScaledLayout(codes="int4", scales="float16", group=128, zeros=True, ordered=True),
}


@pytest.mark.parametrize(
    "layout",
    [
        ScaledLayout(codes="fp8", group=64, group_rows=64, inputs="fp8"),
        ScaledLayout(codes="int8", inputs="int8", ordered=True),
    ],
    ids=["groups", "order"],
)
def test_experts_that_no_kernel_multiplies_are_refused(layout: ScaledLayout) -> None:
    spec = ExpertsSpec(count=2, per_token=1, intermediate_size=128)
    gate_up, down = (QuantizedStack(ScaledMatrix(layout, 2 * rows, 128, CPU, experts=2), 2) for rows in (256, 128))
    router = DenseLinear(torch.zeros(2, 128))
    weights = ExpertWeights(spec=spec, router=router, gate_up=(gate_up,), down=down, shared=None)
    maker = ExpertGpuMaker(128, "silu", torch.empty(8, 0), Scratch(torch.float32, CPU))
    with pytest.raises(EngineError, match="have no products on a GPU"):
        maker.make(weights)


IN_ORDER = "int4 in act-order"
SPLIT = [*((kind, False, False) for kind in LAYOUTS), ("fp8 blocks", True, False), (IN_ORDER, True, False),
         (IN_ORDER, True, True)]  # fmt: skip


@pytest.mark.parametrize(("kind", "split", "same"), SPLIT)
def test_experts_in_codes_with_scales(kind: str, split: bool, same: bool, device: torch.device) -> None:
    """As near to the same experts expanded as rounded inputs let them be; gate and up in one stack or in two, in orders
    of their own or in the same."""
    torch.manual_seed(len(kind))
    spec, hidden = ExpertsSpec(count=3, per_token=2, intermediate_size=128), 256
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    router = DenseLinear(torch.randn(3, hidden, device=device).to(dtype))

    orders = torch.stack([torch.randperm(hidden) for _ in range(3)]).int()

    def stacks(rows: int, columns: int) -> tuple[QuantizedStack, DenseStack]:
        # What comes into the last matrices was put into their order by the rows of the first.
        layout = LAYOUTS[kind] if columns == hidden else replace(LAYOUTS[kind], ordered=False)
        matrix = ScaledMatrix(layout, 3 * rows, columns, device, experts=3)
        if matrix.order is not None:
            own = torch.stack([torch.randperm(hidden) for _ in range(3)]).int()
            matrix.order.copy_(orders if same else own)
        # Codes that stand for numbers: of fp8 those below 127.
        matrix.codes.view(torch.uint8).copy_(torch.randint(0, 127, matrix.codes.shape))
        if layout.scales == "uint8":
            matrix.scales.copy_(torch.randint(116, 119, matrix.scales.shape))
        else:
            matrix.scales.copy_(torch.rand(matrix.scales.shape) * 0.002 + 0.001)
        if matrix.zeros is not None:
            matrix.zeros.copy_(torch.randint(0, 16, matrix.zeros.shape))
        if matrix.inputs is not None:
            matrix.inputs.fill_(1.5)
        weight = torch.empty(3 * rows, columns, dtype=dtype, device=device)
        matrix.dequantize(0, 3 * rows, weight)
        return QuantizedStack(matrix, 3), DenseStack(weight.view(3, rows, columns))

    gate_up = [stacks(128, hidden), stacks(128, hidden)] if split else [stacks(256, hidden)]
    down = stacks(hidden, 128)
    x = torch.randn(5, hidden, device=device).to(dtype)
    found = []
    for kept in (0, 1):
        maker = ExpertGpuMaker(hidden, "silu", torch.empty(8, 0, dtype=dtype, device=device), Scratch(dtype, device))
        gates = tuple(pair[kept] for pair in gate_up)
        weights = ExpertWeights(spec=spec, router=router, gate_up=gates, down=down[kept], shared=None,
                                same_order=same and not kept)  # fmt: skip
        out = torch.full((5, hidden), float("nan"), dtype=dtype, device=device)
        maker.make(weights).run(x, out, add=False)
        found.append(out.double())
    allowed = 0.1 if LAYOUTS[kind].inputs != "plain" else 0.005
    assert (found[0] - found[1]).norm() <= allowed * found[1].norm()


@pytest.mark.parametrize("kind", ["int4", "fp8 blocks", pytest.param("mxfp4", marks=pytest.mark.long)])
def test_parts_of_ranks_with_whole_experts_add_up(kind: str, device: torch.device) -> None:
    """Of three experts one is on another rank; on a GPU these are so many pairs that int4 has kernels in CUDA C++."""
    torch.manual_seed(len(kind))
    spec, hidden, layout = ExpertsSpec(count=3, per_token=2, intermediate_size=128), 256, LAYOUTS[kind]
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    router = DenseLinear(torch.randn(3, hidden, device=device).to(dtype))

    def stack(rows: int, columns: int) -> QuantizedStack:
        matrix = ScaledMatrix(layout, 3 * rows, columns, device, experts=3)
        matrix.codes.view(torch.uint8).copy_(torch.randint(0, 127, matrix.codes.shape))
        few = torch.randint(116, 119, matrix.scales.shape)
        matrix.scales.copy_(few if layout.scales == "uint8" else torch.rand(matrix.scales.shape) * 0.002 + 0.001)
        if matrix.zeros is not None:
            matrix.zeros.copy_(torch.randint(0, 16, matrix.zeros.shape))
        return QuantizedStack(matrix, 3)

    def some(whole: QuantizedStack, numbers: tuple[int, ...]) -> Stack:
        def kept(plane: torch.Tensor) -> torch.Tensor:
            return plane.view(torch.uint8).unflatten(0, (3, -1))[list(numbers)].flatten(0, 1).view(plane.dtype)

        return _with_planes(whole, [kept(plane) for plane in _planes(whole)])

    gate_up, down, x = stack(256, hidden), stack(hidden, 128), torch.randn(12, hidden, device=device).to(dtype)
    found = []
    for here in ((), ((0, 1), (2, 3)), ((1, 2),)):
        own = replace(spec, here=here)
        maker = ExpertGpuMaker(hidden, "silu", torch.empty(16, 0, dtype=dtype, device=device), Scratch(dtype, device))
        stacks = some(gate_up, own.numbers), some(down, own.numbers)
        weights = ExpertWeights(spec=own, router=router, gate_up=stacks[:1], down=stacks[1], shared=None)
        out = torch.full((12, hidden), float("nan"), dtype=dtype, device=device)
        maker.make(weights).run(x, out, add=False)
        found.append(out.double())
    parts = found[1] + found[2]
    allowed = 0.01 if device.type == "cuda" else 1e-5
    assert (parts - found[0]).norm() <= allowed * found[0].norm()
    assert all(part.norm() > 0.1 * parts.norm() for part in found[1:])


def test_more_tokens_than_buffers_hold_are_taken_in_turns(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.execution.gpu.layers.experts.GPU_TOKENS", 5)
    tiny = Tiny(tmp_path, **MODELS["mixtral"])
    asked, params = prompt(0, 13), SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    [outputs] = run(tiny.core(device, gpu=True), [asked], [params])
    tiny.assert_greedy(asked, tokens_of(outputs))
