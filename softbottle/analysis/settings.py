"""What the reader of a report may set for all instruments."""

from typing import NamedTuple


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
    precision: str = "float32"


DEFAULT = Settings()
