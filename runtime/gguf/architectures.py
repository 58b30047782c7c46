"""Table of the supported GGUF architectures: the family that runs each, tensor names, metadata keys, and how rows and norms were
changed. A new family is an entry in ARCHITECTURES; details may go in a module of its name beside this one.
"""

from __future__ import annotations

from ...offload.safetensors_header import CheckpointError, shown
from ..config_rope import QUERY_SCALING_BETA
from ..encoders import GGUF_ARCHITECTURES, refuse_generation
from ..families import FAMILIES, UNKNOWN_FAMILY_HINT, deepseek_v4, internlm2, mixtral, ouro, qwen3_moe
from ..families.hunyuan_v1_dense import STRETCH
from . import (
    apertus,
    bitnet,
    cohere2_moe,
    deci,
    deepseek4,
    falcon_h1,
    gemma3n,
    gemma4,
    gemma_embedding2,
    glm5_next,
    gpt_oss,
    granite_swash,
    hy_v4,
    jamba,
    kimi_delta_attention,
    kolibri1,
    laguna,
    latent_attention,
    linear_attention,
    llama4,
    mamba,
    mamba2,
    mellum,
    mimo2,
    minicpm3,
    minimax3,
    mllama,
    mrope_sections,
    muse_glimmer,
    nemotron_h,
    qwen4,
    rwkv7,
    short_conv,
    sparse_indexer,
    state_spaces,
    step35,
    transformer_names,
)
from .architecture import (
    CLAMP_KQV,
    DEEPSEEK_OCR,
    DEEPSTACK,
    LAYER_NAMES,
    LAYER_NORM,
    RMS_NORM,
    ROPE_ALPHA,
    ROUTER,
    SCORE_CORRECTION,
    SHARED_EXPERT,
    SHARED_EXPERT_GATE,
    SHARED_EXPERT_WIDTH,
    Architecture,
)
from .projector_names import CLIP

BITNET_CPP = ("bitnet-b1.58", "bitnet-25")
_CAUSAL = {"attention.causal": "is_causal"}
_GEMMA_NAMES = {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
                "post_ffw_norm": "post_feedforward_layernorm"}
_GEMMA = {"config": {"hidden_activation": "gelu_pytorch_tanh"}, "norm_offset": 1.0, "layer_names": _GEMMA_NAMES}
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GLM_MOE_KEYS = {
    "expert_count": "n_routed_experts", "expert_used_count": "num_experts_per_tok", "expert_shared_count": "n_shared_experts",
    "expert_feed_forward_length": "moe_intermediate_size", "leading_dense_block_count": "first_k_dense_replace",
    "expert_weights_scale": "routed_scaling_factor", "expert_weights_norm": "norm_topk_prob", "expert_gating_func": "scoring_func"}
_GLM_NAMES = {SCORE_CORRECTION: "mlp.gate.e_score_correction_bias",
              **{part: f"mlp.shared_experts.{target}" for part, target in SHARED_EXPERT.items()}}
_QKV, _GATE_UP = {"attn_qkv": ("attn_q", "attn_k", "attn_v")}, {"ffn_up": ("ffn_gate", "ffn_up")}
_MOE_KEYS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_QWEN_MOE_WIDTHS = {"expert_feed_forward_length": "moe_intermediate_size",
                    "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}
_QWEN_SHARED_EXPERT = {**{part: f"mlp.shared_expert.{target}" for part, target in SHARED_EXPERT.items()},
                       SHARED_EXPERT_GATE: "mlp.shared_expert_gate"}
_HUNYUAN_NAMES = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
_NORM_BIAS = {"output_norm.bias": "model.norm.bias"}
_LINEAR_ATTENTION = {"norm_offset": 1.0, "partial_rotary": True, "required_keys": linear_attention.REQUIRED,
                     "full_names": linear_attention.FULL_NAMES,
                     "roles": {"post_norm": "post_attention_norm"}, "other_keys": linear_attention.OTHER_KEYS,
                     "layer_kinds": (linear_attention.LAYER_TYPES[1], linear_attention.LAYER_TYPES[0])}
_SHORT_CONV = {"required_keys": short_conv.REQUIRED_KEYS, "roles": short_conv.ROLES, "outer_names": short_conv.OUTER,
               "layer_names": short_conv.NAMES,
               "layer_kinds": (short_conv.CONV, short_conv.FULL)}
_COHERE = {"keys": {LAYER_NORM: "layer_norm_eps", "logit_scale": "logit_scale"}, "epsilon_key": LAYER_NORM,
           "required_keys": ("logit_scale",)}
_NEMOTRON_H = {"config": {"mlp_hidden_act": "relu2"}, "layer_names": nemotron_h.NAMES, "full_names": nemotron_h.FULL_NAMES,
               "fused": state_spaces.FUSED,
               "roles": nemotron_h.ROLES, "outer_names": nemotron_h.OUTER, "required_keys": nemotron_h.REQUIRED,
               "other_keys": frozenset({LAYER_NORM})}  # written in addition to the RMS epsilon, ignored by llama.cpp
_MINICPM_SCALES = {"embedding_scale": "scale_emb", "residual_scale": "scale_depth", "logit_scale": "dim_model_base"}
_GRANITE_SCALES = {"attention.scale": "attention_multiplier", "embedding_scale": "embedding_multiplier",
                   "residual_scale": "residual_multiplier", "logit_scale": "logits_scaling"}
ARCHITECTURES = {
    "afmoe": Architecture("afmoe", config={"mup_enabled": True}, experts=("mlp", qwen3_moe.NAMES), window_pattern=True,
                          full_names={f"{ROUTER}.weight": "mlp.router.gate.weight"}, keys={
                              **_GLM_MOE_KEYS, "expert_count": "num_experts", "expert_shared_count": "num_shared_experts",
                              "leading_dense_block_count": "num_dense_layers", "expert_weights_scale": "route_scale",
                              "expert_weights_norm": "route_norm"}, layer_names={
                              "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_mlp_layernorm",
                              "post_ffw_norm": "post_mlp_layernorm", "attn_gate": "self_attn.gate_proj",
                              SCORE_CORRECTION: "mlp.expert_bias",
                              **{part: f"mlp.shared_experts.{target}" for part, target in SHARED_EXPERT.items()}}),
    kolibri1.NAME: Architecture(kolibri1.FAMILY, keys=kolibri1.KEYS, other_keys=kolibri1.OTHER_KEYS, required_keys=kolibri1.REQUIRED,
                                window_pattern=True,
                                experts=("mlp", qwen3_moe.NAMES), layer_names={**_GLM_NAMES, **kolibri1.NAMES}),
    "llama": Architecture("llama", interleaved=True, keys={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
                                                           **_CAUSAL}, experts=("block_sparse_moe", mixtral.NAMES)),
    "nanbeige": Architecture("nanbeige", interleaved=True, other_keys=frozenset({"attention.head_dim"}), keys={
        "num_loops": "num_loops", "skip_loop_final_norm": "skip_loop_final_norm"}),
    "ouro": Architecture("ouro", interleaved=True, keys={"num_loops": "total_ut_steps", "skip_loop_final_norm": "skip_loop_final_norm"},
                         layer_names={"post_attention_norm": ouro.POST_NORMS["o_norm"], "post_ffw_norm": ouro.POST_NORMS["down_norm"]}),
    deci.NAME: Architecture(deci.FAMILY, interleaved=True),
    mellum.NAME: Architecture(mellum.FAMILY, config={"norm_topk_prob": True}, experts=("mlp", qwen3_moe.NAMES), window_pattern=True,
                              keys=mellum.KEYS, required_keys=mellum.REQUIRED, other_keys=mellum.OTHER_KEYS),
    mllama.NAME: Architecture(mllama.FAMILY, interleaved=True, layer_names=mllama.NAMES, full_names=mllama.FULL_NAMES,
                              required_keys=mllama.REQUIRED,
                              other_keys=mllama.OTHER_KEYS),
    "llama-embed": Architecture("llama", interleaved=True, config={"is_causal": False}, other_keys=frozenset({"attention.causal"})),
    "gpt2": Architecture("gpt2", config={"activation_function": "gelu_new"}, fused=_QKV, epsilon_key=LAYER_NORM, roles={
        "positions": "position_embd"}, outer_names={"position_embd.weight": "model.embed_positions.weight", **_NORM_BIAS}, keys={
        LAYER_NORM: "layer_norm_epsilon", "feed_forward_length": "n_inner"}),
    "gptneox": Architecture("gpt_neox", config={"hidden_act": "gelu"}, partial_rotary=True, fused=_QKV, epsilon_key=LAYER_NORM,
                            roles={"mlp_norm": "ffn_norm"}, required_keys=("use_parallel_residual",), keys={
                                LAYER_NORM: "layer_norm_eps", "use_parallel_residual": "use_parallel_residual"}, outer_names={
                                "token_embd.weight": "model.embed_in.weight", "output.weight": "embed_out.weight",
                                **{f"output_norm.{kind}": f"model.final_layer_norm.{kind}" for kind in ("weight", "bias")}}, layer_names={
                                "attn_q": "attention.q_proj", "attn_k": "attention.k_proj", "attn_v": "attention.v_proj",
                                "attn_output": "attention.dense", "ffn_up": "mlp.dense_h_to_4h", "ffn_down": "mlp.dense_4h_to_h"}),
    "internlm2": Architecture("internlm2", interleaved=True, outer_names={
        "token_embd.weight": internlm2.OUTER_NAMES["embed"], "output.weight": internlm2.OUTER_NAMES["head"]}, layer_names={
        part: internlm2.NAMES[target] for part, target in LAYER_NAMES.items() if target in internlm2.NAMES}),
    "qwen2": Architecture("qwen2", keys=_CAUSAL),
    "qwen2moe": Architecture("qwen2_moe", config={"norm_topk_prob": False}, experts=("mlp", qwen3_moe.NAMES),
                             keys={**_MOE_KEYS, **_QWEN_MOE_WIDTHS}, layer_names=_QWEN_SHARED_EXPERT),
    "qwen2vl": Architecture("qwen2", other_keys=frozenset({mrope_sections.KEY})),
    "paddleocr": Architecture("llama", other_keys=frozenset({mrope_sections.KEY})),  # not interleaved
    "qwen3": Architecture("qwen3", keys=_CAUSAL),
    "qwen3vl": Architecture("qwen3", other_keys=frozenset({mrope_sections.KEY, DEEPSTACK})),
    "qwen35": Architecture("qwen3_5_text", keys=linear_attention.KEYS, layer_names=linear_attention.NAMES, **_LINEAR_ATTENTION),
    "qwen35moe": Architecture("qwen3_5_moe_text", experts=("mlp", qwen3_moe.NAMES), optional_keys=frozenset({"feed_forward_length"}),
                              keys={**_MOE_KEYS, **_QWEN_MOE_WIDTHS, **linear_attention.KEYS},
                              layer_names={**_QWEN_SHARED_EXPERT, **linear_attention.NAMES}, **_LINEAR_ATTENTION),
    linear_attention.QWEN3_NEXT: Architecture("qwen3_next", experts=("mlp", qwen3_moe.NAMES),
                                              optional_keys=frozenset({"feed_forward_length"}),
                                              keys={**_MOE_KEYS, **_QWEN_MOE_WIDTHS, **linear_attention.KEYS}, fused=linear_attention.FUSED,
                                              legacy_fused=linear_attention.LEGACY_FUSED,
                                              layer_names={**_QWEN_SHARED_EXPERT, **linear_attention.NAMES}, **_LINEAR_ATTENTION),
    qwen4.NAME: Architecture(qwen4.FAMILY, experts=("mlp", qwen3_moe.NAMES), **qwen4.architecture_fields(_MOE_KEYS | _QWEN_MOE_WIDTHS,
        _QWEN_SHARED_EXPERT)),
    "lfm2": Architecture("lfm2", keys=short_conv.KEYS, **_SHORT_CONV),
    "lfm2moe": Architecture("lfm2_moe", keys={**short_conv.KEYS, **short_conv.MOE_KEYS}, experts=("feed_forward", mixtral.NAMES),
                            **_SHORT_CONV),
    "llama4": Architecture(llama4.FAMILY, keys=llama4.KEYS, layer_names=llama4.NAMES, full_names=llama4.FULL_NAMES,
                           required_keys=llama4.REQUIRED,
                           experts=("feed_forward", qwen3_moe.NAMES)),
    # No latent attention; its files state 0 rotary channels.
    DEEPSEEK_OCR: Architecture("deepseek_ocr2_text", experts=("mlp", qwen3_moe.NAMES), keys=_GLM_MOE_KEYS, layer_names=_GLM_NAMES),
    "dots1": Architecture("dots1", experts=("mlp", qwen3_moe.NAMES), keys=_GLM_MOE_KEYS, layer_names=_GLM_NAMES),
    # In ernie4_5-moe, chatglm and glm4 the checkpoints rotate neighbouring channels too, so rows are in their order.
    "ernie4_5-moe": Architecture("ernie4_5_moe", experts=("mlp", qwen3_moe.NAMES), layer_names={
        **_GLM_NAMES, SCORE_CORRECTION: "mlp.moe_statics.e_score_correction_bias"}, keys={
        "expert_count": "moe_num_experts", "expert_used_count": "moe_k", "expert_shared_count": "moe_num_shared_experts",
        "expert_feed_forward_length": "moe_intermediate_size", "leading_dense_block_count": "moe_layer_start_index",
        "interleave_moe_layer_step": "moe_layer_interval", "expert_shared_feed_forward_length": SHARED_EXPERT_WIDTH}),
    "glm4moe": Architecture("glm4_moe", experts=("mlp", qwen3_moe.NAMES), partial_rotary=True, roles={"post_norm": "post_attention_norm"},
                            other_keys=frozenset({mrope_sections.KEY}), keys={**_GLM_MOE_KEYS,
                                "nextn_predict_layers": "num_nextn_predict_layers"},
                            layer_names={**_GLM_NAMES, "post_attention_norm": "post_attention_layernorm"}),
    latent_attention.NAME: Architecture("deepseek_v3", experts=("mlp", qwen3_moe.NAMES), required_keys=latent_attention.REQUIRED,
                                        keys={**_GLM_MOE_KEYS, **latent_attention.KEYS}, other_keys=latent_attention.OTHER_KEYS,
                                        layer_names={**_GLM_NAMES, **latent_attention.NAMES}),
    latent_attention.MISTRAL4: Architecture(latent_attention.MISTRAL4_FAMILY, experts=("mlp", qwen3_moe.NAMES),
                                            required_keys=latent_attention.REQUIRED, keys={
                                             **_GLM_MOE_KEYS, **latent_attention.KEYS,
                                             latent_attention.TEMPERATURE_SCALE: QUERY_SCALING_BETA},
                                            other_keys=latent_attention.OTHER_KEYS, layer_names={**_GLM_NAMES, **latent_attention.NAMES}),
    **{name: Architecture(family, experts=("mlp", qwen3_moe.NAMES), required_keys=(*latent_attention.REQUIRED, *sparse_indexer.KEYS), keys={
        **_GLM_MOE_KEYS, **latent_attention.KEYS, **sparse_indexer.KEYS},
                          other_keys=latent_attention.OTHER_KEYS | {sparse_indexer.INDEXER_TYPES},
                          roles=sparse_indexer.ROLES, layer_names={**_GLM_NAMES, **latent_attention.NAMES, **sparse_indexer.NAMES})
       for name, family in sparse_indexer.FAMILIES.items() if name != hy_v4.NAME},
    hy_v4.NAME: Architecture(hy_v4.FAMILY, experts=("mlp", qwen3_moe.NAMES), required_keys=(*latent_attention.REQUIRED, *hy_v4.KEYS), keys={
        **_GLM_MOE_KEYS, **latent_attention.KEYS, **hy_v4.KEYS},
                             other_keys=latent_attention.OTHER_KEYS | {sparse_indexer.INDEXER_TYPES, hy_v4.SWIGLU_CLAMP},
        layer_names={**_GLM_NAMES, **hy_v4.NAMES}, full_names=hy_v4.FULL_NAMES, outer_names=hy_v4.OUTER, roles=hy_v4.ROLES),
    "apertus": Architecture(apertus.FAMILY, config={"hidden_act": "xielu"}, layer_names=apertus.NAMES),
    bitnet.NAME: Architecture(bitnet.FAMILY, layer_names=bitnet.NAMES, roles=bitnet.ROLES, other_keys=frozenset({bitnet.ACTIVATION})),
    "arcee": Architecture("arcee", config={"hidden_act": "relu2"}, interleaved=True),
    "command-r": Architecture("cohere", **_COHERE),
    "cohere2": Architecture("cohere2", window_pattern=True, **_COHERE),
    cohere2_moe.NAME: Architecture(cohere2_moe.FAMILY, experts=("mlp", qwen3_moe.NAMES), window_pattern=True, epsilon_key=LAYER_NORM,
                                   keys=cohere2_moe.KEYS, required_keys=cohere2_moe.REQUIRED,
                                   other_keys=frozenset({"expert_shared_feed_forward_length"}), layer_names={
                                       part: f"mlp.shared_experts.{target}" for part, target in SHARED_EXPERT.items()}),
    "exaone": Architecture("exaone", keys={RMS_NORM: "layer_norm_epsilon"}),
    "exaone4": Architecture("exaone4", layer_names=_POST_NORMS, window_pattern=True,
                            keys={"nextn_predict_layers": "num_nextn_predict_layers"}),
    "exaone-moe": Architecture("exaone_moe", experts=("mlp", qwen3_moe.NAMES), window_pattern=True, layer_names={
        **_GLM_NAMES, SCORE_CORRECTION: "mlp.e_score_correction_bias"}, keys={
        **_GLM_MOE_KEYS, "expert_count": "num_experts", "expert_shared_count": "num_shared_experts",
        "nextn_predict_layers": "num_nextn_predict_layers", "expert_group_count": "n_group", "expert_group_used_count": "topk_group",
        "expert_shared_feed_forward_length": SHARED_EXPERT_WIDTH}),
    # Files state the RoPE base after scaling.
    "hunyuan-dense": Architecture("hunyuan_v1_dense", layer_names=_HUNYUAN_NAMES),
    "hunyuan_vl": Architecture("hunyuan_v1_dense", layer_names=_HUNYUAN_NAMES, keys={ROPE_ALPHA: STRETCH},
                               other_keys=frozenset({mrope_sections.KEY})),
    "hunyuan-moe": Architecture("hunyuan_v1_moe", experts=("mlp", qwen3_moe.NAMES), full_names={f"{ROUTER}.weight": "mlp.gate.wg.weight"},
                                layer_names={**_HUNYUAN_NAMES,
                                             **{part: f"mlp.shared_mlp.{target}" for part, target in SHARED_EXPERT.items()}},
                                keys={"expert_count": "num_experts", "expert_used_count": "moe_topk",
                                      "expert_shared_count": "num_shared_expert", "expert_feed_forward_length": "moe_intermediate_size",
                                      "expert_shared_feed_forward_length": SHARED_EXPERT_WIDTH}),
    "bailingmoe2": Architecture("bailing_moe_v2", experts=("mlp", qwen3_moe.NAMES), partial_rotary=True, fused=_QKV, outer_names={
        "token_embd.weight": "model.word_embeddings.weight"}, keys={
        **_GLM_MOE_KEYS, "expert_count": "num_experts", "expert_shared_count": "num_shared_experts", "expert_group_count": "n_group",
        "expert_group_used_count": "topk_group", "nextn_predict_layers": "num_nextn_predict_layers",
        "expert_shared_feed_forward_length": "moe_shared_expert_intermediate_size"}, layer_names={
        "attn_output": "attention.dense", "attn_q_norm": "attention.query_layernorm", "attn_k_norm": "attention.key_layernorm",
        SCORE_CORRECTION: "mlp.gate.expert_bias", **{part: f"mlp.shared_experts.{target}" for part, target in SHARED_EXPERT.items()}}),
    "minicpm": Architecture("minicpm", interleaved=True, keys=_MINICPM_SCALES),
    minicpm3.NAME: Architecture(minicpm3.FAMILY, keys=minicpm3.KEYS, required_keys=minicpm3.REQUIRED, layer_names=latent_attention.NAMES),
    "hy_v3": Architecture("hy_v3", experts=("mlp", qwen3_moe.NAMES), full_names={
        f"{ROUTER}.weight": "mlp.router.gate.weight", SCORE_CORRECTION: "mlp.expert_bias"}, layer_names={  # no kind there
        SCORE_CORRECTION: "mlp.expert_bias", **{part: f"mlp.shared_mlp.{target}" for part, target in SHARED_EXPERT.items()}}, keys={
        **_GLM_MOE_KEYS, "expert_count": "num_experts", "expert_shared_count": "num_shared_experts",
        "expert_weights_scale": "router_scaling_factor", "expert_weights_norm": "route_norm",
        "nextn_predict_layers": "num_nextn_predict_layers",
        "expert_shared_feed_forward_length": SHARED_EXPERT_WIDTH}),
    "minimax-m2": Architecture("minimax_m2", partial_rotary=True, experts=("block_sparse_moe", mixtral.NAMES), layer_names={
        SCORE_CORRECTION: "block_sparse_moe.e_score_correction_bias"}, keys={
        "expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok", "expert_gating_func": "scoring_func",
        "expert_feed_forward_length": "intermediate_size"}),
    # `attn_norm_2` is attention's own norm, in models where the MLP has another one.
    "falcon": Architecture("falcon", config={"activation": "gelu"}, fused=_QKV, epsilon_key=LAYER_NORM, outer_names=_NORM_BIAS, keys={
        LAYER_NORM: "layer_norm_epsilon", "feed_forward_length": "ffn_hidden_size", "attention.head_count_kv": "num_kv_heads"},
                           roles={"mlp_norm": "attn_norm"}, layer_names={
            "attn_norm": "input_layernorm", "attn_norm_2": "ln_attn", "attn_output": "self_attention.dense",
            "attn_q": "self_attention.q_proj", "attn_k": "self_attention.k_proj", "attn_v": "self_attention.v_proj",
            "ffn_up": "mlp.dense_h_to_4h",
            "ffn_down": "mlp.dense_4h_to_h"}),
    falcon_h1.NAME: Architecture(falcon_h1.FAMILY, keys=falcon_h1.KEYS, layer_names=falcon_h1.NAMES, full_names=falcon_h1.FULL_NAMES,
                                 fused=state_spaces.FUSED, roles={**state_spaces.ROLES, "post_norm": "ffn_norm"},
                                 outer_names=falcon_h1.OUTER,
                                 required_keys=falcon_h1.REQUIRED),
    jamba.FAMILY: Architecture(jamba.FAMILY, keys=jamba.KEYS, experts=("feed_forward", qwen3_moe.NAMES), layer_names=jamba.NAMES,
                               full_names=jamba.FULL_NAMES, fused=jamba.FUSED, roles=jamba.ROLES, outer_names=jamba.OUTER,
                               required_keys=jamba.REQUIRED,
                               layer_kinds=jamba.LAYER_TYPES),
    mamba.NAME: Architecture(mamba.NAME, keys=mamba.KEYS, layer_names=mamba.NAMES, full_names=mamba.FULL_NAMES, fused=jamba.FUSED,
                             roles=jamba.ROLES,
                             outer_names=mamba.OUTER, required_keys=mamba.REQUIRED, other_keys=frozenset({mamba.BC_NORM_KEY})),
    mamba2.NAME: Architecture(mamba2.NAME, keys=mamba2.KEYS, layer_names=mamba2.NAMES, full_names=mamba2.FULL_NAMES,
                              fused=state_spaces.FUSED,
                              roles=state_spaces.ROLES, outer_names=mamba.OUTER, required_keys=mamba2.REQUIRED),
    rwkv7.FAMILY: Architecture(rwkv7.FAMILY, **rwkv7.ARCHITECTURE),
    "gemma": Architecture("gemma", config={"hidden_act": "gelu_pytorch_tanh"}, norm_offset=1.0),
    "gemma2": Architecture("gemma2", keys={"attn_logit_softcapping": "attn_logit_softcapping",
                                           "final_logit_softcapping": "final_logit_softcapping"}, **_GEMMA),
    "gemma3": Architecture("gemma3_text", keys={"rope.freq_base_swa": "rope_local_base_freq",
                                                "attention.sliding_window_pattern": "sliding_window_pattern"}, **_GEMMA),
    "gemma-embedding": Architecture("gemma3_text", keys={"rope.freq_base_swa": "rope_local_base_freq",
                                                         "attention.sliding_window_pattern": "sliding_window_pattern"},
                                    config={**_GEMMA["config"], "use_bidirectional_attention": True}, norm_offset=_GEMMA["norm_offset"],
                                    layer_names=_GEMMA_NAMES, other_keys=frozenset({"attention.causal", *(
                                        f"dense_{number}_feat_{side}" for number in (2, 3) for side in ("in", "out"))})),
    "gemma3n": Architecture(gemma3n.FAMILY, config={"hidden_activation": "gelu_pytorch_tanh"}, keys=gemma3n.KEYS, window_pattern=True,
                            layer_names=gemma3n.NAMES, outer_names=gemma4.OUTER, required_keys=gemma3n.REQUIRED,
                            full_names=gemma3n.FULL_NAMES,
                            other_keys=frozenset((gemma3n.ACTIVATION_SPARSITY, *gemma3n.PER_LAYER_KEYS))),
    "gemma4": Architecture(gemma4.FAMILY, config={"hidden_activation": "gelu_pytorch_tanh"}, keys=gemma4.KEYS, layer_names=gemma4.NAMES,
                           window_pattern=True, roles=gemma4.ROLES, outer_names=gemma4.OUTER, required_keys=gemma4.REQUIRED,
                           full_names=gemma4.FULL_NAMES,
                           experts=("", qwen3_moe.NAMES), other_keys=frozenset((*gemma4.HEAD_LENGTHS, *gemma4.PER_LAYER_KEYS))),
    gemma_embedding2.NAME: Architecture(gemma_embedding2.FAMILY, window_pattern=True, **gemma_embedding2.ARCHITECTURE),
    laguna.NAME: Architecture(laguna.FAMILY, experts=("mlp", qwen3_moe.NAMES), partial_rotary=True, keys=laguna.KEYS,
                              required_keys=laguna.REQUIRED,
                              other_keys=laguna.OTHER_KEYS | {"expert_shared_count"}, layer_names={
                                  SCORE_CORRECTION: "mlp.experts.e_score_correction_bias", "attn_gate": "self_attn.g_proj",
                                  **{part: f"mlp.shared_expert.{target}" for part, target in SHARED_EXPERT.items()}}),
    kimi_delta_attention.KIMI: Architecture(kimi_delta_attention.KIMI_FAMILY, experts=("block_sparse_moe", mixtral.NAMES),
                                            **kimi_delta_attention.ARCHITECTURES[kimi_delta_attention.KIMI]),
    kimi_delta_attention.LING: Architecture(kimi_delta_attention.LING_FAMILY, experts=("mlp", qwen3_moe.NAMES),
                                            **kimi_delta_attention.ARCHITECTURES[kimi_delta_attention.LING]),
    glm5_next.NAME: Architecture(glm5_next.FAMILY, experts=("mlp", qwen3_moe.NAMES), **glm5_next.ARCHITECTURE),
    gpt_oss.NAME: Architecture(gpt_oss.FAMILY, experts=("mlp", qwen3_moe.NAMES), **gpt_oss.ARCHITECTURE),
    "mistral3": Architecture("ministral3", interleaved=True, keys={"attention.temperature_scale": QUERY_SCALING_BETA}),
    "granite": Architecture("granite", interleaved=True, keys=_GRANITE_SCALES),
    "granitemoe": Architecture("granitemoe", interleaved=True, experts=("block_sparse_moe", qwen3_moe.NAMES), layer_names={
        part: target for part, target in state_spaces.NAMES.items() if part.endswith("_shexp")}, keys={
        **_GRANITE_SCALES, **_MOE_KEYS, "expert_count": "num_local_experts",
        "expert_shared_feed_forward_length": "shared_intermediate_size"}),
    granite_swash.NAME: Architecture(granite_swash.DENSE, interleaved=True, experts=("block_sparse_moe", qwen3_moe.NAMES),
                                     window_pattern=True,
        layer_names={part: target for part, target in state_spaces.NAMES.items() if part.endswith("_shexp")},
                                     full_names=granite_swash.FULL_NAMES,
        roles=granite_swash.ROLES, fused=granite_swash.FUSED, other_keys=frozenset({granite_swash.ROPE_PATTERN}), keys={
        **_GRANITE_SCALES, **_MOE_KEYS, "expert_count": "num_local_experts",
        "expert_shared_feed_forward_length": "shared_intermediate_size"}),
    "granitehybrid": Architecture("granitemoehybrid", interleaved=True, keys={**_GRANITE_SCALES, **state_spaces.KEYS},
                                  experts=("block_sparse_moe", qwen3_moe.NAMES), layer_names=state_spaces.NAMES,
                                  full_names=state_spaces.FULL_NAMES,
                                  fused=state_spaces.FUSED, roles=state_spaces.ROLES, required_keys=state_spaces.REQUIRED,
                                  layer_kinds=state_spaces.LAYER_TYPES),
    nemotron_h.DENSE: Architecture(nemotron_h.FAMILY, keys=nemotron_h.KEYS, **_NEMOTRON_H),
    nemotron_h.MOE: Architecture(nemotron_h.FAMILY, keys={**nemotron_h.KEYS, **nemotron_h.MOE_KEYS}, experts=("mixer", qwen3_moe.NAMES),
                                 **_NEMOTRON_H),
    "olmo": Architecture("olmo", interleaved=True, epsilon_key=LAYER_NORM, keys={LAYER_NORM: "layer_norm_eps", CLAMP_KQV: "clip_qkv"}),
    # also OLMo 3
    "olmo2": Architecture("olmo2", layer_names=_POST_NORMS, keys={"rope.freq_base_swa": "rope_local_base_freq"}, window_pattern=True),
    "olmoe": Architecture("olmoe", config={"norm_topk_prob": False}, keys=_MOE_KEYS, experts=("mlp", qwen3_moe.NAMES)),
    "qwen3moe": Architecture("qwen3_moe", config={"norm_topk_prob": True}, experts=("mlp", qwen3_moe.NAMES),
                             keys={**_MOE_KEYS, "expert_feed_forward_length": "moe_intermediate_size"}),
    "qwen3vlmoe": Architecture("qwen3_moe", config={"norm_topk_prob": True}, experts=("mlp", qwen3_moe.NAMES),
                               keys={**_MOE_KEYS, "expert_feed_forward_length": "moe_intermediate_size"},
                               other_keys=frozenset({mrope_sections.KEY, DEEPSTACK})),
    "seed_oss": Architecture("seed_oss", layer_names={"post_attention_norm": _POST_NORMS["post_attention_norm"]}, roles={
        "post_norm": "post_attention_norm"}),
    "smollm3": Architecture("smollm3", interleaved=True),
    "starcoder2": Architecture("starcoder2", config={"hidden_act": "gelu_pytorch_tanh"}, outer_names=_NORM_BIAS, epsilon_key=LAYER_NORM,
                               layer_names={
        "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"}, keys={LAYER_NORM: "norm_epsilon"}),
    "jais2": Architecture("jais2", config={"hidden_act": "relu2"}, outer_names=_NORM_BIAS, epsilon_key=LAYER_NORM, keys={
        LAYER_NORM: "layer_norm_eps"}),
    mimo2.NAME: Architecture(mimo2.FAMILY, experts=("mlp", qwen3_moe.NAMES), **mimo2.ARCHITECTURE),
    minimax3.NAME: Architecture(minimax3.FAMILY, experts=("block_sparse_moe", mixtral.NAMES), **minimax3.ARCHITECTURE),
    **transformer_names.ARCHITECTURES,
    "nemotron": Architecture("nemotron", config={"hidden_act": "relu2"}, norm_offset=1.0, partial_rotary=True, outer_names=_NORM_BIAS,
                             epsilon_key=LAYER_NORM, keys={LAYER_NORM: "norm_eps"}),
    # `use_parallel_residual` is not read, because files state it wrongly: like llama.cpp we look at which norms there are.
    "stablelm": Architecture("stablelm", partial_rotary=True, outer_names=_NORM_BIAS, epsilon_key=LAYER_NORM,
                             keys={LAYER_NORM: "layer_norm_eps"},
                             other_keys=frozenset({"use_parallel_residual"}), layer_names={
                                 "attn_q_norm": "self_attn.q_layernorm", "attn_k_norm": "self_attn.k_layernorm"}),
    "phi2": Architecture("phi", config={"hidden_act": "gelu_new"}, partial_rotary=True, legacy_fused=_QKV, epsilon_key=LAYER_NORM, keys={
        LAYER_NORM: "layer_norm_eps"}, layer_names={"attn_output": "self_attn.dense", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2"},
                         outer_names={f"output_norm.{kind}": f"model.final_layernorm.{kind}" for kind in ("weight",
            "bias")} | {"output.bias": "lm_head.bias"}),
    "phi3": Architecture("phi3", partial_rotary=True, fused=_QKV | _GATE_UP),
    step35.NAME: Architecture(step35.FAMILY, experts=("moe", qwen3_moe.NAMES), norm_offset=1.0, window_pattern=True, keys=step35.KEYS,
                              required_keys=step35.REQUIRED, other_keys=step35.OTHER_KEYS, layer_names=step35.NAMES),
    deepseek4.NAME: Architecture(deepseek4.FAMILY, experts=("ffn", deepseek_v4.NAMES), partial_rotary=True, keys=deepseek4.KEYS,
                                 other_keys=deepseek4.OTHER_KEYS, required_keys=deepseek4.REQUIRED, optional_keys=deepseek4.OPTIONAL_KEYS,
                                 layer_names=deepseek4.NAMES, full_names=deepseek4.FULL_NAMES, outer_names=deepseek4.OUTER),
    muse_glimmer.NAME: Architecture(muse_glimmer.FAMILY, interleaved=True, norm_offset=1.0, unshifted_norms=muse_glimmer.UNSHIFTED_NORMS,
                                    window_pattern=True,
                                    keys=muse_glimmer.KEYS, required_keys=muse_glimmer.REQUIRED, layer_names={
                                        **_GEMMA_NAMES, **muse_glimmer.NAMES}),
    "chatglm": Architecture("glm", partial_rotary=True, fused=_GATE_UP, legacy_fused=_QKV),
    "ernie4_5": Architecture("ernie4_5"),
    "glm4": Architecture("glm4", partial_rotary=True, fused=_GATE_UP, legacy_fused=_QKV, other_keys=frozenset({mrope_sections.KEY}),
                         keys={"nextn_predict_layers": "num_nextn_predict_layers"}, layer_names={
                             "post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}),
}


def architecture(path: object, name: object) -> Architecture:
    """The entry of `general.architecture`. Raises CheckpointError naming it."""
    if not isinstance(name, str):
        raise CheckpointError(f"{path} states general.architecture {shown(name)}, expected a name", "convert the original checkpoint again")
    if name in BITNET_CPP:
        raise CheckpointError(f"{path} is of architecture {shown(name)}, which only Microsoft's bitnet.cpp writes and runs",
                              "use the safetensors of the model, or a file of architecture bitnet, which llama.cpp's converter makes")
    if name == CLIP:
        raise CheckpointError(f"{path} is a vision projector (mmproj), not a model", "give the model's own file: this one is found "
                              "beside it, or named with --mmproj FILE")
    refuse_generation({"model_type": GGUF_ARCHITECTURES.get(name)})
    if name not in ARCHITECTURES or ARCHITECTURES[name].family not in FAMILIES:
        raise CheckpointError(f"{path} is of architecture {shown(name)}, which is not supported", UNKNOWN_FAMILY_HINT)
    return ARCHITECTURES[name]
