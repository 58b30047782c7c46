"""Weights as stored by MLX, from the description of its modes, codes bit by bit; and the values they represent."""

import json
from pathlib import Path

import numpy as np
import torch
from gguf_samples import FABLE, weights
from safetensors.torch import save_file
from saved_tokenizers import with_words_of_fable

LEVELS = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
LEVELS = np.concatenate([LEVELS, -LEVELS])


def stream(codes: np.ndarray, bits: int) -> torch.Tensor:
    """[N, K] -> uint32 [N, K * bits / 32]: consecutive codes, lowest bit first."""
    single = (codes[:, :, None] >> np.arange(bits) & 1).astype(np.uint8).reshape(len(codes), -1)
    return torch.from_numpy(np.packbits(single, axis=1, bitorder="little").view(np.uint32))


def affine(values: np.ndarray, bits: int, group: int, kind: torch.dtype = torch.bfloat16):
    """A weight's tensors by suffix, and the values they represent."""
    n, k = values.shape
    grouped = values.reshape(n, -1, group)
    low, top = grouped.min(-1), (1 << bits) - 1
    scales = torch.from_numpy((grouped.max(-1) - low) / top).to(kind)
    biases = torch.from_numpy(low).to(kind)
    scale, bias = scales.float().numpy()[..., None], biases.float().numpy()[..., None]
    codes = np.clip(np.rint((grouped - bias) / np.where(scale == 0, 1, scale)), 0, top).astype(int)
    meant = (scale * codes.astype(np.float32) + bias).astype(np.float32).reshape(n, k)
    return {"weight": stream(codes.reshape(n, k), bits), "scales": scales, "biases": biases}, meant


def small(values: np.ndarray, mode: str):
    """`affine` for the other modes."""
    n, k = values.shape
    grouped = values.reshape(n, -1, 16 if mode == "nvfp4" else 32)
    most = np.maximum(np.abs(grouped).max(-1), 2.0**-60).astype(np.float32)
    if mode == "nvfp4":
        scales = torch.from_numpy(most / 6).to(torch.float8_e4m3fn)
        stored, scale = scales.view(torch.uint8), scales.float().numpy()
    else:
        powers = np.ceil(np.log2(most / (448 if mode == "mxfp8" else 6)))
        stored, scale = torch.from_numpy((powers + 127).astype(np.uint8)), np.exp2(powers).astype(np.float32)
    scaled = np.divide(grouped, scale[..., None], out=np.zeros_like(grouped), where=scale[..., None] > 0)
    if mode == "mxfp8":
        floats = torch.from_numpy(scaled.reshape(n, k)).to(torch.float8_e4m3fn)
        return {"weight": stream(floats.view(torch.uint8).numpy().astype(int), 8), "scales": stored}, (
            floats.float().numpy() * np.repeat(scale, 32, axis=1))
    codes = np.abs(scaled[..., None] - LEVELS).argmin(-1).reshape(n, k)
    return {"weight": stream(codes, 4), "scales": stored}, LEVELS[codes] * np.repeat(scale, k // scale.shape[1], axis=1)


CASES = {"affine 4": ({"bits": 4, "group_size": 64}, lambda values: affine(values, 4, 64)),
         "affine 4, halves": ({"bits": 4, "group_size": 128, "mode": "affine"}, lambda values: affine(values, 4, 128, torch.float16)),
         "affine 4, floats": ({"bits": 4, "group_size": 64}, lambda values: affine(values, 4, 64, torch.float32)),
         "affine 5": ({"bits": 5, "group_size": 32}, lambda values: affine(values, 5, 32)),
         "affine 8": ({"bits": 8, "group_size": 64}, lambda values: affine(values, 8, 64)),
         "affine 6": ({"bits": 6, "group_size": 64}, lambda values: affine(values, 6, 64)),
         "affine 3": ({"bits": 3, "group_size": 64}, lambda values: affine(values, 3, 64)),
         "affine 8, halves": ({"bits": 8, "group_size": 32}, lambda values: affine(values, 8, 32, torch.float16)),
         "affine 2": ({"bits": 2, "group_size": 32}, lambda values: affine(values, 2, 32)),
         "mxfp4": ({"bits": 4, "group_size": 32, "mode": "mxfp4"}, lambda values: small(values, "mxfp4")),
         "mxfp8": ({"bits": 8, "group_size": 32, "mode": "mxfp8"}, lambda values: small(values, "mxfp8")),
         "nvfp4": ({"bits": 4, "group_size": 16, "mode": "nvfp4"}, lambda values: small(values, "nvfp4"))}
CODES = tuple(name for name in CASES if name != "mxfp8")  # that kernels multiply as they are, but for scales of 32 bits


def written(folder: Path, name: str) -> dict[str, np.ndarray]:
    """fable as MLX would store it, embedding included; returns the values of its weights."""
    section, quantize = CASES[name]
    folder.mkdir()
    tensors, meant = {}, {}
    for tensor, values in weights(FABLE).items():
        if values.ndim == 1:
            tensors[tensor], meant[tensor] = torch.from_numpy(values), values
            continue
        parts, meant[tensor] = quantize(values)
        tensors |= {tensor.removesuffix("weight") + ending: part.contiguous() for ending, part in parts.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    raw = json.loads((FABLE / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization": section, "quantization_config": section}))
    with_words_of_fable(folder)
    return meant


def switched(folder: Path) -> dict[str, np.ndarray]:
    """A mixture in MLX's layout, with a layer's experts stacked; returns the weights' values by their own names."""
    tensors, meant, stacks = {}, {}, {}
    for name, values in weights(folder).items():
        if values.ndim != 2 or name.endswith(".A_log"):  # a convolution's taps are the last dimension where it is published
            tensors[name] = torch.from_numpy(values.swapaxes(1, 2).copy() if values.ndim == 3 else values)
            continue
        parts, meant[name] = affine(values, 4, 32)
        before, expert, after = name.partition(".experts.")
        for ending, part in parts.items():
            if expert:
                stacks.setdefault(f"{before}.switch_mlp.{after.split('.')[1]}.{ending}", []).append((int(after.split(".")[0]), part))
            else:
                tensors[name.removesuffix("weight") + ending] = part
    tensors |= {name: torch.stack([part for _, part in sorted(parts, key=lambda each: each[0])]) for name, parts in stacks.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "mlx"})
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | {"quantization": {"bits": 4, "group_size": 32}}))
    return meant
