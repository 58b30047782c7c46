"""Exports an audio encoder as a GGUF file of its own (mmproj), as llama.cpp's converter writes it: the inverse of `audio_config.py` and
`audio_names.py`, for models with audio and no vision.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ... import UsageError
from ...offload.checkpoint import CheckpointError, TensorStore
from ...offload.gguf_header import Value
from ...offload.safetensors_header import AGAIN, TensorInfo
from ..audio.audio_tower import WhisperTower
from ..audio.log_mel import LogMel
from ..audio.qwen2_5_omni import sinusoids
from ..audio.qwen3_asr import MIN_SAMPLES, Qwen3Asr
from ..audio.voxtral import Voxtral
from ..audio.whisper_encoder import EPS
from ..images.modality import AUDIO_INPUT, Modality
from ..images.tower_ops import gelu
from ..images.tower_weights import canonical_name, is_of_tower
from .audio_config import CONV_STRIDE, HOP_LENGTH
from .audio_names import AUDIO_PROJECTORS, POSITION_EMBD
from .projector_names import CLAMP_KINDS, CLIP, TENSOR_KINDS, Projector
from .projector_tensors import ProjectorTensor, projector_tensor

# Model type -> projector type.
PROJECTOR_TYPES: Mapping[str, str] = {"audioflamingo3": "musicflamingo", "qwen2_audio": "qwen2a", "qwen3_asr": "qwen3a",
                                      "voxtral": "voxtral"}
WINDOW_SAMPLES = 400  # of a mel frame
DEFAULT_CHUNKING = 50, 800  # frames of half a chunk, and of an attention window, in every published Qwen3-ASR
NUM_POSITIONS = 1500  # rows of the sinusoidal position table that files hold
# Module of a Qwen3-ASR checkpoint -> the name that its projector table uses.
QWEN3_ASR_NAMES = {"multi_modal_projector.linear_1": "audio_tower.proj1", "multi_modal_projector.linear_2": "audio_tower.proj2"}
OMIT_MMPROJ_HINT = "leave out --mmproj"


def metadata(encoder: WhisperTower | Qwen3Asr, name: str, kind: str) -> dict[str, Value]:
    """Metadata of the mmproj file of a model type. Raises UsageError for settings that such a file cannot state."""
    sizes = encoder.sizes
    _check_defaults(encoder)
    audio_keys: dict[str, Value] = {
        "embedding_length": sizes.width, "feed_forward_length": sizes.ffn_width, "block_count": sizes.layers,
        "attention.head_count": sizes.heads, "projection_dim": encoder.config.hidden_size, "attention.layer_norm_epsilon": EPS,
        "num_mel_bins": sizes.bands}
    if isinstance(encoder, Voxtral):
        audio_keys["projector.stack_factor"] = encoder.stacked_rows
    return {"general.architecture": CLIP, "general.name": name, "general.type": "mmproj", "general.file_type": 1,
            f"{CLIP}.has_audio_encoder": True, f"{CLIP}.projector_type": PROJECTOR_TYPES[kind],
            **{f"{CLIP}.audio.{key}": value for key, value in audio_keys.items()}}


def _check_defaults(encoder: WhisperTower | Qwen3Asr) -> None:
    """Raises UsageError for an encoder that departs from what readers of such a file assume."""
    reason, bands = "which such a file does not say", encoder.sizes.bands
    samples = encoder.log_mel.samples if isinstance(encoder, Qwen3Asr) else CONV_STRIDE * encoder.sizes.max_positions * HOP_LENGTH
    if encoder.log_mel != LogMel(bands, WINDOW_SAMPLES, HOP_LENGTH, samples):
        raise UsageError(f"its audio becomes frames of {encoder.log_mel.window} samples, one every {encoder.log_mel.hop}, {reason}",
                         OMIT_MMPROJ_HINT)
    if encoder.sizes.activation is not gelu or encoder.root_config.raw.get("projector_hidden_act", "gelu") != "gelu":
        raise UsageError(f"its audio tower has another activation than gelu, {reason}", OMIT_MMPROJ_HINT)
    if isinstance(encoder, Qwen3Asr):
        half_chunk, window = DEFAULT_CHUNKING
        window_frames = encoder.chunk_frames * encoder.chunks_per_window
        if (encoder.chunk_frames, window_frames, encoder.min_samples) != (2 * half_chunk, window, MIN_SAMPLES):
            raise UsageError(f"its audio is encoded in chunks of {encoder.chunk_frames} frames, of which {window_frames} "
                             f"attend to each other, {reason}", OMIT_MMPROJ_HINT)


def file_tensors(store: TensorStore, kind: str) -> list[ProjectorTensor]:
    """The tensors of the file in the checkpoint's order. Raises CheckpointError for one that no such file has."""
    projector, tensors = AUDIO_PROJECTORS[PROJECTOR_TYPES[kind]], []
    for stored, info in store.tensors.items():
        if is_of_tower(stored, kind):
            tensors += _map_tensor(canonical_name(stored), info, projector, store)
    return tensors


def _map_tensor(checkpoint_name: str, info: TensorInfo, projector: Projector, store: TensorStore) -> Iterator[ProjectorTensor]:
    """The tensors of the file made from one of the checkpoint. Convolution biases get a dimension of 1 for each spatial dimension."""
    if POSITION_EMBD in projector.ignored:
        stem, _, kind = checkpoint_name.rpartition(".")
        checkpoint_name = f"{QWEN3_ASR_NAMES.get(stem, stem)}.{kind}"
    name = gguf_name(checkpoint_name, projector, store)
    if name.endswith(".bias") and name.startswith(("a.conv1d", "a.conv2d")):
        shape = (*info.shape, *(1,) * int(name[len("a.conv")]))
        yield projector_tensor(name, info, lambda values: values.reshape(shape), shape)
        return
    yield projector_tensor(name, info)
    if POSITION_EMBD in projector.ignored and checkpoint_name == "audio_tower.ln_post.weight":
        # Readers require the sinusoidal position table, which no checkpoint holds; its width is that of this norm.
        yield projector_tensor(POSITION_EMBD, info, lambda values: sinusoids(NUM_POSITIONS, len(values)), (NUM_POSITIONS, info.shape[0]))


def gguf_name(checkpoint_name: str, projector: Projector, store: TensorStore, modality: Modality = AUDIO_INPUT) -> str:
    """The name in the file of a checkpoint tensor of a modality. Raises CheckpointError for one that no such file has."""
    full_names, layer_names, outer_names = ({here: in_file for in_file, here in names.items()}
                                            for names in (projector.full_names, projector.layer_names, projector.outer_names))
    stem, _, kind = checkpoint_name.rpartition(".")
    if checkpoint_name in full_names or stem in outer_names and kind in TENSOR_KINDS:
        return full_names.get(checkpoint_name) or f"{outer_names[stem]}.{kind}"
    number, _, rest = checkpoint_name.removeprefix(projector.layers_prefix).partition(".")
    part, _, kind = rest.rpartition(".")
    layer_name = layer_names.get(part.removesuffix(".linear"), "")
    kinds = (*TENSOR_KINDS, *CLAMP_KINDS) if layer_name in projector.clamped_linears else TENSOR_KINDS
    if checkpoint_name.startswith(projector.layers_prefix) and number.isdigit() and (rest in full_names or layer_name and kind in kinds):
        return f"{projector.blocks_prefix}.{number}.{full_names.get(rest) or f'{layer_name}.{kind}'}"
    raise CheckpointError(f"{store.folder} holds tensor {checkpoint_name} of the {modality.tower}, which no mmproj file of its type has",
                          AGAIN)
