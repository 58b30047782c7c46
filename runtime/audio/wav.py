"""WAV files (RIFF, RF64): PCM of 8, 16, 24 and 32 bits and floats of 32 and 64, more than the standard library reads.

Files are untrusted: the header is checked against the file's size. A data chunk that claims more bytes than the file has ends with the
file; programs that write to a pipe leave such headers.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import numpy as np

from ... import UsageError

PCM, FLOAT, EXTENSIBLE = 1, 3, 0xFFFE
MIN_RATE, MAX_RATE, MAX_CHANNELS = 100, 768_000, 64
CHUNK_FRAMES = 1 << 16  # frames (one sample per channel) decoded at once
CONVERT_HINT = "convert it to 16-bit PCM: ffmpeg -i FILE -ac 1 -ar 16000 new.wav"


def is_wav(data: bytes) -> bool:
    return data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE"


def read_wav(data: bytes, source: str, chunk_frames: int = CHUNK_FRAMES) -> tuple[Iterator[np.ndarray], int]:
    """Chunks float32 [frames, channels] of `chunk_frames` frames, in -1 to 1, and the sample rate.

    Raises UsageError with a message that begins with `source`.
    """
    fmt, body, offset = None, None, 12
    while offset + 8 <= len(data) and body is None:
        name, size = data[offset : offset + 4], int.from_bytes(data[offset + 4 : offset + 8], "little")
        if name == b"fmt ":
            fmt = data[offset + 8 : offset + 8 + size]
        elif name == b"data":
            body = memoryview(data)[offset + 8 : offset + 8 + size]
        offset += 8 + size + size % 2
    if fmt is None or len(fmt) < 16 or body is None:
        raise UsageError(f"{source} is a WAV file without {'data' if fmt else 'a format'}", CONVERT_HINT)
    encoding, channels, rate, _, _, bits = struct.unpack("<HHIIHH", fmt[:16])
    if encoding == EXTENSIBLE and len(fmt) >= 26:
        encoding = int.from_bytes(fmt[24:26], "little")
    if not 1 <= channels <= MAX_CHANNELS or not MIN_RATE <= rate <= MAX_RATE:
        raise UsageError(f"{source} claims {channels} channels at {rate} Hz", CONVERT_HINT)
    if (encoding, bits) not in ((PCM, 8), (PCM, 16), (PCM, 24), (PCM, 32), (FLOAT, 32), (FLOAT, 64)):
        raise UsageError(f"{source} has an unsupported WAV format ({encoding}, {bits} bits)", CONVERT_HINT)
    frame = channels * bits // 8
    body, step = body[: len(body) // frame * frame], chunk_frames * frame
    return (_samples(body[offset : offset + step], encoding, bits).reshape(-1, channels) for offset in range(0, len(body), step)), rate


def _samples(body: memoryview, encoding: int, bits: int) -> np.ndarray:
    if encoding == FLOAT:
        return np.nan_to_num(np.frombuffer(body, f"<f{bits // 8}").astype(np.float32), nan=0.0, posinf=1.0, neginf=-1.0)
    if bits == 8:
        return (np.frombuffer(body, np.uint8).astype(np.float32) - 128) / 128
    if bits == 24:  # widened to the upper three bytes of 32 bits
        widened = np.zeros((len(body) // 3, 4), np.uint8)
        widened[:, 1:] = np.frombuffer(body, np.uint8).reshape(-1, 3)
        return widened.view("<i4")[:, 0].astype(np.float32) / 2**31
    return np.frombuffer(body, f"<i{bits // 8}").astype(np.float32) / np.float32(2 ** (bits - 1))
