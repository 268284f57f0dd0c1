"""Pictures that a test makes and does not look at."""

import pytest

from softbottle import drawing
from softbottle.analysis import curves
from softbottle.experiments import truth


def leave_out(patch: pytest.MonkeyPatch) -> None:
    """A run draws no curve and an empty quickstart.png, which takes no time."""
    patch.setattr(curves, "write", lambda workdir, title: None)
    patch.setattr(truth, "_draw", lambda *_: drawing.Figure(figsize=(1, 1)))


def leave_unpainted(patch: pytest.MonkeyPatch) -> None:
    """Figures are made, and saved as files with nothing in them."""
    patch.setattr(drawing.Figure, "save", lambda figure, path: path.write_bytes(b""))


def lay_out_only(patch: pytest.MonkeyPatch) -> None:
    """A figure is laid out, in which all of it is drawn once, and not painted."""

    def png(figure):
        figure.draw_without_rendering()
        return b"\x89PNG"

    patch.setattr(drawing.Figure, "png", png)
