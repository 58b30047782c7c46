"""Videos for tests, whose every second has a gray of its own."""

import io

import av
import numpy as np


def gray(second: float) -> int:
    return 20 + 10 * int(second)


def as_video(seconds: int, container: str = "mp4", codec: str = "mpeg4", rate: int = 10, size: tuple[int, int] = (64, 48), turned: int = 0,
             **options: str) -> bytes:
    """The bytes of a file of that many seconds. `turned`: the degrees by which whoever shows it is to turn it."""
    file = io.BytesIO()
    with av.open(file, "w", format=container, options=options) as made:
        stream = made.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        if turned:
            stream.set_display_rotation(turned)
        for number in range(seconds * rate):
            points = np.full((size[1], size[0], 3), gray(number / rate), np.uint8)
            made.mux(stream.encode(av.VideoFrame.from_ndarray(points, format="rgb24")))
        made.mux(stream.encode())
    return file.getvalue()


def as_sound(seconds: int = 1) -> bytes:
    """A file that has no pictures."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as made:
        stream = made.add_stream("aac", rate=16_000)
        for _ in range(seconds * 15):
            frame = av.AudioFrame.from_ndarray(np.zeros((1, 1024), np.float32), format="fltp", layout="mono")
            frame.rate = 16_000
            made.mux(stream.encode(frame))
        made.mux(stream.encode())
    return file.getvalue()
