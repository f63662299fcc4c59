"""Read rows of other nodes from a checkpoint that every node has, without communication between nodes.

    home shards of place l of all nodes ─ read here ─▶ node shard [N*S]      instead of an inter all-gather

The values that were read are used only if they contain this rank's home shard as it is now, and if every node
read the same values.  Then each slot equals the home shard of its rank, whatever was written to parameters or
files in between.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from fcdp_compile.core.params.packing import pack_home
from fcdp_compile.core.params.registry import ParamSpec
from fcdp_compile.core.params.seals import fingerprint
from fcdp_compile.core.params.spec import Home
from fcdp_compile.plan import Bucket
from fcdp_compile.runtime.collectives.collectives import Collectives
from fcdp_compile.strategy.formats import Format

log = logging.getLogger(__name__)


class Rows(Protocol):
    """Reads home shards of any rank from somewhere else."""

    def read(self, key: str, node: int, place: int) -> Tensor:
        """The home shard of a parameter on the rank at `place` of `node`, in the parameter's home dtype."""

    def close(self) -> None:
        """Close open files; `read` stays possible."""


class RowSources:
    """The parameters of a model that can be read, by key; every rank has the same keys."""

    def __init__(self) -> None:
        self._of: dict[str, Rows] = {}

    def offer(self, keys: Iterable[str], rows: Rows) -> None:
        """Note that `rows` can read these parameters; every rank must call it."""
        self._of |= dict.fromkeys(keys, rows)

    def node_shard(
        self,
        bucket: Bucket,
        specs: Sequence[ParamSpec],
        home: Tensor,
        at: Home,
        collectives: Collectives,
    ) -> Tensor | None:
        """Read the node shard [N*S] of a frozen bucket, with `home` [S] as this rank's slot; None: gather it.

        specs: of the bucket's parameters, in its order.  at: this rank's place in the mesh.  All ranks must
        call it; either all ranks get None or no rank does.
        """
        keys = [spec.key for spec in specs]
        has_all = self._of.keys() >= set(keys)
        if not (has_all and bucket.frozen and bucket.wire is Format.FULL):
            return None
        found = self._checked(bucket, specs, home, at)
        mark = 0 if found is None else int(fingerprint([found]))
        words = [found is not None, at.place, mark]
        rows = collectives.agree(words, "the agreement on who reads a checkpoint")
        marks = {place: m for _, place, m in rows}
        if all(is_found and marks[place] == m for is_found, place, m in rows):
            return found
        # The rows no longer have the parameters' values; reading them at each refresh would be in vain.
        for key in keys:
            del self._of[key]
        log.info(
            "bucket %d (%s, …) is gathered between nodes: the checkpoint that it was loaded from no longer "
            "holds its values, or not on every node",
            bucket.id,
            specs[0].name,
        )
        return None

    def _checked(
        self, bucket: Bucket, specs: Sequence[ParamSpec], home: Tensor, at: Home
    ) -> Tensor | None:
        """The node shard as this rank reads it; None if reading fails, or if it lacks the home shard."""
        readers = list(dict.fromkeys(self._of[spec.key] for spec in specs))
        try:
            with torch.inference_mode(False), torch.no_grad():
                slots = self._read(bucket, specs, at)
                found = torch.cat(slots).to(home.device)
        except Exception as error:
            # Whatever the error is, a gather between nodes gives the same values.
            log.warning("rows of bucket %d cannot be read, it is gathered: %s", bucket.id, error)
            return None
        finally:
            for reader in readers:
                reader.close()
        own = slots[at.node].to(home.device)
        same = torch.equal(own.view(torch.uint8), home.view(-1).view(torch.uint8))
        return found if same else None

    def _read(self, bucket: Bucket, specs: Sequence[ParamSpec], at: Home) -> list[Tensor]:
        layouts = [spec.layout for spec in specs]
        dtype = getattr(torch, bucket.dtype)
        slots = []
        for node in range(at.nodes):
            shards = [self._of[spec.key].read(spec.key, node, at.place) for spec in specs]
            slots.append(pack_home(shards, layouts, dtype, node))
        return slots
