"""Ollama's responses about models: /api/tags, /api/ps and /api/show. `tags_response` and `ps_response` take any number of models."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from ... import EffllmError
from .generation_options import SAMPLING
from .keep_alive import FOREVER_S
from .ollama_requests import LATEST, LEVELS, SAME
from .ollama_serializer import timestamp

if TYPE_CHECKING:
    from ...runtime.config import ModelConfig
    from ...runtime.encoders.encoder_config import EncoderConfig
    from ...runtime.engine import Engine
    from ...runtime.generation.served_model import GenerationOptions, ServedModel
    from ...runtime.tokenizer import Tokenizer
    from .generation_options import Defaults

NAME_WIDTH = 30  # of the name of a parameter
# Files that determine a model's answers; of larger ones only the size is hashed.
HASHED_PATTERNS, MAX_HASHED_NBYTES = ("*.json", "*.jinja", "1_Pooling/*.json"), 1 << 20


@dataclass(frozen=True)
class ModelEntry:
    """A model in lists."""

    name: str
    family: str
    parameters: int
    stored: str  # the format of most of its weights
    nbytes: int
    digest: str
    changed: float  # modification time of its files, seconds since 1970
    is_gguf: bool = False

    @property
    def tagged(self) -> str:
        """The name with a tag, which every model has at Ollama."""
        return self.name if ":" in self.name else self.name + LATEST

    @property
    def details(self) -> dict[str, object]:
        size = f"{self.parameters / 1e9:.1f}B" if self.parameters >= 1e9 else f"{self.parameters / 1e6:.1f}M"
        return {"parent_model": "", "format": "gguf" if self.is_gguf else "safetensors", "family": self.family, "families": [self.family],
                "parameter_size": size, "quantization_level": self.stored}


@dataclass(frozen=True)
class RunningModel:
    """A loaded model."""

    model: ModelEntry
    nbytes: int  # in memory and on the GPU
    vram: int  # bytes on the GPU alone
    context: int  # tokens
    expires_at: float  # seconds since 1970


def engine_entry(name: str, engine: Engine) -> ModelEntry:
    """The list entry of an engine's model. Reads its headers again."""
    from ...runtime.tensors import parameters

    prepared, tensors, formats = engine.prepared, engine.model.tensors, Counter()
    for roles in tensors.values():
        for tensor in roles.values():
            formats[tensor.info.dtype if tensor.spec.is_raw else str(tensor.spec)] += prod(tensor.shape)
    stored = max(formats, key=formats.__getitem__)
    if prepared.folder.is_file() and prepared.container is not None:  # a GGUF file's blocks, as every program calls them
        stored = prepared.container.spec_text.partition(",")[0]
    return ModelEntry(name, engine.config.family, parameters(tensors), stored, prepared.store.nbytes,
                      *digest_and_mtime(name, prepared.folder),
                      prepared.folder.is_file())


def encoder_entry(name: str, folder: Path) -> ModelEntry:
    """The list entry of an encoder, from its headers. Raises EffllmError."""
    from ...runtime.library.local_model import local_model

    facts = local_model(name, folder)
    return ModelEntry(name, facts.family, facts.params, f"{facts.bits:.4g}bit", facts.size_bytes, digest_of(folder), folder.stat().st_mtime,
                      folder.is_file())


def digest_and_mtime(name: str, folder: Path, variant: str = "") -> tuple[str, float]:
    """A digest of a model and its modification time. A model may still be loaded when its files are broken or gone, and must not break the
    list: its digest is then that of its name."""
    try:
        return digest_of(folder, variant), folder.stat().st_mtime
    except (EffllmError, OSError):
        return hashlib.sha256(name.encode()).hexdigest(), 0.0


def digest_of(folder: Path, variant: str = "") -> str:
    """A digest of everything that determines a model's answers: weights, the small files beside them (template, settings, pooling), the
    format quantized to on load. Clients take equal digests for the same model. Raises EffllmError, OSError."""
    from ...runtime.kv.kv_profile_file import identity_of

    digest = hashlib.sha256(f"{identity_of(folder)} {variant}".encode())
    files = [folder] if folder.is_file() else sorted(each for pattern in HASHED_PATTERNS for each in folder.glob(pattern))
    for path in files:
        nbytes = path.stat().st_size
        digest.update(f"{path.name} {nbytes}".encode())
        digest.update(path.read_bytes() if nbytes <= MAX_HASHED_NBYTES else b"")
    return digest.hexdigest()


def running_model(model: ModelEntry, engine: Engine, now: float) -> RunningModel:
    """The model of an engine, which never expires."""
    placement = engine.placement
    return RunningModel(model, placement.total_bytes + placement.vram_bytes, placement.vram_bytes, engine.n_ctx, now + FOREVER_S)


def tags_response(models: Iterable[ModelEntry]) -> dict[str, object]:
    """The response of /api/tags."""
    return {"models": [{**_card(model), "modified_at": timestamp(model.changed)} for model in models]}


def ps_response(models: Iterable[RunningModel]) -> dict[str, object]:
    """The response of /api/ps."""
    return {"models": [{**_card(each.model), "size": each.nbytes, "size_vram": each.vram, "context_length": each.context,
                        "expires_at": timestamp(each.expires_at)} for each in models]}


def _card(model: ModelEntry) -> dict[str, object]:
    return {"name": model.tagged, "model": model.tagged, "size": model.nbytes, "digest": model.digest, "details": model.details}


@dataclass(frozen=True)
class ModelFiles:
    """What a model's files state, with the context that it is served with, or would be."""

    folder: Path
    config: ModelConfig | EncoderConfig
    tokenizer: Tokenizer
    context: int
    licence: object = None  # as recorded when it was quantized
    has_vision: bool = False
    hears: bool = False


def files_of_engine(served: ServedModel) -> ModelFiles:
    prepared = served.engine.prepared
    licence = prepared.container and prepared.container.licence
    return ModelFiles(prepared.folder, served.engine.config, served.tokenizer, served.engine.n_ctx, licence, served.accepts_images,
                      served.accepts_audio)


def files_of_folder(folder: Path, context: int | None) -> ModelFiles:
    """What the files of a model that is not loaded state. `context`: None for its own. Raises EffllmError."""
    from ...runtime.config import read_config
    from ...runtime.encoders import is_encoder
    from ...runtime.encoders.encoder import tokenizer_of
    from ...runtime.encoders.encoder_config import read_encoder_config
    from ...runtime.images.media import open_media
    from ...runtime.images.modality import AUDIO_INPUT, IMAGE_INPUT
    from ...runtime.stores.container import read_container
    from ...runtime.tokenizer import Tokenizer

    if is_encoder(folder):
        config = read_encoder_config(folder)
        return ModelFiles(folder, config, tokenizer_of(folder, config), context or config.context_length)
    config, container = read_config(folder), None if folder.is_file() else read_container(folder)
    licence = container and container.licence
    media = open_media(folder, config)
    encoders = media.encoders if media is not None else {}
    return ModelFiles(folder, config, Tokenizer.load(folder, config), context or config.context_length, licence, IMAGE_INPUT in encoders,
                      AUDIO_INPUT in encoders)


def show_response(model: ModelEntry, files: ModelFiles, defaults: Defaults | None = None) -> dict[str, object]:
    """The response of /api/show. The context is the served one, by which clients truncate prompts. `defaults`: the default options of
    answers, if known."""
    from ...runtime.source import licence_of

    config, template = files.config, files.tokenizer.template
    shape = {"context_length": files.context, "embedding_length": config.hidden_size, "block_count": config.num_hidden_layers,
             "feed_forward_length": config.intermediate_size, "attention.head_count": config.num_attention_heads,
             "attention.head_count_kv": config.num_key_value_heads, "vocab_size": config.vocab_size}
    kind = config.family
    texts = {"license": files.licence or licence_of(files.folder), "system": defaults and defaults.system,
             "template": template and template.source}
    return {**{key: value for key, value in texts.items() if value}, "parameters": _parameters(files.context,
                                                                                               defaults and defaults.options),
            "details": model.details, "modified_at": timestamp(model.changed), "capabilities": capabilities(files),
            **thinking(files.tokenizer),
            "model_info": {"general.architecture": kind, "general.basename": Path(model.name).name,
                           "general.parameter_count": model.parameters, **{f"{kind}.{key}": value for key, value in shape.items()}}}


def _parameters(context: int, options: GenerationOptions | None) -> str:
    """Default options, one per line; clients read context and stop strings from there."""
    values = {"num_ctx": context}
    if options is not None:
        values["num_predict"] = options.max_tokens
        values |= {option: getattr(options.settings, SAMPLING[option]) for option in SAME if option in SAMPLING}
    stops = options.stops if options else ()
    lines = [(key, value) for key, value in values.items() if value is not None] + [("stop", json.dumps(stop)) for stop in stops]
    return "\n".join(f"{key:<{NAME_WIDTH}}{value}" for key, value in lines)


def thinking(tokenizer: Tokenizer) -> dict[str, object]:
    """The values of `think` for a reasoning model: false and true, or levels for gpt-oss, which always reasons."""
    if not tokenizer.thinks:
        return {}
    values, default = (LEVELS[:3], "medium") if tokenizer.channels else ((False, True), True)
    return {"thinking": {"values": [*values], "default": default}}


def template_takes_tools(tokenizer: Tokenizer) -> bool:
    """Whether a model's chat template describes tools to it, by rendering one."""
    from ...runtime.tool_calls.tool_calling import ToolCalling

    return tokenizer.template is not None and ToolCalling(tokenizer).style.knows_tools


def capabilities(files: ModelFiles) -> list[str]:
    """What a model can do, by Ollama's names. Tools are listed if its template supports them, though any model can be given tools."""
    from ...runtime.encoders.encoder_config import EncoderConfig

    if isinstance(files.config, EncoderConfig):
        return ["rerank" if files.config.ranks else "embedding"]
    folder, tokenizer = files.folder, files.tokenizer
    from ...runtime.generation.embedding import read_pooling_mode
    from ...runtime.tokens.infill import find_fim_tokens

    try:
        read_pooling_mode(folder)
        embeds = True
    except EffllmError:
        embeds = False
    has_infill = find_fim_tokens(tokenizer.vocabulary(), tokenizer.special_tokens) is not None
    return ["completion", *(["tools"] if template_takes_tools(tokenizer) else []), *(["insert"] if has_infill else []),
            *(["thinking"] if tokenizer.thinks else []), *(["embedding"] if embeds else []), *(["vision"] if files.has_vision else []),
            *(["audio"] if files.hears else [])]
