"""Tiny random Whisper models for tests, with a one-second window."""

import json
import shutil
from pathlib import Path

import torch
from audio_models import EXTRACTOR
from transformers import GenerationConfig, WhisperConfig, WhisperForConditionalGeneration
from vision_models import FABLE, FIRST

WORDS = ("<|startoftranscript|>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>", "<|notimestamps|>")
START, EN, DE, TRANSLATE, TRANSCRIBE, UNTIMED = range(FIRST, FIRST + len(WORDS))
SIZES = {"vocab_size": FIRST + len(WORDS), "d_model": 48, "encoder_layers": 3, "encoder_attention_heads": 3, "encoder_ffn_dim": 96,
         "decoder_layers": 2, "decoder_attention_heads": 3, "decoder_ffn_dim": 80, "num_mel_bins": 16, "max_source_positions": 50,
         "max_target_positions": 256}


def save_whisper(folder: Path, is_multilingual: bool = True, **changes: object) -> WhisperForConditionalGeneration:
    """Save a random Whisper model with the packaged tokenizer plus Whisper's special tokens; returns transformers' model.

    is_multilingual: two languages instead of English only.
    """
    ends = json.loads((FABLE / "generation_config.json").read_text())["eos_token_id"]
    end = ends if isinstance(ends, int) else ends[0]
    torch.manual_seed(7)
    model = WhisperForConditionalGeneration(WhisperConfig(**{**SIZES, "init_std": 0.15, "bos_token_id": end, "eos_token_id": end,
                                                             "pad_token_id": end, "decoder_start_token_id": START, **changes}))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    language_settings = {"lang_to_id": {"<|en|>": EN, "<|de|>": DE}, "task_to_id": {"transcribe": TRANSCRIBE, "translate": TRANSLATE}}
    model.generation_config = GenerationConfig(
        is_multilingual=is_multilingual, no_timestamps_token_id=UNTIMED, decoder_start_token_id=START, eos_token_id=end, pad_token_id=end,
        bos_token_id=end, suppress_tokens=[5, 20, 21, START], begin_suppress_tokens=[30, 31, 32, end],
        **(language_settings if is_multilingual else {}))
    model.save_pretrained(folder)
    EXTRACTOR.save_pretrained(folder)
    settings = json.loads((FABLE / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    vocabulary = json.loads((FABLE / "tokenizer.json").read_text())
    added_token = vocabulary["added_tokens"][-1]
    vocabulary["added_tokens"] += [{**added_token, "id": START + number, "content": word, "special": True} for number,
                                   word in enumerate(WORDS)]
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    for extra in ("special_tokens_map.json",):
        if (FABLE / extra).is_file():
            shutil.copy(FABLE / extra, folder / extra)
    return WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
