"""Requests that must be refused, each with its status and the field that is to be named.

MODEL, VOCAB and CONTEXT are replaced by the server's own. Used in process and over real HTTP.
"""

from __future__ import annotations

from typing import Any, NamedTuple

OK = {"prompt": "hello", "max_tokens": 2}
CHAT_OK = {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2}


class Bad(NamedTuple):
    """raw: the body as bytes, for what JSON cannot say."""

    name: str
    field: str | None
    body: Any = None
    raw: bytes | None = None
    path: str = "/v1/completions"
    status: int = 400
    content_type: str = "application/json"
    method: str = "POST"


def completion(name: str, field: str, **fields: Any) -> Bad:
    return Bad(name, field, OK | fields)


def chat(name: str, field: str, **fields: Any) -> Bad:
    return Bad(name, field, CHAT_OK | fields, path="/v1/chat/completions")


def bad_requests(vocab_size: int, max_model_len: int) -> list[Bad]:
    return [
        *_prompts(vocab_size, max_model_len),
        *_fields(vocab_size, max_model_len),
        *_constraints(),
        *_messages(max_model_len),
        *_http(),
    ]


def _constraints() -> list[Bad]:
    explodes = {"type": "string", "pattern": "^[^a]{0,9000}$"}

    def schema(name: str, field: str, value: object) -> Bad:
        body = {"type": "json_schema", "json_schema": {"name": "n", "schema": value, "strict": True}}
        return chat(name, field, response_format=body)

    def structured(name: str, field: str, **fields: object) -> Bad:
        return completion(name, field, structured_outputs=fields)

    return [
        chat("format that is no object", "response_format", response_format="json"),
        chat("unknown format", "response_format.type", response_format={"type": "xml"}),
        chat("format without a schema", "response_format.json_schema", response_format={"type": "json_schema"}),
        schema("schema that is a list", "response_format.json_schema.schema", []),
        schema("schema of no type", "response_format.json_schema.schema", {"type": "word"}),
        schema("schema that no grammar holds", "response_format.json_schema.schema", {"not": {}}),
        schema("schema that explodes", "response_format.json_schema.schema", explodes),
        chat(
            "half a surrogate in a tool",
            "tools[0]",
            tools=[{"type": "function", "function": {"name": "f", "description": "\ud800"}}],
        ),
        *(
            chat(
                f"a schema's {name} of {value}",
                f"response_format.json_schema.{name}",
                response_format={"type": "json_schema", "json_schema": {"schema": {"type": "object"}, name: value}},
            )
            for name, value in (("name", 5), ("description", ["a"]), ("strict", "yes"), ("strict", 1))
        ),
        *(
            chat(
                f"a function's {name} of {value}",
                f"tools[0].function.{name}",
                tools=[{"type": "function", "function": {"name": "f", name: value}}],
            )
            for name, value in (("description", 5), ("strict", "yes"), ("parameters", []))
        ),
        *(
            chat(
                f"tool_choice {asked}",
                "tool_choice",
                tools=[{"type": "function", "function": {"name": "f"}}],
                tool_choice=asked,
            )
            for asked in (
                "f",
                5,
                {"type": "custom", "function": {"name": "f"}},
                {"type": None, "function": {"name": "f"}},
                {"type": "function", "function": {"name": "g"}},
                {"type": "function", "name": "f"},
                {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": []}},
            )
        ),
        completion("structured outputs that are no object", "structured_outputs", structured_outputs=[]),
        structured("half a surrogate in a remark", "structured_outputs.json", json='{"title":"\ud800"}'),
        structured("unknown constraint", "structured_outputs.poem", poem="sonnet"),
        structured("two constraints", "structured_outputs", regex="a", choice=["a"]),
        completion(
            "a constraint in two fields",
            "structured_outputs.regex",
            structured_outputs={"regex": "a"},
            response_format={"type": "json_object"},
        ),
        completion(
            "a schema beside json_object",
            "response_format.schema",
            response_format={"type": "json_object", "schema": {"type": "object"}},
        ),
        completion(
            "misspelt inner field",
            "response_format.json_schema.strictt",
            response_format={"type": "json_schema", "json_schema": {"schema": {"type": "object"}, "strictt": True}},
        ),
        structured("regex that is none", "structured_outputs.regex", regex="(a"),
        structured("empty regex", "structured_outputs.regex", regex=""),
        structured("regex of a number", "structured_outputs.regex", regex=5),
        structured("no choice", "structured_outputs.choice", choice=[]),
        structured("empty choice", "structured_outputs.choice[1]", choice=["a", ""]),
        structured("grammar that is none", "structured_outputs.grammar", grammar="a b c"),
        structured("schema that is not JSON", "structured_outputs.json", json="{"),
        structured("json_object of text", "structured_outputs.json_object", json_object="yes"),
        structured("a switch of text", "structured_outputs.disable_any_whitespace", disable_any_whitespace="yes"),
        *(
            structured(
                f"no others at all, {value}",
                "structured_outputs.disable_additional_properties",
                json={"type": "object"},
                disable_additional_properties=value,
            )
            for value in (True, 0)
        ),
        structured("tag without a format", "structured_outputs.structural_tag", structural_tag="{}"),
        structured("long grammar", "structured_outputs.grammar", grammar="x" * (1 << 19)),
    ]


def _prompts(vocab_size: int, max_model_len: int) -> list[Bad]:
    return [
        Bad("no prompt", "prompt", {"max_tokens": 2}),
        completion("null prompt", "prompt", prompt=None),
        completion("number", "prompt", prompt=5),
        completion("object", "prompt", prompt={"text": "hi"}),
        completion("empty text", "prompt", prompt=""),
        completion("empty list", "prompt", prompt=[]),
        completion("empty ids", "prompt[0]", prompt=[[]]),
        completion("empty text among others", "prompt[1]", prompt=["a", ""]),
        completion("id beyond the vocabulary", "prompt[1]", prompt=[1, vocab_size]),
        completion("negative id", "prompt[0]", prompt=[-1]),
        completion("huge id", "prompt[0]", prompt=[10**30]),
        completion("boolean id", "prompt[0]", prompt=[True, 2]),
        completion("float id", "prompt[1]", prompt=[1, 2.5]),
        completion("ids and text", "prompt[1]", prompt=[1, "a"]),
        completion("text and null", "prompt[1]", prompt=["a", None]),
        completion("id beyond, nested", "prompt[1][0]", prompt=[[1], [vocab_size + 7]]),
        completion("deeper", "prompt[0][0]", prompt=[[[1]]]),
        completion("too long", "prompt", prompt=[1] * max_model_len),
        completion("too long text", "prompt", prompt="a 7 " * max_model_len),
        completion("one of many too long", "prompt[1]", prompt=[[1], [1] * max_model_len]),
        completion("half a surrogate", "prompt", prompt="a\ud800"),
        completion("too many", "prompt", prompt=["a"] * 2000),
    ]


def bad_values(vocab_size: int, max_model_len: int) -> list[tuple[str, Any, str]]:
    """Of the fields that both endpoints have: name, a value that is refused in any request, field that is named."""
    many = ["a"] * 5
    values: dict[str, list[Any]] = {
        "temperature": [-0.1, 2.5, "1", True, [1], float("nan"), float("inf")],
        "top_p": [0, -1, 1.01, "x", float("nan")],
        "min_p": [-0.5, 2, float("nan")],
        "top_k": [-2, 1.5, "5", 10**30],
        "presence_penalty": [-2.1, 2.1, "1", float("nan"), float("-inf")],
        "frequency_penalty": [-3, 2.01, [1], float("nan")],
        "repetition_penalty": [0, -1, "1", float("nan"), float("inf"), 1e30, 1e-30],
        "logit_bias": [5, [5], *({key: 1} for key in ("a", "-1", "1.5", "05", "٣", "9" * 50, str(vocab_size)))],
        "allowed_token_ids": [[], 5, [1] * 1025],
        "bad_words": [["a"] * 129, "a", ["xyzzy " * 150] * 3],
        "seed": ["1", 1.5, 2**63, -(2**70)],
        "n": [0, -1, 1000, 1.5, "2"],
        "max_tokens": [0, -5, 1.5, "10", max_model_len, 10**20],
        "min_tokens": [-1, 1.5, "1", max_model_len, 10**20],
        "truncate_prompt_tokens": [0, -2, 1.5, "5", max_model_len + 1],
        "stop": [5, "", many, "a" * 2000, "\udc00"],
        "stop_token_ids": [5, [1] * 257],
        "include_stop_str_in_output": ["yes", 1],
        "ignore_eos": ["yes", 1],
        "prompt_logprobs": [-1, 21, 1.5, True, "5"],
        "echo": [1, "true"],
        "return_token_ids": [1, "true"],
        "stream": ["true", 1],
        "stream_options": [True, 5],
        "speculation": ["dsi"],
        "model": [5],
    }
    values["logit_bias"] += [{"5": value} for value in (101, -100.5, "1", None, [1], float("nan"), 10**400)]
    for name in ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"):
        values[name].append(10**400)
    for name in ("temperature", "top_p", "top_k", "seed", "n", "max_tokens", "prompt_logprobs", "stream", "echo"):
        values[name].append("\ud800")
    values["logit_bias"].append({str(i): 1 for i in range(1025)})
    found = [(name, value, name) for name, bad in values.items() for value in bad]
    found += [("stop", [""], "stop[0]"), ("stop", ["a", 3], "stop[1]"), ("stop", ["a", "\udc00"], "stop[1]")]
    found += [
        ("bad_words", [1], "bad_words[0]"),
        ("bad_words", ["a", ""], "bad_words[1]"),
        ("bad_words", ["\udc00"], "bad_words[0]"),
    ]
    for name in ("stop_token_ids", "allowed_token_ids"):
        found += [(name, [1, wrong], f"{name}[1]") for wrong in (-1, "a", vocab_size, 10**30, True)]
    found += [("speculation", {"policies": "ar"}, "speculation.policies")]
    found += [("speculation", {"policy": wrong}, "speculation.policy") for wrong in ("warp", 5)]
    depth = "num_speculative_tokens"
    found += [("speculation", {depth: wrong}, f"speculation.{depth}") for wrong in (0, -1, 10**6, "3")]
    found += [("speculation", {depth: "\ud800"}, "speculation"), ("stop_token_ids", [1, "\ud800"], "stop_token_ids")]
    found += [("stream_options", {"include_usages": True}, "stream_options.include_usages")]
    unsupported = {"suffix": "end", "use_beam_search": True, "skip_special_tokens": False, "chat_template": "{{ 1 }}"}
    return found + [(name, value, name) for name, value in unsupported.items()]


def _fields(vocab_size: int, max_model_len: int) -> list[Bad]:
    found = []
    for name, value, field in bad_values(vocab_size, max_model_len):
        described = f"{name}={str(value)[:20]}"
        found += [completion(described, field, **{name: value}), chat(f"{described}, chat", field, **{name: value})]
    found += [completion(f"logprobs={value}", "logprobs", logprobs=value) for value in (-1, 21, 1.5, True, "5")]
    found += [chat(f"logprobs={value}, chat", "logprobs", logprobs=value) for value in (3, "true")]
    for value in (-1, 21, 1.5, "3"):
        found.append(chat(f"top_logprobs={value}", "top_logprobs", logprobs=True, top_logprobs=value))
    return [
        *found,
        completion("top_logprobs in a completion", "top_logprobs", top_logprobs=3),
        completion("best_of", "best_of", best_of=3),
        completion("unknown field", "max_token", max_token=5),
        completion("usage without stream", "stream_options", stream=False, stream_options={}),
        completion(
            "counts in all chunks alone",
            "stream_options.continuous_usage_stats",
            stream=True,
            stream_options={"continuous_usage_stats": True},
        ),
        completion("logprobs of a streamed prompt", "prompt_logprobs", stream=True, prompt_logprobs=1),
        completion("min_tokens over max_tokens", "min_tokens", max_tokens=5, min_tokens=6),
        completion("min_tokens over the room", "min_tokens", max_tokens=None, min_tokens=max_model_len - 1),
        completion(
            "only a stop is allowed", "allowed_token_ids", allowed_token_ids=[7], stop_token_ids=[7], min_tokens=1
        ),
        Bad("unknown model", "model", OK | {"model": "gpt-9"}, status=404),
    ]


def _messages(max_model_len: int) -> list[Bad]:
    def said(content: Any, role: Any = "user") -> list[dict[str, Any]]:
        return [{"role": role, "content": content}]

    return [
        Bad("no messages", "messages", {"max_tokens": 2}, path="/v1/chat/completions"),
        chat("messages of text", "messages", messages="hi"),
        chat("empty", "messages", messages=[]),
        chat("a message of text", "messages[0]", messages=["hi"]),
        chat("no role", "messages[0].role", messages=[{"content": "hi"}]),
        chat("unknown role", "messages[0].role", messages=said("hi", "wizard")),
        chat("role of a list", "messages[0].role", messages=said("hi", ["user"])),
        chat("no content", "messages[0].content", messages=[{"role": "user"}]),
        chat("content of a number", "messages[0].content", messages=said(5)),
        chat("image", "messages[0].content[0]", messages=said([{"type": "image_url", "image_url": {"url": "x"}}])),
        chat("part without text", "messages[0].content[0]", messages=said([{"type": "text"}])),
        chat(
            "tool calls",
            "messages[0].tool_calls[0]",
            messages=[{"role": "assistant", "content": "", "tool_calls": [1]}],
        ),
        chat("half a surrogate", "messages[0].content", messages=said("\ud800")),
        *(
            chat(f"a name, {name!a}", "messages[0].name", messages=[{"role": "user", "content": "a", "name": name}])
            for name in (5, ["a"], "\ud800")
        ),
        chat(
            "no text of an id",
            "messages[0].tool_call_id",
            messages=[{"role": "tool", "content": "a", "tool_call_id": 5}],
        ),
        chat(
            "half a surrogate of a call answered",
            "messages[0].tool_call_id",
            messages=[{"role": "tool", "content": "a", "tool_call_id": "\ud800"}],
        ),
        *(
            chat(
                f"half a surrogate of a call, {called}",
                "messages[0].tool_calls",
                messages=[{"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "f"}} | called]}],
            )
            for called in (
                {"id": "\ud800"},
                {"function": {"name": "\ud800"}},
                {"function": {"name": "f", "arguments": '{"a": "\\ud800"}'}},
            )
        ),
        chat("too long", "messages", messages=said("a 7 " * max_model_len)),
        chat("two limits", "max_tokens", max_completion_tokens=2),
        chat("limit", "max_completion_tokens", max_tokens=None, max_completion_tokens=0),
        chat("an echo without an answer", "max_tokens", echo=True, max_tokens=0),
        chat("min_tokens over the limit", "min_tokens", max_tokens=None, max_completion_tokens=5, min_tokens=6),
        chat("two ways to go on", "continue_final_message", continue_final_message=True, add_generation_prompt=True),
        chat("a name that is taken", "chat_template_kwargs.tokenize", chat_template_kwargs={"tokenize": True}),
        chat("half a surrogate in the template", "chat_template_kwargs", chat_template_kwargs={"x": "\ud800"}),
        chat("no object", "chat_template_kwargs", chat_template_kwargs=[]),
        chat("top_logprobs alone", "top_logprobs", top_logprobs=3),
        chat("top_logprobs without logprobs", "top_logprobs", top_logprobs=3, logprobs=False),
        chat("prompt in a chat", "prompt", prompt="hi"),
    ]


def _http() -> list[Bad]:
    return [
        Bad("not JSON", None, raw=b"{"),
        Bad("nothing", None, raw=b""),
        Bad("not UTF-8", None, raw=b'{"prompt": "\xff"}'),
        Bad("a list", None, raw=b"[1]"),
        Bad("too deep", None, raw=b"[" * 200_000),
        Bad("a digit too many", None, raw=b'{"prompt": ' + b"9" * 10_000 + b"}"),
        Bad("unknown field that is no text", "\ud800", raw=b'{"\\ud800": 1}'),
        Bad("unknown field with a long name", "x" * 100, {"x" * 1000: 1}),
        Bad("form", None, raw=b"prompt=hi", content_type="application/x-www-form-urlencoded", status=415),
        Bad("no type", None, raw=b"{}", content_type="", status=415),
        Bad("wrong method", None, method="GET", status=405),
        Bad("wrong path", None, body=OK, path="/v1/complete", status=404),
        Bad("wrong model path", "model", path="/v1/models/gpt-9", method="GET", status=404),
    ]
