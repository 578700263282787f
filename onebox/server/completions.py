"""OpenAI's chat completions and completions: a checked body in, response objects or stream chunks out. No web imports.

Policy where the API leaves a choice: an answer without visible text has content "", and null only beside tool calls.
Token counts leave out the end-of-text token. `max_tokens` beyond what the context has room for is cut to that room.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import onebox
from onebox.errors import RequestError
from onebox.request import INT64, Request, SamplingParams, TokenLogprob
from onebox.server.answers import Job, Prompt, Service, Steering, new_id
from onebox.server.chat import Answer, AnswerDelta, AnswerUsage, Tokenizer, normalize_messages
from onebox.server.grammars import Asked, answer_grammar
from onebox.server.intake import Report
from onebox.server.parsers import CALL, THINK_END, AnswerParser, CallDelta
from onebox.server.protocol import ChatBody, ChatMessage, CompletionBody, GenerationBody

FINGERPRINT = f"onebox-{onebox.__version__}"
LEAST_LOGPROB = -9999.0  # OpenAI's stand-in for minus infinity, which JSON cannot say


@dataclass(frozen=True)
class Run:
    """A request ready to run: its jobs, one an answer, and what its responses say of it."""

    id: str
    model: str
    prompts: tuple[Prompt, ...]
    jobs: tuple[Job, ...]
    n: int  # answers a prompt; answer i belongs to prompt i // n
    body: GenerationBody
    created: int = field(default_factory=lambda: int(time.time()))
    report: Report | None = None  # what compression and guard did to the prompt

    def usage(self) -> dict[str, Any]:
        prompt_tokens = sum(len(p.ids) for p in self.prompts)
        cached = sum(job.answer.usage.cached_tokens for job in self.jobs[:: self.n])
        return usage_json(prompt_tokens, cached, [job.answer.usage for job in self.jobs]) | self.intake_usage()

    @property
    def headers(self) -> dict[str, str]:
        return self.report.headers() if self.report else {}

    def intake_usage(self) -> dict[str, Any]:
        return self.report.usage() if self.report else {}

    def usage_of(self, index: int) -> dict[str, Any]:
        """Usage of one answer so far, for continuous_usage_stats."""
        usage = self.jobs[index].answer.usage
        return usage_json(len(self.prompts[index // self.n].ids), usage.cached_tokens, [usage])


def usage_json(prompt_tokens: int, cached: int, answers: Sequence[AnswerUsage]) -> dict[str, Any]:
    completion = sum(a.completion_tokens for a in answers)
    accepted = sum(a.accepted for a in answers)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion,
        "total_tokens": prompt_tokens + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(a.reasoning_tokens for a in answers),
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": sum(a.drafted for a in answers) - accepted,
        },
    }


async def prepare_chat(service: Service, body: ChatBody) -> Run:
    """Everything that can be refused is refused here, before the first byte. Raises RequestError."""
    service.check_ready()
    model = service.model_name(body.model)
    tools, forced = chosen_tools(service, body)
    body, report = await taken_in(service, body)
    prompt = await chat_prompt(service, body, tools)
    longest = body.max_completion_tokens or body.max_tokens
    params = body.sampling(
        max_tokens=service.room(len(prompt.ids), longest),
        vocab=service.engine.info.vocab,
        logprobs=body.n_logprobs(),
        defaults=service.defaults,
    )
    id, n = new_id("chatcmpl"), body.n or 1
    steering = None if body.thinking_token_budget is None else Steering(body.thinking_token_budget)
    one_call = body.parallel_tool_calls is False or isinstance(body.tool_choice, dict)
    asked = answer_grammar(body.grammar(), tools, forced, service.tokenizer.encode, parallel=not one_call)
    if asked is not None and prompt.thinking == "open":
        after = tuple(service.tokenizer.encode(THINK_END))
        asked = replace(asked, grammar=replace(asked.grammar, start_after=after))
    jobs = []
    for i in range(n):
        parser = service.parser(prompt.thinking, tools, held=asked is not None)
        job = make_job(service, body, id, i, prompt, params, parser=parser, asked=asked)
        job.answer.max_calls = 1 if one_call else None
        if asked is not None and len(call := service.tokenizer.encode(CALL)) == 1:
            job.answer.call_token, job.answer.begins_after = call[0], asked.grammar.start_after or ()
        jobs.append(replace(job, steering=steering))
    return Run(id, model, (prompt,), tuple(jobs), n, body, report=report)


async def taken_in(service: Service, body: ChatBody) -> tuple[ChatBody, Report | None]:
    """The body with its messages guarded and shortened as it, or the server, asks. Raises RequestError."""
    if not service.intake.wanted(body.compress, body.guard):
        return body, None
    messages = normalize_messages([m.model_dump(exclude_unset=True) for m in body.messages])
    messages, report = await service.intake.messages(messages, body.compress, body.guard)
    return body.model_copy(update={"messages": [ChatMessage.model_validate(m) for m in messages]}), report


async def chat_prompt(service: Service, body: ChatBody, tools: Sequence[Mapping[str, Any]]) -> Prompt:
    return await service.chat_prompt(
        [m.model_dump(exclude_unset=True) for m in body.messages],
        tools=tools,
        options=body.template_options(),
        add_generation_prompt=body.add_generation_prompt is not False,
        continue_final=bool(body.continue_final_message),
    )


async def prepare_completion(service: Service, body: CompletionBody) -> Run:
    """As prepare_chat, for plain prompts."""
    service.check_ready()
    model = service.model_name(body.model)
    n = body.n or 1
    if body.best_of not in (None, n):
        raise RequestError("Unsupported field 'best_of': answers are not ranked; use 'n'.", param="best_of")
    if body.echo and body.n_logprobs() is not None:
        raise RequestError("'echo' with 'logprobs': log probabilities are given for the answer only.", param="echo")
    given, report = body.prompts(), None
    if service.intake.wanted(body.compress, body.guard):
        if len(given) == 1 and isinstance(given[0], str):
            text, report = await service.intake.text(given[0], body.compress, body.guard)
            given = [text]
        elif body.compress or body.guard:  # what the server does by itself is for prompts it can read
            raise RequestError("'compress' and 'guard' need one prompt of text.", param="prompt")
    prompts = tuple([await service.text_prompt(p, param="prompt") for p in given])
    id = new_id("cmpl")
    jobs: list[Job] = []
    asked = body.grammar()
    for prompt in prompts:
        params = body.sampling(
            max_tokens=service.room(len(prompt.ids), body.max_tokens or 16, param="prompt"),
            vocab=service.engine.info.vocab,
            logprobs=body.n_logprobs(),
            defaults=service.defaults,
        )
        jobs += [
            make_job(service, body, id, len(jobs) + i, prompt, params, seed_offset=i, asked=asked) for i in range(n)
        ]
    return Run(id, model, prompts, tuple(jobs), n, body, report=report)


def chosen_tools(service: Service, body: ChatBody) -> tuple[list[dict[str, Any]], tuple[str, ...]]:
    """The tools the model is shown (none for tool_choice "none"), and the functions one of which it must call.

    Raises RequestError for a choice that is none of the tools.
    """
    tools, choice = body.function_tools(), body.tool_choice
    if choice == "none":
        return [], ()
    if tools and not service.tools:
        raise RequestError("'tools' needs a server started with a --tool-call-parser.", param="tools")
    if choice in (None, "auto"):
        return tools, ()
    names = tuple(t["function"]["name"] for t in tools)
    if isinstance(choice, dict):
        function = choice.get("function", choice)
        named = function.get("name") if isinstance(function, dict) else None
        if named not in names:
            raise RequestError(f"'tool_choice' names {named!r}, which is none of the tools.", param="tool_choice")
        return tools, (str(named),)
    if not names:
        raise RequestError("'tool_choice': 'required' needs 'tools'.", param="tool_choice")
    return tools, names


def make_job(
    service: Service,
    body: GenerationBody,
    id: str,
    index: int,
    prompt: Prompt,
    params: SamplingParams,
    *,
    parser: AnswerParser | None = None,
    seed_offset: int | None = None,
    asked: Asked | None = None,
) -> Job:
    """Answer `index` of a request. With a seed, each of n answers has its own: seed, seed + 1, ... (64 bits)."""
    offset = index if seed_offset is None else seed_offset
    if params.seed is not None and offset:
        params = replace(params, seed=(params.seed + offset + INT64) % (2 * INT64) - INT64)
    request = Request(
        id=f"{id}-{index}",
        prompt=prompt.ids,
        params=params,
        priority=body.priority or 0,
        snapshot_at=prompt.turn_ends,
        cache_salt=body.cache_salt or "",
        grammar=asked.grammar if asked else None,
    )
    answer = Answer(
        service.tokenizer,
        parser,
        stop=body.stops(),
        include_stop=bool(body.include_stop_str_in_output),
        skip_special=body.skip_special_tokens is not False,
        min_tokens=params.min_tokens,
        stop_token_ids=params.stop_token_ids,
        constrained_by=asked.field if asked else None,
    )
    return Job(request, answer)


@dataclass
class Whole:
    """An answer gathered from its deltas."""

    reasoning: str = ""
    content: str = ""
    calls: list[dict[str, Any]] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None

    def add(self, delta: AnswerDelta) -> None:
        self.reasoning += delta.reasoning
        self.content += delta.content
        for call in delta.calls:
            add_call(self.calls, call)
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.offsets += delta.offsets
        if delta.finish_reason is not None:
            self.finish_reason, self.stop_reason = delta.finish_reason, delta.stop_reason


def add_call(calls: list[dict[str, Any]], delta: CallDelta) -> None:
    if delta.name is not None:
        calls.append({"id": delta.id, "type": "function", "function": {"name": delta.name, "arguments": ""}})
    calls[delta.index]["function"]["arguments"] += delta.arguments


async def gather(service: Service, jobs: Sequence[Job]) -> list[Whole]:
    """All answers, whole."""
    answers = [Whole() for _ in jobs]
    async with aclosing(service.run(jobs)) as deltas:
        async for index, delta in deltas:
            answers[index].add(delta)
    return answers


def head(run: Run, kind: str) -> dict[str, Any]:
    return {
        "id": run.id,
        "object": kind,
        "created": run.created,
        "model": run.model,
        "system_fingerprint": FINGERPRINT,
    }


async def chat_response(service: Service, run: Run) -> dict[str, Any]:
    """The chat.completion object."""
    choices = []
    for index, whole in enumerate(await gather(service, run.jobs)):
        message: dict[str, Any] = {"role": "assistant", "content": whole.content, "refusal": None}
        if whole.calls:
            message["tool_calls"] = whole.calls
            message["content"] = whole.content or None
        if whole.reasoning and shows_reasoning(run):
            message |= both_names(whole.reasoning)
        choice = {
            "index": index,
            "message": message,
            "logprobs": chat_logprobs(service.tokenizer, whole.logprobs) if wants_logprobs(run) else None,
            "finish_reason": chat_finish(whole.finish_reason, called=bool(whole.calls)),
            "stop_reason": whole.stop_reason,
        }
        if run.body.return_token_ids:
            choice["token_ids"] = whole.tokens
        choices.append(choice)
    response = {**head(run, "chat.completion"), "choices": choices, "usage": run.usage()}
    if run.body.return_token_ids:
        response["prompt_token_ids"] = run.prompts[0].ids
    return response


async def completion_response(service: Service, run: Run) -> dict[str, Any]:
    """The text_completion object."""
    choices = []
    for index, whole in enumerate(await gather(service, run.jobs)):
        choice = completion_choice(service.tokenizer, run, index, whole)
        choice["text"] = echoed(service, run, index) + choice["text"]
        choices.append(choice)
    return {**head(run, "text_completion"), "choices": choices, "usage": run.usage()}


def completion_choice(tokenizer: Tokenizer, run: Run, index: int, part: Whole | AnswerDelta) -> dict[str, Any]:
    logprobs = text_logprobs(tokenizer, part.logprobs, part.offsets) if wants_logprobs(run) else None
    choice = {
        "index": index,
        "text": part.content,
        "logprobs": logprobs,
        "finish_reason": part.finish_reason,
        "stop_reason": part.stop_reason,
    }
    if run.body.return_token_ids:
        choice["token_ids"] = part.tokens
        choice["prompt_token_ids"] = run.prompts[index // run.n].ids
    return choice


def echoed(service: Service, run: Run, index: int) -> str:
    body = run.body
    if not (isinstance(body, CompletionBody) and body.echo):
        return ""
    given = body.prompts()[index // run.n]
    return given if isinstance(given, str) else service.tokenizer.decode(given)


async def chat_chunks(service: Service, run: Run) -> AsyncGenerator[dict[str, Any], None]:
    """chat.completion.chunk objects: the role first, then deltas, a finish, and usage when asked for."""
    begun: set[int] = set()
    called: set[int] = set()

    def choices(index: int, delta: AnswerDelta) -> list[dict[str, Any]]:
        change: dict[str, Any] = {}
        if index not in begun:
            begun.add(index)
            change |= {"role": "assistant", "content": ""}
        if delta.reasoning and shows_reasoning(run):
            change |= both_names(delta.reasoning)
        if delta.content:
            change["content"] = delta.content
        if delta.calls:
            called.add(index)
            change["tool_calls"] = [call_chunk(c) for c in delta.calls]
        choice: dict[str, Any] = {
            "index": index,
            "delta": change,
            "logprobs": chat_logprobs(service.tokenizer, delta.logprobs) if delta.logprobs else None,
            "finish_reason": chat_finish(delta.finish_reason, called=index in called),
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        if run.body.return_token_ids:
            choice["token_ids"] = delta.tokens
        elif not change and delta.finish_reason is None and not delta.logprobs:
            return []  # a step whose text is held back
        return [choice]

    async for chunk in chunks(service, run, "chat.completion.chunk", choices):
        yield chunk


async def completion_chunks(service: Service, run: Run) -> AsyncGenerator[dict[str, Any], None]:
    """text_completion objects of a stream."""
    begun: set[int] = set()

    def choices(index: int, delta: AnswerDelta) -> list[dict[str, Any]]:
        choice = completion_choice(service.tokenizer, run, index, delta)
        if index not in begun:
            begun.add(index)
            choice["text"] = echoed(service, run, index) + choice["text"]
        nothing = not choice["text"] and delta.finish_reason is None and not delta.logprobs
        return [] if nothing and not run.body.return_token_ids else [choice]

    async for chunk in chunks(service, run, "text_completion", choices):
        yield chunk


async def chunks(
    service: Service, run: Run, kind: str, choices: Callable[[int, AnswerDelta], list[dict[str, Any]]]
) -> AsyncGenerator[dict[str, Any], None]:
    options = run.body.stream_options
    with_usage = bool(options and options.include_usage)
    continuous = bool(options and options.continuous_usage_stats)
    common = head(run, kind)
    async with aclosing(service.run(run.jobs)) as deltas:
        async for index, delta in deltas:
            if made := choices(index, delta):
                chunk = {**common, "choices": made}
                if continuous:
                    chunk["usage"] = run.usage_of(index)
                elif with_usage:
                    chunk["usage"] = None
                yield chunk
    if with_usage:
        yield {**common, "choices": [], "usage": run.usage()}


def shows_reasoning(run: Run) -> bool:
    return not (isinstance(run.body, ChatBody) and run.body.include_reasoning is False)


def both_names(reasoning: str) -> dict[str, str]:
    """Clients read one name or the other."""
    return {"reasoning_content": reasoning, "reasoning": reasoning}


def call_chunk(call: CallDelta) -> dict[str, Any]:
    if call.name is None:
        return {"index": call.index, "function": {"arguments": call.arguments}}
    function = {"name": call.name, "arguments": call.arguments}
    return {"index": call.index, "id": call.id, "type": "function", "function": function}


def chat_finish(reason: str | None, *, called: bool) -> str | None:
    return "tool_calls" if called and reason == "stop" else reason


def wants_logprobs(run: Run) -> bool:
    return run.jobs[0].request.params.logprobs is not None


def logprob(value: float) -> float:
    return max(value, LEAST_LOGPROB)


def chat_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    def one(token: int, value: float) -> dict[str, Any]:
        data = tokenizer.bytes_of(token)
        return {"token": data.decode("utf-8", "replace"), "logprob": logprob(value), "bytes": list(data)}

    content = [{**one(e.token, e.logprob), "top_logprobs": [one(t, p) for t, p in e.top]} for e in entries]
    return {"content": content, "refusal": None}


def text_logprobs(tokenizer: Tokenizer, entries: Sequence[TokenLogprob], offsets: Sequence[int]) -> dict[str, Any]:
    def name(token: int) -> str:
        return tokenizer.bytes_of(token).decode("utf-8", "replace")

    return {
        "tokens": [name(e.token) for e in entries],
        "token_logprobs": [logprob(e.logprob) for e in entries],
        "top_logprobs": [{name(t): logprob(p) for t, p in ((e.token, e.logprob), *e.top)} for e in entries],
        "text_offset": list(offsets[: len(entries)]),
    }
