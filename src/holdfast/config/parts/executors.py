"""Who starts the ranks of -tp and -pp and how they add up, in vLLM's words; and what contradicts other settings."""

from __future__ import annotations

from typing import Any, Protocol

from holdfast.config.setting import choice, flag, optional, setting
from holdfast.errors import ConfigurationError

NO_RAY = "HF154"


class ExecutorSettings(Protocol):
    """Those of EngineConfig that concern it."""

    @property
    def distributed_executor_backend(self) -> str | None: ...
    @property
    def tensor_parallel_size(self) -> int: ...
    @property
    def pipeline_parallel_size(self) -> int: ...
    @property
    def data_parallel_size(self) -> int: ...
    @property
    def nnodes(self) -> int: ...


def _backend(field: str, value: Any) -> str:
    if isinstance(value, type):
        raise ConfigurationError(
            f"{field}: a class is not supported: code named in a setting is never run",
            needed="mp or ray",
            field="distributed_executor_backend",
        )
    return str(choice("mp", "ray", "uni", "external_launcher")(field, value))


def distributed_executor_backend_setting() -> Any:
    return setting(
        None,
        "who starts the ranks: mp (this server; on other machines a person or a manager, see --nnodes) or ray (a Ray"
        " cluster that runs already, found by RAY_ADDRESS or on this machine: it chooses the nodes and starts them;"
        " needs pip install 'holdfast[ray]'); default: mp",
        optional(_backend),
    )


def disable_custom_all_reduce_setting() -> Any:
    return setting(
        False,
        "ranks add up what they computed over sockets (gloo) instead of shared memory; on GPUs by NCCL alone instead of"
        " kernels of our own",
        flag,
    )


def check_executor(config: ExecutorSettings) -> None:
    """Raises where the backend and other settings contradict each other. Ray itself is not asked."""
    backend, ranks = config.distributed_executor_backend, config.tensor_parallel_size * config.pipeline_parallel_size
    if backend == "external_launcher":
        raise _wrong(
            "distributed_executor_backend external_launcher is not supported: rank 0 starts the other ranks, or nodes"
            " that are started by others join it",
            needed="mp or ray",
            fix="--nnodes, --node-rank and --master-addr on each machine, or --distributed-executor-backend ray",
        )
    if backend == "uni" and ranks > 1:
        raise _wrong(
            f"distributed_executor_backend uni is one process, and there are {ranks} ranks",
            needed="mp or ray",
            fix="leave --distributed-executor-backend out",
        )
    if backend == "ray" and config.nnodes > 1:
        raise _wrong(
            f"nnodes is {config.nnodes}, and Ray decides itself how many nodes the ranks are on",
            needed="nnodes or Ray",
            fix="leave --nnodes and --node-rank out",
        )
    if backend == "ray" and config.data_parallel_size > 1:
        raise _wrong(
            "engines of data_parallel_size are on one machine so far",
            needed="Ray or data_parallel_size",
            fix="leave --data-parallel-size out",
        )


def _wrong(message: str, *, needed: str, fix: str) -> ConfigurationError:
    return ConfigurationError(message, needed=needed, fix=fix, field="distributed_executor_backend")
