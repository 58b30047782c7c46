"""`EncoderConfig`: config.json of an encoder and the small files next to it, validated as `runtime/config.py` does for other models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from ... import UsageError
from ...offload.safetensors_header import is_gguf
from ..config_reader import ConfigError, Keys, read_json, show
from . import EMBEDDING_SUFFIXES, ENCODERS, RERANKER_SUFFIX, WITHOUT_HEAD, model_type_of

if TYPE_CHECKING:
    from .ranking_head import RankingHead
    from .weights import Tensors

# Files in which sentence-transformers states the maximum length.
LENGTH_FILES = tuple(f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "xlm-roberta", "camembert", "distilbert", "mpnet"))
ACTIVATION_NAMES = ("gelu", "gelu_new", "gelu_pytorch_tanh", "quick_gelu", "relu",
                    "silu")  # keys of ACTIVATIONS, whose module is slow to import
MAX_SIZES = {"hidden_size": 1 << 16, "intermediate_size": 1 << 18, "layers": 1024, "heads": 1024, "vocab_size": 1 << 24,
             "positions": 1 << 20}
# Keys that do not affect inference.
IGNORED_KEYS = frozenset("""
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
    """Config of an encoder, with names as in config.json."""

    family: str  # name of the module in this package
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    context_length: int  # maximum tokens of a text
    norm_eps: float
    hidden_act: str
    position_rows: int = 0  # of the position table, 0 if there is none
    position_offset: int = 0  # row of the first text token in the position table
    pad_id: int | None = None  # a token that has no position and does not count for others' positions
    type_vocab_size: int = 0  # rows of the token type table, 0 if there is none
    rope_thetas: tuple[float, ...] = ()  # RoPE base by layer, empty if there is no RoPE
    rope_divisor: float = 1.0  # of RoPE angles (NTK scaling)
    windows: tuple[int | None, ...] = ()  # attention window to either side by layer, None for full attention; empty: all full
    relative_buckets: int = 0  # of a relative position bias, 0 if there is none
    # Of disentangled attention: rows of its position table to each side, and the distance where their logarithmic part ends, 0 if none is.
    disentangled_span: tuple[int, int] | None = None
    embedding_size: int = 0  # width of the embedding tables, 0 for hidden_size
    kv_heads: int = 0  # for grouped-query attention, 0 for num_attention_heads
    num_experts: int = 0
    experts_per_token: int = 0
    moe_every_n_layers: int = 1  # interval of layers with experts
    num_labels: int = 0  # of a ranking head, 0 if there is none
    tasks: tuple[tuple[str, str], ...] = ()  # (name, instruction prefix) of each task that has an adapter
    raw: Mapping[str, object] | None = None  # config.json
    warnings: tuple[str, ...] = ()
    # Read by tokenizers of any model; encoders have none of them.
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    extra_embeddings: int = 0

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_attention_heads

    @property
    def prompt_vocab_size(self) -> int:
        """A text may hold the token ids below this."""
        return self.vocab_size

    @property
    def num_key_value_heads(self) -> int:
        return self.kv_heads or self.num_attention_heads

    @property
    def distance_nbytes(self) -> int:
        """Bytes of what is computed from the weights: relative position keys and queries of each layer."""
        return 0 if self.disentangled_span is None else 16 * self.disentangled_span[0] * self.hidden_size * self.num_hidden_layers

    @property
    def ranks(self) -> bool:
        return self.num_labels == 1


def read_encoder_config(folder: Path, strict: bool = False) -> EncoderConfig:
    """Config of a folder or GGUF file.

    Raises CheckpointError, ModelNotFound, ConfigError, and with `strict` UsageError for unknown keys.
    """
    if is_gguf(folder):
        from .gguf_encoder import read_file_config

        return read_file_config(folder)
    raw = read_json(folder / "config.json")
    keys = Keys(raw)
    keys.text("model_type", None)
    model_type, architectures = model_type_of(raw), raw.get("architectures") or []
    supported = (*EMBEDDING_SUFFIXES, RERANKER_SUFFIX)
    if not isinstance(architectures, list) or architectures and not any(str(name).endswith(supported) for name in architectures):
        raise ConfigError(f"config.json: architectures is {show(architectures)}, "
                          f"expected a ...{EMBEDDING_SUFFIXES[0]} or a ...{RERANKER_SUFFIX}",
                          "only embedding models and rerankers are supported")
    if isinstance(raw.get("quantization_config"), dict):
        raise ConfigError("config.json: quantization_config is not supported for encoders", "use the original checkpoint")
    if model_type == "bert" and raw.get("position_embedding_type") == "alibi":
        model_type = "jina_bert"  # published configs state bert
    config = family_of(model_type).config(keys)
    if any(str(name).endswith(RERANKER_SUFFIX) for name in architectures):
        if model_type in WITHOUT_HEAD:
            raise ConfigError(f"config.json: architectures is {show(architectures)}: {model_type} rerankers are not supported",
                              "embedding models are")
        config = replace(config, num_labels=_num_labels(raw))
    context = min([config.context_length, *_max_lengths(folder)])
    unknown = sorted(raw.keys() - keys.accessed - IGNORED_KEYS)
    if unknown and strict:
        raise UsageError(f"config.json has keys that effllm does not know: {', '.join(map(show, unknown[:8]))}",
                         "without --strict they are ignored with a warning")
    warnings = (f"config.json has keys that effllm does not know and ignores: {', '.join(map(show, unknown[:8]))}",) if unknown else ()
    return replace(config, context_length=context, raw=raw, warnings=warnings)


def family_of(kind: str):
    """The module of a model_type."""
    return import_module(f".{ENCODERS[kind]}", __package__)


def read_sizes(keys: Keys, hidden: str = "hidden_size", intermediate: str = "intermediate_size", layers: str = "num_hidden_layers",
               heads: str = "num_attention_heads", **defaults: int) -> dict[str, int]:
    """Fields of EncoderConfig that all families state, some under other key names; `defaults` by field. Raises ConfigError."""
    sizes = {"hidden_size": keys.integer(hidden, defaults.get("hidden_size", 768), high=MAX_SIZES["hidden_size"]),
             "intermediate_size": keys.integer(intermediate, defaults.get("intermediate_size", 3072), high=MAX_SIZES["intermediate_size"]),
             "num_hidden_layers": keys.integer(layers, defaults.get("num_hidden_layers", 12), high=MAX_SIZES["layers"]),
             "num_attention_heads": keys.integer(heads, defaults.get("num_attention_heads", 12), high=MAX_SIZES["heads"]),
             "vocab_size": keys.integer("vocab_size", defaults.get("vocab_size", 30522), high=MAX_SIZES["vocab_size"])}
    if sizes["hidden_size"] % sizes["num_attention_heads"]:
        raise ConfigError(f"config.json: {hidden} {sizes['hidden_size']} is not a multiple of {heads} {sizes['num_attention_heads']}")
    return sizes


def default_theta(keys: Keys, default: float) -> float:
    """Base of unscaled RoPE. Raises ConfigError."""
    theta = keys.number("rope_theta", default)
    require_values(keys, rope_scaling=None)
    if (rope := keys.section("rope_parameters")) is None:
        return theta
    rope_keys = Keys(rope, "config.json: rope_parameters")
    require_values(rope_keys, rope_type="default", partial_rotary_factor=1.0)
    return rope_keys.number("rope_theta", theta)


def read_activation(keys: Keys, name: str, default: str = "gelu") -> str:
    """The activation. Raises ConfigError."""
    return keys.choice(name, {activation: activation for activation in ACTIVATION_NAMES}, default)


def require_values(keys: Keys, **expected: object) -> None:
    """Raises ConfigError if a key has another value than the expected one, the only one supported."""
    for name, value in expected.items():
        if keys.has(name) and (stated := keys.raw[name]) is not None and stated != value:
            raise ConfigError(f"config.json: {name} = {show(stated)} is not supported for {keys.raw.get('model_type')} models",
                              f"they run only with {name} = {show(value)}")


def two_layer_head(dense: str, activation: str, out: str) -> Callable[[EncoderConfig, Tensors], RankingHead]:
    """A `load_head` for a two-layer head, with the tensor names `dense` and `out`. It raises CheckpointError."""

    def load_head(config: EncoderConfig, tensors: Tensors) -> RankingHead:
        import numpy as np

        from ..images.tower_ops import ACTIVATIONS
        from .ranking_head import RankingHead

        width = config.hidden_size
        return RankingHead(tensors.linear(dense, width, width), {**ACTIVATIONS, "tanh": np.tanh}[activation], tensors.linear(out, 1, width))

    return load_head


def _num_labels(raw: Mapping[str, object]) -> int:
    """Number of labels of the classification head. Raises ConfigError unless it is one, as rerankers have."""
    names, count = raw.get("id2label"), raw.get("num_labels")
    num_labels = len(names) if isinstance(names, dict) else count if type(count) is int else 2
    if num_labels != 1:
        raise ConfigError(f"config.json: a classification head with {num_labels} labels is not supported",
                          "rerankers have one label, such as BAAI/bge-reranker-v2-m3")
    return num_labels


def _max_lengths(folder: Path) -> list[int]:
    """Limits on text length in the files next to config.json. Tokenizers without a limit state an absurdly large number."""
    lengths = []
    for name, key in (*((name, "max_seq_length") for name in LENGTH_FILES), ("tokenizer_config.json", "model_max_length")):
        if (folder / name).is_file():
            value = read_json(folder / name).get(key)
            if type(value) is int and 2 < value <= MAX_SIZES["positions"]:
                lengths.append(value)
            if lengths and name in LENGTH_FILES:
                break
    return lengths
