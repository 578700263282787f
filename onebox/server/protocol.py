"""OpenAI's request bodies. A field is honoured, refused by name, or listed here as one that changes nothing.

Fields this file does not know at all are ignored, as other servers do, and named once in the log.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from onebox.errors import RequestError
from onebox.request import INT64, SamplingParams
from onebox.server.grammars import Asked, ResponseFormat, StructuredOutputs, asked_grammar

log = logging.getLogger(__name__)

Body = TypeVar("Body", bound="RequestBody")
MAX_CHOICES = 128
MAX_MESSAGES = 100_000
MAX_TOOLS = 10_000
DEFAULTED = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")  # read from generation_config.json
_named: set[str] = set()

# pydantic describes every fault of a body before the first can be told: a list ends at its first one
Once = Field(fail_fast=True)
Strings = Annotated[list[str], Once]
Ids = Annotated[list[int], Once]
Objects = Annotated[list[dict[str, Any]], Once]


def few_fields(value: Any) -> Any:
    """For objects whose every field may be at fault."""
    if isinstance(value, Mapping) and len(value) > 1000:
        raise ValueError(f"has {len(value)} fields")
    return value


def all_numbers(value: Any) -> Any:
    """An object's values, or the first that is no number."""
    if isinstance(value, Mapping):
        for key, number in value.items():
            if isinstance(number, bool) or not isinstance(number, int | float):
                raise ValueError(f"of {key[:40]!r} must be a number, got {short(number)}")
    return value


class RequestBody(BaseModel):
    """A body whose unknown fields are kept, so that they can be named."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    # Known fields that are not honoured: refused unless they ask for nothing. Field -> what to do instead.
    refused: ClassVar[Mapping[str, str]] = {}
    # Known fields that never change an answer here.
    without_effect: ClassVar[frozenset[str]] = frozenset()

    def check_fields(self) -> None:
        """Raises RequestError for a field that is known and not honoured; logs each unknown field once."""
        unknown: list[str] = []
        for name, value in (self.model_extra or {}).items():
            if name in self.refused:
                if value not in (None, False, [], {}, "", 0):
                    raise RequestError(f"Unsupported field '{name}': {self.refused[name]}", param=name)
            elif name not in self.without_effect and name not in _named and len(unknown) < 10 and len(_named) < 1000:
                _named.add(name)
                unknown.append(name[:100])
        if unknown:
            log.warning("unknown request fields are ignored: %s", ", ".join(map(repr, unknown)))


CompressMethod = Literal["auto", "llmlingua", "longllmlingua", "llmlingua2"]
GuardPolicy = Literal["annotate", "flag", "block"]


class CompressOptions(BaseModel):
    """How a prompt is shortened before the model sees it.

    `rate` is output over input tokens; `target_tokens` is never passed. A prompt of no more than `over_tokens` is left
    alone, a longer one is shortened to it unless rate or target say otherwise.
    """

    model_config = ConfigDict(extra="forbid")

    method: CompressMethod | None = None
    rate: Annotated[float, Field(ge=0, le=1)] | None = None
    target_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    over_tokens: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    roles: Annotated[dict[str, Literal["keep", "compress"]], BeforeValidator(few_fields)] | None = None
    question: str | None = None

    @model_validator(mode="before")
    @classmethod
    def bounded(cls, value: Any) -> Any:
        return few_fields(value)

    @model_validator(mode="after")
    def one_length(self) -> CompressOptions:
        if self.rate is not None and self.target_tokens is not None:
            raise ValueError("give rate or target_tokens, not both")
        return self


class IntakeFields(BaseModel):
    """What any generating endpoint takes on top of its API: compression and guard of the prompt. Off unless asked for
    here or at the server's start; false turns off what the server does by itself."""

    compress: CompressOptions | bool | None = None
    guard: GuardPolicy | Literal[False] | None = None


class StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class GenerationBody(RequestBody, IntakeFields):
    """What every generating endpoint takes: OpenAI's fields, and vLLM's additions under vLLM's names."""

    model: str | None = Field(None, description="One of the names of /v1/models; the first one when left out.")
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = 1
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | Strings | None = None
    stop_token_ids: Ids | None = None
    include_stop_str_in_output: bool | None = False
    ignore_eos: bool | None = False
    min_tokens: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], BeforeValidator(all_numbers)] | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | None = None
    guided_regex: str | None = None
    guided_choice: Strings | None = None
    guided_grammar: str | None = None
    skip_special_tokens: bool | None = True
    return_token_ids: bool | None = False
    priority: Annotated[int, Field(ge=-INT64, lt=INT64)] | None = 0
    cache_salt: str | None = None
    user: str | None = None

    def check_fields(self) -> None:
        super().check_fields()
        if self.stream_options is not None and not self.stream:
            raise RequestError("'stream_options' needs 'stream': true.", param="stream_options")

    def stops(self) -> tuple[str, ...]:
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if any(not s for s in stops):
            raise RequestError("'stop' must not hold an empty string.", param="stop")
        if len(stops) > 64:
            raise RequestError(f"'stop' holds {len(stops)} strings; at most 64.", param="stop")
        return stops

    def grammar(self) -> Asked | None:
        """What the answer must look like. Raises RequestError for more than one constraint."""
        guided = {
            "json": self.guided_json,
            "regex": self.guided_regex,
            "choice": self.guided_choice,
            "grammar": self.guided_grammar,
        }
        return asked_grammar(self.response_format, self.structured_outputs, guided)

    def bias(self, vocab: int) -> tuple[tuple[int, float], ...]:
        pairs = []
        for key, value in (self.logit_bias or {}).items():
            if not key.isdecimal() or len(key) > 12 or int(key) >= vocab:
                raise RequestError(
                    f"'logit_bias' names token {key[:40]!r}; ids are 0 to {vocab - 1}.", param="logit_bias"
                )
            if not -100 <= value <= 100:
                raise RequestError(f"'logit_bias' of token {key} must be between -100 and 100.", param="logit_bias")
            pairs.append((int(key), value))
        return tuple(pairs)

    def sampling(
        self, *, max_tokens: int, vocab: int, logprobs: int | None, defaults: Mapping[str, Any]
    ) -> SamplingParams:
        """Sampling parameters. What the body leaves out comes from `defaults` (the model's generation_config.json).

        `max_tokens` is what the context leaves room for; it bounds what the body asks. Raises RequestError.
        """
        values: dict[str, Any] = {name: defaults[name] for name in DEFAULTED if name in defaults}
        for name in (*DEFAULTED, "seed", "min_tokens", "presence_penalty", "frequency_penalty"):
            if (value := getattr(self, name)) is not None:
                values[name] = value
        ids = self.stop_token_ids or ()
        if any(not 0 <= i < vocab for i in ids):
            raise RequestError(f"'stop_token_ids' must hold ids of 0 to {vocab - 1}.", param="stop_token_ids")
        return SamplingParams(
            max_tokens=max_tokens,
            logit_bias=self.bias(vocab),
            stop_token_ids=tuple(dict.fromkeys(ids)),
            ignore_eos=bool(self.ignore_eos),
            logprobs=logprobs,
            **values,
        )


NOT_SERVED: Mapping[str, str] = {
    "prompt_logprobs": "log probabilities are given for the answer only.",
    "use_beam_search": "answers are sampled or greedy.",
    "length_penalty": "there is no beam search.",
    "truncate_prompt_tokens": "shorten the prompt before sending it.",
    "guided_whitespace_pattern": "white space in JSON is one space, or a line and its indentation.",
    "logits_processors": "not served; use logit_bias.",
    "lora_request": "adapters are not served.",
    "kv_transfer_params": "there is one engine.",
    "audio": "this server answers in text.",
}


class CompletionBody(GenerationBody):
    """POST /v1/completions."""

    refused = {
        **NOT_SERVED,
        "suffix": "filling in the middle is not served.",
        "prompt_embeds": "send text or token ids.",
    }
    without_effect = frozenset(
        {
            "metadata",
            "store",
            "request_id",
            "add_special_tokens",
            "spaces_between_special_tokens",
            "guided_decoding_backend",
        }
    )

    prompt: str | Strings | Ids | Annotated[list[Ids], Once]
    echo: bool | None = False
    best_of: int | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | bool | None = None

    def prompts(self) -> list[str | list[int]]:
        """The prompts, each text or token ids. Raises RequestError for none and for an empty one."""
        if isinstance(self.prompt, str):
            prompts: list[str | list[int]] = [self.prompt]
        elif self.prompt and isinstance(self.prompt[0], int):
            prompts = [self.prompt]
        else:
            prompts = list(self.prompt)  # type: ignore[arg-type]
        if not prompts or any(not p for p in prompts):
            raise RequestError("'prompt' must not be empty.", param="prompt")
        if len(prompts) * (self.n or 1) > MAX_CHOICES:
            raise RequestError(
                f"'prompt' asks for {len(prompts) * (self.n or 1)} answers; at most {MAX_CHOICES}.", param="prompt"
            )
        return prompts

    def n_logprobs(self) -> int | None:
        if self.logprobs is True or self.logprobs is False:
            return 1 if self.logprobs else None
        return self.logprobs


class ChatMessage(BaseModel):
    """One message; text, or a list of text parts."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: str | list[Any] | None = None
    tool_calls: list[Any] | None = None


class FunctionTool(BaseModel):
    model_config = ConfigDict(extra="allow")

    name: Annotated[str, Field(pattern=r"^[\w.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None


class ChatTool(BaseModel):
    model_config = ConfigDict(extra="allow")

    type: str = "function"
    function: FunctionTool | None = None


class ChatBody(GenerationBody):
    """POST /v1/chat/completions."""

    refused = {
        **NOT_SERVED,
        "functions": "send 'tools'.",
        "function_call": "send 'tool_choice'.",
        "web_search_options": "this server searches nothing.",
        "chat_template": "the model's own template is used.",
        "documents": "put documents into a message.",
    }
    # parallel_tool_calls true is how the model behaves anyway; modalities ["text"] likewise.
    without_effect = frozenset(
        {
            "metadata",
            "store",
            "service_tier",
            "safety_identifier",
            "prompt_cache_key",
            "prompt_cache_retention",
            "verbosity",
            "modalities",
            "prediction",
            "request_id",
            "add_special_tokens",
            "spaces_between_special_tokens",
            "best_of",
            "guided_decoding_backend",
        }
    )

    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["auto", "none", "required"] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    include_reasoning: bool | None = True
    thinking_token_budget: Annotated[int, Field(ge=0)] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = True
    continue_final_message: bool | None = False

    def n_logprobs(self) -> int | None:
        """Raises RequestError for top_logprobs without logprobs, as OpenAI's API does."""
        if not self.logprobs:
            if self.top_logprobs:
                raise RequestError("'top_logprobs' needs 'logprobs': true.", param="top_logprobs")
            return None
        return self.top_logprobs or 0

    def function_tools(self) -> list[dict[str, Any]]:
        """The tools a template can name. Tools of other types (agents send them) are left out and named in the log."""
        tools = []
        for i, tool in enumerate(self.tools or ()):
            if tool.type != "function":
                log.info("tool type %r is left out", tool.type[:40])
            elif tool.function is None:
                raise RequestError(f"'tools[{i}].function' is missing.", param=f"tools[{i}].function")
            else:
                tools.append(tool.model_dump(exclude_unset=True))
        return tools

    def template_options(self) -> dict[str, Any]:
        """Template variables: chat_template_kwargs, and thinking off for reasoning_effort "none"."""
        options = dict(self.chat_template_kwargs or {})
        for name in ("messages", "tools", "add_generation_prompt"):
            if name in options:
                raise RequestError(
                    f"'chat_template_kwargs' must not set '{name}'; send it in the body.", param="chat_template_kwargs"
                )
        if self.reasoning_effort == "none":
            options.setdefault("enable_thinking", False)
        return options


class CompressBody(RequestBody, CompressOptions):
    """POST /v1/compress: messages, documents or a prompt, and the fields of `compress`."""

    model_config = ConfigDict(extra="allow")

    messages: Annotated[list[dict[str, Any]], Field(min_length=1, fail_fast=True)] | None = None
    documents: Annotated[list[str], Field(min_length=1, fail_fast=True)] | None = None
    prompt: str | None = None
    instruction: str | None = None

    def options(self) -> CompressOptions:
        return CompressOptions.model_validate(self.model_dump(include=set(CompressOptions.model_fields)))


class GuardBody(RequestBody):
    """POST /v1/guard: messages, or a prompt taken as one user message."""

    messages: Objects | None = None
    prompt: str | None = None
    policy: GuardPolicy = "annotate"


class TokenizeBody(RequestBody):
    """POST /tokenize: a prompt, or messages."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    tools: Annotated[list[ChatTool], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    add_generation_prompt: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = False
    without_effect = frozenset({"add_special_tokens"})


class DetokenizeBody(RequestBody):
    """POST /detokenize."""

    model: str | None = None
    tokens: Ids


def parse_body(kind: type[Body], data: bytes) -> Body:
    """A request body of JSON bytes. Raises RequestError naming the first field at fault."""
    try:
        body = kind.model_validate_json(data)
    except ValidationError as e:
        raise validation_error(e) from e
    body.check_fields()
    return body


def rename(e: RequestError, names: Mapping[str, str]) -> None:
    """Lets an error about a translated body name the field of the caller's own; of several names the first counts."""
    for theirs, ours in names.items():
        rest = (e.param or "").removeprefix(theirs)
        if e.param is not None and e.param.startswith(theirs) and rest[:1] in ("", ".", "["):
            e.param = ours + rest
            e.args = (str(e).replace(f"'{theirs}", f"'{ours}", 1),)
            return


def translated(kind: type[Body], fields: Mapping[str, Any]) -> Body:
    """A body made from another API's. Raises RequestError naming the field at fault by its name there."""
    try:
        return kind.model_validate({k: v for k, v in fields.items() if v is not None})
    except ValidationError as e:
        raise validation_error(e) from e


def validation_error(error: ValidationError) -> RequestError:
    """pydantic's findings as one line about the first field at fault."""
    finding = error.errors(include_url=False, include_context=False)[0]
    if finding["type"] == "json_invalid":
        return RequestError(f"The body is not valid JSON: {finding['msg'].removeprefix('Invalid JSON: ')}.", param=None)
    field = dotted(finding["loc"])
    if not field and finding["type"] == "value_error":
        return RequestError(f"The body is not valid: {finding['msg'].removeprefix('Value error, ')}.", param=None)
    if not field:
        return RequestError(f"The body must be a JSON object: {finding['msg']}.", param=None)
    if finding["type"] == "value_error":
        return RequestError(f"'{field}': {finding['msg'].removeprefix('Value error, ')}.", param=field)
    shown = "" if finding["type"] == "missing" else f", got {short(finding['input'])}"
    return RequestError(f"'{field}': {finding['msg']}{shown}.", param=field)


# members of unions, which pydantic names in a location
MEMBERS = ("str", "int", "float", "bool", "dict", "function-after", "CompressOptions")


def dotted(loc: Sequence[int | str]) -> str:
    """`messages[0].role` of a pydantic location; the names of union members are left out."""
    text = ""
    for part in loc:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in MEMBERS:
            text += f".{part}" if text else part
    return text


def short(value: Any) -> str:
    """The beginning of a value, for people."""
    if isinstance(value, str | list):
        value = value[:80]
    elif isinstance(value, dict):
        value = dict(islice(value.items(), 20))
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
