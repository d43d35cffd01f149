"""A rank that is not the first: loads its share of the model, then follows the plans and orders of rank 0.

Decides nothing and answers little: what it computes goes into sums that all ranks have. Ends when it is told to, when
it fails (and says why), or with rank 0.
"""

from __future__ import annotations

import logging
import traceback
from multiprocessing.connection import Connection

import numpy

from holdfast.config import EngineConfig
from holdfast.engine.process.fault_injection import lack_memory
from holdfast.engine.process.protocol import pack_failure
from holdfast.engine.ranks import messages
from holdfast.engine.ranks.cpu import LoadedRank, load_rank, measured
from holdfast.engine.ranks.following import RAM, AskedPlaces, Follower
from holdfast.engine.ranks.together import scales_found
from holdfast.engine.startup.build import find_model
from holdfast.errors import HoldfastError
from holdfast.execution.memory import is_host_shortage
from holdfast.execution.parallel.rank_link import Meeting, RankLink
from holdfast.execution.parallel.sockets.gloo import open_store
from holdfast.observability.line_format import log_as
from holdfast.observability.nonblocking_output import unblock_output
from holdfast.records import StepPlan


def run(segment: int, connection: int) -> int:
    unblock_output()
    answers = Connection(connection)
    start = messages.decode_start(answers.recv_bytes())
    log_as(f"rank {start.rank}", logging.WARNING)
    try:
        _follower(start)(start, segment, answers).run()
    except Exception as error:
        if not isinstance(error, HoldfastError):
            traceback.print_exc()
        answers.send_bytes(messages.encode(messages.RankFailed(pack_failure(error))))
        return 1
    return 0


def _follower(start: messages.StartRank) -> type[Follower]:
    if not start.plan.engine.rank_gpus:
        return CpuFollower
    from holdfast.engine.ranks.gpu.follower import GpuFollower  # Ranks of a CPU need nothing of what it imports.

    return GpuFollower


class CpuFollower(Follower):
    def _load(self, start: messages.StartRank) -> None:
        config = EngineConfig(**start.config)  # type: ignore[arg-type]
        self._link = RankLink(self._segment, start.rank, self._look, config.nnodes)
        if start.store_port is not None:
            self._say(messages.RankHere())
            store = open_store(start.store_port, start.size, start.store_host)
            self._link.meet(Meeting(store, start.host, start.key), all_by_gloo=config.disable_custom_all_reduce)
        stage = self._link.stage
        model = find_model(config, progress=False, text=False)
        self._config, self._files, self._asked = config, model.files, AskedPlaces()
        self._member: LoadedRank = load_rank(
            config,
            model.files,
            model.spec,
            start.plan,
            self._say_loading,
            threads=start.threads,
            beat=None if stage is None else stage.note_alive,
            rank=start.rank,
            collectives=self._link.collectives,
            stage=stage,
        )
        self._say(messages.RankLoaded(self._member.runner.weights_bytes))

    def _lacked(self, error: Exception) -> str:
        return RAM if is_host_shortage(error) else ""

    def _execute(self, plan: StepPlan) -> None:
        lack_memory(on_gpu=False)
        self._asked.note(plan)
        for arrival in self._member.runner.execute(plan).adapters:
            self._say(messages.AdapterSettled(self._asked.pop(arrival.place), arrival))

    def _note_sampled(self, sampled: messages.Sampled) -> None:
        """Other stages are told with each plan as much as they need to know of it."""
        if self._link.stage is not None and self._link.stage.is_first:
            self._member.runner.note_sampled(numpy.array(sampled.slots), numpy.array(sampled.tokens))

    def _follow(self, order: messages.Order) -> bool:
        runner = self._member.runner
        if isinstance(order, messages.Leave):
            return False
        if isinstance(order, messages.ProfileStep):
            self._say(measured(self._member, runner.profile_run()))
            return True
        if isinstance(order, messages.FindScales):
            self._say(scales_found(self._config, self._files, runner))
            return True
        if isinstance(order, messages.BackKV):
            runner.back_kv(order.blocks, order.most_blocks)
        elif isinstance(order, messages.ResizePool):
            lack_memory(on_gpu=False)
            runner.resize_kv(order.blocks)
        self._say(messages.Done())
        return True

    def _rejoin(self) -> None:
        self._segment.calm = self._segment.alarm.value
        self._receiver.skip_to(self._segment.mail.value)
        self._link.go_on_from(self._segment.resume.value)
