"""Tensors of vision and audio towers, read when the first image or audio clip arrives.

Checkpoints name them with or without the prefix `model.` (`thinker.` in Omni models) and `vision_model.`; canonical names have neither.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

import numpy as np

from ... import UsageError
from ...offload.checkpoint import CheckpointError, TensorStore
from ...offload.safetensors_header import AGAIN, TensorInfo
from ..audio import AUDIO_ENCODERS
from ..files.model_folder_files import TOWER
from . import MLX_VISION_PREFIXES, VISION_ENCODERS, is_mlx_quantized, model_type_of, raw_config
from .modality import AUDIO_INPUT, IMAGE_INPUT, Modality
from .tower_ops import Activation, Matrix, Norm, WorkerPool, mlp, to_float32

STORED = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}
PARTS = ("vision_tower.", "vision_model.", "visual.", "multi_modal_projector.", "connector.", "image_newline", "embed_vision.",
         "vision_embedder.", "projector.", "merger.", "resampler_model.",
         "layerwise_projectors.", "spatial_projectors.", "view_separator", "visual_embeddings_table.",
         "vision_backbone.", "mm_projector.", "mlp1.", "transformer.wte.new_embedding", "qformer.", "query_tokens",
         "language_projection.", "aligner.")
# Other prefixes -> canonical ones: LightOnOCR, Mistral's own code, PaddleOCR-VL, DeepSeek-OCR 2, Nemotron 3 Nano Omni, HunyuanOCR.
RENAMED = {"vision_encoder.": "vision_tower.", "vision_projection.": "multi_modal_projector.", "mlp_AR.": "projector.",
           "sam_model.": "vision_tower.sam_encoder.", "qwen2_model.model.model.": "vision_tower.vision_encoder.",
           "qwen2_model.query_768.": "vision_tower.query_768_resolution.", "view_seperator": "view_separator",  # so it is written
           "qwen2_model.query_1024.": "vision_tower.query_1024_resolution.", "projector.layers.": "multi_modal_projector.",
           "pre_mm_projector_norm.": "multi_modal_projector.norm.", "patch_merger.": "multi_modal_projector.patch_merger.",
           "vision_language_adapter.w_in.": "multi_modal_projector.linear_1.",
           "vision_language_adapter.w_out.": "multi_modal_projector.linear_2.",
           "mm_projector.0.": "multi_modal_projector.linear_1.", "mm_projector.2.": "multi_modal_projector.linear_2.",
           "sound_encoder.encoder.": "audio_tower.", "sound_projection.norm.": "embed_audio.layer_norm.",
           "sound_projection.linear1.": "embed_audio.linear_1.", "sound_projection.linear2.": "embed_audio.linear_2."}
# Prefix of some towers -> canonical prefix, and renamed parts.
SAM, PIXTRAL = "vision_tower.sam_encoder.", "vision_tower.transformer.layers."
INSIDE = {SAM: (SAM, {"blocks.": "layers.", ".norm1.": ".layer_norm1.", ".norm2.": ".layer_norm2.", "patch_embed.proj.":
                      "patch_embed.projection.", "neck.0.": "neck.conv1.", "neck.1.": "neck.layer_norm1.", "neck.2.": "neck.conv2.",
                      "neck.3.": "neck.layer_norm2.", "net_2.": "proj.conv1.", "net_3.": "proj.conv2."}),
          # Mistral's own code; its w_q and w_k have adjacent rotary pairs, so they keep their names.
          PIXTRAL: (PIXTRAL, {".wv.": ".v_proj.", ".wo.": ".o_proj.", ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}),
          "vit.": ("vision_tower.", {
              "perceive.proj.0.": "patch_merger.proj_conv.", "perceive.proj.2.": "patch_merger.proj_out.", "perceive.": "patch_merger.",
              "mlp.dense_h_to_4h.": "mlp.fc1.", "mlp.dense_4h_to_h.": "mlp.fc2.", ".input_layernorm.": ".layer_norm1.",
              ".post_attention_layernorm.": ".layer_norm2."})}
# Apple's FastVLM numbers all steps of the tower, downsampling and position embeddings included.
MOBILE = "vision_tower.vision_tower.model."
STEPS = ("stages.0.blocks", "stages.1.downsample", "stages.1.blocks", "stages.2.downsample", "stages.2.blocks", "stages.3.downsample",
         "stages.3.pos_emb", "stages.3.blocks", "stages.4.downsample", "stages.4.pos_emb", "stages.4.blocks")
OF_STEPS = {"lkb_reparam.": "reparam_conv.", "convffn.": "mlp.", "patch_embed.": "stem.", "conv_exp.": "final_conv.",
            "se.reduce.": "se.fc1.", "se.expand.": "se.fc2."}
HEARING_PARTS = ("audio_tower.", "embed_audio.", "multi_modal_projector.", "encoder.", "projector.")  # the last two of Granite Speech


def canonical_name(name: str) -> str:
    """The name without prefixes of the checkpoint's writer."""
    name = name.removeprefix("thinker.").removeprefix("model.")
    for theirs, ours in RENAMED.items():
        if name.startswith(theirs):
            name = ours + name.removeprefix(theirs)
            break
    for begin, (here, parts) in INSIDE.items():
        if name.startswith(begin):
            name = here + name.removeprefix(begin)
            for theirs, ours in parts.items():
                name = name.replace(theirs, ours)
    if name.startswith(MOBILE):
        name = f"vision_tower.timm_model.{_of_mobile(name.removeprefix(MOBILE))}"
    return name.replace("vision_tower.vision_model.", "vision_tower.", 1)


def _of_mobile(name: str) -> str:
    """timm's name of a tensor from Apple's FastViT code."""
    if found := re.match(r"network\.(\d+)\.", name):
        step = int(found[1])
        name = f"{STEPS[step]}.{name[found.end() :]}" if step < len(STEPS) else name
    for theirs, ours in OF_STEPS.items():
        name = name.replace(theirs, ours)
    return re.sub(r"layer_scale(_\d)?$", r"layer_scale\1.gamma", name)


def tower_prefixes(modality: Modality) -> tuple[str, ...]:
    """Prefixes of the canonical names of a modality's tensors."""
    return HEARING_PARTS if modality is AUDIO_INPUT else PARTS


def is_of_tower(name: str, kind: str | None = None) -> bool:
    """Whether a tensor belongs to a supported tower of this model type."""
    own, hears = canonical_name(name), kind in AUDIO_ENCODERS
    return hears and own.startswith(HEARING_PARTS) or (kind in VISION_ENCODERS or not hears) and own.startswith(PARTS)


def tower_store(folder: Path) -> TensorStore:
    """The store that holds a folder's towers: its weights, or for quantized ones the file next to them. Raises what `TensorStore.open`
    does."""
    apart, raw = folder / TOWER, raw_config(folder)
    if apart.is_file():
        return TensorStore.of_file(apart)
    store = TensorStore.open(folder)
    if not is_mlx_quantized(raw) or raw.get("model_type") not in MLX_VISION_PREFIXES:
        return store
    from .mlx_tower import as_published

    return as_published(store, str(raw["model_type"]))


def check_has_tower(folder: Path, modality: Modality) -> None:
    """Raises UsageError for a folder without the tower of this modality."""
    kind = model_type_of(folder)
    with tower_store(folder) as store:
        if any(canonical_name(name).startswith(tower_prefixes(modality)) for name in store.tensors):
            return
        alone = not any(is_of_tower(name, kind) for name in store.tensors)
    if alone:
        raise UsageError(f"{folder} holds only the text model, without its {modality.part} tower",
                         f"for {modality.plural} use the original folder, or one made by effllm quantize")
    raise UsageError(f"{folder} has no {modality.part} tower, though its config.json describes one",
                     f"for {modality.plural} use the original folder, or quantize it again")


class Weights:
    """Tensors of one modality by canonical name; `described` says where their shapes are stated. A context manager that closes the
    store."""

    def __init__(self, store: TensorStore, described: str, modality: Modality = IMAGE_INPUT) -> None:
        self._store, self._described = store, described
        named = ((canonical_name(name), info) for name, info in self._store.tensors.items())
        self._infos: dict[str, TensorInfo] = {name: info for name, info in named
                                              if name.startswith(tower_prefixes(modality))}

    @property
    def nbytes(self) -> int:
        return sum(info.nbytes for info in self._infos.values())

    def has(self, name: str) -> bool:
        return name in self._infos

    def dimensions(self, name: str) -> int:
        """Number of dimensions of a tensor as stored. Raises CheckpointError."""
        return len(self._found(name).shape)

    def shape_of(self, name: str, dimensions: int) -> tuple[int, ...]:
        """Of a tensor with so many dimensions whose sizes no config states. Raises CheckpointError."""
        shape = self._found(name).shape
        if len(shape) != dimensions or 0 in shape:
            raise CheckpointError(f"{name} is {list(shape)}, expected {dimensions} sizes above 0", AGAIN)
        return shape

    def _found(self, name: str) -> TensorInfo:
        if name not in self._infos:
            raise CheckpointError(f"{self._store.folder} holds no tensor {name} of the tower", AGAIN)
        return self._infos[name]

    def stored(self, name: str, *shape: int) -> np.ndarray:
        """As it is stored, in this shape, or in any of as many numbers where it is two-dimensional; dimensions of one do not count. Raises
        CheckpointError."""
        info = self._found(name)
        if info.dtype not in STORED:
            raise CheckpointError(f"{name} is stored as {info.dtype}: towers are supported only in F32, F16 and BF16",
                                  "use a version with its tower in bfloat16")
        count = int(np.prod(shape, dtype=np.int64))
        if _squeezed(info.shape) != _squeezed(shape) and not (len(shape) == 2 and info.shape and info.shape[0] == shape[0]
                                                              and int(np.prod(info.shape, dtype=np.int64)) == count):
            raise CheckpointError(f"{name} is {list(info.shape)}, but {self._described} says {list(shape)}", AGAIN)
        return self._store.read(info).view(STORED[info.dtype]).reshape(shape)

    def numbers(self, name: str, *shape: int) -> np.ndarray:
        """As float32."""
        return np.ascontiguousarray(to_float32(self.stored(name, *shape)))

    def matrix(self, name: str, rows: int, depth: int, bias: bool | None = None) -> Matrix:
        """`name`.weight and its bias: with, without, or None for as stored."""
        with_bias = self.has(f"{name}.bias") if bias is None else bias
        return Matrix(self.stored(f"{name}.weight", rows, depth), self.numbers(f"{name}.bias", rows) if with_bias else None)

    def two_layers(self, name: str, widths: tuple[int, int, int], curve: Activation, bias: bool | None = None,
                   parts: tuple[str, str] = ("linear_1", "linear_2")) -> Callable[[np.ndarray, WorkerPool], np.ndarray]:
        """A two-layer MLP with these widths, from the matrices `name` + each of `parts`: rows [..., K] -> [..., N]."""
        inside, between, out = widths
        first, second = self.matrix(name + parts[0], between, inside, bias), self.matrix(name + parts[1], out, between, bias)
        return lambda x, pool: mlp(x, first, second, curve, pool)

    def layer_norm(self, name: str, width: int, eps: float) -> Norm:
        return Norm(self.numbers(f"{name}.weight", width), self.numbers(f"{name}.bias", width), eps)

    def rms_norm(self, name: str, width: int, eps: float) -> Norm:
        return Norm(self.numbers(f"{name}.weight", width), None, eps, centered=False)

    def __enter__(self) -> Weights:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._store.close()


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(each for each in shape if each != 1)
