"""The agent of a node as an actor of Ray: it joins the head and starts the ranks of its node as its children, which end
with it. Ray may start it again at any time, on another machine too.
"""

from __future__ import annotations

import os
import platform
import sys

import holdfast
from holdfast.config import EngineConfig
from holdfast.errors import HoldfastError
from holdfast.hardware import processor


class NodeActor:
    def hello(self) -> dict[str, str]:
        """That it can be started at all, and by what."""
        import ray

        name = f"{platform.node()[:255]} ({ray.util.get_node_ip_address()})"
        return {"version": holdfast.__version__, "name": name, "python": sys.executable}

    def run(self, settings: dict[str, object], environment: dict[str, str], cpus: int | None) -> bytes:
        """Until the head says that it is over (nothing), or cannot have this node (why). `cpus`: that Ray has reserved
        here; None: none were asked for."""
        import ray

        from holdfast.engine.process.protocol import pack_failure
        from holdfast.engine.ranks.ray_cluster.messages import NotPlaced, encode
        from holdfast.observability.line_format import log_as

        os.environ.update(environment)
        os.environ.pop("OMP_NUM_THREADS", None)  # Ray's, for its own workers; ranks are told their threads.
        cores = processor().cores
        address = ray.util.get_node_ip_address()
        settings = settings | {"node_addr": address, "threads": cores if cpus is None else min(cpus, cores)}
        config = EngineConfig(**settings)  # type: ignore[arg-type]
        log_as(f"node {config.node_rank}")
        try:
            _follow(config)
        except HoldfastError as error:
            return encode(NotPlaced(pack_failure(error)))
        return b""


class GpuHolder:
    """Of the server's own node: has the GPUs of its bundle, so that Ray says which they are and gives them to nobody
    else."""

    def gpus(self) -> list[str]:
        import ray

        return [str(one) for one in ray.get_gpu_ids()]


def _follow(config: EngineConfig) -> None:
    from holdfast.engine.ranks.nodes.agent import NodeAgent
    from holdfast.engine.ranks.nodes.join import head_hears_failure
    from holdfast.engine.startup.build import find_model

    with head_hears_failure(config):
        model = find_model(config, progress=False, text=False)
    NodeAgent(config, model.files).run()
