"use strict";
// A chart of curves or points, as wide as its place, with exact values for pointer and arrow keys.
const SVG = "http://www.w3.org/2000/svg";

function element(name, attributes = {}, parent = null, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  parent?.append(made);
  return made;
}

function html(name, properties = {}, parent = null) {
  const made = Object.assign(document.createElement(name), properties);
  parent?.append(made);
  return made;
}

const exact = (value) => value.toLocaleString("en", { maximumSignificantDigits: 4 });

function ticks(low, high, count) {
  const step = 10 ** Math.floor(Math.log10((high - low) / count || 1));
  const width = [1, 2, 5, 10].map((n) => n * step).find((w) => (high - low) / w <= count);
  const found = [];
  for (let i = Math.ceil(low / width - 1e-9); i * width <= high + 1e-9 * width; i++) found.push(i * width + 0); // + 0: never -0
  return found;
}

function powers(low, high) {
  const few = Math.log10(high / low) < 2.5 ? [1, 2, 5] : [1];
  const found = [];
  for (let e = Math.floor(Math.log10(low)); 10 ** e <= high; e++) {
    found.push(...few.map((n) => n * 10 ** e).filter((t) => t >= low && t <= high));
  }
  return found.length > 1 ? found : ticks(low, high, 4);
}

function scale(values, log, from, to, zero) {
  let [low, high] = [Math.min(...values), Math.max(...values)];
  if (zero) low = Math.min(0, low);
  if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - 1, high + 1];
  else if (log) [low, high] = [low * (low / high) ** 0.06, high * (high / low) ** 0.06];
  const place = log ? Math.log : (v) => v;
  const at = (v) => from + ((place(v) - place(low)) / (place(high) - place(low))) * (to - from);
  return { at, low, high };
}

// Classes of a colour's number: its hue, and how often that hue came before, for another stroke.
const look = (slot) => `c${slot % COLOURED} t${Math.floor(slot / COLOURED) % 3}`;

class Chart {
  constructor(holder, board) {
    const figure = JSON.parse(holder.querySelector("script").textContent);
    Object.assign(this, { holder, figure, board, width: 0 });
    this.plot = holder.querySelector(".plot");
    this.plot.textContent = "";
    this.svg = element("svg", { tabindex: 0, role: "application", "aria-label": figure.caption }, this.plot);
    this.keys = html("div", { className: "keys" }, holder);
    this.tip = html("div", { className: "tip", hidden: true }, this.plot);
    this.tip.setAttribute("role", "status");
    this.at = null; // [series, point] that is pointed at
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    this.svg.addEventListener("blur", () => this.leave());
    this.svg.addEventListener("keydown", (event) => this.key(event));
    new ResizeObserver(() => {
      if (this.plot.clientWidth !== this.width) this.draw();
    }).observe(this.plot);
  }

  slot(label) {
    if (this.figure.of_methods) return this.board.number(label);
    const own = this.figure.series.findIndex((one) => one.label === label);
    const most = this.figure.kind === "points" ? 3 * COLOURED : COLOURED; // looks that differ
    return own < most ? own : -1;
  }

  visible() {
    const shown = this.board.shown();
    const rows = this.board.rows.map((row) => row.dataset.label); // runs with other codes are in no row
    const isShown = (label) => shown.includes(label) || !rows.includes(label);
    const series = this.figure.series.filter((one) => !this.figure.of_methods || isShown(one.label));
    return series.map((one) => ({ ...one, points: one.points.map((p, i) => this.sound(p, one, i)) }));
  }

  sound([x, y], one, i) {
    const drawn = x !== null && y !== null && (this.figure.kind === "points" || !this.figure.log || y > 0);
    return { x, y, drawn, spread: one.spread ? one.spread[i] : 0 };
  }

  draw() {
    const { figure } = this;
    this.width = this.plot.clientWidth;
    this.svg.textContent = "";
    this.at = null;
    this.tip.hidden = true;
    this.series = this.visible();
    const all = this.series.flatMap((one) => one.points.filter((p) => p.drawn));
    if (!this.width) return;
    const height = Math.round(Math.min(380, Math.max(250, this.width * 0.6)));
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${height}`);
    this.svg.setAttribute("height", height);
    if (all.length) this.axes(all, height);
    const order = (one) => (this.slot(one.label) >= 0 ? 1 : 0);
    for (const one of [...this.series].sort((a, b) => order(a) - order(b))) this.line(one);
    this.legend();
  }

  axes(all, height) {
    const { figure, svg, width } = this;
    const [left, right, top, bottom] = [46, width - 12, 26, height - 44];
    const curves = figure.kind === "curves";
    const high = all.map((p) => p.y + (p.spread || 0));
    const xs = all.map((p) => p.x);
    if (figure.diagonal) xs.push(0, 1), high.push(0, 1);
    this.x = scale(xs, figure.log && !curves, left + (curves ? 8 : 0), right - (curves ? 8 : 0), false);
    this.y = scale(high, figure.log && curves, bottom, top, !(figure.log && curves));
    const yTicks = figure.log && curves ? powers(this.y.low, this.y.high) : ticks(this.y.low, this.y.high, 6);
    for (const t of yTicks) {
      element("line", { class: "grid", x1: left, x2: right, y1: this.y.at(t), y2: this.y.at(t) }, svg);
      element("text", { x: left - 6, y: this.y.at(t) + 4, "text-anchor": "end" }, svg, exact(t));
    }
    const room = Math.max(2, Math.floor((right - left) / 56));
    let xTicks = figure.log && !curves ? powers(this.x.low, this.x.high) : ticks(this.x.low, this.x.high, room);
    if (curves && xs.every(Number.isInteger)) xTicks = xTicks.filter(Number.isInteger);
    const every = Math.ceil(xTicks.length / room);
    for (const t of xTicks.filter((_, i) => i % every === 0)) {
      element("line", { class: "grid", x1: this.x.at(t), x2: this.x.at(t), y1: bottom, y2: bottom + 4 }, svg);
      element("text", { x: this.x.at(t), y: bottom + 18, "text-anchor": "middle" }, svg, exact(t));
    }
    element("text", { x: 2, y: 12 }, svg, `↑ ${figure.y}`);
    element("text", { x: right, y: height - 6, "text-anchor": "end" }, svg, `→ ${figure.x}`);
    if (figure.diagonal) {
      const d = `M${this.x.at(0)} ${this.y.at(0)}L${this.x.at(1)} ${this.y.at(1)}`;
      element("path", { class: "diagonal", d }, svg);
    }
    if (figure.front?.length > 1 && this.series.length === figure.series.length) {
      const d = figure.front.map(([x, y], i) => `${i ? "L" : "M"}${this.x.at(x)} ${this.y.at(y)}`).join("");
      element("path", { class: "front", d }, svg);
    }
  }

  line(one) {
    const slot = this.slot(one.label);
    const kind = slot < 0 ? "series" : `series chosen ${look(slot)}`;
    const group = element("g", { class: kind, "data-label": one.label }, this.svg);
    if (this.board.lit === one.label) group.classList.add("lit");
    const there = one.points.filter((p) => p.drawn);
    const at = (p, y) => `${this.x.at(p.x).toFixed(1)} ${this.y.at(y).toFixed(1)}`;
    if (this.figure.kind === "curves") {
      const log = this.figure.log;
      if (one.runs > 1 && slot >= 0 && !log && there.length) {
        const above = there.map((p) => at(p, p.y + p.spread));
        const below = there.map((p) => at(p, Math.max(p.y - p.spread, this.y.low))).reverse();
        element("path", { class: "band", d: `M${[...above, ...below].join("L")}Z` }, group);
      }
      element("path", { d: there.map((p, i) => `${i ? "L" : "M"}${at(p, p.y)}`).join("") }, group);
    }
    if (this.figure.kind === "points" || (this.figure.marks && slot >= 0)) {
      const r = this.figure.kind === "points" ? (slot < 0 ? 3 : 4.5) : 3;
      for (const p of there) element("circle", { cx: this.x.at(p.x), cy: this.y.at(p.y), r }, group);
    }
  }

  legend() {
    this.keys.textContent = "";
    const named = this.series.filter((one) => this.slot(one.label) >= 0);
    for (const one of named) {
      const key = html("button", { type: "button", className: look(this.slot(one.label)) }, this.keys);
      key.textContent = one.label;
      if (this.figure.of_methods) {
        key.dataset.label = one.label;
        continue;
      }
      for (const kind of ["pointerenter", "focus"]) key.addEventListener(kind, () => this.raise(one.label, true));
    }
    const grey = this.series.length - named.length;
    if (grey) html("span", { className: "soft", textContent: `${grey} more in grey` }, this.keys);
  }

  raise(label, only = false) {
    for (const group of [...this.svg.querySelectorAll(".series")]) {
      if (only) group.classList.toggle("lit", group.dataset.label === label);
      if (group.dataset.label === label) this.svg.append(group);
    }
  }

  point(event) {
    const box = this.svg.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    let best = 40 ** 2;
    let found = null;
    this.series.forEach((one, s) =>
      one.points.forEach((p, i) => {
        if (!p.drawn) return;
        const far = (this.x.at(p.x) - x) ** 2 + (this.y.at(p.y) - y) ** 2;
        if (far < best) [best, found] = [far, [s, i]];
      }),
    );
    if (found) this.tell(found);
    else this.leave();
  }

  key(event) {
    if (event.key === "Escape") this.leave();
    if (!(event.key in ARROWS) || !this.series.length) return;
    event.preventDefault();
    const [bySeries, byPoint] = ARROWS[event.key];
    const [s, i] = this.at ?? [0, -byPoint];
    const series = (s + bySeries + this.series.length) % this.series.length;
    const count = this.series[series].points.length;
    this.tell([series, (Math.min(i, count - 1) + byPoint + count) % count]);
  }

  tell([s, i]) {
    this.at = [s, i];
    const { label, runs, points } = this.series[s];
    const p = points[i];
    if (this.figure.of_methods) this.board.light(label);
    else this.raise(label, true);
    this.tip.textContent = "";
    html("b", { textContent: label }, this.tip);
    this.tip.append(this.words(p, runs));
    this.tip.hidden = false;
    if (!p.drawn) return;
    const x = this.x.at(p.x);
    this.tip.style.left = x < this.width / 2 ? `${x + 10}px` : "auto";
    this.tip.style.right = x < this.width / 2 ? "auto" : `${this.width - x + 10}px`;
    this.tip.style.top = `${Math.max(0, this.y.at(p.y) - 20)}px`;
  }

  words(p, runs) {
    const { x, y, kind } = this.figure;
    const value = p.y === null ? "nothing measured" : exact(p.y);
    if (kind === "points") return `${exact(p.x)} ${x}; ${y.replace(", %", "")} ${value}`;
    return `${x} ${p.x}: ${value}${runs > 1 ? ` ± ${exact(p.spread ?? 0)} over ${runs} seeds` : ""}`;
  }

  leave() {
    this.at = null;
    this.tip.hidden = true;
    if (this.figure.of_methods) this.board.light(null);
    else this.raise(null, true);
  }
}
