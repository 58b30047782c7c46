#!/usr/bin/env python3
"""Prompts of bf16 and fp8 weights with activations rounded to bf16 (AVX-512 BF16) against float32 tiles, what `--exact` runs: the matrices
of TinyLlama 1.1B's layers, both ways by turns, for several numbers of tokens; and what the rounding costs a model.

Figures are medians over rounds, ratios are taken within a round. With `--model` and `--text`: the KL divergence of next tokens from a run
that rounds nothing, of effllm and of transformers on torch in bfloat16, each against its own float32, on the same windows.

    python benchmarks/rounded_activations.py [--layers 6] [--rounds 9] [--model FOLDER --text FILE] [--no-results]

The model's weights must be bf16 (`dequantized_gguf.py --bf16` makes such a folder). Wants the machine to itself.
"""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import numpy as np

from effllm.kernels.cpu.bf16_pairs import HAS_PAIRS
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.codes import Codes
from effllm.quant.pack import pack
from effllm.quant.spec import QuantSpec
from effllm.quant.weight import Linear, Norm, Weight, from_f32
from report import Figure, parser_of, publish

HIDDEN, FFN, KEYS = 2048, 5632, 256
TOKENS = {"bf16": (9, 16, 32, 64, 256, 512), "float8:128": (17, 32, 64, 512)}
NAMES = {"bf16": "bf16", "float8:128": "fp8"}
CTX, WINDOWS = 1024, 4
INTRO = ("Packing the activations, and joining gate and up, are in the time of products; attention and norms are left out. "
         "The KL divergence of each program is from its own float32.")


def bf16_matrix(rng: np.random.Generator, rows: int, depth: int) -> Linear:
    return Linear(Weight.raw("bf16", (rows, depth), from_f32(rng.standard_normal((rows, depth), np.float32) / 50, "bf16")))


def fp8_matrix(rng: np.random.Generator, rows: int, depth: int) -> Linear:
    spec, groups = QuantSpec.parse("float8:128"), -(-depth // 128)
    codes = rng.integers(0, 127, (rows, depth), np.uint8) | rng.integers(0, 2, (rows, depth), np.uint8) << 7
    made = Codes(codes, np.full((-(-rows // 16), groups), 2.0**-10, np.float32), None, np.ones(rows, np.float32))
    memory = np.zeros(spec.nbytes((rows, depth)) + 64, np.uint8)
    blob = memory[-memory.ctypes.data % 64 :][: spec.nbytes((rows, depth))]
    blob[:] = pack(made, spec)
    return Linear(Weight.low_bit(spec, (rows, depth), blob))


def seconds(ops: CpuOps, layers: list[dict[str, Linear]], x: np.ndarray) -> float:
    """Of all products of the layers, every one with the same input."""
    none, residual = Norm("none"), x.copy()
    start = time.perf_counter()
    for layer in layers:
        ops.norm_linear(x, none, [layer["q"], layer["k"], layer["v"]])
        hidden = ops.gated_hidden(x, none, layer["gate"], layer["up"], "silu")
        ops.linear_add(hidden, layer["down"], residual)
        ops.linear_add(x, layer["o"], residual)
        ops.flush()
    return time.perf_counter() - start


def speed(stored: str, num_layers: int, rounds: int, threads: int) -> list[Figure]:
    """Figures of one stored type."""
    rng, make, figures = np.random.default_rng(0), bf16_matrix if stored == "bf16" else fp8_matrix, []
    shapes = {"q": (HIDDEN, HIDDEN), "k": (KEYS, HIDDEN), "v": (KEYS, HIDDEN), "o": (HIDDEN, HIDDEN), "gate": (FFN, HIDDEN),
              "up": (FFN, HIDDEN), "down": (HIDDEN, FFN)}
    layers = [{role: make(rng, *shape) for role, shape in shapes.items()} for _ in range(num_layers)]
    products, pool = num_layers * sum(rows * depth for rows, depth in shapes.values()), ThreadPool(threads)
    for tokens in TOKENS[stored]:
        dims = Dims(hidden_size=HIDDEN, num_attention_heads=32, num_key_value_heads=4, head_dim=64, intermediate_size=FFN, vocab_size=32,
                    chunk=tokens, ctx=tokens, logit_rows=1)
        sides = [CpuOps(pool, dims, default_registry(exact=exact)) for exact in (True, False)]
        x = rng.standard_normal((tokens, HIDDEN), np.float32)
        taken = [[seconds(ops, layers, x) for ops in sides] for _ in range(rounds + 1)][1:]  # the first round warms up
        conditions, key = f"{tokens} tokens, {num_layers} layers, {threads} threads", f"{NAMES[stored]}_{tokens}"
        figures += [Figure(f"{key}_ratio", f"{NAMES[stored]} against float32 tiles", conditions, median(a / b for a, b in taken), "×"),
                    Figure(f"{key}_gflops", f"{NAMES[stored]}, rounded activations", conditions,
                           2 * products * tokens / median(b for _, b in taken) / 1e9, "GFLOP/s")]
    pool.close()
    return figures


def effllm_log_probs(folder: Path, windows: list[list[int]], exact: bool) -> Iterator[np.ndarray]:
    from effllm.runtime.engine import open_engine
    from effllm.runtime.prepare import EngineOptions

    *_, engine = open_engine(folder, EngineOptions(device="cpu", kv="32bit", ctx=CTX, exact=exact))
    for window in windows:
        yield normalised(np.concatenate([logits.copy() for _, logits in engine.score(window)]))
    engine.close()


def torch_log_probs(folder: Path, windows: list[list[int]], exact: bool) -> Iterator[np.ndarray]:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32 if exact else torch.bfloat16)
    with torch.no_grad():
        for window in windows:
            yield normalised(model(torch.tensor([window])).logits[0].float().numpy())


def normalised(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities, float64 [T, V]."""
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(1, keepdims=True))


def cost(name: str, key: str, log_probs: Callable[..., Iterator[np.ndarray]], folder: Path, windows: list[list[int]]) -> list[Figure]:
    """Divergence of a rounded run from an exact one."""
    divergence, same = [], []
    for exact, rounded in zip(log_probs(folder, windows, True), log_probs(folder, windows, False), strict=True):
        divergence.append((np.exp(exact) * (exact - rounded)).sum(1))
        same.append(exact.argmax(1) == rounded.argmax(1))
    conditions = f"{folder.name}, {len(windows)} windows of {CTX} tokens"
    return [Figure(f"{key}_kld", f"KL divergence, {name}", conditions, 1e6 * float(np.mean(divergence)), "millionths"),
            Figure(f"{key}_same_top", f"same likeliest token, {name}", conditions, 100 * float(np.mean(same)), "%")]


def main() -> int:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", type=Path, help="folder of a model in bf16")
    parser.add_argument("--text", type=Path)
    options = parser.parse_args()
    if not HAS_PAIRS:
        sys.exit("this processor multiplies no pairs of bf16, or has AMX, which rounds nothing")
    figures = [figure for stored in TOKENS for figure in speed(stored, options.layers, options.rounds, options.threads)]
    if options.model is not None:
        from effllm.runtime.config import read_config
        from effllm.runtime.tokenizer import Tokenizer

        ids = Tokenizer.load(options.model, read_config(options.model)).encode(options.text.read_text(encoding="utf-8"))
        windows = [ids[begin : begin + CTX] for begin in range(0, CTX * WINDOWS, CTX)]
        figures += cost("effllm", "effllm", effllm_log_probs, options.model, windows)
        figures += cost("transformers in bfloat16", "transformers", torch_log_probs, options.model, windows)
    publish("rounded-activations", "Prompts with activations rounded to bf16", INTRO, figures, keep=not options.no_results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
