"""Every error a user can cause, in one tree. A message names the thing, the finding and the way out.

OneboxError
├── ConfigError                 a flag, a config value or a plan that cannot be honoured
├── CheckpointError             a folder of weights that must not be served
├── PromptError                 input or options of the prompt library
└── RequestError                one request that cannot be served; carries its HTTP meaning
    ├── ContextLengthError      prompt plus answer passes max_model_len
    ├── ModelNotFoundError      a model name this server does not serve
    ├── NotFoundError           a stored response or a trace that is not there (any more)
    ├── BodyTooLargeError       a body beyond the byte limit
    ├── BodyTimeoutError        a body that stopped coming
    ├── NotServedError          an endpoint, or an optional part, that this server does not have
    ├── ApiKeyError             no valid key
    ├── BlockedError            the guard refused the prompt
    ├── StoreError              stored responses cannot be read or written now
    ├── InternalError           a bug: the log has it
    ├── UpstreamError           another server that could not be reached or made no sense
    │   └── UpstreamTimeoutError    or was too slow
    └── EngineUnavailableError  the engine is stopped, restarting or full
        └── QueueFullError      the waiting queue is full: retry later
"""

from __future__ import annotations


class OneboxError(Exception):
    """Base of all errors a user can cause: shown as one line, never as a traceback."""


class ConfigError(OneboxError):
    """A flag, a config value or a memory plan cannot be honoured."""


class CheckpointError(OneboxError):
    """A checkpoint is incomplete, damaged, unsupported or not what was asked for.

    The message starts with the tensor, file or config field at fault.
    """


class PromptError(OneboxError):
    """The prompt library got input or options it cannot honour."""


class RequestError(OneboxError):
    """One request cannot be served. `status` is the HTTP status, `code` and `param` are OpenAI's error fields."""

    status = 400
    code: str | None = "invalid_request"
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """Prompt plus requested answer is longer than the served context."""

    code = "context_length_exceeded"


class ModelNotFoundError(RequestError):
    """The request names a model this server does not serve."""

    status = 404
    code = "model_not_found"


class NotFoundError(RequestError):
    """Nothing is stored under this id (any more)."""

    status = 404
    code = "not_found"


class BodyTooLargeError(RequestError):
    """The request's body passes the byte limit."""

    status = 413
    code = "request_too_large"


class BodyTimeoutError(RequestError):
    """The request's body stopped coming."""

    status = 408
    code = "request_timeout"


class NotServedError(RequestError):
    """An endpoint, or an optional part, that this server does not have."""

    status = 501
    code = "not_served"


class ApiKeyError(RequestError):
    """No valid API key came with the request."""

    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class BlockedError(RequestError):
    """The guard refused the prompt; the code is the one clients know for filtered prompts."""

    code = "content_filter"


class StoreError(RequestError):
    """The file of stored responses cannot be read or written now; nothing else is affected."""

    status = 503
    code = "store_unavailable"
    type = "server_error"


class InternalError(RequestError):
    """A bug; its traceback is in the log, not in the answer."""

    status = 500
    code = "internal_error"
    type = "server_error"

    def __init__(self) -> None:
        super().__init__("Internal error; the server's log has it.")


class UpstreamError(RequestError):
    """The server behind this one could not be reached, or what it said was no answer."""

    status = 502
    code = "upstream_error"
    type = "server_error"


class UpstreamTimeoutError(UpstreamError):
    """The server behind this one was too slow."""

    status = 504
    code = "upstream_timeout"


class EngineUnavailableError(RequestError):
    """The engine cannot take or finish the request now; the same request may succeed later."""

    status = 503
    code = "engine_unavailable"
    type = "server_error"


class QueueFullError(EngineUnavailableError):
    """The waiting queue is full; `retry_after_s` says when to come back."""

    status = 429
    code = "queue_full"
    type = "rate_limit_error"

    def __init__(self, message: str, *, retry_after_s: int = 1) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s
