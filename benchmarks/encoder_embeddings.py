#!/usr/bin/env python3
"""Embedding throughput of an encoder in texts per second: MiniLM's shape with random weights, against transformers on torch.

The folder is created with transformers, whose model is the other side: it pads texts to the longest one, as its tokenizer does. Both start
from token ids and process the same texts, alternating, with the same number of threads, each after a pause, like an isolated request.
Figures are medians over rounds.

    python benchmarks/encoder_embeddings.py [--texts 64 1] [--tokens 8 32] [--rounds 9] [--threads N] [--no-results]

Needs torch and transformers (`make setup`), and less than a minute.
"""

import json
import tempfile
from pathlib import Path
from statistics import median
from time import perf_counter, sleep

import numpy as np
import tokenizers
import torch
from transformers import BertConfig, BertModel

from effllm.runtime.encoders.encoder import Encoder, EncoderOptions, open_encoder, plan_encoder, tokenizer_of
from report import Figure, parser_of, publish

VOCAB = 30522
IDLE_S = 0.05  # before a turn: torch's threads look for more work for a while, on the cores that the other side would have
INTRO = ("An encoder of 6 layers of 384 channels, 12 heads and an inner layer of 1,536 (all-MiniLM-L6's shape), random weights, float32: "
         "token ids to vectors, texts of {low} to {high} tokens, {threads} threads, both sides by turns, 50 ms idle before each, medians "
         "of {rounds} behind one that is not counted.")


def make_models(folder: Path, threads: int) -> tuple[Encoder, BertModel]:
    torch.manual_seed(0)
    config = BertConfig(vocab_size=VOCAB, hidden_size=384, intermediate_size=1536, num_hidden_layers=6, num_attention_heads=12)
    model = BertModel(config).eval()
    model.save_pretrained(folder)
    tokenizers.Tokenizer(tokenizers.models.WordPiece({"[UNK]": 0}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    plan = plan_encoder(folder, EncoderOptions(threads=threads))
    *_, encoder = open_encoder(plan, tokenizer_of(folder, plan.config))
    return encoder, model


def ours(encoder: Encoder, rows: list[list[int]]) -> np.ndarray:
    reading = encoder.vectors(rows, lambda: False)
    while True:
        try:
            next(reading)
        except StopIteration as stop:
            return np.array(stop.value)


def theirs(model: BertModel, rows: list[list[int]]) -> np.ndarray:
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    states = model(ids, attention_mask=mask).last_hidden_state * mask[..., None]
    return (states.sum(1) / mask.sum(1, keepdim=True)).numpy()


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--texts", type=int, nargs="+", default=[64, 1])
    parser.add_argument("--tokens", type=int, nargs=2, default=[8, 32])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    threads, figures, draw = options.threads, [], np.random.default_rng(0)
    torch.set_num_threads(threads)
    with tempfile.TemporaryDirectory() as folder, torch.inference_mode():
        encoder, model = make_models(Path(folder), threads)
        for count in options.texts:
            low, high = options.tokens
            rows = [draw.integers(1, VOCAB, draw.integers(low, high + 1)).tolist() for _ in range(count)]
            sides = {"ours": lambda rows=rows: ours(encoder, rows), "torch": lambda rows=rows: theirs(model, rows)}
            seconds: dict[str, list[float]] = {name: [] for name in sides}
            vectors = {}
            for _ in range(1 + options.rounds):
                for name, read in sides.items():
                    sleep(IDLE_S)
                    started = perf_counter()
                    vectors[name] = read()
                    seconds[name].append(perf_counter() - started)
            assert np.abs(vectors["ours"] - vectors["torch"]).max() < 1e-4, "the sides make other vectors"
            took = {name: median(times[1:]) for name, times in seconds.items()}
            where = f"{count} text{'' if count == 1 else 's'} at once"
            figures.append(Figure(f"ratio_{count}", "as fast as torch", where, took["torch"] / took["ours"], "x"))
            figures += [Figure(f"{name}_{count}", label, where, count / took[name], "texts/s")
                        for name, label in (("ours", "effllm"), ("torch", "transformers and torch"))]
    intro = INTRO.format(low=options.tokens[0], high=options.tokens[1], threads=threads, rounds=options.rounds)
    publish("encoder-texts", "Embedding of texts", intro, figures, not options.no_results)


if __name__ == "__main__":
    main()
