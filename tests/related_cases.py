"""Tiny random models of families that are close to others, as `family_models.CASES`."""

from family_sizes import Case, rope

RELATED = {
    "nanochat": Case("nanochat", {"final_logit_softcapping": 3.0, "vocab_size": 301}),
    "nanochat, biases, no cap, tied, bfloat16": Case("nanochat", {
        "final_logit_softcapping": None, "attention_bias": True, "tie_word_embeddings": True, "num_key_value_heads": 1, "hidden_act":
        "gelu", **rope("linear", factor=4.0)}, dtype="bfloat16"),
    "ministral": Case("ministral", {"head_dim": 32, "sliding_window": 40, "vocab_size": 301, "layer_types": [
        "full_attention", "sliding_attention", "sliding_attention"]}),
    "ministral, windows everywhere, bfloat16": Case("ministral", {
        "head_dim": 16, "sliding_window": 150, "tie_word_embeddings": True, **rope("linear", factor=4.0)}, dtype="bfloat16"),
    "flex_olmo": Case("flex_olmo", {"num_experts": 7, "num_experts_per_tok": 3, "intermediate_size": 40, "vocab_size": 301}),
    "flex_olmo, shares add up, biases, tied, bfloat16": Case("flex_olmo", {
        "num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 40, "norm_topk_prob": True, "attention_bias": True,
        "tie_word_embeddings": True, "num_key_value_heads": 1}, dtype="bfloat16"),
}
