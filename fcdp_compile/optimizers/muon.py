"""Muon on sharded matrices: nothing between nodes in `step`, and each matrix is orthogonalised once.

    momentum, by rows       ─ all-to-all within the node ─▶  whole matrices, spread over the node's ranks
    Newton-Schulz           batched over equal shapes
    orthogonal matrices     ─ all-to-all within the node ─▶  rows, which step the home shards

Each matrix has all its rows on one node (strategy modifier "matrix"), so gradients and weights cross
between nodes as with any other optimizer.  `Exchange` brings the rows of matrices together and
back.  Source: Jordan et al., Muon, 2024; `torch.optim.Muon` for the update.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Muon as TorchMuon

from fcdp_compile.core.params.home_shard import HomeShard, key_of
from fcdp_compile.core.params.home_tensor import HomeTensor
from fcdp_compile.core.params.layout import ParamLayout, chunk_rows
from fcdp_compile.core.params.packing import rows_back, rows_first
from fcdp_compile.core.params.registry import owner_of
from fcdp_compile.errors import ArgumentError
from fcdp_compile.optimizers.combine import loss_of
from fcdp_compile.runtime.collectives.agreement import same_act
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.runtime.model import ShardedModel
from fcdp_compile.strategy.home_nodes import balanced, newton_schulz_flops


class Muon(TorchMuon):
    """`torch.optim.Muon` for sharded models, with the same arguments, state and numbers.

    For the matrices of hidden layers; step embeddings, heads and vectors with another optimizer.  Shard the
    model with a strategy such as "fcdp+matrix".

    ns_dtype: of the Newton-Schulz iteration of all matrices; bf16 as torch's.

    Raises: ValueError as torch's, and for a parameter whose rows are on several nodes or that
    ranks of "tp" share.
    """

    def __init__(
        self, params: Any, *args: Any, ns_dtype: torch.dtype = torch.bfloat16, **options: Any
    ) -> None:
        super().__init__(params, *args, **options)
        self._ns_dtype = ns_dtype

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_ns_dtype": self._ns_dtype}

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Raises: ValueError as the class."""
        super().add_param_group(param_group)
        try:
            _check(self.param_groups[-1])
        except ValueError:
            self.param_groups.pop()
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step all matrices that have a gradient; all ranks of the mesh must call it.

        Raises: PlanMismatchError on every rank if ranks step different matrices; ValueError for sparse
        gradients.
        """
        loss = loss_of(closure)
        stepped: dict[Collectives | None, list[_Matrix]] = {}
        for group in self.param_groups:
            for p in group["params"]:
                # Also without a gradient: this rank must then say so to ranks that have some.
                matrices = stepped.setdefault(_collectives(p), [])
                if p.grad is None:
                    continue
                if p.grad.is_sparse:
                    raise ArgumentError("Muon does not step sparse gradients; make them dense")
                matrices.append(_Matrix(p, _layout(p), group, self.state[p]))
        for collectives, matrices in stepped.items():
            if collectives is not None:
                same_act(collectives, _act(matrices))
            if matrices:
                _step(collectives, matrices, self._ns_dtype)
        return loss


_MOST_STEPS, _COEFFICIENTS = 99, 3  # as torch's


def _check(group: dict[str, Any]) -> None:
    """Raises: ArgumentError for a group that Muon cannot step."""
    if "ns_dtype" in group:
        raise ArgumentError("ns_dtype is the same for all of Muon's groups; give it to Muon itself")
    if not 0 <= group["ns_steps"] <= _MOST_STEPS or len(group["ns_coefficients"]) != _COEFFICIENTS:
        raise ArgumentError(
            f"Muon takes up to {_MOST_STEPS} steps with {_COEFFICIENTS} coefficients, not "
            f"ns_steps={group['ns_steps']} and ns_coefficients={group['ns_coefficients']}"
        )
    for p in group["params"]:
        if p.ndim != 2 or not p.is_floating_point():
            raise ArgumentError(
                f"Muon steps matrices of floating point numbers, not a parameter of shape {tuple(p.shape)} "
                f"and {p.dtype}; step it with another optimizer"
            )
        _layout(p)


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One matrix of a step; layout: None if this rank has the whole matrix."""

    parameter: Any
    layout: ParamLayout | None
    group: dict[str, Any]
    state: dict[str, Any]

    def direction(self) -> Tensor:
        """This rank's rows of the momentum that Newton-Schulz orthogonalises, which is updated first."""
        grad, momentum = self.parameter.grad, self.group["momentum"]
        if "momentum_buffer" not in self.state:
            self.state["momentum_buffer"] = torch.zeros_like(
                grad, memory_format=torch.preserve_format
            )
        buffer = self.state["momentum_buffer"]
        buffer.lerp_(grad, 1 - momentum)
        found = grad.lerp(buffer, momentum) if self.group["nesterov"] else buffer
        return found.present() if isinstance(found, HomeTensor) else found

    def apply(self, rows: Tensor) -> None:
        """Step the parameter by this rank's rows of the orthogonal matrix."""
        parameter, lr = self.parameter, float(self.group["lr"])
        height, width = parameter.shape
        adjust = self.group["adjust_lr_fn"]
        if adjust == "match_rms_adamw":
            ratio = 0.2 * math.sqrt(max(height, width))
        else:
            ratio = math.sqrt(max(1, height / width))
        if isinstance(parameter, HomeShard):
            rows = DTensor.from_local(
                rows, parameter.device_mesh, parameter.placements,
                run_check=False, shape=parameter.shape, stride=parameter.stride(),
            )  # fmt: skip
        parameter.mul_(1 - lr * self.group["weight_decay"])
        parameter.add_(HomeTensor.adopt(rows), alpha=-lr * ratio)


def _layout(parameter: Tensor) -> ParamLayout | None:
    """How a matrix is cut; None if each rank has the whole matrix.

    Raises: ArgumentError if its rows are on several nodes, or ranks of "tp" have parts of it.
    """
    if not isinstance(parameter, HomeShard):
        return None
    key = key_of(parameter)
    assert key is not None, "home shards have keys"
    spec = owner_of(key).spec(key)
    if spec.inner is not None and spec.inner.dim is not None:
        raise ArgumentError(
            f'Muon needs whole matrices, but ranks of "tp" have parts of parameter {spec.name!r} of shape '
            f"{tuple(parameter.shape)}; step it with another optimizer, or make the mesh without tp"
        )
    if spec.layout.nodes > 1 and spec.layout.home_node is None:
        raise ArgumentError(
            f"Muon needs whole matrices, but the rows of parameter {spec.name!r} of shape "
            f"{tuple(parameter.shape)} are on {spec.layout.nodes} nodes; shard the model with a strategy "
            "such as 'fcdp+matrix' while the parameter is trainable, and step embeddings with another "
            "optimizer"
        )
    return spec.layout if spec.layout.ranks > 1 else None


def _collectives(parameter: Tensor) -> Collectives | None:
    key = key_of(parameter)
    if not isinstance(parameter, HomeShard) or key is None:
        return None
    owner = owner_of(key)
    assert isinstance(owner, ShardedModel), owner
    return owner.collectives


def _act(matrices: Sequence[_Matrix]) -> str:
    if not matrices:
        return "steps no matrices with Muon"
    names = [str(key_of(m.parameter)) for m in matrices]
    digest = hashlib.sha256("\n".join(names).encode()).hexdigest()[:8]
    return f"steps {names[0].partition(':')[2]!r} and {len(names) - 1} more matrices with Muon ({digest})"


def _step(
    collectives: Collectives | None, matrices: Sequence[_Matrix], ns_dtype: torch.dtype
) -> None:
    """Step the matrices of one model that have rows on this node; the others only get a state."""
    directions = [m.direction().to(ns_dtype) for m in matrices]
    node = 0 if collectives is None else collectives.node
    here = [
        i for i, m in enumerate(matrices) if m.layout is None or m.layout.home_node in (None, node)
    ]
    exchange = Exchange(collectives, [matrices[i].layout for i in here])
    wholes = exchange.gather([directions[i] for i in here])
    like = directions[0].new_empty(0)
    del directions
    done = _orthogonal([matrices[here[i]] for i in exchange.mine], wholes)
    for i, rows in zip(here, exchange.scatter(done, like), strict=True):
        matrices[i].apply(rows)


def _orthogonal(matrices: Sequence[_Matrix], directions: Sequence[Tensor]) -> list[Tensor]:
    """Orthogonalise whole matrices, those of equal shape and settings together."""
    alike: dict[Any, list[int]] = {}
    for i, (matrix, whole) in enumerate(zip(matrices, directions, strict=True)):
        settings = tuple(matrix.group[name] for name in ("ns_steps", "eps"))
        coefficients = tuple(matrix.group["ns_coefficients"])
        alike.setdefault((tuple(sorted(whole.shape)), *settings, coefficients), []).append(i)
    done: dict[int, Tensor] = {}
    for (_, steps, eps, coefficients), members in alike.items():
        turned = [directions[i] if _is_wide(directions[i]) else directions[i].mT for i in members]
        for i, found in zip(
            members, newton_schulz(torch.stack(turned), coefficients, steps, eps), strict=True
        ):
            done[i] = found if _is_wide(directions[i]) else found.mT
    return [done[i] for i in range(len(matrices))]


def _is_wide(matrix: Tensor) -> bool:
    return matrix.shape[0] <= matrix.shape[1]


def newton_schulz(
    matrices: Tensor, coefficients: Sequence[float], steps: int, eps: float
) -> Tensor:
    """The zeroth power of each matrix: its singular values become nearly 1 (Jordan et al., Muon, 2024).

    matrices: [count, rows, columns] with no more rows than columns; not changed.
    """
    a, b, c = coefficients
    x: Tensor = matrices / torch.linalg.matrix_norm(matrices, keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


class Exchange:
    """Spreads the work on matrices that are cut over the ranks of a node over these ranks.

    All ranks of the node make one with the same layouts, in the same order.

    layouts: of the matrices; None for a matrix that every rank has whole, which every rank then works on.
    mine: the numbers of the matrices that this rank works on.
    """

    def __init__(
        self, collectives: Collectives | None, layouts: Sequence[ParamLayout | None]
    ) -> None:
        self._collectives = collectives
        self._cut = {i: x for i, x in enumerate(layouts) if x is not None and x.ranks_per_node > 1}
        self._owners: dict[int, int] = {}
        if collectives is not None and self._cut:
            # The largest first: the small ones then even out what is left.
            costs = {i: float(newton_schulz_flops(x.shape)) for i, x in self._cut.items()}
            order = sorted(costs, key=lambda i: -costs[i])
            owners = balanced([(costs[i],) for i in order], collectives.ranks_per_node)
            self._owners = dict(zip(order, owners, strict=True))
        self._places = 1 if collectives is None else collectives.ranks_per_node
        self._me = 0 if collectives is None else collectives.place
        self.mine = [i for i in range(len(layouts)) if self._owners.get(i, self._me) == self._me]

    def gather(self, rows: Sequence[Tensor]) -> list[Tensor]:
        """This rank's rows of all matrices -> the whole matrices of `mine`."""
        if not self._cut:
            return list(rows)
        sent = {i: rows_first(rows[i], x).reshape(-1) for i, x in self._cut.items()}
        places = range(self._places)
        arrived = self._moved(
            [[sent[i] for i in self._of(place)] for place in places],
            [[self._elements(i, place) for i in self._of(self._me)] for place in places],
            rows[0],
        )
        wholes = {
            i: self._rows(i, torch.cat([arrived[place][n] for place in places]))
            for n, i in enumerate(self._of(self._me))
        }
        return [wholes.get(i, rows[i]) for i in self.mine]

    def scatter(self, wholes: Sequence[Tensor], like: Tensor) -> list[Tensor]:
        """The whole matrices of `mine` -> this rank's rows of all matrices, of the dtype of `like`."""
        done = dict(zip(self.mine, wholes, strict=True))
        if not self._cut:
            return list(wholes)
        places = range(self._places)
        parts = {i: self._parts(i, done[i]) for i in self._of(self._me)}
        arrived = self._moved(
            [[parts[i][place] for i in self._of(self._me)] for place in places],
            [[self._elements(i, self._me) for i in self._of(place)] for place in places],
            like,
        )
        for place in places:
            for n, i in enumerate(self._of(place)):
                done[i] = self._rows(i, arrived[place][n])
        return [done[i] for i in sorted(done)]

    def _of(self, place: int) -> list[int]:
        """The numbers of the cut matrices that the rank at this place works on."""
        return [i for i in self._cut if self._owners[i] == place]

    def _elements(self, i: int, place: int) -> int:
        layout = self._cut[i]
        assert layout.dim is not None
        rows = chunk_rows(layout.shape[layout.dim], layout.ranks_per_node)[place]
        return rows * layout.row_elements

    def _parts(self, i: int, whole: Tensor) -> Sequence[Tensor]:
        layout = self._cut[i]
        sizes = [self._elements(i, place) for place in range(self._places)]
        parts: Sequence[Tensor] = rows_first(whole, layout).reshape(-1).split(sizes)
        return parts

    def _rows(self, i: int, flat: Tensor) -> Tensor:
        layout = self._cut[i]
        return rows_back(flat, layout, flat.numel() // layout.row_elements)

    def _moved(
        self, send: Sequence[Sequence[Tensor]], sizes: Sequence[Sequence[int]], like: Tensor
    ) -> list[Sequence[Tensor]]:
        """What each place of the node sends to this rank.

        send: the tensors for each place.  sizes: elements of the tensors from each place.
        """
        assert self._collectives is not None
        parts = [t for tensors in send for t in tensors]
        arrived = self._collectives.exchange(
            torch.cat([like.new_empty(0), *parts]),
            received=[sum(of_place) for of_place in sizes],
            sent=[sum(t.numel() for t in tensors) for tensors in send],
            name="fcdp::exchange of matrices",
        ).wait()
        from_places = arrived.split([sum(of_place) for of_place in sizes])
        return [part.split(list(n)) for part, n in zip(from_places, sizes, strict=True)]
