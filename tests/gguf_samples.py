"""GGUF files for tests, written by the `gguf` package: fable's weights in any type it can quantize to, or generated tensors."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import gguf
import numpy as np
from tokenizers import Tokenizer

from effllm.offload.checkpoint import TensorStore
from effllm.offload.shards import PAD
from effllm.quant.codebooks import E4M3, MXFP
from effllm.quant.imports.gguf_codebooks import KINDS as LEVELED
from effllm.quant.weight import RAW_NUMPY, to_f32
from effllm.runtime.stores.canonical_names import canonicalize_names

if TYPE_CHECKING:
    from family_models import Case

FABLE = Path(__file__).resolve().parent.parent / "models" / "fable"
NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
LAYER = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
         "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
         "self_attn.k_norm": "attn_k_norm", "self_attn.query_layernorm": "attn_q_norm", "self_attn.key_layernorm": "attn_k_norm",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
         "input_layernorm_2": "post_attention_norm", "post_attention_layernorm_2": "post_ffw_norm",
         "self_attn.attn_sub_norm": "attn_sub_norm", "mlp.ffn_sub_norm": "ffn_sub_norm", "self_attn.q_a_proj": "attn_q_a",
         "self_attn.q_a_layernorm": "attn_q_a_norm", "self_attn.q_b_proj": "attn_q_b",
         "self_attn.kv_a_proj_with_mqa": "attn_kv_a_mqa", "self_attn.kv_a_layernorm": "attn_kv_a_norm", "self_attn.kv_b_proj": "attn_kv_b"}
GEMMA = {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
         "post_feedforward_layernorm": "post_ffw_norm"}
POST_NORMS = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
GLM4 = {"post_self_attn_layernorm": "post_attention_norm", "post_mlp_layernorm": "post_ffw_norm"}
ROUTER = {"block_sparse_moe.gate": "ffn_gate_inp", "mlp.gate": "ffn_gate_inp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
          **{f"mlp.shared_expert{s}.{part}_proj": f"ffn_{part}_shexp" for s in ("", "s") for part in ("gate", "up", "down")}}
CORRECTIONS = ("mlp.gate.e_score_correction_bias", "mlp.moe_statics.e_score_correction_bias")
EXPERT = re.compile(r"(model\.layers\.\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
EXPERTS = {"w1": "ffn_gate_exps", "w2": "ffn_down_exps", "w3": "ffn_up_exps", "gate_proj": "ffn_gate_exps", "down_proj": "ffn_down_exps",
           "up_proj": "ffn_up_exps"}
INTERLEAVED = ("arcee", "llama", "llama-embed", "granite", "granitemoe", "mistral3", "nanbeige", "ouro", "smollm3")
FUSED = {"self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up"}
TYPES = gguf.GGMLQuantizationType


class Reader(gguf.GGUFReader):
    """The package's reader, with arrays sliced from one memory map: it maps the file twice per string, 0.15 s for fable's vocabulary."""

    def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[np.ndarray], list[int], list[gguf.GGUFValueType]]:
        if raw_type != gguf.GGUFValueType.ARRAY or self.byte_order == "S":
            return super()._get_field_parts(orig_offs, raw_type)
        data = self.data.view(np.ndarray)
        kind, count = struct.unpack_from("<IQ", data, orig_offs)
        at, parts = orig_offs + 12, [data[orig_offs : orig_offs + 4].view(np.uint32), data[orig_offs + 4 : orig_offs + 12].view(np.uint64)]
        if kind == gguf.GGUFValueType.STRING:
            for _ in range(count):
                length, = struct.unpack_from("<Q", data, at)
                parts.append(data[at + 8 : at + 8 + length])
                at += 8 + length
        else:
            values = data[at:].view(np.uint8)[: count * np.dtype(scalar := self.gguf_scalar_to_np[gguf.GGUFValueType(kind)]).itemsize]
            parts += np.split(values.view(scalar), count) if count else []
            at += len(values)
        return at - orig_offs, parts, list(range(2, len(parts))), [gguf.GGUFValueType.ARRAY] + [gguf.GGUFValueType(kind)] * (count > 0)


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k in the order of llama.cpp's files, whose rotary pairs are adjacent."""
    return rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def weights(folder: Path) -> dict[str, np.ndarray]:
    """float32 values of a folder's tensors."""
    with TensorStore.open(folder) as store:
        canonicalize_names(store, json.loads((folder / "config.json").read_text())["model_type"])
        return {name: to_f32(store.read(info).view(RAW_NUMPY[info.dtype.lower()]), info.dtype.lower()).reshape(info.shape)
                for name, info in store.tensors.items() if not name.startswith(PAD)}


def peer_name(name: str, arch: str) -> str:
    if name in NAMES:
        return NAMES[name]
    _, _, index, tensor = name.split(".", 3)
    if tensor in CORRECTIONS:
        return f"blk.{index}.exp_probs_b.bias"
    part, _, kind = tensor.rpartition(".")
    family_names = GEMMA if arch in ("gemma2", "gemma3") else POST_NORMS if arch in ("exaone4", "glm4moe",
                                                                                     "olmo2") else GLM4 if arch == "glm4" else {}
    return f"blk.{index}.{(LAYER | FUSED | ROUTER | family_names)[part]}.{kind}"


def write_model(folder: Path, path: Path, kind: str = "F16", arch: str = "llama",
                change: Callable[[gguf.GGUFWriter], None] | None = None, per_file: int = 0,
                expert_types: Mapping[str, str] | None = None) -> dict[str, np.ndarray]:
    """Write the model of `folder` as GGUF; returns its dequantized weights by their names in the folder.

    kind: GGML type of the matrices.
    change: adds metadata.
    per_file: tensors in each of several files, 0 for one file.
    expert_types: GGML types of experts, by a part of the tensor's name in the file.
    """
    raw = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=per_file)
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    writer.add_rope_freq_base(float(raw.get("rope_theta", 10000.0)))
    if raw.get("head_dim"):
        writer.add_key_length(raw["head_dim"])
        writer.add_value_length(raw["head_dim"])
    if change is not None:
        change(writer)
    expected, experts = {}, {}
    for name, values in weights(folder).items():
        if match := EXPERT.fullmatch(name):
            experts.setdefault(f"blk.{match[1].rpartition('.')[2]}.{EXPERTS[match[3]]}.weight", {})[int(match[2])] = (name, values)
            continue
        heads = raw["num_attention_heads"] if ".q_proj." in name else raw["num_key_value_heads"] if ".k_proj." in name else 0
        stored = interleaved(values, heads) if arch in INTERLEAVED and heads else values
        if name.endswith(("shared_expert_gate.weight", "e_score_correction_bias")):
            stored = stored.reshape(-1)  # converters store it as a vector
        stored = stored + np.float32(1) if arch.startswith("gemma") and "norm" in name else stored
        tensor_type = TYPES[kind] if stored.ndim > 1 and "ffn_gate_inp" not in peer_name(name, arch) else TYPES.F32
        data = quantize_blocks(stored, tensor_type.name)
        writer.add_tensor(peer_name(name, arch), data, raw_dtype=tensor_type)
        dequantized = gguf.quants.dequantize(data, tensor_type).reshape(values.shape)
        expected[name] = separated(dequantized, heads) if arch in INTERLEAVED and heads else dequantized
    for name, match in experts.items():
        tensor_type = next((other for part, other in (expert_types or {}).items() if part in name), kind)
        rows = np.stack([match[number][1] for number in range(len(match))])
        data = quantize_blocks(rows, tensor_type)
        writer.add_tensor(name, data, raw_dtype=TYPES[tensor_type])
        dequantized = gguf.quants.dequantize(data, TYPES[tensor_type]).reshape(rows.shape)
        expected |= {match[number][0]: dequantized[number].reshape(match[number][1].shape) for number in match}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


def add_expert_keys(case: Case) -> Callable[[gguf.GGUFWriter], None]:
    """A function that adds the metadata of the experts of a `Case`."""
    changes = case.changes

    def change(writer: gguf.GGUFWriter) -> None:
        names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
        writer.add_expert_count(next(changes[name] for name in names if name in changes))
        writer.add_expert_used_count(changes.get("num_experts_per_tok", changes.get("moe_k")))
        if "moe_intermediate_size" in changes:
            writer.add_expert_feed_forward_length(changes["moe_intermediate_size"])
        if "shared_expert_intermediate_size" in changes:
            writer.add_expert_shared_feed_forward_length(changes["shared_expert_intermediate_size"])
        if "n_routed_experts" in changes:
            writer.add_expert_shared_count(changes["n_shared_experts"])
            writer.add_leading_dense_block_count(changes["first_k_dense_replace"])
            writer.add_expert_weights_scale(changes["routed_scaling_factor"])
            writer.add_expert_weights_norm(changes["norm_topk_prob"])
            writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        if "moe_k" in changes:
            writer.add_expert_shared_count(changes["moe_num_shared_experts"])
            writer.add_expert_shared_feed_forward_length(changes["moe_num_shared_experts"] * changes["moe_intermediate_size"])
            writer.add_leading_dense_block_count(changes["moe_layer_start_index"])
            writer.add_interleave_moe_layer_step(1)
        if "logits_scaling" in changes:
            for name in ("attention_multiplier", "embedding_multiplier", "residual_multiplier", "logits_scaling"):
                key = {"attention_multiplier": "attention.scale", "logits_scaling": "logit_scale"}.get(name)
                key = key or name.replace("multiplier", "scale")
                writer.add_float32(f"{case.family}.{key}", changes[name])
        if case.family == "glm4_moe":
            writer.add_rope_dimension_count(changes["head_dim"] // 2)
    return change


def random_blocks(values: np.ndarray, kind: str) -> np.ndarray:
    """Blocks of a type that the package can only read: roughly the magnitude of some rows, otherwise arbitrary bytes, uint8 [N, row bytes].
    """
    size, nbytes = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    rng = np.random.default_rng(values.size)
    raw = rng.integers(0, 256, (values.size // size, nbytes), np.uint8)
    offset = {"Q2_K": 80, "Q3_K": 108, "TQ1_0": 52, "TQ2_0": 64}.get(kind, 0)
    if kind == "TQ1_0":  # five ternary digits as a fraction of 256
        raw[:, :52] = -(-rng.integers(0, 243, (len(raw), 52)) * 256 // 243)
    target_rms = float(np.sqrt(np.mean(np.square(values.astype(np.float64))))) or 1.0

    def set_scale(scale: float) -> None:
        scale_bytes = np.frombuffer(np.float16(scale).tobytes(), np.uint8)
        if kind == "IQ1_M":  # four bits in each of four words
            nibbles = [scale_bytes[0] << 4 & 0xF0, scale_bytes[0] & 0xF0, scale_bytes[1] << 4 & 0xF0, scale_bytes[1] & 0xF0]
            raw[:, 49:56:2] = raw[:, 49:56:2] & 15 | np.array(nibbles, np.uint8)
        else:
            raw[:, offset : offset + 2] = scale_bytes
            if kind == "Q2_K":  # of minima
                raw[:, offset + 2 : offset + 4] = scale_bytes

    set_scale(1.0)
    set_scale(target_rms / float(np.sqrt(np.mean(np.square(gguf.quants.dequantize(raw, TYPES[kind]), dtype=np.float64)))))
    return raw.reshape(*values.shape[:-1], -1)


def quantize_blocks(values: np.ndarray, kind: str) -> np.ndarray:
    """Rows quantized to blocks of a type."""
    if kind in LEVELED or kind in ("Q2_K", "IQ4_NL"):
        return random_blocks(values, kind)
    if kind == "NVFP4":
        return nvfp4_blocks(np.ascontiguousarray(values, np.float32).reshape(-1, values.shape[-1])).reshape(*values.shape[:-1], -1)
    if kind.endswith("_K"):
        return k_quant_blocks(values.reshape(-1, values.shape[-1]), kind).reshape(*values.shape[:-1], -1)
    return gguf.quants.quantize(values, TYPES[kind])


def nvfp4_blocks(values: np.ndarray) -> np.ndarray:
    """NVFP4 blocks near some rows, uint8 [N, row bytes]; the package itself only reads these."""
    groups = values.reshape(-1, 16)
    target_scales = np.abs(groups).max(1) / 6
    scales = np.searchsorted((E4M3[:126] + E4M3[1:127]) / 2, target_scales).astype(np.uint8)
    scaled = np.divide(groups, E4M3[scales][:, None], out=np.zeros_like(groups), where=scales[:, None] > 0)
    codes = np.abs(scaled[:, :, None] - MXFP.astype(np.float32) / 2).argmin(-1).astype(np.uint8)
    pairs = codes[:, :8] | codes[:, 8:] << np.uint8(4)
    return np.concatenate([scales.reshape(-1, 4), pairs.reshape(-1, 32)], axis=1).reshape(len(values), -1)


def k_quant_blocks(values: np.ndarray, kind: str) -> np.ndarray:
    """Q4_K, Q5_K or Q6_K blocks near some rows, uint8 [N, row bytes]; the package itself only reads these."""
    group, bits = (16, 6) if kind == "Q6_K" else (32, int(kind[1]))
    grouped = np.ascontiguousarray(values, np.float32).reshape(-1, 256 // group, group)
    low = np.zeros(grouped.shape[:2], np.float32) if bits == 6 else np.minimum(grouped.min(2), 0)
    spans = np.abs(grouped).max(2) / 32 if bits == 6 else (grouped.max(2) - low) / ((1 << bits) - 1)
    top = 127 if bits == 6 else 63

    def coded(scale_values: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """float16 super-block scales [n, 1], codes [n, groups] and the values they represent."""
        super_scale = (scale_values.max(1, keepdims=True) / top).astype(np.float16)
        codes = np.rint(np.divide(scale_values, super_scale.astype(np.float32), out=np.zeros_like(scale_values),
                                  where=super_scale > 0)).clip(0, top).astype(np.uint8)
        return super_scale, codes, codes * super_scale.astype(np.float32)

    d, scales, spread = coded(spans)
    e, minima, minimum_values = coded(-low)
    if bits == 6:  # a scale may be negative
        scales[:, ::3], spread[:, ::3] = (256 - scales[:, ::3].astype(int)).astype(np.uint8), -spread[:, ::3]
    scaled = np.divide(grouped + minimum_values[:, :, None], spread[:, :, None], out=np.zeros_like(grouped), where=spread[:, :, None] != 0)
    codes = np.rint(scaled + (32 if bits == 6 else 0)).clip(0, (1 << bits) - 1).astype(np.uint8).reshape(-1, 256)
    if bits == 6:
        runs = codes.reshape(-1, 2, 4, 32)
        lows = np.concatenate([runs[:, :, 0] & 15 | runs[:, :, 2] << 4 & 0xF0, runs[:, :, 1] & 15 | runs[:, :, 3] << 4 & 0xF0], axis=2)
        highs = sum((runs[:, :, i] >> 4 << np.uint8(2 * i)) for i in range(4)).astype(np.uint8)
        blocks = [lows.reshape(-1, 128), highs.reshape(-1, 64), scales, d.view(np.uint8)]
    else:
        runs = codes.reshape(-1, 4, 2, 32)
        packed = np.concatenate([scales[:, :4] | scales[:, 4:] >> 4 << 6, minima[:, :4] | minima[:, 4:] >> 4 << 6,
                                 scales[:, 4:] & 15 | minima[:, 4:] << 4 & 0xF0], axis=1).astype(np.uint8)
        fifths = sum((codes.reshape(-1, 8, 32)[:, i] >> 4 << np.uint8(i)) for i in range(8)).astype(np.uint8)
        blocks = [d.view(np.uint8), e.view(np.uint8), packed, *([fifths] if bits == 5 else []),
                  (runs[:, :, 0] & 15 | runs[:, :, 1] << 4 & 0xF0).reshape(-1, 128)]
    return np.concatenate(blocks, axis=1).reshape(len(values), -1)


def separated(rows: np.ndarray, heads: int) -> np.ndarray:
    """The inverse of `interleaved`."""
    return rows.reshape(heads, rows.shape[0] // heads // 2, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def add_fable_tokenizer(writer: gguf.GGUFWriter) -> None:
    """fable's vocabulary, merges, special tokens and template."""
    own = json.loads((FABLE / "tokenizer.json").read_text(encoding="utf-8"))
    settings = json.loads((FABLE / "tokenizer_config.json").read_text())
    made = Tokenizer.from_file(str(FABLE / "tokenizer.json"))
    size = made.get_vocab_size()
    special = {each["id"] for each in own["added_tokens"]}
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([made.id_to_token(i) for i in range(size)])
    writer.add_token_types([3 if i in special else 1 for i in range(size)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in own["model"]["merges"]])
    writer.add_bos_token_id(made.token_to_id(settings["bos_token"]))
    writer.add_eos_token_id(made.token_to_id(settings["eos_token"]))
    writer.add_add_bos_token(False)
    writer.add_chat_template(settings["chat_template"])


def fable_gguf(path: Path, kind: str = "F16", change: Callable[[gguf.GGUFWriter], None] | None = None) -> dict[str, np.ndarray]:
    """fable with its tokenizer; `change` may add tensors."""

    def both(writer: gguf.GGUFWriter) -> None:
        add_fable_tokenizer(writer)
        if change is not None:
            change(writer)

    return write_model(FABLE, path, kind, change=both)


SCALES = {"blk.0.ffn_up": 0.75, "blk.1.attn_q": 1.3, "blk.2.ffn_down": 2.0}


def add_scales(writer: gguf.GGUFWriter) -> None:
    """Of some NVFP4 matrices, as converters write them; and what they say of activations."""
    for name, scale in SCALES.items():
        writer.add_tensor(f"{name}.scale", np.float32([scale]))
        writer.add_tensor(f"{name}.input_scale", np.float32([7.0]))
