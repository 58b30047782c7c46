#!/usr/bin/env python3
"""What an answer's kernels add to what a packed KV cache loses: the same windows read page by page, as a prompt is, and token by token.

A prompt's kernels open packed pages as floats; an answer's multiply codes with rounded queries and weights. Both are held against the same
model with a float32 cache, page by page, where a token reads packed pages.

    python benchmarks/kv_answers.py --models DIR ... --text heldout.txt [--windows 64] [--no-results]

Models bring their profile (`effllm eval kv-profile`).
"""

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from effllm.runtime.engine import Engine
from effllm.runtime.prepare import EngineOptions
from kv_grid import opened
from kv_model import FIRST, Score, text_windows
from kv_system import scored
from report import Figure, publish

SETTINGS = ("8bit", "6bit", "5bit", "4bit", "3bit", "2bit")
CTX = 832


def answers(engine: Engine, windows: np.ndarray, by_token: bool) -> list[np.ndarray]:
    """Logits [CTX - FIRST, V] of every window."""
    made = []
    for window in windows.tolist():
        parts = [logits[max(0, FIRST - start) :].copy() for start, logits in engine.score(window, 1, by_token=by_token)
                 if start + len(logits) > FIRST]
        made.append(np.concatenate(parts))
    return made


def measured(folder: Path, windows: np.ndarray) -> Iterator[tuple[str, Score, Score]]:
    """A setting, page by page and token by token."""
    with_cache = lambda kv: opened(folder, EngineOptions(device="cpu", kv=kv, ctx=CTX, force=True), False)  # noqa: E731
    exact = with_cache("32bit")
    wanted = answers(exact, windows, False)
    exact.close()
    for kv in SETTINGS:
        engine = with_cache(kv)
        yield kv, scored(wanted, answers(engine, windows, False)), scored(wanted, answers(engine, windows, True))
        engine.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, nargs="+", required=True)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--windows", type=int, default=64)
    parser.add_argument("--no-results", action="store_true", help="print, keep nothing")
    options = parser.parse_args()
    figures = []
    for folder in options.models:
        windows = text_windows(folder, options.text.read_text(encoding="utf-8"), options.windows, CTX)
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
