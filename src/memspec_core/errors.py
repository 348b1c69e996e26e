"""Errors that a user can act on: each message says what is wrong, where, and what to do."""

import errno


class MemSpecError(Exception):
    """Base of every error that this package raises on purpose."""


class SettingsError(MemSpecError):
    """A parameter of the node or of a command is out of range, unknown or contradictory."""


class RequestError(MemSpecError):
    """A field of a generation request is out of range."""


class PromptTooLongError(RequestError):
    """The prompt does not fit into the context."""


class SchemaError(RequestError):
    """A JSON schema is invalid, unsupported or too complex, or there is nothing to read it with."""


class UnknownDraftError(RequestError):
    """A request or a command names a draft that is not configured."""


class CheckpointError(MemSpecError):
    """A checkpoint is missing, empty, truncated, corrupt or of an unsupported kind."""


class ModelError(MemSpecError):
    """A model computes what cannot be right."""


class VocabularyMismatchError(CheckpointError):
    """A draft's token map differs from its target's."""


class MemoryBudgetError(MemSpecError):
    """Something does not fit into the memory budget; raised before anything is allocated."""


class LoadGivenUpError(MemSpecError):
    """What waited for a load no longer does; the load itself goes on."""


class QueueFullError(MemSpecError):
    """No place for one more request: as many wait as may, or the policy lets none wait."""


class NotAcceptingError(MemSpecError):
    """The runtime takes no requests: it is not loaded, its gate is closed, or it has ended."""


class PromptFileError(MemSpecError):
    """A file of prompts is missing or has a line that cannot be used."""


class CacheMismatchError(MemSpecError):
    """A folder of cached work was made from something else than what is asked for now."""


class PeerError(MemSpecError):
    """A runtime to compare with is unknown, not installed, or cannot read the target."""


class MeasurementError(MemSpecError):
    """An answer that was to be measured ended with an error."""


class TraceError(MemSpecError):
    """A decoding trace is missing, damaged, or made with other models."""


class PredictorError(MemSpecError):
    """A predictor is missing, damaged, made for another target, or given no usable input."""


class ProfileError(MemSpecError):
    """A hardware profile is missing, or one of its numbers is missing or cannot be."""


class RecordError(MemSpecError):
    """A record of generations is missing, or a line of it is none."""


class OutputError(MemSpecError):
    """What a command is to write has no place, or would replace something."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether it is memory, or room in the budget, that was missing.

    torch, safetensors and the native step say so in words, the system by a number.
    """
    if isinstance(error, MemoryError | MemoryBudgetError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    words = str(error).lower()
    return any(told in words for told in ("out of memory", "allocate memory", "enough memory"))
