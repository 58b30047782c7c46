"""Builds a tokenizer from GGUF metadata with the `tokenizers` library: byte-level BPE, SentencePiece with scores, or RWKV's greedy
longest match.

The kind is `tokenizer.ggml.model`: "gpt2" has merges in order of rank; "llama" has only scores, from which the implied merges are derived
(every split of a token into two known ones, best score first); "gemma4" is like "llama", but with merges. First, every list is checked
against the others' lengths.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

from ...offload.gguf_header import GgufHeader, shown_value
from ...offload.safetensors_header import shown
from ..templates.template import TOOL_TEMPLATE, ChatTemplate
from ..tokenizer import END_OF_TURN, END_TAG, TEKKEN_PROBES, TEKKEN_WARNING, TokenizerError
from ..tokenizer import Tokenizer as ModelTokenizer
from ..tokens.rwkv_vocabulary import WORLD_FORMAT, WORLD_TEMPLATE, gguf_tokens, rwkv_tokenizer
from .pre_tokenizers import LLAMA3_WORDS, SPLITTERS, pre_tokenizer
from .store import read_header

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = range(1, 7)
SPACE = "▁"
WORLD = "rwkv"
MODELS = ("gpt2", "llama", "gemma4", WORLD)
# Special token -> names in tokenizer.ggml.<>_token_id, the newer first. Those after pad_token are for fill-in-the-middle.
ROLES = {"bos_token": ("bos",), "eos_token": ("eos",), "unk_token": ("unknown",), "pad_token": ("padding",),
         "prefix_token": ("fim_pre", "prefix"), "suffix_token": ("fim_suf", "suffix"), "middle_token": ("fim_mid", "middle"),
         "fim_pad_token": ("fim_pad",), "fim_rep_token": ("fim_rep",), "fim_sep_token": ("fim_sep",)}
END_ROLES = ("eos", "eot", "eom")
# Some files list these as ordinary tokens; they become control tokens, because templates write them and they end a turn.
TURN_TOKENS = frozenset(END_OF_TURN)
# The special tokens of Phi 3 strip the white space after them, which a file does not state; these do not.
PHI_UNSTRIPPED = frozenset(("<unk>", "<s>", "<|endoftext|>"))
OTHER_FILE_HINT = "give a file that holds the model's tokenizer, or the folder of the original checkpoint"
MAX_TOKEN_LENGTH = 256  # characters of a token that merges are derived for: each split of it is looked up
MAX_SPLITS = 1 << 22  # of all tokens; a vocabulary of 256,000 has a fifth of it


@dataclass(frozen=True)
class Vocabulary:
    """The tokenizer metadata of a file, validated."""

    path: Path
    model: str
    pre: str  # name of the pre-tokenizer
    tokens: list[str]  # by id
    kinds: np.ndarray  # by id
    scores: np.ndarray | None  # by id, of a SentencePiece vocabulary
    merges: list[str]  # of a byte-level vocabulary
    ids: Mapping[str, int]  # of special tokens, by name in the file
    add_bos: bool
    space_prefix: bool
    template: str | None
    rstrip: bool = False  # special tokens strip the white space after them
    remarks: tuple[str, ...] = ()  # notices where the file's metadata is overridden
    for_tools: str | None = None  # the template to use if there are tools

    @property
    def special_tokens(self) -> dict[str, str]:
        ids = {role: next((self.ids[name] for name in names if name in self.ids), None) for role, names in ROLES.items()}
        return {role: self.tokens[number] for role, number in ids.items() if number is not None}


def read_vocabulary(header: GgufHeader) -> Vocabulary:
    """The vocabulary, its lists checked against one another. Raises TokenizerError naming the key."""
    data, path = header.metadata, header.path

    def fail(key: str, expected: str) -> TokenizerError:
        return TokenizerError(f"{path} states {key} {shown_value(data.get(key))}, expected {expected}", OTHER_FILE_HINT)

    model = data.get("tokenizer.ggml.model")
    if model is None or (isinstance(model, str) and model in ("none", "no_vocab")):
        raise TokenizerError(f"{path} holds no tokenizer", OTHER_FILE_HINT)
    if not isinstance(model, str) or model not in MODELS:
        raise TokenizerError(f"{path} has a tokenizer of kind {shown_value(model)}, which is not supported", f"known: {', '.join(MODELS)}")
    tokens = data.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list) or not tokens:
        raise fail("tokenizer.ggml.tokens", "a list of texts")
    kinds, scores = data.get("tokenizer.ggml.token_type"), data.get("tokenizer.ggml.scores")
    kinds = np.full(len(tokens), NORMAL) if kinds is None else kinds
    for key, value in (("token_type", kinds), ("scores", scores)):
        if value is not None and not (isinstance(value, np.ndarray) and len(value) == len(tokens)):
            raise fail(f"tokenizer.ggml.{key}", f"{len(tokens)} numbers")
    if model == "llama" and scores is None:
        raise fail("tokenizer.ggml.scores", f"{len(tokens)} numbers")
    merges = data.get("tokenizer.ggml.merges", [])
    if not isinstance(merges, list) or (model not in ("llama", WORLD) and not merges) or any(merge.find(" ", 1) < 1 for merge in merges):
        raise fail("tokenizer.ggml.merges", "a list of pairs of texts")
    pre = data.get("tokenizer.ggml.pre", "default")
    if not isinstance(pre, str):
        raise fail("tokenizer.ggml.pre", "a text")
    if model == "gpt2" and pre not in SPLITTERS:
        raise TokenizerError(f"{path} uses the pre-tokenizer {shown_value(pre)}, which is not supported", OTHER_FILE_HINT)
    ids = {}
    for name in (*(name for names in ROLES.values() for name in names), *END_ROLES):
        value = data.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value < 1 << 32):
            raise fail(f"tokenizer.ggml.{name}_token_id", "a token")
        if value is not None and value < len(tokens):
            ids[name] = value
    default_bos = model != WORLD and (model != "gpt2" or SPLITTERS[pre].bos)
    template = data.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise fail("tokenizer.chat_template", "a text")
    template = WORLD_TEMPLATE if template == WORLD_FORMAT else template
    name = str(data.get("general.name")).lower()  # recognises a Phi 3 converted as another architecture
    rstrip = model == "llama" and (data.get("general.architecture") == "phi3" or "phi-3" in name or "phi3" in name)
    is_tekken = len(tokens) > max(TEKKEN_PROBES) and all(tokens[number] == text for number, text in TEKKEN_PROBES.items())
    remarks = ()
    if model == "gpt2" and is_tekken and SPLITTERS[pre].patterns == (LLAMA3_WORDS,):
        pre, remarks = "tekken", (TEKKEN_WARNING.format(path.name),)
    for_tools = data.get(f"tokenizer.chat_template.{TOOL_TEMPLATE}")
    return Vocabulary(path, model, pre, tokens, kinds, scores, merges, ids, data.get("tokenizer.ggml.add_bos_token", default_bos) is True,
                      data.get("tokenizer.ggml.add_space_prefix", True) is not False, template, rstrip, remarks,
                      for_tools if isinstance(for_tools, str) else None)


def backend(vocabulary: Vocabulary) -> Tokenizer:
    """The library's tokenizer. Raises TokenizerError if the library rejects the lists."""
    try:
        if vocabulary.model == WORLD:
            return _longest_match(vocabulary)
        tokenizer = _byte_level(vocabulary) if vocabulary.model == "gpt2" else _sentence_piece(vocabulary)
        tokens, kinds = vocabulary.tokens, np.array(vocabulary.kinds)
        control = TURN_TOKENS | ({END_TAG} if END_TAG in vocabulary.special_tokens.values() else set())
        kinds[[i for i, token in enumerate(tokens) if token in control and kinds[i] == NORMAL]] = CONTROL
        for special, added_kinds in ((True, (CONTROL, UNKNOWN)), (False, (USER,))):
            added = [AddedToken(tokens[i], special=special, normalized=False,
                                rstrip=vocabulary.rstrip and tokens[i] not in PHI_UNSTRIPPED)
                     for i in np.flatnonzero(np.isin(kinds, added_kinds)) if tokens[i]]
            (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(added)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{vocabulary.path} holds a tokenizer that cannot be built: {shown(str(error))}", OTHER_FILE_HINT) from None
    return tokenizer


def _ids(tokens: Iterable[str]) -> dict[str, int]:
    """Text -> id; of equal texts the first."""
    ids: dict[str, int] = {}
    for number, token in enumerate(tokens):
        ids.setdefault(token, number)
    return ids


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    ids, splitter = _ids(vocabulary.tokens), SPLITTERS[vocabulary.pre]
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=_stated_merges(vocabulary, ids), fuse_unk=False, byte_fallback=False,
                                     ignore_merges=splitter.ignore_merges))
    tokenizer.pre_tokenizer = pre_tokenizer(splitter.patterns)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _longest_match(vocabulary: Vocabulary) -> Tokenizer:
    words, special = (np.flatnonzero(np.isin(vocabulary.kinds, kinds)).tolist() for kinds in ((NORMAL, USER, BYTE), (CONTROL, UNKNOWN)))
    return rwkv_tokenizer(gguf_tokens(vocabulary.tokens, words), {i: vocabulary.tokens[i] for i in special if vocabulary.tokens[i]})


def _stated_merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in vocabulary.merges:
        at = merge.find(" ", 1)
        left, right = merge[:at], merge[at + 1 :]
        if left in ids and right in ids and left + right in ids:
            pairs.append((left, right))
    return pairs


def _sentence_piece(vocabulary: Vocabulary) -> Tokenizer:
    ids = _ids(vocabulary.tokens)
    unknown = vocabulary.special_tokens.get("unk_token")
    merges = implied_merges(vocabulary, ids) if vocabulary.model == "llama" else _stated_merges(vocabulary, ids)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True,
                                     byte_fallback=bool((vocabulary.kinds == BYTE).any())))
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if vocabulary.space_prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if vocabulary.space_prefix else steps)
    return tokenizer


def implied_merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every split of a token into two tokens, the best score first, then by ids. Raises TokenizerError for more of them than any real
    vocabulary has."""
    scores, kinds = vocabulary.scores, vocabulary.kinds
    splits = []
    for number, token in enumerate(vocabulary.tokens):
        if kinds[number] not in (NORMAL, USER, UNUSED) or not 1 < len(token) <= MAX_TOKEN_LENGTH or ids[token] != number:
            continue
        if len(splits) > MAX_SPLITS:
            raise TokenizerError(f"{vocabulary.path} has tokens that can be split in more than {MAX_SPLITS:,} ways", OTHER_FILE_HINT)
        for at in range(1, len(token)):
            left, right = ids.get(token[:at]), ids.get(token[at:])
            if left is not None and right is not None:
                splits.append((-float(scores[number]), number, left, right, token[:at], token[at:]))
    splits.sort(key=lambda split: split[:4])
    return [split[4:] for split in splits]


def load_tokenizer(path: Path, model_rows: int) -> ModelTokenizer:
    """The tokenizer of a file. Raises TokenizerError, TemplateError, CheckpointError."""
    vocabulary = read_vocabulary(read_header(path))
    special = vocabulary.special_tokens
    template = None if vocabulary.template is None else ChatTemplate(vocabulary.template, special, for_tools=vocabulary.for_tools)
    ends = [vocabulary.ids[name] for name in END_ROLES if name in vocabulary.ids]
    return ModelTokenizer(backend(vocabulary), special, vocabulary.add_bos, vocabulary.ids.get("bos"), model_rows, ends, template, path,
                          vocabulary.remarks)


def tokenizer_files(path: Path) -> dict[str, str]:
    """The equivalent tokenizer.json and tokenizer_config.json, as texts."""
    vocabulary = read_vocabulary(read_header(path))
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", **vocabulary.special_tokens,
                                   "add_bos_token": vocabulary.add_bos, "clean_up_tokenization_spaces": False}
    if vocabulary.template is not None:
        settings["chat_template"] = vocabulary.template
    return {"tokenizer.json": backend(vocabulary).to_str(), "tokenizer_config.json": json.dumps(settings, indent=1) + "\n"}
