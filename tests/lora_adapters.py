"""Random LoRA adapters as saved by programs, and a folder's weights."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

PREFIX, RANK = "base_model.model.", 4


def weights(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}
    return found


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def adapter(folder: Path, tensors: dict[str, torch.Tensor], **stated: object) -> Path:
    folder.mkdir()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 10, "base_model_name_or_path": "org/base", **stated}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def peft(pairs: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {f"{PREFIX}{module}.lora_{part}.weight": each for module, pair in pairs.items() for part, each in zip("AB", pair)}
