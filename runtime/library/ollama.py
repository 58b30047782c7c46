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
from ..files.bounded_read import JSON_NBYTES, read_bounded
from .name_suggestions import OLLAMAS

HOST, NAMESPACE, TAG = "registry.ollama.ai", "library", "latest"  # what a name leaves out
SERVICE = Path("/usr/share/ollama/.ollama/models")  # where Ollama's installer for Linux lets its service keep them
KIND = "application/vnd.ollama.image."
PART = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
LICENCE_LETTERS = 40
LICENCES = {"apache license": "Apache-2.0", "mit license": "MIT", "the mit license (mit)": "MIT"}  # by their first lines
LARGEST_TEXT = 1 << 20  # bytes of a layer that is a text


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
            return read_bounded(self.path, LARGEST_TEXT).decode("utf-8", "replace")
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
        """What the text of its licence is known by, or else how it begins."""
        lines = (line.strip() for layer in self.of("license") for line in layer.text().splitlines())
        first = next((line for line in lines if line), None)
        return None if first is None else LICENCES.get(first.lower()) or first[:LICENCE_LETTERS].strip()

    def params(self) -> dict[str, object]:
        """What was said by PARAMETER; nothing where that cannot be read."""
        said: dict[str, object] = {}
        for layer in self.of("params"):
            try:
                content = json.loads(layer.text())
            except (ValueError, RecursionError):
                continue
            said |= content if isinstance(content, dict) else {}
        return said

    def system(self) -> str:
        return "\n".join(filter(None, (layer.text() for layer in self.of("system")))).strip()


def roots(env: Mapping[str, str]) -> list[Path]:
    """Where Ollama may keep its models on this machine, whether or not it does."""
    named = env.get("OLLAMA_MODELS", "").strip().strip('"')
    own = [hub.expand(named, env)] if named else [hub.home(env) / ".ollama" / "models"]
    return own + ([SERVICE] if sys.platform.startswith("linux") else [])


def stored_models(env: Mapping[str, str]) -> Iterator[OllamaModel]:
    """The models whose weights are whole, in the order of their names; of those of one name the first."""
    seen = set()
    for root in roots(env):
        for host, namespace, model, tag in _manifests(root / "manifests"):
            name = _name(host, namespace, model, tag)
            if name not in seen and (found := _read(root, (host, namespace, model, tag), name)) is not None and found.model is not None:
                seen.add(name)
                yield found


def names(env: Mapping[str, str]) -> list[str]:
    """Without a look into any manifest."""
    return list(dict.fromkeys(_name(*parts) for root in roots(env) for parts in _manifests(root / "manifests")))


def find(asked: str, env: Mapping[str, str]) -> OllamaModel | None:
    """The model that Ollama calls so, in any case of its letters, its tag left out or not; None where it has no such one. Raises
    ModelNotFound for one whose weights are not whole, or not in one file."""
    if (parts := _parts(asked)) is None:
        return None
    for root in roots(env):
        found = _read(root, parts, _name(*parts)) or _in_other_case(root, parts)
        if found is not None:
            _demand_weights(found)
            return found
    return None


def _parts(asked: str) -> tuple[str, str, str, str] | None:
    """Host, namespace, model and tag; None for what is no name."""
    path, colon, tag = OLLAMAS.sub("", asked).rpartition(":")
    path, tag = (path, tag) if colon else (tag, TAG)
    each = path.split("/")
    if not 1 <= len(each) <= 3 or not all(PART.fullmatch(part) for part in (*each, tag)):
        return None
    host, namespace, model = [HOST, NAMESPACE][: 3 - len(each)] + each if len(each) != 2 else [HOST, *each]
    return host, namespace, model, tag


def _name(host: str, namespace: str, model: str, tag: str) -> str:
    before = "" if (host, namespace) == (HOST, NAMESPACE) else f"{namespace}/" if host == HOST else f"{host}/{namespace}/"
    return f"{before}{model}" + (f":{tag}" if tag != TAG else "")


def _manifests(folder: Path) -> Iterator[tuple[str, str, str, str]]:
    for host in hub.names_in(folder):
        for namespace in hub.names_in(folder / host):
            for model in hub.names_in(folder / host / namespace):
                for tag in hub.names_in(folder / host / namespace / model):
                    if all(PART.fullmatch(part) for part in (host, namespace, model, tag)):
                        yield host, namespace, model, tag


def _in_other_case(root: Path, parts: tuple[str, str, str, str]) -> OllamaModel | None:
    wanted = "/".join(parts).lower()
    same = next((each for each in _manifests(root / "manifests") if "/".join(each).lower() == wanted), None)
    return None if same is None else _read(root, same, _name(*same))


def _read(root: Path, parts: tuple[str, str, str, str], name: str) -> OllamaModel | None:
    """None for what is no manifest."""
    try:
        content = json.loads(read_bounded(root.joinpath("manifests", *parts), JSON_NBYTES))
    except (OSError, ValueError, RecursionError):
        return None
    layers = content.get("layers") if isinstance(content, dict) else None
    if not isinstance(layers, list):
        return None
    return OllamaModel(name, tuple(layer for each in layers if (layer := _layer(root / "blobs", each)) is not None))


def _layer(blobs: Path, said: object) -> Layer | None:
    if not isinstance(said, dict):
        return None
    kind, digest, size = said.get("mediaType"), said.get("digest"), said.get("size")
    if not isinstance(kind, str) or not kind.startswith(KIND) or not isinstance(digest, str) or not BLOB.fullmatch(digest):
        return None
    path = blobs / digest.replace(":", "-")
    older = blobs / digest  # as early versions named them
    return Layer(kind.removeprefix(KIND), older if not path.exists() and older.exists() else path, size if type(size) is int else -1)


def _demand_weights(found: OllamaModel) -> None:
    if found.model is not None:
        return
    models = found.of("model")
    if len(models) > 1:
        raise ModelNotFound(f"ollama:{found.name} is split into {len(models)} files, which Ollama's library does not name",
                            "link them into a folder as NAME-00001-of-0000N.gguf, and give the first")
    if not models:
        raise ModelNotFound(f"ollama:{found.name} has no GGUF file: it is a cloud model, or in another format",
                            "effllm list shows the models that are here")
    raise ModelNotFound(f"ollama:{found.name} is incomplete: {show(models[0].path.name[:19])} of its library is missing or incomplete",
                        f"ollama pull {typed(found.name)} completes it")
