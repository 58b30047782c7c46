"""GGUF models: the same ModelConfig, tensors and tokenizer as a checkpoint folder has, built from a single file; and export to GGUF."""
