"""Small encoders with random weights for tests: as saved by transformers, with a WordPiece tokenizer and the files of
sentence-transformers."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tokenizers
import torch
import transformers
from packaged_embedder import FABLE
from tokenizers import models, normalizers, pre_tokenizers, processors

WORDS = ("[PAD] [UNK] [CLS] [SEP] [MASK] the fox is king who rules of beasts all sea was calm ##s ##x a b c d . , ? ##b ##c e ##e f ##f g "
         "## made boat came forest in").split()
SIZES = {"vocab_size": len(WORDS) + 3, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 4,
         "max_position_embeddings": 400}
POOLING = {"word_embedding_dimension": 48, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
MODULES = [{"idx": at, "name": str(at), "type": f"sentence_transformers.models.{kind}", "path": path}
           for at, (kind, path) in enumerate((("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")))]


def word_pieces() -> tokenizers.Tokenizer:
    """BERT's tokenizer with few words; a pair's second text has type 1."""
    made = tokenizers.Tokenizer(models.WordPiece({word: at for at, word in enumerate(WORDS)}, unk_token="[UNK]"))
    made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    made.add_special_tokens(WORDS[:5])
    made.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1",
                                                        special_tokens=[("[CLS]", 2), ("[SEP]", 3)])
    return made


def unigrams() -> tokenizers.Tokenizer:
    """XLM-RoBERTa's tokenizer with few pieces."""
    pieces = [*((mark, 0.0) for mark in ("<s>", "<pad>", "</s>", "<unk>")),
              *((f"\u2581{word}", -3.0) for word in ("the", "fox", "king", "is", "")),
              *((letter, -6.0) for letter in "abcdefghiklmnoqrstuwxy.?")]
    made = tokenizers.Tokenizer(models.Unigram(pieces, 3, False))
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    made.add_special_tokens(["<s>", "<pad>", "</s>", "<unk>"])
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", pair="<s> $A </s> </s> $B </s>",
                                                        special_tokens=[("<s>", 0), ("</s>", 2)])
    return made


def merges_of_bytes() -> tokenizers.Tokenizer:
    """ModernBERT's tokenizer: the packaged model's vocabulary, with its own special tokens around a text."""
    made = tokenizers.Tokenizer.from_file(str(FABLE / "tokenizer.json"))
    first, last = "<|endoftext|>", "<|user|>"
    made.post_processor = processors.TemplateProcessing(single=f"{first} $A {last}", pair=f"{first} $A {last} $B {last}",
                                                        special_tokens=[(first, 0), (last, 1)])
    return made


def made_encoder(folder: Path, model: transformers.PreTrainedModel, pooling: object = POOLING, modules: object = MODULES,
                 longest: int | None = None, cut: Callable[[], tokenizers.Tokenizer] = word_pieces) -> Path:
    """A model in a folder; `pooling` None for nothing beside it."""
    model.save_pretrained(folder)
    cut().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"cls_token": "[CLS]", "sep_token": "[SEP]", "pad_token": "[PAD]"}))
    if pooling is not None:
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
        (folder / "modules.json").write_text(json.dumps(modules))
    if longest is not None:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": longest, "do_lower_case": False}))
    return folder


def random_model(kind: str, head: str = "Model", **more: object) -> transformers.PreTrainedModel:
    """A model of a transformers class, with weights large enough for mistakes to show."""
    torch.manual_seed(5)
    config = getattr(transformers, f"{kind}Config")(**{name: value for name, value in {**SIZES, **more}.items() if value is not None})
    model = getattr(transformers, f"{kind}{head}")(config).eval()
    with torch.no_grad():
        for name, each in model.named_parameters():
            each.copy_(torch.randn_like(each) * 0.2 + (1.0 if each.dim() == 1 and "norm" in name.lower() and "weight" in name else 0.0))
    return model


def states_of(model: transformers.PreTrainedModel, ids: list[int]) -> np.ndarray:
    """Hidden states computed by transformers from token ids, in float64."""
    with torch.no_grad():
        return model.double()(torch.tensor([ids]), attention_mask=torch.ones(1, len(ids), dtype=torch.long)).last_hidden_state[0].numpy()


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)
