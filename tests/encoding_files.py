"""GGUF files of small encoders for tests, as llama.cpp writes them from folders of transformers' and with their tokenizers."""

import json
from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from safetensors.numpy import load_file

from effllm.runtime.encoders.gguf_file import own_name

MARK = "\u2581"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
POOLING = {"mean": 1, "cls": 2, "lasttoken": 3, "rank": 4}


def write_encoder(folder: Path, path: Path, arch: str = "bert", pooling: str | None = "mean", kind: str = "F32",
                  changed: Mapping[str, object] | None = None) -> Path:
    """The model of a folder with a WordPiece tokenizer; `kind`: of its matrices; `changed`: what it states otherwise."""
    said = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(path, arch)
    writer.add_name("small")
    for add, key in ((writer.add_context_length, "max_position_embeddings"), (writer.add_embedding_length, "hidden_size"),
                     (writer.add_block_count, "num_hidden_layers"), (writer.add_feed_forward_length, "intermediate_size"),
                     (writer.add_head_count, "num_attention_heads")):
        add(said[key])
    if said["model_type"] == "xlm-roberta":
        writer.add_context_length(said["max_position_embeddings"] - said["pad_token_id"] - 1)
    writer.add_layer_norm_eps(said["layer_norm_eps"])
    writer.add_causal_attention(False)
    if arch == "nomic-bert":
        writer.add_rope_freq_base(1000.0)
    if pooling is not None:
        writer.add_pooling_type(gguf.PoolingType(POOLING[pooling]))
    tokenizer = json.loads((folder / "tokenizer.json").read_text())["model"]
    (unigrams if tokenizer["type"] == "Unigram" else word_pieces)(writer, tokenizer["vocab"], said["vocab_size"])
    first = said["pad_token_id"] + 1 if said["model_type"] == "xlm-roberta" else 0
    for key, value in (changed or {}).items():
        writer.kv_data[0][key].value = value
    for name, values in load_file(folder / "model.safetensors").items():
        own = own_name(name.removeprefix("bert.").removeprefix("roberta."))
        own = own.replace("classifier.dense", "cls").replace("classifier.out_proj", "cls.output")
        values = values[first:] if own.startswith("position_embd") else values
        if not values.dtype.kind == "f" or own.startswith("cls") and pooling != "rank":
            continue
        if values.ndim < 2 or own.startswith(("position_embd", "token_types")) or kind == "F32":
            writer.add_tensor(own, values.astype(np.float32))
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
    writer.add_token_type_count(2)
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
    writer.add_token_type_count(1)
    for role, token in {"bos": 0, "padding": 1, "eos": 2, "seperator": 2, "unknown": 3, "cls": 0}.items():
        writer.add_uint32(f"tokenizer.ggml.{role}_token_id", token)
