"""Models with experts: from safetensors one by one and from GGUF in stacks, kept quantized or expanded, all the same.

Whole models against transformers; the parts alone against float64.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import transformers
from expert_gguf import write_expert_gguf
from safetensors.numpy import save_file

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.formats import gguf as gguf_files
from holdfast.checkpoints.validation.match import match
from holdfast.errors import CheckpointError
from holdfast.execution import native
from holdfast.execution.layers.experts import (
    BlockStack,
    DenseStack,
    ExpertMaker,
    ExpertWeights,
    QuantizedStack,
    SharedExpert,
)
from holdfast.execution.layers.linear import DenseLinear
from holdfast.execution.ops import reference
from holdfast.execution.runner import Runner, RunnerLimits
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.execution.weights.load import Loader, load_weights
from holdfast.footprint.cpu import weights_bytes
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.models import ExpertsSpec, ModelSpec, from_config, from_gguf
from holdfast.records import Row, SamplingParams, SequenceStart, StepPlan, TableWrite

CPU = torch.device("cpu")
PROMPT = [(index * 37) % 300 for index in range(33)]
MIXTRAL = ("Mixtral", {"num_local_experts": 4})
QWEN3 = (
    "Qwen3Moe",
    {
        "num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 32, "head_dim": 16, "norm_topk_prob": True,
    },
)  # fmt: skip
QWEN2 = (
    "Qwen2Moe",
    {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 64},
)
FILES = {"mixtral": ("llama", *MIXTRAL), "qwen3moe": ("qwen3moe", *QWEN3), "qwen2moe": ("qwen2moe", *QWEN2)}
KINDS: dict[str, Callable[[str], str]] = {
    "F16": lambda name: "F16",
    "Q8_0": lambda name: "Q8_0",
    "mixed": lambda name: (
        "Q4_0" if name.endswith("experts.gate") else "F32" if name.endswith("experts.down") else "Q8_0"
    ),
    "MXFP4": lambda name: "MXFP4",
    "MXFP4_MOE": lambda name: "MXFP4" if ".experts." in name else "Q8_0",
}


@torch.inference_mode()
def transformers_logits(oracle: Any, numbers: dict[str, numpy.ndarray], folder: Path) -> torch.Tensor:
    shutil.copy(oracle.folder / "config.json", folder)
    save_file(numbers, folder / "model.safetensors", {"format": "pt"})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return model(torch.tensor([PROMPT])).logits[0, -1].log_softmax(-1)


def logits_after(spec: ModelSpec, weights: Weights, compiled: bool) -> torch.Tensor:
    """Log-probabilities after the prompt: [vocabulary] in the order of ids."""
    groups, places = form_groups([layer.window for layer in spec.layers])
    layout = KVLayout(
        groups=groups,
        block_tokens=16,
        layers_per_page=places,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=4,
    )
    limits = RunnerLimits(max_num_seqs=1, max_num_batched_tokens=64, max_model_len=64)
    runner = Runner(spec, weights, layout, limits, CPU, compiled=compiled)
    runner.back_kv(5)
    params = SamplingParams(temperature=0.0, logprobs=20)
    result = runner.execute(
        StepPlan(
            step_id=0,
            starts=[SequenceStart(0, "r", PROMPT, len(PROMPT), params)],
            table_writes=[TableWrite(0, 0, 0, [1, 2, 3])],
            rows=[Row(0, 0, len(PROMPT), True)],
        )
    )
    found = result.logprobs[0]
    assert found is not None
    known = torch.full((spec.vocab_size,), float("nan"))
    known[list(found.token_ids)] = torch.tensor(found.logprobs)
    return known


@pytest.mark.parametrize("kinds", KINDS)
@pytest.mark.parametrize("file", FILES)
def test_gguf_models_equal_transformers_with_the_same_numbers(
    file: str, kinds: str, oracles: Callable[..., Any], tmp_path: Path
) -> None:
    architecture, model, settings = FILES[file]
    oracle = oracles(model, **settings)
    numbers = write_expert_gguf(oracle.spec, oracle.checkpoint(), tmp_path / "model.gguf", architecture, KINDS[kinds])
    expected = transformers_logits(oracle, numbers, tmp_path)
    header = gguf_files.read_header(tmp_path / "model.gguf")
    spec = from_gguf(header.metadata, header.tensors)
    for expand, compiled in ((True, False), (False, False), *([(False, True)] if native.available() else [])):
        with Checkpoint(header.tensors, "gguf") as checkpoint:
            weights = load_weights(spec, checkpoint, dtype=torch.float32, device=CPU, expand=expand, compiled=compiled)
            counted = weights_bytes(spec, match(spec, checkpoint), dtype="float32", expand=expand, compiled=compiled)
        assert weights.nbytes == counted
        found = logits_after(spec, weights, compiled)
        known = ~found.isnan()
        assert known.sum() >= 20
        # Compiled products round activations as finely as the blocks they meet.
        tolerance = 2e-2 if compiled and kinds != "F16" else 2e-4
        torch.testing.assert_close(found[known], expected[known], atol=tolerance, rtol=0)


@pytest.mark.parametrize(("name", "expand"), [("token_embd.weight", False), ("blk.1.ffn_down_exps.weight", True)])
def test_scales_of_mxfp4_that_are_no_numbers_are_refused_where_they_are_expanded(
    name: str, expand: bool, oracles: Callable[..., Any], tmp_path: Path
) -> None:
    oracle, path = oracles(QWEN3[0], **QWEN3[1]), tmp_path / "model.gguf"
    write_expert_gguf(oracle.spec, oracle.checkpoint(), path, "qwen3moe", KINDS["MXFP4"])
    header = gguf_files.read_header(path)
    with path.open("r+b") as file:
        file.seek(header.tensors[name].offset + 17)
        file.write(b"\xff")
    spec = from_gguf(header.metadata, header.tensors)
    with Checkpoint(header.tensors, "gguf") as checkpoint, pytest.raises(CheckpointError, match=name):
        load_weights(spec, checkpoint, dtype=torch.float32, device=CPU, expand=expand)


def experts_of(weights: Weights) -> ExpertWeights:
    part = weights.layers[-1].mlp
    assert isinstance(part, ExpertWeights)
    return part


def test_how_experts_are_kept(oracles: Callable[..., Any], tmp_path: Path) -> None:
    """Whatever the planner counts is what is there."""
    oracle = oracles(MIXTRAL[0], **MIXTRAL[1])
    write_expert_gguf(oracle.spec, oracle.checkpoint(), tmp_path / "model.gguf", "llama", KINDS["mixed"])
    header = gguf_files.read_header(tmp_path / "model.gguf")
    spec = from_gguf(header.metadata, header.tensors)
    ways: list[tuple[bool, bool, tuple[type, ...]]] = [
        (True, False, (DenseStack, DenseStack)),
        (False, False, (QuantizedStack, QuantizedStack, DenseStack)),
    ]
    if native.available():
        ways.append((False, True, (BlockStack, BlockStack, BlockStack)))
    for expand, compiled, kept in ways:
        with Checkpoint(header.tensors, "gguf") as checkpoint:
            weights = load_weights(spec, checkpoint, dtype=torch.float32, device=CPU, expand=expand, compiled=compiled)
            counted = weights_bytes(spec, match(spec, checkpoint), dtype="float32", expand=expand, compiled=compiled)
        experts = experts_of(weights)
        assert tuple(type(stack) for stack in (*experts.gate_up, experts.down)) == kept
        assert weights.nbytes == counted


def test_a_missing_expert_is_named(oracles: Callable[..., Any]) -> None:
    oracle = oracles(MIXTRAL[0], **MIXTRAL[1])
    tensors = dict(oracle.checkpoint().tensors)
    lost = "model.layers.1.block_sparse_moe.experts.2.w3.weight"
    del tensors[lost]
    with pytest.raises(CheckpointError) as raised:
        load_weights(oracle.spec, Checkpoint(tensors, "safetensors"), dtype=torch.float32, device=CPU, expand=True)
    assert raised.value.needed == lost


@pytest.mark.parametrize("compiled", [False, True])
def test_dummy_experts_differ(compiled: bool, oracles: Callable[..., Any]) -> None:
    """From layer to layer, from expert to expert, and gate from up."""
    if compiled and not native.available():
        pytest.skip(str(native.why_not()))
    spec = oracles(MIXTRAL[0], **MIXTRAL[1]).spec
    weights = load_weights(spec, None, dtype=torch.float32, device=CPU, expand=True, compiled=compiled)
    assert weights.nbytes == 4 * spec.parameters
    if compiled:
        return
    stacks = [layer.mlp.gate_up[0].weight for layer in weights.layers if isinstance(layer.mlp, ExpertWeights)]
    matrices = [half for stack in stacks for expert in stack for half in expert.chunk(2)]
    assert len({float(matrix[0, 0]) for matrix in matrices}) == len(matrices)


def test_dummy_experts_are_the_same_wherever_they_lie(
    oracles: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = oracles(MIXTRAL[0], **MIXTRAL[1]).spec

    def first_stack() -> torch.Tensor:
        weights = load_weights(spec, None, dtype=torch.float32, device=CPU, expand=True, compiled=False)
        return next(layer.mlp.gate_up[0].weight for layer in weights.layers if isinstance(layer.mlp, ExpertWeights))

    whole, fill = first_stack(), Loader.fill_experts
    apart = lambda loader, targets, tensor: fill(loader, [part for one in targets for part in one.split(1)], tensor)  # noqa: E731
    monkeypatch.setattr(Loader, "fill_experts", apart)
    assert torch.equal(first_stack(), whole)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"hidden_act": "gelu"}, "exact gelu"),
        ({"intermediate_size": 100}, "100 columns"),
    ],
)
def test_experts_that_cannot_be_computed_are_refused(changes: dict[str, Any], said: str) -> None:
    config = transformers.MixtralConfig(**{"intermediate_size": 96, **changes}).to_dict()
    with pytest.raises(CheckpointError, match=said):
        from_config({**config, "architectures": ["MixtralForCausalLM"]})


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_near(dtype: torch.dtype) -> None:
    """Routed and shared experts in torch's own products; what was in the target is overwritten."""
    spec = ExpertsSpec(count=4, per_token=2, intermediate_size=32, shared_intermediate_size=48, normalized=False)

    def computed(kind: torch.dtype) -> torch.Tensor:
        source = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return (0.3 * torch.randn(shape, generator=source)).to(dtype).to(kind)

        weights = ExpertWeights(
            spec=spec,
            router=DenseLinear(normal(4, 64)),
            gate_up=(DenseStack(normal(4, 64, 64)),),
            down=DenseStack(normal(4, 64, 32)),
            shared=SharedExpert(
                gate_up=DenseLinear(normal(96, 64)), down=DenseLinear(normal(64, 48)), router=DenseLinear(normal(1, 64))
            ),
        )
        out = torch.full((9, 64), 7.0, dtype=kind)
        ExpertMaker(64, "silu", reference.gate, 16).make(weights).run(normal(9, 64), out, add=False)
        return out.double()

    exact = computed(torch.float32)
    assert float((computed(dtype) - exact).norm() / exact.norm()) < 8 * torch.finfo(dtype).eps
