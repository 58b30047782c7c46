"""Tokenizers of a few words for tests, saved as in a model folder, and modified copies of fable's."""

import json
import shutil
from pathlib import Path

from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from effllm.runtime.config import read_config

FABLE = Path(__file__).parents[1] / "models" / "fable"
CONFIG = read_config(FABLE)


def save(folder: Path, backend: Backend, **settings_of_tokenizer) -> Path:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings_of_tokenizer}))
    return folder


def with_words_of_fable(folder: Path) -> Path:
    """A model folder into which fable's tokenizer is copied."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FABLE / name, folder / name)
    return folder


def copy_of_fable(folder: Path, **changes) -> Path:
    """A model folder like fable's; `changes` edit its JSON files: file stem -> keys."""
    shutil.copy(FABLE / "generation_config.json", with_words_of_fable(folder))
    for stem, keys in changes.items():
        path = folder / f"{stem}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | keys))
    return folder


def sentencepiece_like() -> Backend:
    """Tokens with ▁ for spaces, byte fallback, and <s> at the start: as in Llama 2 and Mistral."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "a", "b", "c", "▁a", "▁ab", "ab", "bc", "▁bc"]
    merges = [("▁", "a"), ("a", "b"), ("▁a", "b"), ("b", "c"), ("▁", "bc")]
    backend = Backend(models.BPE({w: i for i, w in enumerate(words)}, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    backend.post_processor = processors.TemplateProcessing(single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", 1)])
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in ("<unk>", "<s>", "</s>")])
    return backend


def byte_level(*added: AddedToken) -> Backend:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(list(added))
    return backend


def special(text: str) -> AddedToken:
    return AddedToken(text, special=True, normalized=False)
