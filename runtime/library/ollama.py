"""Reader of Ollama's model store: the files behind a name, and the settings stored beside the weights.

    <models>/manifests/<host>/<namespace>/<model>/<tag>    JSON: layers by kind, checksum and size
    <models>/blobs/sha256-<checksum>                       a layer's content; the name has no extension

A manifest is written once all its layers exist; one whose weights are missing is not a local model. The store is never written to.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from ... import ModelNotFound, typed
from ...offload.safetensors_header import BLOB
from .. import hub
from ..config_reader import show
from ..files.bounded_read import MAX_JSON_NBYTES, read_bounded
from .name_suggestions import OLLAMA_PREFIX

DEFAULT_HOST, DEFAULT_NAMESPACE, DEFAULT_TAG = "registry.ollama.ai", "library", "latest"  # what a name leaves out
SERVICE_FOLDER = Path("/usr/share/ollama/.ollama/models")  # where Ollama's installer for Linux lets its service keep them
MEDIA_TYPE_PREFIX = "application/vnd.ollama.image."
PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
MAX_LICENCE_LENGTH = 40
LICENCES = {"apache license": "Apache-2.0", "mit license": "MIT", "the mit license (mit)": "MIT"}  # by their first lines
MAX_TEXT_NBYTES = 1 << 20  # bytes of a layer that is a text


@dataclass(frozen=True)
class Layer:
    """`kind` is the end of its media type: model, projector, template, params, ..."""

    kind: str
    path: Path
    size: int

    @property
    def is_whole(self) -> bool:
        try:
            return self.path.stat().st_size == self.size
        except OSError:
            return False

    def text(self) -> str:
        """Empty where it cannot be read."""
        try:
            return read_bounded(self.path, MAX_TEXT_NBYTES).decode("utf-8", "replace")
        except OSError:
            return ""


@dataclass(frozen=True)
class OllamaModel:
    """A model as its manifest has it. `name` is what Ollama calls it."""

    name: str
    layers: tuple[Layer, ...]

    def of(self, kind: str) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.kind == kind)

    def first(self, kind: str) -> Path | None:
        return next((layer.path for layer in self.of(kind)), None)

    @property
    def model(self) -> Path | None:
        """The file of its weights, where it is one, and whole."""
        models = self.of("model")
        return models[0].path if len(models) == 1 and models[0].is_whole else None

    @property
    def licence(self) -> str | None:
        """The identifier of its licence if it is known, else the beginning of its text."""
        lines = (line.strip() for layer in self.of("license") for line in layer.text().splitlines())
        first = next((line for line in lines if line), None)
        return None if first is None else LICENCES.get(first.lower()) or first[:MAX_LICENCE_LENGTH].strip()

    def params(self) -> dict[str, object]:
        """The settings of the Modelfile's PARAMETER lines; empty if they cannot be read."""
        params: dict[str, object] = {}
        for layer in self.of("params"):
            try:
                content = json.loads(layer.text())
            except (ValueError, RecursionError):
                continue
            params |= content if isinstance(content, dict) else {}
        return params

    def system(self) -> str:
        return "\n".join(filter(None, (layer.text() for layer in self.of("system")))).strip()


def roots(env: Mapping[str, str]) -> list[Path]:
    """Folders that Ollama may store its models in, whether or not they exist."""
    configured = env.get("OLLAMA_MODELS", "").strip().strip('"')
    folders = [hub.expand(configured, env)] if configured else [hub.home(env) / ".ollama" / "models"]
    return folders + ([SERVICE_FOLDER] if sys.platform.startswith("linux") else [])


def stored_models(env: Mapping[str, str]) -> Iterator[OllamaModel]:
    """Models with complete weights, sorted by name; of several with one name the first."""
    seen = set()
    for root in roots(env):
        for host, namespace, model, tag in _manifests(root / "manifests"):
            name = _display_name(host, namespace, model, tag)
            if name not in seen and (stored := _read(root, (host, namespace, model, tag), name)) is not None and stored.model is not None:
                seen.add(name)
                yield stored


def names(env: Mapping[str, str]) -> list[str]:
    """Names of all models, without reading any manifest."""
    return list(dict.fromkeys(_display_name(*parts) for root in roots(env) for parts in _manifests(root / "manifests")))


def find(name: str, env: Mapping[str, str]) -> OllamaModel | None:
    """The model of that name, which may differ in case and leave out the tag; None if there is none. Raises ModelNotFound for one whose
    weights are incomplete, or not in one file."""
    if (name_parts := _parse_name(name)) is None:
        return None
    for root in roots(env):
        model = _read(root, name_parts, _display_name(*name_parts)) or _find_ignoring_case(root, name_parts)
        if model is not None:
            _require_weights(model)
            return model
    return None


def _parse_name(name: str) -> tuple[str, str, str, str] | None:
    """(host, namespace, model, tag); None for an invalid name."""
    path, colon, tag = OLLAMA_PREFIX.sub("", name).rpartition(":")
    path, tag = (path, tag) if colon else (tag, DEFAULT_TAG)
    path_parts = path.split("/")
    if not 1 <= len(path_parts) <= 3 or not all(PART.fullmatch(part) for part in (*path_parts, tag)):
        return None
    if len(path_parts) == 1:
        return DEFAULT_HOST, DEFAULT_NAMESPACE, path_parts[0], tag
    host, namespace, model = path_parts if len(path_parts) == 3 else (DEFAULT_HOST, *path_parts)
    return host, namespace, model, tag


def _display_name(host: str, namespace: str, model: str, tag: str) -> str:
    prefix = f"{namespace}/" if host == DEFAULT_HOST else f"{host}/{namespace}/"
    if (host, namespace) == (DEFAULT_HOST, DEFAULT_NAMESPACE):
        prefix = ""
    return f"{prefix}{model}" + (f":{tag}" if tag != DEFAULT_TAG else "")


def _manifests(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    for host in hub.names_in(folder):
        for namespace in hub.names_in(folder / host):
            for model in hub.names_in(folder / host / namespace):
                for tag in hub.names_in(folder / host / namespace / model):
                    if all(PART.fullmatch(part) for part in (host, namespace, model, tag)):
                        yield host, namespace, model, tag


def _find_ignoring_case(root: Path, parts: tuple[str, str, str, str]) -> OllamaModel | None:
    lowered = "/".join(parts).lower()
    match = next((candidate for candidate in _manifests(root / "manifests") if "/".join(candidate).lower() == lowered), None)
    return None if match is None else _read(root, match, _display_name(*match))


def _read(root: Path, parts: tuple[str, str, str, str], name: str) -> OllamaModel | None:
    """None for what is no manifest."""
    try:
        content = json.loads(read_bounded(root.joinpath("manifests", *parts), MAX_JSON_NBYTES))
    except (OSError, ValueError, RecursionError):
        return None
    layers = content.get("layers") if isinstance(content, dict) else None
    if not isinstance(layers, list):
        return None
    return OllamaModel(name, tuple(layer for each in layers if (layer := _layer(root / "blobs", each)) is not None))


def _layer(blobs: Path, entry: object) -> Layer | None:
    if not isinstance(entry, dict):
        return None
    kind, digest, size = entry.get("mediaType"), entry.get("digest"), entry.get("size")
    if not isinstance(kind, str) or not kind.startswith(MEDIA_TYPE_PREFIX) or not isinstance(digest, str) or not BLOB.fullmatch(digest):
        return None
    path = blobs / digest.replace(":", "-")
    legacy_path = blobs / digest  # as early versions named them
    if not path.exists() and legacy_path.exists():
        path = legacy_path
    return Layer(kind.removeprefix(MEDIA_TYPE_PREFIX), path, size if type(size) is int else -1)


def _require_weights(stored: OllamaModel) -> None:
    if stored.model is not None:
        return
    models = stored.of("model")
    if len(models) > 1:
        raise ModelNotFound(f"ollama:{stored.name} is split into {len(models)} files, which Ollama's library does not name",
                            "link them into a folder as NAME-00001-of-0000N.gguf, and give the first")
    if not models:
        raise ModelNotFound(f"ollama:{stored.name} has no GGUF file: it is a cloud model, or in another format",
                            "effllm list shows the models that are here")
    raise ModelNotFound(f"ollama:{stored.name} is incomplete: {show(models[0].path.name[:19])} of its library is missing or incomplete",
                        f"ollama pull {typed(stored.name)} completes it")
