"""Admission, batching, chunking, preemption. Pure: no torch, no clock, no I/O."""

from holdfast.scheduler.limits import Policy, SchedulerLimits
from holdfast.scheduler.scheduler import Scheduler
from holdfast.scheduler.sequence import Sequence, Status

__all__ = ["Policy", "Scheduler", "SchedulerLimits", "Sequence", "Status"]
