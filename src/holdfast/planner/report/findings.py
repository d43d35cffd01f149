"""The fields of an answer and figures derived from them; `PlanAnswer` (answer.py) adds text and JSON."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.footprint.cpu import KV_ELEMENT_BYTES
from holdfast.observability.decisions import Decision
from holdfast.planner.advice.presets import Configuration
from holdfast.planner.advice.remedy import Remedy, too_long
from holdfast.planner.advice.rules_of_thumb import Thumb
from holdfast.planner.advice.throughput import Throughput
from holdfast.planner.advice.warnings import PlanWarning
from holdfast.planner.compat.gpu_kernels import lacks_engine
from holdfast.planner.compat.vllm_release import Vllm
from holdfast.planner.engines.command import Command
from holdfast.planner.fit.placement import Placement
from holdfast.planner.fit.search import Plan, Question, device_budget
from holdfast.planner.report.llama_layers import LlamaLayers
from holdfast.planner.report.offload import Offload
from holdfast.planner.sizing.kv_cost import kv_cost
from holdfast.units import counted


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class PlanFindings:
    fit: Plan
    safe: Configuration | None
    max: Configuration | None
    warnings: tuple[PlanWarning, ...]
    ways_out: tuple[Remedy, ...]
    rules_of_thumb: tuple[Thumb, ...]
    throughput: Throughput | None
    no_throughput: str | None
    """Why there is none."""
    commands: dict[str, Command]
    """Of the plan; where it does not fit, each of the first way out that its engine runs. Empty where there is none."""
    commands_of: str
    """plan, the kind of the best way out, or none."""
    engine: str | None
    vllm: Vllm
    as_requested: Command | None
    """Of a plan that does not fit, where vLLM was asked for: how it would size what was requested, and refuse it."""
    decisions: tuple[Decision, ...]
    best: int | None = None
    """Which of the ways out, from 0: the first that the engine runs that was asked for, or else Holdfast, or else any;
    the one that `commands_of` is about."""
    offload: Offload | None = None
    """With layers in RAM and on a disk: as was asked for by hand, or what a server does where all do not fit on the
    GPU. None: nothing is streamed, or it cannot be."""

    disk_would_do: str | None = None
    """On a CPU whose RAM does not hold the model, what a folder on a disk would come to, for people. None: one is
    named, or none would do."""

    partly: LlamaLayers | None = None
    """With --for llama.cpp, where all layers do not fit on the GPU: as many as do. None: not one does, or it fits."""

    @property
    def fits(self) -> bool:
        """On the GPU; with layers in RAM where that was asked for by hand."""
        by_hand = self.offload is not None and self.fit is self.offload.placement.plan
        held = not by_hand or self.offload is None or self.offload.runs or not self.offload.known
        return self.fit.fits and held and self.problem is None

    @property
    def runs(self) -> bool:
        """Whether Holdfast, or the engine that was asked for, serves it there: all of it on the GPU, or with layers in
        RAM."""
        if self.partly is not None and self.partly.runs and self.problem is None:
            return True
        return self.fits or (self.offload is not None and self.offload.runs and self.problem is None)

    @property
    def from_disk(self) -> str | None:
        """On a CPU, what is read from a disk for every step, for people; None: nothing is."""
        streamed = None if self.fit.own is None else self.fit.own.streamed
        if streamed is None or not streamed.file_bytes:
            return None
        return f"{len(streamed.on_disk)} of {len(self.question.model.spec.layers)} layers read from NVMe"

    @property
    def unused_disk_bytes(self) -> int | None:
        """Of a disk that was named; None: none was, or layers are read from it."""
        placed = None if self.offload is None else self.offload.placement
        reads = self.from_disk is not None or (isinstance(placed, Placement) and placed.streamed.file_bytes > 0)
        return None if reads else self.question.machine.nvme_bytes

    @property
    def refused(self) -> str | None:
        """Why the engine that was asked for, or else Holdfast, would not run what does not fit, whatever memory there
        was: its family, or the GPU. None: it would, or it fits, and `lacks` says it."""
        if self.fits:
            return None
        engine, spec = self.engine or "holdfast", self.question.model.spec
        lacking = lacks_engine(engine, [rank.device.gpu for rank in self.fit.ranks])
        if lacking is None and engine == "holdfast" and not spec.runnable:
            return f"Holdfast cannot run this model yet: it lacks {', '.join(spec.unsupported)}"
        return lacking

    @property
    def problem(self) -> str | None:
        """What stands in the way where it is not memory."""
        if not too_long(self.question):
            return None
        assert self.question.traffic is not None
        most = self.question.model.spec.max_position
        reach = counted(self.question.traffic.length, "token")
        return f"requests reach {reach}, but the model's context length is {most:,}"

    @property
    def lacks(self) -> tuple[str, ...]:
        """Why the engine that was asked for, or else Holdfast, does not run what fits; empty: it does."""
        command = self.commands.get(self.engine or "holdfast")
        return command.lacks if command is not None and self.fits else ()

    @property
    def kv_bytes_per_token(self) -> int:
        """Of the model, once: copies on several ranks are not counted."""
        return self.question.model.spec.kv_bytes_per_token(KV_ELEMENT_BYTES[self.fit.kv_dtype])

    @property
    def kv_bytes_fixed_per_sequence(self) -> int:
        """What full windows and recurrent states hold of a sequence; of the model, once."""
        element, state = KV_ELEMENT_BYTES[self.fit.kv_dtype], KV_ELEMENT_BYTES[self.fit.dtype]
        whole = kv_cost(self.question.model.spec, element_bytes=element, state_bytes=state)
        return whole.window_bytes + whole.fixed_bytes

    @property
    def question(self) -> Question:
        return self.fit.question

    @property
    def max_model_len(self) -> int:
        """What would be served; where that was asked for and does not fit, the longest that does."""
        return min(self.fit.limits.max_model_len, self.fit.longest_tokens)

    @property
    def concurrency(self) -> float:
        """Sequences of that length side by side."""
        return self.fit.concurrency(self.max_model_len) if self.max_model_len else 0.0

    @property
    def concurrency_at_traffic(self) -> float | None:
        traffic = self.question.traffic
        return None if traffic is None or too_long(self.question) else self.fit.concurrency(max(1, traffic.length))

    @property
    def replicas(self) -> int:
        """Servers like this one that the machine holds side by side; 0: not one."""
        if not self.fits:
            return 0
        least = min(rank.budget_bytes for rank in self.fit.ranks)
        devices = self.question.machine.devices
        large = sum(device_budget(device, self.fit.utilization) >= least for device in devices)
        return large // len(self.fit.ranks)
