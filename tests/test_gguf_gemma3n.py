"""GGUF files of Gemma 3n as converters write them: the same models, quantized ones too, and what is refused by name."""

import math
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from export_models import scores
from family_sizes import GEMMA_3N, Case
from safetensors.torch import load_file
from saved_models import saved
from saved_tokenizers import with_words_of_fable

from effllm import EffllmError
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.gguf.tokenizer_export import tokenizer_metadata
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.tokenizer import Tokenizer

IDS = np.random.default_rng(3).integers(0, 4096, 60).tolist()
SIZES = {**GEMMA_3N, "hidden_size": 64, "intermediate_size": [96, 96, 64, 96, 128, 96], "vocab_size": 4096, "head_dim": 32,
         "vocab_size_per_layer_input": 4096, "hidden_size_per_layer_input": 64, "laurel_rank": 32, "eos_token_id": None}
PARTS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
         "post_feedforward_layernorm": "post_ffw_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj":
         "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
         "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "altup.modality_router": "altup_router",
         "altup.router_norm": "altup_router_norm", "altup.prediction_coefs": "altup_predict_coef", "altup.correction_coefs":
         "altup_correct_coef", "laurel.linear_left": "laurel_l", "laurel.linear_right": "laurel_r", "laurel.post_laurel_norm":
         "laurel_post_norm", "per_layer_input_gate": "inp_gate", "per_layer_projection": "proj", "post_per_layer_input_norm": "post_norm"}
OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "model.embed_tokens_per_layer.weight":
         "per_layer_token_embd.weight", "model.per_layer_model_projection.weight": "per_layer_model_proj.weight",
         "model.per_layer_projection_norm.weight": "per_layer_proj_norm.weight"}
PLAIN = ("altup_", "laurel_", "norm")  # parts of names of what no converter puts into blocks
Change = Callable[[dict, dict], None]


def in_file(name: str) -> str:
    if name in OUTER:
        return OUTER[name]
    _, _, layer, rest = name.split(".", 3)
    if rest == "altup.correct_output_scale":
        return f"blk.{layer}.altup_correct_scale.weight"
    part, _, kind = rest.rpartition(".")
    return f"blk.{layer}.{PARTS[part]}.{kind}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gemma3n") / "source"
    saved(Case("gemma3n_text", SIZES, dtype="float16"), made)
    return with_words_of_fable(made)


def converted(folder: Path, out: Path, change: Change = lambda keys, tensors: None, blocks: str = "F16") -> Path:
    """A file as llama.cpp's converter writes it: streams' matrices stacked, a float for a count, deviations for shares, and keys and values
    of layers that have none of their own."""
    config, tensors = read_config(folder), {}
    stored = load_file(folder / "model.safetensors")
    for role, part in (("altup_projections", "altup_proj"), ("altup_unembed_projections", "altup_unembd_proj")):
        names = [f"model.{role}.{i}.weight" for i in range(config.residual_streams - 1)]
        tensors[f"{part}.weight"] = torch.stack([stored.pop(name) for name in names]).numpy()
    tensors |= {in_file(name): tensor.numpy() for name, tensor in stored.items()}
    if (short := config.vocab_size - len(tensors["per_layer_token_embd.weight"])) > 0:  # words of what sees and hears
        tensors["per_layer_token_embd.weight"] = np.pad(tensors["per_layer_token_embd.weight"], ((0, short), (0, 0)))
    layers = config.num_hidden_layers
    for layer in (layers - 2, layers - 1):
        for part in ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight"):
            tensors[f"blk.{layer}.{part}"] = tensors[f"blk.{layer - 2}.{part}"] + 1
    keys: dict[str, object] = {
        "context_length": 1024, "embedding_length": config.hidden_size, "block_count": layers,
        "attention.head_count": config.num_attention_heads, "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": config.head_dim, "attention.value_length": config.head_dim,
        "attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "attention.sliding_window": 40, "attention.sliding_window_pattern": [window is not None for window in config.windows],
        "attention.shared_kv_layers": 2.0, "feed_forward_length": list(map(config.intermediate_size_of, range(layers))),
        "embedding_length_per_layer_input": config.per_layer_input_dim, "final_logit_softcapping": 3.0, "rope.freq_base": 1e6,
        "altup.num_inputs": 4, "altup.active_idx": 0,
        "activation_sparsity_scale": [-math.inf if each is None else each for each in config.gate_cutoffs]}
    change(keys, tensors)
    writer = gguf.GGUFWriter(out, "gemma3n")
    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32}
    for name, value in keys.items():
        if isinstance(value, list):
            writer.add_array(f"gemma3n.{name}", value)
        else:
            writer.add_key_value(f"gemma3n.{name}", value, kinds[type(value)])
    for name, value in tokenizer_metadata(folder, Tokenizer.load(folder, config), config.vocab_size).items():
        if isinstance(value, list | tuple | np.ndarray):
            writer.add_array(name, value.tolist() if isinstance(value, np.ndarray) else list(value))
        else:
            writer.add_key_value(name, value, gguf.GGUFValueType.STRING if isinstance(value, str) else kinds[type(value)])
    for name, values in tensors.items():
        kind = blocks if values.ndim > 1 and not any(part in name for part in PLAIN) else "F16" if values.ndim > 1 else "F32"
        if kind in ("F16", "F32"):
            writer.add_tensor(name, np.ascontiguousarray(values.astype(np.float16 if kind == "F16" else np.float32)))
        else:
            quantized = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(name, gguf.quants.quantize(values.astype(np.float32), quantized), raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_files_of_converters_are_the_same_models(folder, tmp_path):
    path = converted(folder, tmp_path / "m.gguf")
    ours, theirs = read_config(path, strict=True), read_config(folder)
    for field in ("kv_sources", "layer_intermediate_sizes", "windows", "per_layer_input_dim", "per_layer_input_vocab",
                  "residual_streams", "low_rank_dim", "final_logit_softcapping",
                  "attn_scale", "embedding_multiplier"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert [each is None for each in ours.gate_cutoffs] == [each is None for each in theirs.gate_cutoffs]
    assert np.allclose(*([each or 0.0 for each in own.gate_cutoffs] for own in (ours, theirs)), atol=1e-6)
    wanted = scores(folder, IDS)
    assert np.abs(scores(path, IDS) - wanted).max() < 2e-4 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_blocks_are_multiplied_as_they_lie(kind, folder, tmp_path):
    path = converted(folder, tmp_path / "m.gguf", blocks=kind)
    *_, engine = open_engine(path, EngineOptions(device="cpu", kv="32bit", ctx=128, threads=1))
    kept = {role for role, tensor in engine.model.tensors[0].items() if not tensor.spec.is_raw}
    engine.close()
    assert kept == {"q", "k", "v", "o", "gate", "up", "down", "input_gate", "input_out"}
    wanted = scores(folder, IDS)
    assert np.abs(scores(path, IDS) - wanted).mean() < {"Q8_0": 0.03, "Q4_0": 0.5}[kind] * np.abs(wanted).max()


def test_what_files_leave_out_is_what_readers_take(folder, tmp_path):
    """One width for all layers, the pattern of layers, the smaller theta; and Ollama's words for some of it."""

    def change(keys: dict, tensors: dict) -> None:
        del keys["attention.key_length"], keys["attention.value_length"], keys["attention.sliding_window_pattern"]
        keys |= {"feed_forward_length": 96, "head_dim": 32, "rope.freq_base_local": 20_000.0, "altup.correct_scale": True,
                 "altup.lr_multiplier": 1.0, "attention.shared_kv_layers": 1}

    config = read_config(converted(folder, tmp_path / "m.gguf", change), strict=True)
    assert config.windows == (40,) * 4 + (None, 40) and config.intermediate_size_of(2) == 96 and config.head_dim == 32
    assert [config.ropes[layer].theta for layer in (0, 4)] == [20_000.0, 1e6] and config.kv_sources[5] == 3
    assert read_config(converted(folder, tmp_path / "n.gguf"), strict=True).ropes[0].theta == 10_000.0


def without(name: str) -> Change:
    return lambda keys, tensors: (keys if name in keys else tensors).pop(name)


def saying(**values: object) -> Change:
    return lambda keys, tensors: keys.update({name.replace("__", "."): value for name, value in values.items()})


@pytest.mark.parametrize(("change", "said"), [
    (without("altup.num_inputs"), "lacks key gemma3n.altup.num_inputs"), (without("blk.0.laurel_l.weight"), "lacks tensor blk.0.laurel_l"),
    (without("per_layer_token_embd.weight"), "lacks tensor per_layer_token"), (saying(altup__active_idx=1), "gemma3n.altup.active_idx"),
    (saying(altup__num_inputs=12), "gemma3n.altup.num_inputs"), (saying(attention__value_length=16), "attention.value_length 16"),
    (saying(attention__shared_kv_layers=2.5), "gemma3n.attention.shared_kv_layers"),
    (saying(feed_forward_length=[96] * 5), "gemma3n.feed_forward_length"),
    (saying(attention__sliding_window=0), "states 0 for gemma3n.attention.sliding"),
    (without("attention.sliding_window"), "lacks key gemma3n.attention.sliding_window"),
    (saying(activation_sparsity_scale=[1.6] * 5), "gemma3n.activation_sparsity_scale"),
    (saying(activation_sparsity_scale=[math.inf] * 6), "activation_sparsity_pattern")])
def test_what_a_file_cannot_mean_is_refused(change, said, folder, tmp_path):
    with pytest.raises(EffllmError) as caught:
        read_config(converted(folder, tmp_path / "odd.gguf", change))
    assert said in str(caught.value) and "\n" not in caught.value.message


@pytest.mark.parametrize("name", ["altup_proj.weight", "altup_unembd_proj.weight"])
def test_stacks_of_other_heights_are_refused(name, folder, tmp_path):
    def change(keys: dict, tensors: dict) -> None:
        tensors[name] = tensors[name][:2]

    with pytest.raises(EffllmError, match=name.removesuffix(".weight")) as caught:
        scores(converted(folder, tmp_path / "odd.gguf", change), IDS)
    assert "\n" not in caught.value.message
