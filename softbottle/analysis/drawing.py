"""Figures that show names as they are.

Runs, texts and models are called whatever their users like. Matplotlib takes what
stands between two `$` for a formula, and fails if it is none.
"""

import matplotlib.artist
import matplotlib.axis
import matplotlib.backend_bases
import matplotlib.figure
import matplotlib.text


class Figure(matplotlib.figure.Figure):
    """A figure in which a `$` is a dollar, but for the powers that ticks are."""

    def draw(self, renderer: matplotlib.backend_bases.RendererBase) -> None:
        """Draw all that is in the figure."""
        for text in set(self.findobj(matplotlib.text.Text)) - _tick_labels(self):
            text.set_parse_math(False)
        super().draw(renderer)


def _tick_labels(figure: matplotlib.figure.Figure) -> set[matplotlib.artist.Artist]:
    return {
        text
        for axis in figure.findobj(matplotlib.axis.Axis)
        for tick in (*axis.majorTicks, *axis.minorTicks)
        for text in (tick.label1, tick.label2)
    }
