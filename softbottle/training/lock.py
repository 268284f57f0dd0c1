"""One trainer per folder: a lock that dies with the process that has it.

The lock is `flock` on `workdir/lock`, which the kernel takes back when its process
ends, however it ends. That is enough on local disks, and on NFS and Lustre (mounted
with `flock`), which pass it on to their server. Other shared file systems (gcsfuse
among them) lock within one machine or not at all. So the file also holds who has it
and a heartbeat, a number that its owner raises every `BEAT_SECONDS`. A process that
finds an owner of whom `flock` tells nothing, on another machine or where there are no
locks, watches that number first, and an owner that finds somebody else's name in the
file stops.
"""

import contextlib
import errno
import fcntl
import json
import os
import pathlib
import socket
import sys
import threading
import time
import uuid
from typing import Any

FILE = "lock"
BEAT_SECONDS = 10.0
# Longer than what a file system may hold back of another machine's writes.
WATCH_SECONDS = 3 * BEAT_SECONDS
# Errors of `flock` where a file system has no locks.
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)
_LENGTH = 512  # of the file: always overwritten as a whole


class LockedError(ValueError):
    """Another process trains in the folder."""


class Lock:
    """Holds a folder until `release`, the end of its `with`, or of the process.

    Args:
        workdir: made if it does not exist.

    Raises:
        LockedError: naming the host and the process that has the folder.
    """

    def __init__(self, workdir: pathlib.Path):
        workdir.mkdir(parents=True, exist_ok=True)
        self._workdir, self._beat = workdir, 0
        self._me = {
            "host": socket.gethostname(),
            "boot": _boot(),
            "process": os.getpid(),
            "token": uuid.uuid4().hex,
        }
        self._file = os.open(workdir / FILE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            self._acquire()
        except BaseException:
            os.close(self._file)
            raise
        self._lost: dict[str, Any] | None = None
        self._done = threading.Event()
        self._beating = threading.Thread(target=self._beats, daemon=True)
        self._beating.start()

    def __enter__(self) -> "Lock":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def check(self) -> None:
        """Raise LockedError if another process has taken the folder meanwhile."""
        if self._lost is not None:
            raise LockedError(_in_use(self._workdir, self._lost))

    def release(self) -> None:
        """Give the folder back."""
        self._done.set()
        self._beating.join()
        if self._lost is None:
            self._write({})
        os.close(self._file)

    def _acquire(self):
        locked = True
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise LockedError(_in_use(self._workdir, self._read())) from None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                raise
            locked = False
        owner = self._read()
        here = all(owner.get(key) == self._me[key] for key in ("host", "boot"))
        # On this machine a lock that was obtained tells that the owner is gone.
        if owner and not (locked and here):
            self._watch(owner)
        self._write(self._me | {"beat": 0})

    def _watch(self, owner):
        """Return when an owner has been silent for long enough."""
        print(
            f"{self._workdir} was not given back by {_name(owner)}; waiting "
            f"{WATCH_SECONDS:g} s to see whether it is still at work",
            file=sys.stderr,
        )
        end = time.monotonic() + WATCH_SECONDS
        while time.monotonic() < end:
            time.sleep(min(1.0, WATCH_SECONDS / 10))
            if (now := self._read()) != owner:
                if now:
                    raise LockedError(_in_use(self._workdir, now))
                return

    def _beats(self):
        while not self._done.wait(BEAT_SECONDS):
            # A file system that is away for a while is the checkpoints' affair.
            with contextlib.suppress(OSError):
                owner = self._read()
                if owner.get("token") not in (None, self._me["token"]):
                    self._lost = owner
                    return
                self._beat += 1
                self._write(self._me | {"beat": self._beat})

    def _read(self):
        """Who has the folder by what the file says; empty if nobody."""
        # Opened anew: a network file system looks for other machines' writes then.
        try:
            with (self._workdir / FILE).open("rb") as file:
                owner = json.loads(file.read(_LENGTH))
        except ValueError:
            return {}
        return owner if isinstance(owner, dict) else {}

    def _write(self, owner):
        os.pwrite(self._file, json.dumps(owner).encode().ljust(_LENGTH), 0)
        os.fsync(self._file)


def _boot():
    """What tells this boot of this machine from others, where the system says so."""
    try:
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _name(owner):
    host, process = owner.get("host", "unknown"), owner.get("process", "unknown")
    return f"process {process} on host {host}"


def _in_use(workdir, owner):
    return (
        f"{workdir} is in use: {_name(owner)} trains there. Stop it, or give another "
        "--workdir."
    )
