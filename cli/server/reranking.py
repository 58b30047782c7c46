"""Reranking endpoints: Jina's format, which Cohere and llama-server share, Voyage's, with `data`, and that of text-embeddings-inference,
with `texts`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ... import UsageError
from ...runtime.events import Ranked
from .embeddings import MAX_TEXTS, EmbeddingsRequest
from .guard import RECORD
from .openai_requests import Body
from .problems import SEND_SEPARATELY, UNSUPPORTED, Problem, message_of
from .streams import CLIENT_CLOSED_REQUEST, EventReader, json_response, result_of

if TYPE_CHECKING:
    from .single_model import SingleModelService

PATHS = ("/v1/rerank", "/rerank", "/v1/reranking", "/reranking", "/v2/rerank")
LIST_RULE = "{} has to be a list of non-empty strings"


class RerankRequest(Body):
    unsupported: ClassVar[Mapping[str, tuple[object, ...]]] = EmbeddingsRequest.unsupported
    alternatives: ClassVar[Mapping[str, str]] = EmbeddingsRequest.alternatives

    model: str | None = None
    query: str
    documents: list[Any] | None = None
    texts: list[Any] | None = None
    top_n: int | None = None
    top_k: int | None = None
    instruction: str | None = None
    return_documents: bool = False
    return_text: bool = False


class RerankPaths:
    """The endpoints of one model's `service`."""

    def __init__(self, service: SingleModelService) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        return [Route(path, self.rank, methods=["POST"]) for path in PATHS]

    async def rank(self, request: Request) -> Response:
        payload, service, record = await self._service.payload(request, RerankRequest), self._service, request.scope[RECORD]
        served = service.served
        try:
            await asyncio.to_thread(lambda: served.reranker)
        except UsageError as error:
            raise Problem(501, message_of(error), UNSUPPORTED, code="not_supported") from error
        field = "documents" if payload.documents is not None or payload.texts is None else "texts"
        documents = documents_of(getattr(payload, field), field)
        if not payload.query:
            raise Problem(400, "query is empty", param="query", hint="it is the text that documents are ranked by")
        limit_field = next((each for each in ("top_n", "top_k") if getattr(payload, each) is not None), "top_n")
        if (count := getattr(payload, limit_field)) is not None and count < 1:
            raise Problem(400, f"{limit_field} has to be 1 or more, not {count}", param=limit_field)
        start = partial(served.rank, payload.query, documents, payload.instruction, choice=service.adapters.choice_of(payload.model))
        ranked = await result_of(request, EventReader(service.answer_queue.submit(start), service.note, record), Ranked)
        if ranked is None:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        record.summary = f"{ranked.tokens} tokens in, {len(documents)} document{'' if len(documents) == 1 else 's'} ranked"
        order = sorted(range(len(documents)), key=lambda index: -ranked.scores[index])[:count]
        if field == "texts":
            return json_response([{"index": index, "score": ranked.scores[index],
                                   **({"text": documents[index]} if payload.return_text else {})} for index in order])
        results = [{"index": index, "relevance_score": ranked.scores[index],
                    **({"document": {"text": documents[index]}} if payload.return_documents else {})} for index in order]
        data = [{**each,
                 "document": documents[each["index"]]} if payload.return_documents else each for each in results]  # as at Voyage
        return json_response({"model": service.response_model_name(payload.model), "object": "list", "results": results, "data": data,
                              "usage": {"prompt_tokens": ranked.tokens, "total_tokens": ranked.tokens}})


def documents_of(values: list[Any] | None, field: str) -> list[str]:
    """The texts of documents, each a string or an object with `text`. Raises Problem."""
    if not values:
        raise Problem(400, f"{field} is missing" if values is None else f"{field} is empty", param=field, hint=LIST_RULE.format(field))
    texts = [each.get("text") if isinstance(each, dict) else each for each in values]
    if not all(isinstance(each, str) and each for each in texts):
        raise Problem(400, LIST_RULE.format(field), param=field)
    if len(texts) > MAX_TEXTS:
        raise Problem(400, f"{field} has {len(texts)} texts, at most {MAX_TEXTS} are accepted", param=field, hint=SEND_SEPARATELY)
    return texts
