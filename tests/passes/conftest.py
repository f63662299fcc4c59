"""Failed assertions of the checks that several tests share show their values, as those in tests do."""

import pytest

pytest.register_assert_rewrite("tests.passes.lowered", "tests.passes.schedule_checks")
