"""When a runner's decode steps are graphs, where weights may come to stay on the GPU and leave it: while all stay, and
the arbiter of the memory has room for graphs. They go before weights do. Captures nothing itself.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager

import torch

from holdfast.execution.gpu.graphs.decode_graphs import DecodeGraphs
from holdfast.execution.gpu.graphs.graphs_room import GraphsRoom
from holdfast.execution.gpu.memory.movable_weights import MovableWeights
from holdfast.execution.gpu.memory.oom import give_back_cached
from holdfast.execution.weights.decoder_weights import Weights
from holdfast.held_interrupts import interrupts_put_off


class KeptGraphs(MovableWeights):
    device: torch.device

    def __init__(self, weights: Weights) -> None:
        super().__init__(weights)
        self._graphs: DecodeGraphs | None = None
        """None: no step is ever captured."""
        self._graphs_room: GraphsRoom | None = None
        """Of a decoder whose layers may leave, which are larger: what graphs may take."""

    @abstractmethod
    def _here(self) -> AbstractContextManager[None]: ...

    @property
    def may_capture(self) -> bool:
        """Whether there can be graphs at all: streamed layers are waited for one by one, and launching takes less time
        than they take to come, but those that can come to stay may all do so. Rows of an embedding on a disk are read
        by the host, for every step."""
        streamed = self.decoder.streamed
        return streamed is None or (streamed.movable and streamed.embedding_rows is None)

    @property
    def captures(self) -> bool:
        """Whether there are graphs of some steps, now or later."""
        return self._graphs is not None

    @property
    def graphs_now(self) -> DecodeGraphs | None:
        """For the next step; None: it is launched kernel by kernel."""
        streamed, hosts = self.decoder.streamed, self.decoder.host_mlps
        if streamed is None:
            return self._graphs
        # Those that came last are copied by a step that is launched. A thread that still copies MLPs for the host waits
        # for the device when it is done, which no capture allows.
        waits = streamed.comes or (hosts is not None and not hosts.decided)
        room = self._graphs_room is not None and self._graphs_room.nbytes > 0
        return self._graphs if room and not waits else None

    def limit_graphs(self, room: GraphsRoom) -> None:
        """Of a model whose layers may leave: what graphs may take while all stay."""
        self._graphs_room = room
        if self._graphs is not None:
            self._graphs.room = room

    @interrupts_put_off()
    def close_graphs(self) -> None:
        """Before a layer leaves, of a model whose layers may: the memory of what was captured goes back."""
        graphs, room = self._graphs, self._graphs_room
        # One that could not be captured is no graph, but what it took is there.
        if graphs is None or room is None or not room.any_measured:
            return
        with self._here(), room.closed():
            self._forget_graphs(graphs)
            if self.device.type == "cuda":
                # Of the stream of captures, and of others: torch does not tell them apart.
                torch._C._cuda_clearCublasWorkspaces()
            give_back_cached(self.device)

    def _close_too_large_graphs(self) -> None:
        """After a step that may have captured one: now its size is known."""
        if self._graphs_room is not None and self._graphs_room.exceeded:
            self.close_graphs()

    def change_experts(self, count: int) -> None:
        """So many experts of all layers stay on the GPU from the next step on. Graphs have addresses of those that
        stayed so far: they are captured anew when they are needed."""
        assert self.movable_experts is not None
        with self._here():
            if self._graphs is not None:
                self._forget_graphs(self._graphs)
            self.movable_experts.change(count)
            give_back_cached(self.device)

    def _forget_graphs(self, graphs: DecodeGraphs) -> None:
        if self.device.type == "cuda":  # A step that nobody has read may still be computed.
            torch.cuda.synchronize(self.device)
        graphs.close()
