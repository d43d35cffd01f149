"""Builds the compiled CPU kernels when Holdfast is installed. Everything else is said in pyproject.toml.

Without a C compiler the installation goes on without them: the kernels are optional, torch does their work.
"""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src/holdfast/execution/native")
# The kernels are made for the machine that builds them. For a package that travels, name the oldest machine it
# shall run on (HOLDFAST_NATIVE_ARCH=x86-64-v3), or nothing (HOLDFAST_NATIVE_ARCH=) for the compiler's default.
ARCHITECTURE = os.environ.get("HOLDFAST_NATIVE_ARCH", "native")

kernels = Extension(
    "holdfast.execution.native._kernels",
    sources=sorted(str(path) for path in FOLDER.glob("*.c")),
    depends=sorted(str(path) for path in FOLDER.glob("*.h")),
    # Fused multiply-adds are wanted; reordering of sums is not, so no -ffast-math.
    extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-g0"]
    + ([f"-march={ARCHITECTURE}"] if ARCHITECTURE else []),
    libraries=["m"],
    optional=True,
)

setup(ext_modules=[kernels])
