"""Tokenizers published as ranked byte strings, converted for the `tokenizers` library: Mistral's tekken.json, Kimi's tiktoken.model and
Hunyuan's hy.tiktoken.

A byte string's rank is its id, and BPE merges the pair with the lowest resulting rank first; a word that is a token as a whole is not
split. tekken.json holds its pattern and its special tokens, whose ids come first. The others have a line "base64 rank" each; their pattern
is in Python code, which is not executed, so only known ones are supported. Their special tokens come after the ranks, named by
tokenizer_config.json or, for Hunyuan, by the code.
"""

from __future__ import annotations

import binascii
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from ..files.bounded_read import MAX_TOKENIZER_NBYTES, read_bounded
from ..gguf.pre_tokenizers import KIMI, LLAMA3_WORDS, QWEN2_WORDS, SPLITTERS, same_pattern
from ..hub import RANKS
from ..templates.template import ChatTemplate
from .token_bytes import byte_to_unicode

TEKKEN, TIKTOKEN, HUNYUAN, _ = RANKS
MAX_TOKEN_NBYTES = 1024  # every split of a token is looked up; the longest published one has 256 bytes
MAX_MERGES = 1 << 23
MAX_SPLIT_NBYTES = 1 << 30  # total length of all splits; published vocabularies have a hundredth of it
# Special tokens of the first versions, whose tekken.json does not list them.
DEFAULT_SPECIAL_TOKENS = ("<unk> <s> </s> [INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_RESULTS] [/TOOL_RESULTS] "
                          "[TOOL_CALLS] [IMG] <pad> [IMG_BREAK] [IMG_END] [PREFIX] [MIDDLE] [SUFFIX] "
                          "[SYSTEM_PROMPT] [/SYSTEM_PROMPT] [TOOL_CONTENT]").split()
ROLES = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}
# Names of the Python code whose patterns are known.
KNOWN_PROGRAMS = {TIKTOKEN: ("tokenization_kimi", "tokenization_moonshot"), HUNYUAN: ("tokenization_hy",)}
HUNYUAN_SPECIAL = ["<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", *(f"<|extra_{number}|>" for number in range(205))]
HUNYUAN_ROLES = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "pad_token": "<|pad|>"}
RESERVED_TOKENS = 256  # ids after Kimi's ranks are special tokens, named or not
# Mistral's chat templates by tokenizer version. The system prompt is part of the last question up to version 3, and comes first in later
# versions. Reasoning models of versions 11 and 13 use tags that their vocabulary shares with other models; comments mention them here, so
# that `Tokenizer.think_tags` finds them.
TEMPLATE_V3 = """{{ bos_token }}{% for message in messages %}{% if message.role == 'user' %}[INST]
{%- if loop.last and messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{% endif %}{{ message.content }}[/INST]
{%- elif message.role == 'assistant' %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""
TEMPLATE_V7 = """{{ bos_token }}{% for message in messages %}{% if message.role == 'system' -%}
[SYSTEM_PROMPT]{{ message.content }}[/SYSTEM_PROMPT]{% elif message.role == 'user' %}[INST]{{ message.content }}[/INST]
{%- else %}{{ message.content }}{{ eos_token }}{% endif %}{% endfor %}"""
TEMPLATES = {"v3": TEMPLATE_V3, "v7": TEMPLATE_V7, "v11": TEMPLATE_V7 + "{# <think> </think> #}",
             "v13": TEMPLATE_V7 + "{# [THINK] [/THINK] #}"}


class VocabularyError(ValueError):
    """Why a vocabulary file is invalid; the text says where."""


@dataclass(frozen=True)
class FileTokenizer:
    """A tokenizer and what its file states."""

    path: Path
    backend: Tokenizer
    special: dict[str, str]  # special tokens by role
    add_bos: bool = False
    template: ChatTemplate | None = None  # the chat template of the file's version, if known
    ends: tuple[int, ...] = ()  # further ids that end a turn


def read_tiktoken(path: Path, settings: Mapping[str, Any]) -> FileTokenizer:
    """The tokenizer of a file of ranks; `settings`: tokenizer_config.json next to it. Raises VocabularyError, OSError."""
    data = read_bounded(path, MAX_TOKENIZER_NBYTES)
    return _tekken(path, data) if path.name == TEKKEN else _tiktoken(path, data, settings)


def _tekken(path: Path, data: bytes) -> FileTokenizer:
    try:
        content = json.loads(data)
        config, entries = content["config"], content["vocab"]
        pattern, version, vocab_size, num_special = (config[key]
                                                     for key in ("pattern", "version", "default_vocab_size", "default_num_special_tokens"))
        named = [(entry["rank"], entry["token_str"]) for entry in content.get("special_tokens") or ()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise VocabularyError(f"it is not a valid tekken.json: {type(error).__name__} {str(error)[:80]}") from None
    if not all(type(token_id) is int and 0 < token_id < 1 << 24
               for token_id in (vocab_size, num_special)) or not num_special < vocab_size <= num_special + len(entries):
        raise VocabularyError(f"it names {vocab_size!r} tokens, of which {num_special!r} are special, and has {len(entries)} ranks")
    if not isinstance(pattern, str) or not all(isinstance(name, str) and type(rank) is int for rank, name in named):
        raise VocabularyError("its pattern or one of its special tokens is not text")
    names = dict(named) or dict(enumerate(DEFAULT_SPECIAL_TOKENS))
    specials = [AddedToken(names.get(token_id, f"<SPECIAL_{token_id}>"), special=True, normalized=False) for token_id in range(num_special)]
    if any(not 0 <= rank < num_special for rank in names) or len({token.content for token in specials}) != num_special:
        raise VocabularyError("the ids of its special tokens are not consecutive")
    ranks = _parse_ranks((entry.get("token_bytes"), entry.get("rank")) for entry in entries[: vocab_size - num_special])
    tokenizer = _backend(ranks, num_special, pattern, specials, 0)
    special = {role: text for role, text in ROLES.items() if text in names.values()}
    template_source = TEMPLATES.get(version) if "[INST]" in names.values() else None
    return FileTokenizer(path, tokenizer, special, True, None if template_source is None else ChatTemplate(template_source, special))


def _tiktoken(path: Path, data: bytes, settings: Mapping[str, Any]) -> FileTokenizer:
    if not any(program in json.dumps(settings.get("auto_map")) for program in KNOWN_PROGRAMS[path.name]):
        raise VocabularyError("its pre-tokenizer pattern is in Python code that tokenizer_config.json does not name as "
                              f"{' or '.join(KNOWN_PROGRAMS[path.name])}")
    lines = [line.split() for line in data.splitlines()]
    if any(len(line) != 2 or not line[1].isdigit() or len(line[1]) > 9 for line in lines):
        raise VocabularyError("one of its lines is not a token and a rank")
    if path.name == HUNYUAN:  # its code numbers the lines itself, without duplicates
        ranks = _parse_ranks((text, token_id) for token_id, text in enumerate(dict.fromkeys(text for text, _ in lines)))
        specials = [AddedToken(name, special=True, normalized=False) for name in HUNYUAN_SPECIAL]
        tokenizer = _backend(ranks, 0, QWEN2_WORDS, specials, len(ranks))
        tokenizer.normalizer = normalizers.NFC()
        return FileTokenizer(path, tokenizer, HUNYUAN_ROLES)
    ranks = _parse_ranks((line[0], int(line[1])) for line in lines)
    entries = settings.get("added_tokens_decoder")
    named = {token_id: entry for token_id, entry in (entries if isinstance(entries, dict) else {}).items() if isinstance(entry, dict)}
    specials = []
    for token_id in range(len(ranks), len(ranks) + RESERVED_TOKENS):
        entry = named.get(str(token_id), {})
        name = entry.get("content")
        specials.append(AddedToken(name if isinstance(name, str) and name else f"<|reserved_token_{token_id}|>", normalized=False,
                                   special=entry.get("special") is not False))
    if len({token.content for token in specials}) != RESERVED_TOKENS:
        raise VocabularyError("tokenizer_config.json gives two special tokens the same name")
    return FileTokenizer(path, _backend(ranks, 0, KIMI.patterns[0], specials, len(ranks)), {})


def _parse_ranks(entries: Iterable[tuple[object, object]]) -> dict[bytes, int]:
    """Byte string -> rank, from entries in order of rank."""
    ranks: dict[bytes, int] = {}
    work = 0
    for index, (text, rank) in enumerate(entries):
        try:
            token = binascii.a2b_base64(text)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            raise VocabularyError(f"its token {index} is not base64") from None
        if rank != index or not token or len(token) > MAX_TOKEN_NBYTES or ranks.setdefault(token, index) != index:
            raise VocabularyError(f"its token {index} is empty, too long, out of order or a duplicate")
        work += len(token) ** 2
        if work > MAX_SPLIT_NBYTES:
            raise VocabularyError("its tokens exceed the size limits of a vocabulary")
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise VocabularyError("it lacks tokens for some of the 256 bytes")
    return ranks


def _backend(ranks: Mapping[bytes, int], first: int, pattern: str, specials: list[AddedToken], first_special: int) -> Tokenizer:
    """A tokenizer with `ranks` numbered from `first` and `specials` from `first_special`."""
    spell = _byte_level_speller()
    names = {token: spell(token) for token in ranks}
    vocab = {names[token]: first + rank for token, rank in ranks.items()}
    for token_id, token in enumerate(specials, first_special):
        if vocab.setdefault(token.content, token_id) != token_id:
            raise VocabularyError(f"the special token {token.content[:40]!r} is also an ordinary token")
    merges = [(names[left], names[right]) for left, right in _merges(ranks)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False, ignore_merges=True))
    tokenizer.pre_tokenizer = _pre_tokenizer(pattern)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(specials)
    return tokenizer


def _merges(ranks: Mapping[bytes, int]) -> Iterator[tuple[bytes, bytes]]:
    """Every split of a token into two tokens, lowest rank first: the merges."""
    num_merges = 0
    for token in ranks:
        splits = [(ranks[left], ranks[right], left, right) for position in range(1, len(token))
                if (left := token[:position]) in ranks and (right := token[position:]) in ranks]
        num_merges += len(splits)
        if num_merges > MAX_MERGES:
            raise VocabularyError(f"its tokens imply more than {MAX_MERGES:,} merges")
        for *_, left, right in sorted(splits):
            yield left, right


def fix_mistral_pattern(backend: Tokenizer) -> bool:
    """Replace the pre-tokenizer pattern of a Mistral tokenizer.json that has Llama's by mistake, as early conversions of Mistral Small 3.1
    do; returns whether it did."""
    if backend.pre_tokenizer is None:
        return False
    state = json.loads(backend.pre_tokenizer.__getstate__())
    steps = state["pretokenizers"] if state["type"] == "Sequence" else [state]
    first = steps[0]["pattern"].get("Regex", "") if steps and steps[0]["type"] == "Split" else ""
    if same_pattern(first) != same_pattern(LLAMA3_WORDS):
        return False
    backend.pre_tokenizer = _pre_tokenizer(SPLITTERS["tekken"].patterns[0])
    return True


def _pre_tokenizer(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _byte_level_speller() -> Callable[[bytes], str]:
    """Bytes as byte-level vocabularies write them."""
    table = byte_to_unicode()
    return lambda token: token.decode("latin-1").translate(table)
