"""Gradient accumulation: micro-batches whose gradients do not cross between nodes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from fcdp_compile.errors import FcdpError
from fcdp_compile.sharding.shard import model_of, state_of
from fcdp_compile.torch_compat import has_gradient_hooks


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Let backwards, whose forwards begin in here, accumulate gradients without synchronising them.

        for i, batch in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            with nullcontext() if last else fcdp_compile.no_sync(model):
                loss(model, batch).backward()
        optimizer.step()

    Gradients accumulate at the strategy's scope: whole, within the node (fcdp), or, with strategies that
    reduce every micro-batch's gradients to the home shards, as they would without this. The first
    backward of a forward outside of it reduces them all, and only then `.grad` holds them; before, it
    holds negative zeros. Clearing gradients (`zero_grad`) clears what accumulated. What is not compiled
    synchronises every time: right, and slower; but the last micro-batch must be compiled where earlier
    ones were. Not for `torch.autograd.grad` or `backward(inputs=…)`, which are refused.

    model: sharded, compiled or not.  All ranks must enter and leave for the same micro-batches: checked in
    every forward.

    Raises: ValueError if the model is not sharded, FcdpError if one of its parameters has a gradient hook,
    which would see negative zeros; later, `optimizer.step()` without a synchronising backward raises
    UnsynchronizedGradientError, and a backward FcdpError where gradients were changed meanwhile or an earlier
    one failed.
    """
    state = state_of(model)
    for name, parameter in model_of(model).named_parameters():
        if has_gradient_hooks(parameter):
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
