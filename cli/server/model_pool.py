"""The loaded models of a router: started on demand, unloaded when idle for too long or to make room for others.

The memory of a model is planned before it is loaded, as if it had the whole budget, so it runs as it would alone, with the same context. If
the budget is exceeded, idle models are unloaded first, least recently used first. If all of them are busy, new requests for the ones to be
evicted wait until the load is done, or a model that is always busy would keep out the others. Loads run one at a time, first come, first
served. Everything here runs on the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ...offload.size import format_size
from ...runtime.planning.shared_ram import shared_ram
from .keep_alive import NEVER, format_duration
from .model_registry import RegisteredModel
from .problems import BUSY, FAILED, INVALID, RETRY, Problem, closing, message_of
from .worker_process import ModelLoadError, WorkerLauncher, WorkerProcess

STATUS = {2: 400, 3: 404, 4: 400}  # exit code of a failed load -> HTTP status; 4xx where trying again would not help
CODES = {3: "model_not_found", 4: "does_not_fit"}


class LoadAbandoned(Exception):
    """No request waits any more for a model that would need others to be unloaded."""


@dataclass(eq=False)
class LoadedModel:
    """A loaded model."""

    model: RegisteredModel
    worker: WorkerProcess
    nbytes: int  # memory planned
    context: int  # tokens
    keep_s: float  # keep-alive when idle, seconds
    loaded_at: float = field(default_factory=time.time)
    last_used: float = field(default_factory=time.monotonic)  # when its last answer ended
    busy: int = 0  # requests in progress
    is_unloading: bool = False  # unloaded when idle, whatever the keep-alive of further requests
    timer: asyncio.TimerHandle | None = None

    @property
    def expires_at(self) -> float | None:
        """When the model is unloaded if it stays idle, in seconds since 1970; None for never, and while it is busy."""
        return None if self.busy or self.keep_s == NEVER else time.time() + self.last_used + self.keep_s - time.monotonic()


@dataclass(frozen=True)
class PoolLimits:
    """The limits of a pool."""

    ram: int | None = None  # bytes for all processes together, None for what is free
    max_models: int | None = None  # models loaded at once, None for no limit
    keep_s: float = NEVER  # keep-alive of an idle model, seconds
    waiting: int = 32  # requests that may wait for one load


class ModelPool:
    """Loads and unloads models. `note` is called with a line about each."""

    def __init__(self, launcher: WorkerLauncher, limits: PoolLimits, note: Callable[[str], None]) -> None:
        self._launcher, self._limits, self._note = launcher, limits, note
        self._loaded: dict[object, LoadedModel] = {}
        self._loads: dict[object, asyncio.Task[None]] = {}
        self._waiting: dict[object, int] = {}  # number of requests waiting for each load
        self._evicting: list[LoadedModel] = []  # to be unloaded: no new requests until the current load is done
        self._loading: WorkerProcess | None = None
        self._stopping: set[asyncio.Task[None]] = set()
        self._load_lock, self._changed = asyncio.Lock(), asyncio.Event()
        self.is_closed = False

    def loaded(self) -> list[LoadedModel]:
        """The loaded models, in the order in which they were loaded."""
        return [*self._loaded.values()]

    def find(self, model: RegisteredModel) -> LoadedModel | None:
        """The loaded model, or None."""
        return self._loaded.get(model.key)

    def named(self, name: str) -> RegisteredModel | None:
        """The model of that name if it is loaded; does not read the disk."""
        return next((each.model for each in self._loaded.values() if name in (each.model.name, each.model.typed)), None)

    def is_loading(self, model: RegisteredModel) -> bool:
        return model.key in self._loads

    @property
    def waiting(self) -> int:
        return sum(self._waiting.values())

    def status(self, model: RegisteredModel) -> str:
        """What a request for a model is waiting for, as text."""
        if self._loading is None or self._loading.name != model.name:
            return f"{model.name} is waiting for another model to be loaded" if self._loading else f"{model.name} is loaded"
        return f"{model.name}: {self._loading.status}"

    async def acquire(self, model: RegisteredModel) -> LoadedModel:
        """The model, loaded if necessary; it stays loaded until `release`. Raises Problem."""
        if self._waiting.get(model.key, 0) >= self._limits.waiting:
            count = self._waiting[model.key]
            text = "1 request is waiting" if count == 1 else f"{count} requests are waiting"
            raise Problem(503, f"{text} for {model.name} already, and the queue is full (--queue)", BUSY, code="queue_full",
                          headers={"retry-after": "1"}, hint=RETRY)
        while True:
            if self.is_closed:
                raise closing()
            loaded = self._loaded.get(model.key)
            if loaded is not None and loaded.worker.is_alive and loaded not in self._evicting:
                loaded.busy += 1
                self._stop_timer(loaded)
                return loaded
            load = self._loads.get(model.key) or self._start_load(model)
            self._waiting[model.key] = self._waiting.get(model.key, 0) + 1
            try:
                await asyncio.shield(load)
            finally:
                self._waiting[model.key] -= 1
                self._changed.set()
                if (loaded := self.find(model)) is not None:  # idle if the last waiting request was cancelled
                    self._start_timer(loaded)

    def release(self, loaded: LoadedModel, keep_s: float | None = None) -> None:
        """End the use of a model by a request. `keep_s`: the request's keep-alive, which applies from now on; None leaves it unchanged."""
        loaded.busy -= 1
        loaded.last_used = time.monotonic()
        loaded.keep_s = loaded.keep_s if keep_s is None or loaded.is_unloading else keep_s
        self._changed.set()
        self._start_timer(loaded)

    def unload_when_idle(self, model: RegisteredModel) -> bool:
        """Unload the model once no request uses it; False if it is not loaded."""
        loaded = self.find(model)
        if loaded is None:
            return False
        loaded.is_unloading, loaded.keep_s = True, 0.0
        self._start_timer(loaded)
        return True

    def close(self) -> None:
        """Load no more models, and terminate those that are loaded."""
        self.is_closed = True
        for each in self._loads.values():
            each.cancel()
        for loaded in self.loaded():
            loaded.worker.terminate()

    async def closed(self) -> None:
        """Wait until every worker process has ended."""
        await asyncio.gather(*self._loads.values(), *self._stopping, return_exceptions=True)
        await asyncio.gather(*(each.worker.end() for each in self.loaded()))

    def _start_load(self, model: RegisteredModel) -> asyncio.Task[None]:
        load = self._loads[model.key] = asyncio.ensure_future(self._load(model))
        load.add_done_callback(lambda done: done.cancelled() or done.exception())  # marks the exception as retrieved: nobody may await it
        return load

    async def _load(self, model: RegisteredModel) -> None:
        try:
            async with self._load_lock:
                if not self.is_closed and self._waiting.get(model.key) and not self._is_running(model):
                    await self._load_now(model)
        except asyncio.CancelledError:
            raise closing() from None
        except LoadAbandoned:
            self._note(f"{model.name} was not loaded: no request is waiting for it any more")
        except ModelLoadError as error:
            self._note(f"{model.name} could not be loaded: {error.message}" + (f": {error.hint}" if error.hint else ""))
            status = STATUS.get(error.exit_code, 500)
            raise Problem(status, f"{model.name} cannot be loaded: {message_of(error)}", FAILED if status == 500 else INVALID,
                          code=CODES.get(error.exit_code, "model_not_loaded")) from error
        finally:
            del self._loads[model.key]

    async def _load_now(self, model: RegisteredModel) -> None:
        """Start the worker, make room and load. Raises ModelLoadError and LoadAbandoned."""
        await asyncio.gather(*self._stopping)  # workers that end still hold their memory
        worker = self._loading = await self._launcher.start(model.name, model.typed)
        worker.ended.add_done_callback(lambda _: self._changed.set())
        try:
            nbytes = await worker.planned(self._budget(worker))
            await self._make_room(nbytes, worker, model)
            message = await worker.loaded()
        except BaseException:
            await worker.end()
            raise
        finally:
            self._loading, self._evicting = None, []
        loaded = self._loaded[model.key] = LoadedModel(model, worker, message["nbytes"], message["context"], self._limits.keep_s)
        self._watch(loaded)
        self._note(f"{model.name} is loaded: context {loaded.context} tokens, {format_size(loaded.nbytes)} of memory planned")

    def _is_running(self, model: RegisteredModel) -> bool:
        loaded = self._loaded.get(model.key)
        return loaded is not None and loaded.worker.is_alive

    def _budget(self, coming: WorkerProcess) -> int:
        """Memory for all models together in bytes, as if none were loaded."""
        return shared_ram(self._limits.ram, [coming.pid, *(each.worker.pid for each in self.loaded())])

    async def _make_room(self, nbytes: int, coming: WorkerProcess, model: RegisteredModel) -> None:
        """Unload models until one of `nbytes` fits within the limits, as long as a request waits for it. Raises LoadAbandoned."""
        while coming.is_alive and (evicted := self._models_to_evict(nbytes, coming)):
            if not self._waiting.get(model.key):
                raise LoadAbandoned
            self._evicting = evicted
            idle = [loaded for loaded in evicted if not loaded.busy]
            for loaded in idle:
                await self._end(loaded, f"to make room for {coming.name}")
            if not idle:
                await self._wait_for(evicted, coming)

    async def _wait_for(self, evicted: list[LoadedModel], coming: WorkerProcess) -> None:
        """Wait until one of the busy models has finished an answer, or the pool has changed otherwise."""
        waiting_text = f"waits for {', '.join(each.model.name for each in evicted)} to finish answers and make room"
        if coming.status != waiting_text:
            coming.status = waiting_text
            self._note(f"{coming.name} {waiting_text}")
        self._changed.clear()
        await self._changed.wait()

    def _models_to_evict(self, nbytes: int, coming: WorkerProcess) -> list[LoadedModel]:
        """The models to evict: idle ones before busy ones, least recently used first."""
        remaining = sorted(self.loaded(), key=lambda each: (each.busy == 0, -each.last_used))
        budget, max_models, evicted = self._budget(coming), self._limits.max_models, []
        while remaining and (sum(each.nbytes for each in remaining) + nbytes > budget
                             or max_models is not None and len(remaining) >= max_models):
            evicted.append(remaining.pop())
        return evicted

    def _watch(self, loaded: LoadedModel) -> None:
        """Remove the model when its process ends by itself, and start its keep-alive."""

        def on_exit(_: object) -> None:
            if self._loaded.get(loaded.model.key) is loaded and not self.is_closed:
                del self._loaded[loaded.model.key]
                self._stop_timer(loaded)
                self._changed.set()
                self._note(f"{loaded.model.name} ended {loaded.worker.exit_description()}: the next request loads it again")

        loaded.worker.ended.add_done_callback(on_exit)
        self._start_timer(loaded)

    def _start_timer(self, loaded: LoadedModel) -> None:
        """Start the keep-alive timer of an idle model. Requests that waited for the load but have not acquired it yet count as use."""
        is_in_use = loaded.busy or self._waiting.get(loaded.model.key)
        if not is_in_use and loaded.keep_s != NEVER and self._is_running(loaded.model) and not self.is_closed:
            self._stop_timer(loaded)
            loaded.timer = asyncio.get_running_loop().call_later(loaded.keep_s, self._expire, loaded)

    def _stop_timer(self, loaded: LoadedModel) -> None:
        if loaded.timer is not None:
            loaded.timer.cancel()
            loaded.timer = None

    def _expire(self, loaded: LoadedModel) -> None:
        if self._loaded.get(loaded.model.key) is loaded and not loaded.busy:
            reason = f"idle for {format_duration(loaded.keep_s)}" if loaded.keep_s else "its request has ended (keep_alive 0)"
            self._remove(loaded, reason)
            self._stopping.add(task := asyncio.ensure_future(loaded.worker.end()))
            task.add_done_callback(self._stopping.discard)

    async def _end(self, loaded: LoadedModel, reason: str) -> None:
        """Unload a model and wait until its process has ended. May be called concurrently."""
        if self._loaded.get(loaded.model.key) is loaded:
            self._remove(loaded, reason)
        await loaded.worker.end()

    def _remove(self, loaded: LoadedModel, reason: str) -> None:
        """Remove a model from the pool: no request gets it any more."""
        self._stop_timer(loaded)
        del self._loaded[loaded.model.key]
        self._note(f"{loaded.model.name} is unloaded: {reason}")
