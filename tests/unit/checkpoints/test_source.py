"""From a name to files, from files to a spec and to bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from tiny_gguf import write_tiny_gguf

from holdfast.checkpoints import extra_tensors, from_path, locate, match, open_checkpoint, spec_of
from holdfast.checkpoints.formats import gguf
from holdfast.checkpoints.sources import builtin, cache
from holdfast.checkpoints.sources.resolve import locate_headers, overridden
from holdfast.config import EngineConfig
from holdfast.engine.startup.build import find_model
from holdfast.errors import CheckpointError, ConfigurationError, ModelNotFoundError, UnknownArchitectureError

Folder = Callable[..., Path]


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_is_read_tensor_by_tensor(model_folder: Folder, shards: int) -> None:
    files = locate(str(model_folder(shards=shards)))
    assert (files.kind, files.format, len(files.weights)) == ("folder", "safetensors", shards)
    spec = spec_of(files)
    with open_checkpoint(files) as checkpoint:
        found = match(spec, checkpoint)
        assert set(found) == {tensor.name for tensor in spec.tensors}
        assert extra_tensors(spec, checkpoint) == ()
        value = checkpoint.read(found["layers.0.k"].name)
    assert value.dtype == numpy.uint8
    assert value.flags.writeable
    assert (value.view("<f4") == 3.0).all()
    assert value.nbytes == 16 * 32 * 4


def test_small_files_are_read(model_folder: Folder) -> None:
    folder = model_folder()
    (folder / "generation_config.json").write_text('{"eos_token_id": [3, 4]}')
    (folder / "tokenizer.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text('{"chat_template": "old"}')
    files = locate(str(folder))
    assert files.tokenizer_json == folder / "tokenizer.json"
    assert files.chat_template == "old"
    assert spec_of(files).eos_token_ids == (3, 4)
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert locate(str(folder)).chat_template == "d"
    (folder / "chat_template.jinja").write_text("new")
    assert locate(str(folder)).chat_template == "new"


def test_a_folder_says_whether_it_was_trained_to_embed(model_folder: Folder) -> None:
    folder = model_folder()
    assert not locate(str(folder)).trained_to_embed
    (folder / "modules.json").write_text("[]")
    assert locate(str(folder)).trained_to_embed


@pytest.mark.parametrize(("pooling", "embeds"), [(0, False), (3, True), (4, False)])
def test_so_does_a_gguf_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pooling: int, embeds: bool) -> None:
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    assert not locate(str(path)).trained_to_embed
    read = gguf.read_header

    def with_pooling(*given: Any, **named: Any) -> Any:
        header = read(*given, **named)
        return replace(header, metadata=header.metadata | {"llama.pooling_type": pooling})

    monkeypatch.setattr(gguf, "read_header", with_pooling)
    assert locate(str(path)).trained_to_embed == embeds


def test_a_folder_without_weights_can_still_tell_its_spec(model_folder: Folder) -> None:
    files = locate(str(model_folder(shards=0)))
    assert (files.format, files.weights) == ("none", ())
    assert spec_of(files).hidden_size == 32
    with pytest.raises(CheckpointError, match="dummy"):
        open_checkpoint(files)


def test_a_missing_dtype_is_taken_from_the_weights(model_folder: Folder) -> None:
    assert spec_of(locate(str(model_folder(dtype=None)))).stored_dtype == "float32"


def test_a_folder_with_one_gguf_is_that_file(gguf_file: Path) -> None:
    files = locate(str(gguf_file.parent))
    assert (files.format, files.path) == ("gguf", gguf_file)
    assert files.header is not None
    gguf_file.with_name("second.gguf").write_bytes(gguf_file.read_bytes())
    with pytest.raises(CheckpointError, match="several GGUF"):
        locate(str(gguf_file.parent))


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth"])
def test_pickles_are_refused_with_how_to_convert(model_folder: Folder, name: str) -> None:
    folder = model_folder(shards=0)
    (folder / name).write_bytes(b"\x80\x04.")
    for path in (folder, folder / name):
        with pytest.raises(CheckpointError, match="pickle") as caught:
            from_path(path, name="x")
        assert "save_pretrained" in str(caught.value)


def test_consolidated_copies_are_left_out(model_folder: Folder) -> None:
    folder = model_folder()
    (folder / "consolidated.safetensors").write_bytes(b"foreign")
    assert [path.name for path in locate(str(folder)).weights] == ["model.safetensors"]


@pytest.mark.parametrize("content", ["", "[]", "{", '{"a": ' * 5000])
def test_a_broken_config_is_named(model_folder: Folder, content: str) -> None:
    folder = model_folder()
    (folder / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        locate(str(folder))


def test_an_empty_folder_and_a_foreign_file(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="empty folder"):
        locate(str(tmp_path))
    (tmp_path / "readme.txt").write_text("hello")
    with pytest.raises(CheckpointError, match="not a model"):
        locate(str(tmp_path / "readme.txt"))


@pytest.mark.parametrize("name", ["nowhere", "./not/there", "/not/there", "missing.gguf", "a/b/c", ""])
def test_a_name_that_is_nothing(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="smollm2"):
        locate(name)


def test_a_tensor_of_another_shape_is_refused_with_both_sides(model_folder: Folder) -> None:
    files = locate(str(model_folder(intermediate_size=64)))
    with open_checkpoint(files) as checkpoint, pytest.raises(CheckpointError) as caught:
        match(spec_of(files), checkpoint)
    assert "[64, 32]" in str(caught.value.needed)
    assert "[32, 32]" in str(caught.value.found)
    assert "gate" in str(caught.value)


def test_missing_tensors_are_named(model_folder: Folder) -> None:
    files = locate(str(model_folder(num_hidden_layers=2)))
    with open_checkpoint(files) as checkpoint, pytest.raises(CheckpointError, match="lacks 9 of") as caught:
        match(spec_of(files), checkpoint)
    assert "model.layers.1.input_layernorm.weight" in str(caught.value)


def test_extra_tensors_are_listed(model_folder: Folder) -> None:
    files = locate(str(model_folder()))
    spec = spec_of(files)
    with open_checkpoint(files) as checkpoint:
        tensor = next(iter(checkpoint.tensors.values()))
        checkpoint.tensors = {**checkpoint.tensors, "rotary.inv_freq": tensor}
        assert extra_tensors(spec, checkpoint) == ("rotary.inv_freq",)


def test_a_layout_the_engine_cannot_read_is_refused(model_folder: Folder) -> None:
    folder = model_folder()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"F32"', b'"I32"', 1))
    files = locate(str(folder))
    with open_checkpoint(files) as checkpoint, pytest.raises(CheckpointError, match="I32"):
        match(spec_of(files), checkpoint)


def test_a_file_cut_after_its_header_was_read(model_folder: Folder) -> None:
    files = locate(str(model_folder()))
    with open_checkpoint(files) as checkpoint:
        path = files.weights[0]
        path.write_bytes(path.read_bytes()[:-8])
        with pytest.raises(CheckpointError, match="truncated"):
            checkpoint.read("model.norm.weight")
        with pytest.raises(CheckpointError, match="no tensor"):
            checkpoint.read("nothing")


def test_a_name_of_the_catalogue_is_not_fetched_where_it_cannot_run() -> None:
    """To fetch it would not help."""
    with pytest.raises(UnknownArchitectureError) as caught:
        locate("deepseek-v3")
    assert "cannot run it yet" in caught.value.message


def test_values_in_place_of_those_of_a_config(model_folder: Folder) -> None:
    files = locate(str(model_folder()))
    assert overridden(files, {}) is files
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    plain, longer = spec_of(files), overridden(files, {"rope_scaling": yarn, "rope_theta": 5e5})
    assert longer.config is not None
    assert longer.config["rope_theta"] == 5e5
    assert spec_of(longer) != plain
    newer = replace(
        files, config={**(files.config or {}), "rope_parameters": {"rope_theta": 3.0, "rope_type": "default"}}
    )
    for changes, expected in (
        ({"rope_theta": 7.0}, {"rope_parameters": {"rope_theta": 7.0, "rope_type": "default"}}),
        ({"rope_scaling": yarn}, {"rope_scaling": yarn}),
        ({"text_config": {"a": 1}}, {"text_config": {"a": 1}}),
    ):
        config = overridden(newer, changes).config or {}
        assert config.items() >= expected.items()
        assert ("rope_parameters" in config) != ("rope_scaling" in changes)
    nested = replace(files, config={"text_config": {"a": 1, "b": 2}})
    assert overridden(nested, {"text_config": {"a": 3}}).config == {"text_config": {"a": 3, "b": 2}}
    with pytest.raises(ConfigurationError, match=r"no config\.json"):
        overridden(replace(files, config=None), {"rope_theta": 7.0})


def test_a_copy_of_a_built_in_model_is_hashed_for_its_sampling_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "model.gguf"
    write_tiny_gguf(copy)
    first = builtin.BUILTINS[0]
    parts = (replace(first.parts[0], size=copy.stat().st_size),)
    same = replace(first, parts=parts, sha256=cache.sha256_of(copy))
    monkeypatch.setattr(builtin, "BUILTINS", (same,))
    assert locate_headers(str(copy)).generation_config == same.sampling
    monkeypatch.setattr(cache, "sha256_of", lambda *_, **__: pytest.fail("hashed by an engine, which samples as told"))
    assert find_model(EngineConfig(model=str(copy)), text=False).files.generation_config is None


@pytest.mark.parametrize("named", ["built in", "path", "one of a folder"])
def test_whoever_needs_no_text_reads_no_vocabulary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: str) -> None:
    copy, first = tmp_path / "model-Q4_0.gguf", builtin.BUILTINS[0]
    write_tiny_gguf(copy)
    monkeypatch.setattr(builtin, "ensure", lambda *_, **__: copy)
    name = {"built in": first.name, "path": str(copy), "one of a folder": f"{tmp_path}:Q4_0"}[named]
    asked: list[bool] = []

    def read(path: Path, *, part: bool, vocabulary: bool) -> gguf.GGUFHeader:
        asked.append(vocabulary)
        return read_header(path, part=part, vocabulary=vocabulary)

    read_header = gguf.read_header
    monkeypatch.setattr(gguf, "read_header", read)
    for text in (True, False):
        locate_headers(name, text=text)
    assert asked == [True, False]
