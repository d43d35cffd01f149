"""How long ranks of one machine wait for a plan and for a sum, without a model: two processes, percentiles of each.

python benchmarks/rank_latency.py [--rounds 2000] [--sequences 8] [--hidden 4096]

plan    from the moment rank 0 has it until the other rank has it as an object: packed, copied, woken, unpacked
sum     of [1, hidden] float32 over both ranks, as often as a decoder of 32 layers needs it in a step
"""

from __future__ import annotations

import argparse
import os
import statistics
import time

import torch

from holdfast.engine.ranks import messages
from holdfast.execution.parallel.mailbox import Receiver, Sender
from holdfast.execution.parallel.segment import Segment, SegmentLayout
from holdfast.execution.parallel.shared_memory import SharedMemoryCollectives
from holdfast.records import Row, StepPlan, TableWrite

LAYOUT = SegmentLayout(2, 1 << 20)


def watch(waited_s: float) -> None:
    if waited_s > 30:
        raise SystemExit("the other process is gone")


def follow(descriptor: int, rounds: int, hidden: int) -> None:
    segment = Segment(LAYOUT, descriptor)
    receiver, collectives = Receiver(segment, 1, watch), SharedMemoryCollectives(segment, 1, watch)
    x = torch.ones(1, hidden)
    for _ in range(rounds):
        plan = messages.decode_plan(receiver.receive()[1:])
        sent_ns = plan.step_id
        took = torch.tensor([time.perf_counter_ns() - sent_ns])
        collectives.broadcast(torch.empty(1, dtype=torch.int64))
        collectives.gather(took.view(1, 1), [1, 1], None)
    for _ in range(rounds):
        collectives.all_reduce(x)


def lead(segment: Segment, rounds: int, sequences: int, hidden: int) -> tuple[list[float], list[float]]:
    sender, collectives = Sender(segment, watch), SharedMemoryCollectives(segment, 0, watch)
    rows = [Row(slot, 500 + slot, 1, True) for slot in range(sequences)]
    writes = [TableWrite(slot, 0, 31, [slot]) for slot in range(sequences // 4)]
    plans, out = list[float](), torch.empty((1, 2), dtype=torch.int64)
    for _ in range(rounds):
        time.sleep(0.001)  # As long as a step of a small model: the other rank has gone to sleep.
        plan = StepPlan(step_id=time.perf_counter_ns(), rows=rows, table_writes=writes)
        sender.send(messages.STEP + messages.encode(plan))
        collectives.broadcast(torch.zeros(1, dtype=torch.int64))
        collectives.gather(torch.zeros((1, 1), dtype=torch.int64), [1, 1], out)
        plans.append(int(out[0, 1]) / 1e3)
    sums, x = list[float](), torch.ones(1, hidden)
    for _ in range(rounds):
        began_ns = time.perf_counter_ns()
        collectives.all_reduce(x)
        sums.append((time.perf_counter_ns() - began_ns) / 1e3)
    return plans, sums


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=4096)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    segment = Segment(LAYOUT)
    child = os.fork()
    if child == 0:
        follow(segment.descriptor, asked.rounds, asked.hidden)
        os._exit(0)
    for name, found in zip(("plan", "sum"), lead(segment, asked.rounds, asked.sequences, asked.hidden), strict=True):
        parts = statistics.quantiles(found, n=100)
        print(f"{name}: p50 {parts[49]:.0f} us, p90 {parts[89]:.0f} us, p99 {parts[98]:.0f} us")
    os.waitpid(child, 0)


if __name__ == "__main__":
    main()
