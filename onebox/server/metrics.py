"""Counters and histograms of the server, under vLLM's names so that existing dashboards and routers read them.

Takes what happens to answers; engine totals and gauges are read from EngineStats when scraped.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from onebox.engine.client import EngineClient
from onebox.engine.pages import PAGE_SIZE
from onebox.server.chat import AnswerUsage

if TYPE_CHECKING:
    from onebox.server.intake import Savings

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
LABELS = ("model_name", "engine")
CACHE_LABELS = ("block_size", "num_gpu_blocks")  # what routers read to turn usage into tokens
LORA_LABELS = ("max_lora", "running_lora_adapters", "waiting_lora_adapters")  # routers ask for the series
LATENCY_S = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640)
STEP_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5)
LENGTHS = (1, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000, 200_000)
# Why a prompt found nothing in the prefix cache: shorter than a page, begun by nobody, no state kept, other salt.
MISSES = ("too_short", "no_match", "no_snapshot", "salt")


class Record:
    """One answer on its way: begun, stepping, finished once."""

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._begun_s = self._last_s = time.perf_counter()
        self._tokens = 0
        self._done = False

    def step(self, usage: AnswerUsage) -> None:
        """After each engine step of this answer."""
        new = usage.completion_tokens - self._tokens
        if new <= 0:
            return
        now_s, m = time.perf_counter(), self._metrics
        if self._tokens == 0:
            m.ttft.observe(now_s - self._begun_s)
            m.queue.observe(usage.waited_s)
            m.prefill.observe(max(0.0, now_s - self._begun_s - usage.waited_s))
            self._first_s = now_s
        else:
            m.itl.observe((now_s - self._last_s) / new)
        self._tokens, self._last_s = usage.completion_tokens, now_s

    def finish(self, reason: str, usage: AnswerUsage) -> None:
        if self._done:
            return
        self._done = True
        m, now_s = self._metrics, time.perf_counter()
        m.success.labels(*m.labels, reason).inc()
        m.e2e.observe(now_s - self._begun_s)
        if self._tokens:
            m.inference.observe(max(0.0, self._last_s - self._begun_s - usage.waited_s))
        m.request_prompt_tokens.observe(self._prompt_tokens)
        m.request_generation_tokens.observe(usage.completion_tokens)
        if usage.completion_tokens > 1:
            m.tpot.observe((self._last_s - self._first_s) / (usage.completion_tokens - 1))
            m.decode.observe(self._last_s - self._first_s)


class HttpMetrics:
    """Series of a server whatever stands behind it: errors, compression, guard. The registry is its own."""

    def __init__(self, savings: Savings) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self.registry.register(IntakeCollector(savings))
        self.http_errors = Counter(
            "onebox:http_errors",
            "Requests refused or failed, by status and code.",
            ("status", "code"),
            registry=self.registry,
        )

    def count_error(self, status: int, code: str | None) -> None:
        self.http_errors.labels(str(status), str(code)).inc()

    def render(self) -> bytes:
        return generate_latest(self.registry)


class Metrics(HttpMetrics):
    """All series of one server around an engine."""

    def __init__(self, engine: EngineClient, model_name: str, savings: Savings) -> None:
        super().__init__(savings)
        self.labels = (model_name, "0")
        self.registry.register(EngineCollector(engine, self.labels))

        def histogram(name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
            made = Histogram(f"vllm:{name}", text, LABELS, buckets=buckets, registry=self.registry)
            return made.labels(*self.labels)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"vllm:{name}", text, (*LABELS, *labels), registry=self.registry)

        self.success = counter("request_success", "Answers ended, by reason.", "finished_reason")
        self.ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", LATENCY_S)
        self.itl = histogram(
            "inter_token_latency_seconds", "Between tokens of one answer, a step's time shared.", STEP_S
        )
        self.tpot = histogram("request_time_per_output_token_seconds", "Mean time a token after the first.", STEP_S)
        self.e2e = histogram("e2e_request_latency_seconds", "Arrival to end.", LATENCY_S)
        self.queue = histogram("request_queue_time_seconds", "Arrival to first step.", LATENCY_S)
        self.prefill = histogram("request_prefill_time_seconds", "First step to first token.", LATENCY_S)
        self.inference = histogram("request_inference_time_seconds", "First step to last token.", LATENCY_S)
        self.decode = histogram("request_decode_time_seconds", "First token to last.", LATENCY_S)
        self.request_prompt_tokens = histogram("request_prompt_tokens", "Prompt tokens a request.", LENGTHS)
        self.request_generation_tokens = histogram("request_generation_tokens", "Answer tokens a request.", LENGTHS)

    def begin(self, prompt_tokens: int) -> Record:
        return Record(self, prompt_tokens)


class IntakeCollector(Collector):
    """Totals of compression and guard, read at the time of the scrape."""

    def __init__(self, savings: Savings) -> None:
        self._savings = savings

    def collect(self) -> Iterator[Metric]:
        s = self._savings
        yield counter_family("onebox:compressed_prompts", "Prompts made shorter.", s.compressed)
        yield counter_family("onebox:compression_tokens_before", "Tokens of prompts looked at.", s.tokens_before)
        yield counter_family("onebox:compression_tokens_after", "Tokens of those prompts sent on.", s.tokens_after)
        yield counter_family("onebox:intake_seconds", "Seconds prompts waited for compression and guard.", s.seconds)
        yield counter_family("onebox:intake_abandoned", "Compressions ended early: hung up, or too long.", s.abandoned)
        guarded = CounterMetricFamily("onebox:guard_verdicts", "Prompts judged, by action.", labels=("action",))
        for action in ("pass", "annotate", "flag", "block"):
            guarded.add_metric((action,), s.guarded.get(action, 0))
        yield guarded


def counter_family(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)


class EngineCollector(Collector):
    """EngineStats as Prometheus families, read at the time of the scrape."""

    def __init__(self, engine: EngineClient, labels: tuple[str, ...]) -> None:
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        s = self._engine.stats()
        used = 1 - (s.pages_free + s.pages_cached) / s.pages_total if s.pages_total else 0.0
        gauges = {
            "vllm:num_requests_running": ("Answers in the current batch.", s.running),
            "vllm:num_requests_waiting": ("Requests waiting for a slot.", s.waiting),
            "vllm:kv_cache_usage_perc": ("Share of KV pages in use by requests, 0 to 1.", used),
            "onebox:kv_pages_cached": ("KV pages that only the prefix cache holds.", s.pages_cached),
            "onebox:state_slots_free": ("Recurrent-state slots free.", s.slots_free),
            "onebox:state_slots": ("Recurrent-state slots.", s.slots_total),
            "onebox:snapshots": ("Snapshots of recurrent states on the device.", s.snapshots_total - s.snapshots_free),
            "onebox:snapshots_total": ("Room for snapshots on the device.", s.snapshots_total),
            "onebox:host_snapshots": ("Snapshots in host memory.", s.host_snapshots_total - s.host_snapshots_free),
            "onebox:host_snapshots_total": ("Room for snapshots in host memory.", s.host_snapshots_total),
            "onebox:host_kv_pages": ("KV pages in host memory.", s.host_pages_total - s.host_pages_free),
            "onebox:host_kv_pages_total": ("Room for KV pages in host memory.", s.host_pages_total),
        }
        counters = {
            "vllm:prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", s.prompt_tokens),
            "vllm:prefix_cache_hits": ("Prompt tokens found in the prefix cache.", s.cached_tokens),
            "vllm:prompt_tokens": ("Prompt tokens.", s.prompt_tokens),
            "vllm:prompt_tokens_cached": ("Prompt tokens found in the prefix cache.", s.cached_tokens),
            "vllm:generation_tokens": ("Answer tokens.", s.generated_tokens),
            "vllm:num_preemptions": ("Requests put back to wait.", s.preemptions),
            "vllm:spec_decode_num_drafts": ("Verified windows that had drafts.", s.draft_windows),
            "vllm:spec_decode_num_draft_tokens": ("Draft tokens proposed.", s.drafted_tokens),
            "vllm:spec_decode_num_accepted_tokens": ("Draft tokens kept.", s.accepted_tokens),
            "onebox:engine_restarts": ("Engine processes started in place of one that ended.", s.restarts),
            "onebox:engine_steps": ("Steps of the engine.", s.steps),
            "onebox:prefix_evicted_pages": ("Cached pages given up for room.", s.prefix.get("evicted_pages", 0)),
            "onebox:requests_cancelled": ("Requests cancelled before their end.", s.cancelled),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(name, text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        info = GaugeMetricFamily(
            "vllm:cache_config_info", "Of the KV cache; always 1.", labels=(*LABELS, *CACHE_LABELS)
        )
        info.add_metric((*self._labels, str(PAGE_SIZE), str(s.pages_total)), 1)
        yield info
        adapters = GaugeMetricFamily("vllm:lora_requests_info", "Adapters; none are served.", labels=LORA_LABELS)
        adapters.add_metric(("0", "", ""), 0)
        yield adapters
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(name, text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        yield self._by_name(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Drafts kept, by position in their window.",
            "position",
            {str(i): n for i, n in enumerate(s.accepted_per_pos)},
        )
        yield self._by_name(
            "onebox:prefix_lookups",
            "Prompts looked up in the prefix cache, by result.",
            "result",
            {
                "hit": s.prefix.get("hits", 0),
                **{reason: s.prefix.get(f"miss_{reason}", 0) for reason in MISSES},
            },
        )
        yield self._by_name(
            "onebox:snapshot_moves",
            "Snapshots made, moved and dropped.",
            "move",
            {
                "saved": s.prefix.get("saved", 0),
                "offloaded": s.prefix.get("offloaded", 0),
                "loaded": s.prefix.get("loaded", 0),
                "evicted": s.prefix.get("evicted_snapshots", 0),
            },
        )
        yield self._by_name(
            "onebox:kv_page_moves",
            "KV pages moved to host memory and back.",
            "move",
            {"offloaded": s.prefix.get("offloaded_pages", 0), "loaded": s.prefix.get("loaded_pages", 0)},
        )

    def _by_name(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(name, text, labels=(*LABELS, label))
        for key, value in values.items():
            family.add_metric((*self._labels, key), value)
        return family
