"use strict";
/* Draws what the page's data describes and computes nothing: figures of curves on linear or logarithmic axes. */
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
};
const NS = "http://www.w3.org/2000/svg";
const svg = (tag, attributes, text) => {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
};

/* theme: follows the system until the button says otherwise */
const root = document.documentElement;
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
const label = () => { $("theme").textContent = dark() ? "light" : "dark"; };
$("theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", label);
label();

const tip = $("tip");
const hover = (node, text) => {
  node.addEventListener("pointermove", event => {
    tip.textContent = text; tip.hidden = false;
    tip.style.left = Math.max(0, Math.min(event.clientX + 12, innerWidth - 350)) + "px";
    tip.style.top = event.clientY + 14 + "px";
  });
  node.addEventListener("pointerleave", () => { tip.hidden = true; });
};

const short = x => {
  if (x === 0) return "0";
  const size = Math.abs(x);
  if (size >= 1e4 || size < 1e-3) return x.toExponential(1).replace(".0e", "e").replace("e+", "e");
  return String(Number(x.toPrecision(3)));
};
/* lengths are powers of two and read best as such */
const length = x => x >= 1048576 && x % 1048576 === 0 ? x / 1048576 + "M" : x >= 1024 && x % 1024 === 0 ? x / 1024 + "k" : short(x);

const WIDE = 520, HIGH = 300, LEFT = 62, RIGHT = 14, TOP = 10, BOTTOM = 42;
function scale(axis, values, from, to) {
  let [low, high] = axis.range || [Math.min(...values), Math.max(...values)];
  if (axis.log) {
    low = Math.log10(low); high = Math.log10(high);
    const room = Math.max((high - low) * 0.06, 0.04);
    low -= room; high += room;
  } else {
    if (axis.zero) low = Math.min(low, 0);
    const room = (high - low || 1) * 0.05;
    high += room; if (!axis.zero) low -= room;
  }
  const of = value => from + ((axis.log ? Math.log10(value) : value) - low) / (high - low) * (to - from);
  let ticks = [];
  if (axis.powers) ticks = [...new Set(values)].sort((a, b) => a - b);
  else if (axis.log) {
    const steps = high - low > 2.2 ? [1] : high - low > 0.7 ? [1, 2, 5] : [1, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
    for (let p = Math.floor(low); p <= high; p++) for (const m of steps) ticks.push(m * 10 ** p);
  } else {
    const raw = (high - low) / 5, unit = 10 ** Math.floor(Math.log10(raw));
    const step = [1, 2, 5, 10].find(m => m * unit >= raw) * unit;
    for (let t = Math.ceil(low / step) * step; t <= high; t += step) ticks.push(Number(t.toPrecision(6)));
  }
  ticks = ticks.filter(t => { const at = axis.log ? Math.log10(t) : t; return at >= low && at <= high; });
  const every = Math.ceil(ticks.length / 9);
  return {of, ticks: ticks.filter((_, i) => i % every === 0)};
}

function draw(figure) {
  const chart = svg("svg", {viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": figure.title});
  const points = figure.series.flatMap(s => s.points);
  const extra = figure.limits.map(l => l.y);
  const x = scale(figure.x, points.map(p => p[0]), LEFT, WIDE - RIGHT);
  const y = scale(figure.y, points.flatMap(p => p.slice(1)).concat(extra), HIGH - BOTTOM, TOP);
  const word = figure.x.powers ? length : short;
  for (const t of x.ticks) chart.append(
    svg("line", {class: "grid", x1: x.of(t), x2: x.of(t), y1: TOP, y2: HIGH - BOTTOM}),
    svg("text", {x: x.of(t), y: HIGH - BOTTOM + 16, "text-anchor": "middle"}, word(t)));
  for (const t of y.ticks) chart.append(
    svg("line", {class: "grid", x1: LEFT, x2: WIDE - RIGHT, y1: y.of(t), y2: y.of(t)}),
    svg("text", {x: LEFT - 6, y: y.of(t) + 4, "text-anchor": "end"}, short(t)));
  chart.append(svg("text", {x: (LEFT + WIDE - RIGHT) / 2, y: HIGH - 6, "text-anchor": "middle"}, figure.x.label),
    svg("text", {x: 12, y: (TOP + HIGH - BOTTOM) / 2, transform: `rotate(-90 12 ${(TOP + HIGH - BOTTOM) / 2})`, "text-anchor": "middle"}, figure.y.label));
  for (const l of figure.limits) chart.append(
    svg("line", {class: "limit", x1: LEFT, x2: WIDE - RIGHT, y1: y.of(l.y), y2: y.of(l.y)}),
    svg("text", {x: WIDE - RIGHT - 4, y: y.of(l.y) - 5, "text-anchor": "end"}, l.label));
  figure.series.forEach(s => {
    const style = `--of:var(--c${s.colour % 8})`;
    const path = s.points.map((p, i) => `${i ? "L" : "M"}${x.of(p[0]).toFixed(1)} ${y.of(p[1]).toFixed(1)}`).join("");
    if (s.line) chart.append(svg("path", {class: s.roof ? "roof" : s.dashed ? "curve dashed" : "curve", d: path, style}));
    if (!s.dots) return;
    s.points.forEach(p => {
      if (p.length > 3) chart.append(svg("line", {class: "whisker", style, x1: x.of(p[0]), x2: x.of(p[0]), y1: y.of(p[2]), y2: y.of(p[3])}));
      const dot = svg("circle", {class: "point", style, cx: x.of(p[0]), cy: y.of(p[1]), r: 3.6});
      hover(dot, `${s.name}: ${word(p[0])}, ${short(p[1])}`);
      chart.append(dot);
    });
  });
  return chart;
}

/* a figure as a file: the styles that the page gives it are written into it */
function standalone(chart) {
  const copy = chart.cloneNode(true), from = chart.querySelectorAll("*"), to = copy.querySelectorAll("*");
  from.forEach((node, i) => {
    const style = getComputedStyle(node);
    to[i].setAttribute("style", ["fill", "stroke", "stroke-width", "stroke-dasharray", "opacity"].map(p => `${p}:${style.getPropertyValue(p)}`).join(";"));
  });
  copy.setAttribute("xmlns", NS);
  copy.setAttribute("width", WIDE); copy.setAttribute("height", HIGH);
  copy.setAttribute("font-family", "system-ui,sans-serif"); copy.setAttribute("font-size", "12");
  const paper = svg("rect", {width: WIDE, height: HIGH, style: `fill:${getComputedStyle(root).getPropertyValue("--panel")}`});
  copy.prepend(paper);
  return new XMLSerializer().serializeToString(copy);
}
function offer(name, href) { make("a", {download: name, href}).click(); }
function asSvg(chart) { return "data:image/svg+xml;charset=utf-8," + encodeURIComponent(standalone(chart)); }
function asPng(chart, then) {
  const image = new Image();
  image.onload = () => {
    const canvas = make("canvas", {width: 3 * WIDE, height: 3 * HIGH});
    canvas.getContext("2d").drawImage(image, 0, 0, 3 * WIDE, 3 * HIGH);
    then(canvas.toDataURL("image/png"));
  };
  image.src = asSvg(chart);
}

function show(figure) {
  const chart = draw(figure);
  const name = figure.title.toLowerCase().replace(/[^a-z0-9]+/g, "-");
  const buttons = ["SVG", "PNG"].map(kind => {
    const button = make("button", {type: "button", "aria-label": `Save "${figure.title}" as ${kind}`}, kind);
    button.addEventListener("click", () => kind === "SVG" ? offer(name + ".svg", asSvg(chart)) : asPng(chart, href => offer(name + ".png", href)));
    return button;
  });
  const keys = make("p", {class: "keys"});
  for (const s of figure.series) if (!s.roof) keys.append(make("span", {}, make("i", {class: s.dashed ? "dashed" : s.line ? "" : "dot", style: `--of:var(--c${s.colour % 8})`}), s.name));
  return make("figure", {}, make("div", {class: "top"}, make("figcaption", {}, figure.title, make("small", {}, figure.note)), make("span", {}, ...buttons)), chart, keys);
}

for (const [section, groups] of Object.entries(data.figures)) {
  const place = $(section + "-charts"), names = Object.keys(groups);
  const fill = name => place.replaceChildren(...groups[name].map(show));
  if (names.length > 1) {
    const select = make("select", {id: section + "-choice", "aria-label": "Which cases"}, ...names.map(name => make("option", {}, name)));
    select.addEventListener("input", () => fill(select.value));
    place.before(make("p", {class: "choose"}, select));
  }
  if (names.length) fill(names[0]);
}
