"""Quantizes the tensors of a conversion, with calibration statistics of their inputs where the method needs them.

Without calibration, tensors are processed in file order. With it, the text runs layer by layer and each layer is quantized as soon as
its statistics are complete, so that only one layer's are in memory; tensors without statistics (an embedding) are quantized at the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import prod

import numpy as np

from ...kernels.threads import ThreadPool
from ...offload.folder_writer import FolderWriter
from ...quant import methods
from ...quant.codes import Codes
from ...quant.stats import Stats
from ..calibrate import LayerStats, calibrate
from ..events import Notice, Progress
from .convert_estimate import estimate, human_time
from .convert_plan import OTHER, ConversionPlan, Job
from .convert_stream import read_tensor, require_finite, stream


class Converter:
    """Converts the unfinished tensors of a plan. `ids`: the calibration tokens, empty for a method that needs none."""

    def __init__(self, plan: ConversionPlan, method: str, writer: FolderWriter, pool: ThreadPool, ids: Sequence[int]) -> None:
        self.plan, self.method, self.writer, self.ids = plan, method, writer, ids
        self.todo = [job for job in plan.jobs if job.name not in writer.finished]
        self._pool = pool
        self._method, self._plain = methods.get(method), methods.get(methods.PLAIN)
        self._done = plan.read_nbytes - sum(job.info.nbytes for job in self.todo)

    def announce(self, formats: str) -> Iterator[Notice]:
        """A notice of how long it will take; `formats`: as requested."""
        weights = sum(prod(job.shape) for job in self.todo if job.quantized)
        if weights:
            seconds = estimate(self.plan, self.todo, self.method, self._quantize, self.ids, self._pool.workers)
            threads = f"{self._pool.workers} thread{'s' if self._pool.workers > 1 else ''}"
            text = f" by {len(self.ids)} tokens of text" if self.ids else ""  # may be fewer than requested
            yield Notice(f"{formats} with {self.method}{text}: {weights / 1e6:.4g} M weights take about {human_time(seconds)} on {threads}")

    def run(self) -> Iterator[Progress | Notice]:
        """Convert all unfinished tensors."""
        if self.ids and any(job.quantized for job in self.todo):
            for item in calibrate(self.plan.folder, self.ids, self._pool.workers):
                if isinstance(item, LayerStats):
                    yield from self._convert_layer(item)
                else:
                    yield item
        yield from self._stream([job for job in self.todo if job.name not in self.writer.finished], {}, {})

    def convert(self, jobs: Sequence[Job]) -> Iterator[Progress]:
        """Convert some unfinished tensors, for a method that needs no text."""
        yield from self._stream(jobs, {}, {})

    def _convert_layer(self, layer: LayerStats) -> Iterator[Progress]:
        """The tensors of a layer that have statistics, and those that the method equalises."""
        todo = [job for job in self.todo if job.key == layer.key]
        changed: dict[str, np.ndarray] = {}
        if todo and self._method.equalise is not None and layer.key != "outer":
            changed = self._equalise(layer)
        ready = [job for job in todo if job.name in changed or (job.role in layer.roles and job.quantized)]
        yield from self._stream(ready, layer.roles, changed)

    def _equalise(self, layer: LayerStats) -> dict[str, np.ndarray]:
        """A layer's tensors that equalising changes, by name. Deterministic, so a resumed run gets the same."""
        config, jobs = self.plan.config, {job.role: job for job in self.plan.jobs if job.key == layer.key}
        # Norms and decays of linear attention are often float32, unlike the other norms.
        norms = [job.source.scheme for job in jobs.values() if job.group == OTHER and not job.role.startswith("delta_")]
        norm_dtype = norms[0] if norms else "f32"  # a layer may have neither norms nor biases
        layout = methods.Layout(config.query_heads_of(layer.key), *config.kv_heads_of(layer.key), config.norm_kind, norm_dtype,
                                config.hidden_act,
                                config.v_norm or config.clip_qkv is not None)
        tensors = {role: require_finite(job, read_tensor(self.plan.store, job)) for role, job in jobs.items()}
        specs = {role: job.spec for role, job in jobs.items() if job.group != OTHER}
        changed = self._method.equalise(tensors, layer.roles, specs, layout, self._pool)
        return {jobs[role].name: array for role, array in changed.items()}

    def _stream(self, jobs: Sequence[Job], stats: Mapping[str, Stats], changed: Mapping[str, np.ndarray]) -> Iterator[Progress]:
        def quantize(job: Job, rows: np.ndarray) -> Codes:
            return self._quantize(job, rows, stats.get(job.role))

        for block in stream(self.plan.store, self.writer, jobs, quantize, changed):
            self._done += block.nbytes
            yield Progress("quantizing", self._done, self.plan.read_nbytes, "bytes", block.job.name)

    def _quantize(self, job: Job, rows: np.ndarray, stats: Stats | None) -> Codes:
        needs_stats = self.ids and stats is None and not job.spec.outliers  # a method with outliers selects them without a text
        method = self._plain if needs_stats else self._method
        return method.quantize(rows, job.spec, stats, self._pool)
