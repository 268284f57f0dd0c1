"""Files that were damaged or made to harm: found, or refused in one line.

The suite runs a few of each; all of them with

    SOFTBOTTLE_STRESS=1 python -m pytest tests/hostile_test.py -n 0 -s

prints how many were refused. A larger number takes as many rounds, of other files.
"""

import collections
import io
import json
import os
import pathlib
import random
import shutil
import subprocess
import sys
import zipfile

import numpy as np
import pytest

from softbottle import config
from softbottle.data import corpus
from tests import ROOT

ROUNDS = int(os.environ.get("SOFTBOTTLE_STRESS", 0))
FLIPS = 40 * ROUNDS or 4
CRAFTED = 200 * ROUNDS or 40
CACHED = ("train.int32", "valid.int32", "test.int32", "vocab.txt")
# Beyond what Python, NumPy and the package take before the first file is read.
MEMORY_MIB = 512
SECONDS = 20  # per file


def report(what, outcomes):
    print(f"\n{what}: {dict(sorted(outcomes.items()))}")


@pytest.fixture
def settings(tmp_path):
    """The settings of a text of some hundred words, which is written too."""
    words = np.random.default_rng(0).integers(0, 97, (60, 9))
    text = "".join(" ".join(f"w{n}" for n in line) + "\n" for line in words)
    (tmp_path / "text").mkdir()
    for name in ("train", "valid", "test"):
        (tmp_path / "text" / f"{name}.txt").write_text(text)
    data = config.Data()
    data.name, data.path = "text", str(tmp_path / "text")
    data.cache = str(tmp_path / "cache")
    return data


def flip(path, bit):
    raw = bytearray(path.read_bytes())
    raw[bit // 8] ^= 1 << bit % 8
    path.write_bytes(raw)


@pytest.mark.parametrize("name", [*CACHED, "manifest.json"])
def test_no_changed_bit_of_the_cache_is_silent(settings, name):
    sound = corpus.load(settings)
    expected = *(ids.tolist() for ids in sound[:3]), sound.vocab.words
    (folder,) = pathlib.Path(settings.cache).iterdir()
    path, moment = folder / name, random.Random(ROUNDS)
    outcomes = collections.Counter()
    for bit in moment.sample(range(8 * path.stat().st_size), FLIPS):
        shutil.copytree(folder, folder.parent / "kept")
        flip(path, bit)
        try:
            made = corpus.load(settings)
        except ValueError as error:
            outcomes["refused"] += 1
            assert str(folder) in str(error) and "delete it" in str(error)
            # What the message asks for.
            shutil.rmtree(folder)
            made = corpus.load(settings)
            shutil.rmtree(folder)
        else:
            outcomes["harmless"] += 1
            shutil.rmtree(folder)
        assert (*(ids.tolist() for ids in made[:3]), made.vocab.words) == expected
        (folder.parent / "kept").rename(folder)
    report(f"flips in {name}", outcomes)
    assert outcomes["refused"] == FLIPS or name == "manifest.json"


def damaged(raw, moment):
    """A file of bytes with one to three things wrong with it."""
    raw = bytearray(raw)
    for _ in range(moment.randint(1, 3)):
        kind, at = moment.randrange(5), moment.randrange(max(len(raw), 1))
        if kind == 0:
            raw[at : at + 1] = bytes([moment.randrange(256)])
        elif kind == 1:
            raw = raw[:at]
        elif kind == 2:
            raw[at : at + 8] = moment.choice(NUMBERS)
        elif kind == 3:
            raw[at:at] = moment.randbytes(moment.randint(1, 20))
        else:
            raw[at : at + moment.randint(1, 20)] = b""
    return bytes(raw)


NUMBERS = [
    number.to_bytes(8, "little")
    for number in (0, 1, 9, 2**16, 2**31 - 1, 2**32, 2**40, 2**63 - 1, 2**64 - 1)
]


def in_header(raw, moment, length):
    """Damage to the first `length` bytes, where all the sizes are."""
    return damaged(raw[:length], moment) + raw[length:]


def make_arrays(folder, moment):
    """Damaged .npz and .npy files, with sound checksums around some of them."""
    made = {"hidden": np.ones((40, 5)), "table": np.ones((17, 5), np.float32)}
    made |= {"labels": np.arange(40), "names": np.array(["a", "b"])}
    for number in range(CRAFTED):
        raw = {name: io.BytesIO() for name in made}
        for name, array in made.items():
            np.save(raw[name], array)
        raw = {name: buffer.getvalue() for name, buffer in raw.items()}
        victim = moment.choice(list(raw))
        raw[victim] = lie(raw[victim], moment)
        if number % 4 == 0:
            (folder / f"{number}.npy").write_bytes(raw[victim])
            continue
        path = folder / f"{number}.npz"
        method = moment.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
        with zipfile.ZipFile(path, "w", method) as file:
            for name, content in raw.items():
                file.writestr(f"{name}.npy", content)
        if number % 4 == 1:
            path.write_bytes(damaged(path.read_bytes(), moment))
        elif number % 4 == 2:
            path.write_bytes(lying_sizes(path.read_bytes(), moment))


def lie(raw, moment):
    """An array whose header has another shape or type, or damage in it."""
    if moment.random() < 0.4:
        return in_header(raw, moment, 128)
    shape = moment.choice(["(%d,)", "(%d, 5)", "(5, %d)", "(-1, %d)", "%d", "((%d,),)"])
    shape %= moment.choice([0, 39, 2**20, 2**31, 2**40, 2**62, 2**64])
    kind = moment.choice(
        ["<f8", "<f4", "|O", "<c16", "<U9", "<U0", "<M8[s]", "|V9", "?"]
    )
    text = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}"
    return raw[:10] + text.ljust(117).encode() + b"\n" + raw[128:]


def lying_sizes(raw, moment):
    """A zip file whose directory gives one of its members another size."""
    raw, place = bytearray(raw), raw.find(b"PK\x01\x02")
    at = place + moment.choice([20, 24])  # compressed, uncompressed
    size = moment.choice([0, 1, 2**20, 2**28, 2**31, 2**32 - 2])
    raw[at : at + 4] = size.to_bytes(4, "little")
    return bytes(raw)


# Runs in a process of its own, whose memory is limited once all is imported.
READ = """
import json, pathlib, resource, signal, sys
from softbottle.analysis.sources import arrays

READERS = {".npz": arrays.load, ".npy": arrays.load_one}
folder, memory, seconds = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
used = int(pathlib.Path("/proc/self/statm").read_text().split()[0])
limit = used * resource.getpagesize() + memory * 2**20
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
for path in sorted(pathlib.Path(folder).iterdir()):
    signal.alarm(seconds)  # a hang ends the process, and the test with it
    try:
        READERS[path.suffix](path)
        outcome, line = "read", ""
    except BaseException as error:
        outcome, line = type(error).__name__, str(error)
    print(json.dumps([path.name, outcome, line]), flush=True)
"""


def read_all(folder):
    """Of each file of a folder, what reading it ended with."""
    command = [sys.executable, "-W", "ignore", "-c", READ, str(folder)]
    answer = subprocess.run(
        [*command, str(MEMORY_MIB), str(SECONDS)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    assert answer.returncode == 0, answer.stderr[-2000:]
    return [json.loads(line) for line in answer.stdout.splitlines()]


@pytest.mark.skipif(sys.platform != "linux", reason="the memory limit is Linux's")
def test_crafted_files_are_read_or_refused_in_little_memory(tmp_path):
    make_arrays(tmp_path, random.Random(ROUNDS))
    outcomes = read_all(tmp_path)
    report("arrays", collections.Counter(outcome for _, outcome, _ in outcomes))
    assert len(outcomes) == CRAFTED
    for name, outcome, line in outcomes:
        assert outcome in ("read", "ValueError"), (name, outcome, line)
        assert outcome == "read" or (name in line and "\n" not in line), (name, line)
