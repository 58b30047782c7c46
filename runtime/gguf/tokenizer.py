"""Builds a tokenizer from GGUF metadata with the `tokenizers` library: byte-level BPE, SentencePiece with scores, or RWKV's greedy
longest match.

The kind is `tokenizer.ggml.model`: "gpt2" has merges in order of rank, "llama" only scores, from which the implied merges are derived
(every split of a token into two known ones, best score first), and "gemma4" is of the latter kind with merges. Every list is checked
against the others' lengths first.
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
# Ours -> tokenizer.ggml.<>_token_id, the second as older files have it. The last two lines are of filling in the middle.
ROLES = {"bos_token": ("bos",), "eos_token": ("eos",), "unk_token": ("unknown",), "pad_token": ("padding",),
         "prefix_token": ("fim_pre", "prefix"), "suffix_token": ("fim_suf", "suffix"), "middle_token": ("fim_mid", "middle"),
         "fim_pad_token": ("fim_pad",), "fim_rep_token": ("fim_rep",), "fim_sep_token": ("fim_sep",)}
ENDS = ("eos", "eot", "eom")
# Control tokens also where a file has them for words, as some do: templates write them, and they end a turn.
MARKS = frozenset(END_OF_TURN)
# The marks of Phi 3 swallow the blanks and line ends that follow them, which a file does not say; these do not.
PHI_KEEPS = frozenset(("<unk>", "<s>", "<|endoftext|>"))
OTHER_FILE = "give a file that holds the model's tokenizer, or the folder of the original checkpoint"
MOST_PIECE = 256  # characters of a token that could be merged: a cut at every place is looked up
MOST_CUTS = 1 << 22  # of all tokens; a vocabulary of 256,000 has a fifth of it


@dataclass(frozen=True)
class Vocabulary:
    """`tokens` by id with their `kinds`; `scores` of a SentencePiece one, `merges` of a byte-level one. `ids` of special roles. `swallows`:
    white space behind a mark is no part of the text. `remarks`: what is read otherwise than the file says."""

    path: Path
    model: str
    pre: str
    tokens: list[str]
    kinds: np.ndarray
    scores: np.ndarray | None
    merges: list[str]
    ids: Mapping[str, int]
    add_bos: bool
    space_prefix: bool
    template: str | None
    swallows: bool = False
    remarks: tuple[str, ...] = ()
    for_tools: str | None = None  # another template, where there are tools

    @property
    def special_tokens(self) -> dict[str, str]:
        found = {role: next((self.ids[name] for name in names if name in self.ids), None) for role, names in ROLES.items()}
        return {role: self.tokens[number] for role, number in found.items() if number is not None}


def read_vocabulary(header: GgufHeader) -> Vocabulary:
    """The lists, checked against one another. Raises TokenizerError naming the key."""
    data, path = header.metadata, header.path

    def fail(key: str, expected: str) -> TokenizerError:
        return TokenizerError(f"{path} states {key} {shown_value(data.get(key))}, expected {expected}", OTHER_FILE)

    model = data.get("tokenizer.ggml.model")
    if model is None or (isinstance(model, str) and model in ("none", "no_vocab")):
        raise TokenizerError(f"{path} holds no tokenizer", OTHER_FILE)
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
        raise TokenizerError(f"{path} uses the pre-tokenizer {shown_value(pre)}, which is not supported", OTHER_FILE)
    ids = {}
    for name in (*(name for names in ROLES.values() for name in names), *ENDS):
        value = data.get(f"tokenizer.ggml.{name}_token_id")
        if value is not None and (type(value) is not int or not 0 <= value < 1 << 32):
            raise fail(f"tokenizer.ggml.{name}_token_id", "a token")
        if value is not None and value < len(tokens):
            ids[name] = value
    default = model != WORLD and (model != "gpt2" or SPLITTERS[pre].bos)
    template = data.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise fail("tokenizer.chat_template", "a text")
    template = WORLD_TEMPLATE if template == WORLD_FORMAT else template
    name = str(data.get("general.name")).lower()  # of a Phi 3 that was written as another architecture
    swallows = model == "llama" and (data.get("general.architecture") == "phi3" or "phi-3" in name or "phi3" in name)
    mistral = len(tokens) > max(TEKKEN_PROBES) and all(tokens[number] == text for number, text in TEKKEN_PROBES.items())
    remarks = ()
    if model == "gpt2" and mistral and SPLITTERS[pre].patterns == (LLAMA3_WORDS,):
        pre, remarks = "tekken", (TEKKEN_WARNING.format(path.name),)
    return Vocabulary(path, model, pre, tokens, kinds, scores, merges, ids, data.get("tokenizer.ggml.add_bos_token", default) is True,
                      data.get("tokenizer.ggml.add_space_prefix", True) is not False, template, swallows, remarks,
                      for_tools if isinstance(for_tools := data.get(f"tokenizer.chat_template.{TOOL_TEMPLATE}"), str) else None)


def backend(vocabulary: Vocabulary) -> Tokenizer:
    """The library's tokenizer. Raises TokenizerError where the lists do not make one."""
    try:
        if vocabulary.model == WORLD:
            return _longest(vocabulary)
        made = _byte_level(vocabulary) if vocabulary.model == "gpt2" else _sentence_piece(vocabulary)
        tokens, kinds = vocabulary.tokens, np.array(vocabulary.kinds)
        marks = MARKS | ({END_TAG} if END_TAG in vocabulary.special_tokens.values() else set())
        kinds[[i for i, token in enumerate(tokens) if token in marks and kinds[i] == NORMAL]] = CONTROL
        for special, some in ((True, (CONTROL, UNKNOWN)), (False, (USER,))):
            found = [AddedToken(tokens[i], special=special, normalized=False, rstrip=vocabulary.swallows and tokens[i] not in PHI_KEEPS)
                     for i in np.flatnonzero(np.isin(kinds, some)) if tokens[i]]
            (made.add_special_tokens if special else made.add_tokens)(found)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"{vocabulary.path} holds a tokenizer that cannot be built: {shown(str(error))}", OTHER_FILE) from None
    return made


def _ids(tokens: Iterable[str]) -> dict[str, int]:
    """Text -> id, the first of equal ones."""
    ids: dict[str, int] = {}
    for number, token in enumerate(tokens):
        ids.setdefault(token, number)
    return ids


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    ids, cutter = _ids(vocabulary.tokens), SPLITTERS[vocabulary.pre]
    made = Tokenizer(models.BPE(vocab=ids, merges=_stated_merges(vocabulary, ids), fuse_unk=False, byte_fallback=False,
                                ignore_merges=cutter.whole))
    made.pre_tokenizer = pre_tokenizer(cutter.patterns)
    made.decoder = decoders.ByteLevel()
    return made


def _longest(vocabulary: Vocabulary) -> Tokenizer:
    words, special = (np.flatnonzero(np.isin(vocabulary.kinds, some)).tolist() for some in ((NORMAL, USER, BYTE), (CONTROL, UNKNOWN)))
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
    made = Tokenizer(models.BPE(vocab=ids, merges=merges, unk_token=unknown, fuse_unk=True,
                                byte_fallback=bool((vocabulary.kinds == BYTE).any())))
    spaces = normalizers.Replace(" ", SPACE)
    made.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if vocabulary.space_prefix else spaces
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if vocabulary.space_prefix else steps)
    return made


def implied_merges(vocabulary: Vocabulary, ids: Mapping[str, int]) -> list[tuple[str, str]]:
    """Every cut of a token into two tokens, the best score first; of one token the cuts whose parts come first. Raises TokenizerError for
    more of them than any vocabulary has."""
    scores, kinds = vocabulary.scores, vocabulary.kinds
    found = []
    for number, token in enumerate(vocabulary.tokens):
        if kinds[number] not in (NORMAL, USER, UNUSED) or not 1 < len(token) <= MOST_PIECE or ids[token] != number:
            continue
        if len(found) > MOST_CUTS:
            raise TokenizerError(f"{vocabulary.path} has tokens that can be split in more than {MOST_CUTS:,} ways", OTHER_FILE)
        for at in range(1, len(token)):
            left, right = ids.get(token[:at]), ids.get(token[at:])
            if left is not None and right is not None:
                found.append((-float(scores[number]), number, left, right, token[:at], token[at:]))
    found.sort(key=lambda each: each[:4])
    return [each[4:] for each in found]


def load_tokenizer(path: Path, model_rows: int) -> ModelTokenizer:
    """The tokenizer of a file. Raises TokenizerError, TemplateError, CheckpointError."""
    vocabulary = read_vocabulary(read_header(path))
    special = vocabulary.special_tokens
    template = None if vocabulary.template is None else ChatTemplate(vocabulary.template, special, for_tools=vocabulary.for_tools)
    ends = [vocabulary.ids[name] for name in ENDS if name in vocabulary.ids]
    return ModelTokenizer(backend(vocabulary), special, vocabulary.add_bos, vocabulary.ids.get("bos"), model_rows, ends, template, path,
                          vocabulary.remarks)


def tokenizer_files(path: Path) -> dict[str, str]:
    """The texts of tokenizer.json and tokenizer_config.json that say the same."""
    vocabulary = read_vocabulary(read_header(path))
    settings: dict[str, object] = {"tokenizer_class": "PreTrainedTokenizerFast", **vocabulary.special_tokens,
                                   "add_bos_token": vocabulary.add_bos, "clean_up_tokenization_spaces": False}
    if vocabulary.template is not None:
        settings["chat_template"] = vocabulary.template
    return {"tokenizer.json": backend(vocabulary).to_str(), "tokenizer_config.json": json.dumps(settings, indent=1) + "\n"}
