"""Which variant of the compiled kernels is chosen, forced or refused. No kernels are run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from holdfast.errors import ConfigurationError
from holdfast.hardware import Processor, kernels
from holdfast.hardware.probe import DOT_PRODUCT_FEATURES, KERNEL_VARIANTS

ALL = list(KERNEL_VARIANTS)
X86 = ["amx", "avx512_vnni", "avx512", "avx_vnni", "avx2", "portable"]
SAPPHIRE_RAPIDS = KERNEL_VARIANTS["amx"] | {"sse2", "avx_vnni", "amx_bf16", "avx512_bf16"}
CASCADE_LAKE = KERNEL_VARIANTS["avx512_vnni"] | {"sse2"}
SKYLAKE_X = KERNEL_VARIANTS["avx512"] | {"sse2"}
ALDER_LAKE = KERNEL_VARIANTS["avx_vnni"] | {"sse2"}
HASWELL = KERNEL_VARIANTS["avx2"] | {"sse2"}
NEHALEM = frozenset({"sse2", "sse4_2"})


def chosen(forced: str, features: frozenset[str], built: list[str]) -> kernels.KernelChoice:
    choice = kernels.choose(forced, features, built)
    assert isinstance(choice, kernels.KernelChoice)
    return choice


@pytest.mark.parametrize(
    ("features", "variant"),
    [
        (SAPPHIRE_RAPIDS, "amx"),
        (SAPPHIRE_RAPIDS - {"amx_int8"}, "avx512_vnni"),
        (CASCADE_LAKE, "avx512_vnni"),
        (CASCADE_LAKE | {"avx_vnni"}, "avx512_vnni"),
        (ALDER_LAKE, "avx_vnni"),
        (HASWELL, "avx2"),
        (SKYLAKE_X, "avx512"),
        (SKYLAKE_X - {"avx512bw"}, "avx2"),
        (HASWELL - {"f16c"}, "portable"),
        (NEHALEM, "portable"),
        (frozenset[str](), "portable"),
        (frozenset({"asimd", "asimddp"}), "neon_dotprod"),
        (frozenset({"asimd", "fp"}), "portable"),
    ],
)
def test_the_fastest_that_the_cpu_can_run_is_chosen(features: frozenset[str], variant: str) -> None:
    choice = chosen("", features, ALL)
    assert (choice.variant, choice.source) == (variant, "hardware")
    assert Processor(model="", cores=1, features=features).fast_block_products == (variant != "portable")


def test_one_that_was_not_built_is_named() -> None:
    choice = chosen("", CASCADE_LAKE, ["avx2", "portable"])
    assert choice.variant == "avx2"
    assert "avx512_vnni was not built" in choice.reason
    assert "not built" not in chosen("", CASCADE_LAKE, X86).reason


def test_without_any_there_is_a_reason() -> None:
    reason = kernels.choose("", CASCADE_LAKE, [])
    assert isinstance(reason, str)
    assert "not built" in reason


def test_a_forced_one_is_used() -> None:
    choice = chosen("portable", CASCADE_LAKE, X86)
    assert (choice.variant, choice.source) == ("portable", "environment")
    assert "avx512_vnni, avx512, avx2, portable" in choice.reason


@pytest.mark.parametrize(
    ("forced", "built", "words"),
    [
        ("avx_vnni", X86, "this CPU has no avx_vnni"),
        ("amx", X86, "this CPU has no amx_int8 amx_tile"),
        ("neon_dotprod", X86, "this CPU has no asimddp"),
        ("sse9", X86, "no such kernels; there are amx, avx512_vnni, avx512, avx_vnni, avx2, neon_dotprod, portable"),
        ("avx2", ["portable"], "this installation has only portable"),
    ],
)
def test_a_forced_one_that_cannot_run_is_refused_by_name(forced: str, built: list[str], words: str) -> None:
    with pytest.raises(ConfigurationError) as raised:
        kernels.choose(forced, CASCADE_LAKE, built)
    assert f"HOLDFAST_CPU_KERNELS={forced}: {words}" in raised.value.message
    assert raised.value.code == "HF113"
    expected = "avx512_vnni, avx512, avx2, portable" if built is X86 else "portable"
    assert raised.value.found == f"this machine can run {expected}"


def test_portable_kernels_are_not_fast_products(monkeypatch: pytest.MonkeyPatch) -> None:
    portable = kernels.KernelChoice("portable", "as the test says", "environment")
    monkeypatch.setattr(kernels, "kernel_choice", lambda: portable)
    kernels.processor.cache_clear()
    assert not kernels.processor().fast_block_products
    monkeypatch.undo()
    kernels.processor.cache_clear()


def test_without_dot_products_none_but_the_portable_run() -> None:
    for name, needs in KERNEL_VARIANTS.items():
        assert bool(needs & DOT_PRODUCT_FEATURES) == (name != "portable")


def test_the_compiler_is_allowed_what_the_cpu_is_asked_for() -> None:
    setup = (Path(__file__).parents[3] / "setup.py").read_text()
    flags = {
        flag.replace("avx512vnni", "avx512_vnni").replace("avxvnni", "avx_vnni").replace("-", "_")
        for flag in re.findall(r'"-m(avx\w+|amx-\w+|fma|f16c|bmi2)"', setup)
    }
    assert flags == set().union(*(KERNEL_VARIANTS[name] for name in X86))
