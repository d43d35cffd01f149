"""Counters, gauges and histograms under vLLM's names, so that boards made for vLLM keep working.

Owns one registry and the rule of what counts when. It is told of requests (RequestMeter) and of steps, and asks for
the engine's newest snapshot when it is scraped. It knows nothing of HTTP and starts no server.

What counts: a prompt counts once however many answers it has; generated tokens, successes and latencies count for
each answer. A request that a client walked away from counts as `abort` for each answer that had not ended.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from holdfast.observability.ledger import Ledger
from holdfast.observability.metrics.buckets import (
    INTER_TOKEN_BUCKETS_S,
    LATENCY_EDGES_S,
    N_BUCKETS,
    REQUEST_BUCKETS_S,
    STEP_TOKEN_BUCKETS,
    TTFT_BUCKETS_S,
    token_buckets,
)
from holdfast.observability.metrics.engines import LABELS, EngineCollector, EngineProcessCollector, EngineSource
from holdfast.observability.metrics.fast_histogram import JoinedHistograms, QuickHistogram
from holdfast.records import AnswerDelta, EngineStats, ExpertUse, FinishReason, LinkUse

COMPUTED, FOUND, FETCHED = SOURCES = ("local_compute", "local_cache_hit", "external_kv_transfer")
"""vLLM's names for where the KV of a prompt's token comes from; the last is of what tiers below the KV pool held."""
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class ServingMetrics:
    """One a server. What is said of an engine is asked for at scrape time. Series of vLLM's are lists, one for each
    engine by its number."""

    def __init__(
        self,
        model_name: str,
        *,
        engines: Sequence[EngineSource],
        memory: Callable[[], Ledger | None] = lambda: None,
        max_model_len: int = 131_072,
    ) -> None:
        self.registry = CollectorRegistry()
        self._model_name = model_name
        self._numbers = [str(number) for number in range(len(engines))]
        self._prompt_total = self._generated_total = self._ended_total = self._failed_total = 0
        self.open_meters: dict[RequestMeter, None] = {}
        """Of requests that have not ended, in the order in which they came."""
        largest = token_buckets(max_model_len)

        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of requests that got a first token.")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Prompt tokens found in the prefix cache.")
        by_source = self._labelled("prompt_tokens_by_source", "Prompt tokens by where their KV came from.", "source")
        self.by_source = [{source: one(source) for source in SOURCES} for one in by_source]
        self.generation_tokens = self._counter("generation_tokens", "Generated tokens.")
        success = self._labelled("request_success", "Count of finished outputs by finish reason.", "finished_reason")
        self.success = [{reason: one(reason.value) for reason in FinishReason} for one in success]
        self.iteration_tokens = self._quick("iteration_tokens_total", "Tokens per engine step.", STEP_TOKEN_BUCKETS)
        self.ttft = self._quick(
            "time_to_first_token_seconds", "Arrival to first token.", TTFT_BUCKETS_S, LATENCY_EDGES_S
        )
        self.inter_token = self._quick(
            "inter_token_latency_seconds", "Inter-token latency in seconds.", INTER_TOKEN_BUCKETS_S, LATENCY_EDGES_S
        )
        self.time_per_token = self._histogram(
            "request_time_per_output_token_seconds",
            "Mean time per output token after the first.",
            INTER_TOKEN_BUCKETS_S,
        )
        self.e2e = self._quick(
            "e2e_request_latency_seconds", "Arrival to last token.", REQUEST_BUCKETS_S, LATENCY_EDGES_S
        )
        self.queue_time = self._histogram("request_queue_time_seconds", "Arrival to first step.", REQUEST_BUCKETS_S)
        self.prefill_time = self._histogram(
            "request_prefill_time_seconds", "First step to first token.", REQUEST_BUCKETS_S
        )
        self.decode_time = self._histogram(
            "request_decode_time_seconds", "First token to last token.", REQUEST_BUCKETS_S
        )
        self.inference_time = self._histogram(
            "request_inference_time_seconds", "First step to last token.", REQUEST_BUCKETS_S
        )
        self.request_prompt_tokens = self._histogram("request_prompt_tokens", "Prompt tokens of a request.", largest)
        self.prefill_computed = self._histogram(
            "request_prefill_kv_computed_tokens", "Prompt tokens of a request that were not cached.", largest
        )
        self.request_generation_tokens = self._histogram(
            "request_generation_tokens", "Tokens generated for an output.", largest
        )
        self.request_max_generation_tokens = self._histogram(
            "request_max_num_generation_tokens", "Tokens of the longest output of a request.", largest
        )
        self.params_max_tokens = self._histogram(
            "request_params_max_tokens", "The max_tokens request parameter.", largest
        )
        self.params_n = self._histogram("request_params_n", "The n request parameter.", N_BUCKETS)
        self.registry.register(EngineCollector(model_name, engines))
        self.registry.register(_MemoryCollector(model_name, memory))
        self.registry.register(EngineProcessCollector(model_name, engines))
        self.registry.register(_OlderName(JoinedHistograms(self.inter_token), "vllm:time_per_output_token_seconds"))

    def _counter(self, name: str, help_text: str) -> list[Counter]:
        parent = Counter(f"vllm:{name}", help_text, LABELS, registry=self.registry)
        return [parent.labels(self._model_name, engine) for engine in self._numbers]

    def _labelled(self, name: str, help_text: str, label: str) -> list[Callable[[str], Counter]]:
        """By a further label: a function for each engine that gives the counter of a value."""
        parent = Counter(f"vllm:{name}", help_text, [*LABELS, label], registry=self.registry)
        return [partial(parent.labels, self._model_name, engine) for engine in self._numbers]

    def _histogram(self, name: str, help_text: str, buckets: Iterable[float]) -> list[Histogram]:
        parent = Histogram(f"vllm:{name}", help_text, LABELS, buckets=tuple(buckets), registry=self.registry)
        return [parent.labels(self._model_name, engine) for engine in self._numbers]

    def _quick(
        self, name: str, help_text: str, buckets: Iterable[float], between: Iterable[float] = ()
    ) -> list[QuickHistogram]:
        """For what is observed at every token, or asked for its quantiles."""
        buckets, between = tuple(buckets), tuple(between)
        made = [
            QuickHistogram(
                f"vllm:{name}", help_text, buckets, {"model_name": self._model_name, "engine": engine}, between
            )
            for engine in self._numbers
        ]
        self.registry.register(JoinedHistograms(made))
        return made

    def latencies(self) -> tuple[JoinedHistograms, ...]:
        """To the first token, between two, and to the last, over all engines."""
        return JoinedHistograms(self.ttft), JoinedHistograms(self.inter_token), JoinedHistograms(self.e2e)

    def observe_step(self, stats: EngineStats, engine: int = 0) -> None:
        """One call a step; steps that computed nothing do not count."""
        if stats.step_tokens:
            self.iteration_tokens[engine].observe(stats.step_tokens)

    def open_request(
        self, *, prompt_tokens: int, max_tokens: int, n: int, request_id: str = "", model: str = "", engine: int = 0
    ) -> RequestMeter:
        meter = RequestMeter(self, prompt_tokens=prompt_tokens, max_tokens=max_tokens, n=n, engine=engine)
        meter.request_id, meter.model = request_id, model
        self.open_meters[meter] = None
        return meter

    def ended_totals(self) -> tuple[int, int]:
        """Answers that have ended so far, and of these how many failed."""
        return self._ended_total, self._failed_total

    def count_ended(self, reason: FinishReason, answers: int = 1, *, engine: int = 0) -> None:
        self.success[engine][reason].inc(answers)
        self._ended_total += answers
        self._failed_total += answers if reason is FinishReason.ERROR else 0

    def token_totals(self) -> tuple[int, int]:
        """Prompt tokens and generated tokens so far."""
        return self._prompt_total, self._generated_total

    def count_tokens(self, *, prompt: int = 0, generated: int = 0, engine: int = 0) -> None:
        self._prompt_total += prompt
        self._generated_total += generated
        if prompt:
            self.prompt_tokens[engine].inc(prompt)
        if generated:
            self.generation_tokens[engine].inc(generated)

    def count_sources(self, prompt_tokens: int, cached_tokens: int, fetched_tokens: int, *, engine: int = 0) -> None:
        """Where the KV of one prompt came from."""
        self.cached_tokens[engine].inc(cached_tokens)
        self.by_source[engine][FOUND].inc(cached_tokens - fetched_tokens)
        self.by_source[engine][FETCHED].inc(fetched_tokens)
        self.by_source[engine][COMPUTED].inc(prompt_tokens - cached_tokens)

    def count_embedding(
        self, prompt_tokens: int, cached_tokens: int, fetched_tokens: int, latency_s: float, engine: int = 0
    ) -> None:
        """A prompt that became a vector; there is no token to wait for."""
        self.count_tokens(prompt=prompt_tokens, engine=engine)
        self.count_sources(prompt_tokens, cached_tokens, fetched_tokens, engine=engine)
        self.prefill_computed[engine].observe(prompt_tokens - cached_tokens)
        self.request_prompt_tokens[engine].observe(prompt_tokens)
        self.e2e[engine].observe(latency_s)
        self.count_ended(FinishReason.STOP, engine=engine)

    def render(self) -> bytes:
        return generate_latest(self.registry)


class RequestMeter:
    """Follows one prompt and its n answers. `delta` for each piece, `close` exactly once at the end."""

    def __init__(
        self, metrics: ServingMetrics, *, prompt_tokens: int, max_tokens: int, n: int, engine: int = 0
    ) -> None:
        """`engine`: that answers it."""
        self._metrics, self._engine = metrics, engine
        self.request_id = self.model = ""
        """As the access log has them."""
        self.prompt_tokens = prompt_tokens
        self.max_tokens = max_tokens
        self._open = set(range(n))
        self.arrival_s = time.monotonic()
        self._last_token_s: dict[int, float] = {}
        self._generated = dict.fromkeys(range(n), 0)
        self._cached_tokens: int | None = None
        """Of the first answer: the others find what it has computed."""
        self.ttft_s: float | None = None
        metrics.params_max_tokens[engine].observe(max_tokens)
        metrics.params_n[engine].observe(n)

    @property
    def generated_tokens(self) -> int:
        """Of all its answers."""
        return sum(self._generated.values())

    @property
    def cached_tokens(self) -> int:
        return self._cached_tokens or 0

    @property
    def answering(self) -> int:
        """Answers that have a token and have not ended."""
        return len(self._open & self._last_token_s.keys())

    @property
    def open_answers(self) -> int:
        return len(self._open)

    def tokens_per_s(self) -> float | None:
        """Since its first token, over all answers; None: there is no second one yet."""
        if self.ttft_s is None:
            return None
        elapsed_s = max(self._last_token_s.values()) - self.arrival_s - self.ttft_s
        return (self.generated_tokens - 1) / elapsed_s if elapsed_s > 0 else None

    def delta(self, delta: AnswerDelta) -> None:
        metrics, engine, count = self._metrics, self._engine, len(delta.token_ids)
        if count:
            now_s = time.monotonic()
            if self.ttft_s is None:
                self.ttft_s = now_s - self.arrival_s
                metrics.ttft[engine].observe(self.ttft_s)
                metrics.count_tokens(prompt=self.prompt_tokens, engine=engine)
            if self._cached_tokens is None and delta.index == 0:
                self._cached_tokens = delta.cached_tokens
                metrics.count_sources(self.prompt_tokens, delta.cached_tokens, delta.fetched_tokens, engine=engine)
            last_s = self._last_token_s.get(delta.index)
            # Several tokens in one delta came at the same moment: the wait is shared among them.
            if last_s is not None:
                for _ in range(count):
                    metrics.inter_token[engine].observe((now_s - last_s) / count)
            self._last_token_s[delta.index] = now_s
            self._generated[delta.index] += count
            metrics.count_tokens(generated=count, engine=engine)
        if delta.finish_reason is not None:
            self._finish(delta)

    def _finish(self, delta: AnswerDelta) -> None:
        metrics, engine, timing = self._metrics, self._engine, delta.timing
        self._open.discard(delta.index)
        assert delta.finish_reason is not None
        metrics.count_ended(delta.finish_reason, engine=engine)
        metrics.request_generation_tokens[engine].observe(self._generated[delta.index])
        if timing is not None:
            metrics.e2e[engine].observe(timing.finished_s - timing.arrival_s)
            metrics.queue_time[engine].observe(timing.scheduled_s - timing.arrival_s)
            metrics.prefill_time[engine].observe(timing.first_token_s - timing.scheduled_s)
            metrics.decode_time[engine].observe(timing.finished_s - timing.first_token_s)
            later = self._generated[delta.index] - 1
            if later > 0:
                metrics.time_per_token[engine].observe((timing.finished_s - timing.first_token_s) / later)
            metrics.inference_time[engine].observe(timing.finished_s - timing.scheduled_s)

    def close(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Answers that have not ended count as ended for `reason`."""
        metrics, engine = self._metrics, self._engine
        if self.ttft_s is not None:
            metrics.request_prompt_tokens[engine].observe(self.prompt_tokens)
            metrics.request_max_generation_tokens[engine].observe(max(self._generated.values()))
        if self._cached_tokens is not None:
            metrics.prefill_computed[engine].observe(self.prompt_tokens - self._cached_tokens)
        metrics.count_ended(reason, len(self._open), engine=engine)
        self._open.clear()
        metrics.open_meters.pop(self, None)


class _MemoryCollector(Collector):
    """The memory ledger, read at scrape time."""

    def __init__(self, model_name: str, memory: Callable[[], Ledger | None]) -> None:
        self._model_name = model_name
        self._memory = memory

    def collect(self) -> Iterator[Metric]:
        family = GaugeMetricFamily(
            "holdfast:memory_bytes",
            "Memory in bytes by term, planned and measured; unaccounted is what processes hold beyond the terms.",
            labels=["model_name", "tier", "term", "kind"],
        )
        ledger = self._memory()
        for term in ledger.terms if ledger is not None else ():
            family.add_metric([self._model_name, term.tier, term.term, "planned"], term.planned_bytes)
            if term.measured_bytes is not None:
                family.add_metric([self._model_name, term.tier, term.term, "measured"], term.measured_bytes)
        yield family
        yield from self._links(ledger.links if ledger is not None else [])
        if ledger is not None and ledger.experts is not None:
            yield from self._experts(ledger.experts)

    def _links(self, links: list[LinkUse]) -> Iterator[Metric]:
        if not links:
            return
        counters = (
            ("bytes", "Bytes of weights and KV pages copied over it, or read.", [link.copied_bytes for link in links]),
            ("busy_seconds", "Seconds that these copies, or reads, took.", [link.busy_s for link in links]),
            (
                "stalled_seconds",
                "Seconds that the GPU, or a step, waited for them.",
                [link.stalled_s for link in links],
            ),
        )
        for name, text, values in counters:
            total = CounterMetricFamily(f"holdfast:link_{name}", text, labels=["model_name", "link"])
            for link, value in zip(links, values, strict=True):
                total.add_metric([self._model_name, link.link], value)
            yield total
        possible = GaugeMetricFamily(
            "holdfast:link_possible_bytes_per_second", "As measured at the start.", labels=["model_name", "link"]
        )
        for link in links:
            if link.possible_bytes_per_s:
                possible.add_metric([self._model_name, link.link], link.possible_bytes_per_s)
        yield possible

    def _experts(self, use: ExpertUse) -> Iterator[Metric]:
        pairs = CounterMetricFamily(
            "holdfast:expert_uses",
            "Uses of experts by tokens in steps with few tokens, by where it was computed from: vram, cpu or link.",
            labels=["model_name", "where"],
        )
        over_link = use.pairs - use.hits - use.host_pairs
        for where, count in (("vram", use.hits), ("cpu", use.host_pairs), ("link", over_link)):
            pairs.add_metric([self._model_name, where], count)
        yield pairs
        counters = (
            ("expert_cpu_seconds", "Seconds that the CPU computed experts.", use.host_s),
            ("expert_swaps", "Experts that came to VRAM in the place of others.", use.swaps),
        )
        for name, text, value in counters:
            total = CounterMetricFamily(f"holdfast:{name}", text, labels=["model_name"])
            total.add_metric([self._model_name], value)
            yield total


class _OlderName(Collector):
    """The same histogram once more under the name it used to have."""

    def __init__(self, source: Collector, name: str) -> None:
        self._source = source
        self._name = name

    def collect(self) -> Iterator[Metric]:
        for metric in self._source.collect():
            older = Metric(self._name, f"Older name of {metric.name}.", metric.type)
            for sample in metric.samples:
                older.add_sample(
                    sample.name.replace(metric.name, self._name, 1), sample.labels, sample.value, timestamp=None
                )
            yield older
