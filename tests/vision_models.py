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
FIRST = 4096  # the number of the first word that is added


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
# What a square and an image of one gray show, the photo and the odd one do as well.
SHAPES = [pytest.param(name, marks=pytest.mark.slow if name in ("square", "gray") else ()) for name in PICTURES]


@wrapped()
def made(outer: str, folder: Path, text: Mapping[str, object], vision: Mapping[str, object], words: list[str] = (),
         **more: object) -> PreTrainedModel:
    """A random model saved in `folder` with the packaged tokenizer, to which `words` are added; as transformers reads it."""
    config = AutoConfig.for_model(outer, text_config=deepcopy({**TEXT, **text}), vision_config=dict(vision), **more)
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
    like = vocabulary["added_tokens"][-1]
    vocabulary["added_tokens"] += [{**like, "id": FIRST + number, "content": word, "special": True} for number, word in enumerate(words)]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    if outer == "hunyuan_vl":
        turned_in_pairs(model.model.language_model.rotary_emb)
    return model


def turned_in_pairs(rope: torch.nn.Module) -> None:
    """HunyuanVL's code as published gives both channels of a pair the same number of a token; transformers cuts channels otherwise, so that
    what turns with one another has different ones."""

    def shared_out(angles: torch.Tensor) -> torch.Tensor:
        half = torch.cat([each[axis] for axis, each in enumerate(angles.split(rope.mrope_section, dim=-1))], dim=-1)
        return torch.cat([half, half], dim=-1)

    rope.recomposition_frequencies = shared_out


def seeing(folder: Path, family: str, case: tuple, **tower: object) -> PreTrainedModel:
    """The model of a case (`vision_cases.py`) with its processor, written to `folder`; `tower`: what its tower has otherwise."""
    text, vision, words, more, processor = case
    model = made(family, folder, text, {**vision, **tower}, words, **more)
    processor.save_pretrained(folder)
    return model


def words_of(folder: Path) -> PreTrainedTokenizerFast:
    """The tokenizer for a transformers processor."""
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))


def opened(folder: Path) -> MediaEncoder:
    return encoder_of(folder, read_config(folder), SEEN)


def seen_when_quantized(folder: Path, picture: str = "odd") -> MediaEncoder:
    """The encoder of `whole` in `folder`, checked to be unchanged when the model is quantized to `small` next to it."""
    list(convert(folder / "whole", folder / "small", options()))
    whole, small = (opened(folder / each) for each in ("whole", "small"))
    first, second = (each.encode(PICTURES[picture], EncodingJob()) for each in (whole, small))
    assert np.array_equal(first.rows, second.rows) and first.tokens == second.tokens
    assert whole.bytes_needed() == small.bytes_needed()
    return whole


def _are_tensors(value: object) -> bool:
    """Does a processor return a tensor per image, whose sizes may differ?"""
    return isinstance(value, list) and all(isinstance(each, torch.Tensor) for each in value)


def held_against(sight: MediaEncoder, picture: np.ndarray, model: PreTrainedModel, ready: Mapping[str, torch.Tensor]) -> np.ndarray:
    """Our rows, checked against transformers' encoder on its processor's output `ready`."""
    with torch.inference_mode():
        output = model.model.get_image_features(**{key: value if _are_tensors(value) else torch.as_tensor(np.asarray(value))
                                                   for key, value in ready.items()})
    expected = output.pooler_output
    expected = np.concatenate([features.reshape(-1, features.shape[-1]).numpy() for features in expected])
    encoded = sight.encode(picture, EncodingJob())
    assert encoded.rows.dtype == np.float32 and encoded.rows.shape == expected.shape
    assert np.abs(encoded.rows - expected).max() < 2e-5 * np.abs(expected).max()
    before = encoded.prefix_tokens(0) if encoded.prefix_tokens else ()
    assert len(before) + len(encoded.tokens) == sight.token_count(*picture.shape[:2])
    assert encoded.tokens.count(ROW_PLACEHOLDER) == len(encoded.rows)
    return encoded


class Lfm2Ready:
    """In place of a preprocessor of transformers that asks for torchvision: what ours makes, in its form."""

    def __init__(self, **says: object) -> None:
        self.settings = {"image_processor_type": "Lfm2VlImageProcessorFast", "encoder_patch_size": 8, "downsample_factor": 2,
                         "tile_size": 64,
                         "min_tiles": 2, "max_tiles": 4, "min_image_tokens": 4, "max_image_tokens": 16, "max_pixels_tolerance": 2.0, **says}

    def save_pretrained(self, folder: Path) -> None:
        self.folder = folder
        (folder / "preprocessor_config.json").write_text(json.dumps(self.settings))

    def __call__(self, picture: np.ndarray, **_: object) -> dict[str, torch.Tensor]:
        parts = opened(self.folder).values(picture)
        grids = [(len(part) // 8, part.shape[1] // 8) for part in parts]
        cut = [part.reshape(rows, 8, columns, 8, 3).swapaxes(1, 2).reshape(rows * columns, -1)
               for part, (rows, columns) in zip(parts, grids, strict=True)]
        longest = max(map(len, cut))
        return {"pixel_values": torch.tensor(np.stack([np.pad(patches, ((0, longest - len(patches)), (0, 0))) for patches in cut])),
                "spatial_shapes": torch.tensor(grids),
                "pixel_attention_mask": torch.tensor(np.stack([np.arange(longest) < len(patches) for patches in cut]).astype(np.int32))}


class Llama4Ready:
    """As `Lfm2Ready`, of Llama 4, with tiles of 32 points."""

    def save_pretrained(self, folder: Path) -> None:
        self.folder = folder
        (folder / "preprocessor_config.json").write_text(json.dumps({
            "image_processor_type": "Llama4ImageProcessorFast", "size": {"height": 32, "width": 32}}))

    def __call__(self, picture: np.ndarray, **_: object) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.tensor(np.stack(opened(self.folder).values(picture)).transpose(0, 3, 1, 2))}


class UnifiedReady:
    """As `Lfm2Ready`, of the Gemma 4 without a tower, with squares of 12 points."""

    def save_pretrained(self, folder: Path) -> None:
        self.folder = folder
        (folder / "preprocessor_config.json").write_text(json.dumps({
            "image_processor_type": "Gemma4UnifiedImageProcessor", "patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3}))

    def __call__(self, picture: np.ndarray, **_: object) -> dict[str, torch.Tensor]:
        values = opened(self.folder).values(picture)
        rows, columns = values.shape[0] // 12, values.shape[1] // 12
        cut = values.reshape(rows, 12, columns, 12, 3).swapaxes(1, 2).reshape(rows * columns, -1)
        row, column = np.divmod(np.arange(len(cut)), columns)
        return {"pixel_values": torch.tensor(cut)[None], "image_position_ids": torch.tensor(np.stack([column, row], axis=1))[None]}


class Cohere2Ready(GotOcr2ImageProcessorPil):
    """Command A Vision's, whose module asks for torchvision: the one that it was made of, with its own choice of a shape, which is read
    from that module's text."""

    def crop_image_to_patches(self, *args: object, **options: object) -> list[np.ndarray]:
        with patch.object(got_ocr2, "get_optimal_tiled_canvas", _shape_of_cohere2()):
            return super().crop_image_to_patches(*args, **options)

    def save_pretrained(self, folder: Path) -> None:
        super().save_pretrained(folder)
        config_changed(folder, "preprocessor_config.json", image_processor_type="Cohere2VisionImageProcessorFast")


class UnlimitedOcrReady(DeepseekOcr2ImageProcessorPil):
    """Unlimited OCR's, whose module asks for torchvision: DeepSeek-OCR 2's, of which it was made, and which tiles there are."""

    def __call__(self, pictures: object, **options: object) -> BatchFeature:
        ready, is_single = super().__call__(pictures, **options), isinstance(pictures, np.ndarray)
        grids = [get_optimal_tiled_canvas(picture.shape[:2], (self.tile_size,) * 2, self.min_patches, self.max_patches)
                 for picture in ([pictures] if is_single else pictures)]
        ready["num_local_patches"] = [int(count) for count in ready["num_local_patches"]]
        ready["patches_grid"] = [list(grid) if count else [1, 1] for grid, count in zip(grids, ready["num_local_patches"], strict=True)]
        return ready

    def save_pretrained(self, folder: Path) -> None:
        super().save_pretrained(folder)
        config_changed(folder, "preprocessor_config.json", image_processor_type="UnlimitedOcrImageProcessor")


class MolmoReady(Molmo2ImageProcessor):
    """Molmo 2's, but for what asks for torchvision: there, points between others are made and values are scaled by torch as here."""

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


class KimiReady:
    """Kimi K2.5's, whose module asks for torchvision: its sizes, which are read from that module's text, filled up with black."""

    def __init__(self, **says: object) -> None:
        self.settings = {"image_processor_type": "Kimi_K25ImageProcessor", "merge_size": 2, **says}

    def save_pretrained(self, folder: Path) -> None:
        (folder / "preprocessor_config.json").write_text(json.dumps(self.settings))

    def __call__(self, picture: np.ndarray, **_: object) -> dict[str, torch.Tensor]:
        size, patch = navit_resize()(*picture.shape[:2], self.settings["patch_size"], 2, self.settings["max_patches"],
                                     self.settings["size"]["max_height"]), self.settings["patch_size"]
        (high, wide), (rows, columns) = size[0], (side // patch for side in size[1])
        canvas = np.zeros((*size[1], 3), np.float32)
        canvas[:high, :wide] = Image.fromarray(picture).resize((wide, high), Image.Resampling.BICUBIC)
        cut = (canvas / 127.5 - 1).reshape(rows, patch, columns, patch, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3, patch, patch)
        return {"pixel_values": torch.from_numpy(np.ascontiguousarray(cut)), "image_grid_thw": torch.tensor([[1, rows, columns]])}


class MiniCpmOcrReady(MiniCPMV4_6ImageProcessorPil):
    """MiniCPM-OCR's, whose module needs torchvision: MiniCPM-V's, from which it was derived. `upsize`: what it does with small images."""

    def __init__(self, upsize: str = "always", **says: object) -> None:
        super().__init__(downsample_mode="4x", **says)
        self.upsize = upsize

    def find_best_resize(self, image_size: tuple, *args: object, allow_upscale: bool = False, **options: object) -> tuple[int, int]:
        small = self.upsize == "never" and all(type(side) is int for side in image_size)  # slices are parts of an image
        return super().find_best_resize(image_size, *args, allow_upscale=allow_upscale and not small, **options)

    def save_pretrained(self, folder: Path) -> None:
        super().save_pretrained(folder)
        config_changed(folder, "preprocessor_config.json", image_processor_type="MiniCPMOcrImageProcessor", upsize=None,
                       small_image_upsize=self.upsize)


def _shape_of_cohere2() -> Callable[..., tuple[int, int]]:
    return _read_functions("cohere2_vision", ("get_all_supported_aspect_ratios", "get_optimal_tiled_canvas"))


def navit_resize() -> Callable[..., tuple[tuple[int, int], tuple[int, int]]]:
    """Of Kimi K2.5."""
    return _read_functions("kimi_k25", ("navit_resize",))


def _read_functions(family: str, names: tuple[str, ...]) -> Callable[..., object]:
    """The last of some functions of a preprocessor whose module asks for torchvision."""
    text = (Path(transformers.__path__[0]) / f"models/{family}/image_processing_{family}.py").read_text()
    found = [each for each in ast.parse(text).body if isinstance(each, ast.FunctionDef) and each.name in names]
    made: dict[str, object] = {"np": np, "math": math, "lru_cache": lru_cache}
    exec(compile(ast.Module(found, []), family, "exec"), made)
    return made[names[-1]]


class NemotronReady:
    """Nemotron 3 Nano Omni's, whose module needs torchvision: sizes by its own function, images resized by torch."""

    def __init__(self, **says: object) -> None:
        self.settings = {"image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor", "patch_size": 8, "min_num_patches": 40,
                         "max_num_patches": 120, "max_model_len": 16_384, **says}

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


class PerceptionReady:
    """Perception LM's, whose module asks for torchvision: what ours makes, in its form, of the tiles that its own functions choose."""

    def __init__(self, **says: object) -> None:
        self.settings = {"image_processor_type": "PerceptionLMImageProcessorFast", "tile_size": 32, "max_num_tiles": 4, **says}

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
        whole, large = (np.asarray(Image.fromarray(picture).resize(size, Image.Resampling.BICUBIC))
                        for size in ((side, side), (columns * side, rows * side)))
        cut = large.reshape(rows, side, columns, side, 3).swapaxes(1, 2).reshape(-1, side, side, 3)
        tiles = np.concatenate([whole[None], cut]).transpose(0, 3, 1, 2)
        return {"pixel_values": ((torch.tensor(tiles, dtype=torch.float64) / 255 - 0.5) / 0.5).float()[None]}


def _read_class(family: str, name: str) -> type:
    """The methods of a preprocessor, whose module asks for torchvision, that say nothing of torch."""
    text = (Path(transformers.__path__[0]) / f"models/{family}/image_processing_{family}.py").read_text()
    (found,) = (each for each in ast.parse(text).body if isinstance(each, ast.ClassDef) and each.name == name)
    own = [each for each in found.body if isinstance(each, ast.FunctionDef) and "torch" not in ast.unparse(each)
           and each.name not in ("__init__", "preprocess")]
    made: dict[str, object] = {"math": math, "reduce": reduce}
    exec(compile(ast.Module(own, []), family, "exec"), made)
    return type(name, (), {each.name: staticmethod(made[each.name]) if each.decorator_list else made[each.name] for each in own})


def config_changed(folder: Path, name: str, **changes: object) -> None:
    """Change keys of a JSON file in a folder; None removes one."""
    raw = {**json.loads((folder / name).read_text()), **changes}
    (folder / name).write_text(json.dumps({key: value for key, value in raw.items() if value is not None}))
