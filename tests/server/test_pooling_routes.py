"""The pooling endpoints: a tiny decoder as embedder, and another as reranker."""

from __future__ import annotations

import base64
import concurrent.futures
import contextlib
import http.client
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cohere
import numpy as np
import openai
import pytest
from server_process import DUMMY, ServerProcess, make_tiny_model
from waiting import eventually

from penstock import LLM, PoolingParams

EMBEDS = ("--runner", "pooling", "--pooler-config", '{"dimensions": [8, 16]}')
TEXTS = ["one", "another text", "three", "a fourth text, which is longer than all of the others"]


@pytest.fixture(scope="module")
def embedder(serve_module: Callable[..., ServerProcess]) -> ServerProcess:
    return serve_module(*EMBEDS, "--served-model-name", "tiny")


@pytest.fixture(scope="module")
def expected(tiny_model: Path) -> dict[str, Any]:
    """The vectors of the same weights, offline."""
    options = {"load_format": "dummy", "cpu_threads": 1, "kv_cache_memory_bytes": 64 << 20}
    with LLM(str(tiny_model), runner="pooling", log_level="error", **options) as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
    return {text: output.outputs.embedding for text, output in zip(TEXTS, outputs, strict=True)}


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = make_tiny_model(tmp_path_factory.mktemp("ranker"))
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "good"}}
    (folder / "config.json").write_text(json.dumps(config))
    with ServerProcess(str(folder), *DUMMY, "--served-model-name", "ranker") as server:
        yield server


@pytest.fixture(scope="module")
def client(embedder: ServerProcess) -> Iterator[openai.OpenAI]:
    with embedder.openai() as client:
        yield client


def assert_same(found: Any, wanted: Any) -> None:
    np.testing.assert_allclose(found, wanted, atol=1e-5)


def post(server: ServerProcess, path: str, **body: Any) -> dict[str, Any]:
    response = server.post(path, body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def refusal(server: ServerProcess, path: str, **body: Any) -> tuple[str, str | None]:
    """What a request is refused with, which must be its own fault, and the field."""
    response = server.post(path, body)
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    return error["message"], error["param"]


@pytest.mark.parametrize("encoding", ["float", "base64"])
def test_openais_client_gets_the_vectors_of_offline_inference(
    client: openai.OpenAI, expected: dict[str, Any], encoding: Any
) -> None:
    reply = client.embeddings.create(model="tiny", input=TEXTS, encoding_format=encoding)
    assert [item.index for item in reply.data] == [0, 1, 2, 3]
    for item, text in zip(reply.data, TEXTS, strict=True):
        vector: Any = item.embedding
        if encoding == "base64":
            vector = np.frombuffer(base64.b64decode(vector), "<f4")
        assert_same(vector, expected[text])
    assert reply.usage.prompt_tokens == sum(map(len, TEXTS)) == reply.usage.total_tokens


def test_openais_client_asks_for_base64_by_itself(
    client: openai.OpenAI, expected: dict[str, Any]
) -> None:
    reply = client.embeddings.create(model="tiny", input=TEXTS[0])
    assert_same(reply.data[0].embedding, expected[TEXTS[0]])


def test_dimensions_cut_and_normalize_anew(client: openai.OpenAI, expected: dict[str, Any]) -> None:
    reply = client.embeddings.create(model="tiny", input=TEXTS[1], dimensions=8)
    cut = expected[TEXTS[1]][:8]
    assert_same(reply.data[0].embedding, cut / np.linalg.norm(cut))


def test_token_ids_are_inputs_too(embedder: ServerProcess, expected: dict[str, Any]) -> None:
    ids = [post(embedder, "/tokenize", prompt=text)["tokens"] for text in TEXTS]
    several = post(embedder, "/v1/embeddings", input=ids)["data"]
    for item, text in zip(several, TEXTS, strict=True):
        assert_same(item["embedding"], expected[text])
    (alone,) = post(embedder, "/v1/embeddings", input=ids[1])["data"]
    assert_same(alone["embedding"], expected[TEXTS[1]])


def test_a_conversation_is_embedded_as_its_template_writes_it(embedder: ServerProcess) -> None:
    messages = [{"role": "user", "content": "hello"}]
    (chat,) = post(embedder, "/v1/embeddings", messages=messages)["data"]
    (text,) = post(embedder, "/v1/embeddings", input="user: hello\n")["data"]
    assert_same(chat["embedding"], text["embedding"])


@pytest.mark.parametrize(("dtype", "tolerance"), [("float16", 1e-3), ("bfloat16", 1e-2)])
def test_base64_comes_in_the_type_that_is_asked_for(
    embedder: ServerProcess, expected: dict[str, Any], dtype: str, tolerance: float
) -> None:
    body = {"input": TEXTS[0], "encoding_format": "base64", "embed_dtype": dtype}
    raw = base64.b64decode(post(embedder, "/v1/embeddings", **body)["data"][0]["embedding"])
    assert len(raw) == 2 * 32
    if dtype == "float16":
        vector = np.frombuffer(raw, "<f2").astype(np.float32)
    else:
        vector = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(vector, expected[TEXTS[0]], atol=tolerance)


def test_truncation_keeps_the_side_that_is_asked_for(embedder: ServerProcess) -> None:
    body = {"truncate_prompt_tokens": 4}
    first = post(embedder, "/v1/embeddings", input="abcdefgh", **body)
    last = post(embedder, "/v1/embeddings", input="abcdefgh", truncation_side="left", **body)
    assert first["usage"]["prompt_tokens"] == 4
    for cut, text in ((first, "abcd"), (last, "efgh")):
        whole = post(embedder, "/v1/embeddings", input=text)
        assert_same(cut["data"][0]["embedding"], whole["data"][0]["embedding"])


def test_pooling_gives_a_vector_for_each_token(embedder: ServerProcess) -> None:
    (item,) = post(embedder, "/pooling", input="abc", task="token_embed")["data"]
    assert np.array(item["data"]).shape == (3, 32)
    (embedded,) = post(embedder, "/v1/embeddings", input="abc")["data"]
    assert_same(item["data"][-1], embedded["embedding"])


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
def test_an_embedder_scores_by_the_cosine(
    embedder: ServerProcess, expected: dict[str, Any], path: str
) -> None:
    answer = post(embedder, path, text_1=TEXTS[0], text_2=TEXTS)
    for item, text in zip(answer["data"], TEXTS, strict=True):
        assert item["score"] == pytest.approx(expected[TEXTS[0]] @ expected[text], abs=1e-5)
    pairs = post(embedder, path, queries=TEXTS[:2], documents=TEXTS[2:])
    assert len(pairs["data"]) == 2


def test_sagemakers_route_answers_as_the_pooling_endpoints(embedder: ServerProcess) -> None:
    for path, part, body in [
        ("/v1/embeddings", "data", {"input": TEXTS}),
        ("/v1/score", "data", {"queries": TEXTS[0], "documents": TEXTS[1:]}),
        ("/v1/rerank", "results", {"query": TEXTS[0], "documents": TEXTS[1:]}),
    ]:
        own, invoked = post(embedder, path, **body), post(embedder, "/invocations", **body)
        assert own[part] == invoked[part]
        assert own.keys() == invoked.keys()


def test_an_embedder_puts_its_prompts_before_queries_and_documents(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    kinds = {"": "Transformer", "1_Pooling": "Pooling"}
    modules = [
        {"idx": index, "path": path, "type": f"sentence_transformers.models.{kind}"}
        for index, (path, kind) in enumerate(kinds.items())
    ]
    (folder / "1_Pooling").mkdir()
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": {"pooling_mode_lasttoken": True},
        "config_sentence_transformers.json": {"prompts": {"query": "find ", "passage": "see "}},
    }
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content))
    with contextlib.closing(ServerProcess(str(folder), *DUMMY)) as server:
        written = [f"find {TEXTS[0]}", *(f"see {text}" for text in TEXTS)]
        data = post(server, "/v1/embeddings", input=written)["data"]
        query, *documents = (np.array(item["embedding"]) for item in data)
        lengths = np.linalg.norm(documents, axis=1) * np.linalg.norm(query)
        expected = np.array(documents) @ query / lengths
        scores = post(server, "/score", text_1=TEXTS[0], text_2=TEXTS)["data"]
        assert_same([item["score"] for item in scores], expected)
        ranked = post(server, "/rerank", query=TEXTS[0], documents=TEXTS)["results"]
        for result in ranked:
            assert_same(result["relevance_score"], expected[result["index"]])

        # Limits are those of the texts alone: prompts stay whole.
        limits = {"max_tokens_per_query": 2, "max_tokens_per_doc": 4}
        cut = post(server, "/score", text_1=TEXTS[0], text_2=TEXTS, **limits)
        short = [text[:4] for text in TEXTS]
        alone = post(server, "/score", text_1=TEXTS[0][:2], text_2=short)
        assert cut["usage"] == alone["usage"]
        assert_same(*([item["score"] for item in answer["data"]] for answer in (cut, alone)))
        for result in post(server, "/rerank", query=TEXTS[0], documents=TEXTS, **limits)["results"]:
            assert_same(result["relevance_score"], alone["data"][result["index"]]["score"])
        long = post(server, "/score", text_1="a", text_2="b" * 999, max_tokens_per_doc=9)
        assert long["usage"]["prompt_tokens"] == len("find a") + len("see " + "b" * 9)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_back_by_relevance(ranker: ServerProcess, path: str) -> None:
    scores = post(ranker, "/score", data_1="query", data_2=TEXTS)["data"]
    answer = post(ranker, path, query="query", documents=TEXTS, top_n=3)
    best = sorted(scores, key=lambda item: -item["score"])[:3]
    assert [result["index"] for result in answer["results"]] == [item["index"] for item in best]
    for result, item in zip(answer["results"], best, strict=True):
        assert result["relevance_score"] == pytest.approx(item["score"], abs=1e-6)
        assert 0 <= result["relevance_score"] <= 1
        assert result["document"] == {"text": TEXTS[result["index"]]}
    bare = post(ranker, path, query="q", documents=[{"text": "a"}], return_documents=False)
    assert "document" not in bare["results"][0]


def test_classes_have_probabilities_and_names(ranker: ServerProcess) -> None:
    (item,) = post(ranker, "/classify", input="text")["data"]
    assert item["label"] == "good"
    assert item["num_classes"] == len(item["probs"]) == 1
    (logit,) = post(ranker, "/classify", input="text", use_activation=False)["data"]
    assert item["probs"][0] == pytest.approx(1 / (1 + np.exp(-logit["probs"][0])), abs=1e-6)


def test_the_list_of_models_says_what_a_model_does(
    ranker: ServerProcess, embedder: ServerProcess
) -> None:
    def card(server: ServerProcess) -> tuple[list[str], list[str] | None]:
        (found,) = server.get("/v1/models").json()["data"]
        return found["tasks"], found["labels"]

    assert card(embedder) == (["embed", "token_embed", "score"], None)
    tasks, labels = card(ranker)
    assert {"classify", "score"} <= set(tasks)
    assert labels == ["good"]


def test_coheres_client_reranks_and_embeds(
    ranker: ServerProcess, embedder: ServerProcess, expected: dict[str, Any]
) -> None:
    with_ranker = cohere.ClientV2("none", base_url=ranker.base_url)
    results = with_ranker.rerank(model="ranker", query="q", documents=TEXTS, top_n=2).results
    assert len(results) == 2
    assert results[0].relevance_score >= results[1].relevance_score
    reply = (
        cohere.ClientV2("none", base_url=embedder.base_url)
        .embed(
            model="tiny",
            texts=TEXTS,
            input_type="search_document",
            embedding_types=["float", "ubinary", "binary", "int8", "uint8"],
        )
        .embeddings
    )
    for index, text in enumerate(TEXTS):
        vector, bits, codes = (
            np.array((kind or [])[index]) for kind in (reply.float_, reply.ubinary, reply.int8)
        )
        assert_same(vector, expected[text])
        assert bits.tolist() == np.packbits(expected[text] > 0).tolist()
        assert (reply.binary or [])[index] == (bits - 128).tolist()
        assert np.abs(codes).max() == 127
        assert codes @ vector > 0.999 * np.linalg.norm(codes)
        assert (reply.uint8 or [])[index] == (codes + 128).tolist()


def test_langchains_embeddings_work(embedder: ServerProcess, expected: dict[str, Any]) -> None:
    from langchain_openai import OpenAIEmbeddings
    from pydantic import SecretStr

    embeddings = OpenAIEmbeddings(
        model="tiny",
        base_url=f"{embedder.base_url}/v1",
        api_key=SecretStr("none"),
        check_embedding_ctx_length=False,
    )
    for found, text in zip(embeddings.embed_documents(TEXTS), TEXTS, strict=True):
        assert_same(found, expected[text])
    assert_same(embeddings.embed_query(TEXTS[0]), expected[TEXTS[0]])


@pytest.mark.parametrize(
    ("body", "field", "words"),
    [
        ({"input": []}, "input", "must not be empty"),
        ({"input": ""}, "input", "must not be empty"),
        ({"input": ["a", ""]}, "input", "input[1] must not be empty"),
        ({"input": [[1], []]}, "input", "input[1] must not be empty"),
        ({"input": ["a", 1]}, "input", "of one kind"),
        ({"input": [1, "a"]}, "input", "of one kind"),
        ({"input": [[1, 2], "a"]}, "input", "of one kind"),
        ({"input": [-1]}, "input", "token IDs from 0 on"),
        ({"input": {"text": "a"}}, "input", "must be a text"),
        ({}, "input", "give either input or messages"),
        ({"input": [5000]}, "input", "token ids from 0 to 256"),
        ({"input": "a", "dimensions": 5}, "dimensions", "one of 8, 16, 32"),
        ({"input": "a", "dimensions": 0}, "dimensions", "at least 1"),
        ({"input": "a" * 257}, "input", "truncate_prompt_tokens"),
        ({"input": "a", "truncate_prompt_tokens": 257}, "truncate_prompt_tokens", "256"),
        ({"input": "a", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "float"),
        ({"input": "a", "embed_dtype": "int3"}, "embed_dtype", "float16"),
        ({"input": "a", "priority": 2**70}, "priority", ""),
    ],
)
def test_what_is_wrong_with_inputs_is_said_with_the_field(
    embedder: ServerProcess, body: dict[str, Any], field: str, words: str
) -> None:
    message, param = refusal(embedder, "/v1/embeddings", **body)
    assert param is not None
    assert param.startswith(field)
    assert words in message


def test_what_is_wrong_with_pairs_is_said_with_the_field(
    ranker: ServerProcess, embedder: ServerProcess
) -> None:
    bad: list[tuple[ServerProcess, str, dict[str, Any], str]] = [
        (ranker, "/rerank", {"query": "q", "documents": ["a"], "top_n": -1}, "top_n"),
        (ranker, "/rerank", {"query": "q", "documents": []}, "documents"),
        (ranker, "/rerank", {"query": "q", "documents": ["a" * 300]}, "documents"),
        (ranker, "/rerank", {"documents": ["a"]}, "query"),
        (embedder, "/rerank", {"query": "", "documents": ["a"]}, "query"),
        (embedder, "/rerank", {"query": "q", "documents": ["a", ""]}, "documents"),
        (embedder, "/score", {"queries": ["a", ""], "documents": ["b", "c"]}, "queries"),
        (ranker, "/score", {"text_1": "a"}, "text_2"),
        (ranker, "/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "text_1"),
        (ranker, "/score", {"text_1": ["a", "b"], "text_2": ["a", "b", "c"]}, "text_1"),
        (ranker, "/score", {"text_1": "a", "text_2": "b", "max_tokens_per_doc": -1},
         "max_tokens_per_doc"),
        (embedder, "/score", {"text_1": "a", "text_2": "b", "max_tokens_per_query": -1},
         "max_tokens_per_query"),
        (embedder, "/score", {"text_1": "a", "text_2": "b", "instruction": "c"}, "instruction"),
        (embedder, "/rerank", {"query": "a", "documents": ["b"], "instruction": "c"},
         "instruction"),
        (ranker, "/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "instruction"),
        (ranker, "/v1/embeddings", {"input": "a"}, "model"),
        (embedder, "/classify", {"input": "a"}, "model"),
        (ranker, "/v2/embed", {"texts": ["a"]}, "model"),
        (embedder, "/v2/embed", {"texts": []}, "texts"),
        (embedder, "/v2/embed", {"texts": ["a"], "embedding_types": ["int4"]}, "embedding_types"),
        (embedder, "/v2/embed", {"texts": ["a"], "images": ["data:"]}, "images"),
        (embedder, "/v2/embed", {"inputs": [{"content": []}]}, "inputs"),
        (embedder, "/v2/embed", {"texts": ["a"], "max_tokens": 0}, "max_tokens"),
        (embedder, "/v2/embed", {"texts": ["a"], "max_tokens": 9, "truncate": "NONE"},
         "max_tokens"),
        (embedder, "/v2/embed", {"texts": ["a"], "output_dimension": 5}, "output_dimension"),
        (embedder, "/v2/embed", {"texts": ["a" * 300], "truncate": "NONE"}, "texts"),
        (embedder, "/pooling", {"input": "a", "task": "classify"}, "task"),
    ]  # fmt: skip
    for server, path, body, field in bad:
        message, param = refusal(server, path, **body)
        assert param == field, (path, body, message)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}),
        ("/v1/responses", {"input": "a"}),
    ],
)
def test_generation_is_refused_by_a_pooling_model(
    embedder: ServerProcess, path: str, body: dict[str, Any]
) -> None:
    message, field = refusal(embedder, path, **body)
    assert field == "model"
    assert "/v1/embeddings" in message


def test_vectors_are_refused_by_a_generating_model(serve_tiny: Any) -> None:
    server = serve_tiny()
    for path, body in [
        ("/v1/embeddings", {"input": "a"}),
        ("/pooling", {"input": "a"}),
        ("/classify", {"input": "a"}),
        ("/score", {"text_1": "a", "text_2": "b"}),
        ("/rerank", {"query": "a", "documents": ["b"]}),
        ("/v2/embed", {"texts": ["a"]}),
    ]:
        message, field = refusal(server, path, **body)
        assert field == "model"
        assert "--runner pooling" in message


def test_a_request_of_thousands_of_texts_leaves_room_for_others(tiny_model: Path) -> None:
    flags = ("--max-num-seqs", "4", "--max-queued-requests", "16", "--runner", "pooling")
    server = ServerProcess(str(tiny_model), *DUMMY, *flags)
    try:
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            with server.engine_stopped():
                many = pool.submit(post, server, "/v1/embeddings", input=["many texts"] * 3000)
                # All that it has on the engine: the others wait in the API process.
                eventually(lambda: server.get("/load").json()["server_load"] == 8)
                single = pool.submit(post, server, "/v1/embeddings", input="a single one")
                eventually(lambda: server.get("/load").json()["server_load"] == 9)  # next in line
            assert len(single.result()["data"]) == 1
            data = many.result()["data"]
        assert len(data) == 3000
        assert all(item["embedding"] == data[0]["embedding"] for item in data)
    finally:
        server.close()


def test_nothing_is_left_of_a_client_that_leaves(embedder: ServerProcess) -> None:
    def num_unfinished() -> float:
        return float(embedder.get("/load").json()["server_load"])

    with embedder.engine_stopped():
        connection = http.client.HTTPConnection("127.0.0.1", embedder.port)
        body = json.dumps({"input": ["a text"] * 1000})
        headers = {"Content-Type": "application/json"}
        connection.request("POST", "/v1/embeddings", body, headers)
        eventually(lambda: num_unfinished() > 0)
        connection.close()
        eventually(lambda: num_unfinished() == 0)
    assert len(post(embedder, "/v1/embeddings", input="another")["data"]) == 1


def test_metrics_count_the_tokens_that_were_pooled(embedder: ServerProcess) -> None:
    def count(name: str) -> float:
        lines = embedder.get("/metrics").text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(name))

    before = count("penstock:prompt_tokens_total"), count("penstock:e2e_request_latency_seconds_c")
    post(embedder, "/v1/embeddings", input=["abc", "defg"])
    assert count("penstock:prompt_tokens_total") == before[0] + 7
    assert count("penstock:e2e_request_latency_seconds_c") == before[1] + 2


def test_params_of_pooling_are_checked() -> None:
    from penstock.protocol.errors import InputError

    with pytest.raises(InputError, match="task must be one of"):
        PoolingParams(task="paint")  # type: ignore[arg-type]
