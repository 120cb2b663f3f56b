"use strict";
// Draws the curves again as someone wants to see them: log scale, smoothed, by step, tokens or epoch; values under the
// pointer. Every number is in the page already (report.py): without scripts it shows the same curves by step.
const WIDTH = 480, HEIGHT = 150; // of report.py
const controls = document.getElementById("controls");
const tip = document.getElementById("tip");
const read = (text) => text.split(" ").map(Number);
const axes = Object.fromEntries([...document.querySelectorAll("data.axis")].map((one) => [one.dataset.run, {
  step: read(one.dataset.steps), tokens: read(one.dataset.tokens), epoch: read(one.dataset.epochs),
}]));

// The value of a run's axis at a step, between the steps that are known.
function across(run, step, by) {
  const axis = axes[run];
  if (by === "step" || !axis || axis[by].length !== axis.step.length || axis[by].some(Number.isNaN)) return step;
  const at = axis.step.findIndex((other) => other >= step);
  if (at < 0) return axis[by].at(-1);
  if (at === 0) return axis[by][0];
  const part = (step - axis.step[at - 1]) / (axis.step[at] - axis.step[at - 1]);
  return axis[by][at - 1] + part * (axis[by][at] - axis[by][at - 1]);
}

// An exponential mean that does not lean on its first value, as TensorBoard's.
function smoothed(values, share) {
  let sum = 0, weight = 0;
  return values.map((value) => {
    sum = sum * share + value * (1 - share);
    weight = weight * share + (1 - share);
    return sum / weight;
  });
}

function short(value, digits = 4) {
  const rounded = Number(Number(value).toPrecision(digits));
  // As the page's own text has it: an axis has no room for zeros.
  if (rounded && Math.abs(rounded) < 1e-4) return rounded.toExponential().replace(/e-(\d)$/, "e-0$1");
  return Math.abs(rounded) < 1 ? String(rounded) : rounded.toLocaleString("en", { maximumSignificantDigits: digits });
}

function draw(figure) {
  const by = controls.elements.by.value, share = Number(controls.elements.smooth.value);
  const lines = [...figure.querySelectorAll("polyline")];
  const curves = lines.map((line) => {
    const steps = read(line.dataset.steps), values = read(line.dataset.values);
    const shown = line.dataset.key.startsWith("eval_") ? values : smoothed(values, share); // few points, and no noise
    return { line, xs: steps.map((step) => across(line.dataset.run, step, by)), steps, values, shown };
  });
  const all = curves.flatMap((one) => one.shown);
  const log = controls.elements.log.checked && all.every((value) => value > 0);
  const height = log ? Math.log10 : (value) => value;
  const low = Math.min(...all.map(height)), high = Math.max(...all.map(height));
  const first = Math.min(...curves.flatMap((one) => one.xs)), last = Math.max(...curves.flatMap((one) => one.xs));
  const x = (value) => (last > first ? (value - first) / (last - first) : 0.5) * WIDTH;
  const y = (value) => HEIGHT - (high > low ? (height(value) - low) / (high - low) : 0.5) * HEIGHT;
  for (const one of curves) {
    one.places = one.xs.map((value, at) => [x(value), y(one.shown[at])]);
    const drawn = one.places.length > 1 ? one.places : [[one.places[0][0] - 4, one.places[0][1]], [one.places[0][0] + 4, one.places[0][1]]];
    one.line.setAttribute("points", drawn.map((place) => place.map((part) => part.toFixed(2)).join(",")).join(" "));
  }
  for (const best of figure.querySelectorAll("line.best")) {
    const at = x(across(best.dataset.run, Number(best.dataset.step), by));
    best.setAttribute("x1", at);
    best.setAttribute("x2", at);
  }
  const back = log ? (value) => 10 ** value : (value) => value;
  figure.querySelectorAll("text.y").forEach((text, n) => { text.textContent = short(back(high - (n / 2) * (high - low))); });
  figure.querySelectorAll("text.when").forEach((text, n) => {
    text.textContent = `${n ? "" : by + " "}${by === "epoch" ? short(first + (n / 2) * (last - first), 3) : Math.round(first + (n / 2) * (last - first)).toLocaleString("en")}`;
  });
  figure.curves = curves;
}

function point(event) {
  const figure = event.currentTarget, svg = figure.querySelector("svg");
  const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
  tip.replaceChildren(...figure.curves.map((one) => {
    let near = 0;
    one.places.forEach((place, n) => { if (Math.abs(place[0] - at.x) < Math.abs(one.places[near][0] - at.x)) near = n; });
    const row = document.createElement("div"), mark = document.createElement("i");
    mark.className = one.line.classList[0];
    row.append(mark, `${one.line.dataset.run} ${one.line.dataset.key}, step ${one.steps[near]}: ${short(one.values[near])}`);
    return row;
  }));
  tip.hidden = false;
  const side = event.clientX + tip.offsetWidth + 24 > innerWidth ? -tip.offsetWidth - 12 : 12;
  tip.style.transform = `translate(${Math.max(0, event.clientX + side)}px, ${event.clientY + 12}px)`;
}

// A page that is reloaded every few seconds stays as it was set.
function keep(text) {
  try {
    if (text) sessionStorage.setItem("curves", text);
    return sessionStorage.getItem("curves");
  } catch { return null; } // a file may have no storage
}

const kept = JSON.parse(keep() || "null");
if (kept) [controls.elements.log.checked, controls.elements.smooth.value, controls.elements.by.value] = kept;
controls.hidden = false;
const figures = [...document.querySelectorAll("figure.curves")];
for (const figure of figures) {
  draw(figure);
  figure.addEventListener("pointermove", point);
  figure.addEventListener("pointerleave", () => { tip.hidden = true; });
}
controls.addEventListener("input", () => {
  keep(JSON.stringify([controls.elements.log.checked, controls.elements.smooth.value, controls.elements.by.value]));
  figures.forEach(draw);
});
