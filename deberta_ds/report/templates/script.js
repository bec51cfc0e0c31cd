// Charts: Python draws them over steps; the buttons of a page of runs draw them again. Text is only
// ever set as text, so nothing that comes from a file becomes part of the page's code.
const add = (parent, tag, text) => {
  parent.append(Object.assign(document.createElement(tag), { textContent: text }));
};
const COLUMNS = { step: 0, tokens: 3, time: 4 }; // of a point: x, text of y, y, tokens, seconds
const KEPT = 'deberta_ds view', FIRST = { x: 'step', logX: false, logY: false, show: 'all', smooth: 2.5 };
const view = { ...FIRST };
const compact = new Intl.NumberFormat('en', { notation: 'compact', maximumSignificantDigits: 4 });
const counted = (count) => compact.format(count).replace('K', 'k');
const clock = (seconds) => (seconds < 7200 ? `${+(seconds / 60).toPrecision(3)} min`
  : `${+(seconds / 3600).toPrecision(4)} h`);
const xText = (x, name) => (name === 'time' ? clock(x) : name === 'tokens' ? counted(x)
  : x.toLocaleString('en', { maximumSignificantDigits: 12 }));
function yText(y, unit) {
  const text = unit === 'share' ? `${+(100 * y).toPrecision(4)}%` : unit === 'count' ? counted(y)
    : Math.abs(y) >= 1e5 || (y && Math.abs(y) < 1e-3) ? y.toExponential(1) : `${+y.toPrecision(4)}`;
  return (unit === 'gain' && y > 0 ? '+' : '') + text.replaceAll('-', '\u2212');
}
const scale = (low, high, log) => {
  const of = log ? Math.log10 : (value) => value;
  return (value) => 100 * (of(value) - of(low)) / (of(high) - of(low));
};
function ticks(low, high, log) { // some four round values
  if (log && high / low > 4) {
    const steps = high / low > 1e3 ? [1] : [1, 2, 5], found = [];
    for (let k = Math.floor(Math.log10(low)); k <= Math.log10(high); k++) {
      found.push(...steps.map((step) => step * 10 ** k).filter((t) => t >= low && t <= high));
    }
    return found;
  }
  const rough = (high - low) / 4, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power).find((f) => f >= 0.8 * rough);
  const found = [];
  for (let k = Math.ceil(low / step); k * step <= high; k++) found.push(+(k * step).toPrecision(12));
  return found;
}
function smoothed(points) { // a centered mean; its window shrinks at both ends
  const half = Math.round(points.length * view.smooth / 100);
  return points.map(([x], k) => {
    const reach = Math.min(half, k, points.length - 1 - k);
    const window = points.slice(k - reach, k + reach + 1);
    return [x, window.reduce((sum, [, y]) => sum + y, 0) / window.length];
  });
}
const charts = [...document.querySelectorAll('.plot')].map((plot) => {
  const lines = JSON.parse(plot.dataset.hover), last = Math.max(plot.dataset.last, 1e-9);
  return { plot, lines, shown: lines, column: 0, name: plot.dataset.x, unit: plot.dataset.unit,
           place: (x) => 100 * x / last };
});
function redraw(chart) {
  const { plot, unit } = chart, svg = plot.querySelector('svg');
  const hidden = { all: [], training: ['dots'], dots: ['trend', 'thin'] }[view.show];
  chart.shown = chart.lines.filter((line) => !hidden.includes(line.style));
  if (chart.shown.every((line) => line.style === 'baseline')) chart.shown = chart.lines;
  chart.column = COLUMNS[view.x];
  chart.name = view.x;
  const { logX } = view, all = chart.shown.flatMap((line) => line.points);
  const logY = view.logY && all.every((point) => point[2] > 0);
  const curves = chart.shown.map((line) => line.points.map((p) => [p[chart.column], p[2]])
    .filter(([x]) => !logX || x > 0));
  const xs = curves.flat().map(([x]) => x), first = logX ? Math.min(...xs) : 0;
  const last = Math.max(...xs, first + 1e-9);
  const values = (from) => curves.flatMap((points, k) => points.filter(([x]) => x >= from
    || !['trend', 'thin'].includes(chart.shown[k].style)).map(([, y]) => y));
  let ys = values(first), settled = values(first + 0.05 * (last - first));
  const range = (numbers) => Math.max(...numbers) - Math.min(...numbers);
  if (!logX && !logY && settled.length && range(settled) && range(ys) > 1.8 * range(settled)) ys = settled;
  let low = Math.min(...ys), high = Math.max(...ys);
  const room = 0.08 * (high - low) || 0.1 * Math.abs(high) || 0.1;
  const factor = (high / low) ** 0.08 * (high > low ? 1 : 1.1);
  [low, high] = logY ? [low / factor, high * factor]
    : [plot.dataset.zero && low >= 0 ? 0 : low - room, high + room];
  const top = scale(high, low, logY);
  chart.place = scale(first, last, logX);
  for (const old of plot.querySelectorAll('path, .grid, .y, .x')) old.remove();
  const draw = (tag, kind, attributes) => {
    const element = document.createElementNS(svg.namespaceURI, tag);
    element.setAttribute('class', kind);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    svg.append(element);
    return element;
  };
  const label = (kind, side, place, text) => {
    add(plot, 'span', text);
    plot.lastChild.className = kind;
    plot.lastChild.style[side] = `${place}%`;
  };
  for (const tick of ticks(low, high, logY)) {
    draw('line', 'grid', { x1: 0, x2: 100, y1: top(tick), y2: top(tick) });
    label('y', 'top', top(tick), yText(tick, unit));
  }
  const unitOfX = view.x !== 'time' ? 1 : last < 7200 ? 60 : 3600;
  let free = -1;
  for (const tick of ticks(first / unitOfX, last / unitOfX, logX).map((t) => t * unitOfX)) {
    const place = chart.place(tick);
    if (place < free || place > 93) continue;
    label('x', 'left', place, tick ? xText(tick, view.x) : `${view.x} 0`);
    free = place + 14;
  }
  curves.forEach((points, k) => {
    const { style, color } = chart.shown[k];
    const at = ([x, y]) => `${chart.place(x).toFixed(2)} ${top(y).toFixed(2)}`;
    const path = (kind, d) => {
      if (d) draw('path', kind, { d }).style.setProperty('--color', `var(--${color})`);
    };
    const line = (of) => of.length && 'M' + of.map(at).join('L');
    const trend = ['trend', 'thin'].includes(style) ? smoothed(points) : points;
    if (style === 'trend') path('raw', line(points));
    path({ baseline: 'base', thin: 'thin' }[style] || 'line', line(trend));
    if (style === 'dots' || points.length === 1) path('dots', points.map((p) => `M${at(p)}h0`).join(''));
    for (const end of plot.querySelectorAll('.end')) {
      if (end.title === chart.shown[k].label && trend.length) end.style.top = `${top(trend.at(-1)[1])}%`;
    }
  });
  const ends = [...plot.querySelectorAll('.end')].sort((a, b) => parseFloat(a.style.top) - parseFloat(b.style.top));
  ends.forEach((end, k) => {
    if (k) end.style.top = `${Math.max(parseFloat(end.style.top), parseFloat(ends[k - 1].style.top) + 12)}%`;
    end.hidden = !chart.shown.some((line) => line.label === end.title);
  });
  for (const mark of plot.querySelectorAll('.mark, .mark-label')) {
    mark.style.display = view.x === 'step' && !logX ? '' : 'none'; // the steps of a resume
  }
  for (const crop of plot.closest('figure').querySelectorAll('.crop')) crop.hidden = true;
}
function show() {
  for (const button of document.querySelectorAll('.controls button')) {
    const { key, to } = button.dataset;
    button.setAttribute('aria-pressed', to ? view[key] === to : view[key]);
  }
  document.querySelector('.controls input').value = view.smooth;
  if (Object.keys(FIRST).some((key) => view[key] !== FIRST[key]) || show.changed) charts.forEach(redraw);
}
for (const controls of document.querySelectorAll('.controls')) {
  const changed = () => {
    show.changed = true;
    show();
    try { sessionStorage.setItem(KEPT, JSON.stringify(view)); } catch { /* not kept: a locked-down browser */ }
  };
  controls.hidden = false;
  for (const button of controls.querySelectorAll('button')) {
    const { key, to } = button.dataset;
    button.addEventListener('click', () => {
      view[key] = to || !view[key];
      changed();
    });
  }
  controls.querySelector('input').addEventListener('input', (event) => {
    view.smooth = +event.target.value;
    changed();
  });
  try { Object.assign(view, JSON.parse(sessionStorage.getItem(KEPT))); } catch { /* as above */ }
  show(); // a live page reloads itself and keeps its view
}
// The value of every line at the place under the pointer that is nearest.
for (const chart of charts) {
  const { plot } = chart, cross = plot.querySelector('.cross'), tip = plot.querySelector('.tip');
  plot.addEventListener('pointermove', (event) => {
    const box = plot.getBoundingClientRect(), x = 100 * (event.clientX - box.left) / box.width;
    const far = (point) => Math.abs(chart.place(point[chart.column]) - x);
    const nearer = (a, b) => (far(b) < far(a) ? b : a);
    const nearest = chart.shown.map((line) => line.points.reduce(nearer));
    const at = nearest.reduce(nearer), left = chart.place(at[chart.column]);
    const text = (point) => xText(point[chart.column], chart.name);
    cross.style.left = left + '%';
    tip.style.left = left > 55 ? 'auto' : `calc(${left}% + 10px)`;
    tip.style.right = left > 55 ? `calc(${100 - left}% + 10px)` : 'auto';
    tip.replaceChildren();
    add(tip, 'em', `${chart.name} ${text(at)}`);
    chart.shown.forEach((line, k) => {
      tip.append(document.createElement('br'), line.label + ' ');
      if (text(nearest[k]) !== text(at) && line.style !== 'baseline') add(tip, 'em', `at ${text(nearest[k])} `);
      add(tip, 'b', nearest[k][1]);
    });
  });
}
// Attention: the pair of tokens under the pointer, in all maps of a head at once.
for (const head of document.querySelectorAll('.maps')) {
  const pieces = JSON.parse(head.dataset.pieces), readout = head.querySelector('.readout');
  const maps = [...head.querySelectorAll('.map')].map((map) => ({
    map, mark: map.querySelector('.at'), values: JSON.parse(map.dataset.values) }));
  const size = 100 / pieces.length;
  for (const { map } of maps) {
    map.addEventListener('pointermove', (event) => {
      const box = map.getBoundingClientRect();
      const place = (from, length) => Math.max(0, Math.min(pieces.length - 1,
        Math.floor(pieces.length * from / length)));
      const row = place(event.clientY - box.top, box.height);
      const column = place(event.clientX - box.left, box.width);
      head.classList.add('pointed');
      readout.replaceChildren();
      add(readout, 'b', `${pieces[row]} \u2192 ${pieces[column]}`);
      add(readout, 'em', `columns ${row} and ${column}, distance ${row - column}`);
      for (const { map: other, mark, values } of maps) {
        Object.assign(mark.style, { left: column * size + '%', top: row * size + '%',
                                    width: size + '%', height: size + '%' });
        const value = values[row * pieces.length + column] * other.dataset.scale;
        const text = other.dataset.unit === 'share' ? (100 * value).toFixed(2) + ' %'
          : value.toFixed(3).replace('-', '\u2212');
        add(readout, 'span', other.dataset.name + ' ');
        add(readout.lastChild, 'b', text);
      }
    });
  }
}
// A table that is wider than its frame says so.
const mark = () => {
  for (const frame of document.querySelectorAll('.scroll')) {
    frame.classList.toggle('wider', frame.scrollWidth > frame.clientWidth + 2);
  }
};
mark();
addEventListener('resize', mark);
addEventListener('beforeprint', () => {
  for (const part of document.querySelectorAll('details')) part.open = true;
});
