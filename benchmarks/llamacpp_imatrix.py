"""llama.cpp's importance matrix, computed as `llama-imatrix` does: the mean over the tokens of a calibration text of the squared inputs of
every linear layer, column by column. Token embedding and output get none, as there.
"""

from __future__ import annotations

import json
import lzma
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from effllm.runtime.tokenizer import Tokenizer
from llamacpp_files import peer_name

TOKENS, WINDOW = 16384, 512


def calibration_text(path: Path, characters: int) -> str:
    """The beginning of a text file, or of the `text` fields of a .jsonl.xz file."""
    if path.name.endswith(".jsonl.xz"):
        texts, length = [], 0
        with lzma.open(path, "rt", encoding="utf-8") as lines:
            for line in lines:
                texts.append(json.loads(line)["text"])
                length += len(texts[-1])
                if length >= characters:
                    break
        return "\n\n".join(texts)[:characters]
    return path.read_text(encoding="utf-8")[:characters]


def calibration_ids(path: Path, tokenizer: Tokenizer, tokens: int = TOKENS) -> list[int]:
    """The first `tokens` tokens of a text, in whole windows. Raises ValueError for a text shorter than a window."""
    ids = tokenizer.encode(calibration_text(path, 12 * tokens))[:tokens]
    ids = ids[: len(ids) // WINDOW * WINDOW]
    if not ids:
        raise ValueError(f"{path} has less than {WINDOW} tokens")
    return ids


def importance(model: torch.nn.Module, ids: Sequence[int]) -> dict[str, np.ndarray]:
    """llama.cpp's tensor name -> mean squared input [K] float32, from windows of the calibration ids through the float32 model."""
    sums: dict[str, torch.Tensor] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name.startswith("model.layers."):

            def collect(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], name: str = name) -> None:
                squares = inputs[0].double().square().flatten(0, -2).sum(0)
                sums[name] = sums[name] + squares if name in sums else squares

            hooks.append(module.register_forward_pre_hook(collect))
    try:
        with torch.inference_mode():
            for start in range(0, len(ids), WINDOW):
                model(torch.tensor([ids[start : start + WINDOW]]), use_cache=False)
    finally:
        for hook in hooks:
            hook.remove()
    return {peer_name(f"{name}.weight"): (squares / len(ids)).float().numpy() for name, squares in sums.items()}
