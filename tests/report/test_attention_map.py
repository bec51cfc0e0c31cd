"""The attention page and the charts: their parts are the model's numbers, and read well."""

import base64
import io
import json
import math
import re

import numpy as np
import pytest
import torch
from export_cases import FAMILIES, make_release
from report_cases import Page
from test_report_browser import CHROMIUM, probed

from deberta_ds.base.errors import UserError
from deberta_ds.base.numbers import format_value
from deberta_ds.evaluate.attention_parts import attention_parts, position_similarity
from deberta_ds.model.attention.geometry import Geometry
from deberta_ds.publish.hf import write_hugging_face
from deberta_ds.release.native import write_ours
from deberta_ds.release.reader import load_backbone
from deberta_ds.report.charts import Chart, Series, draw, summarize
from deberta_ds.report.small_pages import colored, write_attention

TEXT = "The quick brown fox jumps over the lazy dog."


@pytest.mark.parametrize("family", ["v1", "v2", "v3"])
def test_parts_sum_to_the_scores_of_transformers(tmp_path, family, monkeypatch):
    """The oracle is what transformers' attention hands to its softmax, in float64."""
    transformers = pytest.importorskip("transformers")
    write_hugging_face(make_release(family), tmp_path)
    pieces, found = attention_parts(load_backbone(tmp_path), TEXT, [0, 2, 3], [0, 1, 2, 3])
    theirs = transformers.AutoModel.from_pretrained(
        tmp_path, attn_implementation="eager").eval().double()
    ids = torch.tensor([load_backbone(tmp_path).tokenizer.encode(TEXT)])
    ids = torch.cat([torch.tensor([[1]]), ids, torch.tensor([[2]])], 1)
    scores, softmax = [], torch.nn.functional.softmax

    def watched(values, *arguments, **options):
        scores.append(values)
        return softmax(values, *arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "softmax", watched)
    monkeypatch.setattr(torch, "softmax", watched)
    with torch.no_grad():
        theirs(ids)
    monkeypatch.undo()
    assert len(scores) == 4 and len(found) == 12 and len(pieces) == ids.size(1)
    for one in found:
        wanted = scores[one.layer].view(4, len(pieces), len(pieces))[one.head].numpy()
        np.testing.assert_allclose(sum(one.parts.values()), wanted, rtol=0, atol=1e-6)
        np.testing.assert_allclose(one.scores, wanted, rtol=0, atol=1e-6)
        np.testing.assert_allclose(one.probabilities.sum(-1), 1)
        assert set(one.parts) == {"content", "c2p", "p2c"}


def test_similarity_by_distance_is_that_of_the_table_rows(tmp_path):
    write_ours(make_release("v1"), tmp_path)
    model = load_backbone(tmp_path)
    table = model.backbone.trunk.encoder.relative.detach().double()
    found = position_similarity(model, [1])
    assert list(found) == ["table", "c2p", "p2c"]
    one = found["table"][0]
    slot = Geometry(64, 0).slots(torch.arange(-63, 64))
    wanted = [torch.cosine_similarity(table[row], table[64], dim=0).item() for row in slot]
    np.testing.assert_allclose(one.cosines, wanted, atol=1e-7)
    assert one.cosines[63] == pytest.approx(1) and one.distances[0] == -63


def test_colors_tell_sign_and_size():
    pixels = colored(np.array([[0.0, 1.0], [-0.5, -1.0]]))
    assert pixels[..., 3].tolist() == [[0, 255], [128, 255]]
    assert (pixels[1, 0, :3] == pixels[1, 1, :3]).all()
    assert (pixels[0, 1, :3] != pixels[1, 1, :3]).any()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page of a tiny v3 and its picture, of a hostile text."""
    root = tmp_path_factory.mktemp("attention")
    write_ours(make_release("v3"), root / "model")
    text = "<script>document.title='owned'</script> \"><img src=x> $x^2$ {{ 7 }}"
    out = root / "page.html"
    written = write_attention(str(root / "model"), text, None, None, out, png=True)
    assert written == [out, root / "page.png"]
    return out


def test_the_page_holds_the_numbers_and_the_text_as_text(page, tmp_path):
    from matplotlib.image import imread

    html = page.read_text()
    tags = Page(html)
    assert html.count("<script") == 1 and "<script>document" in tags.text
    maps = re.findall(r'data-scale="([^"]*)" data-values="([^"]*)"', html)
    assert len(maps) == 3 * 4 * 5  # layers, heads, maps
    scale = float(maps[0][0])
    content, c2p, p2c, total = (scale * np.array(json.loads(values)) for _, values in maps[:4])
    np.testing.assert_allclose(content + c2p + p2c, total, atol=2 * scale)  # rounded integers
    image = base64.b64decode(re.search(r'src="data:image/png;base64,([^"]*)"', html)[1])
    size = int(len(content) ** 0.5)
    assert imread(io.BytesIO(image)).shape == (size, size, 4)
    assert imread(page.with_suffix(".png")).shape[0] > 1000


READ_A_PAIR = """
  const head = document.querySelector('.maps'), map = head.querySelector('.map');
  const box = map.getBoundingClientRect();
  map.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + 1,
                                                     clientY: box.top + box.height - 1}));
  return {size: box.width, readout: head.querySelector('.readout').textContent};
"""


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
@pytest.mark.parametrize("width", [1400, 390])
def test_the_pointer_reads_a_pair_of_tokens(page, tmp_path, width):
    found = probed(page.read_text(), READ_A_PAIR, width, tmp_path)
    assert found["size"] > 100
    assert re.match(r"\[SEP\] . \[CLS\].*distance \d+content to content .*probability [\d.]+ %",
                    found["readout"]), found["readout"]


def test_what_cannot_be_drawn_is_said(tmp_path):
    write_ours(make_release("v3"), tmp_path / "model")
    model = load_backbone(tmp_path / "model")
    for text, message in (("", "0 tokens"), ("word " * 200, "a picture shows 1 to 126")):
        with pytest.raises(UserError, match=message):
            attention_parts(model, text, [0], [0])
    with pytest.raises(UserError, match="layer 4: the model has layers 0 to 3"):
        attention_parts(model, TEXT, [4], [0])
    with pytest.raises(UserError, match="head -1: the model has heads 0 to 3"):
        attention_parts(model, TEXT, [0], [-1])
    with pytest.raises(UserError, match="too many for a report"):
        write_attention(str(tmp_path / "model"), "a b c d e f g h i j k l m n o p " * 3,
                        list(range(4)) * 40, [0, 1, 2, 3], tmp_path / "x.html", png=False)
    assert not (tmp_path / "x.html").exists() and FAMILIES["v3"]["num_heads"] == 4


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
