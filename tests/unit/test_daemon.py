"""Calls in threads: their order, their errors, and that none of them keeps a process from its end."""

import subprocess
import sys
import threading
import time

import pytest

from flowrl.daemon import background, in_parallel


def test_values_come_in_the_order_of_the_items_and_so_many_at_a_time():
    now, most, lock = 0, 0, threading.Lock()

    def call(item):
        nonlocal now, most
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02 * (3 - item % 3))
        with lock:
            now -= 1
        return item * item

    assert in_parallel(call, range(9), 3) == [item * item for item in range(9)] and most == 3
    assert in_parallel(call, [], 3) == []


def test_an_error_gives_up_what_is_not_begun():
    begun = []

    def call(item):
        begun.append(item)
        if item == 1:
            raise OSError("no more")
        time.sleep(0.05)

    with pytest.raises(OSError, match="no more"):
        in_parallel(call, range(100), 2)
    time.sleep(0.2)
    assert len(begun) < 10


@pytest.mark.parametrize("error", [ValueError, SystemExit, KeyboardInterrupt])
def test_whatever_a_call_raises_is_its_answer(error):
    def call():
        raise error

    assert isinstance(background(call).exception(timeout=5), error)


def test_a_process_ends_while_its_calls_go_on():
    lines = "import time; from flowrl.daemon import background; background(lambda: time.sleep(60))"
    begun = time.monotonic()
    subprocess.run([sys.executable, "-c", lines], check=True, timeout=30)
    assert time.monotonic() - begun < 20
