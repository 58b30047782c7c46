"""Videos for tests in which every second has its own shade of gray."""

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


SILENCE = np.zeros(16_000, np.float32)


def as_sound(samples: np.ndarray = SILENCE, container: str = "mp4", codec: str = "aac", rate: int = 16_000,
             layout: str = "mono") -> bytes:
    """A file of `samples` float32 [n] at that rate, the same in all channels, without video."""
    file = io.BytesIO()
    with av.open(file, "w", format=container) as made:
        stream = made.add_stream(codec, rate=rate, layout=layout)
        resampler = av.AudioResampler(format=stream.codec_context.format.name, layout=layout, rate=rate,
                                      frame_size=stream.codec_context.frame_size or 1024)
        channels = np.stack([samples] * (2 if layout == "stereo" else 1))
        frame = av.AudioFrame.from_ndarray(channels, format="fltp", layout=layout)
        frame.rate, frame.pts = rate, 0
        for each in (*resampler.resample(frame), *resampler.resample(None)):
            made.mux(stream.encode(each))
        made.mux(stream.encode())
    return file.getvalue()
