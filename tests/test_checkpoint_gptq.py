"""Calibrated INT4: error is fed forward, Hessians are those of the model's own inputs, and the output is nearer."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import pytest
import torch
from checkpoints import VOCAB, make_twin, write
from serving import TINY

from onebox.bench.quality import agreement
from onebox.checkpoint.autoround import quantize_int4
from onebox.checkpoint.gptq import gptq_quantizer, quantize_gptq
from onebox.checkpoint.reader import WeightReader
from onebox.checkpoint.scheme import Scheme
from onebox.checkpoint.tuning import TunedLevels, count_long
from onebox.checkpoint.verify import verify
from onebox.checkpoint.write import BuildOptions, build
from onebox.errors import CheckpointError, ConfigError
from onebox.kernels.weights import dequantize
from onebox.ledger import Build
from onebox.model.calibrate import Calibration, calibration_label, read_windows
from onebox.model.layers import rms_norm
from onebox.model.load import load_model

INT4 = Build(experts="int4", attention="int4", gdn="int4")


def windows(seed: int, count: int, length: int) -> list[torch.Tensor]:
    """Tokens with a skewed distribution, as text has."""
    g = torch.Generator().manual_seed(seed)
    weights = 1.0 / torch.arange(1, VOCAB + 1)
    return [torch.multinomial(weights, length, replacement=True, generator=g) for _ in range(count)]


@pytest.mark.parametrize("group", [32, 128])
def test_error_fed_forward_lowers_the_error_of_the_product(group: int) -> None:
    g = torch.Generator().manual_seed(1)
    mix = torch.randn(256, 256, generator=g) @ torch.diag(torch.rand(256, generator=g) ** 4)
    x, w = torch.randn(2000, 256, generator=g) @ mix, torch.randn(96, 256, generator=g)
    fed, nearest = quantize_gptq(w, x.T @ x / len(x), group), quantize_int4(w, group)
    errors = [float(((dequantize(q) - w) @ x.T).norm()) for q in (fed, nearest)]
    assert errors[0] < 0.75 * errors[1]
    assert fed.group == group and fed.zero is None


def test_uncorrelated_inputs_leave_plain_rounding() -> None:
    w = torch.randn(8, 128)
    fed = quantize_gptq(w, torch.eye(128), 128)
    nearest = quantize_int4(w, 128)
    assert torch.equal(fed.q, nearest.q) and torch.equal(fed.scale, nearest.scale)


def test_hessians_are_of_the_inputs_and_do_not_depend_on_the_order_of_questions(tmp_path: Path) -> None:
    twin = make_twin()
    write(twin, tmp_path)
    text = windows(0, 3, 100)
    calibration = Calibration(tmp_path, text)
    norm = twin.tensors["layers.0.input_layernorm.weight"]
    x = rms_norm(torch.cat([twin.tensors["embed_tokens.weight"].float()[t] for t in text]), norm, 1e-6)
    got = calibration.hessian("layers.0.linear_attn.in_proj_qkv")
    assert got is not None and torch.allclose(got, x.T @ x / len(x), atol=1e-4)
    names = ["layers.3.self_attn.o_proj", "layers.1.mlp.experts.2.down_proj", "mtp.layers.0.mlp.experts.1.up_proj"]
    asked = {name: calibration.hessian(name) for name in names}
    for name in reversed(names):
        again, before = Calibration(tmp_path, text).hessian(name), asked[name]
        assert before is not None and again is not None and torch.equal(again, before), name
    assert calibration.hessian("lm_head") is None and calibration.hessian("layers.0.mlp.gate") is None


def test_expert_that_calibration_hardly_meets_is_rounded_to_nearest(tmp_path: Path) -> None:
    write(make_twin(), tmp_path)
    assert Calibration(tmp_path, windows(0, 1, 20)).hessian("layers.0.mlp.experts.0.up_proj") is None


def test_calibrated_build_is_nearer_to_its_source_than_a_rounded_one(tmp_path: Path) -> None:
    src = str(tmp_path / "src")
    write(make_twin(3), tmp_path / "src")
    calibration = Calibration(src, windows(1, 8, 256))
    build(src, tmp_path / "rtn", BuildOptions(recipe=INT4))
    options = BuildOptions(recipe=INT4, calibration="test")
    build(src, tmp_path / "gptq", options, quantizer=gptq_quantizer(calibration.hessian))
    with torch.inference_mode():
        reference = load_model(src).model
        fresh = windows(2, 3, 128)
        rtn, gptq = (agreement(reference, load_model(tmp_path / d).model, fresh).kl for d in ("rtn", "gptq"))
    assert gptq < 0.8 * rtn


def test_text_of_another_models_tokenizer_is_refused(tmp_path: Path) -> None:
    write(make_twin(), tmp_path)
    with pytest.raises(ConfigError, match=f"token {VOCAB}.*vocab_size is {VOCAB}"):
        Calibration(tmp_path, [torch.tensor([1, VOCAB])])


def test_inputs_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(CheckpointError, match="other text"):
        quantize_gptq(torch.randn(8, 128), torch.full((128, 128), float("nan")), 128)


def test_calibration_text_is_checked_and_cut_into_windows(tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    tokenizer = Tokenizer(WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "a b a b a"}\n{"text": "b b"}\n')
    cut = [w.tolist() for w in read_windows(text, tmp_path / "tokenizer.json", window=3)]
    assert cut == [[0, 1, 0], [1, 0], [1, 1]]
    before = calibration_label(text)
    text.write_text('{"txt": "a"}\n')
    assert calibration_label(text) != before
    with pytest.raises(ConfigError, match="line 1"):
        read_windows(text, tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match="tokenizer"):
        read_windows(text, tmp_path / "none.json")
    with pytest.raises(ConfigError, match=r"text\.jsonl: no tokenizer"):
        read_windows(text, text)
    text.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="calibration text"):
        read_windows(text, tmp_path / "tokenizer.json")
    with pytest.raises(ConfigError, match=r"nowhere\.jsonl"):
        calibration_label(tmp_path / "nowhere.jsonl")


# --- levels tuned by the auto-round library ---


def tuned(tmp_path: Path, ends: list[str]) -> TunedLevels:
    """A Quantizer whose library is a checkpoint of another twin, and which notes how often it ran."""

    def tune(base: Path, text: Path, group: int, out: Path) -> Path:
        ends.append(base.name)
        write(make_twin(9), out / "model", "autoround", mtp="side")
        return out / "model"

    return TunedLevels(tmp_path / "src", tmp_path / "text", 128, "label", tmp_path / "work", tune)


def test_tuned_levels_are_taken_bit_for_bit_and_the_rest_is_rounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("onebox.checkpoint.hybrid.CHUNK_ELEMENTS", 64 * 128)  # several chunks of rows a matrix
    src, ends = str(tmp_path / "src"), list[str]()
    write(make_twin(3), tmp_path / "src", "bf16-fused")
    quantizer = tuned(tmp_path, ends)
    build(src, tmp_path / "out", BuildOptions(recipe="hybrid", calibration="test"), quantizer=quantizer)
    want = write(make_twin(9), tmp_path / "same", "autoround").meaning
    reader = WeightReader.open(tmp_path / "out")
    for name in ("layers.0.linear_attn.in_proj_qkv", "layers.2.mlp.experts.3.up_proj", "layers.3.self_attn.q_proj"):
        assert torch.equal(dequantize(reader.read_module(name)), want[name]), name
    assert quantizer.left == {n for n in reader.modules if n.startswith("mtp.") and reader.scheme(n).kind == "int4"} | {
        "layers.3.self_attn.o_proj"
    }
    assert ends == ["src"] and not quantizer.taken & quantizer.left
    quantizer.clean()
    assert not (tmp_path / "work").exists()


def test_tuning_is_done_once_for_a_build_and_again_when_it_was_cut_short(tmp_path: Path) -> None:
    ends: list[str] = []
    name, w, scheme = "layers.0.linear_attn.out_proj", torch.zeros(128, 128), Scheme("int4", 128)
    (tmp_path / "work" / "library").mkdir(parents=True)  # a run that was killed
    assert tuned(tmp_path, ends)(name, 0, w, scheme) is not None
    assert tuned(tmp_path, ends)(name, 0, w, scheme) is not None and len(ends) == 1
    other = tuned(tmp_path, ends)
    other.label = "another build"
    assert other(name, 0, w, scheme) is not None and len(ends) == 2
    assert tuned(tmp_path, ends)(name, 0, w, Scheme("int4", 64)) is None, "levels of another group"


def test_folder_with_other_files_is_no_place_for_tuning(tmp_path: Path) -> None:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match="other files"):
        tuned(tmp_path, [])("layers.0.linear_attn.out_proj", 0, torch.zeros(128, 128), Scheme("int4", 128))
    assert (tmp_path / "work" / "notes.txt").read_text() == "mine"


def test_library_that_is_not_there_is_said_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "version", absent)
    with pytest.raises(ConfigError, match="pip install auto-round"):
        calibration_label(tmp_path / "text", "auto-round")
    with pytest.raises(ConfigError, match="Known: gptq, auto-round"):
        calibration_label(tmp_path / "text", "awq")


def test_only_texts_that_are_long_enough_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("onebox.checkpoint.tuning.LENGTH", 5)
    text = tmp_path / "text.jsonl"
    text.write_text('{"text": "one two three four five six"}\n{"text": "one"}\n')
    assert count_long(text, TINY / "tokenizer.json") == 1
    text.write_text('{"text": "one"}\n')
    with pytest.raises(ConfigError, match=r"text\.jsonl: no line has 5 tokens"):
        count_long(text, TINY / "tokenizer.json")


@pytest.mark.slow
def test_build_tuned_by_the_library_itself_is_near_its_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("auto_round", reason="pip install auto-round")
    from onebox.cli import main

    for name, value in {"ITERATIONS": 2, "LENGTH": 128}.items():
        monkeypatch.setattr(f"onebox.checkpoint.tuning.{name}", value)
    src, out = tmp_path / "src", tmp_path / "out"
    build(str(TINY), src, BuildOptions(recipe="bf16"))
    calibration = Path(__file__).parent / "data" / "calibration.jsonl"
    with pytest.raises(SystemExit) as ended:
        main(["build", str(src), "--out", str(out), "--calibrate", str(calibration), "--calibrate-with", "auto-round"])
    said = capfd.readouterr()
    assert not ended.value.code, said.err[-2000:]
    assert "auto-round tuned" in said.out and not (tmp_path / "out.auto-round").exists()
    verify(out, str(src))
    with torch.inference_mode():
        reference, tokens = load_model(src).model, windows(4, 2, 128)
        assert agreement(reference, load_model(out).model, tokens).top1 > 0.8
