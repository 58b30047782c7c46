"""Tiny random models of the families that came last, as `family_models.CASES`."""

from family_sizes import DELTA, FEW_EXPERTS, Case, rope

NEWER = {
    "qwen3_next": Case("qwen3_next", {**DELTA, **FEW_EXPERTS, "shared_expert_intermediate_size": 56, "initializer_range": 0.12}),
    "qwen3_next, other layers, bfloat16": Case("qwen3_next", {
        **DELTA, **FEW_EXPERTS, "shared_expert_intermediate_size": 104, "layer_types": ["linear_attention", "full_attention"] * 2,
        "linear_num_key_heads": 3, "linear_num_value_heads": 9, "attention_bias": True, "initializer_range": 0.12,
        **rope("default", partial_rotary_factor=0.5)}, dtype="bfloat16", older=True),
}
