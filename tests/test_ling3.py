"""Ling 3: low-rank queries, which its smallest model has and transformers' class lacks; and what its configs say."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from config_samples import refused
from family_models import CASES, Case, assert_logits_match, text, written
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridExperts, BailingHybridMLP

from effllm.kernels.kda_shape import KdaShape
from effllm.kernels.layout import capped_silu
from effllm.runtime.config import parse_config
from effllm.runtime.engine import open_engine
from effllm.runtime.prepare import EngineOptions

RANK = 20
# What Ling 3.0 tiny and flash have in common as they are published; flash states bounds of its last layers' gates besides.
PUBLISHED = {
    "architectures": ["BailingMoeV3ForCausalLM"], "auto_map": {
        "AutoConfig": "configuration_bailing_moe_v3.BailingMoeV3Config", "AutoModelForCausalLM":
        "modeling_bailing_moe_v3.BailingMoeV3ForCausalLM"}, "attention_dropout": 0.0, "embedding_dropout": 0.0, "eos_token_id": 156_895,
    "gated_attention_proj_granularity_type": "head_wise", "group_norm_size": 1, "head_dim": 128, "hidden_act": "silu", "kda_lower_bound":
    -5.0, "kda_safe_gate": True, "kv_lora_rank": 512, "linear_silu": True, "max_position_embeddings": 131_072, "model_type":
    "bailing_hybrid", "moe_router_enable_expert_bias": True, "n_group": 8, "no_kda_lora": True, "norm_topk_prob": True,
    "num_experts_per_tok": 8, "num_nextn_predict_layers": 1, "num_shared_experts": 1, "output_dropout": 0.0, "qk_head_dim": 192,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6, "rope_interleave": True, "rope_scaling": None, "rope_theta":
    6_000_000, "rotary_dim": 64, "routed_scaling_factor": 2.5, "router_dtype": "fp32", "scale_router_input": False, "score_function":
    "sigmoid", "scoring_func": "sigmoid", "short_conv_kernel_size": 4, "tie_word_embeddings": False, "topk_group": 4, "topk_method":
    "noaux_tc", "torch_dtype": "bfloat16", "up_proj_norm": False, "use_bias": False, "use_kda_lora": False, "use_mla_nope": False,
    "use_nGPT": False, "use_qk_norm": True, "use_qkv_bias": False, "v_head_dim": 128, "value_norm": False, "vocab_size": 157_184}
TINY = {**PUBLISHED, "first_k_dense_replace": 1, "hidden_size": 1536, "intermediate_size": 4608, "layer_group_size": 4,
        "moe_intermediate_size": 512, "moe_shared_expert_intermediate_size": 512, "num_attention_heads": 16, "num_experts": 128,
        "num_hidden_layers": 24, "num_key_value_heads": 16, "q_lora_rank": 256}
FLASH = {**PUBLISHED, "first_k_dense_replace": 2, "hidden_size": 2560, "intermediate_size": 6144, "layer_group_size": 6,
         "moe_intermediate_size": 768, "moe_shared_expert_intermediate_size": 768, "num_attention_heads": 32, "num_experts": 512,
         "num_hidden_layers": 42, "num_key_value_heads": 32, "q_lora_rank": None}


def with_query_rank(folder: Path) -> PreTrainedModel:
    """A model whose queries come of RANK numbers of a token, saved so; what transformers reads is given the same."""
    model = written(Case("bailing_hybrid", CASES["bailing_hybrid"].changes), folder)
    path, tensors = folder / "model.safetensors", load_file(folder / "model.safetensors")
    for layer, block in enumerate(model.model.layers):
        if not hasattr(block.self_attn, "kv_b_proj"):
            continue
        whole, prefix = block.self_attn.q_proj, f"model.layers.{layer}.attention."
        down, up = torch.nn.Linear(whole.in_features, RANK, False), torch.nn.Linear(RANK, whole.out_features, False)
        norm = type(block.self_attn.kv_a_layernorm)(RANK)
        for part in (down, norm, up):
            part.weight.data = 0.3 * torch.randn_like(part.weight) + (part is norm)
        block.self_attn.q_proj = torch.nn.Sequential(down, norm, up)
        del tensors[f"{prefix}q_proj.weight"]
        tensors |= {f"{prefix}q_a_proj.weight": down.weight.data.clone(), f"{prefix}q_a_layernorm.weight": norm.weight.data.clone(),
                    f"{prefix}q_b_proj.weight": up.weight.data.clone()}
    save_file(tensors, path)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, "q_lora_rank": RANK}))
    return model


def test_queries_by_way_of_a_few_numbers(tmp_path: Path) -> None:
    model = with_query_rank(tmp_path)
    assert_logits_match(tmp_path, model, text(model, 200))


def test_what_follows_a_part_of_a_text_is_what_follows_the_whole(tmp_path: Path) -> None:
    """States, latents and gates are gone on with."""
    ids, found = text(with_query_rank(tmp_path), 150), []
    for cuts in ((149,), (70, 149), (1, 2, 3, 90, 149)):
        *_, engine = open_engine(tmp_path, EngineOptions(kv="32bit", device="cpu", ctx=256, exact=True))
        for cut in cuts:
            list(engine.prefill(ids[:cut]))
        (row,) = engine.forward_logits(ids[149:])
        found.append(row.copy())
        engine.close()
    assert all(np.allclose(found[0], other, atol=1e-4 * np.abs(found[0]).max()) for other in found[1:])


def test_the_published_configs() -> None:
    tiny, flash = (parse_config(raw, strict=True) for raw in (TINY, FLASH))
    assert tiny.recurrent == KdaShape.of(16, 128, 4, low_rank_gates=False, decay_bound=-5.0) and flash.recurrent.key_heads == 32
    assert tiny.mla.query_rank == 256 and flash.mla.query_rank is None and tiny.attn_scale == 192**-0.5
    assert [layer for layer in range(24) if layer not in tiny.recurrent_layers] == [3, 7, 11, 15, 19, 23]
    assert [layer for layer in range(42) if layer not in flash.recurrent_layers] == [5, 11, 17, 23, 29, 35, 41]
    assert min(tiny.moe.layers) == 1 and min(flash.moe.layers) == 2 and tiny.moe.shared_expert_dim == 512
    assert (tiny.moe.num_groups, tiny.moe.top_groups, tiny.moe.routed_scale) == (8, 4, 2.5) and tiny.rope.theta == 6e6
    assert tiny.output_gate and tiny.output_gate_per_head and tiny.mtp_layers == 1 and tiny.context_length == 131_072


@pytest.mark.parametrize(("key", "value"), [
    ("architectures", ["BailingMoeV2_5ForCausalLM"]), ("auto_map", {"AutoModel": "modeling_other.Other"}), ("kda_lower_bound", 0),
    ("kda_lower_bound", None), ("kda_lower_bound", True), ("num_hidden_layers", 23), ("layer_types", ["full_attention"] * 24),
    ("layer_types", ["sliding_attention"] * 24), ("mlp_layer_types", ["moe"] * 24), ("no_kda_lora", False), ("hidden_act", "gelu"),
    ("attention_bias", True), ("gated_attention_proj_granularity_type", "element_wise"), ("expert_swiglu_limit_list", 7.0),
    ("use_mla_nope", True), ("n_group", 3), ("num_key_value_heads", 4), ("rope_interleave", False), ("short_conv_kernel_size", 0)])
def test_what_is_not_run_is_named(key: str, value: object) -> None:
    refused({**TINY, key: value}, key)


class Bounded(BailingHybridExperts):
    """Experts whose gates, and what these multiply, have a bound, as the model was trained; transformers' class has none."""

    def forward(self, x: torch.Tensor, index: torch.Tensor, shares: torch.Tensor) -> torch.Tensor:
        gate, up = torch.einsum("td,efd->tef", x, self.gate_up_proj).chunk(2, -1)
        each = torch.einsum("tef,edf->ted", bounded(gate, up, self.bound), self.down_proj)
        return (each.gather(1, index[..., None].expand(-1, -1, x.shape[-1])) * shares[..., None]).sum(1)


class BoundedMLP(BailingHybridMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(bounded(self.gate_proj(x), self.up_proj(x), self.bound))


def bounded(gate: torch.Tensor, up: torch.Tensor, bound: float) -> torch.Tensor:
    return torch.nn.functional.silu(gate).clamp(max=bound) * up.clamp(-bound, bound)


def test_gates_of_some_layers_have_bounds(tmp_path: Path) -> None:
    """Other ones for experts and for what every token visits; lists go on for the layer that guesses ahead."""
    model = written(CASES["bailing_hybrid"], tmp_path)
    path, bounds = tmp_path / "config.json", ([0.0, 0.0, 0.4, 0.3, 0.0, 0.5, 0.1], [0.0, 0.2, 0.3, 0.0, 0.0, 0.6, 0.1])
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "num_nextn_predict_layers": 1, "expert_swiglu_limit_list": bounds[0],
                                "share_expert_swiglu_limit_list": bounds[1]}))
    with pytest.raises(AssertionError):
        assert_logits_match(tmp_path, model, text(model, 70))
    for layer, own, shared in zip(model.model.layers, *bounds):
        for bound, name, kind in ((own, "experts", Bounded), (shared, "shared_experts", BoundedMLP)) if own or shared else ():
            if bound:
                module = getattr(layer.mlp, name)
                module.__class__, module.bound = kind, bound
    assert_logits_match(tmp_path, model, text(model, 70))


def test_flash_has_the_bounds_that_it_states() -> None:
    lists = {"expert_swiglu_limit_list": [0.0] * 40 + [4, 7.0], "share_expert_swiglu_limit_list": [0.0] * 41 + [5.0]}
    made = parse_config({**FLASH, **lists}, strict=True)
    assert made.gate_limits == ((None, None),) * 40 + ((4.0, None), (7.0, 5.0))
    assert (made.expert_act(39), made.expert_act(41), made.expert_act(41, shared=True)) == ("silu", capped_silu(7.0), capped_silu(5.0))
    for name, wrong in (("expert_swiglu_limit_list", [7.0] + [0.0] * 41), ("expert_swiglu_limit_list", [-1.0] * 42),
                        ("share_expert_swiglu_limit_list", [0.0] * 7)):
        refused({**FLASH, name: wrong}, name)


def test_gates_that_are_not_clamped_may_be_listed() -> None:
    assert parse_config({**TINY, "expert_swiglu_limit_list": [0.0] * 24}, strict=True).recurrent.decay_bound == -5.0
