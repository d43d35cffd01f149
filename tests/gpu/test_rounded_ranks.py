"""Ranks on GPUs, two of them on one, whose weights have rounded inputs, or whose pages are in FP8: rows that ranks have
parts of are rounded as whole rows are, to the bit, and engines say what one rank says as far as rounding lets them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_exchange
import pytest
import torch
from gpu_exchange import ExchangeProcesses
from quantized_files import Format, compressed, fp8, int8, write_quantized
from quantized_formats import FORMATS
from tiny_gpu import Tiny, prompt

from holdfast import LLM, SamplingParams

WIDE = {"architecture": "Llama", "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 8,
        "num_key_value_heads": 4, "head_dim": 64, "num_hidden_layers": 2, "vocab_size": 224,
        "max_position_embeddings": 512, "initializer_range": 0.08}  # fmt: skip
DYNAMIC = {"quant_method": "fp8", "activation_scheme": "dynamic"}
INTEGERS = {"num_bits": 8, "type": "int", "symmetric": True}
FP8 = Format(DYNAMIC, fp8(), "fp8")
BLOCKS = Format(
    DYNAMIC | {"weight_block_size": [128, 128]},
    fp8("block", block=(128, 128), name="weight_scale_inv"),
    "fp8",
    input_group=128,
)
W8A8 = Format(
    compressed(
        {**INTEGERS, "strategy": "channel"}, {**INTEGERS, "dynamic": True, "strategy": "token"}, "int-quantized"
    ),
    int8(),
    "int8",
)
PAGES = {"kv_cache_dtype": "fp8"}
ENGINES: dict[str, tuple[Format | None, dict[str, Any], dict[str, int]]] = {
    "fp8, pages in fp8": (FP8, PAGES, {"tensor_parallel_size": 2}),
    "fp8 in blocks": (BLOCKS, {}, {"tensor_parallel_size": 2}),
    "w8a8": (W8A8, {}, {"tensor_parallel_size": 2}),
    "fp8 while loading": (None, {"quantization": "fp8"}, {"tensor_parallel_size": 2}),
    "act-order": (FORMATS["gptq-ordered"], {}, {"tensor_parallel_size": 2}),
    "stages of fp8, pages in fp8": (FP8, PAGES, {"pipeline_parallel_size": 2}),
}
"""How a model's matrices are rounded, settings of its engine, and its ranks."""
ASKED = prompt(4, 120)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SCORED = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, prompt_logprobs=1)


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExchangeProcesses]:
    made = ExchangeProcesses(tmp_path_factory.mktemp("exchange"), request.param)
    yield made
    made.close()


@pytest.mark.parametrize(("rows", "each"), [(1, 256), (3, 384), (64, 256), (300, 512)])
def test_parts_of_rows_are_rounded_as_whole_rows(ranks: ExchangeProcesses, rows: int, each: int) -> None:
    """`each`: columns of a rank."""
    ranks.together(gpu_exchange.rounded_parts, rows, each)


def written(folder: Path, made: Format | None) -> tuple[Tiny, Path]:
    (folder / "plain").mkdir()
    tiny = Tiny(folder / "plain", **WIDE)
    if made is not None:
        write_quantized(folder / "plain", folder / "quantized", made)
    return tiny, folder / ("plain" if made is None else "quantized")


def engine(folder: Path, **settings: Any) -> LLM:
    given = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 400, "max_num_seqs": 4,
             "max_num_batched_tokens": 64, "kv_cache_memory_bytes": "32MiB", "vram": "8GiB",
             "skip_tokenizer_init": True}  # fmt: skip
    return LLM(str(folder), **given | settings)


def answers(folder: Path, **settings: Any) -> tuple[list[float], list[list[int]], str]:
    """Log-probabilities of a prompt's tokens, tokens of others, and how pages are scaled."""
    with engine(folder, **settings) as llm:
        print("\n".join(llm.info.decisions))
        rows = llm.info.memory.ranks
        assert [row.weights_bytes for row in rows] == [row.planned_weights_bytes for row in rows]
        [told] = llm.generate(prompt_token_ids=[ASKED], sampling_params=SCORED, use_tqdm=False)
        prompts = [prompt(1, 5), prompt(2, 150), prompt(3, 33)]
        outputs = llm.generate(prompt_token_ids=prompts, sampling_params=GREEDY, use_tqdm=False)
        scales = next((one for one in llm.info.decisions if one.startswith("kv_cache_scales")), "")
    places = zip(ASKED[1:], told.prompt_logprobs[1:], strict=True)
    return [place[token].logprob for token, place in places], [list(o.outputs[0].token_ids) for o in outputs], scales


def apart(some: list[float], others: list[float]) -> float:
    return float(torch.tensor(some).sub(torch.tensor(others)).square().mean().sqrt())


@pytest.mark.parametrize("name", ENGINES)
def test_two_ranks_say_what_one_says(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no farther from it than it is from the model before it was quantized. Nearer they need not be: an input
    that lies between two codes goes either way by the last bit of a sum."""
    made, settings, sizes = ENGINES[name]
    tiny, folder = written(tmp_path, made)
    with torch.inference_mode():
        told = tiny.model(torch.tensor([ASKED])).logits[0].log_softmax(-1)
    plain = [float(told[place, token]) for place, token in enumerate(ASKED[1:])]
    alone, of_one, scales = answers(folder, **settings)
    monkeypatch.setenv("HOLDFAST_RANK_GPUS", "0,0")
    together, found, found_scales = answers(folder, **settings, **sizes)
    pairs = [pair for mine, theirs in zip(found, of_one, strict=True) for pair in zip(mine, theirs, strict=True)]
    print(f"{name}: {apart(together, alone):.4f} from one rank, which is {apart(alone, plain):.4f} from plain weights;")
    alike = sum(one == other for one, other in pairs)
    print(f"{alike} of {len(pairs)} tokens are alike")
    assert alike > 2 * len(found), "the first of each comes of its prompt: nothing that was decoded behind it is right"
    assert apart(together, alone) <= apart(alone, plain)
    assert found_scales == scales
    assert bool(scales) == ("kv_cache_dtype" in settings)


def test_dummies_of_a_quantized_model_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = written(tmp_path, FP8)
    monkeypatch.setenv("HOLDFAST_RANK_GPUS", "0,0")
    _, found, _ = answers(folder, tensor_parallel_size=2, load_format="dummy")
    assert [len(tokens) for tokens in found] == [12] * 3
