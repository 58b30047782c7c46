"""MPT and BLOOM: ALiBi (attention biases that grow with distance), in extra channels of each head. Quantized, streamed from disk, with a
16-bit cache, which keeps positions exact, and never packed. Also values narrower than keys, by the same ops."""

from pathlib import Path

import numpy as np
import pytest
import torch
from config_samples import refused
from conversions import options, run
from family_models import CASES, Case, assert_logits_match, our_logits, text, written
from safetensors.torch import load_file, save_file
from saved_models import saved
from streamed_models import streaming
from test_afmoe import found_by, resident
from transformers.models.bloom.modeling_bloom import build_alibi_tensor
from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

from effllm import UsageError
from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.weight import Norm
from effllm.runtime.config import parse_config
from effllm.runtime.families import bloom, mpt
from effllm.runtime.prepare import prepare
from effllm.runtime.rope import ALIBI, alibi_channels

# Matrices large enough to be read one by one.
WIDE = {"mpt": {"n_heads": 8, "hidden_size": 256, "initializer_range": 0.06},
        "bloom": {"n_head": 8, "hidden_size": 256, "initializer_range": 0.06}}
MPT = {
    "architectures": ["MPTForCausalLM"], "attn_config": {
        "alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0, "attn_type": "multihead_attention",
        "attn_uses_sequence_id": False, "clip_qkv": None, "prefix_lm": False, "qk_ln": False, "softmax_scale": None},
    "auto_map": {"AutoConfig": "configuration_mpt.MPTConfig", "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"}, "d_model": 4096,
    "emb_pdrop": 0, "embedding_fraction": 1.0, "expansion_ratio": 4, "init_config": {"name": "kaiming_normal_"}, "init_device": "cpu",
    "learned_pos_emb": True, "logit_scale": None, "max_seq_len": 2048, "model_type": "mpt", "n_heads": 32, "n_layers": 32, "no_bias": True,
    "norm_type": "low_precision_layernorm", "resid_pdrop": 0, "tokenizer_name": "EleutherAI/gpt-neox-20b", "torch_dtype": "bfloat16",
    "use_cache": False, "verbose": 0, "vocab_size": 50_432}
BLOOM = {
    "apply_residual_connection_post_layernorm": False, "architectures": ["BloomForCausalLM"], "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True, "bias_dropout_fusion": True, "bos_token_id": 1, "eos_token_id": 2, "hidden_dropout": 0.0,
    "initializer_range": 0.02, "layer_norm_epsilon": 1e-5, "masked_softmax_fusion": True, "model_type": "bloom", "n_embed": 1024, "n_inner":
    None, "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100, "pad_token_id": 3, "pretraining_tp": 1, "seq_length": 2048,
    "skip_bias_add": True, "skip_bias_add_qkv": False, "unk_token_id": 0, "use_cache": True, "vocab_size": 250_880}


@pytest.fixture(scope="module", params=("mpt", "bloom"))
def folders(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base, family = tmp_path_factory.mktemp("slopes"), request.param
    saved(Case(family, {**CASES[family].changes, **WIDE[family]}), base / "whole")
    run(base / "whole", base / "4bit", options("4bit"))
    return {"whole": base / "whole", "4bit": base / "4bit"}


@pytest.mark.parametrize("kind", ["whole", "4bit"])
def test_weights_from_the_disk_give_the_same_bits(kind: str, folders: dict[str, Path]) -> None:
    assert np.array_equal(found_by(streaming(folders[kind], keep=3, ctx=384, kv="16bit")), found_by(resident(folders[kind])))


def test_four_bits_say_nearly_the_same(folders: dict[str, Path]) -> None:
    ours, rounded = (found_by(resident(folders[kind], exact=True), 100) for kind in ("whole", "4bit"))
    assert 0 < np.square(ours - rounded).mean() < 0.1 * ours.var()


def test_sixteen_bits_of_cache_hold_places_and_fewer_are_refused(folders: dict[str, Path]) -> None:
    exact, half = (found_by(resident(folders["whole"], kv=kv)) for kv in ("32bit", "16bit"))
    assert 0 < np.abs(exact - half).max() < 2e-3 * np.abs(exact).max()
    with pytest.raises(UsageError, match="a key's position") as caught:
        resident(folders["whole"], kv="4bit")
    assert caught.value.hint == "--kv 16bit"


def test_plans_count_what_heads_are_wider(folders: dict[str, Path]) -> None:
    engine = resident(folders["whole"])
    assert engine.cache.layouts[0].head_dim == 80 and engine.config.projected_head_dim == engine.config.v_head_dim == 64
    pages = engine.cache.shape.pages * engine.cache.sealed_nbytes
    assert engine.prepared.placement.kv_bytes == sum(map(len, engine.cache.slots.memory)) + pages
    assert engine.backends["cpu"].workspace.nbytes <= prepare(folders["whole"], engine.prepared.options).placement.workspace_bytes
    engine.close()


def test_values_narrower_than_keys(tmp_path: Path) -> None:
    """MiMo V2 Flash, whose heads of values are widened too: in few bits and in packed caches it says nearly the same."""
    own = {"hidden_size": 128, "intermediate_size": 192, "moe_intermediate_size": 64, "num_experts_per_tok": 6, "initializer_range": 0.08}
    saved(Case("mimo_v2_flash", {**CASES["mimo_v2_flash"].changes, **own}), tmp_path / "whole")
    run(tmp_path / "whole", tmp_path / "4bit", options("4bit"))
    exact, packed = (found_by(resident(tmp_path / "whole", kv=kv, kv_sink=0, kv_window=0)) for kv in ("32bit", "8bit"))
    rounded = found_by(resident(tmp_path / "4bit", kv="32bit"))
    assert 0 < np.square(exact - packed).mean() < 1e-4 * exact.var() and 0 < np.square(exact - rounded).mean() < 0.2 * exact.var()
    engine = resident(tmp_path / "whole", kv="8bit")
    pages = engine.cache.shape.pages * engine.cache.sealed_nbytes
    assert engine.prepared.placement.kv_bytes == sum(map(len, engine.cache.slots.memory)) + pages
    assert engine.config.v_head_dim == 20 and {layout.head_dim for layout in engine.cache.layouts} == {32}
    engine.close()


def test_a_bloom_of_the_model_without_its_head(tmp_path: Path) -> None:
    """As the published ones name their tensors."""
    model = written(Case("bloom", CASES["bloom"].changes), tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({name.removeprefix("transformer."): tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    ids = text(model, 90)
    assert_logits_match(tmp_path, model, ids)
    assert our_logits(tmp_path, ids).shape == (90, 301)


@pytest.mark.parametrize("heads", [1, 4, 6, 12, 16, 40, 112])
def test_slopes_are_those_of_transformers(heads: int) -> None:
    (of_mpt,) = build_mpt_alibi_tensor(heads, 9)[:, 0].diff(dim=1)[:, :1].T.tolist()
    of_bloom = build_alibi_tensor(torch.ones(1, 9), heads, torch.float64)[:, 0].diff(dim=1)[:, 0].tolist()
    assert np.allclose(mpt.alibi_slopes(heads), of_mpt, rtol=1e-5) and np.allclose(bloom.alibi_slopes(heads), of_bloom, rtol=1e-5)


def test_what_stands_in_front_makes_slopes_of_places() -> None:
    by_head, scale = (0.5, 2**-8), 0.25
    queries, keys = alibi_channels(by_head, 3, scale, 16)
    assert keys.tolist() == [[1, *[0] * 15]] * 3 and queries.shape == (2, 16) and not queries[:, 2:].any()
    places = np.array([0, 1, 63, 64, 2047, 16_383])
    digits = np.concatenate(ALIBI.cos_sin(places), 1)  # of (1, 0), turned
    assert np.allclose(scale * digits @ queries[:, :2].T, places[:, None] * by_head, rtol=1e-6)
    assert np.array_equal(digits.astype(np.float16), digits) and digits.max() < 256  # and so in bfloat16


@pytest.mark.parametrize("tokens", [1, 40])
def test_heads_become_wider_and_narrower(tokens: int) -> None:
    rng, heads, depth, wide = np.random.default_rng(1), 4, 12, 20
    sizes, pool = Dims(96, heads, heads, wide, 64, 300, chunk=64, ctx=128, logit_rows=8, v_head_dim=depth), ThreadPool(2)
    y, front = rng.standard_normal((tokens, heads * depth), np.float32), rng.standard_normal((heads, wide - depth), np.float32)
    x, norm = rng.standard_normal((tokens, 96), np.float32), Norm("layer", *rng.standard_normal((2, 96)).astype(np.float32), 1e-5)
    for registry in (None, default_registry("reference")):
        ops = CpuOps(pool, sizes, registry)
        behind, plain = ops.pad_heads(y, heads, wide, front, 0), ops.pad_heads(y, heads, wide, None, 1)
        back = ops.unpad_heads(behind, heads, depth)
        renormed = ops.norm_stream(ops.from_host(x), norm)
        ops.flush()
        split = behind.reshape(tokens, heads, wide)
        assert np.array_equal(split[..., wide - depth :], y.reshape(tokens, heads, depth)) and (split[..., : wide - depth] == front).all()
        assert not plain.reshape(tokens, heads, wide)[..., : wide - depth].any() and np.array_equal(back, y)
        wanted = (x - x.mean(1, keepdims=True)) / np.sqrt(x.var(1, keepdims=True) + 1e-5) * norm.weight + norm.bias
        assert np.allclose(renormed, wanted, atol=1e-5)
    pool.close()


def test_published_configs() -> None:
    made = parse_config(MPT, strict=True)
    assert (made.head_dim, made.projected_head_dim, made.attn_scale, made.max_position_embeddings) == (144, 128, 128**-0.5, 2048)
    assert len(made.alibi_slopes) == 32 and made.intermediate_size == 16_384 and made.tie_word_embeddings and made.hidden_act == "gelu"
    made = parse_config(BLOOM, strict=True)
    assert (made.head_dim, made.num_hidden_layers, made.num_attention_heads) == (80, 24, 16)
    assert made.eos_token_ids == (2,) and made.hidden_act == "gelu_tanh" and made.qkv_bias


@pytest.mark.parametrize(("base", "key", "value"), [
    (MPT, "attn_config", {"alibi": False}), (MPT, "attn_config", {"qk_ln": True}), (MPT, "attn_config", {"prefix_lm": True}),
    (MPT, "attn_config", {"attn_type": "multiquery_attention"}), (MPT, "attn_config", {"alibi_bias_max": 4}), (MPT, "no_bias", False),
    (MPT, "expansion_ratio", 2), (MPT, "auto_map", {"AutoModel": "modeling_other.Other"}), (MPT, "norm_type", "rmsnorm"),
    (BLOOM, "apply_residual_connection_post_layernorm", True), (BLOOM, "n_inner", 99), (BLOOM, "n_layer", 0)])
def test_what_they_may_not_have_is_named(base: dict[str, object], key: str, value: object) -> None:
    refused({**base, key: value}, key)
