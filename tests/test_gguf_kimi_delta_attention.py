"""GGUF files of Kimi Linear and Ling 3 as llama.cpp's converters write them: the same models, also quantized, and what is refused."""

import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from export_models import scores
from family_sizes import KIMI, Case
from more_family_cases import LING
from safetensors.torch import load_file
from saved_models import saved
from saved_tokenizers import with_words_of_fable

from effllm import EffllmError
from effllm.runtime.config import read_config
from effllm.runtime.engine import open_engine
from effllm.runtime.gguf.tokenizer_export import tokenizer_metadata
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.sampler import Sampler, SamplerSettings
from effllm.runtime.tokenizer import Tokenizer

IDS = np.random.default_rng(3).integers(0, 4096, 60).tolist()
# Widths of which blocks are made: 64 and 96 numbers of a row.
WIDE = {"vocab_size": 4096, "num_key_value_heads": 4, "num_attention_heads": 4, "kv_lora_rank": 64, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32, "v_head_dim": 32, "moe_intermediate_size": 64, "intermediate_size": 96, "initializer_range": 0.12}
CASES = {"kimi-linear": Case("kimi_linear", {**KIMI, **WIDE, "linear_head_dim": 32, "linear_num_heads": 4, "n_group": 1, "topk_group": 1},
                             dtype="float16"),
         "bailingmoe3": Case("bailing_hybrid", {**LING, **WIDE, "head_dim": 32}, dtype="float16")}
PARTS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v",
         "o_proj": "attn_output", "dense": "attn_output", "kv_a_proj_with_mqa": "attn_kv_a_mqa", "kv_a_layernorm": "attn_kv_a_norm",
         "q_conv1d": "ssm_conv1d_q", "k_conv1d": "ssm_conv1d_k", "v_conv1d": "ssm_conv1d_v", "b_proj": "ssm_beta", "o_norm": "ssm_norm",
         "f_a_proj": "ssm_f_a", "f_b_proj": "ssm_f_b", "g_a_proj": "ssm_g_a", "g_b_proj": "ssm_g_b", "f_proj": "ssm_f_a",
         "gate": "ffn_gate_inp", **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
         **{f"block_sparse_moe.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
         **{f"shared_experts.{part}_proj": f"ffn_{part}_shexp" for part in ("gate", "up", "down")}}
EXPERTS = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}
OUTER = {"model.embed_tokens.weight": "token_embd.weight", "model.word_embeddings.weight": "token_embd.weight", "model.norm.weight":
         "output_norm.weight", "lm_head.weight": "output.weight"}
Change = Callable[[dict, dict], None]


@pytest.fixture(params=CASES, scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("models") / request.param
    saved(CASES[request.param], made)
    return with_words_of_fable(made)


def in_file(arch: str, layer: str, rest: str, values: np.ndarray) -> tuple[str, np.ndarray]:
    """A tensor of a layer by its name in the file, as converters have it."""
    inside = rest.split(".", 1)[-1]
    if inside == "A_log":
        return f"blk.{layer}.ssm_a", -np.exp(values) if arch == "kimi-linear" else np.exp(values).reshape(-1, 1)
    if inside == "dt_bias":
        return f"blk.{layer}.ssm_dt.bias", values
    if rest.endswith(("e_score_correction_bias", "expert_bias")):
        return f"blk.{layer}.exp_probs_b.bias", values
    part, _, kind = rest.rpartition(".")
    if part.endswith("_conv1d"):
        values = values.reshape(1, len(values), 1, -1)
    if part == "attention.g_proj":
        return f"blk.{layer}.{'attn_gate' if len(values) == 4 else 'ssm_g_a'}.weight", values
    names = (part, part.split(".", 1)[-1], part.rpartition(".")[2])
    return f"blk.{layer}.{next(PARTS[name] for name in names if name in PARTS)}.{kind}", values


def converted(folder: Path, out: Path, change: Change = lambda keys, tensors: None, blocks: str = "F16", opened: bool = False) -> Path:
    """A file of the model, its matrices in blocks of a type; of what these stand for where it is `opened`."""
    arch, config, tensors, experts = folder.name, read_config(folder), {}, {}
    own = config.mla
    for name, tensor in load_file(folder / "model.safetensors").items():
        values = tensor.to(torch.float32).numpy()
        if name in OUTER:
            tensors[OUTER[name]] = values
            continue
        _, _, layer, rest = name.split(".", 3)
        if found := re.search(r"experts\.(\d+)\.(\w+)\.weight", rest):
            experts.setdefault(f"blk.{layer}.ffn_{EXPERTS[found[2]]}_exps.weight", {})[int(found[1])] = values
        elif rest.endswith("kv_b_proj.weight"):
            split = values.reshape(-1, own.kv_b_rows, own.rank)
            tensors[f"blk.{layer}.attn_k_b.weight"] = split[:, : own.nope].swapaxes(1, 2)
            tensors[f"blk.{layer}.attn_v_b.weight"] = split[:, own.nope :]
        else:
            name, values = in_file(arch, layer, rest, values)
            tensors[name] = values
    tensors |= {name: np.stack([found[i] for i in range(len(found))]) for name, found in experts.items()}
    mixture, layers = config.moe, config.num_hidden_layers
    keys: dict[str, object] = {
        "context_length": 512, "embedding_length": 64, "block_count": layers, "feed_forward_length": 96, "attention.head_count": 4,
        "attention.head_count_kv": [int(layer not in config.recurrent_layers) for layer in range(layers)],
        "attention.layer_norm_rms_epsilon": float(config.norm_eps), "attention.key_length": own.key, "attention.key_length_mla": own.query,
        "attention.value_length_mla": own.value, "attention.kv_lora_rank": own.rank, "rope.dimension_count": own.rope,
        "ssm.conv_kernel": config.recurrent.taps, "kda.head_dim": config.recurrent.key_dim, "expert_count": mixture.num_experts,
        "expert_used_count": mixture.experts_per_token, "expert_feed_forward_length": mixture.expert_dim, "expert_shared_count": 2,
        "leading_dense_block_count": min(mixture.layers), "expert_weights_scale": mixture.routed_scale, "expert_gating_func": 2,
        "rope.freq_base": float(config.rope.theta) if config.rope else 10_000.0, "vocab_size": 4096}
    if arch == "bailingmoe3":
        keys |= {"kda.gate_lower_bound": config.recurrent.decay_bound, "kda.safe_gate": True, "expert_group_count": mixture.num_groups,
                 "expert_group_used_count": mixture.top_groups, "expert_weights_norm": True,
                 "expert_shared_feed_forward_length": mixture.shared_expert_dim}
    change(keys, tensors)
    writer = gguf.GGUFWriter(out, arch)
    kinds = {bool: gguf.GGUFValueType.BOOL, int: gguf.GGUFValueType.UINT32, float: gguf.GGUFValueType.FLOAT32,
             str: gguf.GGUFValueType.STRING}
    text = tokenizer_metadata(folder, Tokenizer.load(folder, config), config.vocab_size)
    for name, value in [*((f"{arch}.{name}", value) for name, value in keys.items()), *text.items()]:
        if isinstance(value, list | tuple | np.ndarray):
            writer.add_array(name, value.tolist() if isinstance(value, np.ndarray) else list(value))
        else:
            writer.add_key_value(name, value, kinds[type(value)])
    for name, values in tensors.items():
        wide = values.ndim > 1 and "ssm_conv1d" not in name and not name.endswith("ssm_a")
        kind = "F32" if not wide or "ffn_gate_inp" in name else blocks
        if kind in ("F16", "F32"):
            writer.add_tensor(name, np.ascontiguousarray(values.astype(np.float16 if kind == "F16" else np.float32)))
        else:
            quantized = gguf.GGMLQuantizationType[kind]
            blocked = gguf.quants.quantize(np.ascontiguousarray(values.astype(np.float32)), quantized)
            if opened:
                writer.add_tensor(name, gguf.quants.dequantize(blocked, quantized))
            else:
                writer.add_tensor(name, blocked, raw_dtype=quantized)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def test_files_of_converters_are_the_same_models(folder: Path, tmp_path: Path) -> None:
    path = converted(folder, tmp_path / "m.gguf")
    ours, theirs = read_config(path, strict=True), read_config(folder)
    assert dataclasses.replace(ours.moe, routed_scale=theirs.moe.routed_scale) == theirs.moe
    assert ours.moe.routed_scale == pytest.approx(theirs.moe.routed_scale)
    for field in ("recurrent", "recurrent_layers", "mla", "attn_scale", "output_gate", "output_gate_per_head", "num_key_value_heads"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert [rope and rope.theta for rope in ours.ropes] == [rope and rope.theta for rope in theirs.ropes]
    wanted = scores(folder, IDS)
    assert np.abs(scores(path, IDS) - wanted).max() < 2e-3 * np.abs(wanted).max()


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_blocks_are_multiplied_as_they_lie(kind: str, folder: Path, tmp_path: Path) -> None:
    """Queries, keys and values of linear attention too, in one matrix of the blocks of three: as what they stand for, written out."""
    path, wide = converted(folder, tmp_path / "m.gguf", blocks=kind), converted(folder, tmp_path / "w.gguf", blocks=kind, opened=True)
    found = []
    for file in (path, wide):
        *_, engine = open_engine(file, EngineOptions(device="cpu", kv="32bit", ctx=128, threads=1, exact=True))
        layer = engine.config.recurrent_layers[0]
        kept = {role for role, tensor in engine.model.tensors[layer].items() if not tensor.spec.is_raw}
        assert {"state_in", "state_gate", "state_out"} <= kept or file == wide and not kept
        found.append(np.concatenate([rows.copy() for _, rows in engine.score(IDS)]))
        engine.close()
    assert np.abs(found[0] - found[1]).max() < 2e-3 * np.abs(found[1]).max()


def test_bounds_of_gates_are_those_of_a_folder(folder: Path, tmp_path: Path) -> None:
    """Of Ling's files; Kimi's have none."""
    if folder.name != "bailingmoe3":
        assert not read_config(folder).gate_limits
        return
    lists = {"swiglu_clamp_exp": [0.0, 0.0, 0.5, 0.0, 0.25, 0.0], "swiglu_clamp_shexp": [0.0, 0.5, 0.0, 0.0, 0.25, 0.0]}
    path = converted(folder, tmp_path / "m.gguf", lambda keys, tensors: keys.update(lists))
    bounded = tmp_path / "bounded"
    shutil.copytree(folder, bounded)
    raw = json.loads((bounded / "config.json").read_text())
    (bounded / "config.json").write_text(json.dumps({**raw, "expert_swiglu_limit_list": lists["swiglu_clamp_exp"],
                                                     "share_expert_swiglu_limit_list": lists["swiglu_clamp_shexp"]}))
    assert read_config(path).gate_limits == read_config(bounded).gate_limits
    ours, plain = scores(path, IDS), scores(converted(folder, tmp_path / "plain.gguf"), IDS)
    assert np.abs(ours - scores(bounded, IDS)).max() < 2e-4 * np.abs(ours).max() < np.abs(ours - plain).max()


def test_parts_of_other_types_are_widened(folder: Path, tmp_path: Path) -> None:
    """As where values of a layer have more bits than its keys: exactly what the file holds, in 16 bits."""
    wanted = scores(converted(folder, tmp_path / "a.gguf"), IDS)
    layer = read_config(folder).recurrent_layers[0]

    def mixed(keys: dict, tensors: dict) -> None:
        name = f"blk.{layer}.attn_v.weight"
        tensors[name] = tensors.pop(name)

    path = converted(folder, tmp_path / "b.gguf", mixed)
    assert np.array_equal(scores(path, IDS), wanted)  # in another place of the file


@pytest.mark.parametrize(("change", "said"), [
    (lambda keys, tensors: keys.update({"expert_gating_func": 1}), "expert_gating_func is not 2"),
    (lambda keys, tensors: keys.update({"attention.key_length_mla": 16}), "rope.dimension_count 32"),
    (lambda keys, tensors: keys.pop("kda.head_dim"), "lacks key"),
    (lambda keys, tensors: keys.update({"swiglu_clamp_exp": [0.0, 7.0]}), "swiglu_"),
    (lambda keys, tensors: tensors.pop("blk.0.attn_k.weight"), "without another"),
    (lambda keys, tensors: tensors.update({"blk.0.attn_k.weight": np.zeros((64, 64))}), "the config says"),
    (lambda keys, tensors: tensors.update({"blk.0.ssm_a": -tensors["blk.0.ssm_a"]}), "a decay that is not")])
def test_what_is_wrong_with_a_file_is_named(change: Change, said: str, folder: Path, tmp_path: Path) -> None:
    path = converted(folder, tmp_path / "m.gguf", change)
    with pytest.raises(EffllmError) as caught:
        scores(path, IDS)
    assert said in caught.value.message and caught.value.hint


@pytest.mark.peer
@pytest.mark.slow
def test_llamacpp_writes_the_same_tokens(folder: Path, tmp_path: Path) -> None:
    peer, path = pytest.importorskip("llama_cpp"), converted(folder, tmp_path / "m.gguf")
    theirs = peer.Llama(str(path), n_ctx=128, n_threads=1, verbose=False, type_k=0, type_v=0)
    *_, engine = open_engine(path, EngineOptions(device="cpu", kv="32bit", ctx=128, threads=1, exact=True))
    same = 0
    try:
        for length in (1, 12, 70):
            ids = np.random.default_rng(length).integers(5, 4096, length).tolist()
            theirs.reset()
            answer = [token for token, _ in zip(theirs.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0), range(16))]
            engine.reset()
            list(engine.prefill(ids))
            sampler = Sampler(SamplerSettings(temperature=0.0), engine.config.vocab_size)
            same += [step.token for step in engine.generate(sampler, 16, frozenset())] == answer
    finally:
        engine.close()
        theirs.close()
    assert same >= 2, f"{same} of 3 answers are equal"
