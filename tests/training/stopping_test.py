import os
import signal
import threading

import pytest

from softbottle.training import stopping
from tests import ROOT, commands

IMPATIENT = """
import os, signal
from softbottle.training import stopping
with stopping.watch() as has_to_stop:
    for _ in range(2):
        os.kill(os.getpid(), signal.SIGINT)
    raise AssertionError("still here")
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_first_signal_asks_to_save_and_leave(number):
    before = signal.getsignal(number)
    with stopping.watch() as has_to_stop:
        assert not has_to_stop(1)
        os.kill(os.getpid(), number)
        assert has_to_stop(2)
    assert signal.getsignal(number) is before


def test_a_second_interrupt_leaves_at_once_and_says_what_is_safe(tmp_path):
    (tmp_path / "impatient.py").write_text(IMPATIENT)
    script = os.path.relpath(tmp_path / "impatient.py", ROOT / "launch")
    code, _, errors = commands.finish(commands.start(script))
    assert code == 130
    assert errors.splitlines()[-1] == (
        "left at once; the last complete checkpoint is intact"
    )


def test_in_another_thread_no_handler_is_set():
    before, seen = signal.getsignal(signal.SIGINT), []

    def work():
        with stopping.watch() as has_to_stop:
            seen.extend([has_to_stop(1), signal.getsignal(signal.SIGINT)])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False, before]
