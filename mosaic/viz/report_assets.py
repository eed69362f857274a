"""Style and script of the HTML report, kept as text so that the report is a single file.

The script reads one JSON island, draws on two canvases that share their range of ops, and writes names through
`textContent` only.
"""

from __future__ import annotations

from typing import Final

STYLE: Final = """
:root { color-scheme: light dark; --bg: #ffffff; --ink: #1f2328; --soft: #656d76; --line: #d9dde2; --panel: #f6f8fa;
  --good: #1a7f37; --bad: #b2182b; --mark: #1a1a1a; --grid: #e7eaee; --hatch: #ffffff; }
@media (prefers-color-scheme: dark) { :root { --bg: #14181d; --ink: #e4e8ec; --soft: #98a1ab; --line: #343b44;
  --panel: #1c2229; --good: #4ac26b; --bad: #ff7b72; --mark: #f5f5f5; --grid: #2a313a; --hatch: #14181d; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1280px; padding: 24px; background: var(--bg); color: var(--ink);
  font: 14px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
h1 { font-size: 22px; margin: 0; } h2 { font-size: 16px; margin: 32px 0 8px; }
p { margin: 4px 0; } .soft { color: var(--soft); } code { font: 12.5px/1.5 ui-monospace, Menlo, Consolas, monospace; }
.verdict { font-weight: 600; } .yes { color: var(--good); } .no { color: var(--bad); }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr)); gap: 12px; margin: 16px 0; }
.fact { background: var(--panel); border: 1px solid var(--line); border-radius: 6px; padding: 10px 12px; }
.fact b { display: block; font-size: 18px; font-weight: 600; } .fact span { color: var(--soft); font-size: 12.5px; }
.columns { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(380px, 100%), 1fr)); gap: 0 32px;
  align-items: start; }
.bar { display: flex; height: 18px; border-radius: 4px; overflow: hidden; background: var(--panel);
  outline: 1px solid var(--line); margin: 8px 0; }
.bar i { display: block; height: 100%; }
.key { display: flex; flex-wrap: wrap; gap: 4px 16px; margin: 6px 0; font-size: 12.5px; color: var(--soft); }
.dot { display: inline-block; width: 11px; height: 11px; border-radius: 2px; margin-right: 6px; vertical-align: -1px; }
table { border-collapse: collapse; width: 100%; font-size: 13px; }
th, td { text-align: left; padding: 4px 10px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
th button { all: unset; cursor: pointer; } th button:focus-visible { outline: 2px solid currentColor; }
th[aria-sort=ascending] button::after { content: " \\25B2"; }
th[aria-sort=descending] button::after { content: " \\25BC"; }
.scroll { overflow: auto; max-height: 480px; border: 1px solid var(--line); border-radius: 6px; padding: 0 10px; }
.scroll thead th { position: sticky; top: 0; background: var(--bg); }
#rows tr { cursor: pointer; } #rows tr:hover, #rows tr.on { background: var(--panel); }
canvas { display: block; width: 100%; touch-action: pan-y; cursor: crosshair; }
.tools { display: flex; flex-wrap: wrap; gap: 8px; align-items: center; margin: 8px 0; }
.tools button, .tools input, .tools select { font: inherit; font-size: 13px; color: inherit; background: var(--panel);
  border: 1px solid var(--line); border-radius: 6px; padding: 3px 10px; }
#tip { position: fixed; pointer-events: none; z-index: 2; max-width: 460px; padding: 8px 10px; border-radius: 6px;
  background: var(--bg); border: 1px solid var(--line); box-shadow: 0 4px 16px rgb(0 0 0 / .18); font-size: 12.5px; }
#tip b { display: block; overflow-wrap: anywhere; } #tip span { display: block; color: var(--soft); }
"""

SCRIPT: Final = """
"use strict";
(() => {
const plan = JSON.parse(document.getElementById("plan").textContent);
const {ops, buffers, regions, categories, colors, live, total, peak} = plan;
const count = ops.length, GIB = 2 ** 30, PAD = {left: 58, right: 10, top: 36, bottom: 22};
const byId = id => document.getElementById(id);
const tip = byId("tip"), timeline = byId("timeline"), map = byId("map");
let first = 0, last = Math.max(count, 1), drag = null, chosen = -1, hoverOp = -1;

const ink = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
function bytes(n) {
  for (const [unit, name] of [[2 ** 40, "TiB"], [GIB, "GiB"], [2 ** 20, "MiB"], [1024, "KiB"]])
    if (n >= unit) return (n / unit).toFixed(2) + " " + name;
  return n + " B";
}
function step(top) {
  const raw = top / 5, unit = 10 ** Math.floor(Math.log10(raw));
  return unit * [1, 2, 5, 10].find(k => k * unit >= raw);
}
function begin(canvas) {
  const scale = window.devicePixelRatio || 1, width = canvas.clientWidth, height = canvas.clientHeight;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const g = canvas.getContext("2d");
  g.setTransform(scale, 0, 0, scale, 0, 0);
  g.clearRect(0, 0, width, height);
  g.font = "11px system-ui, sans-serif";
  return [g, width, height];
}
function frame(canvas, top) {
  const [g, width, height] = begin(canvas);
  const w = width - PAD.left - PAD.right, h = height - PAD.top - PAD.bottom;
  const x = op => PAD.left + (op - first) / (last - first) * w;
  const y = n => PAD.top + h - n / top * h;
  g.fillStyle = ink("--soft"); g.strokeStyle = ink("--grid"); g.lineWidth = 1;
  g.textAlign = "right"; g.textBaseline = "middle";
  const unit = top >= GIB ? GIB : 2 ** 20, mark = step(top / unit);
  for (let v = 0; v <= top / unit; v += mark) {
    g.beginPath(); g.moveTo(PAD.left, y(v * unit)); g.lineTo(width - PAD.right, y(v * unit)); g.stroke();
    g.fillText(+v.toFixed(6) + (unit === GIB ? " GiB" : " MiB"), PAD.left - 6, y(v * unit));
  }
  g.textAlign = "center"; g.textBaseline = "top";
  const tick = Math.max(1, Math.ceil(step(last - first)));
  for (let op = Math.ceil(first / tick) * tick; op <= last; op += tick)
    g.fillText(String(op), Math.min(Math.max(x(op), PAD.left + 4), width - PAD.right - 10), height - PAD.bottom + 6);
  g.save(); g.beginPath(); g.rect(PAD.left, 0, w, height - PAD.bottom); g.clip();
  return {g, x, y, w, h, width, height};
}
function line(f, value, color, dash) {
  f.g.strokeStyle = color; f.g.lineWidth = 1; f.g.setLineDash(dash);
  f.g.beginPath(); f.g.moveTo(PAD.left, f.y(value)); f.g.lineTo(f.width - PAD.right, f.y(value)); f.g.stroke();
  f.g.setLineDash([]);
}
function cursor(f) {
  if (hoverOp >= first && hoverOp < last) {
    f.g.strokeStyle = ink("--mark"); f.g.lineWidth = 1;
    f.g.strokeRect(f.x(hoverOp) + .5, PAD.top, Math.max(f.x(hoverOp + 1) - f.x(hoverOp) - 1, 1), f.h);
  }
  if (drag && drag.to !== drag.from) {
    f.g.fillStyle = ink("--mark"); f.g.globalAlpha = .12;
    f.g.fillRect(Math.min(drag.from, drag.to), PAD.top, Math.abs(drag.to - drag.from), f.h);
    f.g.globalAlpha = 1;
  }
}
const stackTop = Math.max(plan.placed, peak.bytes, 1) * 1.06;
function drawTimeline() {
  const f = frame(timeline, stackTop), {g, x, y} = f;
  const floor = new Float64Array(count);
  categories.forEach((name, c) => {
    g.fillStyle = colors[c];
    g.beginPath(); g.moveTo(x(first), y(0));
    const from = Math.floor(first), to = Math.min(Math.ceil(last), count);
    for (let i = from; i < to; i++) { const t = y(floor[i] + live[c][i]); g.lineTo(x(i), t); g.lineTo(x(i + 1), t); }
    for (let i = to - 1; i >= from; i--) { const t = y(floor[i]); g.lineTo(x(i + 1), t); g.lineTo(x(i), t); }
    g.closePath(); g.fill();
    for (let i = from; i < to; i++) floor[i] += live[c][i];
  });
  line(f, plan.bound, ink("--mark"), [5, 4]);
  if (plan.placed !== plan.bound) line(f, plan.placed, ink("--bad"), []);
  if (count) {
    const px = x(peak.index + .5), py = y(peak.bytes);
    g.fillStyle = ink("--mark");
    g.beginPath(); g.moveTo(px - 5, py - 9); g.lineTo(px + 5, py - 9);
    g.lineTo(px, py - 1); g.closePath(); g.fill();
    const right = px > PAD.left + f.w / 2;
    g.textBaseline = "bottom"; g.textAlign = right ? "right" : "left";
    g.fillText("peak " + bytes(peak.bytes) + " at " + ops[peak.index][0], px + (right ? -8 : 8), py - 2);
  }
  cursor(f); g.restore();
}
const mapTop = Math.max(plan.placed, 1) * 1.06;
function boxAt(f, b, held) {
  const left = f.x(Math.max(held[0], first)), right = f.x(Math.min(held[1], last));
  const top = f.y(b.offset + b.size), bottom = f.y(b.offset);
  return [left, top, Math.max(right - left, 1), Math.max(bottom - top, 1)];
}
function lighter(color) {
  const n = parseInt(color.slice(1), 16);
  return 299 * (n >> 16) + 587 * (n >> 8 & 255) + 114 * (n & 255) > 130000;
}
function drawMap() {
  const f = frame(map, mapTop), {g} = f;
  g.lineWidth = last - first > 200 ? .4 : 1; g.strokeStyle = ink("--bg");
  g.textAlign = "center"; g.textBaseline = "middle";
  buffers.forEach((b, i) => b.held.forEach(held => {
    if (held[0] >= last || held[1] <= first) return;
    const [left, top, w, h] = boxAt(f, b, held), color = colors[b.cat];
    g.fillStyle = color; g.fillRect(left, top, w, h);
    if (w > 2 && h > 2) g.strokeRect(left, top, w, h);
    const label = b.name.slice(b.name.lastIndexOf("/") + 1);
    if (h > 12 && w > 7 * label.length + 6) {
      g.fillStyle = lighter(color) ? "#1a1a1a" : "#ffffff"; g.fillText(label, left + w / 2, top + h / 2);
    }
  }));
  if (chosen >= 0) buffers[chosen].held.forEach(held => {
    if (held[0] >= last || held[1] <= first) return;
    g.strokeStyle = ink("--mark"); g.lineWidth = 2; g.strokeRect(...boxAt(f, buffers[chosen], held));
  });
  line(f, plan.placed, ink("--mark"), [5, 4]);
  g.fillStyle = ink("--soft"); g.textBaseline = "bottom";
  for (const r of regions) {
    if (r.start >= last || r.end <= first) continue;
    const left = f.x(Math.max(r.start, first)), right = f.x(Math.min(r.end, last)), height = 13 + 11 * r.depth;
    g.fillRect(left + 1, height, Math.max(right - left - 2, 1), 3);
    if (right - left > 7 * r.label.length + 4) g.fillText(r.label, (left + right) / 2, height - 1);
  }
  cursor(f); g.restore();
}
let queued = false;
function draw() {
  if (queued) return;
  queued = true;
  requestAnimationFrame(() => { queued = false; drawTimeline(); drawMap(); });
}
function say(event, title, lines) {
  tip.replaceChildren();
  const head = document.createElement("b"); head.textContent = title; tip.append(head);
  for (const text of lines) { const s = document.createElement("span"); s.textContent = text; tip.append(s); }
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 8)) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 8)) + "px";
}
function opAt(canvas, event) {
  const rect = canvas.getBoundingClientRect(), w = rect.width - PAD.left - PAD.right;
  return first + (event.clientX - rect.left - PAD.left) / w * (last - first);
}
function addressAt(event) {
  const rect = map.getBoundingClientRect(), h = rect.height - PAD.top - PAD.bottom;
  return (1 - (event.clientY - rect.top - PAD.top) / h) * mapTop;
}
const opLabel = i => i < 0 ? "start" : i >= count ? "the end of the step" : ops[i][0] + " (op " + i + ")";
function tellOp(event, i) {
  const lines = [ops[i][1] + (ops[i][2] === "main" ? "" : ", stream " + ops[i][2]) + ", op " + i + " of " + count,
    "live " + bytes(total[i])];
  categories.forEach((name, c) => { if (live[c][i]) lines.push(name + ": " + bytes(live[c][i])); });
  say(event, ops[i][0], lines);
}
function tellBuffer(event, b) {
  const lines = [b.kind + ", " + categories[b.cat] + ", " + b.dtype + " [" + b.shape.join(", ") + "]",
    bytes(b.size) + " at offset " + bytes(b.offset) + " (" + b.offset.toLocaleString("en-US") + ")",
    "from " + opLabel(b.start), b.end >= count ? "to the end of the step" : "freed before " + opLabel(b.end)];
  if (b.held.length !== 1 || b.held[0][0] !== b.start || b.held[0][1] !== b.end)
    lines.push("held in " + b.held.map(h => "[" + h[0] + ", " + h[1] + ")").join(" "));
  for (const a of b.aliases) lines.push("alias: " + a);
  say(event, b.name, lines);
}
function bufferAt(op, address) {
  return buffers.findIndex(b => address >= b.offset && address < b.offset + b.size &&
    b.held.some(h => op >= h[0] && op < h[1]));
}
function move(canvas, event) {
  if (drag) drag.to = event.clientX - canvas.getBoundingClientRect().left;
  const op = opAt(canvas, event), i = Math.floor(op), inside = i >= 0 && i < count && op >= first && op < last;
  hoverOp = inside ? i : -1;
  const hit = inside && canvas === map ? bufferAt(op, addressAt(event)) : -1;
  if (hit >= 0) tellBuffer(event, buffers[hit]);
  else if (inside) tellOp(event, i);
  else tip.hidden = true;
  draw();
}
function view(from, to) {
  const width = Math.min(Math.max(to - from, 4), Math.max(count, 1));
  first = Math.max(0, Math.min(Math.round(from), count - width)); last = first + Math.round(width);
  draw();
}
for (const canvas of [timeline, map]) {
  canvas.addEventListener("pointermove", event => move(canvas, event));
  canvas.addEventListener("pointerleave", () => { hoverOp = -1; tip.hidden = true; draw(); });
  canvas.addEventListener("pointerdown", event => {
    const at = event.clientX - canvas.getBoundingClientRect().left;
    drag = {from: at, to: at, op: opAt(canvas, event)}; canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointerup", event => {
    const op = opAt(canvas, event), moved = drag && Math.abs(drag.to - drag.from) > 6;
    if (moved) view(Math.floor(Math.min(drag.op, op)), Math.ceil(Math.max(drag.op, op)));
    else if (canvas === map) choose(bufferAt(op, addressAt(event)), true);
    drag = null; draw();
  });
  canvas.addEventListener("pointercancel", () => { drag = null; draw(); });
  canvas.addEventListener("dblclick", () => view(0, count));
}
byId("whole").addEventListener("click", () => view(0, count));
byId("around").addEventListener("click", () => view(peak.index - 14, peak.index + 14));
const body = byId("rows"), rows = [...body.rows];
function choose(index, scroll) {
  chosen = index;
  for (const row of rows) {
    const on = index >= 0 && row.dataset.at === String(index);
    row.classList.toggle("on", on);
    if (on && scroll) body.closest(".scroll").scrollTop = row.offsetTop - 60;
  }
  draw();
}
body.addEventListener("click", event => {
  const row = event.target.closest("tr");
  if (!row || row.dataset.at === undefined) return;
  const b = buffers[Number(row.dataset.at)], margin = Math.max(6, Math.round((b.end - b.start) / 4));
  choose(Number(row.dataset.at), false);
  view(b.start - margin, b.end + margin);
});
function filter() {
  const words = byId("filter").value.toLowerCase().split(/\\s+/).filter(Boolean), pick = byId("pick").value;
  let shown = 0;
  for (const row of rows) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every(word => text.includes(word)) || (pick !== "" && row.dataset.category !== pick);
    shown += !row.hidden;
  }
  byId("shown").textContent = shown + " of " + rows.length + " shown";
}
byId("filter").addEventListener("input", filter);
byId("pick").addEventListener("change", filter);
document.querySelectorAll("#buffers th button").forEach((button, column) => button.addEventListener("click", () => {
  const head = button.parentElement, up = head.getAttribute("aria-sort") === "descending";
  document.querySelectorAll("#buffers th").forEach(th => th.removeAttribute("aria-sort"));
  head.setAttribute("aria-sort", up ? "ascending" : "descending");
  const value = cell => cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
  const key = row => value(row.cells[column]);
  const order = (a, b) => typeof a === "number" ? a - b : a.localeCompare(b, "en", {numeric: true});
  rows.sort((a, b) => (up ? 1 : -1) * order(key(a), key(b)));
  body.append(...rows);
}));
filter();
addEventListener("resize", draw);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
draw();
})();
"""
