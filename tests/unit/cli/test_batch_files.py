"""The files of a batch: what is a line, what has an answer, and what a run that was cut off anywhere leaves behind."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from holdfast.cli.batch import files
from holdfast.cli.batch.files import Input, Output, read_lines
from holdfast.errors import ConfigurationError, HoldfastError


def answer(line: files.InputLine, text: str = "x") -> bytes:
    return json.dumps({"id": line.answer_id, "text": text}, separators=(",", ":")).encode() + b"\n"


@pytest.fixture
def lines(tmp_path: Path) -> list[files.InputLine]:
    (tmp_path / "in.jsonl").write_bytes(b'{"a":1}\n\n{"a":2}\r\n   \n{"a":1}\n{"a":3}')
    return list(read_lines(tmp_path / "in.jsonl", "model"))


def resumed(folder: Path, model: str = "model") -> list[int]:
    """The numbers of the lines that have an answer."""
    output = Output(folder / "out.jsonl")
    try:
        answered = output.resume(Input(folder / "in.jsonl").digests(model))
    finally:
        output.close()
    return [number for number, one in enumerate(answered) if one]


def test_lines_are_numbered_as_editors_do_and_empty_ones_are_not_asked(lines) -> None:
    assert [(line.number, line.text) for line in lines] == [
        (1, b'{"a":1}'),
        (3, b'{"a":2}'),
        (5, b'{"a":1}'),
        (6, b'{"a":3}'),
    ]
    # The same words twice are two lines: the number tells them apart.
    assert lines[0].digest == lines[2].digest
    assert len({line.answer_id for line in lines}) == 4


def test_a_line_end_at_the_end_changes_nothing(tmp_path, lines) -> None:
    with (tmp_path / "in.jsonl").open("ab") as file:
        file.write(b'\n{"a":4}\n')
    assert [line.answer_id for line in read_lines(tmp_path / "in.jsonl", "model")][:4] == [
        line.answer_id for line in lines
    ]


def test_an_output_that_was_cut_anywhere_is_gone_on_with(tmp_path, lines) -> None:
    whole = [answer(line, "ünder") for line in (lines[1], lines[0], lines[3])]
    data = b"".join(whole)
    ends = [sum(map(len, whole[:count])) for count in range(len(whole) + 1)]
    for cut in range(len(data) + 1):
        (tmp_path / "out.jsonl").write_bytes(data[:cut])
        kept = max(count for count, end in enumerate(ends) if end <= cut)
        assert resumed(tmp_path) == sorted([3, 1, 6][:kept])
        assert (tmp_path / "out.jsonl").read_bytes() == data[: ends[kept]]


def test_zeros_that_a_power_cut_left_are_dropped(tmp_path, lines) -> None:
    (tmp_path / "out.jsonl").write_bytes(answer(lines[0]) + bytes(5000))
    assert resumed(tmp_path) == [1]
    assert (tmp_path / "out.jsonl").read_bytes() == answer(lines[0])


@pytest.mark.parametrize("case", ["words", "another line", "another model", "twice", "beyond", "absurd"])
def test_what_is_not_of_this_batch_is_left_alone(tmp_path, lines, case) -> None:
    changed = files.InputLine(lines[0].number, lines[1].digest, None)
    beyond = files.InputLine(7, lines[0].digest, None)
    absurd = files.InputLine(10**17, lines[0].digest, None)
    content = {
        "words": b"my diary\n",
        "another line": answer(changed),
        "another model": answer(lines[0]),
        "twice": answer(lines[0]) * 2,
        "beyond": answer(beyond),
        "absurd": answer(absurd),
    }[case]
    (tmp_path / "out.jsonl").write_bytes(content + b"torn")
    with pytest.raises(ConfigurationError) as refused:
        resumed(tmp_path, model="another" if case == "another model" else "model")
    assert refused.value.code == "HF171"
    assert (tmp_path / "out.jsonl").read_bytes() == content + b"torn"


def test_one_run_at_a_time_writes_to_a_file(tmp_path, lines) -> None:
    first = Output(tmp_path / "out.jsonl")
    with pytest.raises(ConfigurationError) as refused:
        Output(tmp_path / "out.jsonl")
    assert refused.value.code == "HF172"
    first.close()
    Output(tmp_path / "out.jsonl").close()


def test_an_endless_line_is_not_kept(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(files, "MOST_LINE_BYTES", 64)
    monkeypatch.setattr(files, "PIECE_BYTES", 16)
    (tmp_path / "in.jsonl").write_bytes(b"a" * 64 + b"\n" + b"b" * 1000 + b"\n" + b"b" * 1001 + b"\nc\n" + b"d" * 63)
    lines = list(read_lines(tmp_path / "in.jsonl", "model"))
    assert [(line.number, line.text) for line in lines] == [
        (1, None),
        (2, None),
        (3, None),
        (4, b"c"),
        (5, b"d" * 63),
    ]
    assert lines[1].digest != lines[2].digest


async def test_appended_lines_are_whole_and_on_disk_when_it_returns(tmp_path) -> None:
    output = Output(tmp_path / "out.jsonl")
    written = [f"line {number} {'x' * number}\n".encode() for number in range(200)]

    async def append(line: bytes) -> None:
        await output.append(line)
        assert line in (tmp_path / "out.jsonl").read_bytes()

    await asyncio.gather(*map(append, written))
    await output.finish()
    output.close()
    assert sorted((tmp_path / "out.jsonl").read_bytes().splitlines(keepends=True)) == sorted(written)


async def test_a_full_disk_is_said_to_all_who_wait(tmp_path, monkeypatch) -> None:
    output = Output(tmp_path / "out.jsonl")

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    told = await asyncio.gather(output.append(b"a\n"), output.append(b"b\n"), return_exceptions=True)
    assert [getattr(error, "code", error) for error in told] == ["HF173", "HF173"]
    assert all(isinstance(error, HoldfastError) for error in told)
    await output.finish()
    output.close()


async def test_nothing_is_written_behind_a_torn_line(tmp_path, lines, monkeypatch) -> None:
    """A disk that was full for a moment: a part of one line is written, then nothing, then there is room again."""
    output, write, calls = Output(tmp_path / "out.jsonl"), os.write, iter((None, 40, OSError(28, "No space left")))
    await output.append(answer(lines[1]))

    def short(file: int, data: bytes) -> int:
        match next(calls, None):
            case OSError() as error:
                raise error
            case int(room):
                return write(file, bytes(data)[:room])
        return write(file, data)

    next(calls)
    monkeypatch.setattr(os, "write", short)
    first = asyncio.create_task(output.append(answer(lines[0])))
    told = await asyncio.gather(first, output.append(answer(lines[2])), return_exceptions=True)
    told += await asyncio.gather(output.append(answer(lines[3])), return_exceptions=True)
    assert [getattr(error, "code", error) for error in told] == ["HF173"] * 3
    await output.finish()
    output.close()
    assert (tmp_path / "out.jsonl").read_bytes() == answer(lines[1])
    assert resumed(tmp_path) == [3]


def test_refusals_of_earlier_runs_are_counted(tmp_path, lines, monkeypatch) -> None:
    monkeypatch.setattr(files, "PIECE_BYTES", 8)
    monkeypatch.setattr(files, "_BEGINNING_BYTES", 8)
    good, bad = (f'{{"id":"{line.answer_id}","error":'.encode() for line in lines[:2])
    (tmp_path / "out.jsonl").write_bytes(good + b"null}\n" + bad + b'{"code":"x"}}\n')
    numbers = iter((1, 3))
    monkeypatch.setattr(Output, "_line_of", lambda self, beginning, digests: next(numbers))
    output = Output(tmp_path / "out.jsonl")
    answered = output.resume(Input(tmp_path / "in.jsonl").digests("model"))
    output.close()
    assert (answered[1], answered[3]) == (files.ANSWERED, files.REFUSED)


def test_a_byte_order_mark_is_no_part_of_the_first_line(tmp_path) -> None:
    (tmp_path / "in.jsonl").write_bytes(b'\xef\xbb\xbf{"a":1}\n{"a":2}\n')
    assert [line.text for line in read_lines(tmp_path / "in.jsonl", "model")] == [b'{"a":1}', b'{"a":2}']


def test_files_that_cannot_be_used(tmp_path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(ConfigurationError) as refused:
            Input(path)
        assert refused.value.code == "HF170"
    with pytest.raises(ConfigurationError) as refused:
        Output(tmp_path / "no" / "folder")
    assert refused.value.code == "HF170"
