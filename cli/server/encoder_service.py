"""The service of an encoder: embeddings, reranking and tokenization. Paths that generate text answer with what the model is for."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...runtime.generation.served_encoder import ServedEncoder
from .compaction import COMPACT
from .gemini_models import COUNTED as GEMINI_COUNTED
from .gemini_models import GENERATED
from .llama_paths import TokenPaths
from .lm_studio_chat import CHAT as LM_CHAT
from .ollama import OllamaEncoder
from .problems import MESSAGES, OLLAMA, UNSUPPORTED, Problem
from .single_model import CHAT_PATHS, COMPLETION_PATHS, COUNT_TOKENS_PATHS, SingleModelService

WRITING = (*CHAT_PATHS, *COMPLETION_PATHS, "/completion", "/completions", "/infill", "/apply-template",
           "/v1/responses", "/responses", *COUNT_TOKENS_PATHS, *COMPACT, MESSAGES, f"{MESSAGES}/count_tokens", f"{OLLAMA}chat",
           f"{OLLAMA}generate",
           LM_CHAT, *GENERATED, GEMINI_COUNTED)


@dataclass
class EncoderService(SingleModelService):
    """An encoder. It has no page for browsers, which is a chat."""

    served: ServedEncoder

    def routes(self) -> list[Route]:
        return [*super().routes(), *OllamaEncoder(self.name, self.served, self.check_model).routes(), *TokenPaths(self).routes(),
                *(Route(path, partial(self._writes_none, path), methods=["POST"]) for path in WRITING)]

    async def _writes_none(self, path: str, request: Request) -> Response:
        does, where = ("ranks documents", "/v1/rerank") if self.served.encoder.ranks else ("embeds texts", "/v1/embeddings")
        raise Problem(501, f"{self.name} does not support {path}: it {does} and generates no text", UNSUPPORTED, code="not_supported",
                      hint=f"use POST {where}")
