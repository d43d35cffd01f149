"""Flags of weights that do not stay on a GPU, as people know them from vLLM and llama.cpp: with their meaning, or
refused by name."""

from __future__ import annotations

import argparse

import pytest

from holdfast.cli.main import main
from holdfast.config import EngineConfig
from holdfast.config.parts.offload import OffloadRequest, offload_request
from holdfast.config.plan import PlanConfig
from holdfast.config.sources import add_flags
from holdfast.errors import ConfigurationError
from holdfast.units import GIB


@pytest.mark.parametrize("kind", [EngineConfig, PlanConfig])
@pytest.mark.parametrize(
    ("given", "asked"),
    [
        ({}, OffloadRequest()),
        ({"offload": False}, OffloadRequest(refused=True)),
        ({"gpu_layers": "auto"}, OffloadRequest()),
        ({"gpu_layers": "20"}, OffloadRequest(gpu_layers=20)),
        ({"gpu_layers": "all"}, OffloadRequest(gpu_layers=1 << 16)),
        ({"gpu_layers": "-1"}, OffloadRequest()),
        ({"gpu_layers": 99}, OffloadRequest(gpu_layers=99)),
        ({"cpu_offload_gb": 10.5}, OffloadRequest(cpu_bytes=int(10.5 * GIB))),
        ({"cpu_offload_gb": "0"}, OffloadRequest()),
        ({"cpu_offload_gb": 2, "offload_backend": "uva"}, OffloadRequest(cpu_bytes=2 * GIB)),
        ({"offload_group_size": 8, "offload_num_in_group": 2}, OffloadRequest(groups=(8, 2))),
        ({"offload_group_size": 2, "offload_backend": "prefetch"}, OffloadRequest(groups=(2, 1))),
        ({"offload_group_size": 4, "offload_prefetch_step": 3}, OffloadRequest(groups=(4, 1), ahead=3)),
        ({"n_cpu_moe": 24}, OffloadRequest(expert_layers=24)),
        ({"n_cpu_moe": 0}, OffloadRequest()),
        ({"cpu_moe": True, "gpu_layers": 99}, OffloadRequest(expert_layers=1 << 16, gpu_layers=99)),
        ({"override_tensor": "a=CPU, b=CUDA0"}, OffloadRequest(overrides=("a=CPU", "b=CUDA0"))),
        ({"cpu_compute": "off"}, OffloadRequest(cpu_compute=False)),
    ],
)
def test_what_was_asked_for(kind: type, given: dict[str, object], asked: OffloadRequest) -> None:
    found = offload_request(kind.from_arguments(**given))  # type: ignore[attr-defined]
    assert found == asked
    assert found.by_hand == (asked.gpu_layers is not None or asked.cpu_bytes > 0 or asked.groups is not None)


@pytest.mark.parametrize("kind", [EngineConfig, PlanConfig])
@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"gpu_layers": 10, "cpu_offload_gb": 4}, "cpu_offload_gb"),
        ({"cpu_offload_gb": 4, "offload_group_size": 2}, "offload_group_size"),
        ({"cpu_offload_gb": 4, "offload": False}, "cpu_offload_gb"),
        ({"offload_prefetch_step": 4, "offload": False}, "offload_prefetch_step"),
        ({"offload_group_size": 2, "offload_backend": "uva"}, "offload_group_size"),
        ({"cpu_offload_gb": 4, "offload_backend": "prefetch"}, "cpu_offload_gb"),
        ({"offload_backend": "prefetch"}, "offload_group_size"),
        ({"offload_group_size": 2, "offload_num_in_group": 3}, "offload_num_in_group"),
        ({"n_cpu_moe": 4, "cpu_moe": True}, "n_cpu_moe"),
        ({"n_cpu_moe": 4, "override_tensor": "exps=CPU"}, "override_tensor"),
        ({"cpu_moe": True, "cpu_offload_gb": 4}, "cpu_offload_gb"),
        ({"n_cpu_moe": 4, "offload": False}, "n_cpu_moe"),
    ],
)
def test_settings_that_contradict_each_other(kind: type, given: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        kind.from_arguments(**given)  # type: ignore[attr-defined]
    assert (caught.value.code, caught.value.field) == ("HF135", field)
    assert caught.value.fix


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda"])
def test_a_disk_for_layers_contradicts_no_offload(device: str) -> None:
    with pytest.raises(ConfigurationError, match="--nvme-path is for layers that are streamed") as caught:
        EngineConfig.from_arguments(device=device, offload=False, nvme_path="/var/tmp")
    assert (caught.value.code, caught.value.field) == ("HF135", "nvme_path")
    assert caught.value.fix == "leave --no-offload or --nvme-path out"
    with pytest.raises(ConfigurationError, match="HF135"):
        PlanConfig.from_arguments(offload=False, nvme="1TB")


@pytest.mark.parametrize(
    "given",
    [
        {"gpu_layers": 10},
        {"cpu_offload_gb": 4},
        {"offload_group_size": 2},
        {"offload_prefetch_step": 4},
        {"gpu_layers": 0, "offload_prefetch_step": 4},
        {"offload_backend": "uva"},
        {"n_cpu_moe": 4},
        {"cpu_moe": True},
        {"override_tensor": "exps=CPU"},
        {"cpu_compute": "off"},
    ],
)
def test_a_cpu_has_no_layers_on_a_gpu(given: dict[str, object]) -> None:
    with pytest.raises(ConfigurationError, match="runs on the CPU") as caught:
        EngineConfig.from_arguments(device="cpu", **given)
    assert caught.value.code == "HF120"
    assert EngineConfig.from_arguments(device="cpu", gpu_layers=0).gpu_layers == 0


@pytest.mark.parametrize("words", [("--gpu-layers", "12"), ("-ngl", "12"), ("--n-gpu-layers", "12"), ("-ngl=12",)])
def test_spellings_of_llama_cpp(words: tuple[str, ...]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig, title="engine")
    assert parser.parse_args(words).gpu_layers == "12"


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("-ncmoe", "10"), {"n_cpu_moe": "10"}),
        (("--n-cpu-moe", "10"), {"n_cpu_moe": "10"}),
        (("-cmoe",), {"cpu_moe": "true"}),
        (("--cpu-moe",), {"cpu_moe": "true"}),
        (("-ot", "a=CPU", "-ot", "b=CPU"), {"override_tensor": ["a=CPU", "b=CPU"]}),
        (("--override-tensor", "exps=CPU"), {"override_tensor": ["exps=CPU"]}),
    ],
)
def test_spellings_of_llama_cpp_for_experts(words: tuple[str, ...], found: dict[str, object]) -> None:
    parser = argparse.ArgumentParser()
    add_flags(parser, EngineConfig, title="engine")
    assert vars(parser.parse_args(words)) == found


@pytest.mark.parametrize(
    ("words", "instead"),
    [
        (("--offload-params", "w13_weight"), "whole layers"),
        (("--cpu-offload-params", "experts"), "whole layers"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    words: tuple[str, ...], instead: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "a/b", *words]) == 2
    said = capsys.readouterr().err
    assert "is not supported" in said
    assert instead in " ".join(said.split())


def test_none_of_it_is_said_to_have_no_effect() -> None:
    from holdfast.config.tuning import TUNING

    assert not [name for name in TUNING if "offload" in name and not name.startswith(("kv_", "sleep_"))]


@pytest.mark.parametrize(
    ("given", "fix"),
    [
        ("10GiB", "cpu_offload_gb 10"),
        ("512MiB", "cpu_offload_gb 0.5"),
        ("much", "leave it out"),
        ("-1", "leave it out"),
        ("9" * 400 + "GiB", "leave it out"),
    ],
    ids=["GiB", "MiB", "words", "negative", "endless"],
)
def test_gibibytes_with_their_unit_are_told_as_the_number(given: str, fix: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EngineConfig.from_arguments(cpu_offload_gb=given)
    assert caught.value.needed == "a number of GiB, without the unit, from 0 to 1,048,576"
    assert str(caught.value.fix).removeprefix("--").replace("-", "_").startswith(fix.replace("-", "_"))


@pytest.mark.parametrize(("given", "fix"), [("-3", "all"), ("70000", "all"), ("many", "leave it out")])
def test_the_words_for_all_layers_are_told(given: str, fix: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        EngineConfig.from_arguments(gpu_layers=given)
    assert "all, or auto" in str(caught.value.needed)
    assert str(caught.value.fix).endswith(fix)
