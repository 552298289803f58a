"""Every error that a user can cause, typed, with the field and the remedy in its text."""

from __future__ import annotations

TRUNCATION = "truncate_prompt_tokens to cut it (-1: to what fits)"


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose."""


class ConfigError(PenstockError):
    """An engine option, or a combination of options, that cannot work."""


class InputError(PenstockError, ValueError):
    """A request that cannot be run; `field` names what was wrong with it."""

    def __init__(self, message: str, field: str | None = None) -> None:
        super().__init__(message)
        self.field = field


class ContextOverflow(InputError):
    """A prompt that leaves no room in the context for output.

    `num_tokens` is the prompt's length, or without `is_exact` a lower bound of it. Clients
    recognize the text, and shorten the conversation: the sentences are OpenAI's and vLLM's, and
    langchain-openai looks for "prompt is too long" where the client shows it no code.
    """

    def __init__(
        self, num_tokens: int, max_model_len: int, field: str = "prompt", is_exact: bool = True
    ) -> None:
        at_least = "" if is_exact else "at least "
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, you "
            f"requested {at_least}{num_tokens + 1} tokens ({num_tokens} in the {field}, 1 for the "
            f"completion), so the prompt is too long. Please reduce the length of the {field}.",
            field,
        )
        self.num_tokens = num_tokens
        self.max_model_len = max_model_len
        self.is_exact = is_exact

    def of_field(self, field: str) -> ContextOverflow:
        """The same, where the prompt is made from `field`."""
        return ContextOverflow(self.num_tokens, self.max_model_len, field, self.is_exact)


class InputOverflow(ContextOverflow):
    """An input of a pooling model that is longer than its context. `option` would truncate it."""

    def __init__(
        self,
        num_tokens: int,
        max_model_len: int,
        field: str = "input",
        is_exact: bool = True,
        option: str = TRUNCATION,
    ) -> None:
        super().__init__(num_tokens, max_model_len, field, is_exact)
        at_least = "" if is_exact else "at least "
        self.args = (
            f"This model's maximum context length is {max_model_len} tokens. However, your "
            f"{field} has {at_least}{num_tokens} tokens, so it is too long. Please reduce its "
            f"length, or set {option}.",
        )

    def of_field(self, field: str, option: str = TRUNCATION) -> InputOverflow:
        return InputOverflow(self.num_tokens, self.max_model_len, field, self.is_exact, option)


class ModelError(PenstockError):
    """A model that cannot be found, read or understood."""


class AdapterError(ModelError):
    """A LoRA adapter that cannot be found, read or understood, or does not fit the model."""


class RequestFault(PenstockError):
    """A request that failed while it ran. The engine and its other requests go on."""


class CrashFault(RequestFault):
    """A request that killed the engine, again and again, with nothing else running."""


class OutOfMemory(PenstockError, MemoryError):
    """A step did not fit into the device's memory; a smaller one may."""


class EngineDeadError(PenstockError):
    """The engine is gone; nothing more can be run on it."""


def waited_too_long(limit_s: float) -> str:
    """What a request is told that was never begun."""
    return f"the request waited longer than {limit_s:g} s for its turn; try again later"
