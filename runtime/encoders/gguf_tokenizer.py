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

CONTINUATION_PREFIX = "##"
TOKENIZER_TYPES = ("bert", "gpt2", "t5")
# Role -> metadata keys that may state its token id. "seperator" is llama.cpp's spelling, in all files.
ROLES: Mapping[str, tuple[str, ...]] = {
    "cls_token": ("cls", "bos"), "sep_token": ("seperator", "eos"), "unk_token": ("unknown",), "pad_token": ("padding",),
    "mask_token": ("mask",)}
# Role -> tokens that have it if the file states none.
DEFAULT_TOKENS = {"cls_token": ("[CLS]", "<s>"), "sep_token": ("[SEP]", "</s>"), "unk_token": ("[UNK]", "<unk>")}


def load_file_tokenizer(path: Path, rows: int) -> ModelTokenizer:
    """The tokenizer of a file whose embedding table has `rows` rows. Raises TokenizerError."""
    metadata = read_header(path).metadata
    tokenizer_type, tokens = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.tokens")
    if tokenizer_type not in TOKENIZER_TYPES or not isinstance(tokens, list) or not tokens:
        raise TokenizerError(f"{path} has tokenizer type {shown(str(tokenizer_type))}, which is not supported for encoders",
                             f"known: {', '.join(TOKENIZER_TYPES)}")
    token_types = metadata.get("tokenizer.ggml.token_type")
    if not isinstance(token_types, np.ndarray) or len(token_types) != len(tokens):
        raise TokenizerError(f"{path} has no token type for each of its {len(tokens)} tokens", OTHER_FILE_HINT)
    special = {role: token for role, names in ROLES.items() if (token := _special_token(role, names, metadata, tokens)) is not None}
    if missing := {"cls_token", "sep_token", *(() if tokenizer_type == "gpt2" else ("unk_token",))} - special.keys():
        raise TokenizerError(f"{path} names no {sorted(missing)[0]}", OTHER_FILE_HINT)
    try:
        if tokenizer_type == "gpt2":
            tokenizer = backend(read_vocabulary(read_header(path)))
        elif tokenizer_type == "bert":
            tokenizer = _word_piece_tokenizer(tokens, token_types, special, metadata)
        else:
            tokenizer = _unigram_tokenizer(tokens, special, metadata)
        special_tokens = {*special.values(), *(tokens[index] for index in np.flatnonzero(np.isin(token_types, (CONTROL,))))}
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in sorted(special_tokens) if token])
        is_bert_with_bpe = tokenizer_type == "gpt2" and metadata.get("general.architecture") == "bert"
        tokenizer.post_processor = _post_processor("t5" if is_bert_with_bpe else tokenizer_type, tokenizer, special)
    except TokenizerError:
        raise
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{path} holds a tokenizer that cannot be built: {shown(str(error))}", OTHER_FILE_HINT) from None
    return ModelTokenizer(tokenizer, special, False, None, rows, (), None, path)


def _special_token(role: str, names: tuple[str, ...], metadata: Mapping[str, object], tokens: list[str]) -> str | None:
    """The token of a role, by metadata or else by its usual spelling; None if there is none."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in names]
    named = [tokens[token_id] for token_id in ids if type(token_id) is int and 0 <= token_id < len(tokens)]
    return next(iter([*named, *(token for token in DEFAULT_TOKENS.get(role, ()) if token in tokens)]), None)


def _word_piece_tokenizer(tokens: list[str], token_types: np.ndarray, special: Mapping[str, str],
                          metadata: Mapping[str, object]) -> Tokenizer:
    special_tokens = {*special.values()}
    ids: dict[str, int] = {}
    for token_id, token in enumerate(tokens):
        if token not in special_tokens and token_types[token_id] not in (CONTROL, UNKNOWN):
            token = token[1:] if token.startswith(SPACE) else CONTINUATION_PREFIX + token
        ids.setdefault(token, token_id)
    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=special["unk_token"], continuing_subword_prefix=CONTINUATION_PREFIX))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=metadata.get("tokenizer.ggml.normalizer.lowercase", True) is not False)
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece(CONTINUATION_PREFIX)
    return tokenizer


def _unigram_tokenizer(tokens: list[str], special: Mapping[str, str], metadata: Mapping[str, object]) -> Tokenizer:
    scores = metadata.get("tokenizer.ggml.scores")
    pieces = [(token, float(score)) for token, score in zip(tokens, scores, strict=True)]
    tokenizer = Tokenizer(models.Unigram(pieces, tokens.index(special["unk_token"]), False))
    charsmap = metadata.get("tokenizer.ggml.precompiled_charsmap")
    steps = [normalizers.Precompiled(charsmap.astype(np.uint8).tobytes())] if isinstance(charsmap, np.ndarray) and len(charsmap) else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace(SPACE, "always")])
    tokenizer.decoder = decoders.Metaspace(SPACE, "always")
    return tokenizer


def _post_processor(tokenizer_type: str, tokenizer: Tokenizer, special: Mapping[str, str]) -> processors.TemplateProcessing:
    """Puts special tokens around a text and between a pair: RoBERTa has two between. BERT's second text has token type 1."""
    first, last = special["cls_token"], special["sep_token"]
    pair = {"bert": f"{first} $A {last} $B:1 {last}:1", "gpt2": f"{first} $A {last} $B {last}",
            "t5": f"{first} $A {last} {last} $B {last}"}[tokenizer_type]
    special_tokens = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((first, last))]
    return processors.TemplateProcessing(single=f"{first} $A {last}", pair=pair, special_tokens=special_tokens)
