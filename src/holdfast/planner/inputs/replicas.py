"""Data parallelism: the GPUs of one replica out of all of them, and its share of the traffic.

Replicas share nothing but experts, where those are whole on each rank. Counts nothing.
"""

from __future__ import annotations

from dataclasses import replace

from holdfast.config.nodes import WRONG_NODES
from holdfast.config.plan import PlanConfig
from holdfast.config.unsupported import NOT_WITH_RANKS
from holdfast.errors import ConfigurationError
from holdfast.observability.decisions import Decision
from holdfast.planner.inputs.question import Machine, PlannedModel, Traffic
from holdfast.planner.sizing.sharded_weights import parallel_sizes
from holdfast.units import counted

TOO_FEW_DEVICES = "HF133"


def ranks_of_a_replica(config: PlanConfig) -> int:
    return (config.tensor_parallel_size or 1) * (config.pipeline_parallel_size or 1)


def one_replica(machine: Machine, config: PlanConfig) -> tuple[Machine, tuple[Decision, ...]]:
    """The GPUs of the replica that has least; the machine itself where there is only one."""
    replicas, each = config.data_parallel_size or 1, ranks_of_a_replica(config)
    if replicas == 1:
        return machine, ()
    if machine.kind == "cpu":
        return _share_of_cpu(machine, replicas)
    devices, wanted = machine.devices, replicas * each
    if machine.kind != "gpu" or len(devices) < wanted:
        raise ConfigurationError(
            f"{replicas} replicas of {counted(each, 'GPU')} each need {wanted} GPUs",
            code=TOO_FEW_DEVICES,
            needed=counted(wanted, "GPU"),
            found=f"{len(devices)}: {', '.join(device.name for device in devices)}",
            fix=f"--gpu with x{wanted}, or a smaller -dp",
            field="data_parallel_size",
        )
    groups = [devices[at * each : (at + 1) * each] for at in range(replicas)]
    least = min(groups, key=lambda group: min(device.total_bytes for device in group))
    reason = f"each on {counted(each, 'GPU')}, with its own weights and KV; what follows is of one of them"
    if config.enable_expert_parallel:
        reason = f"each on {counted(each, 'GPU')}, with its own KV; experts are divided over all {wanted} GPUs"
    if left := len(devices) - wanted:
        reason += f"; {left} of {len(devices)} GPUs {'is' if left == 1 else 'are'} unused"
    said = Decision("data_parallel_size", counted(replicas, "replica"), reason, "set")
    return replace(machine, devices=least, aside=()), (said,)


def _share_of_cpu(machine: Machine, replicas: int) -> tuple[Machine, tuple[Decision, ...]]:
    """Engines on a CPU share its memory and cores, as `holdfast serve -dp` divides them."""
    devices = tuple(
        replace(
            device,
            free_bytes=device.free_bytes // replicas,
            budget_bytes=None if device.budget_bytes is None else device.budget_bytes // replicas,
        )
        for device in machine.devices
    )
    cores = max(1, machine.cores // replicas)
    reason = f"each with a part of memory and {counted(cores, 'core')}; what follows is of one of them"
    said = Decision("data_parallel_size", counted(replicas, "replica"), reason, "set")
    return replace(machine, devices=devices, cores=cores), (said,)


def sizes_of_nodes(
    machine: Machine, model: PlannedModel, config: PlanConfig
) -> tuple[PlanConfig, tuple[Decision, ...]]:
    """Where nothing was said of sizes: all GPUs of each node, each layer over as many of them as can be."""
    nodes, devices, most_stages = config.nnodes, len(machine.devices), len(model.spec.layers)
    said = config.tensor_parallel_size, config.pipeline_parallel_size
    if nodes == 1 or machine.kind != "gpu" or said != (None, None) or (config.data_parallel_size or 1) > 1:
        return config, ()
    able = [size for size in parallel_sizes(model.spec, devices) if nodes * (devices // size) <= most_stages]
    if not able:
        return config, ()
    size = max(able, key=lambda one: (devices // one * one, one))
    stages = nodes * (devices // size)
    reason = f"none were set: all of {nodes} nodes with {counted(devices, 'GPU')} each, and no stage is on two"
    decision = Decision("sizes", f"-tp {size} -pp {stages}", reason, "planner")
    return replace(config, tensor_parallel_size=size, pipeline_parallel_size=stages), (decision,)


def all_machines(machine: Machine, config: PlanConfig) -> tuple[Machine, tuple[Decision, ...]]:
    """The GPUs, or the memory and cores, of so many machines as the one that is described, for one model."""
    nodes, ranks = config.nnodes, ranks_of_a_replica(config)
    if nodes == 1:
        return machine, ()
    if ranks % nodes:
        size, stages = config.tensor_parallel_size or 1, config.pipeline_parallel_size or 1
        raise ConfigurationError(
            f"{counted(ranks, 'rank')} (-tp {size} x -pp {stages}) cannot be on {nodes} nodes, as many on each",
            code=WRONG_NODES,
            needed="a number of ranks that nnodes divides",
            fix=f"-pp {nodes}, with -tp for the ranks of one node",
            field="nnodes",
        )
    if machine.kind == "gpu":
        return _gpus_of_all(machine, config)
    devices = tuple(
        replace(
            device,
            total_bytes=device.total_bytes * nodes,
            free_bytes=device.free_bytes * nodes,
            budget_bytes=None if device.budget_bytes is None else device.budget_bytes * nodes,
        )
        for device in machine.devices
    )
    reason = "each as large as this one"
    said = Decision("nnodes", counted(nodes, "node"), reason, "set")
    return replace(machine, devices=devices, cores=machine.cores * nodes), (said,)


def _gpus_of_all(machine: Machine, config: PlanConfig) -> tuple[Machine, tuple[Decision, ...]]:
    """As many GPUs of each node as it has ranks; numbered through, in the order of ranks."""
    nodes, each, size = config.nnodes, ranks_of_a_replica(config) // config.nnodes, config.tensor_parallel_size or 1
    if each % size:
        raise ConfigurationError(
            f"the GPUs of a stage (-tp {size}) would not be on one node: {counted(each, 'rank')} on each of {nodes}",
            code=NOT_WITH_RANKS,
            needed="stages that lie on one node each",
            fix=f"-pp {nodes}, with -tp for the GPUs of one node; or leave --nnodes out and name the GPUs of all"
            f" machines together{_together(machine, nodes)}",
            field="tensor_parallel_size",
        )
    if len(machine.devices) < each:
        raise ConfigurationError(
            f"each of {nodes} nodes needs {counted(each, 'GPU')}",
            code=TOO_FEW_DEVICES,
            needed=counted(each, "GPU"),
            found=f"{len(machine.devices)}: {', '.join(device.name for device in machine.devices)}",
            fix=f"--gpu with x{each}, which is of each node, or smaller -tp and -pp",
            field="nnodes",
        )
    devices = tuple(
        replace(device, index=node * each + place)
        for node in range(nodes)
        for place, device in enumerate(machine.devices[:each])
    )
    said = Decision("nnodes", counted(nodes, "node"), f"each with {counted(each, 'such GPU')}", "set")
    return replace(machine, devices=devices, aside=()), (said,)


def _together(machine: Machine, nodes: int) -> str:
    """As --gpu names them."""
    kinds = {device.gpu.key for device in machine.devices if device.gpu is not None}
    return f": --gpu {min(kinds)}x{nodes * len(machine.devices)}" if len(kinds) == 1 else ""


def share_of_a_replica(traffic: Traffic | None, config: PlanConfig) -> Traffic | None:
    """Requests are dealt out evenly."""
    replicas = config.data_parallel_size or 1
    if traffic is None or replicas == 1:
        return traffic
    return replace(traffic, concurrency=-(-traffic.concurrency // replicas))
