"""Processes that share one GPU and exchange numbers over CUDA IPC: started, given one another's memory, and asked to
run a function of this file each. What they print, and how they end, is in what a failure says."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

START_S, ANSWER_S = 120.0, 120.0
SLOT_BYTES = 64 << 10
POISON = float("nan")
KINDS = (torch.float32, torch.float16, torch.bfloat16)
ROUNDING = {torch.float32: 2.0**-23, torch.float16: 2.0**-10, torch.bfloat16: 2.0**-7}
"""Twice the largest relative error of one rounding."""


class ExchangeProcesses:
    """`size` ranks on GPU 0. `together(function, ...)` runs it as function(collectives, rank, size, ...) in each.
    `staged`: two stages of one rank each, and what they have are lines."""

    def __init__(self, folder: Path, size: int = 2, *, limit_s: float = 60.0, staged: bool = False) -> None:
        context = multiprocessing.get_context("spawn")
        self._logs = [folder / f"rank-{size}-{rank}.log" for rank in range(size)]
        self._connections, self._processes = list[Connection](), list[Any]()
        for rank, log in enumerate(self._logs):
            ours, theirs = context.Pipe()
            process = context.Process(target=_main, args=(rank, size, theirs, str(log), limit_s, staged), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        handles = self._answers("the handle of its memory", START_S)
        self._tell(handles)
        self._answers("that it has mapped the others", START_S)

    def together(self, function: Callable[..., Any], *arguments: Any, timeout_s: float = ANSWER_S) -> list[Any]:
        self._tell((function.__name__, arguments))
        return self._answers(function.__name__, timeout_s)

    def _tell(self, message: Any) -> None:
        for connection in self._connections:
            connection.send(message)

    def _answers(self, what: str, timeout_s: float) -> list[Any]:
        deadline, found, problems = time.monotonic() + timeout_s, list[Any](), list[str]()
        for rank, connection in enumerate(self._connections):
            try:
                if not connection.poll(max(0.0, deadline - time.monotonic())):
                    problems.append(f"rank {rank} has not answered {what} within {timeout_s:g} s")
                    continue
                kind, value = connection.recv()
            except (EOFError, OSError) as error:
                problems.append(f"rank {rank} has ended ({error!r}), exit code {self._processes[rank].exitcode}")
                continue
            found.append(value)
            if kind == "failed":
                problems.append(f"rank {rank} failed in {what}:\n{value}")
        if problems:
            logs = "\n".join(f"--- log of rank {rank}:\n{log.read_text()}" for rank, log in enumerate(self._logs))
            raise AssertionError("\n".join(problems) + "\n" + logs)
        return found

    def close(self) -> None:
        for connection in self._connections:
            with contextlib.suppress(OSError):
                connection.send(None)
        for process in self._processes:
            process.join(10)
            if process.is_alive():
                process.kill()
                process.join()


def _main(rank: int, size: int, connection: Connection, log: str, limit_s: float, staged: bool) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.stdout = sys.stderr = os.fdopen(2, "w", buffering=1)
    faulthandler.enable()
    faulthandler.dump_traceback_later(START_S + ANSWER_S, repeat=True)
    from holdfast.execution.parallel.gpu.exchange import ExchangeCollectives
    from holdfast.execution.parallel.gpu.lines import ExchangeLines, LineTo
    from holdfast.execution.parallel.gpu.peer_memory import PeerMemory
    from holdfast.footprint.gpu import exchange_memory_bytes, line_memory_bytes

    try:
        device = torch.device("cuda", 0)
        torch.cuda.set_device(device)
        offset = exchange_memory_bytes(SLOT_BYTES)
        memory = PeerMemory(offset + (line_memory_bytes(LINE_SLOT_BYTES) if staged else 0), device)
        connection.send(("done", memory.handle))
        places = memory.open_peers(connection.recv(), rank)
        print(f"rank {rank}: memory at {[hex(place) for place in places]}")
        collectives: Any
        if staged:
            other = LineTo(1 - rank, LINE_SLOT_BYTES)
            collectives = ExchangeLines(device, memory, places, rank, offset, other, other, limit_s=limit_s)
        else:
            collectives = ExchangeCollectives(memory, places, rank, SLOT_BYTES, limit_s=limit_s)
        connection.send(("done", None))
    except BaseException:
        connection.send(("failed", traceback.format_exc()))
        return
    while (asked := connection.recv()) is not None:
        name, arguments = asked
        try:
            connection.send(("done", globals()[name](collectives, rank, size, *arguments)))
        except BaseException:
            connection.send(("failed", traceback.format_exc()))
            return
    torch.cuda.synchronize()
    collectives.close()


def numbers(rank: int, count: int, kind: torch.dtype, seed: int = 0) -> torch.Tensor:
    """What a rank has, known to all."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + 7919 * count + rank)
    return torch.randn(count, generator=generator, dtype=torch.float64).to(kind)


def exact_sum(size: int, count: int, kind: torch.dtype, seed: int = 0) -> torch.Tensor:
    return sum((numbers(rank, count, kind, seed).double() for rank in range(size)), torch.zeros(count).double())


def _guarded(content: torch.Tensor, offset: int) -> tuple[torch.Tensor, torch.Tensor]:
    """On the GPU with poison around it, and itself."""
    around = torch.full((offset + len(content) + 64,), POISON, dtype=content.dtype, device="cuda")
    inside = around[offset : offset + len(content)]
    inside.copy_(content)
    return around, inside


def _require_guard(around: torch.Tensor, offset: int, count: int, what: str) -> None:
    outside = torch.cat([around[:offset], around[offset + count :]])
    assert bool(outside.isnan().all()), f"{what}: something was written beside it"


def sums(collectives: Any, rank: int, size: int, count: int, offset: int) -> list[str]:
    """Every kind of number, one shot and two, alone and onto something; returns the bits, the same on all ranks."""
    bits = list[str]()
    for kind in KINDS:
        exact = exact_sum(size, count, kind)
        magnitude = sum(numbers(one, count, kind).double().abs() for one in range(size))
        for two_shot in (False, True, None):
            what = f"{kind} x {count} at {offset}, two_shot={two_shot}"
            around, x = _guarded(numbers(rank, count, kind), offset)
            collectives.all_reduce(x, two_shot=two_shot)
            torch.cuda.synchronize()
            collectives.check()
            _require_guard(around, offset, count, what)
            error = (x.cpu().double() - exact).abs() - ROUNDING[kind] * exact.abs() - 1e-6 * magnitude
            worst = int(error.argmax())
            assert float(error.max()) <= 0, (
                f"{what}: {float(x[worst])} at {worst} of {count} and not {float(exact[worst])};"
                f" {int((error > 0).sum())} are wrong, the first at {int((error > 0).nonzero()[0])}"
            )
            bits.append(x.cpu().view(torch.uint8).numpy().tobytes().hex()[:256])
            base = numbers(99, count, kind)
            around, onto = _guarded(base, offset)
            _, x = _guarded(numbers(rank, count, kind), offset)
            collectives.add_reduced(x, onto, two_shot=two_shot)
            torch.cuda.synchronize()
            collectives.check()
            _require_guard(around, offset, count, f"{what} onto")
            wanted = exact + base.double()
            error = (onto.cpu().double() - wanted).abs()
            allowed = ROUNDING[kind] * (wanted.abs() + exact.abs()) + 2e-6 * (magnitude + base.double().abs())
            assert bool((error <= allowed).all()), f"{what} onto: off by {float((error - allowed).max())} too much"
            bits.append(onto.cpu().view(torch.uint8).numpy().tobytes().hex()[:256])
    return bits


def gathers(collectives: Any, rank: int, size: int, rows: int, widths: tuple[int, ...]) -> None:
    for kind in (*KINDS, torch.int32):
        parts = [(100 * numbers(one, rows * width, torch.float32)).to(kind) for one, width in enumerate(widths)]
        part = parts[rank].view(rows, widths[rank]).cuda()
        out = torch.full((rows, sum(widths)), -7, dtype=kind, device="cuda") if rank == 0 else None
        collectives.gather(part, list(widths), out)
        torch.cuda.synchronize()
        collectives.check()
        if out is not None:
            wanted = torch.cat([one.view(rows, width) for one, width in zip(parts, widths, strict=True)], 1)
            wrong = (out.cpu() != wanted).nonzero()
            assert not len(wrong), f"{kind} {rows} x {widths}: {len(wrong)} are wrong, the first at {wrong[0].tolist()}"


def broadcasts(collectives: Any, rank: int, size: int, count: int) -> None:
    for kind in (torch.int32, torch.int64, torch.bfloat16, torch.uint8):
        told = torch.arange(count).remainder(251).to(kind)
        x = (told if rank == 0 else torch.full_like(told, 99)).cuda()
        collectives.broadcast(x)
        torch.cuda.synchronize()
        collectives.check()
        assert torch.equal(x.cpu(), told), f"{kind} x {count}: {x.cpu()[:8].tolist()}"


def rounded_parts(collectives: Any, rank: int, size: int, rows: int, each: int) -> None:
    """Products of one rank's columns whose inputs are rounded by rows: codes and scales are those of the whole row, to
    the bit, in a graph with other inputs too, and products add up to the whole's."""
    from dataclasses import replace

    from holdfast.execution.gpu.layers.linear import DividedGpuLinear, Scratch, gpu_linear
    from holdfast.execution.layers.linear import DividedLinear, QuantizedLinear
    from holdfast.execution.parallel.gpu.share import GpuRankShare
    from holdfast.execution.triton_kernels.rounded.rounding import round_rows
    from holdfast.execution.weights.scaled_matrix import ScaledMatrix
    from holdfast.footprint.scaled_layouts import ScaledLayout

    device, kind, outputs, columns = torch.device("cuda", 0), torch.bfloat16, 128, each * size
    layout, own = ScaledLayout(codes="fp8", inputs="fp8"), slice(rank * each, (rank + 1) * each)
    whole = ScaledMatrix(layout, outputs, columns, device)
    weight = (100 * numbers(50, outputs * columns, torch.float32)).clamp(-448, 448).view(outputs, columns)
    whole.codes.copy_(weight.to(torch.float8_e4m3fn))
    whole.scales.fill_(0.001)
    divided = replace(layout, static_inputs=True, divided_inputs=True)
    part = ScaledMatrix(divided, outputs, each, device)
    part.codes.view(torch.uint8).copy_(whole.codes.view(torch.uint8)[:, own])
    part.scales.copy_(whole.scales)
    share = GpuRankShare(collectives, [(8 * one, 8 * one + 8) for one in range(size)], 4, rows, kind, device)
    scratch = Scratch(kind, device, rows, largest=share.largest_of_parts)
    linear = gpu_linear(DividedLinear(QuantizedLinear(part, kind), divided, None), scratch)
    assert isinstance(linear, DividedGpuLinear)
    alone, found = gpu_linear(QuantizedLinear(whole, kind), Scratch(kind, device, rows)), dict[str, torch.Tensor]()
    inputs, out = (
        torch.empty((rows, each), dtype=kind, device=device),
        torch.empty((rows, outputs), dtype=kind, device=device),
    )

    def give(seed: int) -> torch.Tensor:
        """The largest of each row is another rank's from row to row."""
        x = numbers(60, rows * columns, kind, seed).view(rows, columns).cuda()
        x[torch.arange(rows), torch.arange(rows) * each % columns] = 9.0 + seed
        inputs.copy_(x[:, own])
        return x

    def step() -> None:
        linear.write(inputs, out)
        found["codes"], found["scales"] = scratch.rounded.inputs(rows, each, torch.float8_e4m3fn, grouped=False)
        collectives.all_reduce(out)

    def require(x: torch.Tensor, what: str) -> None:
        torch.cuda.synchronize()
        collectives.check()
        codes = torch.empty((rows, columns), dtype=torch.float8_e4m3fn, device=device)
        scales, wanted = torch.empty((rows, 1), device=device), torch.empty_like(out)
        round_rows(x, codes, scales)
        alone.write(x, wanted)
        assert torch.equal(found["scales"], scales), f"{what}: scales"
        assert torch.equal(found["codes"].view(torch.uint8), codes.view(torch.uint8)[:, own]), f"{what}: codes"
        error = (out.double() - wanted.double()).norm(dim=1) / wanted.double().norm(dim=1)
        assert bool((error < 0.01).all()), f"{what}: off by {float(error.max())}"

    x = give(0)
    step()
    require(x, f"{rows} rows")
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        step()
        graph.capture_end()
    torch.cuda.synchronize()
    for seed in (1, 2):
        x = give(seed)
        graph.replay()
        require(x, f"{rows} rows, replayed {seed} times")


LINE_SLOT_BYTES = 1 << 20


def lines(collectives: Any, rank: int, size: int, times: int) -> float:
    """Two stages: what the first hands on comes to the second, whose answer comes back, in their order and to the bit;
    two are handed on before the first answer is taken. All of it in a graph too, which goes on counting. Returns
    seconds."""
    kinds, counts = (torch.float32, torch.bfloat16, torch.float16), (1, 7, 1003, 250_000)
    sent = dict[tuple[int, int], torch.Tensor]()
    for seed, kind in enumerate(kinds):
        for count in counts:
            for turn in range(3):
                sent[seed, 3 * count + turn] = numbers(0, count, kind, 100 * seed + turn).cuda()
    for (seed, key), told in sent.items():
        count = len(told)
        around, inside = _guarded(torch.zeros(count, dtype=told.dtype), 0)
        if rank == 0:
            collectives.put(told)
            collectives.put(told * 2)
            for times_two in (2, 4):
                collectives.take(inside)
                torch.cuda.synchronize()
                collectives.check()
                assert torch.equal(inside, told * times_two), f"{kinds[seed]} x {count}, turn {key % 3}"
        else:
            for _ in range(2):
                collectives.take(inside)
                collectives.put(inside * 2)
            torch.cuda.synchronize()
            collectives.check()
        _require_guard(around, 0, count, f"{kinds[seed]} x {count}")
    turn, x = torch.zeros(1, device="cuda"), torch.zeros(5000, device="cuda")
    total = torch.zeros(5000, dtype=torch.float64, device="cuda")

    def step() -> None:
        turn.add_(1)
        if rank == 0:
            x.copy_(turn.expand(5000))
            collectives.put(x)
        else:
            collectives.take(x)
            x.mul_(3)
            collectives.put(x)

    def answer() -> None:
        if rank == 0:
            collectives.take(x)
            total.add_(x)

    step()
    answer()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        step()
        graph.capture_end()
    torch.cuda.synchronize()
    began_s = time.monotonic()
    graph.replay()
    for _ in range(times - 1):  # The next is handed on before the answer of the one before is taken.
        graph.replay()
        answer()
    answer()
    torch.cuda.synchronize()
    took_s = time.monotonic() - began_s
    collectives.check()
    turns = (times + 1) * (times + 2) // 2
    assert float(turn) == times + 1
    if rank == 0:
        assert total.eq(3 * turns).all(), f"{total[:4].tolist()} and not {3 * turns}"
    return took_s


def unanswered(collectives: Any, rank: int, size: int, limit_s: float) -> tuple[str, float]:
    """Rank 1 hands nothing on: what rank 0 says, and after how long."""
    if rank:
        time.sleep(limit_s + 1.0)
        return "", 0.0
    collectives.limit(limit_s)
    x, began_s = torch.ones(5000, device="cuda"), time.monotonic()
    collectives.take(x)
    torch.cuda.synchronize()
    took_s = time.monotonic() - began_s
    try:
        collectives.check()
    except Exception as error:
        return f"{type(error).__name__}: {error}", took_s
    return "nothing", took_s


def replays(collectives: Any, rank: int, size: int, times: int) -> float:
    """A graph with every kind of exchange, which goes on counting from replay to replay. Returns seconds."""
    count, widths = 1000, [5 + rank for rank in range(size)]
    turn = torch.zeros(1, device="cuda")
    x, y = torch.zeros(count, device="cuda"), torch.zeros(count, device="cuda", dtype=torch.bfloat16)
    total, wide = torch.zeros(count, dtype=torch.float64, device="cuda"), torch.zeros(count, device="cuda")
    part = torch.zeros((3, widths[rank]), device="cuda")
    out = torch.zeros((3, sum(widths)), device="cuda") if rank == 0 else None
    gathered = torch.zeros(1, dtype=torch.float64, device="cuda")
    token, tokens = torch.zeros(3, dtype=torch.int32, device="cuda"), torch.zeros(3, dtype=torch.int64, device="cuda")

    def step() -> None:
        turn.add_(1)
        x.copy_(turn.expand(count) * (rank + 1))
        collectives.all_reduce(x, two_shot=False)
        total.add_(x)
        y.fill_(rank + 1)
        collectives.all_reduce(y, two_shot=True)
        wide.add_(y)
        part.copy_(turn.expand_as(part) + rank)
        collectives.gather(part, widths, out)
        if out is not None:
            gathered.add_(out.sum())
        token.copy_(turn.expand(3) + (0 if rank == 0 else 1000))
        collectives.broadcast(token)
        tokens.add_(token)

    step()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        step()
        graph.capture_end()
    torch.cuda.synchronize()
    began_s = time.monotonic()
    for _ in range(times - 1):
        graph.replay()
    torch.cuda.synchronize()
    took_s = time.monotonic() - began_s
    collectives.check()
    turns, ones = times * (times + 1) // 2, size * (size + 1) // 2
    assert float(turn) == times, f"{float(turn)} steps and not {times}"
    assert total.eq(turns * ones).all(), f"one shot: {total[:4].tolist()} and not {turns * ones}"
    assert wide.eq(times * ones).all(), f"two shots: {wide[:4].tolist()} and not {times * ones}"
    assert tokens.eq(turns).all(), f"broadcast: {tokens.tolist()} and not {turns}"
    if out is not None:
        wanted = 3 * sum(width * (turns + one * times) for one, width in enumerate(widths))
        assert float(gathered) == wanted, f"gather: {float(gathered)} and not {wanted}"
    return took_s


def lonely(collectives: Any, rank: int, size: int, limit_s: float) -> tuple[str, float]:
    """Only rank 0 comes: what it says, and after how long."""
    if rank:
        time.sleep(limit_s + 1.0)
        return "", 0.0
    collectives.limit(limit_s)
    x, began_s = torch.ones(5000, device="cuda"), time.monotonic()
    collectives.all_reduce(x)
    collectives.all_reduce(x, two_shot=True)
    torch.cuda.synchronize()
    took_s = time.monotonic() - began_s
    try:
        collectives.check()
    except Exception as error:
        return f"{type(error).__name__}: {error}", took_s
    return "nothing", took_s


def given_up(collectives: Any, rank: int, size: int) -> tuple[str, float]:
    """Rank 0 waits for one that never comes, until another thread of it gives up."""
    import threading

    if rank:
        return "", 0.0
    timer = threading.Timer(0.5, collectives.give_up)
    x, began_s = torch.ones(5000, device="cuda"), time.monotonic()
    collectives.all_reduce(x)
    timer.start()
    torch.cuda.synchronize()
    took_s = time.monotonic() - began_s
    try:
        collectives.check()
    except Exception as error:
        return f"{type(error).__name__}: {error}", took_s
    return "nothing", took_s


def nccl_alone(log: str) -> None:
    """A group of one rank, which is what NCCL has on one GPU: every call, and all of them in a graph."""
    from holdfast.execution.parallel.gpu.nccl import NcclCollectives
    from holdfast.execution.parallel.sockets.gloo import open_store

    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    device = torch.device("cuda", 0)
    torch.cuda.set_device(device)
    collectives = NcclCollectives(open_store(None, 1), 0, 1, device, limit_s=60.0)
    x, onto, out = torch.ones(100, device=device), torch.ones(100, device=device), torch.zeros((4, 25), device=device)

    def step() -> None:
        collectives.all_reduce(x)
        collectives.add_reduced(x, onto)
        collectives.gather(x.view(4, 25), [25], out)
        collectives.broadcast(x)

    step()
    torch.cuda.synchronize()
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.cuda.stream(side):
        graph.capture_begin(capture_error_mode="thread_local")
        step()
        graph.capture_end()
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    assert onto.eq(12).all(), onto
    assert out.eq(1).all(), out
    collectives.close()
