"""Tests of this folder run on the simulated device."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture(autouse=True)
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler builds the device")
    monkeypatch.setenv("FCDP_TEST_DEVICE", "sim")
