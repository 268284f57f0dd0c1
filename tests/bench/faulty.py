"""Tasks that go wrong in every way a measurement can."""

import os
import sys
import time


def run_task(task):
    print("chatter that is no answer")
    if task["do"] == "raise":
        raise MemoryError("RESOURCE_EXHAUSTED: Out of memory while trying")
    if task["do"] == "die":
        print("illegal address", file=sys.stderr)
        os._exit(7)
    if task["do"] == "hang":
        time.sleep(600)
    return {"pid": os.getpid()}
