"""What tests of races share."""

import pytest

from softbottle.bench import race, timing


@pytest.fixture
def brief(monkeypatch):
    """One short round of calls: no test asks how long anything takes."""
    monkeypatch.setattr(timing, "LEAST_ROUNDS", 1)
    monkeypatch.setattr(timing, "_ROUND_SECONDS", 1e-6)
    monkeypatch.setattr(race, "CPU_PRODUCT", 16)
