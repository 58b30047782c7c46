#!/usr/bin/env python3
"""Quality loss added by the decode kernels to that of a packed KV cache: the same windows read page by page, as in prefill, and token by
token.

Decode kernels multiply codes by rounded queries and weights; prefill kernels do the same with AVX-512 if the query heads of a KV head fill
their tiles, otherwise they dequantize packed pages to float. Both are compared with the same model and a float32 cache, page by page, on
tokens that read packed pages.

    python benchmarks/kv_decode_quality.py --models DIR ... --text heldout.txt [--windows 64] [--no-results]

Models need their profile (`effllm eval kv-profile`).
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from kv_model import Score, text_windows
from kv_system import OURS, engine_answers, scored
from report import Figure, parser_of, publish

CTX = 832


def scores(folder: Path, kv: str, windows: Sequence[Sequence[int]], by_token: bool = False) -> list[np.ndarray]:
    """Logits [CTX - FIRST, V] of every window."""
    with engine_answers(folder, kv, CTX, False, by_token) as answers:
        return [answers(window) for window in windows]


def measured(folder: Path, windows: Sequence[Sequence[int]]) -> Iterator[tuple[str, Score, Score]]:
    """One setting, page by page and token by token."""
    expected = scores(folder, "32bit", windows)
    for kv in OURS:
        yield kv, *(scored(expected, scores(folder, kv, windows, by_token)) for by_token in (False, True))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=64)
    options = parser.parse_args()
    figures = []
    for folder in options.models:
        windows = text_windows(folder, options.text.read_text(encoding="utf-8"), options.windows, CTX).tolist()
        for kv, prompt, answer in measured(folder, windows):
            conditions = f"{folder.name}, {len(windows)} windows of {CTX} tokens"
            key = f"{folder.name}_{kv}".replace("-", "_")
            print(f"{folder.name} {kv}: {prompt.kld:.3e} and {answer.kld:.3e}", file=sys.stderr, flush=True)
            figures += [Figure(f"prompt_{key}", f"KLD, {kv}, page by page", conditions, prompt.kld, "nats"),
                        Figure(f"answer_{key}", f"KLD, {kv}, token by token", conditions, answer.kld, "nats"),
                        Figure(f"ratio_{key}", f"{kv}, token by token against page by page", conditions, answer.kld / prompt.kld, "×")]
    publish("kv-answers", "What an answer's kernels add to what a packed cache loses", __doc__.split("\n\n")[1], figures,
            keep=not options.no_results)


if __name__ == "__main__":
    main()
