"""The memory plan on machines described by hand: what fits, what is cut, and that the way out of a refusal fits."""

from __future__ import annotations

import json
import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from onebox import cli
from onebox.config import EngineConfig
from onebox.engine.engine import Engine
from onebox.engine.pages import pages_for
from onebox.engine.plan import Facts, Machine, MemoryPlan, host_memory, plan_for, plan_memory, weight_bytes
from onebox.errors import ConfigError
from onebox.ledger import BUILDS, SHAPES, resident_bytes
from onebox.request import Request, SamplingParams
from onebox.spec import Spec
from tests.twins import make_twin

GB = 1e9
TINY = str(Path(__file__).parent.parent / "onebox" / "models" / "tiny")
BIG, SMALL = SHAPES["qwen3.5-122b-a10b"], SHAPES["qwen3.5-35b-a3b"]


def discrete(gigabytes: float) -> Machine:
    return Machine("discrete", "GPU", gigabytes * GB, (gigabytes - 0.5) * GB, 64 * GB)


UNIFIED = Machine("unified", "integrated GPU", 128 * GB, 119 * GB, 119 * GB)
CPU = Machine("cpu", "CPU", 8 * GB, 6.5 * GB, 6.5 * GB)
TINY_SPEC = Facts.read(EngineConfig(TINY)).spec


def plan(spec: Spec, machine: Machine, build: str = "hybrid", k: int = 2, **options: Any) -> MemoryPlan:
    cpu = machine.kind == "cpu"
    config = EngineConfig(
        "m", device="cpu" if cpu else "cuda", dtype="float32" if cpu else "bfloat16", draft_len=k, **options
    )
    weights = resident_bytes(spec, BUILDS["bf16" if cpu else build], slots=0).weights * (2 if cpu else 1)
    return plan_memory(config, spec, machine, weights=weights, draft_len=k, mtp=k > 0)


@pytest.mark.parametrize(
    ("spec", "machine"),
    [
        (SMALL, discrete(24)),
        (SMALL, discrete(80)),
        (SMALL, discrete(141)),
        (SMALL, UNIFIED),
        (BIG, discrete(80)),
        (BIG, discrete(141)),
        (BIG, UNIFIED),
        (TINY_SPEC, CPU),
        (TINY_SPEC, discrete(24)),
    ],
)
@pytest.mark.parametrize("k", [0, 4])
def test_a_plan_stays_within_the_machine_and_holds_the_context_that_it_promises(
    spec: Spec, machine: Machine, k: int
) -> None:
    made = plan(spec, machine, k=k)
    assert made.used <= made.capacity <= machine.free - made.floor + 1
    assert made.max_num_seqs >= 1 and made.n_pages >= pages_for(made.max_model_len + 2 * k)
    assert (made.max_model_len < spec.max_positions) == any("max_model_len" in note for note in made.notes)
    assert (made.max_num_seqs < 16) == any("max_num_seqs" in note for note in made.notes)


@pytest.mark.parametrize(
    ("spec", "machine"), [(BIG, discrete(24)), (BIG, CPU), (SMALL, CPU), (SMALL, replace(discrete(24), free=8 * GB))]
)
def test_weights_that_cannot_fit_are_refused_with_the_numbers(spec: Spec, machine: Machine) -> None:
    with pytest.raises(ConfigError, match=r"weights take [\d.]+ GB.*needs [\d.]+ GB.*smaller build"):
        plan(spec, machine)


@pytest.mark.parametrize(
    ("spec", "machine", "options"),
    [
        (SMALL, discrete(24), {"max_model_len": 262_144}),
        (BIG, discrete(80), {"max_model_len": 262_144, "gpu_memory_utilization": 0.94}),
        (SMALL, discrete(24), {"kv_gb": 20.0}),
        (BIG, UNIFIED, {"kv_gb": 100.0}),
        (SMALL, discrete(80), {"kv_gb": 1.0, "max_model_len": 200_000}),
        (TINY_SPEC, CPU, {"kv_gb": 0.02, "max_model_len": 8000}),
        (TINY_SPEC, CPU, {"kv_gb": 9.0}),
        (TINY_SPEC, CPU, {"kv_gb": 1e-6}),
        (TINY_SPEC, CPU, {"snapshot_host_gb": 30.0}),
        (TINY_SPEC, CPU, {"kv_host_gb": 30.0, "snapshot_host_gb": 0.5}),
        (SMALL, discrete(80), {"kv_host_gb": 100.0, "snapshot_host_gb": 2.0}),
        (SMALL, discrete(80), {"snapshot_host_gb": 100.0}),
        (BIG, UNIFIED, {"snapshot_host_gb": 60.0}),
    ],
)
def test_every_way_out_that_a_refusal_names_is_a_plan_that_fits(
    spec: Spec, machine: Machine, options: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=r"(What fits:|the least is) --") as e:
        plan(spec, machine, **options)
    offers = re.findall(
        r"--(kv-gb|max-model-len|snapshot-host-gb|kv-host-gb) ([\d.e+-]+\d)", str(e.value).split("What fits")[-1]
    )
    assert offers
    for flag, value in offers:
        name = flag.replace("-", "_")
        number = int(value) if name == "max_model_len" else float(value)
        offered = {**options, name: number}
        if str(e.value).count("--kv-gb") and "least" in str(e.value):
            offered = {"kv_gb": float(offers[-1][1])}
        made = plan(spec, machine, **offered)
        assert made.used <= made.capacity


def test_no_refused_length_is_one_token_too_careful() -> None:
    with pytest.raises(ConfigError) as e:
        plan(SMALL, discrete(24), max_model_len=262_144)
    [fits] = re.findall(r"--max-model-len (\d+)\.", str(e.value))
    with pytest.raises(ConfigError):
        plan(SMALL, discrete(24), max_model_len=int(fits) + 64)


def test_kv_gb_is_what_the_pages_take_and_a_length_that_was_not_given_is_cut_to_it() -> None:
    made = plan(SMALL, discrete(80), kv_gb=1.0)
    assert made.n_pages * 64 * 22_528 <= 1.0 * GB < (made.n_pages + 1) * 64 * 22_528  # 11 layers with the drafter's
    assert made.max_model_len == made.n_pages * 64 - 4
    assert [note for note in made.notes if f"max_model_len is {made.max_model_len}" in note] == list(made.notes)


def test_max_num_seqs_is_clamped_with_one_note_that_names_the_numbers() -> None:
    made = plan(BIG, discrete(80), max_num_seqs=256, max_model_len=8192)
    [note] = made.notes
    assert f"max_num_seqs 256 is cut to {made.max_num_seqs}" in note and "GB" in note
    few = plan(TINY_SPEC, CPU, max_num_seqs=64, kv_gb=0.01)
    assert few.max_num_seqs == few.n_pages // 2 < 64


def test_gpu_memory_utilization_is_the_share_of_the_device_that_everything_may_use() -> None:
    half = plan(SMALL, discrete(80), gpu_memory_utilization=0.5)
    assert half.capacity == 40 * GB and half.used <= 40 * GB
    assert plan(SMALL, discrete(80), gpu_memory_utilization=0.9).n_pages >= half.n_pages
    with pytest.raises(ConfigError, match="does not fit"):
        plan(SMALL, discrete(80), gpu_memory_utilization=0.1)


def test_unified_memory_keeps_8_gb_for_the_rest_of_the_machine_and_pays_for_host_snapshots() -> None:
    made = plan(BIG, UNIFIED)
    assert made.floor == 8 * GB and made.capacity == 111 * GB
    assert plan(BIG, UNIFIED, memory_floor_gb=20.0).capacity == 99 * GB
    host = plan(BIG, UNIFIED, snapshot_host_gb=4.0)
    assert host.n_host_snapshots == 26 and host.used <= host.capacity
    assert host.used - host.weights >= host.host_snapshots > 3.9 * GB


def test_host_snapshots_beside_a_discrete_gpu_take_nothing_from_it() -> None:
    without, with_host = plan(BIG, discrete(141)), plan(BIG, discrete(141), snapshot_host_gb=8.0)
    assert with_host.n_host_snapshots == 52 and with_host.n_pages == without.n_pages


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_gb", float("nan")),
        ("kv_gb", float("inf")),
        ("kv_gb", -1.0),
        ("kv_gb", 0.0),
        ("gpu_memory_utilization", float("nan")),
        ("gpu_memory_utilization", 1.5),
        ("gpu_memory_utilization", 0.0),
        ("memory_floor_gb", float("inf")),
        ("memory_floor_gb", -1.0),
        ("snapshot_host_gb", float("nan")),
        ("snapshot_host_gb", -0.5),
        ("kv_host_gb", -0.5),
    ],
)
def test_sizes_that_are_no_sizes_are_refused_by_name(field: str, value: float) -> None:
    with pytest.raises(ConfigError, match=field):
        EngineConfig("m", **{field: value})  # type: ignore[arg-type]


def test_the_plan_of_the_bundled_model_is_what_the_engine_allocates(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "onebox.engine.plan"):
        engine = Engine(EngineConfig(TINY, device="cpu", kv_gb=0.05, max_num_seqs=3))
    made, cache = engine.plan, engine.runner.cache

    def size(*tensors: torch.Tensor) -> int:
        return sum(t.numel() * t.element_size() for t in tensors)

    assert size(*cache.kv) == made.kv
    slots = [t for s in cache.gdn for t in (s.s, s.k, s.v, s.g, s.beta, s.conv)]
    assert size(*slots, cache.hidden) == made.states
    assert size(*(t for s in cache.snapshots for t in (s.s, s.conv)), cache.snapshot_hidden) == made.snapshots
    assert f"KV pages           {made.kv / GB:.3f} GB" in caplog.text
    assert engine.info.plan["bytes"]["kv_pages"] == made.kv


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_counted_to_two_percent_by_headers_alone(tmp_path: Path, tied: bool) -> None:
    make_twin(tmp_path, tied=tied, hidden=128)
    for path in (str(tmp_path), *([] if tied else [TINY])):
        config = EngineConfig(path, device="cpu", dtype="float32")
        facts = Facts.read(config)
        engine = Engine(config)
        seen: dict[int, int] = {}
        stack: list[Any] = [engine.runner.model]
        while stack:
            x = stack.pop()
            if isinstance(x, torch.Tensor):
                seen[x.data_ptr()] = x.numel() * x.element_size()
            elif isinstance(x, tuple):
                stack += x
            elif hasattr(x, "__dataclass_fields__"):
                stack += [getattr(x, name) for name in x.__dataclass_fields__]
        counted = weight_bytes(facts.spec, facts.report.formats, config, mtp=facts.mtp)
        assert counted == pytest.approx(sum(seen.values()), rel=0.02)
    packed = Facts.read(EngineConfig(TINY))
    on_gpu = EngineConfig(TINY, device="cuda", dtype="bfloat16")
    stored = sum(p.stat().st_size for p in Path(TINY).glob("*.safetensors"))
    assert weight_bytes(packed.spec, packed.report.formats, on_gpu, mtp=True) == pytest.approx(stored, rel=0.03)


def test_a_pool_smaller_than_the_models_context_serves_requests_that_ask_for_everything() -> None:
    engine = Engine(EngineConfig(TINY, device="cpu", kv_gb=0.02))
    engine.add(Request("r", (5, 6, 7), SamplingParams(max_tokens=10**9, temperature=0.0)))
    assert engine.step()[0].tokens


def test_a_plan_that_does_not_fit_is_refused_before_any_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onebox.engine.engine.load_model", lambda *_, **__: pytest.fail("weights were read"))
    with pytest.raises(ConfigError, match="--max-model-len 3196"):
        Engine(EngineConfig(TINY, device="cpu", kv_gb=0.02, max_model_len=8000))


def test_available_memory_is_what_the_container_leaves(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 64000000 kB\nMemFree: 1 kB\nMemAvailable: 50000000 kB\n")
    assert host_memory(tmp_path) == (64e6 * 1024, 50e6 * 1024)
    group = tmp_path / "sys/fs/cgroup"
    group.mkdir(parents=True)
    (group / "memory.max").write_text("max\n")
    (group / "memory.current").write_text("5\n")
    (group / "memory.stat").write_text("anon 1\ninactive_file 1000000\n")
    assert host_memory(tmp_path) == (64e6 * 1024, 50e6 * 1024)
    (group / "memory.max").write_text("8000000000\n")
    (group / "memory.current").write_text("3000000000\n")
    assert host_memory(tmp_path) == (8e9, 5.001e9)


def test_plan_for_reads_headers_alone() -> None:
    made = plan_for(EngineConfig(TINY, device="cpu", dtype="float32"), CPU)
    assert made.max_model_len == 8192 and made.max_num_seqs == 16 and made.notes == ()
    assert made.json()["capacity_bytes"] == round(made.capacity)


def test_the_command_shows_the_plan_and_refuses_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as done:
        cli.main(["plan", "--device", "cpu", "--kv-gb", "0.02", "--json"])
    out = capsys.readouterr()
    assert done.value.code == 0 and json.loads(out.out)["max_model_len"] == 3196
    assert out.err.splitlines() == [f"note: {note}" for note in json.loads(out.out)["notes"]]
    with pytest.raises(SystemExit) as done:
        cli.main(["plan", "--device", "cpu", "--kv-gb", "1e6"])
    assert done.value.code == 1 and "What fits: --kv-gb" in capsys.readouterr().err
