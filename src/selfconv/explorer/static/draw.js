// Numbers as pictures: one coloured pixel per number, which the browser enlarges without smoothing; and charts.

const anchors = (hex) => hex.split(" ").map((c) => [0, 2, 4].map((i) => parseInt(c.slice(i, i + 2), 16)));
const SIGNED = anchors("7f3b08 b35806 e08214 fdb863 fee0b6 f7f7f7 d8daeb b2abd2 8073ac 542788 2d004b");
const POSITIVE = anchors("440154 482878 3e4a89 31688e 26828e 1f9e89 35b779 6ece58 b5de2b fde725");

const bytes = (text) => Uint8Array.from(atob(text), (c) => c.charCodeAt(0));

// An array as the server writes it: its shape, and all values in one Float32Array.
export const decode = ({shape, data}) => ({shape, values: new Float32Array(bytes(data).buffer)});

// Part n of an array along its first axis.
export const part = ({shape, values}, n) => {
  const size = values.length / shape[0];
  return {shape: shape.slice(1), values: values.subarray(n * size, (n + 1) * size)};
};

export const largest = (...arrays) => Math.max(...arrays.flatMap(({values}) => [...values].map(Math.abs)), 0);
export const sum = ({values}) => values.reduce((total, x) => total + x, 0);
export const minus = (a, b) => ({shape: a.shape, values: a.values.map((x, n) => x - b.values[n])});

export const number = (x, digits = 2) => {
  const text = Math.abs(x) >= 100 ? x.toFixed(0) : Number(x.toPrecision(digits)).toString();
  return text.replace("-", "−");
};

// With so many digits after the point; never −0.
export const fixed = (x, digits = 2) => x.toFixed(digits).replace(/^-(?=[0.]*$)/, "").replace("-", "−");

export function node(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

// In main memory: a browser composes every other canvas as a layer of its own, which takes longer than all drawing.
const drawing = (canvas) => canvas.getContext("2d", {willReadFrequently: true});

// Canvases of pictures that were replaced. A new one takes longer to make than a small picture to draw.
const spare = [];

// The children are made anew, their pictures on the canvases of those before.
export function redraw(container, makeChildren) {
  spare.push(...container.querySelectorAll("canvas[role=img]"));
  container.replaceChildren(...makeChildren());
}

function labelled(label, width, height) {
  const canvas = spare.pop() ?? node("canvas", {role: "img"});
  canvas.setAttribute("aria-label", label);
  return Object.assign(canvas, {title: label, width, height});
}

function colour(table, share) {
  const x = Math.min(Math.max(share, 0), 1) * (table.length - 1), n = Math.min(Math.floor(x), table.length - 2);
  return table[n].map((c, i) => Math.round(c + (x - n) * (table[n + 1][i] - c)));
}

const signed = (value, limit) => colour(SIGNED, limit ? (value / limit + 1) / 2 : 0.5);

// Windows [n, h, w] (or one [h, w]) in a square arrangement, row by row, with a gap between them.
export function picture(array, limit, positive, label) {
  const {values} = array, [h, w] = array.shape.slice(-2), count = values.length / (h * w);
  const columns = Math.ceil(Math.sqrt(count)), rows = Math.ceil(count / columns);
  const canvas = labelled(label, columns * (w + 1) - 1, rows * (h + 1) - 1);
  const context = drawing(canvas), image = context.createImageData(canvas.width, canvas.height);
  values.forEach((value, n) => {
    const which = Math.floor(n / (h * w)), i = Math.floor((n % (h * w)) / w), j = n % w;
    const row = Math.floor(which / columns) * (h + 1) + i, column = (which % columns) * (w + 1) + j;
    const rgb = positive ? colour(POSITIVE, limit ? value / limit : 0) : signed(value, limit);
    image.data.set([...rgb, 255], 4 * (row * canvas.width + column));
  });
  context.putImageData(image, 0, 0);
  return canvas;
}

// An image [C, size, size] of bytes in base64.
export function photo(canvas, text, channels) {
  const data = bytes(text), area = data.length / channels, size = Math.sqrt(area);
  canvas.width = canvas.height = size;
  const context = drawing(canvas), image = context.createImageData(size, size);
  for (let n = 0; n < area; n++) {
    const rgb = [0, 1, 2].map((c) => data[(channels >= 3 ? c : 0) * area + n]);
    image.data.set([...rgb, 255], 4 * n);
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

const grey = node("canvas");

// Pixel by pixel: a filter of the context takes longer than everything else on the page.
function paleGrey(background) {
  const {width, height} = background, image = drawing(background).getImageData(0, 0, width, height);
  for (let n = 0; n < image.data.length; n += 4) {
    const [red, green, blue] = image.data.subarray(n, n + 3);
    image.data.fill(102 + 0.6 * (0.3 * red + 0.59 * green + 0.11 * blue), n, n + 3);
  }
  Object.assign(grey, {width, height});
  drawing(grey).putImageData(image, 0, 0);
  return grey;
}

// A signed map over the image in light grey: the stronger a cell, the less of the image shows through.
export function overlay(background, map, limit, label) {
  const side = 240, canvas = labelled(label, side, side), context = drawing(canvas), [rows, columns] = map.shape;
  context.imageSmoothingEnabled = false;
  context.drawImage(paleGrey(background), 0, 0, side, side);
  const h = side / rows, w = side / columns;
  map.values.forEach((value, n) => {
    const strength = limit ? Math.abs(value) / limit : 0, i = Math.floor(n / columns), j = n % columns;
    context.globalAlpha = 0.9 * strength;
    context.fillStyle = `rgb(${signed(value, limit)})`;
    context.fillRect(j * w, i * h, w, h);
    if (rows > 4) return;
    context.globalAlpha = 1;
    context.font = "600 16px system-ui, sans-serif";
    context.textAlign = "center";
    context.textBaseline = "middle";
    context.lineWidth = 3;
    const text = fixed(value, limit < 0.5 ? 2 : 1);
    context.strokeStyle = "#000b";
    context.fillStyle = "#fff";
    context.strokeText(text, (j + 0.5) * w, (i + 0.5) * h);
    context.fillText(text, (j + 0.5) * w, (i + 0.5) * h);
  });
  return canvas;
}

// ---- charts ----

const SVG = "http://www.w3.org/2000/svg";

function shape(tag, attributes, text = "") {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.textContent = text;
  return made;
}

// Lines over x: {name for the legend, style, dashed, points: [[x, y], …], background: more points, drawn faintly}.
export function chart({title, lines, xs, ys, xName, now, format = (y) => y, label}) {
  const [width, height, left, right, top, bottom] = [340, title ? 190 : 155, 38, 12, title ? 36 : 8, 34];
  const svg = shape("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label});
  const x = (v) => left + ((v - xs[0]) / (xs.at(-1) - xs[0] || 1)) * (width - left - right);
  const y = (v) => height - bottom - ((v - ys[0]) / (ys.at(-1) - ys[0])) * (height - top - bottom);
  if (title) svg.append(shape("text", {x: left, y: 12}, title));
  for (const tick of ys) {
    svg.append(shape("line", {class: "grid", x1: left, x2: width - right, y1: y(tick), y2: y(tick)}));
    svg.append(shape("text", {x: left - 6, y: y(tick) + 4, "text-anchor": "end"}, format(tick)));
  }
  for (const tick of xs)
    svg.append(shape("line", {class: "grid", x1: x(tick), x2: x(tick), y1: top, y2: height - bottom}),
      shape("text", {x: x(tick), y: height - bottom + 15, "text-anchor": "middle"}, number(tick, 4)));
  svg.append(shape("text", {x: (left + width - right) / 2, y: height - 4, "text-anchor": "middle"}, xName));
  if (now !== undefined) svg.append(shape("line", {class: "now", x1: x(now), x2: x(now), y1: top, y2: height - bottom}));
  let place = left;
  for (const {name, style, dashed, points, background = []} of lines) {
    const dash = dashed ? {"stroke-dasharray": "5 3"} : {};
    if (name) {
      const legend = {x1: place, x2: place + 18, y1: top - 12, y2: top - 12, class: style, "stroke-width": 2};
      svg.append(shape("line", {...legend, ...dash}), shape("text", {x: place + 22, y: top - 8}, name));
      place += 34 + 6.3 * name.length;
    }
    const path = (all) => all.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" ");
    svg.append(shape("polyline", {class: `${style} faint`, points: path(background), ...dash}));
    svg.append(shape("polyline", {class: style, points: path(points), ...dash}));
    for (const [a, b] of points.length < 40 ? points : [])
      svg.append(shape("circle", {class: `dot ${style}`, cx: x(a), cy: y(b), r: 2.2}));
  }
  return svg;
}

// Round numbers from 0 to at least the highest.
export function ticks(highest, most = 4) {
  const rough = Math.max(highest, 1e-9) / most, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((n) => n * power).find((n) => n >= rough * 0.999);
  return Array.from({length: Math.ceil((highest / step) * 0.999) + 1}, (_, n) => Number((n * step).toPrecision(6)));
}
