"""Prometheus metrics of a server's answers, under llama.cpp's names."""

from __future__ import annotations

from collections.abc import Iterable

from ...runtime.events import Stats
from .answer_queue import AnswerQueue

TEXT = "text/plain; version=0.0.4; charset=utf-8"


class Metrics:
    """Totals over all answers that have ended."""

    def __init__(self) -> None:
        self.read = self.made = self.longest = self.drafted = self.accepted = 0
        self.reading_s = self.writing_s = 0.0

    def add(self, stats: Stats) -> None:
        self.read += stats.read_tokens
        self.made += len(stats.token_ids)
        self.reading_s += stats.prefill_s
        self.writing_s += stats.decode_s
        self.longest = max(self.longest, stats.context_used)
        drafts = stats.speculation or {}
        self.drafted += drafts.get("drafted", 0)
        self.accepted += drafts.get("accepted", 0)

    def render(self, answer_queue: AnswerQueue) -> str:
        """In Prometheus' text format, with the state of the queue."""
        rows: Iterable[tuple[str, str, str, float]] = (
            ("prompt_tokens_total", "counter", "Prompt tokens processed.", self.read),
            ("prompt_seconds_total", "counter", "Prompt processing time in seconds.", self.reading_s),
            ("tokens_predicted_total", "counter", "Generated tokens.", self.made),
            ("tokens_predicted_seconds_total", "counter", "Generation time in seconds.", self.writing_s),
            ("n_tokens_max", "counter", "Largest context so far, in tokens.", self.longest),
            ("spec_decode_num_draft_tokens_total", "counter", "Drafted tokens.", self.drafted),
            ("spec_decode_num_accepted_tokens_total", "counter", "Accepted draft tokens.", self.accepted),
            ("prompt_tokens_seconds", "gauge", "Average prompt throughput in tokens/s.", rate(self.read, self.reading_s)),
            ("predicted_tokens_seconds", "gauge", "Average generation throughput in tokens/s.", rate(self.made, self.writing_s)),
            ("requests_processing", "gauge", "Requests being processed.", answer_queue.running),
            ("requests_deferred", "gauge", "Requests waiting in the queue.", answer_queue.waiting))
        return "".join(f"# HELP llamacpp:{name} {what}\n# TYPE llamacpp:{name} {kind}\nllamacpp:{name} {value:.15g}\n"
                       for name, kind, what, value in rows)


def rate(count: int, seconds: float) -> float:
    return count / seconds if seconds else 0.0
