"""How an embedding model's files ask to be pooled, in every spelling, and what becomes of one that cannot be."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.checkpoints.pooling import folder_pooling, gguf_pooling
from holdfast.checkpoints.sources.hub import choose
from holdfast.engine.requests.admission import Admission
from holdfast.engine.requests.embedding import PARAMS
from holdfast.errors import UnsupportedOptionError
from holdfast.models import from_config

OLD = ("cls_token", "mean_tokens", "max_tokens", "mean_sqrt_len_tokens", "weightedmean_tokens", "lasttoken")


def asking(folder: Path, config: dict[str, Any] | None, *more: str) -> str:
    names = [("0", "", "Transformer"), ("1", "1_Pooling", "Pooling"), *(("2", f"2_{one}", one) for one in more)]
    modules = [
        {"idx": int(idx), "name": idx, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for idx, path, kind in names
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    if config is not None:
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(config))
    return folder_pooling(folder)


def switches(chosen: str) -> dict[str, Any]:
    return {"word_embedding_dimension": 64} | {f"pooling_mode_{name}": name == chosen for name in OLD}


@pytest.mark.parametrize(
    ("config", "found"),
    [
        (switches("lasttoken") | {"include_prompt": True}, "last"),
        (switches("mean_tokens"), "mean"),
        (switches("cls_token"), "cls"),
        (switches("weightedmean_tokens"), "weightedmean"),
        ({"embedding_dimension": 64, "pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode": "mean"}, "mean"),
        ({"pooling_mode": ["cls", "mean"]}, "cls with mean"),
        ({"word_embedding_dimension": 64}, "mean"),
    ],
)
def test_a_folder_asks_in_both_spellings(tmp_path: Path, config: dict[str, Any], found: str) -> None:
    assert asking(tmp_path, config, "Normalize") == found


def test_what_comes_behind_it_and_what_is_missing_is_named(tmp_path: Path) -> None:
    assert asking(tmp_path, None) == "one that 1_Pooling/config.json should say, which is not there"
    assert asking(tmp_path, switches("lasttoken"), "Dense", "Normalize") == "last and Dense"


def test_who_says_nothing_is_pooled_by_the_last_token(tmp_path: Path) -> None:
    assert folder_pooling(tmp_path) == "last"
    (tmp_path / "modules.json").write_text("[]")
    assert folder_pooling(tmp_path) == "last"


def test_a_gguf_header_asks_by_number() -> None:
    assert [gguf_pooling(number) for number in (None, 0, 1, 2, 3, 4)] == ["last", "last", "mean", "cls", "last", "last"]


def test_a_download_has_the_file_that_says_it() -> None:
    names = ["config.json", "model.safetensors", "modules.json", "1_Pooling/config.json", "onnx/config.json"]
    assert "1_Pooling/config.json" in choose(names, "some/model")
    assert "onnx/config.json" not in choose(names, "some/model")


def test_a_pooling_that_is_not_done_is_refused_by_name() -> None:
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 64, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
    }  # fmt: skip
    spec = from_config(config)
    for pooling, refused in (("mean", True), ("cls", True), ("last", False)):
        admission = Admission(replace(spec, pooling=pooling), 64, random.Random(0))
        if not refused:
            assert admission.admit([1, 2], PARAMS, request_id="a", embed=True)[0].embed
            continue
        with pytest.raises(UnsupportedOptionError, match=f"{pooling} pooling"):
            admission.admit([1, 2], PARAMS, request_id="a", embed=True)
        assert admission.admit([1, 2], PARAMS, request_id="a"), "it generates all the same"
