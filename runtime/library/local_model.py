"""Facts about one local model, read from its headers: a line of `effllm list`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ... import EffllmError
from ...offload.safetensors_header import is_gguf
from .. import hub
from ..files.bounded_read import MAX_JSON_NBYTES, read_bounded
from ..gguf.projector_lookup import sibling_projectors
from ..speculation.draft_types import DraftShape, draft_in
from .listing_cache import ListingCache, ModelFacts
from .weight_count import count_weights, weights

if TYPE_CHECKING:
    from ..config import ModelConfig
    from ..encoders.encoder_config import EncoderConfig


@dataclass(frozen=True)
class LocalModel:
    """A line of `effllm list`."""

    name: str  # as typed
    family: str
    folder: Path  # or the GGUF file
    size_bytes: int
    params: int
    source: str  # "effllm", "folder", "hub cache" or the display name of another program
    licence: str | None
    bits: float = 0.0  # stored per weight
    context: int = 0
    revision: str | None = None
    has_template: bool = False
    mmproj: Path | None = None  # projector file of a GGUF model
    takes: tuple[str, ...] = ()  # inputs other than text: "image", "audio"
    writes: bool = True  # generates text, not only vectors or rankings


def local_model(name: str, folder: Path, source: str = "folder", licence: str | None = None, revision: str | None = None,
                cache: ListingCache | None = None) -> LocalModel | None:
    """Of a folder or a GGUF file; None for what cannot run here. `before`: what was seen of it when it was listed last."""
    if is_gguf(folder):
        said = name, folder, source, licence, revision
        return _local_file(*said) if cache is None else _cached_file(cache, *said)
    try:
        return read_folder(name, folder, source, licence, revision, cache)
    except EffllmError:
        return None


def read_folder(name: str, folder: Path, source: str, licence: str | None, revision: str | None = None,
                cache: ListingCache | None = None) -> LocalModel:
    """Of a folder. Raises EffllmError, which says why, for what cannot run here."""
    from ...offload.checkpoint import TensorStore
    from ...offload.torch_checkpoint import open_folder
    from ..config import read_config
    from ..encoders import is_encoder
    from ..encoders.encoder_config import read_encoder_config
    from ..stores.container import read_container

    draft = draft_in(folder)
    config, container = draft or (read_encoder_config if is_encoder(folder) else read_config)(folder), read_container(folder)
    with (TensorStore.open if draft is None else open_folder)(folder) as store:
        elements = count_weights(folder, store) if container is None else sum(weights(*each) for each in container.tensors.items())
        source_info = container.source if container else {}
        return LocalModel(name, config.family, folder, store.nbytes, elements, source, licence or _text(source_info.get("licence")),
                          container.bits_per_weight if container else 8 * store.nbytes / max(1, elements), config.context_length,
                          revision or _text(source_info.get("revision")), has_template(folder),
                          takes=_cached_input_modalities(folder, config, cache), writes=_generates_text(config))


def model_from_facts(facts: ModelFacts, name: str, file: Path, source: str, licence: str | None, revision: str | None, has_template: bool,
          projector: Path | None) -> LocalModel:
    """The `LocalModel` of a file whose facts are known."""
    return LocalModel(name, facts.family, file, facts.size_bytes, facts.params, source, licence or facts.licence, facts.bits, facts.context,
                      revision, has_template, projector, tuple(facts.takes), facts.writes)


def facts_of(file: Path, projector: Path | None) -> ModelFacts | None:
    """Of a GGUF file; None for what cannot run here."""
    model = _local_file("", file, "", None, None, projector)
    return None if model is None else ModelFacts(model.family, model.size_bytes, model.params, model.licence, float(model.bits),
                                                 model.context,
                                            model.has_template, list(model.takes), model.writes)


def _cached_file(cache: ListingCache, name: str, path: Path, source: str, licence: str | None,
                    revision: str | None) -> LocalModel | None:
    """`_local_file` of a file whose vocabulary is read once, and again where the file, or what it sees with, is another."""
    projectors = sibling_projectors(path)
    projector = projectors[0] if len(projectors) == 1 else None
    facts = cache.of(path, projector, facts_of)
    return None if facts is None else model_from_facts(facts, name, path, source, licence, revision, facts.has_template, projector)


def _local_file(name: str, path: Path, source: str, licence: str | None, revision: str | None,
               projector: Path | None = None) -> LocalModel | None:
    """Of a GGUF file with its projector, or that which lies beside it; None for what cannot run here."""
    from ..encoders import is_encoder
    from ..encoders.encoder_config import read_encoder_config
    from ..gguf.folder_files import stated_licence
    from ..gguf.store import open_gguf_store, read_gguf_config, read_header

    try:
        if is_encoder(path):
            config, header = read_encoder_config(path), read_header(path)
        else:
            config, header = read_gguf_config(path), read_header(path)
            open_gguf_store(path, low_bit=True).close()  # judges the names and types of its tensors
    except EffllmError:
        return None
    projectors = [projector] if projector is not None else sibling_projectors(path)
    nbytes = sum(tensor.nbytes for tensor in header.tensors.values())
    elements = sum(prod(tensor.shape) for tensor in header.tensors.values())
    return LocalModel(name, config.family, path, nbytes, elements, source, licence or stated_licence(header), 8 * nbytes / elements,
                      config.context_length, revision, "tokenizer.chat_template" in header.metadata,
                      projectors[0] if len(projectors) == 1 else None,
                      _input_modalities(path, config, projectors) if projectors or header.sees else (), _generates_text(config))


def _cached_input_modalities(folder: Path, config: ModelConfig | EncoderConfig | DraftShape,
                             cache: ListingCache | None) -> tuple[str, ...]:
    """`_input_modalities` of a folder, cached because reading its encoders imports NumPy."""
    if cache is None or not _may_have_encoders(folder):
        return _input_modalities(folder, config)
    return cache.taken(folder, lambda: _input_modalities(folder, config))


def _may_have_encoders(folder: Path) -> bool:
    from ..images import AUDIO_ENCODERS, VISION_ENCODERS, model_type_of

    return model_type_of(folder) in VISION_ENCODERS.keys() | AUDIO_ENCODERS.keys()


def _input_modalities(model: Path, config: ModelConfig | EncoderConfig | DraftShape, projectors: Sequence[Path] = ()) -> tuple[str, ...]:
    """What a model takes beside text. Heads of towers are read of those alone that may have one."""
    if model.is_dir() and not _may_have_encoders(model):
        return ()
    from ..images.media import open_media

    try:
        media = open_media(model, config, str(projectors[0]) if len(projectors) == 1 else None)
    except EffllmError:  # of another model, or of a type that is not read: text works
        return ()
    return () if media is None else tuple(modality.part for modality in media.encoders)


def _generates_text(config: EncoderConfig | ModelConfig | DraftShape) -> bool:
    from ..config import ModelConfig

    return isinstance(config, ModelConfig) and config.is_generative


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def has_template(folder: Path) -> bool:
    """Whether a chat template lies there, in a file of its own or in the tokenizer's config."""
    if (folder / "chat_template.jinja").is_file() or (folder / "chat_template.json").is_file():
        return True
    if (folder / hub.RANKS[0]).is_file() and not (folder / "tokenizer.json").exists():  # of which the version has one
        return True
    try:
        return b'"chat_template"' in read_bounded(folder / "tokenizer_config.json", MAX_JSON_NBYTES)
    except OSError:
        return False
