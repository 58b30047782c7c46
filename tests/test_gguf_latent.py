"""GGUF files of models with latent attention: from older and newer converters, their metadata, and what is refused.

That llama.cpp runs what is exported as we do is in `test_gguf_export_families.py`.
"""

import json
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest
from export_models import exported, model, scores
from family_models import LATENT, Case, oracle, text, written
from family_sizes import OF_BLOCKS, ONE_GROUP, SAME_SCALES
from gguf_samples import Reader, write_model

from effllm import EffllmError
from effllm.offload.checkpoint import TensorStore
from effllm.offload.notes import Fallback
from effllm.quant.recipe import Recipe
from effllm.quant.spec import QuantSpec
from effllm.runtime.config import read_config
from effllm.runtime.conversion.convert_plan import plan_conversion
from effllm.runtime.engine import open_engine
from effllm.runtime.gguf.latent_attention import KV_B_HALVES, split_kv_b
from effllm.runtime.gguf.store import open_gguf_store, read_header
from effllm.runtime.planning.forecast import prepare_quantized
from effllm.runtime.prepare import EngineOptions
from effllm.runtime.pull.remote_gguf_header import _config
from effllm.runtime.tensors import check_tensors

MODELS = {
    "deepseek_v2": Case("deepseek_v2", {**LATENT, **OF_BLOCKS, "q_lora_rank": None, "n_group": 4, "topk_group": 2, **SAME_SCALES,
                                        "topk_method": "group_limited_greedy", "intermediate_size": 96}),
    "deepseek_v3": Case("deepseek_v3", {**LATENT, **OF_BLOCKS, "n_group": 4, "topk_group": 2, "intermediate_size": 96}),
    "glm4_moe_lite": Case("glm4_moe_lite", {**LATENT, **OF_BLOCKS, **ONE_GROUP, "rms_norm_eps": 1e-5, "intermediate_size": 96}),
}


def stated(case: Case, **others: object) -> Callable[[gguf.GGUFWriter], None]:
    """The keys that a converter writes of a `Case`, in its older form; `others` in the place of some, None for none."""
    own = case.changes
    keys = {"attention.kv_lora_rank": own["kv_lora_rank"], "attention.q_lora_rank": own["q_lora_rank"],
            "attention.key_length": own["qk_nope_head_dim"] + own["qk_rope_head_dim"], "attention.value_length": own["v_head_dim"],
            "rope.dimension_count": own["qk_rope_head_dim"], "expert_count": own["n_routed_experts"],
            "expert_used_count": own["num_experts_per_tok"], "expert_feed_forward_length": own["moe_intermediate_size"],
            "expert_shared_count": own["n_shared_experts"], "leading_dense_block_count": own["first_k_dense_replace"],
            "expert_group_count": own["n_group"], "expert_group_used_count": own["topk_group"],
            "expert_gating_func": 1 if case.family == "deepseek_v2" else 2}

    def change(writer: gguf.GGUFWriter) -> None:
        for key, value in {**keys, **others}.items():
            if value is not None:
                writer.add_uint32(f"deepseek2.{key}", value)
        writer.add_expert_weights_scale(own["routed_scaling_factor"])
        writer.add_expert_weights_norm(case.family != "deepseek_v2")
        if "rope_parameters" in own:
            section = own["rope_parameters"]
            writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
            writer.add_rope_scaling_factor(section["factor"])
            writer.add_rope_scaling_orig_ctx_len(section["original_max_position_embeddings"])
            writer.add_rope_scaling_yarn_log_mul(0.1 * section["mscale_all_dim"])

    return change


def older(tmp_path: Path, name: str, kind: str = "F32", **others: object) -> tuple[Path, object]:
    """(a file as older converters wrote it, transformers' model)."""
    oracle_model = written(MODELS[name], tmp_path / "source")
    path = tmp_path / "source" / "config.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({key: value for key, value in raw.items() if key != "head_dim"}))
    write_model(tmp_path / "source", tmp_path / "m.gguf", kind, "deepseek2", stated(MODELS[name], **others))
    return tmp_path / "m.gguf", oracle_model


@pytest.mark.parametrize("name", MODELS)
def test_an_older_file_answers_as_transformers_does(tmp_path: Path, name: str) -> None:
    path, theirs = older(tmp_path, name)
    config, source = read_config(path, strict=True), read_config(tmp_path / "source")
    assert config.family == ("deepseek_v2" if name == "deepseek_v2" else "deepseek_v3")
    assert (config.mla, config.moe, config.num_hidden_layers) == (source.mla, source.moe, 3)
    assert config.attn_scale == pytest.approx(source.attn_scale)
    for length in (1, 7, 100):
        ids = text(theirs, length)
        expected = oracle(theirs, ids)
        assert np.abs(scores(path, ids) - expected).max() < 2e-4 * np.abs(expected).max()


@pytest.mark.parametrize("gating", [None, 0])
def test_scores_that_a_file_does_not_name_are_those_that_its_tensors_correct(tmp_path: Path, gating: int | None) -> None:
    """Files of GLM-4.7-Flash leave it out, as those of V2 did."""
    for name in ("glm4_moe_lite", "deepseek_v2"):
        (tmp_path / name).mkdir()
        path, _ = older(tmp_path / name, name, expert_gating_func=gating)
        found, source = read_config(path), read_config(tmp_path / name / "source")
        assert found.moe == source.moe
        # What comes first of a file that is not here yet names no tensors.
        assert _config(path, dict(read_header(path).metadata), source.vocab_size, None).moe == source.moe


def test_a_factor_of_experts_that_a_file_leaves_out_is_one(tmp_path: Path) -> None:
    """As llama.cpp takes it; in a config.json an absent one is the published model's."""
    path, _ = older(tmp_path, "deepseek_v3")
    path.write_bytes(path.read_bytes().replace(b"expert_weights_scale", b"expert_weights_other"))
    assert read_config(path).moe.routed_scale == 1.0 != read_config(tmp_path / "source").moe.routed_scale


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0"])
def test_what_heads_share_out_is_widened_without_a_fallback(tmp_path: Path, kind: str) -> None:
    """Of older files, whose matrix is one of many that run from their codes, and of newer ones, which hold it in two halves."""
    one, theirs = older(tmp_path, "deepseek_v3", kind)
    two = exported(model("deepseek_v3", tmp_path / "other"), tmp_path / "two.gguf", kind)
    for path, within in ((one, {"Q8_0": 0.03, "Q4_0": 0.5}[kind]), (two, None)):
        with open_gguf_store(path, low_bit=True) as store:
            assert not any(isinstance(said, Fallback) for said in store.notices)
            tensors = check_tensors(read_config(path), store, store.container)
            assert tensors[1]["kv_b"].spec.is_raw and not tensors[1]["q_b"].spec.is_raw
            assert store.place(tensors[1]["kv_b"].info) is None
        if within:
            ids = text(theirs, 60)
            expected = oracle(theirs, ids)
            assert np.abs(scores(path, ids) - expected).mean() < within * np.abs(expected).max()


def test_a_plan_at_other_bits_counts_what_a_conversion_makes(tmp_path: Path) -> None:
    """What heads share out, blocks in the file, stays in 16 bits."""
    path = exported(model("glm4_moe_lite", tmp_path / "source"), tmp_path / "m.gguf", "Q8_0")
    prepared = prepare_quantized(path, "4bit", EngineOptions(device="cpu", ctx=128))
    plan = plan_conversion(path, Recipe(QuantSpec.parse("4bit")))
    plan.store.close()
    assert {str(job.spec) for job in plan.jobs if job.role == "kv_b"} == {"f16"}
    assert prepared.store.nbytes == sum(job.nbytes for job in plan.jobs)


def test_halves_of_blocks_mean_what_they_meant(tmp_path: Path) -> None:
    """Each half is quantized along its own rows; chunked reads equal a single one."""
    source = model("deepseek_v3", tmp_path / "source")
    path = exported(source, tmp_path / "m.gguf", "Q8_0")
    kinds = {tensor.name: (tensor.tensor_type.name, tensor.shape.tolist()) for tensor in Reader(path).tensors}
    assert kinds["blk.0.attn_k_b.weight"] == ("Q8_0", [32, 64, 4]) and kinds["blk.0.attn_v_b.weight"] == ("Q8_0", [64, 32, 4])
    config = read_config(path)
    with open_gguf_store(path, "f32") as store, TensorStore.open(source) as before:
        name = "model.layers.0.self_attn.kv_b_proj.weight"
        info = store.tensors[name]
        whole = store.read(info).view(np.float32).reshape(info.shape)
        meant = before.read(before.tensors[name]).view(np.float16).astype(np.float32).reshape(info.shape)
        assert 0 < np.abs(whole - meant).max() < 0.01 * np.abs(meant).max()
        pieces = [store.read(info, begin, begin + 37).view(np.float32) for begin in range(0, info.shape[0] - 37, 37)]
        assert np.array_equal(np.concatenate(pieces), whole.reshape(-1)[: 37 * len(pieces) * config.mla.rank])


@pytest.mark.parametrize(("key", "value", "said"), [
    ("expert_gating_func", 3, "expert_gating_func 3"), ("attention.temperature_scale", 1, "temperature_scale"),
    ("rope.dimension_count", 48, "rope.dimension_count 48"),
    ("attention.key_length", 0, "attention.key_length 0"), ("attention.kv_lora_rank", None, "attention.kv_lora_rank"),
    ("attention.kv_lora_rank", 32, "shape"), ("attention.value_length", 16, "shape"), ("expert_group_count", 5, "expert_group_count 5")])
def test_what_a_file_says_wrongly_is_named(tmp_path: Path, key: str, value: int | None, said: str) -> None:
    path, _ = older(tmp_path, "deepseek_v3", **{key: value})
    with pytest.raises(EffllmError) as caught:
        config = read_config(path)
        with open_gguf_store(path) as store:
            check_tensors(config, store)
    assert said in caught.value.message and "\n" not in caught.value.message and caught.value.hint


def test_a_half_that_is_missing_is_named(tmp_path: Path) -> None:
    path = exported(model("glm4_moe_lite", tmp_path / "source"), tmp_path / "m.gguf")
    data = path.read_bytes()
    for part in (b"blk.1.attn_v_b.weight", b"blk.1.attn_k_b.weight"):
        assert data.count(part) == 1
        path.write_bytes(data.replace(part, b"blk.9" + part[5:]))
        with pytest.raises(EffllmError, match="blk.9.attn"):
            open_gguf_store(path)
    header, config = read_header(path), read_config(path)
    for part in KV_B_HALVES:
        own = {each: header.tensors[f"blk.0{each}"] for each in KV_B_HALVES if each != part}
        with pytest.raises(EffllmError, match=f"without {part[1:]}"):
            split_kv_b(path, "kv_b_proj", own, config)


def test_a_file_has_the_widths_and_the_mixture_of_its_folder(tmp_path: Path) -> None:
    source = model("deepseek_v3", tmp_path / "source")
    path = exported(source, tmp_path / "m.gguf")
    *_, engine = open_engine(path, EngineOptions(device="cpu", kv="16bit", ctx=128))
    try:
        assert engine.config.mla == read_config(source).mla
        assert engine.config.moe == read_config(source).moe
        list(engine.prefill(list(range(5, 60))))
        assert np.isfinite(engine._logits).all()
    finally:
        engine.close()
