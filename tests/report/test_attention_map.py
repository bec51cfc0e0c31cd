"""The attention page and the charts: their parts are the model's numbers, and read well."""

import json
import math
import re
from statistics import fmean

import numpy as np
import pytest
import torch
from export_cases import FAMILIES, make_release
from report_cases import Page
from test_report_browser import CHROMIUM, probed

from deberta_ds.base.errors import UserError
from deberta_ds.evaluate.attention_parts import attention_parts, position_similarity
from deberta_ds.model.attention.geometry import Geometry
from deberta_ds.publish.hf import write_hugging_face
from deberta_ds.release.model_files import write_ours
from deberta_ds.release.reader import load_backbone
from deberta_ds.report.attention_page import colored, write_attention
from deberta_ds.report.charts import binned

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
    written = write_attention(str(root / "model"), text, [1], [0, 1], out, png=True)
    assert written == [out, root / "page.png"]
    assert write_attention(str(root / "model"), text, None, None, out, png=False) == [out]
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
    assert imread(page.with_suffix(".png")).shape[0] > 600


READ_A_PAIR = """
  const head = document.querySelector('.maps'), map = head.querySelector('.map');
  const pixels = map.querySelector('canvas').getContext('2d').getImageData(0, 0, 999, 999).data;
  const box = map.getBoundingClientRect();
  map.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + 1,
                                                     clientY: box.top + box.height - 1}));
  return {size: box.width, painted: pixels.some((value) => value),
          readout: head.querySelector('.readout').textContent};
"""


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
@pytest.mark.parametrize("width", [1400, 390])
def test_the_pointer_reads_a_pair_of_tokens(page, tmp_path, width):
    found = probed(page.read_text(), READ_A_PAIR, width, tmp_path)
    assert found["size"] > 100 and found["painted"]
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


def test_long_series_are_binned_and_keep_their_mean():
    points = [(step, math.sin(step)) for step in range(12_345)]
    found = binned(points)
    assert len(found) == 240 and binned(points[:240]) == points[:240]
    assert fmean(y for _, y in found) == pytest.approx(fmean(y for _, y in points), abs=1e-3)
