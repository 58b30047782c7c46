"""GGUF files of GLM 5.3 as llama.cpp's converter writes them: the same models, also quantized and with fused queries, keys and values, and
what is refused."""

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from export_models import scores
from safetensors.torch import load_file
from saved_models import saved
from test_gguf_kimi_delta_attention import PARTS, Case
from unusual_family_cases import GLM_5_NEXT

from effllm import EffllmError
from effllm.runtime.config import read_config

CASE = Case("glm5_next_text", {
    **GLM_5_NEXT, "vocab_size": 4096, "num_key_value_heads": 4, "num_attention_heads": 4, "kv_lora_rank": 64, "q_lora_rank": 64,
    "qk_nope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 96, "linear_head_dim": 32,
    "linear_num_heads": 4, "n_group": 1, "topk_group": 1, "initializer_range": 0.12, "linear_lower_bound": -5.0, "index_topk": 128,
    "index_kpool": 4, "hc_mult": 4}, dtype="float16", inside="glm5_next")
IDS = np.random.default_rng(3).integers(0, 4096, 60).tolist()
OWN = {**PARTS, "indexer.wq_b": "indexer.attn_q_b", "indexer.wk": "indexer.attn_k", "indexer.k_norm": "indexer.k_norm",
       "indexer.weights_proj": "indexer.proj", "q_a_proj": "attn_q_a", "q_a_layernorm": "attn_q_a_norm", "q_b_proj": "attn_q_b",
       **{f"shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}}
WHOLE = {"self_attn.dt_bias": "ssm_dt.bias", "mlp.gate.e_score_correction_bias": "exp_probs_b.bias",
         "self_attn.indexer.index_kpool_compress_ape": "indexer_compressor_ape.weight",
         "self_attn.indexer.index_kpool_compress_gate": "indexer_compressor_gate.weight",
         **{f"hc_{branch}_{part}": f"hc_{branch}_{part}.weight" for branch in ("attn", "ffn") for part in ("fn", "base", "scale")}}
OUTER = {"embed_tokens.weight": "token_embd.weight", "norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
Change = Callable[[dict, dict], None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("glm") / "source"
    saved(CASE, made)
    return made


def in_file(layer: str, rest: str, values: np.ndarray) -> dict[str, np.ndarray]:
    """A tensor of a layer by its name in the file, or what is made of it."""
    if rest in WHOLE:
        return {f"blk.{layer}.{WHOLE[rest]}": values}
    if rest == "self_attn.A_log":
        return {f"blk.{layer}.ssm_a": -np.exp(values)}
    if rest == "self_attn.conv1d.weight":
        return {f"blk.{layer}.ssm_conv1d_{part}.weight": own for part, own in zip("qkv", np.split(values, 3), strict=True)}
    part, _, kind = rest.rpartition(".")
    names = (part, part.split(".", 1)[-1], part.rpartition(".")[2])
    return {f"blk.{layer}.{next(OWN[name] for name in names if name in OWN)}.{kind}": values}


def converted(folder: Path, out: Path, change: Change = lambda keys, tensors: None, blocks: str = "F16") -> Path:
    """A file of the model, its large matrices in blocks of a type."""
    config, tensors, experts = read_config(folder), {}, {}
    own, index, mixture = config.mla, config.indexer.shape, config.moe
    for name, tensor in load_file(folder / "model.safetensors").items():
        values, name = tensor.float().numpy(), name.removeprefix("model.").removeprefix("language_model.").removeprefix("model.")
        if name in OUTER:
            tensors[OUTER[name]] = values
        if not name.startswith("layers."):
            continue
        _, layer, rest = name.split(".", 2)
        if found := re.search(r"experts\.(\d+)\.(\w+)_proj\.weight", rest):
            experts.setdefault(f"blk.{layer}.ffn_{found[2]}_exps.weight", {})[int(found[1])] = values
        elif rest.endswith("kv_b_proj.weight"):
            split = values.reshape(-1, own.kv_b_rows, own.rank)
            tensors[f"blk.{layer}.attn_k_b.weight"] = split[:, : own.nope].swapaxes(1, 2)
            tensors[f"blk.{layer}.attn_v_b.weight"] = split[:, own.nope :]
        else:
            tensors |= in_file(layer, rest, values)
    tensors |= {name: np.stack([found[i] for i in range(len(found))]) for name, found in experts.items()}
    layers = config.num_hidden_layers
    keys: dict[str, object] = {
        "context_length": 512, "embedding_length": config.hidden_size, "block_count": layers, "feed_forward_length": 96,
        "attention.head_count": 4, "attention.head_count_kv": [int(layer not in config.recurrent_layers) for layer in range(layers)],
        "attention.layer_norm_rms_epsilon": float(config.norm_eps), "attention.layer_norm_epsilon": 1e-6, "attention.key_length": own.key,
        "attention.value_length": own.rank, "attention.key_length_mla": own.nope, "attention.value_length_mla": own.value,
        "attention.kv_lora_rank": own.rank, "attention.q_lora_rank": own.query_rank, "rope.dimension_count": 0,
        "ssm.conv_kernel": config.recurrent.taps, "kda.head_dim": config.recurrent.key_dim,
        "kda.gate_lower_bound": config.recurrent.decay_bound,
        "expert_count": mixture.num_experts, "expert_used_count": mixture.experts_per_token,
        "expert_feed_forward_length": mixture.expert_dim,
        "expert_shared_count": mixture.shared_expert_dim // mixture.expert_dim, "leading_dense_block_count": min(mixture.layers),
        "expert_weights_scale": mixture.routed_scale, "expert_weights_norm": mixture.renormalise, "expert_gating_func": 2,
        "swiglu_clamp_exp": [10.0] * layers, "attention.indexer.head_count": index.heads, "attention.indexer.key_length": index.width,
        "attention.indexer.top_k": index.top_k * index.tokens_per_key, "attention.indexer.kpool": index.tokens_per_key,
        "attention.indexer.kpool_select_tail": True, "hyper_connection.count": config.residual_streams,
        "hyper_connection.sinkhorn_iterations": config.sinkhorn_iterations, "hyper_connection.epsilon": config.sinkhorn_eps,
        "vocab_size": 4096}
    change(keys, tensors)
    writer = gguf.GGUFWriter(out, "glm5-next")
    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32,
             str: gguf.GGUFValueType.STRING}
    for name, value in keys.items():
        if isinstance(value, list):
            writer.add_array(f"glm5-next.{name}", value)
        else:
            writer.add_key_value(f"glm5-next.{name}", value, kinds[type(value)])
    writer.add_tokenizer_model("no_vocab")
    for name, values in tensors.items():
        plain = values.ndim == 1 or any(part in name for part in ("ssm_conv1d", "ffn_gate_inp", "hc_", "indexer_compressor", "ssm_beta"))
        kind = gguf.GGMLQuantizationType["F32" if plain else blocks]
        writer.add_tensor(name, gguf.quants.quantize(np.ascontiguousarray(values.astype(np.float32)), kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def in_one(keys: dict, tensors: dict) -> None:
    """Queries, keys and values of linear attention as one tensor, and a layer that guesses ahead."""
    for layer in range(3):
        parts = [tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
        tensors[f"blk.{layer}.attn_qkv.weight"] = np.concatenate(parts)
    keys |= {"block_count": 5, "nextn_predict_layers": 1, "attention.head_count_kv": [*keys["attention.head_count_kv"], 1]}
    keys["attention.indexer.types"] = [1, 1, 1, 1]
    tensors |= {"blk.4.nextn.enorm.weight": np.ones(8), "blk.4.attn_norm.weight": np.ones(8)}


def test_files_of_converters_are_the_same_models(folder: Path, tmp_path: Path) -> None:
    theirs, wanted = read_config(folder), scores(folder, IDS)
    for name, change in (("plain", lambda keys, tensors: None), ("one", in_one)):
        path = converted(folder, tmp_path / f"{name}.gguf", change)
        ours = read_config(path, strict=True)
        assert dataclasses.replace(ours.moe, routed_scale=theirs.moe.routed_scale) == theirs.moe
        for field in ("recurrent", "recurrent_layers", "mla", "residual_streams", "sinkhorn_iterations", "indexer", "hidden_act",
                      "num_hidden_layers"):
            assert getattr(ours, field) == getattr(theirs, field), field
        assert ours.sinkhorn == pytest.approx(theirs.sinkhorn)
        assert np.abs(scores(path, IDS) - wanted).max() < 1e-3 * np.abs(wanted).max()


def test_blocks_run_from_their_codes(folder: Path, tmp_path: Path) -> None:
    wanted = scores(folder, IDS)
    assert np.abs(scores(converted(folder, tmp_path / "m.gguf", blocks="Q8_0"), IDS) - wanted).mean() < 0.05 * np.abs(wanted).max()


def says(**values: object) -> Change:
    return lambda keys, tensors: keys.update({name.replace("__", "."): value for name, value in values.items()})


@pytest.mark.parametrize(("change", "said"), [
    (says(rope__dimension_count=32), "rope.dimension_count 32"), (says(expert_gating_func=1), "expert_gating_func is not 2"),
    (says(swiglu_clamp_exp=[7.0] * 4), "swiglu_limit"),
    (says(attention__indexer__kpool_select_tail=False), "index_kpool_always_select_tail"),
    (says(attention__indexer__types=[1, 2, 1, 1]), "expected 0 or 1 for each of 4 layers"),
    (says(attention__key_length_mla=0), "key_length_mla"), (says(nextn_predict_layers=9), "nextn_predict_layers 9 of 4 blocks"),
    (says(attention__indexer__kpool=1), "attention.indexer.kpool"),
    (lambda keys, tensors: keys.pop("attention.indexer.top_k"), "lacks key glm5-next.attention.indexer.top_k"),
    (lambda keys, tensors: tensors.pop("blk.0.attn_k.weight"), "holds a part of .* without another"),
    (lambda keys, tensors: tensors.update({"blk.0.attn_odd.weight": np.ones(4)}), "attn_odd.weight., which no glm5_next_text model has")])
def test_what_it_cannot_be_is_named(folder: Path, tmp_path: Path, change: Change, said: str) -> None:
    path = converted(folder, tmp_path / "m.gguf", change)
    with pytest.raises(EffllmError, match=said) as caught:
        scores(path, IDS)
    assert caught.value.hint and "\n" not in caught.value.message


@pytest.mark.peer
@pytest.mark.slow
def test_llama_cpp_gives_the_same_logits(folder: Path, tmp_path: Path) -> None:
    peer = pytest.importorskip("llama_cpp")
    path = converted(folder, tmp_path / "m.gguf")
    theirs = peer.Llama(str(path), n_ctx=128, n_threads=1, verbose=False, logits_all=True, type_k=0, type_v=0)
    try:
        theirs.eval(IDS)
        found = np.array(theirs.scores[: len(IDS)])
    finally:
        theirs.close()
    assert np.abs(scores(path, IDS) - found).max() < 1e-2 * np.abs(found).max()
