"""The options of torch.compile, and the messages about wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from fcdp_compile.backend.options import Options
from fcdp_compile.cluster.profile import CLUSTERS, write_profile
from fcdp_compile.errors import ProfileError
from fcdp_compile.plan.cost import MACHINES


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("FCDP_DUMP", raising=False)


def test_defaults() -> None:
    assert Options.parse(None) == Options.parse({}) == Options()
    assert Options().bucket_bytes is None
    assert Options().in_flight_bytes is None
    assert (Options().compute_on("cpu"), Options().compute_on("cuda")) == ("eager", "inductor")


@pytest.mark.parametrize("compute", ["inductor", "eager"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_chosen_compute_holds_for_every_device(compute: str, device: str) -> None:
    assert Options.parse({"compute": compute}).compute_on(device) == compute


@pytest.mark.parametrize("folder", ["here", Path("here")])
def test_a_folder_may_be_text_or_path(folder: str | Path) -> None:
    assert Options.parse({"dump": folder}).dump == Path("here")


def test_the_environment_names_the_folder_unless_an_option_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FCDP_DUMP", "there")
    assert Options.parse({}).dump == Path("there")
    assert Options.parse({"dump": "here"}).dump == Path("here")
    monkeypatch.setenv("FCDP_DUMP", "")
    assert Options.parse({}).dump is None


@pytest.mark.parametrize(
    ("given", "runs"), [(None, 0), (False, 0), (0, 0), (True, 3), (1, 1), (2, 2), (1000, 1000)]
)
def test_how_many_runs_are_recorded(given: bool | int | None, runs: int) -> None:
    assert Options.parse({"record": given, "dump": "here"}).record == runs


def test_recording_needs_a_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    for given in (True, 1):
        with pytest.raises(ValueError, match="option 'record' needs the option 'dump'"):
            Options.parse({"record": given})
    assert Options.parse({"record": 0}) == Options.parse({"record": False}) == Options()
    monkeypatch.setenv("FCDP_DUMP", "there")
    assert Options.parse({"record": 2}).record == 2


@pytest.mark.parametrize(("mb", "size"), [(1, 2**20), (0.5, 2**19), (25.0, 25 * 2**20)])
def test_sizes_are_in_mib(mb: float, size: int) -> None:
    assert Options.parse({"bucket_mb": mb}).bucket_bytes == size
    assert Options.parse({"in_flight_mb": mb}).in_flight_bytes == size


def test_what_is_in_flight_may_be_left_to_the_schedule() -> None:
    assert Options.parse({"in_flight_mb": None}) == Options()


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (None, None),
        (0, 0),
        (12345, 12345),
        ("0B", 0),
        ("17 B", 17),
        ("64GiB", 64 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("2KB", 2000),
        ("0.5TB", 500 * 10**9),
        ("3TiB", 3 * 2**40),
    ],
)
def test_host_memory_is_in_bytes(given: int | str | None, size: int | None) -> None:
    assert Options.parse({"host_memory": given}).host_memory == size


@pytest.mark.parametrize(
    ("given", "size"),
    [
        (None, None),
        (1, 1),
        (40 * 2**30, 40 * 2**30),
        ("40GiB", 40 * 2**30),
        ("1.5 MiB", 3 * 2**19),
        ("2GB", 2 * 10**9),
        ("7KB", 7000),
        ("7B", 7),
    ],
)
def test_device_memory_is_bytes_or_a_text(given: int | str | None, size: int | None) -> None:
    assert Options.parse({"device_memory": given}).device_memory == size


@pytest.mark.parametrize("threshold", [1, 0.9, 1e-9])
def test_a_threshold_is_a_part(threshold: float) -> None:
    assert Options.parse({"memory_threshold": threshold}).memory_threshold == threshold


@pytest.mark.parametrize("as_given", [str, Path])
def test_a_machine_may_be_what_a_profile_holds(
    tmp_path: Path, as_given: type[str] | type[Path]
) -> None:
    profile = CLUSTERS["a40x8-1gbe"]
    write_profile(tmp_path / "cluster.json", profile)
    options = Options.parse({"machine": as_given(tmp_path / "cluster.json")})
    assert options.machine_on("cpu") == options.machine_on("cuda") == profile.machine


def test_a_machine_may_be_where_it_differs() -> None:
    inter = Options.parse({"machine": {"inter": {"bytes_per_s": 7}}}).machine_on("cpu").inter
    assert (inter.bytes_per_s, inter.latency_s) == (7, MACHINES["cpu"].inter.latency_s)


def test_a_profile_that_is_missing_or_damaged(tmp_path: Path) -> None:
    path = tmp_path / "cluster.json"
    with pytest.raises(
        ValueError, match=r"option 'machine': cannot .*cluster.json' \(No such file"
    ):
        Options.parse({"machine": path})
    with pytest.raises(ProfileError, match="is not a regular file"):
        Options.parse({"machine": tmp_path})
    write_profile(path, CLUSTERS["a40x8-1gbe"])
    path.write_text(path.read_text().replace('"flops_per_s": ', '"flops_per_s": -'))
    with pytest.raises(ProfileError, match=r"option 'machine': .*cluster.json: machine: is impos"):
        Options.parse({"machine": path})
    with pytest.raises(ValueError, match="option 'machine'"):
        Options.parse({"machine": path})


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ValueError, match="unknown option 'bucket_mib'") as caught:
        Options.parse({"bucket_mib": 3})
    message = str(caught.value)
    assert all(known in message for known in ("compute", "dump", "bucket_mb", "in_flight_mb"))
    assert message.endswith("did you mean 'bucket_mb'?")
    with pytest.raises(ValueError, match="unknown option 'zzz'") as caught:
        Options.parse({"zzz": 3})
    assert "did you mean" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"compute": "fast"}, ValueError, "'inductor' or 'eager', not 'fast'"),
        ({"compute": 1}, TypeError, "'inductor' or 'eager', not int"),
        ({"compute": True}, TypeError, "not bool"),
        ({"dump": 3}, TypeError, "a folder's path, not int"),
        ({"bucket_mb": "25"}, TypeError, "a number of MiB, not str"),
        ({"bucket_mb": True}, TypeError, "a number of MiB, not bool"),
        ({"bucket_mb": 0}, ValueError, "between 0 and"),
        ({"bucket_mb": -1}, ValueError, "not -1"),
        ({"bucket_mb": float("nan")}, ValueError, "not nan"),
        ({"bucket_mb": float("inf")}, ValueError, "not inf"),
        ({"machine": 3}, TypeError, "a mapping such as"),
        ({"machine": {"intre": {}}}, ValueError, "has no 'intre'"),
        ({"machine": {"inter": {"speed": 1}}}, ValueError, "a link has no 'speed'"),
        ({"machine": {"inter": {"bytes_per_s": 0}}}, ValueError, "bytes_per_s > 0"),
        ({"machine": {"flops_per_s": "fast"}}, TypeError, "must be a number, not str"),
        ({"machine": {"flops_per_s": 0}}, ValueError, "must be above zero, not 0"),
        ({"host_memory": 1.5}, TypeError, "a text such as '64GiB', not float"),
        ({"host_memory": True}, TypeError, "not bool"),
        ({"host_memory": -1}, ValueError, "between 0 and 4611686018427387903 bytes, not -1"),
        ({"host_memory": "64"}, ValueError, "one of the units B, KB, .*, not '64'"),
        ({"host_memory": "64gib"}, ValueError, "not '64gib'"),
        ({"host_memory": "64 G"}, ValueError, "not '64 G'"),
        ({"host_memory": "-1GiB"}, ValueError, "not '-1GiB'"),
        ({"host_memory": "1e3 MB"}, ValueError, "not '1e3 MB'"),
        ({"host_memory": " 1MB"}, ValueError, "not ' 1MB'"),
        ({"host_memory": "1MB\n"}, ValueError, "not '1MB"),
        ({"host_memory": "٣MB"}, ValueError, "not '٣MB'"),
        ({"host_memory": "99999999TiB"}, ValueError, "between 0 and"),
        ({"in_flight_mb": "all"}, TypeError, "'in_flight_mb' must be a number of MiB, not str"),
        ({"in_flight_mb": 0}, ValueError, "option 'in_flight_mb' must be between 0 and"),
        ({"record": 2.0}, TypeError, "true, false or a number of runs, not float"),
        ({"record": "yes"}, TypeError, "a number of runs, not str"),
        ({"record": -1, "dump": "here"}, ValueError, "between 0 and 1000, not -1"),
        ({"record": 1001, "dump": "here"}, ValueError, "between 0 and 1000, not 1001"),
        ({3: 1}, ValueError, "unknown option 3"),
        ({"memory_threshold": "0.9"}, TypeError, "must be a number, not str"),
        ({"memory_threshold": True}, TypeError, "must be a number, not bool"),
        ({"memory_threshold": 0}, ValueError, "above 0 and at most 1, not 0"),
        ({"memory_threshold": 1.01}, ValueError, "not 1.01"),
        ({"memory_threshold": float("nan")}, ValueError, "not nan"),
        ({"device_memory": 4.0}, TypeError, "such as '64GiB', not float"),
        ({"device_memory": True}, TypeError, "not bool"),
        ({"device_memory": -1}, ValueError, "between 0 and .*, not -1"),
        ({"device_memory": "40"}, ValueError, "a number with one of the units B, KB"),
        ({"device_memory": "40gib"}, ValueError, "not '40gib'"),
        ({"device_memory": "-1GiB"}, ValueError, "not '-1GiB'"),
    ],
)
def test_bad_values(options: dict, error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        Options.parse(options)
