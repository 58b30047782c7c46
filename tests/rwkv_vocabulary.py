"""A small RWKV vocabulary for tests: all bytes, some words, line ends, and partial characters; as a folder's file, and as in a GGUF file.
"""

from pathlib import Path

import gguf

from effllm.runtime.hub import WORLD

WORDS = ["\n\n", "\r\n", "  ", "User", "Assistant", ": ", " the", "the", "then", " there", "thereof", "ere", "ab", "abc", "abcdef", "de",
         "'\"", "\\n", "\\", "[a-z]", "(?:", "||", "<b>", "中", "中文", "文", "é", "ＡＢ", "\u200b", "😀", "😀😀"]
PARTS = [b"\xe4\xb8", b"\xf0\x9f", b"\x00\x01", b"\xff\xfe", b" \xe4", b"\xad"]
TOKENS = {token: number for number, token in enumerate(dict.fromkeys(
    [bytes([byte]) for byte in range(256)] + sorted({word.encode() for word in WORDS} | {*PARTS})), 1)}
END = "<|rwkv_tokenizer_end_of_text|>"
SETTINGS = {"tokenizer_class": "Rwkv6Tokenizer", "bos_token": END, "eos_token": "\n\n", "unk_token": END, "pad_token": END,
            "added_tokens_decoder": {"0": {"content": END, "special": True}}, "chat_template": (
                "{% for message in messages %}{{ message.role | capitalize + ': ' + message.content + '\\n\\n' }}{% endfor %}"
                "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}")}


def lines() -> str:
    """As published: text where the bytes are valid text, bytes otherwise."""
    found = []
    for token, number in TOKENS.items():
        try:
            said = repr(token.decode())
        except UnicodeDecodeError:
            said = repr(token)
        found.append(f"{number} {said} {len(token)}\n")
    return "".join(found)


def write_vocabulary(folder: Path) -> None:
    (folder / WORLD).write_text(lines(), encoding="utf-8", newline="")


def add_vocabulary(writer: gguf.GGUFWriter, rows: int, template: str = "rwkv-world") -> None:
    """As llama.cpp's converter does it."""
    padding = [f"[PAD{number}]" for number in range(len(TOKENS) + 1, rows)]
    writer.add_tokenizer_model("rwkv")
    writer.add_token_list([b"<s>", *(repr(token)[2:-1].encode() for token in TOKENS), *(each.encode() for each in padding)])
    writer.add_token_types([gguf.TokenType.CONTROL, *[gguf.TokenType.NORMAL] * len(TOKENS), *[gguf.TokenType.UNUSED] * len(padding)])
    writer.add_chat_template(template)
    for role, number in (("bos", 0), ("eos", 0), ("unk", 0), ("eot", TOKENS[b"\n\n"])):
        getattr(writer, f"add_{role}_token_id")(number)


def greedy(text: bytes) -> list[int]:
    """Token ids by greedy longest match from the start."""
    numbers, at = [], 0
    while at < len(text):
        length = next(length for length in range(len(text) - at, 0, -1) if text[at : at + length] in TOKENS)
        numbers.append(TOKENS[text[at : at + length]])
        at += length
    return numbers
