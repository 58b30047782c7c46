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
from .problems import AGAIN, BUSY, FAILED, INVALID, Problem, closing, message_of
from .worker_process import ModelLoadError, WorkerLauncher, WorkerProcess

STATUS = {2: 400, 3: 404, 4: 400}  # exit code of a failed load -> HTTP status; 4xx where trying again would not help
CODES = {3: "model_not_found", 4: "does_not_fit"}


class NoLongerWanted(Exception):
    """Every request for a model that others would have to make room for has gone."""


@dataclass(eq=False)
class LoadedModel:
    """A loaded model. `used`: when its last answer ended (monotonic); `since`: when it was loaded; `busy`: requests in progress; `goes`: it
    was asked to unload, whatever the keep-alive of its requests."""

    model: RegisteredModel
    child: WorkerProcess
    nbytes: int
    context: int
    keep_s: float
    since: float = field(default_factory=time.time)
    used: float = field(default_factory=time.monotonic)
    busy: int = 0
    goes: bool = False
    timer: asyncio.TimerHandle | None = None

    @property
    def until(self) -> float | None:
        """When it is unloaded if it stays idle, in seconds since 1970; None for never, or while it is busy."""
        return None if self.busy or self.keep_s == NEVER else time.time() + self.used + self.keep_s - time.monotonic()


@dataclass(frozen=True)
class PoolLimits:
    """`ram`: bytes for all processes together, None for what is free; `most`: models at once; `keep_s`: keep-alive of an idle model;
    `waiting`: requests that may wait for one load."""

    ram: int | None = None
    most: int | None = None
    keep_s: float = NEVER
    waiting: int = 32


class ModelPool:
    """Loads and unloads models. `note` gets a line about each."""

    def __init__(self, starter: WorkerLauncher, limits: PoolLimits, note: Callable[[str], None]) -> None:
        self._starter, self._limits, self._note = starter, limits, note
        self._loaded: dict[object, LoadedModel] = {}
        self._loads: dict[object, asyncio.Task[None]] = {}
        self._waiting: dict[object, int] = {}  # number of requests waiting for each load
        self._in_way: list[LoadedModel] = []  # being evicted: they take no new requests until the load is done
        self._coming: WorkerProcess | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._turn, self._changed = asyncio.Lock(), asyncio.Event()
        self.is_closed = False

    def loaded(self) -> list[LoadedModel]:
        """The loaded models, in the order in which they were loaded."""
        return [*self._loaded.values()]

    def find(self, model: RegisteredModel) -> LoadedModel | None:
        """The loaded model, or None."""
        return self._loaded.get(model.key)

    def named(self, name: str) -> RegisteredModel | None:
        """The model of that name if it is loaded, which spares a look at the disk."""
        return next((each.model for each in self._loaded.values() if name in (each.model.name, each.model.typed)), None)

    def is_loading(self, model: RegisteredModel) -> bool:
        return model.key in self._loads

    @property
    def waiting(self) -> int:
        return sum(self._waiting.values())

    def at(self, model: RegisteredModel) -> str:
        """What a request for a model is waiting for, in words."""
        if self._coming is None or self._coming.name != model.name:
            return f"{model.name} is waiting for another model to be loaded" if self._coming else f"{model.name} is loaded"
        return f"{model.name}: {self._coming.at}"

    async def take(self, model: RegisteredModel) -> LoadedModel:
        """The model, loaded if necessary, and kept until `give_back`. Raises Problem."""
        if self._waiting.get(model.key, 0) >= self._limits.waiting:
            many = self._waiting[model.key]
            waits = "1 request is waiting" if many == 1 else f"{many} requests are waiting"
            raise Problem(503, f"{waits} for {model.name} already, and the queue is full (--queue)", BUSY, code="queue_full",
                          headers={"retry-after": "1"}, hint=AGAIN)
        while True:
            if self.is_closed:
                raise closing()
            loaded = self._loaded.get(model.key)
            if loaded is not None and loaded.child.is_alive and loaded not in self._in_way:
                loaded.busy += 1
                self._stop_timer(loaded)
                return loaded
            load = self._loads.get(model.key) or self._begin(model)
            self._waiting[model.key] = self._waiting.get(model.key, 0) + 1
            try:
                await asyncio.shield(load)
            finally:
                self._waiting[model.key] -= 1
                self._changed.set()
                if (loaded := self.find(model)) is not None:  # the last request that waited may have gone
                    self._rest(loaded)

    def give_back(self, loaded: LoadedModel, keep_s: float | None = None) -> None:
        """A request has ended. `keep_s`: its keep-alive, which holds from now on."""
        loaded.busy -= 1
        loaded.used = time.monotonic()
        loaded.keep_s = loaded.keep_s if keep_s is None or loaded.goes else keep_s
        self._changed.set()
        self._rest(loaded)

    def let_go(self, model: RegisteredModel) -> bool:
        """Unload the model once no request uses it; False if it is not loaded."""
        loaded = self.find(model)
        if loaded is None:
            return False
        loaded.goes, loaded.keep_s = True, 0.0
        self._rest(loaded)
        return True

    def close(self) -> None:
        """Load no more models, and terminate those that are loaded."""
        self.is_closed = True
        for each in self._loads.values():
            each.cancel()
        for loaded in self.loaded():
            loaded.child.terminate()

    async def closed(self) -> None:
        """Wait until every worker process has ended."""
        await asyncio.gather(*self._loads.values(), *self._ending, return_exceptions=True)
        await asyncio.gather(*(each.child.end() for each in self.loaded()))

    def _begin(self, model: RegisteredModel) -> asyncio.Task[None]:
        load = self._loads[model.key] = asyncio.ensure_future(self._load(model))
        load.add_done_callback(lambda done: done.cancelled() or done.exception())  # retrieved, as nobody may await it any more
        return load

    async def _load(self, model: RegisteredModel) -> None:
        try:
            async with self._turn:
                if not self.is_closed and self._waiting.get(model.key) and not self._is_there(model):
                    await self._load_now(model)
        except asyncio.CancelledError:
            raise closing() from None
        except NoLongerWanted:
            self._note(f"{model.name} was not loaded: no request is waiting for it any more")
        except ModelLoadError as error:
            self._note(f"{model.name} could not be loaded: {error.message}" + (f": {error.hint}" if error.hint else ""))
            status = STATUS.get(error.exit_code, 500)
            raise Problem(status, f"{model.name} cannot be loaded: {message_of(error)}", FAILED if status == 500 else INVALID,
                          code=CODES.get(error.exit_code, "model_not_loaded")) from error
        finally:
            del self._loads[model.key]

    async def _load_now(self, model: RegisteredModel) -> None:
        """Raises ModelLoadError and NoLongerWanted."""
        await asyncio.gather(*self._ending)  # they still hold their memory
        child = self._coming = await self._starter.start(model.name, model.typed)
        child.ended.add_done_callback(lambda _: self._changed.set())
        try:
            nbytes = await child.planned(self._budget(child))
            await self._make_room(nbytes, child, model)
            told = await child.loaded()
        except BaseException:
            await child.end()
            raise
        finally:
            self._coming, self._in_way = None, []
        loaded = self._loaded[model.key] = LoadedModel(model, child, told["nbytes"], told["context"], self._limits.keep_s)
        self._follow(loaded)
        self._note(f"{model.name} is loaded: context {loaded.context} tokens, {format_size(loaded.nbytes)} of memory planned")

    def _is_there(self, model: RegisteredModel) -> bool:
        loaded = self._loaded.get(model.key)
        return loaded is not None and loaded.child.is_alive

    def _budget(self, coming: WorkerProcess) -> int:
        """Bytes for all models together, as if none were loaded."""
        return shared_ram(self._limits.ram, [coming.pid, *(each.child.pid for each in self.loaded())])

    async def _make_room(self, nbytes: int, coming: WorkerProcess, model: RegisteredModel) -> None:
        """Unload what exceeds the limits beside a model of so many bytes, as long as a request waits for it. Raises NoLongerWanted."""
        while coming.is_alive and (going := self._going(nbytes, coming)):
            if not self._waiting.get(model.key):
                raise NoLongerWanted
            self._in_way = going
            resting = [each for each in going if not each.busy]
            for each in resting:
                await self._end(each, f"to make room for {coming.name}")
            if not resting:
                await self._wait_for(going, coming)

    async def _wait_for(self, going: list[LoadedModel], coming: WorkerProcess) -> None:
        """Wait until one of the busy models has finished an answer, or anything else has changed."""
        message_of = f"waits for {', '.join(each.model.name for each in going)} to finish answers and make room"
        if coming.at != message_of:
            coming.at = message_of
            self._note(f"{coming.name} {message_of}")
        self._changed.clear()
        await self._changed.wait()

    def _going(self, nbytes: int, coming: WorkerProcess) -> list[LoadedModel]:
        """The models to evict: idle ones before busy ones, least recently used first."""
        staying = sorted(self.loaded(), key=lambda each: (each.busy == 0, -each.used))
        budget, most, going = self._budget(coming), self._limits.most, []
        while staying and (sum(each.nbytes for each in staying) + nbytes > budget or most is not None and len(staying) >= most):
            going.append(staying.pop())
        return going

    def _follow(self, loaded: LoadedModel) -> None:
        """Drop it when its process ends by itself, and unload it when it is idle for too long."""

        def over(_: object) -> None:
            if self._loaded.get(loaded.model.key) is loaded and not self.is_closed:
                del self._loaded[loaded.model.key]
                self._stop_timer(loaded)
                self._changed.set()
                self._note(f"{loaded.model.name} ended {loaded.child.how_it_ended()}: the next request loads it again")

        loaded.child.ended.add_done_callback(over)
        self._rest(loaded)

    def _rest(self, loaded: LoadedModel) -> None:
        """Start the keep-alive timer of an idle model. Requests that waited for the load have yet to take it, so they count as use."""
        is_wanted = loaded.busy or self._waiting.get(loaded.model.key)
        if not is_wanted and loaded.keep_s != NEVER and self._is_there(loaded.model) and not self.is_closed:
            self._stop_timer(loaded)
            loaded.timer = asyncio.get_running_loop().call_later(loaded.keep_s, self._expire, loaded)

    def _stop_timer(self, loaded: LoadedModel) -> None:
        if loaded.timer is not None:
            loaded.timer.cancel()
            loaded.timer = None

    def _expire(self, loaded: LoadedModel) -> None:
        if self._loaded.get(loaded.model.key) is loaded and not loaded.busy:
            why = f"idle for {format_duration(loaded.keep_s)}" if loaded.keep_s else "its request has ended (keep_alive 0)"
            self._remove(loaded, why)
            self._ending.add(task := asyncio.ensure_future(loaded.child.end()))
            task.add_done_callback(self._ending.discard)

    async def _end(self, loaded: LoadedModel, why: str) -> None:
        """Unload it and wait; concurrent callers wait for the same end."""
        if self._loaded.get(loaded.model.key) is loaded:
            self._remove(loaded, why)
        await loaded.child.end()

    def _remove(self, loaded: LoadedModel, why: str) -> None:
        """From now on no request takes it."""
        self._stop_timer(loaded)
        del self._loaded[loaded.model.key]
        self._note(f"{loaded.model.name} is unloaded: {why}")
