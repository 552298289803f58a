"""/v1/conversations, through OpenAI's own client."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from server_process import ServerProcess
from waiting import eventually


def texts(client: openai.OpenAI, conversation_id: str) -> list[str]:
    """What was said, in order."""
    items = client.conversations.items.list(conversation_id, order="asc", limit=100)
    return [part.text for item in items for part in item.content]  # type: ignore


def user(text: str, **fields: Any) -> Any:
    return {"type": "message", "role": "user", "content": text, **fields}


def test_a_conversation_is_created_read_changed_and_deleted(scripted: openai.OpenAI) -> None:
    made = scripted.conversations.create(metadata={"topic": "tea"}, items=[user("Hello.")])
    assert made.id.startswith("conv_")
    assert made.object == "conversation"
    assert made.metadata == {"topic": "tea"}
    assert scripted.conversations.retrieve(made.id) == made
    changed = scripted.conversations.update(made.id, metadata={"topic": "coffee"})
    assert (changed.id, changed.metadata) == (made.id, {"topic": "coffee"})
    assert scripted.conversations.retrieve(made.id) == changed
    assert texts(scripted, made.id) == ["Hello."]
    deleted = scripted.conversations.delete(made.id)
    assert (deleted.id, deleted.object, deleted.deleted) == (made.id, "conversation.deleted", True)
    for reach in (
        scripted.conversations.retrieve, scripted.conversations.delete,
        scripted.conversations.items.list,
    ):  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            reach(made.id)
    with pytest.raises(openai.NotFoundError):
        scripted.conversations.update(made.id, metadata={})


def test_items_are_added_listed_read_and_deleted(scripted: openai.OpenAI) -> None:
    conversation = scripted.conversations.create().id
    items = scripted.conversations.items
    added = items.create(
        conversation,
        items=[
            user("a", id="msg_a"),
            {"role": "assistant", "content": "b"},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}", "id": "fc"},
            {"type": "function_call_output", "call_id": "c", "output": "d"},
        ],
    )
    ids = [item.id for item in added.data]
    assert (added.first_id, added.last_id, added.has_more) == (ids[0], ids[-1], False)
    assert [item.type for item in added.data] == [
        "message", "message", "function_call", "function_call_output",
    ]  # fmt: skip
    assert len(set(ids)) == 4
    pages = list(items.list(conversation, order="asc", limit=1).iter_pages())
    assert [item.id for page in pages for item in page.data] == ids
    assert [item.id for item in items.list(conversation, limit=3)] == ids[::-1]
    one = items.retrieve("msg_a", conversation_id=conversation)
    assert one.type == "message"
    assert (one.role, one.status, one.content[0].text) == ("user", "completed", "a")  # type: ignore
    assert items.delete("msg_a", conversation_id=conversation).id == conversation
    assert [item.id for item in items.list(conversation, order="asc")] == ids[1:]
    for reach in (items.retrieve, items.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            reach("msg_a", conversation_id=conversation)
        assert caught.value.param == "item_id"


def test_an_id_that_is_taken_is_not_given_twice(scripted: openai.OpenAI) -> None:
    conversation = scripted.conversations.create(items=[user("a", id="msg_a")]).id
    twice = scripted.conversations.items.create(
        conversation, items=[user("b", id="msg_a"), user("c", id="msg_c"), user("d", id="msg_c")]
    )
    ids = ["msg_a", *(item.id for item in twice.data)]
    assert len(set(ids)) == 4
    assert texts(scripted, conversation) == ["a", "b", "c", "d"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("as_object", [False, True])
def test_responses_continue_a_conversation_and_add_to_it(
    scripted: openai.OpenAI, stream: bool, as_object: bool
) -> None:
    conversation = scripted.conversations.create(items=[user("The word is [[first]].")]).id
    given: Any = {"id": conversation} if as_object else conversation
    options: Any = {"model": "scripted", "conversation": given, "store": False}

    def answer(**fields: Any) -> Any:
        if not stream:
            return scripted.responses.create(**options, **fields)
        *_, last = scripted.responses.create(stream=True, **options, **fields)
        return last.response

    one = answer()  # the conversation alone
    assert one.output_text == "first"
    assert one.conversation.id == conversation
    two = answer(input="Now [[second]].")
    assert two.output_text == "second"
    assert two.usage.input_tokens > one.usage.input_tokens
    said = ["The word is [[first]].", "first", "Now [[second]].", "second"]
    assert texts(scripted, conversation) == said


def test_what_runs_in_the_background_ends_up_in_its_conversation(
    scripted: openai.OpenAI, scripted_server: ServerProcess
) -> None:
    conversation = scripted.conversations.create().id
    options: Any = {"model": "scripted", "conversation": conversation, "background": True}
    done = scripted.responses.create(input="[[Yes.]]", **options)
    eventually(lambda: scripted.responses.retrieve(done.id).status == "completed")
    assert texts(scripted, conversation) == ["[[Yes.]]", "Yes."]
    endless = scripted.responses.create(input="[[On and on...]]", **options)
    scripted.responses.cancel(endless.id)
    eventually(scripted_server.is_idle)
    assert texts(scripted, conversation) == ["[[Yes.]]", "Yes."], "what was cancelled is not"


def test_responses_at_once_do_not_undo_each_other(scripted: openai.OpenAI) -> None:
    conversation = scripted.conversations.create().id
    words = [f"[[w{index}]]" for index in range(8)]

    def say(word: str) -> None:
        scripted.responses.create(model="scripted", input=word, conversation=conversation)

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(say, words))
    said = texts(scripted, conversation)
    assert sorted(said[::2]) == words
    assert [text.strip("[]") for text in said[::2]] == said[1::2], "each answer after its question"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"conversation": "conv_none"}, "conversation"),
        ({"conversation": {"id": "conv_none"}}, "conversation"),
        ({"conversation": {}}, "conversation"),
        ({"conversation": "conv_none", "previous_response_id": "resp_none"}, "conversation"),
        ({}, "input"),
    ],
)
def test_a_conversation_that_cannot_be_continued_is_refused(
    scripted_server: ServerProcess, fields: dict[str, Any], param: str
) -> None:
    answer = scripted_server.post("/v1/responses", fields)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("path", "field"), [("/v1/responses", "input"), ("/v1/conversations", "items")]
)
def test_what_is_kept_must_be_json(scripted_server: ServerProcess, path: str, field: str) -> None:
    item = '{"type": "mcp_list_tools", "id": "a", "server_label": "b", "tools": [{"x": NaN}]}'
    with scripted_server.client(headers={"Content-Type": "application/json"}) as client:
        answer = client.post(path, content=f'{{"{field}": [{item}]}}')
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field
    assert f"{field} must be plain JSON" in answer.json()["error"]["message"]


def test_a_conversation_holds_so_much_and_says_so(
    serve_tiny: Callable[..., ServerProcess],
) -> None:
    server = serve_tiny("--max-stored-items", "3", "--max-stored-responses", "2")
    url = f"{server.base_url}/v1"
    with openai.OpenAI(base_url=url, api_key="none", max_retries=0) as client:
        model = client.models.list().data[0].id
        first, full = client.conversations.create(), client.conversations.create()
        client.conversations.items.create(full.id, items=[user("a"), user("b"), user("c")])
        with pytest.raises(openai.BadRequestError, match="--max-stored-items") as caught:
            client.conversations.items.create(full.id, items=[user("d")])
        assert caught.value.param == "items"
        assert texts(client, full.id) == ["a", "b", "c"]
        with pytest.raises(openai.BadRequestError, match="--max-stored-items") as caught:
            client.responses.create(model=model, input="d", conversation=full.id)
        with pytest.raises(openai.BadRequestError, match="16"):
            client.conversations.create(metadata={str(index): "" for index in range(17)})
        client.conversations.create()  # one more than there is room for
        with pytest.raises(openai.NotFoundError):
            client.conversations.retrieve(first.id)


def test_a_response_that_cannot_be_kept_says_so(serve_tiny: Callable[..., ServerProcess]) -> None:
    server = serve_tiny("--max-stored-items", "3")
    long = {"input": [user("x")] * 4, "max_output_tokens": 1}
    assert server.post("/v1/responses", long).json()["store"] is False
    assert server.post("/v1/responses", {**long, "input": "x"}).json()["store"] is True
    wordy = {"input": "x", "background": True, "instructions": "x" * 200, "max_output_tokens": 1}
    small = serve_tiny("--max-stored-response-bytes", "1000")
    answer = small.post("/v1/responses", wordy)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "background")
    for field in ("store", "background"):
        answer = server.post("/v1/responses", {**long, field: True})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
        assert "--max-stored-items" in answer.json()["error"]["message"]
