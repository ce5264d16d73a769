"""The script of a page: it draws the lanes anew on canvases, so that one can zoom, move, and ask what is where."""

SCRIPT = r"""
(() => {
'use strict';
const root = document.currentScript.parentNode, data = JSON.parse(root.querySelector('script').textContent);
const box = root.querySelector('div'), svg = box.querySelector('svg');
const DIGITS = 'ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/', VALUE = {};
[...DIGITS].forEach((digit, at) => VALUE[digit] = at);
const PAD = 9, ABOVE = 4, BELOW = 24;  // of a canvas around its chart
const GAP = 1.2;  // pixels of idle time that are seen
const CHART = data.chart, END = data.end, view = {from: 0, to: END};

// Reading. See _spans and _steps of page.py for what the letters mean.
function reader(text) {
  let at = 0;
  const number = () => {
    let out = 0, weight = 1, digit;
    do { digit = VALUE[text[at++]]; out += (digit & 31) * weight; weight *= 32; } while (digit & 32);
    return out;
  };
  const signed = () => { const one = number(); return one % 2 ? -(one + 1) / 2 : one / 2; };
  return {more: () => at < text.length, number, signed};
}

function spans([device, top, height, codes, text]) {
  const from = reader(text), last = codes.map(() => [-1, 0]);
  const out = {device, top, height, codes, start: [], end: [], code: [], microbatch: []};
  let now = 0;
  while (from.more()) {
    const word = from.number(), code = word >> 1, [before, length] = last[code];
    const [skip, gap, longer] = word & 1 ? [from.signed(), from.signed(), from.signed()] : [0, 0, 0];
    const microbatch = before + 1 + skip, start = now + gap;
    now = start + length + longer;
    last[code] = [microbatch, now - start];
    out.start.push(start); out.end.push(now); out.code.push(code); out.microbatch.push(microbatch);
  }
  return out;
}

function levels(text, changes) {
  const from = reader(text), out = {time: [], amount: [], peak: 0};
  let now = 0, amount = 0;
  while (from.more()) {
    const change = changes[from.number()];
    amount = Number((amount + change).toPrecision(12));
    now += from.signed();
    out.time.push(now); out.amount.push(amount);
    out.peak = Math.max(out.peak, amount);
  }
  return out;
}

for (const panel of data.panels) {
  panel.height = panel.devices * panel.pitch;
  if (panel.held) panel.held = panel.held.map(text => levels(text, panel.changes));
  else panel.tracks = panel.tracks.map(spans);
  // Bars of several colours have them in the same order everywhere: by kind, then by stage.
  const kinds = Object.keys(data.kinds), all = (panel.held ? [] : panel.tracks.flatMap(track => track.codes));
  all.sort((a, b) => kinds.indexOf(a[0]) - kinds.indexOf(b[0]) || a[1] - b[1]);
  panel.ranks = new Map();
  for (const [, , colour] of all) if (!panel.ranks.has(colour)) panel.ranks.set(colour, panel.ranks.size);
}

// The first index from which a sorted list is more than a number.
function after(list, number) {
  let low = 0, high = list.length;
  while (low < high) { const mid = (low + high) >> 1; if (list[mid] > number) high = mid; else low = mid + 1; }
  return low;
}

function amount(number) {
  return number >= 1e6 ? number.toPrecision(3) : String(Number(number.toFixed(2)));
}

function time(steps) {
  return String(Number((steps * data.step * data.time[0]).toFixed(data.time[2])));
}

// Drawing.
let scale = 1, fine = 1, ink = '#000', joined = false;
// Where neighbours must touch, both end on a pixel.
const snap = x => Math.round((x + PAD) * fine) / fine - PAD;

function paint(panel) {
  const {canvas} = panel, place = canvas.getBoundingClientRect();
  if (!place.width) return;
  const size = (CHART + 2 * PAD) * (panel.height + ABOVE + BELOW), wanted = place.width / (CHART + 2 * PAD);
  fine = Math.min((window.devicePixelRatio || 1) * wanted, Math.sqrt(24e6 / size));
  canvas.width = Math.round((CHART + 2 * PAD) * fine);
  canvas.height = Math.round((panel.height + ABOVE + BELOW) * fine);
  const pen = canvas.getContext('2d');
  pen.setTransform(fine, 0, 0, fine, PAD * fine, ABOVE * fine);
  scale = CHART / (view.to - view.from);
  ticks(pen, panel);
  pen.save();
  pen.beginPath(); pen.rect(0, -ABOVE, CHART, panel.height + ABOVE); pen.clip();
  pen.globalAlpha = 0.06; pen.fillStyle = ink;
  for (let lane = 0; lane < panel.devices; lane++)
    pen.fillRect(-view.from * scale, lane * panel.pitch, panel.end * scale, panel.bar);
  pen.globalAlpha = 1;
  if (panel.held) panel.held.forEach((lane, at) => area(pen, panel, lane, at * panel.pitch));
  else {
    for (const track of panel.tracks) bars(pen, panel, track);
    if (panel.chosen) frame(pen, panel, panel.chosen);
  }
  pen.restore();
}

function ticks(pen, panel) {
  const factor = data.step * data.time[0], least = (view.to - view.from) * factor / Math.max(2, CHART / 80);
  const power = Math.floor(Math.log10(least)), decimals = power => Math.max(0, -power);
  const step = [1, 2, 5, 10].map(many => many * 10 ** power).find(step => step >= least * (1 - 1e-9));
  const digits = Math.min(20, decimals(Math.floor(Math.log10(step) + 1e-9)));
  pen.font = '12px system-ui, sans-serif'; pen.textAlign = 'center'; pen.fillStyle = pen.strokeStyle = ink;
  for (let at = Math.ceil(view.from * factor / step - 1e-9); at * step <= view.to * factor * (1 + 1e-12); at++) {
    const x = (at * step / factor - view.from) * scale;
    pen.globalAlpha = 0.16;
    pen.beginPath(); pen.moveTo(x, -ABOVE); pen.lineTo(x, panel.height + 3); pen.stroke();
    pen.globalAlpha = 0.72;
    const word = String(Number((at * step).toFixed(digits))), half = pen.measureText(word).width / 2;
    pen.fillText(word, Math.max(half - PAD, Math.min(CHART + PAD - half, x)), panel.height + 18);
  }
  pen.globalAlpha = 1;
}

// Narrow actions, side by side, become bars of six pixels, in which the height of a colour is its share of the time.
function bars(pen, panel, track) {
  const y = track.device * panel.pitch + track.top, height = track.height, {start, end, code, codes} = track;
  const strip = data.by === 'stage' && !track.top ? Math.max(3, height * 0.2) : 0, wide = data.by === 'stage';
  const shown = [];
  let run = null;
  const flush = next => {
    if (!run) return;
    if (next - run.to <= GAP) run.to = next;  // too little idle time to see
    joined = joined || run.shares.size > 1;
    const length = Math.max(0.15, run.to - run.from), from = snap(run.from), width = Math.max(1 / fine, snap(run.to) - from);
    let floor = y + height;
    for (const [colour, share] of [...run.shares].sort((a, b) => panel.ranks.get(a[0]) - panel.ranks.get(b[0]))) {
      const tall = height * Math.min(1, share / length);
      floor -= tall;
      pen.fillStyle = colour;
      pen.fillRect(from, floor, width, tall);
    }
    run = null;
  };
  for (let at = after(end, view.from); at < start.length && start[at] <= view.to; at++) {
    const x = (start[at] - view.from) * scale, width = (end[at] - start[at]) * scale, colour = codes[code[at]][2];
    if (width < 3.5) {
      // A bar ends where its first kind comes again, so that those of a steady phase look alike.
      const long = run && x + width - run.from;
      if (run && (x - run.to > GAP || long > 18 || (long > 6 && code[at] === run.code))) flush(x);
      if (!run) run = {from: x, to: x, code: code[at], shares: new Map()};
      run.to = x + width;
      run.shares.set(colour, (run.shares.get(colour) || 0) + width);
      continue;
    }
    flush(x);
    // Narrow ones touch: with gaps as wide as half of them the picture would be grey.
    const left = snap(x), seen = Math.max(1 / fine, snap(x + width) - left - (width < 4 ? 0 : 1));
    pen.fillStyle = colour;
    pen.fillRect(left, y, seen, height);
    if (strip) { pen.fillStyle = data.kinds[codes[code[at]][0]][1]; pen.fillRect(left, y, seen, strip); }
    if (width > 9 && height > 8) shown.push([x, seen, at]);
  }
  flush(Infinity);
  if (!shown.length) return;
  const font = Math.max(8, Math.min(12, height - 5 - strip));
  pen.font = font + 'px system-ui, sans-serif'; pen.textAlign = 'center'; pen.fillStyle = data.ink;
  for (const [x, width, at] of shown) {
    const word = (wide ? codes[code[at]][0] : '') + track.microbatch[at];
    const left = Math.max(0, x), right = Math.min(CHART, x + width);
    if (right - left >= word.length * 0.6 * font + 3)
      pen.fillText(word, (left + right) / 2, y + (height + strip) / 2 + 0.36 * font);
  }
}

function area(pen, panel, lane, y) {
  const {time, amount} = lane, floor = y + panel.bar;
  let from = null, to = 0, most = 0;
  const flush = () => {
    if (from === null) return;
    const tall = panel.bar * Math.min(1, most / panel.most);
    from = snap(from);
    to = Math.max(from + 1 / fine, snap(to));
    pen.fillStyle = '#8b95d6';
    pen.fillRect(from, floor - tall, to - from, tall);
    if (most === lane.peak && most > 0) {
      pen.fillStyle = ink;
      pen.fillRect(from, Math.max(y, floor - tall - 1), Math.max(2, to - from), 2);
    }
    from = null;
  };
  for (let at = Math.max(0, after(time, view.from) - 1); at < time.length && time[at] <= view.to; at++) {
    const x = Math.max(-9, (time[at] - view.from) * scale);
    const end = at + 1 < time.length ? Math.min(CHART + 9, (time[at + 1] - view.from) * scale) : x;
    if (from !== null && end - from > 1 && amount[at] !== most) flush();
    if (from === null) { from = x; most = 0; }
    most = Math.max(most, amount[at]);
    to = end;
  }
  flush();
}

function frame(pen, panel, [track, at]) {
  const x = (track.start[at] - view.from) * scale, width = Math.max(2, (track.end[at] - track.start[at]) * scale);
  pen.strokeStyle = ink; pen.lineWidth = 2;
  pen.strokeRect(x, track.device * panel.pitch + track.top + 1, width - 1, track.height - 2);
}

// What an action waited for.
function waited(panel, track, at) {
  const before = at ? track.end[at - 1] : 0, start = track.start[at];
  if (track.top || start <= before) return '';
  if (!panel.index) {
    panel.index = new Map();
    for (const one of panel.tracks)
      for (let i = 0; i < one.code.length; i++) {
        const [kind, stage] = one.codes[one.code[i]];
        panel.index.set(kind + stage + '.' + one.microbatch[i], one.end[i]);
      }
  }
  const [kind, stage] = track.codes[track.code[at]], microbatch = track.microbatch[at];
  const needs = kind === 'F' ? [['F', stage - 1]] : kind === 'B' || kind === 'I' ? [['B', stage + 1], ['I', stage + 1], ['L', stage]] : [];
  let last = null;
  for (const [kind, stage] of needs) {
    const end = panel.index.get(kind + stage + '.' + microbatch);
    if (end !== undefined && (!last || end > last[0])) last = [end, stage + kind + microbatch];
  }
  const wait = 'waited ' + time(start - before) + ' ' + data.time[1];
  return '\n' + (last && last[0] > before ? wait + ' for ' + last[1] + ', which ended at ' + time(last[0]) : wait);
}

function words(panel, track, at) {
  const [kind, stage] = track.codes[track.code[at]], start = track.start[at], end = track.end[at];
  return stage + kind + track.microbatch[at] + ' ' + data.kinds[kind][0] + '\n' +
    panel.names[track.device] + ', stage ' + stage + ', microbatch ' + track.microbatch[at] + '\n' +
    time(start) + ' to ' + time(end) + ' ' + data.time[1] + ' (takes ' + time(end - start) + ')' + waited(panel, track, at);
}

// What is at a place of a panel: words for the tip, and the action if there is one.
function find(panel, x, y) {
  const device = Math.floor(y / panel.pitch), inside = y - device * panel.pitch, now = view.from + x / scale;
  if (device < 0 || device >= panel.devices || x < 0 || x > CHART || now > panel.end) return null;
  if (panel.held) {
    const lane = panel.held[device], at = after(lane.time, now) - 1, some = at < 0 ? 0 : lane.amount[at];
    const until = at + 1 < lane.time.length ? lane.time[at + 1] : panel.end;
    return {text: panel.names[device] + ' holds ' + amount(some) + '\n' + time(at < 0 ? 0 : lane.time[at]) + ' to ' +
      time(until) + ' ' + data.time[1] + '\npeak ' + amount(lane.peak)};
  }
  const tracks = panel.tracks.filter(track => track.device === device);
  const track = tracks.find(one => inside >= one.top && inside < one.top + one.height + 1) || tracks[0];
  if (!track) return null;
  const next = after(track.end, now);
  if (next < track.start.length && track.start[next] <= now) return {text: words(panel, track, next), track, at: next};
  const from = next ? track.end[next - 1] : 0, to = next < track.start.length ? track.start[next] : panel.end;
  return {text: panel.names[device] + (track.top ? ': nothing moves' : ' is idle') + '\n' + time(from) + ' to ' + time(to) + ' ' + data.time[1] + ' (' + time(to - from) + ')'};
}

// The page.
box.className = 'live';
const tools = document.createElement('div'), tip = document.createElement('div'), hint = document.createElement('span'), note = document.createElement('span');
tools.className = 'tools'; tip.className = 'tip'; tip.hidden = true;
tip.setAttribute('role', 'status'); tip.setAttribute('aria-live', 'polite');
function button(word, label, act) {
  const one = document.createElement('button');
  one.type = 'button'; one.textContent = word; one.title = label; one.setAttribute('aria-label', label);
  one.addEventListener('click', act);
  tools.append(one);
}
button('+', 'zoom in', () => zoom(1 / 1.6));
button('\u2212', 'zoom out', () => zoom(1.6));
button('all', 'show all', () => show(0, END));
tools.append(hint, note);
root.insertBefore(tools, box);
box.append(tip);

function show(from, to) {
  const least = Math.max(END / 1e5, Math.min(END, 4 / Math.max(data.step, 1))), length = Math.min(END, Math.max(least, to - from));
  view.from = Math.max(0, Math.min(END - length, from));
  view.to = view.from + length;
  tip.hidden = true;
  later();
}
function zoom(factor, x = CHART / 2) {
  const at = view.from + (view.to - view.from) * x / CHART;
  show(at - (at - view.from) * factor, at + (view.to - at) * factor);
}
let waiting = false;
function later() {
  if (waiting) return;
  waiting = true;
  requestAnimationFrame(() => { waiting = false; all(); });
}
function all() {
  ink = getComputedStyle(svg).color;
  joined = false;
  data.panels.forEach(paint);
  note.textContent = joined ? data.joined : '';
}
function fits() { return document.documentElement.scrollHeight <= window.innerHeight + 1; }
function hints() {
  hint.textContent = (fits() ? 'wheel' : 'Ctrl and wheel') + ' or + \u2212 to zoom, drag to move, 0 for all; arrow keys go from action to action';
}

function tell(panel, found, x, y) {
  tip.hidden = !found;
  if (!found) return;
  tip.textContent = found.text;
  const unit = box.clientWidth / data.width, left = (data.left + x) * unit + 14, top = (panel.top + y) * unit + 16;
  tip.style.left = Math.max(0, left + tip.offsetWidth > box.clientWidth ? left - tip.offsetWidth - 24 : left) + 'px';
  tip.style.top = (top + tip.offsetHeight > box.clientHeight ? top - tip.offsetHeight - 28 : top) + 'px';
}

function choose(panel, track, at) {
  panel.chosen = [track, at];
  const length = view.to - view.from, start = track.start[at], end = track.end[at];
  if (start < view.from || end > view.to) show((start + end - length) / 2, (start + end + length) / 2);
  scale = CHART / (view.to - view.from);
  tell(panel, {text: words(panel, track, at)}, Math.min(CHART, (end - view.from) * scale), track.device * panel.pitch);
  later();
}

function step(panel, key) {
  const work = panel.tracks ? panel.tracks.filter(track => !track.top) : [];
  if (!work.length) return;
  if (!panel.chosen) { choose(panel, work[0], Math.min(after(work[0].end, view.from), work[0].end.length - 1)); return; }
  const [track, at] = panel.chosen, row = work.indexOf(track) < 0 ? 0 : work.indexOf(track);
  if (key === 'ArrowLeft' || key === 'ArrowRight')
    choose(panel, track, Math.max(0, Math.min(track.start.length - 1, at + (key === 'ArrowRight' ? 1 : -1))));
  else {
    const to = work[Math.max(0, Math.min(work.length - 1, row + (key === 'ArrowDown' ? 1 : -1)))];
    choose(panel, to, Math.min(after(to.end, track.start[at]), to.start.length - 1));
  }
}

for (const panel of data.panels) {
  const canvas = panel.canvas = document.createElement('canvas'), part = (number, whole) => 100 * number / whole + '%';
  canvas.style.left = part(data.left - PAD, data.width);
  canvas.style.width = part(CHART + 2 * PAD, data.width);
  canvas.style.top = part(panel.top - ABOVE, data.height);
  canvas.style.height = part(panel.height + ABOVE + BELOW, data.height);
  canvas.tabIndex = 0;
  canvas.setAttribute('role', 'application');
  canvas.setAttribute('aria-label', panel.title + ': arrow keys go from action to action, plus and minus zoom, 0 shows all');
  box.append(canvas);
  const inside = event => {
    const place = canvas.getBoundingClientRect(), unit = place.width / (CHART + 2 * PAD);
    return [(event.clientX - place.left) / unit - PAD, (event.clientY - place.top) / unit - ABOVE];
  };
  const fingers = new Map();
  canvas.addEventListener('pointerdown', event => {
    fingers.set(event.pointerId, inside(event));
    canvas.setPointerCapture(event.pointerId);
  });
  const up = event => fingers.delete(event.pointerId);
  canvas.addEventListener('pointerup', up);
  canvas.addEventListener('pointercancel', up);
  canvas.addEventListener('pointerleave', () => { if (document.activeElement !== canvas || !panel.chosen) tip.hidden = true; });
  canvas.addEventListener('pointermove', event => {
    const [x, y] = inside(event), old = fingers.get(event.pointerId);
    if (!old) { tell(panel, find(panel, x, y), x, y); return; }
    const others = [...fingers].filter(([id]) => id !== event.pointerId);
    fingers.set(event.pointerId, [x, y]);
    const per = (view.to - view.from) / CHART;
    if (!others.length) { if (x !== old[0]) show(view.from - (x - old[0]) * per, view.to - (x - old[0]) * per); return; }
    const fixed = others[0][1][0], before = Math.abs(old[0] - fixed), now = Math.abs(x - fixed);
    if (before > 4 && now > 4) zoom(before / now, fixed);
  });
  canvas.addEventListener('wheel', event => {
    const [x] = inside(event), by = event.deltaMode ? 16 : 1;
    if (Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      const move = event.deltaX * by * (view.to - view.from) / CHART;
      event.preventDefault();
      show(view.from + move, view.to + move);
    } else if (event.ctrlKey || event.metaKey || event.altKey || fits()) {
      event.preventDefault();
      zoom(1.0025 ** Math.max(-300, Math.min(300, event.deltaY * by)), Math.max(0, Math.min(CHART, x)));
    }
  }, {passive: false});
  canvas.addEventListener('dblclick', event => zoom(1 / 2.5, inside(event)[0]));
  canvas.addEventListener('keydown', event => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === '+' || event.key === '=') zoom(1 / 1.6);
    else if (event.key === '-') zoom(1.6);
    else if (event.key === '0') show(0, END);
    else if (event.key === 'Escape') { tip.hidden = true; panel.chosen = null; later(); }
    else if (event.key.startsWith('Arrow')) step(panel, event.key);
    else return;
    event.preventDefault();
  });
  canvas.addEventListener('blur', () => { panel.chosen = null; tip.hidden = true; later(); });
}
if (window.matchMedia) window.matchMedia('(prefers-color-scheme: dark)').addEventListener('change', later);
window.addEventListener('resize', () => { hints(); later(); });
window.addEventListener('beforeprint', all);
hints();
all();
})();
"""
"""It asks for nothing from outside, and writes texts as texts: no name can become markup."""
