"""The app: `make_app(session, options)`. Any ASGI server can run it; `server.py` does so with uvicorn."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from fastapi import FastAPI, Response
from fastapi.responses import JSONResponse
from prometheus_client import CONTENT_TYPE_LATEST

import pass_runtime
from pass_runtime.serve.errors import ApiError
from pass_runtime.serve.forms import ChatForm, CompletionForm, Form
from pass_runtime.serve.handlers import add_handlers
from pass_runtime.serve.jobs import ask
from pass_runtime.serve.middleware import Bounded, Counted, Keyed
from pass_runtime.serve.options import ServeOptions
from pass_runtime.serve.prometheus import Prometheus
from pass_runtime.serve.schemas import ChatRequest, CompletionRequest, Sampled
from pass_runtime.serve.service import Service
from pass_runtime.serve.streaming import Answer
from pass_runtime.session import Session

_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {"error": {"type": "object", "required": ["message", "type", "param", "code"]}},
}
_TOLD = {
    400: "Refused.",
    401: "No valid key.",
    404: "No such model.",
    408: "The body came too slowly.",
    413: "Too large.",
    429: "Too much to do.",
    500: "It failed.",
    503: "Shutting down.",
    504: "It took too long.",
}
RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": told, "content": {"application/json": {"schema": _ERROR}}} for status, told in _TOLD.items()
}
ANSWERED: dict[int | str, dict[str, Any]] = RESPONSES | {
    200: {
        "description": "The answer; with stream, server-sent events.",
        "content": {"application/json": {}, "text/event-stream": {}},
    }
}


def make_app(session: Session, options: ServeOptions | None = None) -> FastAPI:
    """Requests become sequences of `session`, which the caller closes. `app.state.service` drains and counts."""
    options = options or ServeOptions()
    model = options.model_name or session.manifest.model.name
    figures = Prometheus(session, model)
    service = Service(session, options, model, figures)
    app = FastAPI(title="PaSS", version=pass_runtime.__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    add_handlers(app)
    _add_endpoints(app, service)
    _add_probes(app, service, figures)
    app.add_middleware(Bounded, most=options.max_body_bytes, seconds=options.body_seconds)
    app.add_middleware(Keyed, keys=options.keys)
    app.add_middleware(Counted, model=model, figures=figures)
    return app


def _add_endpoints(app: FastAPI, service: Service) -> None:
    card = {"id": service.model, "object": "model", "created": int(time.time()), "owned_by": "pass"}

    async def answer(request: Sampled, form: type[Form], *, logprobs: bool) -> Response:
        if request.model != service.model:
            raise _unknown_model(request.model, service.model)
        service.check_room()  # before any work is done
        asked = await asyncio.to_thread(ask, service.session, service.options, request)
        service.check_room(asked.sequences)
        usage = bool(request.stream_options and request.stream_options.include_usage)
        told = form(service.model, service.texts, logprobs=logprobs)
        return Answer(service, asked, told, stream=bool(request.stream), include_usage=usage)

    @app.post("/v1/completions", response_class=Response, responses=ANSWERED)
    async def completions(request: CompletionRequest) -> Response:
        return await answer(request, CompletionForm, logprobs=request.logprobs is not None)

    @app.post("/v1/chat/completions", response_class=Response, responses=ANSWERED)
    async def chat_completions(request: ChatRequest) -> Response:
        return await answer(request, ChatForm, logprobs=bool(request.logprobs))

    @app.get("/v1/models", responses={401: RESPONSES[401]})
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card]}

    @app.get("/v1/models/{model:path}", responses={401: RESPONSES[401], 404: RESPONSES[404]})
    async def model(model: str) -> dict[str, Any]:
        if model != service.model:
            raise _unknown_model(model, service.model)
        return card


def _add_probes(app: FastAPI, service: Service, figures: Prometheus) -> None:
    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether the process answers, and its session is open."""
        if service.session.closed:
            raise ApiError("the session is closed", 503)
        return {"status": "ok"}

    @app.get("/ready", responses={503: RESPONSES[503]})
    async def ready() -> JSONResponse:
        """Whether new requests are taken."""
        taken = not service.draining and not service.session.closed
        return JSONResponse({"ready": taken}, 200 if taken else 503)

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        return Response(figures.text(), media_type=CONTENT_TYPE_LATEST)


def _unknown_model(asked: str, served: str) -> ApiError:
    return ApiError(f"no model {asked!r} here; it is {served!r}", 404, param="model", code="model_not_found")
