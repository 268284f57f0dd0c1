"""Figures that show names as they are.

Runs, texts and models are called whatever their users like. Matplotlib takes what
stands between two `$` for a formula, and fails if it is none.
"""

import io
import pathlib

import matplotlib.artist
import matplotlib.axis
import matplotlib.backend_bases
import matplotlib.figure
import matplotlib.text

from softbottle import files


class Figure(matplotlib.figure.Figure):
    """A figure in which a `$` is a dollar, but for the powers that ticks are."""

    def draw(self, renderer: matplotlib.backend_bases.RendererBase) -> None:
        """Draw all that is in the figure."""
        for text in set(self.findobj(matplotlib.text.Text)) - _tick_labels(self):
            text.set_parse_math(False)
        super().draw(renderer)

    def png(self) -> bytes:
        """The figure as a picture."""
        buffer = io.BytesIO()
        self.savefig(buffer, format="png", dpi=150)
        return buffer.getvalue()

    def save(self, path: pathlib.Path) -> None:
        """Write the picture, all of it or nothing."""
        files.replace(path, self.png())


def _tick_labels(figure: matplotlib.figure.Figure) -> set[matplotlib.artist.Artist]:
    return {
        text
        for axis in figure.findobj(matplotlib.axis.Axis)
        for tick in (*axis.majorTicks, *axis.minorTicks)
        for text in (tick.label1, tick.label2)
    }
