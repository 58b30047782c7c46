"""LoRA adapters: as they are stored, beside a model as it runs, and merged into one."""
