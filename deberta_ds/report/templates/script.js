// Shows, under the pointer, the value of every line of a chart at the nearest drawn place. Text is
// only ever set as text, so nothing that comes from a file becomes part of the page's code.
const add = (parent, tag, text) => {
  parent.append(Object.assign(document.createElement(tag), { textContent: text }));
};
const nearer = (x) => (a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a);
for (const plot of document.querySelectorAll('.plot')) {
  const lines = JSON.parse(plot.dataset.hover);
  const cross = plot.querySelector('.cross'), tip = plot.querySelector('.tip');
  plot.addEventListener('pointermove', (event) => {
    const box = plot.getBoundingClientRect();
    const x = 100 * (event.clientX - box.left) / box.width;
    const nearest = lines.map((line) => line.points.reduce(nearer(x)));
    const at = nearest.reduce(nearer(x));
    cross.style.left = at[0] + '%';
    tip.style.left = at[0] > 55 ? 'auto' : `calc(${at[0]}% + 10px)`;
    tip.style.right = at[0] > 55 ? `calc(${100 - at[0]}% + 10px)` : 'auto';
    tip.replaceChildren();
    add(tip, 'em', `${plot.dataset.x} ${at[1]}`);
    lines.forEach((line, k) => {
      tip.append(document.createElement('br'), line.label + ' ');
      if (nearest[k][1] !== at[1] && !line.baseline) add(tip, 'em', `at ${nearest[k][1]} `);
      add(tip, 'b', nearest[k][2]);
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
