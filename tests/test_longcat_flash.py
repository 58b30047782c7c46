"""LongCat Flash: the published config, identity experts against the definition, and the same bits independent of chunking, threads and the
experts' tier."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from config_samples import refused
from conversions import options, run
from family_models import CASES, oracle, our_logits, text, written
from test_moe import EXPERTS, TOP, Layer, close, dims, inputs

from effllm.kernels import reference_moe
from effllm.kernels.cpu.ops import CpuOps
from effllm.kernels.reference_moe import Routed, Routing
from effllm.kernels.threads import ThreadPool
from effllm.runtime.calibrate import LayerStats, calibrate
from effllm.runtime.config import parse_config
from effllm.runtime.engine import open_engine
from effllm.runtime.prepare import EngineOptions

PUBLISHED = {
    "architectures": ["LongcatFlashForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "attention_method": "MLA",
    "auto_map": {
        "AutoConfig": "configuration_longcat_flash.LongcatFlashConfig", "AutoModel": "modeling_longcat_flash.LongcatFlashModel",
        "AutoModelForCausalLM": "modeling_longcat_flash.LongcatFlashForCausalLM"}, "bos_token_id": 1, "eos_token_id": 2,
    "expert_ffn_hidden_size": 2048, "ffn_hidden_size": 12_288, "hidden_size": 6144, "kv_lora_rank": 512, "max_position_embeddings": 131_072,
    "mla_scale_kv_lora": True, "mla_scale_q_lora": True, "model_type": "longcat_flash", "moe_topk": 12, "n_routed_experts": 512,
    "norm_topk_prob": False, "num_attention_heads": 64, "num_layers": 28, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim":
    64, "rms_norm_eps": 1e-5, "rope_theta": 10_000_000.0, "routed_scaling_factor": 6.0, "router_bias": False, "torch_dtype": "bfloat16",
    "use_cache": True, "v_head_dim": 128, "vocab_size": 131_072, "zero_expert_num": 256, "zero_expert_type": "identity"}


def test_the_published_config() -> None:
    made = parse_config(PUBLISHED, strict=True)
    own = made.moe
    assert made.num_hidden_layers == 56 and own.layers == frozenset(range(0, 56, 2)) and made.residual_streams == 2
    assert (own.num_experts, own.zero_experts, own.experts_per_token, own.routed_scale) == (512, 256, 12, 6.0)
    assert own.correction_bias and not own.sigmoid
    assert dict(made.multipliers) == {"q_a_norm": 2.0, "kv_a_norm": 12**0.5} and made.attn_scale == 192**-0.5 and made.rope.theta == 1e7


@pytest.mark.parametrize(("key", "value"), [
    ("zero_expert_type", "drop"), ("router_bias", True), ("mla_scale_q_lora", False), ("moe_topk", 769), ("qk_head_dim", 128),
    ("q_lora_rank", None), ("auto_map", {"AutoModel": "modeling_other.Other"}), ("norm_topk_prob", True)])
def test_what_it_may_not_have_is_named(key: str, value: object) -> None:
    refused({**PUBLISHED, key: value}, key)


@pytest.mark.parametrize("threads", (1, 2))
@pytest.mark.parametrize("handed", (1, 40))
def test_what_is_passed_on_matches_the_definition(handed: int, threads: int) -> None:
    """One beside many that have matrices, and so many that some tokens visit no other."""
    pool = ThreadPool(threads)
    ops = CpuOps(pool, replace(dims(experts=EXPERTS + handed), parallel_to_mlp=True))
    layer = Layer(experts=EXPERTS + handed)
    layer.experts = layer.experts[:EXPERTS]
    routing = Routing(TOP, False, routed_scale=2.0, zero_experts=handed)
    try:
        for tokens in (1, 3, 70):
            x, seen = inputs(tokens, seed=tokens), []
            expected, routed = reference_moe.moe(x, layer.norm, layer.router, layer.experts, routing, "silu")
            stream = ops.from_host(x)
            with ops.collecting():
                ops.moe(stream, layer.norm, layer.router, layer.experts, routing, "silu", seen.append)
            close(stream.copy(), expected, x)
            assert isinstance(seen[0], Routed) and np.array_equal(seen[0].offsets, routed.offsets)
            assert len(routed.offsets) == EXPERTS + 1 and (tokens < 70 or 0 < routed.offsets[-1] < tokens * TOP)
            made = np.bincount(seen[0].tokens[: seen[0].offsets[-1]], minlength=tokens)
            assert tokens < 70 or handed == 1 or made.min() == 0
    finally:
        pool.close()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory):
    """A tiny model, and its folder."""
    folder = tmp_path_factory.mktemp("longcat")
    return written(CASES["longcat_flash"], folder), folder


def test_neither_threads_nor_pieces_of_a_prompt_change_a_bit(made) -> None:
    model, folder = made
    found = []
    for threads, chunk in ((1, 128), (2, 128), (2, 32)):
        *_, engine = open_engine(folder, EngineOptions(kv="32bit", device="cpu", ctx=256, threads=threads, chunk=chunk))
        try:
            found.append(np.concatenate([logits.copy() for _, logits in engine.score(text(model, 150))]))
        finally:
            engine.close()
    assert np.array_equal(found[0], found[1]) and np.array_equal(found[0], found[2])


def test_a_quantized_folder_answers_nearly_the_same(made, tmp_path: Path) -> None:
    """Experts by what their visitors show: in eight bits hardly any token goes to another."""
    model, folder = made
    ids = text(model, 120)
    assert {item.key for item in calibrate(folder, ids, threads=1) if isinstance(item, LayerStats)} == {0, 1, 2, 3, "outer"}
    run(folder, tmp_path / "out", options("8bit"))
    wanted = oracle(model, ids)
    lost = np.square(our_logits(tmp_path / "out", ids) - wanted).mean(axis=1)
    assert np.median(lost) < 0.1**2 * np.square(wanted).mean()
