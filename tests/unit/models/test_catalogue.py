"""The model catalogue: enough of them, each whole, found under every name, and counting to its published size.

Parameter counts are the strongest check there is without the files: our families compute them from the config, the
makers publish them, and a single wrong digit in a shape makes them differ.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from whole_tables import check_rows

from holdfast.errors import ConfigurationError
from holdfast.models import catalogue, registry
from holdfast.planner.inputs.question import PlannedModel
from holdfast.planner.sizing.sharded_weights import total_bytes, weights_of

ENTRIES = catalogue.entries()
DESCRIBED = [entry for entry in ENTRIES if entry.config["architectures"][0] in registry.known_architectures()]

FAMILIES_ASKED_FOR = {
    "Llama 2": "llama-2-7b", "Llama 3": "llama-3-8b", "Llama 3.1": "llama-3.1-405b", "Llama 3.2": "llama-3.2-1b",
    "Llama 3.3": "llama-3.3-70b", "Llama 4": "llama-4-scout", "Mistral": "mistral-7b-v0.3", "Nemo": "mistral-nemo",
    "Mistral Small": "mistral-small-24b", "Mistral Large": "mistral-large", "Mixtral": "mixtral-8x22b",
    "Ministral": "ministral-8b", "Codestral": "codestral-22b", "Qwen2.5": "qwen2.5-72b", "QwQ": "qwq-32b",
    "Qwen Coder": "qwen2.5-coder-32b", "Qwen3": "qwen3-32b", "Qwen3 MoE": "qwen3-235b-a22b",
    "Qwen3 Coder": "qwen3-coder-480b", "Qwen3 Next": "qwen3-next-80b-a3b", "Gemma": "gemma-7b",
    "Gemma 2": "gemma-2-27b", "Gemma 3": "gemma-3-27b", "Phi 2": "phi-2", "Phi 3": "phi-3-medium-4k",
    "Phi 3.5": "phi-3.5-moe", "Phi 4": "phi-4-mini", "DeepSeek V2": "deepseek-v2-lite", "DeepSeek V3": "deepseek-v3",
    "DeepSeek R1": "deepseek-r1", "distilled R1": "deepseek-r1:70b", "gpt-oss": "gpt-oss-120b",
    "SmolLM": "smollm-135m", "SmolLM2": "smollm2-135m", "SmolLM3": "smollm3", "Command R": "command-r-plus",
    "Command A": "command-a", "Yi": "yi-34b", "GLM": "glm-4-9b", "GLM 4.5": "glm-4.5-air", "Falcon": "falcon-7b",
    "OLMo 2": "olmo-2-13b", "Granite": "granite-3.1-8b", "InternLM": "internlm2.5-7b", "StarCoder": "starcoder2-15b",
    "StableLM": "stablelm-2-12b", "EXAONE": "exaone-3.5-32b", "Nemotron": "llama-3.1-nemotron-70b", "Kimi": "kimi-k2",
    "MiniMax": "minimax-m2",
}  # fmt: skip


def test_there_are_enough_of_them() -> None:
    assert len(ENTRIES) >= 180
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)
    assert len({entry.hub_id for entry in ENTRIES}) == len(ENTRIES)
    assert sum(not entry.quantized for entry in ENTRIES) >= 140
    assert sum(entry.parameters is not None for entry in ENTRIES) >= 140
    assert sum(entry.checked is not None for entry in ENTRIES) >= 175


@pytest.mark.parametrize("name", FAMILIES_ASKED_FOR.values(), ids=FAMILIES_ASKED_FOR.keys())
def test_a_widely_served_family_is_there(name: str) -> None:
    assert catalogue.find(name).config["model_type"]


@pytest.mark.parametrize("method", ["awq", "gptq", "fp8", "compressed-tensors", "mxfp4"])
def test_every_kind_of_quantization_is_there(method: str) -> None:
    methods = [entry.config["quantization_config"]["quant_method"] for entry in ENTRIES if entry.quantized]
    assert method in methods


def test_an_entry_is_whole() -> None:
    def check(entry: catalogue.CatalogueEntry) -> None:
        assert entry.source == f"https://huggingface.co/{entry.hub_id}/blob/main/config.json"
        assert entry.checked is None or entry.checked.startswith("https://")
        (architecture,) = entry.config["architectures"]
        assert architecture[0].isupper()
        assert _first(entry.config, "num_hidden_layers", "n_layer", "n_layers", "num_layers") >= 8
        assert _first(entry.config, "hidden_size", "n_embd", "n_embed", "d_model") >= 512
        assert _first(entry.config, "torch_dtype", "dtype", default="float32") in ("bfloat16", "float16", "float32")
        for field in ("layer_types", "no_rope_layers"):
            values = _text(entry.config).get(field)
            assert values is None or len(values) == _first(entry.config, "num_hidden_layers")

    check_rows(ENTRIES, check, lambda entry: entry.name)


@pytest.mark.parametrize(
    ("name", "tokens"),
    [("command-r-plus", 131072), ("command-r", 131072), ("command-a", 262144), ("command-r7b", 132096)],
)
def test_contexts_as_servers_take_them(name: str, tokens: int) -> None:
    """The first two give a shorter one too, which was that of their first training."""
    assert registry.describe_config(catalogue.find(name).config).max_position == tokens


def test_an_entry_claims_no_more_than_was_compared() -> None:
    for entry in ENTRIES:
        compared = entry.checked is not None
        assert ("not checked against a public copy yet; see https://" in entry.provenance) is not compared
        assert (entry.checked or entry.source) in entry.provenance
        assert (entry.context_checked or "") in entry.provenance


def _text(config: Any) -> dict[str, Any]:
    return {**config, **config.get("text_config", {})}


def _first(config: Any, *names: str, default: Any = None) -> Any:
    """The field under whichever of its names a family uses."""
    return next((_text(config)[name] for name in names if name in _text(config)), default)


def test_every_name_of_an_entry_finds_it() -> None:
    def check(entry: catalogue.CatalogueEntry) -> None:
        for name in (entry.name, entry.hub_id, *entry.aliases):
            assert catalogue.find(name) is entry
            assert catalogue.lookup(name.upper().replace("-", "_")) is entry

    check_rows(ENTRIES, check, lambda entry: entry.name)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("llama3.1:8b", "llama-3.1-8b"),
        ("meta-llama/Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("meta-llama/Meta-Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("llama3:70b", "llama-3-70b"),
        ("qwen2.5:7b", "qwen2.5-7b"),
        ("Qwen3 30B A3B", "qwen3-30b-a3b"),
        ("gemma3:27b", "gemma-3-27b"),
        ("gpt-oss:20b", "gpt-oss-20b"),
        ("phi4:latest", "phi-4"),
        ("neuralmagic/Meta-Llama-3.1-8B-Instruct-FP8", "llama-3.1-8b-fp8"),
    ],
)
def test_what_people_write(written: str, name: str) -> None:
    assert catalogue.find(written).name == name


def test_the_families_count_what_was_published() -> None:
    def check(entry: catalogue.CatalogueEntry) -> None:
        spec = registry.describe_config(entry.config)
        if entry.parameters is not None:
            assert spec.parameters == entry.parameters

    check_rows(DESCRIBED, check, lambda entry: entry.name)


def test_the_families_describe_almost_all() -> None:
    assert len(DESCRIBED) >= 180


def test_a_quantized_variant_has_the_shape_of_what_it_is_like() -> None:
    base, variant = catalogue.find("llama-3.1-70b"), catalogue.find("llama-3.1-70b-awq")
    assert variant.config["quantization_config"]["bits"] == 4
    assert "quantization_config" not in base.config
    changed = {field for field in variant.config if variant.config[field] != base.config.get(field)}
    assert changed == {"torch_dtype", "quantization_config"}


def test_a_config_cannot_be_written_to() -> None:
    with pytest.raises(TypeError):
        catalogue.find("llama-3-8b").config["hidden_size"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("name", "nearest"), [("llama-3.4-8b", "llama-3.1-8b"), ("qwen3-31b", "qwen3-32b"), ("gptoss-21b", "gpt-oss-20b")]
)
def test_an_unknown_name_is_refused_with_the_nearest(name: str, nearest: str) -> None:
    assert catalogue.lookup(name) is None
    with pytest.raises(ConfigurationError) as refused:
        catalogue.find(name)
    assert refused.value.code == catalogue.UNKNOWN_MODEL
    assert nearest in str(refused.value.needed)


@pytest.mark.parametrize("name", ["", "/", "somebody/Llama-3.1-8B-Instruct", "\0", "x" * 100_000, "../llama"])
def test_what_is_not_a_name_is_refused_shortly(name: str) -> None:
    with pytest.raises(ConfigurationError) as refused:
        catalogue.find(name)
    assert len(str(refused.value)) < 700


def test_the_files_hold_no_field_that_is_not_read() -> None:
    fields = {"name", "hub_id", "aliases", "parameters", "like", "checked", "context_checked", "config"}
    for path in Path(catalogue.__file__).parent.glob("*.json"):
        for row in json.loads(path.read_bytes()):
            assert set(row) <= fields, (path.name, row["name"])


def test_nothing_is_read_before_it_is_asked_for() -> None:
    code = "import sys, holdfast.models.catalogue as c; sys.exit(c._catalogue.cache_info().currsize)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_families_are_imported_when_a_model_of_theirs_is_read() -> None:
    code = (
        "import sys, holdfast.models as m; m.known_architectures(); print([n for n in sys.modules if 'families.' in n])"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("family", registry.FAMILIES)
def test_every_family_has_its_module(family: str) -> None:
    module = importlib.import_module(f"holdfast.models.families.{family}")
    assert family == module.FAMILY
    assert callable(module.describe)


def test_every_architecture_is_of_one_family() -> None:
    for names in zip(*registry.FAMILIES.values(), strict=True):
        flat = [name for family in names for name in family]
        assert len(flat) == len(set(flat))
    assert len(registry.known_architectures()) >= 60


@pytest.mark.parametrize(
    ("name", "gigabytes"),
    [
        # Sums of the eleven files that the maker lists, each rounded to 10 MB. With 29,568 columns they would be
        # 130 MB less.
        ("qwen2.5-72b-awq", 3.94 + 3 * 3.91 + 5 * 3.99 + 3.46 + 2.49),
        ("qwen2.5-72b-gptq-int4", 3.94 + 3 * 3.92 + 5 * 4.00 + 3.46 + 2.49),
    ],
)
def test_quantized_models_are_as_large_as_their_files(name: str, gigabytes: float) -> None:
    """Their MLPs are padded by 128, so that groups split over 8 GPUs."""
    entry = catalogue.find(name)
    assert entry.config["intermediate_size"] == 29_696
    model = PlannedModel(name=name, spec=registry.describe_config(entry.config), origin="catalogue")
    assert total_bytes(weights_of(model, dtype="float16")) / 1e9 == pytest.approx(gigabytes, abs=11 * 0.005)
