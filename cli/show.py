"""`effllm show MODEL`: what a model is, from its headers, checked as for a run."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from .flags import add_command
from .list_ import counted
from .loading import find, seeing_with, tokenizer_of
from .options import Json, Mmproj, Model
from .screen import Screen

if TYPE_CHECKING:
    from ..runtime.config import ModelConfig

UNLIMITED = "1000T"  # the headers are checked by planning a run; this command asks whether they are sound, not whether the run fits


def register(app: typer.Typer) -> None:
    add_command(app, "show", "look around", show)


def show(context: typer.Context, model: Model, mmproj: Mmproj = None, json: Json = False) -> None:
    """What a model is: shape, context, precision, licence."""
    from ..offload.size import format_size
    from ..runtime.calls.calling import Calling
    from ..runtime.config import read_config
    from ..runtime.encoders import is_encoder
    from ..runtime.engine import EngineOptions, prepare
    from ..runtime.hub import shown_licence
    from ..runtime.images.album import album_of
    from ..runtime.images.senses import PICTURES, SOUNDS, Sense
    from ..runtime.prepare import TEXT_ALONE
    from ..runtime.source import licence_of
    from ..runtime.tensors import check_tensors
    from ..runtime.tensors import parameters as count
    from ..runtime.tokens.infill import marks_of

    screen = Screen(context.obj)
    ref = find(model, screen)
    if is_encoder(ref.folder):
        from .encoder_facts import show_encoder

        show_encoder(model, ref, screen, json)
        return
    ref = seeing_with(ref, mmproj, screen)
    prepared = prepare(ref.folder, EngineOptions(device="cpu", ctx=1, ram=UNLIMITED))
    config, container, album = read_config(ref.folder), prepared.container, album_of(ref.whole, prepared.config, ref.mmproj)
    sight = None if album is None else album.sight
    groups = check_tensors(config, prepared.store, container)
    tokenizer = tokenizer_of(ref, EngineOptions())
    calls = Calling(tokenizer).style if tokenizer.template else None
    infill = marks_of(tokenizer.vocabulary(), tokenizer.special_tokens)
    licence = ref.licence or (container and container.source.get("licence")) or licence_of(ref.folder)
    parameters, tensors = count(groups), [tensor for roles in groups.values() for tensor in roles.values()]
    stored = sorted({tensor.info.dtype if tensor.spec.is_raw else str(tensor.spec) for tensor in tensors})
    windows = sorted({window for window in config.windows if window is not None})
    experts, state, latent = config.mixture, config.state, config.latent
    bits = 8 * prepared.store.nbytes / parameters if container is None else container.bits_per_weight

    def taken(sense: Sense) -> dict[str, object] | None:
        return {"placeholder": sight.placeholder, "bytes": sight.bytes_needed()} if sight is not None and album.sense is sense else None

    if json:
        screen.json({"model": model, "folder": str(ref.folder), "repo": ref.repo, "revision": ref.revision, "licence": licence,
                     "family": config.family, "parameters": parameters, "bits_per_weight": round(bits, 4),
                     "size_bytes": prepared.store.nbytes, "stored": stored,
                     "context": config.context_length, "num_hidden_layers": config.num_hidden_layers, "hidden_size": config.hidden_size,
                     "intermediate_size": config.intermediate_size, "num_attention_heads": config.num_attention_heads,
                     "num_key_value_heads": config.num_key_value_heads, "head_dim": config.head_dim,
                     "layer_heads": [list(each) for each in config.layer_heads], "layer_queries": list(config.layer_queries),
                     "layers_without_keys": sorted(set(range(len(config.kv_sources))) - set(config.attention_layers)),
                     "vocab_size": config.vocab_size,
                     "experts": None if experts is None else {"count": experts.experts, "per_token": experts.per_token,
                                                              "width": experts.width, "layers": len(experts.layers),
                                                              "shared_width": experts.shared_width},
                     "latent": None if latent is None else {"rank": latent.rank, "cached": latent.key, "key": latent.query,
                                                            "value": latent.value},
                     "chosen": None if config.indexed is None else {"tokens": config.indexed.shape.whole,
                                                                    "at_once": config.indexed.shape.grain},
                     "compressed": None if config.compressed is None else [each and each.rate for each in config.compressed.shapes],
                     "states": None if state is None else {"kind": state.title, "layers": len(config.state_layers)},
                     "windows": windows, "chat_template": tokenizer.template is not None, "thinks": tokenizer.thinks,
                     "tools": calls.format.name if calls and calls.knows_tools else None,
                     "infill": infill is not None, "pictures": taken(PICTURES), "sounds": taken(SOUNDS),
                     "warnings": [*config.warnings, *tokenizer.remarks],
                     "quantized": None if container is None else {"spec": container.spec_text, "bits_per_weight": container.bits_per_weight,
                                                                  "source": dict(container.source), "method": dict(container.method),
                                                                  "calibration": dict(container.calibration)}})
        return
    warnings = [each for each in config.warnings if not (sight and TEXT_ALONE in each)]
    for warning in (*warnings, *tokenizer.remarks):
        screen.note(warning)
    source = f"{ref.repo}@{ref.revision}" if ref.repo else ""
    screen.pairs([pair for pair in (
        ("model", f"{model}, {config.family}"),
        ("from", source),
        ("folder" if ref.folder.is_dir() else "file", str(ref.folder)),
        ("licence", shown_licence(licence, "not stated")),
        ("parameters", f"{counted(parameters)}, stored as {', '.join(stored)}, {format_size(prepared.store.nbytes)}"),
        ("quantized", "" if container is None else f"{container.spec_text}, {container.bits_per_weight:.2f} bits per weight, by "
                                                   f"{container.method.get('name', '?')} from {container.source.get('model', '?')}"),
        ("layers", f"{config.num_hidden_layers} of width {config.hidden_size}" + _inside(config)),
        ("experts", "" if experts is None else f"{experts.per_token} of {experts.experts} for a token, of width {experts.width}, in "
                                               f"{len(experts.layers)} layers"
                                               + (f", beside a shared one of {experts.shared_width}" if experts.shared_width else "")),
        ("attention", _attention(config)),
        ("" if state is None else state.title, "" if state is None else f"{len(config.state_layers)} layers, {state.described()}"),
        ("window", ", ".join(f"{window} tokens" for window in windows)),
        ("context", f"{config.context_length} tokens, {_positions(config)}"),
        ("vocabulary", f"{config.vocab_size} tokens"),
        ("chat", "has a template" + (", reasons first" if tokenizer.thinks else "") if tokenizer.template else "base model, no template"),
        ("tools", "" if calls is None else f"calls in the form of {calls.format.name}" if calls.knows_tools else "its template knows none"),
        ("pictures" if sight is None else f"{album.sense.noun}s", "" if sight is None else
         f"taken, as {sight.placeholder}; what {album.sense.does} them takes {format_size(sight.bytes_needed())}"),
        ("infill", "" if infill is None else f"has tokens for filling in the middle ({tokenizer.decode([infill.prefix], False)})"),
    ) if pair[1]])


def _positions(config: ModelConfig) -> str:
    """How a model knows where a token stands; the order of states alone says it in some that have them."""
    if config.rope is not None:
        return f"rotary positions {config.rope.kind}"
    return "no positions" if config.position_offset is None else "learned positions"


def _inside(config: ModelConfig) -> str:
    """The width inside the MLPs, if there are any."""
    return "" if len(config.without_mlp) == config.num_hidden_layers else f", feed-forward {config.intermediate_size}"


def _attention(config: ModelConfig) -> str:
    """Heads of the layers, of those that have others too, and how many have no keys and values of their own."""
    if not config.attention_layers:
        return "none"
    if config.latent is not None:
        own = config.latent
        return (f"{config.num_attention_heads} heads with keys of {own.query} and values of {own.value}, made of a latent of {own.rank}; "
                f"{own.key} numbers of a token are kept" + _chosen(config))
    queries = sorted({*config.layer_queries} or {config.num_attention_heads})
    said = f"{' or '.join(map(str, queries))} query and {config.num_key_value_heads} key-value heads of {config.head_dim}"
    usual = config.num_key_value_heads, config.head_dim
    for other in sorted({*config.layer_heads} - {usual}):
        said += f", in {config.layer_heads.count(other)} layers {other[0]} of {other[1]}"
    without = len(config.kv_sources) - len(config.attention_layers) if config.kv_sources else 0
    return said + (f"; {without} layers attend to keys and values of others" if without else "") + _chosen(config)


def _chosen(config: ModelConfig) -> str:
    """How many tokens one sees, where it chooses them."""
    if config.compressed is not None:
        rates = sorted({shape.rate for shape in config.compressed.shapes if shape is not None})
        keys = f"; beyond a window keys of {' and '.join(map(str, rates))} tokens"
        return keys if config.indexed is None else f"{keys}, of which a token chooses {config.indexed.shape.chosen} of the first"
    return "" if config.indexed is None else f"; a token sees {config.indexed.shape.whole}, which it chooses"
