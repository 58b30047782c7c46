#!/usr/bin/env python3
"""Trains the reference model `fable`: a small Llama-architecture language model on public-domain tales.

It learns four things, so that compression methods have something real to damage: prose, short chats, copying, and recall of numbers stated
up to a full context earlier (see fable_data.py). Needs torch and tokenizers; runs on CPU or CUDA; writes a Hugging Face folder. The data
folder holds `tales.jsonl.xz` (one book per line, with its "text") and `heldout.txt` (never trained on). The first published fable came from
four shorter runs with these samplers, prose before copying; this is the single-run form, copying first.

    python tools/train_fable.py --out fable --minutes 90                        # about 6M parameters, two CPU cores
    python tools/train_fable.py --out fable --minutes 9 --dim 512 --layers 8 --heads 8 --kv-heads 2 --ffn 1536 \\
        --context 4096 --tokens-per-step 65536 --device cuda

`--from` continues from a folder it has written, with another activation if requested; `--sparsity` adds a sparsity loss until that share of
the FFN's gates is zero (fable-relu, for sparse activation):

    python tools/train_fable.py --from models/fable --act relu --sparsity 0.92 --out models/fable-relu --minutes 25

Minutes are CPU time, so that a busy machine does not spoil the schedule; `--at-most` limits wall-clock minutes.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor, nn

from fable_data import Corpus, Mix, build_tokenizer, read_books
from fable_export import export, load, write_card, write_sparse_card
from fable_model import Model, Shape, crowding
from fable_muon import Muon

MUON_RATE = 0.02
ADAM_RATE = 3e-3
# Tokens of one backward pass on a CPU; larger batches are accumulated.
CPU_TOKENS_A_PASS = 8192
# The pressure for zero gates: its least weight, its most, and how fast it follows what is missing to the share asked for, which is
# asked for step by step from what ReLU alone leaves.
LEAST_PRESSURE, MOST_PRESSURE, PRESSURE_GAIN, RELU_ALONE = 0.03, 0.4, 0.3, 0.7
NEAR = (0.5, 0.7, 0.9)
FAR = (0.1, 0.3, 0.6, 0.95)


@dataclass(frozen=True)
class Stage:
    """A part of the run, up to the share `until` of its time: rows of `context` tokens, `tokens` per step, drawn from `mix`."""

    until: float
    context: int
    tokens: int
    mix: Mix


def schedule(context: int, tokens: int) -> list[Stage]:
    """Copying first on short rows, where induction heads form quickly; then prose and recall on increasingly long ones."""
    return [
        Stage(0.12, min(128, context), tokens // 2, Mix(0.45, 0.25, 0.0, NEAR)),
        Stage(0.30, min(256, context), tokens, Mix(0.12, 0.42, 0.05, NEAR)),
        Stage(0.85, context // 2, tokens, Mix(0.04, 0.22, 0.14, FAR)),
        Stage(1.01, context, tokens, Mix(0.04, 0.22, 0.14, FAR)),
    ]


def fine_tuning(context: int, tokens: int) -> list[Stage]:
    """What a trained model needs to adapt to a change: no copying stage; long contexts only at the end."""
    return [
        Stage(0.80, min(256, context), tokens, Mix(0.04, 0.15, 0.11, FAR)),
        Stage(1.01, min(1024, context), tokens, Mix(0.04, 0.15, 0.11, FAR)),
    ]


def fine_tuning_rate(step: int, progress: float) -> float:
    """Fraction of the requested learning rate: 20 steps of warm-up, flat for a fifth of the time, then linear decay."""
    return min(1.0, step / 20, max(0.02, (1 - progress) / 0.8))


def learning_rate(step: int, progress: float) -> float:
    """Fraction of the full learning rate: 60 steps of warm-up, then flat, then linear decay from 40% of the time on."""
    warm = min(1.0, step / 60)
    return warm if progress < 0.4 else warm * max(0.02, (1 - progress) / 0.6)


class Trainer:
    """The model, its optimizers, and gradient accumulation within one step."""

    def __init__(self, model: Model, device: str, teacher: Model | None = None, goal: float | None = None,
                 pressure: float = LEAST_PRESSURE) -> None:
        self.model, self.device, self.teacher, self.goal, self.pressure, self.zeros = model, device, teacher, goal, pressure, 0.0
        matrices, self.others = model.split_parameters()
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = []
        if teacher is not None:
            model.requires_grad_(False)
            self.others = [p for block in model.blocks for part in (block.gate, block.up, block.down, block.post_norm)
                           for p in part.requires_grad_(True).parameters()]
        else:
            kind = torch.optim.Muon if device.startswith("cuda") else Muon
            self.optimizers.append((kind(matrices, lr=MUON_RATE, momentum=0.95, weight_decay=0.05), MUON_RATE))
        self.optimizers.append((torch.optim.AdamW(self.others, lr=ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0), ADAM_RATE))
        self.autocast = torch.autocast("cuda", torch.bfloat16, enabled=device.startswith("cuda"))

    def step(self, ids: np.ndarray, weights: np.ndarray, rate: float, ramp: float = 1.0) -> float:
        """One update on ids and weights [B, T + 1]; returns the weighted mean loss. `ramp`: share of the way to the goal of zeros that
        should be done by now."""
        self._set_rate(rate)
        rows, weight = torch.from_numpy(ids).to(self.device), torch.from_numpy(weights).to(self.device)
        total_weight = weight[:, 1:].sum()
        part = max(1, CPU_TOKENS_A_PASS // (rows.shape[1] - 1)) if self.device == "cpu" else rows.shape[0]
        loss = 0.0
        for begin in range(0, rows.shape[0], part):
            gates: list[Tensor] | None = None if self.goal is None else []
            share = self._loss(rows[begin : begin + part], weight[begin : begin + part], gates) / total_weight
            loss += share.item()
            if gates:
                share = share + self._press(gates, ramp) * min(part, rows.shape[0] - begin) / rows.shape[0]
            share.backward()
        nn.utils.clip_grad_norm_(self.others, 1.0)
        for optimizer, _ in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    def _press(self, gates: list[Tensor], ramp: float) -> Tensor:
        """The sparsity loss of nonzero gates; its weight grows while the share of zeros is behind the target, and shrinks when ahead."""
        zeros = sum((gate.detach() == 0).float().mean().item() for gate in gates) / len(gates)
        self.zeros = zeros if not self.zeros else 0.9 * self.zeros + 0.1 * zeros
        shortfall = RELU_ALONE + (self.goal - RELU_ALONE) * ramp - self.zeros
        self.pressure = min(MOST_PRESSURE, max(LEAST_PRESSURE, self.pressure * math.exp(PRESSURE_GAIN * shortfall)))
        return self.pressure * crowding(gates)

    def _loss(self, rows: Tensor, weight: Tensor, gates: list[Tensor] | None) -> Tensor:
        with self.autocast:
            logits = self.model(rows[:, :-1], gates)
        targets = rows[:, 1:].flatten()
        if self.teacher is not None:
            with torch.no_grad():
                targets = self.teacher(rows[:, :-1]).float().flatten(0, 1).softmax(-1)
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets, reduction="none")
        return (losses * weight[:, 1:].flatten()).sum()

    def _set_rate(self, rate: float) -> None:
        for optimizer, full in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = full * rate


@dataclass(frozen=True)
class Budget:
    """Training time in minutes: CPU time (wall clock on a GPU), with a limit on wall-clock time."""

    minutes: float
    at_most: float
    threads: int
    device: str

    def progress(self, clock_s: float, processor_s: float) -> float:
        """Fraction of the budget that is spent."""
        spent = processor_s / self.threads if self.device == "cpu" else clock_s
        return max(spent / (60 * self.minutes), clock_s / (60 * self.at_most))


def train(trainer: Trainer, corpus: Corpus, budget: Budget, stages: list[Stage], rate: Callable[[int, float], float],
          ramp: Callable[[float], float], save: Callable[[], None]) -> int:
    """Train until the budget is spent, saving now and then; returns the number of tokens seen. `rate` and `ramp`: the share of the full
    rates, and of the way to the goal of zeros, that a progress asks for."""
    start, start_processor = time.time(), time.process_time()
    step = num_tokens = 0
    smooth: float | None = None
    while (progress := budget.progress(time.time() - start, time.process_time() - start_processor)) < 1:
        stage = next(stage for stage in stages if progress < stage.until)
        ids, weights = corpus.batch(max(1, stage.tokens // stage.context), stage.context, stage.mix)
        loss = trainer.step(ids, weights, rate(step, progress), ramp(progress))
        step += 1
        num_tokens += ids.shape[0] * stage.context
        smooth = loss if smooth is None else 0.97 * smooth + 0.03 * loss
        if step % 10 == 0:
            line = f"{time.time() - start:6.0f} s  {progress:4.0%}  step {step}  {num_tokens / 1e6:.1f}M tokens  loss {smooth:.3f}"
            pressed = "" if trainer.goal is None else f"  zeros {trainer.zeros:.3f}  pressure {trainer.pressure:.4f}"
            print(line + pressed, flush=True)
        if step % 40 == 0:
            save()
    return num_tokens


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--data", type=Path, default=Path(__file__).resolve().parent.parent / "data", help="folder of the two corpus files")
    parser.add_argument("--tokenizer", type=Path, help="reuse a tokenizer.json")
    parser.add_argument("--minutes", type=float, default=90, help="of the processor")
    parser.add_argument("--at-most", type=float, default=math.inf, metavar="MINUTES", help="of the clock")
    parser.add_argument("--from", dest="base", type=Path, help="folder of a trained fable to go on from: its shape and tokenizer are kept")
    parser.add_argument("--sparsity", type=float, help="share of the FFN's gates to become zero (with --from and --act relu)")
    parser.add_argument("--teacher", type=Path, help="folder of the model whose distribution is learned (that of --from)")
    parser.add_argument("--rate", type=float, default=0.4, help="share of the full rates at which --from begins")
    parser.add_argument("--pressure", type=float, default=LEAST_PRESSURE, help="weight at which --sparsity begins")
    parser.add_argument("--books", type=int, help="train on the first so many books alone (all)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seed", type=int, default=0)
    sizes = dict(vocab=4096, dim=256, layers=6, heads=4, kv_heads=2, head_dim=64, ffn=768, context=2048, tokens_per_step=8192)
    for name, value in sizes.items():
        parser.add_argument("--" + name.replace("_", "-"), type=int, default=value)
    parser.add_argument("--act", choices=["silu", "relu", "gelu"], help="silu, or that of --from")
    arguments = parser.parse_args()
    if arguments.sparsity is not None and not (arguments.base and arguments.act == "relu"):
        parser.error("--sparsity needs --from and --act relu")
    if not arguments.base:
        arguments.act = arguments.act or "silu"
    missing = [name for name in ("tales.jsonl.xz", "heldout.txt") if not (arguments.data / name).is_file()]
    if missing:
        parser.error(f"{arguments.data} lacks {' and '.join(missing)}; name the corpus folder with --data")
    return arguments


def main() -> int:
    arguments = parse_arguments()
    torch.manual_seed(arguments.seed)
    random.seed(arguments.seed)
    np.random.seed(arguments.seed)
    books = read_books(arguments.data)[: arguments.books]
    tokenizer_file = arguments.tokenizer or (arguments.base and arguments.base / "tokenizer.json")
    tokenizer = Tokenizer.from_file(str(tokenizer_file)) if tokenizer_file else build_tokenizer(books, arguments.vocab)
    corpus = Corpus(books, (arguments.data / "heldout.txt").read_text(encoding="utf-8"), tokenizer)
    device, minutes = arguments.device, arguments.minutes
    budget = Budget(minutes, arguments.at_most, torch.get_num_threads(), device)
    teacher = None
    if arguments.base:
        model, teacher = load(arguments.base, arguments.act).to(device), load(arguments.teacher or arguments.base).to(device)
        teacher.requires_grad_(False)
        stages = fine_tuning(model.shape.context, arguments.tokens_per_step)
        rate = lambda step, progress: arguments.rate * fine_tuning_rate(step, progress)  # noqa: E731
    else:
        shape = Shape(**{field.name: getattr(arguments, field.name) for field in fields(Shape)})
        model = Model(shape).to(device)
        stages, rate = schedule(shape.context, arguments.tokens_per_step), learning_rate

    def save(card: str = "# Training is under way\n") -> None:
        export(model, tokenizer, arguments.out, card)

    # it was pressed before: no way back to the start
    is_pressed = teacher is not None and load(arguments.base).shape.act == model.shape.act
    trainer = Trainer(model, device, teacher, arguments.sparsity, arguments.pressure)
    num_tokens = train(trainer, corpus, budget, stages, rate, lambda progress: 1.0 if is_pressed else min(1.0, progress / 0.4), save)
    model.eval()
    save()
    if arguments.sparsity is None:
        card = write_card(model, corpus, minutes, num_tokens, device)
    else:
        card = write_sparse_card(model, teacher, corpus, (arguments.teacher or arguments.base).name, num_tokens, trainer.pressure, device)
    save(card)
    print(card)
    return 0


if __name__ == "__main__":
    sys.exit(main())
