"""Make failed assertions of the shared checks show their values, as assertions in tests do."""

import pytest

pytest.register_assert_rewrite("tests.passes.lowered", "tests.passes.schedule_checks")
