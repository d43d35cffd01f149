"""CUDA C++ to a cubin, by the NVRTC that every CUDA build of torch brings: no toolkit, no headers, no host compiler.

Cubins are kept in the user's cache folder under a hash of all that they depend on: a second start compiles nothing.
Sources include nothing. Knows neither the driver nor what is compiled.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import sys
import tempfile
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from holdfast.checkpoints.sources.cache import cache_folder
from holdfast.errors import EngineError

_ELF = b"\x7fELF"
"""What every cubin begins with."""
_made: dict[str, bytes] = {}
"""By hash, of this process: where the cache folder cannot be written nothing is compiled twice."""


class CompileError(EngineError):
    """What NVRTC has against a source."""


@cache
def _library() -> ctypes.CDLL | None:
    """That of the CUDA release that torch is built for, whose cubins the driver takes: beside torch's other libraries,
    else on the loader's path. None without CUDA."""
    if torch.version.cuda is None and torch.version.hip is not None:
        return None
    majors = (13, 12) if torch.version.cuda is None else (int(torch.version.cuda.split(".")[0]),)
    for name in (f"libnvrtc.so.{major}" for major in majors):
        for path in (found for folder in sys.path for found in Path(folder or ".").glob(f"nvidia/*/lib/{name}")):
            # Opened by its name alone later on, where the loader does not look into torch's folders.
            for builtins in path.parent.glob("libnvrtc-builtins.so.*"):
                ctypes.CDLL(str(builtins))
            return ctypes.CDLL(str(path))
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    return None


def available() -> bool:
    return _library() is not None


def version() -> tuple[int, int]:
    """NVRTC's; (0, 0) without it."""
    library = _library()
    if library is None:
        return 0, 0
    major, minor = ctypes.c_int(), ctypes.c_int()
    library.nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


def supports(capability: tuple[int, int]) -> bool:
    """Whether this NVRTC knows GPUs of this compute capability."""
    library = _library()
    if library is None:
        return False
    count = ctypes.c_int()
    _check(library.nvrtcGetNumSupportedArchs(ctypes.byref(count)))
    known = (ctypes.c_int * count.value)()
    _check(library.nvrtcGetSupportedArchs(known))
    return capability[0] * 10 + capability[1] in known


def cubin(
    source: str, capability: tuple[int, int], defines: Mapping[str, int] | None = None, *, fresh: bool = False
) -> bytes:
    """Compiled for GPUs of this compute capability, or taken from the cache. `defines` are macros. `fresh`: what the
    cache has is not to be taken, for the driver refused it."""
    given = options(capability, defines or {})
    about = "\n".join((source, *given, str(version())))
    name = hashlib.sha256(about.encode()).hexdigest()
    kept = cache_folder() / "cuda" / f"{name}.cubin"
    if not fresh:
        found = _made.get(name) or _kept(kept)
        if found is not None:
            return found
    _made[name] = compile_source(source, given)
    _keep(kept, _made[name])
    return _made[name]


def _kept(path: Path) -> bytes | None:
    try:
        found = path.read_bytes()
    except OSError:
        return None
    return found if found.startswith(_ELF) else None


def options(capability: tuple[int, int], defines: Mapping[str, int]) -> list[str]:
    # sm_90a has what sm_90 has, and the instructions of Hopper alone.
    architecture = f"sm_{capability[0]}{capability[1]}{'a' if capability == (9, 0) else ''}"
    macros = [f"--define-macro={name}={value}" for name, value in sorted(defines.items())]
    return [f"--gpu-architecture={architecture}", "--std=c++17", "--device-as-default-execution-space", *macros]


def compile_source(source: str, options: list[str]) -> bytes:
    library = _library()
    if library is None:
        raise CompileError("CUDA kernels cannot be compiled", needed="libnvrtc of torch's CUDA build", found="none")
    program = ctypes.c_void_p()
    given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    _check(library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"holdfast.cu", 0, None, None))
    try:
        failed = library.nvrtcCompileProgram(program, len(options), given)
        if failed:
            raise CompileError("a CUDA kernel does not compile", found=_text(library, program))
        size = ctypes.c_size_t()
        _check(library.nvrtcGetCUBINSize(program, ctypes.byref(size)))
        made = ctypes.create_string_buffer(size.value)
        _check(library.nvrtcGetCUBIN(program, made))
        return made.raw
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _text(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    size = ctypes.c_size_t()
    library.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    text = ctypes.create_string_buffer(size.value)
    library.nvrtcGetProgramLog(program, text)
    return text.value.decode(errors="replace").strip()


def _check(status: int) -> None:
    if status:
        raise CompileError("NVRTC failed", found=f"status {status}")


def _keep(path: Path, data: bytes) -> None:
    """Whole or not at all; without a cache the next start compiles again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            file = Path(folder) / path.name
            with file.open("wb") as target:
                target.write(data)
                target.flush()
                os.fsync(target.fileno())
            os.replace(file, path)
    except OSError:
        return
