"""Drives a server with the official OpenAI client: python openai_client.py URL [CHECK...]

The checks are the functions below (default: all). Prints what it checked; any failure is an exception. The model may
write nonsense, but needs a chat template.
"""

import json
import sys

import openai
from openai import OpenAI
from pydantic import BaseModel

ASK = [{"role": "user", "content": "Tell me about the sea."}]


def chat(client, model):
    def ask(**more):
        return client.chat.completions.create(model=model, messages=ASK, max_tokens=24, **more)

    whole = ask(temperature=0)
    choice = whole.choices[0]
    assert whole.object == "chat.completion" and whole.id.startswith("chatcmpl-"), whole
    assert choice.message.role == "assistant" and choice.message.content, whole
    assert choice.finish_reason in ("stop", "length"), whole
    usage = whole.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, usage
    assert 0 < usage.completion_tokens <= 24 and usage.prompt_tokens_details.cached_tokens >= 0, usage

    # The same words in pieces, and the counts at the end.
    text, last, finish = "", None, None
    for chunk in ask(temperature=0, stream=True, stream_options={"include_usage": True}):
        assert last is None, "something came behind the counts"
        last = chunk.usage
        for c in chunk.choices:
            text += c.delta.content or ""
            finish = c.finish_reason or finish
    assert text == choice.message.content and finish == choice.finish_reason, (text, whole)
    assert (last.prompt_tokens, last.completion_tokens) == (usage.prompt_tokens, usage.completion_tokens), last

    # The client's own helper puts a stream together again.
    # (It takes an answer that was cut off for a failure.)
    stop = text[8:11]
    short = text[: text.index(stop)]
    with client.chat.completions.stream(model=model, messages=ASK, max_tokens=24, temperature=0, stop=stop) as stream:
        final = stream.get_final_completion()
    assert final.choices[0].message.content == short and final.choices[0].finish_reason == "stop", final

    several = ask(n=3, seed=5, temperature=1.2)
    lone = [ask(seed=5 + i, temperature=1.2).choices[0].message.content for i in range(3)]
    assert [c.message.content for c in several.choices] == lone, (several, lone)
    assert [c.index for c in several.choices] == [0, 1, 2]

    probs = ask(temperature=0, logprobs=True, top_logprobs=3).choices[0].logprobs.content
    assert len(probs) == usage.completion_tokens
    assert all(p.top_logprobs[0].token == p.token and p.logprob <= 0 and len(p.top_logprobs) == 3 for p in probs)

    cut = ask(temperature=0, stop=[stop]).choices[0]
    assert cut.message.content == short and cut.finish_reason == "stop", cut
    return "chat"


def completions(client, model):
    def go_on(prompt, **more):
        return client.completions.create(model=model, prompt=prompt, max_tokens=8, temperature=0, **more)

    one, two = go_on("Once upon a time"), go_on("The harbour")
    both = go_on(["Once upon a time", "The harbour"])
    assert [c.text for c in both.choices] == [one.choices[0].text, two.choices[0].text], both
    assert both.usage.prompt_tokens == one.usage.prompt_tokens + two.usage.prompt_tokens
    assert "".join(c.choices[0].text for c in go_on("Once upon a time", stream=True)) == one.choices[0].text
    return "completions"


def echo(client, model):
    def go_on(**more):
        return client.completions.create(model=model, prompt="The harbour", max_tokens=8, temperature=0, **more)

    plain = go_on()
    both = go_on(echo=True, logprobs=1).choices[0]
    assert both.text == "The harbour" + plain.choices[0].text, both
    probs = both.logprobs
    assert probs.token_logprobs[0] is None and all(p <= 0 for p in probs.token_logprobs[1:]), probs
    assert len(probs.tokens) == plain.usage.prompt_tokens + plain.usage.completion_tokens, probs
    return "echo"


def models(client, model):
    assert model in [m.id for m in client.models.list()]
    assert client.models.retrieve(model).id == model
    return "models"


def errors(client, model):
    def refused(kind, status, param, **fields):
        try:
            client.chat.completions.create(**{"model": model, "messages": ASK, "max_tokens": 2, **fields})
        except kind as error:
            assert error.status_code == status and error.param == param, error
            return error
        raise AssertionError(f"{fields} was not refused")

    refused(openai.BadRequestError, 400, "temperature", temperature=-1)
    refused(openai.BadRequestError, 400, "n", n=0)
    long = [{"role": "user", "content": "word " * 20000}]
    assert refused(openai.BadRequestError, 400, "messages", messages=long).code == "context_length_exceeded"
    assert refused(openai.NotFoundError, 404, "model", model="no-such-model").code == "model_not_found"
    bad = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "word"}}}
    refused(openai.BadRequestError, 400, "response_format.json_schema.schema", response_format=bad)
    return "errors"


def forms(client, model):
    # No strings: a model that writes nonsense does not end them.
    schema = {
        "type": "object",
        "properties": {"adult": {"type": "boolean"}, "kind": {"enum": ["cat", "dog"]}},
        "required": ["adult", "kind"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": schema}}
    for seed in range(4):
        got = client.chat.completions.create(
            model=model, messages=ASK, response_format=form, seed=seed, temperature=1, max_tokens=100
        )
        pet = json.loads(got.choices[0].message.content)
        assert type(pet["adult"]) is bool and pet["kind"] in ("cat", "dog") and len(pet) == 2, pet
        assert got.choices[0].finish_reason == "stop", got

    class Pet(BaseModel):
        adult: bool
        legs: bool

    parsed = client.chat.completions.parse(model=model, messages=ASK, response_format=Pet, temperature=0, max_tokens=100)
    assert isinstance(parsed.choices[0].message.parsed, Pet), parsed

    tool = {
        "type": "function",
        "function": {
            "name": "light",
            "description": "Switches the light.",
            "parameters": {
                "type": "object",
                "properties": {"on": {"type": "boolean"}, "room": {"enum": ["kitchen", "hall"]}},
                "required": ["on", "room"],
                "additionalProperties": False,
            },
        },
    }

    def call(**more):
        return client.chat.completions.create(
            model=model, messages=ASK, tools=[tool], temperature=0, max_tokens=120, parallel_tool_calls=False, **more
        )

    for choice in ("required", {"type": "function", "function": {"name": "light"}}):
        got = call(tool_choice=choice).choices[0]
        assert got.finish_reason == "tool_calls", got
        function = got.message.tool_calls[0].function
        arguments = json.loads(function.arguments)
        assert function.name == "light" and arguments["room"] in ("kitchen", "hall"), function
    name, written = "", ""
    for chunk in call(tool_choice="required", stream=True):
        for c in chunk.choices:
            for piece in c.delta.tool_calls or []:
                name += piece.function.name or ""
                written += piece.function.arguments or ""
    assert (name, json.loads(written)) == ("light", arguments), (name, written)
    # The conversation goes on with the call and its result.
    talk = ASK + [
        {"role": "assistant", "tool_calls": [got.message.tool_calls[0].model_dump()]},
        {"role": "tool", "tool_call_id": got.message.tool_calls[0].id, "content": "done"},
    ]
    more = client.chat.completions.create(model=model, messages=talk, max_tokens=4)
    assert more.choices[0].message.role == "assistant"
    assert call(tool_choice="none").choices[0].message.tool_calls is None
    return "schemas and tools"


def vectors(client, model):
    # The client asks for base64 unless told otherwise.
    got = client.embeddings.create(model=model, input=["the sea", "the shore"])
    plain = client.embeddings.create(model=model, input="the sea", encoding_format="float")
    assert len(got.data) == 2 and got.usage.prompt_tokens > 0
    assert abs(sum(x * x for x in got.data[0].embedding) - 1) < 1e-4
    assert all(abs(a - b) < 1e-6 for a, b in zip(got.data[0].embedding, plain.data[0].embedding, strict=True))
    last = client.embeddings.create(model=model, input="the sea", extra_body={"pooling": "last"})
    assert last.data[0].embedding != got.data[0].embedding
    return "embeddings"


CHECKS = {check.__name__: check for check in (models, chat, completions, echo, errors, forms, vectors)}


def main():
    url, *names = sys.argv[1:]
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60)
    model = client.models.list().data[0].id
    for name in names or CHECKS:
        print("ok", CHECKS[name](client, model))


main()
