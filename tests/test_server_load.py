"""Load: rude clients leak nothing and change no answer; HTTP is not what limits an engine."""

from __future__ import annotations

import pytest

from onebox.bench import overhead, soak


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_fifteen_seconds_of_rude_clients_leak_nothing_and_change_no_answer() -> None:
    result = soak.main(["--streams", "60", "--seconds", "15", "--max-waiting", "30"])
    assert result["faults"] == 0, result["fault_examples"]
    assert result["wrong"] == 0
    assert result["finished"] >= 20
    assert result["hung_up"] > 0 and result["invalid"] > 0 and result["refused_429"] > 0
    assert result["leaked"] == {"pages": 0, "slots": 0}
    assert result["fds"]["after"] <= result["fds"]["before"] + 2  # a connection that is just being closed
    assert result["rss_growth"] < 0.05
    assert result["log_errors"] == 0


@pytest.mark.slow
def test_thirty_two_streams_pass_thirty_thousand_tokens_a_second() -> None:
    result = overhead.main(["--tokens", "12000", "--rate", "5000"])
    assert result["tok_s"] >= 30_000
