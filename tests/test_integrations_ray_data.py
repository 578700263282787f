"""Ray Data: `onebox batch --ray` and `onebox compress --ray` keep each result once, whoever dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from serving import TINY, saying

with warnings.catch_warnings():  # its own use of others
    warnings.simplefilter("ignore")
    ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'onebox[ray]'")

    from onebox.integrations.ray_data import Spread, over_cluster

from onebox.batch.command import batch
from onebox.batch.run import Limits
from onebox.config import EngineConfig
from onebox.prompt import bulk
from onebox.prompt.bulk import Settings, compress_file, in_here
from onebox.server.serve import ServeOptions

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]
QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled"}
STORY = "The lighthouse of Varrow was kept by Ines Okafor. Ships came by every day. The tea was cold. "


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    here = Path(__file__).parent
    path = os.pathsep.join([str(here.parent), str(here), os.environ.get("PYTHONPATH", "")])
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**QUIET, "PYTHONPATH": path}.items():
            patch.setenv(name, value)
        ray.init(
            "local",
            num_cpus=2,
            num_gpus=0,
            include_dashboard=False,
            log_to_driver=False,
            object_store_memory=100 * 2**20,
            logging_level="ERROR",
        )
        try:
            yield
        finally:
            ray.shutdown()


def write(path: Path, n: int) -> Path:
    lines = []
    for i in range(n):
        body = {"messages": [{"role": "user", "content": f"Say {i}."}], "max_tokens": 4, "temperature": 0}
        lines.append({"custom_id": f"r{i}", "method": "POST", "url": "/v1/chat/completions", "body": body})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    return path


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()]


class DiesOnce:
    """Makes engines; the process of one of them is killed at its tenth request."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __call__(self, config: EngineConfig) -> Any:
        engine = saying("hm</think>Hello", step_s=0.01, max_num_seqs=config.max_num_seqs)
        script = engine.script

        def counted(request: Any) -> Any:
            if len(engine.requests) >= 10 and not self.mark.exists():
                self.mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return script(request)

        engine.script = counted
        return engine


def test_a_worker_that_is_killed_costs_no_result_and_no_second_one(cluster, tmp_path):
    source, out, mark = write(tmp_path / "in.jsonl", 100), tmp_path / "out.jsonl", tmp_path / "died"
    options = ServeOptions(engine=EngineConfig(str(TINY), max_num_seqs=4), port=0, drain_s=1, api_keys=("k",))
    spread = Spread("local", options, Limits(pause_s=0.05), 2, DiesOnce(mark))
    said: list[str] = []
    assert batch(source, out, spread, spread.limits, say=said.append, quiet=True) == 0, said
    assert mark.exists()
    assert Counter(row["custom_id"] for row in rows(out)) == {f"r{i}": 1 for i in range(100)}
    assert {row["response"]["body"]["choices"][0]["message"]["content"] for row in rows(out)} == {"Hello"}
    before = out.read_bytes()
    assert batch(source, out, spread, spread.limits, say=said.append, quiet=True) == 0 and out.read_bytes() == before


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_compression_over_processes_is_what_one_process_makes(cluster, tmp_path, monkeypatch, suffix):
    monkeypatch.setattr(bulk, "PART_ROWS", 16)
    source, how = tmp_path / f"in{suffix}", Settings(rate=0.5)
    texts = [f"Row {i}. {STORY * 3}" for i in range(100)]
    if suffix == ".jsonl":
        source.write_text("".join(json.dumps({"id": i, "prompt": text}) + "\n" for i, text in enumerate(texts)))
    else:
        pq.write_table(pa.table({"id": range(100), "prompt": texts}), source)
    here, there = tmp_path / f"here{suffix}", tmp_path / f"there{suffix}"
    assert compress_file(source, here, how, in_here(how), lambda _: None) == 0
    work = over_cluster("local", how)

    def cut(parts):
        for _, done in zip(range(3), work(parts), strict=False):
            yield done
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compress_file(source, there, how, cut, lambda _: None)
    assert len(list((tmp_path / f"there{suffix}.parts").glob(f"*{suffix}"))) == 3
    assert compress_file(source, there, how, work, lambda _: None) == 0
    if suffix == ".jsonl":
        assert there.read_bytes() == here.read_bytes()
    else:
        assert pq.read_table(there).equals(pq.read_table(here)) and pq.read_table(there).num_rows == 100


def started(*argv: Any) -> subprocess.Popen[str]:
    words = [sys.executable, "-m", "onebox.cli", "batch", *map(str, argv), "--ray", "local", "--max-num-seqs", "8"]
    here = Path(__file__).parent.parent
    environment = {**os.environ, **QUIET, "PYTHONPATH": str(here)}
    return subprocess.Popen(words, stderr=subprocess.PIPE, text=True, env=environment, cwd=here)


def test_the_command_killed_twice_and_resumed_has_each_result_once(tmp_path):
    source, out = write(tmp_path / "in.jsonl", 500), tmp_path / "out.jsonl"
    for least in (60, 200):
        process = started(source, out)
        while not out.exists() or out.read_bytes().count(b"\n") < least:
            assert process.poll() is None, process.communicate()
            time.sleep(0.05)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        assert out.read_bytes().count(b"\n") < 500
    process = started(source, out)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    assert Counter(row["custom_id"] for row in rows(out)) == {f"r{i}": 1 for i in range(500)}
    assert all(row["response"]["status_code"] == 200 for row in rows(out))


def test_an_address_where_no_cluster_is_ends_in_one_line(tmp_path):
    source = write(tmp_path / "in.jsonl", 1)
    argv = [sys.executable, "-m", "onebox.cli", "batch", source, tmp_path / "o.jsonl", "--ray", "127.0.0.1:1"]
    environment = {**os.environ, **QUIET, "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run(list(map(str, argv)), capture_output=True, text=True, env=environment, timeout=120)
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == 1 and "no Ray cluster answers there" in last and "Traceback" not in done.stderr, (
        done.stderr
    )
