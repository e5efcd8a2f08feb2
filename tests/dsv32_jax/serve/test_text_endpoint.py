import openai
import pytest


def ask(server, prompt, **options):
    return server.client.completions.create(model="tiny", prompt=prompt, **options)


def test_a_text_is_continued(server):
    answer = ask(server, "script=hello", max_tokens=100)
    assert answer.object == "text_completion"
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("Grüße, world", "stop")
    assert answer.usage.prompt_tokens == 1 + len("script=hello")


def test_a_stream_adds_up_to_the_text(server):
    options = {"seed": 3, "max_tokens": 24, "n": 2}
    whole = ask(server, "hi", **options)
    texts, reasons = ["", ""], [None, None]
    for chunk in ask(server, "hi", stream=True, **options):
        (choice,) = chunk.choices
        texts[choice.index] += choice.text
        reasons[choice.index] = choice.finish_reason
    assert texts == [choice.text for choice in whole.choices]
    assert reasons == [choice.finish_reason for choice in whole.choices]


def test_ids_are_taken_as_they_are(server):
    as_text = ask(server, "hi", seed=1).choices[0].text
    assert ask(server, [256, *b"hi"], seed=1).choices[0].text == as_text
    with pytest.raises(openai.BadRequestError, match="token ids"):
        ask(server, [264])
    with pytest.raises(openai.BadRequestError, match="at least one token") as caught:
        ask(server, [])
    assert (caught.value.param, caught.value.code) == ("prompt", "invalid_value")


def test_the_default_limit_is_openais(server):
    assert ask(server, "script=long").usage.completion_tokens == 16


def test_each_token_has_its_log_probability(server):
    found = ask(server, "script=hello", logprobs=0, max_tokens=3).choices[0].logprobs
    assert found.tokens == ["G", "r", "\ufffd"]
    assert len(found.token_logprobs) == 3
    with pytest.raises(openai.BadRequestError, match="logprobs above 0"):
        ask(server, "hi", logprobs=1)


def test_a_prompt_that_leaves_no_room_is_refused(server):
    with pytest.raises(
        openai.BadRequestError, match="1025 tokens; it must have at most 1023"
    ) as caught:
        ask(server, "x" * 1024)
    assert caught.value.code == "context_length_exceeded"


def test_the_one_model_is_listed(server):
    assert [model.id for model in server.client.models.list()] == ["tiny"]
    assert server.client.models.retrieve("tiny").id == "tiny"
    with pytest.raises(openai.NotFoundError):
        server.client.models.retrieve("other")


@pytest.mark.parametrize("body", [b"{", b'{"a": NaN}', b'"\\ud800"', b"[" * 100_000, b"\xff"])
def test_a_body_that_is_not_json_is_refused(server, body):
    response = server.http.post("/v1/completions", content=body)
    assert response.status_code == 400
    assert response.json()["error"]["code"] == "invalid_json"


def test_other_paths_and_methods_are_refused_in_openais_form(server):
    assert server.http.get("/v2").json()["error"]["code"] == "no_endpoint"
    response = server.http.get("/v1/completions")
    assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
    assert response.headers["allow"] == "POST"


def test_figures_count_what_was_done(server):
    ask(server, "script=hello", max_tokens=5)
    text = server.http.get("/metrics").text
    figures = dict(line.rsplit(" ", 1) for line in text.splitlines() if line[0] != "#")
    assert float(figures['dsv32_requests_total{path="/v1/completions",status="200"}']) >= 1
    assert float(figures["dsv32_generated_tokens_total"]) == server.engine.stats.drawn_tokens
    assert float(figures["dsv32_prompt_tokens_total"]) >= 13
    assert float(figures["dsv32_time_to_first_token_seconds_count"]) >= 1
    assert float(figures["dsv32_inter_token_seconds_count"]) >= 4
    for name in ("waiting_texts", "running_texts"):
        assert float(figures[f"dsv32_{name}"]) == 0
    assert {"dsv32_draft_acceptance_ratio", "dsv32_reused_tokens_total"} <= figures.keys()
