"""vLLM's methods of `LLM` that are not there, refused with the reason, and those that have nothing to do. Owns no
state."""

from __future__ import annotations

from typing import Any, NoReturn

from holdfast.config import EngineConfig
from holdfast.errors import UnsupportedOptionError
from holdfast.models.registry import runnable_architectures

_NO_REWARD = "it needs a reward for every token, and only the last token is pooled"


_WEIGHTS_STAY = "weights are read once, from files"
_OTHER_WEIGHTS = "sleep(), write the new files in place of the old ones, wake_up()"


def refuse_breathing(config: EngineConfig) -> None:
    """What a server does between requests: here nothing runs then."""
    given = {"idle_release": config.idle_release, "yield_to_neighbours": config.yield_to_neighbours}
    for name in (name for name, there in given.items() if there):
        raise UnsupportedOptionError(
            f"{name} is a setting of holdfast serve: between two calls of LLM nothing runs that could do it",
            fix=f"leave {name} out; sleep() gives the memory back until wake_up()",
            field=name,
        )


def refuse_several_engines(config: EngineConfig, who: str = "LLM") -> None:
    """As vLLM's LLM does: one engine computes here."""
    if config.data_parallel_size > 1:
        raise UnsupportedOptionError(
            f"data_parallel_size is {config.data_parallel_size}, but {who} has one engine",
            needed="1",
            fix=f"holdfast serve MODEL -dp {config.data_parallel_size}, or holdfast run-batch -i FILE -o FILE --model"
            f" MODEL -dp {config.data_parallel_size}",
            field="data_parallel_size",
        )


def refuse_ray(config: EngineConfig, who: str) -> None:
    if config.distributed_executor_backend == "ray":
        raise UnsupportedOptionError(
            f"distributed_executor_backend is ray, but {who} has all ranks on this machine",
            needed="mp",
            fix="holdfast serve MODEL --distributed-executor-backend ray, and holdfast chat --url with its address",
            field="distributed_executor_backend",
        )


class EmptyMethods:
    def get_world_size(self, include_dp: bool = True) -> int:
        """One device computes everything."""
        return 1

    def reset_mm_cache(self) -> None:
        """Of images and audio, which no prompt has."""


class AbsentMethods:
    def reward(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("reward", _NO_REWARD, "classify(prompts) with a model that rewards whole texts")

    def init_weight_transfer_engine(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("init_weight_transfer_engine", _WEIGHTS_STAY, _OTHER_WEIGHTS)

    def start_weight_update(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("start_weight_update", _WEIGHTS_STAY, _OTHER_WEIGHTS)

    def start_draft_weight_update(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("start_draft_weight_update", _WEIGHTS_STAY, _OTHER_WEIGHTS)

    def update_weights(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("update_weights", _WEIGHTS_STAY, _OTHER_WEIGHTS)

    def update_weight_version(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("update_weight_version", _WEIGHTS_STAY, _OTHER_WEIGHTS)

    def get_weight_version(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("get_weight_version", _WEIGHTS_STAY, _OTHER_WEIGHTS)

    def finish_weight_update(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("finish_weight_update", _WEIGHTS_STAY, _OTHER_WEIGHTS)

    def collective_rpc(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("collective_rpc", "the engine has no worker processes to call", "leave it out")

    def apply_model(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("apply_model", "there is no access to the model object", "leave it out")


class ModelRegistry:
    """vLLM's table of models, to which scripts add code of their own."""

    @staticmethod
    def get_supported_archs() -> frozenset[str]:
        return frozenset(runnable_architectures())

    @staticmethod
    def register_model(model_arch: str, model_cls: object) -> NoReturn:
        _refuse(
            "ModelRegistry.register_model",
            f"a model is described by its config, and code of scripts is not run for it ({model_arch})",
            "serve an architecture of get_supported_archs(), or add a family: docs/add-a-model.md",
        )


def _refuse(name: str, reason: str, fix: str) -> NoReturn:
    raise UnsupportedOptionError(f"{name} is not supported: {reason}", fix=fix, field=name)
