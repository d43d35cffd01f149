"""Settings of KV pages that lie below the pool: on a disk. Declared once, checked against each other."""

from __future__ import annotations

from typing import Any, Protocol

from holdfast.config.setting import memory, optional, setting, text
from holdfast.errors import ConfigurationError


class KVTierSettings(Protocol):
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


def check_kv_tiers(config: KVTierSettings) -> None:
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
    if config.device == "cuda":
        raise ConfigurationError(
            "the KV store is for servers on a CPU so far",
            code="HF120",
            needed="device cpu",
            found="device cuda",
            fix="leave --kv-store out, or --device cpu",
            field="kv_store",
        )
