"""What a conversation came to, in an item that its program holds and does not read.

The API calls its text encrypted. Here it is the words themselves in base64, with a mark before them: they are the program's own
conversation, and a server that was started anew is to read them too."""

from __future__ import annotations

import base64
import binascii

from .problems import Problem

MARK, ALONE = b"effllm:", b"effllm.alone:"  # the latter stands for all that was said before it
HEAD = "What was said before, in short:\n"


def encode_summary(text: str, alone: bool = False) -> str:
    return base64.b64encode((ALONE if alone else MARK) + text.encode("utf-8", "replace")).decode()


def replaces_history(content: object) -> bool:
    """Whether nothing but a system prompt is to be read of what came before."""
    return isinstance(content, str) and content.startswith(base64.b64encode(ALONE).decode()[: 4 * (len(ALONE) // 3)])


def decode_summary(content: object, where: str) -> str:
    """The words of an item of type compaction. Raises Problem for one that was not made here."""
    try:
        data = base64.b64decode(content, validate=True) if isinstance(content, str) else b""
        for mark in (MARK, ALONE):
            if data.startswith(mark):
                return HEAD + data.removeprefix(mark).decode()
    except (binascii.Error, ValueError):
        pass
    raise Problem(400, f"{where}.encrypted_content was not made by this program, and nobody else can read it", param=where,
                  hint="send what was said before instead")
