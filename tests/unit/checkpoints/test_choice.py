"""Which files are the model, judged by names alone, and the same choice made in a folder that is here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.checkpoints import from_path, locate, locate_headers
from holdfast.checkpoints.sources.select_files import choose_weights, quantization_of
from holdfast.errors import CheckpointError

LLAMA = [
    "config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "original/consolidated.00.pth",
    "original/params.json",
]
MISTRAL = [
    "config.json",
    "consolidated.safetensors",
    "model-1.safetensors",
    "model.safetensors.index.json",
    "params.json",
]
VARIANTS = ["model.safetensors", "model.fp16.safetensors", "adapter_model.safetensors"]
GGUFS = [
    "README.md",
    "mmproj-model-F16.gguf",
    "Model-Q4_K_M.gguf",
    "Model-UD-Q4_K_XL.gguf",
    "Model-Q8_0.gguf",
    "Model.imatrix.gguf",
    "BF16/Model-BF16-00001-of-00002.gguf",
    "BF16/Model-BF16-00002-of-00002.gguf",
]


@pytest.mark.parametrize(
    ("names", "wanted", "format", "weights"),
    [
        (LLAMA, None, "safetensors", LLAMA[1:3]),
        (MISTRAL, None, "safetensors", ["model-1.safetensors"]),
        (["consolidated.safetensors"], None, "safetensors", ["consolidated.safetensors"]),
        # Variants of one model beside each other: loaders take the plain name.
        (VARIANTS, None, "safetensors", ["model.safetensors"]),
        (["model.safetensors", "x.gguf"], None, "safetensors", ["model.safetensors"]),
        (["model.safetensors", "x-Q8_0.gguf"], "Q8_0", "gguf", ["x-Q8_0.gguf"]),
        (GGUFS, "q4_k_m", "gguf", ["Model-Q4_K_M.gguf"]),
        (GGUFS, "Q4_K_XL", "gguf", ["Model-UD-Q4_K_XL.gguf"]),
        (GGUFS, "UD-Q4_K_XL", "gguf", ["Model-UD-Q4_K_XL.gguf"]),
        (GGUFS, "BF16", "gguf", GGUFS[6:]),
        (GGUFS, "Model-BF16-00002-of-00002.gguf", "gguf", GGUFS[6:]),
        (GGUFS, "model-q8_0.gguf", "gguf", ["Model-Q8_0.gguf"]),
        (GGUFS[-2:], None, "gguf", GGUFS[6:]),
        (["a.gguf", "mmproj.gguf"], None, "gguf", ["a.gguf"]),
        (["config.json", "training_args.bin", "optimizer.pt"], None, "none", []),
    ],
)  # fmt: skip
def test_choices(names: list[str], wanted: str | None, format: str, weights: list[str]) -> None:
    choice = choose_weights(names, "owner/model", wanted)
    assert (choice.format, list(choice.weights)) == (format, weights)
    left_out = choice.reason.partition("left out: ")[2]
    assert not any(name in left_out.split(", ") for name in weights)


def test_the_reason_names_what_was_left_out() -> None:
    assert choose_weights(LLAMA, "r").reason == (
        "model-00001-of-00002.safetensors and 1 more; left out: original/consolidated.00.pth"
    )


@pytest.mark.parametrize(
    ("names", "wanted", "word"),
    [
        (GGUFS, None, r"several GGUF models \(3\)"),
        (GGUFS, None, "Q4_K_M, Q8_0, UD-Q4_K_XL"),
        (GGUFS, None, "owner/model:Q4_K_M"),
        (GGUFS, "Q4_K", "no GGUF file for 'Q4_K'"),
        (GGUFS[:-1], "BF16", "1 of the 2 parts"),
        (["x/a-Q8_0.gguf", "y/b-Q8_0.gguf"], "Q8_0", "owner/model:x/a-Q8_0.gguf"),
        (LLAMA, "Q4_K_M", "no GGUF file to choose"),
        (["config.json", "original/consolidated.00.pth"], None, "pickle"),
        (["pytorch_model-00001-of-00002.bin"], None, "pickle"),
        (["adapter_model.safetensors", "adapter_config.json"], None, "an adapter"),
    ],
)
def test_refusals(names: list[str], wanted: str | None, word: str) -> None:
    with pytest.raises(CheckpointError, match=word):
        choose_weights(names, "owner/model", wanted)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("llama-2-7b.Q4_K_M.gguf", "Q4_K_M"),
        ("gemma-3-4b-it-q4_0.gguf", "Q4_0"),
        ("x/DeepSeek-R1-UD-IQ1_S-00001-of-00003.gguf", "UD-IQ1_S"),
        ("gpt-oss-20b-mxfp4.gguf", "MXFP4"),
        ("BitNet-TQ2_0.gguf", "TQ2_0"),
        ("model-f16.gguf", "F16"),
        ("model.gguf", None),
        ("qwen2-7b.gguf", None),
    ],
)
def test_quantization_of_a_name(name: str, quantization: str | None) -> None:
    assert quantization_of(name) == quantization


def test_a_folder_of_many_ggufs_is_asked_for_one(gguf_file: Path) -> None:
    folder, raw = gguf_file.parent, gguf_file.read_bytes()
    gguf_file.unlink()
    (folder / "large").mkdir()
    for name in ("m-Q4_0.gguf", "m-Q8_0.gguf", "large/m-F16.gguf"):
        (folder / name).write_bytes(raw)
    for wanted, name in (("Q8_0", "m-Q8_0.gguf"), ("m-Q4_0.gguf", "m-Q4_0.gguf"), ("f16", "large/m-F16.gguf")):
        files = locate(f"{folder}:{wanted}")
        assert files.path == folder / name
        assert files.chosen.startswith(f"{name}, selected with {wanted}; left out:")
        assert locate_headers(f"{folder}:{wanted}").path == folder / name
    with pytest.raises(CheckpointError, match=f"{folder}:Q4_0"):
        locate(str(folder))


def test_a_folder_says_what_was_left_out(model_folder: Callable[..., Path]) -> None:
    folder = model_folder()
    (folder / "pytorch_model.bin").write_bytes(b"\x80")
    assert locate(str(folder)).chosen == "model.safetensors; left out: pytorch_model.bin"


def test_parts_that_contradict_their_names_are_refused(gguf_file: Path) -> None:
    for number in (1, 2):
        gguf_file.with_name(f"m-{number:05}-of-00002.gguf").write_bytes(gguf_file.read_bytes())
    with pytest.raises(CheckpointError, match="not the part that its name says"):
        from_path(gguf_file.with_name("m-00001-of-00002.gguf"), name="m")
    gguf_file.with_name("m-00002-of-00002.gguf").unlink()
    with pytest.raises(CheckpointError, match="1 of the 2 parts"):
        from_path(gguf_file.with_name("m-00001-of-00002.gguf"), name="m")
