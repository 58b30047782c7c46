"""Handcrafted GGUF files, byte by byte: what no writer would write."""

import struct
from collections.abc import Mapping

import numpy as np

U32, F32, STRING, ARRAY = 4, 6, 8, 9


def text(value: str | bytes) -> bytes:
    raw = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(raw)) + raw


def pair(key: str, kind: int, raw: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + raw


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """Dimensions as in the file, innermost first."""
    return text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape) + struct.pack("<IQ", kind, offset)


def file(pairs: list[bytes], tensors: list[bytes], data: int = 4096, version: int = 3, counts: tuple[int, int] | None = None) -> bytes:
    tensor_count, key_count = counts or (len(tensors), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, tensor_count, key_count) + b"".join(pairs) + b"".join(tensors)
    return head + bytes(-len(head) % 32 + data)


def typed(value: object) -> bytes:
    """A value preceded by its type number: int, float, bool, text, and lists of one of these."""
    if isinstance(value, list):
        kind, *_ = struct.unpack("<I", typed(value[0])[:4])
        return struct.pack("<IIQ", ARRAY, kind, len(value)) + b"".join(typed(each)[4:] for each in value)
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", U32, value) if value >= 0 else struct.pack("<Ii", 5, value)
    return struct.pack("<If", F32, value) if isinstance(value, float) else struct.pack("<I", STRING) + text(value)


TOKENS = ["<unk>", "<s>", "</s>", "▁", "a", "b", "ab", "▁ab"]
KEYS = {
    "general.architecture": "llama", "llama.block_count": 1, "llama.context_length": 64, "llama.embedding_length": 8,
    "llama.feed_forward_length": 8, "llama.attention.head_count": 2, "llama.attention.head_count_kv": 1,
    "llama.attention.layer_norm_rms_epsilon": 1e-5, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": TOKENS, "tokenizer.ggml.scores": [float(n) for n in range(8)],
    "tokenizer.ggml.token_type": [2, 3, 3, 1, 1, 1, 1, 1],
}
SHAPES = {  # dimensions as the file has them
    "token_embd.weight": (8, 8), "output_norm.weight": (8,), "blk.0.attn_norm.weight": (8,), "blk.0.ffn_norm.weight": (8,),
    "blk.0.attn_q.weight": (8, 8), "blk.0.attn_k.weight": (8, 4), "blk.0.attn_v.weight": (8, 4), "blk.0.attn_output.weight": (8, 8),
    "blk.0.ffn_gate.weight": (8, 8), "blk.0.ffn_up.weight": (8, 8), "blk.0.ffn_down.weight": (8, 8),
}


def small_model(keys: Mapping[str, object] = {}, tensors: Mapping[str, object] = {}) -> bytes:
    """A model of one layer with a vocabulary. `keys`: other values, or bytes from the type on; `tensors`: (dimensions, type, bytes) of one
    that is another; None leaves one out."""
    own, placed, at = {**KEYS, **keys}, [], 0
    pairs = [text(key) + (value if isinstance(value, bytes) else typed(value)) for key, value in own.items() if value is not None]
    for name, entry in {**{name: (shape, 0, 4 * int(np.prod(shape))) for name, shape in SHAPES.items()}, **tensors}.items():
        if entry is not None:
            shape, kind, nbytes = entry
            placed.append(tensor(name, shape, kind, at))
            at += -(-nbytes // 32) * 32
    return file(pairs, placed, data=at)
