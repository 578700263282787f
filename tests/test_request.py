"""What a request may ask for: every number is bounded, so that no request can harm an engine."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from onebox.engine.sampler import SamplingRows, sample
from onebox.errors import RequestError
from onebox.request import INT64, Output, SamplingParams, TokenLogprob, joined

WHOLE = ["max_tokens", "top_k", "seed", "min_tokens", "logprobs"]  # the server's schema takes whole numbers alone
NUMBERS = [*WHOLE, "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty"]
EXTREME = [
    0,
    1,
    -1,
    2**31,
    2**63 - 1,
    2**63,
    -(2**63),
    10**20,
    1e20,
    -1e20,
    1e-39,
    5e-324,
    math.inf,
    -math.inf,
    math.nan,
]


RANGES = {
    "max_tokens": (1, INT64 - 1),
    "top_k": (-1, INT64 - 1),
    "seed": (-INT64, INT64 - 1),
    "min_tokens": (0, 100),
    "logprobs": (0, 20),
    "temperature": (0, 100),
    "top_p": (5e-324, 1),
    "min_p": (0, 1),
    "presence_penalty": (-2, 2),
    "frequency_penalty": (-2, 2),
    "repetition_penalty": (5e-324, 100),
}


def allowed(name: str, value: float) -> bool:
    low, high = RANGES[name]
    return low <= value <= high


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", EXTREME)
def test_a_number_is_refused_by_name_or_can_be_sampled_with(name: str, value: float) -> None:
    if name in WHOLE and not isinstance(value, int):
        return
    values: dict[str, Any] = {"max_tokens": 100, name: value}
    if not allowed(name, value):
        with pytest.raises(RequestError, match=name) as caught:
            SamplingParams(**values)
        assert caught.value.param == name
        return
    params = SamplingParams(**values)
    rows = SamplingRows.of([params], [params.seed or 0], [7], torch.device("cpu"))
    logits = torch.linspace(-30, 30, 500).repeat(1, 1)
    token = int(sample(logits, rows))
    assert 0 <= token < 500 and (token == 499 or not params.greedy)


@pytest.mark.parametrize("bias", [math.inf, -math.inf, math.nan, 1e30])
def test_a_bias_that_is_no_number_is_refused(bias: float) -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams(logit_bias=((3, bias),))


@pytest.mark.parametrize("temperature", [1e-39, 1e-20, 9e-6])
def test_a_temperature_that_fp32_cannot_divide_by_is_greedy(temperature: float) -> None:
    params = SamplingParams(temperature=temperature)
    rows = SamplingRows.of([params, SamplingParams()], [1, 2], [0, 0], torch.device("cpu"))
    logits = torch.randn(2, 100, generator=torch.Generator().manual_seed(0)) * 50
    assert params.greedy and int(sample(logits, rows)[0]) == int(logits[0].argmax())


def test_64_bits_are_the_bound() -> None:
    assert SamplingParams(top_k=INT64 - 1, seed=-INT64).top_k == INT64 - 1
    with pytest.raises(RequestError, match="top_k"):
        SamplingParams(top_k=INT64)


def test_joined_outputs_have_the_tokens_of_both_and_the_totals_of_the_later() -> None:
    first = Output("r", (1, 2), (TokenLogprob(1, -0.1), TokenLogprob(2, -0.2)), prompt_tokens=5, drafted=2, accepted=1)
    then = Output("r", (3,), (TokenLogprob(3, -0.3),), finish_reason="length", prompt_tokens=5, drafted=4, accepted=2)
    both = joined(first, then)
    assert (both.tokens, [p.token for p in both.logprobs]) == ((1, 2, 3), [1, 2, 3])
    assert (both.finish_reason, both.drafted, both.accepted) == ("length", 4, 2)
