// The page: what the user has chosen, what is asked of the server, and what is shown.

import {chart, decode, largest, minus, node, number, overlay, part, photo, picture, sum, ticks} from "./draw.js";

const $ = (id) => document.getElementById(id);
const [ANSWER, NOTHING, RUNNER_UP] = [-1, -1, -2];  // choices beside the classes
const fixed = (x) => x.toFixed(2).replace("-", "−");
const percent = (p) => `${(100 * p).toFixed(1)}%`;
const style = (model) => (model.kind === "planar" ? "planar" : "group");

let about;  // what the server said at the start: models, classes, samples, layers
const chosen = {image: 0, angle: 0, home: [0, 0], layer: 0, head: 0, channel: 0};
let truth = null;  // the label of a sample
let shown = null;  // the last answer
let occlusion = null;  // of the same image and angle, once it is there
let curves = [];  // for each model a Map: angle → probability of the class that the curve is about
let curveClass = 0;

// ---- asking ----

async function ask(path, body) {
  const post = body === undefined ? {} : {method: "POST", body};
  const answer = await fetch(path, post);
  if (!answer.ok) throw new Error(await answer.text());
  return answer.json();
}

// While an answer is on its way, only the last question is kept.
function latest(path, show) {
  let busy = false, waiting = false, done = Promise.resolve();
  const run = async () => {
    busy = true;
    do {
      waiting = false;
      const question = JSON.stringify(chosen);
      try {
        show(await ask(path, question), JSON.parse(question));
      } catch (error) {
        say(error.message, true);
      }
    } while (waiting);
    busy = false;
  };
  return () => {
    if (busy) waiting = true;
    else done = run();
    return done;
  };
}

const look = latest("/api/look", (answer, question) => {
  shown = {...answer, angle: question.angle};
  occlusion = null;
  answer.models.forEach((model, n) => curves[n].set(question.angle, model.probabilities[curveClass]));
  photo($("photo"), answer.image, about.channels);
  placeFrames(answer.pixel);
  drawDecisions();
  drawFilters(answer.models);
  drawMaps(answer.models);
  drawCurve();
  clearTimeout(look.later);
  look.later = setTimeout(occlude, 250);
});

const lookAtPixel = latest("/api/pixel", (answer) => drawFilters(answer.models));

const occlude = latest("/api/occlusion", (answer, question) => {
  if (question.angle !== shown.angle || question.image !== chosen.image) return;
  occlusion = answer.models.map(decode);
  drawDecisions();
});

function say(text, error = false) {
  $("message").textContent = text;
  $("message").classList.toggle("error", error);
}

// ---- the image ----

function choose(image, label) {
  Object.assign(chosen, {image, angle: 0});
  truth = label;
  for (const [n, button] of [...$("samples").children].entries())
    button.setAttribute("aria-pressed", String(n === image));
  setAngle(0);
  const known = about.classes.indexOf(label);
  curveClass = known;
  curves = about.models.map(() => new Map());
  if (known >= 0) return look();
  curveClass = 0;
  return look().then(() => {  // without a label: the class that the first network answers
    const p = shown.models[0].upright;
    curveClass = p.indexOf(Math.max(...p));
    curves = about.models.map((_, n) => new Map([[0, shown.models[n].probabilities[curveClass]]]));
    drawCurve();
  });
}

function setAngle(angle) {
  chosen.angle = angle;
  $("angle").value = angle;
  $("degrees").textContent = `${angle}°`.replace("-", "−");
}

function turnTo(angle) {
  setAngle(180 - ((((180 - angle) % 360) + 360) % 360));  // above −180°, up to 180°
  return look();
}

async function allAround() {
  const from = chosen.angle, image = chosen.image;
  for (let step = 1, here = from; step <= 24; step++) {
    if (chosen.angle !== here || chosen.image !== image) return;  // the user has done something else
    await turnTo(from + 15 * step);
    here = chosen.angle;
  }
}

// Where a place of the image goes when the image is turned counter-clockwise about its centre.
function turnPlace([row, column], degrees) {
  const centre = (about.size - 1) / 2, radians = (degrees * Math.PI) / 180;
  const [r, c, cos, sin] = [row - centre, column - centre, Math.cos(radians), Math.sin(radians)];
  return [r * cos - c * sin + centre, c * cos + r * sin + centre];
}

function currentPixel() {
  return turnPlace(chosen.home, chosen.angle).map((x) => Math.min(Math.max(Math.round(x), 0), about.size - 1));
}

function choosePixel(row, column) {
  const inside = [row, column].map((x) => Math.min(Math.max(x, 0), about.size - 1));
  chosen.home = turnPlace(inside, -chosen.angle);
  placeFrames(inside);
  lookAtPixel();
}

function placeFrames([row, column]) {
  const {size: [down, across], window: k} = about.layers[chosen.layer];
  const i = Math.floor((row * down) / about.size), j = Math.floor((column * across) / about.size);
  const put = (id, top, left, height, width) => Object.assign($(id).style, {
    top: `${100 * top}%`, left: `${100 * left}%`, height: `${100 * height}%`, width: `${100 * width}%`});
  const reach = Math.floor(k / 2);
  put("pixel", i / down, j / across, 1 / down, 1 / across);
  put("window", (i - reach) / down, (j - reach) / across, k / down, k / across);
  $("window").hidden = !k;
  $("place").textContent = `Now: row ${row}, column ${column}.`;
}

// ---- the decision ----

function card(model, n, ...children) {
  const title = node("h3", {}, model.name, " ", node("small", {}, model.title));
  return node("article", {class: "card", "data-kind": model.kind, "data-model": n}, title, ...children);
}

function answerLine(p) {
  const best = p.indexOf(Math.max(...p)), line = node("p", {class: "answer", role: "status"});
  line.append("answers ", node("b", {}, about.classes[best]), ` with ${percent(p[best])}`);
  if (truth !== null) {
    const right = about.classes[best] === truth;
    const mark = right ? "right" : `wrong, the true class is ${truth}`;
    line.append(" · ", node("span", {class: right ? "mark-right" : "mark-wrong"}, `${right ? "✓" : "✗"} ${mark}`));
  }
  return line;
}

function bars(p, upright) {
  let order = about.classes.map((_, n) => n);
  if (order.length > 10)
    order = order.sort((a, b) => Math.max(p[b], upright[b]) - Math.max(p[a], upright[a])).slice(0, 10);
  const best = p.indexOf(Math.max(...p)), list = node("ol", {class: "bars"});
  list.style.setProperty("--names", `${Math.min(9, Math.max(...about.classes.map((c) => c.length)) * 0.62 + 0.5)}em`);
  for (const n of order) {
    const bar = node("span", {class: "bar"}), tick = node("span", {class: "tick"});
    bar.style.width = `${100 * p[n]}%`;
    tick.style.left = `${100 * upright[n]}%`;
    list.append(node("li", n === best ? {class: "best"} : {}, node("span", {class: "name"}, about.classes[n]),
      node("span", {class: "track"}, bar, tick), node("span", {class: "value"}, percent(p[n]))));
  }
  return list;
}

function evidence(maps, n) {
  const [own, other] = [$("class").value, $("other").value].map(Number);
  const {logits} = shown.models[n], order = logits.map((_, c) => c).sort((a, b) => logits[b] - logits[a]);
  const best = own === ANSWER ? order[0] : own, next = other === RUNNER_UP ? order.find((c) => c !== best) : other;
  const map = part(maps, best), name = about.classes[best];
  if (next === undefined || next === NOTHING || next === best)
    return {map, words: `“${name}”`, logit: `the logit of “${name}”`};
  const words = `“${name}” rather than “${about.classes[next]}”`;
  const logit = `the difference of their logits, ${fixed(logits[best])} − ${fixed(logits[next])}`;
  return {map: minus(map, part(maps, next)), words, logit};
}

function drawDecisions() {
  $("decisions").replaceChildren(...about.models.map((model, n) => {
    const answer = shown.models[n], {map, words, logit} = evidence(decode(answer.activation), n);
    const total = fixed(sum(map));
    const where = overlay($("photo"), map, largest(map), `class activation map for ${words}, sum ${total}`);
    const why = node("figure", {class: "activation"}, where, node("figcaption", {},
      `Activation map for ${words}: the cells add up to `, node("b", {}, total), `, ${logit}.`));
    const covered = node("figure", {class: "occlusion"});
    if (occlusion) {
      const falls = evidence(occlusion[n], n).map, limit = largest(falls);
      covered.append(overlay($("photo"), falls, limit, `occlusion for ${words}, largest fall ${number(limit)}`));
      covered.append(node("figcaption", {}, "Occlusion: covering a part lowers this number by up to ",
        node("b", {}, fixed(Math.max(...falls.values))), "."));
    } else {
      const waiting = node("canvas", {"aria-hidden": "true"});
      waiting.width = waiting.height = 320;
      covered.append(waiting, node("figcaption", {}, "Occlusion: covering part after part…"));
    }
    const facts = node("p", {class: "facts"}, model.facts), said = node("p", {class: "said"}, answer.said || " ");
    return card(model, n, facts, answerLine(answer.probabilities), said, bars(answer.probabilities, answer.upright),
      node("div", {class: "pair"}, why, covered));
  }));
}

// ---- filters at the pixel ----

const COLUMNS = [["V", "values"], ["ψ", "template"], ["α", "scores"], ["α·ψ", "filter"], ["α·β", "position"]];

function filterTable(model, f) {
  const arrays = [f.value, f.psi, f.alpha, f.effective, f.positional].map(decode), limits = arrays.map((a) => largest(a));
  const head = node("tr", {}, node("td", {class: "corner"}), ...COLUMNS.map(([name, what]) =>
    node("th", {scope: "col"}, node("b", {}, name), node("span", {class: "about"}, node("br"), what))),
    node("th", {scope: "col", class: "number"}, node("b", {}, "="), node("span", {class: "about"}, node("br"), "output")));
  const rows = model.planes.map((plane, p) => node("tr", {}, node("th", {scope: "row"}, plane),
    ...COLUMNS.map(([name], c) => {
      const values = c === 0 ? arrays[0] : part(arrays[c], p);
      return node("td", {}, picture(values, limits[c], name === "α", `${name} at ${plane}, up to ${number(limits[c])}`));
    }), node("td", {class: "number"}, number(f.output[p]))));
  const scale = node("tr", {}, node("td"), ...COLUMNS.map(([name], c) =>
    node("td", {}, (name === "α" ? "≤" : "±") + number(limits[c]))), node("td"));
  return node("table", {class: "filters"}, node("thead", {}, head), node("tbody", {}, ...rows), node("tfoot", {}, scale));
}

function headsTable(model, f) {
  const heads = decode(f.heads), limit = largest(heads), count = heads.shape[0];
  const numbers = Array.from({length: count}, (_, n) => n);
  const head = node("tr", {}, node("td", {class: "corner"}), ...numbers.map((n) =>
    node("th", {scope: "col", ...(n === f.head ? {class: "best"} : {})}, String(n + 1))));
  const rows = model.planes.map((plane, p) => node("tr", {}, node("th", {scope: "row"}, plane), ...numbers.map((n) =>
    node("td", {}, picture(part(part(heads, n), p), limit, true, `α of head ${n + 1} at ${plane}`)))));
  return node("table", {class: "heads"}, node("caption", {}, `α of every head, 0 to ${number(limit)}`),
    node("thead", {}, head), node("tbody", {}, ...rows));
}

function drawFilters(models) {
  $("filters").replaceChildren(...about.models.map((model, n) => {
    const f = models[n].filters;
    if (!f) return card(model, n, node("p", {}, "This network has no self convolution: its filters are the same everywhere."));
    const tables = node("div", {class: "split"}, filterTable(model, f), headsTable(model, f));
    return card(model, n, node("p", {class: "where"}, f.where), tables);
  }));
}

// ---- feature maps ----

function drawMaps(models) {
  $("maps").replaceChildren(...about.models.map((model, n) => {
    const m = models[n].maps, rows = {upright: decode(m.upright)};
    if (shown.angle) rows[`turned ${shown.angle}°`.replace("-", "−")] = decode(m.turned);
    const limit = largest(...Object.values(rows));
    const head = model.planes.length > 1 ? [node("thead", {}, node("tr", {}, node("td", {class: "corner"}),
      ...model.planes.map((plane) => node("th", {scope: "col"}, plane))))] : [];
    const body = node("tbody", {}, ...Object.entries(rows).map(([name, maps]) => node("tr", {},
      node("th", {scope: "row"}, name), ...model.planes.map((plane, p) =>
        node("td", {}, picture(part(maps, p), limit, false, `feature map at ${plane}, ${name}`))))));
    return card(model, n, node("p", {class: "where"}, `${m.where}, ±${number(limit)}`),
      node("table", {class: model.planes.length > 1 ? "maps" : "maps single"}, ...head, body), node("p", {class: "said", role: "status"}, m.said || " "));
  }));
}

// ---- the curve ----

function drawCurve() {
  const lines = about.models.map((model, n) => ({name: model.name, style: style(model), dashed: style(model) === "planar",
    points: [...curves[n]].sort((a, b) => a[0] - b[0])}));
  const name = about.classes[curveClass], count = curves[0].size;
  $("curve").replaceChildren(chart({lines, xs: [-180, -90, 0, 90, 180], ys: [0, 0.5, 1], xName: "degrees",
    now: shown.angle, format: (y) => `${100 * y}%`, label: `probability of ${name} against the angle, ${count} angles so far`}));
  $("curve-caption").textContent = `Probability of “${name}” at each angle you have turned to (${count} so far). `
    + "A network that knows rotations stays level at multiples of 90°.";
}

// ---- training ----

function trainingCard(model, n, seen) {
  const images = node("div", {class: "seen", role: "img", "aria-label": `${seen.images.length} training images`});
  images.append(...seen.images.map((image) => photo(node("canvas"), image, about.channels)));
  const charts = [["Loss", "loss", null], ["Accuracy", "accuracy", 1]].map(([title, what, top]) => {
    const lines = [["training", "train", "group"], ["validation", "val", "planar"]].map(([name, key, look]) => ({
      name, style: look, dashed: key === "val", points: seen.metrics.map((row) => [row.epoch, row[`${key}_${what}`]])
        .filter(([, value]) => value !== null && value !== undefined)}));
    const values = lines.flatMap(({points}) => points.map(([, value]) => value));
    const last = Math.max(...seen.metrics.map((row) => row.epoch), 1);
    return chart({title, lines, xs: ticks(last).filter((x) => x <= last), ys: ticks(top ?? Math.max(...values, 0)),
      xName: "epoch", label: `${title} over ${last} epochs`});
  });
  const course = seen.metrics.length ? charts : [node("p", {}, "No epoch of this run has ended.")];
  return card(model, n, node("p", {}, seen.said), images, node("div", {class: "pair"}, ...course));
}

async function showTraining() {
  const open = $("training").hidden;
  if (open && !$("training").childElementCount)
    $("training").replaceChildren(...(await ask("/api/training")).models.map((seen, n) => trainingCard(about.models[n], n, seen)));
  $("training").hidden = !open;
  $("training-button").setAttribute("aria-expanded", String(open));
}

// ---- the controls ----

function options(select, names, value = 0, first = 0) {
  select.replaceChildren(...names.map((name, n) => node("option", {value: n + first}, name)));
  select.value = value;
}

function layerOptions() {
  const {heads, channels} = about.layers[chosen.layer], count = (n) => Array.from({length: n}, (_, i) => String(i + 1));
  chosen.head = Math.min(chosen.head, heads - 1);
  chosen.channel = Math.min(chosen.channel, channels - 1);
  options($("head"), count(heads), chosen.head);
  options($("channel"), count(channels), chosen.channel);
}

function listen() {
  $("angle").addEventListener("input", () => turnTo(Number($("angle").value)));
  $("left").addEventListener("click", () => turnTo(chosen.angle + 90));
  $("right").addEventListener("click", () => turnTo(chosen.angle - 90));
  $("upright").addEventListener("click", () => turnTo(0));
  $("around").addEventListener("click", allAround);
  $("training-button").addEventListener("click", () => showTraining().catch((error) => say(error.message, true)));
  for (const id of ["class", "other"]) $(id).addEventListener("change", drawDecisions);
  for (const id of ["layer", "head", "channel"])
    $(id).addEventListener("change", () => {
      chosen[id] = Number($(id).value);
      if (id === "layer") layerOptions();
      look();
    });
  $("stage").addEventListener("click", (event) => {
    const box = $("photo").getBoundingClientRect();
    choosePixel(Math.floor(((event.clientY - box.top) / box.height) * about.size),
      Math.floor(((event.clientX - box.left) / box.width) * about.size));
  });
  $("stage").addEventListener("keydown", (event) => {
    const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
    if (!step) return;
    event.preventDefault();
    const [row, column] = currentPixel(), cell = about.size / about.layers[chosen.layer].size[0];
    choosePixel(row + step[0] * cell, column + step[1] * cell);
  });
  $("file").addEventListener("change", async () => {
    const [file] = $("file").files;
    $("file").value = "";
    if (!file) return;
    try {
      if (file.size > about.maxUpload)
        throw new Error(`expected up to ${about.maxUpload >> 20} MB; got ${(file.size / 2 ** 20).toFixed(1)} MB`);
      const {image, size} = await ask("/api/upload", file);
      say(`${file.name}, as ${size}×${size} pixels`);
      choose(image, null);
    } catch (error) {
      say(`${file.name}: ${error.message}`, true);
    }
  });
}

async function start() {
  about = await ask("/api/start");
  const names = about.models.map(({name}) => name).join(" and ");
  $("about").textContent = `${names}, trained on ${about.data}: what each network answers, which parts of the image `
    + "it answers from, and what changes when the image is turned.";
  $("samples").append(...about.samples.map(({label, image}, n) => {
    const button = node("button", {type: "button", "aria-label": `sample: ${label}`, title: label, "aria-pressed": "false"},
      photo(node("canvas"), image, about.channels));
    button.addEventListener("click", () => { say(about.note); choose(n, label); });
    return button;
  }));
  options($("layer"), about.layers.map(({title}) => title), about.first.layer);
  options($("class"), ["the answer of each network", ...about.classes], ANSWER, ANSWER);
  options($("other"), ["the runner-up", "nothing: the class by itself", ...about.classes], RUNNER_UP, RUNNER_UP);
  const {layer, head, channel, pixel, sample} = about.first;
  Object.assign(chosen, {layer, head, channel, home: pixel});
  layerOptions();
  listen();
  say(about.note);
  await choose(sample, about.samples[sample].label);
  document.body.dataset.ready = "true";
}

start().catch((error) => { $("about").textContent = `The page could not start: ${error.message}`; });
