"""The offline API: text and ids, batches in order, stops, several answers, log probabilities, chats, Ctrl-C."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from serving import TINY, tokenizer

from onebox.errors import ConfigError, ContextLengthError, RequestError
from onebox.llm import LLM, SamplingParams
from onebox.request import SamplingParams as EngineParams

GREEDY = SamplingParams(temperature=0, max_tokens=16)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(str(TINY), device="cpu", max_num_seqs=4, max_model_len=2048) as llm:
        yield llm


def idle(llm: LLM) -> bool:
    stats = llm.engine.stats()
    return not llm.engine.has_work and stats.slots_free == stats.slots_total


def test_the_package_gives_the_api_without_loading_torch_first() -> None:
    code = (
        "import sys, onebox; assert 'torch' not in sys.modules\n"
        "from onebox import LLM, SamplingParams\n"
        "assert LLM.__name__ == 'LLM' and SamplingParams(n=2).n == 2 and 'torch' in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_batch_comes_in_order_and_equals_each_alone(llm: LLM) -> None:
    prompts: list[Any] = ["1 2 3 4", "Once upon a time", [5, 6, 7], *[f"{i} and" for i in range(9)]]
    together = llm.generate(prompts, GREEDY)
    assert [r.prompt for r in together] == [p if isinstance(p, str) else None for p in prompts]
    for prompt, result in zip(prompts, together, strict=True):
        (alone,) = llm.generate(prompt, GREEDY)
        assert result.outputs[0].token_ids == alone.outputs[0].token_ids
        assert result.outputs[0].text == alone.outputs[0].text
    first = together[0]
    assert first.prompt_token_ids == tuple(tokenizer().encode("1 2 3 4"))
    assert first.outputs[0].text == tokenizer().decode(first.outputs[0].token_ids, skip_special=True)
    assert idle(llm)


def test_a_stop_string_cuts_the_text_and_frees_the_slot(llm: LLM) -> None:
    whole = llm.generate("1 2 3 4 5 6 7", GREEDY)[0].outputs[0]
    stop = whole.text[4:7]
    cut = llm.generate("1 2 3 4 5 6 7", SamplingParams(temperature=0, max_tokens=16, stop=stop))[0].outputs[0]
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert (cut.finish_reason, cut.stop_reason) == ("stop", stop)
    kept = llm.generate(
        "1 2 3 4 5 6 7", SamplingParams(temperature=0, max_tokens=16, stop=[stop], include_stop_str_in_output=True)
    )[0].outputs[0]
    assert kept.text == cut.text + stop
    assert idle(llm)


def test_n_answers_have_seeds_of_their_own_and_parameters_may_differ(llm: LLM) -> None:
    two = llm.generate("Once upon", SamplingParams(n=2, seed=11, max_tokens=12))[0].outputs
    (second,) = llm.generate("Once upon", SamplingParams(seed=12, max_tokens=12))[0].outputs
    assert [o.index for o in two] == [0, 1]
    assert two[0].token_ids != two[1].token_ids == second.token_ids
    short, long = llm.generate(
        ["1 2 3", "1 2 3"],
        [EngineParams(max_tokens=3, temperature=0, ignore_eos=True), EngineParams(max_tokens=7, ignore_eos=True)],
    )
    assert (len(short.outputs[0].token_ids), len(long.outputs[0].token_ids)) == (3, 7)
    assert short.outputs[0].finish_reason == "length"


def test_logprobs_name_the_chosen_token_and_its_rivals(llm: LLM) -> None:
    answer = llm.generate("1 2 3", SamplingParams(temperature=0, max_tokens=5, logprobs=3, ignore_eos=True))[0]
    out = answer.outputs[0]
    assert out.logprobs is not None and len(out.logprobs) == 5
    for token, entries in zip(out.token_ids, out.logprobs, strict=True):
        assert entries[token].rank == 1 and len(entries) == 3  # greedy takes the best
        assert entries[token].decoded_token == tokenizer().decode([token])
    assert out.cumulative_logprob == pytest.approx(
        sum(e[t].logprob for t, e in zip(out.token_ids, out.logprobs, strict=True))
    )


def test_chats_are_rendered_by_the_template(llm: LLM) -> None:
    hi = [{"role": "user", "content": "What is the capital of France?"}]
    (one,) = llm.chat(hi, GREEDY, chat_template_kwargs={"enable_thinking": False})
    again = llm.chat([hi, hi], GREEDY, chat_template_kwargs={"enable_thinking": False})
    assert [a.outputs[0].text for a in again] == [one.outputs[0].text] * 2
    assert one.prompt is not None and one.prompt.startswith("<|im_start|>user") and "assistant" in one.prompt
    tool = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
    (shown,) = llm.chat(hi, GREEDY, tools=[tool])
    assert shown.prompt is not None and "get_weather" in shown.prompt


@pytest.mark.parametrize(
    ("prompts", "params", "error"),
    [
        (["a", [1] * 5000], GREEDY, ContextLengthError),
        (["a", []], GREEDY, RequestError),
        (["a", 3.5], GREEDY, RequestError),
        (["a", [10**9]], GREEDY, RequestError),
        (["a", "b"], [GREEDY], RequestError),
    ],
    ids=["long", "empty", "no text", "unknown id", "params"],
)
def test_a_bad_prompt_is_an_error_and_leaves_nothing_running(
    llm: LLM, prompts: Any, params: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        llm.generate(prompts, params)
    assert idle(llm)
    assert llm.generate("a", GREEDY)


def test_unknown_options_and_a_closed_model_say_so() -> None:
    with pytest.raises(ConfigError, match="tensor_parallel"):
        LLM(str(TINY), tensor_parallel=2)
    with pytest.raises(RequestError, match="'n'"):
        SamplingParams(n=0)
    with pytest.raises(RequestError, match="'stop'"):
        SamplingParams(stop=[""])
    assert SamplingParams(logit_bias={3: 5}, stop_token_ids=[4]).logit_bias == ((3, 5.0),)  # type: ignore[arg-type]


def test_ctrl_c_ends_the_step_and_cancels_the_rest(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    step, n = llm.engine.step, 0

    def interrupted() -> Any:
        nonlocal n
        n += 1
        if n == 4:
            signal.raise_signal(signal.SIGINT)
        return step()

    monkeypatch.setattr(llm.engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["1 2 3"] * 6, SamplingParams(max_tokens=500, temperature=0, ignore_eos=True))
    assert n == 4 and idle(llm)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    llm.engine.scheduler.check()
