"""`holdfast bench latency`: how long one batch takes, with the arguments and result keys of `vllm bench latency`."""

from __future__ import annotations

import argparse
import time

import numpy as np

from holdfast.bench.as_vllm import datasets
from holdfast.bench.as_vllm.offline import add_engine_arguments, open_engine, random_prompts, save

HELP = """Measure how long one batch of requests takes, without a server, with the arguments of `vllm bench latency`."""
EXAMPLES = """examples:
  holdfast bench latency --model smollm2 --batch-size 8 --input-len 32 --output-len 128 --output-json latency.json
"""
USAGE = "holdfast bench latency [--model MODEL] [options of vllm bench latency] [settings]"
REFUSED = {
    "use-beam-search": ("batches are sampled", "leave it out; holdfast.LLM.beam_search searches"),
    "profile": ("nothing is profiled here", "leave it out"),
}
PERCENTILES = (10, 25, 50, 75, 90, 99)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=128)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--n", type=int, default=1, help="outputs of each prompt")
    parser.add_argument("--num-iters-warmup", type=int, default=10)
    parser.add_argument("--num-iters", type=int, default=30)
    parser.add_argument("--output-json", metavar="FILE")
    parser.add_argument("--disable-detokenize", action="store_true")
    for name in REFUSED:
        parser.add_argument(f"--{name}", nargs="?", const=True, help=argparse.SUPPRESS)
    add_engine_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    import holdfast

    datasets.refuse(arguments, REFUSED, "vllm bench latency")
    # A batch that is asked again would else be found in the cache.
    engine = open_engine(arguments, enable_prefix_caching=False)
    prompts = random_prompts(arguments.batch_size, arguments.input_len, seed=0)
    params = holdfast.SamplingParams(
        n=arguments.n,
        temperature=1.0,
        ignore_eos=True,
        max_tokens=arguments.output_len,
        detokenize=not arguments.disable_detokenize,
    )
    latencies = []
    for turn in range(arguments.num_iters_warmup + arguments.num_iters):
        began_s = time.perf_counter()
        engine.generate(prompts, params, use_tqdm=False)
        if turn >= arguments.num_iters_warmup:
            latencies.append(time.perf_counter() - began_s)
    ranks = [float(value) for value in np.percentile(latencies, PERCENTILES)]
    average = float(np.mean(latencies))
    print(f"Avg latency: {average} seconds")
    for rank, value in zip(PERCENTILES, ranks, strict=True):
        print(f"{rank}% percentile latency: {value} seconds")
    percentiles = {str(rank): value for rank, value in zip(PERCENTILES, ranks, strict=True)}
    save(arguments.output_json, {"avg_latency": average, "latencies": latencies, "percentiles": percentiles})
    return 0
