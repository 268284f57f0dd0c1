"""What the reader of a report may set for all instruments."""

from typing import Literal, NamedTuple

Precision = Literal["float32", "float64"]


class Settings(NamedTuple):
    """How closely the instruments look.

    Attributes:
        order: n of the n-grams of a text.
        dimensions: of their next-word matrix, at most; None takes the capture's own.
        precision: in which log-probabilities are computed for their rank, "float32"
            or "float64".
    """

    order: int = 2
    dimensions: int | None = None
    precision: Precision = "float32"


DEFAULT = Settings()
