"""GGUF files of Gemma 4 as converters write them: where their keys differ from ours, and what is refused by name."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from export_models import exported, model, scores
from gguf_samples import Reader
from test_gguf_tokenizer import LLAMA, header

from effllm import EffllmError
from effllm.runtime.config import read_config
from effllm.runtime.gguf.export import export_gguf
from effllm.runtime.gguf.tokenizer import backend, read_vocabulary

IDS = np.random.default_rng(3).integers(0, 4096, 60).tolist()
GEMMA = "gemma4."


def copied(path: Path, out: Path, change: Callable[[dict, dict], None]) -> Path:
    """The file with other keys and tensors."""
    reader, writer = Reader(path), gguf.GGUFWriter(out, "gemma4")
    keys = {name: (field.contents(), field.types) for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    tensors = {tensor.name: np.array(tensor.data) for tensor in reader.tensors}
    del keys["general.architecture"]
    change(keys, tensors)
    for name, (value, types) in keys.items():
        writer.add_key_value(name, value, types[0], types[-1] if types[0] == gguf.GGUFValueType.ARRAY else None)
    for name, values in tensors.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def by_converter(keys: dict, tensors: dict) -> None:
    """Truths for windows, one number where all layers have it, keys and values of layers that have none of their own."""
    pattern, _ = keys[f"{GEMMA}attention.sliding_window_pattern"]
    keys[f"{GEMMA}attention.sliding_window_pattern"] = [bool(each) for each in pattern], [gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.BOOL]
    for key in ("attention.head_count_kv", "feed_forward_length"):
        values, _ = keys[GEMMA + key]
        if len(set(values)) == 1:
            keys[GEMMA + key] = values[0], [gguf.GGUFValueType.UINT32]
    shared, _ = keys[f"{GEMMA}attention.shared_kv_layers"]
    for layer in range(len(pattern) - shared, len(pattern)):
        for part in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
            tensors[f"blk.{layer}.{part}"] = tensors[f"blk.{layer % 2}.{part}"] + 1
    for name in [name for name in tensors if "ffn_gate_exps" in name]:
        up = tensors.pop(name.replace("gate", "up"))
        tensors[name.replace("gate", "gate_up")] = np.concatenate([tensors.pop(name), up], 1)


@pytest.mark.parametrize("name", ["gemma4_text", "gemma4_text, keys as values", "gemma4_text, mixture"])
def test_files_of_converters_are_the_same_models(name, tmp_path):
    source = model(name, tmp_path / "source")
    path = exported(source, tmp_path / "m.gguf")
    theirs = copied(path, tmp_path / "theirs.gguf", by_converter)
    assert np.array_equal(scores(theirs, IDS), scores(path, IDS))
    ours, folder = read_config(theirs, strict=True), read_config(source)
    for field in ("kv_sources", "layer_intermediate_sizes", "k_eq_v_layers", "windows", "per_layer_input_dim", "moe",
                  "final_logit_softcapping"):
        assert getattr(ours, field) == getattr(folder, field), field
    assert [ours.kv_heads_of(layer) for layer in range(4)] == [folder.kv_heads_of(layer) for layer in range(4)]
    assert [rope.params for rope in ours.ropes] == [rope.params for rope in folder.ropes]


def changed(**keys: object) -> Callable[[dict, dict], None]:
    def change(held: dict, _: dict) -> None:
        for name, value in keys.items():
            held[GEMMA + name.replace("__", ".")] = value, [gguf.GGUFValueType.UINT32]

    return change


def odd_divisors(_: dict, tensors: dict) -> None:
    tensors["rope_freqs.weight"][0] = 3.0


@pytest.mark.parametrize(("change", "said"), [
    (changed(attention__value_length=16), "attention.value_length 16"), (changed(rope__dimension_count=8), "rope.dimension_count 8"),
    (lambda keys, _: keys.pop(f"{GEMMA}attention.key_length_swa"), "lacks key gemma4.attention.key_length_swa"),
    (lambda keys, _: keys.pop(f"{GEMMA}attention.sliding_window_pattern"), "sliding_window_pattern"),
    (odd_divisors, "nor disable a channel"),
    (changed(attention__shared_kv_layers=1), "feed_forward_length")])
def test_what_a_file_cannot_mean_is_refused(change, said, tmp_path):
    path = exported(model("gemma4_text", tmp_path / "source"), tmp_path / "m.gguf")
    with pytest.raises(EffllmError) as caught:
        read_config(copied(path, tmp_path / "odd.gguf", change))
    assert said in str(caught.value) and "\n" not in caught.value.message


@pytest.mark.parametrize(("changes", "said"), [({"layer_types": ["full_attention"] * 6}, "only one type of layer"),
                                               ({"vocab_size_per_layer_input": 5000}, "another vocabulary"),
                                               ({"num_kv_shared_layers": 1}, "than the last two"),
                                               ({"attention_bias": True}, "biases")])
def test_what_a_file_cannot_say_is_refused(changes, said, tmp_path):
    source = model("gemma4_text", tmp_path / "source", **changes)
    with pytest.raises(EffllmError, match=said):
        list(export_gguf(source, tmp_path / "m.gguf", "F16", "a name"))


def test_its_tokenizers_state_their_merges():
    """Of the same kind as those with scores, from which these merges follow."""
    merges = ["a b", "▁ ab"]
    made = backend(read_vocabulary(header(**{**LLAMA, "model": "gemma4", "merges": merges, "add_space_prefix": False})))
    plain = backend(read_vocabulary(header(**LLAMA, add_space_prefix=False)))
    for text in ("ab", " ab", "A ab<go>ab", "b a"):
        assert made.encode(text).ids == plain.encode(text).ids
    with pytest.raises(EffllmError, match="merges"):
        read_vocabulary(header(**{**LLAMA, "model": "gemma4"}))
