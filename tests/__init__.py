"""What several test files need to know of where they are."""

import pathlib

ROOT = pathlib.Path(__file__).resolve().parents[1]
# Corpora that are not part of the project; tests that want them skip without.
CORPORA = ROOT.parent / "shared" / "data"
