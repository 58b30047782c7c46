"""What of a model's config the pages of a saved session depend on, as a digest.

The digest is over field names and values, in the form that they had when sessions were first saved: a field that was renamed counts under
its first name, and one that was added later only where it is not at its default. So sessions saved by earlier versions still match, except
of models whose indexer has keys of several tokens (GLM 5.3, Qwen 4). A new field needs nothing here; a renamed one needs an entry in
`renamed`.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass

from ..config import ModelConfig

NOT_IN_PAGES = {"warnings", "ropes", "bos_token_id", "eos_token_ids", "max_position_embeddings", "mtp_layers"}  # change no page's bytes


@dataclass(frozen=True)
class FirstForm:
    """How a dataclass was first written. `name`: its own, empty if that has not changed. `renamed`: field -> its first name. `original`:
    fields that count even at their default. `together`: fields that came at once, which count as soon as one of them is not at its
    default. `omitted_at`: field -> the value at which it does not count, where that is not its default."""

    name: str = ""
    renamed: dict[str, str] = field(default_factory=dict)
    original: frozenset[str] = frozenset()
    together: tuple[tuple[str, ...], ...] = ()
    omitted_at: dict[str, object] = field(default_factory=dict)


FIRST_FORMS = {
    "ModelConfig": FirstForm(
        renamed={
            "qk_norm_full_width": "qk_norm_whole", "qk_norm_per_head": "qk_norm_each",
            "qk_norm_unweighted": "qk_norm_unit", "qk_norm_without_rope": "qk_norm_still", "v_norm": "values_normed",
            "layer_query_heads": "layer_queries", "layer_kv_heads": "layer_heads", "k_eq_v_layers": "keys_as_values",
            "v_head_dim": "value_dim", "alibi_slopes": "slopes", "query_position_scaling": "queries_grow",
            "learned_rope_alpha": "frequencies_learned", "output_gate": "gates_apart", "output_gate_in_q": "gated_queries",
            "output_gate_per_head": "gates_whole", "output_gate_softplus": "gates_softplus", "differential_attention": "differs",
            "dynamic_mask": "keys_marked", "bidirectional": "both_ways", "prefix_lm": "prefixed", "answer_window": "written_window",
            "cross_attention_layers": "cross_layers", "layers_without_attention": "without_attention", "mla": "latent",
            "layer_mla": "layer_latents", "mla_norm_eps": "latent_eps", "indexer": "indexed", "compressed_attention": "compressed",
            "recurrent": "delta", "recurrent_layers": "delta_layers", "recurrent_norm_eps": "state_norm_eps",
            "parallel_hybrid": "states_beside", "hybrid_layers": "attends_beside", "num_shared_blocks": "shared_blocks",
            "shared_attention_lora": "attention_branches", "layer_intermediate_sizes": "layer_ffn", "layers_without_mlp": "without_mlp",
            "activation_params": "curves", "gate_cutoffs": "cuts", "gate_limits": "gate_bounds", "moe": "mixture",
            "expert_format": "experts_stored", "router_mlp_dim": "router_rank", "per_token_scale": "one_scale",
            "norm_bias": "norms_biased", "unweighted_norms": "norms_unit", "post_norm_eps": "behind_eps", "final_norm_kind": "last_norm",
            "gated_norm_rank": "norms_gated", "branch_post_norms": "branches_normed", "parallel_block": "side_by_side",
            "parallel_block_norms": "norms_apart", "layer_scalars": "layers_scaled", "multipliers": "factors", "low_rank_dim": "low_rank",
            "residual_streams": "streams", "residual_gate_rank": "mix_rank", "sinkhorn_iterations": "mix_rounds",
            "sinkhorn_eps": "mix_least", "unmixed_streams": "streams_kept", "embedding_norm": "embedding_normed",
            "extra_embeddings": "words_beside", "per_layer_input_dim": "input_width", "per_layer_input_vocab": "input_vocab",
            "per_layer_input_multiplier": "input_multiplier", "head_transform_act": "head_act", "head_transform_bias": "head_in_bias",
            "pooled_dim": "vector_width", "pooled_inner_dim": "vector_inner", "listwise_reranker": "ranks_lists",
            "max_supported_tokens": "most_tokens"},
        original=frozenset({"qkv_bias", "o_bias", "mlp_bias", "qk_norm", "qk_norm_full_width", "norm_kind", "attn_scale",
            "attn_logit_softcapping", "final_logit_softcapping", "embedding_multiplier", "residual_multiplier", "logits_scaling",
            "position_offset", "moe", "expert_format"}),
        together=(("recurrent", "recurrent_layers", "output_gate_in_q"),)),
    "MoEConfig": FirstForm(
        name="Mixture",
        renamed={
            "num_experts": "experts", "experts_per_token": "per_token", "expert_dim": "width", "routed_scale": "factor",
            "correction_bias": "corrected", "shared_expert_dim": "shared_width", "shared_expert_gate": "shared_scaled",
            "num_groups": "groups", "top_groups": "kept_groups", "parallel_to_mlp": "apart", "weights_scale_inputs": "of_inputs",
            "sparsemixer_margin": "near", "correction_on_logits": "of_logits", "sqrt_softplus": "roots", "hash_routed_layers": "picked",
            "zero_experts": "handed", "zero_experts_drop": "idle", "latent_dim": "latent", "vision_expert_dim": "seen_width",
            "vision_token_ids": "seen_words"},
        together=(("sigmoid", "routed_scale", "correction_bias", "shared_expert_dim", "shared_expert_gate"), ("num_groups", "top_groups"),
                  ("sqrt_softplus", "hash_routed_layers"), ("vision_expert_dim", "vision_token_ids"))),
    "CompressedAttentionConfig": FirstForm(
        name="Compressed",
        renamed={
            "output_groups": "groups", "output_group_rank": "group_rank", "sinkhorn_iterations": "rounds",
            "sinkhorn_eps": "least"}),
    "IndexerConfig": FirstForm(
        name="Indexed",
        renamed={
            "source_layers": "sources", "interleaved_rope": "neighbours"}),
    "NgramConfig": FirstForm(
        name="Ngrams",
        renamed={
            "tables_per_order": "each", "min_rows": "least", "row_multiple": "multiple", "eos_token_id": "end",
            "vocab_size": "words", "num_shards": "parts"}),
    "IndexShape": FirstForm(
        renamed={
            "top_k": "chosen", "block_size": "grain", "per_head": "each", "local_blocks": "near",
            "tokens_per_key": "rate", "pooled": "means", "weighted_pooling": "weighed"},
        original=frozenset({"block_size", "per_head", "local_blocks"})),
    "CompressedShape": FirstForm(
        renamed={
            "tokens_per_key": "rate", "index_dim": "index", "leading_products": "first", "trailing_products": "behind",
            "state_size": "room"}),
    "DeltaShape": FirstForm(
        renamed={
            "beta_scale": "writes", "sigmoid_gate": "sigmoid"}),
    "KdaShape": FirstForm(
        renamed={
            "beta_scale": "writes", "sigmoid_gate": "sigmoid", "low_rank_gates": "narrow", "decay_bound": "bound"},
        together=(("low_rank_gates", "decay_bound"),)),
    "LatentShape": FirstForm(
        original=frozenset({"query_rank"})),
    "LightningShape": FirstForm(
        original=frozenset({"taps"})),
    "Mamba1Shape": FirstForm(
        original=frozenset({"biased"}), omitted_at={"normed": True}),
    "Mamba2Shape": FirstForm(
        original=frozenset({"biased"})),
    "Rwkv7Shape": FirstForm(
        original=frozenset({"eps", "taps"})),
}


def config_digest(config: ModelConfig) -> str:
    """32 hex digits that two models share if the same tokens, weights and settings give the same pages in both."""
    values = {name: first_repr(value) for each, name, value in _counted(config) if each.name not in NOT_IN_PAGES}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:32]


def first_repr(value: object) -> str:
    """`repr(value)` as it was when sessions were first saved."""
    if type(value) is tuple:
        return f"({', '.join(map(first_repr, value))}{',' if len(value) == 1 else ''})"
    if not is_dataclass(value):
        return repr(value)
    title = FIRST_FORMS.get(type(value).__name__, FirstForm()).name or type(value).__name__
    return f"{title}({', '.join(f'{name}={first_repr(own)}' for _, name, own in _counted(value))})"


def _counted(record: object) -> list[tuple[Field, str, object]]:
    """The fields of a dataclass that count, each with its first name and its value."""
    form = FIRST_FORMS.get(type(record).__name__, FirstForm())
    used = {each.name for each in fields(record)
            if each.default is MISSING or getattr(record, each.name) != form.omitted_at.get(each.name, each.default)}
    used |= {name for group in form.together if used.intersection(group) for name in group}
    return [(each, form.renamed.get(each.name, each.name), getattr(record, each.name)) for each in fields(record)
            if each.name in used or each.name in form.original]
