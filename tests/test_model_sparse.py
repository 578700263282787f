"""Sparse prefill in a model and under the engine: off where it should be, the same wherever a prompt is cut."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kernels_common import DEVICE, DTYPE, assert_close, rows
from test_kernels_decode import SPEC, model

from onebox import cli
from onebox.bench import sparse_search
from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.errors import ConfigError
from onebox.kernels.sparse_attention_ref import SPAN, HeadPattern
from onebox.model.attention import AttentionWeights, attention
from onebox.model.prefill import Tiles
from onebox.model.sparse import FROM, SparsePrefill, read_table, write_table
from onebox.request import Batch, Request, SamplingParams
from tests.test_engine_engine import run, tokens
from tests.twins import make_twin

ALL = 1 << 20


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("twin")
    make_twin(folder, max_positions=8192)
    return str(folder)


def long_prompt(twin: str, n: int) -> tuple[int, ...]:
    g = torch.Generator().manual_seed(9)
    return tuple(torch.randint(5, 200, (n,), generator=g).tolist())


def answer(engine: Engine, prompt: tuple[int, ...], name: str = "r") -> list[int]:
    options = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    return tokens(run(engine, [Request(name, prompt, options)])[name])


def engine(twin: str, **options: Any) -> Engine:
    base: dict[str, Any] = {"device": "cpu", "draft_len": 0, "max_model_len": 8192, "kv_gb": 0.05}
    return Engine(EngineConfig(twin, **{**base, **options}))


def narrow(twin: str, tmp_path: Path) -> str:
    """A table that lets heads read very little."""
    spec = Engine(EngineConfig(twin, device="cpu", kv_gb=0.01)).runner.model.spec
    path = tmp_path / "narrow.json"
    write_table([[HeadPattern("a_shape", pages=2)] * spec.n_heads] * spec.n_attention_layers, path)
    return str(path)


def test_short_prompts_are_dense_and_read_the_same(twin: str) -> None:
    prompt = long_prompt(twin, 1500)
    assert answer(engine(twin, prefill_attention="auto"), prompt) == answer(engine(twin), prompt)


def test_patterns_that_read_everything_give_the_dense_numbers(twin: str, tmp_path: Path) -> None:
    prompt = long_prompt(twin, 2500)
    spec = engine(twin).runner.model.spec
    path = tmp_path / "all.json"
    write_table([[HeadPattern("a_shape", pages=ALL)] * spec.n_heads] * spec.n_attention_layers, path)
    sparse = engine(twin, prefill_attention="minference", sparse_from=0, sparse_table=str(path))
    assert answer(sparse, prompt) == answer(engine(twin), prompt)


def hidden_of(e: Engine, prompt: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> torch.Tensor:
    """The prompt rows' hidden states, as the engine computed them."""
    seen: list[torch.Tensor] = []
    forward = type(e.runner.model).forward

    def watched(self: Any, batch: Any, cache: Any) -> torch.Tensor:
        out = forward(self, batch, cache)
        if not batch.window:
            seen.append(out.clone())
        return out

    with monkeypatch.context() as m:
        m.setattr(type(e.runner.model), "forward", watched)
        answer(e, prompt)
    return torch.cat(seen)


def test_sparse_prompts_differ_from_dense_and_not_by_budget_or_cache(
    twin: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = long_prompt(twin, 3 * SPAN + 200)
    options = {"prefill_attention": "minference", "sparse_from": 0, "sparse_table": narrow(twin, tmp_path)}
    whole = engine(twin, **options, max_num_batched_tokens=8192, prefix_caching=False)
    want = hidden_of(whole, prompt, monkeypatch)
    assert (want - hidden_of(engine(twin, prefix_caching=False), prompt, monkeypatch)).abs().max() > 1e-3
    cut = engine(twin, **options, max_num_batched_tokens=2 * SPAN + 10, prefix_caching=False)
    assert_close(hidden_of(cut, prompt, monkeypatch), want, 1e-4)


def test_drafts_and_the_prefix_cache_keep_the_text(twin: str, tmp_path: Path) -> None:
    prompt = long_prompt(twin, 2 * SPAN + 100)
    options = {"prefill_attention": "minference", "sparse_from": 0, "sparse_table": narrow(twin, tmp_path)}
    want = answer(engine(twin, **options), prompt)
    drafting = engine(twin, **options, draft_len=3)
    assert answer(drafting, prompt, "a") == want
    assert answer(drafting, prompt, "b") == want
    assert drafting.scheduler.prefix.counts["hits"] == 1
    drafting.scheduler.check()


def test_the_prefix_cache_knows_which_patterns_made_its_numbers(twin: str, tmp_path: Path) -> None:
    a = engine(twin, prefill_attention="minference", sparse_from=0)
    b = engine(twin, prefill_attention="minference", sparse_from=64)
    c = engine(twin, prefill_attention="minference", sparse_from=0, sparse_table=narrow(twin, tmp_path))
    assert len({e.scheduler.prefix.build for e in (a, b, c, engine(twin))}) == 4


def test_page_formats_and_patterns_go_together(twin: str) -> None:
    prompt = long_prompt(twin, 2 * SPAN)
    options = {"kv_cache_dtype": "tq4", "prefill_attention": "minference", "sparse_from": 0}
    assert answer(engine(twin, **options, draft_len=2), prompt) == answer(engine(twin, **options), prompt)


def test_a_layer_through_the_kernels_equals_the_reference_path() -> None:
    """Rows of a long sequence by patterns beside a short dense one, over pages that hold what came before."""
    m, table, parts = model("bf16"), torch.arange(1, 15).view(2, 7), [(0, 256, 400), (1, 0, 3)]
    w = m.layers[1].mixer
    assert isinstance(w, AttentionWeights)
    pages = rows(15, 2, 64, SPEC.n_kv_heads, SPEC.head_dim, seed=41)
    positions = torch.cat([torch.arange(first, end) for _, first, end in parts])
    owner = torch.cat([torch.full((end - first,), b) for b, first, end in parts])
    tensors = (
        positions % 64,
        positions,
        torch.tensor([0, 144, 147]),
        torch.tensor([256, 0]),
        table,
        table[owner, positions // 64] * 64 + positions % 64,
        torch.arange(1, 3),
        torch.zeros(2, dtype=torch.long),
    )
    batch = Batch(*(t.to(DEVICE) for t in tensors), window=False, max_query=144, max_context=400)
    pattern = HeadPattern("vertical_slash", columns=5, pages=1)
    sparse = SparsePrefill(((pattern,) * SPEC.n_heads,), 10)
    found = sparse.rows(batch)
    assert found == [(0, 144, 256), (144, 147, 0)]
    layer = replace(sparse.layer(0, found), sparse_from=0)
    x, rope = rows(len(positions), SPEC.hidden, seed=40), m.rope.tables(batch.positions, DTYPE)
    want = attention(x, w, batch, pages.clone(), rope, SPEC, sparse=layer)
    got = attention(x, w, batch, pages.clone(), rope, SPEC, tiles=Tiles.of(batch), sparse=layer)
    assert_close(got, want, 1e-2)
    full = attention(x, w, batch, pages.clone(), rope, SPEC)
    assert (want[:64] - full[:64]).abs().max() > 1e-2 * full.abs().max()  # and by patterns is not by all


def test_a_table_comes_back_as_written(tmp_path: Path) -> None:
    patterns = [[HeadPattern("block_sparse", pages=i + 1) for i in range(SPEC.n_heads)]] * SPEC.n_attention_layers
    write_table(patterns, tmp_path / "t.json")
    assert read_table(tmp_path / "t.json", SPEC) == tuple(tuple(layer) for layer in patterns)


HEAD = {"kind": "a_shape", "pages": 2}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "No such file"),
        ("{", "Expecting"),
        ("[1]", '"format": 1'),
        (json.dumps({"format": 1, "layers": [3]}), "iterable|int"),
        (json.dumps({"format": 1, "layers": [[{"kind": "spiral"}]]}), "spiral"),
        (json.dumps({"format": 1, "layers": [[{"kind": "a_shape", "width": 2}]]}), "width"),
        (json.dumps({"format": 1, "layers": [[HEAD]]}), "attention layers of"),
        ("[" * 100_000, "."),
    ],
)
def test_a_table_that_is_not_for_this_model_is_refused_by_name(
    tmp_path: Path, content: str | None, message: str
) -> None:
    path = tmp_path / "table.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_table(path, SPEC)
    assert "table.json" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_attention": "fast"}, "prefill_attention must be one of dense, minference, auto"),
        ({"sparse_from": 5}, "sparse_from needs prefill_attention"),
        ({"sparse_table": "x"}, "sparse_table needs prefill_attention"),
        ({"prefill_attention": "auto", "sparse_from": -1}, "sparse_from must be 0 or more"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig("m", **options)


def test_where_modes_begin() -> None:
    assert SparsePrefill.of("auto", SPEC).sparse_from == FROM["auto"] > FROM["minference"]
    assert SparsePrefill.of("minference", SPEC, 7).sparse_from == 7
    assert "prefill-attention" in {o.lstrip("-") for p in _serve_options() for o in p.opts}


def _serve_options() -> list[Any]:
    import typer.main

    return list(typer.main.get_command(cli.app).commands["serve"].params)  # type: ignore[attr-defined]


def test_a_search_finds_the_pattern_that_errs_least(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table, results = tmp_path / "patterns.json", tmp_path / "results.jsonl"
    asked = ["--length", "1100", "--prompts", "1", "--budget", "128", "--commit", "c", "--key-values", "300"]
    sparse_search.main([*asked, "--items", "1", "--out", str(table), "--results", str(results)])
    patterns = json.loads(table.read_text())["layers"]
    lines = [json.loads(line) for line in results.read_text().splitlines()]
    assert [line["mode"] for line in lines] == ["dense", "vertical_slash", "table"]
    dense, _, found = lines
    assert dense["kl"] == 0 and dense["top1"] == 1 and found["kl"] > 0
    heads = found["heads"]
    assert len(heads) == sum(map(len, patterns)) and all(0 < h["retained"] <= 1 and h["error"] > 0 for h in heads)
    assert "onebox serve --prefill-attention minference" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir() if p.suffix == ".tmp"] == []


@pytest.mark.parametrize(
    "bad", [["--length", "100"], ["--budget", "0"], ["--items", "0"], ["--prompts", "0"], ["--sparse-from", "-1"]]
)
def test_a_search_of_nothing_is_refused(bad: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        sparse_search.main(bad)
    err = capsys.readouterr().err
    assert bad[0] in err and "must be at least" in err
