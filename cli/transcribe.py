"""`effllm transcribe MODEL FILE`: transcribes audio to text or subtitles."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from .flags import add_command, flag
from .loading import find_model_variant, open_model, quantized_on_load, show_progress, with_mmproj
from .options import ANSWER, OUTPUT, EngineFlags, Json, Mmproj, Model, WeightFlags
from .screen import Screen

EXAMPLES = """examples

  effllm transcribe whisper talk.mp3
  effllm transcribe whisper talk.mp3 --language de --format srt > talk.srt
  effllm transcribe Qwen/Qwen3-ASR-0.6B talk.wav --json

Audio may be up to an hour long. Clips longer than the model's window are split at pauses. Subtitle times are those of the segments
between pauses.
"""

File = Annotated[str, typer.Argument(metavar="FILE", help="the audio file; - is standard input", show_default=False)]
Language = Annotated[str | None, flag(ANSWER, "--language", "CODE", "the spoken language, such as de (detected)")]
Hint = Annotated[str | None, flag(ANSWER, "--hint", "TEXT", "names and terms to expect, for models that support it")]
Translate = Annotated[bool, flag(ANSWER, "--translate", "", "translate to English")]
Format = Annotated[Literal["text", "srt", "vtt"], flag(OUTPUT, "--format", "text|srt|vtt", "plain text, or subtitles (text)",
                                                             command="transcribe")]


def register(app: typer.Typer) -> None:
    add_command(app, "transcribe", "run a model", transcribe, EXAMPLES)


def transcribe(context: typer.Context, model: Model, file: File, language: Language = None, hint: Hint = None, translate: Translate = False,
               *, engine: EngineFlags, mmproj: Mmproj = None, weights: WeightFlags, format: Format = "text", json: Json = False) -> None:
    """Transcribe speech from an audio file."""
    from ..runtime.audio.audio_file import read_audio
    from ..runtime.audio.transcript import Transcriber, subtitles
    from ..runtime.config import read_config
    from ..runtime.events import Done, TextDelta
    from ..runtime.generation.served_model import GenerationOptions, ServedModel
    from ..runtime.images.media import check_modality
    from ..runtime.images.modality import AUDIO_INPUT, SAMPLE_RATE
    from ..runtime.sampler import SamplerSettings
    from .attachment import expand_path

    screen = Screen(context.obj)
    screen.environment.require_stdout()
    unquantized = with_mmproj(find_model_variant(model, screen), mmproj, screen)
    check_modality(unquantized.whole, read_config(unquantized.whole), unquantized.mmproj, AUDIO_INPUT)
    with screen.waiting(f"reading {file}"):
        samples = read_audio(expand_path("/dev/stdin" if file == "-" else file))
    options, is_plain = engine.options(), format == "text" and not json
    with quantized_on_load(unquantized, weights, screen, options) as ref, open_model(ref, options, screen, with_media=True) as opened:
        transcriber = Transcriber(ServedModel(opened.engine, opened.tokenizer), language, hint, translate)
        chunks = transcriber.chunks(samples, timed=not is_plain)
        transcript, generation_options = transcriber.transcript(chunks), GenerationOptions(SamplerSettings(temperature=0.0))
        try:
            for chunk in chunks:
                for event in show_progress(transcriber.answer(chunk, generation_options), screen, TextDelta | Done):
                    if isinstance(event, Done):
                        text = transcript.finish_answer(event.stats.token_ids)
                    else:
                        text = transcript.add(event.text) if event.kind == "answer" else ""
                    if is_plain and text:
                        screen.answer(text)
        finally:
            if is_plain:
                screen.end_answer()
    if json:
        screen.json({"task": "translate" if translate else "transcribe", **transcript.to_json(len(samples) / SAMPLE_RATE)})
    elif not is_plain:
        screen.line(subtitles(transcript.segments, format == "vtt").rstrip("\n"))
