#!/usr/bin/env python3
"""Decode and prefill with all layers on a GPU: Triton kernels that dequantize in registers, torch ops, and the CPU for comparison.

Random weights of a named shape. The three sides hold the model at the same time and alternate in every round; figures are medians over
rounds, ratios are taken within one. The GPU's memory roofline is a sum over 1 GiB. Takes some minutes per format, and wants the GPU and the
CPU to itself.

    python benchmarks/gpu_decode.py [--shape tinyllama-1.1b] [--bits bf16 4bit 8bit] [--rounds 10] [--no-results]
"""

import sys
import time
from collections.abc import Iterator
from statistics import median

import numpy as np
import torch

from effllm import UsageError
from effllm.runtime.engine import Engine, open_prepared
from effllm.runtime.measuring.bench import prepare_synthetic
from effllm.runtime.planning.needed_kernels import Needs, kernel_kinds
from effllm.runtime.prepare import EngineOptions
from report import GIB, Figure, parser_of, publish

TOKENS, PROMPT, CTX = 16, 512, 1024
SIDES = {"card": "one kernel a product", "torch": "torch's operations", "cpu": "CPU"}
INTRO = ("Random weights, 16-bit KV cache, batch 1. Tokens one by one behind a prompt, with logits; all layers and the head on the card, "
         "by our kernels and by torch's operations, and the same model on the CPU, by turns in every round. Roof: a sum over 1 GiB on the "
         "card.")


def open_side(shape: str, bits: str, side: str) -> Engine:
    """An engine with random weights. Raises UsageError unless all of it is on the requested side."""
    options = EngineOptions(device="cpu" if side == "cpu" else "cuda", ctx=CTX)
    spec = None if bits == "bf16" else bits
    engine = list(open_prepared(lambda: prepare_synthetic(shape, options, spec), kernel_kinds(Needs(spec is not None), options)))[-1]
    if side != "cpu" and "cpu" in engine.placement.devices:
        raise UsageError(f"the card does not hold {shape} at {bits}", "--shape with fewer weights")
    if side == "torch":
        engine.backends["cuda"].on.compiles = False
    return engine


def time_run(engine: Engine, ids: list[int]) -> tuple[float, float]:
    """Seconds of a prompt, and of a token after it."""
    engine.reset()
    started = time.perf_counter()
    list(engine.prefill(ids[:PROMPT]))
    prompt_s = time.perf_counter() - started
    for token in ids[PROMPT : PROMPT + 4]:  # a page begun, a pass recorded
        engine.forward_logits([token])
    started = time.perf_counter()
    for token in ids[PROMPT + 4 :]:
        engine.forward_logits([token])
    return prompt_s, (time.perf_counter() - started) / (len(ids) - PROMPT - 4)


def roof(engine: Engine) -> float:
    """Memory read bandwidth of the GPU in bytes per second."""
    card = engine.backends["cuda"].on
    memory = torch.ones(GIB // 4, device=card.torch)
    rates = []
    for _ in range(4):
        memory.sum().item()
        started = time.perf_counter()
        memory.sum().item()
        rates.append(GIB / (time.perf_counter() - started))
    return max(rates)


def measure(shape: str, bits: str, rounds: int) -> Iterator[Figure]:
    engines = {side: open_side(shape, bits, side) for side in SIDES}
    ids = np.random.default_rng(0).integers(0, engines["cpu"].config.vocab_size, PROMPT + 4 + TOKENS).tolist()
    seconds: dict[str, list[tuple[float, float]]] = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        for side, engine in engines.items():
            timing = time_run(engine, ids)
            if number:  # the first compiles, and is not counted
                seconds[side].append(timing)
        print(f"{bits}: round {number} of {rounds}", file=sys.stderr)
    conditions = f"{shape}, {bits}, {rounds} rounds of {TOKENS} tokens"
    declined = sorted({reason for reason in engines["card"].backends["cuda"].kernel_choice.declined.values() if reason})
    for which, (name, count) in enumerate((("prompt", PROMPT), ("token", 1))):
        for baseline in ("torch", "cpu"):
            ratio = median(baseline_times[which] / times[which] for times,
                           baseline_times in zip(seconds["card"], seconds[baseline], strict=True))
            yield Figure(f"{bits}_{name}_against_{baseline}", f"{name}s against {SIDES[baseline]}", conditions, ratio, "×")
        for side, description in SIDES.items():
            rate = count / median(times[which] for times in seconds[side])
            note = f" ({'; '.join(declined)})" if declined and side == "card" else ""
            yield Figure(f"{bits}_{name}_{side}_tps", f"{name}s, {description}{note}", conditions, rate, "tokens/s")
    nbytes, peak_rate = engines["card"].model.bytes_per_pass, roof(engines["card"])
    token = median(times[1] for times in seconds["card"])
    read = f"{nbytes / 1e9:.3f} GB, {peak_rate / 1e9:.0f} GB/s"
    yield Figure(f"{bits}_roof", "a token, share of the card's roof", read, nbytes / token / peak_rate, "")
    for engine in engines.values():
        engine.close()


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", default="tinyllama-1.1b")
    parser.add_argument("--bits", nargs="+", default=["bf16", "4bit", "8bit"])
    parser.add_argument("--rounds", type=int, default=10)
    arguments = parser.parse_args()
    figures = [figure for bits in arguments.bits for figure in measure(arguments.shape, bits, arguments.rounds)]
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else "a simulated GPU"
    publish("gpu-decode", f"Tokens and prompts on {name}", f"{INTRO} torch {torch.__version__}.", figures, not arguments.no_results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
