"""All error classes of fcdp, so that a caller can catch them without knowing the code that raises them."""


class FcdpError(RuntimeError):
    """The base class of the errors that fcdp raises."""


class LostRankError(FcdpError):
    """A collective failed because other ranks did not join; the message names the collective and ranks."""


class StaleParameterError(FcdpError):
    """A backward needs parameter values that have changed, or whose copy is gone, since its forward."""


class PlanMismatchError(FcdpError):
    """Ranks compiled different plans, or are about to do different things; the message says which."""


class PlanFormatError(FcdpError, ValueError):
    """A file is not a plan, or is damaged; the message names the file and the field."""


class UnshardedParameterError(FcdpError):
    """A compiled graph, a sharded model or `full` got a parameter that `shard` has not sharded."""


class MixedTensorsError(FcdpError, ValueError):
    """An op got sharded and plain tensors; fcdp cannot know which rows the plain tensors hold."""


class UnsynchronizedGradientError(FcdpError):
    """An optimizer step lacks gradients of micro-batches that no synchronising backward has reduced."""


class ArgumentError(FcdpError, ValueError, TypeError):
    """A function was called with a wrong argument; the message says which arguments it takes."""


class MissingExtraError(FcdpError, ImportError):
    """A library of an extra cannot be imported; the message names the extra."""


class ProfileError(FcdpError, ValueError):
    """A file is not a cluster profile, or is damaged; the message names the file and the field."""


class RecordingError(FcdpError, ValueError):
    """A file holds no recording, a damaged recording, or one of another plan; the message says which."""


class CheckpointError(FcdpError, ValueError):
    """A checkpoint is damaged, incomplete or of another model; the message names files and tensors."""
