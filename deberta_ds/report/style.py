"""The look of the report: one style sheet (light, dark, phone, paper) and the pointer read-out."""

CSS = """
:root{color-scheme:light dark;--bg:#f5f6f8;--card:#fff;--ink:#14171f;--muted:#626c7c;
--faint:#8a93a3;--line:#e7e9ee;--grid:#eef0f4;--gen:#0b8a7d;--disc:#5145e5;--base:#9aa3b2;--amber:#c2700c;
--gen-soft:#93ccc5;--disc-soft:#b1acf3;--good:#0a7d4f;--bad:#c02626;--run0:#5145e5;--run1:#0b8a7d;
--run2:#d4650f;--run3:#b4237a;--run4:#2271c9;
--shadow:0 1px 2px rgba(16,24,40,.05),0 6px 20px -10px rgba(16,24,40,.10)}
@media (prefers-color-scheme:dark){:root{--bg:#0c0e13;--card:#14171e;--ink:#eceef3;--muted:#9aa4b5;
--faint:#6d7686;--line:#262b35;--grid:#1e232c;--gen:#36d1be;--disc:#918bff;--base:#6f7889;
--gen-soft:#28716b;--disc-soft:#524f8b;
--amber:#f0a94a;--good:#4ad295;--bad:#ff7b72;--run0:#918bff;--run1:#36d1be;--run2:#ff9d52;
--run3:#f472b6;--run4:#6bb2ff;--shadow:none}}
*{box-sizing:border-box;margin:0}
body{background:var(--bg);color:var(--ink);
font:15px/1.5 Inter,ui-sans-serif,system-ui,-apple-system,
"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif;font-feature-settings:"cv11","ss03";
font-variant-numeric:tabular-nums;-webkit-font-smoothing:antialiased;-webkit-text-size-adjust:100%}
main{max-width:1160px;margin:0 auto;padding:44px 24px 64px}
h1,h2,h3{letter-spacing:-.015em;line-height:1.2}
h1{font-size:34px;font-weight:700;letter-spacing:-.028em}
h2{font-size:19px;font-weight:650;margin:44px 0 4px}
h2+p{color:var(--muted);margin-bottom:16px;max-width:70ch}
h3{font-size:14.5px;font-weight:620}
.eyebrow{font-size:12px;font-weight:600;letter-spacing:.07em;text-transform:uppercase;
color:var(--faint);margin-bottom:10px}
.title{display:flex;flex-wrap:wrap;align-items:center;gap:8px 14px}
.pill{font-size:12.5px;font-weight:600;padding:3px 11px;border-radius:99px;color:var(--good);
background:color-mix(in srgb,var(--good) 12%,transparent)}
.pill.wait{color:var(--amber);background:color-mix(in srgb,var(--amber) 13%,transparent)}
.lead{font-size:17px;line-height:1.55;color:var(--muted);max-width:74ch;margin:12px 0 22px}
.lead b{color:var(--ink);font-weight:620}
.card{background:var(--card);border:1px solid var(--line);border-radius:14px;
box-shadow:var(--shadow);
break-inside:avoid}
.bar{margin:0 0 30px}
.track{position:relative;height:6px;border-radius:9px;background:var(--line)}
.track .done{position:absolute;inset:0 auto 0 0;border-radius:9px;background:var(--disc)}
.track u{position:absolute;top:-4px;width:3px;height:14px;margin-left:-1.5px;border-radius:2px;
background:var(--amber);box-shadow:0 0 0 2px var(--bg)}
.bar p{display:flex;flex-wrap:wrap;justify-content:space-between;gap:2px 20px;margin-top:10px;
font-size:13px;color:var(--muted)}
.key{display:inline-block;width:3px;height:11px;border-radius:2px;background:var(--amber);
margin:0 6px 0 4px;vertical-align:-1px}
.tiles{display:grid;grid-template-columns:repeat(4,1fr);overflow:hidden;gap:1px;
background:var(--line)}
.tile{background:var(--card);padding:18px 20px 17px;min-width:0}
.tile h3{font-size:13px;font-weight:500;color:var(--muted);letter-spacing:0}
.tile b{display:block;font-size:27px;font-weight:640;letter-spacing:-.03em;line-height:1.25;
margin:5px 0 3px;white-space:nowrap;overflow:hidden;text-overflow:ellipsis}
.tile b.name{font-size:21px;line-height:1.6}
.tile p{font-size:12.5px;color:var(--muted);line-height:1.4}
.up{color:var(--good)}.down{color:var(--bad)}
.grid2{display:grid;grid-template-columns:repeat(2,minmax(0,1fr));gap:16px}
.grid3{display:grid;grid-template-columns:repeat(3,minmax(0,1fr));gap:16px}
.grid2>:only-child{grid-column:1/-1}
.chart{padding:18px 20px 14px}
.chart figcaption{display:flex;justify-content:space-between;gap:16px;min-height:56px}
.chart figcaption p{font-size:12.5px;color:var(--muted);line-height:1.4;margin-top:2px}
.crop{color:var(--faint)}
.now{font-size:20px;font-weight:640;letter-spacing:-.02em;line-height:1.15;white-space:nowrap}
.now small{font-size:12px;font-weight:500;color:var(--muted);letter-spacing:0}
.plot{position:relative;height:196px;margin:20px 76px 26px 46px;font-size:11.5px;touch-action:pan-y}
.grid3 .plot{height:150px;margin-top:12px;margin-right:10px}
.grid3 .end,.grid3 .resume-label{display:none}
.plot svg{position:absolute;inset:0;width:100%;height:100%;overflow:visible;
clip-path:inset(-1px -6px)}
.plot svg *{vector-effect:non-scaling-stroke;fill:none;stroke-linejoin:round}
.grid{stroke:var(--grid);stroke-width:1}.resume{stroke:var(--amber);stroke-width:1.3;
stroke-dasharray:3 3}
.line{stroke-width:2;stroke-linecap:round}.raw{stroke-width:1;opacity:.28}.dots{stroke-width:6.5;
stroke-linecap:round}.base{stroke-width:1.5;stroke-dasharray:5 4}
.plot svg .band{opacity:.15;stroke:none}
.plot span{position:absolute;white-space:nowrap;color:var(--faint);line-height:1}
.plot .y{right:100%;margin-right:9px;transform:translateY(-50%)}
.plot .x{top:100%;margin-top:9px;transform:translateX(-50%)}
.plot .end{left:100%;margin-left:9px;transform:translateY(-50%);font-weight:600;width:67px;
overflow:hidden;text-overflow:ellipsis;line-height:1.25}
.plot .resume-label{bottom:100%;margin-bottom:4px;transform:translateX(-50%);color:var(--amber);
font-size:11px}
.cross{position:absolute;top:0;bottom:0;width:1px;background:var(--faint);opacity:0}
.tip{position:absolute;top:6px;z-index:2;padding:7px 10px;border-radius:8px;background:var(--ink);
color:var(--bg);font-size:12px;line-height:1.5;white-space:nowrap;pointer-events:none;opacity:0}
.tip em{font-style:normal;opacity:.7}
.plot:hover .cross,.plot:hover .tip{opacity:1}
.scroll{overflow-x:auto}
table{width:100%;border-collapse:collapse;font-size:13.5px}
th{font-size:12px;font-weight:550;color:var(--muted);text-align:left;white-space:nowrap}
th,td{padding:9px 12px;border-bottom:1px solid var(--line)}
tr:last-child td{border-bottom:0}thead tr:first-child th{padding-top:12px}
th:first-child,td:first-child{padding-left:20px}th:last-child,td:last-child{padding-right:20px}
.n{text-align:right;white-space:nowrap}
.group th{text-align:center;border-bottom:0;padding-bottom:0;font-weight:650}
td.quiet{color:var(--muted)}tr.last td{font-weight:620}
.tasks .track{height:10px;min-width:170px}
.tasks .track .done{background:var(--disc)}
.track .spread{position:absolute;top:4px;height:2px;background:var(--ink);opacity:.55}
.track s{position:absolute;top:-4px;bottom:-4px;width:2px;margin-left:-1px;background:var(--ink)}
td.wide{width:42%}td.stage{white-space:nowrap}td.share{width:12%;min-width:70px}
.what{color:var(--muted)}
.step{display:inline-grid;place-items:center;width:22px;height:22px;margin-right:10px;
font-size:12px;
font-weight:600;border-radius:50%;color:var(--disc);
background:color-mix(in srgb,var(--disc) 11%,transparent)}
td .dur{display:block;height:4px;border-radius:9px;background:var(--disc);opacity:.75;min-width:2px}
details{border-bottom:1px solid var(--line)}details:last-child{border-bottom:0}
summary{padding:13px 20px;font-weight:600;font-size:14px;cursor:pointer;list-style:none;
display:flex;
justify-content:space-between;gap:16px}
summary::-webkit-details-marker{display:none}
summary small{font-size:12.5px;font-weight:400;color:var(--muted);overflow:hidden;
text-overflow:ellipsis;white-space:nowrap}
summary small:after{content:"+";margin-left:14px;color:var(--faint)}
details[open] summary small:after{content:"\\2212"}
dl{display:grid;grid-template-columns:repeat(auto-fill,minmax(300px,1fr));gap:0 36px;
padding:0 20px 16px}
dl div{display:flex;justify-content:space-between;gap:16px;padding:5px 0;font-size:13px;
border-top:1px solid var(--grid);min-width:0}
dd.set{font-weight:700}dt{color:var(--muted);white-space:nowrap}dd{text-align:right;overflow-wrap:anywhere;
font-family:ui-monospace,"SF Mono",SFMono-Regular,Menlo,Consolas,monospace;font-size:12px}
footer{margin-top:44px;font-size:12.5px;color:var(--faint)}
@media (max-width:1000px){.grid3{grid-template-columns:1fr}.grid3 .plot{height:150px}}
@media (max-width:820px){.grid2{grid-template-columns:1fr}
.tiles{grid-template-columns:repeat(2,1fr)}}
@media (max-width:560px){main{padding:26px 14px 48px}h1{font-size:27px}.lead{font-size:15.5px}
.tile{padding:14px 15px}.tile b{font-size:22px}.tile b.name{font-size:17px}
.chart{padding:16px 14px 12px}
.plot{height:176px;margin-left:44px;margin-right:74px}.plot .end{width:72px}
.tasks .track{min-width:110px}
th,td{padding:9px}th:first-child,td:first-child{padding-left:15px}
th:last-child,td:last-child{padding-right:15px}dl{padding:0 15px 14px}summary{padding:13px 15px}}
@media print{:root{--bg:#fff;--card:#fff;--ink:#14171f;--muted:#5b6474;--faint:#8a93a2;
--line:#dfe2e8;
--grid:#eceef2;--gen:#0b8a7d;--disc:#5145e5;--base:#9aa3b2;--amber:#c2700c;--good:#0a7d4f;
--shadow:none;color-scheme:light}
body{font-size:12px;print-color-adjust:exact;-webkit-print-color-adjust:exact;
zoom:.66}.scroll{overflow:visible}.folds{break-inside:auto}details{break-inside:avoid}
main{padding:0;max-width:none}h2{break-after:avoid;margin-top:26px}h2+p{break-after:avoid}
.tiles{grid-template-columns:repeat(4,1fr)}.grid2{grid-template-columns:repeat(2,1fr)}
.grid3{grid-template-columns:repeat(3,1fr)}.plot{height:140px}.grid3 .plot{height:100px}
.tip,.cross{display:none}@page{margin:14mm}}
"""

# Shows, under the pointer, the value of every line of a chart at the nearest drawn step.
SCRIPT = """
for (const plot of document.querySelectorAll('.plot')) {
  const lines = JSON.parse(plot.dataset.hover);
  const cross = plot.querySelector('.cross'), tip = plot.querySelector('.tip');
  plot.addEventListener('pointermove', (event) => {
    const box = plot.getBoundingClientRect();
    const x = 100 * (event.clientX - box.left) / box.width;
    const nearest = lines.map((line) => line.points.reduce(
      (a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a)));
    const at = nearest.reduce((a, b) => (Math.abs(b[0] - x) < Math.abs(a[0] - x) ? b : a));
    cross.style.left = at[0] + '%';
    tip.style.left = at[0] > 55 ? 'auto' : `calc(${at[0]}% + 10px)`;
    tip.style.right = at[0] > 55 ? `calc(${100 - at[0]}% + 10px)` : 'auto';
    tip.replaceChildren();
    tip.insertAdjacentHTML('beforeend', `<em>step ${at[1]}</em>`);
    lines.forEach((line, k) => {
      const elsewhere = nearest[k][1] !== at[1] && line.color !== 'base';
      tip.append(document.createElement('br'), line.label + ' ');
      if (elsewhere) tip.insertAdjacentHTML('beforeend', `<em>at ${nearest[k][1]}</em> `);
      tip.insertAdjacentHTML('beforeend', '<b>' + nearest[k][2] + '</b>');
    });
  });
}
addEventListener('beforeprint', () => {
  for (const part of document.querySelectorAll('details')) part.open = true;
});
"""
