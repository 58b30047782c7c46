"""Writes model folders with generated weights, laid out as by `effllm quantize`."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from effllm.offload.shards import Planned, index_json, plan_files
from effllm.runtime.measuring.synthetic import SyntheticStore
from effllm.runtime.stores.container import FILE


def of_store(store: SyntheticStore) -> list[Planned]:
    """All tensors of a store, in its order."""
    return [Planned(info.name, info.dtype, info.shape, info.nbytes) for info in store.tensors.values()]


def write_folder(folder: Path, config: Mapping[str, object], groups: Sequence[Sequence[Planned]],
                 generated: Callable[[str], np.ndarray]) -> None:
    """Write tensors, each group one record, and the config; `generated` gives a tensor's values in the order of its bytes. The files are on
    the disk when this returns, so that a benchmark of the disk does not share it with them."""
    folder.mkdir(parents=True, exist_ok=True)
    names, files = {tensor.name for group in groups for tensor in group}, plan_files(groups, {})
    for file in files:
        with (folder / file.name).open("wb") as out:
            out.write(file.head)
            for name, place_in_file in file.places.items():
                if name in names:
                    out.seek(place_in_file)
                    out.write(np.ascontiguousarray(generated(name)).data)
            out.truncate(file.size)
            os.fsync(out.fileno())
    if len(files) > 1:
        (folder / "model.safetensors.index.json").write_text(index_json(files))
    (folder / "config.json").write_text(json.dumps(config))


def write_marker(folder: Path, store: SyntheticStore) -> None:
    """What makes a folder one of low-bit weights; nothing for others."""
    if store.container is not None:
        (folder / FILE).write_text(store.container.to_json())
