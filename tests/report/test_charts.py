"""Charts: binned series, and axes with few short ticks whatever the values are."""

import math

import pytest

from deberta_ds.base.numbers import format_value
from deberta_ds.report.charts import Chart, Series, draw, summarize


def test_long_series_are_binned_and_keep_their_mean_and_extremes():
    points = [(step, math.sin(step)) for step in range(12_345)]
    thin, trend, band = summarize(points)
    assert len(thin) == len(trend) == len(band) == 240
    assert min(low for _, low, _ in band) == min(y for _, y in points)
    assert max(high for *_, high in band) == max(y for _, y in points)


FLAT = [[0.5], [0.0, 0.0, 0.0], [-1e-9, 1e-9], [1e12, 2e12], [3, 3], [1e-320, 0],
        [1e299, -1e299], [2e-3 + k * 1e-18 for k in range(9)], [1e16, 1e16 + 2],
        [11.1 + k * 1e-14 for k in range(9)], [-5e-324, 5e-324], [123_456.1, 123_456.2]]


@pytest.mark.parametrize("unit", ["number", "share", "gain", "count", "rate", "tenths"])
@pytest.mark.parametrize("values", FLAT, ids=str)
def test_flat_tiny_and_huge_values_have_few_short_ticks(values, unit):
    points = list(enumerate(values))
    for from_zero in (False, True):
        drawing = draw(Chart("x", "x", "", unit, [Series("x", points, "main", "trend")],
                             from_zero=from_zero, last_x=len(values) - 1))
        assert "nan" not in repr(drawing) and "inf" not in repr(drawing).replace("infin", "")
        texts = [text for _, text in drawing.y_ticks]
        assert 1 <= len(texts) <= 8 and max(map(len, texts)) <= 12, texts
        assert all(-1 <= top <= 101 for top, _ in drawing.y_ticks)


def test_float_noise_is_not_magnified():
    points = [(step, 2e-3 + step % 3 * 1e-18) for step in range(50)]
    drawing = draw(Chart("x", "x", "", "rate", [Series("x", points, "main", "plain")], last_x=49))
    ys = {pair.split(" ")[1] for pair in drawing.strokes[0][-1][1:].split("L")}
    assert len(ys) == 1


def test_a_share_has_no_ticks_beyond_all_of_it_and_noise_at_zero_is_flat():
    def ticks(unit, *values):
        chart = Chart("x", "x", "", unit, [Series("x", list(enumerate(values)), "main", "dots")],
                      last_x=len(values) - 1)
        return [text for _, text in draw(chart).y_ticks]

    assert "120%" not in ticks("share", 0.881, 0.881) and "100%" in ticks("share", 0.881, 0.881)
    assert "100%" in ticks("share", 0.1, 0.999) and not any(
        text.startswith("−") for text in ticks("share", 0.001, 0.5))
    assert not any("e" in text for text in ticks("gain", -1e-9, 0.0))
    assert format_value(-1e-9, "gain") == "0"


def test_a_line_of_one_point_is_seen():
    for style in ("trend", "plain", "dots"):
        drawing = draw(Chart("x", "x", "", "number", [Series("x", [(1, 2.0)], "main", style)]))
        assert "dots" in [kind for kind, *_ in drawing.strokes]
