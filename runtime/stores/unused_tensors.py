"""Detects checkpoint tensors that the config does not account for: extra layers, biases or norms.

Either means that config and weights do not belong together, and the model would run as another than was trained. Tensors known to be
harmless are ignored: buffers of old checkpoints, scales of caches and activations that are not quantized here, zero biases, file
padding, keys and values of layers that share another's, multi-token prediction layers, and the non-text parts of multimodal models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ...kernels.reference import CURVE_EDGE, CURVE_SLOPE
from ...offload.checkpoint import TensorStore
from ...offload.notes import Fallback
from ...offload.safetensors_header import TensorInfo, shown
from ...offload.shards import PAD
from ...quant.weight import RAW_NUMPY, to_f32
from ..config import ModelConfig
from ..families import COMPOSITE, MODEL_TYPE_ALIASES
from ..tensors import ModelTensor
from .import_config import IGNORED_ENDINGS

HARMLESS = re.compile(r"(?:.*\.)?(?:rotary_emb\.(?:inv_freq|cos_cached|sin_cached)|masked_bias|layers\.\d+\.attention\.bias|"
                      r"h\.\d+\.attn\.(?:attention\.)?(?:bias|masked_bias|causal_mask)|layers\.\d+\.self_attn\.(?:slope_rate|(?:query|key|diagonal)_decay)|"
                      rf"decoder\.version|position_ids|early_exit_gate\..+|layers\.\d+\.ple\.ple_embedding\.(?:layer_multipliers|ngram_heads_\w+)|mtp(?:_\w+)?\..+|(?:{'|'.join(IGNORED_ENDINGS)}))")
# Names of vision, audio and speech modules in published checkpoints.
ENCODER_PARTS = (
    "aligner", "audio_tokenizer", "audio_tower", "code2wav", "connector", "density_router", "embed_audio", "embed_vision",
    "generation_aligner", "generation_embeddings", "generation_head", "layerwise_projectors", "merger", "mlp1", "mlp_AR", "mm_projector",
    "multi_modal_projector", "patch_merge_mlp", "patch_merger", "pre_mm_projector_norm", "projector", "resampler_model", "sound_encoder",
    "sound_projection", "spatial_projectors", "talker", "token2wav", "vision_adapter", "vision_backbone", "vision_embedder",
    "vision_encoder", "vision_final_layernorm", "vision_language_adapter", "vision_model", "vision_projection", "vision_projector",
    "vision_tokenizer", "vision_tower", "visual", "visual_embeddings_table", "vit", "vit_large_projector", "vqmodel")
ENCODER_TENSORS = re.compile(r"(?:model\.)?encoder\..+|(?:.*\.)?(?:image_newline|view_sep[ae]rator|(?:qwen2_model|sam_model)\..+|"
                   rf"(?:{'|'.join(ENCODER_PARTS)})\..+)")
# Vision and audio tensors, or a tied head, of multimodal families that are not in COMPOSITE.
FAMILY_ENCODER_TENSORS = {"phi4_multimodal": re.compile(r"(?:.*\.)?(?:embed_tokens_extend\..+|.+\.lora_[AB]\.(?:speech|vision)\.weight)"),
          "whisper": re.compile(r"model\.encoder\..+|proj_out\.weight")}
# (family, norms after its dense layers, which A.X K1's checkpoints hold and the model does not use).
EXTRA_DENSE_NORM = "axk1", re.compile(r"(?:.*\.)?layers\.\d+\.(?:mlp\.)?post_mlp_layernorm\.weight")
# Projections of zero-computation experts, which transformers writes although they are identities.
ZERO_EXPERT_TENSORS = re.compile(r"(?:.*\.)?layers\.\d+\.mlp\.experts\.(\d+)\.(?:gate|up)_proj\.weight")
# Sparse attention's indexers, not used in contexts in which every token attends to all others.
INDEXER = re.compile(r"(?:.*\.)?layers\.\d+\.self_attn\.(?:indexer\.|index_[qk]_).+")
LAYER_KV = re.compile(r"(?:.*\.)?layers\.(\d+)\.self_attn\.(?:[kv]_proj|[kv]_norm)\..+")
# Constants of xIELU, equal in all layers.
XIELU_CONSTANTS = {".mlp.act_fn.beta": CURVE_SLOPE, ".mlp.act_fn.eps": CURVE_EDGE}
XIELU_RTOL = 3e-2  # precision of 16-bit floats
MAX_BIAS_NBYTES = 1 << 20  # larger biases are not read to see whether they are zero


def unused_tensors(config: ModelConfig, store: TensorStore, read: Iterable[TensorInfo]) -> tuple[str, ...]:
    """Names of a folder's tensors that are not in `read` and might matter."""
    used = {(info.file, info.offset) for info in read}  # a split tensor begins where its first part does
    unused = [info for info in store.tensors.values() if (info.file, info.offset) not in used]
    unused = [info for info in unused if not info.name.startswith(PAD) and not HARMLESS.fullmatch(info.name)]
    if config.family in {MODEL_TYPE_ALIASES.get(each, each) for inner in COMPOSITE.values() for each in inner}:
        unused = [info for info in unused if not ENCODER_TENSORS.fullmatch(info.name)]
    if config.family in FAMILY_ENCODER_TENSORS:
        unused = [info for info in unused if not FAMILY_ENCODER_TENSORS[config.family].fullmatch(info.name)]
    if config.family == EXTRA_DENSE_NORM[0]:
        unused = [info for info in unused if not EXTRA_DENSE_NORM[1].fullmatch(info.name)]
    if config.moe is not None and config.moe.zero_experts:
        num_experts = config.moe.num_experts
        unused = [info for info in unused
                if not ((match := ZERO_EXPERT_TENSORS.fullmatch(info.name)) and int(match[1]) >= num_experts)]
    if config.max_supported_tokens is not None or config.indexer is not None:
        unused = [info for info in unused if not INDEXER.fullmatch(info.name)]
    mtp_prefixes = tuple(f"model.layers.{config.num_hidden_layers + i}." for i in range(config.mtp_layers))
    return tuple(info.name for info in unused if not info.name.startswith(mtp_prefixes) and not _is_shared_kv(config, info.name)
                 and not _is_zero_bias(store, info) and not _is_xielu_constant(store, info))


def unused_tensor_notices(config: ModelConfig, store: object, tensors: Mapping[int | str, Mapping[str, ModelTensor]]) -> Sequence[str]:
    """Notices about unused tensors of a store whose `tensors` are read; none for a synthetic store."""
    if not isinstance(store, TensorStore):
        return ()
    names = unused_tensors(config, store, (tensor.info for roles in tensors.values() for tensor in roles.values()))
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return (Fallback(f"not used, because config.json does not ask for it: {shown(names[0])}{more}"),) if names else ()


def _is_shared_kv(config: ModelConfig, name: str) -> bool:
    """Whether a tensor computes keys or values of a layer that shares those of another; checkpoints still hold it."""
    match = LAYER_KV.fullmatch(name)
    layer = -1 if match is None else int(match[1])
    return bool(config.kv_sources) and 0 <= layer < config.num_hidden_layers and config.kv_sources[layer] != layer


def _is_zero_bias(store: TensorStore, info: TensorInfo) -> bool:
    """Whether a tensor is a bias of zeros, which some tools write beside every matrix."""
    return info.name.endswith(".bias") and info.nbytes <= MAX_BIAS_NBYTES and not store.read(info).any()


def _is_xielu_constant(store: TensorStore, info: TensorInfo) -> bool:
    """Whether a tensor is a constant of an activation, with its usual value (`families/apertus.py`)."""
    usual = next((value for end, value in XIELU_CONSTANTS.items() if info.name.endswith(end)), None)
    scheme = info.dtype.lower()
    if usual is None or scheme not in RAW_NUMPY or info.nbytes > 4:
        return False
    return bool(np.allclose(to_f32(store.read(info).reshape(-1).view(RAW_NUMPY[scheme]), scheme), usual, rtol=XIELU_RTOL, atol=0))
