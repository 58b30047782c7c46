#!/usr/bin/env python3
"""Train the reference model `fable`: a small Llama-architecture language model on public-domain tales.

It learns four things, so that compression methods have something real to damage: prose, short chats, copying, and recall of numbers
stated up to a full context earlier (see fable_data.py). Needs torch and tokenizers; runs on CPU or CUDA; writes a Hugging Face folder.
The data folder holds `tales.jsonl.xz` (one book a line, with its "text") and `heldout.txt` (never trained on). The first published
fable came from four shorter runs with these samplers, prose before copying; this is the single-run form, copying first.

    python tools/train_fable.py --out fable --minutes 90                        # about 6M parameters, two CPU cores
    python tools/train_fable.py --out fable --minutes 9 --dim 512 --layers 8 --heads 8 --kv-heads 2 --ffn 1536 \\
        --context 4096 --tokens-per-step 65536 --device cuda
"""

import argparse
import random
import sys
import time
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from fable_data import Corpus, Mix, build_tokenizer, read_books
from fable_export import export, write_card
from fable_model import Model, Shape

MUON_RATE = 0.02
ADAM_RATE = 3e-3
# Tokens of one backward pass on a CPU; larger batches are accumulated.
CPU_TOKENS_A_PASS = 8192
NEAR = (0.5, 0.7, 0.9)
FAR = (0.1, 0.3, 0.6, 0.95)


@dataclass(frozen=True)
class Stage:
    """Part of the run up to the share `until` of its time: rows of `context` tokens, `tokens` a step, drawn from `mix`."""

    until: float
    context: int
    tokens: int
    mix: Mix


def schedule(context: int, tokens: int) -> list[Stage]:
    """Copying first on short rows, where induction heads form quickly; then prose and recall on ever longer ones."""
    return [
        Stage(0.12, min(128, context), tokens // 2, Mix(0.45, 0.25, 0.0, NEAR)),
        Stage(0.30, min(256, context), tokens, Mix(0.12, 0.42, 0.05, NEAR)),
        Stage(0.85, context // 2, tokens, Mix(0.04, 0.22, 0.14, FAR)),
        Stage(1.01, context, tokens, Mix(0.04, 0.22, 0.14, FAR)),
    ]


def learning_rate(step: int, progress: float) -> float:
    """Share of the full rate: 60 steps of warm-up, then flat, then linear down from 40% of the time on."""
    warm = min(1.0, step / 60)
    return warm if progress < 0.4 else warm * max(0.02, (1 - progress) / 0.6)


class Trainer:
    """The model, its two optimizers, and the accumulation of one step."""

    def __init__(self, model: Model, device: str) -> None:
        self.model, self.device = model, device
        matrices, self.others = model.split_parameters()
        self.muon = torch.optim.Muon(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.05)
        self.adam = torch.optim.AdamW(self.others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0)
        self.autocast = torch.autocast("cuda", torch.bfloat16, enabled=device.startswith("cuda"))

    def step(self, ids: np.ndarray, weights: np.ndarray, rate: float) -> float:
        """One update on ids and weights [B, T + 1]; returns the weighted mean loss."""
        self._set_rate(rate)
        rows, weight = torch.from_numpy(ids).to(self.device), torch.from_numpy(weights).to(self.device)
        total_weight = weight[:, 1:].sum()
        part = max(1, CPU_TOKENS_A_PASS // (rows.shape[1] - 1)) if self.device == "cpu" else rows.shape[0]
        loss = 0.0
        for begin in range(0, rows.shape[0], part):
            share = self._loss(rows[begin : begin + part], weight[begin : begin + part]) / total_weight
            share.backward()
            loss += share.item()
        nn.utils.clip_grad_norm_(self.others, 1.0)
        for optimizer in (self.muon, self.adam):
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def _loss(self, rows: Tensor, weight: Tensor) -> Tensor:
        with self.autocast:
            logits = self.model(rows[:, :-1])
        each = F.cross_entropy(logits.float().flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        return (each * weight[:, 1:].flatten()).sum()

    def _set_rate(self, rate: float) -> None:
        for optimizer, full in ((self.muon, MUON_RATE), (self.adam, ADAM_RATE)):
            for group in optimizer.param_groups:
                group["lr"] = full * rate


def train(model: Model, corpus: Corpus, minutes: float, tokens_per_step: int, device: str) -> int:
    """Train for `minutes` of wall-clock time; returns the number of tokens seen."""
    trainer = Trainer(model, device)
    stages = schedule(model.shape.context, tokens_per_step)
    start = time.time()
    step = seen = 0
    smooth: float | None = None
    while (progress := (time.time() - start) / (minutes * 60)) < 1:
        stage = next(stage for stage in stages if progress < stage.until)
        ids, weights = corpus.batch(max(1, stage.tokens // stage.context), stage.context, stage.mix)
        loss = trainer.step(ids, weights, learning_rate(step, progress))
        step += 1
        seen += ids.shape[0] * stage.context
        smooth = loss if smooth is None else 0.97 * smooth + 0.03 * loss
        if step % 50 == 0:
            print(f"{time.time() - start:6.0f} s  step {step}  {seen / 1e6:.1f}M tokens  loss {smooth:.3f}", flush=True)
    return seen


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parent.parent / "data", help="folder of the two corpus files")
    parser.add_argument("--tokenizer", type=Path, help="reuse a tokenizer.json")
    parser.add_argument("--minutes", type=float, default=90)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    sizes = dict(vocab=4096, dim=256, layers=6, heads=4, kv_heads=2, head_dim=64, ffn=768, context=2048, tokens_per_step=8192)
    for name, value in sizes.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    parser.add_argument("--act", default="silu", choices=["silu", "relu", "gelu"])
    arguments = parser.parse_args()
    missing = [name for name in ("tales.jsonl.xz", "heldout.txt") if not (arguments.data / name).is_file()]
    if missing:
        parser.error(f"{arguments.data} lacks {' and '.join(missing)}; name the corpus folder with --data")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    random.seed(arguments.seed)
    np.random.seed(arguments.seed)
    books = read_books(arguments.data)
    if arguments.tokenizer:
        tokenizer = Tokenizer.from_file(str(arguments.tokenizer))
    else:
        tokenizer = build_tokenizer(books, arguments.vocab)
    corpus = Corpus(books, (arguments.data / "heldout.txt").read_text(encoding="utf-8"), tokenizer)
    shape = Shape(**{field.name: getattr(arguments, field.name) for field in fields(Shape)})
    model = Model(shape).to(arguments.device)
    seen = train(model, corpus, arguments.minutes, arguments.tokens_per_step, arguments.device)
    model.eval()
    card = write_card(model, corpus, arguments.minutes, seen, arguments.device)
    export(model, tokenizer, arguments.out, card)
    print(card)
    return 0


if __name__ == "__main__":
    sys.exit(main())
