"""Small models that see, one a family: what makes one of transformers' (`sight_models.made`), and its preprocessor."""

from fastvit_torch import ARGS
from perception_torch import ARGS as ARGS_OF_PE
from sight_models import (
       FIRST,
       TOWER,
       Cohere2Ready,
       KimiReady,
       Lfm2Ready,
       MiniCpmOcrReady,
       MolmoReady,
       PerceptionReady,
       UnifiedReady,
       UnlimitedOcrReady,
)
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.deepseek_ocr2.image_processing_pil_deepseek_ocr2 import DeepseekOcr2ImageProcessorPil
from transformers.models.ernie4_5_vl_moe.image_processing_pil_ernie4_5_vl_moe import Ernie4_5_VLMoeImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.granite_docling.image_processing_pil_granite_docling import GraniteDoclingImageProcessorPil
from transformers.models.hunyuan_vl.image_processing_pil_hunyuan_vl import HunYuanVLImageProcessorPil
from transformers.models.idefics2.image_processing_pil_idefics2 import Idefics2ImageProcessorPil
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import MiniCPMV4_6ImageProcessorPil
from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil
from transformers.models.paddleocr_vl.image_processing_pil_paddleocr_vl import PaddleOCRVLImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

SQUARE = {"height": 32, "width": 32}
PINPOINTS = [[32, 64], [64, 32], [64, 64]]
AYA = ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE_GLOBAL", *(f"TILE_{number}" for number in range(1, 5))]
HUNYUAN = [f"<｜hy_place▁holder▁no▁{number}｜>" for number in (102, 100, 101)]
ROWS = [f"<row_{row}_col_{column}>" for row in (1, 2, 3) for column in (1, 2, 3)]
QWEN = {"depth": 3, "hidden_size": 48, "intermediate_size": 72, "num_heads": 3, "out_hidden_size": 48, "patch_size": 8}
ROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 4, 4]}
# Of patches of two points, as many as learned rows read.
SAM = {"hidden_size": 24, "mlp_dim": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 128, "patch_size": 2,
       "window_size": 5, "global_attn_indexes": [1], "output_channels": 12}
HEADS = {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 16}
PATCHES = Qwen2VLImageProcessorPil(patch_size=8, size={"shortest_edge": 40 * 40, "longest_edge": 90 * 90})
# Granite and Cohere scale logits, which classes of transformers that see leave out: by 1 they are the same.
# family -> text part, tower, words, what else its config says, and preprocessor
CASES = {
    "deepseek_ocr2": ({"model_type": "deepseek_ocr2_text", "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                       "num_key_value_heads": 2, "mlp_layer_types": ["dense", "sparse"], "routed_scaling_factor": 1.5,
                       "max_position_embeddings": 1024},
                      {"sam_config": {**SAM, "downsample_channels": [16, 24]}, "encoder_config": {
                          "hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
                          "num_key_value_heads": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}}, ["<image>"],
                      {"image_token_id": FIRST},
                      DeepseekOcr2ImageProcessorPil(size={"height": 128, "width": 128}, tile_size=96, max_patches=2)),
    "unlimited_ocr": ({"model_type": "unlimited_ocr_text", "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                       "num_key_value_heads": 2, "sliding_window": 40},
                      {"sam_config": {**SAM, "image_size": 64, "patch_size": 4, "window_size": 5, "downsample_channels": [16, 24]},
                       "encoder_config": {"hidden_size": 24, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
                                          "image_size": 32, "patch_size": 8}}, ["<image>"], {"image_token_id": FIRST},
                      UnlimitedOcrReady(size={"height": 64, "width": 64}, tile_size=48, max_patches=6)),
    "ernie4_5_vl_moe": ({"head_dim": 24, "num_hidden_layers": 3, "moe_intermediate_size": [40, 24], "moe_num_experts": 5, "moe_k": 2,
                         "pad_token_id": 0, "rope_parameters": {**ROPE, "mrope_section": [5, 5, 2]}},
                        {"depth": 3, "hidden_size": 48, "intermediate_size": 72, "num_heads": 3, "patch_size": 8},
                        ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>"],
                        {"image_token_id": FIRST, "image_start_token_id": FIRST + 1, "image_end_token_id": FIRST + 2,
                         "video_token_id": 4190, "video_start_token_id": 4191, "video_end_token_id": 4192, "tie_word_embeddings": True},
                        Ernie4_5_VLMoeImageProcessorPil(patch_size=8, size={"shortest_edge": 40 * 40, "longest_edge": 90 * 90})),
    "fast_vlm": ({"model_type": "qwen2"},
                 {"model_type": "timm_wrapper", "architecture": "fastvit_mci3", "hidden_size": 128, "model_args": ARGS}, ["<image>"],
                 {"image_token_index": FIRST},
                 CLIPImageProcessorPil(size={"shortest_edge": 192}, crop_size={"height": 192, "width": 192}, image_mean=[0.0] * 3,
                                       image_std=[1.0] * 3)),
    "gemma3": ({"model_type": "gemma3_text", "query_pre_attn_scalar": 24, "sliding_window": 40},
               {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
               ["<image_soft_token>", "<start_of_image>", "<end_of_image>"],
               {"mm_tokens_per_image": 16, "image_token_index": FIRST, "boi_token_index": FIRST + 1, "eoi_token_index": FIRST + 2},
               Gemma3ImageProcessorPil(size=SQUARE)),
    "gemma4": ({"model_type": "gemma4_text", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40,
                "global_head_dim": 32, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 4200, "num_kv_shared_layers": 0,
                "use_bidirectional_attention": "vision"},
               {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2, "num_attention_heads": 3, "num_key_value_heads": 3,
                "head_dim": 24, "patch_size": 4, "position_embedding_size": 220}, ["<|image|>", "<|image>", "<image|>"],
               {"image_token_id": FIRST, "boi_token_id": FIRST + 1, "eoi_token_id": FIRST + 2, "audio_config": None},
               Gemma4ImageProcessorPil(patch_size=4, max_soft_tokens=70)),
    "gemma4_unified": ({"model_type": "gemma4_unified_text", "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 40,
                        "global_head_dim": 32, "num_kv_shared_layers": 0},
                       {"patch_size": 4, "mm_embed_dim": 40, "output_proj_dims": 40, "mm_posemb_size": 70},
                       ["<|image|>", "<|image>", "<image|>"],
                       {"image_token_id": FIRST, "boi_token_id": FIRST + 1, "eoi_token_id": FIRST + 2, "audio_config": None},
                       UnifiedReady()),
    "granite4_vision": (
        {"model_type": "granite4_vision_text", "num_hidden_layers": 6, "embedding_multiplier": 12.0, "logits_scaling": 4.0,
         "residual_multiplier": 0.22, "attention_multiplier": 0.015},
        {**TOWER, "hidden_size": 64, "num_attention_heads": 4, "model_type": "siglip_vision_model", "vision_use_head": False}, ["<image>"],
        {"image_token_index": FIRST, "image_grid_pinpoints": PINPOINTS, "vision_feature_select_strategy": "full", "downsample_rate": "1/2",
         "deepstack_layer_map": [[-2, 0], [1, 1], [-1, 3]], "spatial_target_layers": [2, 4, 1, 5], "spatial_vision_layer": -1,
         "qformer_config": {"model_type": "blip_2_qformer", "intermediate_size": 72, "num_hidden_layers": 1,
                            "cross_attention_frequency": 1, "use_qformer_text_input": False}},
        LlavaNextImageProcessorPil(size={"shortest_edge": 32}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS)),
    "got_ocr2": ({"model_type": "qwen2"},
                 {"hidden_size": 48, "mlp_dim": 72, "num_hidden_layers": 3, "num_attention_heads": 3, "image_size": 80, "patch_size": 8,
                  "window_size": 4, "global_attn_indexes": [1], "output_channels": 24}, ["<imgpad>", "<img>", "</img>"],
                 {"image_token_index": FIRST},
                 GotOcr2ImageProcessorPil(size={"height": 80, "width": 80}, max_patches=4, crop_to_patches=True)),
    "granite_docling": ({"pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 4},
                        {**TOWER, "num_hidden_layers": 4, "scale_factor": 2, "deepstack_visual_indexes": [0, 2], "out_hidden_size": 48},
                        ["<image>", "<fake_token_around_image>", "<global-img>", *ROWS],
                        {"image_token_id": FIRST, "pad_token_id": 0, "density_router_hidden_size": 16},
                        GraniteDoclingImageProcessorPil(size=SQUARE, max_patches=4)),
    "hunyuan_vl": ({"model_type": "hunyuan_vl_text", "rope_parameters": {
                       "rope_type": "xdrope", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0, "mrope_section": [3, 4, 3, 2]}},
                   {**TOWER, "max_image_size": 48, "image_size": None}, HUNYUAN, {"image_token_id": FIRST},
                   HunYuanVLImageProcessorPil(patch_size=8, size={"shortest_edge": 40 * 40, "longest_edge": 90 * 90})),
    "idefics2": ({"model_type": "mistral", "pad_token_id": 0}, {**TOWER, "image_size": 48},
                 ["<image>", "<fake_token_around_image>", "<end_of_utterance>"],
                 {"image_token_id": FIRST, "perceiver_config": {
                     "hidden_size": 48, "resampler_n_latents": 5, "resampler_depth": 2, "resampler_n_heads": 4, "resampler_head_dim": 6,
                     "num_key_value_heads": 2}},
                 Idefics2ImageProcessorPil(size={"shortest_edge": 20, "longest_edge": 70}, do_image_splitting=True)),
    "idefics3": ({"model_type": "llama"}, {**TOWER}, ["<image>", "<fake_token_around_image>", "<global-img>", *ROWS],
                 {"image_token_id": FIRST, "pad_token_id": 0},
                 Idefics3ImageProcessorPil(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})),
    "kimi_k25": ({"model_type": "deepseek_v3", "q_lora_rank": 36, "kv_lora_rank": 48, "qk_nope_head_dim": 20, "qk_rope_head_dim": 16,
                  "v_head_dim": 28, "num_key_value_heads": 2, "first_k_dense_replace": 2, "eos_token_id": 4, "head_dim": 16},
                 {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "num_attention_heads": 3, "patch_size": 8,
                  "pos_emb_height": 5, "pos_emb_width": 5}, ["<|media_pad|>"],
                 {"image_token_id": FIRST, "projection_hidden_size": 48, "tie_word_embeddings": False},
                 KimiReady(patch_size=8, max_patches=120, size={"max_height": 20, "max_width": 20})),
    "lfm2_vl": ({"model_type": "lfm2", "layer_types": ["conv", "full_attention"]},
                {"model_type": "siglip2_vision_model", "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 2,
                 "num_attention_heads": 3, "patch_size": 8, "num_patches": 36, "vision_use_head": False},
                ["<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
                 *(f"<|img_row_{row}_col_{column}|>" for row in (1, 2) for column in (1, 2))],
                {"image_token_id": FIRST, "projector_hidden_size": 56}, Lfm2Ready()),
    "lfm3_vl": ({"model_type": "lfm3", "num_hidden_layers": 4, "sliding_window": 40, "pad_token_id": 0, "eos_token_id": 4,
                 "bos_token_id": 1},
                {"hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
                 "patch_size": 8}, ["<|image_pad|>", "<|vision_start|>", "<|vision_end|>"], {"image_token_id": FIRST,
                                                                                           "projector_hidden_size": 56}, PATCHES),
    "llava_next": ({"model_type": "llama"}, {**TOWER, "model_type": "clip_vision_model"}, ["<image>"],
                   {"image_token_index": FIRST, "image_grid_pinpoints": PINPOINTS},
                   LlavaNextImageProcessorPil(size={"shortest_edge": 32}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS)),
    "llava_next, granite": ({"model_type": "granite", "embedding_multiplier": 12.0, "logits_scaling": 1.0, "residual_multiplier": 0.22,
                             "attention_multiplier": 0.015}, {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
                            ["<image>"], {"image_token_index": FIRST, "image_grid_pinpoints": PINPOINTS, "vision_feature_layer": [-3, -1],
                                          "vision_feature_select_strategy": "full"},
                            LlavaNextImageProcessorPil(size={"shortest_edge": 32}, crop_size=SQUARE, image_grid_pinpoints=PINPOINTS)),
    "aya_vision": ({"model_type": "cohere2", "logit_scale": 1.0, "sliding_window": 40,
                    "layer_types": ["sliding_attention", "full_attention"]},
                   {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}, AYA,
                   {"image_token_index": FIRST, "alignment_intermediate_size": 56},
                   GotOcr2ImageProcessorPil(size=SQUARE, max_patches=4, crop_to_patches=True)),
    "minicpmv4_6": ({"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
                     "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "eos_token_id": 4},
                    {**TOWER, "image_size": 56},
                    ["<|image_pad|>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"],
                    {"image_token_id": FIRST, "insert_layer_id": 1},
                    MiniCPMV4_6ImageProcessorPil(scale_resolution=64, patch_size=8, max_slice_nums=5)),
    "minicpmv4_7": ({"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
                     "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "eos_token_id": 4,
                     "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2]}},
                    {**TOWER, "image_size": 56},
                    ["<|image_pad|>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"],
                    {"image_token_id": FIRST, "insert_layer_id": 1, "newline_id": 203, **{
                        f"{name}_id": FIRST + number for number, name in enumerate(
                            ("image_start", "image_end", "slice_start", "slice_end"), start=1)}},
                    MiniCPMV4_6ImageProcessorPil(scale_resolution=64, patch_size=8, max_slice_nums=5)),
    "minicpm_ocr": ({"model_type": "qwen3_5_text", "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
                     "linear_num_key_heads": 2, "linear_key_head_dim": 16, "linear_value_head_dim": 16, "eos_token_id": 4},
                    {**TOWER, "image_size": 56},
                    ["<|image_pad|>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"],
                    {"image_token_id": FIRST, "insert_layer_id": 1},
                    MiniCpmOcrReady("never", scale_resolution=64, patch_size=8, max_slice_nums=2)),
    "molmo2": ({"model_type": "molmo2_text", "vocab_size": FIRST, "additional_vocab_size": 16},
               {**HEADS, "hidden_size": 48, "intermediate_size": 72, "num_hidden_layers": 3, "image_size": [32, 32], "patch_size": 8},
               ["<im_patch>", "<im_start>", "<im_end>", "<im_col>", "<low_res_im_start>", "<|image|>"],
               {"image_patch_id": FIRST, "adapter_config": {**HEADS, "hidden_size": 48, "intermediate_size": 56, "text_hidden_size": 48,
                                                            "vision_feature_layer": [-1, 0]}},
               MolmoReady(size=SQUARE, patch_size=8, max_crops=4, overlap_margins=[1, 1])),
    "cohere2_vision": ({"model_type": "cohere2", "logit_scale": 1.0, "sliding_window": 40,
                        "layer_types": ["sliding_attention", "full_attention"]},
                       {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
                       ["<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"],
                       {"image_token_id": FIRST, "alignment_intermediate_size": 56},
                       Cohere2Ready(size=SQUARE, max_patches=4, crop_to_patches=True)),
    "mistral3": ({"model_type": "mistral"}, {**TOWER, "model_type": "pixtral", "image_size": 96}, ["[IMG]", "[IMG_BREAK]", "[IMG_END]"],
                 {"image_token_index": FIRST}, PixtralImageProcessorPil(size={"longest_edge": 96}, patch_size={"height": 16, "width": 16})),
    "ovis2": ({"model_type": "qwen2"}, {**TOWER, "image_size": 48, "vocab_size": 90, "hidden_stride": 2, "qkv_bias": True},
              ["<IMG_ATOM>", "<image>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"],
              {"image_token_id": FIRST, "visual_indicator_token_ids": list(range(FIRST + 2, FIRST + 7)), "hidden_size": 48,
               "vocab_size": 4200},
              Ovis2ImageProcessorPil(size={"height": 48, "width": 48}, max_patches=5, crop_to_patches=True)),
    "internvl": ({"model_type": "qwen2"}, {**TOWER, "image_size": [32, 32], "patch_size": [8, 8]}, ["<IMG_CONTEXT>", "<img>", "</img>"],
                 {"image_token_id": FIRST}, GotOcr2ImageProcessorPil(size=SQUARE, max_patches=4, crop_to_patches=True)),
    "qianfan_ocr": ({"model_type": "qwen3"}, {**TOWER, "image_size": [32, 32], "patch_size": [8, 8]}, ["<IMG_CONTEXT>", "<img>", "</img>"],
                    {"image_token_id": FIRST, "image_seq_length": 4},
                    GotOcr2ImageProcessorPil(size=SQUARE, max_patches=4, crop_to_patches=True)),
    "glm4v": ({"model_type": "glm4v_text", "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 2, 2]}},
              {**QWEN, "image_size": 48, "rms_norm_eps": 1e-5}, ["<|image|>", "<|begin_of_image|>", "<|end_of_image|>"],
              {"image_token_id": FIRST, "image_start_token_id": FIRST + 1, "image_end_token_id": FIRST + 2},
              Glm4vImageProcessorPil(patch_size=8, size={"shortest_edge": 40 * 40, "longest_edge": 120 * 120})),
    "glm_ocr": ({"model_type": "glm_ocr_text", "rope_parameters": ROPE, "eos_token_id": 4},
                {**QWEN, "rms_norm_eps": 1e-5}, ["<|image|>", "<|begin_of_image|>", "<|end_of_image|>"],
                {"image_token_id": FIRST, "image_start_token_id": FIRST + 1, "image_end_token_id": FIRST + 2},
                Glm4vImageProcessorPil(patch_size=8, size={"shortest_edge": 40 * 40, "longest_edge": 120 * 120})),
    "lighton_ocr": ({"model_type": "qwen3"}, {**TOWER, "model_type": "pixtral", "image_size": 96}, ["<|image_pad|>"],
                    {"image_token_id": FIRST},
                    PixtralImageProcessorPil(size={"longest_edge": 96}, patch_size={"height": 8, "width": 8})),
    "paddleocr_vl": ({"model_type": "paddleocr_vl_text", "rope_parameters": ROPE, "use_bias": True}, {**TOWER, "image_size": 48},
                     ["<|IMAGE_PLACEHOLDER|>", "<|IMAGE_START|>"], {"image_token_id": FIRST, "vision_start_token_id": FIRST + 1},
                     PaddleOCRVLImageProcessorPil(patch_size=8, size={"shortest_edge": 40 * 40, "longest_edge": 90 * 90})),
    "perception_lm": ({"model_type": "llama"},
                      {"model_type": "timm_wrapper", "architecture": "vit_pe_core_large_patch14_336", "model_args": ARGS_OF_PE},
                      ["<|image|>"], {"image_token_id": FIRST, "projector_pooling_ratio": 2}, PerceptionReady()),
    "qwen2_vl": ({"model_type": "qwen2_vl_text", "rope_parameters": ROPE},
                 {"depth": 2, "embed_dim": 48, "hidden_size": 48, "num_heads": 3, "mlp_ratio": 2, "patch_size": 8},
                 ["<|image_pad|>", "<|vision_start|>"], {"image_token_id": FIRST, "vision_start_token_id": FIRST + 1}, PATCHES),
    "qwen2_5_vl": ({"model_type": "qwen2_5_vl_text", "rope_parameters": ROPE},
                   {**QWEN, "window_size": 32, "fullatt_block_indexes": [1]}, ["<|image_pad|>", "<|vision_start|>"],
                   {"image_token_id": FIRST, "vision_start_token_id": FIRST + 1}, PATCHES),
    "qwen3_vl": ({"model_type": "qwen3_vl_text", "rope_parameters": ROPE},
                 {**QWEN, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 2]}, ["<|image_pad|>", "<|vision_start|>"],
                 {"image_token_id": FIRST, "vision_start_token_id": FIRST + 1}, PATCHES),
}
