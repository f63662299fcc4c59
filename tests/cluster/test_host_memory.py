"""The memory that a process may use, from made-up /proc and /sys trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from fcdp_compile.cluster.free_memory import (
    UNLIMITED,
    HostBudget,
    Limit,
    available_bytes,
    cgroup_bytes,
    detect,
    lockable_bytes,
    total_bytes,
)

GIB = 2**30
NO_LIMIT = 9223372036854771712  # in version 1 of control groups
V1, V2 = "sys/fs/cgroup/memory", "sys/fs/cgroup"


def write(root: Path, files: dict[str, object]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(f"{text}\n")
    return root


def group(folder: str, limit: object, used: int, droppable: int = 0) -> dict[str, object]:
    if folder.startswith(V1):
        return {
            f"{folder}/memory.limit_in_bytes": limit,
            f"{folder}/memory.usage_in_bytes": used,
            f"{folder}/memory.stat": f"cache 5\ninactive_file 1\ntotal_inactive_file {droppable}",
        }
    return {
        f"{folder}/memory.max": limit,
        f"{folder}/memory.current": used,
        f"{folder}/memory.stat": f"anon 5\ninactive_file {droppable}",
    }


@pytest.mark.parametrize(
    ("mount", "line"), [(V1, "4:cpu,memory:/a/b"), (V2, "0::/a/b")], ids=["v1", "v2"]
)
class TestGroups:
    """Both versions of control groups."""

    @pytest.mark.parametrize(("own", "parent", "left"), [(8, 9, 6), (9, 5, 3), (5, 5, 3)])
    def test_the_least_of_the_group_and_those_above(
        self, tmp_path: Path, mount: str, line: str, own: int, parent: int, left: int
    ) -> None:
        files = group(f"{mount}/a/b", own * GIB, 2 * GIB) | group(
            f"{mount}/a", parent * GIB, 2 * GIB
        )
        root = write(tmp_path, {"proc/self/cgroup": f"9:pids:/x\n{line}"} | files)
        assert cgroup_bytes(root) == left * GIB

    def test_files_that_can_be_dropped_are_not_used(
        self, tmp_path: Path, mount: str, line: str
    ) -> None:
        files = group(f"{mount}/a/b", 8 * GIB, 7 * GIB, droppable=4 * GIB)
        root = write(tmp_path, {"proc/self/cgroup": line} | files)
        assert cgroup_bytes(root) == 5 * GIB

    def test_a_path_outside_of_the_container(self, tmp_path: Path, mount: str, line: str) -> None:
        files = group(mount, 8 * GIB, GIB)
        root = write(tmp_path, {"proc/self/cgroup": line} | files)
        assert cgroup_bytes(root) == 7 * GIB

    def test_a_group_that_is_full(self, tmp_path: Path, mount: str, line: str) -> None:
        files = group(f"{mount}/a/b", GIB, 2 * GIB)
        assert cgroup_bytes(write(tmp_path, {"proc/self/cgroup": line} | files)) == 0

    def test_no_limit(self, tmp_path: Path, mount: str, line: str) -> None:
        limit = NO_LIMIT if mount == V1 else "max"
        files = group(f"{mount}/a/b", limit, GIB)
        assert cgroup_bytes(write(tmp_path, {"proc/self/cgroup": line} | files)) is None


def test_both_versions_at_once(tmp_path: Path) -> None:
    """A hybrid machine: version 2 without the memory controller."""
    files = {"proc/self/cgroup": "4:memory:/a\n0::/a", "sys/fs/cgroup/unified/a/cgroup.procs": ""}
    root = write(tmp_path, files | group(f"{V1}/a", 3 * GIB, GIB))
    assert cgroup_bytes(root) == 2 * GIB


def test_nothing_known_is_no_limit(tmp_path: Path) -> None:
    assert cgroup_bytes(tmp_path) is available_bytes(tmp_path) is lockable_bytes(tmp_path) is None
    assert detect(ranks_on_machine=2, ranks_in_group=2, root=tmp_path) == HostBudget(
        bytes=UNLIMITED, limit=Limit.NOTHING
    )
    write(tmp_path, {"proc/self/cgroup": "nonsense\n\n0::", "proc/meminfo": "MemAvailable:"})
    assert cgroup_bytes(tmp_path) is available_bytes(tmp_path) is None


def test_available_memory(tmp_path: Path) -> None:
    text = "MemTotal:       32879852 kB\nMemFree:         1000 kB\nMemAvailable:   2048 kB"
    assert available_bytes(write(tmp_path, {"proc/meminfo": text})) == 2 * 2**20


@pytest.mark.parametrize(
    ("total", "limits", "expected"),
    [(10, (40, 50), 10), (40, (20, 50), 20), (40, (50, 20), 20), (40, ("max", "max"), 40)],
)
def test_all_memory(
    tmp_path: Path, total: int, limits: tuple[object, object], expected: int
) -> None:
    """All memory of the machine, or a group's limit, however much is in use."""
    own, parent = (limit if limit == "max" else int(str(limit)) * GIB for limit in limits)
    files = {"proc/meminfo": f"MemTotal: {total * 2**20} kB\nMemAvailable: 5 kB"}
    files |= {"proc/self/cgroup": "0::/a/b"}
    files |= group(f"{V2}/a/b", own, 9 * GIB) | group(f"{V2}/a", parent, 9 * GIB)
    assert total_bytes(write(tmp_path, files)) == expected * GIB


def test_all_memory_of_an_unknown_system(tmp_path: Path) -> None:
    assert total_bytes(tmp_path) is None


@pytest.mark.parametrize(
    ("limit", "capabilities", "expected"),
    [
        ("8388608", "0000000000000000", 8388608),
        ("8388608", "0000000000004000", None),  # CAP_IPC_LOCK alone
        ("8388608", "000001ffffffbfff", 8388608),  # all but CAP_IPC_LOCK
        ("unlimited", "0000000000000000", None),
    ],
)
def test_locked_memory(tmp_path: Path, limit: str, capabilities: str, expected: int | None) -> None:
    files = {
        "proc/self/limits": "Limit                     Soft Limit           Hard Limit   Units\n"
        f"Max locked memory         {limit}              unlimited    bytes",
        "proc/self/status": f"Name:\tpython\nCapEff:\t{capabilities}",
    }
    assert lockable_bytes(write(tmp_path, files)) == expected


@pytest.mark.parametrize(
    ("available", "limit", "ranks", "expected", "why"),
    [
        (10, 40, (4, 4), 9 * GIB // 4, Limit.AVAILABLE),
        (40, 10, (4, 4), 9 * GIB // 4, Limit.CGROUP),
        (40, 10, (8, 1), 40 * GIB * 9 // 10 // 8, Limit.AVAILABLE),  # a container for each rank
        (80, 5, (8, 1), 5 * GIB * 9 // 10, Limit.CGROUP),
    ],
)
def test_a_rank_gets_its_share_of_the_tightest(
    tmp_path: Path, available: int, limit: int, ranks: tuple[int, int], expected: int, why: Limit
) -> None:
    files = {
        "proc/meminfo": f"MemAvailable: {available * 2**20} kB",
        "proc/self/cgroup": "0::/",
    } | group(V2, limit * GIB, 0)
    found = detect(ranks_on_machine=ranks[0], ranks_in_group=ranks[1], root=write(tmp_path, files))
    assert found == HostBudget(bytes=expected, limit=why)


def test_this_machine_has_some() -> None:
    found = detect(ranks_on_machine=1, ranks_in_group=1)
    assert 0 < found.bytes < UNLIMITED


def test_a_budget_is_not_negative() -> None:
    with pytest.raises(ValueError, match="cannot be -1 bytes"):
        HostBudget(bytes=-1, limit=Limit.OPTION)
