"""Responses that are kept, run in the background, and belong to someone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
from server_process import ServerProcess
from waiting import eventually


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
    assert begun.status == "queued"
    assert begun.background
    assert begun.usage is None
    eventually(
        lambda: scripted.responses.retrieve(begun.id).status not in ("queued", "in_progress")
    )
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
        with pytest.raises(openai.BadRequestError, match="still queued"):
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
    for _ in range(3):  # of whom there is one too many, and who has the most makes room
        bob.responses.create(input="b", **options)
    assert alice.responses.retrieve(hers.id).id == hers.id
    theirs = alice.conversations.create(items=[{"role": "user", "content": "a"}])
    for reach in (
        bob.conversations.retrieve,
        bob.conversations.delete,
        bob.conversations.items.list,
    ):
        with pytest.raises(openai.NotFoundError):
            reach(theirs.id)
    with pytest.raises(openai.BadRequestError, match="no conversation"):
        bob.responses.create(input="b", conversation=theirs.id, **options)


def test_a_response_is_queued_until_its_first_token(
    scripted: openai.OpenAI, scripted_server: ServerProcess
) -> None:
    options: Any = {"model": "scripted", "background": True}
    with scripted_server.engine_stopped():
        begun = scripted.responses.create(input="[[Done.]]", **options)
        assert scripted.responses.retrieve(begun.id).status == "queued"
    eventually(lambda: scripted.responses.retrieve(begun.id).status == "completed")

    def is_seen_in_progress() -> bool:
        seen = begun = scripted.responses.create(input="[[And on and on...]]", **options)
        while seen.status == "queued":
            seen = scripted.responses.retrieve(begun.id)
        scripted.responses.cancel(begun.id)
        return seen.status == "in_progress"

    eventually(is_seen_in_progress)


def test_the_tokens_of_a_request_are_counted(scripted: openai.OpenAI) -> None:
    options: Any = {"model": "scripted", "instructions": "Be brief."}
    first = scripted.responses.create(input="[[One.]]", **options)
    for following in ({}, {"previous_response_id": first.id}):
        counted = scripted.responses.input_tokens.count(input="[[Two.]]", **options, **following)
        assert counted.object == "response.input_tokens"
        second = scripted.responses.create(input="[[Two.]]", **options, **following)
        assert second.usage is not None
        assert counted.input_tokens == second.usage.input_tokens
    with pytest.raises(openai.BadRequestError) as caught:
        scripted.responses.input_tokens.count(model="scripted")
    assert caught.value.param == "input"
    many = scripted.responses.input_tokens.count(model="scripted", input="word " * 2000)
    assert many.input_tokens > 4096, "more than the model takes is counted as well"
