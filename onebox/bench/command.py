"""Bodies of `onebox bench`: every benchmark by name, each with the options of its own module.

A module that parses its own arguments is passed what follows its name; the ones with typer options stand below.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from onebox.errors import ConfigError

# name -> what `onebox bench --help` says; the module of that name has a `main` that reads the command line
MODULES = {
    "decode": "a decode step as one CUDA graph, random weights",
    "kernels": "every kernel of a step against its byte floor",
    "engine": "greedy decoding through the engine on a GPU",
    "efficiency": "what plan expects of the engine, from its measured steps",
    "ladder": "one rung a technique, timed with the rung below",
    "report": "result lines -> docs/results.md and charts",
    "quality": "a build against its reference: KL, top-1, needles",
    "sparse-search": "a sparse prefill pattern for every head",
    "scbench": "SCBench: questions about one context, by turns and requests",
    "chat": "greedy chat answers: how many are right",
    "drafters": "drafters side by side on the same chats",
    "state": "16-bit recurrent states against fp32 ones",
    "reuse": "time to the first token, cold and again",
    "overhead": "what the server adds to an engine that is free",
    "soak": "a server under rude clients, and what it leaks",
}

app = typer.Typer(
    help="Measure something: print it, and append a JSON line to results/.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


def run_module(name: str, args: list[str]) -> None:
    """`onebox.bench.NAME`'s own main, as if it were the program."""
    sys.argv = [f"onebox bench {name}", *args]
    import_module(f"onebox.bench.{name.replace('-', '_')}").main()


def _register(name: str, text: str) -> None:
    # its own parser answers --help
    passed = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": list[str]()}

    def command(context: typer.Context) -> None:
        run_module(name, context.args)

    app.command(name, help=text, context_settings=passed, add_help_option=False)(command)


for _name, _text in MODULES.items():
    _register(_name, _text)


@app.command()
def serve(
    url: Annotated[str, typer.Option(help="Server to measure, with or without /v1.")] = "http://127.0.0.1:8000",
    scenario: Annotated[list[str] | None, typer.Option(help="Name, repeatable; left out: single.")] = None,
    list_: Annotated[bool, typer.Option("--list", help="Show the scenarios and stop.")] = False,
    model: Annotated[str | None, typer.Option(help="Left out: the first in /v1/models.")] = None,
    endpoint: Annotated[str, typer.Option(help="chat or completions.")] = "chat",
    api_key: Annotated[str | None, typer.Option(help="Key of the server.")] = None,
    rate: Annotated[float | None, typer.Option(help="Poisson arrivals a second, in place of a closed loop.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Clients of the closed loop.")] = None,
    requests: Annotated[int | None, typer.Option(help="Requests, or chats of the scenario agent.")] = None,
    input_tokens: Annotated[int | None, typer.Option(help="Prompt tokens, of each turn of a chat.")] = None,
    output_tokens: Annotated[int | None, typer.Option(help="Answer tokens.")] = None,
    shared_tokens: Annotated[int | None, typer.Option(help="Tokens that all prompts begin with.")] = None,
    prefill_tokens: Annotated[int | None, typer.Option(help="Long prompts of the scenario mixed.")] = None,
    turns: Annotated[int | None, typer.Option(help="Turns of a chat.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="JSON lines with a prompt or question, for random words.")
    ] = None,
    thinking: Annotated[bool, typer.Option(help="Leave thinking on, where the template has it.")] = True,
    tokenizer: Annotated[Path | None, typer.Option(help="Folder to count tokens with, if usage is silent.")] = None,
    warmup: Annotated[int | None, typer.Option(help="Requests before; left out: a client each, 8 at most.")] = None,
    repeats: Annotated[int, typer.Option(help="Runs, a line each, with other prompts.")] = 1,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    slo: Annotated[str | None, typer.Option(help="Goodput within ms: ttft:2000,itl:50,e2e:60000.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds without a byte.")] = 600.0,
    label: Annotated[str | None, typer.Option(help="What this server is, for the result line.")] = None,
    compare: Annotated[
        tuple[Path, Path] | None, typer.Option(help="Measure nothing: two result files side by side.", metavar="A B")
    ] = None,
    out: Annotated[Path, typer.Option(help="Where the lines go.")] = Path("results/serving.jsonl"),
) -> None:
    """serving scenarios against any OpenAI-compatible server"""
    from onebox.bench import tables, values
    from onebox.bench.serving import SCENARIOS, Scenario, Slo

    if list_:
        for s in SCENARIOS.values():
            typer.echo(f"{s.name:14} {s.what}")
        return
    if compare is not None:
        found = tables.pairs(tables.read(compare[0]), tables.read(compare[1]))
        tables.show_pairs(found, [path.stem for path in compare], sys.stdout)
        return
    names = scenario or ["single"]
    if unknown := [n for n in names if n not in SCENARIOS]:
        raise ConfigError(f"--scenario {unknown[0]!r} is not known. Known: {', '.join(SCENARIOS)}.")
    try:
        values.output(str(out))
    except values.Refused as e:
        raise ConfigError(f"--out {e}") from e
    if endpoint not in ("chat", "completions"):
        raise ConfigError(f"--endpoint must be chat or completions, got {endpoint!r}.")
    if rate is not None and concurrency is not None:
        raise ConfigError("--rate is for Poisson arrivals and --concurrency for a closed loop; give one.")
    if rate is not None and not 0 < rate < float("inf"):
        raise ConfigError(f"--rate must be above 0 requests a second, got {rate:g}.")
    changes = {  # flag -> field of Scenario, value, least
        "--concurrency": ("concurrency", concurrency, 1),
        "--requests": ("sessions", requests, 1),
        "--input-tokens": ("input_tokens", input_tokens, 1),
        "--output-tokens": ("output_tokens", output_tokens, 1),
        "--shared-tokens": ("shared", shared_tokens, 0),
        "--prefill-tokens": ("prefill_tokens", prefill_tokens, 0),
        "--turns": ("turns", turns, 1),
        "--repeats": (None, repeats, 1),
        "--warmup": (None, warmup, 0),
    }
    for flag, (_, n, least) in changes.items():
        if n is not None and n < least:
            raise ConfigError(f"{flag} must be at least {least}, got {n}.")
    if not 0 < timeout < float("inf"):
        raise ConfigError(f"--timeout must be above 0 seconds, got {timeout:g}.")
    given: dict[str, Any] = {name: n for name, n, _ in changes.values() if name is not None and n is not None}

    def altered(s: Scenario) -> Scenario:
        return replace(s, **given)

    _measure(
        [altered(SCENARIOS[n]) for n in names],
        url.rstrip("/").removesuffix("/v1"),
        model,
        {"endpoint": endpoint, "api_key": api_key, "timeout_s": timeout, "thinking": thinking},
        {"rate": rate, "warmup": warmup, "slo": Slo.parse(slo) if slo else None, "texts": _texts(prompts)},
        tokenizer,
        repeats,
        seed,
        label,
        out,
    )


def _measure(
    scenarios: list[Any],
    url: str,
    model: str | None,
    target_options: dict[str, Any],
    run_options: dict[str, Any],
    tokenizer: Path | None,
    repeats: int,
    seed: int,
    label: str | None,
    out: Path,
) -> None:
    import torch

    from onebox.bench import record, tables
    from onebox.bench.serving import Target, probe, run_scenario

    name, version = _server(url, model, target_options["api_key"])
    target = Target(url, name, **target_options)
    if tokenizer is not None:
        target = replace(target, count=_counter(tokenizer))
    target = asyncio.run(probe(target))
    for s in scenarios:
        for i in range(repeats):
            with _progress(s.name) as done:
                line = asyncio.run(run_scenario(target, s, seed=seed + i, done=done, **run_options))
            line = line | ({"server": label or version} if label or version else {})
            record.append(out, line | record.environment(torch.device("cpu")))
            tables.show(line, sys.stdout)
            if line["failed"] == line["requests"]:
                kind, message = next(iter(line["failure_examples"].items()))
                raise ConfigError(f"{s.name}: all {line['requests']} requests failed: {kind}: {message}")


def _server(url: str, model: str | None, api_key: str | None) -> tuple[str, str | None]:
    """The model to ask for, and what the server says it is. Raises ConfigError."""
    import httpx

    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        answer = httpx.get(f"{url}/v1/models", headers=headers, timeout=10)
        answer.raise_for_status()
        models = [str(m["id"]) for m in answer.json()["data"]]
    except httpx.HTTPStatusError as e:
        status = e.response.status_code
        why = {401: "is the key right (--api-key)?", 403: "is the key right (--api-key)?"}
        starting = "it is starting, or cannot serve; try again once it is ready"
        hint = why.get(status, starting if status >= 500 else "is this an OpenAI-compatible server?")
        raise ConfigError(f"{url}/v1/models: HTTP {status}; {hint}") from e
    except httpx.HTTPError as e:
        raise ConfigError(f"{url}: no server answers ({e}); start one with 'onebox serve'.") from e
    except (ValueError, KeyError, TypeError) as e:
        raise ConfigError(f"{url}/v1/models: not a list of models; is this an OpenAI-compatible server?") from e
    if model is None and not models:
        raise ConfigError(f"{url}/v1/models lists no model; name one with --model.")
    version = None
    with contextlib.suppress(httpx.HTTPError, ValueError, AttributeError):
        version = httpx.get(f"{url}/version", headers=headers, timeout=5).json().get("version")
    return model or models[0], f"version {version}" if version else None


def _counter(folder: Path) -> Callable[[str], int]:
    from tokenizers import Tokenizer

    path = folder / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(f"{path}: no such file; --tokenizer is a folder with a tokenizer.json.")
    tokenizer = Tokenizer.from_file(str(path))
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False).ids)


def _texts(path: Path | None) -> list[str]:
    import json

    if path is None:
        return []
    try:
        lines = [json.loads(line) for line in path.read_text("utf-8").splitlines() if line.strip()]
        return [str(line.get("prompt") or line["question"]) for line in lines]
    except (OSError, ValueError, KeyError, AttributeError) as e:
        raise ConfigError(f"{path}: must be JSON lines with a 'prompt' or a 'question' ({e}).") from e


@contextlib.contextmanager
def _progress(name: str) -> Iterator[Callable[[int, int], None]]:
    """A bar on stderr where that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda n, of: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(name, total=None)
        yield lambda n, of: bars.update(task, completed=n, total=of)
