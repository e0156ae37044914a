// Controls, tables and pictures of the page. Everything it shows comes from account().
"use strict";

const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const SVG = "http://www.w3.org/2000/svg";
const PICTURE = 40; // most tiles a side that the picture draws

// slider position <-> value; lengths and rates go by powers of two
const SCALES = {
  n: { min: 7, max: 20, step: 0.125, to: (x) => Math.round(2 ** x), from: Math.log2 },
  d: { min: 16, max: 256, step: 8, to: (x) => x, from: (v) => v },
  heads: { min: 1, max: 128, step: 1, to: (x) => x, from: (v) => v },
  sram: { min: 5, max: 9, step: 0.0625, to: (x) => Math.round(2 ** x), from: Math.log2 },
  bandwidth: { min: 5, max: 13.5, step: 0.0625, to: (x) => Number((2 ** x).toPrecision(3)), from: Math.log2 },
};
const state = { n: 4096, d: 64, heads: 1, dtype: "float16", causal: false, device: "a100-40gb", sram: 192, bandwidth: 1555 };

function device() {
  return data.devices.find((each) => each.name === state.device) || data.devices[0];
}

function settings() {
  const rates = device().by_dtype[state.dtype];
  const { n, d, heads, causal, sram, bandwidth } = state;
  return { n, d, heads, size: data.dtypes[state.dtype], causal, sram, bandwidth, products: rates.products, exps: rates.exps, l2: rates.l2 };
}

function bytes(count) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
  let at = 0;
  while (count >= 999.5 && at < units.length - 1) { count /= 1024; at++; }
  return `${at === 0 ? count : count.toFixed(count < 9.995 ? 2 : 1)} ${units[at]}`;
}

function seconds(t) {
  const [scale, unit] = t >= 1 ? [1, "s"] : t >= 1e-3 ? [1e-3, "ms"] : [1e-6, "µs"];
  return `${(t / scale).toFixed(t / scale < 99.95 ? 2 : 0)} ${unit}`;
}

function cells(row, ...texts) {
  texts.forEach((text, at) => {
    const cell = document.createElement(at === 0 ? "th" : "td");
    if (at === 0) cell.scope = "row";
    cell.textContent = text;
    row.append(cell);
  });
  return row;
}

function bar(row, share, kind) {
  const cell = document.createElement("td");
  const fill = document.createElement("span");
  fill.className = `bar ${kind}`;
  fill.style.width = `${Math.max(1, 100 * share)}%`;
  cell.className = "bars";
  cell.append(fill);
  row.append(cell);
}

function table(id, lines) {
  const most = Math.log10(Math.max(...lines.map((line) => line.value))), least = most - 6;
  $(id).replaceChildren(...lines.map((line) => {
    const row = cells(document.createElement("tr"), line.name, bytes(line.value), line.note);
    bar(row, (Math.log10(line.value) - least) / (most - least), line.kind);
    return row;
  }));
}

function draw(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  return node;
}

// the three points differ in shape as well as in colour
const SHAPES = {
  naive: (x, y) => draw("circle", { cx: x, cy: y, r: 5.5, class: "point naive" }),
  keys: (x, y) => draw("rect", { x: x - 5, y: y - 5, width: 10, height: 10, class: "point keys" }),
  once: (x, y) => draw("polygon", { points: `${x},${y - 7} ${x + 7},${y} ${x},${y + 7} ${x - 7},${y}`, class: "point once" }),
};

function roofline(a, s) {
  const [left, right, top, bottom] = [46, 346, 22, 262];
  const peak = Math.log10(s.products * 1e12), [low, high] = [peak - 4, peak + 0.4];
  const x = (intensity) => left + (Math.min(Math.max(Math.log10(intensity), 0), 5) / 5) * (right - left);
  const y = (rate) => bottom - ((Math.max(rate, low) - low) / (high - low)) * (bottom - top);
  const roof = (intensity) => Math.log10(Math.min(s.products * 1e12, intensity * s.bandwidth * 1e9));
  const nodes = [];
  ["1", "10", "100", "1k", "10k", "100k"].forEach((name, power) => {
    const at = x(10 ** power);
    nodes.push(draw("line", { x1: at, x2: at, y1: top, y2: bottom, class: "grid" }));
    nodes.push(draw("text", { x: at, y: bottom + 15, class: "tick", "text-anchor": "middle" }, name));
  });
  for (let power = Math.ceil(low); power <= high; power++) {
    nodes.push(draw("line", { x1: left, x2: right, y1: y(power), y2: y(power), class: "grid" }));
    const [value, unit] = power >= 12 ? [10 ** (power - 12), "T"] : [10 ** (power - 9), "G"];
    nodes.push(draw("text", { x: left - 5, y: y(power) + 4, class: "tick", "text-anchor": "end" }, `${value}${unit}`));
  }
  const line = [1, a.balance, 1e5].map((intensity) => `${x(intensity)},${y(roof(intensity))}`).join(" ");
  nodes.push(draw("polyline", { points: line, class: "roof" }));
  nodes.push(draw("line", { x1: x(a.balance), x2: x(a.balance), y1: y(peak), y2: bottom, class: "balance" }));
  nodes.push(draw("text", { x: x(a.balance) + 5, y: bottom - 6, class: "tick" }, `balance ${a.balance.toFixed(0)}`));
  nodes.push(SHAPES.keys(x(a.keys_outer_intensity), y(roof(a.keys_outer_intensity))));
  nodes.push(SHAPES.naive(x(a.naive_intensity), y(Math.log10(a.flops / a.seconds_naive))));
  nodes.push(SHAPES.once(x(a.once_intensity), y(Math.log10(a.flops / a.seconds_tiled))));
  nodes.push(draw("text", { x: (left + right) / 2, y: bottom + 32, class: "axis", "text-anchor": "middle" }, "FLOP per byte of memory traffic"));
  nodes.push(draw("text", { x: 4, y: top - 9, class: "axis" }, "FLOP/s"));
  $("roofline").replaceChildren(...nodes);
  $("roofline").setAttribute("aria-label", `Roofline with balance point ${a.balance.toFixed(0)} FLOP per byte: stored scores at ` +
    `${a.naive_intensity.toFixed(1)}, keys outer at ${a.keys_outer_intensity.toFixed(0)}, each byte once at ${a.once_intensity.toFixed(0)}`);
}

function picture(a, s) {
  // too many tiles for the eye: the same shape with fewer, in the same proportions
  const shrink = Math.max(1, Math.max(a.tiles_q, a.tiles_k) / PICTURE);
  const n = Math.max(1, Math.round(s.n / shrink));
  const blockQ = Math.min(a.block_q, n), blockK = Math.min(a.block_k, n);
  const rows = Math.ceil(n / blockQ), columns = Math.ceil(n / blockK), side = 300;
  const nodes = [];
  for (let row = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++) {
      const [first, last] = [row * blockQ, Math.min((row + 1) * blockQ, n)];
      const [start, stop] = [column * blockK, Math.min((column + 1) * blockK, n)];
      const kind = !s.causal || stop <= first + 1 ? "full" : start < last ? "edge" : "skip";
      nodes.push(draw("rect", { x: (start / n) * side, y: (first / n) * side, width: ((stop - start) / n) * side, height: ((last - first) / n) * side, class: `tile ${kind}` }));
    }
  }
  $("tiles").replaceChildren(...nodes);
  $("tiles").setAttribute("aria-label", `${a.tiles_q} by ${a.tiles_k} tiles, ${a.visited} visited, ${a.edge} of them edges`);
  const cut = shrink > 1 ? `drawn for N = ${n}` : "drawn to scale";
  $("tiles-note").textContent = `${a.block_q} queries × ${a.block_k} keys a tile: ${a.tiles_q} × ${a.tiles_k} tiles, ` +
    `${a.visited} visited (${a.edge} of them edges), ${(100 * a.skipped_share).toFixed(1)}% skipped; ${cut}`;
}

function update() {
  const s = settings(), a = account(s);
  for (const key of Object.keys(SCALES)) {
    $(key).value = SCALES[key].from(state[key]);
    if (document.activeElement !== $(`${key}-number`)) $(`${key}-number`).value = state[key];
    $(key).setAttribute("aria-valuetext", String(state[key]));
  }
  $("dtype").value = state.dtype;
  $("device").value = state.device;
  $("causal").checked = state.causal;
  table("bytes", [
    { name: "stored scores", value: a.naive_bytes, note: `${a.naive_intensity.toFixed(1)} FLOP/byte`, kind: "naive" },
    { name: "keys outer", value: a.keys_outer_bytes, note: `${a.keys_outer_intensity.toFixed(1)} FLOP/byte`, kind: "keys" },
    { name: "queries outer, requested", value: a.queries_outer_bytes, note: "the cache answers most of it", kind: "queries" },
    { name: "each byte once", value: a.once_bytes, note: `${a.once_intensity.toFixed(0)} FLOP/byte`, kind: "once" },
  ]);
  table("kept", [
    { name: "scores stored", value: a.kept_eager, note: `${(a.kept_eager / a.kept_linear).toFixed(1)} × linear`, kind: "naive" },
    { name: "six linear tensors", value: a.kept_linear, note: "the tutorial's account", kind: "keys" },
    { name: "ours", value: a.kept_ours, note: "x, q, k, v, out and lse", kind: "once" },
  ]);
  roofline(a, s);
  picture(a, s);
  const doubt = device().uncertain.length ? ` In doubt for this device: ${device().uncertain.join(", ").replaceAll("_", " ")}.` : "";
  const times = [a.seconds_memory, a.seconds_products, a.seconds_exps];
  const limits = data.limits.filter((_, at) => times[at] >= 0.97 * a.seconds_tiled).join(" and ");
  $("verdict").textContent = `Limited by ${limits}: at least ${seconds(a.seconds_tiled)} ` +
    `(memory ${seconds(a.seconds_memory)}, products ${seconds(a.seconds_products)}, exponentials ${seconds(a.seconds_exps)}). ` +
    `With stored scores at least ${seconds(a.seconds_naive)}, ${a.naive_over_keys_outer.toFixed(1)} times the bytes of keys outer.` +
    (a.fits_l2 ? " All of it fits in the last cache: counters would show far less than stored scores." : "");
  $("device-note").textContent = `${s.products.toPrecision(4)} TFLOP/s for ${state.dtype}, ${s.exps.toPrecision(3)} T exp/s, cache ${s.l2} MiB.${doubt}`;
  const query = new URLSearchParams(Object.entries(state).map(([key, value]) => [key, String(value)]));
  history.replaceState(null, "", `#${query}`);
}

function choose(name) {
  state.device = name;
  const rates = device().by_dtype[state.dtype];
  Object.assign(state, { sram: rates.sram, bandwidth: rates.bandwidth });
}

function restore() {
  for (const [key, value] of new URLSearchParams(location.hash.slice(1))) {
    if (key === "causal") state.causal = value === "true";
    else if (key in SCALES && Number(value) > 0) state[key] = Number(value);
    else if (key === "dtype" && value in data.dtypes) state.dtype = value;
    else if (key === "device" && data.devices.some((each) => each.name === value)) state.device = value;
  }
}

function theme(next) {
  document.documentElement.dataset.theme = next;
  $("theme").textContent = next === "dark" ? "Light page" : "Dark page";
}

function start() {
  $("dtype").replaceChildren(...Object.keys(data.dtypes).map((name) => new Option(name, name)));
  $("device").replaceChildren(...data.devices.map((each) => new Option(each.title, each.name)));
  for (const [key, scale] of Object.entries(SCALES)) {
    Object.assign($(key), { min: scale.min, max: scale.max, step: scale.step });
    $(key).addEventListener("input", () => { state[key] = scale.to(Number($(key).value)); update(); });
    $(`${key}-number`).addEventListener("input", () => {
      const value = Number($(`${key}-number`).value);
      const whole = ["n", "d", "heads"].includes(key);
      const good = value >= scale.to(scale.min) / (whole ? 1e6 : 1) && value <= scale.to(scale.max) && (!whole || Number.isInteger(value) && value >= 1);
      $(`${key}-number`).setAttribute("aria-invalid", String(!good));
      if (good) { state[key] = value; update(); }
    });
    $(`${key}-number`).addEventListener("blur", () => { $(`${key}-number`).removeAttribute("aria-invalid"); update(); });
  }
  $("dtype").addEventListener("change", () => { state.dtype = $("dtype").value; update(); });
  $("device").addEventListener("change", () => { choose($("device").value); update(); });
  $("causal").addEventListener("change", () => { state.causal = $("causal").checked; update(); });
  $("theme").addEventListener("click", () => theme(document.documentElement.dataset.theme === "dark" ? "light" : "dark"));
  theme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  restore();
  update();
}

start();
