"""Keys of config.json for all families: those ignored, and those supported at only one value."""

from __future__ import annotations

from collections.abc import Mapping

# Training, bookkeeping, and sampling defaults of old versions, which are read from generation_config.json instead.
KEYS_HARMLESS = frozenset({
    "_attn_implementation", "_attn_implementation_autoset", "_commit_hash", "_model_name_or_path", "_name_or_path", "attention_dropout",
    "attn_implementation", "bad_words_ids", "begin_suppress_tokens", "chunk_size_feed_forward", "classifier_dropout", "debug",
    "decoder_start_token_id", "diversity_penalty", "do_sample", "early_stopping", "encoder_no_repeat_ngram_size", "ep_size",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id", "hidden_dropout", "id2label",
    "initializer_range", "is_decoder", "is_llama_config", "keys_to_ignore_at_inference", "label2id", "length_penalty", "max_length",
    "micro_forward", "min_length", "name_or_path", "neftune_noise_alpha", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_labels", "num_return_sequences", "output_attentions", "output_hidden_states", "output_router_logits", "output_scores",
    "pad_token_id", "prefix", "pretraining_tp", "problem_type", "remove_invalid_values", "repetition_penalty", "resid_pdrop", "return_dict",
    "return_dict_in_generate", "router_aux_loss_coef", "sep_token_id", "skip_checkpoint", "suppress_tokens", "task_specific_params",
    "temperature", "tf_legacy_loss", "tie_encoder_decoder", "tie_last_hidden_states", "tokenizer_class", "top_k", "top_p", "torchscript",
    "transformers.js_config", "transformers_version", "typical_p", "unk_token_id", "unsloth_fixed", "unsloth_version", "use_bfloat16",
    "use_cache", "use_deepep",
})
# Keys that only some families read -> the value that means "not used", as null does. Any other value is refused in the other families.
READ_BY_SOME: Mapping[str, object] = {
    "attention_multiplier": 1.0, "attn_logit_softcapping": None, "auto_map": None, "embedding_multiplier": 1.0,
    "final_logit_softcapping": None, "logits_scaling": 1.0, "num_experts": None, "num_local_experts": None, "partial_rotary_factor": 1.0,
    "per_layer_config": None, "quantization_config": None, "query_pre_attn_scalar": None, "residual_multiplier": 1.0,
    "use_qk_norm": False,
}
# Keys that no family reads -> their only supported value.
REFUSED_UNLESS: Mapping[str, object] = {
    "add_cross_attention": False, "compression_config": None, "cross_attention_hidden_size": None, "is_causal": True,
    "is_encoder_decoder": False, "moe_config": None, "pruned_heads": {}, "quantization": None, "rope_interleaved": False,
}
# Key -> hint of the error message, where it is more than "this family runs only with ...".
REASONS = {
    "auto_map": "the checkpoint brings its own code, which is never run",
    "is_causal": "a bidirectional model cannot generate text",
    "compression_config": "this is the older name of quantization_config: rename it in config.json, or use a newer upload",
    "quantization": "it must be an object with bits and group_size, as MLX writes it: download config.json of the model again",
    # an object is checked by `import_config.check_method`
    "quantization_config": "it must be an object with a quant_method, as the tool that quantized the model wrote it: take config.json "
                           "again from who published the model, or the original 16-bit checkpoint",
}
