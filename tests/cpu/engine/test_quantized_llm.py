"""`LLM` with quantized checkpoints and with --quantization: what was planned is what is held, and it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import quantized_files as written
import torch
import transformers
from quantized_files import Format, write_mxfp4, write_quantized

from holdfast import LLM, SamplingParams, plan
from holdfast.config import EngineConfig
from holdfast.engine.startup import build
from holdfast.engine.startup.progress import LoadProgress
from holdfast.errors import ConfigurationError

pytestmark = pytest.mark.usefixtures("forked_starts")

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 300, "max_position_embeddings": 256,
}  # fmt: skip
FORMATS = {
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, written.awq()),
    "fp8": Format({"quant_method": "fp8", "activation_scheme": "dynamic"}, written.fp8("tensor"), inputs="fp8"),
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    torch.manual_seed(5)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(plain: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str | None, Path]:
    made: dict[str | None, Path] = {None: plain}
    for name, how in FORMATS.items():
        made[name] = tmp_path_factory.mktemp(name)
        write_quantized(plain, made[name], how)
    return made


def settings_of(folder: Path, **more: object) -> dict[str, object]:
    limits = {"max_num_seqs": 2, "max_model_len": 64, "kv_cache_memory_bytes": "4MiB", "threads": 1}
    return {"model": str(folder), "skip_tokenizer_init": True, "dtype": "float32", **limits, **more}


EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 16}
IN_ORDER = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True, "desc_act": True}


@pytest.mark.parametrize(
    ("asked", "line"), [("mxfp4", "weights: MXFP4 g32, "), ("gptq_marlin", "weights: GPTQ int4 g32 in act-order, ")]
)
def test_experts_are_held_as_planned(asked: str, line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(7)
    config = transformers.Qwen3MoeConfig(**SIZES, **EXPERTS, decoder_sparse_step=1, mlp_only_layers=[])
    transformers.Qwen3MoeForCausalLM(config).float().save_pretrained(tmp_path / "plain")
    folder = tmp_path / "quantized"
    if asked == "mxfp4":
        write_mxfp4(tmp_path / "plain", folder)
    else:
        write_quantized(tmp_path / "plain", folder, Format(IN_ORDER, written.gptq(ordered=True)))
    with LLM(**settings_of(folder, expand_weights="never", quantization=asked)) as llm:
        assert llm.info.memory is not None
        (weights,) = (term for term in llm.info.memory.terms if term.term == "weights")
        assert weights.planned_bytes == weights.measured_bytes, "to the byte"
        (output,) = llm.generate([{"prompt_token_ids": [5, 9, 11]}], SamplingParams(max_tokens=4, temperature=0))
        assert len(output.outputs[0].token_ids) == 4
    assert line in capsys.readouterr().err
    told = plan(str(folder), ram="4GiB", dtype="float32", expand_weights="never", quantization=asked)
    assert told.fit.weights_bytes == weights.planned_bytes


def test_ranks_divide_columns_in_act_order(plain: Path, tmp_path: Path) -> None:
    """Processes that gather what comes into o and down: the tokens of one, and weights as planned."""
    write_quantized(plain, tmp_path, Format(IN_ORDER, written.gptq(ordered=True)))
    said = []
    for ranks in (1, 2):
        with LLM(**settings_of(tmp_path, expand_weights="never", tensor_parallel_size=ranks, threads=2)) as llm:
            asked = [{"prompt_token_ids": [5, 9, 11]}, {"prompt_token_ids": list(range(40))}]
            outputs = llm.generate(asked, SamplingParams(max_tokens=12, temperature=0, ignore_eos=True))
            said.append([list(output.outputs[0].token_ids) for output in outputs])
            assert llm.info.memory is not None
            (weights,) = (term for term in llm.info.memory.terms if term.term == "weights")
            assert weights.planned_bytes == weights.measured_bytes, "to the byte"
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("stored", "asked", "line"),
    [
        ("awq", None, "weights: AWQ int4 g32, "),
        ("awq", "awq_marlin", "weights: AWQ int4 g32, "),
        ("fp8", "fp8", "weights: FP8, "),
        (None, "fp8", "weights: FP8, quantized while loading, "),
        (None, "int4", "weights: INT4, quantized while loading, "),
        (None, None, "weights: bfloat16, "),
    ],
)
def test_what_was_planned_is_held(
    folders: dict[str | None, Path],
    capsys: pytest.CaptureFixture[str],
    stored: str | None,
    asked: str | None,
    line: str,
) -> None:
    with LLM(**settings_of(folders[stored], expand_weights="never", quantization=asked)) as llm:
        assert llm.info.memory is not None
        (weights,) = (term for term in llm.info.memory.terms if term.term == "weights")
        assert weights.planned_bytes == weights.measured_bytes, "to the byte"
        (output,) = llm.generate([{"prompt_token_ids": [5, 9, 11]}], SamplingParams(max_tokens=4, temperature=0))
        assert len(output.outputs[0].token_ids) == 4
        decisions = "\n".join(llm.info.decisions)
    assert line in capsys.readouterr().err
    # As `holdfast plan` has it, from headers alone.
    told = plan(str(folders[stored]), ram="4GiB", dtype="float32", expand_weights="never", quantization=asked)
    assert told.fit.weights_bytes == weights.planned_bytes
    assert ("quantization = " in decisions) == (asked not in (None, stored))


def test_progress_moves_with_every_tensor_that_is_quantized(plain: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which takes minutes on a CPU."""
    seen: list[tuple[str, int, int]] = []
    monkeypatch.setattr(LoadProgress, "__call__", lambda self, *told: seen.append(told))
    with LLM(**settings_of(plain, quantization="int4")):
        done = [done for stage, done, total in seen if stage == "load" and total]
    assert done == list(range(1, len(done) + 1))
    assert {total for stage, _, total in seen if stage == "load" and total} == {len(done)}
    assert len(done) == 2 * 9 + 3, "of each layer seven matrices and two norms; embedding, norm and head"


def test_a_word_that_is_not_true_of_the_checkpoint_is_refused_before_a_plan(folders: dict[str | None, Path]) -> None:
    for stored, asked in (("awq", "gptq"), ("fp8", "awq_marlin"), ("awq", "int4"), (None, "bitsandbytes")):
        with pytest.raises(ConfigurationError) as caught:
            build.find_model(EngineConfig.from_arguments(**settings_of(folders[stored], quantization=asked)))
        assert caught.value.code == "HF144"
        assert f"--quantization {asked}" in caught.value.message
        assert (caught.value.fix or "").startswith(("leave --quantization out", "--quantization int4, "))
    with pytest.raises(ConfigurationError) as caught:
        LLM(**settings_of(folders["awq"], quantization="fp8"))
    assert (caught.value.fix or "").startswith("leave quantization out")


def test_dummy_weights_lie_as_real_ones_would(folders: dict[str | None, Path]) -> None:
    for stored, asked in (("awq", None), (None, "int4")):
        more = {"quantization": asked, "expand_weights": "never"}
        with LLM(**settings_of(folders[stored], load_format="dummy", **more)) as llm:
            assert llm.info.memory is not None
            (weights,) = (term for term in llm.info.memory.terms if term.term == "weights")
            assert weights.planned_bytes == weights.measured_bytes
            llm.generate([{"prompt_token_ids": [5, 9, 11]}], SamplingParams(max_tokens=2, temperature=0))
