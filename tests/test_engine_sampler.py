from __future__ import annotations

import pytest
import torch

from onebox.engine.sampler import SamplingRows, gumbel_noise, penalize, sample, token_logprobs, truncate
from onebox.engine.sequence import Sequence
from onebox.engine.speculate import accept, choose
from onebox.request import Request, SamplingParams

CPU = torch.device("cpu")


def rows(n: int, seed: int = 0, **params: float) -> SamplingRows:
    p = SamplingParams(max_tokens=1, **params)  # type: ignore[arg-type]
    return SamplingRows.of([p] * n, [seed] * n, list(range(n)), CPU)


@pytest.mark.parametrize(
    "params",
    [{"temperature": 1.0}, {"temperature": 0.6}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 1.5, "top_k": 3}],
)
def test_samples_follow_the_truncated_softmax(params: dict[str, float]) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, 0.0, -1.0, -3.0, 1.5, 0.2])
    n = 100_000
    r = rows(n, seed=123, **params)
    want = truncate((logits / params["temperature"]).expand(1, -1), rows(1, **params))[0].softmax(-1)
    tokens = sample(logits.expand(n, -1), r)
    seen = torch.bincount(tokens, minlength=8).double()
    kept = want > 0
    assert seen[~kept].sum() == 0
    expected = want.double()[kept] * n
    chi_square = ((seen[kept] - expected) ** 2 / expected).sum()
    assert chi_square < 30  # 7 degrees of freedom: p about 1e-4


def test_noise_of_neighbouring_seeds_positions_and_tokens_is_uncorrelated() -> None:
    seeds = torch.arange(300).repeat_interleave(300)
    noise = gumbel_noise(seeds, torch.arange(300).repeat(300), 4).unflatten(0, (300, 300))
    flat = (noise - noise.mean()) / noise.std()
    for a, b in [(flat[1:], flat[:-1]), (flat[:, 1:], flat[:, :-1]), (flat[..., 1:], flat[..., :-1])]:
        assert abs(float((a * b).mean())) < 0.01
    assert abs(float(noise.mean()) - 0.5772) < 0.01
    assert abs(float(noise.std()) - 1.2825) < 0.01


def test_a_row_does_not_depend_on_its_batch() -> None:
    logits = torch.randn(8, 1000)
    r = rows(8, seed=7, temperature=0.8, top_p=0.9, top_k=50)
    together = sample(logits, r)
    for i in range(8):
        alone = SamplingRows.of([SamplingParams(temperature=0.8, top_p=0.9, top_k=50)], [7], [i], CPU)
        assert int(sample(logits[i, None], alone)) == int(together[i])


def test_greedy_rows_beside_random_rows_stay_greedy() -> None:
    logits = torch.randn(2, 50)
    params = [SamplingParams(temperature=0.0), SamplingParams(temperature=5.0)]
    r = SamplingRows.of(params, [1, 1], [0, 0], CPU)
    assert int(sample(logits, r)[0]) == int(logits[0].argmax())


def test_top_k_one_top_p_tiny_and_min_p_one_are_greedy() -> None:
    logits = torch.randn(20, 100)
    for params in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        assert torch.equal(sample(logits, rows(20, temperature=1.0, **params)), logits.argmax(-1))


def test_top_p_keeps_the_smallest_set_that_reaches_it() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = truncate(logits, rows(1, temperature=1.0, top_p=0.8)).isfinite()
    assert kept.tolist() == [[True, True, False, False]]


def test_min_p_is_relative_to_the_best_token() -> None:
    logits = torch.tensor([[0.5, 0.3, 0.15, 0.05]]).log()
    kept = truncate(logits, rows(1, temperature=1.0, min_p=0.25)).isfinite()
    assert kept.tolist() == [[True, True, True, False]]


def test_penalties_and_bias_change_only_their_tokens() -> None:
    logits = torch.tensor([[1.0, -1.0, 2.0, 0.5]])
    params = SamplingParams(
        repetition_penalty=2.0, presence_penalty=0.5, frequency_penalty=0.25, logit_bias=((3, -1.0),)
    )
    out = penalize(logits, [params], [[1]], [[0, 0]])
    assert torch.allclose(out, torch.tensor([[1.0 / 2 - 0.5 - 0.5, -2.0, 2.0, -0.5]]))
    assert logits[0, 0] == 1.0
    assert penalize(logits, [SamplingParams()], [[1]], [[0]]) is logits


def test_logprobs_are_natural_logs_best_first() -> None:
    entry = token_logprobs(torch.tensor([0.0, 1.0, 2.0]), 0, 2)
    want = torch.tensor([0.0, 1.0, 2.0]).log_softmax(-1)
    assert entry.logprob == pytest.approx(float(want[0]))
    assert [t for t, _ in entry.top] == [2, 1]


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (1.0, 0.9), (0.6, 0.9)])
def test_verified_tokens_follow_the_target_with_three_drafts(temperature: float, top_p: float) -> None:
    """A Markov chain of six tokens is the target, another one the drafter; every token that stands is a draw."""
    torch.manual_seed(3)
    vocab, n, k = 6, 55_000, 3
    target = torch.randn(vocab, vocab) * 1.2
    drafter = target + torch.randn(vocab, vocab) * 0.8
    params = SamplingParams(max_tokens=9, temperature=temperature, top_p=top_p)
    sequences = [
        Sequence(
            request=Request(str(i), (i % vocab,), params),
            arrival=i,
            seed=7_000_000 + i,
            draft_len=k,
            stop_ids=frozenset(),
            max_len=10,
        )
        for i in range(n)
    ]
    seeds = [s.seed for s in sequences]
    last = torch.tensor([s.tokens[-1] for s in sequences])
    drafted = [last]
    for i in range(k):
        drafted.append(sample(drafter[drafted[-1]], SamplingRows.of([params] * n, seeds, [1 + i] * n, CPU)))
    rows = torch.stack(drafted, dim=1)  # [n, 1 + k]: what each row of a window reads
    drafts = rows[:, 1:].tolist()
    targets = choose(
        target[rows.flatten()], [(s, d[:i]) for s, d in zip(sequences, drafts, strict=True) for i in range(1 + k)]
    )
    seen = torch.zeros(vocab, vocab, dtype=torch.float64)
    kept = 0
    for i, d in enumerate(drafts):
        stand = accept(d, targets[i * (1 + k) : (i + 1) * (1 + k)])
        kept += len(stand) - 1
        for before, token in zip([sequences[i].tokens[-1], *stand], stand, strict=False):
            seen[before, token] += 1
    assert seen.sum() >= 100_000 and 0.2 < kept / (n * k) < 0.95
    want = truncate(target / temperature, rows_of(params, vocab)).softmax(-1).double()
    assert seen[want == 0].sum() == 0
    expected = (want * seen.sum(1, keepdim=True))[want > 0]
    chi_square = float(((seen[want > 0] - expected) ** 2 / expected).sum())
    freedom = expected.numel() - vocab
    assert chi_square < freedom + 4 * (2 * freedom) ** 0.5, f"{chi_square:.1f} for {freedom} degrees of freedom"
    # the same statistic tells the drafter's own distribution apart, so it can fail
    wrong = truncate(drafter / temperature, rows_of(params, vocab)).softmax(-1).double().clamp(min=1e-9)
    off = wrong * seen.sum(1, keepdim=True)
    assert float(((seen - off) ** 2 / off).sum()) > 10 * freedom


def rows_of(params: SamplingParams, n: int) -> SamplingRows:
    return SamplingRows.of([params] * n, [0] * n, [0] * n, CPU)
