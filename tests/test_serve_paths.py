"""Paths and fields that must be declared in two places."""

from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

from starlette.routing import Route

import effllm
from effllm.cli.options import SamplingFlags
from effllm.cli.server.application import GenerationService
from effllm.cli.server.generation_options import SAMPLING, Defaults
from effllm.cli.server.openai_requests import GenerationRequest
from effllm.cli.server.router import Router
from effllm.runtime.generation.served_model import GenerationOptions
from effllm.runtime.sampler import SamplerSettings

DOCS = Path(effllm.__path__[0]) / "docs"
OF_ONE = {("/lora-adapters", "GET"), ("/lora-adapters", "POST"), ("/v1/responses/{name}/end", "GET")}  # a front has or asks for its own


def of_one_model() -> set[tuple[str, str]]:
    replies = SimpleNamespace(adapters=SimpleNamespace(names=(), scales=()), tokenizer=None, config=None, engine=None)
    return paths(GenerationService(replies, MagicMock(), "m", print, defaults=Defaults(GenerationOptions(SamplerSettings()))).routes())


def paths(routes: list[Route]) -> set[tuple[str, str]]:
    return {(route.path, method) for route in routes for method in route.methods - {"HEAD"}}


def test_a_server_of_several_models_has_every_path_that_a_model_answers() -> None:
    missing = of_one_model() - paths(Router(MagicMock(), MagicMock(), "key").application().routes)
    assert missing == OF_ONE, "PASSED of cli/server/router.py has what is passed on to a model"


def test_every_path_of_openai_is_documented() -> None:
    text = "".join((DOCS / f"{name}.md").read_text(encoding="utf-8") for name in ("serve", "serve-apis"))
    said = {path.partition("/{")[0] for path, _ in of_one_model() if path.startswith("/v1/") and path != "/v1/health"}
    assert len(said) > 10 and not {path for path in said if path not in text}, "the table \"Endpoints\" of docs/serve.md"


def test_every_setting_of_the_sampler_is_a_flag_and_a_field_of_requests() -> None:
    names = {field.name for field in fields(SamplerSettings)} - {"logit_bias"}
    assert names == {field.name for field in fields(SamplingFlags) if field.name != "from_settings"}, "SamplingFlags of cli/options.py"
    assert SAMPLING.keys() <= GenerationRequest.model_fields.keys() and names == {*SAMPLING.values()}, \
        "GenerationRequest of cli/server/openai_requests.py"
