"""Losses with something asked of them, beside plain ones."""

import pytest

from softbottle.bench import option, race, table, worker


def race_of(*asked, heads=None):
    settings = {"asked": asked, "heads": heads, "seconds": 0.01}
    result = race.head(worker.in_process, ["tiny"], ["blocked"], [], **settings)
    return result, {row["variant"]: row for row in result["rows"]}


@pytest.mark.slow
def test_each_is_checked_and_set_beside_the_plain_loss():
    result, rows = race_of("smoothing")
    names = ("plain", "smoothing")
    assert list(rows) == [f"{head}, {n}" for head in option.HEADS for n in names]
    assert all(row["status"] == "ok" and row["same_bits"] for row in rows.values())
    for head in option.HEADS:
        plain, smoothed = rows[f"{head}, plain"], rows[f"{head}, smoothing"]
        assert "plain" not in plain["over"]
        assert smoothed["over"]["plain"] == smoothed["ms"] / smoothed["beside_ms"]
    assert "/ plain" in table.render(result)


@pytest.mark.slow
def test_a_formula_that_is_not_kept_is_not_timed(monkeypatch):
    (_, dense), (smoothed, _) = option.OPTIONS["plain"], option.OPTIONS["smoothing"]
    monkeypatch.setitem(option.OPTIONS, "smoothing", (smoothed, dense))
    _, rows = race_of("smoothing", heads=["softmax"])
    assert list(rows) == ["softmax, plain", "softmax, smoothing"]
    row = rows["softmax, smoothing"]
    assert row["status"] == "wrong" and "ms" not in row


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no option is called 'smooth'; there are"):
        race_of("smooth")
    with pytest.raises(ValueError, match="no head is called 'moc-7'; there are"):
        race_of("smoothing", heads=["moc-7"])
