"""Small random models with bidirectional attention for tests; transformers is the oracle."""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.numpy import save_file
from transformers import AutoConfig, AutoModel, Gemma3TextConfig, Gemma3TextModel

WIDTH, INNER = 64, 96
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2,
         "head_dim": 16, "global_head_dim": 16, "position_embedding_size": 64}
KINDS = ("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"), ("Dense", "3_Dense"), ("Normalize", "4_Normalize")


def both_ways(folder: Path, window: int = 17, **more: object) -> Path:
    """A model like EmbeddingGemma, as published: without a head, and with two matrices after mean pooling."""
    torch.manual_seed(11)
    config = Gemma3TextConfig(**{
        "vocab_size": 301, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "head_dim": 32,
        "num_key_value_heads": 2, "max_position_embeddings": 1024, "sliding_window": window, "use_bidirectional_attention": True,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 32, "initializer_range": 0.2, **more})
    Gemma3TextModel(config).save_pretrained(folder)
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in KINDS]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True, "include_prompt": True}))
    random = np.random.default_rng(3)
    for name, shape in (("2_Dense", (INNER, WIDTH)), ("3_Dense", (WIDTH, INNER))):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"in_features": shape[1], "out_features": shape[0], "bias": False,
                                                               "activation_function": "torch.nn.modules.linear.Identity"}))
        save_file({"linear.weight": random.standard_normal(shape).astype(np.float32)}, folder / name / "model.safetensors")
    return folder


def turned_both_ways(folder: Path, kind: str, sliding_window: int | None = None, **more: object) -> Path:
    """A causal model of a family whose config says that its attention is bidirectional."""
    torch.manual_seed(12)
    config = AutoConfig.for_model(kind, vocab_size=301, hidden_size=WIDTH, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4,
                                  num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.2,
                                  sliding_window=sliding_window, **more)
    config.is_causal = False
    AutoModel.from_config(config).save_pretrained(folder)
    return folder


def mean_of(folder: Path, ids: list[int]) -> np.ndarray:
    """Mean pooling over transformers' states, in float64, unnormalized."""
    model = AutoModel.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([ids])).last_hidden_state[0].mean(0).numpy()


def as_gguf(folder: Path, out: Path, kind: str = "F32", dense: bool = True) -> Path:
    """The same model in the GGUF file written by llama.cpp's converter: one added to norms, rows first, matrices after pooling."""
    import gguf
    from safetensors.numpy import load_file

    config = json.loads((folder / "config.json").read_text())
    writer = gguf.GGUFWriter(out, "gemma-embedding")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_rope_freq_base(config["rope_parameters"]["full_attention"]["rope_theta"])
    writer.add_pooling_type(gguf.PoolingType.MEAN)
    writer.add_causal_attention(False)
    names = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
             "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
             "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "post_attention_norm",
             "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm", "norm": "output_norm",
             "embed_tokens": "token_embd"}
    tensors = load_file(folder / "model.safetensors")
    for number, name in enumerate(("2_Dense", "3_Dense") if dense else (), 2):
        tensors[f"dense_{number}.weight"] = load_file(folder / name / "model.safetensors")["linear.weight"]
    for name, data in tensors.items():
        parts = name.removesuffix(".weight").split(".")
        own = names.get(".".join(parts[2:]) if parts[0] == "layers" else parts[0], parts[0])
        own = f"blk.{parts[1]}.{own}" if parts[0] == "layers" else own
        data = data.astype(np.float32) + (1 if "norm" in name else 0)
        if data.ndim == 2 and kind != "F32":
            packed = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(f"{own}.weight", gguf.quantize(data, packed), raw_dtype=packed)
        else:
            writer.add_tensor(f"{own}.weight", np.ascontiguousarray(data, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def embedding_gemma2(folder: Path, whole: bool = False, **more: object) -> Path:
    """A model like EmbeddingGemma 2, on its own or as published, inside one with encoders; norms and layer scales are random too."""
    from transformers import EmbeddingGemma2Config, EmbeddingGemma2Model, EmbeddingGemma2TextConfig, EmbeddingGemma2TextModel

    torch.manual_seed(13)
    config = EmbeddingGemma2TextConfig(**{
        "vocab_size": 301, "hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 32, "global_head_dim": 64, "num_global_key_value_heads": 1, "max_position_embeddings": 1024,
        "sliding_window": 8, "sliding_window_pattern": 2, "hidden_size_per_layer_input": 32, "embedding_dim": INNER,
        "initializer_range": 0.2, **more})
    if whole:
        towers = {"vision_config": {"model_type": "gemma4_vision", **TOWER}, "audio_config": None}
        model = EmbeddingGemma2Model(EmbeddingGemma2Config(text_config=config.to_dict(), **towers))
    else:
        model = EmbeddingGemma2TextModel(config)
    for name, values in model.state_dict().items():
        if "norm" in name or "layer_scalar" in name:
            values.copy_(1 + 0.3 * torch.randn_like(values))
    model.save_pretrained(folder)
    modules = [{"type": f"sentence_transformers.models.{kind}", "path": path} for kind, path in (*KINDS[:2], ("Normalize", "2_Normalize"))]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": "mean", "include_prompt": True}))
    return folder
