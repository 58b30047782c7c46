"""The same weights as llama.cpp files: a Hugging Face folder of the Llama architecture written as GGUF, quantized by llama.cpp's own
quantizer (through `llama-cpp-python`), and read back under the Hugging Face names.

llama.cpp interleaves the rows of a head's q and k, because its RoPE rotates adjacent pairs where Hugging Face's is half-split; both
directions are here. Token ids are fed directly, so the files carry no vocabulary ("no_vocab" and its size).
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Iterator, Mapping
from math import prod
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from gguf import GGMLQuantizationType

from effllm.offload.checkpoint import TensorStore
from effllm.quant.weight import from_f32, to_f32
from effllm.runtime.config import read_config

DTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
LAYER = {
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
HEADS = ("token_embd.weight", "output.weight")


def peer_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor. Raises KeyError for one that the architecture does not have."""
    if name in OUTER:
        return OUTER[name]
    _, _, index, rest = name.split(".", 3)
    return f"blk.{index}.{LAYER[rest.removesuffix('.weight')]}.weight"


def own_name(name: str) -> str:
    """The inverse."""
    for ours, theirs in OUTER.items():
        if theirs == name:
            return ours
    _, index, role, _ = name.split(".")
    return f"model.layers.{index}.{next(ours for ours, theirs in LAYER.items() if theirs == role)}.weight"


def rotated_heads(name: str, raw: Mapping[str, object]) -> int:
    """Heads whose rows llama.cpp interleaves: those of q and k, 0 for every other tensor (llama.cpp's name)."""
    if name.endswith("attn_q.weight"):
        return int(raw["num_attention_heads"])
    return int(raw["num_key_value_heads"]) if name.endswith("attn_k.weight") else 0


def interleave(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows [heads * D, K], half-split per head -> adjacent pairs. `separate` is the inverse."""
    return rows.reshape(heads, 2, -1, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def separate(rows: np.ndarray, heads: int) -> np.ndarray:
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def raw_config(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def tensors_f32(folder: Path) -> Iterator[tuple[str, np.ndarray]]:
    """(Hugging Face name, float32 values) of every tensor of a folder, one at a time."""
    with TensorStore.open(folder) as store:
        for name, info in store.tensors.items():
            scheme = DTYPES[info.dtype]
            data = store.read(info).view(np.float32 if scheme == "f32" else np.uint16)
            yield name, to_f32(data, scheme).reshape(info.shape)


def write_gguf(folder: Path, path: Path, matrices: str = "f32") -> None:
    """The folder's weights as GGUF: matrices in `matrices` (f32, f16 or bf16), vectors in f32. Memory stays near one tensor."""
    raw = raw_config(folder)
    writer = gguf.GGUFWriter(path, "llama")
    head_dim = int(raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"])
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(read_config(folder).ropes[0].theta)
    writer.add_layer_norm_rms_eps(float(raw["rms_norm_eps"]))
    writer.add_vocab_size(raw["vocab_size"])
    writer.add_tokenizer_model("no_vocab")
    kinds = {"f32": GGMLQuantizationType.F32, "f16": GGMLQuantizationType.F16, "bf16": GGMLQuantizationType.BF16}
    with TensorStore.open(folder) as store:
        for name, info in store.tensors.items():
            kind = matrices if len(info.shape) > 1 else "f32"
            item = 4 if kind == "f32" else 2
            writer.add_tensor_info(peer_name(name), info.shape, np.dtype(np.float32), prod(info.shape) * item, kinds[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for name, values in tensors_f32(folder):
        theirs = peer_name(name)
        if heads := rotated_heads(theirs, raw):
            values = interleave(values, heads)
        writer.write_tensor_data(np.ascontiguousarray(from_f32(values, matrices) if values.ndim > 1 else values))
    writer.close()


def quantize(source: Path, target: Path, ftype: str, threads: int = 2, imatrix: Mapping[str, np.ndarray] | None = None,
             head: str | None = None) -> None:
    """llama-quantize: `ftype` like "Q4_K_M". `imatrix`: llama.cpp's tensor name -> mean squared input per column. `head`: type of token
    embedding and output, llama.cpp's own choice if None. Raises RuntimeError when the library refuses."""
    params = llama_cpp.llama_model_quantize_default_params()
    params.nthread = threads
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{ftype}")
    if head:
        params.output_tensor_type = params.token_embedding_type = getattr(llama_cpp, f"GGML_TYPE_{head}")
    if imatrix:
        kind = llama_cpp.llama_model_imatrix_data
        kept = {name: np.ascontiguousarray(values, np.float32) for name, values in imatrix.items()}
        entries = (kind * (len(kept) + 1))()  # the last one, all zeros, ends the list
        for entry, (name, values) in zip(entries, kept.items()):
            entry.name, entry.size = name.encode(), values.size
            entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        params.imatrix = ctypes.cast(entries, ctypes.POINTER(kind))
    unfinished = target.with_suffix(".unfinished")
    if llama_cpp.llama_model_quantize(str(source).encode(), str(unfinished).encode(), ctypes.byref(params)):
        raise RuntimeError(f"llama.cpp does not quantize {source.name} to {ftype}")
    unfinished.rename(target)


def read_back(path: Path, raw: Mapping[str, object]) -> dict[str, np.ndarray]:
    """The file's values as float32 under Hugging Face names, rows in Hugging Face order."""
    out = {}
    for tensor in gguf.GGUFReader(path).tensors:
        shape = tuple(int(n) for n in reversed(tensor.shape))
        values = gguf.quants.dequantize(np.asarray(tensor.data), tensor.tensor_type).reshape(shape)
        heads = rotated_heads(tensor.name, raw)
        out[own_name(tensor.name)] = np.array(separate(values, heads) if heads else values, np.float32)
    return out


def sizes(path: Path) -> dict[str, object]:
    """Bits per weight of a file, every tensor's bytes over every tensor's values: `bpw` of all, `body_bpw` without token embedding and
    output, `head_bpw` of those; `nbytes` of all tensors and the types used."""
    nbytes, count = {"body": 0, "head": 0}, {"body": 0, "head": 0}
    types: dict[str, list[str]] = {}
    for tensor in gguf.GGUFReader(path).tensors:
        part = "head" if tensor.name in HEADS else "body"
        nbytes[part] += int(tensor.n_bytes)
        count[part] += int(tensor.n_elements)
        types.setdefault(tensor.tensor_type.name, []).append(tensor.name)
    return {
        "bpw": 8 * sum(nbytes.values()) / sum(count.values()), "body_bpw": 8 * nbytes["body"] / count["body"],
        "head_bpw": 8 * nbytes["head"] / count["head"], "nbytes": sum(nbytes.values()),
        "types": {kind: len(names) for kind, names in types.items()},
    }
