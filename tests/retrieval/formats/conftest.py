"""Failing assertions of samples.py show their values, as those of tests do."""

import pytest

pytest.register_assert_rewrite("tests.retrieval.formats.samples")
