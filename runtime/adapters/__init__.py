"""LoRA adapters: as they are stored, beside a running model, and merged into a model."""
