// The page: what the user has chosen, what is asked of the server, and what is shown.

import {chart, decode, fixed, largest, minus, node, number, overlay, part, photo, picture, redraw, sum, ticks} from "./draw.js";

const $ = (id) => document.getElementById(id);
const ROUNDING = 1e-4;  // of the largest logit: less is not drawn as evidence
const [ANSWER, NOTHING, STRONGEST] = [-1, -1, -2];  // choices beside the classes
const percent = (p) => `${(100 * p).toFixed(1)}%`;
const best = (p) => p.indexOf(Math.max(...p));

// Planar networks and those on a group have colours of their own; a further one of its kind has another.
function style(model) {
  const planar = ({kind}) => kind === "planar";
  const alike = about.models.filter((other) => planar(other) === planar(model));
  return `${planar(model) ? "planar" : "group"}-${alike.indexOf(model) % 3}`;
}

let about;  // what the server said at the start: models, classes, samples, layers
const chosen = {image: 0, angle: 0, home: [0, 0], layer: 0, heads: [], channels: []};  // a head and a channel of each network
let shown = null;  // the last response and its request: everything displayed comes from it
let occlusion = null;  // of the image and angle that are shown, once it is there
let around = new Map();  // angle → for each model its probabilities, as far as they are known
let turned = [0, 0];  // from which angle to which the user has turned the image
let choices = 0;  // how many images the user has chosen
let turns = 0;  // how often the user has turned the image, or chosen another
const uploads = new Map();  // image of the user → what is said about it
let failures = 0;
let gone = false;  // the server

// ---- asking ----

const GONE = "The server has ended: start `selfconv explore` again, then reload this page.";
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);
const sameImage = (a, b) => a.image === b.image && a.angle === b.angle;

async function ask(path, body) {
  if (gone) throw new Error(GONE);
  try {
    const answer = await fetch(path, body === undefined ? {} : {method: "POST", body});
    if (!answer.ok) throw new Error(await answer.text());
    return await answer.json();
  } catch (error) {
    if (!(error instanceof TypeError)) throw error;  // TypeError: there was no answer, or not all of one
    gone ||= !(await fetch("/favicon.svg").catch(() => null));
    throw new Error(gone ? GONE : "the request was not answered");
  }
}

// Sends requests until the display matches the selection; resolves to true if it does.
let asking = null;
function refresh() {
  asking ??= catchUp().finally(() => {
    asking = null;
    document.body.classList.remove("waiting");
  });
  return asking;
}

async function catchUp() {
  document.body.classList.add("waiting");
  while (!same(chosen, shown?.question)) {
    const question = structuredClone(chosen), before = failures;
    const pixelAlone = shown && same({...question, home: 0}, {...shown.question, home: 0});
    try {
      const answer = await ask(pixelAlone ? "/api/pixel" : "/api/look", JSON.stringify(question));
      if (pixelAlone) showPixel(answer, question);
      else showAll(answer, question);
      if (failures === before) say(wordsFor(question.image));  // an error stays until a later question is answered
    } catch (error) {
      if (!shown) throw error;
      fail(error.message);
      if (!gone && !same(question, chosen)) continue;  // the user has chosen something else meanwhile
      Object.assign(chosen, structuredClone(shown.question));
      showControls();
      return false;
    }
  }
  return true;
}

function showAll(answer, question) {
  if (question.image !== shown?.question.image) [around, turned] = [new Map(), [0, 0]];
  if (!shown || !sameImage(question, shown.question)) occlusion = null;
  shown = {...answer, question};
  around.set(question.angle, answer.models.map(({probabilities}) => probabilities));
  turned = [Math.min(turned[0], question.angle), Math.max(turned[1], question.angle)];
  photo($("photo"), answer.image, about.channels);
  placeFrames();
  drawDecisions();
  drawFilters();
  drawMaps();
  drawVerdicts();
  drawCurve();
  clearTimeout(showAll.later);
  if (!occlusion) showAll.later = setTimeout(occlude, 250);
}

function showPixel(answer, question) {
  const models = shown.models.map((model, n) => ({...model, ...answer.models[n]}));
  shown = {...shown, question, pixel: answer.pixel, models};
  placeFrames();
  drawFilters();
}

async function occlude() {
  if (occlude.busy) return;
  occlude.busy = true;
  try {
    while (!occlusion) {
      const {question} = shown, {models} = await ask("/api/occlusion", JSON.stringify(question));
      if (sameImage(question, shown.question)) occlusion = models.map(decode);
    }
    drawDecisions();
    lookAround();
  } catch (error) {
    fail(error.message);
  } finally {
    occlude.busy = false;
  }
}

// The answers at other angles, one small question after another, so that no click has to wait for them.
async function lookAround() {
  const mine = around;  // of one image: another one has another map
  if (lookAround.of === mine) return;
  lookAround.of = mine;
  try {
    for (let step = 0; step <= 24 && mine === around; step++) {
      const angle = 15 * Math.ceil(step / 2) * (step % 2 ? 1 : -1);  // to both sides of upright
      if (mine.has(angle)) continue;
      mine.set(angle, (await ask("/api/answer", JSON.stringify({...shown.question, angle}))).models);
      if (mine === around && angle % 45 === 0) drawCurve();
    }
  } catch (error) {
    fail(error.message);
  }
}

function say(text, error = false) {
  $("message").textContent = text;
  $("message").classList.toggle("error", error);
}

function fail(text) {
  failures += 1;
  say(text, true);
}

// ---- the image ----

const wordsFor = (image) => uploads.get(image) ?? about.note;

function choose(image) {
  choices += 1;
  turns += 1;
  say(wordsFor(image));
  Object.assign(chosen, {image, angle: 0});
  showControls();
  return refresh();
}

// Updates the controls to the current selection.
function showControls() {
  $("angle").value = chosen.angle;
  $("degrees").textContent = `${chosen.angle}°`.replace("-", "−");
  for (const [n, button] of [...$("samples").children].entries())
    button.setAttribute("aria-pressed", String(n === chosen.image));
  $("layer").value = chosen.layer;
  viewOptions();
}

function turnTo(angle) {
  chosen.angle = Math.abs(angle) <= 180 ? angle : 180 - ((((180 - angle) % 360) + 360) % 360);
  showControls();
  return refresh();
}

function userTurnsTo(angle) {
  turns += 1;
  return turnTo(angle);
}

// Ends where it began, unless the user turns the image meanwhile.
async function allAround() {
  if (allAround.of === turns) return;  // it is on its way
  const mine = ++turns, from = chosen.angle;
  allAround.of = mine;
  for (let step = 1; step <= 24 && mine === turns; step++) if (!(await turnTo(from + 15 * step))) break;
  allAround.of = null;
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

// Selects a pixel given in an image rotated by `angle`; for clicks, the displayed angle.
function choosePixel(row, column, angle) {
  const inside = [row, column].map((x) => Math.min(Math.max(x, 0), about.size - 1));
  chosen.home = turnPlace(inside, -angle);
  return refresh();
}

// The layer that is chosen, of the network whose layers are chosen from.
const leadLayer = ({layer}) => about.models[about.lead].layers[layer];

function placeFrames() {
  const [row, column] = shown.pixel, {size: [down, across], window: k} = leadLayer(shown.question);
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
  return node("article", {class: `card ${style(model)}`, "data-model": n}, title, ...children);
}

// The true class of the image that is shown; null for one's own image.
function truthShown() {
  const {image} = shown.question;
  return typeof image === "number" ? about.samples[image].label : null;
}

function truthMark(p) {
  const truth = truthShown();
  if (truth === null) return [];
  const right = about.classes[best(p)] === truth;
  return [" ", node("span", {class: right ? "mark-right" : "mark-wrong"}, `${right ? "✓" : "✗"} true class ${truth}`)];
}

function answerLine(p) {
  return node("p", {class: "answer"}, "answers ", node("b", {}, about.classes[best(p)]), ` with ${percent(p[best(p)])}`,
    ...truthMark(p));
}

// Beside the slider, and read out by screen readers, which would not find the answers in redrawn cards.
function drawVerdicts() {
  $("verdicts").replaceChildren(...about.models.map((model, n) => {
    const p = shown.models[n].probabilities;
    return node("li", {class: style(model)}, node("span", {class: "name"}, `${model.name}:`),
      node("span", {class: "value"}, `${about.classes[best(p)]}, ${percent(p[best(p)])}`, ...truthMark(p)));
  }));
}

function bars(p, upright) {
  let order = about.classes.map((_, n) => n);
  if (order.length > 10)
    order = order.sort((a, b) => Math.max(p[b], upright[b]) - Math.max(p[a], upright[a])).slice(0, 10);
  const list = node("ol", {class: "bars"});
  list.style.setProperty("--names", `${Math.min(9, Math.max(...about.classes.map((c) => c.length)) * 0.62 + 0.5)}em`);
  for (const n of order) {
    const bar = node("span", {class: "bar"}), tick = node("span", {class: "tick"});
    bar.style.width = `${100 * p[n]}%`;
    tick.style.left = `${100 * upright[n]}%`;
    list.append(node("li", n === best(p) ? {class: "best"} : {}, node("span", {class: "name"}, about.classes[n]),
      node("span", {class: "track"}, bar, tick), node("span", {class: "value"}, percent(p[n]))));
  }
  return list;
}

function evidence(maps, n) {
  const [own, other] = [$("class").value, $("other").value].map(Number);
  const {logits} = shown.models[n], order = logits.map((_, c) => c).sort((a, b) => logits[b] - logits[a]);
  const first = own === ANSWER ? order[0] : own, next = other === STRONGEST ? order.find((c) => c !== first) : other;
  const map = part(maps, first), name = about.classes[first];
  if (next === undefined || next === NOTHING || next === first) {
    const itself = next === first ? " (which is the answer: not compared with itself)" : "";
    return {map, words: `“${name}”${itself}`, logit: `the logit of “${name}”`};
  }
  const words = `“${name}” rather than “${about.classes[next]}”`;
  const logit = `the difference of their logits (rounded: ${fixed(logits[first])} and ${fixed(logits[next])})`;
  return {map: minus(map, part(maps, next)), words, logit};
}

function drawDecisions() {
  redraw($("decisions"), () => about.models.map((model, n) => {
    const answer = shown.models[n], {map, words, logit} = evidence(decode(answer.activation), n);
    const total = fixed(sum(map)), least = ROUNDING * Math.max(...answer.logits.map(Math.abs));
    const where = overlay($("photo"), map, Math.max(largest(map), least), `class activation map for ${words}, sum ${total}`);
    const why = node("figure", {class: "activation"}, node("h4", {}, "Where the evidence is"), where, node("figcaption", {},
      `Activation map for ${words}: the cells add up to `, node("b", {}, total), `, ${logit}.`));
    const covered = node("figure", {class: "occlusion"}, node("h4", {}, "If a part is covered"));
    if (occlusion) {
      const falls = evidence(occlusion[n], n).map, [fall, rise] = [Math.max(...falls.values), -Math.min(...falls.values)];
      const effect = (verb, by) => [`${verb} this number by up to `, node("b", {}, fixed(by))];
      const lowers = effect("lowers", fall), raises = effect("raises", rise);
      const both = rise > fall ? [raises, lowers] : [lowers, raises];
      const said = fall > least && rise > least ? ["covering one part ", ...both[0], ", covering another ", ...both[1], "."]
        : fall > least ? ["covering a part ", ...lowers, "; covering none raises it."]
          : rise > least ? ["no part is needed; covering one ", ...raises, "."] : ["covering any part changes nothing."];
      const caption = node("figcaption", {}, "Occlusion: ", ...said);
      const label = `for ${words}. ${caption.textContent}`;
      covered.append(overlay($("photo"), falls, Math.max(largest(falls), least), label), caption);
    } else {
      const waiting = node("canvas", {"aria-hidden": "true"});
      waiting.width = waiting.height = 240;
      covered.append(waiting, node("figcaption", {}, "Occlusion: covering part after part…"));
    }
    const facts = node("p", {class: "facts"}, node("b", {}, model.kind), `: ${model.meaning[0].toLowerCase()}${model.meaning.slice(1)} ${model.facts}.`);
    const said = node("p", {class: "said"}, answer.said);
    return card(model, n, facts, answerLine(answer.probabilities), said, bars(answer.probabilities, answer.upright),
      node("div", {class: "pair"}, why, covered));
  }));
}

// ---- filters at the pixel ----

const EVEN = 1.5;  // times the share of each neighbour, if all had the same

// The pictures of the equation, each after its operator; those in brackets have a common background.
const COLUMNS = [["Σ", "V", "neighbours"], ["×", "ψ", "template"], ["×", "α", "attention"], ["=", "α·ψ", "filter"],
  ["+ Σ", "α·β", "position"]];
const [FIRST_IN_BRACKETS, LAST_IN_BRACKETS] = [1, 3];
const EQUATION = "Σ neighbours × (template × attention = filter) + Σ position = output";

const planeName = (model, plane) => node("th", {scope: "row"}, model.planes.length > 1 ? plane : "");
const operator = (text, style = "") => node("td", {class: `operator ${style}`}, text);

const tableClass = (name, model) => (model.planes.length > 4 ? `${name} long` : name);  // of more, with longer names

function filterTable(model, f) {
  const arrays = [f.value, f.psi, f.alpha, f.effective, f.positional].map(decode), limits = arrays.map((a) => largest(a));
  const many = model.planes.length > 1;
  const row = (tag, name, cell, signs, end) => node("tr", {}, ...(many ? [name] : []), ...COLUMNS.flatMap(([sign], c) => {
    const inside = FIRST_IN_BRACKETS <= c && c <= LAST_IN_BRACKETS ? "bracket" : "";
    const made = node(tag, {class: inside, ...(tag === "th" ? {scope: "col"} : {})}, ...cell(c));
    return [operator(signs ? sign : "", c > FIRST_IN_BRACKETS ? inside : ""), made];
  }), operator(signs ? "=" : ""), end);
  const head = row("th", node("td", {class: "corner"}, "turn"), (c) => [node("b", {}, COLUMNS[c][1]),
    node("span", {class: "about"}, node("br"), COLUMNS[c][2])], false, node("th", {scope: "col", class: "number"}, "output"));
  const rows = model.planes.map((plane, p) => row("td", planeName(model, plane), (c) => {
    const values = c === 0 ? arrays[0] : part(arrays[c], p), name = COLUMNS[c][1];
    return [picture(values, limits[c], name === "α", `${name} at ${plane}, up to ${number(limits[c])}`)];
  }, true, node("td", {class: "number"}, number(f.output[p]))));
  const scale = row("td", node("td"), (c) => [(COLUMNS[c][1] === "α" ? "≤" : "±") + number(limits[c])], false, node("td"));
  return node("table", {class: tableClass("filters", model)}, node("caption", {}, EQUATION), node("thead", {}, head),
    node("tbody", {}, ...rows), node("tfoot", {}, scale));
}

function headsTable(model, f) {
  const heads = decode(f.heads), limit = largest(heads), count = heads.shape[0];
  const numbers = Array.from({length: count}, (_, n) => n);
  const head = node("tr", {}, node("td", {class: "corner"}, "head"), ...numbers.map((n) =>
    node("th", {scope: "col", ...(n === f.head ? {class: "best"} : {})}, String(n))));
  const rows = model.planes.map((plane, p) => node("tr", {}, planeName(model, plane), ...numbers.map((n) =>
    node("td", {}, picture(part(part(heads, n), p), limit, true, `α of head ${n} at ${plane}`)))));
  return node("table", {class: tableClass("heads", model)}, node("caption", {}, `attention α of every head, 0 to ${number(limit)}`),
    node("thead", {}, head), node("tbody", {}, ...rows));
}

function drawFilters() {
  redraw($("filters"), () => about.models.map((model, n) => {
    const f = shown.models[n].filters;
    if (!f) return card(model, n, node("p", {}, "This network has no self convolution: its filters are the same everywhere."));
    const tables = node("div", {class: "split"}, filterTable(model, f), headsTable(model, f));
    const alpha = decode(f.alpha), [k, l] = alpha.shape.slice(-2);
    const even = largest(alpha) * k * l < EVEN ? "; attention is nearly even here, so the filter is nearly the template" : "";
    return card(model, n, node("p", {class: "where"}, `${f.where}${even}.`), tables);
  }));
}

// ---- feature maps ----

function drawMaps() {
  redraw($("maps"), () => about.models.map((model, n) => {
    const {angle} = shown.question, m = shown.models[n].maps, rows = {upright: decode(m.upright)};
    if (angle) rows[`turned ${angle}°`.replace("-", "−")] = decode(m.turned);
    const limit = largest(...Object.values(rows)), names = Object.keys(rows), planar = model.planes.length === 1;
    const cell = (name, plane, p) => node("td", {}, picture(part(rows[name], p), limit, false,
      planar ? `feature map, ${name}` : `feature map at ${plane}, ${name}`));
    const header = (text) => node("th", {scope: "col"}, text), corner = node("td", {class: "corner"});
    const head = planar ? names.map(header) : [corner, ...model.planes.map(header)];
    const body = planar ? [node("tr", {}, ...names.map((name) => cell(name, model.planes[0], 0)))]
      : names.map((name) => node("tr", {}, node("th", {scope: "row"}, name),
        ...model.planes.map((plane, p) => cell(name, plane, p))));
    return card(model, n, node("p", {class: "where"}, `${m.where}, ±${number(limit)}`),
      node("table", {class: planar ? "maps single" : tableClass("maps", model)}, node("thead", {}, node("tr", {}, ...head)),
        node("tbody", {}, ...body)),
      node("p", {class: "said"}, m.said || (angle ? "" : "Turn the image to compare.")));
  }));
}

// ---- the curve ----

// Of the true class, or if that is not known, of each network's answer to the upright image.
function drawCurve() {
  const known = [...around].sort((a, b) => a[0] - b[0]), truth = about.classes.indexOf(truthShown());
  const drawn = shown.models.map(({upright}) => (truth >= 0 ? truth : best(upright))), {angle: here} = shown.question;
  const name = new Intl.ListFormat("en").format([...new Set(drawn)].map((c) => `“${about.classes[c]}”`));
  const lines = about.models.map((model, n) => {
    const background = known.map(([angle, models]) => [angle, models[n][drawn[n]]]);
    const points = background.filter(([angle]) => turned[0] <= angle && angle <= turned[1]);
    return {style: style(model), dashed: model.kind === "planar", points, background};
  });
  const now = about.models.map((model, n) => `${model.name} ${percent(shown.models[n].probabilities[drawn[n]])}`);
  $("curve").replaceChildren(chart({lines, xs: [-180, -90, 0, 90, 180], ys: [0, 0.5, 1], xName: "degrees",
    now: here, format: (y) => `${100 * y}%`,
    label: `probability of ${name} against the angle; at ${here}°: ${now.join(", ")}`}));
  const own = new Set(drawn).size > 1 ? ", the answer of each network to the upright image" : "";
  $("curve-caption").textContent = `Probability of ${name}${own}, at the angles you have turned through (strong) and at `
    + `others (faint). ${about.exact} Training can teach other angles, if it turns its images.`;
}

// ---- training ----

function trainingCard(model, n, seen) {
  const images = node("div", {class: "seen", role: "img", "aria-label": `${seen.images.length} training images`});
  images.append(...seen.images.map((image) => photo(node("canvas"), image, about.channels)));
  const charts = [["Loss", "loss", null], ["Accuracy", "accuracy", 1]].map(([title, what, top]) => {
    const lines = [["training", "train", "series-0"], ["validation", "val", "series-1"]].map(([name, key, look]) => ({
      name, style: look, dashed: key === "val", points: seen.metrics.map((row) => [row.epoch, row[`${key}_${what}`]])
        .filter(([, value]) => value !== null && value !== undefined)}));
    const values = lines.flatMap(({points}) => points.map(([, value]) => value));
    const last = Math.max(...seen.metrics.map((row) => row.epoch), 1);
    return chart({title, lines, xs: ticks(last).filter((x) => x <= last), ys: ticks(top ?? Math.max(...values, 0)),
      xName: "epoch", label: `${title} over ${last} epochs`});
  });
  const course = seen.metrics.length ? charts : [node("p", {}, "No epoch of this run has ended.")];
  return card(model, n, node("p", {}, seen.said), images, ...course);
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

// For each network a head and a channel to choose: only such as it has in this layer.
function viewOptions() {
  const count = (n) => Array.from({length: n}, (_, i) => String(i));
  about.models.forEach((model, n) => {
    for (const [what, id] of [["heads", `head-${n}`], ["channels", `channel-${n}`]]) {
      const there = model.layers[chosen.layer][what];
      chosen[what][n] = Math.min(chosen[what][n], there - 1);
      if ($(id).length !== there) options($(id), count(there));
      $(id).value = chosen[what][n];
    }
  });
}

function makeViews() {
  $("views").append(...about.models.map((model, n) => {
    const label = (title, id) => node("label", {}, `${title} `, node("select", {id, "aria-label": `${title} of ${model.name}`}));
    const head = label("Head", `head-${n}`);
    head.hidden = !model.attention;
    return node("span", {class: `view ${style(model)}`, role: "group", "aria-label": model.name},
      ...(about.models.length > 1 ? [node("span", {class: "name"}, model.name)] : []), head, label("Channel", `channel-${n}`));
  }));
}

// A class is not compared with itself.
function otherOptions() {
  for (const option of $("other").options) option.disabled = Number(option.value) >= 0 && option.value === $("class").value;
  if ($("other").selectedOptions[0].disabled) $("other").value = STRONGEST;
}

function listen() {
  $("angle").addEventListener("input", () => userTurnsTo(Number($("angle").value)));
  $("left").addEventListener("click", () => userTurnsTo(chosen.angle + 90));
  $("right").addEventListener("click", () => userTurnsTo(chosen.angle - 90));
  $("upright").addEventListener("click", () => userTurnsTo(0));
  $("around").addEventListener("click", allAround);
  $("training-button").addEventListener("click", () => showTraining().catch((error) => fail(error.message)));
  for (const id of ["class", "other"])
    $(id).addEventListener("change", () => {
      otherOptions();
      drawDecisions();
    });
  const choosing = (id, keep) => $(id).addEventListener("change", () => {
    keep(Number($(id).value));
    showControls();
    refresh();
  });
  choosing("layer", (value) => { chosen.layer = value; });
  about.models.forEach((_, n) => {
    choosing(`head-${n}`, (value) => { chosen.heads[n] = value; });
    choosing(`channel-${n}`, (value) => { chosen.channels[n] = value; });
  });
  if (about.attention) listenToPixels();
  $("file").addEventListener("change", readUpload);
}

function listenToPixels() {
  $("stage").addEventListener("click", (event) => {
    const box = $("photo").getBoundingClientRect();
    choosePixel(Math.floor(((event.clientY - box.top) / box.height) * about.size),
      Math.floor(((event.clientX - box.left) / box.width) * about.size), shown.question.angle);
  });
  $("stage").addEventListener("keydown", (event) => {
    const step = {ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1]}[event.key];
    if (!step) return;
    event.preventDefault();
    const [row, column] = currentPixel(), cell = about.size / leadLayer(chosen).size[0];
    choosePixel(row + step[0] * cell, column + step[1] * cell, chosen.angle);
  });
}

async function readUpload() {
  const [file] = $("file").files;
  $("file").value = "";
  if (!file) return;
  const mine = ++choices;  // the answer to an upload that was followed by another choice comes too late
  say(`${file.name}: reading…`);
  try {
    if (file.size > about.maxUpload)
      throw new Error(`expected up to ${about.maxUpload >> 20} MB; got ${(file.size / 2 ** 20).toFixed(1)} MB`);
    const {image, size} = await ask("/api/upload", file);
    if (mine !== choices) return;
    uploads.set(image, `${file.name}, as ${size}×${size} pixels`);
    choose(image);
  } catch (error) {
    if (gone) fail(error.message);
    else if (mine === choices) fail(`${file.name}: ${error.message}; the image before it is still shown`);
  }
}

// Without attention: hides the filters of a pixel and keeps the menus of layer and channel.
function withoutAttention() {
  $("maps").before($("layer-controls"));
  for (const id of ["filters-section", "click-hint"]) $(id).hidden = true;
  document.body.classList.add("still");
  $("stage").removeAttribute("tabindex");
  $("stage").setAttribute("role", "img");
  $("stage").setAttribute("aria-label", "the image");
  $("stage").removeAttribute("aria-describedby");
}

async function start() {
  about = await ask("/api/start");
  const names = new Intl.ListFormat("en").format(about.models.map(({name}) => name)), many = about.models.length > 1;
  $("about").textContent = `${names} ${many ? "say" : "says"} what is in an image, after training on ${about.data}. See `
    + "which parts of the image an answer comes from, and turn the image: does the answer hold?";
  $("planes-caption").hidden = about.models.every(({planes}) => planes.length === 1);
  $("mirror-caption").hidden = !about.models.some(({planes}) => planes.some((plane) => plane.endsWith(" m")));
  if (!about.attention) withoutAttention();
  $("samples").append(...about.samples.map(({name, image}, n) => {
    const button = node("button", {type: "button", "aria-label": `sample: ${name}`, title: name, "aria-pressed": "false"},
      photo(node("canvas"), image, about.channels));
    button.addEventListener("click", () => choose(n));
    return button;
  }));
  options($("layer"), about.layers, about.first.layer);
  makeViews();
  options($("class"), [many ? "the answer of each network" : "the answer", ...about.classes], ANSWER, ANSWER);
  options($("other"), ["the strongest other class", "nothing: the class by itself", ...about.classes], STRONGEST, STRONGEST);
  const {layer, heads, channels, pixel, sample} = about.first;
  Object.assign(chosen, {layer, heads, channels, home: pixel});
  await choose(sample);
  listen();
  document.body.dataset.ready = "true";
}

start().catch((error) => { $("about").textContent = `The page could not start: ${error.message}`; });
