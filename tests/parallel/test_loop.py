"""What several processes do together at the end of each step of a run."""

from tests.parallel.processes import on_processes
from trivium.train.loop import _agreed


def agreed(world):
    second = world.rank == 1
    return [
        _agreed(world, False, None, False),
        _agreed(world, second, None, False),  # Ctrl-C reaches the second alone
        _agreed(world, False, 10 + world.rank, False),  # each has timed its own steps
        _agreed(world, False, 10 if second else None, second),  # the second's clock is ahead
        _agreed(world, False, None, not second),
    ]


def test_a_signal_to_any_stops_all_and_the_first_ones_clock_counts():
    want = [(False, None, False), (True, None, False), (False, 10, False), (False, None, False), (False, None, True)]
    assert on_processes(2, agreed) == [want, want]
