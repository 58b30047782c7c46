"""The `encrypted_content` of a compaction item: a summary that the client stores and does not read.

It is base64 with a prefix, not encrypted: the summary is of the client's own conversation, and a restarted server has to be able to read
it."""

from __future__ import annotations

import base64
import binascii

from .problems import Problem

MARK, ALONE = b"effllm:", b"effllm.alone:"  # the latter replaces everything before it
HEAD = "What was said before, in short:\n"


def encode_summary(text: str, alone: bool = False) -> str:
    return base64.b64encode((ALONE if alone else MARK) + text.encode("utf-8", "replace")).decode()


def replaces_history(content: object) -> bool:
    """Whether the item replaces everything before it but the system prompt."""
    return isinstance(content, str) and content.startswith(base64.b64encode(ALONE).decode()[: 4 * (len(ALONE) // 3)])


def decode_summary(content: object, where: str) -> str:
    """The summary of a compaction item. Raises Problem for one that was not made here."""
    try:
        data = base64.b64decode(content, validate=True) if isinstance(content, str) else b""
        for mark in (MARK, ALONE):
            if data.startswith(mark):
                return HEAD + data.removeprefix(mark).decode()
    except (binascii.Error, ValueError):
        pass
    raise Problem(400, f"{where}.encrypted_content was not made by effllm, so it cannot be read", param=where,
                  hint="send what was said before instead")
