"""GGUF files of DeepSeek V4 as llama.cpp's converter writes them: read as the folder they were converted from, with llama.cpp's output."""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from family_models import Case
from gguf_samples import add_fable_tokenizer, quantize_blocks
from hybrid_models import IDS, opened, read_afresh
from safetensors.torch import load_file
from saved_models import saved
from test_deepseek_v4 import WIDE

from effllm.offload.checkpoint import CheckpointError
from effllm.runtime.config import read_config
from effllm.runtime.gguf.deepseek4 import FULL_NAMES, NAMES
from effllm.runtime.source import open_store

YARN = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 32.0, "beta_slow": 1.0}
MODEL = {**WIDE, "head_dim": 128, "index_head_dim": 64, "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention":
         128}, "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"], "intermediate_size": 64, "rope_parameters": YARN, "vocab_size": 4096,
         "rms_norm_eps": 2.0**-20, "hc_eps": 2.0**-20}  # which files hold in float32
RATIOS = [0, 4, 128, 4, 0]  # the last of a layer that guesses ahead
OUTSIDE = {"model.embed_tokens.weight": "token_embd.weight", "embed.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
           "head.weight": "output.weight", "lm_head.weight": "output.weight"}
OUTSIDE |= {f"model.hc_head.hc_{part}": f"output_hc_{part}.weight" for part in ("fn", "base", "scale")}
KINDS = gguf.GGMLQuantizationType


def file_name(name: str) -> str:
    """The file's name of a tensor of a folder, but for an expert's."""
    if name in OUTSIDE:
        return OUTSIDE[name]
    _, _, layer, own = name.split(".", 3)
    part = {ours: theirs for theirs, ours in FULL_NAMES.items()}.get(own)
    part = part or {f"{ours}.weight": f"{theirs}.weight" for theirs, ours in NAMES.items()}.get(own)
    return f"blk.{layer}." + (part or {"ffn.gate.weight": "ffn_gate_inp.weight", "ffn.gate.bias": "exp_probs_b.bias",
                                       "attn.wo_a.weight": "attn_output_a.weight"}[own])


def write(folder: Path, path: Path, kind: str = "F32", change: Callable[[gguf.GGUFWriter], None] | None = None) -> None:
    """The model of `folder`, its experts in `kind`."""
    raw, writer = json.loads((folder / "config.json").read_text()), gguf.GGUFWriter(path, "deepseek4")
    numbers = {"block_count": 4, "context_length": raw["max_position_embeddings"], "embedding_length": raw["hidden_size"],
               "attention.head_count": raw["num_attention_heads"], "attention.head_count_kv": 1, "attention.key_length": 128,
               "attention.value_length": 128, "attention.q_lora_rank": raw["q_lora_rank"], "attention.output_lora_rank": raw["o_lora_rank"],
               "attention.output_group_count": raw["o_groups"], "attention.sliding_window": raw["sliding_window"], "rope.dimension_count":
               32, "expert_count": raw["n_routed_experts"], "expert_used_count": raw["num_experts_per_tok"], "expert_shared_count": 1,
               "expert_feed_forward_length": 64, "hash_layer_count": 1, "attention.indexer.head_count": raw["index_n_heads"],
               "attention.indexer.key_length": 64, "attention.indexer.top_k": raw["index_topk"], "hyper_connection.count": raw["hc_mult"],
               "hyper_connection.sinkhorn_iterations": raw["hc_sinkhorn_iters"], "expert_gating_func": 4, "nextn_predict_layers": 0,
               "rope.scaling.original_context_length": 64, "vocab_size": raw["vocab_size"]}
    for key, value in numbers.items():
        writer.add_uint32(f"deepseek4.{key}", value)
    for key, value in {"attention.layer_norm_rms_epsilon": raw["rms_norm_eps"], "rope.freq_base": 10_000.0, "expert_weights_scale":
                       raw["routed_scaling_factor"], "attention.compress_rope_freq_base": 160_000.0, "hyper_connection.epsilon":
                       raw["hc_eps"], "rope.scaling.factor": 16.0, "rope.scaling.yarn_beta_fast": 32.0, "rope.scaling.yarn_beta_slow":
                       1.0}.items():
        writer.add_float32(f"deepseek4.{key}", value)
    writer.add_string("deepseek4.rope.scaling.type", "yarn")
    writer.add_bool("deepseek4.expert_weights_norm", True)
    writer.add_array("deepseek4.attention.compress_ratios", RATIOS)
    for key in ("swiglu_clamp_exp", "swiglu_clamp_shexp"):
        writer.add_array(f"deepseek4.{key}", [10.0] * 4)
    add_fable_tokenizer(writer)
    if change is not None:
        change(writer)
    experts: dict[str, dict[int, np.ndarray]] = {}
    for name, value in load_file(folder / "model.safetensors").items():
        if ".experts." in name:
            _, _, layer, _, _, number, part, _ = name.split(".")
            own = f"blk.{layer}.ffn_{ {'w1': 'gate', 'w3': 'up', 'w2': 'down'}[part]}_exps.weight"
            experts.setdefault(own, {})[int(number)] = value.numpy()
        else:
            own = value.numpy()
            writer.add_tensor(file_name(name), own.astype(np.int32 if "tid2eid" in name else np.float32))
    for name, parts in experts.items():
        rows = np.stack([parts[number] for number in range(len(parts))])
        writer.add_tensor(name, quantize_blocks(rows, kind), raw_dtype=KINDS[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("deepseek4") / "model"
    saved(Case("deepseek_v4", MODEL), made)
    return made


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    write(folder, folder.with_name("model.gguf"))
    return folder.with_name("model.gguf")


def test_a_file_is_the_folder_that_it_was_made_from(folder: Path, file: Path) -> None:
    """To the bit: the same config but for what files do not say, and the same answers."""
    ours, theirs = read_config(file, strict=True), read_config(folder)
    for name in ("compressed_attention", "indexer", "moe", "ropes", "windows", "residual_streams", "head_dim", "hidden_act"):
        assert getattr(ours, name) == getattr(theirs, name), name
    engines = [opened(each, kv="16bit") for each in (file, folder)]
    rows = [read_afresh(each, IDS[:300]) for each in engines]
    for each in engines:
        each.close()
    assert np.array_equal(*rows)


def test_experts_in_blocks_stay_codes(folder: Path, tmp_path: Path) -> None:
    write(folder, tmp_path / "m.gguf", "Q8_0")
    with open_store(tmp_path / "m.gguf", low_bit=True) as store:
        names = {name for name in store.container.tensors if ".experts." in name}
        assert len(names) == 3 * 4 * MODEL["n_routed_experts"] and set(store.container.tensors) == names


def test_a_layer_that_guesses_ahead_is_left_out(folder: Path, tmp_path: Path) -> None:
    """Files count it in."""
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["deepseek4.block_count"].value = 5
        writer.kv_data[0]["deepseek4.nextn_predict_layers"].value = 1
        writer.add_tensor("blk.4.nextn.enorm.weight", np.ones(128, np.float32))

    write(folder, tmp_path / "m.gguf", change=change)
    assert read_config(tmp_path / "m.gguf").num_hidden_layers == 4
    with open_store(tmp_path / "m.gguf") as store:
        assert not any(".4." in name.partition(".experts")[0] for name in store.tensors)


@pytest.mark.peer
@pytest.mark.slow
def test_llama_cpp_reads_the_file_alike(file: Path) -> None:
    """Where it chooses other keys that are as good, a token may differ: most do not."""
    peer = pytest.importorskip("llama_cpp")
    ids = IDS[:300]
    model = peer.Llama(str(file), n_ctx=640, n_batch=640, n_threads=2, logits_all=True, verbose=False)
    model.eval(ids)
    theirs = np.array(model.scores[: len(ids)])
    model.close()
    engine = opened(file, kv="32bit")
    ours = np.concatenate([part.copy() for _, part in engine.score(ids)])
    engine.close()
    apart = np.abs(ours - theirs).max(1) / np.abs(theirs).max(1)
    assert np.median(apart) < 2e-3 and (apart < 5e-3).mean() > 0.7 and (ours.argmax(1) == theirs.argmax(1)).mean() > 0.95


@pytest.mark.parametrize(("key", "value", "named"), [
    ("expert_gating_func", 2, "expert_gating_func"), ("compress_ratios", [0, 4], "compress_ratios"),
    ("swiglu_clamp_exp", [7.0] * 4, "swiglu_limit")])
def test_what_is_not_read_is_named(folder: Path, tmp_path: Path, key: str, value: object, named: str) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        own = next(own for own in writer.kv_data[0] if own.endswith(key))
        writer.kv_data[0][own].value = value

    write(folder, tmp_path / "m.gguf", change=change)
    with pytest.raises(CheckpointError, match=named):
        read_config(tmp_path / "m.gguf")
