"""Prometheus metrics of a server, under the names of vLLM and of SGLang."""

import math
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from specsim.core.config import SpecConfig
from specsim.core.metrics import latency
from specsim.serving.requests import Request
from specsim.serving.trace import StepRecord

_SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
_COUNTERS = {
    "prompt_tokens": "Prompt tokens.",
    "generation_tokens": "Generated tokens.",
}


class Metrics:
    """Counters and gauges of one server.

    A round without drafts counts as no draft round, as in vLLM.
    """

    def __init__(self, model: str, config: SpecConfig) -> None:
        self._registry = CollectorRegistry()
        self._model = model
        self._drafts = self._counter("vllm:spec_decode_num_drafts", "Rounds of requests with drafts.")
        self._proposed = self._counter("vllm:spec_decode_num_draft_tokens", "Proposed draft positions.")
        self._accepted = self._counter("vllm:spec_decode_num_accepted_tokens", "Accepted drafts.")
        by_position = Counter(
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted drafts by position.",
            ["model_name", "position"],
            registry=self._registry,
        )
        self._by_position = [by_position.labels(model, str(position)) for position in range(config.num_steps)]
        self._tokens = {
            (tool, name): self._counter(f"{tool}:{name}", text)
            for tool in ("vllm", "sglang")
            for name, text in _COUNTERS.items()
        }
        self._ended = Counter(
            "vllm:request_success", "Requests by ending.", ["model_name", "finished_reason"], registry=self._registry
        )
        self._requests = self._counter("sglang:num_requests", "Requests that have ended.")
        self._aborted = self._counter("sglang:num_aborted_requests", "Aborted requests.")
        self._cached = self._counter("sglang:cached_tokens", "Prompt tokens whose KV was reused.")
        self._preempted = self._counter("vllm:num_preemptions", "Preemptions.")
        self._gauges = {
            name: Gauge(name, text, ["model_name"], registry=self._registry).labels(model)
            for name, text in {
                "vllm:num_requests_running": "Running requests.",
                "vllm:num_requests_waiting": "Waiting requests.",
                "vllm:kv_cache_usage_perc": "Share of KV slots in use.",
                "sglang:num_running_reqs": "Running requests.",
                "sglang:num_queue_reqs": "Waiting requests.",
                "sglang:num_used_tokens": "KV slots in use.",
                "sglang:token_usage": "Share of KV slots in use.",
                "sglang:spec_accept_length": "Tokens of a round with drafts, since the start.",
                "sglang:spec_accept_rate": "Accepted share of proposed draft positions, since the start.",
            }.items()
        }
        self._times = {
            (tool, name): self._histogram(f"{tool}:{name}_seconds")
            for tool in ("vllm", "sglang")
            for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency")
        }
        self.rounds = 0  # with drafts
        self.proposed = 0
        self.accepted = 0

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self._registry).labels(self._model)

    def _histogram(self, name: str) -> Histogram:
        text = f"{name.partition(':')[2].replace('_', ' ')}, of requests."
        return Histogram(name, text, ["model_name"], registry=self._registry, buckets=_SECONDS).labels(self._model)

    @property
    def accept_length(self) -> float:
        """Mean accepted tokens of a round with drafts, 0 without one."""
        return 1 + self.accepted / self.rounds if self.rounds else 0.0

    @property
    def accept_rate(self) -> float:
        """Accepted share of the proposed positions, 0 without one."""
        return self.accepted / self.proposed if self.proposed else 0.0

    def count_step(self, record: StepRecord) -> None:
        """Count what happens in a step."""
        self._preempted.inc(len(record.preempted))

    def count_request(self, request: Request) -> None:
        """Count a request that has ended, with its rounds."""
        reason = request.finish_reason or ""
        self._requests.inc()
        self._ended.labels(self._model, reason).inc()
        self._aborted.inc(reason == "abort")
        self._cached.inc(request.num_reused)
        for tool in ("vllm", "sglang"):
            self._tokens[tool, "prompt_tokens"].inc(len(request.prompt_ids))
            self._tokens[tool, "generation_tokens"].inc(len(request.token_ids))
        for accepted, depth in zip(request.accepted, request.proposed, strict=True):
            self._count_round(accepted - 1, depth)
        self._observe(request)

    def _count_round(self, num_accepted: int, depth: int) -> None:
        if not depth:
            return
        self.rounds += 1
        self.proposed += depth
        self.accepted += num_accepted
        self._drafts.inc()
        self._proposed.inc(depth)
        self._accepted.inc(num_accepted)
        for counter in self._by_position[:num_accepted]:
            counter.inc()

    def _observe(self, request: Request) -> None:
        times = latency(request.arrived, request.emissions)
        for name, seconds in {
            "time_to_first_token": times.ttft_seconds,
            "inter_token_latency": times.itl_seconds,
            "e2e_request_latency": times.e2e_seconds,
        }.items():
            if not math.isnan(seconds):
                for tool in ("vllm", "sglang"):
                    self._times[tool, name].observe(seconds)

    def page(self, num_running: int, num_waiting: int, usage: Mapping[str, int]) -> bytes:
        """Write the page; usage: KVPool.usage."""
        used = usage["slots"] - usage["free"] - usage["cached"]
        share = used / usage["slots"]
        for name, value in {
            "vllm:num_requests_running": num_running,
            "vllm:num_requests_waiting": num_waiting,
            "vllm:kv_cache_usage_perc": share,
            "sglang:num_running_reqs": num_running,
            "sglang:num_queue_reqs": num_waiting,
            "sglang:num_used_tokens": used,
            "sglang:token_usage": share,
            "sglang:spec_accept_length": self.accept_length,
            "sglang:spec_accept_rate": self.accept_rate,
        }.items():
            self._gauges[name].set(value)
        return generate_latest(self._registry)
