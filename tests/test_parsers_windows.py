"""Parser scenarios through real speculation windows: the bundled model is held to each text, its steps are parsed."""

from __future__ import annotations

import json
import re

import pytest
from serving import TINY, tokenizer
from test_parsers import CASES, TOOLS

from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.request import Grammar, Output, Request, SamplingParams
from onebox.server.chat import Answer
from onebox.server.parsers import AnswerParser

pytestmark = pytest.mark.slow


def only(text: str) -> Grammar:
    """The grammar of one text alone. Tags that are tokens stand as tokens."""
    added = {t.content: i for i, t in tokenizer().rust.get_added_tokens_decoder().items()}
    parts = [p for p in re.split("(" + "|".join(map(re.escape, added)) + ")", text) if p]
    rule = " ".join(f"<[{added[p]}]>" if p in added else json.dumps(p, ensure_ascii=False) for p in parts)
    return Grammar("grammar", f"start: {rule}")


@pytest.fixture(scope="module")
def steps() -> dict[str, list[Output]]:
    """The engine's outputs for every scenario, all in one batch, three drafts a step."""
    engine = Engine(EngineConfig(str(TINY), device="cpu", max_num_seqs=32, max_model_len=512, draft_len=3))
    got: dict[str, list[Output]] = {name: [] for name, (text, _, _) in CASES.items() if text}
    for name in got:
        prompt = tuple(tokenizer().encode(f"<|im_start|>user\n{name}<|im_end|>\n<|im_start|>assistant\n"))
        params = SamplingParams(max_tokens=300, temperature=1.0, seed=1)
        engine.add(Request(name, prompt, params, grammar=only(CASES[name][0])))
    while engine.has_work:
        for output in engine.step():
            got[output.request_id].append(output)
    return got


def test_windows_carry_several_tokens(steps: dict[str, list[Output]]) -> None:
    sizes = [len(o.tokens) for outputs in steps.values() for o in outputs]
    assert sum(n > 1 for n in sizes) > len(steps)
    assert max(sizes) == 4


@pytest.mark.parametrize("name", [name for name, (text, _, _) in CASES.items() if text])
def test_a_scenario_through_windows_means_the_same(name: str, steps: dict[str, list[Output]]) -> None:
    text, thinking, (reasoning, content, calls) = CASES[name]
    assert steps[name][-1].finish_reason == "stop", steps[name][-1]
    assert tokenizer().decode(t for o in steps[name] for t in o.tokens) == text
    answer = Answer(tokenizer(), AnswerParser(thinking=thinking, tools=TOOLS))
    deltas = [answer.push(output) for output in steps[name]]
    assert ("".join(d.reasoning for d in deltas), "".join(d.content for d in deltas)) == (reasoning, content)
    got: list[list[str]] = []
    for call in (c for d in deltas for c in d.calls):
        if call.name is not None:
            got.append([call.name, ""])
        got[call.index][1] += call.arguments
    assert [(n, json.loads(a)) for n, a in got] == calls
