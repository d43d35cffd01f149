"""Builds the compiled CPU kernels when Holdfast is installed. Everything else is said in pyproject.toml.

Without a C compiler the installation goes on without them: the kernels are optional, torch does their work. The same
sources are compiled into a module for each variant of the CPU, so that a wheel runs on any machine of its architecture;
holdfast.hardware.kernels chooses one when Holdfast starts.
"""

from __future__ import annotations

import copy
import os
import platform
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

FOLDER = Path("src/holdfast/execution/native")
# Fused multiply-adds are wanted; reordering of sums is not, so no -ffast-math.
FLAGS = ["-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-g0"]

AVX2 = ["-mavx2", "-mfma", "-mf16c", "-mbmi2"]
AVX512 = [*AVX2, "-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=256"]
VNNI = [*AVX512, "-mavx512vnni"]
AMX = [*VNNI, "-mamx-tile", "-mamx-int8"]
# What each may use beyond the architecture's least: what holdfast.hardware.kernels asks of the CPU before it loads one.
X86 = {
    "portable": [],
    "avx2": AVX2,
    "avx_vnni": [*AVX2, "-mavxvnni"],
    "avx512": AVX512,
    "avx512_vnni": VNNI,
    "amx": AMX,
}
ARM = {"portable": [], "neon_dotprod": ["-march=armv8.2-a+dotprod"]}
VARIANTS = {"x86_64": X86, "amd64": X86, "aarch64": ARM, "arm64": ARM}.get(platform.machine().lower(), {"portable": []})


class BuildVariants(build_ext):
    def finalize_options(self) -> None:
        """Variants beside each other, as there are cores: each is half a minute of one core's work."""
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()

    def build_extension(self, ext: Extension) -> None:
        """In a folder of the variant's own: its objects have the names of the others'."""
        own = copy.copy(self)
        own.build_temp = os.path.join(self.build_temp, ext.name.rpartition(".")[2])
        build_ext.build_extension(own, ext)


def kernels(variant: str, flags: list[str]) -> Extension:
    return Extension(
        f"holdfast.execution.native._kernels_{variant}",
        sources=sorted(str(path) for path in FOLDER.glob("*.c")),
        depends=sorted(str(path) for path in FOLDER.glob("*.h")),
        define_macros=[("VARIANT", variant)],
        extra_compile_args=FLAGS + flags,
        libraries=["m", "pthread"],
        optional=True,
    )


setup(
    ext_modules=[kernels(variant, flags) for variant, flags in VARIANTS.items()],
    cmdclass={"build_ext": BuildVariants},
)
