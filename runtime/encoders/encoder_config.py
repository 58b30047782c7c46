"""`EncoderConfig`: config.json of an encoder and the small files next to it, validated as `runtime/config.py` does for generative
models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ... import UsageError
from ...offload.safetensors_header import is_gguf
from ..config_reader import ConfigError, Keys, read_json, show
from . import ENCODERS, RANKS, VECTORS, WITHOUT_HEAD, model_type_of

if TYPE_CHECKING:
    from .ranking_head import RankingHead
    from .weights import Tensors

# Files in which sentence-transformers states the maximum length.
SENTENCES = tuple(f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet"))
ACTS = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu", "silu")  # of `ACTIVATIONS`, which importing would load
MOST = {"hidden_size": 1 << 16, "intermediate_size": 1 << 18, "layers": 1024, "heads": 1024, "vocab_size": 1 << 24, "positions": 1 << 20}
# Keys that do not affect inference.
HARMLESS = frozenset("""
_attn_implementation _name_or_path add_cross_attention architectures attention_dropout attention_probs_dropout_prob attn_implementation
attn_pdrop auto_map bos_token_id chunk_size_feed_forward classifier_dropout cls_token_id cross_attention_hidden_size decoder_bias
dense_seq_output deterministic_flash_attn directionality dropout dtype embd_pdrop embedding_dropout eos_token_id finetuning_task
fused_bias_fc fused_dropout_add_ln gradient_checkpointing gradient_clipping hidden_dropout_prob id2label initializer_cutoff_factor
initializer_range is_decoder label2id language last_layer_subset layer_norm_eps legacy logn_attention_clip1 mask_token_id
max_trained_positions mlp_checkpoint_lvl mlp_dropout mlp_fc1_bias mlp_fc2_bias model_max_length num_labels output_attentions
output_hidden_states output_past pad_token_id pad_vocab_size_multiple pooler_dropout pooler_fc_size pooler_num_attention_heads
pooler_num_fc_layers pooler_size_per_head pooler_type position_embedding_type pretraining_tp problem_type pruned_heads qa_dropout
qkv_proj_bias reference_compile reorder_and_upcast_attn repad_logits_with_grad resid_pdrop return_dict rotary_emb_scale_base
sbert_ce_default_activation_function scale_attn_by_inverse_layer_idx scale_attn_weights sentence_transformers sep_token_id
seq_classif_dropout sinusoidal_pos_embds sparse_pred_ignore_index sparse_prediction summary_activation summary_first_dropout
summary_last_dropout summary_proj_to_labels summary_type summary_use_proj tie_word_embeddings torch_dtype transformers_version unk_token_id
unpad_inputs use_cache use_flash_attn use_memory_efficient_attention use_return_dict use_xentropy
""".split())


@dataclass(frozen=True)
class EncoderConfig:
    """Names as in config.json. `position_rows`: size of the position table, 0 for none; the first text token has row `position_offset`, and
    with `pad_id` padding has no position. `type_rows`: size of the token type table. `thetas`: RoPE base by layer, empty for none, with
    angles divided by `slower`; `windows`: attention window to either side by layer, None for all. `relative`: buckets of the relative
    position bias. `spans`: of a relative position table, distances to each side and the end of its logarithmic part, 0 for none.
    `embedding_size`: width of the tables, 0 for hidden_size. `kv_heads`: for grouped-query attention, 0 for none. `experts`,
    `experts_per_token`: in every `experts_every`th layer. `labels`: of a ranking head, 0 for none. `tasks`: with adapters, each with its
    instruction prefix."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    context_length: int
    norm_eps: float
    hidden_act: str
    position_rows: int = 0
    position_offset: int = 0
    pad_id: int | None = None
    type_rows: int = 0
    thetas: tuple[float, ...] = ()
    slower: float = 1.0
    windows: tuple[int | None, ...] = ()
    relative: int = 0
    spans: tuple[int, int] | None = None
    embedding_size: int = 0
    kv_heads: int = 0
    experts: int = 0
    experts_per_token: int = 0
    experts_every: int = 1
    labels: int = 0
    tasks: tuple[tuple[str, str], ...] = ()
    raw: Mapping[str, object] | None = None
    warnings: tuple[str, ...] = ()
    # What a tokenizer asks of any model: none of these tokens is this kind's.
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    extra_embeddings: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def num_key_value_heads(self) -> int:
        return self.kv_heads or self.num_attention_heads

    @property
    def made_nbytes(self) -> int:
        """Of what is made of the weights once, beside them: distances as keys and as queries of each layer."""
        return 0 if self.spans is None else 16 * self.spans[0] * self.hidden_size * self.num_hidden_layers

    @property
    def ranks(self) -> bool:
        return self.labels == 1


def read_encoder_config(folder: Path, strict: bool = False) -> EncoderConfig:
    """Of a folder or a GGUF file. Raises CheckpointError, ModelNotFound, ConfigError, and with `strict` UsageError for unknown keys."""
    if is_gguf(folder):
        from .gguf_encoder import read_file_config

        return read_file_config(folder)
    raw = read_json(folder / "config.json")
    keys = Keys(raw)
    keys.text("model_type", None)
    kind, named = model_type_of(raw), raw.get("architectures") or []
    if not isinstance(named, list) or not any(str(name).endswith((*VECTORS, RANKS)) for name in named or [VECTORS[0]]):
        raise ConfigError(f"config.json: architectures is {show(named)}, expected a ...{VECTORS[0]} or a ...{RANKS}",
                          "only embedding models and rerankers are supported")
    if isinstance(raw.get("quantization_config"), dict):
        raise ConfigError("config.json: quantization_config is not supported for encoders", "use the original checkpoint")
    if kind == "bert" and raw.get("position_embedding_type") == "alibi":
        kind = "jina_bert"  # whose published configs say bert
    config = family_of(kind).config(keys)
    if any(str(name).endswith(RANKS) for name in named):
        if kind in WITHOUT_HEAD:
            raise ConfigError(f"config.json: architectures is {show(named)}: {kind} rerankers are not supported",
                              "embedding models are")
        config = replace(config, labels=_labels(raw))
    context = min([config.context_length, *_stated_lengths(folder)])
    unknown = sorted(raw.keys() - keys.accessed - HARMLESS)
    if unknown and strict:
        raise UsageError(f"config.json has keys that effllm does not know: {', '.join(map(show, unknown[:8]))}",
                         "without --strict they are ignored with a warning")
    warned = (f"config.json has keys that effllm does not know and ignores: {', '.join(map(show, unknown[:8]))}",) if unknown else ()
    return replace(config, context_length=context, raw=raw, warnings=warned)


def family_of(kind: str):
    """The module of a family."""
    return import_module(f".{ENCODERS[kind]}", __package__)


def sizes(keys: Keys, hidden: str = "hidden_size", inner: str = "intermediate_size", layers: str = "num_hidden_layers",
          heads: str = "num_attention_heads", **defaults: int) -> dict[str, int]:
    """Fields that all families state, some under other names; `defaults` by these. Raises ConfigError."""
    found = {"hidden_size": keys.integer(hidden, defaults.get("hidden_size", 768), high=MOST["hidden_size"]),
             "intermediate_size": keys.integer(inner, defaults.get("intermediate_size", 3072), high=MOST["intermediate_size"]),
             "num_hidden_layers": keys.integer(layers, defaults.get("num_hidden_layers", 12), high=MOST["layers"]),
             "num_attention_heads": keys.integer(heads, defaults.get("num_attention_heads", 12), high=MOST["heads"]),
             "vocab_size": keys.integer("vocab_size", defaults.get("vocab_size", 30522), high=MOST["vocab_size"])}
    if found["hidden_size"] % found["num_attention_heads"]:
        raise ConfigError(f"config.json: {hidden} {found['hidden_size']} is not a multiple of {heads} {found['num_attention_heads']}")
    return found


def default_theta(keys: Keys, unsaid: float) -> float:
    """Base of unscaled RoPE. Raises ConfigError."""
    theta = keys.number("rope_theta", unsaid)
    refuse(keys, rope_scaling=None)
    if (rope := keys.section("rope_parameters")) is None:
        return theta
    inner = Keys(rope, "config.json: rope_parameters")
    refuse(inner, rope_type="default", partial_rotary_factor=1.0)
    return inner.number("rope_theta", theta)


def act_of(keys: Keys, name: str, default: str = "gelu") -> str:
    """The activation. Raises ConfigError."""
    return keys.choice(name, {each: each for each in ACTS}, default)


def refuse(keys: Keys, **only: object) -> None:
    """Raises ConfigError for a key with a value that is not supported."""
    for name, value in only.items():
        if keys.has(name) and (said := keys.raw[name]) is not None and said != value:
            raise ConfigError(f"config.json: {name} = {show(said)} is not supported for {keys.raw.get('model_type')} models",
                              f"they run only with {name} = {show(value)}")


def plain_head(dense: str, act: str, last: str) -> Callable[[EncoderConfig, Tensors], RankingHead]:
    """A loader of a two-layer head with these tensor names. The loader raises CheckpointError."""

    def load_head(config: EncoderConfig, tensors: Tensors) -> RankingHead:
        import numpy as np

        from ..images.tower_ops import ACTIVATIONS
        from .ranking_head import RankingHead

        width = config.hidden_size
        return RankingHead(tensors.linear(dense, width, width), {**ACTIVATIONS, "tanh": np.tanh}[act], tensors.linear(last, 1, width))

    return load_head


def _labels(raw: Mapping[str, object]) -> int:
    """Number of labels. Raises ConfigError for a head that does not rank."""
    named, count = raw.get("id2label"), raw.get("num_labels")
    labels = len(named) if isinstance(named, dict) else count if type(count) is int else 2
    if labels != 1:
        raise ConfigError(f"config.json: a classification head with {labels} labels is not supported",
                          "rerankers have one label, such as BAAI/bge-reranker-v2-m3")
    return labels


def _stated_lengths(folder: Path) -> list[int]:
    """Limits on text length in the files next to config.json. A tokenizer without one states an absurdly large number."""
    found = []
    for name, key in (*((name, "max_seq_length") for name in SENTENCES), ("tokenizer_config.json", "model_max_length")):
        if (folder / name).is_file():
            value = read_json(folder / name).get(key)
            found += [value] if type(value) is int and 2 < value <= MOST["positions"] else []
            if found and name in SENTENCES:
                break
    return found
