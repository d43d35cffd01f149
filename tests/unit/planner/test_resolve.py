"""From the name of a model to shapes and bytes: paths, the hub, the catalogue, and models as if they were quantized."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
from safetensors.numpy import load_file, save_file

from holdfast.checkpoints.sources import builtin
from holdfast.checkpoints.validation.match import UNANNOUNCED
from holdfast.errors import CheckpointError, ConfigurationError, HoldfastError, ModelNotFoundError
from holdfast.models import catalogue, describe_config
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.models.model_sources import holdfast_source
from holdfast.planner.models.quantize import METHODS, quantized_as
from holdfast.planner.models.resolve import Resolved, resolve_model
from holdfast.planner.sizing.sharded_weights import total_bytes, weights_of

# The hub and the small models of the checkpoints' own tests.
_place = importlib.util.spec_from_file_location(
    "checkpoint_fixtures", Path(__file__).parent.parent / "checkpoints" / "conftest.py"
)
assert _place is not None
assert _place.loader is not None
fixtures = importlib.util.module_from_spec(_place)
_place.loader.exec_module(fixtures)
model_folder = fixtures.model_folder
serve_hub = fixtures.serve_hub

ASK = """
import json, sys
from holdfast.errors import HoldfastError
from holdfast.planner.models.resolve import resolve_model
for word in sys.argv[1:]:
    name, _, revision = word.partition("@")
    try:
        found = resolve_model(name, revision=revision or None)
        said = {"origin": found.model.origin, "stored": found.model.stored and len(found.model.stored),
                "decisions": [decision.line() for decision in found.decisions]}
    except HoldfastError as error:
        said = {"code": error.code, "message": str(error)}
    print(json.dumps(said))
"""


def weights_bytes(model: PlannedModel) -> int:
    return total_bytes(weights_of(model, dtype="bfloat16"))


def shaped(name: str) -> PlannedModel:
    return PlannedModel(name=name, spec=describe_config(catalogue.find(name).config), origin="catalogue")


# Where it is


def test_a_folder_is_counted_from_its_headers(model_folder: Callable[..., Path]) -> None:
    found = resolve_model(str(model_folder(shards=3)))
    assert (found.model.origin, found.model.format, found.model.exact) == ("folder", "safetensors", True)
    assert found.model.stored is not None
    assert len(found.model.stored) == 11
    assert found.model.canonical is not None
    assert found.decisions[0].field == "model"
    assert "safetensors" in found.decisions[0].reason


def test_a_folder_without_weights_is_counted_from_its_config(model_folder: Callable[..., Path]) -> None:
    found = resolve_model(str(model_folder(shards=0)))
    assert not found.model.exact
    assert [decision.value for decision in found.decisions][1] == "derived"


def test_a_model_that_the_engine_cannot_run_is_planned_all_the_same(tmp_path: Path) -> None:
    config = dict(catalogue.find("deepseek-v3").config)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = resolve_model(str(tmp_path))
    assert not found.model.spec.runnable
    assert weights_bytes(found.model) > 600e9


def test_the_built_in_model_is_counted_without_a_download(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOLDFAST_CACHE", str(tmp_path))
    found = resolve_model()
    assert not list(tmp_path.iterdir())
    assert (found.model.name, found.model.exact) == ("smollm2", False)
    assert "not downloaded yet" in found.decisions[0].reason
    file_bytes = builtin.BUILTINS[0].size
    assert weights_bytes(found.model) == pytest.approx(file_bytes, rel=0.05)


def test_a_name_of_the_catalogue_needs_no_network() -> None:
    found = resolve_model("Llama3.1:8b")
    assert found.model.origin == "catalogue"
    assert weights_bytes(found.model) == 8_030_261_248 * 2
    assert found.model.published_parameters == 8_030_261_248


def test_shapes_that_nobody_compared_are_marked() -> None:
    assert not resolve_model("llama-3.1-8b").model.unchecked
    for entry in catalogue.entries()[::20]:
        assert resolve_model(entry.name).model.unchecked is (entry.checked is None)
    assert resolve_model("phi-4-fp8").model.unchecked


def test_a_path_comes_before_a_name(tmp_path: Path, model_folder: Callable[..., Path], monkeypatch: Any) -> None:
    folder = model_folder()
    monkeypatch.chdir(tmp_path)
    folder.rename(tmp_path / "llama-3.1-8b")
    assert resolve_model("llama-3.1-8b").model.origin == "folder"


@pytest.mark.parametrize(
    ("name", "kind", "code"),
    [
        ("lama-3.1-8b", ConfigurationError, "HF142"), ("./nothing", ModelNotFoundError, "HF210"),
        ("missing.gguf", ModelNotFoundError, "HF210"), ("", ModelNotFoundError, "HF210"),
        ("a" * 5000, ModelNotFoundError, "HF210"), ("b/" + "a" * 5000, ModelNotFoundError, "HF210"),
        ("~nobody-of-this-name/x", ModelNotFoundError, "HF210"), ("a\0b", HoldfastError, "HF142"),
    ],
)  # fmt: skip
def test_what_is_not_there(name: str, kind: type[HoldfastError], code: str) -> None:
    with pytest.raises(kind) as caught:
        resolve_model(name)
    assert caught.value.code == code
    assert len(str(caught.value)) < 1000


def test_a_revision_of_what_has_none() -> None:
    for name in ("smollm2", "llama-3.1-8b"):
        with pytest.raises(ConfigurationError) as caught:
            resolve_model(name, revision="main")
        assert caught.value.code == "HF130"


# What contradicts itself


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 64}, "config"), ({"num_hidden_layers": 2}, "lacks"), ({"num_hidden_layers": 0}, "layers"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"), ({"hidden_size": "big"}, "hidden_size"),
        ({"num_attention_heads": 10**12}, "num_attention_heads"), ({"architectures": ["NoSuchModel"]}, "NoSuchModel"),
        ({"quantization_config": {"quant_method": "wishful"}}, "quantization_config"),
    ],
)  # fmt: skip
def test_a_config_that_contradicts_is_refused_by_name(
    model_folder: Callable[..., Path], change: dict[str, Any], named: str
) -> None:
    with pytest.raises(HoldfastError) as caught:
        resolve_model(str(model_folder(**change)))
    assert named in str(caught.value)
    assert caught.value.code in ("HF230", "HF240")


W8A16 = {"weights": {"num_bits": 8, "type": "int", "strategy": "channel"}, "targets": ["Linear"]}


def test_a_missing_scale_is_refused_by_its_name(model_folder: Callable[..., Path]) -> None:
    config = {"quant_method": "compressed-tensors", "format": "int-quantized", "config_groups": {"group_0": W8A16}}
    folder = model_folder(quantization_config=config)
    stored: dict[str, Any] = {}
    for name, array in load_file(folder / "model.safetensors").items():
        stored[name] = array
        if name.endswith("_proj.weight"):
            stored[name] = array.astype(numpy.int8)
            stored[f"{name}_scale"] = numpy.ones((len(array), 1), numpy.float32)
    save_file(stored, folder / "model.safetensors")
    assert resolve_model(str(folder)).model.spec.runnable
    del stored["model.layers.0.mlp.up_proj.weight_scale"]
    save_file(stored, folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 11 tensors") as caught:
        resolve_model(str(folder))
    assert caught.value.needed == "model.layers.0.mlp.up_proj.weight_scale"


def test_packed_weights_without_a_config_say_what_serve_says(model_folder: Callable[..., Path]) -> None:
    folder = model_folder()
    stored = load_file(folder / "model.safetensors")
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        stored[name.replace(".weight", ".qweight")] = numpy.zeros((4, len(stored.pop(name))), numpy.int32)
    save_file(stored, folder / "model.safetensors")
    (said,) = holdfast_source(resolve_model(str(folder)).model).lacks
    assert UNANNOUNCED in said


def test_weights_of_another_family_are_refused(model_folder: Callable[..., Path]) -> None:
    folder = model_folder()
    config = dict(catalogue.find("qwen3-30b-a3b").config)
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as caught:
        resolve_model(str(folder))
    assert "config" in str(caught.value)


@pytest.mark.parametrize("length", [0, 7, 8, 40, 400])
def test_truncated_headers(model_folder: Callable[..., Path], length: int) -> None:
    folder = model_folder()
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(CheckpointError) as caught:
        resolve_model(str(folder))
    assert "model.safetensors" in str(caught.value)


# The hub


def asked(hub: str, home: Path, *words: str, **environment: str) -> list[dict[str, Any]]:
    """For each word, a name or name@revision, what became of it. The hub's client reads its settings once a process."""
    patience = {"HF_HUB_ETAG_TIMEOUT": "120"}  # Seconds: other work may have the machine.
    surroundings = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(home), **patience, **environment}
    done = subprocess.run(
        [sys.executable, "-c", ASK, *words], env=surroundings, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_a_hub_id_is_read_by_range_and_falls_to_the_catalogue(
    model_folder: Callable[..., Path], serve_hub: Callable[..., Any], tmp_path: Path
) -> None:
    folder = model_folder()
    files = {path.name: path.read_bytes() for path in folder.iterdir()}
    files["model.safetensors"] += bytes(0)
    known = "meta-llama/Llama-3.1-8B"
    with serve_hub({"owner/name": files}) as hub:
        found, missing = asked(hub.address, tmp_path, "owner/name", known)
        assert (found["origin"], found["stored"]) == ("hub", 11)
        assert "by range" in found["decisions"][0]
        assert hub.ranges
        assert missing["code"] == "HF210", "a hub that says there is no such model is believed"
        (offline,) = asked(hub.address, tmp_path, known, HF_HUB_OFFLINE="1")
        assert offline["origin"] == "catalogue"
        assert "the hub cannot be read" in offline["decisions"][0]
    with socket.socket() as nobody:  # Not listening, so that whoever calls is refused, and this port is nobody else's.
        nobody.bind(("127.0.0.1", 0))
        hub_port = nobody.getsockname()[1]
        unreachable, pinned, unknown = asked(
            f"http://127.0.0.1:{hub_port}", tmp_path, known, f"{known}@v2", "owner/name"
        )
    assert unreachable["origin"] == "catalogue"
    assert pinned["code"] == "HF222", "the catalogue does not know one revision from another"
    assert unknown["code"] == "HF222"


def test_a_hub_that_takes_the_connection_and_says_nothing_is_not_waited_for(tmp_path: Path) -> None:
    known = "meta-llama/Llama-3.1-8B"
    with socket.create_server(("127.0.0.1", 0)) as silent:
        hub = f"http://127.0.0.1:{silent.getsockname()[1]}"
        unknown, found = asked(hub, tmp_path, "owner/name", known, HF_HUB_ETAG_TIMEOUT="1")
        silent.setblocking(False)
        silent.accept()[0].close()
        with pytest.raises(BlockingIOError):  # Who did not answer once is not asked again at once.
            silent.accept()
    assert unknown["code"] == "HF222"
    assert "has not responded within 1 s" in unknown["message"]
    assert found["origin"] == "catalogue"


# As if quantized


@pytest.mark.parametrize(
    ("name", "method", "gigabytes"),
    [
        # File sizes that publishers of GGUF files list; headers of a few megabytes are in them.
        ("llama-3.1-8b", "Q2_K", 3.18), ("llama-3.1-8b", "Q3_K_M", 4.02), ("llama-3.1-8b", "Q3_K_L", 4.32),
        ("llama-3.1-8b", "Q4_K_S", 4.69), ("llama-3.1-8b", "Q4_K_M", 4.92), ("llama-3.1-8b", "Q5_K_M", 5.73),
        ("llama-3.1-8b", "Q6_K", 6.60), ("llama-3.1-8b", "Q8_0", 8.54), ("llama-3.1-8b", "q4_0", 4.66),
        ("llama-3.1-70b", "Q2_K", 26.38), ("llama-3.1-70b", "Q3_K_M", 34.27), ("llama-3.1-70b", "Q4_K_S", 40.35),
        ("llama-3.1-70b", "Q4_K_M", 42.52), ("llama-3.1-70b", "Q5_K_M", 49.95), ("llama-3.1-70b", "Q6_K", 57.89),
        ("mixtral-8x7b", "Q4_K_M", 28.45), ("mixtral-8x7b", "Q6_K", 38.38), ("mixtral-8x7b", "Q8_0", 49.62),
    ],
)  # fmt: skip
def test_sizes_as_published(name: str, method: str, gigabytes: float) -> None:
    assert weights_bytes(quantized_as(shaped(name), method)) / 1e9 == pytest.approx(gigabytes, rel=0.005)


def test_packed_matrices_by_hand() -> None:
    """Llama 3.1 8B: 6.979 billion weights in linear layers of the decoder, 1.051 billion in embedding and head."""
    spec = shaped("llama-3.1-8b").spec
    linear = sum(tensor.elements for tensor in spec.tensors if tensor.linear and tensor.layer is not None)
    kept = 2 * (spec.parameters - linear)
    assert linear == 32 * (2 * 4096 * 4096 + 2 * 1024 * 4096 + 3 * 14336 * 4096)
    four_bits = linear // 2 + linear // 128 * 2 + linear // 128 // 2
    assert weights_bytes(quantized_as(shaped("llama-3.1-8b"), "awq")) == four_bits + kept
    matrices = 7 * 32
    assert weights_bytes(quantized_as(shaped("llama-3.1-8b"), "fp8")) == linear + 4 * matrices + kept


@pytest.mark.parametrize("name", ["gemma-3-27b", "deepseek-v3", "gpt-oss-20b", "qwen3-30b-a3b", "phi-4"])
def test_every_family_can_be_counted_or_is_refused_by_code(name: str) -> None:
    plain = shaped(name)
    whole, refused = weights_bytes(plain), []
    for method in METHODS:
        try:
            changed = quantized_as(plain, method)
        except ConfigurationError as error:
            refused.append((error.code, error.field))
            continue
        assert not changed.exact
        if method not in ("F32", "F16", "BF16") and plain.spec.quantization is None:
            assert weights_bytes(changed) < 0.7 * whole
    assert set(refused) <= {("HF144", "quantization")}
    assert len(refused) < len(METHODS) or plain.spec.quantization is not None


def test_what_is_stored_so_stays_as_it_is() -> None:
    model = shaped("llama-3.1-8b-awq")
    assert quantized_as(model, "awq") is model
    assert quantized_as(model, "awq_marlin") is model
    with pytest.raises(ConfigurationError, match=r"already quantized \(awq\)") as caught:
        quantized_as(model, "fp8")
    assert caught.value.field == "quantization"


def test_a_gguf_says_all_that_it_holds() -> None:
    """Its name may be of one kind alone, and not of the one that most of it has."""
    mixed = quantized_as(shaped("gemma-3-270m"), "Q4_K_M")
    with pytest.raises(ConfigurationError) as caught:
        quantized_as(mixed, "awq")
    kinds = str(caught.value.found).split(", ")
    assert len(kinds) == len(set(kinds)) > 1
    assert {"Q4_K", "Q6_K"} <= set(kinds)
    assert f"already quantized ({caught.value.found})" in caught.value.message


def test_a_tag_as_ollama_writes_it_is_said_to_be_planned_unquantized() -> None:
    said = [one.reason for one in resolve_model("llama3.1:70b").decisions if one.value == "unquantized"]
    assert len(said) == 1
    assert "-q Q4_K_M plans that" in said[0]
    for name, quantization in (("llama3.1:70b", "Q4_K_M"), ("llama-3.1-70b", None), ("gpt-oss:20b", None)):
        found = resolve_model(name, quantization=quantization)
        assert not any("Ollama" in one.reason for one in found.decisions)


def test_a_quantization_comes_with_a_decision() -> None:
    found: Resolved = resolve_model("llama-3.1-8b", quantization="awq")
    assert found.decisions[-1].line().startswith("quantization = awq (set)")
    assert resolve_model("llama-3.1-8b-awq", quantization="awq").decisions[-1].source == "model"


@pytest.mark.parametrize("method", ["aqlm", "wishful", "Q9_K", "x" * 500])
def test_unknown_methods(method: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        resolve_model("llama-3.1-8b", quantization=method)
    assert (caught.value.code, caught.value.field) == ("HF144", "quantization")
