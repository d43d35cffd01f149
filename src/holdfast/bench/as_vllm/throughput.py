"""`holdfast bench throughput`: how fast all requests are done when all are there at once, without a server, with the
arguments and result keys of `vllm bench throughput`."""

from __future__ import annotations

import argparse
import time
from typing import Any

from holdfast.bench.as_vllm.offline import add_engine_arguments, open_engine, random_prompts, save
from holdfast.errors import ConfigurationError
from holdfast.units import shorten

HELP = """Measure offline throughput, without a server, with the arguments of `vllm bench throughput`."""
EXAMPLES = """examples:
  holdfast bench throughput --model smollm2 --input-len 512 --output-len 128 --num-prompts 100 --output-json t.json
  holdfast bench throughput --dataset-name custom --dataset-path prompts.jsonl --output-len 128
"""
USAGE = "holdfast bench throughput [--model MODEL] [options of vllm bench throughput] [settings]"
DATASETS = ("random", "sharegpt", "custom")
DEFAULT_INPUT, DEFAULT_OUTPUT = 1024, 128


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", choices=("vllm",), default="vllm", help="no effect: the engine is Holdfast's")
    parser.add_argument("--dataset-name", default="random")
    parser.add_argument("--dataset-path", "--dataset")
    parser.add_argument("--input-len", "--random-input-len", type=int)
    parser.add_argument("--output-len", "--random-output-len", type=int)
    parser.add_argument("--prefix-len", "--random-prefix-len", type=int, default=0)
    parser.add_argument("--num-prompts", type=int, default=1000)
    parser.add_argument("--num-warmups", type=int, default=0)
    parser.add_argument("--n", type=int, default=1, help="outputs of each prompt")
    parser.add_argument("--output-json", metavar="FILE")
    parser.add_argument("--disable-detokenize", action="store_true")
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    import holdfast

    prompts = _prompts(arguments, arguments.num_prompts, seed=0)
    warm = _prompts(arguments, arguments.num_warmups, seed=1)
    engine = open_engine(arguments)
    params = holdfast.SamplingParams(
        n=arguments.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=arguments.output_len or DEFAULT_OUTPUT,
        detokenize=not arguments.disable_detokenize,
    )
    if warm:
        engine.generate(warm, params, use_tqdm=False)
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


def _prompts(arguments: argparse.Namespace, count: int, seed: int) -> list[Any]:
    if arguments.dataset_path is None and arguments.dataset_name == "random":
        length = arguments.input_len or DEFAULT_INPUT
        return random_prompts(count, length, seed, prefix=arguments.prefix_len)
    if arguments.dataset_name not in DATASETS or arguments.dataset_path is None:
        raise ConfigurationError(
            f"--dataset-name {shorten(arguments.dataset_name)} cannot be had so",
            needed=f"one of {', '.join(DATASETS)}, and of a file --dataset-path",
            fix="--dataset-name random --input-len 512 --output-len 128",
            field="dataset_name",
        )
    from holdfast.bench.load.inputs import read_prompts

    texts = [text for text in read_prompts(arguments.dataset_path) if isinstance(text, str)]
    return [texts[at % len(texts)] for at in range(count if texts else 0)]
