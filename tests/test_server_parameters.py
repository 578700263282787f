"""The tables of parameters in docs/server.md are true: a field said to be honoured changes something, one said to be
ignored changes nothing, one said to be refused is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from serving import post, saying

DOCS = Path(__file__).parent.parent / "docs" / "server.md"
ANSWER = "I think so\n</think>\n\nHello, <|box_start|>world<|box_end|>, and more"
BASE: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}]},
    "/v1/completions": {"prompt": "Hi"},
    "/v1/responses": {"input": "Hi"},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 50},
}
# what clients of other servers send, of which the chat table must speak
EXPECTED = """
max_completion_tokens n logprobs top_logprobs logit_bias seed stop response_format tools tool_choice
parallel_tool_calls reasoning_effort stream_options user top_k min_p repetition_penalty min_tokens
stop_token_ids ignore_eos structured_outputs chat_template_kwargs thinking_token_budget
include_reasoning continue_final_message prompt_logprobs
cache_salt priority return_token_ids truncate_prompt_tokens
"""


def rows() -> list[tuple[str, str, dict[str, Any], str]]:
    """Path, field, example body and what happens, of each row."""
    found, path = [], ""
    for line in DOCS.read_text("utf-8").splitlines():
        if match := re.match(r"\| `POST (/v1/[a-z/]+)` field \|", line):
            path = match[1]
        elif path and (match := re.match(r"\| `(\w+)` \| `(\{.*\})` \| (honoured|ignored|refused)", line)):
            found.append((path, match[1], json.loads(match[2]), match[3]))
        elif not line.startswith("|"):
            path = ""
    return found


def outcome(path: str, body: dict[str, Any]) -> tuple[int, Any, str]:
    """Status, what the engine was asked, and the response less what is new in every one."""
    engine = saying(ANSWER, tokens_per_step=2)
    response = post(engine, path, {**BASE[path], **body})
    text = re.sub(r'"(created|created_at|completed_at)": ?\d+', "", response.text)
    asked = [str(r).replace(r.id, "") for r in engine.requests]
    return (
        response.status_code,
        asked,
        re.sub(r"\b(chatcmpl|cmpl|resp|msg|rs|fc|call|toolu)[-_][0-9a-f]{24,32}", "", text),
    )


def test_the_tables_speak_of_every_known_field() -> None:
    chat = {field for path, field, _, _ in rows() if path == "/v1/chat/completions"}
    assert set(EXPECTED.split()) <= chat
    assert {path for path, _, _, _ in rows()} == set(BASE)


@pytest.mark.parametrize(("path", "field", "body", "what"), rows(), ids=lambda v: v if isinstance(v, str) else "")
def test_a_row_of_the_table_is_true(path: str, field: str, body: dict[str, Any], what: str) -> None:
    assert field in body
    status, asked, text = outcome(path, body)
    if what == "refused":
        assert status == 400
        assert json.loads(text)["error"]["message"].startswith(f"Unsupported field '{field}'")
        return
    assert status == 200, text
    without = outcome(path, {k: v for k, v in body.items() if k != field})
    assert without[0] == 200, without
    assert ((asked, text) != without[1:]) == (what == "honoured")
