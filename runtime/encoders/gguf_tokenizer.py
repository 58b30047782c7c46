"""Tokenizer of an encoder in a GGUF file: WordPiece (`bert`), unigram (`t5`) or byte-level BPE (`gpt2`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from ...offload.safetensors_header import shown
from ..gguf.store import read_header
from ..gguf.tokenizer import CONTROL, OTHER_FILE_HINT, SPACE, UNKNOWN, backend, read_vocabulary
from ..tokenizer import Tokenizer as ModelTokenizer
from ..tokenizer import TokenizerError

CONTINUED = "##"
KINDS = ("bert", "gpt2", "t5")
# Role -> keys of the file that may name its token; llama.cpp's word for what parts is misspelt, in all files.
ROLES: Mapping[str, tuple[str, ...]] = {
    "cls_token": ("cls", "bos"), "sep_token": ("seperator", "eos"), "unk_token": ("unknown",), "pad_token": ("padding",),
    "mask_token": ("mask",)}
USUAL = {"cls_token": ("[CLS]", "<s>"), "sep_token": ("[SEP]", "</s>"), "unk_token": ("[UNK]", "<unk>")}  # where a file names none


def load_file_tokenizer(path: Path, rows: int) -> ModelTokenizer:
    """Raises TokenizerError."""
    data = read_header(path).metadata
    kind, tokens = data.get("tokenizer.ggml.model"), data.get("tokenizer.ggml.tokens")
    if kind not in KINDS or not isinstance(tokens, list) or not tokens:
        raise TokenizerError(f"{path} has tokenizer type {shown(str(kind))}, which is not supported for encoders",
                             f"known: {', '.join(KINDS)}")
    kinds = data.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, np.ndarray) or len(kinds) != len(tokens):
        raise TokenizerError(f"{path} has no token type for each of its {len(tokens)} tokens", OTHER_FILE_HINT)
    special = {role: token for role, names in ROLES.items() if (token := _named(role, names, data, tokens)) is not None}
    if missing := {"cls_token", "sep_token", *(() if kind == "gpt2" else ("unk_token",))} - special.keys():
        raise TokenizerError(f"{path} names no {sorted(missing)[0]}", OTHER_FILE_HINT)
    try:
        if kind == "gpt2":
            made = backend(read_vocabulary(read_header(path)))
        else:
            made = _word_pieces(tokens, kinds, special, data) if kind == "bert" else _unigrams(tokens, special, data)
        marks = {*special.values(), *(tokens[at] for at in np.flatnonzero(np.isin(kinds, (CONTROL,))))}
        made.add_special_tokens([AddedToken(each, special=True, normalized=False) for each in sorted(marks) if each])
        made.post_processor = _joined("t5" if kind == "gpt2" and data.get("general.architecture") == "bert" else kind, made, special)
    except TokenizerError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path} holds a tokenizer that cannot be built: {shown(str(error))}", OTHER_FILE_HINT) from None
    return ModelTokenizer(made, special, False, None, rows, (), None, path)


def _named(role: str, names: tuple[str, ...], data: Mapping[str, object], tokens: list[str]) -> str | None:
    numbers = [data.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    stated = [tokens[number] for number in numbers if type(number) is int and 0 <= number < len(tokens)]
    return next(iter([*stated, *(each for each in USUAL.get(role, ()) if each in tokens)]), None)


def _word_pieces(tokens: list[str], kinds: np.ndarray, special: Mapping[str, str], data: Mapping[str, object]) -> Tokenizer:
    own = {*special.values()}
    ids: dict[str, int] = {}
    for number, token in enumerate(tokens):
        is_mark = token in own or kinds[number] in (CONTROL, UNKNOWN)
        ids.setdefault(token if is_mark else token[1:] if token.startswith(SPACE) else CONTINUED + token, number)
    made = Tokenizer(models.WordPiece(ids, unk_token=special["unk_token"], continuing_subword_prefix=CONTINUED))
    made.normalizer = normalizers.BertNormalizer(lowercase=data.get("tokenizer.ggml.normalizer.lowercase", True) is not False)
    made.pre_tokenizer, made.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(CONTINUED)
    return made


def _unigrams(tokens: list[str], special: Mapping[str, str], data: Mapping[str, object]) -> Tokenizer:
    scores = data.get("tokenizer.ggml.scores")
    pieces = [(token, float(score)) for token, score in zip(tokens, scores, strict=True)]
    made = Tokenizer(models.Unigram(pieces, tokens.index(special["unk_token"]), False))
    charsmap = data.get("tokenizer.ggml.precompiled_charsmap")
    steps = [normalizers.Precompiled(charsmap.astype(np.uint8).tobytes())] if isinstance(charsmap, np.ndarray) and len(charsmap) else []
    made.normalizer = normalizers.Sequence([*steps, normalizers.Replace(Regex(" {2,}"), " ")])
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, "always")])
    made.decoder = decoders.Metaspace(SPACE, "always")
    return made


def _joined(kind: str, made: Tokenizer, special: Mapping[str, str]) -> processors.TemplateProcessing:
    """Post-processor: special tokens around a text and between a pair (RoBERTa has two there); BERT's second text has another token
    type."""
    first, last = special["cls_token"], special["sep_token"]
    pair = {"bert": f"{first} $A {last} $B:1 {last}:1", "gpt2": f"{first} $A {last} $B {last}",
            "t5": f"{first} $A {last} {last} $B {last}"}[kind]
    named = [(each, made.token_to_id(each)) for each in dict.fromkeys((first, last))]
    return processors.TemplateProcessing(single=f"{first} $A {last}", pair=pair, special_tokens=named)
