"""llama-server's slot actions: save a slot's cache to a file, restore it, erase it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...runtime.events import Event, SlotDone
from ...runtime.sessions.session_name import is_valid_name
from ...runtime.sessions.slot_files import FLAG, SlotFiles, erase
from .bodies import read_body
from .conversations import MAX_DIGITS
from .guard import RECORD
from .openai_requests import Body, parse
from .problems import UNSUPPORTED, Problem
from .streams import CLIENT_CLOSED_REQUEST, EventReader, json_response, result_of

if TYPE_CHECKING:
    from ...runtime.generation.slot import Slot
    from .application import GenerationService

NO_FOLDER = f"this server does not save slots: start it with {FLAG} DIR"
FILENAME_RULE = "filename has to be a file name: no /, no \\, no dot or dash at its beginning, 100 bytes at most"
ACTION_RULE = "action has to be save, restore or erase"


class SlotRequest(Body):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {}

    model: str | None = None
    filename: str | None = None


@dataclass(frozen=True)
class Action:
    """An action on a slot (`done`: its participle), and the names of its tokens, bytes and time in the response."""

    done: str
    begin: Callable[[SlotFiles, Slot, str], Iterator[Event]]
    tokens: str
    nbytes: str
    ms: str


ACTIONS = {"save": Action("saved", SlotFiles.save, "n_saved", "n_written", "save_ms"),
           "restore": Action("restored", SlotFiles.restore, "n_restored", "n_read", "restore_ms")}


class LlamaSlots:
    """The slots of one model's `service`; `files` is None where saving is off."""

    def __init__(self, service: GenerationService, files: SlotFiles | None) -> None:
        self._service, self._files = service, files

    def routes(self) -> list[Route]:
        return [Route("/slots/{id_slot}", self.act, methods=["POST"])]

    async def act(self, request: Request) -> Response:
        service, action = self._service, request.query_params.get("action")
        body = await read_body(request)
        payload = parse(SlotRequest, body) if body.strip() else SlotRequest()
        if name := payload.model or request.query_params.get("model"):
            service.check_model(name, "model")
        number, last = request.path_params["id_slot"], service.answer_queue.parallel - 1
        if not number.isascii() or not number.isdecimal() or len(number) > MAX_DIGITS or int(number) > last:
            valid = f"0 to {last}" if last else "0 alone"
            raise Problem(400, f"there is no slot {number!r:.20}: {valid} (--parallel)", param="id_slot")
        if action == "erase":
            done = await self._done(request, int(number), erase, "erased")
            return client_disconnected() if done is None else json_response({"id_slot": int(number), "n_erased": done.tokens})
        if (handler := ACTIONS.get(action or "")) is None:
            raise Problem(400, ACTION_RULE, param="action")
        if self._files is None:
            raise Problem(501, NO_FOLDER, UNSUPPORTED, code="not_supported")
        if payload.filename is None or not is_valid_name(payload.filename):
            raise Problem(400, FILENAME_RULE, param="filename")
        done = await self._done(request, int(number), lambda slot: handler.begin(self._files, slot, payload.filename), handler.done)
        if done is None:
            return client_disconnected()
        return json_response({"id_slot": int(number), "filename": payload.filename, handler.tokens: done.tokens,
                              handler.nbytes: done.nbytes,
                              "timings": {handler.ms: round(done.seconds * 1000, 3)}})

    async def _done(self, request: Request, number: int, act: Callable[[Slot], Iterator[Event]], word: str) -> SlotDone | None:
        service, record = self._service, request.scope[RECORD]
        reader = EventReader(service.answer_queue.submit(partial(service.served.run_on_slot, number, act)), service.note, record)
        if (done := await result_of(request, reader, SlotDone)) is not None:
            record.summary = f"{done.tokens} tokens {word}"
        return done


def client_disconnected() -> Response:
    return Response(status_code=CLIENT_CLOSED_REQUEST)
