"""Zamba 2: attention and MLP blocks shared among layers, each with LoRA branches of its own, over the hidden state and the embedding.
Quantized, streamed from disk, with packed caches and under calibration."""

from math import prod
from pathlib import Path

import numpy as np
import pytest
from config_samples import refused
from conversions import options, run
from family_models import CASES, Case
from quantization_checks import assert_calibration_is_a_pass
from saved_models import saved
from streamed_models import streaming
from test_afmoe import found_by, resident

from effllm.kernels.cpu.candidates import default_registry
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.threads import ThreadPool
from effllm.kernels.workspace import Dims
from effllm.quant.weight import Linear, LowRank, Norm, Weight
from effllm.runtime.config import parse_config
from effllm.runtime.planning.forecast import work
from effllm.runtime.prepare import prepare
from effllm.runtime.stores.container import read_container
from effllm.runtime.weights.shared_block_weights import uses

# Matrices large enough to be read one by one, weights less wide than where exactness is judged.
WIDE = {"hidden_size": 128, "intermediate_size": 192, "adapter_rank": 24, "initializer_range": 0.06}
ZAMBA = {
    "adapter_rank": 128, "add_bias_linear": False, "architectures": ["Zamba2ForCausalLM"], "attention_dropout": 0.0, "attention_head_dim":
    128, "attention_hidden_size": 4096, "bos_token_id": 1, "chunk_size": 256, "eos_token_id": 2, "hidden_act": "gelu", "hidden_size": 2048,
    "hybrid_layer_ids": [5, 11, 17, 23, 29, 35], "initializer_range": 0.02, "intermediate_size": 8192, "kv_channels": 64,
    "layers_block_type": [*[*["mamba"] * 5, "hybrid"] * 6, "mamba", "mamba"], "mamba_d_conv": 4, "mamba_d_state": 128, "mamba_expand": 2,
    "mamba_headdim": 64, "mamba_ngroups": 1, "max_position_embeddings": 4096, "model_type": "zamba2", "n_mamba_heads": 64,
    "num_attention_heads": 32, "num_hidden_layers": 38, "num_key_value_heads": 32, "num_logits_to_keep": 1, "num_mem_blocks": 1,
    "num_query_groups": 32, "pad_token_id": 0, "rms_norm_eps": 1e-5, "rope_theta": 10_000, "time_step_floor": 1e-4, "time_step_max": 0.1,
    "time_step_min": 0.001, "torch_dtype": "bfloat16", "use_cache": True, "use_conv_bias": True, "use_long_context": False,
    "use_mamba_kernels": True, "use_mem_eff_path": False, "use_mem_rope": True, "use_shared_attention_adapter": True, "vocab_size": 32_000}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base = tmp_path_factory.mktemp("lent")
    saved(Case("zamba2", {**CASES["zamba2"].changes, **WIDE}), base / "whole")
    run(base / "whole", base / "4bit", options("4bit"))
    return {"whole": base / "whole", "4bit": base / "4bit"}


@pytest.mark.parametrize("kind", ["whole", "4bit"])
def test_layers_from_the_disk_give_the_same_bits_and_blocks_stay(kind: str, folders: dict[str, Path]) -> None:
    engine = streaming(folders[kind], keep=3, ctx=384, kv="16bit")
    cut = engine.prepared.streaming.parts
    blocks = [tensor for role, tensor in engine.model.tensors["outer"].items() if role.startswith("blocks.") and tensor.is_matrix]
    assert len(blocks) == 14 and not any(tensor.name in cut.slices for tensor in blocks)
    assert {tensor.name for tensor in blocks} <= {info.name for info in cut.always["outer"]}
    assert any(name.endswith("mamba.out_proj.weight") for name in cut.slices)
    assert np.array_equal(found_by(engine), found_by(resident(folders[kind])))


def test_four_bits_hold_every_large_matrix_once_and_say_nearly_the_same(folders: dict[str, Path]) -> None:
    stored = read_container(folders["4bit"]).tensors
    own = [name for name, each in stored.items() if not each.spec.is_raw]
    assert sum("shared_transformer.self_attn.q_proj" in name for name in own) == 2 and sum(".linear.weight" in name for name in own) == 3
    assert not any("adapter" in name for name in own) and sum("adapter" in name for name in stored) == 3 * (6 + 3)
    ours, rounded = (found_by(resident(folders[kind], exact=True), 100) for kind in ("whole", "4bit"))
    assert 0 < np.square(ours - rounded).mean() < 0.1 * ours.var()


def test_packed_caches_say_nearly_the_same(folders: dict[str, Path]) -> None:
    exact, packed = (found_by(resident(folders["whole"], kv=kv, kv_sink=0, kv_window=0)) for kv in ("32bit", "8bit"))
    assert 0 < np.abs(exact - packed).max() and np.square(exact - packed).mean() < 0.02 * exact.var()


def test_plans_count_blocks_once_and_what_is_read_of_them_as_often_as_it_is(folders: dict[str, Path]) -> None:
    engine = resident(folders["whole"])
    config, cache, outer = engine.config, engine.cache, engine.model.tensors["outer"]
    pages = sum(map(len, cache.slots.memory)) + cache.shape.pages * cache.sealed_nbytes
    assert engine.prepared.placement.kv_bytes == pages + config.num_hidden_layers * config.recurrent.nbytes
    assert config.attention_layers == (1, 3, 4) and len(cache.layouts) == 3
    assert engine.backends["cpu"].workspace.nbytes <= prepare(folders["whole"], engine.prepared.options).placement.workspace_bytes
    names = [tensor.name for roles in engine.model.tensors.values() for tensor in roles.values()]
    assert len(names) == len(set(names)) and engine.model.nbytes == sum(
        tensor.nbytes for roles in engine.model.tensors.values() for tensor in roles.values())
    assert [uses(config, role) for role in ("blocks.0.q", "blocks.1.q", "embed")] == [2, 1, 1]
    again = sum(tensor.nbytes for role, tensor in outer.items() if role.startswith("blocks.0."))
    assert engine.model.bytes_per_pass == engine.model.nbytes + again
    products = sum(part.products for part in work(engine.prepared, engine.model.tensors).parts)
    matrices = [(role, tensor) for roles in engine.model.tensors.values() for role, tensor in roles.items() if len(tensor.shape) == 2]
    assert products == sum(prod(tensor.shape) * uses(config, role) for role, tensor in matrices)
    engine.close()


def test_calibration_is_a_pass_of_the_model(folders: dict[str, Path]) -> None:
    """Every matrix of a layer has statistics but branches, which are not rounded."""
    stats = assert_calibration_is_a_pass(folders["whole"])
    assert {"lent_out", "state_in", "state_gate", "state_out"} <= set(stats[1].roles) and "lent_out" not in stats[0].roles


@pytest.mark.parametrize("tokens", [1, 7, 40])
def test_stages_match_the_reference(tokens: int) -> None:
    """The first of two streams taken and added to, branches of low rank, and an MLP that adds to nothing."""
    rng, hidden, ffn, rank = np.random.default_rng(3), 96, 72, 8
    sizes, pool = Dims(hidden, 4, 4, 48, ffn, 300, chunk=64, ctx=128, logit_rows=8, residual_streams=2, low_rank_dim=rank), ThreadPool(2)

    def linear(*shape: int) -> Linear:
        return Linear(Weight.raw("f32", shape, rng.standard_normal(shape).astype(np.float32).view(np.uint8).reshape(-1)))

    def norm(size: int) -> Norm:
        return Norm("rms", rng.standard_normal(size).astype(np.float32), None, 1e-5)

    wide, narrow, own = norm(2 * hidden), norm(hidden), [LowRank(linear(rank, hidden), linear(ffn, rank)) for _ in range(2)]
    gate, up, down, out, first = linear(ffn, hidden), linear(ffn, hidden), linear(hidden, ffn), linear(hidden, 192), linear(hidden, 192)
    beside = LowRank(linear(rank, 2 * hidden), linear(hidden, rank))
    x, read = rng.standard_normal((tokens, 2 * hidden), np.float32), rng.standard_normal((tokens, 192), np.float32)
    results = []
    for registry in (None, default_registry("reference")):
        ops = CpuOps(pool, sizes, registry)
        streams = ops.enter_streams(ops.from_host(x[:, :hidden].copy()), (), 2)
        ops.flush()
        assert np.array_equal(streams, np.tile(x[:, :hidden], 2))
        streams[:] = x
        taken = ops.first_stream(streams, 2)
        ops.flush()
        assert np.array_equal(taken, x[:, :hidden])
        (made,) = ops.norm_linear(streams, wide, [first])
        ops.add_low_rank(streams, wide, beside, made)
        ops.flush()
        added = made.copy()
        given = ops.shared_block_mlp(taken, narrow, gate, up, down, "gelu", own)
        ops.flush()
        given = given.copy()
        ops.add_to_first(streams, read, out)
        ops.flush()
        results.append((added, given, streams.copy()))
    pool.close()
    n, m = (normed(values, each) for values, each in ((x, wide), (x[:, :hidden], narrow)))
    matrix = {id(each): each.weight.to_f32().astype(np.float64) for each in (
        gate, up, down, out, first, *(part for low in (*own, beside) for part in (low.down, low.up)))}
    low = lambda values, each: values @ matrix[id(each.down)].T @ matrix[id(each.up)].T  # noqa: E731
    gates, ups = (m @ matrix[id(each)].T + low(m, branch) for each, branch in zip((gate, up), own, strict=True))
    wanted = (n @ matrix[id(first)].T + low(n, beside), gelu(gates) * ups @ matrix[id(down)].T,
              np.concatenate([x[:, :hidden] + read @ matrix[id(out)].T, x[:, hidden:]], 1))
    for found in results:
        for ours, theirs in zip(found, wanted, strict=True):
            assert np.abs(ours - theirs).max() < 1e-5 * np.abs(theirs).max()


def normed(values: np.ndarray, norm: Norm) -> np.ndarray:
    wide = values.astype(np.float64)
    return wide / np.sqrt(np.square(wide).mean(1, keepdims=True) + norm.eps) * norm.weight


def gelu(values: np.ndarray) -> np.ndarray:
    from math import erf

    return values * (1 + np.vectorize(erf)(values / 2**0.5)) / 2


def test_the_published_1_2b() -> None:
    made = parse_config(ZAMBA, strict=True)
    assert (made.head_dim, made.num_key_value_heads, made.attn_scale, made.residual_streams, made.low_rank_dim) == (
        128, 32, 64**-0.5, 2, 128)
    assert made.hybrid_layers == made.attention_layers == (5, 11, 17, 23, 29, 35) and made.num_shared_blocks == 1
    assert made.recurrent_layers == made.layers_without_mlp == tuple(range(38)) and made.shared_attention_lora and made.hidden_act == "gelu"
    assert (made.recurrent.heads, made.recurrent.head_dim, made.recurrent.depth, made.recurrent.groups) == (64, 64, 128, 1)
    assert [rope is not None for rope in made.ropes] == [layer in made.hybrid_layers for layer in range(38)]


def test_what_a_silent_config_means() -> None:
    made = parse_config({"model_type": "zamba2", "architectures": ZAMBA["architectures"]}, strict=True)
    assert made.hybrid_layers == (6, 12, 18, 24, 30, 36, 42, 47, 51) and made.intermediate_size == 10_240 and not made.shared_attention_lora
    assert set(made.ropes) == {None} and made.recurrent.head_dim == 640 and made.tie_word_embeddings


@pytest.mark.parametrize(("key", "value"), [
    ("add_bias_linear", True), ("use_long_context", True), ("tie_word_embeddings", False), ("layers_block_type", ["mamba"] * 38),
    ("layers_block_type", ["conv"] * 38), ("attention_head_dim", 64), ("mamba_headdim", 32), ("mamba_ngroups", 3), ("n_mamba_heads", 60),
    ("num_key_value_heads", 8), ("num_mem_blocks", 0), ("adapter_rank", 0)])
def test_what_zamba_2_may_not_have_is_named(key: str, value: object) -> None:
    refused({**ZAMBA, key: value}, key)
