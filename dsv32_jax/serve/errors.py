"""What a client is told when a request can not be answered, in the form of OpenAI's API."""

from typing import Any

RETRY_AFTER = 1  # seconds that a client is asked to wait when the queue is full


class ApiError(Exception):
    """A request that is refused, or that failed.

    Attributes:
        status: The HTTP status.
        message: What is wrong, for a person.
        kind: OpenAI's `type`.
        param: The field that is wrong, or None.
        code: What is wrong, for a program, or None.
        headers: Of the response.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ):
        """Describe the error; the class docstring has the arguments."""
        super().__init__(message)
        self.status, self.message, self.kind = status, message, kind
        self.param, self.code, self.headers = param, code, headers or {}

    def body(self) -> dict[str, Any]:
        """Return the JSON that a client gets."""
        return {
            "error": {
                "message": self.message,
                "type": self.kind,
                "param": self.param,
                "code": self.code,
            }
        }


def invalid(param: str, message: str) -> ApiError:
    """Return the error of a field whose value is wrong."""
    return ApiError(400, message, param=param, code="invalid_value")


def unsupported(param: str, why: str = "is not supported") -> ApiError:
    """Return the error of a field of OpenAI's API that would have no effect here."""
    return ApiError(400, f"{param} {why}", param=param, code="unsupported")


def queue_full(limit: int) -> ApiError:
    """Return the error of a request that finds the queue full."""
    return ApiError(
        429,
        f"{limit} texts are running or waiting already; try again later",
        kind="rate_limit_error",
        code="queue_full",
        headers={"retry-after": str(RETRY_AFTER)},
    )


def stopping() -> ApiError:
    """Return the error of a request that comes, or is still running, while the server stops."""
    return ApiError(503, "the server is stopping", kind="server_error", code="stopping")


def timed_out(seconds: float) -> ApiError:
    """Return the error of a request that took too long."""
    message = f"the request was not done after {seconds:g} s"
    return ApiError(504, message, kind="server_error", code="timeout")


def slow_reader(unread: int) -> ApiError:
    """Return the error of a stream that nobody reads."""
    message = f"the client has left {unread} tokens unread"
    return ApiError(408, message, kind="server_error", code="slow_reader")


def engine_failed(error: BaseException) -> ApiError:
    """Return the error of every request once the engine has failed."""
    message = f"the engine failed with {type(error).__name__}; the server must be restarted"
    return ApiError(500, message, kind="server_error", code="engine_failed")
