"""GGUF files of small encoders for tests, as llama.cpp writes them, from transformers folders with their tokenizers."""

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf_samples import add_fable_tokenizer
from safetensors.numpy import load_file

from effllm.runtime.encoders.gguf_encoder import gguf_name

MARK = "\u2581"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
POOLING = {"mean": 1, "cls": 2, "lasttoken": 3, "rank": 4}
# What DistilBERT calls otherwise than BERT, of which its files are.
DISTILLED = {"distilbert.": "", "transformer.layer": "encoder.layer", "attention.q_lin": "attention.self.query",
             "attention.k_lin": "attention.self.key", "attention.v_lin": "attention.self.value",
             "attention.out_lin": "attention.output.dense", "sa_layer_norm": "attention.output.LayerNorm", "ffn.lin1": "intermediate.dense",
             "ffn.lin2": "output.dense", "output_layer_norm": "output.LayerNorm", "pre_classifier": "pooler.dense"}


def write_encoder(folder: Path, path: Path, arch: str = "bert", pooling: str | None = "mean", kind: str = "F32",
                  changed: Mapping[str, object] | None = None, charsmap: bytes | None = None, split_gates: bool = False) -> Path:
    """The model of a folder with its tokenizer; `kind`: of its matrices; `changed`: what it states otherwise; `charsmap`: what
    SentencePiece does to a text first; `split_gates`: of Jina's, as they were written at first."""
    said = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("small")
    for add, keys in ((writer.add_context_length, ("max_position_embeddings", "n_positions")),
                      (writer.add_embedding_length, ("dim", "hidden_size", "n_embd")),
                      (writer.add_block_count, ("n_layers", "num_hidden_layers", "n_layer")),
                      (writer.add_feed_forward_length, ("hidden_dim", "intermediate_size", "n_inner")),
                      (writer.add_head_count, ("n_heads", "num_attention_heads", "n_head"))):
        add(next(said[key] for key in keys if key in said))
    counted_behind_pad = said.get("model_type", "xlm-roberta") in ("roberta", "xlm-roberta")  # configs of Jina's state none
    if counted_behind_pad:
        writer.add_context_length(said["max_position_embeddings"] - said["pad_token_id"] - 1)
    writer.add_causal_attention(False)
    if arch == "eurobert":
        writer.add_head_count_kv(said["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(said["rms_norm_eps"])
    else:
        writer.add_layer_norm_eps(next((said[key] for key in ("layer_norm_eps", "norm_eps", "layer_norm_epsilon") if key in said), 1e-12))
    if arch == "modern-bert":
        writer.add_rope_freq_base(said["rope_parameters"]["full_attention"]["rope_theta"])
        writer.add_rope_freq_base_swa(said["rope_parameters"]["sliding_attention"]["rope_theta"])
        writer.add_sliding_window(said["local_attention"])
        writer.add_sliding_window_pattern(3)
    elif arch not in ("bert", "jina-bert-v2"):
        writer.add_rope_freq_base(said["rotary_emb_base"] if "rotary_emb_base" in said else said["rope_parameters"]["rope_theta"])
    if arch == "nomic-bert-moe":
        writer.add_expert_count(said["num_experts"])
        writer.add_expert_used_count(said["moe_top_k"])
        writer.add_moe_every_n_layers(said["moe_every_n_layers"])
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(POOLING[pooling]))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
    write = {"Unigram": unigrams, "WordPiece": word_pieces, "BPE": merges_of_bytes}[tokenizer["type"]]
    write(writer, tokenizer["vocab"], said["vocab_size"])
    if charsmap is not None:
        writer.add_precompiled_charsmap(charsmap)
        writer.add_add_space_prefix(True)
        writer.add_remove_extra_whitespaces(True)
    writer.add_token_type_count(said.get("type_vocab_size") or 1)
    first = said["pad_token_id"] + 1 if counted_behind_pad else 0
    for key, value in (changed or {}).items():
        writer.kv_data[0][key].value = value
    for name, values in load_file(folder / "model.safetensors").items():
        if name.endswith((".mlp.w1", ".mlp.w2")):  # of experts, each a matrix [inner, width]
            values = values.reshape(said["num_experts"], -1, values.shape[1])
            name, values = (name.replace("mlp.w1", "up.weight"), values) if name.endswith("w1") else (
                name.replace("mlp.w2", "down.weight"), values.swapaxes(1, 2))
        if name.endswith("experts.bias"):  # which such files do not have
            continue
        for theirs, plain in DISTILLED.items() if said.get("model_type") == "distilbert" else ():
            name = name.replace(theirs, plain)
        own = gguf_name(name.removeprefix("bert.").removeprefix("roberta.").removeprefix("model."))
        own = own.replace("classifier.dense", "cls").replace("classifier.out_proj", "cls.output")
        values = values[first:] if own.startswith("position_embd") else values
        if not values.dtype.kind == "f" or own.startswith("cls") and pooling != "rank":
            continue
        if split_gates and (name.endswith(("mlp.gated_layers.weight", "mlp.up_gated_layer.weight"))):
            halves = np.split(values, 2)
            gate, values = halves if name.endswith("mlp.gated_layers.weight") else halves[::-1]
            writer.add_tensor(own.replace("ffn_up", "ffn_gate"), np.ascontiguousarray(gate, np.float32))
        if values.ndim < 2 or own.startswith(("position_embd", "token_types")) or kind == "F32":
            writer.add_tensor(own, np.ascontiguousarray(values, np.float32))
        elif kind == "F16":
            writer.add_tensor(own, values.astype(np.float16))
        else:
            wanted = getattr(gguf.GGMLQuantizationType, kind)
            writer.add_tensor(own, gguf.quants.quantize(values.astype(np.float32), wanted), raw_dtype=wanted)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def word_pieces(writer: gguf.GGUFWriter, words: Mapping[str, int], rows: int) -> None:
    tokens = [*sorted(words, key=words.__getitem__), *(f"[unused{at}]" for at in range(rows - len(words)))]
    kinds = [gguf.TokenType.CONTROL if each in SPECIAL else gguf.TokenType.NORMAL for each in tokens]
    writer.add_tokenizer_model("bert")
    writer.add_token_list([each if each in SPECIAL else each[2:] if each.startswith("##") else MARK + each for each in tokens])
    writer.add_token_types(kinds)
    named = {"cls": "[CLS]", "seperator": "[SEP]", "unknown": "[UNK]", "padding": "[PAD]", "mask": "[MASK]", "bos": "[CLS]", "eos": "[SEP]"}
    for role, token in named.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", words[token])


def unigrams(writer: gguf.GGUFWriter, pieces: list[tuple[str, float]], rows: int) -> None:
    pieces = [*pieces, *((f"<unused{at}>", -100.0) for at in range(rows - len(pieces)))]
    kinds = {**dict.fromkeys(("<s>", "</s>", "<pad>"), gguf.TokenType.CONTROL), "<unk>": gguf.TokenType.UNKNOWN}
    writer.add_tokenizer_model("t5")
    writer.add_token_list([piece for piece, _ in pieces])
    writer.add_token_scores([score for _, score in pieces])
    writer.add_token_types([kinds.get(piece, gguf.TokenType.NORMAL) for piece, _ in pieces])
    for role, token in {"bos": 0, "padding": 1, "eos": 2, "seperator": 2, "unknown": 3, "cls": 0}.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token)


def merges_of_bytes(writer: gguf.GGUFWriter, words: Mapping[str, int], rows: int) -> None:
    """fable's merges, with an encoder's own special tokens."""
    add_fable_tokenizer(writer)
    assert len(words) <= rows
    for role, token in {"cls": 0, "seperator": 1}.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token)
