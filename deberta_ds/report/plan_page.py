"""The planner's page: memory of each ZeRO stage and way of recomputing, drawn to one scale."""

from html import escape

from deberta_ds.planner.plan import GPUS, RESERVED_BYTES, Choice, recommended
from deberta_ds.report.style import CSS

_PARTS = (("weights", "var(--disc)"), ("optimizer", "var(--disc-soft)"),
          ("forward, backward and update", "var(--gen-soft)"), ("reserve", "var(--base)"))
_WIDTH, _LEFT, _RIGHT, _ROW = 1060, 150, 120, 34
_STYLE = """
.plan{padding:18px 20px;overflow-x:auto}.plan svg{min-width:760px;width:100%;height:auto}
.plan text{font:13px Inter,system-ui,sans-serif;fill:var(--ink)}
.plan .small{fill:var(--muted);font-size:12px}
.plan table{border-collapse:collapse;width:100%;font-size:13.5px;white-space:nowrap}
.plan th,.plan td{text-align:right;padding:6px 10px;border-bottom:1px solid var(--line)}
.plan th:nth-child(-n+2),.plan td:nth-child(-n+2){text-align:left}.plan tr.best{font-weight:650}
.plan tr.over{color:var(--faint)}.legend{display:flex;flex-wrap:wrap;gap:6px 18px;margin:0 0 12px;
font-size:13px;color:var(--muted)}.legend i{display:inline-block;width:11px;height:11px;
border-radius:3px;margin-right:6px;vertical-align:-1px}
"""


def plan_page(title: str, facts: list[str], choices: list[Choice], gpu: str, ranks: int) -> str:
    """Return one self-contained HTML document."""
    best = recommended(choices)
    answer = (f"Fastest that fits: <b>ZeRO-{best.stage}, recompute {best.recompute}</b>: "
              f"{best.days:.1f} days, {best.days * 24 * ranks:,.0f} GPU-hours." if best else
              "<b>Nothing fits.</b> Use more GPUs, a smaller train.micro_batch_rows, or offload.")
    legend = "".join(f'<span><i style="background:{color}"></i>{name}</span>'
                     for name, color in _PARTS)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)} - plan</title><style>{CSS}{_STYLE}</style></head><body><main>"
        f'<p class="eyebrow">DeBERTa pretraining plan</p><h1>{escape(title)}</h1>'
        f'<p class="lead">{answer}<br>{"<br>".join(map(escape, facts))}</p>'
        "<h2>Peak memory of one GPU</h2>"
        f"<p>The line is the memory of one {escape(gpu.upper())}.</p>"
        f'<div class="card plan"><p class="legend">{legend}</p>{_bars(choices, gpu, best)}</div>'
        "<h2>Time</h2><p>Communication is taken to overlap with computation; a step takes the "
        'longer of the two.</p><div class="card plan">'
        f"{_table(choices, ranks, best)}</div></main></body></html>\n")


def _segments(choice: Choice) -> list[float]:
    memory = choice.memory
    work = max(memory.work, memory.update)
    return [memory.weights + memory.buffers, memory.optimizer, work, RESERVED_BYTES]


def _bars(choices: list[Choice], gpu: str, best: Choice | None) -> str:
    limit = GPUS[gpu].memory
    largest = max([limit, *(sum(_segments(choice)) for choice in choices)])
    scale = (_WIDTH - _LEFT - _RIGHT) / min(largest, 2.5 * limit)
    height = _ROW * len(choices) + 26
    parts = [f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" '
             'aria-label="Peak memory by ZeRO stage and recomputation">']
    for number, choice in enumerate(choices):
        top, left = number * _ROW + 4, _LEFT
        weight = ' style="font-weight:650"' if choice is best else ""
        parts.append(f'<text x="0" y="{top + 16}"{weight}>ZeRO-{choice.stage}, '
                     f"{choice.recompute}</text>")
        opacity = 1 if choice.fits else 0.45
        for size, (_, color) in zip(_segments(choice), _PARTS, strict=True):
            width = min(size * scale, _WIDTH - _RIGHT - left)
            parts.append(f'<rect x="{left:.1f}" y="{top}" width="{max(width, 0):.1f}" height="22" '
                         f'style="fill:{color}" opacity="{opacity}"/>')
            left += width
        total = sum(_segments(choice)) / 1e9
        note = f"{total:.1f} GB" + ("" if choice.fits else ", too much")
        parts.append(f'<text class="small" x="{left + 8:.1f}" y="{top + 16}">{note}</text>')
    x = _LEFT + limit * scale
    parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 22}" '
                 'style="stroke:var(--bad)" stroke-width="2"/>'
                 f'<text class="small" x="{x:.1f}" y="{height - 6}" text-anchor="middle">'
                 f"{limit / 1e9:.0f} GB</text></svg>")
    return "".join(parts)


def _table(choices: list[Choice], ranks: int, best: Choice | None) -> str:
    heads = ("stage", "recompute", "compute / step", "communication / step", "tokens/s", "days",
             "GPU-hours")
    rows = []
    for choice in choices:
        kind = "best" if choice is best else "" if choice.fits else "over"
        cells = (f"ZeRO-{choice.stage}", choice.recompute, f"{choice.compute_seconds:.3f} s",
                 f"{choice.communication_seconds:.3f} s", f"{choice.tokens_per_second:,.0f}",
                 f"{choice.days:.2f}", f"{choice.days * 24 * ranks:,.0f}")
        row = "".join(f"<td>{cell}</td>" for cell in cells)
        rows.append(f'<tr class="{kind}">{row}</tr>')
    head = "".join(f"<th>{name}</th>" for name in heads)
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"
