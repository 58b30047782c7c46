"""Encoders in GGUF files as llama.cpp writes them, presented under the original checkpoint's config keys and tensor names.

llama.cpp writes XLM-RoBERTa as BERT: with BERT's head, and without the position rows before the first text token's. The experts of a layer
are one tensor [experts, rows, depth] for each of their two matrices.
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
from . import GGUF_ARCHITECTURES, WITHOUT_HEAD
from .encoder_config import EncoderConfig, family_of

if TYPE_CHECKING:
    import numpy as np

    from ...offload.checkpoint import OpenFile
    from ...offload.gguf_header import GgufTensor

POOLING_TYPES = {1: "mean", 2: "cls", 3: "lasttoken"}  # pooling_type -> a name of `pooling.POOLING_MODES`
RANK_POOLING = 4
POOLING_TYPE = "pooling_type"
# Metadata key, without the architecture's name -> key of config.json.
KEYS = {
    "embedding_length": "hidden_size", "block_count": "num_hidden_layers", "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads", "context_length": "max_position_embeddings",
    "attention.layer_norm_epsilon": "layer_norm_eps"}
# By model_type: keys that other types lack, or that have another name in config.json.
FAMILY_KEYS: Mapping[str, Mapping[str, str]] = {
    "eurobert": {"attention.head_count_kv": "num_key_value_heads", "attention.layer_norm_rms_epsilon": "rms_norm_eps",
                 "rope.freq_base": "rope_theta"},
    "jina_embeddings_v3": {"rope.freq_base": "rope_theta"},
    "modernbert": {"attention.layer_norm_epsilon": "norm_eps", "attention.sliding_window": "local_attention",
                   "attention.sliding_window_pattern": "global_attn_every_n_layers", "rope.freq_base": "global_rope_theta",
                   "rope.freq_base_swa": "local_rope_theta"},
    "nomic_bert": {"expert_count": "num_experts", "expert_used_count": "moe_top_k", "moe_every_n_layers": "moe_every_n_layers",
                   "rope.freq_base": "rotary_emb_base"}}
# By architecture: keys of config.json that files do not state.
IMPLIED_VALUES: Mapping[str, Mapping[str, object]] = {
    "jina-bert-v2": {"feed_forward_type": "geglu", "position_embedding_type": "alibi"}, "nomic-bert-moe": {"activation_function": "gelu"}}
# Checkpoint name -> GGUF name, outside of layers and within a layer.
OUTER_NAMES = {
    "embeddings.word_embeddings": "token_embd", "embeddings.position_embeddings": "position_embd",
    "embeddings.token_type_embeddings": "token_types", "embeddings.LayerNorm": "token_embd_norm", "emb_ln": "token_embd_norm",
    "pooler.dense": "cls", "classifier": "cls.output", "embeddings.tok_embeddings": "token_embd", "embeddings.norm": "token_embd_norm",
    "final_norm": "output_norm", "head.dense": "cls", "head.norm": "cls.norm", "embed_tokens": "token_embd", "norm": "output_norm"}
LAYER_NAMES = {
    "attention.self.query": "attn_q", "attention.self.key": "attn_k", "attention.self.value": "attn_v", "attention.self.qkv": "attn_qkv",
    "attention.output.dense": "attn_output", "attention.output.LayerNorm": "attn_output_norm", "intermediate.dense": "ffn_up",
    "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm", "attn.Wqkv": "attn_qkv", "attn.out_proj": "attn_output",
    "mlp.fc11": "ffn_up", "mlp.fc12": "ffn_gate", "mlp.fc2": "ffn_down", "norm1": "attn_output_norm", "norm2": "layer_output_norm",
    "mlp.fc1": "ffn_up", "mlp.router.layer": "ffn_gate_inp", "mlp.experts.up": "ffn_up_exps", "mlp.experts.down": "ffn_down_exps",
    "mixer.Wqkv": "attn_qkv", "mixer.out_proj": "attn_output", "attn.Wo": "attn_output", "mlp.Wi": "ffn_up", "mlp.Wo": "ffn_down",
    "attn_norm": "attn_norm", "mlp_norm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
    "attention.self.layer_norm_q": "attn_q_norm", "attention.self.layer_norm_k": "attn_k_norm", "layer_norm_1": "attn_norm_2",
    "layer_norm_2": "layer_output_norm", "mlp.layernorm": "layer_output_norm", "mlp.gated_layers": "ffn_up",
    "mlp.up_gated_layer": "ffn_up", "mlp.gated_layers_v": "ffn_up", "mlp.gated_layers_w": "ffn_gate", "mlp.wo": "ffn_down",
    "mlp.down_layer": "ffn_down"}
LAYER_PATTERN = re.compile(r"(?:encoder\.)?layers?\.(\d+)\.(.+)\.(weight|bias)")
RAW_DTYPES = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
AGAIN = "fetch the file again, or use the folder of the checkpoint"


def is_encoder_file(path: Path) -> bool:
    """Whether a GGUF file holds an encoder; False if it cannot be read."""
    from ... import EffllmError
    from ..gguf.store import read_header

    try:
        header = read_header(path)
    except EffllmError:
        return False
    return header.metadata.get("general.architecture") in GGUF_ARCHITECTURES


def read_file_config(path: Path) -> EncoderConfig:
    """Config from a file's metadata. Raises CheckpointError that names the metadata key."""
    from ..gguf.store import read_header

    header = read_header(path)
    return config_from_header(header)


def config_from_header(header: GgufHeader) -> EncoderConfig:
    """As `read_file_config`, from a header."""
    architecture, embeddings = str(header.metadata.get("general.architecture")), header.tensors.get("token_embd.weight")
    if embeddings is None or len(embeddings.shape) != 2:
        raise CheckpointError(f"{header.path} holds no tensor token_embd.weight", AGAIN)
    model_type, token_types = GGUF_ARCHITECTURES[architecture], header.tensors.get("token_types.weight")
    raw: dict[str, object] = {"model_type": model_type, "vocab_size": embeddings.shape[0], **IMPLIED_VALUES.get(architecture, {})}
    keys = {**KEYS, **FAMILY_KEYS.get(model_type, {})}
    raw |= {key: value for gguf_key, key in keys.items() if (value := header.metadata.get(f"{architecture}.{gguf_key}")) is not None}
    if token_types is not None:
        raw["type_vocab_size"] = token_types.shape[0]
    try:
        config = family_of(model_type).config(Keys(raw, str(header.path)))
    except ConfigError as error:
        message = error.message  # names the metadata keys, not config.json's
        for gguf_key, key in keys.items():
            message = message.replace(key, f"{architecture}.{gguf_key}")
        raise CheckpointError(message, AGAIN) from error
    ranks = header.metadata.get(f"{architecture}.{POOLING_TYPE}") == RANK_POOLING
    if ranks and model_type in WITHOUT_HEAD:
        raise CheckpointError(f"{header.path} holds a {architecture} reranker, which is not supported", "embedding models are")
    return replace(config, type_vocab_size=config.type_vocab_size if token_types is not None else 0, num_labels=int(ranks), raw=raw)


def pooling_mode_of(path: Path) -> str | None:
    """The pooling mode of a file, a name of `pooling.POOLING_MODES`; None if it states none."""
    from ..gguf.store import read_header

    metadata = read_header(path).metadata
    return POOLING_TYPES.get(metadata.get(f"{metadata.get('general.architecture')}.{POOLING_TYPE}"))


class GgufTensors:
    """Tensors of a file under the checkpoint's names, for `weights.Tensors`. A context manager."""

    def __init__(self, path: Path) -> None:
        from ..gguf.split_files import open_parts

        self.folder = path
        self._header, self._opened = open_parts(path)
        self.nbytes = sum(tensor.nbytes for tensor in self._header.tensors.values())

    def stored(self, name: str) -> GgufTensor | None:
        """The file's tensor for a checkpoint name."""
        return self._header.tensors.get(gguf_name(name))

    def values(self, tensor: GgufTensor) -> np.ndarray:
        """A tensor as stored if that is in 16 or 32 bits (bfloat16 as uint16), else as float32. Raises CheckpointError."""
        import numpy as np

        from ...offload.safetensors_header import pread_into
        from ...quant.imports.gguf import DECODERS, dequantize

        stored = np.empty(tensor.nbytes, np.uint8)
        file: OpenFile = self._opened[tensor.file]
        pread_into(tensor.file, file.fd, memoryview(stored), tensor.offset)
        if tensor.type in RAW_DTYPES:
            return stored.view(RAW_DTYPES[tensor.type]).reshape(tensor.shape)
        if tensor.type not in DECODERS:
            raise CheckpointError(f"{self.folder} has tensor {shown(tensor.name)} of type {tensor.type}, which is not read", AGAIN)
        return dequantize(stored, tensor.type, tensor.shape[-1]).reshape(tensor.shape)

    def __enter__(self) -> GgufTensors:
        return self

    def __exit__(self, *error: object) -> None:
        from ..gguf.split_files import close_all

        close_all(self._opened)


def gguf_name(name: str) -> str:
    """The GGUF name for a checkpoint name; the name itself if there is none."""
    if match := LAYER_PATTERN.fullmatch(name):
        layer, inner, part = match.groups()
        return f"blk.{layer}.{LAYER_NAMES.get(inner, inner)}.{part}"
    outer, _, part = name.rpartition(".")
    return f"{OUTER_NAMES.get(outer, outer)}.{part}"
