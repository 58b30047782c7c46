"""Shows an answer as it streams, and its statistics."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from typing import TYPE_CHECKING

from .interrupt import interruptible, termination_signal
from .loading import show_progress
from .number_format import margin, rounded
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.events import Stats
    from ..runtime.session import Session

# finish reason -> note
FINISH_NOTES = {
    "length": "stopped after {tokens} (-n)",
    "cancelled": "stopped by {what} after {tokens}{then}",
}


def show_answer(events: Iterable[object], session: Session, screen: Screen, silent: bool = False) -> Stats:
    """Stream the answer to stdout and its reasoning to stderr, unless `silent`; returns the statistics. Raises SecondInterrupt at the
    second Ctrl-C; in any case the last line is ended."""
    from ..runtime.events import Done, TextDelta

    screen.set_preformatted(session.constraint is not None)
    try:
        with interruptible(session.cancel):
            for event in show_progress(events, screen, TextDelta | Done):
                if isinstance(event, Done):
                    stats = event.stats
                elif silent:
                    continue
                elif event.kind == "thinking":
                    screen.thinking(event.text)
                else:
                    screen.answer(event.text)
            return stats
    finally:
        if isinstance(events, Generator):
            events.close()  # the session adds the answer so far to its history
        screen.end_answer()


def print_finish_reason(stats: Stats, session: Session, screen: Screen, next_step: str = "") -> None:
    """Note why an answer ended, unless it ended by itself or a notice has told. `next_step`: what another Ctrl-C would do."""
    count = len(stats.token_ids)
    if stats.finish_reason in FINISH_NOTES and (stats.finish_reason != "length" or count == session.max_tokens):
        signal_name = termination_signal()
        screen.note(FINISH_NOTES[stats.finish_reason].format(tokens=format_token_count(count), what=signal_name or "Ctrl-C",
                                                             then="" if signal_name else next_step))


def print_stats(stats: Stats, session: Session, screen: Screen) -> None:
    """Write the lines of `--stats` to stderr: four, and one each for paged experts, selected cache pages, and speculation."""
    from ..offload.size import format_size

    note, cached = screen.note, f", {stats.cached_tokens} of them cached" if stats.cached_tokens else ""
    note(" · ".join((f"prompt {format_token_count(stats.prompt_tokens)}{cached}{format_rate(stats.prefill_tps)}",
                    f"answer {format_token_count(len(stats.token_ids))}{format_rate(stats.decode_tps)}",
                    f"first token {stats.ttft_s:.2f} s", f"load {stats.load_s:.2f} s", f"seed {stats.seed}")))
    note(" · ".join((f"peak memory {format_size(stats.peak_rss_bytes)}, {format_size(stats.planned_bytes)} planned",
                    f"weights {format_size(stats.weights_bytes)}", f"read {format_size(stats.disk_bytes_read)}",
                    f"layers {placement_summary(stats.placement)}")))
    note(" · ".join((f"context {stats.context_used} of {stats.context_max} tokens", f"cache {format_size(stats.kv_bytes)}",
                    *cache_packing(stats),
                    *((f"{stats.kv_bits_per_value:.1f} bits per value overall",) if stats.kv_bits_per_value else ()))))
    if (experts := stats.placement.get("experts")) is not None and experts["needed"]:
        ready = 100 * experts["ready"] / experts["needed"]
        note(f"experts: {experts['slots']} of {experts['total']} in memory, hit rate {100 * experts['hit_rate']:.0f}% "
            f"of {experts['needed']} needed ({experts['policy']}), {ready:.0f}% with prefetched ones; "
            f"{experts['guesses_used']} of {experts['guessed']} prefetched experts were used")
    if (pages := stats.placement.get("kv_read")) is not None and pages["among"]:
        note(f"KV cache on disk: {pages['asked']} of {pages['among']} pages selected ({100 * pages['asked'] / pages['among']:.0f}%), "
            f"{pages['found']} of them already in memory")
    if stats.speculation is not None:
        speculation, options = stats.speculation, session.engine.options
        if speculation["drafted"]:
            note("speculation: {drafted} drafted, {accepted} accepted, {tokens_per_pass:.2f} tokens per pass, "
                "{gain:.1f} times as fast".format(**speculation))
        elif stats.placement["streamed_bytes"] or options.spec in ("lookup", "mtp") or options.draft:  # requested or announced
            note(f"speculation: nothing was drafted: {speculation['undrafted']}")
    note(prediction_summary(stats.placement))


def cache_packing(stats: Stats) -> tuple[str, ...]:
    """How much of the cache is packed; empty for a cache without packing."""
    if not stats.kv_packed:
        return ()
    if not stats.packed_tokens:
        return (f"none quantized yet, {stats.exact_tokens} exact",)
    return (f"{stats.packed_tokens} packed at {stats.packed_bits:.3g} bits per value and {stats.exact_tokens} exact",)


def format_token_count(tokens: int) -> str:
    return f"{tokens} token{'' if tokens == 1 else 's'}"


def placement_summary(placement: Mapping[str, object]) -> str:
    return ", ".join(f"{device} {layers}" for device, layers in placement["layers"].items())


def prediction_summary(placement: Mapping[str, object]) -> str:
    """Predicted and measured speed: `predicted 20.1 tokens/s (± 15%), measured 19.4`."""
    predicted, measured = placement["predicted_tps"], placement["measured_tps"]
    if predicted is None:
        return f"no prediction: {placement['reason']}"
    prediction = f"predicted {rounded(predicted)} tokens/s ({margin(placement['error'])})"
    if measured is None:
        return f"{prediction}, not measured: the only token came from the prompt's pass"
    ratio = measured / predicted
    difference = f": {100 * abs(ratio - 1):.0f}% {'less' if ratio < 1 else 'more'}, {placement['miss']}" if placement["miss"] else ""
    return f"{prediction}, measured {rounded(measured)}{difference}"


def format_rate(tokens_per_second: float) -> str:
    return f" ({tokens_per_second:.0f}/s)" if tokens_per_second else ""
