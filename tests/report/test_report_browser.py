"""The pages in a real browser: hostile text stays text, nothing overflows, the pointer reads out.

Skipped where there is no Chromium (Debian's package `chromium`, or CHROMIUM=path).
"""

import base64
import json
import os
import re
import shutil
import subprocess

import pytest
from report_cases import Page, make_records, make_run, make_sweep

from deberta_ds.report import run_pages
from deberta_ds.report.charts import Chart, Series
from deberta_ds.report.pages import render

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--hide-scrollbars")
HOSTILE = ["<script>document.title='owned'</script>",
           "\"><img src=x onerror=\"document.title='owned'\">",
           "'><svg onload='document.title=`owned`'></svg>",
           "</style><script>document.title='owned'</script>",
           "</title></script><script>document.title='owned'</script>",
           "{{ 7 * 7 }}{% raw %}${document.title='owned'}",
           "\" onmouseover=\"document.title='owned'\" x=\"", "javascript:document.title='owned'",
           "];document.title='owned';[",
           "&lt;script&gt; &amp; \u202e \x00 \x1b[31m \U0001f600 </p></div></main>"]

HOSTILE.append(" ".join(HOSTILE))  # the last one has it all


def hostile_run(directory, text, kind="rtd"):
    records = make_records(steps=60, eval_every=20, resume=30, kind=kind)
    for record in records:
        if record["kind"] == "event":
            record["detail"] = text
    records += [{"kind": "event", "step": 60, "event": text, "detail": text}]
    run = make_run(directory, records, text, kind, out_dir="runs/x")
    config = json.loads((run / "config.json").read_text())
    config |= {"origins": {f"{text}.{text}": text, "name": text}, "versions": {text: text},
               "hardware": text, "commit": text, "branch": text, "content_hashes": {text: text}}
    (run / "config.json").write_text(json.dumps(config))
    (run / "summary.json").write_text(json.dumps(
        [{"stage": text, "what": text, "result": text, "seconds": 1}]))
    hostile_sweep(run / "superglue", text)
    return run


def hostile_sweep(directory, text):
    shutil.rmtree(directory, ignore_errors=True)
    make_sweep(directory, model=text, names=("RTE", text))
    path = directory / "results.json"
    whole = json.loads(path.read_text())
    spread = whole["tasks"]["RTE"]["score"]
    for task in whole["tasks"].values():
        task |= {"labels": [text, text], "metrics": {text: spread},
                 "diagnostics": {text: {text: spread}}}
    for run in whole["runs"]:
        run["settings"] = {text: text}
        run["history"] = [{"epoch": 1.0, text: 0.5}, {"epoch": 2.0, text: 0.6}]
    path.write_text(json.dumps(whole))
    return directory


def browse(page, *flags, tmp_path):
    done = subprocess.run(
        [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", *flags, f"file://{page}"],
        capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def without_policy(text):
    return re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Every kind of page of every hostile text: {name: path}, and the tags of a harmless one."""
    root = tmp_path_factory.mktemp("pages")
    found = {}
    for number, text in enumerate(["harmless", *HOSTILE]):
        run = hostile_run(root / f"{number}", text)
        other = hostile_run(root / f"{number}-mlm", text, "mlm")
        for name, write, inputs in (
            ("run", run_pages.write_runs, [run]), ("both", run_pages.write_runs, [run, other]),
            ("sweep", run_pages.write_sweep, [run / "superglue", other / "superglue"])):
            found[name, number] = root / f"{name}-{number}.html"
            write(found[name, number], inputs)
    return found


@pytest.mark.parametrize("name", ["run", "both", "sweep"])
def test_hostile_text_adds_no_tag_and_no_attribute(pages, name):
    """Every text reaches every place of a page; its tags and attributes are a harmless page's."""
    harmless = Page(pages[name, 0].read_text())
    for number, text in enumerate(HOSTILE, start=1):
        page = Page(pages[name, number].read_text())
        assert page.tags == harmless.tags and page.attributes == harmless.attributes
        assert text.replace("\x00", "") in page.text.replace("\x00", "")


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
@pytest.mark.parametrize("name", ["run", "both", "sweep"])
def test_hostile_text_does_not_run_in_a_browser(pages, name, tmp_path):
    dom = browse(pages[name, len(HOSTILE)], "--dump-dom", "--virtual-time-budget=1000",
                 tmp_path=tmp_path)
    title = re.search(r"<title>(.*?)</title>", dom, re.S)[1]
    assert title != "owned" and HOSTILE[7] in title and dom.count("<script") == 1
    assert not re.search(r"<(img|iframe|object)\b|<svg[^>]*onload", dom)


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
def test_a_script_that_was_smuggled_in_would_not_run(pages, tmp_path):
    """The second wall: the page's policy knows its one script by hash."""
    page = tmp_path / "changed.html"
    evil = "<script>document.title='owned'</script><b onclick='1' id=b></b>"
    text = pages["run", 0].read_text()
    page.write_text(text.replace("<main>", "<main>" + evil))
    assert "<title>owned" not in browse(page, "--dump-dom", tmp_path=tmp_path)
    page.write_text(without_policy(text).replace("<main>", "<main>" + evil))
    assert "<title>owned" in browse(page, "--dump-dom", tmp_path=tmp_path)  # the test can fail


# Put into a page: tells what is wider than the page, and what the lines of BODY return.
PROBE = """<script>
addEventListener('load', () => {
  const wide = [], inside = document.documentElement.clientWidth;
  for (const element of document.querySelectorAll('main *')) {
    if (element.closest('.scroll, svg, summary, .at')) continue;
    const box = element.getBoundingClientRect();
    if (box.width && (box.right > inside + 1 || box.left < -1))
      wide.push(element.tagName + '.' + element.className + ' ' + element.textContent.slice(0, 30));
  }
  const found = (() => {BODY})();
  parent.postMessage(btoa(unescape(encodeURIComponent(JSON.stringify(
    {wide, width: inside, ...found})))), '*');
});
</script>"""
# A frame, because a window of Chromium is never narrower than 500 pixels.
FRAME = """<!doctype html><title>none</title><iframe src="page.html" style="border:0;width:%dpx;
height:2000px"></iframe><script>onmessage = (e) => document.title = 'PROBE' + e.data</script>"""


def probed(text, body, width, tmp_path):
    """Return what the PROBE with these lines finds in a page of `width` pixels."""
    (tmp_path / "page.html").write_text(without_policy(text).replace(
        "</main>", "</main>" + PROBE.replace("BODY", body)))
    (tmp_path / "frame.html").write_text(FRAME % width)
    dom = browse(tmp_path / "frame.html", "--window-size=1500,2000", "--dump-dom",
                 "--virtual-time-budget=2000", tmp_path=tmp_path)
    found = json.loads(base64.b64decode(re.search(r"<title>PROBE(.*?)</title>", dom)[1]))
    assert found["wide"] == [] and found["width"] == width
    return found


READ_A_CHART = """
  const plot = document.querySelector('.plot'), box = plot.getBoundingClientRect();
  plot.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + box.width / 2,
                                                      clientY: box.top + 9}));
  const spill = [...document.querySelectorAll('.plot .y')].filter((label) =>
    label.getBoundingClientRect().left < label.closest('.card').getBoundingClientRect().left);
  const tipText = plot.querySelector('.tip').textContent;
  for (const pressed of ['[data-to=tokens]', '[data-key=logX]', '[data-key=logY]'])
    document.querySelector(pressed)?.click();
  const drawn = [...document.querySelectorAll('.plot')].map((one) =>
    one.querySelector('svg').innerHTML + one.querySelector('.x').textContent).join();
  return {broken: /NaN|Infinity|undefined/.test(drawn), x: plot.querySelector('.x').textContent,
          tip: tipText, spill: spill.map((s) => s.textContent),
          hints: document.querySelectorAll('.wider').length};
"""


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.parametrize("kind", ["run", "both", "sweep"])
def test_nothing_overflows_and_the_pointer_reads_out(tmp_path, kind, width):
    """On a desk and on a phone. A model's path as a heading pushed the last columns off a desk."""
    name, page = "a-rather-long-name-of-a-run-without-a-space" * 2, tmp_path / "page.html"
    if kind == "sweep":
        sweeps = [make_sweep(tmp_path / f"{n}", f"{n}/{name}") for n in range(3)]
        run_pages.write_sweep(page, sweeps)
    else:
        runs = [make_run(tmp_path / f"{n}", name=f"{n}{name}") for n in range(2)]
        run_pages.write_runs(page, runs[:1 + (kind == "both")])
    found = probed(page.read_text(), READ_A_CHART, width, tmp_path)
    assert found["spill"] == []
    tip = {"run": "step \\d+.*training ?.*held out", "sweep": "epoch \\d.*seed 1", "both":
           f"step \\d+.*0{name} .*1{name} "}[kind]
    assert re.match(tip, found["tip"]), found["tip"]
    assert (found["hints"] > 0) == (width == 390)
    assert not found["broken"] and found["x"] == ("epoch 0" if kind == "sweep" else "20k")


FLAT = [[0.5], [0.0, 0.0, 0.0], [-1e-9, 1e-9], [1e12, 2e12], [3, 3], [1e-320, 0],
        [1e299, -1e299], [2e-3 + k * 1e-18 for k in range(9)], [1e16, 1e16 + 2],
        [11.1 + k * 1e-14 for k in range(9)], [-5e-324, 5e-324], [123_456.1, 123_456.2],
        [0.881, 0.881], [0.1, 0.999], [0.001, 0.5]]
READ_TICKS = """
  return {charts: [...document.querySelectorAll('.plot')].map((plot) => ({
    ticks: [...plot.querySelectorAll('.y')].map((y) => [y.textContent, parseFloat(y.style.top)]),
    paths: [...plot.querySelectorAll('path')].map((path) => path.getAttribute('d')),
    dots: plot.querySelectorAll('.dots').length}))};
"""


@pytest.mark.skipif(not CHROMIUM, reason="no Chromium here")
@pytest.mark.parametrize("unit", ["number", "share", "gain", "count", "rate", "tenths"])
def test_flat_tiny_and_huge_values_have_few_short_ticks(tmp_path, unit):
    cards = [Chart("x", "x", "", unit, [Series("x", list(enumerate(values)), "main", "trend")],
                   from_zero=from_zero, last_x=len(values) - 1)
             for values in FLAT for from_zero in (False, True)]
    page = render("attention.html", model="", text="", pieces="[]", shown=[], labeled=False,
                  layers={}, charts=cards)
    found = probed(page, READ_TICKS, 1400, tmp_path)["charts"]
    for card, drawn in zip(cards, found, strict=True):
        texts = [text for text, _ in drawn["ticks"]]
        assert 1 <= len(texts) <= 8 and max(map(len, texts)) <= 12, (card, texts)
        assert len(set(texts)) == len(texts), (card, texts)
        assert all(-1 <= top <= 101 for _, top in drawn["ticks"]), (card, drawn)
        assert not re.search("NaN|Infinity|undefined", f"{drawn}"), (card, drawn)
        values = [y for _, y in card.series[0].points]
        if len(values) == 1:  # is seen
            assert drawn["dots"] == 1
        elif max(values) - min(values) < 1e-12 and not card.from_zero:  # noise stays small
            assert len(set(re.findall(r" ([\d.]+)", drawn["paths"][0]))) == 1
        if unit == "share" and max(values) <= 1 and min(values) >= 0:
            assert not any(text.startswith("\u2212") for text in texts) and "120%" not in texts
