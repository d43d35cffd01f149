"""A rank that is not the first, on a GPU: launches the same steps as rank 0, which waits for it on the device alone."""

from __future__ import annotations

from holdfast.config import EngineConfig
from holdfast.engine.process.fault_injection import lack_memory
from holdfast.engine.ranks import messages
from holdfast.engine.ranks.following import RAM, VRAM, AskedPlaces, Follower
from holdfast.engine.ranks.gpu.rank import START_LIMIT_S, OpenedGpu, load_gpu_rank, profile_gpu_rank
from holdfast.engine.ranks.together import scales_found
from holdfast.engine.startup.build import find_model
from holdfast.errors import EngineDiedError
from holdfast.execution.gpu.memory.oom import is_shortage
from holdfast.execution.memory import is_host_shortage
from holdfast.execution.parallel.gpu.staged_runner import StagedGpuRunner
from holdfast.execution.parallel.rank_link import Meeting
from holdfast.execution.parallel.sockets.gloo import open_store
from holdfast.records import StepPlan


class GpuFollower(Follower):
    def _load(self, start: messages.StartRank) -> None:
        config = EngineConfig(**start.config)  # type: ignore[arg-type]
        self._config = config
        self._ready, self._asked = False, AskedPlaces()
        opened = OpenedGpu(config, start.plan, start.rank)
        self._say(messages.RankOpened(opened.handle, opened.against))
        told = messages.decode_join(self._answers.recv_bytes())
        against = told.against or opened.open_peers(told.handles)
        self._say(messages.RankJoined(against))
        told = messages.decode_join(self._answers.recv_bytes())
        meeting = None
        if start.store_port is not None:
            meeting = Meeting(open_store(start.store_port, start.size, start.store_host), start.host, start.key)
        joined = opened.join(meeting, told.against, START_LIMIT_S, self._look)
        model = find_model(config, progress=False, text=False)
        self._files = model.files
        self._member = load_gpu_rank(config, model.files, model.spec, start.plan, opened, joined, self._say_loading)
        self._say(messages.RankLoaded(self._member.runner.weights_bytes))
        self._ready = True

    def _execute(self, plan: StepPlan) -> None:
        self._member.runner.check()
        self._asked.note(plan)
        lack_memory(on_gpu=True)
        for arrival in self._member.runner.submit(plan).adapters:
            self._say(messages.AdapterSettled(self._asked.pop(arrival.place), arrival))

    def _lacked(self, error: Exception) -> str:
        if is_host_shortage(error):
            return RAM
        return VRAM if is_shortage(error) else ""

    def _note_sampled(self, sampled: messages.Sampled) -> None:
        """Ranks of the first stage alone look embeddings up."""
        runner = self._member.runner
        assert isinstance(runner, StagedGpuRunner), "without stages tokens are told on the device"
        if runner.stage.is_first:
            runner.note_sampled(sampled.slots, sampled.tokens)

    def _follow(self, order: messages.Order) -> bool:
        runner = self._member.runner
        if isinstance(order, messages.Leave):
            return False
        if isinstance(order, messages.ProfileStep):
            self._say(profile_gpu_rank(self._member, self._plan))
            return True
        if isinstance(order, messages.FindScales):
            self._say(scales_found(self._config, self._files, runner))
            return True
        if isinstance(order, messages.BackKV):
            runner.back_kv(order.blocks)
        elif isinstance(order, messages.ResizePool):
            lack_memory(on_gpu=True)
            runner.resize_kv(order.blocks)
        elif isinstance(order, messages.Serve):
            self._member.joined.limit(order.limit_s)
        self._say(messages.Done())
        return True

    def _rejoin(self) -> None:
        raise EngineDiedError("rank 0 has left a step in the middle, or another rank has ended")

    def _look(self, waited_s: float) -> None:
        super()._look(waited_s)
        if self._ready and waited_s:  # A failed kernel, or a rank that did not come, is told before the next step.
            self._member.runner.check()
