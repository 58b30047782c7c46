#!/usr/bin/env python3
"""Cost of a LoRA adapter on all matrices of a model: a token and a prompt with and without it, alternating in one process.

    python benchmarks/adapters.py [--ranks 8 16 64] [--dora 16] [--bits 4] [--rounds 9]

Adapters of the ranks given by `--dora` are DoRA adapters, for which the time to compute row norms at startup is reported as well. Both
engines hold the same random weights of the `tinyllama-1.1b` shape. Ratios are taken within a round, figures are medians over rounds; next
to them the adapter's share of the bytes read per token.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
from safetensors.numpy import save_file

from effllm.offload.hardware import cpu_threads
from effllm.runtime.adapters.dora import MEASURING
from effllm.runtime.engine import Engine, open_prepared
from effllm.runtime.events import Progress
from effllm.runtime.measuring.bench import prepare_synthetic
from effllm.runtime.measuring.synthetic import synthetic_config
from effllm.runtime.prepare import EngineOptions
from report import Figure, parser_of, publish

SHAPE, PROMPT, TOKENS = "tinyllama-1.1b", 512, 32
INTRO = "A model with a LoRA adapter beside all its matrices, and without, by turns. Ratios within a round, medians over rounds."


def adapter(folder: Path, rank: int, has_lengths: bool = False) -> Path:
    """Random LoRA matrices of this rank for every matrix of the layers, in PEFT's format; with equal row norms for all rows (DoRA)."""
    config, rng = synthetic_config(SHAPE), np.random.default_rng(rank)
    hidden, kv = config.hidden_size, config.num_key_value_heads * config.head_dim
    attention = {"q_proj": (hidden, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, hidden)}
    mlp = {"gate_proj": (config.intermediate_size, hidden), "up_proj": (config.intermediate_size, hidden),
           "down_proj": (hidden, config.intermediate_size)}
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for block, matrices in (("self_attn", attention), ("mlp", mlp)):
            for name, (rows, depth) in matrices.items():
                for which, shape in (("A", (rank, depth)), ("B", (rows, rank))):
                    values = 0.01 * rng.standard_normal(shape, np.float32)
                    tensors[f"base_model.model.model.layers.{layer}.{block}.{name}.lora_{which}.weight"] = values.astype(np.float16)
                if has_lengths:
                    tensors[f"base_model.model.model.layers.{layer}.{block}.{name}.lora_magnitude_vector"] = np.ones(rows, np.float32)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def opened(bits: int, *adapters: Path) -> tuple[Engine, float]:
    """An engine, and the seconds spent computing row norms."""
    options, measuring = EngineOptions(device="cpu", ctx=PROMPT + TOKENS, spec="off", lora=tuple(map(str, adapters))), []
    for event in open_prepared(lambda: prepare_synthetic(SHAPE, options, f"{bits}bit"), ()):
        if isinstance(event, Progress) and event.phase == MEASURING:
            measuring.append(time.perf_counter())
    return event, measuring[-1] - measuring[0] if measuring else 0.0


def seconds(engine: Engine, ids: list[int]) -> tuple[float, float]:
    """Time of a prompt, and of a token after a few others."""
    engine.reset()
    started = time.perf_counter()
    list(engine.prefill(ids))
    prompt = time.perf_counter() - started
    engine.reset()
    list(engine.prefill(ids[:8]))
    started = time.perf_counter()
    for token in ids[:TOKENS]:
        engine.forward_logits([token])
    return prompt, (time.perf_counter() - started) / TOKENS


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--dora", type=int, nargs="*", default=[16], metavar="RANK")
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    ids, figures = np.random.default_rng(0).integers(0, 32000, PROMPT).tolist(), []
    plain, _ = opened(options.bits)
    with tempfile.TemporaryDirectory() as folder:
        for rank, has_lengths in [*((rank, False) for rank in options.ranks), *((rank, True) for rank in options.dora)]:
            called = f"{'dora_' * has_lengths}{rank}"
            adapted, measuring = opened(options.bits, adapter(Path(folder) / called, rank, has_lengths))
            rounds = [[seconds(engine, ids) for engine in (plain, adapted)] for _ in range(options.rounds + 1)][1:]  # the first wakes them
            share = adapted.prepared.adapters.nbytes / plain.model.bytes_per_pass
            machine = f"{SHAPE} at {options.bits} bits, {cpu_threads()} threads, {options.rounds} rounds"
            conditions = f"{'DoRA, ' * has_lengths}rank {rank}, {machine}"
            for index, name, description in ((1, "token", "a token"), (0, "prompt", f"a prompt of {PROMPT} tokens")):
                key = f"{name}_{called}"
                pairs = [(one[index], other[index]) for one, other in rounds]
                figures += [Figure(f"{key}_ratio", f"{description}: its rate with the adapter", conditions,
                                   median(a / b for a, b in pairs), "×"),
                            Figure(f"{key}_plain", f"{description}, without", conditions, 1e3 * median(a for a, _ in pairs), "ms"),
                            Figure(f"{key}_beside", f"{description}, with", conditions, 1e3 * median(b for _, b in pairs), "ms")]
            figures.append(Figure(f"bytes_{called}", "its bytes, of those of a token", conditions, 100 * share, "%"))
            if has_lengths:
                figures.append(Figure(f"measuring_{called}", "measuring rows at the start", conditions, measuring, "s"))
            adapted.close()
    plain.close()
    publish("adapters", "Adapters", INTRO, figures, keep=not options.no_results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
