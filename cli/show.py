"""`effllm show MODEL`: facts about a model, from its headers, with the checks of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from .. import EffllmError, typed
from .flags import add_command, flag
from .list_ import format_parameters
from .loading import find_model, tokenizer_of, with_mmproj
from .options import OUTPUT, Json, Mmproj, Model
from .screen import Screen

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..runtime.catalog import ModelRef
    from ..runtime.config import ModelConfig
    from ..runtime.images import MediaEncoder
    from ..runtime.images.media import MediaCache
    from ..runtime.images.modality import Modality
    from ..runtime.stores.container import Container
    from ..runtime.tokenizer import Tokenizer
    from ..runtime.tokens.infill import FimTokens
    from ..runtime.tool_calls.call_style import CallStyle

UNLIMITED_RAM = "1000T"  # the headers are checked by planning a run, and whether it fits does not matter here

Template = Annotated[bool, flag(OUTPUT, "--template", "", "print the model's chat template, and nothing else")]


def register(app: typer.Typer) -> None:
    add_command(app, "show", "inspect", show)


@dataclass(frozen=True)
class ModelInfo:
    """What is shown of a model."""

    name: str
    ref: ModelRef
    config: ModelConfig
    container: Container | None  # how effllm quantized it, None if it did not
    media: MediaCache | None  # its image and audio encoders
    tokenizer: Tokenizer
    calls: CallStyle | None  # tool calls of its template
    infill: FimTokens | None
    licence: str | None
    parameters: int  # counted from headers
    nbytes: int  # of its weights
    stored: list[str]  # types and formats of its tensors

    @property
    def encoders(self) -> Mapping[Modality, MediaEncoder]:
        return {} if self.media is None else self.media.encoders

    @property
    def windows(self) -> list[int]:
        return sorted({window for window in self.config.windows if window is not None})

    @property
    def bits(self) -> float:
        """Bits per weight."""
        return 8 * self.nbytes / self.parameters if self.container is None else self.container.bits_per_weight


def show(context: typer.Context, model: Model, mmproj: Mmproj = None, template: Template = False, json: Json = False) -> None:
    """Show what a model is: shape, context, precision, licence."""
    from ..runtime.encoders import is_encoder

    screen = Screen(context.obj)
    ref = find_model(model, screen)
    if is_encoder(ref.folder):
        from .encoder_info import show_encoder

        if template:
            raise EffllmError(f"{model} generates no text, so it has no chat template", f"effllm show {typed(model)}")
        show_encoder(model, ref, screen, json)
        return
    if template:
        _print_template(model, ref, screen, json)
        return
    info = _read_info(model, with_mmproj(ref, mmproj, screen))
    if json:
        screen.json(_to_json(info))
    else:
        _print_info(info, screen)


def _print_template(name: str, ref: ModelRef, screen: Screen, json: bool) -> None:
    """Print the source of the chat template."""
    from ..runtime.engine import EngineOptions

    template = tokenizer_of(ref, EngineOptions()).template
    if template is None:
        raise EffllmError(f"{name} is a base model, without a chat template", f'effllm run {typed(name)} "your text" --raw continues it')
    if json:
        screen.json({"template": template.source})
    else:
        screen.environment.write(template.source.rstrip("\n") + "\n")


def _read_info(name: str, ref: ModelRef) -> ModelInfo:
    """Read the facts from the headers. Raises what a run of the model would raise for them."""
    from ..runtime.config import read_config
    from ..runtime.engine import EngineOptions, prepare
    from ..runtime.images.media import open_media
    from ..runtime.source import licence_of
    from ..runtime.tensors import check_tensors, parameters
    from ..runtime.tokens.infill import find_fim_tokens
    from ..runtime.tool_calls.tool_calling import ToolCalling

    prepared = prepare(ref.folder, EngineOptions(device="cpu", ctx=1, ram=UNLIMITED_RAM))
    config, container = read_config(ref.folder), prepared.container
    groups = check_tensors(config, prepared.store, container)
    tensors = [tensor for roles in groups.values() for tensor in roles.values()]
    tokenizer = tokenizer_of(ref, EngineOptions())
    return ModelInfo(name, ref, config, container, open_media(ref.whole, prepared.config, ref.mmproj), tokenizer,
                     ToolCalling(tokenizer).style if tokenizer.template else None,
                     find_fim_tokens(tokenizer.vocabulary(), tokenizer.special_tokens),
                     ref.licence or (container and container.licence) or licence_of(ref.folder), parameters(groups),
                     prepared.store.nbytes, sorted({tensor.info.dtype if tensor.spec.is_raw else str(tensor.spec) for tensor in tensors}))


def _to_json(info: ModelInfo) -> dict[str, object]:
    from ..runtime.images.modality import AUDIO_INPUT, IMAGE_INPUT

    config, container, ref, calls = info.config, info.container, info.ref, info.calls

    def encoder_json(modality: Modality) -> dict[str, object] | None:
        if (encoder := info.encoders.get(modality)) is None:
            return None
        return {"placeholder": encoder.placeholder, "bytes": encoder.bytes_needed()}

    return {"model": info.name, "folder": str(ref.folder), "repo": ref.repo, "revision": ref.revision, "licence": info.licence,
            "family": config.family, "parameters": info.parameters, "bits_per_weight": round(info.bits, 4), "size_bytes": info.nbytes,
            "stored": info.stored, **_shape_to_json(config), "windows": info.windows,
            "chat_template": info.tokenizer.template is not None, "reasoning": info.tokenizer.thinks,
            "tools": calls.format.name if calls and calls.knows_tools else None,
            "infill": info.infill is not None, "images": encoder_json(IMAGE_INPUT), "audio": encoder_json(AUDIO_INPUT),
            "warnings": [*config.warnings, *info.tokenizer.warnings],
            "quantized": None if container is None else {"spec": container.spec_text, "bits_per_weight": container.bits_per_weight,
                                                         "source": dict(container.source), "method": dict(container.method),
                                                         "calibration": dict(container.calibration)}}


def _shape_to_json(config: ModelConfig) -> dict[str, object]:
    """The architecture from the config, for --json."""
    experts, state, latent = config.moe, config.recurrent, config.mla
    return {"context": config.context_length, "num_hidden_layers": config.num_hidden_layers, "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size, "num_attention_heads": config.num_attention_heads,
            "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim,
            "layer_heads": [list(each) for each in config.layer_kv_heads], "layer_queries": list(config.layer_query_heads),
            "kv_shared_layers": sorted(set(range(len(config.kv_sources))) - set(config.attention_layers)),
            "vocab_size": config.vocab_size,
            "experts": None if experts is None else {"count": experts.num_experts, "per_token": experts.experts_per_token,
                                                     "width": experts.expert_dim,
                                                     "layers": len(experts.layers), "shared_width": experts.shared_expert_dim,
                                                     "zero_experts": experts.zero_experts},
            "latent_attention": None if latent is None else {"rank": latent.rank, "cached": latent.key, "key": latent.query,
                                                                     "value": latent.value},
            "sparse_attention": None if config.indexer is None else {"tokens": config.indexer.shape.dense_tokens,
                                                                     "block_size": config.indexer.shape.unit_tokens},
            "compressed_attention": None if config.compressed_attention is None
            else [each and each.tokens_per_key for each in config.compressed_attention.shapes],
            "recurrent_state": None if state is None else {"kind": state.title, "layers": len(config.recurrent_layers)}}


def _print_info(info: ModelInfo, screen: Screen) -> None:
    from ..offload.size import format_size
    from ..runtime.hub import shown_licence
    from ..runtime.prepare import TEXT_ONLY_WARNING

    config, container, ref, tokenizer = info.config, info.container, info.ref, info.tokenizer
    calls, infill, state = info.calls, info.infill, config.recurrent
    for warning in (*(each for each in config.warnings if not (info.encoders and TEXT_ONLY_WARNING in each)), *tokenizer.warnings):
        screen.note(warning)
    screen.pairs([pair for pair in (
        ("model", f"{info.name}, {config.family}"),
        ("from", f"{ref.repo}@{ref.revision}" if ref.repo else ""),
        ("folder" if ref.folder.is_dir() else "file", str(ref.folder)),
        ("licence", shown_licence(info.licence, "not stated")),
        ("parameters", f"{format_parameters(info.parameters)}, stored as {_stored(info)}, {format_size(info.nbytes)}"),
        ("quantized", "" if container is None else f"{container.spec_text}, {container.bits_per_weight:.2f} bits per weight, by "
                                                   f"{container.method.get('name', '?')} from {container.source.get('model', '?')}"),
        ("layers", f"{config.num_hidden_layers} of width {config.hidden_size}" + _intermediate_size(config)),
        ("experts", _experts(config)),
        ("attention", _attention(config)),
        ("" if state is None else state.title, "" if state is None else f"{len(config.recurrent_layers)} layers, {state.described()}"),
        ("window", ", ".join(f"{window} tokens" for window in info.windows)),
        ("context", f"{config.context_length} tokens, {_positions(config)}"),
        ("vocabulary", f"{config.vocab_size} tokens"),
        ("chat", "has a template" + (", reasons first" if tokenizer.thinks else "") if tokenizer.template else "base model, no template"),
        ("tools", "" if calls is None else f"calls in the format of {calls.format.name}" if calls.knows_tools else "not in the template"),
        *((modality.plural, f"supported, as {encoder.placeholder}; the {modality.tower} takes {format_size(encoder.bytes_needed())}")
          for modality, encoder in info.encoders.items()),
        ("infill", "" if infill is None else f"supported ({tokenizer.decode([infill.prefix], False)})"),
    ) if pair[1]])


def _stored(info: ModelInfo) -> str:
    """The types of the tensors, those of a GGUF file as it calls them itself."""
    if info.container is None or info.ref.folder.is_dir():
        return ", ".join(info.stored)
    return ", ".join((*(kind for kind in info.stored if ":" not in kind), info.container.spec_text))


def _experts(config: ModelConfig) -> str:
    experts = config.moe
    if experts is None:
        return ""
    text = f"{experts.experts_per_token} of {experts.num_experts} per token, of width {experts.expert_dim}, in {len(experts.layers)} layers"
    text += f", with {experts.zero_experts} identity experts" if experts.zero_experts else ""
    text += f", plus a shared one of width {experts.shared_expert_dim}" if experts.shared_expert_dim else ""
    return text + (f"; as many of width {experts.vision_expert_dim} for image tokens" if experts.vision_expert_dim else "")


def _positions(config: ModelConfig) -> str:
    """The position encoding; state-space layers may have none."""
    if config.rope is not None:
        return f"RoPE, {'unscaled' if config.rope.kind == 'default' else config.rope.kind}"
    return "no positions" if config.position_offset is None else "learned positions"


def _intermediate_size(config: ModelConfig) -> str:
    """The intermediate size of the MLPs, if any."""
    return "" if len(config.layers_without_mlp) == config.num_hidden_layers else f", feed-forward {config.intermediate_size}"


def _attention(config: ModelConfig) -> str:
    """Attention heads, also of layers that differ, and how many share the keys and values of others."""
    if not config.attention_layers:
        return "none"
    if config.mla is not None:
        mla = config.mla
        return (f"{config.num_attention_heads} heads with keys of {mla.query} and values of {mla.value}, from a latent of {mla.rank}; "
                f"{mla.key} values cached per token" + _sparse_attention(config))
    queries = sorted({*config.layer_query_heads} or {config.num_attention_heads})
    text = f"{' or '.join(map(str, queries))} query and {config.num_key_value_heads} key-value heads of {config.head_dim}"
    default_heads = config.num_key_value_heads, config.head_dim
    for other in sorted({*config.layer_kv_heads} - {default_heads}):
        text += f", in {config.layer_kv_heads.count(other)} layers {other[0]} of {other[1]}"
    shared = len(config.kv_sources) - len(config.attention_layers) if config.kv_sources else 0
    return text + (f"; {shared} layers share the KV cache of others" if shared else "") + _sparse_attention(config)


def _sparse_attention(config: ModelConfig) -> str:
    """The number of tokens that sparse attention selects."""
    if config.compressed_attention is not None:
        rates = sorted({shape.tokens_per_key for shape in config.compressed_attention.shapes if shape is not None})
        keys = f"; beyond a window, keys compressed over {' and '.join(map(str, rates))} tokens"
        return keys if config.indexer is None else f"{keys}, each token attending to the top {config.indexer.shape.top_k} of the first"
    return "" if config.indexer is None else f"; each token attends to the top {config.indexer.shape.dense_tokens}"
