"""Pages in every format under the engine: bytes as planned, and text that depends on nothing but the format."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from onebox import cli
from onebox.config import KV_CACHE_DTYPES, EngineConfig
from onebox.engine.engine import Engine
from onebox.engine.pages import PAGE_SIZE
from onebox.engine.plan import Machine, plan_memory, users_that_fit
from onebox.errors import ConfigError
from onebox.kernels.paged_attention_ref import paged_attention_ref, write_kv_ref
from onebox.kernels.turboquant_ref import FORMATS, PageFormat, QuantizedPages
from onebox.ledger import BUILDS, KV_FORMATS, SHAPES, Build, kv_bytes_per_token, resident_bytes
from onebox.model.kv_layout import channels
from onebox.request import Request, SamplingParams
from tests.test_engine_engine import TINY, requests, run, tokens
from tests.twins import make_twin

BIG = SHAPES["qwen3.5-122b-a10b"]


@pytest.fixture(scope="module")
def twin(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("twin")
    make_twin(folder)
    return str(folder)


def texts(engine: Engine, asked: list[Request]) -> dict[str, list[int]]:
    return {name: tokens(outputs) for name, outputs in run(engine, asked).items()}


@pytest.mark.parametrize("name", FORMATS)
def test_text_is_the_same_with_drafts_small_chunks_and_preemption(twin: str, name: str) -> None:
    asked = requests(twin, n=4, max_tokens=60)
    options = {"model": twin, "device": "cpu", "kv_cache_dtype": name}
    want = texts(Engine(EngineConfig(**options, draft_len=0)), asked)  # type: ignore[arg-type]
    page = PageFormat.of(name, 2, 32, PAGE_SIZE).page_bytes * 2  # of the attention layer and of the drafter's
    pressed = Engine(
        EngineConfig(**options, draft_len=3, max_model_len=256, max_num_batched_tokens=48, kv_gb=6.5 * page / 1e9)  # type: ignore[arg-type]
    )
    assert texts(pressed, asked) == want
    assert pressed.stats().preemptions > 0


@pytest.mark.parametrize("name", ["fp8", "tq4", "tq2.5"])
def test_a_prompt_from_the_prefix_cache_reads_as_a_computed_one(twin: str, name: str) -> None:
    prompt = requests(twin, n=3, max_tokens=1)[-1].prompt * 3
    options = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    first, second = (Request(f"r{i}", prompt[: 3 * PAGE_SIZE + 9], options) for i in range(2))
    engine = Engine(EngineConfig(twin, device="cpu", draft_len=2, kv_cache_dtype=name))
    want = texts(engine, [first])["r0"]
    assert texts(engine, [second])["r1"] == want
    assert engine.scheduler.prefix.counts["hits"] == 1
    assert engine.scheduler.prefix.build == name


@pytest.mark.parametrize("name", KV_CACHE_DTYPES)
def test_pages_take_the_bytes_that_the_plan_says(twin: str, name: str) -> None:
    engine = Engine(EngineConfig(twin, device="cpu", max_num_seqs=2, kv_gb=0.01, kv_cache_dtype=name))
    stored = sum((kv if isinstance(kv, Tensor) else kv.data).nbytes for kv in engine.runner.cache.kv)
    assert stored == engine.plan.kv
    shown = "float32" if name == "auto" else name
    assert engine.plan.json()["kv_format"] == shown
    assert any(line.endswith(f"tokens in {shown}") for line in engine.plan.lines())


@pytest.mark.parametrize("name", FORMATS)
def test_the_ledger_counts_a_page_as_it_is_laid_out(name: str) -> None:
    form = PageFormat.of(name, BIG.n_kv_heads, BIG.head_dim, PAGE_SIZE)
    per_token = kv_bytes_per_token(BIG, Build(kv=name), mtp=True)
    assert per_token == form.page_bytes / PAGE_SIZE * (BIG.n_attention_layers + 1)
    assert set(FORMATS) == set(KV_FORMATS) - {"fp32", "bf16"} == set(KV_CACHE_DTYPES) - {"auto", "bf16"}


@pytest.mark.parametrize("kv_start", [0, 1])
@pytest.mark.parametrize("name", FORMATS)
def test_attention_over_pages_is_attention_over_their_decoded_entries(name: str, kv_start: int) -> None:
    """Rotated keys against turned queries, over a page's edge, with groups of query heads: as without rotations."""
    g = torch.Generator().manual_seed(1)
    n, n_kv, heads, d = 150, 2, 4, 64
    form = PageFormat.of(name, n_kv, d, PAGE_SIZE)
    order = torch.randperm(d, generator=g)
    pages = QuantizedPages.allocate(form, 5, torch.device("cpu"), order, order.flip(0))
    table = torch.tensor([[3, 1, 4]])
    position = torch.arange(n)
    slot = table[0, position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE
    k, v = (torch.randn(n, n_kv, d, generator=g) for _ in range(2))
    q = torch.randn(5, heads, d, generator=g)
    write_kv_ref(k, v, pages, slot)
    got = paged_attention_ref(q, pages, table, position[-5:], [0, 5], kv_start)
    exact = torch.zeros(5, 2, PAGE_SIZE, n_kv, d)
    turns = (pages.k_turn, pages.v_turn)
    for i, (x, turn) in enumerate(zip(pages.read(torch.arange(5)), turns, strict=True)):
        exact[:, i] = (x if turn is None else x @ turn.T).unflatten(0, (5, PAGE_SIZE))
    want = paged_attention_ref(q, exact, table, position[-5:], [0, 5], kv_start)
    assert torch.allclose(got, want, atol=1e-5)
    plain = torch.zeros_like(exact)
    write_kv_ref(k, v, plain, slot)
    off = got - paged_attention_ref(q, plain, table, position[-5:], [0, 5], kv_start)
    bits = min(g.bits for g in (*form.k, *form.v))
    assert 0 < float(off.norm() / want.norm()) < (0.06 if bits == 8 else 2.5 * 2.0**-bits)


def test_outliers_are_the_dimensions_that_the_weights_make_large(twin: str) -> None:
    model = Engine(EngineConfig(twin, device="cpu")).runner.model
    mixer = next(b.mixer for b in model.layers if hasattr(b.mixer, "k_norm"))
    half = model.spec.rope_dims // 2
    mixer.k_norm[:] = 0.0
    mixer.k_norm[2 * half + 3], mixer.k_norm[1] = 9.0, 5.0
    mixer.v.view(model.spec.n_kv_heads, model.spec.head_dim, -1)[:, 7] *= 50  # type: ignore[union-attr]
    k, v = channels(mixer, model.spec)  # type: ignore[arg-type]
    assert k[:3].tolist() == [2 * half + 3, 1, 1 + half] and int(v[0]) == 7


def test_formats_that_are_not_served_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype must be one of auto, bf16, fp8"):
        EngineConfig("m", kv_cache_dtype="tq5")
    config = EngineConfig("m", device="cpu", dtype="float32", kv_cache_dtype="tq3")
    odd = SHAPES["qwen3.5-35b-a3b"].__class__(**{**vars(BIG), "head_dim": 80})
    with pytest.raises(ConfigError, match="tq3 needs heads of a multiple of 32 dimensions, these have 80"):
        plan_memory(config, odd, Machine("cpu", "CPU", 1e12, 1e12, 1e12), weights=1e9, draft_len=0, mtp=False)


def test_a_million_tokens_fit_where_yarn_allows_them_and_pages_are_small() -> None:
    """The 122B shape in its hybrid build on a card of 141 GB."""
    spec = replace(BIG, max_positions=1_048_576)
    weights = resident_bytes(spec, BUILDS["hybrid"], slots=0).weights
    machine = Machine("discrete", "GPU", 141e9, 140e9, 64e9)
    users = {
        kv: users_that_fit(
            EngineConfig("m", device="cuda", dtype="bfloat16"), spec, machine,
            context=1_000_000, weights=weights, draft_len=2, mtp=True, kv=kv,
        )
        for kv in ("bf16", "fp8", "tq4")
    }  # fmt: skip
    assert users["tq4"] >= 3 * users["bf16"] > 0 and users["bf16"] < users["fp8"] < users["tq4"]


def test_the_command_takes_a_format(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        cli.main(["plan", TINY, "--device", "cpu", "--kv-cache-dtype", "fp8_e4m3"])
    assert "tokens in fp8" in capsys.readouterr().out
