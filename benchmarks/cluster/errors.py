"""The error of this package."""


class ClusterError(RuntimeError):
    """Nodes cannot be made here, or cannot do what was asked; the message is one sentence."""
