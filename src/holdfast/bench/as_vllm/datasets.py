"""vLLM's datasets out of files: prompts, lengths and times. What would need a download, pictures or sound is refused by
name, with what works instead. Asks no server; how many tokens a text has, the caller counts.

    random, prefix_repetition               made up, no file
    sharegpt, custom, spec_bench, speed_bench   prompts of a file; lengths of the file or of a flag
    sonnet                                  prompts of a text's lines, up to a length
    burstgpt                                lengths of a table
    timed_trace                             lengths and times of a trace, with what its prompts have in common
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from holdfast.bench.as_vllm.dataset_files import (
    WRONG,
    number_in,
    rows_of,
    table_of,
    tokens_in,
    unreadable,
    wrong_row,
)
from holdfast.bench.load.inputs import read_prompts
from holdfast.errors import ConfigurationError
from holdfast.units import shorten

MADE_UP = ("random", "prefix_repetition")
OF_FILES = ("sharegpt", "custom", "sonnet", "burstgpt", "spec_bench", "speed_bench", "timed_trace")
_TEXTS = '--dataset-name custom --dataset-path FILE.jsonl, with a line {"prompt": "..."} for each'
_NO_MEDIA = f"requests of text alone: --dataset-name random --random-input-len 1024, or {_TEXTS}"
REFUSED = {
    "hf": ("its rows are downloaded from the hub, which a benchmark does not do", f"its rows in a file: {_TEXTS}"),
    "random-mm": ("pictures and videos are not made up here", _NO_MEDIA),
    "custom_image": ("pictures are not sent", _NO_MEDIA),
    "custom_audio": ("sound is not sent", _NO_MEDIA),
    "random-rerank": (
        "reranking streams no tokens, and what is measured here is a stream",
        "--dataset-name random --random-input-len 512 --random-output-len 1",
    ),
}
"""Why, and the nearest that works."""
_OF_TEXTS = "prompts are as long as the file's texts"
_OF_LENGTHS = "the file says how long each is"
NOT_SET_BY_FLAGS = {
    "prefix_repetition": {"input": "--prefix-repetition-prefix-len and --prefix-repetition-suffix-len say it"},
    **{name: {"input": _OF_TEXTS} for name in ("sharegpt", "custom", "spec_bench", "speed_bench")},
    **{name: {"input": _OF_LENGTHS, "output": _OF_LENGTHS} for name in ("burstgpt", "timed_trace")},
}
"""Why --input-len and --output-len say nothing of a dataset's requests."""
LEAST_TOKENS, MOST_PROMPT_TOKENS, MOST_TOKENS = 4, 1024, 2048
"""Of a conversation of ShareGPT; vLLM leaves out what is shorter or longer."""
SONNET_ASKS = "Choose as many of these lines of a poem as you can:\n"
Counted = Callable[[str], int]


class DatasetRequests(msgspec.Struct, frozen=True, kw_only=True):
    """By their numbers; what is empty is not the dataset's to say."""

    prompts: tuple[Any, ...] = ()
    lengths: tuple[tuple[int, int], ...] = ()
    """Tokens of prompt and output."""
    times_s: tuple[float, ...] = ()
    """When each is to be sent, the first at 0."""
    chunks: tuple[tuple[int, ...], ...] = ()
    """Of each prompt: chunks of one number are the same text."""

    @property
    def count(self) -> int:
        return max(map(len, (self.prompts, self.lengths, self.times_s)))


def refuse(arguments: argparse.Namespace, refused: Mapping[str, tuple[str, str]], command: str) -> None:
    """What vLLM's command has and this has not: by name, why, and what to do."""
    for name, (why, fix) in refused.items():
        if getattr(arguments, name.replace("-", "_")) is not None:
            field = name.replace("-", "_")
            raise ConfigurationError(f"--{name} of {command} is not there: {why}", fix=fix, field=field)


def check_dataset(name: str, path: str | None, *, offered: Sequence[str] = (*MADE_UP, *OF_FILES)) -> None:
    """Refuses what cannot be had, and a file that is not named."""
    if name in offered and (name in MADE_UP or path):
        return
    why, fix = REFUSED.get(name, ("", "--dataset-name random --random-input-len 1024 --random-output-len 128"))
    if name in offered:
        why, fix = "it is read from a file", f"--dataset-name {name} --dataset-path FILE"
    elif name in OF_FILES or name in MADE_UP:
        why, fix = "it has no times or prompts that a run without a server could use", f"holdfast bench serve, or {fix}"
    raise ConfigurationError(
        f"--dataset-name {shorten(name)} cannot be had so" + (f": {why}" if why else ""),
        needed=f"one of {', '.join(offered)}; of all but {' and '.join(MADE_UP)} --dataset-path",
        found=f"--dataset-path {shorten(path or 'not set')}",
        fix=fix,
        field="dataset_name",
    )


def check_asked_lengths(name: str, input_tokens: int | None, output_tokens: int | None) -> None:
    """Refuses --input-len and --output-len where they would change nothing, and numbers that no request has."""
    for kind, tokens in (("input", input_tokens), ("output", output_tokens)):
        if tokens is None or (name, kind, tokens) == ("custom", "output", -1):  # As each line says.
            continue
        if why := NOT_SET_BY_FLAGS.get(name, {}).get(kind, ""):
            fix = "leave it out, or --dataset-name random, whose lengths flags say"
            raise ConfigurationError(
                f"--{kind}-len says nothing of --dataset-name {name}: {why}", fix=fix, field=f"{kind}_len"
            )
        if tokens < 1:
            raise ConfigurationError(
                f"--{kind}-len {tokens}: no request is so long", needed="1 token or more", fix=f"--{kind}-len 128",
                field=f"{kind}_len",
            )  # fmt: skip


def in_order(rows: list[Any], *, seed: int, shuffle: bool) -> list[Any]:
    """As vLLM takes them: shuffled by the seed, unless that is not wanted."""
    if shuffle:
        random.Random(seed).shuffle(rows)
    return rows


def enough(rows: Sequence[Any], count: int, *, oversample: bool) -> tuple[Any, ...]:
    """So many of them, some more than once where there are fewer."""
    wanted = count if oversample else min(count, len(rows))
    return tuple(rows[at % len(rows)] for at in range(wanted))


def sharegpt(
    pairs: Sequence[tuple[str, str]], count: int, counted: Counted, *, output: int | None, oversample: bool
) -> DatasetRequests:
    """`output`: None: as long as the answers of the file."""
    found: list[tuple[str, tuple[int, int]]] = []
    for prompt, answer in pairs:
        if len(found) == count:
            break
        asked, answered = counted(prompt), counted(answer) if output is None else output
        short = asked < LEAST_TOKENS or (output is None and answered < LEAST_TOKENS)
        if not short and asked <= MOST_PROMPT_TOKENS and asked + answered <= MOST_TOKENS:
            found.append((prompt, (asked, answered)))
    if not found:
        raise ConfigurationError(
            "--dataset-path: no conversation is of a length that is taken",
            needed=f"prompts of {LEAST_TOKENS} to {MOST_PROMPT_TOKENS} tokens, {MOST_TOKENS} with the answer",
            fix="--dataset-name custom, which takes prompts of any length",
            field="dataset_path",
        )
    taken = enough(found, count, oversample=oversample)
    return DatasetRequests(prompts=tuple(one for one, _ in taken), lengths=tuple(length for _, length in taken))


def custom(path: str, count: int, *, output: int, seed: int, shuffle: bool, oversample: bool) -> DatasetRequests:
    """`output`: -1: as each line says."""
    if output != -1:
        rows = in_order(list(read_prompts(path)), seed=seed, shuffle=shuffle)
        return _of_one_length(rows, count, output, oversample=oversample)
    listed = []
    for number, row in rows_of(path, "custom"):
        try:
            if not isinstance(row["prompt"], str) or (tokens := tokens_in(row, "output_tokens")) < 1:
                raise ValueError("no prompt, or no output_tokens")
        except WRONG as error:
            raise wrong_row(path, "custom", number, error) from error
        listed.append((row["prompt"], (1, tokens)))
    taken = enough(in_order(listed, seed=seed, shuffle=shuffle), count, oversample=oversample)
    return DatasetRequests(prompts=tuple(one for one, _ in taken), lengths=tuple(lengths for _, lengths in taken))


def first_turns(
    path: str, name: str, count: int, *, category: str | None, output: int, seed: int, shuffle: bool, oversample: bool
) -> DatasetRequests:
    """Of Spec-Bench and SPEED-Bench: what is asked first, of one category or of all."""
    found = []
    for number, row in rows_of(path, name):
        turns = row.get("turns" if name == "spec_bench" else "messages")
        first = turns[0] if isinstance(turns, list) and turns else None
        text = first.get("content") if isinstance(first, dict) else first
        if not isinstance(text, str):
            raise wrong_row(path, name, number, f"nothing is asked in {shorten(row)}")
        if category is None or row.get("category") == category:
            found.append(text)
    if not found:
        raise unreadable(path, name, f"nothing of the category {shorten(str(category))}")
    return _of_one_length(in_order(found, seed=seed, shuffle=shuffle), count, output, oversample=oversample)


def _of_one_length(rows: list[Any], count: int, output: int, *, oversample: bool) -> DatasetRequests:
    taken = enough(rows, count, oversample=oversample)
    return DatasetRequests(prompts=taken, lengths=tuple((1, output) for _ in taken))


def sonnet(
    lines: Sequence[str], count: int, counted: Counted, *, prompt: int, output: int, prefix: int, seed: int
) -> DatasetRequests:
    """All begin with the same lines, as many as `prefix` tokens hold; lines drawn at random follow, up to `prompt`
    tokens. `counted`: with what the server adds, where it does."""
    begin = counted(SONNET_ASKS)
    each = max(0.1, (counted(SONNET_ASKS + "\n".join(lines) + "\n") - begin) / len(lines))
    if prompt < begin + each:
        raise ConfigurationError(
            f"--sonnet-input-len {prompt}: not one line would follow what asks for it",
            needed=f"{begin + each:.0f} tokens or more",
            fix="--sonnet-input-len 550",
            field="sonnet_input_len",
        )
    whole = int((prompt - begin) / each)
    shared = max(0, round((prefix - begin) / each))
    if shared > whole:
        raise ConfigurationError(
            f"--sonnet-prefix-len {prefix}: prompts would begin with more than all that they have",
            needed=f"less than --sonnet-input-len {prompt}",
            fix="--sonnet-prefix-len 200 --sonnet-input-len 550",
            field="sonnet_prefix_len",
        )
    common = [lines[at % len(lines)] for at in range(shared)]
    draw = random.Random(seed)
    prompts = tuple(_up_to([*common, *draw.choices(lines, k=whole - shared)], prompt, counted) for _ in range(count))
    return DatasetRequests(prompts=prompts, lengths=((prompt, output),) * count)


def _up_to(lines: Sequence[str], most: int, counted: Counted) -> str:
    """Without the last ones, where these happen to be long."""
    for kept in range(len(lines), 1, -1):
        text = SONNET_ASKS + "".join(f"{line}\n" for line in lines[:kept])
        if counted(text) <= most:
            return text
    return f"{SONNET_ASKS}{lines[0]}\n"


def burstgpt(path: str, count: int, *, seed: int) -> DatasetRequests:
    """Rows of GPT-4 that were answered, drawn at random; more than once where there are fewer."""
    found = []
    for number, row in table_of(path, "burstgpt"):
        try:
            if row["Model"] == "GPT-4" and (output := tokens_in(row, "Response tokens")) > 0:
                found.append((max(1, tokens_in(row, "Request tokens")), output))
        except WRONG as error:
            raise wrong_row(path, "burstgpt", number, error) from error
    if not found:
        raise unreadable(path, "burstgpt", "no row of GPT-4 with an answer")
    draw = random.Random(seed)
    taken = draw.sample(found, count) if count <= len(found) else draw.choices(found, k=count)
    return DatasetRequests(lengths=tuple(taken))


def timed_trace(path: str, count: int, *, labels: tuple[str, str, str, str], seconds: float) -> DatasetRequests:
    """`labels`: of times, prompts, outputs and chunks; `seconds`: of one unit of its times."""
    at, prompt, output, chunks = labels
    found: list[tuple[float, tuple[int, int], tuple[int, ...]]] = []
    for number, row in rows_of(path, "timed_trace"):
        if len(found) == count:
            break
        try:
            lengths = (max(1, tokens_in(row, prompt)), max(1, tokens_in(row, output)))
            at_s = seconds * number_in(row, at)
            if not math.isfinite(at_s):
                raise ValueError(f"{shorten(at)} is too far away")
            found.append((at_s, lengths, _chunks_in(row, chunks)))
        except WRONG as error:
            raise wrong_row(path, "timed_trace", number, error) from error
    found.sort(key=lambda one: one[0])
    return DatasetRequests(
        lengths=tuple(lengths for _, lengths, _ in found),
        times_s=tuple(time_s - found[0][0] for time_s, _, _ in found),
        chunks=tuple(hashes for _, _, hashes in found) if any(hashes for _, _, hashes in found) else (),
    )


def _chunks_in(row: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """None where it has none. Raises one of WRONG."""
    found = row.get(key) or []
    if not isinstance(found, list) or any(isinstance(one, bool) for one in found):
        raise ValueError(f"{shorten(key)} is {shorten(found)}, no list of whole numbers")
    return tuple(int(one) for one in found)


def chunk_words(chunk: int, words: Sequence[str], count: int) -> list[str]:
    """The same for every prompt that has this chunk."""
    return random.Random(f"chunk-{chunk}").choices(words, k=count)


def parse_range_ratio(text: str) -> tuple[float, float]:
    """Of prompts and outputs: `0.3`, or `{"input": 0.3, "output": 0.5}`."""
    try:
        found = json.loads(text)
        ratios = (found.get("input", 0.0), found.get("output", 0.0)) if isinstance(found, dict) else (found, found)
        low, high = (-1.0 if isinstance(one, bool) else float(one) for one in ratios)
    except (ValueError, TypeError, OverflowError, RecursionError):
        low = high = -1.0
    if not (0 <= low < 1 and 0 <= high < 1):
        raise ConfigurationError(
            f"--random-range-ratio: {shorten(text)} is no share",
            needed="a number from 0 to less than 1, or one for each of input and output",
            fix="""--random-range-ratio 0.3, or '{"input": 0.3, "output": 0.5}'""",
            field="random_range_ratio",
        )
    return low, high
