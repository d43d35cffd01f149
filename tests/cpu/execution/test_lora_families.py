"""Adapters beside every form of product: fused and plain matrices, biases, norms on either side, quantized blocks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import quantized_files
import torch
from lora_adapters import LAYER_MODULES, merge, write_adapter
from safetensors.torch import load_file, save_file
from tiny_gguf import write_tiny_gguf

from holdfast.checkpoints import locate, open_checkpoint, spec_of
from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.config import EngineConfig
from holdfast.engine.requests.adapters import Adapters
from holdfast.execution import native
from holdfast.execution.lora.slots import LoraLimits
from holdfast.execution.runner import Runner, RunnerLimits
from holdfast.execution.weights.load import load_weights
from holdfast.kvcache.groups import KVLayout, form_groups
from holdfast.models import ModelSpec
from holdfast.records import AdapterFetch, AdapterRef, Row, SamplingParams, SequenceStart, StepPlan, TableWrite

CPU = torch.device("cpu")
LORA = LoraLimits(max_loras=2, max_rank=16, cached=0)
PROMPT = [(31 * place * place + place) % 200 + 3 for place in range(19)]
FAMILIES: list[tuple[str, dict[str, Any], tuple[str, ...], bool]] = [
    ("Phi3", {}, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj"), False),
    (
        "Gemma3",
        {"head_dim": 16, "sliding_window": 9, "layer_types": ["sliding_attention", "full_attention"] * 2},
        LAYER_MODULES,
        True,
    ),
    ("Starcoder2", {}, ("q_proj", "k_proj", "v_proj", "o_proj", "c_fc", "c_proj"), False),
    ("Qwen2", {}, LAYER_MODULES, True),
]


def answers(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    adapters: list[AdapterRef | None],
    *,
    compiled: bool,
    count: int = 5,
    expand: bool | None = None,
) -> list[list[int]]:
    """Greedy, the same prompt once with each, in one batch."""
    expand = not compiled if expand is None else expand
    weights = load_weights(spec, checkpoint, dtype=torch.float32, device=CPU, expand=expand, compiled=compiled)
    groups, places = form_groups([layer.window for layer in spec.layers])
    layout = KVLayout(
        groups=groups,
        block_tokens=32,
        layers_per_page=places,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        element_bytes=4,
    )
    limits = RunnerLimits(max_num_seqs=4, max_num_batched_tokens=128, max_model_len=32, max_loras=2)
    runner = Runner(spec, weights, layout, limits, CPU, compiled=compiled, lora=LORA)
    runner.back_kv(1 + len(groups) * len(adapters))
    known, page, numbers = [list(PROMPT) for _ in adapters], 1, list(dict.fromkeys(adapters))
    starts, writes = [], []
    for slot, adapter in enumerate(adapters):
        where = -1 if adapter is None else [one for one in numbers if one is not None].index(adapter)
        params = SamplingParams(temperature=0.0)
        starts.append(SequenceStart(slot, str(slot), PROMPT, len(PROMPT), params, adapter=adapter, adapter_place=where))
        for group in groups:
            writes.append(TableWrite(slot, group.index, 0, [page]))
            page += 1
    wanted = [AdapterFetch(place, ref) for place, ref in enumerate(one for one in numbers if one is not None)]
    there = len(runner.execute(StepPlan(step_id=0, fetches=wanted)).adapters)
    while there < len(wanted):
        there += len(runner.execute(StepPlan(step_id=0)).adapters)
    for step in range(count):
        computed = 0 if step == 0 else len(known[0]) - 1
        rows = [Row(slot, computed, len(tokens) - computed, True) for slot, tokens in enumerate(known)]
        first = step == 0
        plan = StepPlan(step_id=step, starts=starts if first else [], table_writes=writes if first else [], rows=rows)
        result = runner.execute(plan)
        assert not result.failures
        for tokens, token in zip(known, result.token_ids, strict=True):
            tokens.append(token)
    return [tokens[len(PROMPT) :] for tokens in known]


def load(spec: ModelSpec, *folders: Path) -> list[AdapterRef]:
    known = Adapters(spec, "tiny", EngineConfig(enable_lora=True))
    return [known.load(folder.name, str(folder), anywhere=True) for folder in folders]


@pytest.mark.parametrize(
    ("architecture", "settings", "modules", "compiled"), FAMILIES, ids=[one[0] for one in FAMILIES]
)
def test_families_answer_as_merged_models(
    architecture: str,
    settings: dict[str, Any],
    modules: tuple[str, ...],
    compiled: bool,
    oracles: Callable[..., Any],
    tmp_path: Path,
) -> None:
    if compiled and not native.available():
        pytest.skip(f"no compiled kernels here: {native.why_not()}")
    oracle = oracles(architecture, num_hidden_layers=4, **settings)
    folders = [
        write_adapter(tmp_path / f"adapter-{seed}", oracle.folder, seed=seed, modules=modules, rank=2 + seed)
        for seed in (1, 2)
    ]
    one, two = load(oracle.spec, *folders)
    base, first, second = answers(oracle.spec, oracle.checkpoint(), [None, one, two], compiled=compiled)
    assert len({str(base), str(first), str(second)}) > 1
    oracle.assert_greedy(PROMPT + base, len(PROMPT))
    for folder, tokens in zip(folders, (first, second), strict=True):
        merged = merge(tmp_path / f"merged-{folder.name}", oracle.folder, folder)
        model = type(oracle.model).from_pretrained(merged, attn_implementation="eager").float().eval()
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT + tokens])).logits[0]
        assert tokens == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()


def test_quantized_blocks_stay_as_they_are(tmp_path: Path) -> None:
    """The base product from blocks, and the adapters beside it: as with the same blocks expanded. In GGUF the rows of q
    and k lie in another order, and adapters know nothing of it."""
    if not native.available():
        pytest.skip(f"no compiled kernels here: {native.why_not()}")
    write_tiny_gguf(tmp_path / "tiny.gguf")
    files = locate(str(tmp_path / "tiny.gguf"), revision=None)
    spec = spec_of(files)
    (tmp_path / "shapes").mkdir()
    shapes = {tensor.hf_name: torch.zeros(tensor.shape) for tensor in spec.tensors}
    save_file(shapes, tmp_path / "shapes" / "model.safetensors")
    (ref,) = load(spec, write_adapter(tmp_path / "adapter", tmp_path / "shapes", seed=5))
    found = answers(spec, open_checkpoint(files), [None, ref], compiled=True)
    assert found == answers(spec, open_checkpoint(files), [None, ref], compiled=False)
    assert found[0] != found[1]


@pytest.mark.parametrize("ordered", [False, True])
def test_adapters_on_quantized_checkpoints(ordered: bool, oracles: Callable[..., Any], tmp_path: Path) -> None:
    """Beside codes and scales, fused or each matrix in an order of its own: as merged into the numbers they mean."""
    oracle = oracles("Llama", hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    config = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": ordered}
    made = quantized_files.Format(config, quantized_files.gptq(ordered=ordered))
    means = quantized_files.write_quantized(oracle.folder, tmp_path / "quantized", made)
    plain = tmp_path / "plain"
    plain.mkdir()
    state = load_file(oracle.folder / "model.safetensors")
    save_file(state | {name: torch.from_numpy(value) for name, value in means.items()}, plain / "model.safetensors")
    (plain / "config.json").write_text((oracle.folder / "config.json").read_text())
    adapter = write_adapter(tmp_path / "adapter", plain, seed=1)
    files = locate(str(tmp_path / "quantized"))
    spec = spec_of(files)
    (ref,) = load(spec, adapter)
    base, adapted = answers(spec, open_checkpoint(files), [None, ref], compiled=False, expand=False)
    assert base != adapted
    for folder, tokens in ((plain, base), (merge(tmp_path / "merged", plain, adapter), adapted)):
        model = type(oracle.model).from_pretrained(folder, attn_implementation="eager").float().eval()
        with torch.inference_mode():
            logits = model(torch.tensor([PROMPT + tokens])).logits[0]
        assert tokens == logits[len(PROMPT) - 1 : -1].argmax(-1).tolist()
