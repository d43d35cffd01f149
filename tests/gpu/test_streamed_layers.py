"""Layers that come to the GPU for every step, from pinned memory and from a disk: tokens and log-probabilities are
those of a model that stays, bit for bit, also where slots are poisoned and nothing comes in time."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks import random_checkpoints

from holdfast.checkpoints import locate, match, open_checkpoint
from holdfast.config import EngineConfig
from holdfast.engine.startup import streamed_layers as startup
from holdfast.engine.startup.build import build_core, find_model, plan_model
from holdfast.errors import ModelAccessError
from holdfast.execution.streaming.copies import CudaCopies
from holdfast.footprint.streamed import all_apart, beside_gpu, streamed_layers
from holdfast.planner.sizing.engine_weights import EngineWeights
from holdfast.records import Request, SamplingParams

LAYERS = 7
SHAPE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "rms_norm_eps": 1e-5, "rope_theta": 5e5,
    "hidden_act": "silu", "max_position_embeddings": 4096, "torch_dtype": "bfloat16", "bos_token_id": 1,
    "eos_token_id": 2, "num_key_value_heads": 4, "vocab_size": 4096, "hidden_size": 1024, "intermediate_size": 2816,
    "num_hidden_layers": LAYERS, "num_attention_heads": 8, "head_dim": 128, "tie_word_embeddings": False,
}  # fmt: skip
FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"}, "bfloat16": {}, "awq": {}, "awq-files": {}, "fp8": {"quantization": "fp8"},
    "q4_k": {}, "smollm2": {},
}  # fmt: skip


def stored(kind: str, folder: Path) -> dict[str, Any]:
    """Settings that name it. The last is a real model, which may be out of reach."""
    if kind == "smollm2":
        try:
            locate("smollm2")
        except ModelAccessError as error:
            pytest.skip(error.message)
        return {"model": "smollm2"}
    if kind == "q4_k":
        path = folder / "model.gguf"
        if not path.exists():
            random_checkpoints.write_q4_k(SHAPE, path)
        return {"model": str(path)}
    if kind == "awq-files":  # Whose zero points are not all the same.
        if not (folder / "config.json").exists():
            random_checkpoints.write_awq(SHAPE, folder)
        return {"model": str(folder)}
    config = random_checkpoints.awq_config(SHAPE) if kind == "awq" else SHAPE
    (folder / "config.json").write_text(json.dumps(config))
    return {"model": str(folder), "load_format": "dummy"}


Told = list[tuple[list[int], list[dict[int, float]]]]


def answers(
    kind: str, folder: Path, streamed: int, on_disk: int = 0, *, embedding: bool = False, moving: bool = False
) -> Told:
    """`moving`: layers come to stay and leave at random between steps."""
    config = EngineConfig(
        device="cuda", skip_tokenizer_init=True, max_num_seqs=8, max_num_batched_tokens=256, max_model_len=512,
        kv_cache_memory_bytes=64 << 20, nvme_path=str(folder) if on_disk else None, cpu_compute="off",
        **FORMATS[kind], **stored(kind, folder),
    )  # fmt: skip
    found = find_model(config)
    plan = plan_model(config, found)
    assert plan.engine.streamed is None
    if streamed:
        checkpoint = None if config.load_format == "dummy" else match(found.spec, open_checkpoint(found.files))
        weights = EngineWeights(found.spec, checkpoint, plan.engine.quantize)
        by_layer = weights.by_layer(dtype=plan.dtype)
        placed = beside_gpu(streamed_layers(by_layer, streamed, on_disk), by_layer)
        saved = weights.saved_by_layer(dtype=plan.dtype)
        assert any(saved) == kind.startswith("awq")
        placed = replace(placed, ahead=0 if all_apart(placed.layers) else 1, saved=saved)
        if embedding:
            placed = replace(placed, embedding_bytes=weights.gathered_bytes(dtype=plan.dtype))
        plan = replace(plan, own=replace(plan.engine, streamed=placed))
    core, info = build_core(config, found, lambda stage, done, total: None, plan)
    lines = "\n".join(line for line in info.decisions if line.startswith(("link", "nvme")))
    print(kind, streamed, on_disk, embedding, lines)
    for number, length in enumerate((5, 200, 1, 64, 300, 17)):
        ids = [random.Random(number).randrange(3, 4000) for _ in range(length)]
        sampled = {"temperature": 0.0} if number % 2 else {"temperature": 1.0, "seed": number}
        params = SamplingParams(max_tokens=12 + number, ignore_eos=True, logprobs=3, **sampled)
        core.add(Request(request_id=str(number), prompt_token_ids=ids, params=params))
    told: dict[str, tuple[list[int], list[dict[int, float]]]] = {}
    dice, layers = random.Random(9), core.runner.movable_layers  # type: ignore[attr-defined]
    while core.has_work:
        if moving and dice.random() < 0.4:
            layers.change([layer for layer in range(len(found.spec.layers)) if dice.random() < 0.6])
        for output in core.step():
            tokens, logprobs = told.setdefault(output.request_id, ([], []))
            tokens.extend(output.token_ids)
            for one in output.logprobs or []:
                logprobs.append(dict(zip(one.token_ids, one.logprobs, strict=True)))
    core.close()
    assert torch.cuda.memory_allocated() < 64 << 20
    return [told[name] for name in sorted(told)]


class PoisonedCopies(CudaCopies):
    """A slot is NaN from its last reader to its copy, and neither side is ever in time."""

    least_cycles, most_cycles = 0, 4_000_000

    def copy_pieces(self, pieces: Any, after: Any, done: Any) -> None:
        self._stream.wait_event(after)
        with torch.cuda.stream(self._stream):
            for _, target in pieces:
                target.fill_(0xFF)
            torch.cuda._sleep(random.randint(self.least_cycles, self.most_cycles))
        super().copy_pieces(pieces, after, done)

    def await_copy(self, mark: Any) -> None:
        super().await_copy(mark)
        torch.cuda._sleep(random.randrange(500_000))


@pytest.mark.parametrize("kind", FORMATS)
def test_answers_are_those_of_a_model_that_stays(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = 30 if kind == "smollm2" else LAYERS
    plain = answers(kind, tmp_path, 0)
    assert answers(kind, tmp_path, layers) == plain
    assert answers(kind, tmp_path, 3, embedding=True) == plain
    monkeypatch.setattr(startup, "CudaCopies", PoisonedCopies)
    assert answers(kind, tmp_path, layers // 2) == plain
    assert answers(kind, tmp_path, layers - 2, 3, moving=True) == plain


def test_poison_is_seen_where_computing_does_not_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or the test above would prove nothing."""
    plain = answers("bfloat16", tmp_path, 0)
    monkeypatch.setattr(PoisonedCopies, "await_copy", lambda copies, mark: None)
    monkeypatch.setattr(PoisonedCopies, "least_cycles", 40_000_000)
    monkeypatch.setattr(PoisonedCopies, "most_cycles", 40_000_000)
    monkeypatch.setattr(startup, "CudaCopies", PoisonedCopies)
    assert answers("bfloat16", tmp_path, 5) != plain
