import json

import matplotlib.image
import pytest

from softbottle.bench import plot


def result(sweep):
    rows = []
    for variant, constant, slope in (("auto", 0.5, 0.1), ("torch.compile", 1.0, 0.3)):
        for size in (1, 2, 4, 8):
            components, vocab = (size, 50) if sweep == "components" else (3, size)
            case = ["a", 16, components, 24, vocab]
            row = {"variant": variant, "case": case, "status": "ok"}
            rows.append(row | {"ms": constant + slope * size})
    rows.append({"variant": "torch.compile", "status": "failed", "reason": "memory"})
    rows.append(rows[0] | {"variant": "blocked", "same_program_as": "auto"})
    return {"sweep": sweep, "device": "cpu", "rows": rows}


def test_both_sweeps_are_drawn_on_white_with_the_line_that_fits(tmp_path):
    paths = []
    for sweep in ("components", "vocab"):
        paths.append(tmp_path / f"{sweep}.json")
        paths[-1].write_text(json.dumps(result(sweep)))
    plot.cost(paths, tmp_path / "results" / "cost.png")
    image = matplotlib.image.imread(tmp_path / "results" / "cost.png")
    assert image.shape[1] > 2 * image.shape[0]
    assert (image[0, 0, :3] == 1).all(), "white, whatever the page is"


@pytest.mark.parametrize("sweep", ["components", "vocab"])
def test_a_line_has_the_constant_and_slope_of_its_points(sweep):
    rows = [r for r in result(sweep)["rows"] if r["variant"] == "auto"]
    _, _, constant, slope = plot.line(rows, sweep)
    assert constant == pytest.approx(0.5) and slope == pytest.approx(0.1)


def test_a_race_that_is_no_sweep_cannot_be_drawn(tmp_path):
    path = tmp_path / "head.json"
    path.write_text(json.dumps({"rows": [], "sweep": None}))
    with pytest.raises(ValueError, match="is not the result of"):
        plot.cost([path], tmp_path / "cost.png")
    failed = [row | {"status": "failed"} for row in result("vocab")["rows"]]
    path.write_text(json.dumps(result("vocab") | {"rows": failed}))
    with pytest.raises(ValueError, match="head.json has no variant that was timed"):
        plot.cost([path], tmp_path / "cost.png")
