"""WAV files (RIFF, RF64): PCM of 8, 16, 24 and 32 bits and floats of 32 and 64, more than the standard library reads.

Files are untrusted: the header is checked against the file's size. A data chunk that claims more than the file has, as programs write that
pipe one, ends with the file.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from ... import UsageError

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
LOWEST_RATE, HIGHEST_RATE, MOST_CHANNELS = 100, 768_000, 64
PIECE = 1 << 16  # samples of a channel that are read at once
ANOTHER = "convert it to 16-bit PCM: ffmpeg -i FILE -ac 1 -ar 16000 new.wav"


def is_wav(data: bytes) -> bool:
    return data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE"


def read_wav(data: bytes, source: str, at_once: int = PIECE) -> tuple[Iterator[np.ndarray], int]:
    """Chunks float32 [frames, channels] of `at_once` frames, in -1 to 1, and the sample rate. Raises UsageError with a message that begins
    with `source`."""
    form, body, at = None, None, 12
    while at + 8 <= len(data) and body is None:
        name, size = data[at : at + 4], int.from_bytes(data[at + 4 : at + 8], "little")
        if name == b"fmt ":
            form = data[at + 8 : at + 8 + size]
        elif name == b"data":
            body = memoryview(data)[at + 8 : at + 8 + size]
        at += 8 + size + size % 2
    if form is None or len(form) < 16 or body is None:
        raise UsageError(f"{source} is a WAV file without {'data' if form else 'a format'}", ANOTHER)
    kind, channels, rate, _, _, bits = struct.unpack("<HHIIHH", form[:16])
    if kind == EXTENSIBLE and len(form) >= 26:
        kind = int.from_bytes(form[24:26], "little")
    if not 1 <= channels <= MOST_CHANNELS or not LOWEST_RATE <= rate <= HIGHEST_RATE:
        raise UsageError(f"{source} claims {channels} channels at {rate} Hz", ANOTHER)
    if (kind, bits) not in ((PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32), (FLOAT, 64)):
        raise UsageError(f"{source} has an unsupported WAV format ({kind}, {bits} bits)", ANOTHER)
    frame = channels * bits // 8
    body, step = body[: len(body) // frame * frame], at_once * frame
    return (_samples(body[at : at + step], kind, bits).reshape(-1, channels) for at in range(0, len(body), step)), rate


def _samples(body: memoryview, kind: int, bits: int) -> np.ndarray:
    if kind == FLOAT:
        return np.nan_to_num(np.frombuffer(body, f"<f{bits // 8}").astype(np.float32), nan=0.0, posinf=1.0, neginf=-1.0)
    if bits == 8:
        return (np.frombuffer(body, np.uint8).astype(np.float32) - 128) / 128
    if bits == 24:  # as the upper bytes of 32
        wide = np.zeros((len(body) // 3, 4), np.uint8)
        wide[:, 1:] = np.frombuffer(body, np.uint8).reshape(-1, 3)
        return wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    return np.frombuffer(body, f"<i{bits // 8}").astype(np.float32) / np.float32(2 ** (bits - 1))
