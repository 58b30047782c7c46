"""RWKV's World vocabulary, for the `tokenizers` library: byte strings, of which the longest match is taken greedily, from a folder's
rwkv_vocab_v20230424.txt or a GGUF file.

The library has no such model, but a regular expression built from the trie of all byte strings splits a text the same way, into words of a
word-level vocabulary. A line of the file is an id, a Python literal of text or bytes, and its length in bytes; id 0 is the end of a text
and has no line.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from ..files.bounded_read import MAX_TOKENIZER_NBYTES, read_bounded
from .tiktoken_vocabulary import FileTokenizer, VocabularyError
from .token_bytes import byte_to_unicode

END_OF_TEXT = "<|rwkv_tokenizer_end_of_text|>"  # the name of id 0 in published folders
LINE = re.compile(r"""(\d{1,7}) (b?(?:'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*")) (\d{1,4})""")
ESCAPE = re.compile(r"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)  # in tokens of a GGUF file
ESCAPED_CHARS = {"t": "\t", "n": "\n", "r": "\r"}
MAX_TOKEN_NBYTES = 256  # bytes of a token; the longest published one has 128
MAX_TOTAL_NBYTES = 1 << 22  # of all tokens, which limits the trie; a published vocabulary has a tenth of it
MAX_TOKEN_ID = 1 << 22
REGEX_SYNTAX = frozenset("\\.^$*+?{}[]|()-&~#")  # escaped inside and outside of brackets; other escapes have a meaning in some engines
MAX_REGEX_DEPTH = 8  # nested groups of the expression
# The chat template of models whose GGUF file names this format, as in llama.cpp.
WORLD_FORMAT, WORLD_TEMPLATE = "rwkv-world", """{%- for message in messages -%}
{%- if message.role == 'system' %}{{ 'System: ' + message.content | trim + '\\n\\n' }}
{%- elif message.role == 'user' %}{{ 'User: ' + message.content | trim + '\\n\\n' }}{% if loop.last %}{{ 'Assistant:' }}{% endif %}
{%- elif message.role == 'assistant' %}{{ 'Assistant: ' + message.content | trim + '\\n\\n' }}{% endif %}
{%- endfor -%}"""


def read_rwkv(path: Path, settings: Mapping[str, Any]) -> FileTokenizer:
    """The tokenizer of a folder's file; `settings`: tokenizer_config.json next to it. Raises VocabularyError, OSError."""
    tokens: dict[bytes, int] = {}
    numbers: set[int] = set()
    for line_number, line in enumerate(read_bounded(path, MAX_TOKENIZER_NBYTES).decode("utf-8", "replace").split("\n"), 1):
        if not line.rstrip("\r"):
            continue
        token_id, token = _read(line.rstrip("\r"), line_number)
        if token_id in numbers or tokens.setdefault(token, token_id) != token_id:
            raise VocabularyError(f"its line {line_number} repeats an id or a text")
        numbers.add(token_id)
    entries = settings.get("added_tokens_decoder")
    named = {int(token_id): entry.get("content") for token_id, entry in (entries if isinstance(entries, dict) else {}).items()
             if isinstance(entry, dict) and str(token_id).isdecimal() and len(str(token_id)) < 8}
    special = {token_id: text for token_id, text in {0: END_OF_TEXT, **named}.items() if isinstance(text, str) and text
               and token_id not in numbers}
    tokenizer = rwkv_tokenizer(tokens, special)
    roles = {"bos_token": special[0], "eos_token": special[0]} if 0 in special else {}
    end = settings.get("eos_token")
    end_id = tokens.get(end.encode()) if isinstance(end, str) else None  # an ordinary text that ends a turn, such as two newlines
    return FileTokenizer(path, tokenizer, roles, ends=() if end_id is None else (end_id,))


def _read(line: str, line_number: int) -> tuple[int, bytes]:
    """Id and bytes of a line. Raises VocabularyError."""
    match, token = LINE.fullmatch(line) if len(line) <= 8 * MAX_TOKEN_NBYTES else None, None
    if match:
        literal = match[2]
        try:
            # slow, so only for escapes and byte strings
            text = literal[1:-1] if "\\" not in literal and literal[0] != "b" else ast.literal_eval(literal)
            token = text.encode() if isinstance(text, str) else text
        except (ValueError, SyntaxError):
            token = None
    if not token or len(token) != int(match[3]):
        raise VocabularyError(f"its line {line_number} is not an id, a text and its length in bytes")
    return int(match[1]), token


def gguf_tokens(texts: Sequence[str], token_ids: Iterable[int]) -> dict[bytes, int]:
    """Byte strings and their ids, from tokens as a GGUF file writes them; the first of equal ones."""
    tokens: dict[bytes, int] = {}
    for token_id in token_ids:
        tokens.setdefault(unescape_bytes(texts[token_id]), token_id)
    tokens.pop(b"", None)
    return tokens


def unescape_bytes(text: str) -> bytes:
    """Bytes of a GGUF token, in which non-printing bytes are Python escapes."""
    data = bytearray()
    start = 0
    for match in ESCAPE.finditer(text):
        data += text[start : match.start()].encode("utf-8", "replace")
        escape = match[1]
        data += bytes([int(escape[1:], 16)]) if len(escape) == 3 else ESCAPED_CHARS.get(escape, escape).encode("utf-8", "replace")
        start = match.end()
    return bytes(data + text[start:].encode("utf-8", "replace"))


def rwkv_tokenizer(tokens: Mapping[bytes, int], special: Mapping[int, str]) -> Tokenizer:
    """The library's tokenizer for byte strings and `special` tokens by id. Raises VocabularyError."""
    if any(bytes([byte]) not in tokens for byte in range(256)):
        raise VocabularyError("it lacks tokens for some of the 256 bytes")
    if max(map(len, tokens)) > MAX_TOKEN_NBYTES or sum(map(len, tokens)) > MAX_TOTAL_NBYTES or max((*tokens.values(),
                                                                                                    *special)) > MAX_TOKEN_ID:
        raise VocabularyError("its tokens exceed the size limits of a vocabulary")
    table = byte_to_unicode()
    vocab = {token.decode("latin-1").translate(table): token_id for token, token_id in tokens.items()}
    trie: dict = {}
    for word in vocab:
        node = trie
        for char in word:
            node = node.setdefault(char, {})
        node[""] = {}
    used_ids = {*vocab.values()}
    for token_id, text in special.items():
        if token_id in used_ids or vocab.setdefault(text, token_id) != token_id:
            raise VocabularyError(f"the special token {text[:40]!r} is a duplicate")
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=next(iter(vocab))))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
                                                  pre_tokenizers.Split(Regex(_pattern(trie)), "isolated")])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special.values()])
    return tokenizer


def _pattern(node: Mapping[str, dict], depth: int = 0) -> str:
    """Regular expression of the words below a trie node that matches the longest: continuations before ends. Below a nesting limit, as in
    runs of spaces, words are alternatives, longest first."""
    if depth == MAX_REGEX_DEPTH:
        alternatives = sorted(_words(node), key=len, reverse=True)
        return f"(?:{'|'.join(''.join(map(_escaped, word)) for word in alternatives if word)})" + "?" * ("" in node)
    end_chars = [char for char, child in node.items() if char and child.keys() == {""}]
    alternatives = []
    for char, child in node.items():
        if char and child.keys() != {""}:
            is_single_path = len(child) == 1  # no group is needed
            alternatives.append(_escaped(char) + _pattern(child, depth + (not is_single_path)))
    if end_chars:
        alternatives.append(f"[{''.join(map(_escaped, end_chars))}]")
    joined = "|".join(alternatives)
    return f"(?:{joined})?" if "" in node else f"(?:{joined})" if len(alternatives) > 1 else joined


def _words(node: Mapping[str, dict]) -> Iterator[str]:
    for char, child in node.items():
        if char:
            yield from (char + word for word in _words(child))
        else:
            yield ""


def _escaped(char: str) -> str:
    return "\\" + char if char in REGEX_SYNTAX else char
