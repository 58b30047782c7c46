"""A model of a larger shape that computes what a small one does: the small weights in the corner of large matrices, noise where it has no
effect.

Its layers are as wide as requested and its gates are copies of the small model's, so it has the same activations on any text: the trace of
a real sparse model drives matrices large enough to be read from disk. Copies of a neuron are as far apart as possible, so that neighbors
are not active together more often than in the small model.
"""

import json
import shutil
from pathlib import Path

import numpy as np

from effllm.offload.shards import Planned
from effllm.quant.weight import from_f32, to_f32
from effllm.runtime.source import open_store
from synthetic_folder import write_folder

COPIED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
SMALL, TYPICAL = 0x33, 0x3C  # high bytes of bf16 noise: below 5e-8, about 0.01


class Widened:
    """`small`: the folder of a Llama with tied embeddings; the rest is the shape, with as many KV heads as query heads."""

    def __init__(self, small: Path, hidden: int, ffn: int, heads: int) -> None:
        self.config = json.loads((small / "config.json").read_text())
        self.hidden, self.ffn, self.heads, self.head_dim = hidden, ffn, heads, hidden // heads
        self.base_width, self.base_ffn, self.layers = (self.config[key]
                                                       for key in ("hidden_size", "intermediate_size", "num_hidden_layers"))
        self.own_heads, self.own_kv, self.own_dim = (self.config[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        if self.head_dim % self.own_dim or hidden < self.base_width or ffn < self.base_ffn or heads < self.own_heads:
            raise SystemExit("the shape is not a wider one, or its heads are no multiple of the small model's")
        with open_store(small) as store:
            self.weights = {name: to_f32(store.read(info).view(np.uint16), "bf16").reshape(info.shape)
                            for name, info in store.tensors.items()}
        self.rng = np.random.default_rng(1)
        step = self.head_dim // self.own_dim
        # RoPE turns channel i with i + D/2 at theta ** (-2i/D): the small model's frequencies are every `step`-th of the wide one's.
        half = np.arange(self.own_dim // 2) * step
        self.rotary_order = np.concatenate([half, half + self.head_dim // 2])

    def noise(self, rows: int, columns: int, high: int = TYPICAL) -> np.ndarray:
        """bf16 of random signs and mantissas."""
        bits = np.frombuffer(self.rng.bytes(2 * rows * columns), np.uint16).reshape(rows, columns)
        return (bits & np.uint16(0x807F)) | np.uint16(high << 8 | 0x80)

    def head(self, name: str, head: int) -> np.ndarray:
        rows = self.weights[name].reshape(-1, self.own_dim, self.base_width)
        return rows[head if len(rows) == self.own_heads else head * len(rows) // self.own_heads]

    def projection(self, layer: int, role: str) -> np.ndarray:
        """q, k or v: heads that the small model lacks are noise, which `o` ignores."""
        out = self.noise(self.heads * self.head_dim, self.hidden)
        factor = np.sqrt(self.head_dim / self.own_dim) if role == "q" else 1.0  # scores are divided by the root of the wide head
        for head in range(self.own_heads):
            block = np.zeros((self.head_dim, self.base_width), np.float32)
            block[self.rotary_order] = factor * self.head(f"model.layers.{layer}.self_attn.{role}_proj.weight", head)
            out[head * self.head_dim : (head + 1) * self.head_dim, : self.base_width] = from_f32(block, "bf16")
        return out

    def output(self, layer: int) -> np.ndarray:
        out = self.noise(self.hidden, self.heads * self.head_dim, SMALL)
        base = self.weights[f"model.layers.{layer}.self_attn.o_proj.weight"]
        block = np.zeros((self.base_width, self.heads * self.head_dim), np.float32)
        for head in range(self.own_heads):
            block[:, head * self.head_dim + self.rotary_order] = base[:, head * self.own_dim : (head + 1) * self.own_dim]
        out[: self.base_width] = from_f32(block, "bf16")
        return out

    def copied(self, layer: int, role: str) -> np.ndarray:
        """gate, or up: copies of the small model's neurons, one after the other."""
        out = self.noise(self.ffn, self.hidden)
        base = self.weights[f"model.layers.{layer}.mlp.{role}_proj.weight"]
        out[:, : self.base_width] = from_f32(base, "bf16")[np.arange(self.ffn) % self.base_ffn]
        return out

    def down(self, layer: int) -> np.ndarray:
        """Every copy carries its share."""
        out = self.noise(self.hidden, self.ffn, SMALL)
        base, source = self.weights[f"model.layers.{layer}.mlp.down_proj.weight"], np.arange(self.ffn) % self.base_ffn
        out[: self.base_width] = from_f32((base / np.bincount(source))[:, source], "bf16")
        return out

    def norm(self, name: str) -> np.ndarray:
        """The mean of squares is over all channels, of which the extra ones are zero."""
        out = np.zeros(self.hidden, np.float32)
        out[: self.base_width] = self.weights[name] * np.sqrt(self.base_width / self.hidden)
        return from_f32(out, "bf16")

    def embedding(self) -> np.ndarray:
        base = self.weights["model.embed_tokens.weight"]
        out = self.noise(len(base), self.hidden, SMALL)
        out[:, : self.base_width] = from_f32(base, "bf16")
        return out

    def tensors(self) -> dict[str, tuple[tuple[int, ...], object]]:
        """Name -> shape and generator."""
        wide, hidden, ffn = self.heads * self.head_dim, self.hidden, self.ffn
        tensors = {"model.embed_tokens.weight": ((self.config["vocab_size"], hidden), self.embedding),
                   "model.norm.weight": ((hidden,), lambda: self.norm("model.norm.weight"))}
        for i in range(self.layers):
            prefix = f"model.layers.{i}."
            for norm in ("input_layernorm.weight", "post_attention_layernorm.weight"):
                tensors[prefix + norm] = ((hidden,), lambda name=prefix + norm: self.norm(name))
            for role in "qkv":
                tensors[f"{prefix}self_attn.{role}_proj.weight"] = ((wide, hidden), lambda i=i, role=role: self.projection(i, role))
            tensors[f"{prefix}self_attn.o_proj.weight"] = ((hidden, wide), lambda i=i: self.output(i))
            for role in ("gate", "up"):
                tensors[f"{prefix}mlp.{role}_proj.weight"] = ((ffn, hidden), lambda i=i, role=role: self.copied(i, role))
            tensors[f"{prefix}mlp.down_proj.weight"] = ((hidden, ffn), lambda i=i: self.down(i))
        return tensors

    def write(self, small: Path, folder: Path) -> None:
        """The folder of the wide model."""
        tensors = self.tensors()
        changed = {"hidden_size": self.hidden, "intermediate_size": self.ffn, "num_attention_heads": self.heads, "head_dim": self.head_dim,
                   "num_key_value_heads": self.heads, "rms_norm_eps": self.config["rms_norm_eps"] * self.base_width / self.hidden}
        write_folder(folder, {**self.config, **changed},
                     [[Planned(name, "BF16", shape, 2 * int(np.prod(shape)))] for name, (shape, _) in tensors.items()],
                     lambda name: tensors[name][1]())
        for name in COPIED:
            shutil.copy(small / name, folder)
