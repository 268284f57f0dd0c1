"""What the one who reads a report may ask of all instruments."""

from typing import NamedTuple


class Asked(NamedTuple):
    """How closely to look.

    Attributes:
        order: n of the n-grams of a text.
        dimensions: of their next-word matrix, at most; None leaves it to the subject.
        precision: in which log-probabilities are computed for their rank, "float32"
            or "float64".
    """

    order: int = 2
    dimensions: int | None = None
    precision: str = "float32"


USUAL = Asked()
