"""The options of `torch.compile(..., backend="fcdp", options={...})`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from fcdp_compile.cluster.profile import read_profile
from fcdp_compile.cluster.quantities import parse_bytes
from fcdp_compile.errors import ArgumentError, ProfileError, did_you_mean
from fcdp_compile.plan.cost import MACHINES, Machine, assumed_machine, machine_from

_RECORDED_RUNS = 3  # with fewer, one disturbed run could decide the median
_MAX_RECORDED_RUNS = 1000  # a thousand steps fill 40 MB

DEFAULT_THRESHOLD = 0.9  # tau; the rest is for workspaces and fragmentation, which no plan sees


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Checked options.

    compute: "inductor", "eager" (ATen kernels) or None for the device's default.
    dump: folder for plans and printed graphs, or None.
    bucket_mb: size of a full bucket in MiB (2**20 bytes) of gathered parameters; None: by the cost model.
    in_flight_mb: MiB of gathered parameters and of gradients in transfer that may be alive at once; None: the
    least that the graph needs and a few more buckets.
    host_memory: bytes of host memory that the caches of one node may take; None: the free memory.
    machine: speeds of the cluster, or only those that differ from `cost.MACHINES`; equal on every rank.
    memory_threshold: tau; cached node shards stay on the device while its memory in use, predicted and at run
    time measured, is at most this part of its memory.
    device_memory: bytes of the device's memory; None: of the smallest GPU of all ranks (a CPU caches none).
    record: how many runs of each compiled graph and variant are timed, after a first run.
    """

    compute: str | None = None
    dump: Path | None = None
    bucket_mb: float | None = None
    in_flight_mb: float | None = None
    host_memory: int | None = None
    machine: Machine | Mapping[str, Any] = field(default_factory=dict)
    memory_threshold: float = DEFAULT_THRESHOLD
    device_memory: int | None = None
    record: int = 0

    @property
    def bucket_bytes(self) -> int | None:
        """Size of a full bucket in bytes."""
        return None if self.bucket_mb is None else int(self.bucket_mb * 2**20)

    @property
    def in_flight_bytes(self) -> int | None:
        """Bytes that may be in flight at once; None: the schedule decides."""
        return None if self.in_flight_mb is None else int(self.in_flight_mb * 2**20)

    def machine_on(self, device_type: str) -> Machine:
        """The speeds of the cluster; assumed ones where none were given."""
        if isinstance(self.machine, Machine):
            return self.machine
        return machine_from(self.machine, assumed_machine(device_type))

    def compute_on(self, device_type: str) -> str:
        """The compiler of the segments: on CPUs eager by default, as compiling outlasts a trial run."""
        return self.compute or ("eager" if device_type == "cpu" else "inductor")

    @staticmethod
    def parse(options: Mapping[str, Any] | None) -> Options:
        """Check a user's options.

        Raises: ValueError for an unknown name or value, TypeError for a wrong type, each with those that are
        known; ArgumentError for a cluster profile that cannot be read.
        """
        known = [f.name for f in fields(Options)]
        given = dict(options or {})
        for name in given:
            if name not in known:
                hint = did_you_mean(str(name), known)
                raise ArgumentError(
                    f"unknown option {name!r} of backend 'fcdp'; known are {', '.join(known)}{hint}"
                )
        dump = _folder(given.get("dump", os.environ.get("FCDP_DUMP") or None))
        return Options(
            compute=_compute(given.get("compute")),
            dump=dump,
            bucket_mb=_size("bucket_mb", given.get("bucket_mb")),
            in_flight_mb=_size("in_flight_mb", given.get("in_flight_mb")),
            host_memory=_bytes("host_memory", given.get("host_memory")),
            machine=_machine(given.get("machine")),
            memory_threshold=_part(given.get("memory_threshold", DEFAULT_THRESHOLD)),
            device_memory=_bytes("device_memory", given.get("device_memory")),
            record=_runs(given.get("record"), dump),
        )


def _compute(value: Any) -> str | None:
    if value in (None, "inductor", "eager"):
        return None if value is None else str(value)
    told = repr(value) if isinstance(value, str) else type(value).__name__
    raise ArgumentError(f"option 'compute' must be 'inductor' or 'eager', not {told}")


def _folder(value: Any) -> Path | None:
    if value is None:
        return None
    if not isinstance(value, str | os.PathLike):
        raise ArgumentError(f"option 'dump' must be a folder's path, not {type(value).__name__}")
    if not str(value):
        raise ArgumentError("option 'dump' is empty; give the path of a folder or leave it out")
    return Path(value)


def _runs(value: Any, dump: Path | None) -> int:
    if value is None:
        return 0
    if not isinstance(value, int):
        raise ArgumentError(
            f"option 'record' must be true, false or a number of runs, not {type(value).__name__}"
        )
    runs = _RECORDED_RUNS if value is True else int(value)
    if not 0 <= runs <= _MAX_RECORDED_RUNS:
        raise ArgumentError(
            f"option 'record' must be between 0 and {_MAX_RECORDED_RUNS}, not {value}"
        )
    if runs and dump is None:
        raise ArgumentError(
            "option 'record' needs the option 'dump' (or FCDP_DUMP), the folder that it writes to"
        )
    return runs


def _size(name: str, value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(f"option {name!r} must be a number of MiB, not {type(value).__name__}")
    if not 0 < value < 2**20:
        raise ArgumentError(f"option {name!r} must be between 0 and {2**20} MiB, not {value}")
    return float(value)


def _machine(value: Any) -> Machine | Mapping[str, Any]:
    if value is None:
        return {}
    if isinstance(value, str | os.PathLike):
        return _measured_machine(Path(value))
    if not isinstance(value, Mapping):
        raise ArgumentError(
            "option 'machine' must be a mapping such as {'inter': {'bytes_per_s': 125e6}} or the path of a "
            f"cluster profile, not {type(value).__name__}"
        )
    machine_from(value, MACHINES["cpu"])  # raises if it is wrong
    return value


def _measured_machine(path: Path) -> Machine:
    try:
        return read_profile(path).rank_machine
    except ProfileError as error:
        raise ProfileError(f"option 'machine': {error}") from None
    except OSError as error:
        raise ArgumentError(
            f"option 'machine': cannot read the cluster profile {str(path)!r} ({error.strerror}); give the "
            "path of a file that fcdp probe wrote, on every rank"
        ) from error


def _part(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ArgumentError(
            f"option 'memory_threshold' must be a number, not {type(value).__name__}"
        )
    if not 0 < value <= 1:
        raise ArgumentError(f"option 'memory_threshold' must be above 0 and at most 1, not {value}")
    return float(value)


def _bytes(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ArgumentError(
            f"option {name!r} must be a number of bytes or a text such as '64GiB', not "
            f"{type(value).__name__}"
        )
    if isinstance(value, int):
        size = value
    else:
        try:
            size = parse_bytes(value)
        except ValueError as error:
            raise ArgumentError(f"option {name!r} {error}") from None
    if not 0 <= size < 2**62:
        raise ArgumentError(
            f"option {name!r} must be between 0 and {2**62 - 1} bytes, not {value!r}"
        )
    return size
