// Charts: the page has their lines as data; the buttons of a page of runs draw them again. Text is only
// ever set as text, so nothing that comes from a file becomes part of the page's code.
const add = (parent, tag, text) => {
  parent.append(Object.assign(document.createElement(tag), { textContent: text }));
};
const COLUMNS = { step: 0, tokens: 3, time: 4 }; // of a point: x, text of y, y, tokens, seconds
const KEPT = 'deberta_ds view', FIRST = { x: 'step', logX: false, logY: false, show: 'all', smooth: 2.5 };
const FLAT = 1e-6; // a range below this share of the values, or in itself, is float noise
const LABEL = 12; // of a name at the end of a line, in percent of the frame's height
const view = { ...FIRST };
const compact = new Intl.NumberFormat('en', { notation: 'compact', maximumSignificantDigits: 4 });
const minus = (text) => text.replaceAll('-', '\u2212');
const counted = (count) => (Math.abs(count) < 1e15 ? compact.format(count).replace('K', 'k')
  : count.toExponential(1).replace('+', ''));
const clock = (seconds) => (seconds < 7200 ? `${+(seconds / 60).toPrecision(3)} min`
  : `${+(seconds / 3600).toPrecision(4)} h`);
const xText = (x, name) => (name === 'time' ? clock(x) : name === 'tokens' ? counted(x)
  : x.toLocaleString('en', { maximumSignificantDigits: 12 }));
function yTexts(values, unit) { // with the digits that tell them apart, and no more
  if (unit === 'count') return values.map((y) => minus(counted(y)));
  const [factor, sign] = unit === 'share' ? [100, '%'] : [1, ''];
  const rounded = values.map((y) => +(factor * y).toPrecision(12));
  const digits = Math.max(...rounded.map((y) => (`${y}`.split('.')[1] || '').length));
  const wide = unit === 'rate' || digits > 5 || rounded.some((y) => y && (Math.abs(y) >= 1e5 || Math.abs(y) < 1e-5));
  return rounded.map((y) => minus((unit === 'gain' && y > 0 ? '+' : '') + (!wide ? y.toFixed(digits)
    : y ? (+y.toPrecision(5)).toExponential().replace('+', '').replace('e0', '') : '0')) + sign);
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
  const step = [1, 2, 2.5, 5, 10].map((f) => f * power)
    .reduce((a, b) => (Math.abs(b - rough) < Math.abs(a - rough) ? b : a));
  const found = [];
  for (let k = Math.ceil(low / step); k <= Math.floor(high / step); k++) found.push(+(k * step).toPrecision(12));
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
function domain(ys, unit, fromZero) { // with room around them, also around one value
  let low = Math.min(...ys), high = Math.max(...ys);
  const largest = Math.max(Math.abs(low), Math.abs(high)), isRate = unit === 'rate';
  if (fromZero) low = Math.min(0, low);
  const flat = high - low <= FLAT * (isRate ? largest : Math.max(1, largest));
  const room = Math.max(1e-12, !flat ? 0.08 * (high - low)
    : largest > FLAT || (isRate && largest) ? 0.5 * largest : 0.1);
  const bottom = fromZero && low === 0 ? 0 : low - room;
  return unit !== 'share' ? [bottom, high + room] // of a share no more than all
    : [Math.max(bottom, Math.min(low, -0.01)), Math.min(high + room, Math.max(high, 1.01))];
}
const charts = [...document.querySelectorAll('.plot')].map((plot) => ({
  plot, lines: JSON.parse(plot.dataset.lines), unit: plot.dataset.unit }));
function draw(chart) {
  const { plot, unit } = chart, svg = plot.querySelector('svg'), { logX } = view;
  const hidden = { all: [], training: ['dots'], dots: ['trend', 'thin'] }[view.show];
  chart.shown = chart.lines.filter((line) => !hidden.includes(line.style));
  if (chart.shown.every((line) => line.style === 'baseline')) chart.shown = chart.lines;
  chart.column = COLUMNS[view.x];
  chart.name = view.x === 'step' ? plot.dataset.x : view.x;
  const logY = view.logY && chart.shown.flatMap((line) => line.points).every((point) => point[2] > 0);
  const curves = chart.shown.map((line) => line.points.map((p) => [p[chart.column], p[2]])
    .filter(([x]) => !logX || x > 0));
  const xs = curves.flat().map(([x]) => x), first = logX ? Math.min(...xs) : 0;
  const last = Math.max(view.x === 'step' ? plot.dataset.last : 0, ...xs, first + 1e-9);
  const values = (from) => curves.flatMap((points, k) => points.filter(([x]) => x >= from
    || !['trend', 'thin'].includes(chart.shown[k].style)).map(([, y]) => y));
  let ys = values(first);
  const settled = values(first + 0.05 * (last - first)), crop = plot.closest('figure').querySelector('.crop');
  const range = (numbers) => Math.max(...numbers) - Math.min(...numbers);
  crop.hidden = logX || logY || !settled.length || !range(settled) || range(ys) <= 1.8 * range(settled);
  if (!crop.hidden) {
    ys = settled;
    crop.textContent = `Starts at ${chart.shown[0].points[0][1]}, off the frame.`;
  }
  let [low, high] = domain(ys, unit, plot.dataset.zero);
  if (logY) {
    const factor = (Math.max(...ys) / Math.min(...ys)) ** 0.08 * (range(ys) ? 1 : 1.1);
    [low, high] = [Math.min(...ys) / factor, Math.max(...ys) * factor];
  }
  const top = scale(high, low, logY);
  chart.place = scale(first, last, logX);
  for (const old of plot.querySelectorAll('path, .grid, .y, .x, .end')) old.remove();
  const shape = (tag, kind, attributes) => {
    const element = document.createElementNS(svg.namespaceURI, tag);
    element.setAttribute('class', kind);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    svg.append(element);
    return element;
  };
  const label = (kind, side, place, text) => {
    add(plot, 'span', text);
    Object.assign(plot.lastChild, { className: kind, title: text }).style[side] = `${place}%`;
    return plot.lastChild;
  };
  const yTicks = ticks(low, high, logY), texts = logY ? yTicks.flatMap((y) => yTexts([y], unit)) : yTexts(yTicks, unit);
  plot.style.setProperty('--ticks', Math.max(1, ...texts.map((text) => text.length)));
  yTicks.forEach((tick, k) => {
    shape('line', 'grid', { x1: 0, x2: 100, y1: top(tick), y2: top(tick) });
    label('y', 'top', top(tick), texts[k]);
  });
  const unitOfX = view.x !== 'time' ? 1 : last < 7200 ? 60 : 3600;
  let free = -1;
  for (const tick of ticks(first / unitOfX, last / unitOfX, logX).map((t) => t * unitOfX)) {
    const place = chart.place(tick);
    if (place < free || (place > 93 && tick !== last) || (unitOfX === 1 && tick % 1)) continue;
    label('x', 'left', place, tick ? xText(tick, view.x === 'step' && tick >= 1e3 ? 'tokens' : view.x)
      : `${chart.name} 0`);
    free = place + 14;
  }
  const ends = [];
  curves.forEach((points, k) => {
    const { style, color, label: text } = chart.shown[k];
    const at = ([x, y]) => `${chart.place(x).toFixed(2)} ${top(y).toFixed(2)}`;
    const path = (kind, d) => {
      if (d) shape('path', kind, { d }).style.setProperty('--color', `var(--${color})`);
    };
    const line = (of) => of.length && 'M' + of.map(at).join('L');
    const trend = ['trend', 'thin'].includes(style) ? smoothed(points) : points;
    if (style === 'trend') path('raw', line(points));
    path({ baseline: 'base', thin: 'thin' }[style] || 'line', line(trend));
    // A line of one point is not seen.
    if (style === 'dots' || points.length === 1) path('dots', points.map((p) => `M${at(p)}h0`).join(''));
    if (plot.dataset.ends && trend.length) ends.push({ text, color, top: top(trend.at(-1)[1]) });
  });
  ends.sort((a, b) => a.top - b.top).forEach((end, k) => { // pushed apart, down and then up
    if (k) end.top = Math.max(end.top, ends[k - 1].top + LABEL);
  });
  ends.reverse().forEach((end, k) => {
    end.top = Math.min(end.top, k ? ends[k - 1].top - LABEL : 98);
    const color = end.color.endsWith('-soft') ? 'muted' : end.color;
    label('end', 'top', end.top, end.text).style.color = `var(--${color})`;
  });
  for (const mark of plot.querySelectorAll('.mark, .mark-label')) {
    mark.style.display = view.x === 'step' && !logX ? '' : 'none'; // the steps of a resume
  }
}
function show() {
  for (const button of document.querySelectorAll('.controls button')) {
    const { key, to } = button.dataset;
    button.setAttribute('aria-pressed', to ? view[key] === to : view[key]);
  }
  charts.forEach(draw);
}
for (const controls of document.querySelectorAll('.controls')) {
  const changed = () => {
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
  controls.querySelector('input').value = view.smooth; // a live page reloads itself and keeps its view
}
show();
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
const POSITIVE = [0x6c, 0x63, 0xf5], NEGATIVE = [0xe0, 0x86, 0x1c], STEPS = 9999; // of a map's integers
for (const head of document.querySelectorAll('.maps')) {
  const pieces = JSON.parse(head.dataset.pieces), readout = head.querySelector('.readout');
  const maps = [...head.querySelectorAll('.map')].map((map) => ({
    map, mark: map.querySelector('.at'), values: JSON.parse(map.dataset.values) }));
  const size = 100 / pieces.length;
  for (const { map, values } of maps) {
    const canvas = map.querySelector('canvas').getContext('2d');
    const image = canvas.createImageData(pieces.length, pieces.length);
    values.forEach((value, k) => image.data.set([...(value < 0 ? NEGATIVE : POSITIVE),
                                                 Math.round(255 * Math.abs(value) / STEPS)], 4 * k));
    canvas.putImageData(image, 0, 0);
  }
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
