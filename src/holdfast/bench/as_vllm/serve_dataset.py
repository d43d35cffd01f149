"""The part of `holdfast bench serve` that `--dataset-name` says: its arguments, and what they make of a load.

How many tokens a file's texts have is estimated from their characters, by what the server counts of a sample.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holdfast.bench.as_vllm import datasets
from holdfast.bench.as_vllm.dataset_files import conversations_of, lines_of
from holdfast.bench.as_vllm.datasets import DatasetRequests
from holdfast.errors import ConfigurationError
from holdfast.units import counted, shorten

WITHOUT_EFFECT = ("trust-remote-code", "no-stream", "skip-chat-template", "no-reranker")
OF_REFUSED = (
    "hf-subset", "hf-split", "hf-name", "hf-output-len", "blazedit-min-distance", "blazedit-max-distance",
    "asr-max-audio-len-sec", "asr-min-audio-len-sec", "bfcl-categories", "random-mm-base-items-per-request",
    "random-mm-num-mm-items-range-ratio", "random-mm-limit-mm-per-prompt", "random-mm-bucket-config",
)  # fmt: skip
"""Arguments of datasets that are refused; beside another dataset vLLM ignores them as well."""
SUBSETS = ("qualitative", "throughput_1k", "throughput_2k", "throughput_8k", "throughput_16k", "throughput_32k")
MOST_TOKENS_AT_ONCE = 1 << 28
"""Of all prompts that are made before the first is sent; they take about 6 bytes a token, several times over."""
Sampled = Callable[[Sequence[str]], tuple[float, float]]
"""Of texts: tokens of a character, and those that the server adds to a prompt."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("dataset")
    group.add_argument("--dataset-name", default="random")
    group.add_argument("--dataset-path")
    group.add_argument("--input-len", type=int)
    group.add_argument("--output-len", type=int)
    group.add_argument("--disable-shuffle", action="store_true")
    group.add_argument("--no-oversample", action="store_true")
    group.add_argument("--random-input-len", type=int, default=1024)
    group.add_argument("--random-output-len", type=int, default=128)
    group.add_argument("--random-range-ratio", default="0.0")
    group.add_argument("--random-prefix-len", type=int, default=0)
    group.add_argument("--custom-output-len", type=int, default=256, help="-1: output_tokens of each line")
    group.add_argument("--sharegpt-output-len", type=int, help="default: as long as the answers of the file")
    group.add_argument("--sonnet-input-len", type=int, default=550)
    group.add_argument("--sonnet-output-len", type=int, default=150)
    group.add_argument("--sonnet-prefix-len", type=int, default=200)
    group.add_argument("--spec-bench-output-len", type=int, default=256)
    group.add_argument("--spec-bench-category")
    group.add_argument("--speed-bench-output-len", type=int, default=4096)
    group.add_argument("--speed-bench-category")
    group.add_argument("--speed-bench-dataset-subset", default="qualitative", choices=SUBSETS)
    group.add_argument("--prefix-repetition-prefix-len", type=int, default=256)
    group.add_argument("--prefix-repetition-suffix-len", type=int, default=256)
    group.add_argument("--prefix-repetition-num-prefixes", type=int, default=10)
    group.add_argument("--prefix-repetition-output-len", type=int, default=128)
    group.add_argument("--self-timed", action=argparse.BooleanOptionalAction, help="timed_trace: by its own times")
    group.add_argument("--timed-trace-chunk-hash-size", type=int, default=16)
    group.add_argument("--timed-trace-sec-multiplier", type=float, default=1.0)
    for part in ("timestamp", "input-length", "output-length", "hash-ids"):
        group.add_argument(f"--timed-trace-label-{part}", default=part.replace("-", "_"))
    for name in WITHOUT_EFFECT:
        group.add_argument(f"--{name}", action="store_true", help="no effect")
    for name in OF_REFUSED:
        group.add_argument(f"--{name}", help=argparse.SUPPRESS)


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError("must be a whole number, 1 or more")
    return int(text)


def check(arguments: argparse.Namespace) -> None:
    """What can be told without a server."""
    name = arguments.dataset_name
    datasets.check_dataset(name, arguments.dataset_path)
    datasets.check_asked_lengths(name, arguments.input_len, arguments.output_len)
    datasets.parse_range_ratio(arguments.random_range_ratio)
    if not 0 < arguments.timed_trace_sec_multiplier < math.inf:
        raise ConfigurationError(
            f"--timed-trace-sec-multiplier {arguments.timed_trace_sec_multiplier}: no unit of time is so long",
            needed="seconds of one unit of the trace's times, more than 0",
            fix="--timed-trace-sec-multiplier 0.001, where these are milliseconds",
            field="timed_trace_sec_multiplier",
        )
    if arguments.self_timed is not None and name != "timed_trace":
        raise ConfigurationError(
            "--self-timed is of requests that have times",
            needed="--dataset-name timed_trace",
            found=f"--dataset-name {shorten(name)}",
            fix="leave it out: --request-rate says when requests are sent",
            field="self_timed",
        )


def lengths_of_flags(arguments: argparse.Namespace) -> tuple[tuple[int, int], ...]:
    """Of requests whose texts are made of a file, as long as flags say; none where the file says it."""
    if arguments.dataset_name != "sonnet":
        return ()
    lengths = (arguments.input_len or arguments.sonnet_input_len, _output(arguments, "sonnet") or 1)
    check_room(arguments.num_prompts, arguments.num_prompts * lengths[0])
    return (lengths,)


def check_room(count: int, tokens: int) -> None:
    """Whether so many prompts can be held all at once, with so many tokens in all."""
    if tokens > MOST_TOKENS_AT_ONCE:
        raise ConfigurationError(
            f"{counted(count, 'prompt')} with {tokens:,} tokens in all would be made before the first is sent",
            needed=f"{MOST_TOKENS_AT_ONCE:,} tokens at most",
            found=f"{tokens // count:,} tokens each in the mean",
            fix=f"--num-prompts {max(1, count * MOST_TOKENS_AT_ONCE // tokens)} or fewer, or shorter ones",
            field="num_prompts",
        )


def requests_of(arguments: argparse.Namespace, sampled: Sampled) -> DatasetRequests:
    """Of a file; empty where all is made up."""
    name, path, count = arguments.dataset_name, arguments.dataset_path, arguments.num_prompts
    seed, shuffle, oversample = arguments.seed, not arguments.disable_shuffle, not arguments.no_oversample
    if name == "sharegpt":
        pairs = datasets.in_order(conversations_of(path), seed=seed, shuffle=shuffle)
        each, _ = sampled([text for pair in pairs for text in pair])
        return datasets.sharegpt(
            pairs, count, lambda text: round(each * len(text)),
            output=_output(arguments, "sharegpt"), oversample=oversample,
        )  # fmt: skip
    if name == "custom":
        output = arguments.output_len or arguments.custom_output_len
        return datasets.custom(path, count, output=output, seed=seed, shuffle=shuffle, oversample=oversample)
    if name in ("spec_bench", "speed_bench"):
        of_category = {"category": getattr(arguments, f"{name}_category"), "output": _output(arguments, name)}
        file = path if name == "spec_bench" else str(Path(path, f"{arguments.speed_bench_dataset_subset}.jsonl"))
        return datasets.first_turns(file, name, count, **of_category, seed=seed, shuffle=shuffle, oversample=oversample)
    if name == "sonnet":
        ((tokens, answered),) = lengths_of_flags(arguments)
        lines = lines_of(path, name)
        each, added = sampled(lines)
        return datasets.sonnet(
            lines, count, lambda text: round(added + each * len(text)), seed=seed,
            prompt=tokens, output=answered, prefix=arguments.sonnet_prefix_len,
        )  # fmt: skip
    if name == "burstgpt":
        return datasets.burstgpt(path, count, seed=seed)
    if name == "timed_trace":
        labels = ("timestamp", "input_length", "output_length", "hash_ids")
        at, prompt, output, chunks = (str(getattr(arguments, f"timed_trace_label_{label}")) for label in labels)
        seconds = arguments.timed_trace_sec_multiplier
        return datasets.timed_trace(path, count, labels=(at, prompt, output, chunks), seconds=seconds)
    return DatasetRequests()


def _output(arguments: argparse.Namespace, name: str) -> int | None:
    found: int | None = arguments.output_len or getattr(arguments, f"{name}_output_len")
    return found


def load_fields(arguments: argparse.Namespace, found: DatasetRequests) -> dict[str, Any]:
    """Of a `Load`."""
    from holdfast.bench.load.load import Arrival, LengthRange

    name, output = arguments.dataset_name, arguments.output_len
    if name == "random":
        of_prompts, of_outputs = datasets.parse_range_ratio(arguments.random_range_ratio)
        prefix = arguments.random_prefix_len
        drawn = _around(arguments.input_len or arguments.random_input_len, of_prompts)
        return {
            "prompt": LengthRange(drawn.low + prefix, drawn.high + prefix),
            "output": _around(output or arguments.random_output_len, of_outputs),
            "prefix_tokens": prefix,
        }
    if name == "prefix_repetition":
        prefix, suffix = arguments.prefix_repetition_prefix_len, arguments.prefix_repetition_suffix_len
        return {
            "prompt": _around(prefix + suffix),
            "output": _around(output or arguments.prefix_repetition_output_len),
            "prefix_tokens": prefix,
            "prefixes": arguments.prefix_repetition_num_prefixes,
        }
    fields: dict[str, Any] = {"requests": found.count, "prompts": found.prompts, "lengths": found.lengths}
    if found.times_s and arguments.self_timed is not False:
        timed = zip(found.times_s, found.lengths, strict=True)
        fields["replay"] = tuple(Arrival(at_s, *lengths) for at_s, lengths in timed)
        fields["rate"] = None
    return fields


def _around(tokens: int, ratio: float = 0.0) -> Any:
    from holdfast.bench.load.load import LengthRange

    return LengthRange(max(1, math.floor(tokens * (1 - ratio))), max(1, math.ceil(tokens * (1 + ratio))))


def prompts_of_chunks(found: DatasetRequests, chunk_tokens: int, words_per_token: float) -> tuple[str, ...]:
    """Prompts that have in common what those of the trace had: a chunk is as many words as it has tokens."""
    from holdfast.bench.load.prompts import WORDS

    check_room(found.count, sum(tokens for tokens, _ in found.lengths))
    each = max(1, round(chunk_tokens * words_per_token))
    prompts = list[str]()
    for chunks, (tokens, _) in zip(found.chunks, found.lengths, strict=True):
        wanted = max(1, round(tokens * words_per_token))
        words = list[str]()
        for chunk in chunks:
            if len(words) == wanted:
                break
            words += datasets.chunk_words(chunk, WORDS, min(each, wanted - len(words)))
        rest = datasets.chunk_words(-1 - len(prompts), WORDS, wanted - len(words))
        prompts.append(" ".join([*words, *rest]))
    return tuple(prompts)
