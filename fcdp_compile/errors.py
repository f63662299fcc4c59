"""Every error class of fcdp, so that a caller can catch one without knowing who raises it."""


class FcdpError(RuntimeError):
    """Base of every refusal of fcdp."""


class LostRankError(FcdpError):
    """A collective has failed because other ranks did not come; the message names it and the ranks."""


class StaleParameterError(FcdpError):
    """A gathered copy no longer belongs to the values that a computation was started with."""


class PlanMismatchError(FcdpError):
    """Ranks compiled plans that differ; the message holds the difference."""


class PlanFormatError(FcdpError, ValueError):
    """A file is not a plan, or a damaged one; the message names the file and the field."""


class UnshardedParameterError(FcdpError):
    """A compiled graph reads a parameter that `shard` has not seen while several processes run."""


class MixedTensorsError(FcdpError, ValueError):
    """An op got sharded tensors and plain ones, whose rows nothing tells."""


class UnsynchronizedGradientError(FcdpError):
    """Gradients of micro-batches wait that no synchronising backward has reduced."""


class ArgumentError(FcdpError, ValueError, TypeError):
    """An argument is not what a function takes; the message says what it takes."""


class MissingExtraError(FcdpError, ImportError):
    """A library is missing that comes with an extra; the message says with which."""


class ProfileError(FcdpError, ValueError):
    """A file is not a cluster profile, or a damaged one; the message names the file and the field."""


class RecordingError(FcdpError, ValueError):
    """A file holds no recording, a damaged one, or that of another plan; the message says which."""


class CheckpointError(FcdpError, ValueError):
    """A checkpoint is damaged, incomplete or of another model; the message names the files and tensors."""
