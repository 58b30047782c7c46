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

# Model type -> type of its projector's file.
PROJECTOR_TYPES: Mapping[str, str] = {"audioflamingo3": "musicflamingo", "qwen2_audio": "qwen2a", "qwen3_asr": "qwen3a",
                                      "voxtral": "voxtral"}
WINDOW_SAMPLES = 400  # samples of a frame
DEFAULT_CHUNKING = 50, 800  # frames of half a piece, and of those that see each other: of all such models
NUM_POSITIONS = 1500  # places that files have of those that follow from their number
QWEN3_ASR_NAMES = {"multi_modal_projector.linear_1": "audio_tower.proj1", "multi_modal_projector.linear_2": "audio_tower.proj2"}
OMIT_MMPROJ_HINT = "leave out --mmproj"


def metadata(sight: WhisperTower | Qwen3Asr, name: str, kind: str) -> dict[str, Value]:
    """The keys of the file of a model of this type. Raises UsageError for what such a file does not say."""
    sizes = sight.sizes
    _check_defaults(sight)
    stated: dict[str, Value] = {
        "embedding_length": sizes.width, "feed_forward_length": sizes.ffn_width, "block_count": sizes.layers, "attention.head_count":
        sizes.heads, "projection_dim": sight.config.hidden_size, "attention.layer_norm_epsilon": EPS, "num_mel_bins": sizes.bands}
    if isinstance(sight, Voxtral):
        stated["projector.stack_factor"] = sight.stacked_rows
    return {"general.architecture": CLIP, "general.name": name, "general.type": "mmproj", "general.file_type": 1,
            f"{CLIP}.has_audio_encoder": True, f"{CLIP}.projector_type": PROJECTOR_TYPES[kind], **{f"{CLIP}.audio.{key}": value
                                                                                        for key, value in stated.items()}}


def _check_defaults(sight: WhisperTower | Qwen3Asr) -> None:
    said, bands = "which such a file does not say", sight.sizes.bands
    samples = sight.log_mel.samples if isinstance(sight, Qwen3Asr) else CONV_STRIDE * sight.sizes.max_positions * HOP_LENGTH
    if sight.log_mel != LogMel(bands, WINDOW_SAMPLES, HOP_LENGTH, samples):
        raise UsageError(f"its audio becomes frames of {sight.log_mel.window} samples, one every {sight.log_mel.hop}, {said}",
                         OMIT_MMPROJ_HINT)
    if sight.sizes.activation is not gelu or sight.root_config.raw.get("projector_hidden_act", "gelu") != "gelu":
        raise UsageError(f"its audio tower has another activation than gelu, {said}", OMIT_MMPROJ_HINT)
    if isinstance(sight, Qwen3Asr):
        half, together = DEFAULT_CHUNKING
        if (sight.chunk_frames, sight.chunk_frames * sight.chunks_per_window, sight.min_samples) != (2 * half, together, MIN_SAMPLES):
            raise UsageError(f"its audio is encoded in chunks of {sight.chunk_frames} frames, of which "
                             f"{sight.chunk_frames * sight.chunks_per_window} attend to each other, {said}", OMIT_MMPROJ_HINT)


def file_tensors(store: TensorStore, kind: str) -> list[ProjectorTensor]:
    """The tensors of the file, in the checkpoint's order. Raises CheckpointError for one that no such file has."""
    projector, found = AUDIO_PROJECTORS[PROJECTOR_TYPES[kind]], []
    for stored, info in store.tensors.items():
        if is_of_tower(stored, kind):
            found += _map_tensor(canonical_name(stored), info, projector, store)
    return found


def _map_tensor(own: str, info: TensorInfo, projector: Projector, store: TensorStore) -> Iterator[ProjectorTensor]:
    """Biases of convolutions have a dimension for each over which they go."""
    if POSITION_EMBD in projector.ignored:
        stem, _, kind = own.rpartition(".")
        own = f"{QWEN3_ASR_NAMES.get(stem, stem)}.{kind}"
    name = gguf_name(own, projector, store)
    if name.endswith(".bias") and name.startswith(("a.conv1d", "a.conv2d")):
        shape = (*info.shape, *(1,) * int(name[len("a.conv")]))
        yield projector_tensor(name, info, lambda values: values.reshape(shape), shape)
        return
    yield projector_tensor(name, info)
    if POSITION_EMBD in projector.ignored and own == "audio_tower.ln_post.weight":  # as wide as the places that readers want to have
        yield projector_tensor(POSITION_EMBD, info, lambda values: sinusoids(NUM_POSITIONS, len(values)), (NUM_POSITIONS, info.shape[0]))


def gguf_name(own: str, projector: Projector, store: TensorStore, modality: Modality = AUDIO_INPUT) -> str:
    """What a tensor of that sense is called in the file. Raises CheckpointError for one that no such file has."""
    whole, inside, outer = ({ours: theirs for theirs, ours in names.items()}
                            for names in (projector.full_names, projector.layer_names, projector.outer_names))
    stem, _, kind = own.rpartition(".")
    if own in whole or stem in outer and kind in TENSOR_KINDS:
        return whole.get(own) or f"{outer[stem]}.{kind}"
    number, _, rest = own.removeprefix(projector.layers_prefix).partition(".")
    part, _, kind = rest.rpartition(".")
    named = inside.get(part.removesuffix(".linear"), "")
    kinds = (*TENSOR_KINDS, *CLAMP_KINDS) if named in projector.clamped_linears else TENSOR_KINDS
    if own.startswith(projector.layers_prefix) and number.isdigit() and (rest in whole or named and kind in kinds):
        return f"{projector.blocks_prefix}.{number}.{whole.get(rest) or f'{named}.{kind}'}"
    raise CheckpointError(f"{store.folder} holds tensor {own} of the {modality.tower}, which no mmproj file of its type has", AGAIN)
