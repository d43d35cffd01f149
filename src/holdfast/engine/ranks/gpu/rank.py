"""One rank on its GPU: joined with the others, weights loaded, the heaviest step run with them, graphs captured, and
what all that took. The same for the first rank and for the others; starts no process and chooses no pool.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.checkpoints import ModelFiles, open_checkpoint
from holdfast.config import EngineConfig
from holdfast.config.unsupported import NOT_WITH_RANKS
from holdfast.engine.ranks.messages import Measured
from holdfast.errors import ConfigurationError, EngineError
from holdfast.execution.batch import RunnerLimits
from holdfast.execution.device import DTYPES, KV_DTYPES
from holdfast.execution.gpu.cuda.module import DriverError
from holdfast.execution.gpu.memory.accounting import GpuHeld, GpuMemory, held_before, open_device
from holdfast.execution.gpu.runner import GpuRunner
from holdfast.execution.lora.slots import LoraLimits
from holdfast.execution.parallel.gpu.exchange import ExchangeCollectives
from holdfast.execution.parallel.gpu.lines import ExchangeLines, LineTo
from holdfast.execution.parallel.gpu.nccl import NcclCollectives, nccl_available
from holdfast.execution.parallel.gpu.node_lines import NodeLine, NodeLineIn, NodeLineOut, pinned_line
from holdfast.execution.parallel.gpu.peer_memory import PeerMemory
from holdfast.execution.parallel.gpu.row_norms import GpuRowNorms
from holdfast.execution.parallel.gpu.share import GpuRankShare
from holdfast.execution.parallel.gpu.stage import GpuStage, rank_before, rank_behind
from holdfast.execution.parallel.gpu.staged_runner import StagedGpuRunner
from holdfast.execution.parallel.gpu.together import (
    GpuCollectives,
    JoinedGpus,
    SmallAndLarge,
    against_exchange,
)
from holdfast.execution.parallel.rank_link import Meeting
from holdfast.execution.parallel.segment import Watch
from holdfast.execution.parallel.sockets.connect_ranks import connect_ranks
from holdfast.execution.parallel.sockets.gloo import Store
from holdfast.execution.parallel.sockets.spread import Spread
from holdfast.execution.weights.load import load_weights
from holdfast.footprint.gpu import exchange_memory_bytes, line_memory_bytes
from holdfast.hardware.nvidia import probe
from holdfast.models import ModelSpec
from holdfast.models.stages import rank_spec
from holdfast.planner import Plan, largest_pool

START_LIMIT_S = 600.0
"""That another rank may let this one wait while kernels are compiled and the driver loads them."""
TensorsLoaded = Callable[[int, int], None]


class OpenedGpu:
    """A rank's GPU before anything is loaded to it, and the memory that others may map."""

    def __init__(self, config: EngineConfig, plan: Plan, rank: int) -> None:
        self.rank, self._plan, self._uuids = rank, plan, [gpu.uuid for gpu in plan.engine.rank_gpus]
        self._spread = Spread(plan.engine.rank_count, max(1, len(plan.engine.stages)), config.nnodes)
        self._node = self._spread.ranks_of(self._spread.node_of(rank))
        uuid, sharing = self._uuids[rank], self._uuids.count(self._uuids[rank])
        not_ours, free_bytes = held_before(uuid), plan.device_of(rank).free_bytes * sharing
        if sharing == 1:  # Ranks of one GPU may have begun to fill it.
            free_bytes = next((gpu.free_bytes for gpu in probe().gpus if gpu.uuid == uuid), free_bytes)
        self.device = open_device(uuid)
        beside = plan.terms["context"] if plan.engine.rank_gpus[rank].engines > 1 else None
        self.memory = GpuMemory(self.device, uuid, free_bytes, not_ours, sharing, beside)
        self.context = self.memory.held()
        self.memory.watch_tensors()
        self._peers: PeerMemory | None = None
        beside_it = [self._uuids[other] for other in self._node]
        self.against = ""
        if len(beside_it) > 1:  # On a node of its own a rank maps nobody's memory.
            self.against = against_exchange(beside_it, disabled=config.disable_custom_all_reduce)
            if self.against and self._spread.nodes > 1:
                self.against = f"on node {self._spread.node_of(rank)}: {self.against}"
        if not self.against and len(beside_it) > 1:
            try:
                self._peers = PeerMemory(self._exchange_bytes() + self._lines_bytes(), self.device)
            except DriverError as error:
                self.against = f"rank {rank}: {error.message}"
        self._places: list[int] = []

    def _exchange_bytes(self) -> int:
        """Of what it shows the others of its stage; the same on all ranks."""
        return exchange_memory_bytes(self._plan.engine.slot_bytes) if self._plan.engine.shards else 0

    def _lines_bytes(self) -> int:
        """Of what it hands on to another stage on its node."""
        if not self._plan.engine.stages:
            return 0
        behind = rank_behind(self.rank, self._spread.stages, self._spread.tensor_parallel)
        return line_memory_bytes(self._line_slot(self.rank) if behind in self._node else 0)

    def _line_slot(self, rank: int) -> int:
        engine = self._plan.engine
        stages, each = len(engine.stages), max(1, len(engine.shards))
        if rank // each < stages - 1:
            return engine.stream_bytes
        return engine.answer_bytes if rank % each == 0 else 0

    @property
    def handle(self) -> bytes:
        return b"" if self._peers is None else self._peers.handle

    @property
    def exchange_bytes(self) -> int:
        return 0 if self._peers is None else self._peers.nbytes

    def open_peers(self, handles: Sequence[bytes]) -> str:
        """Why the memory of the others of this node cannot be mapped; empty: it is, or there are none."""
        self._places = [0] * len(handles)
        if self._peers is None:
            return ""
        first, last = self._node.start, self._node.stop
        try:
            self._places[first:last] = self._peers.open_peers(handles[first:last], self.rank - first)
        except DriverError as error:
            return f"rank {self.rank}: {error.message}"
        return ""

    def join(self, meeting: Meeting | None, against: str, limit_s: float, watch: Watch) -> JoinedGpus:
        """`meeting`: for NCCL, and for stages that share no memory; None: ranks share a GPU, which NCCL does not have,
        and have no stages. `against`: why no rank maps the memory of others; empty: all have. `watch`: called while
        ranks of other nodes are awaited."""
        if against and self._peers is not None:
            self._peers.close()
            self._peers = None
        if self._plan.engine.stages:
            return self._join_stages(meeting, against, watch)
        return JoinedGpus(self._join_all(None if meeting is None else meeting.store, against, limit_s), None)

    def _join_stages(self, meeting: Meeting | None, against: str, watch: Watch) -> JoinedGpus:
        engine = self._plan.engine
        count, each, memory = len(engine.stages), max(1, len(engine.shards)), self._peers
        if against and each > 1:
            raise _no_exchange(against, self._spread)
        if against:  # Stages of one rank each: what they hand on goes through RAM, as it does to other nodes.
            self._node = range(self.rank, self.rank + 1)
        collectives = None
        if each > 1:
            index, place = divmod(self.rank, each)
            peers = self._places[index * each : (index + 1) * each]
            assert memory is not None, "ranks of a stage are on one node"
            collectives = ExchangeCollectives(memory, peers, place, engine.slot_bytes, limit_s=START_LIMIT_S)
        sender, receiver = rank_before(self.rank, count, each), rank_behind(self.rank, count, each)
        with contextlib.ExitStack() as unless_joined:
            ends = {} if meeting is None else self._node_lines(meeting, sender, receiver, watch, unless_joined)
            lines = ExchangeLines(
                self.device,
                memory,
                self._places,
                self.rank,
                self._exchange_bytes(),
                None if sender is None else LineTo(sender, self._line_slot(sender), ends.get("in")),
                None if receiver is None else LineTo(receiver, self._line_slot(self.rank), ends.get("out")),
                limit_s=START_LIMIT_S,
            )
            unless_joined.pop_all()
        return JoinedGpus(collectives, GpuStage(self.rank, count, each, lines))

    def _node_lines(
        self,
        meeting: Meeting,
        sender: int | None,
        receiver: int | None,
        watch: Watch,
        unless_joined: contextlib.ExitStack,
    ) -> dict[str, NodeLine]:
        """To ranks of other nodes: `in` from the one before, `out` to the one behind. `unless_joined`: what is to be
        closed where joining fails."""
        sources = [sender] if sender is not None and sender not in self._node else []
        targets = [receiver] if receiver is not None and receiver not in self._node else []
        incoming, outgoing = connect_ranks(
            meeting.store, self.rank, sources, targets, host=meeting.host, key=meeting.key, watch=watch
        )
        for line in (*incoming.values(), *outgoing.values()):
            unless_joined.callback(line.close)
        found, device = dict[str, NodeLine](), self.device
        for rank, line in incoming.items():
            found["in"] = NodeLineIn(pinned_line(self._line_slot(rank), device), device, line, rank)
            unless_joined.callback(found["in"].close)
        for rank, line in outgoing.items():
            found["out"] = NodeLineOut(pinned_line(self._line_slot(self.rank), device), device, line, rank)
            unless_joined.callback(found["out"].close)
        return found

    def _join_all(self, store: Store | None, against: str, limit_s: float) -> GpuCollectives:
        small = None
        if self._peers is not None:
            slot_bytes = self._plan.engine.slot_bytes
            small = ExchangeCollectives(self._peers, self._places, self.rank, slot_bytes, limit_s=START_LIMIT_S)
        if store is None or (small is not None and not nccl_available()):
            if small is None:
                raise EngineError(
                    "ranks that share a GPU exchange numbers over CUDA IPC alone, which cannot be had",
                    found=against,
                    fix="give each rank a GPU of its own",
                )
            return small
        if not nccl_available():
            raise EngineError("this torch has no NCCL", found=against, fix="pip install --force-reinstall torch")
        large = NcclCollectives(store, self.rank, len(self._uuids), self.device, limit_s=limit_s)
        return large if small is None else SmallAndLarge(small, large, self._plan.engine.slot_bytes)


def _no_exchange(against: str, spread: Spread) -> ConfigurationError:
    """Of stages of several ranks. `against`: why GPUs do not map one another's memory."""
    instead = f"-tp 1 -pp {spread.size}, whose stages hand on through RAM"
    if spread.nodes == 1:
        instead += f", or -tp {spread.size} alone, which adds up by NCCL"
    return ConfigurationError(
        f"stages of {spread.tensor_parallel} GPUs each add up over CUDA IPC alone, which cannot be had",
        code=NOT_WITH_RANKS,
        needed=f"peer access among the {spread.each} GPUs of {'this machine' if spread.nodes == 1 else 'each node'}",
        found=against,
        fix=f"{instead}; or --device cpu",
        field="pipeline_parallel_size",
    )


@dataclass(slots=True)
class GpuRank:
    opened: OpenedGpu
    joined: JoinedGpus
    runner: GpuRunner
    loaded: GpuHeld
    page_bytes: int
    """Of a KV page as this rank has it."""
    against: str = ""
    """Why ranks do not map one another's memory; empty: they do."""


def load_gpu_rank(
    config: EngineConfig,
    files: ModelFiles,
    spec: ModelSpec,
    plan: Plan,
    opened: OpenedGpu,
    joined: JoinedGpus,
    progress: TensorsLoaded,
    beat: Callable[[], None] | None = None,
) -> GpuRank:
    shards, dtype, limits = plan.engine.shards, DTYPES[plan.dtype], RunnerLimits.of(plan.limits, config.lora_places)
    own, layout = rank_spec(spec, *plan.engine.part_of(opened.rank)), plan.engine.layout_of(opened.rank)
    share = None
    if joined.collectives is not None:
        tokens, norms = limits.max_num_batched_tokens, None
        if spec.decoder.query_key_norm == "whole":
            kv_heads = [shard.kv_heads for shard in shards]
            norms = GpuRowNorms(joined.collectives, spec, kv_heads, tokens, opened.device)
        vocab = [shard.vocab for shard in shards]
        share = GpuRankShare(joined.collectives, vocab, limits.max_num_seqs, tokens, dtype, opened.device, norms)
    stored = contextlib.nullcontext() if config.load_format == "dummy" else open_checkpoint(files)
    with stored as checkpoint:
        weights = load_weights(
            own,
            checkpoint,
            dtype=dtype,
            device=opened.device,
            expand=plan.engine.expand_weights,
            quantize=plan.engine.quantize,
            progress=progress,
            whole=spec,
        )
    runner = (GpuRunner if joined.stage is None else StagedGpuRunner)(
        own,
        weights,
        layout,
        limits,
        opened.device,
        kv_dtype=KV_DTYPES[plan.kv_dtype],
        graphs=not config.enforce_eager,
        lora=LoraLimits.of(config),
        beat=beat,
        share=share,
        stage=joined.stage,
        whole=spec,
    )
    opened.memory.beside_torch = lambda: runner.beside_torch_bytes + opened.exchange_bytes
    loaded = opened.memory.held()
    opened.memory.forget_loading()
    return GpuRank(opened, joined, runner, loaded, layout.page_bytes)


def profile_gpu_rank(rank: GpuRank, plan: Plan) -> Measured:
    """With all other ranks: the heaviest step, then the graphs that are needed first."""
    runner, memory, opened = rank.runner, rank.opened.memory, rank.opened
    runner.reserve_kv(largest_pool(plan, plan.device.total_bytes))
    runner.back_kv(2)
    runner.profile_run()
    profiled = memory.held()
    runner.capture()
    captured = memory.held()
    rank.joined.check()
    named = runner.weights_bytes + runner.buffers_bytes + runner.logits_bytes + runner.adapters_bytes
    terms = {
        "context": opened.context.own_bytes,
        "weights": runner.weights_bytes,
        "buffers": runner.buffers_bytes,
        "activations": max(0, memory.most_allocated() + runner.mapped_bytes - named),
        "adapters": runner.adapters_bytes,
        "logits": runner.logits_bytes,
        "graphs": max(0, captured.own_bytes - profiled.own_bytes),
        "exchange": opened.exchange_bytes,
    }
    held = captured.own_bytes - runner.kv.nbytes
    return Measured(
        terms=terms,
        nameless_bytes=max(0, held - sum(terms.values())),
        given_back_bytes=0,
        peak_bytes=rank.loaded.own_bytes,
        free_bytes=captured.free_bytes,
        own_bytes=captured.own_bytes,
        kv_bytes=runner.kv.nbytes,
    )
