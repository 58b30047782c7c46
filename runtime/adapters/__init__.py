"""LoRA adapters: reading them, applying them beside a running model, and merging them into one."""
