"""What is taken for an adapter of a model and what is refused, by name: other models, other methods, other places."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy
import pytest
from deadlines import PATIENCE_S
from safetensors.numpy import save_file

from holdfast.checkpoints.lora.adapter import stamp
from holdfast.checkpoints.lora.same_files import digest, find_same
from holdfast.cli.commands import serve
from holdfast.config import EngineConfig, ServerConfig
from holdfast.engine.requests import adapters as books
from holdfast.engine.requests.adapters import Adapters, load_modules, read_module, trained_on_another
from holdfast.engine.startup.build import FoundModel
from holdfast.errors import AdapterError, ConfigurationError, UnsupportedOptionError
from holdfast.models import ModelSpec, from_config
from holdfast.records import LoRARequest

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 300, "hidden_size": 64,
    "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "hidden_act": "silu",
}  # fmt: skip
Q = "base_model.model.model.layers.0.self_attn.q_proj"
PLAIN: dict[str, Any] = {
    "peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "bias": "none",
    "base_model_name_or_path": "maker/llama-tiny",
}  # fmt: skip
Save = Callable[..., Path]


def factors(module: str = Q, rows: int = 64, columns: int = 64, rank: int = 4) -> dict[str, Any]:
    return {
        f"{module}.lora_A.weight": numpy.ones((rank, columns), numpy.float32),
        f"{module}.lora_B.weight": numpy.ones((rows, rank), numpy.float32),
    }


@pytest.fixture(scope="module")
def spec() -> ModelSpec:
    return from_config(CONFIG)


@pytest.fixture
def save(tmp_path: Path) -> Save:
    def write(name: str = "allowed/good", tensors: Mapping[str, Any] | None = None, **config: Any) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True)
        save_file(dict(factors() if tensors is None else tensors), folder / "adapter_model.safetensors")
        (folder / "adapter_config.json").write_text(json.dumps(PLAIN | config))
        return folder

    return write


@pytest.fixture
def adapters(spec: ModelSpec, tmp_path: Path) -> Adapters:
    (tmp_path / "allowed").mkdir(exist_ok=True)
    config = EngineConfig(enable_lora=True, max_lora_rank=8)
    return Adapters(spec, "llama-tiny", config, [tmp_path / "allowed"])


def refused(adapters: Adapters, path: str | Path, *, code: str) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        adapters.load("mine", str(path))
    assert caught.value.code == code, str(caught.value)
    assert adapters.named("mine") is None
    return caught.value


def test_one_is_known_by_name_until_it_is_unloaded(adapters: Adapters, save: Save) -> None:
    folder = save()
    ref = adapters.load("mine", str(folder))
    assert adapters.named("mine") == ref
    with pytest.raises(AdapterError, match="already been loaded"):
        adapters.load("mine", str(folder))
    again = adapters.load("mine", str(folder), in_place=True)
    assert again.number > ref.number  # Nothing loaded of the first is taken for the second's.
    assert adapters.unload("mine") == again
    assert adapters.named("mine") is None
    with pytest.raises(AdapterError, match="is not loaded"):
        adapters.unload("mine")


def test_nobody_can_ask_for_one_that_was_looked_at_and_not_added(adapters: Adapters, save: Save) -> None:
    first = adapters.load("mine", str(save()))
    looked = [adapters.examine("mine", str(save(f"allowed/{place}")), in_place=True) for place in range(2)]
    assert adapters.named("mine") == first
    assert adapters.add(looked[1]) == looked[1].ref == adapters.named("mine")
    assert len({first.number, *(one.ref.number for one in looked)}) == 3


def test_a_number_stands_for_one_adapter_where_two_threads_look_at_once(
    adapters: Adapters, save: Save, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found that nobody has the number before either is done."""
    folders, both = [save(name) for name in ("allowed/one", "allowed/two")], threading.Barrier(2, timeout=PATIENCE_S)
    monkeypatch.setattr(books, "find_folder", lambda path, allowed: both.wait() < 2 and Path(path))
    asked = [LoRARequest(folder.name, 7, str(folder)) for folder in folders]
    with ThreadPoolExecutor(2) as pool:
        looks = [pool.submit(adapters.resolve, one) for one in asked]
    first, other = sorted(looks, key=lambda one: one.exception() is not None)
    with pytest.raises(AdapterError, match="are of different LoRA adapters"):
        other.result()
    assert [one.ref for one in adapters.listed] == [first.result()]


def test_prefixes_belong_to_the_files_whatever_was_loaded_before_them(
    adapters: Adapters, spec: ModelSpec, save: Save
) -> None:
    """A restarted server finds them on disk, though its adapters come in another order."""
    folder = save()
    ref = adapters.load("mine", str(folder))
    restarted = Adapters(spec, "llama-tiny", EngineConfig(enable_lora=True, max_lora_rank=8), None)
    other = restarted.load("another", str(save("allowed/other")))
    same = restarted.load("mine", str(folder))
    assert same.number != ref.number
    assert same.salt == ref.salt != other.salt
    weights = folder / "adapter_model.safetensors"
    os.utime(weights, ns=(1, 1))
    assert restarted.load("mine", str(folder), in_place=True).salt != ref.salt


@pytest.fixture
def of_nodes(spec: ModelSpec, tmp_path: Path) -> Adapters:
    """Of the head of two nodes."""
    sizes = {"nnodes": 2, "pipeline_parallel_size": 2, "device": "cpu"}
    return Adapters(spec, "llama-tiny", EngineConfig(enable_lora=True, max_lora_rank=8, **sizes), None)


def test_other_nodes_know_one_by_its_bytes(adapters: Adapters, of_nodes: Adapters, save: Save) -> None:
    """By each of them, wherever they lie and whenever they were written. One machine alone reads none of them."""
    folder = save()
    alone, ref = adapters.load("mine", str(folder)), of_nodes.load("mine", str(folder))
    assert (alone.digest, alone.shared_path) == ("", "")
    assert (ref.stamp, ref.salt) == (alone.stamp, alone.salt)
    copy = Path(shutil.copytree(folder, folder.parent / "copy"))
    os.utime(copy / "adapter_model.safetensors", ns=(1, 1))
    assert find_same(str(copy), ref.digest, "mine") == (copy, stamp(copy))
    digests = [ref.digest]
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        raw = (copy / file).read_bytes()
        (copy / file).write_bytes(raw[:-1] + bytes([raw[-1] ^ 1]))
        with pytest.raises(AdapterError, match=rf"{file} of mine is another one than on the head") as refused:
            find_same(str(copy), ref.digest, "mine")
        assert refused.value.found == f"as many bytes ({len(raw):,}), and not the same"
        (copy / file).write_bytes(raw + b" ")
        with pytest.raises(AdapterError, match="another one than") as refused:
            find_same(str(copy), ref.digest, "mine")
        assert refused.value.found == f"{len(raw) + 1:,} bytes, and {len(raw):,} on the head"
        assert (refused.value.code, str(copy) in str(refused.value)) == ("HF379", False)
        digests.append(digest(copy, "mine", stamp(copy)))
        (copy / file).write_bytes(raw)
    assert len({*digests}) == 3


def test_what_another_node_cannot_read_is_said(of_nodes: Adapters, save: Save, tmp_path: Path) -> None:
    ref = of_nodes.load("mine", str(save()))

    def said(path: Path) -> tuple[str, str | None]:
        with pytest.raises(AdapterError) as refused:
            find_same(str(path), ref.digest, "mine")
        assert refused.value.code == "HF379"
        assert str(tmp_path) not in str(refused.value)
        assert "copy the adapter's folder from the head" in str(refused.value.fix)
        return refused.value.message, refused.value.found

    none = "No such file or directory"
    assert said(tmp_path / "nothing") == ("the folder of mine that the head named cannot be opened", none)
    half = save("half")
    (half / "adapter_model.safetensors").unlink()
    assert said(half) == ("adapter_model.safetensors of mine cannot be read", none)
    os.mkfifo(half / "adapter_model.safetensors")
    assert said(half) == ("adapter_model.safetensors of mine cannot be read", "not a file")  # It is not waited for.


def test_files_that_change_while_all_of_them_are_read_are_not_known(save: Save) -> None:
    folder = save()
    before = stamp(folder)
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterError, match="have changed") as refused:
        digest(folder, "mine", before)
    assert refused.value.code == "HF376"


def test_other_nodes_look_by_the_path_that_was_given(of_nodes: Adapters, save: Save, tmp_path: Path) -> None:
    """A link may lead elsewhere there, but a way up through one would be another than here."""
    folder = save()
    (tmp_path / "link").symlink_to(folder.parent)
    for given, told in (
        (folder, folder),
        (tmp_path / "link" / "good", tmp_path / "link" / "good"),
        (tmp_path / "link" / ".." / "allowed" / "good", folder),
        (Path(os.path.relpath(folder)), folder),
    ):
        ref = of_nodes.load("mine", str(given), in_place=True)
        assert (ref.shared_path, ref.path) == (str(told), str(folder))
    for turn in range(2):  # Of Python's too, also where files have changed since.
        os.utime(folder / "adapter_model.safetensors", ns=(1, 1 + turn))
        ref = of_nodes.resolve(LoRARequest("python", 99, str(tmp_path / "link" / "good"), load_inplace=True))
        assert (ref.shared_path, ref.stamp) == (str(tmp_path / "link" / "good"), stamp(folder))


def test_only_folders_allowed_at_start(adapters: Adapters, save: Save, tmp_path: Path) -> None:
    good, outside = save(), save("outside/secret")
    adapters.load("good", str(good / ".." / "good"))  # It leads nowhere else.
    (tmp_path / "allowed" / "link").symlink_to(outside)
    (tmp_path / "allowed-too").mkdir()
    shutil.copytree(outside, tmp_path / "allowed-too" / "good")
    loop = tmp_path / "allowed" / "loop"
    loop.symlink_to(loop)
    for path in (
        outside,
        good / ".." / ".." / "outside" / "secret",
        tmp_path / "allowed" / "link",
        tmp_path / "allowed-too" / "good",
        "/etc",
        "/no/such/folder",
        "outside/secret",
        "",
        "\0",
        "a" * 100_000,
        loop,
        "/proc/self/cwd",
        "~root",
    ):
        error = refused(adapters, path, code="HF371")
        assert str(tmp_path) not in str(error)  # Nor whether there is something.


def test_a_file_that_leads_outside_is_not_followed(adapters: Adapters, save: Save, tmp_path: Path) -> None:
    outside = save("outside/secret")
    for file in ("adapter_config.json", "adapter_model.safetensors"):
        folder = save(f"allowed/{file}")
        (folder / file).unlink()
        (folder / file).symlink_to(outside / file)
        refused(adapters, folder, code="HF371")
        (folder / file).unlink()
        (folder / file).symlink_to(tmp_path / "allowed" / "good" / file)  # As the hub's cache keeps them.
    os.mkfifo(save("allowed/pipe") / "x")
    shutil.rmtree(tmp_path / "allowed" / "pipe")
    folder = save("allowed/pipe")
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")
    refused(adapters, folder, code="HF373")  # It is not waited for.


@pytest.mark.parametrize(
    ("tensors", "said"),
    [
        (factors("base_model.model.transformer.h.0.attn.c_attn"), "transformer.h.0.attn.c_attn"),
        (factors("base_model.model.model.layers.2.self_attn.q_proj"), "layers.2"),
        (factors(columns=128), "A [4, 128]"),
        (factors(rows=32), "B [32, 4]"),
        ({**factors(), "base_model.model.lm_head.weight": numpy.ones((320, 64), numpy.float32)}, "320"),
        ({**factors(), "base_model.model.model.embed_tokens.weight": numpy.ones((304, 64), numpy.float32)}, "304"),
    ],
)
def test_one_for_another_model_names_both(adapters: Adapters, save: Save, tensors: Any, said: str) -> None:
    error = refused(adapters, save(tensors=tensors), code="HF372")
    assert "maker/llama-tiny" in error.message
    assert "llama-tiny" in (error.needed or "")
    assert said in error.message


def test_a_larger_vocabulary_beside_it(adapters: Adapters, save: Save) -> None:
    folder = save()
    (folder / "added_tokens.json").write_text('{"<new>": 300}')
    assert "300" in refused(adapters, folder, code="HF372").message


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"use_dora": True}, "DoRA"),
        ({"bias": "lora_only"}, "bias"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"peft_type": "IA3"}, "peft_type"),
        ({"peft_type": None}, "peft_type"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights"),
        ({"target_parameters": ["mlp.experts.gate_up_proj"]}, "target_parameters"),
        ({"layer_replication": [[0, 1]]}, "layer_replication"),
        ({"lora_bias": True}, "lora_bias"),
        ({"made_up_next_year": {"scale": 2}}, "made_up_next_year"),
        ({"r": 0}, "r of"),
        ({"lora_alpha": "NaN"}, "lora_alpha"),
        ({"lora_alpha": float("nan")}, "lora_alpha"),
        ({"use_rslora": 1}, "use_rslora"),
        ({"target_modules": ["k_proj"]}, "target_modules"),
        ({"alpha_pattern": {"(a+)+$": 3}}, "alpha_pattern"),
    ],
)
def test_what_is_not_there_is_refused_by_name(adapters: Adapters, save: Save, config: Any, said: str) -> None:
    assert said in refused(adapters, save(**config), code="HF373").message


def test_patterns_are_never_run(adapters: Adapters, save: Save) -> None:
    """A pattern of a stranger can take for ever."""
    adapters.load("mine", str(save(target_modules=r"(((a+)+)+)+$")))


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {f"{Q}.lora_A.weight": numpy.ones((4, 64), numpy.float32)},
        {**factors(), f"{Q}.lora_magnitude_vector": numpy.ones(64, numpy.float32)},
        {**factors(), "base_model.model.lm_head.lora_A.weight": numpy.ones((4, 64), numpy.float32)},
        {**factors(), "base_model.model.model.embed_tokens.lora_embedding_A": numpy.ones((4, 300), numpy.float32)},
        {f"{Q}.lora_A.weight": numpy.ones((4, 64), numpy.int64), f"{Q}.lora_B.weight": numpy.ones((64, 4))},
    ],
)
def test_tensors_that_cannot_be_used(adapters: Adapters, save: Save, tensors: Any) -> None:
    refused(adapters, save(tensors=tensors), code="HF373")


def test_what_is_no_file_is_not_told_by_its_path(adapters: Adapters, save: Save, tmp_path: Path) -> None:
    folder = save()
    (folder / "adapter_model.safetensors").unlink()
    os.mkfifo(folder / "adapter_model.safetensors")
    assert str(tmp_path) not in str(refused(adapters, folder, code="HF373"))


def test_files_rewritten_with_their_old_time_are_others(adapters: Adapters, save: Save) -> None:
    folder = save()
    weights = folder / "adapter_model.safetensors"
    before, state = stamp(folder), weights.stat()
    weights.write_bytes(weights.read_bytes()[::-1])
    os.utime(weights, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert stamp(folder) != before


def test_torn_and_pickled_files(adapters: Adapters, save: Save) -> None:
    folder = save()
    whole = (folder / "adapter_model.safetensors").read_bytes()
    for cut in (b"", whole[:7], whole[:40], whole[:-1], b"\xff" * 64):
        (folder / "adapter_model.safetensors").write_bytes(cut)
        refused(adapters, folder, code="HF373")
    (folder / "adapter_model.safetensors").unlink()
    refused(adapters, folder, code="HF373")
    (folder / "adapter_model.bin").write_bytes(b"\x80\x04.")
    assert "pickle" in refused(adapters, folder, code="HF374").message
    for text in ("", "[]", "{", '{"peft_type": "LORA", "r": 1e400}'):
        (folder / "adapter_config.json").write_text(text)
        refused(adapters, folder, code="HF373")


def test_rank_and_number_are_bounded(adapters: Adapters, save: Save, monkeypatch: pytest.MonkeyPatch) -> None:
    wide = refused(adapters, save("allowed/wide", factors(rank=9)), code="HF375")
    assert wide.fix == "--max-lora-rank 9"
    monkeypatch.setattr("holdfast.engine.requests.adapters.MOST_ADAPTERS", 2)
    folder = save()
    for name in ("one", "two"):
        adapters.load(name, str(folder))
    refused(adapters, folder, code="HF370")
    for name in ("", "x" * 300, "a\nb"):
        with pytest.raises(AdapterError, match="name"):
            adapters.load(name, str(folder))


def test_base_and_instruct_are_told_apart() -> None:
    for base, model, warned in (
        ("HuggingFaceTB/SmolLM2-135M", "smollm2-135m-instruct-q4_1.gguf", True),
        ("meta-llama/Llama-3.1-8B-Instruct", "./models/Llama-3.1-8B", True),
        ("google/gemma-3-4b-pt", "gemma-3-4b-it", True),
        ("HuggingFaceTB/SmolLM2-135M-Instruct", "SmolLM2-135M-Instruct", False),
        ("HuggingFaceTB/SmolLM2-360M", "SmolLM2-135M-Instruct", False),
        ("", "SmolLM2-135M-Instruct", False),
    ):
        assert (trained_on_another(base, model) is not None) == warned, (base, model)


def test_a_warning_is_said_and_it_is_loaded(
    adapters: Adapters, save: Save, caplog: pytest.LogCaptureFixture, spec: ModelSpec
) -> None:
    folder = save(base_model_name_or_path="maker/llama-tiny-instruct")
    with caplog.at_level(logging.WARNING):
        adapters.load("mine", str(folder))
    assert "HFW09" in caplog.text
    assert "maker/llama-tiny-instruct" in caplog.text


def test_modules_named_at_start(adapters: Adapters, save: Save, tmp_path: Path) -> None:
    folder = save("elsewhere/sql")
    written = json.dumps({"name": "law", "path": str(folder), "base_model_name": "tiny"})
    load_modules(adapters, [f"sql={folder}", written], ["tiny"])
    assert [(one.ref.name, one.parent) for one in adapters.listed] == [("sql", None), ("law", "tiny")]
    adapters.unload("sql")
    adapters.load("sql", str(folder))  # Its folder was named at start.
    for wrong in ("sql", "=x", "sql=", "{", "{}", '{"name": 1, "path": "x"}', '{"name": "a", "path": "b", "c": "d"}'):
        with pytest.raises(ConfigurationError, match="is not valid"):
            read_module(wrong)
    for wrong in (
        f"tiny={folder}",
        json.dumps({"name": "a", "path": str(folder), "base_model_name": "other"}),
        f"a={tmp_path}/nothing",
    ):
        with pytest.raises(ConfigurationError, match="--lora-modules"):
            load_modules(adapters, [wrong], ["tiny"])


def test_not_enabled(spec: ModelSpec, save: Save) -> None:
    plain = Adapters(spec, "llama-tiny", EngineConfig())
    with pytest.raises(UnsupportedOptionError, match="not enabled"):
        plain.resolve(LoRARequest("mine", 1, str(save())))
    for wrong in (("", 1, "x"), ("a", 0, "x"), ("a", True, "x"), ("a", 1, "")):
        with pytest.raises(ValueError, match="lora_"):
            LoRARequest(*wrong)


@pytest.mark.parametrize("given", [{"lora_modules": ("sql=x",)}, {"lora_folders": ("x",)}])
def test_flags_of_adapters_need_them_enabled(spec: ModelSpec, given: Any) -> None:
    with pytest.raises(ConfigurationError, match="not enabled") as caught:
        serve._adapters(EngineConfig(), ServerConfig(**given), Any)  # type: ignore[arg-type]
    assert caught.value.fix == "--enable-lora"


def test_any_folder_where_none_was_named_and_nobody_else_can_ask(spec: ModelSpec, save: Save) -> None:
    config, model = EngineConfig(enable_lora=True), FoundModel(cast("Any", SimpleNamespace(name="tiny")), spec)
    folder = save("anywhere")
    keyed = {"uds": "/tmp/s", "root_path": "/llm", "api_key": ("k",)}
    for trusted in ({}, {"host": "localhost"}, {"host": "0.0.0.0", "api_key": ("k",)}, keyed):
        found = serve._adapters(config, ServerConfig(**trusted), model)
        assert found is not None
        refused(found, "/no/such/folder", code="HF371")  # A 404.
        found.load("mine", str(folder))
    proxied = ({"uds": "/tmp/s"}, {"root_path": "/llm"})  # Anybody may ask through the proxy.
    for given in ({"host": "0.0.0.0"}, {"lora_folders": (str(folder.parent / "other"),)}, *proxied):
        (folder.parent / "other").mkdir(exist_ok=True)
        found = serve._adapters(config, ServerConfig(**given), model)
        assert found is not None
        refused(found, folder, code="HF371")


def test_a_snapshot_in_the_hubs_cache_is_links_to_its_files(spec: ModelSpec, save: Save, tmp_path: Path) -> None:
    blobs = save("hub/models--maker--law/blobs")
    snapshot = tmp_path / "hub" / "models--maker--law" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("../../blobs") / file.name)
    adapters = Adapters(spec, "tiny", EngineConfig(enable_lora=True), [snapshot])
    adapters.load("law", str(snapshot))
    (snapshot / "adapter_config.json").unlink()
    (snapshot / "adapter_config.json").symlink_to(save("hub/models--other/blobs") / "adapter_config.json")
    refused(adapters, snapshot, code="HF371")
