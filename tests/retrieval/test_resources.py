"""How many threads are used: as asked for within reason, or the faster number in a trial."""

import pytest

from retrieval import resources
from retrieval.resources import allowed, faster_threads, told_allowed, told_threads


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [
        ({1: 1.0, 2: 5.0, 4: 9.0}, 1),
        ({1: 4.0, 2: 2.0, 4: 1.0}, 4),
        ({1: 4.0, 2: 1.0, 4: 2.0}, 2),
        ({1: 0.95, 2: 1.5, 4: 1.0}, 4),  # too near to tell
    ],
)
def test_the_faster_number_of_threads_is_taken(seconds, chosen):
    count, gain = faster_threads(seconds.__getitem__, 4)
    assert count == chosen
    assert gain == pytest.approx(seconds[4] / seconds[chosen])


def test_one_processor_needs_no_trial():
    assert faster_threads(lambda _: pytest.fail("it was tried"), 1) == (1, 1.0)


def test_a_busy_moment_does_not_decide():
    moments = iter([(2, 9.0), (1, 2.0), (2, 1.0), (1, 2.0), (2, 1.0), (1, 2.0)])

    def seconds(count):
        expected, taken = next(moments)
        assert count == expected
        return taken

    assert faster_threads(seconds, 2) == (2, 1.0)


def test_what_a_trial_found_is_told_in_a_line():
    assert told_threads(1, 5.26, 2) == "1 thread: 5.3 times as fast as 2 in a trial"
    assert told_threads(2, 1.0, 2) == "2 threads: fewer are not faster in a trial"


def test_no_more_threads_than_processors(monkeypatch):
    monkeypatch.setattr(resources, "processors", lambda: 2)
    assert (allowed(1), allowed(2), allowed(100_000)) == (1, 2, 2)
    assert told_allowed(2) == ""
    assert told_allowed(100_000) == "--threads 100000: 2 are used, one a processor"
