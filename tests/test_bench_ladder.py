"""`onebox bench ladder`: rungs in order, pairs interleaved, figures by hand, checks that fail, answers checked."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from onebox.bench import ladder, values
from onebox.bench.ladder import Paired, Sample, Technique, check, lines, main, moved_bytes, techniques
from onebox.bench.protocol import FIVE_PROMPTS, json_is_right, product_is_right
from onebox.ledger import BUILDS, SHAPES, Build, step_bytes
from onebox.model.load import load_model
from tests.twins import make_twin

SAMPLE = Sample(tok_s=100.0, ms_per_step=10.0, tokens_per_step=1.0, ttft_ms=50.0, ttft_again_ms=40.0, said=((1, 2),))


def test_rungs_of_a_16_bit_checkpoint_add_one_thing_each() -> None:
    rungs = techniques(False, (1, 2, 3), 0.5)
    assert [r.name for r in rungs] == [
        "16-bit", "INT4", "+ FP8 shared expert", "+ INT8 head", "+ MTP-1", "+ MTP-2", "+ MTP-3", "+ quantised drafter",
        "+ prefix cache", "+ prompt compression",
    ]  # fmt: skip
    assert rungs[0].build == Build() and rungs[-1] == replace(rungs[-2], name="+ prompt compression", rate=0.5)
    assert rungs[7].build == BUILDS["hybrid"] and [r.k for r in rungs] == [0, 0, 0, 0, 1, 2, 3, 3, 3, 3]


def test_a_packed_checkpoint_keeps_its_weights_and_one_without_drafter_has_no_drafts() -> None:
    assert {r.build for r in techniques(True, (1, 3), 0.5)} == {None}
    assert [r.k for r in techniques(True, (1, 3), 0.5)] == [0, 1, 3, 3, 3]
    assert {r.k for r in techniques(False, (1, 2), 0.5, mtp=False)} == {0}


@dataclass
class Scripted:
    technique: Technique
    log: list[str]
    speeds: list[float] = field(default_factory=list)

    def sample(self) -> Sample:
        self.log.append(self.technique.name)
        speed = self.speeds.pop(0) if self.speeds else 100.0
        return replace(SAMPLE, tok_s=speed, ms_per_step=1e3 / speed)


def test_pairs_take_turns_and_the_gain_is_the_median_of_ratios_within_a_repeat() -> None:
    log: list[str] = []
    below = Scripted(Technique("a", None), log, [1.0, 100.0, 50.0, 10.0])  # the first is a warm-up; the machine slows
    here = Scripted(Technique("b", None), log, [1.0, 200.0, 100.0, 30.0])
    paired = Paired.run(here, below, 3)
    assert log == ["a", "b", "a", "b", "b", "a", "a", "b"]
    found = paired.fields()
    assert found["tok_s_over_below"] == {"median": 2.0, "low": 2.0, "high": 3.0}
    assert (found["tok_s"], found["tok_s_low"], found["tok_s_high"], found["repeats"]) == (100.0, 30.0, 200.0, 3)
    assert found["same_text"] == 1.0 and "acceptance" not in found


def test_the_bottom_rung_is_timed_alone_and_other_text_is_counted() -> None:
    alone = Paired.run(Scripted(Technique("a", None), []), None, 2).fields()
    assert "tok_s_over_below" not in alone and "same_text" not in alone
    two = replace(SAMPLE, said=((1, 2), (3, 4)))
    assert Paired((two,), (replace(two, said=((1, 2), (3, 5))),)).same_text == 0.5


def test_bytes_of_a_cpu_are_fp32_and_those_of_a_gpu_the_builds() -> None:
    spec = SHAPES["qwen3.5-35b-a3b"]
    step = step_bytes(spec, BUILDS["hybrid"], context=500, k=1)
    assert moved_bytes(spec, BUILDS["hybrid"], 1, 500, kv="fp32", unpacked=False) == (step.total, step.total)
    plain = step_bytes(spec, Build(), context=500, k=1)
    want = 2 * (plain.total - plain.state) + plain.state  # KV in fp32 is twice its 16 bits
    assert moved_bytes(spec, BUILDS["hybrid"], 1, 500, kv="fp32", unpacked=True) == pytest.approx((step.total, want))


def scripted_rung(monkeypatch: pytest.MonkeyPatch, text: list[int], loaded: object, name: str = "x") -> Any:
    monkeypatch.setattr(ladder, "self_check", lambda model, path, store: "finite logits")
    return SimpleNamespace(
        technique=Technique(name, None, k=1), loaded=loaded, path=Path("x"), short_text=lambda: list(text)
    )


def test_drafts_that_change_the_text_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = SimpleNamespace(model=None)
    below = scripted_rung(monkeypatch, [1, 2, 3], loaded, "plain")
    assert check(scripted_rung(monkeypatch, [1, 2, 3], loaded), below) == ["finite logits", "text of the rung below"]
    with pytest.raises(ladder.CheckFailed, match="differs from that of 'plain'"):
        check(scripted_rung(monkeypatch, [1, 2, 4], loaded, "+ MTP-1"), below)
    other = scripted_rung(monkeypatch, [9], SimpleNamespace(model=None))  # another build may say something else
    assert check(other, below) == ["finite logits"]


def test_a_failed_check_is_a_line_and_exit_status_3(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(rung: object, below: object) -> None:
        raise ladder.CheckFailed("as it is: wrong.")

    monkeypatch.setattr(ladder, "check", failing)
    with pytest.raises(SystemExit) as e:
        main(["--items", "1", "--document", "64", "--device", "cpu", "--out", str(tmp_path / "l.jsonl")])
    assert e.value.code == ladder.FAILED and "ladder check failed: as it is: wrong." in capsys.readouterr().err
    assert not (tmp_path / "l.jsonl").exists()


def test_two_rungs_of_the_bundled_model_are_two_lines(tmp_path: Path) -> None:
    out = tmp_path / "ladder.jsonl"
    size = "--items 1 --document 64 --chats 1 --max-tokens 4 --windows 1 --window 16 --repeats 1 --rungs 1,2"
    main([*size.split(), "--device", "cpu", "--out", str(out)])
    alone, drafted = (json.loads(line) for line in out.read_text().splitlines())
    assert alone["below"] is None and drafted["below"] == alone["rung"] == "as it is"
    assert drafted["same_text"] == 1.0 and drafted["same_logits"] and 0 < drafted["roof_share"] < 1
    assert drafted["commit"] and "threads" in drafted["device"] and "tok_s_over_below" not in alone


@pytest.mark.slow
def test_the_bundled_model_climbs_and_every_line_is_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ladder.jsonl"
    size = "--items 1 --document 200 --chats 1 --max-tokens 6 --windows 1 --window 32 --repeats 1 --rungs 1,6,7,8"
    main([*size.split(), "--device", "cpu", "--out", str(out)])
    records = [json.loads(line) for line in out.read_text().splitlines()]
    assert [r["rung"] for r in records] == ["as it is", "+ tq4 KV", "+ prefix cache", "+ prompt compression"]
    assert [r["below"] for r in records] == [None, *(r["rung"] for r in records[:-1])]
    for r in records:
        assert r["tok_s"] > 0 and r["ttft_ms"] > 0 and 0 < r["roof_share"] < 1 and r["repeats"] == 1
        assert r["held_as"] == "fp32, unpacked at load"
        assert r["commit"] and r["command"] and "threads" in r["device"] and r["checks"]
    bare, packed, cached, _ = records
    assert bare["kl"] == 0.0 and bare["top1"] == 1.0 and bare["kv"] == "fp32"
    assert packed["kl"] > 0 and packed["kl_below"] == packed["kl"] and packed["kv"] == "tq4"
    assert packed["kv_bytes_per_token"] < 0.2 * bare["kv_bytes_per_token"]
    assert cached["same_logits"] and cached["same_text"] == 1.0 and cached["kl"] == packed["kl"]
    assert 0 < cached["acceptance"] <= 1
    assert cached["checks"][1:] == ["text of the rung below", "text of a cached prompt"]
    assert records[3]["prompt_tokens"] < 0.8 * records[2]["prompt_tokens"]
    assert "+ prompt compression" in capsys.readouterr().out


def test_builds_of_a_16_bit_checkpoint_are_made_once_and_hold_what_their_rung_says(tmp_path: Path) -> None:
    make_twin(tmp_path / "base", hidden=128)
    tall = ladder.Ladder(tmp_path / "base", cast(Any, None), (), (), tmp_path / "builds", "cpu", 64, 1)
    found = {}
    for technique in techniques(False, (1,), 0.5):
        path = tall.path(technique)
        found[technique.name] = (path, set(load_model(path).report.formats))
    assert found["16-bit"][0] == tmp_path / "base" and found["16-bit"][1] <= {"bf16", "fp32"}
    assert "int4" in found["INT4"][1] and "fp8" not in found["INT4"][1]
    assert {"int4", "fp8"} <= found["+ FP8 shared expert"][1] and "int8" not in found["+ FP8 shared expert"][1]
    assert {"int4", "fp8", "int8"} <= found["+ INT8 head"][1]
    assert found["+ MTP-1"][0] == found["+ INT8 head"][0] != found["+ quantised drafter"][0]
    assert len({path for path, _ in found.values()}) == 5


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--repeats", "0"], "--repeats: must be at least 1, got 0"),
        (["--items", "-1"], "--items: must be at least 1, got -1"),
        (["--items", "many"], "--items: must be a whole number, got 'many'"),
        (["--rate", "nan"], "--rate: must be finite, got nan"),
        (["--rate", "0"], "--rate: must be above 0"),
        (["--drafts", "9"], "--drafts: must be 0 to 4 drafts, got 9"),
        (["--rungs", "99"], "--rungs: there are 8"),
        (["--prompt", "5"], "--prompt goes with --shape"),
        (["/no/such/folder"], "no such folder"),
        (["--text", "/no/such/file"], "no such file"),
        (["--shape", "qwen3.5-35b-a3b"], "--shape qwen3.5-35b-a3b needs a CUDA device"),
        (["--shape", "nothing"], "--shape: invalid choice"),
    ],
)
def test_a_bad_value_is_one_line_that_names_it(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ladder.torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as e:
        main(argv)
    err = capsys.readouterr().err
    assert e.value.code == 2 and says in err
    assert len([line for line in err.splitlines() if "packed already" not in line]) == 1


def test_numbers_with_commas_are_read_whole() -> None:
    assert values.counts("1,20") == (1, 20) and values.shares("0.5,1") == (0.5, 1.0)
    assert values.not_negative("0") == 0.0 and values.count_or_none("0") == 0
    for bad, read in (("0", values.positive), (",", values.counts), ("1.5", values.share), ("-1", values.not_negative)):
        with pytest.raises(values.Refused):
            read(bad)


@pytest.mark.parametrize("answer", ["35352137", "The product is 35,352,137.", "= 35.352.137!", "35 352 137"])
def test_a_right_product_is_seen_however_it_is_written(answer: str) -> None:
    assert product_is_right(answer)


@pytest.mark.parametrize("answer", ["", "35352138", "135352137", "353521370", "7823 * 4519"])
def test_a_wrong_product_is_not(answer: str) -> None:
    assert not product_is_right(answer)


def test_json_of_the_asked_shape_is_seen_bare_fenced_or_wrapped() -> None:
    rows = [{"name": f"n{i}", "age": i} for i in range(10)]
    for text in (json.dumps(rows), f"Here:\n```json\n{json.dumps(rows)}\n```", json.dumps({"employees": rows})):
        assert json_is_right(text)
    other = [*rows[:9], {"name": "n", "salary": 1}]
    for text in ("", "[1, 2]", json.dumps(rows[:9]), json.dumps(other), json.dumps(rows)[:-5], json.dumps([{}] * 10)):
        assert not json_is_right(text)


def test_the_protocol_has_five_prompts_with_the_published_caps() -> None:
    assert [p.max_tokens for p in FIVE_PROMPTS] == [256, 512, 1024, 64, 2048]


def test_the_table_shows_a_line_a_rung() -> None:
    whole = Paired((SAMPLE,), (SAMPLE,)).fields() | {"rung": "+ MTP-1", "weight_bytes": 2e9, "kl": 0.01, "top1": 0.9}
    speed_only = {k: v for k, v in whole.items() if "again" not in k and k not in ("kl", "top1")} | {"roof_share": 0.5}
    assert len(lines([whole, speed_only])) == 3 and "0.50" in lines([speed_only])[1]


def test_a_shape_climbs_without_a_gpu_and_its_lines_say_that_weights_and_drafts_are_made_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from functools import partial

    from onebox.bench import engine

    monkeypatch.setattr(engine, "decode", partial(engine.decode, steps=6))
    found = list(ladder.climb_shape("tiny", (2,), (1.0, 1.0), prompt=8, repeats=1, layers=4))
    assert [r["rung"] for r in found] == [
        "INT4", "+ FP8 shared expert", "+ INT8 head", "+ MTP-2", "+ quantised drafter",
    ]  # fmt: skip
    for r in found:
        assert r["weights"] == "random" and r["model"] == "tiny" and r["roof_share"] is None
        assert "kl" not in r and "recall" not in r and "plain PyTorch" in r["checks"] and "unpacked" in r["held_as"]
    assert [r["tokens_per_step"] for r in found] == [1, 1, 1, 3, 3]
    assert found[3]["forced_acceptance"] == [1.0, 1.0] and found[3]["below"] == "+ INT8 head"
    assert [a["bytes_per_step"] > b["bytes_per_step"] for a, b in pairwise(found[:3])] == [True, True]
