"""The ledger against figures worked out by hand for the two published shapes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from onebox.errors import ConfigError
from onebox.ledger import (
    BUILDS,
    SHAPES,
    Build,
    StepBytes,
    distinct_experts,
    kv_bytes_per_token,
    resident_bytes,
    slot_bytes,
    state_bytes,
    step_bytes,
    tokens_per_step,
)

BIG, SMALL = SHAPES["qwen3.5-122b-a10b"], SHAPES["qwen3.5-35b-a3b"]
GB = 1e9


def gb(value: float) -> float:
    return value / GB


@pytest.mark.parametrize(
    ("component", "build", "big", "small"),
    [
        ("routed", "int4", 1.869, 0.519),
        ("shared", "int4", 0.906, 0.252),
        ("shared", "hybrid", 0.453, 0.126),
        ("router", "hybrid", 0.076, 0.042),
        ("attention", "hybrid", 0.487, 0.141),
        ("gdn", "hybrid", 1.642, 0.521),
        ("head", "int4", 1.526, 1.017),
        ("head", "hybrid", 0.763, 0.509),
        ("state", "hybrid", 0.302, 0.126),
    ],
)
def test_components_of_one_token_match_the_published_table(
    component: str, build: str, big: float, small: float
) -> None:
    for spec, want in ((BIG, big), (SMALL, small)):
        assert gb(getattr(step_bytes(spec, BUILDS[build]), component)) == pytest.approx(want, abs=7e-4)


@pytest.mark.parametrize(
    ("build", "total", "roof"),
    [("bf16", 18.31, 235), ("fp8", 10.11, 425), ("int4", 6.81, 632), ("int4-fp8", 6.35, 677), ("hybrid", 5.59, 769)],
)
def test_totals_and_roofs_of_each_build_of_the_122b(build: str, total: float, roof: float) -> None:
    step = step_bytes(BIG, BUILDS[build])
    assert gb(step.total) == pytest.approx(total, abs=0.015)
    assert step.roof_tok_s(4.3e12) == pytest.approx(roof, rel=2e-3)


@pytest.mark.parametrize(
    ("build", "total", "roof"), [("int4", 2.62, 1643), ("int4-fp8", 2.49, 1726), ("hybrid", 1.98, 2169)]
)
def test_totals_and_roofs_of_each_build_of_the_35b(build: str, total: float, roof: float) -> None:
    step = step_bytes(SMALL, BUILDS[build])
    assert gb(step.total) == pytest.approx(total, abs=0.006)
    assert step.roof_tok_s(4.3e12) == pytest.approx(roof, rel=2e-3)


@pytest.mark.parametrize(("rows", "want"), [(1, 8), (2, 15.8), (3, 23.3), (4, 30.5), (6, 44.4), (9, 63.6), (13, 86.6)])
def test_distinct_experts_of_independent_rows(rows: int, want: float) -> None:
    assert distinct_experts(256, 8, rows) == pytest.approx(want, abs=0.06)


def test_a_step_with_two_drafts_matches_the_published_cycle() -> None:
    build = replace(BUILDS["hybrid"], mtp_experts="bf16", mtp_dense="bf16")
    step = step_bytes(BIG, build, k=2, state_writes=3)
    verify = step.total - step.mtp - step.draft_head
    assert gb(verify) == pytest.approx(9.5, abs=0.05)
    assert gb(step.mtp + step.draft_head) == pytest.approx(2.6, abs=0.1)
    assert gb(step.draft_head) == pytest.approx(2 * 0.763, abs=2e-3)
    sparse = step_bytes(BIG, build, k=2, state_writes=3, distinct=8 * 2.2)  # each further row adds 60 % new experts
    assert gb(sparse.total - sparse.mtp - sparse.draft_head) == pytest.approx(8.1, abs=0.06)


def test_one_mtp_pass_in_bf16() -> None:
    build = replace(BUILDS["hybrid"], mtp_experts="bf16", mtp_dense="bf16")
    for spec, want in ((BIG, 0.366), (SMALL, 0.129)):
        extra_row = (distinct_experts(256, 8, 2) - 8) * 3 * spec.expert_width * spec.hidden * 2.0
        assert gb(step_bytes(spec, build, k=1).mtp - extra_row) == pytest.approx(want, abs=1e-3)


def test_lazy_commit_writes_the_state_once_whatever_the_draft_length() -> None:
    assert step_bytes(BIG, BUILDS["hybrid"], k=4).state == step_bytes(BIG, BUILDS["hybrid"], k=0).state


def test_a_shorter_draft_vocabulary_shortens_only_the_draft_head() -> None:
    full, short = (step_bytes(BIG, BUILDS["hybrid"], k=2, draft_vocab=v) for v in (None, 248_320 // 8))
    assert short.draft_head == pytest.approx(full.draft_head / 8)
    assert short.total == pytest.approx(full.total - full.draft_head + short.draft_head)


def test_context_and_batch_scale_the_parts_that_depend_on_them() -> None:
    one, many = (
        step_bytes(BIG, BUILDS["hybrid"], context=1000),
        step_bytes(BIG, BUILDS["hybrid"], batch=32, context=1000),
    )
    assert gb(one.kv) == pytest.approx(0.0246, abs=1e-4)
    assert many.kv == 32 * one.kv and many.state == 32 * one.state and many.head == one.head
    assert many.routed / one.routed == pytest.approx(distinct_experts(256, 8, 32) / 8)


def test_tokens_per_step_of_conditional_acceptances() -> None:
    assert tokens_per_step(()) == 1.0
    assert tokens_per_step((0.8, 0.8)) == pytest.approx(2.44)
    assert tokens_per_step((0.9, 0.8)) == pytest.approx(2.62)


def test_fixed_memory_of_a_sequence_and_of_the_weights() -> None:
    assert state_bytes(BIG) == pytest.approx(151e6, rel=2e-3)
    assert slot_bytes(BIG, 0) - state_bytes(BIG) == pytest.approx(2.7e6, rel=0.02)
    assert kv_bytes_per_token(BIG, BUILDS["hybrid"]) == 24_576 and kv_bytes_per_token(SMALL, BUILDS["hybrid"]) == 20_480
    int4 = resident_bytes(BIG, BUILDS["int4-fp8"], slots=0, mtp=True)
    assert gb(int4.mtp) == pytest.approx(5.05, abs=0.01)
    assert gb(int4.weights - int4.mtp) == pytest.approx(66, abs=1.5)
    plain = resident_bytes(BIG, BUILDS["bf16"], slots=0, mtp=False)
    assert plain.weights / 2 == pytest.approx(122.1e9, rel=1e-3)


def test_a_total_is_the_sum_of_its_parts() -> None:
    step = StepBytes(1, 2, 3, 4, 5, 6, 7, 8, 9, 10)
    assert step.total == 55


def test_an_unknown_format_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="experts format 'int3'"):
        Build(experts="int3")
