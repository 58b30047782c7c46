"""Embedding endpoints of OpenAI, Ollama, Google and llama.cpp."""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic.alias_generators import to_camel
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...runtime.events import Embedded
from ...runtime.generation.embedding import shortest_floats, truncate_dimensions
from .answer_queue import AnswerQueue
from .bodies import read_request
from .gemini_models import EMBEDDED
from .gemini_requests import BatchEmbedContentsRequest, EmbedContentRequest, text_of
from .guard import RECORD
from .llama_requests import prompts_in
from .ollama_requests import waited_ns
from .ollama_serializer import NS
from .openai_requests import UNSUPPORTED_FIELDS, Body, Kind
from .problems import LM_STUDIO, OLLAMA, SEND_SEPARATELY, Problem
from .streams import CLIENT_CLOSED_REQUEST, EventReader, json_response, result_of

if TYPE_CHECKING:
    import numpy as np

    from ...runtime.generation.served_encoder import ServedEncoder
    from ...runtime.generation.served_model import ServedModel
    from .adapters import Adapters

MAX_TEXTS = 2048  # texts of a request, as at OpenAI
FLOAT, BASE64 = "float", "base64"
# Google's task type -> whether its text is a query (True) or a document (False).
IS_QUERY = {**dict.fromkeys(("RETRIEVAL_QUERY", "CODE_RETRIEVAL_QUERY", "QUESTION_ANSWERING", "FACT_VERIFICATION"), True),
          "RETRIEVAL_DOCUMENT": False}
MAX_INTEGER = 32760.0
NO_NORM = "embd_normalize has to be the number of a norm, 0 or more: vectors cannot be left unnormalized"
Texts = list[str] | list[list[int]] | list[str | list[int]]


class EmbeddingsRequest(Body):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = {**UNSUPPORTED_FIELDS, "lora": ([],)}
    alternatives: ClassVar[Mapping[str, str]] = {"lora": "name the adapter as model instead"}

    model: str | None = None
    input: Any
    encoding_format: str | None = None
    dimensions: int | None = None
    prompt_name: str | None = None
    task: str | None = None  # as Jina's API has it: the prompt of that name, of a model that has one


class OllamaEmbedRequest(Body):
    model: str | None = None
    input: Any = None
    truncate: bool | None = None
    dimensions: int | None = None


class OllamaEmbeddingRequest(Body):
    """The older endpoint, for one text."""

    model: str | None = None
    prompt: str | None = None


class LlamaEmbeddingRequest(Body):
    """llama-server's. `embd_normalize`: the p-norm by which a vector gets length 1; 0 for 16-bit integers."""

    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = EmbeddingsRequest.unsupported
    alternatives: ClassVar[Mapping[str, str]] = EmbeddingsRequest.alternatives

    model: str | None = None
    content: Any = None
    input: Any = None
    embd_normalize: int = 2
    encoding_format: str | None = None


class EmbeddingPaths:
    """The embedding endpoints of one model. `note` is called with the engine's notices; `demand` raises Problem for the name of another
    model."""

    def __init__(self, served: ServedModel | ServedEncoder, answer_queue: AnswerQueue, name: str, note: Callable[[str], None],
                 demand: Callable[[str, str | None], None], adapters: Adapters) -> None:
        self._served, self._answer_queue, self._name, self._note, self._check_model = served, answer_queue, name, note, demand
        self._adapters = adapters

    def routes(self) -> list[Route]:
        answers = {"/v1/embeddings": self.openai, "/embeddings": self.openai, "/embedding": self.llama,
                   f"{LM_STUDIO}embeddings": self.openai,
                   f"{OLLAMA}embed": self.ollama, f"{OLLAMA}embeddings": self.single,
                   **dict(zip(EMBEDDED, (self.gemini, self.gemini_several), strict=True))}
        return [Route(path, answer, methods=["POST"]) for path, answer in answers.items()]

    async def openai(self, request: Request) -> Response:
        payload = await self._payload(request, EmbeddingsRequest)
        encode = self._vector_encoder(payload.encoding_format)
        texts = texts_of(payload.input, "input")
        self._check_dimensions(payload.dimensions)
        if not texts:
            raise Problem(400, "input is empty", param="input", hint="send a string, or a list of strings")

        def to_response(embedded: Embedded) -> dict[str, object]:
            vectors = truncate_dimensions(embedded.vectors, payload.dimensions)
            return {"object": "list", "model": self._adapters.requested_adapter(payload.model) or self._name,
                    "usage": {"prompt_tokens": embedded.tokens, "total_tokens": embedded.tokens},
                    "data": [{"object": "embedding", "index": index, "embedding": encode(each)} for index, each in enumerate(vectors)]}

        name = payload.prompt_name
        if name is None and payload.task in self._served.embedding_prompts.prefixes:
            name = payload.task
        return await self._answer(request, payload.model, texts, False, to_response, name)

    async def llama(self, request: Request) -> Response:
        """llama-server's format: always a list, with a list of vectors per text, as it may return one per token."""
        payload = await self._payload(request, LlamaEmbeddingRequest)
        if payload.embd_normalize < 0:
            raise Problem(400, NO_NORM, param="embd_normalize")
        encode = self._vector_encoder(payload.encoding_format)
        field = "content" if payload.content is not None or payload.input is None else "input"
        texts = await asyncio.to_thread(prompts_in, getattr(payload, field), self._served.tokenizer, field)
        check_texts(texts, field)

        def to_response(embedded: Embedded) -> list[dict[str, object]]:
            return [{"index": index, "embedding": [encode(normalized(each, payload.embd_normalize))]}
                    for index, each in enumerate(embedded.vectors)]

        return await self._answer(request, payload.model, texts, False, to_response)

    async def ollama(self, request: Request) -> Response:
        """Ollama's format. Texts that are too long are truncated unless `truncate` is false."""
        payload, started = await self._payload(request, OllamaEmbedRequest), time.monotonic()
        texts = texts_of(payload.input, "input") if payload.input else []
        self._check_dimensions(payload.dimensions)
        waited = waited_ns(request.headers)

        def to_response(embedded: Embedded) -> dict[str, object]:
            vectors = truncate_dimensions(embedded.vectors, payload.dimensions)
            return {"model": payload.model or self._name, "embeddings": [shortest_floats(each) for each in vectors],
                    "load_duration": waited,
                    "total_duration": waited + round((time.monotonic() - started) * NS), "prompt_eval_count": embedded.tokens}

        if not texts:
            return json_response(to_response(Embedded([], 0)))
        return await self._answer(request, payload.model, texts, payload.truncate is not False, to_response)

    async def single(self, request: Request) -> Response:
        payload = await self._payload(request, OllamaEmbeddingRequest)
        if not payload.prompt:
            return json_response({"embedding": []})
        to_response = lambda embedded: {"embedding": shortest_floats(embedded.vectors[0])}  # noqa: E731
        return await self._answer(request, payload.model, [payload.prompt], True, to_response)

    async def gemini(self, request: Request) -> Response:
        return await self._gemini(request, [await read_request(request, EmbedContentRequest)], "",
                                  lambda vectors: {"embedding": vectors[0]})

    async def gemini_several(self, request: Request) -> Response:
        payload = (await read_request(request, BatchEmbedContentsRequest)).requests
        return await self._gemini(request, payload, "requests[{}].", lambda vectors: {"embeddings": vectors})

    async def _gemini(self, request: Request, payload: list[EmbedContentRequest], where: str,
                      to_response: Callable[[list[dict[str, object]]], dict[str, object]]) -> Response:
        """Google's format. Task types map to the prompts of a model, if it has any; all texts of a batch need the same one."""
        self._check_model(name := request.path_params["name"], "model")
        if not payload:
            raise Problem(400, "requests is empty", param="requests", hint="send one for each text")
        texts = [text_of(each.content, f"{where.format(index)}content") for index, each in enumerate(payload)]
        check_texts(texts, "content" if not where else "requests")
        for field in ("task_type", "output_dimensionality"):
            if len({getattr(each, field) for each in payload}) > 1:
                raise Problem(400, f"the requests differ in {to_camel(field)}", param="requests", hint=SEND_SEPARATELY)
        self._check_dimensions(width := payload[0].output_dimensionality or None)
        prompts = self._served.embedding_prompts
        task = IS_QUERY.get(payload[0].task_type or "")
        prompt = {True: prompts.query, False: prompts.document}.get(task)

        def respond(embedded: Embedded) -> dict[str, object]:
            return to_response([{"values": shortest_floats(each)} for each in truncate_dimensions(embedded.vectors, width)])

        return await self._answer(request, name, texts, True, respond, prompt)

    async def _payload(self, request: Request, kind: type[Kind]) -> Kind:
        payload = await read_request(request, kind)
        if payload.model:
            self._check_model(payload.model, "model")
        return payload

    @staticmethod
    def _vector_encoder(encoding: str | None) -> Callable[[np.ndarray], object]:
        if encoding not in (None, FLOAT, BASE64):
            raise Problem(400, f"encoding_format has to be float or base64, not {encoding!r:.40}", param="encoding_format")
        return encode_base64 if encoding == BASE64 else shortest_floats

    def _check_dimensions(self, dimensions: int | None) -> None:
        """Raises Problem for more dimensions than a vector has."""
        width = self._served.vector_width if dimensions is not None else 0
        if dimensions is not None and not 1 <= dimensions <= width:
            raise Problem(400, f"dimensions has to be 1 to {width}, not {dimensions}", param="dimensions")

    async def _answer(self, request: Request, model: str | None, texts: Texts, truncate: bool,
                      to_response: Callable[[Embedded], object], prompt_name: str | None = None) -> Response:
        """Respond with the embeddings of texts; with an empty response if the client has disconnected. Raises Problem."""
        record, choice = request.scope[RECORD], self._adapters.choice_of(model)
        payload = partial(self._served.embed, texts, truncate, choice=choice, prompt_name=prompt_name)
        reader = EventReader(self._answer_queue.submit(payload), self._note, record)
        if (embedded := await result_of(request, reader, Embedded)) is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        record.summary = f"{embedded.tokens} tokens in, {len(texts)} vector{'' if len(texts) == 1 else 's'}"
        # In a thread: megabytes of JSON take seconds, which would hold up the streams of other requests.
        return await asyncio.to_thread(lambda: json_response(to_response(embedded)))


def texts_of(value: object, where: str) -> Texts:
    """The texts of a request, or their token ids: one or a list. Raises Problem."""
    texts = [value] if isinstance(value, str) or isinstance(value, list) and value and all(type(each) is int for each in value) else value
    if not isinstance(texts, list) or not (all(isinstance(each, str) for each in texts) or all(
            isinstance(each, list) and all(type(token) is int for token in each) for each in texts)):
        raise Problem(400, f"{where} has to be a string, a list of strings, or token ids", param=where)
    check_texts(texts, where)
    return texts


def check_texts(texts: Texts, where: str) -> None:
    """Raises Problem for too many texts, or an empty one."""
    if len(texts) > MAX_TEXTS:
        raise Problem(400, f"{where} has {len(texts)} texts, at most {MAX_TEXTS} are accepted", param=where, hint=SEND_SEPARATELY)
    if (empty := next((index for index, each in enumerate(texts) if not each), None)) is not None:
        raise Problem(400, f"{where}[{empty}] is empty", param=where, hint="leave it out")


def normalized(vector: np.ndarray, norm: int) -> np.ndarray:
    """The vector scaled to length 1 by the p-norm of that number; 0 scales its largest component to llama.cpp's integer range."""
    if norm == 2:
        return vector
    sizes = abs(vector.astype("f8"))
    length = sizes.max() / MAX_INTEGER if norm == 0 else (sizes ** norm).sum() ** (1 / norm)
    return (vector / length).astype("f4") if length else vector


def encode_base64(vector: np.ndarray) -> str:
    return base64.b64encode(vector.astype("<f4").tobytes()).decode()
