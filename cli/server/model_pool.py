"""The models that a server of several holds in memory: loaded when one is asked for, ended when they rest too long or stand in the way.

What a model takes is planned before it is loaded, as if it had the whole budget: it runs as it would alone, with the same context. If
that and what is loaded already are more than the budget, models that rest go, the one first that has rested longest; if all of them
answer, the next request to one of those waits until this load is done, else a model that is always busy would keep out the others.
Loads go one by one, in the order in which they were asked for. All of this happens on the loop.
"""

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

STATUS = {2: 400, 3: 404, 4: 400}  # exit code of a load that failed -> status; what cannot fit does not fit either when it is tried again
CODES = {3: "model_not_found", 4: "does_not_fit"}


class NoLongerWanted(Exception):
    """For a model that others would have to go for."""


@dataclass(eq=False)
class LoadedModel:
    """A model that is loaded. `used` is when its last answer ended (monotonic), `since` when it was loaded; `busy` requests are with it.
    `goes`: somebody let it go, however long these want it to stay."""

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
        """When it goes if nobody asks for it, in seconds since 1970; None for never, or while it answers."""
        return None if self.busy or self.keep_s == NEVER else time.time() + self.used + self.keep_s - time.monotonic()


@dataclass(frozen=True)
class PoolLimits:
    """`ram`: bytes for all processes together, None for what is free; `most`: models at once; `keep_s`: how long one stays that nobody
    asks for; `waiting`: requests that may wait for one load."""

    ram: int | None = None
    most: int | None = None
    keep_s: float = NEVER
    waiting: int = 32


class ModelPool:
    """`note` is told what happens."""

    def __init__(self, starter: WorkerLauncher, limits: PoolLimits, note: Callable[[str], None]) -> None:
        self._starter, self._limits, self._note = starter, limits, note
        self._loaded: dict[object, LoadedModel] = {}
        self._loads: dict[object, asyncio.Task[None]] = {}
        self._waiting: dict[object, int] = {}  # requests that wait for a load
        self._in_way: list[LoadedModel] = []  # take no more requests until a load is done
        self._coming: WorkerProcess | None = None
        self._ending: set[asyncio.Task[None]] = set()
        self._turn, self._changed = asyncio.Lock(), asyncio.Event()
        self.is_closed = False

    def loaded(self) -> list[LoadedModel]:
        """Those that are, in the order in which they were."""
        return [*self._loaded.values()]

    def find(self, model: RegisteredModel) -> LoadedModel | None:
        """The model, if it is loaded."""
        return self._loaded.get(model.key)

    def named(self, name: str) -> RegisteredModel | None:
        """The model of that name, if it is loaded: then nobody has to look where the name leads."""
        return next((each.model for each in self._loaded.values() if name in (each.model.name, each.model.typed)), None)

    def is_loading(self, model: RegisteredModel) -> bool:
        return model.key in self._loads

    @property
    def waiting(self) -> int:
        return sum(self._waiting.values())

    def at(self, model: RegisteredModel) -> str:
        """What a request for a model waits for, in words."""
        if self._coming is None or self._coming.name != model.name:
            return f"{model.name} waits for another model to be loaded" if self._coming else f"{model.name} is loaded"
        return f"{model.name}: {self._coming.at}"

    async def take(self, model: RegisteredModel) -> LoadedModel:
        """The model, loaded, which stays until it is given back. Raises Problem."""
        if self._waiting.get(model.key, 0) >= self._limits.waiting:
            many = self._waiting[model.key]
            waits = "1 request waits" if many == 1 else f"{many} requests wait"
            raise Problem(503, f"{waits} for {model.name} already, which is the most here (--queue)", BUSY, code="queue_full",
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
                if (loaded := self.find(model)) is not None:  # which rests if this was the last that waited, and has left
                    self._rest(loaded)

    def give_back(self, loaded: LoadedModel, keep_s: float | None = None) -> None:
        """An answer has ended. `keep_s`: how long the request wants it to stay, from now on."""
        loaded.busy -= 1
        loaded.used = time.monotonic()
        loaded.keep_s = loaded.keep_s if keep_s is None or loaded.goes else keep_s
        self._changed.set()
        self._rest(loaded)

    def let_go(self, model: RegisteredModel) -> bool:
        """End it as soon as nobody is with it; False where it is not loaded."""
        loaded = self.find(model)
        if loaded is None:
            return False
        loaded.goes, loaded.keep_s = True, 0.0
        self._rest(loaded)
        return True

    def close(self) -> None:
        """Load no more, and let what is loaded end."""
        self.is_closed = True
        for each in self._loads.values():
            each.cancel()
        for loaded in self.loaded():
            loaded.child.terminate()

    async def closed(self) -> None:
        """Wait until every process has ended."""
        await asyncio.gather(*self._loads.values(), *self._ending, return_exceptions=True)
        await asyncio.gather(*(each.child.end() for each in self.loaded()))

    def _begin(self, model: RegisteredModel) -> asyncio.Task[None]:
        load = self._loads[model.key] = asyncio.ensure_future(self._load(model))
        load.add_done_callback(lambda done: done.cancelled() or done.exception())  # whoever waited may have left
        return load

    async def _load(self, model: RegisteredModel) -> None:
        try:
            async with self._turn:
                if not self.is_closed and self._waiting.get(model.key) and not self._is_there(model):
                    await self._load_now(model)
        except asyncio.CancelledError:
            raise closing() from None
        except NoLongerWanted:
            self._note(f"{model.name} is not loaded: nobody waits for it any more")
        except ModelLoadError as error:
            self._note(f"{model.name} is not loaded: {error.message}" + (f": {error.hint}" if error.hint else ""))
            status = STATUS.get(error.exit_code, 500)
            raise Problem(status, f"{model.name} cannot be loaded: {message_of(error)}", FAILED if status == 500 else INVALID,
                          code=CODES.get(error.exit_code, "model_not_loaded")) from error
        finally:
            del self._loads[model.key]

    async def _load_now(self, model: RegisteredModel) -> None:
        """Raises ModelLoadError and NoLongerWanted."""
        await asyncio.gather(*self._ending)  # whose memory is still taken
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
        """Bytes for all models together, were none loaded."""
        return shared_ram(self._limits.ram, [coming.pid, *(each.child.pid for each in self.loaded())])

    async def _make_room(self, nbytes: int, coming: WorkerProcess, model: RegisteredModel) -> None:
        """End what stands in the way of a model of so many bytes, as long as it is wanted. Raises NoLongerWanted."""
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
        """Until one of the models that answer has done so, or another thing has changed."""
        message_of = f"waits for answers of {', '.join(each.model.name for each in going)}, whose place it takes"
        if coming.at != message_of:
            coming.at = message_of
            self._note(f"{coming.name} {message_of}")
        self._changed.clear()
        await self._changed.wait()

    def _going(self, nbytes: int, coming: WorkerProcess) -> list[LoadedModel]:
        """What has to go for it: what rests before what answers, and of these what was used longest ago."""
        staying = sorted(self.loaded(), key=lambda each: (each.busy == 0, -each.used))
        budget, most, going = self._budget(coming), self._limits.most, []
        while staying and (sum(each.nbytes for each in staying) + nbytes > budget or most is not None and len(staying) >= most):
            going.append(staying.pop())
        return going

    def _follow(self, loaded: LoadedModel) -> None:
        """Forget it when its process ends by itself, and end it when it rests too long."""

        def over(_: object) -> None:
            if self._loaded.get(loaded.model.key) is loaded and not self.is_closed:
                del self._loaded[loaded.model.key]
                self._stop_timer(loaded)
                self._changed.set()
                self._note(f"{loaded.model.name} ended {loaded.child.how_it_ended()}: the next request loads it again")

        loaded.child.ended.add_done_callback(over)
        self._rest(loaded)

    def _rest(self, loaded: LoadedModel) -> None:
        """End it in time, unless somebody asks for it. Who waited for it to be loaded has yet to take it."""
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
            why = f"nobody asked for it for {format_duration(loaded.keep_s)}" if loaded.keep_s else "it has answered, and is not kept"
            self._remove(loaded, why)
            self._ending.add(task := asyncio.ensure_future(loaded.child.end()))
            task.add_done_callback(self._ending.discard)

    async def _end(self, loaded: LoadedModel, why: str) -> None:
        """Who calls this beside another waits for the same end."""
        if self._loaded.get(loaded.model.key) is loaded:
            self._remove(loaded, why)
        await loaded.child.end()

    def _remove(self, loaded: LoadedModel, why: str) -> None:
        """From now on nobody takes it."""
        self._stop_timer(loaded)
        del self._loaded[loaded.model.key]
        self._note(f"{loaded.model.name} is ended: {why}")
