"""Tensors on their way to a GPU: whatever order they are asked for in, their bytes; what fails is said; and a whole
model loaded so is the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_files import Format, awq, fp8, write_quantized
from simulated_copies import unpinned_memory
from tiny_gguf import write_tiny_gguf

from holdfast.checkpoints.checkpoint import Checkpoint
from holdfast.checkpoints.files import StoredTensor
from holdfast.checkpoints.formats import gguf as gguf_files
from holdfast.checkpoints.formats import safetensors
from holdfast.errors import CheckpointError, EngineError
from holdfast.execution.device import GPU_TILES, tile_elements
from holdfast.execution.layers.linear import QuantizedLinear, StackedLinear
from holdfast.execution.loading import staged_reads as module
from holdfast.execution.loading.staged_reads import WORTH_BYTES, StagedReads, staged_reads
from holdfast.execution.weights import load
from holdfast.execution.weights.decoder_weights import LayerWeights, Weights
from holdfast.execution.weights.load import load_weights
from holdfast.models import from_config, from_gguf

CPU = torch.device("cpu")
PIECE = 4096
FORMATS = {
    "awq": Format({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True}, awq()),
    "fp8": Format({"quant_method": "fp8", "activation_scheme": "dynamic"}, fp8("tensor")),
}


def checkpoint_of(path: Path, sizes: list[int]) -> tuple[Checkpoint, dict[str, bytes]]:
    source, tensors, contents, end = random.Random(0), {}, {}, 0
    with path.open("wb") as file:
        for number, size in enumerate(sizes):
            name = f"t{number}"
            contents[name] = source.randbytes(size)
            file.write(contents[name])
            tensors[name] = StoredTensor(name=name, layout="U8", shape=(size,), path=path, offset=end, nbytes=size)
            end += size
    return Checkpoint(tensors, "safetensors"), contents


def staged(checkpoint: Checkpoint, names: list[str], buffers: int = 3) -> StagedReads:
    return StagedReads(checkpoint, names, unpinned_memory([PIECE] * buffers), CPU)


def bytes_of(found: torch.Tensor) -> bytes:
    return bytes(found.numpy())


@pytest.mark.parametrize("seed", range(12))
def test_any_order_and_any_that_are_never_asked_for(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    sizes = [rng.choice([1, PIECE - 1, PIECE, PIECE + 1, 3 * PIECE + 7, 9 * PIECE]) for _ in range(40)]
    checkpoint, contents = checkpoint_of(tmp_path / "file", sizes)
    reads = staged(checkpoint, list(contents), rng.choice([1, 2, 5]))
    wanted = [name for name in contents if rng.random() < 0.8]
    if seed % 3:
        rng.shuffle(wanted)
    brought = 0
    for name in wanted:
        if reads.foreseen(name):
            brought += 1
            assert bytes_of(reads.bring(name)) == contents[name]
    assert brought > (len(wanted) * 9 // 10 if seed % 3 == 0 else 4)
    reads.close()


def test_pieces_are_read_before_they_are_asked_for(tmp_path: Path) -> None:
    checkpoint, contents = checkpoint_of(tmp_path / "file", [2 * PIECE, PIECE, PIECE])
    reads = staged(checkpoint, list(contents), 4)
    reads._readers.shutdown()  # All that was begun is done.
    assert {name: len(coming.pieces) for name, coming in reads._coming.items()} == {"t0": 2, "t1": 1, "t2": 1}
    assert bytes_of(reads.bring("t1")) == contents["t1"]
    reads.close()


def test_a_file_that_is_cut_off_is_said_and_nothing_stays_open(tmp_path: Path) -> None:
    checkpoint, contents = checkpoint_of(tmp_path / "file", [PIECE, 4 * PIECE])
    with (tmp_path / "file").open("r+b") as file:
        file.truncate(2 * PIECE)
    reads = staged(checkpoint, list(contents))
    assert bytes_of(reads.bring("t0")) == contents["t0"]
    with pytest.raises(CheckpointError, match="truncated"):
        reads.bring("t1")
    reads.close()


def test_few_bytes_are_not_staged_nor_any_on_a_cpu(tmp_path: Path) -> None:
    checkpoint, contents = checkpoint_of(tmp_path / "file", [100, 1000])
    assert staged_reads(checkpoint, list(contents), torch.device("cuda", 0)) is None
    checkpoint, contents = checkpoint_of(tmp_path / "file", [WORTH_BYTES])
    assert staged_reads(checkpoint, list(contents), CPU) is None


def test_without_pinned_memory_tensors_are_read_in_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(sizes: list[int], device: torch.device) -> None:
        raise EngineError("the driver did not pin host memory", code="HF444", found="CUDA error 2")

    monkeypatch.setattr(module, "PinnedMemory", refused)
    checkpoint, contents = checkpoint_of(tmp_path / "file", [WORTH_BYTES])
    assert staged_reads(checkpoint, list(contents), torch.device("cuda", 0)) is None
    assert "read one after the other" in caplog.text


def planes(weights: Weights) -> Iterator[tuple[str, torch.Tensor]]:
    """All tensors that a model has."""
    for number, layer in enumerate([weights.embed, weights.head, *weights.layers]):
        parts = [layer.qkv, layer.o, *layer.mlp.linears] if isinstance(layer, LayerWeights) else [layer]
        parts = [one for part in parts for one in (part.parts if isinstance(part, StackedLinear) else [part])]
        for place, part in enumerate(parts):
            matrix = part.matrix if isinstance(part, QuantizedLinear) else part
            for name, plane in vars(matrix).items():
                if isinstance(plane, torch.Tensor):
                    yield f"{number}.{place}.{name}", plane


@pytest.mark.parametrize("kind", ["plain", "awq", "fp8", "gguf"])
def test_a_model_is_the_same(
    kind: str, oracles: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    oracle = oracles("Llama", tie_word_embeddings=False, attention_bias=True)
    spec, checkpoint = oracle.spec, oracle.checkpoint()
    if kind == "gguf":
        write_tiny_gguf(tmp_path / "model.gguf")
        header = gguf_files.read_header(tmp_path / "model.gguf")
        spec, checkpoint = from_gguf(header.metadata, header.tensors), Checkpoint(header.tensors, "gguf")
    elif kind != "plain":
        write_quantized(oracle.folder, tmp_path, FORMATS[kind])
        spec = from_config(json.loads((tmp_path / "config.json").read_text()))
        checkpoint = Checkpoint(safetensors.read_headers((tmp_path / "model.safetensors",)), "safetensors")
    said = {"dtype": torch.bfloat16, "device": CPU, "expand": False, "pack": False}
    expected = dict(planes(load_weights(spec, checkpoint, **said)))
    made, asked = list[StagedReads](), list[str]()

    def always(checkpoint: Checkpoint, names: list[str], device: torch.device) -> StagedReads:
        made.append(staged(checkpoint, names, 2))
        asked.extend(names)
        return made[0]

    brought = StagedReads._begin
    taken = list[str]()
    monkeypatch.setattr(StagedReads, "_begin", lambda reads, name: (taken.append(name), brought(reads, name))[1])
    monkeypatch.setattr(load, "staged_reads", always)
    found = dict(planes(load_weights(spec, checkpoint, **said)))
    assert len(found) > 10
    assert found.keys() == expected.keys()
    assert all(torch.equal(bits(found[name]), bits(expected[name])) for name in found)
    # Matrices are foreseen in the order in which they are asked for; vectors are too small to be.
    matrices = [name for name in taken if "norm" not in name and not name.endswith("bias")]
    order = list(dict.fromkeys(name.rpartition(".")[0] for name in matrices))
    assert len(order) > 10
    assert order == list(dict.fromkeys(name.rpartition(".")[0] for name in asked if name in set(matrices)))
    assert not made[0]._memory.pieces, "closed"


def bits(plane: torch.Tensor) -> torch.Tensor:
    return plane.contiguous().view(-1).view(torch.uint8)


def test_a_gpu_unpacks_more_at_once() -> None:
    assert tile_elements(1 << 20, CPU) == 1 << 20
    assert tile_elements(1 << 20, torch.device("cuda", 0)) == GPU_TILES << 20


class LateCopies:
    """A GPU's stream: what is copied is done when an event behind it is waited for, or at random a bit earlier."""

    def __init__(self, seed: int) -> None:
        self.dice, self.launched, self.done = random.Random(seed), list[Callable[[], object]](), 0

    def run(self, last: int) -> None:
        for copy in self.launched[self.done : last]:
            copy()
        self.done = max(self.done, last)


class LateEvent:
    def __init__(self, copies: LateCopies) -> None:
        self._copies, self._behind = copies, 0

    def record(self, stream: object) -> None:
        self._behind = len(self._copies.launched)

    def query(self) -> bool:
        if self._copies.dice.random() < 0.5:
            self.synchronize()
        return self._copies.done >= self._behind

    def synchronize(self) -> None:
        self._copies.run(self._behind)


def brought_late(path: Path, seed: int) -> int:
    """How many tensors are wrong in the end."""
    copies = LateCopies(seed)
    checkpoint, contents = checkpoint_of(path, [copies.dice.choice([1, PIECE, 3 * PIECE + 7]) for _ in range(20)])
    reads, made = staged(checkpoint, list(contents), copies.dice.choice([1, 2, 5])), dict[str, torch.Tensor]()
    for buffer in reads._free:
        buffer.copied = LateEvent(copies)  # type: ignore[assignment]
    for _, buffer, _ in [piece for coming in reads._coming.values() for piece in coming.pieces]:
        buffer.copied = LateEvent(copies)  # type: ignore[assignment]
    for name in contents:
        if reads.foreseen(name):
            made[name] = torch.zeros(len(contents[name]), dtype=torch.uint8)
            for first, piece in reads.pieces(name):
                target = made[name][first : first + len(piece)]
                copies.launched.append(lambda target=target, piece=piece: target.copy_(piece))
    copies.run(len(copies.launched))
    reads.close()
    assert len(made) > 15
    return sum(bytes_of(found) != contents[name] for name, found in made.items())


def test_no_buffer_is_filled_again_before_it_was_copied_from(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    assert [brought_late(tmp_path / "file", seed) for seed in range(10)] == [0] * 10
    monkeypatch.setattr(LateEvent, "record", lambda event, stream: None)
    assert sum(brought_late(tmp_path / "file", seed) for seed in range(10)) > 0, "or this would prove nothing"
