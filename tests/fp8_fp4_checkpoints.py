"""Weights in 8- and 4-bit floats as other tools store them, from each format's description; and the values they represent."""

import numpy as np
import torch


def as_fp8(values: np.ndarray, kind: str, name: str = "", powers: bool = False):
    n, k = values.shape
    shape = {"blocks": (-(-n // 128), -(-k // 128)), "rows": (n, 1), "one": (1, 1)}[kind]
    scales = (np.random.default_rng(1).random(shape, np.float32) + 0.5) / 512
    if powers:
        scales = np.exp2(np.rint(np.log2(scales) * 2)).astype(np.float32) * 256
    high, wide = (128, 128) if kind == "blocks" else (-(-n // shape[0]), k)
    spread = np.repeat(np.repeat(scales, high, 0)[:n], wide, 1)[:, :k]
    codes = torch.from_numpy(np.clip(values / spread, -448, 448)).to(torch.float8_e4m3fn)
    name = name or ("weight_scale_inv" if kind == "blocks" else "weight_scale")
    stored = torch.from_numpy(scales).to(torch.float8_e8m0fnu) if powers else scales
    return {"weight": codes, name: stored if kind != "one" else stored.reshape(())}, codes.float().numpy() * spread


def as_mxfp4(values: np.ndarray, name: str = "weight_scale_inv"):
    """Two levels of E2M1 in a byte of whole numbers, under powers of two for 32 inputs."""
    grouped = values.reshape(len(values), -1, 32)
    powers = np.ceil(np.log2(np.maximum(np.abs(grouped).max(-1), 2.0**-60) / 6)).astype(np.float32)
    levels = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = np.concatenate([levels, -levels])
    codes = np.abs(grouped[..., None] / np.exp2(powers)[..., None, None] - levels).argmin(-1).astype(np.uint8).reshape(len(values), -1)
    packed = (codes[:, ::2] | codes[:, 1::2] << np.uint8(4)).view(np.int8)
    parts = {"weight": packed, name: torch.from_numpy(np.exp2(powers)).to(torch.float8_e8m0fnu)}
    return parts, levels[codes] * np.repeat(np.exp2(powers), 32, axis=1)


def as_mxfp4_packed(values: np.ndarray, name: str = "weight_packed"):
    """The same in unsigned bytes, exponents too, as compressed-tensors and ModelOpt have it."""
    parts, meant = as_mxfp4(values, "scales")
    return {name: parts["weight"].view(np.uint8), "weight_scale": parts["scales"].view(torch.uint8)}, meant


def as_mxfp8(values: np.ndarray):
    """Floats of eight bits under exponents for 32 inputs."""
    powers = np.ceil(np.log2(np.maximum(np.abs(values.reshape(len(values), -1, 32)).max(-1), 2.0**-100) / 448)).astype(np.float32)
    spread = np.repeat(np.exp2(powers), 32, axis=1)
    codes = torch.from_numpy(values / spread).to(torch.float8_e4m3fn)
    return {"weight": codes, "weight_scale": (powers + 127).astype(np.uint8)}, codes.float().numpy() * spread


def as_nvfp4(values: np.ndarray, names: tuple[str, str], divides: bool):
    """Levels of E2M1 under floats of eight bits for 16 inputs, and one scale, by which compressed-tensors divides."""
    grouped = values.reshape(len(values), -1, 16)
    largest = np.abs(grouped).max(-1) / 6
    matrix = np.float32(448 / largest.max() if divides else largest.max() / 448)
    scale = np.float32(1) / matrix if divides else matrix
    scales = torch.from_numpy(largest / scale).to(torch.float8_e4m3fn)
    meant = scales.float().numpy()
    scaled = np.divide(grouped, (meant * scale)[..., None], out=np.zeros_like(grouped), where=meant[..., None] > 0)
    levels = np.float32([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    levels = np.concatenate([levels, -levels])
    codes = np.abs(scaled[..., None] - levels).argmin(-1).astype(np.uint8).reshape(len(values), -1)
    parts = {names[0]: codes[:, ::2] | codes[:, 1::2] << np.uint8(4), "weight_scale": scales,
             names[1]: np.float32([matrix]) if divides else matrix, "input_global_scale" if divides else "input_scale": np.float32([3.0])}
    return parts, levels[codes] * np.repeat(meant, 16, axis=1) * scale


def quark(weights: dict[str, object], **others: object) -> dict[str, object]:
    """As it is published: caches by names of their own, what activations are rounded to, and what was left out."""
    of_all = {"weight": {**weights, "is_dynamic": False}, "input_tensors": {"dtype": "fp8_e4m3", "is_dynamic": True}}
    return {"quant_method": "quark", "global_quant_config": of_all, "layer_quant_config": {
        "*k_proj": {**of_all, "output_tensors": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"}}}, "exclude": ["*lm_head"], "export": {
        "kv_cache_group": ["*k_proj"], "pack_method": "reorder", "weight_format": "real_quantized"}, **others}


def as_fbgemm(values: np.ndarray):
    parts, meant = as_fp8(values, "rows", "weight_scale")
    return {**parts, "input_scale_ub": np.float32([1200.0])}, meant
