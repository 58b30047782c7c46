#!/usr/bin/env python3
"""Folders of random weights in the shapes of published models (some of their layers), created with transformers: the inputs of
`gguf_vs_llamacpp.py`.

    python benchmarks/family_shapes.py NAME FOLDER
    effllm export FOLDER -o FILE.gguf --type Q4_0
    python benchmarks/gguf_vs_llamacpp.py FILE.gguf --name NAME-q4_0

Vocabularies are cut to one size, so that the layers keep their share of a token's time; the tokenizer is fable's, since no text is read.
Needs transformers and memory for 16 bits per weight. Without NAME it lists the available names.
"""

import argparse
import sys
from pathlib import Path

VOCAB, CTX = 32768, 8192
# model_type, then what differs from transformers' defaults: widths are those of the model, layers fewer.
SHAPES = {
    "gemma4-like": ("gemma4_text", {
        "vocab_size_per_layer_input": VOCAB, "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 12,
        "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 256, "global_head_dim": 512, "hidden_size_per_layer_input": 256,
        "num_kv_shared_layers": 6, "sliding_window": 512, "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 2,
        "max_position_embeddings": 4096, "final_logit_softcapping": 30.0}),
    "glm-4.7-flash-like": ("glm4_moe_lite", {
        "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536, "num_hidden_layers": 4, "num_attention_heads": 20,
        "num_key_value_heads": 20, "n_shared_experts": 1, "n_routed_experts": 64, "num_experts_per_tok": 4, "first_k_dense_replace": 1,
        "routed_scaling_factor": 1.8, "kv_lora_rank": 512, "q_lora_rank": 768, "qk_rope_head_dim": 64, "qk_nope_head_dim": 192,
        "v_head_dim": 256}),
    "granite4-h-like": ("granitemoehybrid", {
        "hidden_size": 1536, "intermediate_size": 512, "shared_intermediate_size": 4096, "num_hidden_layers": 20,
        "num_attention_heads": 12, "num_key_value_heads": 4, "num_local_experts": 0, "num_experts_per_tok": 0,
        "layer_types": (["mamba"] * 5 + ["attention"] + ["mamba"] * 4) * 2, "mamba_n_heads": 48, "mamba_d_head": 64, "mamba_d_state": 128,
        "mamba_n_groups": 1, "mamba_expand": 2, "position_embedding_type": "nope", "tie_word_embeddings": True,
        "attention_multiplier": 0.0078125, "embedding_multiplier": 12, "residual_multiplier": 0.22, "logits_scaling": 6}),
    "lfm2-like-1.2b": ("lfm2", {
        "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 12288, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "full_attn_idxs": [2, 5, 8, 10, 12, 14], "max_position_embeddings": 4096}),
    "qwen1.5-moe-like": ("qwen2_moe", {
        "hidden_size": 2048, "intermediate_size": 5632, "moe_intermediate_size": 1408, "shared_expert_intermediate_size": 5632,
        "num_hidden_layers": 4, "num_attention_heads": 16, "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4}),
    "qwen3.5-like-1.5b": ("qwen3_5_text", {
        "vocab_size": 65536, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 16, "pad_token_id": None,
        "tie_word_embeddings": True, "max_position_embeddings": 4096}),
    "qwen3.5-moe-like": ("qwen3_5_moe_text", {
        "hidden_size": 2048, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_hidden_layers": 4,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 256, "num_experts": 256, "num_experts_per_tok": 8,
        "linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128}),
}
TOKENIZER = Path(__file__).resolve().parents[1] / "models" / "fable"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", choices=SHAPES)
    parser.add_argument("folder", nargs="?", type=Path)
    options = parser.parse_args()
    if options.folder is None:
        print("\n".join(SHAPES))
        return 0
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, overrides = SHAPES[options.name]
    config = AutoConfig.for_model(kind, **{"vocab_size": VOCAB, "max_position_embeddings": CTX, **overrides})
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    model = AutoModelForCausalLM.from_config(config)
    model.save_pretrained(options.folder)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (options.folder / file).write_bytes((TOKENIZER / file).read_bytes())
    print(f"{options.folder}: {sum(parameter.numel() for parameter in model.parameters()) / 1e9:.2f} billion weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
