"""Settings of weights that do not stay on a GPU, as Holdfast, vLLM and llama.cpp name them: declared once for a server
and for a plan, checked against each other, and read into what was asked for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.config.setting import choice, flag, number, optional, setting, whole
from holdfast.errors import ConfigurationError
from holdfast.units import GIB

OFFLOAD_CONTRADICTION, OF_A_GPU = "HF135", "HF120"
PREFETCH_STEP = 1
"""Where nothing else was asked for."""
MOST_LAYERS = 1 << 16
"""Of any model: -ngl 99 and 999 mean all."""


class OffloadSettings(Protocol):
    @property
    def offload(self) -> bool: ...
    @property
    def gpu_layers(self) -> int | None: ...
    @property
    def cpu_offload_gb(self) -> float: ...
    @property
    def offload_backend(self) -> str: ...
    @property
    def offload_group_size(self) -> int: ...
    @property
    def offload_num_in_group(self) -> int: ...
    @property
    def offload_prefetch_step(self) -> int: ...
    @property
    def device(self) -> str: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OffloadRequest:
    """What was asked for by hand; nothing of it: as many layers as need be are streamed."""

    refused: bool = False
    """None may be."""
    gpu_layers: int | None = None
    """So many stay on the GPU."""
    cpu_bytes: int = 0
    """So much of the weights waits in RAM, in whole layers."""
    groups: tuple[int, int] | None = None
    """Of every so many layers, so many at the end."""
    ahead: int = PREFETCH_STEP
    """Layers that are copied while one is computed."""

    @property
    def by_hand(self) -> bool:
        return self.gpu_layers is not None or self.cpu_bytes > 0 or self.groups is not None

    @property
    def flag(self) -> str:
        """That asked for it, for people."""
        if self.gpu_layers is not None:
            return f"--gpu-layers {self.gpu_layers}"
        if self.groups is not None:
            return "--offload-group-size {} --offload-num-in-group {}".format(*self.groups)
        return f"--cpu-offload-gb {self.cpu_bytes / GIB:g}"


NO_REQUEST = OffloadRequest()


def offload_request(config: OffloadSettings) -> OffloadRequest:
    return OffloadRequest(
        refused=not config.offload,
        gpu_layers=config.gpu_layers,
        cpu_bytes=int(config.cpu_offload_gb * GIB),
        groups=(config.offload_group_size, config.offload_num_in_group) if config.offload_group_size else None,
        ahead=config.offload_prefetch_step,
    )


def _layers(field: str, value: Any) -> int | None:
    """llama.cpp's words; -1 was its older word for all."""
    written = str(value).strip().lower()
    if written == "auto":
        return None
    if written in ("all", "-1"):
        return MOST_LAYERS
    return int(whole(0, MOST_LAYERS)(field, value))


def offload_setting() -> Any:
    return setting(
        True,
        "keep layers that do not fit on the GPU in RAM, or on the disk of --nvme-path where RAM is too small, and copy "
        "them to the GPU for every step; --no-offload refuses such a model instead",
        flag,
    )


def gpu_layers_setting() -> Any:
    return setting(
        None,
        "number of layers that stay on the GPU, or all; the others are copied to it from RAM for every step (llama.cpp "
        "computes them on the CPU); default, or auto: as many as fit",
        optional(_layers),
        flags=("-ngl", "--n-gpu-layers"),
        metavar="N",
    )


def cpu_offload_gb_setting() -> Any:
    return setting(
        0.0,
        "GiB of weights to keep in RAM, in whole layers that are copied to the GPU for every step; default: what does "
        "not fit on the GPU",
        number(0, 1 << 20),
        metavar="GIB",
    )


def offload_backend_setting() -> Any:
    return setting(
        "auto",
        "which of vLLM's offload settings hold: auto, uva (--cpu-offload-gb) or prefetch (--offload-group-size); "
        "weights are copied ahead in any case",
        choice("auto", "uva", "prefetch"),
    )


def offload_group_size_setting() -> Any:
    return setting(
        0, "of every so many layers, keep the last --offload-num-in-group in RAM", whole(0, MOST_LAYERS), metavar="N"
    )


def offload_num_in_group_setting() -> Any:
    return setting(1, "layers to keep in RAM of every --offload-group-size", whole(1, MOST_LAYERS), metavar="N")


def offload_prefetch_step_setting() -> Any:
    return setting(
        PREFETCH_STEP,
        "layers that are copied ahead; each takes the room of a layer on the GPU",
        whole(1, 16),
        metavar="N",
    )


def check_offload(config: OffloadSettings, disk: str | None) -> None:
    """That these agree with each other, and with the device. `disk`: the setting that gives layers room on one."""
    asked = offload_request(config)
    given = [name for name, there in (
        ("gpu_layers", asked.gpu_layers is not None),
        ("cpu_offload_gb", asked.cpu_bytes > 0),
        ("offload_group_size", asked.groups is not None),
    ) if there]  # fmt: skip
    ahead = None if config.offload_prefetch_step == PREFETCH_STEP else "offload_prefetch_step"
    streaming = [name for name in (*given, ahead, disk) if name is not None and name != "gpu_layers"]
    if not config.offload and streaming:
        raise _contradicts(
            f"--no-offload streams no layers, and {_flag(streaming[0])} is for layers that are streamed",
            streaming[0],
            f"leave --no-offload or {_flag(streaming[0])} out",
        )
    if len(given) > 1:
        names = " and ".join(map(_flag, given))
        raise _contradicts(
            f"{names} all say which layers stay on the GPU", given[1], f"leave all but {_flag(given[0])} out"
        )
    wrong = {"uva": "offload_group_size", "prefetch": "cpu_offload_gb"}.get(config.offload_backend)
    if wrong in given:
        raise _contradicts(
            f"{_flag(wrong)} has no effect with --offload-backend {config.offload_backend}",
            wrong,
            "leave --offload-backend out",
        )
    if config.offload_backend == "prefetch" and asked.groups is None:
        raise _contradicts(
            "--offload-backend prefetch needs to know which layers it is for",
            "offload_group_size",
            "--offload-group-size 2, or leave --offload-backend out: layers that do not fit are streamed by themselves",
        )
    if config.offload_num_in_group > max(1, config.offload_group_size):
        raise _contradicts(
            f"--offload-num-in-group is {config.offload_num_in_group}, more than --offload-group-size, "
            f"{config.offload_group_size}",
            "offload_num_in_group",
            f"--offload-num-in-group {max(1, config.offload_group_size)}",
        )
    if config.device == "cpu":
        _check_cpu(config, [name for name in given if name != "gpu_layers" or asked.gpu_layers != 0])


def check_all_stay(asked: OffloadRequest, layers: int) -> None:
    """That --no-offload comes with no number of layers on the GPU, or with all that a model has."""
    if asked.refused and asked.gpu_layers is not None and asked.gpu_layers < layers:
        left = f"{layers - asked.gpu_layers} of {layers} layers"
        raise _contradicts(
            f"{asked.flag} leaves {left} to stream, and --no-offload streams none",
            "gpu_layers",
            "leave --no-offload or --gpu-layers out, or --gpu-layers all",
        )


def _check_cpu(config: OffloadSettings, given: list[str]) -> None:
    """`given`: which layers stay on a GPU."""
    if config.offload_prefetch_step != PREFETCH_STEP:
        given = [*given, "offload_prefetch_step"]
    if config.offload_backend != "auto":
        given = [*given, "offload_backend"]
    if given:
        raise ConfigurationError(
            f"{_flag(given[0])} is for layers on a GPU, but this server runs on the CPU",
            code=OF_A_GPU,
            needed="a GPU",
            found="device cpu",
            fix=f"leave {_flag(given[0])} out",
            field=given[0],
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _contradicts(message: str, field: str, fix: str) -> ConfigurationError:
    return ConfigurationError(message, code=OFFLOAD_CONTRADICTION, fix=fix, field=field)
