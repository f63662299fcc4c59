"""What the command refuses."""


class ClusterError(RuntimeError):
    """Nodes cannot be made here, or were asked for something they do not have; one sentence."""
