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
