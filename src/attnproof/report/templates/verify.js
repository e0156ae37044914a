"use strict";
(() => {
const data = JSON.parse(document.getElementById("data").textContent);
const $ = id => document.getElementById(id);
const ORDER = ["INVALID", "FAIL", "POWERLESS", "FINDING", "PASS", "SKIP"];
const WORD = {PASS: "pass", FAIL: "fail", FINDING: "finding", SKIP: "skipped", INVALID: "invalid", POWERLESS: "powerless"};
const T = {name: 0, max: 1, rms: 2, z: 3, zmax: 4, used: 5, ok: 6, classic: 7, checks: 8, worst: 9};
const num = value => value === null || value === undefined ? NaN : value === "inf" ? Infinity : value === "-inf" ? -Infinity : Number(value);
const most = (tensors, at, name) => {
  const found = tensors.filter(t => (!name || t[T.name] === name) && t[at] !== null).map(t => num(t[at]));
  return found.length ? Math.max(...found.map(x => Number.isNaN(x) ? Infinity : x)) : NaN;
};
const show = x => Number.isNaN(x) ? "\u2013" : !Number.isFinite(x) ? "inf" : x === 0 ? "0" : Math.abs(x) >= 0.01 && Math.abs(x) < 1000 ? x.toFixed(2) : x.toExponential(1);
const make = (tag, attributes = {}, ...children) => {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) name === "class" ? node.className = value : node.setAttribute(name, value);
  node.append(...children);
  return node;
};
const pill = status => make("span", {class: "pill " + status}, WORD[status] || status);

data.results.forEach((r, i) => {
  Object.assign(r, {i, max: most(r.tensors, T.max, "out"), rms: most(r.tensors, T.rms, "out"), z: most(r.tensors, T.z), bound: most(r.tensors, T.used)});
  r.search = [r.case, r.about, r.who, r.why, r.hint, ...r.tensors.map(t => t[T.name])].join(" ").toLowerCase();
});
const unique = key => [...new Set(data.results.map(r => r[key]))];
const whos = unique("who"), groups = unique("group").sort();

/* theme: follows the system until the button says otherwise */
const root = document.documentElement;
const dark = () => root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
const label = () => { $("theme").textContent = dark() ? "light" : "dark"; };
$("theme").addEventListener("click", () => { root.dataset.theme = dark() ? "light" : "dark"; label(); });
label();

/* a command with a button that copies it; file:// has no clipboard API everywhere, so selecting is the fallback */
const command = text => {
  const code = make("code", {}, text), button = make("button", {type: "button"}, "copy");
  button.addEventListener("click", event => {
    event.stopPropagation();
    const range = document.createRange();
    range.selectNodeContents(code);
    const selection = getSelection();
    selection.removeAllRanges();
    selection.addRange(range);
    let done = false;
    try { done = document.execCommand("copy"); } catch { done = false; }
    button.textContent = done ? "copied" : "selected";
  });
  return make("div", {class: "command"}, code, button);
};

for (const kind of data.kinds) {
  const card = make("article", {class: "card " + kind.status}, make("h3", {}, pill(kind.status), " " + kind.who));
  card.append(make("p", {}, `${kind.case}${kind.count > 1 ? ` and ${kind.count - 1} more` : ""}: ${kind.why}`));
  if (kind.hint) card.append(make("p", {class: "hint"}, kind.hint));
  card.append(command(kind.replay));
  $("cards").append(card);
}
if (!data.kinds.length) $("cards").append(make("p", {}, "None: every result is within its bound."));

/* overview */
const grid = $("grid"), head = make("tr", {}, make("th", {}, "cases"));
whos.forEach(who => head.append(make("th", {}, who)));
grid.append(make("thead", {}, head));
const body = make("tbody");
for (const group of groups) {
  const line = make("tr", {}, make("th", {scope: "row"}, group));
  for (const who of whos) {
    const mine = data.results.filter(r => r.group === group && r.who === who);
    if (!mine.length) { line.append(make("td", {}, "")); continue; }
    const counts = ORDER.map(s => [s, mine.filter(r => r.status === s).length]).filter(c => c[1]);
    const worst = counts[0][0];
    const button = make("button", {type: "button"}, make("b", {}, counts.map(([s, n]) => `${n} ${WORD[s]}`).join(", ")), show(Math.max(...mine.map(r => r.bound).filter(x => !Number.isNaN(x)), -Infinity) === -Infinity ? NaN : Math.max(...mine.map(r => r.bound).filter(x => !Number.isNaN(x)))));
    button.addEventListener("click", () => { $("group").value = group; $("who").value = who; $("status").value = ""; $("text").value = ""; $("dtype").value = ""; refresh(); $("results").scrollIntoView(); });
    line.append(make("td", {class: "cell " + worst}, button));
  }
  body.append(line);
}
grid.append(body);

/* charts */
const NS = "http://www.w3.org/2000/svg";
const svg = (tag, attributes, text) => {
  const node = document.createElementNS(NS, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text !== undefined) node.textContent = text;
  return node;
};
const tip = $("tip");
const hover = (node, text) => {
  const place = event => {
    tip.textContent = text; tip.hidden = false;
    tip.style.left = Math.min(event.clientX + 12, innerWidth - 350) + "px";
    tip.style.top = event.clientY + 14 + "px";
  };
  node.addEventListener("pointermove", place);
  node.addEventListener("pointerleave", () => { tip.hidden = true; });
};
const jitter = i => ((i * 2654435761 % 4294967296) / 4294967296 - 0.5);
const log = x => Math.log10(Math.max(x, 1e-12));

function strips(target, points, axis) {
  const wide = 520, left = 128, row = 44, high = whos.length * row + 34;
  const chart = svg("svg", {viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": axis.label});
  const x = value => left + (Math.min(Math.max(axis.map(value), axis.low), axis.high) - axis.low) / (axis.high - axis.low) * (wide - left - 14);
  if (axis.band) chart.append(svg("rect", {class: "band", x: x(axis.band[0]), width: x(axis.band[1]) - x(axis.band[0]), y: 4, height: high - 34}));
  axis.ticks.forEach(t => {
    chart.append(svg("line", {class: "axis", x1: x(t), x2: x(t), y1: 4, y2: high - 28}));
    chart.append(svg("text", {x: x(t), y: high - 12, "text-anchor": "middle"}, axis.say(t)));
  });
  chart.append(svg("line", {class: "limit", x1: x(axis.limit), x2: x(axis.limit), y1: 0, y2: high - 28}));
  whos.forEach((who, i) => {
    chart.append(svg("text", {class: "words", x: 0, y: i * row + row / 2 + 6}, who.length > 20 ? who.slice(0, 19) + "\u2026" : who));
    chart.append(svg("line", {class: "axis", x1: left, x2: wide - 14, y1: (i + 1) * row + 2, y2: (i + 1) * row + 2}));
  });
  points.forEach(p => dot(chart, x(p.value), whos.indexOf(p.r.who) * row + row / 2 + 3 + jitter(p.r.i * 7 + p.k) * (row - 16), p));
  $(target).append(chart);
}
function dot(chart, x, y, p) {
  const node = svg("circle", {cx: x.toFixed(1), cy: y.toFixed(1), r: 3.4, class: p.ok ? "PASS" : p.r.status, tabindex: -1});
  hover(node, `${p.r.case}, ${p.r.who}, ${p.name}: ${p.words}`);
  node.addEventListener("click", () => reveal(p.r));
  chart.append(node);
}
const tensors = [];
data.results.forEach(r => r.tensors.forEach((t, k) => tensors.push({r, t, k, name: t[T.name], ok: t[T.ok] === 1})));
const used = tensors.map(p => ({...p, value: num(p.t[T.used]), words: `${show(num(p.t[T.used]))} of the bound`}))
  .map(p => num(p.t[T.max]) === Infinity ? {...p, value: Infinity, words: "not finite"} : p).filter(p => !Number.isNaN(p.value) && p.value > 0);
strips("bound-chart", used, {label: "error over bound", map: log, low: -3.2, high: 4.2, limit: 1, ticks: [0.001, 0.01, 0.1, 1, 10, 100, 1000, 10000], say: t => t >= 1000 ? t / 1000 + "k" : String(t)});
const noise = tensors.filter(p => ["float16", "bfloat16"].includes(p.r.dtype) && p.t[T.z] !== null && p.name !== "lse" && num(p.t[T.z]) > 0)
  .map(p => ({...p, value: num(p.t[T.z]), words: "z " + show(num(p.t[T.z]))}));
strips("z-chart", noise, {label: "z", map: v => v, low: 0, high: 2.6, limit: 1.3, band: [0.85, 1.15], ticks: [0, 0.5, 1, 1.5, 2, 2.5], say: String});
["PASS", "FINDING", "FAIL"].forEach(s => $("legend").append(make("i", {class: s}), s === "PASS" ? "within every bound" : s === "FINDING" ? "finding about another kernel" : "failure"));
$("legend").append(" \u00a0 one dot per tensor of a case; press a dot to see its case");

/* classic thresholds against the model */
function scatter() {
  const wide = 520, high = 360, left = 46, low = [-8, -3.4], top = [2.4, 4.2];
  const chart = svg("svg", {viewBox: `0 0 ${wide} ${high}`, role: "img", "aria-label": "maximum error against share of bound"});
  const clip = (v, k) => Math.min(Math.max(v, low[k]), top[k]);
  const x = v => left + (clip(log(v), 0) - low[0]) / (top[0] - low[0]) * (wide - left - 12);
  const y = v => high - 36 - (clip(log(v), 1) - low[1]) / (top[1] - low[1]) * (high - 56);
  for (let e = -8; e <= 2; e += 2) {
    chart.append(svg("line", {class: "axis", x1: x(10 ** e), x2: x(10 ** e), y1: 12, y2: high - 36}));
    chart.append(svg("text", {x: x(10 ** e), y: high - 20, "text-anchor": "middle"}, `1e${e}`));
  }
  for (let e = -3; e <= 4; e++) {
    chart.append(svg("line", {class: "axis", x1: left, x2: wide - 12, y1: y(10 ** e), y2: y(10 ** e)}));
    chart.append(svg("text", {x: left - 6, y: y(10 ** e) + 4, "text-anchor": "end"}, `1e${e}`));
  }
  chart.append(svg("line", {class: "limit", x1: x(1e-2), x2: x(1e-2), y1: 12, y2: high - 36}), svg("line", {class: "limit", x1: left, x2: wide - 12, y1: y(1), y2: y(1)}));
  chart.append(svg("text", {x: (left + wide) / 2, y: high - 4, "text-anchor": "middle"}, "maximum absolute error"), svg("text", {x: left + 6, y: 24}, "share of the hard bound"));
  used.forEach(p => dot(chart, x(num(p.t[T.max]) || 1e-12), y(p.value), p));
  $("classic-chart").append(chart);
}
scatter();
const lax = tensors.filter(p => !p.ok && p.t[T.classic]), strict = tensors.filter(p => p.ok && !p.t[T.classic]);
const list = items => {
  const ul = make("ul");
  [...new Set(items.map(p => `${p.r.case}, ${p.r.who}: ${p.name}`))].slice(0, 8).forEach(text => ul.append(make("li", {}, text)));
  return ul;
};
$("classic-words").append(make("p", {}, `${lax.length} tensors are outside the model's limits and inside the fixed thresholds.`));
if (lax.length) $("classic-words").append(list(lax));
$("classic-words").append(make("p", {}, `${strict.length} correct tensors would have been rejected by the fixed thresholds.`));
if (strict.length) $("classic-words").append(list(strict));
if (data.mutants.length) {
  const missed = data.mutants.filter(m => m.classic === "PASS");
  $("mutants").append(make("h3", {}, `Of ${data.mutants.length} broken kernels the fixed thresholds miss ${missed.length}`));
  const table = make("table", {class: "plain"}), tbody = make("tbody");
  table.append(make("thead", {}, make("tr", {}, ...["broken kernel", "what is wrong", "killed by", "fixed thresholds"].map(t => make("th", {}, t)))), tbody);
  data.mutants.forEach(m => tbody.append(make("tr", {}, make("td", {}, m.candidate), make("td", {}, m.says), make("td", {}, m.by || "survived"), make("td", {}, m.classic === "PASS" ? "pass it" : "object"))));
  $("mutants").append(make("div", {class: "scroll"}, table));
}

/* table */
const options = (id, all, values) => { $(id).append(make("option", {value: ""}, all)); values.forEach(v => $(id).append(make("option", {value: v}, WORD[v] || v))); };
options("who", "every kernel", whos);
options("status", "every verdict", ORDER.filter(s => data.results.some(r => r.status === s)));
options("group", "every group", groups);
options("dtype", "every dtype", unique("dtype"));
let sort = {key: "status", up: true}, shown = 100;
const rank = r => ORDER.indexOf(r.status);
const compare = (a, b) => {
  const key = sort.key;
  let d;
  if (key === "status") d = rank(a) - rank(b) || a.i - b.i;
  else if (typeof a[key] === "string") d = a[key].localeCompare(b[key]);
  else {
    const x = Number.isNaN(a[key]), y = Number.isNaN(b[key]);
    if (x || y) return x - y;
    d = a[key] === b[key] ? 0 : a[key] < b[key] ? -1 : 1;
  }
  return sort.up ? d : -d;
};
function matching() {
  const text = $("text").value.toLowerCase();
  return data.results.filter(r => (!text || r.search.includes(text)) && ["who", "status", "group", "dtype"].every(id => !$(id).value || r[id] === $(id).value)).sort(compare);
}
function refresh() {
  const found = matching(), tbody = document.querySelector("#table tbody");
  tbody.replaceChildren(...found.slice(0, shown).map(line));
  $("count").textContent = `${found.length} of ${data.results.length}`;
  $("more").hidden = found.length <= shown;
  document.querySelectorAll("#table th").forEach(th => th.setAttribute("aria-sort", th.dataset.key === sort.key ? sort.up ? "ascending" : "descending" : "none"));
}
function line(r) {
  const tr = make("tr", {class: "row", id: "r" + r.i, tabindex: 0}, make("td", {}, pill(r.status)), make("td", {}, r.case, make("small", {}, r.about)), make("td", {}, r.who));
  for (const key of ["max", "rms", "z", "bound"]) tr.append(make("td", {class: "number"}, show(r[key])));
  const toggle = () => tr.nextSibling && tr.nextSibling.className === "detail" ? tr.nextSibling.remove() : tr.after(detail(r));
  tr.addEventListener("click", toggle);
  tr.addEventListener("keydown", event => { if (event.key === "Enter") toggle(); });
  return tr;
}
function detail(r) {
  const cell = make("td", {colspan: 7});
  if (r.why) cell.append(make("div", {}, r.why));
  if (r.hint) cell.append(make("div", {class: "lead"}, r.hint));
  for (const note of r.notes) cell.append(make("div", {class: "lead"}, note));
  for (const [name, text] of Object.entries(r.guards)) cell.append(make("div", {}, `${name}: ${text}`));
  if (r.tensors.length) {
    const table = make("table"), tbody = make("tbody");
    table.append(make("thead", {}, make("tr", {}, ...["tensor", "max abs", "RMS", "z rms", "z max", "of bound", "model", "1e-2 / 1e-3", "worst element"].map(t => make("th", {}, t)))), tbody);
    for (const t of r.tensors) {
      const worst = t[T.worst].length ? `[${t[T.worst][0].join(", ")}] got ${t[T.worst][1]}, right ${t[T.worst][2]}, within ${show(num(t[T.worst][3]))}` : "";
      tbody.append(make("tr", {}, make("td", {}, t[T.name]), ...[T.max, T.rms, T.z, T.zmax, T.used].map(k => make("td", {class: "number"}, show(num(t[k])))),
        make("td", {}, t[T.ok] ? "holds" : t[T.checks].map(c => `${c[0]} ${show(num(c[1]))} > ${show(num(c[2]))}`).join("; ")), make("td", {}, t[T.classic] ? "holds" : "objects"), make("td", {}, worst)));
    }
    cell.append(make("div", {class: "scroll"}, table));
  }
  cell.append(command(r.replay));
  return make("tr", {class: "detail"}, cell);
}
function reveal(r) {
  ["text", "who", "status", "group", "dtype"].forEach(id => { $(id).value = ""; });
  $("text").value = r.case;
  $("who").value = r.who;
  shown = Math.max(shown, 100);
  refresh();
  const row = $("r" + r.i);
  if (!row) return;
  row.after(detail(r));
  row.scrollIntoView({block: "center"});
  row.focus({preventScroll: true});
}
document.querySelectorAll("#table th").forEach(th => th.querySelector("button").addEventListener("click", () => {
  sort = {key: th.dataset.key, up: sort.key === th.dataset.key ? !sort.up : !["max", "rms", "z", "bound"].includes(th.dataset.key)};
  refresh();
}));
["text", "who", "status", "group", "dtype"].forEach(id => $(id).addEventListener("input", refresh));
$("reset").addEventListener("click", () => { ["text", "who", "status", "group", "dtype"].forEach(id => { $(id).value = ""; }); refresh(); });
$("more").addEventListener("click", () => { shown += 200; refresh(); });
refresh();
})();
