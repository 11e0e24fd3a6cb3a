"""How the page looks, and the few lines that run in the browser."""

CSS = """
:root { --sc-soft: color-mix(in srgb, var(--body-text-color) 72%, transparent); }
.gradio-container { max-width: 1240px !important; width: 100%; margin: 0 auto !important;
  overflow: visible !important; }
.gradio-container > .main { padding: 14px clamp(10px, 3vw, 32px) !important; }
.block:has(> .html-container > .prose:empty) { display: none; }
.html-container { padding: 0 !important; }
.sc-title h1 { font-size: 1.5rem; margin: 0 0 .2rem; }
.sc-title p { margin: 0; color: var(--sc-soft); }
.sc-px { display: block; width: 100%; height: auto; image-rendering: pixelated; margin: 0 !important; }
.sc-note { color: var(--sc-soft); margin: .2rem 0; }
.sc-error { border-left: 4px solid #D55E00; padding: .4rem .7rem; margin: 0;
  background: var(--background-fill-secondary); overflow-wrap: anywhere; }

@media (max-width: 500px) {
  .sc-title h1 { font-size: 1.2rem; }
  .sc-about { display: none; }
  .sc-panel { padding: 8px !important; }
  .sc-panel td, .sc-panel th { padding: 1px !important; }
}
@media (min-width: 800px) { .sc-left { position: sticky; top: 10px; align-self: flex-start; } }
.sc-samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(44px, 1fr)); gap: 5px; }
.sc-sample { margin: 0 !important; padding: 2px; border: 2px solid transparent; border-radius: 5px;
  cursor: pointer; }
.sc-sample[aria-pressed=true] { border-color: #D55E00; }
.sc-sample:focus-visible, .sc-focus:focus-visible { outline: 3px solid #0072B2; outline-offset: 2px; }

.sc-focus { max-width: 400px; margin: 0 auto; width: 100%; }
.sc-stage { position: relative; overflow: hidden; cursor: crosshair;
  border: 1px solid var(--border-color-primary); }
.sc-window, .sc-pixel { position: absolute; pointer-events: none; box-sizing: border-box; }
.sc-window { border: 3px solid #D55E00; box-shadow: 0 0 0 1px #fff, inset 0 0 0 1px #fff; }
.sc-pixel { border: 2px solid #D55E00; box-shadow: 0 0 0 1px #fff; }

.sc-panels { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 320px), 1fr));
  gap: 14px; }
.sc-panel { border: 1px solid var(--border-color-primary); border-radius: 8px; padding: 10px 12px;
  min-width: 0; }
.sc-panel h3 { margin: 0 0 2px; font-size: 1.05rem; }
.sc-panel h3 small { font-weight: 400; color: var(--sc-soft); overflow-wrap: anywhere; }
.sc-stack { display: grid; gap: 14px; }
.sc-split { display: flex; flex-wrap: wrap; gap: 10px 28px; }
.sc-split > div { flex: 1 1 190px; min-width: 0; }
.sc-split > div:first-child { flex: 2.4 1 300px; }
.sc-flex { display: flex; flex-wrap: wrap; gap: 14px; }
.sc-flex > .sc-panel { flex: 3 1 300px; }
.sc-flex > .sc-panel[data-model=planar] { flex: 1 1 220px; }
.sc-panel p { margin: 0 0 8px; font-size: .9rem; }
.sc-heading { margin: 10px 0 6px; font-size: 1.15rem; }
.sc-same { border-left: 4px solid #009E73; padding-left: 8px; }
.sc-changed { border-left: 4px solid #D55E00; padding-left: 8px; }

.sc-bars { list-style: none; margin: 0; padding: 0; font-size: .85rem; }
.sc-bars li { display: grid; grid-template-columns: minmax(1.4rem, 25%) 1fr 3.4rem; gap: 8px;
  align-items: center;
  margin: 0; line-height: 1.45; }
.sc-bars-short .sc-bars li { grid-template-columns: 1.4rem 1fr 3.4rem; }
.sc-class { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; text-align: right; }
.sc-track { position: relative; height: .75rem; background: var(--background-fill-secondary);
  border: 1px solid var(--border-color-primary); border-radius: 2px; }
.sc-bar { position: absolute; inset: 0 auto 0 0; background: #56B4E9; }
.sc-best .sc-bar { background: #0072B2; }
.sc-mark { position: absolute; top: -3px; bottom: -3px; width: 2px; margin-left: -1px;
  background: var(--body-text-color); }
.sc-value { text-align: right; font-variant-numeric: tabular-nums; }
.sc-best { font-weight: 700; }

.sc-panel table { width: 100%; table-layout: fixed; border-collapse: collapse; margin: 0; font-size: .78rem; }
.sc-panel table, .sc-panel tr, .sc-panel td, .sc-panel th { border: 0 !important;
  background: none !important; }
.sc-panel td, .sc-panel th { padding: 3px !important; text-align: center; vertical-align: middle;
  font-weight: 400; white-space: nowrap; color: var(--body-text-color); }
.sc-panel tfoot td { color: var(--sc-soft); }
.sc-panel thead th { line-height: 1.25; font-size: .74rem; }
.sc-panel thead th b { font-size: .95rem; }
.sc-filters td:first-child, .sc-heads td:first-child { width: 34px; }
.sc-filters thead th:last-child { width: 48px; }
.sc-nobr { white-space: nowrap; }
.sc-panel td img { outline: 1px solid var(--border-color-primary); }
.sc-number { font-variant-numeric: tabular-nums; }
.sc-heads { align-self: start; }
.sc-heads caption { text-align: left; padding: 2px; color: var(--sc-soft); }
.sc-heads thead th { font-size: .78rem; }
.sc-heads th.sc-best { font-weight: 700; text-decoration: underline; }
.sc-maps th[scope=row], .sc-maps td:first-child { width: 52px; white-space: normal; }
.sc-maps-1 { max-width: 210px; }
.sc-scale { color: var(--sc-soft); margin: 2px 0 0 !important; font-size: .78rem !important; }

.sc-charts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 380px), 1fr));
  gap: 14px; }
.sc-charts figure { margin: 0; }
.sc-charts svg { width: 100%; height: auto; }
.sc-charts text { font-size: 12px; fill: var(--body-text-color); }
.sc-charts .sc-chart-title { font-size: 14px; font-weight: 700; }
.sc-charts .sc-tick { stroke: var(--border-color-primary); }
.sc-charts figcaption { font-size: .85rem; color: var(--sc-soft); }
"""

# The frame follows a click or an arrow key at once; the filters follow when the server has answered.
STAGE_JS = """
const stage = () => element.querySelector('.sc-stage');
const place = () => {
  const s = stage(), d = Object.fromEntries(Object.entries(s.dataset).map(([k, v]) => [k, Number(v)]));
  const put = (box, top, left, height, width) => Object.assign(s.querySelector(box).style, {
    top: 100 * top + '%', left: 100 * left + '%', height: 100 * height + '%', width: 100 * width + '%'});
  const i = Math.floor(d.row * d.down / d.rows), j = Math.floor(d.column * d.across / d.columns);
  const reach = Math.floor(d.window / 2);
  put('.sc-pixel', i / d.down, j / d.across, 1 / d.down, 1 / d.across);
  put('.sc-window', (i - reach) / d.down, (j - reach) / d.across, d.window / d.down, d.window / d.across);
  s.querySelector('.sc-window').hidden = !d.window;
};
const choose = (row, column) => {
  const d = stage().dataset, inside = (n, count) => Math.min(Math.max(n, 0), count - 1);
  d.row = inside(row, d.rows); d.column = inside(column, d.columns);
  place();
  trigger('select', {row: Number(d.row), column: Number(d.column)});
};
element.classList.add('sc-focus');
element.tabIndex = 0;
element.setAttribute('role', 'group');
element.setAttribute('aria-label', 'the image: click a pixel, or move with the arrow keys');
element.addEventListener('click', event => {
  const box = stage().querySelector('img').getBoundingClientRect(), d = stage().dataset;
  choose(Math.floor((event.clientY - box.top) / box.height * d.rows),
         Math.floor((event.clientX - box.left) / box.width * d.columns));
});
element.addEventListener('keydown', event => {
  const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
  if (!step) return;
  event.preventDefault();
  const d = stage().dataset;  // a step is a cell of the layer's map
  choose(Number(d.row) + step[0] * d.rows / d.down, Number(d.column) + step[1] * d.columns / d.across);
});
watch('value', place);
place();
"""

SAMPLES_JS = """
element.addEventListener('click', event => {
  const button = event.target.closest('.sc-sample');
  if (!button) return;
  for (const other of element.querySelectorAll('.sc-sample'))
    other.setAttribute('aria-pressed', String(other === button));
  trigger('select', {sample: Number(button.dataset.sample)});
});
"""
