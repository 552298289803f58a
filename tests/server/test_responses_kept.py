"""Responses that are kept, run in the background, and belong to someone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from server_process import ServerProcess, eventually


def test_a_response_that_is_deleted_or_not_stored_is_gone(scripted: openai.OpenAI) -> None:
    kept = scripted.responses.create(model="scripted", input="[[Hi.]]")
    scripted.responses.delete(kept.id)
    unkept = scripted.responses.create(model="scripted", input="[[Hi.]]", store=False)
    for response in (kept, unkept):
        with pytest.raises(openai.NotFoundError):
            scripted.responses.retrieve(response.id)
        with pytest.raises(openai.NotFoundError):
            scripted.responses.delete(response.id)
        with pytest.raises(openai.NotFoundError):
            scripted.responses.cancel(response.id)
        with pytest.raises(openai.BadRequestError) as caught:
            scripted.responses.create(
                model="scripted", input="[[Hi.]]", previous_response_id=response.id
            )
        assert caught.value.param == "previous_response_id"


def test_a_response_in_the_background_is_fetched_when_it_is_done(scripted: openai.OpenAI) -> None:
    begun = scripted.responses.create(model="scripted", input="[[Done.]]", background=True)
    assert begun.status == "in_progress"
    assert begun.background
    eventually(lambda: scripted.responses.retrieve(begun.id).status != "in_progress")
    done = scripted.responses.retrieve(begun.id)
    assert done.status == "completed"
    assert done.output_text == "Done."
    assert scripted.responses.cancel(begun.id).status == "completed"
    next_one = scripted.responses.create(
        model="scripted", input="[[More.]]", previous_response_id=begun.id
    )
    with pytest.raises(openai.BadRequestError, match="background"):
        scripted.responses.cancel(next_one.id)


def test_a_response_in_the_background_can_be_cancelled(
    scripted: openai.OpenAI, scripted_server: ServerProcess
) -> None:
    endless: Any = {
        "model": "scripted", "input": "[[And on and on...]]", "background": True,
        "extra_body": {"chat_template_kwargs": {"enable_thinking": True}},
    }  # fmt: skip
    with scripted_server.engine_stopped():  # so that none is over before
        begun = scripted.responses.create(**endless)
        with pytest.raises(openai.BadRequestError, match="in progress"):
            scripted.responses.create(
                model="scripted", input="[[Hi.]]", previous_response_id=begun.id
            )
        cancelled = scripted.responses.cancel(begun.id)
        assert cancelled.status == "cancelled"
    eventually(scripted_server.is_idle)
    assert scripted.responses.retrieve(begun.id).status == "cancelled"
    with scripted_server.engine_stopped():
        begun = scripted.responses.create(**endless)
        scripted.responses.delete(begun.id)
    eventually(scripted_server.is_idle)
    with pytest.raises(openai.NotFoundError):
        scripted.responses.retrieve(begun.id)


def test_one_key_cannot_reach_the_responses_of_another(
    serve_tiny: Callable[..., ServerProcess],
) -> None:
    server = serve_tiny("--api-key", "alice", "--api-key", "bob", "--max-stored-responses", "2")
    url = f"{server.base_url}/v1"
    alice, bob = (
        openai.OpenAI(base_url=url, api_key=key, max_retries=0) for key in ("alice", "bob")
    )
    options: Any = {"model": alice.models.list().data[0].id, "max_output_tokens": 2}
    hers = alice.responses.create(input="a", **options)
    assert alice.responses.retrieve(hers.id).id == hers.id
    for reach in (bob.responses.retrieve, bob.responses.delete, bob.responses.cancel):
        with pytest.raises(openai.NotFoundError):
            reach(hers.id)
    with pytest.raises(openai.NotFoundError):
        list(bob.responses.input_items.list(hers.id))
    with pytest.raises(openai.BadRequestError):
        bob.responses.create(input="b", previous_response_id=hers.id, **options)
    for _ in range(2):  # which is what there is room for
        bob.responses.create(input="b", **options)
    with pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(hers.id)
