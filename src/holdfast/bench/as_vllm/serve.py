"""`holdfast bench serve`: a server under load with the arguments and result keys of `vllm bench serve`.

Words in, a table and a JSON file out; no verdict. What vLLM has and this has not is refused by name.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from collections.abc import Iterator
from typing import Any

from holdfast.bench.as_vllm import datasets, serve_dataset
from holdfast.bench.as_vllm.results import result_keys, table
from holdfast.errors import ConfigurationError, EngineError
from holdfast.units import shorten

HELP = """Benchmark a running server with the arguments of `vllm bench serve`, for scripts that have them.

The same result keys; `holdfast bench URL` says more, and whether the server passes."""
EXAMPLES = """examples:
  holdfast bench serve --model NAME --random-input-len 512 --random-output-len 128 --num-prompts 200 --request-rate 4
  holdfast bench serve --backend openai-chat --endpoint /v1/chat/completions --max-concurrency 16 --save-result
  holdfast bench serve --dataset-name custom --dataset-path prompts.jsonl --goodput ttft:500 tpot:50
"""
USAGE = "holdfast bench serve [--base-url URL] [--model NAME] [options of vllm bench serve]"

BACKENDS = ("vllm", "openai", "openai-chat", "lmdeploy", "scalellm", "sglang", "llama.cpp", "tgi")
BACKENDS_REFUSED = {
    "openai-audio": "sound is not sent",
    **dict.fromkeys(
        ("openai-embeddings", "openai-embeddings-chat", "openai-embeddings-clip", "openai-embeddings-vlm2vec",
         "infinity-embeddings", "infinity-embeddings-clip", "vllm-pooling", "vllm-rerank"),
        "embeddings, pooling and reranking stream no tokens, and what is measured here is a stream",
    ),
}  # fmt: skip
WITHOUT_EFFECT = ("disable-tqdm", "skip-tokenizer-init")
VALUES_WITHOUT_EFFECT = ("tokenizer", "tokenizer-mode", "request-id-prefix", "timeline-itl-thresholds")
REFUSED = {
    "use-beam-search": ("a search over beams streams nothing", "leave it out"),
    "profile": (
        "the server's profiler is not started from here",
        "leave it out",
    ),
    "plot-timeline": ("nothing is drawn here", "leave it out; holdfast bench URL --html page.html draws one"),
    "plot-dataset-stats": ("nothing is drawn here", "leave it out; --save-result --save-detailed has all lengths"),
    "probe-request-rate": ("all requests are of one kind", "leave it out"),
    "enable-multimodal-chat": ("pictures and sound are not sent", "leave it out"),
    "custom-ensure-client-side-data": ("pictures and sound are not sent", "leave it out"),
}
"""Why, and what to do."""
SAMPLING = ("top_p", "top_k", "min_p", "temperature", "frequency_penalty", "presence_penalty", "repetition_penalty")
RAMP_PARTS = 20
"""A ramp is linear or exponential in the number of requests; it is sent as so many straight parts."""
READY_POLL_S = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", "--endpoint-type", default="openai", help=", ".join(BACKENDS))
    parser.add_argument("--base-url")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--endpoint", help="default: /v1/completions; /v1/chat/completions of openai-chat")
    parser.add_argument("--header", nargs="*", default=[], metavar="KEY=VALUE")
    parser.add_argument("--model", help="default: the first that the server lists")
    parser.add_argument("--served-model-name")
    parser.add_argument("--num-prompts", type=serve_dataset.positive, default=1000)
    parser.add_argument("--num-warmups", type=int, default=0)
    parser.add_argument("--request-rate", type=float, default=math.inf, help="default: inf, all at once")
    parser.add_argument("--burstiness", type=float, default=1.0)
    parser.add_argument("--max-concurrency", type=int)
    parser.add_argument("--ramp-up-strategy", choices=("linear", "exponential"))
    parser.add_argument("--ramp-up-start-rps", type=float)
    parser.add_argument("--ramp-up-end-rps", type=float)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--ignore-eos", action="store_true")
    parser.add_argument("--logprobs", type=int)
    parser.add_argument("--extra-body", type=_json_object, metavar="JSON")
    parser.add_argument("--chat-template-kwargs", type=_json_object, metavar="JSON")
    parser.add_argument("--random-batch-size", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--lora-modules", nargs="+", default=[])
    parser.add_argument("--lora-assignment", choices=("random", "round-robin"), default="random")
    parser.add_argument("--ready-check-timeout-sec", type=int, default=0)
    parser.add_argument("--insecure", action="store_true")
    for name in SAMPLING:
        parser.add_argument(f"--{name.replace('_', '-')}", type=int if name == "top_k" else float)
    serve_dataset.add_arguments(parser)
    _add_results(parser)
    for name in WITHOUT_EFFECT:
        parser.add_argument(f"--{name}", action="store_true", help="no effect")
    for name in VALUES_WITHOUT_EFFECT:
        parser.add_argument(
            f"--{name}", help="no effect: tokens are counted by the server" if "tok" in name else "no effect"
        )
    for name in REFUSED:
        parser.add_argument(f"--{name}", nargs="?", const=True, help=argparse.SUPPRESS)


def _json_object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"{shorten(text)} is no object of JSON")
    return found


def _add_results(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("results")
    group.add_argument("--percentile-metrics", default="ttft,tpot,itl")
    group.add_argument("--metric-percentiles", default="99")
    group.add_argument("--goodput", nargs="+", default=[], metavar="KEY:MS", help="ttft, tpot and e2el, in ms")
    group.add_argument("--save-result", action="store_true")
    group.add_argument("--save-detailed", action="store_true")
    group.add_argument("--append-result", action="store_true")
    group.add_argument("--metadata", nargs="*", default=[], metavar="KEY=VALUE")
    group.add_argument("--label")
    group.add_argument("--result-dir")
    group.add_argument("--result-filename")


def run(arguments: argparse.Namespace) -> int:
    from holdfast.bench.client.processes import client_processes
    from holdfast.bench.target import find_target

    _check_arguments(arguments)
    _check_saving(arguments)
    url = (arguments.base_url or f"http://{arguments.host}:{arguments.port}").rstrip("/").removesuffix("/v1")
    key = os.environ.get("HOLDFAST_API_KEY") or os.environ.get("OPENAI_API_KEY")
    certificate = "insecure" if arguments.insecure else ""
    _wait_until_ready(url, key, certificate, arguments.ready_check_timeout_sec)
    target = find_target(url, key, arguments.served_model_name or arguments.model, certificate)
    load = _with_prompts(read_load(arguments, url, target.model, key), arguments, target)
    if arguments.num_warmups:
        from msgspec.structs import replace

        asked = {"requests": arguments.num_warmups, "rate": math.inf, "concurrency": 1, "replay": ()}
        warm = replace(load, **asked, seed=load.seed + 1)
        with client_processes(warm, 1) as clients:
            clients.wait(lambda: None)
    with client_processes(load, 1) as clients:
        clients.wait(lambda: None)
    answers = sorted(clients.answers, key=lambda answer: answer.number)
    if not any(answer.good for answer in answers):
        why = next((f"{answer.error}: {answer.said}" for answer in answers if answer.error), "no request was sent")
        raise EngineError("no request was answered", found=shorten(why, 300), fix="holdfast doctor URL")
    found = result_keys(answers, arguments, model=arguments.model or target.model, start_s=clients.start_s)
    _save(found, arguments)  # First: who reads the table may leave.
    print("\n".join(table(found, arguments)))
    return 0


def _check_arguments(arguments: argparse.Namespace) -> None:
    """What cannot be done is refused before anything is asked of a server."""
    datasets.refuse(arguments, REFUSED, "vllm bench serve")
    if arguments.backend not in BACKENDS:
        raise ConfigurationError(
            f"--backend {shorten(arguments.backend)} cannot be had"
            + (f": {BACKENDS_REFUSED[arguments.backend]}" if arguments.backend in BACKENDS_REFUSED else ""),
            needed=f"one of {', '.join(BACKENDS)}",
            fix="--backend openai, or --backend openai-chat --endpoint /v1/chat/completions",
            field="backend",
        )
    if arguments.random_batch_size != 1:
        raise ConfigurationError(
            "--random-batch-size is of embeddings, which are not measured here", fix="leave it out",
            field="random_batch_size",
        )  # fmt: skip
    serve_dataset.check(arguments)


def _with_prompts(load: Any, arguments: argparse.Namespace, target: Any) -> Any:
    """What a dataset's file has in it, by what the server counts; and what a word costs, where prompts are made up.
    Lengths are checked before a text of such a length is made."""
    from msgspec.structs import replace

    from holdfast.bench.target import calibrated, check_lengths, counted_by_server

    if lengths := serve_dataset.lengths_of_flags(arguments):
        check_lengths(replace(load, lengths=lengths), target)
    found = serve_dataset.requests_of(arguments, lambda texts: counted_by_server(load, texts))
    load = replace(load, **serve_dataset.load_fields(arguments, found))
    check_lengths(load, target)
    if load.prompts:
        return load
    load = calibrated(load)
    if found.chunks:
        each = arguments.timed_trace_chunk_hash_size
        load = replace(load, prompts=serve_dataset.prompts_of_chunks(found, each, load.words_per_token))
    return load


def read_load(arguments: argparse.Namespace, url: str, model: str, key: str | None) -> Any:
    """As one load of ours, but for what its dataset says."""
    from holdfast.bench.load.load import CHAT, COMPLETIONS, Load

    chat = arguments.backend == "openai-chat" or (arguments.endpoint or "").endswith("/chat/completions")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    headers |= dict(_pairs(arguments.header, "header"))
    body = {name: value for name in SAMPLING if (value := getattr(arguments, name)) is not None}
    if arguments.chat_template_kwargs:
        body["chat_template_kwargs"] = arguments.chat_template_kwargs
    if arguments.logprobs is not None:
        body |= {"logprobs": True, "top_logprobs": arguments.logprobs} if chat else {"logprobs": arguments.logprobs}
    return Load(
        url=url,
        path=arguments.endpoint or (CHAT if chat else COMPLETIONS),
        model=model,
        headers=headers,
        certificate="insecure" if arguments.insecure else "",
        phases=_phases(arguments),
        concurrency=arguments.max_concurrency,
        rate=1.0 if arguments.ramp_up_strategy else arguments.request_rate,
        arrivals="gamma",
        burstiness=arguments.burstiness,
        requests=arguments.num_prompts,
        seed=arguments.seed,
        adapters=tuple(arguments.lora_modules),
        adapters_in_turn=bool(arguments.lora_modules) and arguments.lora_assignment == "round-robin",
        # Made-up prompts would end anywhere; vLLM sets it for its random dataset too.
        ignore_eos=arguments.ignore_eos or arguments.dataset_name in (*datasets.MADE_UP, "timed_trace"),
        extra_body=body | (arguments.extra_body or {}),
    )


def _phases(arguments: argparse.Namespace) -> tuple[Any, ...]:
    from holdfast.bench.load.profile import PEAK, Phase

    start, end = arguments.ramp_up_start_rps, arguments.ramp_up_end_rps
    if arguments.ramp_up_strategy is None:
        return (Phase(PEAK, math.inf),)
    if not start or not end:
        raise ConfigurationError(
            "--ramp-up-strategy needs the rates that it goes from and to",
            needed="--ramp-up-start-rps and --ramp-up-end-rps above 0",
            fix="--ramp-up-start-rps 1 --ramp-up-end-rps 10",
            field="ramp_up_strategy",
        )

    def rate(share: float) -> float:
        linear = start + (end - start) * share
        return float(linear if arguments.ramp_up_strategy == "linear" else start * (end / start) ** share)

    parts, count = [], arguments.num_prompts / RAMP_PARTS
    for part in range(RAMP_PARTS):
        low, high = rate(part / RAMP_PARTS), rate((part + 1) / RAMP_PARTS)
        parts.append(Phase(f"part {part}", 2 * count / (low + high), low, high))
    return (*parts, Phase("last", math.inf, end, end))


def _wait_until_ready(url: str, key: str | None, certificate: str, seconds: int) -> None:
    from holdfast.bench.client.wire import trusted
    from holdfast.doctor.probe.metrics_page import OK, client_for, get

    until = time.monotonic() + seconds
    with client_for(key, trusted(certificate)) as client:
        while time.monotonic() < until and get(client, f"{url}/v1/models").status != OK:
            time.sleep(READY_POLL_S)


def _pairs(given: list[str], field: str) -> Iterator[tuple[str, str]]:
    for pair in given:
        name, equals, value = pair.partition("=")
        if not equals or "\r" in pair or "\n" in pair:
            raise ConfigurationError(
                f"--{field}: {shorten(pair)!r} is not KEY=VALUE", fix=f"--{field} key=value", field=field
            )
        yield name.strip(), value.strip()


def _check_saving(arguments: argparse.Namespace) -> None:
    """Before the run, whose figures would else be lost after it."""
    saved = arguments.save_result or arguments.append_result
    given = [name for name in ("result_dir", "result_filename") if getattr(arguments, name)]
    if given and not saved:
        flag = f"--{given[0].replace('_', '-')}"
        print(f"holdfast: {flag} has no effect without --save-result: nothing is saved", file=sys.stderr)
    folder = arguments.result_dir or "."
    if saved:
        try:
            os.makedirs(folder, exist_ok=True)
        except OSError as error:
            raise _not_writable(folder, str(error)) from error
        if not os.access(folder, os.W_OK):
            raise _not_writable(folder, "no permission")


def _not_writable(folder: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"--result-dir: {shorten(folder)} cannot be written",
        needed="a folder, which is made where it is not there",
        found=why,
        fix="--result-dir results",
        field="result_dir",
    )


def _save(found: dict[str, Any], arguments: argparse.Namespace) -> None:
    if not (arguments.save_result or arguments.append_result):
        return
    document = {**found, **dict(_pairs(arguments.metadata, "metadata"))}
    if not arguments.save_detailed:
        for name in ("input_lens", "output_lens", "start_times", "ttfts", "itls", "generated_texts", "errors"):
            document.pop(name)
    rate = "ramp-up" if arguments.ramp_up_strategy else f"{arguments.request_rate}qps"
    at_once = "" if arguments.max_concurrency is None else f"-concurrency{arguments.max_concurrency}"
    model = str(found["model_id"]).rpartition("/")[2]
    name = arguments.result_filename or (
        f"{arguments.label or arguments.backend}-{rate}{at_once}-{model}-{found['date']}.json"
    )
    with open(
        os.path.join(arguments.result_dir or ".", name), "a" if arguments.append_result else "w", encoding="utf-8"
    ) as file:
        if arguments.append_result and file.tell():
            file.write("\n")
        json.dump(document, file)
