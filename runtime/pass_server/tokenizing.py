"""vLLM's endpoints /tokenize (from a text or messages to token ids) and /detokenize (to a text)."""

from __future__ import annotations

from functools import partial
from typing import Any, ClassVar

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from pydantic import Field

from pass_runtime import PassError
from pass_server import schemas
from pass_server.api_error import ApiError, not_supported
from pass_server.service import Service


class TokenizeRequest(schemas.StrictObject):
    """Either `prompt` or `messages` must be set."""

    model: schemas.Name | None = None
    prompt: schemas.Text | None = None
    messages: schemas.Messages | None = None
    add_special_tokens: bool | None = Field(
        None, description="Default true for a prompt; must be false for messages."
    )
    return_token_strs: bool | None = None
    tools: schemas.Tools | None = None
    chat_template_kwargs: schemas.TemplateVariables | None = None
    neutral: ClassVar = {
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "chat_template": (),
        "mm_processor_kwargs": ({},),
    }


class DetokenizeRequest(schemas.StrictObject):
    model: schemas.Name | None = None
    tokens: schemas.TokenIds


def add_tokenize_endpoints(app: FastAPI, service: Service, responses: Any) -> None:
    """Add both endpoints to the app. responses: the error responses in the OpenAPI document."""

    @app.post("/tokenize", responses=responses)
    async def tokenize(request: TokenizeRequest, http: Request) -> Response:
        service.check_model(request.model)
        return await service.run_in_thread(
            partial(_tokenized, service, request), len(await http.body())
        )

    @app.post("/detokenize", responses=responses)
    async def detokenize(request: DetokenizeRequest, http: Request) -> Response:
        service.check_model(request.model)
        return await service.run_in_thread(
            partial(_detokenized, service, request), len(await http.body())
        )


def _tokenized(service: Service, request: TokenizeRequest) -> Response:
    if (request.prompt is None) == (request.messages is None):
        raise ApiError("give either prompt or messages", param="prompt")
    session, param = service.session, "prompt" if request.messages is None else "messages"
    try:
        ids = _prompt_ids(service, request) if param == "prompt" else _chat_ids(service, request)
    except PassError as error:
        raise ApiError(str(error), param=param) from None
    answer = {"count": len(ids), "max_model_len": session.capacity, "tokens": ids}
    texts = None
    if request.return_token_strs:
        texts = [session.tokenizer.id_to_token(token) for token in ids]
    return JSONResponse({**answer, "token_strs": texts})


def _prompt_ids(service: Service, request: TokenizeRequest) -> list[int]:
    text = request.prompt or ""
    for name in ("tools", "chat_template_kwargs"):
        if getattr(request, name):
            raise ApiError(f"{name} need messages, not a prompt", param=name)
    return service.session.encode(text, add_special_tokens=request.add_special_tokens is not False)


def _chat_ids(service: Service, request: TokenizeRequest) -> list[int]:
    if request.add_special_tokens:
        why = "the chat template writes the special tokens of messages"
        raise not_supported("add_special_tokens", True, why)
    names = {"messages", "tools", "chat_template_kwargs"}
    fields = request.model_dump(include=names, exclude_none=True)
    chat = schemas.ChatRequest.model_validate({"model": service.model, **fields})
    return service.parser.chat_ids(chat)


def _detokenized(service: Service, request: DetokenizeRequest) -> Response:
    vocabulary = service.session.manifest.model.vocab_size
    if any(not 0 <= token < vocabulary for token in request.tokens):
        raise ApiError(f"a token id is not in the vocabulary of {vocabulary}", param="tokens")
    return JSONResponse({"prompt": service.session.decode(request.tokens)})
