"""`onebox plan --box`: what a machine would do with a model, by the ledger and the memory plan that a server has."""

from __future__ import annotations

import contextlib
import json
from dataclasses import fields, replace
from pathlib import Path

import pytest

from onebox import cli
from onebox.bench import efficiency
from onebox.config import EngineConfig
from onebox.engine.forecast import ACCEPTANCE, Forecaster, Subject, forecast, machine_of
from onebox.engine.plan import GB, plan_memory, users_that_fit
from onebox.errors import CheckpointError, ConfigError
from onebox.ledger import BOXES, BUILDS, MEASURED, SHAPES, step_bytes, tokens_per_step

ROOT = Path(__file__).parent.parent
TINY = str(ROOT / "onebox" / "models" / "tiny")
BIG, SMALL = "qwen3.5-122b-a10b", "qwen3.5-35b-a3b"


def run(*argv: str) -> int:
    with pytest.raises(SystemExit) as e:
        cli.main(["plan", *argv])
    return int(e.value.code or 0)


@pytest.mark.parametrize(
    ("model", "shape", "build"),
    [
        ("qwen3.5-122b-a10b", BIG, "hybrid"),
        ("Intel/Qwen3.5-122B-A10B-int4-AutoRound", BIG, "int4"),
        ("Qwen/Qwen3.5-122B-A10B-FP8", BIG, "fp8"),
        ("RedHatAI/Qwen3.6-35B-A3B-NVFP4", SMALL, "nvfp4"),
        ("Qwen/Qwen3.6-35B-A3B", SMALL, "hybrid"),
        ("Qwen/Qwen3.6-27B", "qwen3.5-27b", "hybrid"),
    ],
)
def test_a_hub_id_names_its_shape_and_build(model: str, shape: str, build: str) -> None:
    subject = Subject.of(model)
    assert subject.spec == SHAPES[shape] and subject.build_name == build
    assert Subject.of(model, "bf16").build == BUILDS["bf16"]


@pytest.mark.parametrize("model", ["Qwen/Qwen3-30B-A3B", "llama", "Qwen/Qwen3.5-397B-A17B"])
def test_an_unknown_model_is_refused_with_what_is_known(model: str) -> None:
    with pytest.raises(ConfigError, match="Known"):
        Subject.of(model)


def test_a_folder_is_planned_by_what_it_holds(tmp_path: Path) -> None:
    stored = sum(f.stat().st_size for f in Path(TINY).glob("*.safetensors"))
    subject = Subject.of(TINY)
    assert subject.stored == pytest.approx(stored, rel=0.05) and subject.spec.n_mtp_layers == 1
    (tmp_path / "config.json").write_text((Path(TINY) / "config.json").read_text("utf-8"))
    bare = Subject.of(str(tmp_path))
    assert bare.stored is None and bare.spec == subject.spec
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Subject.of(str(tmp_path))


def test_bytes_roof_and_expected_speed_are_the_ledgers() -> None:
    made = forecast(Subject.of(BIG), "dgx-spark", context=1000, users=2, k=2)
    step = step_bytes(SHAPES[BIG], BUILDS["hybrid"], batch=2, context=1000, k=2)
    tokens = tokens_per_step(ACCEPTANCE[:2])
    assert made.step == step
    speed = made.speeds[2]
    assert speed.roof_tok_s == pytest.approx(2 * tokens * 273e9 / step.total)
    seconds = step.total / (MEASURED.share * 273e9) + 50 * MEASURED.layer_s
    assert speed.expected_tok_s == pytest.approx(2 * tokens / seconds)
    assert all(s.expected_tok_s < s.roof_tok_s for s in made.speeds)


def test_rows_beyond_the_measured_ones_cost_more_than_their_bytes() -> None:
    made = Forecaster(Subject.of(BIG), BOXES["h200"], EngineConfig("m", device="cuda", dtype="bfloat16"))
    few, many = made.speed(32, 128, 0), made.speed(32, 128, 2)
    assert many.roof_tok_s > few.roof_tok_s and many.expected_tok_s < few.expected_tok_s


def test_expected_steps_are_the_measured_ones() -> None:
    lines = efficiency.cases(efficiency.read(ROOT / "results" / "engine.jsonl"))
    at = [c for c in lines if c.commit == efficiency.AT]
    assert len(at) >= 6
    for case in at:
        assert case.predicted_ms(MEASURED) == pytest.approx(case.ms, rel=0.05), case
    found = efficiency.fit(at)
    for field in ("share", "layer_s", "row_bytes"):
        assert getattr(MEASURED, field) == pytest.approx(getattr(found, field), rel=0.02), field
    # an unseen shape, on kernels of a little earlier
    [other] = [c for c in lines if c.model == SMALL and c.batch == 1 and c.k == 0]
    assert other.predicted_ms(MEASURED) == pytest.approx(other.ms, rel=0.15)


@pytest.mark.parametrize(("box", "users", "context"), [("dgx-spark", 1, 4096), ("h200", 7, 131_072), ("h100", 3, 999)])
@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_users_that_fit_are_a_plan_and_one_more_is_not(box: str, users: int, context: int, kv: str) -> None:
    spec, machine = SHAPES[BIG], machine_of(BOXES[box])
    config = EngineConfig("m", device="cuda", dtype="bfloat16", fused=True, draft_len=2)
    weights = Subject.of(BIG).weights(BUILDS["hybrid"])
    n = users_that_fit(config, spec, machine, context=context, weights=weights, draft_len=2, mtp=True, kv=kv)
    pages = -(-(context + 4) // 64)

    def fits(n: int) -> bool:
        page = {"bf16": 26_624, "fp8": 13_312}[kv] * 64
        asked = replace(config, max_num_seqs=n, max_model_len=context, kv_gb=n * pages * page * (1 + 1e-9) / GB)
        made = plan_memory(asked, spec, machine, weights=weights, draft_len=2, mtp=True, kv=kv)
        return made.max_num_seqs == n

    assert fits(n)
    with contextlib.suppress(ConfigError):
        assert not fits(n + 1)


def test_smaller_kv_holds_more_and_the_published_capacity_is_found() -> None:
    made = forecast(Subject.of(BIG), "dgx-spark", context=262_144, k=2)
    bf16, fp8, tq4 = made.fits
    assert [f.served for f in made.fits] == [True, False, False]
    assert bf16.users < fp8.users < tq4.users
    assert bf16.users in (5, 6, 7)  # 24.6 kB a token, 45 GB beside the weights; the recipe's log said 4 to 5 users
    assert bf16.longest == 262_144


def test_weights_that_do_not_fit_are_refused_with_builds_and_boxes_that_would_do() -> None:
    with pytest.raises(ConfigError, match=r"66\.1 GB of hybrid .* boxes that hold this build: dgx-spark.*h200"):
        forecast(Subject.of(BIG), "rtx-5090")
    with pytest.raises(ConfigError, match=r"builds that fit here: .*hybrid"):
        forecast(Subject.of(BIG, "bf16"), "dgx-spark")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"context": 0}, "--context"),
        ({"context": 300_000}, "262144"),
        ({"users": 0}, "--users"),
        ({"k": 5}, "--k 5"),
        ({"k": 2, "acceptance": (0.9,)}, "--k 2"),
        ({"acceptance": (1.2,)}, "--acceptance"),
    ],
)
def test_values_out_of_range_are_refused_by_name(options: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        forecast(Subject.of(BIG), "h200", **options)  # type: ignore[arg-type]


def test_more_users_than_fit_is_said() -> None:
    made = forecast(Subject.of(BIG), "dgx-spark", context=131_072, users=64, k=0)
    assert any("64 users at 131,072 tokens do not fit" in note for note in made.notes)


def test_the_ladder_climbs_in_bytes_and_advice_names_its_reason() -> None:
    made = forecast(Subject.of(BIG), "dgx-spark")
    names = [r.rung for r in made.ladder]
    assert names == [
        "INT4",
        "+ FP8 shared expert",
        "+ INT8 head",
        "+ MTP-1",
        "+ MTP-2",
        "+ MTP-3",
        "+ quantised drafter",
        "+ fp8 KV",
        "+ tq4 KV",
    ]
    assert made.ladder[0].roof_tok_s == pytest.approx(39.5, abs=0.2)
    assert made.ladder[2].roof_tok_s == pytest.approx(48.0, abs=0.2)
    single, many, far = made.advice
    assert (single.workload, many.workload, far.workload) == ("single stream", "many users", "long context")
    best = max(made.speeds, key=lambda s: s.expected_tok_s)
    assert f"{best.k} drafts" in single.settings and single.tok_s == best.expected_tok_s
    assert f"{best.tokens_per_step:.2f} tokens a step" in single.reason
    assert many.tok_s_user >= 10 and many.tok_s > single.tok_s
    assert "262144" in far.settings and "% of a step's bytes" in far.reason


def test_a_dense_model_has_no_rung_for_a_shared_expert_and_says_what_a_better_build_gives() -> None:
    made = forecast(Subject.of("Qwen/Qwen3.6-27B-FP8"), "rtx-pro-6000")
    assert "+ FP8 shared expert" not in [r.rung for r in made.ladder]
    assert "build hybrid would give" in made.advice[0].reason


def test_a_checkpoint_without_a_drafter_drafts_nothing() -> None:
    subject = Subject.of(BIG)
    made = forecast(replace(subject, spec=replace(subject.spec, n_mtp_layers=0)), "h200")
    assert made.k == 0 and len(made.speeds) == 1 and any("no MTP head" in note for note in made.notes)


def test_the_command_prints_every_part_and_json_holds_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SMALL, "--box", "h200", "--users", "8", "--context", "32K", "--k", "2", "--acceptance", "0.8,0.64") == 0
    out = capsys.readouterr().out
    for part in ("routed experts", "users at 32,768", "+ MTP-2", "many users", "long context", "H200 SXM", "8 users"):
        assert part in out
    assert max(map(len, out.splitlines()[3:])) <= 250 and "user(s)" not in out
    assert run(SMALL, "--box", "h200", "--users", "8", "--context", "32K", "--k", "2", "--json") == 0
    made = json.loads(capsys.readouterr().out)
    assert made["users"] == 8 and made["context"] == 32_768 and made["k"] == 2
    assert {f.name for f in fields(step_bytes(SHAPES[SMALL], BUILDS["hybrid"]))} == set(made["step"])


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        ([BIG], "--box dgx-spark|"),
        (["/no/such/folder"], "neither a folder nor a known model"),
        ([BIG, "--box", "mac"], "--box 'mac'"),
        ([BIG, "--box", "h200", "--build", "q5"], "--build 'q5'"),
        ([BIG, "--box", "h200", "--max-num-seqs", "3"], "--max-num-seqs"),
        ([BIG, "--box", "h200", "--acceptance", "x"], "--acceptance"),
        ([BIG, "--box", "h200", "--context", "long"], "--context"),
        (["--users", "3"], "--users goes with --box"),
        ([BIG, "--box", "rtx-4090"], "do not fit"),
    ],
)
def test_a_mistake_is_one_line(argv: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(*argv) in (1, 2)
    err = capsys.readouterr().err.splitlines()
    assert len(err) == 1 and err[0].startswith("onebox: error:") and says in err[0]
