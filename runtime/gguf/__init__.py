"""Models that are a single GGUF file: the same ModelConfig, tensors and tokenizer as a folder has, made from what the file holds."""
