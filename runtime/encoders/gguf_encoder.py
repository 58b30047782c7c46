"""Encoders in GGUF files as llama.cpp writes them, presented as the original checkpoint's config.json and tensor names.

llama.cpp writes XLM-RoBERTa as BERT, without the position rows before its first, with its head as BERT's. Experts are one tensor [experts,
rows, depth] for each of their two matrices.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ...offload.gguf_header import GgufHeader
from ...offload.safetensors_header import CheckpointError, shown
from ..config_reader import ConfigError, Keys
from . import FILES, WITHOUT_HEAD
from .encoder_config import EncoderConfig, family_of

if TYPE_CHECKING:
    import numpy as np

    from ...offload.checkpoint import OpenFile
    from ...offload.gguf_header import GgufTensor

WAYS = {1: "mean", 2: "cls", 3: "lasttoken"}  # pooling_type -> how a vector is made
RANK = 4
POOLING_TYPE = "pooling_type"
# Below the architecture's name -> config.json.
KEYS = {"embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
        "attention.head_count": "num_attention_heads", "context_length": "max_position_embeddings",
        "attention.layer_norm_epsilon": "layer_norm_eps"}
# By model_type what is called otherwise there, or not of all.
ALSO: Mapping[str, Mapping[str, str]] = {
    "eurobert": {"attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
                 "rope.freq_base": "rope_theta"},
    "jina_embeddings_v3": {"rope.freq_base": "rope_theta"},
    "modernbert": {"attention.layer_norm_epsilon": "norm_eps", "attention.sliding_window": "local_attention",
                   "attention.sliding_window_pattern": "global_attn_every_n_layers", "rope.freq_base": "global_rope_theta",
                   "rope.freq_base_swa": "local_rope_theta"},
    "nomic_bert": {"expert_count": "num_experts", "expert_used_count": "moe_top_k", "moe_every_n_layers": "moe_every_n_layers",
                   "rope.freq_base": "rotary_emb_base"}}
UNSAID: Mapping[str, Mapping[str, object]] = {  # of an architecture
    "jina-bert-v2": {"feed_forward_type": "geglu", "position_embedding_type": "alibi"}, "nomic-bert-moe": {"activation_function": "gelu"}}
# Checkpoint names within a layer -> GGUF names.
OUTER = {"embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd",
         "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm", "emb_ln": "token_embd_norm",
         "pooler.dense": "cls", "classifier": "cls.output", "embeddings.tok_embeddings": "token_embd", "embeddings.norm": "token_embd_norm",
         "final_norm": "output_norm", "head.dense": "cls", "head.norm": "cls.norm", "embed_tokens": "token_embd", "norm": "output_norm"}
INNER = {"attention.self.query": "attn_q", "attention.self.key": "attn_k", "attention.self.value": "attn_v",
         "attention.self.qkv": "attn_qkv",
         "attention.output.dense": "attn_output", "attention.output.LayerNorm": "attn_output_norm", "intermediate.dense": "ffn_up",
         "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm", "attn.Wqkv": "attn_qkv", "attn.out_proj": "attn_output",
         "mlp.fc11": "ffn_up", "mlp.fc12": "ffn_gate", "mlp.fc2": "ffn_down", "norm1": "attn_output_norm", "norm2": "layer_output_norm",
         "mlp.fc1": "ffn_up", "mlp.router.layer": "ffn_gate_inp", "mlp.experts.up": "ffn_up_exps", "mlp.experts.down": "ffn_down_exps",
         "mixer.Wqkv": "attn_qkv", "mixer.out_proj": "attn_output",
         "attn.Wo": "attn_output", "mlp.Wi": "ffn_up", "mlp.Wo": "ffn_down", "attn_norm": "attn_norm", "mlp_norm": "ffn_norm",
         "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm",
         "post_attention_layernorm": "ffn_norm", "attention.self.layer_norm_q": "attn_q_norm", "attention.self.layer_norm_k": "attn_k_norm",
         "layer_norm_1": "attn_norm_2", "layer_norm_2": "layer_output_norm", "mlp.layernorm": "layer_output_norm",
         "mlp.gated_layers": "ffn_up", "mlp.up_gated_layer": "ffn_up", "mlp.gated_layers_v": "ffn_up", "mlp.gated_layers_w": "ffn_gate",
         "mlp.wo": "ffn_down", "mlp.down_layer": "ffn_down"}
LAYER = re.compile(r"(?:encoder\.)?layers?\.(\d+)\.(.+)\.(weight|bias)")
RAW = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
AGAIN = "fetch the file again, or use the folder of the checkpoint"


def is_encoder_file(path: Path) -> bool:
    """Whether a GGUF file holds an encoder; False for what cannot be read."""
    from ... import EffllmError
    from ..gguf.store import read_header

    try:
        header = read_header(path)
    except EffllmError:
        return False
    return header.metadata.get("general.architecture") in FILES


def read_file_config(path: Path) -> EncoderConfig:
    """Config from a file's metadata. Raises CheckpointError that names the metadata key."""
    from ..gguf.store import read_header

    header = read_header(path)
    return config_of(header)


def config_of(header: GgufHeader) -> EncoderConfig:
    """`read_file_config` of a header."""
    name, tokens = str(header.metadata.get("general.architecture")), header.tensors.get("token_embd.weight")
    if tokens is None or len(tokens.shape) != 2:
        raise CheckpointError(f"{header.path} holds no tensor token_embd.weight", AGAIN)
    kind, types = FILES[name], header.tensors.get("token_types.weight")
    raw: dict[str, object] = {"model_type": kind, "vocab_size": tokens.shape[0], **UNSAID.get(name, {})}
    keys = {**KEYS, **ALSO.get(kind, {})}
    raw |= {ours: value for theirs, ours in keys.items() if (value := header.metadata.get(f"{name}.{theirs}")) is not None}
    if types is not None:
        raw["type_vocab_size"] = types.shape[0]
    try:
        config = family_of(kind).config(Keys(raw, str(header.path)))
    except ConfigError as error:
        message = error.message
        for theirs, ours in keys.items():
            message = message.replace(ours, f"{name}.{theirs}")
        raise CheckpointError(message, AGAIN) from error
    ranks = header.metadata.get(f"{name}.{POOLING_TYPE}") == RANK
    if ranks and kind in WITHOUT_HEAD:
        raise CheckpointError(f"{header.path} holds a {name} reranker, which is not supported", "embedding models are")
    return replace(config, type_rows=config.type_rows if types is not None else 0, labels=int(ranks), raw=raw)


def way_of(path: Path) -> str | None:
    """The pooling mode of a file, a name of `pooling.POOLING_MODES`; None where it does not say."""
    from ..gguf.store import read_header

    metadata = read_header(path).metadata
    return WAYS.get(metadata.get(f"{metadata.get('general.architecture')}.{POOLING_TYPE}"))


class GgufTensors:
    """Tensors of a file under the checkpoint's names, for `weights.Tensors`. A context manager."""

    def __init__(self, path: Path) -> None:
        from ..gguf.split_files import open_parts

        self.folder = path
        self._header, self._opened = open_parts(path)
        self.nbytes = sum(tensor.nbytes for tensor in self._header.tensors.values())

    def stored(self, name: str) -> GgufTensor | None:
        """The file's tensor for a name of the checkpoint's."""
        return self._header.tensors.get(own_name(name))

    def values(self, tensor: GgufTensor) -> np.ndarray:
        """As it is stored where that is 16 or 32 bits (bfloat16 as uint16), else float32. Raises CheckpointError."""
        import numpy as np

        from ...offload.safetensors_header import pread_into
        from ...quant.imports.gguf import DECODERS, dequantize

        raw = np.empty(tensor.nbytes, np.uint8)
        file: OpenFile = self._opened[tensor.file]
        pread_into(tensor.file, file.fd, memoryview(raw), tensor.offset)
        if tensor.type in RAW:
            return raw.view(RAW[tensor.type]).reshape(tensor.shape)
        if tensor.type not in DECODERS:
            raise CheckpointError(f"{self.folder} has tensor {shown(tensor.name)} of type {tensor.type}, which is not read", AGAIN)
        return dequantize(raw, tensor.type, tensor.shape[-1]).reshape(tensor.shape)

    def __enter__(self) -> GgufTensors:
        return self

    def __exit__(self, *error: object) -> None:
        from ..gguf.split_files import close_all

        close_all(self._opened)


def own_name(name: str) -> str:
    """What a file calls a tensor of the checkpoint's; the name itself for one that it has not."""
    if found := LAYER.fullmatch(name):
        layer, inner, part = found.groups()
        return f"blk.{layer}.{INNER.get(inner, inner)}.{part}"
    outer, _, part = name.rpartition(".")
    return f"{OUTER.get(outer, outer)}.{part}"
