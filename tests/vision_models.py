"""Tiny random vision models for tests: transformers' processors and encoders are the oracle."""

import ast
import json
import math
import shutil
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import lru_cache, reduce
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
import torch
import transformers
from conversions import options
from fastvit_torch import wrapped
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, BatchFeature, PreTrainedModel, PreTrainedTokenizerFast
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil, get_optimal_tiled_canvas
from transformers.models.got_ocr2 import image_processing_pil_got_ocr2 as got_ocr2
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.molmo2.image_processing_molmo2 import Molmo2ImageProcessor

import effllm
from effllm.runtime.config import read_config
from effllm.runtime.convert import convert
from effllm.runtime.images import ROW_PLACEHOLDER, EncodingJob, MediaEncoder, encoder_of
from effllm.runtime.images.modality import IMAGE_INPUT as SEEN
from effllm.runtime.images.preprocessor import CLIP_MEAN, CLIP_STD

FABLE = Path(effllm.__path__[0]) / "models" / "fable"
TEXT = {"vocab_size": 4200, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 512, "head_dim": 24}
TOWER = {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 32, "patch_size": 8}
FIRST = 4096  # id of the first added token


def pictures() -> dict[str, np.ndarray]:
    """uint8 [height, width, 3]: waves plus noise, in the shapes that matter."""
    rng = np.random.default_rng(7)

    def drawn(height: int, width: int) -> np.ndarray:
        y, x = np.mgrid[:height, :width]
        waves = np.stack([np.sin(x / (7 + 3 * c)) + np.cos(y / (11 - 2 * c)) for c in range(3)], axis=-1)
        return (127 + 50 * waves + rng.normal(0, 12, (height, width, 3))).clip(0, 255).astype(np.uint8)

    gray = drawn(41, 53)[..., :1].repeat(3, axis=2)
    return {"photo": drawn(120, 160), "square": drawn(64, 64), "wide": drawn(30, 171), "tall": drawn(150, 37), "tiny": drawn(5, 7),
            "gray": gray, "odd": drawn(33, 31)}


PICTURES = pictures()
# "square" and "gray" are slow: "photo" and "odd" cover the same paths.
SHAPES = [pytest.param(name, marks=pytest.mark.slow if name in ("square", "gray") else ()) for name in PICTURES]


@wrapped()
def save_random_model(family: str, folder: Path, text: Mapping[str, object], vision: Mapping[str, object], words: list[str] = (),
                      **changes: object) -> PreTrainedModel:
    """A random model saved in `folder` with the packaged tokenizer, to which `words` are added; as transformers reads it."""
    config = AutoConfig.for_model(family, text_config=deepcopy({**TEXT, **text}), vision_config=dict(vision), **changes)
    torch.manual_seed(3)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.ndim == 1 else 0.15))
        for name, buffer in model.named_buffers():
            if "running" in name:
                buffer.add_(torch.rand_like(buffer) * 0.3)
    model.save_pretrained(folder)
    for name in ("tokenizer_config.json", "generation_config.json"):
        shutil.copy(FABLE / name, folder / name)
    vocabulary = json.loads((FABLE / "tokenizer.json").read_text())
    added_token = vocabulary["added_tokens"][-1]
    vocabulary["added_tokens"] += [{**added_token, "id": FIRST + number, "content": word, "special": True} for number,
                                   word in enumerate(words)]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if family == "hunyuan_vl":
        fix_rope_pairs(model.model.language_model.rotary_emb)
    return model


def fix_rope_pairs(rope: torch.nn.Module) -> None:
    """Patch rotary positions: HunyuanVL's published code gives both channels of a rotated pair the same position; transformers splits
    channels differently, so that those of a pair may differ."""

    def recombine(angles: torch.Tensor) -> torch.Tensor:
        frequencies = torch.cat([part[axis] for axis, part in enumerate(angles.split(rope.mrope_section, dim=-1))], dim=-1)
        return torch.cat([frequencies, frequencies], dim=-1)

    rope.recomposition_frequencies = recombine


def save_vision_model(folder: Path, family: str, case: tuple, **tower_changes: object) -> PreTrainedModel:
    """Save the model of a case (`vision_cases.py`) with its processor. `tower_changes`: fields of its vision config to change."""
    text, vision, words, changes, processor = case
    model = save_random_model(family, folder, text, {**vision, **tower_changes}, words, **changes)
    processor.save_pretrained(folder)
    return model


def fast_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer for a transformers processor."""
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def open_encoder(folder: Path) -> MediaEncoder:
    return encoder_of(folder, read_config(folder), SEEN)


def open_quantized_encoder(folder: Path, picture: str = "odd") -> MediaEncoder:
    """The encoder of `whole` in `folder`, checked to be unchanged when the model is quantized to `small` next to it."""
    list(convert(folder / "whole", folder / "small", options()))
    whole, small = (open_encoder(folder / name_or_encoder) for name_or_encoder in ("whole", "small"))
    first, second = (name_or_encoder.encode(PICTURES[picture], EncodingJob()) for name_or_encoder in (whole, small))
    assert np.array_equal(first.rows, second.rows) and first.tokens == second.tokens
    assert whole.bytes_needed() == small.bytes_needed()
    return whole


def _are_tensors(value: object) -> bool:
    """Does a processor return a tensor per image, whose sizes may differ?"""
    return isinstance(value, list) and all(isinstance(item, torch.Tensor) for item in value)


def assert_encodes_as(encoder: MediaEncoder, picture: np.ndarray, model: PreTrainedModel,
                      processed: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Assert that our rows equal those of transformers' encoder on its processor's output `processed`; returns ours."""
    with torch.inference_mode():
        output = model.model.get_image_features(**{key: value if _are_tensors(value) else torch.as_tensor(np.asarray(value))
                                                   for key, value in processed.items()})
    expected = output.pooler_output
    expected = np.concatenate([features.reshape(-1, features.shape[-1]).numpy() for features in expected])
    encoded = encoder.encode(picture, EncodingJob())
    assert encoded.rows.dtype == np.float32 and encoded.rows.shape == expected.shape
    assert np.abs(encoded.rows - expected).max() < 2e-5 * np.abs(expected).max()
    prefix = encoded.prefix_tokens(0) if encoded.prefix_tokens else ()
    assert len(prefix) + len(encoded.tokens) == encoder.token_count(*picture.shape[:2])
    assert encoded.tokens.count(ROW_PLACEHOLDER) == len(encoded.rows)
    return encoded


class Lfm2Processor:
    """Stands in for transformers' preprocessor, which needs torchvision: the output of ours in its format."""

    def __init__(self, **changes: object) -> None:
        self.settings = {"image_processor_type": "Lfm2VlImageProcessorFast", "encoder_patch_size": 8, "downsample_factor": 2,
                         "tile_size": 64,
                         "min_tiles": 2, "max_tiles": 4, "min_image_tokens": 4, "max_image_tokens": 16, "max_pixels_tolerance": 2.0,
                         **changes}

    def save_pretrained(self, folder: Path) -> None:
        self.folder = folder
        (folder / "preprocessor_config.json").write_text(json.dumps(self.settings))

    def __call__(self, picture: np.ndarray, **_: object) -> dict[str, torch.Tensor]:
        tiles = open_encoder(self.folder).values(picture)
        grids = [(len(tile) // 8, tile.shape[1] // 8) for tile in tiles]
        patches_by_tile = [tile.reshape(rows, 8, columns, 8, 3).swapaxes(1, 2).reshape(rows * columns, -1)
                           for tile, (rows, columns) in zip(tiles, grids, strict=True)]
        longest = max(map(len, patches_by_tile))
        return {"pixel_values": torch.tensor(np.stack([np.pad(patches,
                                                              ((0, longest - len(patches)), (0, 0))) for patches in patches_by_tile])),
                "spatial_shapes": torch.tensor(grids),
                "pixel_attention_mask": torch.tensor(np.stack([np.arange(longest) < len(patches)
                                                               for patches in patches_by_tile]).astype(np.int32))}


class Llama4Processor:
    """Like `Lfm2Processor`, for Llama 4, with tiles of 32 pixels."""

    def save_pretrained(self, folder: Path) -> None:
        self.folder = folder
        (folder / "preprocessor_config.json").write_text(json.dumps({
            "image_processor_type": "Llama4ImageProcessorFast", "size": {"height": 32, "width": 32}}))

    def __call__(self, picture: np.ndarray, **_: object) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.tensor(np.stack(open_encoder(self.folder).values(picture)).transpose(0, 3, 1, 2))}


class Gemma4UnifiedProcessor:
    """Like `Lfm2Processor`, for the Gemma 4 without a tower, with squares of 12 pixels."""

    def save_pretrained(self, folder: Path) -> None:
        self.folder = folder
        (folder / "preprocessor_config.json").write_text(json.dumps({
            "image_processor_type": "Gemma4UnifiedImageProcessor", "patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3}))

    def __call__(self, picture: np.ndarray, **_: object) -> dict[str, torch.Tensor]:
        values = open_encoder(self.folder).values(picture)
        rows, columns = values.shape[0] // 12, values.shape[1] // 12
        patches = values.reshape(rows, 12, columns, 12, 3).swapaxes(1, 2).reshape(rows * columns, -1)
        row, column = np.divmod(np.arange(len(patches)), columns)
        return {"pixel_values": torch.tensor(patches)[None], "image_position_ids": torch.tensor(np.stack([column, row], axis=1))[None]}


class Cohere2Processor(GotOcr2ImageProcessorPil):
    """Command A Vision's preprocessor, whose module needs torchvision: the class it derives from, with its own choice of a canvas, read
    from that module's source."""

    def crop_image_to_patches(self, *args: object, **options: object) -> list[np.ndarray]:
        with patch.object(got_ocr2, "get_optimal_tiled_canvas", _cohere2_canvas()):
            return super().crop_image_to_patches(*args, **options)

    def save_pretrained(self, folder: Path) -> None:
        super().save_pretrained(folder)
        change_config(folder, "preprocessor_config.json", image_processor_type="Cohere2VisionImageProcessorFast")


class UnlimitedOcrProcessor(DeepseekOcr2ImageProcessorPil):
    """Unlimited OCR's preprocessor, whose module needs torchvision: DeepSeek-OCR 2's, plus the tile grids."""

    def __call__(self, pictures: object, **options: object) -> BatchFeature:
        processed, is_single = super().__call__(pictures, **options), isinstance(pictures, np.ndarray)
        grids = [get_optimal_tiled_canvas(picture.shape[:2], (self.tile_size,) * 2, self.min_patches, self.max_patches)
                 for picture in ([pictures] if is_single else pictures)]
        processed["num_local_patches"] = [int(count) for count in processed["num_local_patches"]]
        processed["patches_grid"] = [list(grid) if count else [1, 1] for grid,
                                     count in zip(grids, processed["num_local_patches"], strict=True)]
        return processed

    def save_pretrained(self, folder: Path) -> None:
        super().save_pretrained(folder)
        change_config(folder, "preprocessor_config.json", image_processor_type="UnlimitedOcrImageProcessor")


class MolmoProcessor(Molmo2ImageProcessor):
    """Molmo 2's preprocessor, with plain torch for interpolation and scaling, which need torchvision."""

    def convert_to_rgb(self, image: torch.Tensor, **_: object) -> torch.Tensor:
        assert image.shape[0] == 3
        return image

    def rescale_and_normalize(self, images: torch.Tensor, do_rescale: bool, factor: float, do_normalize: bool, mean: tuple,
                              std: tuple) -> torch.Tensor:
        assert do_rescale and do_normalize
        return (images * factor - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]

    def to_dict(self) -> dict[str, object]:
        return {**super().to_dict(), "image_processor_type": "Molmo2ImageProcessor"}

    def resize(self, image: torch.Tensor, size: object, antialias: bool, **_: object) -> torch.Tensor:
        assert not antialias
        return torch.nn.functional.interpolate(image, size=(size.height, size.width), mode="bilinear", align_corners=False)


class KimiProcessor:
    """Kimi K2.5's preprocessor, whose module needs torchvision: sizes by its own function, read from its source, padded with black."""

    def __init__(self, **changes: object) -> None:
        self.settings = {"image_processor_type": "Kimi_K25ImageProcessor", "merge_size": 2, **changes}

    def save_pretrained(self, folder: Path) -> None:
        (folder / "preprocessor_config.json").write_text(json.dumps(self.settings))

    def __call__(self, picture: np.ndarray, **_: object) -> dict[str, torch.Tensor]:
        size, patch = navit_resize()(*picture.shape[:2], self.settings["patch_size"], 2, self.settings["max_patches"],
                                     self.settings["size"]["max_height"]), self.settings["patch_size"]
        (height, width), (rows, columns) = size[0], (side // patch for side in size[1])
        canvas = np.zeros((*size[1], 3), np.float32)
        canvas[:height, :width] = Image.fromarray(picture).resize((width, height), Image.Resampling.BICUBIC)
        patches = (canvas / 127.5 - 1).reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, patch, patch)
        return {"pixel_values": torch.from_numpy(np.ascontiguousarray(patches)), "image_grid_thw": torch.tensor([[1, rows, columns]])}


class MiniCpmOcrProcessor(MiniCPMV4_6ImageProcessorPil):
    """MiniCPM-OCR's, whose module needs torchvision: MiniCPM-V's, from which it was derived. `upsize`: what it does with small images."""

    def __init__(self, upsize: str = "always", **changes: object) -> None:
        super().__init__(downsample_mode="4x", **changes)
        self.upsize = upsize

    def find_best_resize(self, image_size: tuple, *args: object, allow_upscale: bool = False, **options: object) -> tuple[int, int]:
        small = self.upsize == "never" and all(type(side) is int for side in image_size)  # slices are parts of an image
        return super().find_best_resize(image_size, *args, allow_upscale=allow_upscale and not small, **options)

    def save_pretrained(self, folder: Path) -> None:
        super().save_pretrained(folder)
        change_config(folder, "preprocessor_config.json", image_processor_type="MiniCPMOcrImageProcessor", upsize=None,
                      small_image_upsize=self.upsize)


def _cohere2_canvas() -> Callable[..., tuple[int, int]]:
    return _read_functions("cohere2_vision", ("get_all_supported_aspect_ratios", "get_optimal_tiled_canvas"))


def navit_resize() -> Callable[..., tuple[tuple[int, int], tuple[int, int]]]:
    """Kimi K2.5's function that chooses the size of a resized image and of its canvas."""
    return _read_functions("kimi_k25", ("navit_resize",))


def _read_functions(family: str, names: tuple[str, ...]) -> Callable[..., object]:
    """The last of `names`, functions of a preprocessor's module that cannot be imported without torchvision."""
    text = (Path(transformers.__path__[0]) / f"models/{family}/image_processing_{family}.py").read_text()
    functions = [node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef) and node.name in names]
    namespace: dict[str, object] = {"np": np, "math": math, "lru_cache": lru_cache}
    exec(compile(ast.Module(functions, []), family, "exec"), namespace)
    return namespace[names[-1]]


class NemotronProcessor:
    """Nemotron 3 Nano Omni's, whose module needs torchvision: sizes by its own function, images resized by torch."""

    def __init__(self, **changes: object) -> None:
        self.settings = {"image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor", "patch_size": 8, "min_num_patches": 40,
                         "max_num_patches": 120, "max_model_len": 16_384, **changes}

    def save_pretrained(self, folder: Path) -> None:
        (folder / "preprocessor_config.json").write_text(json.dumps(self.settings))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        min_patches, max_patches, max_length = (self.settings[name] for name in ("min_num_patches", "max_num_patches", "max_model_len"))
        max_patches = max(min(max(4 * (max_length - 4), min_patches), max_patches), min_patches)
        functions = _read_functions("nemotron_h_omni", ("get_patch_grid_size",))
        return functions(height, width, self.settings["patch_size"], 2, min_patches, max_patches)

    def __call__(self, picture: np.ndarray, **_: object) -> dict[str, torch.Tensor]:
        side, (rows, columns) = self.settings["patch_size"], self.grid(*picture.shape[:2])
        points = torch.tensor(picture).permute(2, 0, 1)[None].float()
        if points.shape[2:] != (rows * side, columns * side):
            points = torch.nn.functional.interpolate(points, (rows * side, columns * side), mode="bicubic", antialias=True)
        mean, std = (torch.tensor(values)[:, None, None] for values in (CLIP_MEAN, CLIP_STD))
        patches = ((points / 255 - mean) / std).reshape(3, rows, side, columns, side)
        return {"pixel_values": patches.permute(1, 3, 0, 2, 4).reshape(rows * columns, -1),
                "image_grid_hw": torch.tensor([[rows, columns]])}


class PerceptionProcessor:
    """Perception LM's preprocessor, whose module needs torchvision: tiles chosen by its own functions, resized as by ours."""

    def __init__(self, **changes: object) -> None:
        self.settings = {"image_processor_type": "PerceptionLMImageProcessorFast", "tile_size": 32, "max_num_tiles": 4, **changes}

    def save_pretrained(self, folder: Path) -> None:
        self.folder = folder
        (folder / "preprocessor_config.json").write_text(json.dumps(self.settings))

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Columns and rows."""
        processor = _read_class("perception_lm", "PerceptionLMImageProcessor")()
        processor.max_num_tiles = self.settings["max_num_tiles"]
        sizes = {"img_width": width, "img_height": height, "tile_size": self.settings["tile_size"]}
        return processor._fit_image_to_canvas(**sizes) or processor._find_closest_aspect_ratio(**sizes)

    def __call__(self, picture: np.ndarray, **_: object) -> dict[str, torch.Tensor]:
        side, (columns, rows) = self.settings["tile_size"], self.grid(*picture.shape[:2])
        thumbnail, large = (np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC))
                            for size in ((side, side), (columns * side, rows * side)))
        tile_rows = large.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        tiles = np.concatenate([thumbnail[None], tile_rows]).transpose(0, 3, 1, 2)
        return {"pixel_values": ((torch.tensor(tiles, dtype=torch.float64) / 255 - 0.5) / 0.5).float()[None]}


def _read_class(family: str, name: str) -> type:
    """A class with those methods of a preprocessor that do not use torch; its module needs torchvision."""
    text = (Path(transformers.__path__[0]) / f"models/{family}/image_processing_{family}.py").read_text()
    (class_node,) = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef) and node.name == name)
    methods = [node for node in class_node.body if isinstance(node, ast.FunctionDef) and "torch" not in ast.unparse(node)
               and node.name not in ("__init__", "preprocess")]
    namespace: dict[str, object] = {"math": math, "reduce": reduce}
    exec(compile(ast.Module(methods, []), family, "exec"), namespace)
    return type(name, (),
                {node.name: staticmethod(namespace[node.name]) if node.decorator_list else namespace[node.name] for node in methods})


def change_config(folder: Path, name: str, **changes: object) -> None:
    """Change keys of a JSON file in a folder; None removes one."""
    raw = {**json.loads((folder / name).read_text()), **changes}
    (folder / name).write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
