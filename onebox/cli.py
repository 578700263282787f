"""The command line: parse, call one function, print. A user's mistake is one line on stderr and a non-zero exit."""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import onebox
from onebox.bench import command as bench_command
from onebox.config import MAX_DRAFT_LEN, EngineConfig, bundled_model, environment_keys, upstream_key
from onebox.errors import ConfigError, OneboxError

if TYPE_CHECKING:
    from onebox.engine.client import EngineClient

app = typer.Typer(
    name="onebox",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(bench_command.app, name="bench")
REPEATED = ("--served-model-name", "--api-key", "--allowed-origins")  # vLLM takes several values after one flag
MTP_METHODS = ("mtp", "qwen3_next_mtp", "qwen3_5_mtp", "qwen3_5_moe_mtp")
DEFAULT_URL = "http://127.0.0.1:8000"


def expand_repeated(argv: Sequence[str]) -> list[str]:
    """`--flag a b` as `--flag a --flag b`, for the flags that take several values in vLLM's spelling."""
    out: list[str] = []
    flag, seen = "", 0
    for arg in argv:
        if arg.startswith("-"):
            flag, seen = arg, 0
        elif flag in REPEATED:
            seen += 1
            if seen > 1:
                out.append(flag)
        out.append(arg)
    return out


def json_object(text: str | None, flag: str) -> dict[str, Any]:
    if not text:
        return {}
    try:
        value = json.loads(text)
    except ValueError as e:
        raise ConfigError(f"{flag} must be a JSON object: {e}.") from e
    if not isinstance(value, dict):
        raise ConfigError(f"{flag} must be a JSON object, got {text[:80]}.")
    return value


def json_list(values: Sequence[str]) -> list[str]:
    """Values as given, or a JSON list of them, which is how vLLM takes some flags."""
    if len(values) == 1 and values[0].startswith("["):
        try:
            found = json.loads(values[0])
        except ValueError as e:
            raise ConfigError(f"not a JSON list: {values[0][:80]} ({e}).") from e
        return [str(value) for value in found]
    return list(values)


def speculation(text: str | None, adaptive: bool = False) -> dict[str, Any]:
    """EngineConfig's fields of a --speculative-config. Raises ConfigError for another drafter."""
    if not text:
        return {"adaptive_drafts": adaptive}
    config = json_object(text, "--speculative-config")
    method, n = config.get("method", "mtp"), config.get("num_speculative_tokens", 2)
    if method not in (*MTP_METHODS, "ngram"):
        known = ", ".join((*MTP_METHODS, "ngram"))
        raise ConfigError(f"--speculative-config: method {method!r} is not served; known: {known}.")
    lookup = {"prompt_lookup_max": "lookup_max", "prompt_lookup_min": "lookup_min"}
    known_fields = {"method", "num_speculative_tokens", "model", "draft_tensor_parallel_size", "adaptive", *lookup}
    if unknown := set(config) - known_fields:
        raise ConfigError(f"--speculative-config: unknown field {', '.join(sorted(unknown))}.")
    for name in ("num_speculative_tokens", *lookup):
        value = config.get(name, 2)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"--speculative-config: {name} must be a whole number, got {value!r}.")
    if not 0 <= n <= MAX_DRAFT_LEN:
        raise ConfigError(f"--speculative-config: num_speculative_tokens must be 0 to {MAX_DRAFT_LEN}, got {n}.")
    if not isinstance(config.get("adaptive", False), bool):
        raise ConfigError(f"--speculative-config: adaptive must be true or false, got {config['adaptive']!r}.")
    found: dict[str, Any] = {"draft_len": n, "adaptive_drafts": adaptive or config.get("adaptive", False)}
    if method == "ngram":
        longest = config.get("prompt_lookup_max", max(config.get("prompt_lookup_min", 2), 4))
        found |= {"draft_method": "ngram", "lookup_max": longest}
        found["lookup_min"] = config.get("prompt_lookup_min", min(2, longest))
    return found


def kv_format_of(name: str) -> str:
    """--kv-cache-dtype as EngineConfig spells it; vLLM's names for the same formats are taken too."""
    return {"bfloat16": "bf16", "fp8_e4m3": "fp8"}.get(name, name)


def length(text: str | None, flag: str = "--max-model-len") -> int | None:
    """A number of tokens as vLLM writes it: 32768, 32k (thousands), 32K (1024s); auto or -1 for the model's own."""
    if text is None or text in ("auto", "-1"):
        return None
    scale = {"k": 1000, "K": 1024, "m": 10**6, "M": 2**20}.get(text[-1:], 1)
    digits = text if scale == 1 else text[:-1]
    try:
        return int(float(digits) * scale)
    except (ValueError, OverflowError) as e:
        raise ConfigError(f"{flag} must be a number of tokens such as 32768 or 32k, got {text!r}.") from e


def make_engine(config: EngineConfig) -> EngineClient:
    """The engine in its own process, unless the config says otherwise."""
    if config.single_process:
        from onebox.engine.thread import ThreadEngine

        return ThreadEngine(config)
    from onebox.engine.process import ProcessEngine

    return ProcessEngine(config)


def say(line: str) -> None:
    typer.echo(line, err=True)


def note_unneeded(given: dict[str, object]) -> None:
    for flag, value in given.items():
        if value not in (None, False):
            say(f"note: {flag} is not needed here and changes nothing")


def read_text(file: str) -> str:
    """A file's text, or standard input's for `-`. Raises ConfigError."""
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as e:
        raise ConfigError(f"{file}: cannot be read as UTF-8 text ({e}).") from e


def resolve_model(model: str | None, flag: str | None) -> str:
    if model and flag and model != flag:
        raise ConfigError(f"two models given, {model!r} and --model {flag!r}; give one.")
    return model or flag or bundled_model()


Model = Annotated[str | None, typer.Argument(help="Checkpoint folder. Left out: the bundled test model.")]
MaxModelLen = Annotated[str | None, typer.Option(help="Longest prompt plus answer: 32768, 32k, auto.")]
Speculative = Annotated[
    str | None,
    typer.Option(help='JSON, e.g. \'{"method":"mtp","num_speculative_tokens":2}\'; 0 tokens: off.', metavar="JSON"),
]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")]
KvCacheDtype = Annotated[
    str, typer.Option(help="KV pages: auto (as --dtype), bf16, fp8, k8v4, tq4, tq3.5, tq3 or tq2.5.")
]
KvGb = Annotated[float | None, typer.Option(help="GB of KV pages; left out: what the plan has over.")]
Utilization = Annotated[float | None, typer.Option(help="Share of the device's memory that all of it may use.")]
Floor = Annotated[float | None, typer.Option(help="GB to leave free; on unified memory 8 if not given.")]
Ray = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="Ray cluster that does the work, such as ray://host:10001; local begins one."),
]
SnapshotHostGb = Annotated[float, typer.Option(help="GB of host memory for prefix-cache states.")]
KvHostGb = Annotated[
    float, typer.Option(help="GB of host memory for KV pages of prefixes that were not used for long.")
]


@app.command()
def serve(
    model: Model = None,
    model_flag: Annotated[str | None, typer.Option("--model", help="As MODEL.", hidden=True)] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 for any free port.")] = 8000,
    served_model_name: Annotated[list[str] | None, typer.Option(help="Names in /v1/models; the first answers.")] = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[int, typer.Option(help="Answers at a time.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Prompt tokens a step at most.")] = 2048,
    max_waiting: Annotated[int, typer.Option(help="Requests waiting beyond those, before 429.")] = 256,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    state_dtype: Annotated[str, typer.Option(help="Recurrent states: float32, or bfloat16 on a CPU.")] = "float32",
    kv_gb: KvGb = None,
    gpu_memory_utilization: Utilization = None,
    memory_floor_gb: Floor = None,
    snapshot_host_gb: SnapshotHostGb = 0.0,
    kv_host_gb: KvHostGb = 0.0,
    speculative_config: Speculative = None,
    adaptive_drafts: Annotated[
        bool, typer.Option("--adaptive-drafts", help="Draft less where it does not pay.")
    ] = False,
    draft_vocab: Annotated[
        int | None, typer.Option(help="Draft from the first so many tokens alone: a cheaper drafter, the same text.")
    ] = None,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Reuse of shared prompt beginnings.")] = True,
    enable_chunked_prefill: Annotated[bool, typer.Option(help="Accepted; always on.")] = True,
    kv_cache_dtype: KvCacheDtype = "auto",
    prefill_attention: Annotated[
        str, typer.Option(help="dense; minference: sparse patterns in long prompts; auto: where they pay.")
    ] = "dense",
    sparse_from: Annotated[int | None, typer.Option(help="Tokens of a prompt below which attention is dense.")] = None,
    sparse_table: Annotated[
        str | None, typer.Option(metavar="FILE", help="Patterns a head, of onebox bench sparse-search.")
    ] = None,
    prefill_kernels: Annotated[
        bool | None, typer.Option(help="Prompts through Triton kernels on CUDA. Default: where a trial at start works.")
    ] = None,
    reasoning_parser: Annotated[str, typer.Option(help="qwen3, or none.")] = "qwen3",
    enable_auto_tool_choice: Annotated[bool, typer.Option(help="Accepted; tools are served anyway.")] = True,
    tool_call_parser: Annotated[str, typer.Option(help="qwen3_coder, qwen3_xml, hermes, or none.")] = "qwen3_coder",
    chat_template: Annotated[str | None, typer.Option(help="File to use in place of the model's.")] = None,
    default_chat_template_kwargs: Annotated[
        str | None, typer.Option(help="JSON, e.g. '{\"enable_thinking\": false}'.", metavar="JSON")
    ] = None,
    generation_config: Annotated[str, typer.Option(help="auto, vllm, or a folder.")] = "auto",
    override_generation_config: Annotated[str | None, typer.Option(metavar="JSON")] = None,
    api_key: Annotated[list[str] | None, typer.Option(help="Keys to ask for; also ONEBOX_API_KEY.")] = None,
    api_key_file: Annotated[str | None, typer.Option(help="File of keys, one a line.")] = None,
    allowed_origins: Annotated[list[str] | None, typer.Option(help="Origins of pages that may call; none.")] = None,
    response_store: Annotated[str, typer.Option(metavar="PATH", help="SQLite file of stored responses.")] = ":memory:",
    upstream: Annotated[
        str | None, typer.Option(metavar="URL", help="Serve in front of this server; no model is loaded.")
    ] = None,
    upstream_timeout: Annotated[float, typer.Option(help="Seconds without a byte from it before 504.")] = 600.0,
    self_check: Annotated[bool, typer.Option(help="Refuse a model whose numbers are wrong.")] = True,
    single_process: Annotated[bool, typer.Option(help="Run the engine in a thread of the server.")] = False,
    stall_s: Annotated[float, typer.Option(help="Seconds a step may take before the engine is restarted.")] = 60.0,
    log_level: Annotated[str, typer.Option("--log-level", "--uvicorn-log-level")] = "info",
    log_format: Annotated[str, typer.Option(help="text, or json: one object a line.")] = "text",
    enable_log_requests: Annotated[bool, typer.Option(help="Write prompts into the log.")] = False,
    drain_s: Annotated[
        float, typer.Option("--drain-s", "--shutdown-timeout", help="Seconds to finish answers.")
    ] = 30.0,
    compress_over: Annotated[int | None, typer.Option(help="Shorten longer prompts to this many tokens.")] = None,
    compress_method: Annotated[str, typer.Option(help="auto, llmlingua, longllmlingua or llmlingua2.")] = "auto",
    compress_model: Annotated[str | None, typer.Option(help="Scorer of other methods; the bundled model.")] = None,
    guard: Annotated[str | None, typer.Option(help="annotate, flag or block prompts that look like attacks.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option("--tensor-parallel-size", "-tp", hidden=True)] = 1,
    pipeline_parallel_size: Annotated[int, typer.Option(hidden=True)] = 1,
    moe_backend: Annotated[str | None, typer.Option(hidden=True)] = None,
    attention_backend: Annotated[str | None, typer.Option(hidden=True)] = None,
    load_format: Annotated[str | None, typer.Option(hidden=True)] = None,
    quantization: Annotated[str | None, typer.Option(hidden=True)] = None,
    trust_remote_code: Annotated[bool, typer.Option(hidden=True)] = False,
    enforce_eager: Annotated[bool, typer.Option(hidden=True)] = False,
    language_model_only: Annotated[bool, typer.Option(hidden=True)] = False,
    async_scheduling: Annotated[bool | None, typer.Option(hidden=True)] = None,
    disable_log_requests: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Serve a model over the OpenAI API. Flags are vLLM's."""
    from onebox.server.intake import IntakeOptions
    from onebox.server.serve import ServeOptions, UpstreamOptions, all_keys, serve_upstream
    from onebox.server.serve import serve as run

    if tensor_parallel_size != 1 or pipeline_parallel_size != 1:
        raise ConfigError("--tensor-parallel-size and --pipeline-parallel-size must be 1: one device is served.")
    note_unneeded(
        {
            "--no-enable-chunked-prefill": not enable_chunked_prefill,
            "--moe-backend": moe_backend,
            "--attention-backend": attention_backend,
            "--load-format": load_format,
            "--quantization": quantization,
            "--trust-remote-code": trust_remote_code,
            "--enforce-eager": enforce_eager,
            "--language-model-only": language_model_only,
            "--async-scheduling": async_scheduling,
            "--disable-log-requests": disable_log_requests,
        }
    )
    http: dict[str, Any] = {
        "host": host,
        "port": port,
        "api_keys": all_keys(api_key or (), api_key_file, environment_keys()),
        "allowed_origins": tuple(json_list(allowed_origins or ())),
        "log_level": log_level,
        "log_format": log_format,
        "log_prompts": enable_log_requests,
        "drain_s": drain_s,
        "intake": IntakeOptions(
            compress_over=compress_over,
            method=compress_method,  # type: ignore[arg-type]  # IntakeOptions refuses unknown names
            scorer=compress_model,
            guard=guard,  # type: ignore[arg-type]
        ),
    }
    if log_format != "json":
        say(f"onebox {onebox.__version__}")
    if upstream is not None:
        if model or model_flag:
            raise ConfigError(f"--upstream {upstream} serves that server's model; leave {model or model_flag!r} out.")
        serve_upstream(UpstreamOptions(upstream, upstream_key(), upstream_timeout, **http), say=say)
        return
    options = ServeOptions(
        engine=EngineConfig(
            model=resolve_model(model, model_flag),
            device=device,
            dtype=dtype,
            state_dtype=state_dtype,
            max_model_len=length(max_model_len),
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_waiting=max_waiting,
            **speculation(speculative_config, adaptive_drafts),
            draft_vocab=draft_vocab,
            kv_cache_dtype=kv_format_of(kv_cache_dtype),
            prefill_attention=prefill_attention,
            sparse_from=sparse_from,
            sparse_table=sparse_table,
            prefill_kernels=prefill_kernels,
            kv_gb=kv_gb,
            gpu_memory_utilization=gpu_memory_utilization,
            memory_floor_gb=memory_floor_gb,
            snapshot_host_gb=snapshot_host_gb,
            kv_host_gb=kv_host_gb,
            prefix_caching=enable_prefix_caching,
            self_check=self_check,
            single_process=single_process,
            stall_s=stall_s,
        ),
        served_names=tuple(served_model_name or ()),
        generation_config=generation_config,
        override_generation_config=json_object(override_generation_config, "--override-generation-config"),
        reasoning_parser=reasoning_parser,
        tool_parser=tool_call_parser if enable_auto_tool_choice else "none",
        chat_template=chat_template,
        template_options=json_object(default_chat_template_kwargs, "--default-chat-template-kwargs"),
        response_store=response_store,
        **http,
    )
    run(options, make_engine, say=say)


@app.command()
def plan(
    model: Model = None,
    device: Device = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16, float16.")] = "auto",
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[int, typer.Option(help="Answers at a time.")] = 16,
    max_num_batched_tokens: Annotated[int, typer.Option(help="Prompt tokens a step at most.")] = 2048,
    kv_cache_dtype: KvCacheDtype = "auto",
    kv_gb: KvGb = None,
    gpu_memory_utilization: Utilization = None,
    memory_floor_gb: Floor = None,
    snapshot_host_gb: SnapshotHostGb = 0.0,
    kv_host_gb: KvHostGb = 0.0,
    speculative_config: Speculative = None,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Reuse of shared prompt beginnings.")] = True,
    box: Annotated[
        str | None, typer.Option(help="A machine you do not have: dgx-spark, rtx-pro-6000, h200, ...")
    ] = None,
    context: Annotated[str | None, typer.Option(help="With --box: tokens of each user; 4096, 32K.")] = None,
    users: Annotated[int | None, typer.Option(help="With --box: answers at a time.")] = None,
    build: Annotated[str | None, typer.Option(help="With --box: hybrid, int4, fp8, nvfp4, ...; else by name.")] = None,
    k: Annotated[int | None, typer.Option(help="With --box: drafts a step; left out: the best.")] = None,
    acceptance: Annotated[str | None, typer.Option(help="With --box: drafts kept, by position: 0.9,0.8,0.7.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="As one JSON object.")] = False,
) -> None:
    """Show where `serve` with these flags would put memory, from the checkpoint's headers alone.

    With --box: what that machine would do with the model, before anything is downloaded. MODEL may then be a folder, a
    hub id or a shape's name (qwen3.5-122b-a10b).
    """
    if box is not None:
        refuse_with_box(
            {
                "--device": device != "auto",
                "--dtype": dtype != "auto",
                "--max-model-len": max_model_len,
                "--max-num-seqs": max_num_seqs != 16,
                "--speculative-config": speculative_config,
                "--kv-cache-dtype": kv_cache_dtype != "auto",
                "--kv-gb": kv_gb,
                "--snapshot-host-gb": snapshot_host_gb,
                "--kv-host-gb": kv_host_gb,
            }
        )
        plan_box(
            resolve_model(model, None),
            box,
            context=4096 if (tokens := length(context, "--context")) is None else tokens,
            users=1 if users is None else users,
            build=build,
            k=k,
            acceptance=acceptance,
            as_json=as_json,
            max_num_batched_tokens=max_num_batched_tokens,
            gpu_memory_utilization=gpu_memory_utilization,
            memory_floor_gb=memory_floor_gb,
            prefix_caching=enable_prefix_caching,
        )
        return
    for flag, value in (("--context", context), ("--users", users), ("--build", build), ("--k", k)):
        if value is not None:
            raise ConfigError(f"{flag} goes with --box; see 'onebox plan --help'.")
    if model is not None and not Path(model).is_dir():
        from onebox.engine.forecast import Subject
        from onebox.ledger import BOXES

        Subject.of(model)
        raise ConfigError(f"{model} is not a folder here; name a machine: --box {'|'.join(BOXES)}.")
    import torch

    from onebox.engine.plan import plan_for, table

    config = EngineConfig(
        model=resolve_model(model, None),
        device=device,
        dtype=dtype,
        max_model_len=length(max_model_len),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        **speculation(speculative_config),
        kv_cache_dtype=kv_format_of(kv_cache_dtype),
        kv_gb=kv_gb,
        gpu_memory_utilization=gpu_memory_utilization,
        memory_floor_gb=memory_floor_gb,
        snapshot_host_gb=snapshot_host_gb,
        kv_host_gb=kv_host_gb,
        prefix_caching=enable_prefix_caching,
    ).resolve_device(cuda_devices=torch.cuda.device_count())
    found = plan_for(config)
    for note in found.notes:
        say(f"note: {note}")
    if as_json:
        typer.echo(json.dumps(found.json(), indent=1))
    elif sys.stdout.isatty():
        table(found, sys.stdout)
    else:
        for line in found.lines():
            typer.echo(line)


def refuse_with_box(given: dict[str, object]) -> None:
    for flag, value in given.items():
        if value:
            raise ConfigError(f"{flag} is about this machine; with --box say --context, --users, --build and --k.")


def plan_box(
    model: str,
    box: str,
    *,
    context: int,
    users: int,
    build: str | None,
    k: int | None,
    acceptance: str | None,
    as_json: bool,
    **engine: Any,
) -> None:
    from onebox.engine.forecast import ACCEPTANCE, Subject, forecast, show

    try:
        kept = tuple(float(a) for a in acceptance.split(",")) if acceptance else ACCEPTANCE
    except ValueError as e:
        raise ConfigError(f"--acceptance must be numbers such as 0.9,0.8, got {acceptance!r}.") from e
    subject = Subject.of(model, build)
    config = EngineConfig(subject.name, **engine)
    made = forecast(subject, box, context=context, users=users, k=k, acceptance=kept, config=config)
    if as_json:
        typer.echo(json.dumps(made.json(), indent=1))
    else:
        show(made, sys.stdout)


@app.command()
def build(
    source: Annotated[str | None, typer.Argument(help="Base: a folder, or a repository of the model hub.")] = None,
    out: Annotated[str | None, typer.Option("--out", "-o", help="Folder to write.")] = None,
    recipe: Annotated[str | None, typer.Option(help="Build to make; left out: the best one for the base.")] = None,
    format_: Annotated[str, typer.Option("--format", help="onebox, or auto-round for stock engines.")] = "onebox",
    donor: Annotated[
        str | None, typer.Option("--fp8-from", "--donor", help="FP8 checkpoint to take dense matrices from.")
    ] = None,
    mtp: Annotated[str, typer.Option(help="Drafter: recipe, keep, drop, or a format.")] = "recipe",
    group: Annotated[int, typer.Option(help="Columns an INT4 scale serves: 32, 64 or 128.")] = 128,
    calibrate: Annotated[
        str | None, typer.Option(metavar="FILE", help="Text to calibrate INT4 with: JSON lines with a 'text'.")
    ] = None,
    calibrate_with: Annotated[str, typer.Option(help="gptq, or auto-round where that library is installed.")] = "gptq",
    shard_gb: Annotated[float, typer.Option(help="Largest file, in GB.")] = 4.0,
    revision: Annotated[str | None, typer.Option(help="Commit of a hub repository.")] = None,
    donor_revision: Annotated[
        str | None, typer.Option("--fp8-revision", "--donor-revision", help="Commit of the donor.")
    ] = None,
    vision: Annotated[bool, typer.Option(help="Keep the vision tower's tensors.")] = True,
    verify: Annotated[
        str | None, typer.Option(metavar="DIR", help="Check a finished build, against SOURCE when given.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Show the plan and write nothing.")] = False,
    verbose: Annotated[bool, typer.Option("--verbose", help="List every tensor of the plan.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No bars.")] = False,
) -> None:
    """Make a hybrid checkpoint from a 16-bit or packed one. Started again after a kill, it goes on."""
    if verify is not None:
        verify_build(verify, source, revision, quiet=quiet)
        return
    if not source or (not out and not dry_run):
        raise ConfigError(f"{'--out' if source else 'SOURCE'} is missing; see 'onebox build --help'.")
    if format_ not in ("onebox", "auto-round"):
        raise ConfigError(f"--format {format_!r} is not known. Known: onebox, auto-round.")
    if format_ == "auto-round" and (recipe not in (None, "int4") or donor or mtp not in ("recipe", "keep", "drop")):
        raise ConfigError("--format auto-round is INT4 and 16-bit; leave out --recipe, --fp8-from and --mtp.")

    from onebox.checkpoint.progress import progress
    from onebox.checkpoint.tuning import TunedLevels
    from onebox.checkpoint.write import BuildOptions, Quantizer, prepare, room
    from onebox.checkpoint.write import run as write
    from onebox.model.calibrate import calibration_label, quantizer_for
    from onebox.model.complete import check_complete

    if not 0 < shard_gb < 1e6:
        raise ConfigError(f"--shard-gb must be above 0, got {shard_gb}.")
    options = BuildOptions(
        recipe="int4" if format_ == "auto-round" else recipe,
        mtp=mtp,
        group=group,
        vision=vision,
        shard_bytes=max(int(shard_gb * 1e9), 1),
        revision=revision,
        donor=donor,
        donor_revision=donor_revision,
        calibration=calibration_label(Path(calibrate), calibrate_with) if calibrate else None,
    )
    prepared = prepare(source, options)
    check_complete(prepared.base.path, mtp=mtp != "drop")
    for line in (*(prepared.plan.lines() if verbose else ()), *prepared.summary()):
        typer.echo(line)
    if dry_run:
        typer.echo(room(prepared, out or "."))
        typer.echo(f"about {prepared.seconds():.0f} s to build" + (", and the calibration" if calibrate else ""))
        return
    assert out is not None
    quantizer: Quantizer | None = None
    if calibrate and calibrate_with == "auto-round":
        work = Path(f"{Path(out).resolve()}.auto-round")
        quantizer = TunedLevels(prepared.base.path, Path(calibrate), group, prepared.identity(), work)
    elif calibrate:
        quantizer = quantizer_for(prepared.base.path, Path(calibrate))
    with progress(prepared.plan.nbytes, "build", quiet=quiet) as bars:
        result = write(prepared, out, progress=bars, quantizer=quantizer)
    if isinstance(quantizer, TunedLevels):
        typer.echo(
            f"auto-round tuned {len(quantizer.taken)} INT4 matrices, {len(quantizer.left)} are rounded to nearest"
        )
        quantizer.clean()
    worst = max(result.errors.items(), key=lambda entry: entry[1], default=None)
    typer.echo(
        f"{result.path}: {prepared.plan.nbytes / 1e6:.1f} MB"
        + (f"; largest error {worst[1]:.4f} ({worst[0]})" if worst else "")
    )


def verify_build(path: str, source: str | None, revision: str | None, *, quiet: bool) -> None:

    from onebox.checkpoint import manifest
    from onebox.checkpoint.progress import progress
    from onebox.checkpoint.verify import verify
    from onebox.model.complete import check_complete

    total = sum(entry["bytes"] for entry in manifest.files(Path(path)).values())
    with progress(total, "verify", quiet=quiet) as bars:
        report = verify(path, source, revision, progress=bars)
    check_complete(path)
    for line in report.lines():
        typer.echo(line)


@app.command()
def chat(
    model: Model = None,
    url: Annotated[str, typer.Option(help="Server to talk to; with none there, one is started here.")] = DEFAULT_URL,
    message: Annotated[list[str] | None, typer.Option("--message", "-m", help="Ask this; repeatable.")] = None,
    system: Annotated[str | None, typer.Option(help="System message.")] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Longest answer.")] = None,
    temperature: Annotated[float | None, typer.Option()] = None,
    thinking: Annotated[bool, typer.Option(help="Let the model think before it answers.")] = True,
    api_key: Annotated[str, typer.Option(help="Key of the server.")] = "none",
    speculative_config: Speculative = None,
    max_model_len: MaxModelLen = None,
    device: Device = "auto",
) -> None:
    """Chat in the terminal, with tokens a second and the share of drafts kept after each answer."""
    from onebox.server import terminal
    from onebox.server.serve import ServeOptions, in_background

    params: dict[str, Any] = {"max_tokens": max_tokens, "temperature": temperature}
    params = {k: v for k, v in params.items() if v is not None}
    if not thinking:
        params["extra_body"] = {"chat_template_kwargs": {"enable_thinking": False}}
    url = url.rstrip("/").removesuffix("/v1")
    lines = message if message else typed_lines()
    if model is None and terminal.reachable(url):
        terminal.chat(url, lines, api_key=api_key, system=system, **params)
        return
    if model is None and url != DEFAULT_URL:
        raise ConfigError(f"{url}: no server answers there; start one with 'onebox serve', or leave --url out.")
    options = ServeOptions(
        engine=EngineConfig(
            model=resolve_model(model, None),
            device=device,
            max_model_len=length(max_model_len),
            **speculation(speculative_config),
        ),
        port=0,
        drain_s=1,
    )
    with in_background(options, make_engine, say=say) as (here, name):
        terminal.chat(here, lines, model=name, system=system, **params)


@app.command()
def batch(
    source: Annotated[Path, typer.Argument(metavar="INPUT", help="Requests in OpenAI's batch format, one a line.")],
    output: Annotated[Path | None, typer.Argument(metavar="[OUTPUT]", help="As --out.", show_default=False)] = None,
    out: Annotated[Path | None, typer.Option("--out", "-o", help="File of results; what it holds is skipped.")] = None,
    errors: Annotated[Path | None, typer.Option(help="File of bad lines; left out: OUT.errors.jsonl.")] = None,
    base_url: Annotated[
        str | None, typer.Option(metavar="URL", help="Server that answers; left out: MODEL, in here.")
    ] = None,
    api_key: Annotated[str | None, typer.Option(help="Its key; also ONEBOX_API_KEY.")] = None,
    concurrency: Annotated[int | None, typer.Option(help="Requests at a time; twice --max-num-seqs, or 16.")] = None,
    attempts: Annotated[int, typer.Option(help="Tries of a request that fails for no fault of its own.")] = 5,
    timeout: Annotated[float, typer.Option(help="Seconds without a byte before a try has failed.")] = 3600.0,
    patience: Annotated[float, typer.Option(help="Seconds that the server may be away before the run ends.")] = 300.0,
    retry_failed: Annotated[bool, typer.Option("--retry-failed", help="Try results without an answer again.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
    ray: Ray = None,
    ray_workers: Annotated[int | None, typer.Option(min=1, help="Engines there; left out: one a GPU.")] = None,
    model: Annotated[str | None, typer.Option(help="Checkpoint folder. Left out: the bundled test model.")] = None,
    served_model_name: Annotated[list[str] | None, typer.Option(help="Names that requests may ask for.")] = None,
    max_model_len: MaxModelLen = None,
    max_num_seqs: Annotated[int, typer.Option(help="Answers at a time.")] = 16,
    device: Device = "auto",
    kv_gb: KvGb = None,
    gpu_memory_utilization: Utilization = None,
    memory_floor_gb: Floor = None,
    speculative_config: Speculative = None,
    reasoning_parser: Annotated[str, typer.Option(help="qwen3, or none.")] = "qwen3",
    tool_call_parser: Annotated[str, typer.Option(help="qwen3_coder, qwen3_xml, hermes, or none.")] = "qwen3_coder",
    default_chat_template_kwargs: Annotated[
        str | None, typer.Option(help="JSON, e.g. '{\"enable_thinking\": false}'.", metavar="JSON")
    ] = None,
) -> None:
    """Answer a file of requests, each once; started again after whatever ended it, it goes on.

    Exit status 3: done, and some line or answer is an error.
    """
    from onebox.batch.command import batch as run
    from onebox.batch.run import Limits
    from onebox.server.serve import ServeOptions, in_background

    if output is not None and out is not None:
        raise ConfigError(f"two files for the results, {output} and --out {out}; give one.")
    out = output or out
    if out is None:
        raise ConfigError("--out is missing: the file of results; see 'onebox batch --help'.")
    engine: dict[str, Any] = {
        "max_model_len": length(max_model_len),
        "max_num_seqs": None if max_num_seqs == 16 else max_num_seqs,
        "device": None if device == "auto" else device,
        "kv_gb": kv_gb,
        "gpu_memory_utilization": gpu_memory_utilization,
        "memory_floor_gb": memory_floor_gb,
        **(speculation(speculative_config) if speculative_config else {}),
    }
    engine = {name: value for name, value in engine.items() if value is not None}
    limits = Limits(concurrency or (16 if base_url else 2 * max_num_seqs), attempts, timeout, patience)
    if base_url is not None:
        flags = {"model": model, "served_model_name": served_model_name, "ray": ray, "ray_workers": ray_workers}
        if given := [*engine, *(name for name, value in flags.items() if value)]:
            raise ConfigError(f"--{given[0].replace('_', '-')} is for a model in here; leave it out beside --base-url.")
        if api_key is None:
            api_key = next(iter(environment_keys()), None)
        server: Any = lambda: nullcontext((base_url, api_key))  # noqa: E731
    else:
        key = secrets.token_hex(16)  # the port is for this process alone
        options = ServeOptions(
            engine=EngineConfig(resolve_model(model, None), max_waiting=max(256, limits.concurrency), **engine),
            port=0,
            drain_s=1,
            api_keys=(key,),
            served_names=tuple(served_model_name or ()),
            reasoning_parser=reasoning_parser,
            tool_parser=tool_call_parser,
            template_options=json_object(default_chat_template_kwargs, "--default-chat-template-kwargs"),
        )

        @contextmanager
        def served() -> Iterator[tuple[str, str]]:
            with in_background(options, make_engine, say=say) as (url, _):
                yield url, key

        server = served
        if ray is not None:
            from onebox.integrations.ray_data import Spread

            server = Spread(ray, options, limits, ray_workers)
    fix = "change 'model' in the file" + ("" if base_url else ", or give --served-model-name NAME")
    code = run(source, out, server, limits, errors=errors, retry_failed=retry_failed, quiet=quiet, fix=fix, say=say)
    if code:
        raise typer.Exit(code)


@app.command()
def compress(
    file: Annotated[str, typer.Argument(help="Text file, or - for standard input.")] = "-",
    rate: Annotated[float | None, typer.Option(help="Output over input tokens; 0.5 if no target is given.")] = None,
    target_tokens: Annotated[
        int | None, typer.Option(help="Never more tokens than this, and within 5 % of it.")
    ] = None,
    question: Annotated[
        str | None, typer.Option(help="Keep what helps to answer this; not added to the output.")
    ] = None,
    method: Annotated[str, typer.Option(help="auto, llmlingua, longllmlingua or llmlingua2.")] = "auto",
    model: Annotated[str | None, typer.Option(help="Scorer: folder or id. Left out: the bundled model.")] = None,
    html: Annotated[str | None, typer.Option(help="Write a heat map of what stayed and why.")] = None,
    jsonl: Annotated[bool, typer.Option("--jsonl", help="One JSON object a line with a field 'prompt'.")] = False,
    out: Annotated[Path | None, typer.Option(help="FILE's rows, .jsonl or .parquet, with one column shorter.")] = None,
    column: Annotated[str, typer.Option(help="That column, with --out.")] = "prompt",
    ray: Ray = None,
) -> None:
    """Shorten a prompt: text in, shorter text out; the summary goes to stderr.

    With --out, a file of any size, kept part by part; the same command goes on where it was ended. Exit status 3: done,
    and some rows have an error.
    """
    from onebox.prompt import command

    if rate is None and target_tokens is None:
        rate = 0.5
    if out is not None:
        if html:
            raise ConfigError("--html draws one prompt; leave out --out.")
        raise typer.Exit(compress_rows(Path(file), out, ray, column, method, model, rate, target_tokens, question))
    if ray is not None or column != "prompt":
        raise ConfigError(f"--{'ray' if ray else 'column'} is for files of rows; name the output with --out FILE.")
    compressor = command.build_compressor(method, model)
    options = {"rate": rate, "target_tokens": target_tokens, "question": question}
    text = read_text(file)
    if jsonl:
        if html:
            raise ConfigError("--html draws one prompt; leave out --jsonl.")
        rows = [line for line in text.splitlines() if line.strip()]
        with command.progress_bar("prompts", len(rows)) as advance:
            for done, line in enumerate(command.compress_lines(rows, compressor, **options), 1):
                sys.stdout.write(line + "\n")
                sys.stdout.flush()
                advance(done, len(rows))
        say(f"{len(rows)} prompts by {compressor.method} ({compressor.scorer.name})")
        return
    with command.progress_bar("characters", len(text), from_=100_000) as advance:
        result, summary = command.compress_text(text, compressor, progress=advance, **options)
    sys.stdout.write(result.text)
    if sys.stdout.isatty() and result.text and not result.text.endswith("\n"):
        sys.stdout.write("\n")
    sys.stdout.flush()
    if html:
        command.write_html(result, html)
    say(summary)


def compress_rows(source: Path, out: Path, ray: str | None, *settings: Any) -> int:
    """The exit status."""
    from onebox.prompt import bulk

    how = bulk.Settings(*settings)
    work = bulk.in_here(how)
    if ray is not None:
        from onebox.integrations.ray_data import over_cluster

        work = over_cluster(ray, how)
    errors = bulk.compress_file(source, out, how, work, say)
    say(f"{source} -> {out}" + (f"; {errors} rows have an error" if errors else ""))
    return 3 if errors else 0


@app.command()
def guard(
    file: Annotated[str, typer.Argument(help="Text, or messages as JSON; - for standard input.")] = "-",
    policy: Annotated[
        str, typer.Option(help="annotate: add the intention to the system prompt; flag; or block.")
    ] = "flag",
    threshold: Annotated[
        float | None, typer.Option(help="Score from which a text is flagged; the detector's own if not given.")
    ] = None,
    detector: Annotated[str, typer.Option(help="head (needs its encoder), phrases, or auto.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="The verdict as one JSON object.")] = False,
) -> None:
    """Score a prompt for injection and say what it asks for. Exit status 3 when flag or block applies."""
    from onebox.prompt import guard_command

    ready = guard_command.build_guard(policy, threshold, detector)
    text = read_text(file)
    verdict = ready.check(guard_command.parse(text))
    typer.echo(guard_command.shown(verdict, as_json=as_json))
    if guard_command.status(verdict):
        raise typer.Exit(guard_command.status(verdict))


@app.command()
def doctor(
    model: Model = None,
    device: Device = "auto",
    host: Annotated[str, typer.Option(help="Address a server would listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port it would listen on.")] = 8000,
    self_test: Annotated[bool, typer.Option(help="Load the model and let it answer.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object.")] = False,
) -> None:
    """Look at this machine: what keeps models from being served, or slow, and what helps. Exit status 3: a problem."""
    from onebox.doctor import FAILED, examine, report

    if not 1 <= port < 65536:
        raise ConfigError(f"--port must be between 1 and 65535, got {port}.")
    findings = []
    for finding in examine(resolve_model(model, None), device=device, host=host, port=port, self_test=self_test):
        findings.append(finding)
        if not as_json:
            typer.echo("\n".join(finding.lines()))
    made = report(findings, onebox.__version__)
    if as_json:
        typer.echo(json.dumps(made, indent=1))
    if not made["ok"]:
        raise typer.Exit(FAILED)


def typed_lines() -> Iterator[str]:
    """What the user types, or what is piped in, until it ends."""
    interactive = sys.stdin.isatty()
    while True:
        if interactive:
            typer.echo("> ", nl=False, err=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"onebox {onebox.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Serve Qwen3.5 / Qwen3.6 mixture-of-experts models from one box."""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point. Exit codes: 0 done, 1 the command failed, 2 the command line is wrong, 130 interrupted;
    `guard` adds 3, flagged, `doctor` 3, a problem found, `batch` and `compress` 3, not all was done.
    """
    args = expand_repeated(sys.argv[1:] if argv is None else argv)
    try:
        code = app(args or ["--help"], standalone_mode=False)
    except OneboxError as e:
        fail(" ".join(str(e).split()), 1)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except OSError as e:
        if e.filename is None:
            raise
        fail(f"{e.filename}: {e.strerror or e}", 1)
    except Exception as e:
        # typer's usage errors carry the message for the user and an exit code; anything else is a bug.
        if not hasattr(e, "format_message"):
            raise
        fail(e.format_message(), getattr(e, "exit_code", 2))
    sys.exit(code if isinstance(code, int) else 0)


def fail(message: str, code: int) -> None:
    """One line, and one that a name in a file cannot make into commands of the terminal."""
    message = "".join(c if c.isprintable() else "?" for c in message)
    typer.echo(f"onebox: error: {message}", err=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
