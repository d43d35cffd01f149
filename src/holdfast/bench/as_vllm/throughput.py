"""`holdfast bench throughput`: how fast all requests are done when all are there at once, without a server, with the
arguments and result keys of `vllm bench throughput`."""

from __future__ import annotations

import argparse
import functools
import math
import random
import time
from collections.abc import Callable
from typing import Any

from holdfast.bench.as_vllm import datasets
from holdfast.bench.as_vllm.dataset_files import conversations_of, lines_of
from holdfast.bench.as_vllm.offline import add_engine_arguments, open_engine, random_prompts, save
from holdfast.bench.as_vllm.serve_dataset import OF_REFUSED, positive
from holdfast.errors import ConfigurationError
from holdfast.units import shorten

HELP = """Measure offline throughput, without a server, with the arguments of `vllm bench throughput`."""
EXAMPLES = """examples:
  holdfast bench throughput --model smollm2 --input-len 512 --output-len 128 --num-prompts 100 --output-json t.json
  holdfast bench throughput --dataset-name custom --dataset-path prompts.jsonl --output-len 128
  holdfast bench throughput --dataset-name sharegpt --dataset-path ShareGPT_V3_unfiltered_cleaned_split.json
"""
USAGE = "holdfast bench throughput [--model MODEL] [options of vllm bench throughput] [settings]"
DATASETS = ("random", "sharegpt", "custom", "sonnet", "burstgpt", "prefix_repetition", "spec_bench")
BACKENDS = ("vllm", "vllm-chat")
DEFAULT_INPUT, DEFAULT_OUTPUT = 1024, 128
SONNET_INPUT, SONNET_OUTPUT = 550, 150
WITHOUT_EFFECT = ("async-engine", "prequeue-requests", "hf-enable-torch-compile", "no-reranker")
"""All requests are there before the first is computed, in one engine in this process."""
REFUSED = {
    "profile": ("nothing is profiled here", "leave it out"),
    "lora-path": ("adapters are measured over a server", "holdfast bench serve --lora-modules NAME"),
    "enable-multimodal-chat": ("pictures and sound are not read", "leave it out"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="vllm", help="no effect: the engine is Holdfast's")
    parser.add_argument("--dataset-name", default="random", help=", ".join(DATASETS))
    parser.add_argument("--dataset-path", "--dataset")
    parser.add_argument("--input-len", "--random-input-len", type=int)
    parser.add_argument("--output-len", "--random-output-len", "--custom-output-len", type=int)
    parser.add_argument("--prefix-len", "--random-prefix-len", type=int, default=0)
    parser.add_argument("--random-range-ratio", default="0.0")
    parser.add_argument("--prefix-repetition-prefix-len", type=int, default=256)
    parser.add_argument("--prefix-repetition-suffix-len", type=int, default=256)
    parser.add_argument("--prefix-repetition-num-prefixes", type=int, default=10)
    parser.add_argument("--prefix-repetition-output-len", type=int, default=128)
    parser.add_argument("--no-oversample", action="store_true")
    parser.add_argument("--num-prompts", type=positive, default=1000)
    parser.add_argument("--num-warmups", type=int, default=0)
    parser.add_argument("--n", type=int, default=1, help="outputs of each prompt")
    parser.add_argument("--output-json", metavar="FILE")
    parser.add_argument("--disable-detokenize", action="store_true")
    parser.add_argument("--lora-assignment", help=argparse.SUPPRESS)
    parser.add_argument("--hf-max-batch-size", help=argparse.SUPPRESS)
    parser.add_argument("--random-batch-size", help=argparse.SUPPRESS)
    for name in OF_REFUSED:
        parser.add_argument(f"--{name}", help=argparse.SUPPRESS)
    for name in WITHOUT_EFFECT:
        parser.add_argument(f"--{name}", action="store_true", help="no effect")
    for name in REFUSED:
        parser.add_argument(f"--{name}", nargs="?", const=True, help=argparse.SUPPRESS)
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    import holdfast

    _check(arguments)
    # Opened where its tokenizer or its answers are needed first: a file that is none is told before a model is loaded.
    opened = functools.cache(lambda: open_engine(arguments))
    prompts, lengths = _requests(arguments, arguments.num_prompts, opened)
    engine = opened()

    def params_of(lengths: list[int]) -> list[Any]:
        settings = {"n": arguments.n, "temperature": 1.0, "ignore_eos": True}
        detokenize = not arguments.disable_detokenize
        return [holdfast.SamplingParams(**settings, max_tokens=one, detokenize=detokenize) for one in lengths]

    if arguments.num_warmups:
        warm, warm_lengths = _requests(arguments, arguments.num_warmups, opened, seed=1)
        engine.generate(warm, params_of(warm_lengths), use_tqdm=False)
    params = params_of(lengths)
    began_s = time.perf_counter()
    outputs = engine.generate(prompts, params, use_tqdm=False)
    elapsed_s = time.perf_counter() - began_s
    asked = sum(len(output.prompt_token_ids) for output in outputs)
    made = sum(len(answer.token_ids) for output in outputs for answer in output.outputs)
    print(
        f"Throughput: {len(prompts) / elapsed_s:.2f} requests/s, {(asked + made) / elapsed_s:.2f} total tokens/s,"
        f" {made / elapsed_s:.2f} output tokens/s"
    )
    print(f"Total num prompt tokens:  {asked}")
    print(f"Total num output tokens:  {made}")
    document = {
        "elapsed_time": elapsed_s,
        "num_requests": len(prompts),
        "total_num_tokens": asked + made,
        "requests_per_second": len(prompts) / elapsed_s,
        "tokens_per_second": (asked + made) / elapsed_s,
    }
    save(arguments.output_json, document)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    datasets.refuse(arguments, REFUSED, "vllm bench throughput")
    if arguments.backend not in BACKENDS:
        raise ConfigurationError(
            f"--backend {shorten(arguments.backend)}: the engine that is measured is Holdfast's own",
            needed="--backend vllm, which vLLM's scripts have, or none",
            fix="leave it out",
            field="backend",
        )
    datasets.parse_range_ratio(arguments.random_range_ratio)
    name = arguments.dataset_name
    if arguments.dataset_path is None and name == "sharegpt":  # As vLLM: random without a file.
        name = "random"
    datasets.check_dataset(name, arguments.dataset_path, offered=DATASETS)
    datasets.check_asked_lengths(name, arguments.input_len, arguments.output_len)


def _requests(
    arguments: argparse.Namespace, count: int, opened: Callable[[], Any], *, seed: int = 0
) -> tuple[list[Any], list[int]]:
    """Prompts, and how long each answer is."""
    name, path, output = arguments.dataset_name, arguments.dataset_path, arguments.output_len
    oversample = not arguments.no_oversample
    if name == "prefix_repetition":
        return _repeated_prefixes(arguments, count, seed)
    if name == "random" or path is None:
        return _random(arguments, count, seed)

    def counted(text: str) -> int:
        return len(opened().get_tokenizer().encode(text))

    if name == "sharegpt":
        pairs = datasets.in_order(conversations_of(path), seed=seed, shuffle=True)
        found = datasets.sharegpt(pairs, count, counted, output=output, oversample=oversample)
    elif name == "sonnet":
        found = datasets.sonnet(
            lines_of(path, name), count, counted, seed=seed, prompt=arguments.input_len or SONNET_INPUT,
            output=output or SONNET_OUTPUT, prefix=arguments.prefix_len,
        )  # fmt: skip
    elif name == "burstgpt":
        found = datasets.burstgpt(path, count, seed=seed)
        made = [random_prompts(1, prompt, f"{seed}-{at}")[0] for at, (prompt, _) in enumerate(found.lengths)]
        return list(made), [length for _, length in found.lengths]
    elif name == "spec_bench":
        found = datasets.first_turns(
            path, name, count, category=None, output=output or DEFAULT_OUTPUT, seed=seed, shuffle=True,
            oversample=oversample,
        )  # fmt: skip
    else:
        found = datasets.custom(
            path, count, output=output or DEFAULT_OUTPUT, seed=seed, shuffle=True, oversample=oversample
        )
    if messages := next((one for one in found.prompts if not isinstance(one, str)), None):
        raise ConfigurationError(
            f"--dataset-path: {shorten(path)} has lists of messages, and without a server no chat template is applied",
            needed='lines of text, or of JSON with "prompt"',
            found=shorten(messages),
            fix="holdfast bench serve --backend openai-chat --dataset-name custom, or a file of texts",
            field="dataset_path",
        )
    return list(found.prompts), [length for _, length in found.lengths]


def _random(arguments: argparse.Namespace, count: int, seed: int) -> tuple[list[Any], list[int]]:
    of_prompts, of_outputs = datasets.parse_range_ratio(arguments.random_range_ratio)
    draw = random.Random(f"{seed}-lengths")
    asked, answered = arguments.input_len or DEFAULT_INPUT, arguments.output_len or DEFAULT_OUTPUT
    if not of_prompts:
        prompts = random_prompts(count, asked, seed, prefix=arguments.prefix_len)
    else:
        longest = random_prompts(count, math.ceil(asked * (1 + of_prompts)), seed, prefix=arguments.prefix_len)
        cut = [arguments.prefix_len + _around(draw, asked, of_prompts) for _ in longest]
        prompts = [
            {"prompt_token_ids": one["prompt_token_ids"][:tokens]} for one, tokens in zip(longest, cut, strict=True)
        ]
    return list(prompts), [_around(draw, answered, of_outputs) for _ in prompts]


def _around(draw: random.Random, tokens: int, ratio: float) -> int:
    return draw.randint(max(1, math.floor(tokens * (1 - ratio))), max(1, math.ceil(tokens * (1 + ratio))))


def _repeated_prefixes(arguments: argparse.Namespace, count: int, seed: int) -> tuple[list[Any], list[int]]:
    """As many with each prefix, one prefix after the other."""
    each = -(-count // max(1, arguments.prefix_repetition_num_prefixes))
    lengths = (arguments.prefix_repetition_suffix_len, arguments.prefix_repetition_prefix_len)
    prompts: list[Any] = []
    for at in range(-(-count // each)):
        prompts += random_prompts(each, lengths[0], f"{seed}-{at}", prefix=lengths[1])
    return prompts[:count], [arguments.output_len or arguments.prefix_repetition_output_len] * count
