"""`effllm transcribe MODEL FILE`: transcribes audio to text or subtitles."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

from .flags import add_command, flag
from .loading import at_precision, find_any, follow, loaded, with_mmproj
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
    from .attachment import named_path

    screen = Screen(context.obj)
    screen.environment.require_stdout()
    found = with_mmproj(find_any(model, screen), mmproj, screen)
    check_modality(found.whole, read_config(found.whole), found.mmproj, AUDIO_INPUT)
    with screen.waiting(f"reading {file}"):
        samples = read_audio(named_path("/dev/stdin" if file == "-" else file))
    options, plain = engine.options(), format == "text" and not json
    with at_precision(found, weights, screen, options) as ref, loaded(ref, options, screen, sees=True) as at_hand:
        writing = Transcriber(ServedModel(at_hand.engine, at_hand.tokenizer), language, hint, translate)
        parts = writing.pieces(samples, timed=not plain)
        made, wish = writing.transcript(parts), GenerationOptions(SamplerSettings(temperature=0.0))
        try:
            for part in parts:
                for event in follow(writing.answer(part, wish), screen, TextDelta | Done):
                    is_text = isinstance(event, TextDelta)
                    told = made.ended(event.stats.token_ids) if not is_text else made.add(event.text) if event.kind == "answer" else ""
                    if plain and told:
                        screen.answer(told)
        finally:
            if plain:
                screen.end_answer()
    if json:
        screen.json({"task": "translate" if translate else "transcribe", **made.to_json(len(samples) / SAMPLE_RATE)})
    elif not plain:
        screen.line(subtitles(made.segments, format == "vtt").rstrip("\n"))
