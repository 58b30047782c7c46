#!/usr/bin/env python3
"""Embedding throughput of a decoder in texts per second: Qwen3-Embedding-0.6B's shape with random weights, batched and one by one, against
transformers on torch.

The folder is created with transformers, whose model is the other side: it pads texts to the longest one, in the stored weight type. Both
start from token ids and process the same texts, alternating, with the same number of threads. Figures are medians over rounds.

    python benchmarks/decoder_embeddings.py [--texts 64] [--tokens 24 40] [--layers 28] [--rounds 3] [--threads N] [--no-results]

Needs torch and transformers (`make setup`), 5 GB of memory, 1 GB of disk and some three minutes.
"""

import json
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3Model

from effllm.runtime.engine import Engine, EngineOptions, open_engine
from effllm.runtime.generation.embedding import LAST, embed_texts
from report import Figure, parser_of, publish

VOCAB, NEAR = 151669, 0.99  # NEAR: how near vectors of random weights in 16 bits are by two ways of computing
INTRO = ("A decoder of {layers} layers of 1,024 channels, 16 heads, 8 of keys, and an inner layer of 3,072 (Qwen3-Embedding-0.6B's shape), "
         "random weights, bfloat16: token ids to vectors of the last token, {texts} texts of {low} to {high} tokens, {threads} threads, "
         "all sides by turns, medians of {rounds} behind one that is not counted.")


def make_models(folder: Path, layers: int, threads: int) -> tuple[Engine, Qwen3Model]:
    torch.manual_seed(0)
    config = Qwen3Config(vocab_size=VOCAB, hidden_size=1024, intermediate_size=3072, num_hidden_layers=layers, num_attention_heads=16,
                         num_key_value_heads=8, head_dim=128, max_position_embeddings=32768, tie_word_embeddings=True)
    model = Qwen3Model(config).to(torch.bfloat16).eval()
    model.save_pretrained(folder)
    stated = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**stated, "architectures": ["Qwen3ForCausalLM"]}))
    *_, engine = open_engine(folder, EngineOptions(ctx=2048, threads=threads))
    return engine, model


def ours(engine: Engine, rows: list[list[int]]) -> np.ndarray:
    reading = embed_texts(engine, rows, LAST, lambda: False)
    while True:
        try:
            next(reading)
        except StopIteration as stop:
            return np.array(stop.value)


def one_by_one(engine: Engine, rows: list[list[int]]) -> np.ndarray:
    return np.concatenate([ours(engine, [row]) for row in rows])


def theirs(model: Qwen3Model, rows: list[list[int]]) -> np.ndarray:
    longest, lengths = max(map(len, rows)), torch.tensor([*map(len, rows)])
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = (torch.arange(longest) < lengths[:, None]).long()
    states = model(ids, attention_mask=mask, use_cache=False).last_hidden_state[torch.arange(len(rows)), lengths - 1].float()
    return torch.nn.functional.normalize(states).numpy()


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, nargs=2, default=[24, 40])
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    threads, draw, (low, high) = options.threads, np.random.default_rng(0), options.tokens
    torch.set_num_threads(threads)
    rows = [draw.integers(1, VOCAB, draw.integers(low, high + 1)).tolist() for _ in range(options.texts)]
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        engine, model = make_models(Path(folder), options.layers, threads)
        sides = {"ours": lambda: ours(engine, rows), "one": lambda: one_by_one(engine, rows), "torch": lambda: theirs(model, rows)}
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(1 + options.rounds):
            results = {}
            for name, read in sides.items():
                started = perf_counter()
                results[name] = read()
                seconds[name].append(perf_counter() - started)
        engine.close()
    assert np.array_equal(results["ours"], results["one"]), "a text beside others has another vector"
    assert (results["ours"] * results["torch"]).sum(1).min() > NEAR, "the sides make other vectors"
    took = {name: median(times[1:]) for name, times in seconds.items()}
    where = f"{options.texts} texts"
    figures = [Figure("ratio_one", "as fast as one by one", where, took["one"] / took["ours"], "x"),
               Figure("ratio_torch", "as fast as torch", where, took["torch"] / took["ours"], "x"),
               *(Figure(name, label, where, options.texts / took[name], "texts/s") for name, label in
                 (("ours", "effllm, several in a pass"), ("one", "effllm, one by one"), ("torch", "transformers and torch, bfloat16")))]
    intro = INTRO.format(layers=options.layers, texts=options.texts, low=low, high=high, threads=threads, rounds=options.rounds)
    publish("decoder-texts", "Embedding of texts by a decoder", intro, figures, not options.no_results)


if __name__ == "__main__":
    main()
