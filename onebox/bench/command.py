"""Bodies of `onebox bench`: every benchmark by name, each with the options of its own module.

A module that parses its own arguments is passed what follows its name; the ones with typer options stand below.
"""

from __future__ import annotations

import sys
from importlib import import_module

import typer

# name -> what `onebox bench --help` says; the module of that name has a `main` that reads the command line
MODULES = {
    "decode": "a decode step as one CUDA graph, random weights",
    "kernels": "every kernel of a step against its byte floor",
    "engine": "greedy decoding through the engine on a GPU",
    "efficiency": "what plan expects of the engine, from its measured steps",
    "quality": "a build against its reference: KL, top-1, needles",
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
    import_module(f"onebox.bench.{name}").main()


def _register(name: str, text: str) -> None:
    # its own parser answers --help
    passed = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": list[str]()}

    def command(context: typer.Context) -> None:
        run_module(name, context.args)

    app.command(name, help=text, context_settings=passed, add_help_option=False)(command)


for _name, _text in MODULES.items():
    _register(_name, _text)
