"""Gradient accumulation: micro-batches whose gradients do not cross between nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fcdp_compile.core.sharding.shard import model_of, state_of
from fcdp_compile.errors import FcdpError
from fcdp_compile.torch_compat.autograd import gradient_hooks


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Accumulate gradients without synchronising them, for forwards that begin in this block.

        for i, batch in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            with nullcontext() if last else fcdp_compile.no_sync(model):
                loss(model, batch).backward()
        optimizer.step()

    The strategy decides how gradients accumulate: whole on each rank, cut over the ranks of a node (fcdp),
    or, if it reduces every micro-batch's gradients to the home shards, as without no_sync. Code that is not
    compiled accumulates as well. Leaving the block reduces nothing: the first backward of a forward outside
    of the block reduces all accumulated gradients, and only then `.grad` holds them; before, `.grad` holds
    negative zeros. `zero_grad` clears accumulated gradients too. `torch.autograd.grad` and
    `backward(inputs=…)` are refused.

    model: sharded, compiled or not.  All ranks must enter and leave for the same micro-batches; every
    forward checks this.

    Raises: ValueError if the model is not sharded, FcdpError if one of its parameters has a gradient hook,
    because the hook would see negative zeros.  Later, `optimizer.step()` without a synchronising backward
    raises UnsynchronizedGradientError, and a backward raises FcdpError if gradients were changed in between
    or an earlier backward failed.
    """
    state = state_of(model)
    for name, parameter in model_of(model).named_parameters():
        if gradient_hooks(parameter):
            raise FcdpError(
                f"parameter {name!r} has a gradient hook, but within no_sync there is no gradient for "
                "the hook; remove the hook, or change gradients after the last backward"
            )
    was_on = state.accumulation.is_on
    state.accumulation.is_on = True
    try:
        yield
    finally:
        state.accumulation.is_on = was_on
