"""`effllm export MODEL -o OUT`: the model in the formats of other programs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Literal

import typer

from .. import UsageError, typed
from .flags import add_command, flag
from .loading import final_result, find_model, resumable
from .options import OUTPUT, Json, Model
from .screen import Screen

FORMAT = "format"
EXAMPLES = """examples

  effllm export fable -o fable.gguf
  effllm export ./my-model -o my-model.gguf --type Q4_0
  effllm export ./my-model -o my-model-int4 --format compressed-tensors --type INT4
  effllm export ./my-model -o mmproj-my-model.gguf --mmproj
  effllm export ./my-model -o ./my-model-tuned --lora ./my-adapter
"""

Out = Annotated[str, flag(OUTPUT, "-o --out", "OUT", "the file to write; for compressed-tensors, the folder")]
Format = Annotated[Literal["gguf", "compressed-tensors"] | None,
                   flag(FORMAT, "--format", "gguf|compressed-tensors",
                        "gguf for llama.cpp and others, compressed-tensors for transformers and vLLM (gguf)")]
Type = Annotated[str | None, flag(FORMAT, "--type", "F16|BF16|Q8_0|Q4_0|INT8|INT4",
                                  "precision of the matrices (F16); INT8 and INT4 are for compressed-tensors (INT4)")]
Lora = Annotated[str | None, flag(FORMAT, "--lora", "ADAPTER",
                                  "merge a LoRA adapter (folder or GGUF file) into the model, and "
                                  "write a folder like the model's", "export")]
Sees = Annotated[bool, flag(FORMAT, "--mmproj", "", "write the model's vision or audio part as a GGUF file of its own (mmproj), instead "
                                                    "of the text part", "export")]
Force = Annotated[bool, flag(OUTPUT, "--force", "", "replace a GGUF file", "export")]


def register(app: typer.Typer) -> None:
    add_command(app, "export", "convert models", export, EXAMPLES)


def export(context: typer.Context, model: Model, out: Out, format: Format = None, type: Type = None, lora: Lora = None,
           mmproj: Sees = False, force: Force = False, json: Json = False) -> None:
    """Write a model for other programs, with its tokenizer and chat template."""
    from ..offload.size import format_size
    from ..runtime.conversion.compressed_tensors import CompressedFolder, export_compressed
    from ..runtime.gguf.export import Exported, export_gguf

    screen = Screen(context.obj)
    if mmproj and (lora or format == "compressed-tensors" or type not in (None, "F16")):
        raise UsageError("--mmproj writes a GGUF file of type F16 with only the vision or audio tower",
                         f"effllm export {typed(model)} -o {typed(out)} --mmproj")
    if lora is not None:
        if format or type or force:
            raise UsageError("--lora makes a folder like the model's; another format is made from that folder",
                             f"effllm export {typed(model)} -o DIR --lora {typed(lora)}, then effllm export DIR -o {typed(out)}")
        merge_adapter(find_model(model, screen).folder, Path(os.path.expanduser(lora)), Path(out), screen, json)
        return
    if format == "compressed-tensors" and force:
        raise UsageError("--force replaces a GGUF file, not a folder", "give another folder with -o")
    ref = find_model(model, screen)
    if format == "compressed-tensors":
        with resumable(screen, Path(out)):
            folder = final_result(export_compressed(ref.folder, Path(out), (type or "INT4").upper()), screen, CompressedFolder)
        if json:
            screen.json(folder.to_json())
        else:
            counts = f"{folder.quantized} tensors as integers, {folder.kept} as they were"
            screen.note(f"{folder.folder}: {format_size(folder.nbytes)}, {counts}")
        return
    name = ref.alias or (ref.repo or "").rpartition("/")[2] or ref.folder.resolve().stem
    if mmproj:
        from ..runtime.gguf.projector_export import export_projector

        export_events = export_projector(ref.folder, Path(out), name, force)
    else:
        export_events = export_gguf(ref.folder, Path(out), (type or "F16").upper(), name, force, licence=ref.licence)
    exported = final_result(export_events, screen, Exported)
    if json:
        screen.json(exported.to_json())
    else:
        kinds = ", ".join(f"{count} {kind}" for kind, count in exported.types.items())
        screen.note(f"{exported.path}: {format_size(exported.nbytes)}, {exported.tensors} tensors ({kinds})")
    from ..runtime.gguf.projector_export import exportable_projector

    if not (mmproj or json) and (modality := exportable_projector(ref.folder)) is not None:
        beside = Path(out).with_name(f"mmproj-{Path(out).name}")
        screen.note(f"this is the text part; to export the {modality.tower}: effllm export {typed(model)} -o {typed(beside)} --mmproj")


def merge_adapter(source: Path, adapter: Path, out: Path, screen: Screen, json: bool) -> None:
    """A copy of the model with the adapter merged."""
    from ..offload.size import format_size
    from ..runtime.adapters.merge import Merged, merge
    from .quantize import register_finished, run_command

    with resumable(screen, out):
        merged = final_result(merge(source, adapter, out), screen, Merged)
    register_finished(merged.folder, screen)
    if json:
        screen.json(merged.to_json())
    else:
        screen.note(f"{merged.folder}: {format_size(merged.nbytes)}, {merged.changed} of {merged.tensors} tensors changed; "
                    f"{run_command(merged.folder)}")
