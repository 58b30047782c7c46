"""Weights as stored by bitsandbytes, from its description: levels next to codes (NF4, FP4), and int8 rows (LLM.int8)."""

import json

import numpy as np
import torch

# Quantiles of a normal distribution whose largest is 1, and floats of two bits of exponent and one of mantissa.
NF4 = np.float32([-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
                  -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
                  0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0])
FP4 = np.float32([0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4])
FP4 = np.concatenate([FP4, -FP4])
BLOCK, OUTER = 64, 256


def as_levels(values: np.ndarray, kind: str = "nf4", double: bool = False, storage: torch.dtype = torch.uint8, block: int = BLOCK):
    """A weight's tensors by suffix, and the values they represent."""
    levels, flat = {"nf4": NF4, "fp4": FP4}[kind], values.reshape(-1)
    padded = np.pad(flat, (0, -flat.size % block)).reshape(-1, block)
    most = np.maximum(np.abs(padded).max(1), np.float32(1e-6))
    said = {"quant_type": kind, "blocksize": block, "dtype": "bfloat16", "shape": list(values.shape)}
    parts = {"weight.quant_map": levels}
    if double:
        mean, of_scales = float(most.mean()), np.linspace(-1, 1, 256, dtype=np.float32)
        apart = np.pad(most - np.float32(mean), (0, -len(most) % OUTER)).reshape(-1, OUTER)
        outer = np.maximum(np.abs(apart).max(1), np.float32(1e-9))
        codes = np.abs(apart[:, :, None] / outer[:, None, None] - of_scales).argmin(-1).astype(np.uint8)
        most = (of_scales[codes] * outer[:, None] + np.float32(mean)).reshape(-1)[: len(most)]
        said |= {"nested_blocksize": OUTER, "nested_dtype": "float32", "nested_offset": mean}
        parts |= {"weight.absmax": codes.reshape(-1)[: len(most)], "weight.nested_absmax": outer, "weight.nested_quant_map": of_scales}
    else:
        parts["weight.absmax"] = most
    codes = np.abs(padded[:, :, None] / most[:, None, None] - levels).argmin(-1).astype(np.uint8)
    meant = (levels[codes] * most[:, None]).reshape(-1)[: flat.size].reshape(values.shape)
    codes = codes.reshape(-1)[: flat.size + flat.size % 2]
    packed = torch.from_numpy(codes[::2] << np.uint8(4) | codes[1::2])
    parts["weight"] = packed.view(storage).reshape(-1, 1)
    parts[f"weight.quant_state.bitsandbytes__{kind}"] = np.frombuffer(json.dumps(said).encode(), np.uint8)
    return parts, meant


def as_bytes_by_row(values: np.ndarray, exact: bool = True):
    """`exact`: largest magnitudes of which a 127th is a number in half precision."""
    most = np.abs(values).max(1).astype(np.float32)
    if exact:
        most = (most / 127).astype(np.float16).astype(np.float32) * np.float32(127)
    codes = np.clip(np.rint(values / most[:, None] * 127), -127, 127).astype(np.int8)
    return {"weight": codes, "SCB": most, "weight_format": np.uint8(0)}, codes.astype(np.float32) * (most / np.float32(127))[:, None]
