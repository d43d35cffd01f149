"""LoRA adapters by name: as people ask for one (vLLM's LoRARequest), and as it crosses to the engine. No files."""

from __future__ import annotations

import msgspec

from holdfast.errors import RequestError


class LoRARequest(msgspec.Struct, frozen=True):
    """vLLM's names. `lora_int_id` stands for one adapter as long as an engine lives."""

    lora_name: str
    lora_int_id: int
    lora_path: str
    base_model_name: str | None = None
    load_inplace: bool = False
    """Its files may have changed since it was first named: they are looked at again."""

    def __post_init__(self) -> None:
        for name in ("lora_name", "lora_path"):
            if not isinstance(getattr(self, name), str) or not getattr(self, name):
                raise RequestError(f"{name} must be a text that is not empty", field=name)
        if isinstance(self.lora_int_id, bool) or not isinstance(self.lora_int_id, int) or self.lora_int_id < 1:
            raise RequestError(
                f"lora_int_id is {self.lora_int_id!r}", needed="a whole number from 1", field="lora_int_id"
            )


class AdapterRef(msgspec.Struct, frozen=True, array_like=True):
    """An adapter whose files were looked at. Equal refs mean equal weights: cached prefixes are salted with them."""

    name: str
    number: int
    path: str
    stamp: str
    """Of its files when they were looked at: other files under the same name are another adapter."""
    shared_path: str = ""
    """Of an engine on several nodes: where each of the others looks for it."""
    digest: str = ""
    """Of its files' bytes: by the stamp of one machine no other can tell that its files are the same. Empty: there is
    no other."""

    @property
    def salt(self) -> str:
        """Of cached prefixes: by its files alone. Its number follows the order in which adapters were loaded, which is
        another after a restart, and in another server that shares the store of KV pages."""
        return f"{self.path}\0{self.stamp}"
