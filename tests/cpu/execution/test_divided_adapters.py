"""LoRA adapters of a model that several ranks compute: each has its part of both factors, the tokens are those of one
rank, and an adapter that one rank cannot read is none's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from greedy_runs import greedy_answers, layout_of, make_core
from lora_adapters import LAYER_MODULES, write_adapter
from thread_ranks import ThreadRanks

from holdfast.config import EngineConfig
from holdfast.engine.requests.adapters import Adapters
from holdfast.errors import AdapterError
from holdfast.execution import native
from holdfast.execution.lora.files import AdapterFiles
from holdfast.execution.lora.slots import LoraLimits
from holdfast.execution.runner import Runner, RunnerLimits
from holdfast.execution.weights.load import load_weights
from holdfast.models import ModelSpec
from holdfast.records import AdapterRef, Request, SamplingParams

pytestmark = pytest.mark.skipif(not native.available(), reason="ranks wait for one another by compiled code")

LORA = LoraLimits(max_loras=2, max_rank=16, cached=1)
LIMITS = RunnerLimits(max_num_seqs=4, max_num_batched_tokens=24, max_model_len=64, max_loras=2)
BLOCKS = 60
PROMPTS = {
    str(number): [(37 * number + 11 * place**2) % 290 + 3 for place in range(9 + 5 * number)] for number in range(6)
}
FUSED = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
SHAPES: list[tuple[str, dict[str, Any], tuple[str, ...]]] = [
    # Nine heads over three, of which one rank has two thirds; and rows of three matrices in one.
    ("Llama", {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 144}, LAYER_MODULES),
    ("Phi3", {"num_key_value_heads": 1}, FUSED),
]


def refs_of(spec: ModelSpec, model: Path, folder: Path, modules: tuple[str, ...]) -> list[AdapterRef]:
    """Three, of which the last changes one product alone; more than there are places."""
    known = Adapters(spec, "tiny", EngineConfig(enable_lora=True))
    found = []
    for seed, own in enumerate((modules, modules, modules[-1:])):
        made = write_adapter(folder / f"adapter-{seed}", model, seed=seed, rank=2 + seed, modules=own)
        found.append(known.load(made.name, str(made), anywhere=True))
    return found


def answers_of(runner: Any, layout: Any, refs: list[AdapterRef], stages: int = 1) -> dict[str, list[int]]:
    core = make_core(runner, layout, BLOCKS, stages=stages, sequences=4, loras=2)
    adapters = {str(number): refs[number % 4] for number in range(len(PROMPTS)) if number % 4 < 3}
    return greedy_answers(core, PROMPTS, lengths=dict.fromkeys(PROMPTS, 6), adapters=adapters)


@pytest.mark.parametrize(
    ("architecture", "settings", "modules", "compiled"),
    [
        pytest.param(*shape, compiled, id=f"{shape[0]}-{compiled}", marks=() if usual else pytest.mark.long)
        for shape, compiled, usual in (
            (SHAPES[0], True, True),
            (SHAPES[0], False, False),
            (SHAPES[1], True, False),
            (SHAPES[1], False, True),
        )
    ],
)
def test_ranks_answer_with_adapters_as_one_does(
    architecture: str,
    settings: dict[str, Any],
    modules: tuple[str, ...],
    compiled: bool,
    oracles: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Three adapters and none in one batch, through two places: what one rank says is held against merged weights in
    test_lora_families."""
    oracle = oracles(architecture, **settings)
    refs = refs_of(oracle.spec, oracle.folder, tmp_path, modules)
    loading = {"expand": not compiled, "compiled": compiled}
    weights = load_weights(oracle.spec, oracle.checkpoint(), dtype=torch.float32, device=torch.device("cpu"), **loading)
    layout = layout_of(oracle.spec)
    one = Runner(oracle.spec, weights, layout, LIMITS, torch.device("cpu"), compiled=compiled, lora=LORA)
    one.back_kv(BLOCKS)
    expected = answers_of(one, layout, refs)
    for size, stages in ((2, 1), (1, 2), (2, 2)):
        ranks = ThreadRanks(
            oracle.spec, oracle.checkpoint, LIMITS, BLOCKS, size=size, stages=stages, lora=LORA, **loading
        )
        assert answers_of(ranks.runner, ranks.layout, refs, stages) == expected, (size, stages)
        ranks.close()


@pytest.mark.parametrize(
    ("architecture", "settings", "splits"),
    [
        ("Gemma3", {"head_dim": 24, "sliding_window": 9, "num_hidden_layers": 4,
                    "layer_types": ["sliding_attention", "full_attention"] * 2}, ((2, 1), (2, 2))),
        ("Llama", {"num_hidden_layers": 2}, ((4, 1),)),
    ],
)  # fmt: skip
def test_adapters_of_windows_and_of_four_ranks(
    architecture: str,
    settings: dict[str, Any],
    splits: tuple[tuple[int, int], ...],
    oracles: Callable[..., Any],
    tmp_path: Path,
) -> None:
    """Norms behind attention and MLP, whose sums are added up apart; and KV heads that two ranks have each."""
    oracle, loading = oracles(architecture, **settings), {"expand": False, "compiled": True}
    refs = refs_of(oracle.spec, oracle.folder, tmp_path, LAYER_MODULES)
    weights = load_weights(oracle.spec, oracle.checkpoint(), dtype=torch.float32, device=torch.device("cpu"), **loading)
    layout = layout_of(oracle.spec)
    one = Runner(oracle.spec, weights, layout, LIMITS, torch.device("cpu"), compiled=True, lora=LORA)
    one.back_kv(BLOCKS)
    expected = answers_of(one, layout, refs)
    for size, stages in splits:
        ranks = ThreadRanks(
            oracle.spec, oracle.checkpoint, LIMITS, BLOCKS, size=size, stages=stages, lora=LORA, **loading
        )
        assert answers_of(ranks.runner, ranks.layout, refs, stages) == expected, (size, stages)
        ranks.close()


def test_adapters_of_attention_are_divided_beside_whole_experts(oracles: Callable[..., Any], tmp_path: Path) -> None:
    experts = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 32}
    oracle = oracles("Qwen3Moe", **experts)
    refs = refs_of(oracle.spec, oracle.folder, tmp_path, ("q_proj", "k_proj", "v_proj", "o_proj"))
    weights = load_weights(
        oracle.spec, oracle.checkpoint(), dtype=torch.float32, device=torch.device("cpu"), expand=True
    )
    one = Runner(oracle.spec, weights, layout_of(oracle.spec), LIMITS, torch.device("cpu"), lora=LORA)
    one.back_kv(BLOCKS)
    ranks = ThreadRanks(oracle.spec, oracle.checkpoint, LIMITS, BLOCKS, size=2, placement="linear", lora=LORA)
    assert answers_of(ranks.runner, ranks.layout, refs) == answers_of(one, one.layout, refs)
    ranks.close()


def test_parts_of_all_ranks_are_the_whole_adapter(oracles: Callable[..., Any], tmp_path: Path) -> None:
    """Side by side, or with products added up; and of the KV head that two ranks have, both have it."""
    oracle = oracles("Llama", num_key_value_heads=1, num_hidden_layers=2)
    ref = refs_of(oracle.spec, oracle.folder, tmp_path, LAYER_MODULES)[0]
    whole = AdapterFiles(oracle.spec, 16, torch.float32)
    ranks = ThreadRanks(oracle.spec, oracle.checkpoint, LIMITS, BLOCKS, size=2)
    parts = [AdapterFiles(runner.spec, 16, torch.float32, oracle.spec) for runner in ranks.runners]
    deltas = []
    for files in (whole, *parts):
        target = torch.full((files.elements,), float("nan"))
        files.read(ref, target)
        deltas.append({(site.layer, site.product): (a[0], b[0], site.rows) for site, a, b in files.views(target[None])})
    found, *shares = deltas
    for key, (a, b, rows) in found.items():
        if key[1] in ("o", "down"):
            inner = [part[key][0].shape[1] for part in shares]
            joined = sum(part[key][1] @ part[key][0] @ mask for part, mask in zip(shares, _masks(inner), strict=True))
            assert torch.allclose(joined, b @ a)
            continue
        for part in shares:
            assert torch.equal(part[key][0], a)
        rank = b.shape[1]
        for place, whole_part in enumerate(torch.split(b, list(rows))):
            own = [torch.split(part[key][1], list(part[key][2]))[place] for part in shares]
            again = own[0] if key[1] == "qkv" and place else torch.cat(own)
            assert torch.equal(again, whole_part)
            assert own[0].shape[1] == rank
    ranks.close()


def _masks(widths: list[int]) -> list[torch.Tensor]:
    """[own columns, all columns] of each rank: where its columns are among all."""
    eye = torch.eye(sum(widths))
    return list(torch.split(eye, widths))


def test_an_adapter_that_one_rank_cannot_read_is_none_s(
    oracles: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its requests end and say which rank; the next that asks for it, once it can be read, has it."""
    oracle = oracles("Llama")
    refs = refs_of(oracle.spec, oracle.folder, tmp_path, LAYER_MODULES)
    ranks = ThreadRanks(oracle.spec, oracle.checkpoint, LIMITS, BLOCKS, size=2, stages=2, lora=LORA)
    broken, read = ranks.runners[3]._adapters._files, AdapterFiles.read

    def refusing(self: AdapterFiles, ref: AdapterRef, *given: Any) -> Any:
        if self is broken and ref == refs[0]:
            raise AdapterError("the disk is gone", field="model")
        return read(self, ref, *given)

    monkeypatch.setattr(AdapterFiles, "read", refusing)
    core = make_core(ranks.runner, ranks.layout, BLOCKS, stages=2, sequences=4, loras=2)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    for number, prompt in enumerate(list(PROMPTS.values())[:3]):
        core.add(Request(request_id=str(number), prompt_token_ids=prompt, params=params, adapter=[None, *refs][number]))
    ended = {}
    while core.has_work:
        ended |= {output.request_id: output.failure for output in core.step() if output.finish_reason is not None}
    assert ended["0"] is None
    assert ended["2"] is None
    assert ended["1"] is not None
    assert ended["1"].message == "rank 3: the disk is gone"
    monkeypatch.undo()
    prompts = {"again": PROMPTS["0"]}
    assert greedy_answers(core, prompts, lengths={"again": 4}, adapters={"again": refs[0]}) != greedy_answers(
        core, prompts, lengths={"again": 4}
    )
    ranks.close()
