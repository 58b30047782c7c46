"""Model libraries of other programs, laid out in a test's home folder."""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

KIND = "application/vnd.ollama.image."


class OllamaTree:
    """A folder as OLLAMA_MODELS names it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.blobs = folder, folder / "blobs"
        self.blobs.mkdir(parents=True)

    def layer(self, kind: str, content: bytes | str | object) -> dict[str, object]:
        raw = content if isinstance(content, bytes) else content.encode() if isinstance(content, str) else json.dumps(content).encode()
        digest = hashlib.sha256(raw).hexdigest()
        (self.blobs / f"sha256-{digest}").write_bytes(raw)
        return {"mediaType": KIND + kind, "digest": f"sha256:{digest}", "size": len(raw)}

    def add(self, name: str, model: bytes | None, namespace: str = "library", host: str = "registry.ollama.ai",
            **layers: bytes | str | object) -> Path:
        """A model `name:tag` of these layers by kind; its manifest."""
        model_name, _, tag = name.partition(":")
        held = [] if model is None else [self.layer("model", model)]
        held += [self.layer(kind, content) for kind, content in layers.items()]
        path = self.folder / "manifests" / host / namespace / model_name / (tag or "latest")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
                                    "config": self.layer("config", {"model_format": "gguf"}) , "layers": held}))
        return path

    def blob(self, raw: bytes) -> Path:
        return self.blobs / f"sha256-{hashlib.sha256(raw).hexdigest()}"


def put(home: Path, files: Mapping[str, bytes]) -> None:
    for place, raw in files.items():
        path = home / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(raw)


def state(folder: Path) -> dict[str, tuple[int, int, int]]:
    """A snapshot that would reveal any write."""
    found = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path)] = status.st_size, status.st_mtime_ns, status.st_mode
    return found
