"""Settings of weights that do not stay on a GPU, as Holdfast, vLLM and llama.cpp name them: declared once for a server
and for a plan, checked against each other, and read into what was asked for. And of KV pages that lie on a disk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from holdfast.config.setting import choice, flag, gibibytes, memory, number, optional, setting, text, texts, whole
from holdfast.errors import ConfigurationError
from holdfast.units import GIB

OFFLOAD_CONTRADICTION, OF_A_GPU = "HF135", "HF120"
_NO_LAYERS = "--no-offload streams no layers, and {} is for layers that are streamed"
_NO_EXPERTS = "--no-offload keeps no experts in RAM, and {} is for those"
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
    def cpu_moe(self) -> bool: ...
    @property
    def n_cpu_moe(self) -> int: ...
    @property
    def override_tensor(self) -> tuple[str, ...]: ...
    @property
    def cpu_compute(self) -> str: ...
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
    expert_layers: int = 0
    """The experts of so many layers at the beginning wait in RAM."""
    overrides: tuple[str, ...] = ()
    """Those that match, as llama.cpp writes it: PATTERN=CPU, PATTERN=CUDA0; the first that matches counts."""
    cpu_compute: bool = True
    """The host's cores may compute what waits in RAM."""

    @property
    def experts_by_hand(self) -> bool:
        return self.expert_layers > 0 or self.overrides != ()

    @property
    def by_hand(self) -> bool:
        """Of whole layers."""
        return self.gpu_layers is not None or self.cpu_bytes > 0 or self.groups is not None

    @property
    def flag(self) -> str:
        """That asked for it, for people."""
        if self.overrides:
            return f"--override-tensor {','.join(self.overrides)}"
        if self.expert_layers:
            return "--cpu-moe" if self.expert_layers == MOST_LAYERS else f"--n-cpu-moe {self.expert_layers}"
        if self.gpu_layers is not None:
            return f"--gpu-layers {'all' if self.gpu_layers == MOST_LAYERS else self.gpu_layers}"
        if self.groups is not None:
            return "--offload-group-size {} --offload-num-in-group {}".format(*self.groups)
        return f"--cpu-offload-gb {self.cpu_bytes / GIB:g}"

    @property
    def flags(self) -> str:
        """With the one that refuses: beside it, at most all layers are asked for."""
        asked = [self.flag] if self.by_hand or self.experts_by_hand else []
        return " and ".join(["--no-offload", *asked] if self.refused else asked)


NO_REQUEST = OffloadRequest()


def offload_request(config: OffloadSettings) -> OffloadRequest:
    return OffloadRequest(
        refused=not config.offload,
        gpu_layers=config.gpu_layers,
        cpu_bytes=int(config.cpu_offload_gb * GIB),
        groups=(config.offload_group_size, config.offload_num_in_group) if config.offload_group_size else None,
        ahead=config.offload_prefetch_step,
        expert_layers=MOST_LAYERS if config.cpu_moe else config.n_cpu_moe,
        overrides=tuple(part.strip() for one in config.override_tensor for part in one.split(",") if part.strip()),
        cpu_compute=config.cpu_compute == "auto",
    )


def _layers(field: str, value: Any) -> int | None:
    """llama.cpp's words: -1 is its number for auto."""
    written = str(value).strip().lower()
    if written in ("auto", "-1", "all"):
        return MOST_LAYERS if written == "all" else None
    try:
        return int(whole(0, MOST_LAYERS)(field, value))
    except ConfigurationError as error:
        error.needed = f"a whole number from 0 to {MOST_LAYERS:,}, all, or auto: as many as fit"
        error.fix = error.fix if error.fix == "leave it out" else f"leave it out, or {field} all"
        raise


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
        gibibytes(1 << 20),
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


def cpu_moe_setting() -> Any:
    return setting(
        False,
        "keep the experts of all layers in RAM; the rest of every layer stays on the GPU. Default: as many experts "
        "stay there as fit",
        flag,
        flags=("-cmoe",),
    )


def n_cpu_moe_setting() -> Any:
    return setting(
        0,
        "keep the experts of the first N layers in RAM, and all others on the GPU",
        whole(0, MOST_LAYERS),
        flags=("-ncmoe",),
        metavar="N",
    )


def override_tensor_setting() -> Any:
    return setting(
        (),
        "keep the experts of the layers in RAM whose names match, as llama.cpp writes it: exps=CPU, or "
        r"blk\.(2[0-9])\.ffn_.*_exps\.=CPU; PATTERN=CUDA0 keeps them on the GPU; of anything but whole layers' experts "
        "it is refused",
        texts,
        flags=("-ot",),
        metavar="PATTERN=CPU",
    )


def cpu_compute_setting() -> Any:
    return setting(
        "auto",
        "let the host's cores compute what waits in RAM where that is sooner than moving it, if RAM holds a copy for "
        "them: auto or off",
        choice("auto", "off"),
    )


class BudgetSettings(Protocol):
    @property
    def device(self) -> str: ...
    @property
    def vram(self) -> int | None: ...
    @property
    def nvme(self) -> int | None: ...
    @property
    def nvme_path(self) -> str | None: ...


def check_budgets(config: BudgetSettings) -> None:
    """That there is something for each to be of."""
    if config.vram is not None and config.device == "cpu":
        raise ConfigurationError(
            "vram is a GPU memory budget, but this server runs on the CPU",
            code=OF_A_GPU,
            needed="ram",
            found="vram",
            fix="--ram SIZE",
            field="vram",
        )
    if config.nvme is not None and config.nvme_path is None:
        raise ConfigurationError(
            "nvme is the size of a file, but there is no folder for it",
            needed="nvme_path as well",
            fix="--nvme-path DIR",
            field="nvme",
        )


def check_offload(config: OffloadSettings, disk: str | None) -> None:
    """That these agree with each other, and with the device. `disk`: the setting that gives layers room on one."""
    asked = offload_request(config)
    given = [name for name, there in (
        ("gpu_layers", asked.gpu_layers is not None),
        ("cpu_offload_gb", asked.cpu_bytes > 0),
        ("offload_group_size", asked.groups is not None),
    ) if there]  # fmt: skip
    experts = _expert_settings(config)
    ahead = None if config.offload_prefetch_step == PREFETCH_STEP else "offload_prefetch_step"
    streaming = [name for name in (*given, *experts, ahead, disk) if name is not None and name != "gpu_layers"]
    if not config.offload and streaming:
        said = _NO_EXPERTS if streaming[0] in experts else _NO_LAYERS
        raise _contradicts(
            said.format(_flag(streaming[0])),
            streaming[0],
            f"leave --no-offload or {_flag(streaming[0])} out",
        )
    if len(given) > 1:
        names = " and ".join(map(_flag, given))
        raise _contradicts(
            f"{names} all say which layers stay on the GPU", given[1], f"leave all but {_flag(given[0])} out"
        )
    layers = [name for name in given if name != "gpu_layers"]
    if len(experts) > 1 or (experts and layers):
        first, second = (*experts, *layers)[:2]
        raise _contradicts(
            f"{_flag(first)} and {_flag(second)} both say what waits in RAM", second, f"leave {_flag(second)} out"
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
        _check_cpu(config, [*(name for name in given if name != "gpu_layers" or asked.gpu_layers != 0), *experts])


def _expert_settings(config: OffloadSettings) -> list[str]:
    """Those that say whose experts wait in RAM."""
    given = {
        "cpu_moe": config.cpu_moe,
        "n_cpu_moe": config.n_cpu_moe > 0,
        "override_tensor": len(config.override_tensor) > 0,
    }
    return [name for name, there in given.items() if there]


def check_all_stay(asked: OffloadRequest, layers: int) -> None:
    """That --no-offload, and settings of whose experts wait, come with no number of layers on the GPU, or with all that
    a model has."""
    if asked.experts_by_hand and asked.gpu_layers is not None and asked.gpu_layers < layers:
        raise _contradicts(
            f"{asked.flag} is for experts of layers that stay on the GPU, and --gpu-layers {asked.gpu_layers} leaves"
            f" {layers - asked.gpu_layers} of {layers} layers to stream whole",
            "gpu_layers",
            "leave --gpu-layers out, or --gpu-layers all",
        )
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
    if config.cpu_compute != "auto":
        given = [*given, "cpu_compute"]
    if given:
        raise ConfigurationError(
            f"{_flag(given[0])} is for layers on a GPU, but this server runs on the CPU",
            code=OF_A_GPU,
            needed="a GPU",
            found="device cpu",
            fix=f"leave {_flag(given[0])} out",
            field=given[0],
        )


class KVTierSettings(Protocol):
    @property
    def kv_ram(self) -> int | None: ...
    @property
    def kv_offloading_size(self) -> float | None: ...
    @property
    def swap_space(self) -> float | None: ...
    @property
    def kv_store(self) -> str | None: ...
    @property
    def kv_store_size(self) -> int | None: ...
    @property
    def kv_store_daily_writes(self) -> int | None: ...
    @property
    def enable_prefix_caching(self) -> bool: ...
    @property
    def device(self) -> str: ...


def kv_store_setting() -> Any:
    return setting(
        None,
        "folder on a fast disk where the KV cache of prompt prefixes is kept that were asked for twice; servers of the "
        "same model share it, and find it again after a restart",
        optional(text),
        metavar="DIR",
    )


def kv_store_size_setting() -> Any:
    return setting(
        None,
        "maximum size of the KV store, such as 100GiB; default: half of what is free there, at most 100 GiB",
        optional(memory),
        metavar="SIZE",
    )


def kv_store_daily_writes_setting() -> Any:
    return setting(
        None,
        "maximum written to the KV store in a day, such as 500GiB, because disks wear; default: ten times its size",
        optional(memory),
        metavar="SIZE",
    )


def _memory_or_none(field: str, value: Any) -> int:
    return 0 if str(value).strip() == "0" else memory(field, value)


def kv_ram_setting() -> Any:
    return setting(
        None,
        "RAM for KV blocks that leave the GPU, such as 40GiB, or 0 for none: prefixes and preempted requests come back "
        "from there instead of being computed again; default of a server: a quarter of the RAM that it leaves free, at "
        "most twice the KV cache; on a CPU none, because the KV cache is in RAM already",
        optional(_memory_or_none),
        metavar="SIZE",
    )


def idle_release_setting() -> Any:
    return setting(
        None,
        "seconds without a request after which the KV cache gives its memory up, but for one sequence of full length; "
        "it is taken again when a request comes. On a GPU, cached prefixes go to --kv-ram before. 0, or default: never",
        optional(number(0, 7 * 86400)),
        metavar="SECONDS",
    )


def yield_to_neighbours_setting() -> Any:
    return setting(
        False,
        "give memory of the KV cache up while other processes need it, and take it back, and what they leave of the "
        "budget's share, when they are gone; looked at once a second",
        flag,
    )


def kv_offloading_size_setting() -> Any:
    return setting(None, "same as --kv-ram, in GiB", optional(gibibytes(1 << 20)), metavar="GIB")


def swap_space_setting() -> Any:
    return setting(None, "same as --kv-ram, in GiB; older vLLM's name", optional(gibibytes(1 << 20)), metavar="GIB")


def kv_ram_bytes(config: KVTierSettings) -> int | None:
    """On a GPU; on a CPU the pool is in RAM itself. None: nothing was said."""
    if config.kv_ram is not None:
        return config.kv_ram
    # Older vLLM swaps preempted requests, with prefix caching or without: here these are computed again.
    swapped = config.swap_space if config.enable_prefix_caching else 0.0
    said = swapped if config.kv_offloading_size is None else config.kv_offloading_size
    return None if said is None else int(said * GIB)


def check_kv_tiers(config: KVTierSettings) -> None:
    if config.kv_ram and config.device == "cpu":
        raise ConfigurationError(
            "kv_ram is for KV blocks that leave a GPU, but this server runs on the CPU, and its KV cache is in RAM",
            code=OF_A_GPU,
            needed="a GPU",
            found="device cpu",
            fix="--kv-cache-memory-bytes SIZE for a larger KV cache",
            field="kv_ram",
        )
    if kv_ram_bytes(config) and not config.enable_prefix_caching and config.device != "cpu":
        name = "kv_ram" if config.kv_ram is not None else "kv_offloading_size"
        raise ConfigurationError(
            "KV blocks in RAM are found as prefixes, but prefix caching is off",
            needed="enable_prefix_caching",
            fix=f"leave --no-enable-prefix-caching or {_flag(name)} out",
            field=name,
        )
    if config.kv_store is None:
        for name in ("kv_store_size", "kv_store_daily_writes"):
            if getattr(config, name) is not None:
                raise ConfigurationError(
                    f"{name} is a setting of the KV store, but there is no folder for it",
                    needed="kv_store as well",
                    fix="--kv-store DIR",
                    field=name,
                )
        return
    if not config.enable_prefix_caching:
        raise ConfigurationError(
            "the KV store keeps prefixes, but prefix caching is off",
            needed="enable_prefix_caching",
            fix="leave --no-enable-prefix-caching or --kv-store out",
            field="kv_store",
        )


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _contradicts(message: str, field: str, fix: str) -> ConfigurationError:
    return ConfigurationError(message, code=OFFLOAD_CONTRADICTION, fix=fix, field=field)
