"""The Llama block in plain torch, as used to train `fable`, and the two scores that its card reports.

Everything a Hugging Face `LlamaForCausalLM` does for this shape and nothing more: RMS norm, rotate-half RoPE, grouped-query attention, a
gated FFN, tied embeddings, no biases. Written out instead of taken from transformers, so that training needs torch alone and the engine's
own block has an independent implementation to be compared with. Shapes: B rows, T tokens, H heads, D channels of a head.
"""

import math
import random
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fable_data import ANSWER_WEIGHT, Corpus

NORM_EPS = 1e-5
ROPE_THETA = 10000.0


@dataclass(frozen=True)
class Shape:
    """The size of a model; field names are those of the command line."""

    vocab: int
    dim: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    context: int
    act: str


class Norm(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, NORM_EPS)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE on [B, H, T, D]: channel i turns together with channel i + D/2."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat([-b, a], -1) * sin


class Block(nn.Module):
    """One pre-norm decoder layer; attributes are named as in the Hugging Face checkpoint, without `_proj`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = shape.heads, shape.kv_heads, shape.head_dim
        self.act = getattr(F, shape.act)
        self.q = nn.Linear(shape.dim, shape.heads * shape.head_dim, bias=False)
        self.k = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.v = nn.Linear(shape.dim, shape.kv_heads * shape.head_dim, bias=False)
        self.o = nn.Linear(shape.heads * shape.head_dim, shape.dim, bias=False)
        self.gate = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.up = nn.Linear(shape.dim, shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, shape.dim, bias=False)
        self.input_norm, self.post_norm = Norm(shape.dim), Norm(shape.dim)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, gates: list[Tensor] | None = None) -> Tensor:
        normed = self.input_norm(x)
        q = rotate(self._split(self.q(normed), self.heads), cos, sin)
        k = rotate(self._split(self.k(normed), self.kv_heads), cos, sin)
        v = self._split(self.v(normed), self.kv_heads)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        # [B, H, T, D] -> [B, T, H * D]
        x = x + self.o(attended.transpose(1, 2).flatten(2))
        normed = self.post_norm(x)
        gate = self.act(self.gate(normed))
        if gates is not None:
            gates.append(gate)
        return x + self.down(gate * self.up(normed))

    def _split(self, y: Tensor, heads: int) -> Tensor:
        """[B, T, heads * D] -> [B, heads, T, D]"""
        return y.view(*y.shape[:2], heads, self.head_dim).transpose(1, 2)


class Model(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocab, shape.dim)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.dim)
        for parameter in self.parameters():
            if parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)
        # The residual stream sums 2 * layers outputs: each starts that much smaller (GPT-2).
        for block in self.blocks:
            for projection in (block.o, block.down):
                nn.init.normal_(projection.weight, std=0.02 / math.sqrt(2 * shape.layers))
        inv_freq = 1 / (ROPE_THETA ** (torch.arange(0, shape.head_dim, 2).float() / shape.head_dim))
        angle = torch.outer(torch.arange(shape.context + 1).float(), inv_freq)
        angle = torch.cat([angle, angle], -1)
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, ids: Tensor, gates: list[Tensor] | None = None) -> Tensor:
        """ids [B, T] -> logits [B, T, vocab]; each layer's activated gate [B, T, ffn] is appended to `gates`."""
        x = self.embed(ids)
        tokens = ids.shape[1]
        for block in self.blocks:
            x = block(x, self.cos[:tokens].to(x.dtype), self.sin[:tokens].to(x.dtype), gates)
        return F.linear(self.norm(x), self.embed.weight)

    def split_parameters(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        """The matrices inside the blocks (for Muon), and the embedding with the norms (for AdamW)."""
        embedding = self.embed.weight
        matrices = [p for p in self.parameters() if p.dim() == 2 and p is not embedding]
        others = [p for p in self.parameters() if p.dim() != 2 or p is embedding]
        return matrices, others


def crowding(gates: list[Tensor]) -> Tensor:
    """How far gates are from sparse: the sum over layers of the mean L1 norm over L2 norm of a token's gates, as a share of its most.

    A share s of equal gates costs sqrt(s). Unlike L1 alone it cannot be paid by making gates small and `up` large.
    """
    return sum((gate.abs().sum(-1) / (gate.square().sum(-1) * gate.shape[-1] + NORM_EPS).sqrt()).mean() for gate in gates)


@torch.no_grad()
def sparsity(model: Model, corpus: Corpus, n: int, windows: int, device: str) -> list[float]:
    """Each layer's share of gates that are exactly zero, over `windows` windows of `n` held-out tokens."""
    generator = np.random.RandomState(1)
    zeros = [0.0] * model.shape.layers
    for _ in range(windows):
        start = generator.randint(0, len(corpus.heldout) - n - 1)
        gates: list[Tensor] = []
        model(torch.tensor(corpus.heldout[start : start + n].astype(np.int64), device=device)[None], gates)
        zeros = [total + (gate == 0).float().mean().item() / windows for total, gate in zip(zeros, gates, strict=True)]
    return zeros


@torch.no_grad()
def perplexity(model: Model, corpus: Corpus, n: int, windows: int, device: str) -> float:
    """Held-out perplexity over `windows` windows of `n` tokens, the same windows at every call."""
    generator = np.random.RandomState(1)
    total = 0.0
    for _ in range(windows):
        start = generator.randint(0, len(corpus.heldout) - n - 1)
        ids = torch.tensor(corpus.heldout[start : start + n + 1].astype(np.int64), device=device)[None]
        total += F.cross_entropy(model(ids[:, :-1])[0].float(), ids[0, 1:]).item()
    return math.exp(total / windows)


@torch.no_grad()
def recall_accuracy(model: Model, corpus: Corpus, n: int, spread: float, samples: int, device: str) -> float:
    """Share of the answers' digits that the greedy prediction gets right (0.1 is chance), on the same rows at every call."""
    digits = torch.tensor([corpus.tokenizer.token_to_id(digit) for digit in "0123456789"])
    before = random.getstate(), np.random.get_state()
    random.seed(5)
    np.random.seed(5)
    right = seen = 0
    for _ in range(samples):
        ids, weights = corpus.recall(n, spread)
        row = torch.tensor(ids)
        is_answer = (torch.tensor(weights)[1:] >= ANSWER_WEIGHT) & torch.isin(row[1:], digits)
        predicted = model(row[None, :-1].to(device))[0].argmax(-1).cpu()
        right += (predicted[is_answer] == row[1:][is_answer]).sum().item()
        seen += is_answer.sum().item()
    random.setstate(before[0])
    np.random.set_state(before[1])
    return right / max(1, seen)
