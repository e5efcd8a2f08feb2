"""Figures of the server in Prometheus's text format."""

from collections.abc import Iterable

import prometheus_client
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dsv32_jax.serve.worker import EngineWorker, Item, Ticket

FIRST_BUCKETS = (0.01, 0.03, 0.1, 0.3, 1, 3, 10, 30, 100)
NEXT_BUCKETS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1, 3)


class Metrics:
    """The server's figures, in a registry of their own."""

    def __init__(self, worker: EngineWorker):
        """Begin at zero.

        Args:
            worker: Whose counts are read when the figures are.
        """
        self._registry = prometheus_client.CollectorRegistry()
        self._registry.register(_EngineFigures(worker))
        self._requests = prometheus_client.Counter(
            "dsv32_requests", "HTTP requests", ["path", "status"], registry=self._registry
        )
        self._broken = prometheus_client.Counter(
            "dsv32_failed_streams",
            "Streams that ended in an error",
            ["code"],
            registry=self._registry,
        )
        self._first = prometheus_client.Histogram(
            "dsv32_time_to_first_token_seconds",
            "From a request's admission to its first token",
            buckets=FIRST_BUCKETS,
            registry=self._registry,
        )
        self._next = prometheus_client.Histogram(
            "dsv32_inter_token_seconds",
            "Between two tokens of a text",
            buckets=NEXT_BUCKETS,
            registry=self._registry,
        )

    def count(self, path: str, status: int) -> None:
        """Count a request.

        Args:
            path: One of the server's, or "other": a label must not take every value that clients think of.
            status: The HTTP status; 499 where the client left.
        """
        self._requests.labels(path, status).inc()

    def count_failed_stream(self, code: str) -> None:
        """Count a stream that failed after it had begun, with the status 200.

        Args:
            code: Of the error.
        """
        self._broken.labels(code).inc()

    def time(self, ticket: Ticket, item: Item, before: float | None) -> None:
        """Measure a token's delay.

        Args:
            ticket: The request.
            item: The token.
            before: When the same text's token before it was drawn, or None.
        """
        if before is None:
            self._first.observe(item.at - ticket.submitted)
        else:
            self._next.observe(item.at - before)

    def text(self) -> bytes:
        """Return the figures."""
        return prometheus_client.generate_latest(self._registry)


class _EngineFigures(Collector):
    """Reads the engine's own counts when asked, so that nothing is counted twice."""

    def __init__(self, worker: EngineWorker):
        self._worker = worker

    def collect(self) -> Iterable[Metric]:
        """Yield the figures."""
        stats = self._worker.stats
        counts = {
            "prompt_tokens": ("Tokens of prompts that were run", stats.prompt_tokens),
            "reused_tokens": ("Tokens of prompts found in the cache", stats.reused_tokens),
            "generated_tokens": ("Tokens drawn", stats.drawn_tokens),
            "drafts": ("Drafted tokens checked", stats.drafts),
            "accepted_drafts": ("Drafted tokens taken", stats.accepted),
            "preemptions": ("Texts that lost their cache and began again", stats.preempted),
        }
        for name, (what, value) in counts.items():
            yield CounterMetricFamily(f"dsv32_{name}", what, value)
        levels = {
            "waiting_texts": ("Texts without a slot", self._worker.n_queued),
            "running_texts": ("Texts with a slot", self._worker.n_running),
            "draft_acceptance_ratio": ("Share of the drafts taken so far", stats.acceptance),
        }
        for name, (what, level) in levels.items():
            yield GaugeMetricFamily(f"dsv32_{name}", what, level)
