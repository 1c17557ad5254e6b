// Renders samples of runs and memories, as look/sample.py and look/run_sample.py make them.
// Texts from data become text nodes, never markup.
'use strict';
const root = document.documentElement;
const main = document.querySelector('main');
const news = document.getElementById('news');
let data = JSON.parse(document.getElementById('data').textContent);

// ---- elements and numbers ----

function fill(e, attributes, inside) {
  for (const [k, v] of Object.entries(attributes)) if (v !== null && v !== undefined && v !== false) e.setAttribute(k, v);
  e.append(...inside.flat().filter(x => x !== null && x !== undefined));
  return e;
}
function element(name, attributes = {}, ...inside) {   // 'p.note' is a p of the class note
  const [kind, ...classes] = name.split('.');
  const e = document.createElement(kind);
  e.className = classes.join(' ');
  return fill(e, attributes, inside);
}
const shape = (name, attributes, ...inside) => fill(document.createElementNS('http://www.w3.org/2000/svg', name), attributes, inside);
function button(text, label, act) {
  const b = element('button', { type: 'button', title: label, 'aria-label': label }, text);
  b.addEventListener('click', act);
  return b;
}
const section = (title, ...inside) => element('section', {}, title ? element('h2', {}, title) : null, ...inside);
const folded = (title, ...inside) => element('details', { 'data-title': title }, element('summary', {}, title), ...inside);

// NaN and infinities are strings in JSON.
const number = x => ['NaN', 'Infinity', '-Infinity'].includes(x) ? Number(x) : x;
function shown(x) {   // four significant digits; whole numbers in full
  x = number(x);
  if (x === null || x === undefined) return '–';
  if (Array.isArray(x)) return x.slice(0, 6).map(shown).join('  ') + (x.length > 6 ? ` … (${x.length})` : '');
  if (typeof x !== 'number') return String(x);
  const size = Math.abs(x);
  if (Number.isInteger(x) && size < 1e12 || size >= 1e4 && size < 1e12) return Math.round(x).toLocaleString('en');
  if (size >= 1e12 || size && size < 1e-4) return (+x.toPrecision(4)).toExponential();
  return (+x.toPrecision(4)).toLocaleString('en', { maximumFractionDigits: 12 });
}

// What the names of numbers mean.
const WORDS = {
  __proto__: null,
  probability: 'sampling probability as a multiple of uniform',
  priority: 'sampling priority, as last set by update_priorities; new rows use initial',
  weight: 'importance weight, (smallest probability / probability)^beta',
  age: 'rows added since then', stale: 'priorities that arrived after their rows were overwritten',
  ess: 'effective sample size: number of rows whose uniform sampling is equally even', never_drawn: 'fraction never sampled',
  fill: 'fill level', sampled: 'times a row was sampled; for the replay buffer, total number of sampled rows', batches: 'total number of sampled batches', inserted: 'total number of added rows',
  evicted: 'total number of overwritten rows', age_mean: 'mean age of sampled rows, in rows added since', age_max: 'maximum of this age',
  drawn_mean: 'mean number of samples of rows that were sampled', drawn_max: 'maximum of this number',
  beta: 'exponent of importance weights',
};
function meaning(name, part) {
  if (name === 'weight' && part?.settings?.weight_norm === 'batch')
    return 'importance weight (probability / uniform)^-beta; in a batch it is relative to the largest of the batch';
  return WORDS[name];
}

// ---- facts, tables, charts ----

const facts = (named, part) => element('dl.facts', {}, ...Object.entries(named).map(([k, v]) =>
  element('div', { title: meaning(k, part) }, element('dt', {}, k), element('dd', {}, typeof v === 'boolean' ? (v ? 'yes' : 'no') : shown(v)))));

function table(t, part) {
  const cell = v => element(typeof number(v) === 'number' ? 'td.number' : 'td', {}, v === null ? '' : shown(v));
  const right = t.head.map((_, j) => t.rows.every(r => r[j] === null || typeof number(r[j]) === 'number'));
  const head = t.head.map((h, j) => element(right[j] ? 'th.number' : 'th', { scope: 'col', title: meaning(h, part) }, h));
  return element('div.scrolls', {}, element('table', {}, element('thead', {}, element('tr', {}, ...head)),
    element('tbody', {}, ...t.rows.map(row => element('tr', {}, ...row.map(cell))))));
}
const titled = (t, part) => t.rows.length > 12 || ['Settings', 'Versions'].includes(t.title)
  ? folded(t.title, table(t, part)) : element('div', {}, element('h3', {}, t.title), table(t, part));

function ticks(low, high, most) {   // a few round numbers between two numbers
  const rough = (high - low) / most || 1, unit = 10 ** Math.floor(Math.log10(rough));
  const step = unit * [1, 2, 5, 10].find(k => k * unit >= rough), found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(+(i * step).toPrecision(12));
  return found;
}
const COLORS = 6;
function chart(c, wide = false) {
  const W = wide ? Math.max(300, Math.min(innerWidth - 30, 1150)) : 370, H = wide ? 240 : 170, left = 54, bottom = 24, top = 8;
  const lines = c.lines.map(l => ({ ...l, color: l.color ?? c.lines.indexOf(l), x: l.x.map(Number), y: l.y.map(v => v === null ? NaN : Number(v)) }));
  const finite = name => lines.flatMap(l => l[name].filter(Number.isFinite));
  const levels = c.levels ?? [], xs = finite('x'), ys = [...finite('y'), ...levels.map(([y]) => y)];
  if (!xs.length || !finite('y').length) return null;
  if (lines.some(l => l.style === 'bars')) ys.push(0);
  const range = v => v.reduce(([a, b], x) => [Math.min(a, x), Math.max(b, x)], [Infinity, -Infinity]);
  let [x0, x1] = range(xs), [y0, y1] = range(ys);
  if (x0 === x1) [x0, x1] = [x0 - .5, x1 + .5];
  if (y0 === y1) [y0, y1] = [y0 - Math.abs(y0) / 2 - .5, y1 + Math.abs(y1) / 2 + .5];
  const X = x => left + (x - x0) / (x1 - x0) * (W - left - 8), Y = y => H - bottom - (y - y0) / (y1 - y0) * (H - bottom - top);
  const svg = shape('svg', { viewBox: `0 0 ${W} ${H}`, role: 'img', 'aria-label': c.title });
  for (const y of ticks(y0, y1, 4)) svg.append(shape('path', { class: 'grid', d: `M${left} ${Y(y)}H${W - 8}` }), shape('text', { x: left - 6, y: Y(y) + 4, 'text-anchor': 'end' }, shown(y)));
  for (const x of ticks(x0, x1, wide && W > 500 ? 8 : 4)) svg.append(shape('text', { x: Math.min(X(x), W - 18), y: H - 7, 'text-anchor': 'middle' }, shown(x)));
  for (const [y, text] of levels) svg.append(shape('path', { class: 'level', d: `M${left} ${Y(y)}H${W - 8}` }, shape('title', {}, text)));
  for (const [x, text] of c.events ?? []) svg.append(shape('path', { class: 'level', d: `M${X(x)} ${top}V${H - bottom}` }, shape('title', {}, `${text} at ${shown(x)}`)));
  for (const l of lines) {
    const of = `c${l.color % COLORS}`, at = l.y.map((y, i) => [l.x[i], y, l.x[i + 1]]).filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));
    const point = ([x, y]) => `${X(x).toFixed(1)} ${Y(y).toFixed(1)}`;
    if (l.style === 'bars') svg.append(...at.map(([x, y, next]) => shape('rect', { class: of, x: X(x), y: Y(y), width: Math.max(X(next) - X(x) - 1, 1), height: Math.max(Y(0) - Y(y), 0) })));
    if (l.style === 'line' || l.style === 'marked') svg.append(shape('path', { class: `${of} line`, d: 'M' + at.map(point).join('L') + 'h.01' }));
    if (l.style === 'dots' || l.style === 'marked') svg.append(shape('path', { class: `${of} ${l.style}`, d: at.map(p => `M${point(p)}h.01`).join('') }));
  }
  const said = element('small', {}, c.x);
  svg.addEventListener('pointermove', event => {
    const box = svg.getBoundingClientRect(), x = x0 + ((event.clientX - box.left) / box.width * W - left) / (W - left - 8) * (x1 - x0);
    const near = l => l.x.reduce((best, v, i) => Math.abs(v - x) < Math.abs(l.x[best] - x) && i < l.y.length ? i : best, 0);
    said.textContent = `${c.x} ${lines.map(l => `${shown(l.x[near(l)])}: ${shown(l.y[near(l)])}`).join(', ')}`;
  });
  svg.addEventListener('pointerleave', () => { said.textContent = c.x; });
  const names = [...lines.map(l => element('span', {}, element(`i.c${l.color % COLORS}`), l.name)), ...levels.map(([y, text]) => element('span', {}, `┄ ${text}: ${shown(y)}`))];
  return element(wide ? 'figure.chart.wide' : 'figure.chart', {}, element('figcaption', {}, element('b', {}, c.title), ...(names.length > 1 ? names : [])), svg, said);
}
const charts = list => element('div.charts', {}, ...list.map(c => chart(c)));

// ---- runs ----

const runHead = r => element('p.state', { 'data-state': r.state }, element('b', {}, r.state), ' ', r.lead);
function oneRun(r) {
  const [first, ...others] = r.charts;
  return [runHead(r), facts(r.facts), first ? chart(first, true) : element('p.note', {}, 'no metrics yet'), others.length ? section('Metrics', charts(others)) : null,
    section('Details', element('div.tables', {}, ...r.tables.map(t => titled(t))))];
}
function manyRuns(runs) {   // side by side
  const names = [...new Set(runs.flatMap(r => Object.keys(r.facts)))], titles = [...new Set(runs.flatMap(r => r.charts.map(c => c.title)))];
  const together = title => {
    const found = runs.flatMap((r, k) => r.charts.filter(c => c.title === title).map(c => [r, k, c]));
    const lines = found.flatMap(([r, k, c]) => c.lines.filter(l => l.style !== 'dots').map(l => ({ ...l, color: k, name: c.lines.length > 1 ? `${r.name}, ${l.name}` : r.name })));
    return { title, x: found[0][2].x, levels: found[0][2].levels, lines };
  };
  const settings = runs.map(r => Object.fromEntries(r.tables.find(t => t.title === 'Settings')?.rows ?? []));
  const keys = [...new Set(settings.flatMap(s => Object.keys(s)))], differ = k => new Set(settings.map(s => s[k])).size > 1;
  const rows = (which) => which.map(k => [k, ...settings.map(s => s[k] ?? null)]), head = ['', ...runs.map(r => r.name)];
  const result = { head, rows: [['title', ...runs.map(r => r.title)], ['state', ...runs.map(r => r.state)], ...names.map(k => [k, ...runs.map(r => r.facts[k] ?? null)])] };
  const [first, ...others] = titles.map(together);
  return [first ? chart(first, true) : null, table(result), section('Metrics', charts(others)),
    section('Settings', keys.some(differ) ? table({ head, rows: rows(keys.filter(differ)) }) : element('p.note', {}, 'all settings are the same'), folded('All settings', table({ head, rows: rows(keys) }))),
    ...runs.map(r => folded(`Details of ${r.name}`, runHead(r), ...r.tables.filter(t => t.title !== 'Settings').map(t => titled(t))))];
}

// ---- memories: the one that is shown, and the step ----

const LONG = 500, WINDOW = 200;
const now = { memory: 0, key: null, query: '', episode: 0, step: 0, found: [], matches: [], timer: null, span: Infinity, from: 0 };
const memories = () => data.parts.filter(p => p.kind === 'memory');
const part = () => memories()[now.memory];
const episode = () => part().episodes[now.episode];
let view = null;   // elements of the memory that is shown

// A column at a step; '=' is the state of the next step.
function at(e, name, i) {
  const x = e.columns[name]?.[i];
  return x === '=' ? e.columns[name.slice(5)]?.[i + 1] : x;
}
const isOf = (name, column) => column === name || column.startsWith(name + '.');
const columnsOf = (name, ...kinds) => part().columns.filter(c => isOf(name, c.name) && (!kinds.length || kinds.includes(c.kind)));
const asList = v => Array.isArray(v) ? v : v === undefined ? [] : [v];
function keyLink(key, text) {
  const a = element('a', { href: `#key=${key}` }, text ?? shown(key));
  a.addEventListener('click', event => { event.preventDefault(); if (goToKey(key)) view.steps.scrollIntoView({ block: 'nearest' }); });
  return a;
}

function memory(p) {
  view = {
    list: element('div.episodes', { role: 'listbox', 'aria-label': 'episodes' }), message: element('span.note', { role: 'status' }),
    input: element('input', { type: 'search', 'aria-label': 'search', placeholder: 'key:120   env:3   return>10   reward<0', autocomplete: 'off', spellcheck: 'false' }),
    title: element('h3'), tracks: element('div.tracks'), notes: element('p.note'), panel: element('div.panel'), windowed: element('span.note'),
    slider: element('input', { type: 'range', min: 0, 'aria-label': 'step' }),
  };
  view.input.value = now.query;
  view.input.addEventListener('input', () => search(view.input.value));
  view.slider.addEventListener('input', () => go(now.episode, Number(view.slider.value)));
  view.play = button('▶', 'play (space)', () => playing(!now.timer));
  view.zooms = element('div.window', {}, view.windowed, button('+', 'fewer steps (+)', () => zoom(.5)), button('−', 'more steps (-)', () => zoom(2)), button('all', 'all steps (0)', () => zoom(Infinity)));
  const controls = element('div.controls', {}, button('⇤', 'first step (Home)', () => go(now.episode, 0)), button('←', 'step back (←)', () => go(now.episode, now.step - 1)), view.play,
    button('→', 'next step (→)', () => go(now.episode, now.step + 1)), button('⇥', 'last step (End)', () => go(now.episode, Infinity)), view.slider);
  view.steps = element('div.steps', {}, view.title, controls, view.zooms, view.tracks, view.notes, view.panel);
  const help = folded('Keys and search', element('p.note', {}, '← → steps, ↑ ↓ episodes, PgUp PgDn ten steps, Home End, n N next and last match, + - 0 zoom, space plays, / searches. ' +
    'A search term is a name, one of : != > < >= <=, and a value. Names for episodes: env, return, length, end. Names for steps: key, step, sampled, probability, priority, weight, and each column or one of its numbers: state[2]>0.2. ' +
    'Other words match the reason why an episode was chosen, or how it ended.'));
  const remarks = p.remarks.map(r => element('li', {}, r.text, ' ', ...r.keys.map(k => element('span', {}, keyLink(k), ' '))));
  const checked = `No remarks. Checked: returns, silent environments, ends of episodes, priorities, and the columns of ${shown(p.checked)} rows`;
  const many = p.of > p.episodes.length ? `${p.episodes.length} of ${shown(p.of)} episodes are on this page, with images of some steps.` : `All ${p.of} episodes are on this page.`;
  const steps = p.episodes.length ? [section('Episodes in the replay buffer', ring(p), element('p.note', {}, many)),
    section('Steps', element('div.searching', {}, view.input, view.message), help, element('div.panes', {}, view.list, view.steps))] : [];
  const head = data.parts.length > memories().length ? element('h2', {}, `Replay buffer: ${p.title}`) : null;
  return [head, element('p.lead', {}, p.lead), remarks.length ? section('Remarks', element('ul.remarks', {}, ...remarks)) : p.rows ? element('p.checked', {}, checked) : null, ...steps,
    p.charts.length ? section('Whole replay buffer', charts(p.charts)) : null,
    section('Numbers', facts(p.numbers, p), folded('Settings', facts(p.settings, p)), folded('Bytes', facts(p.size)),
      folded('Columns of a row', table({ head: ['column', 'dtype', 'shape'], rows: p.columns.map(c => [c.name, c.dtype, c.shape.join(' × ')]) })))];
}

function ring(p) {   // episodes along the ring, a line for each environment
  const line = new Map(p.environments.map((id, i) => [id, i])), wide = Math.max(p.inserted - p.oldest, 1), high = Math.min(Math.max(14 * line.size, 28), 168);
  const svg = shape('svg', { viewBox: `0 0 1000 ${10 * line.size}`, preserveAspectRatio: 'none', height: high, role: 'img', 'aria-label': 'episodes from the oldest row to the newest' });
  const place = k => (k - p.oldest) / wide * 1000, there = new Map(p.episodes.map((e, i) => [e.first, i])), r = p.ring;
  r.first.forEach((first, j) => {
    const i = there.get(first), x = place(first), bar = shape('rect', { class: `${r.end[j]}${i === undefined ? ' pale' : ''}`, x, y: 10 * line.get(r.env_id[j]) + 1, width: Math.max(place(r.last[j] + 1) - x - .6, .6), height: 8 },
      shape('title', {}, `env ${r.env_id[j]}, keys ${shown(first)} to ${shown(r.last[j])}, ${r.end[j]}` + (i === undefined ? ', not on this page' : '')));
    if (i !== undefined) bar.addEventListener('click', () => go(i, 0));
    svg.append(bar);
  });
  for (const k of p.remarks.flatMap(m => m.keys)) svg.append(shape('rect', { class: 'named', x: place(k), y: 0, width: 3, height: 10 * line.size }));
  const kinds = [...new Set(r.end)].map(end => element('span', {}, element(`i.${end}`), end));
  const some = r.first.length < p.of ? element('span', {}, `${shown(r.first.length)} of ${shown(p.of)} episodes are drawn`) : null;
  return element('div.ring', {}, svg, element('div.ends.note', {}, element('span', {}, `key ${shown(p.oldest)}`), element('span', {}, `key ${shown(p.inserted - 1)}`)),
    element('p.legend.note', {}, ...kinds, element('span', {}, 'pale: not on this page (click others to open them)'), p.remarks.length ? element('span', {}, element('i.named'), 'rows of remarks') : null, some));
}

// ---- search: `env:3 return>10 reward<0 key:120` ----

const OF_EPISODE = { __proto__: null, env: 'env_id', env_id: 'env_id', return: 'total', length: 'length', end: 'end' };
function parsed(word) {
  const [, name, sign, value] = word.match(/^(.+?)(>=|<=|!=|:|=|>|<)(.+)$/) ?? [];
  if (!name) return { word: word.toLowerCase() };
  const [, base, j] = name.match(/^(.+)\[(\d+)\]$/) ?? [null, name];
  return { name, base: base === 'step' ? 'step_n' : base, j, sign: sign === ':' ? '=' : sign, value, episode: OF_EPISODE[name] };
}
function holds(x, sign, value) {
  if (Array.isArray(x)) return x.some(y => holds(y, sign, value));
  if (x === null || x === undefined) return false;
  const a = Number(number(x)), b = Number(value);
  if (typeof x === 'boolean' || Number.isNaN(b) || Number.isNaN(a)) return String(x).toLowerCase().includes(value.toLowerCase()) === (sign === '=') && ['=', '!='].includes(sign);
  return { '=': a === b, '!=': a !== b, '>': a > b, '<': a < b, '>=': a >= b, '<=': a <= b }[sign];
}
function stepValue(e, q, i) {
  const own = Array.isArray(e[q.base]) ? e[q.base][i] : undefined, x = own ?? at(e, q.base, i) ?? at(e, `state.${q.base}`, i) ?? e.more[q.base]?.[i];
  return q.j === undefined ? x : x?.[q.j];
}
function search(text) {
  now.query = text;
  const query = text.trim().split(/\s+/).filter(Boolean).map(parsed), narrow = query.filter(q => q.name && !q.episode);
  now.found = [];
  now.matches = [];
  part().episodes.forEach((e, k) => {
    const fits = query.every(q => q.word ? [...e.why, e.end].join(' ').toLowerCase().includes(q.word) : !q.episode || holds(e[q.episode], q.sign, q.value));
    const steps = fits && narrow.length ? e.key.map((_, i) => i).filter(i => narrow.every(q => holds(stepValue(e, q, i), q.sign, q.value))) : [];
    if (!fits || narrow.length && !steps.length) return;
    now.found.push(k);
    now.matches.push(...steps.map(i => [k, i]));
  });
  const key = query.find(q => q.name === 'key' && q.sign === '=');
  view.message.textContent = !text.trim() ? '' : key && !now.matches.length ? whereIs(Number(key.value)) : `${now.found.length} of ${part().episodes.length} episodes` + (narrow.length ? `, ${shown(now.matches.length)} steps` : '');
  drawList();
  drawMatches();
  const here = now.matches.some(([k, i]) => k === now.episode && i === now.step);
  if (now.matches.length && !here) goClose(...now.matches[0]);
  else if (now.found.length && !now.found.includes(now.episode)) go(now.found[0], 0);
}
function whereIs(key) {   // a row that is not in the sample
  const p = part();
  if (key < p.oldest) return `row ${shown(key)} was overwritten; the oldest is ${shown(p.oldest)}`;
  if (key >= p.inserted) return `row ${shown(key)} was not added yet; the newest is ${shown(p.inserted - 1)}`;
  return `row ${shown(key)} is in the replay buffer, but not on this page`;
}

// ---- the list of episodes ----

function drawList() {
  const p = part(), wide = Math.max(p.inserted - p.oldest, 1);
  view.list.replaceChildren(...now.found.map(k => {
    const e = p.episodes[k], bar = element('i'), item = element('button.episode', { type: 'button', role: 'option', 'data-episode': k, 'aria-selected': String(k === now.episode) },
      element('b', {}, `env ${e.env_id}`), element('span', {}, `${shown(e.length)} steps`), element('span.return', {}, e.total === undefined ? '' : `return ${shown(e.total)}`),
      element(`span.end.${e.end}`, {}, e.end), element('span.why', {}, e.why.join(', ')), element('span.where', {}, bar));
    bar.style.left = `${100 * (e.first - p.oldest) / wide}%`;
    bar.style.width = `max(${100 * (e.last - e.first + 1) / wide}%, 3px)`;
    item.addEventListener('click', () => go(k, 0));
    return item;
  }));
  if (!now.found.length) view.list.append(element('p.note', {}, 'no matches'));
}
function showSelected() {
  for (const b of view.list.querySelectorAll('.episode')) {
    const on = Number(b.dataset.episode) === now.episode;
    b.setAttribute('aria-selected', on);
    if (on && (b.offsetTop < view.list.scrollTop || b.offsetTop + b.offsetHeight > view.list.scrollTop + view.list.clientHeight)) view.list.scrollTop = b.offsetTop - 60;
  }
}

// ---- tracks: numbers along an episode; a row is one unit wide, and the view box is the window ----

const seen = () => Math.min(now.span, episode().rows);
const across = rows => 100 * rows / seen();
const within = a => a >= now.from && a < now.from + seen();
function addTrack(name, values, dots = false) {
  const e = episode(), y = values.map(v => v === null || v === undefined ? NaN : Number(number(v))), finite = y.filter(Number.isFinite);
  if (!finite.length) return;
  const low = Math.min(...finite), high = Math.max(...finite), place = v => high > low ? 27 - 24 * (v - low) / (high - low) : 15;
  let path = '', bad = '';
  y.forEach((v, i) => {
    if (!Number.isFinite(v)) { if (values[i] !== null) bad += `M${e.at[i] + .5} 0v30`; return; }
    const on = !dots && Number.isFinite(y[i - 1]) && e.at[i] === e.at[i - 1] + 1;
    path += `${on ? 'L' : 'M'}${e.at[i] + .5} ${place(v).toFixed(1)}${on ? '' : 'h.001'}`;
  });
  addRow(name, [shape('path', { d: path, class: dots ? 'line dots' : 'line' }), shape('path', { d: bad, class: 'bad' })], high > low ? `${shown(low)} to ${shown(high)}` : `always ${shown(low)}`, i => values[i]);
}
function addRow(name, shapes, range, value) {
  const said = element('span.value'), svg = shape('svg', { preserveAspectRatio: 'none', 'aria-hidden': 'true' }, ...shapes), plot = element('div.plot', {}, svg);
  const row = element('div.track', {}, element('span.name', { title: name }, name), said, plot, element('span.range', {}, range));
  row.update = () => { said.textContent = value ? shown(value(now.step)) : ''; };
  row.look = () => svg.setAttribute('viewBox', `${now.from} 0 ${seen()} 30`);
  const move = event => { const box = plot.getBoundingClientRect(); go(now.episode, nearest((event.clientX - box.left) / box.width)); };
  plot.addEventListener('pointerdown', event => { plot.setPointerCapture(event.pointerId); move(event); });
  plot.addEventListener('pointermove', event => { if (plot.hasPointerCapture(event.pointerId)) move(event); });
  view.tracks.append(row);
}
function nearest(share) {
  const e = episode(), want = now.from + share * seen() - .5;
  return e.at.reduce((best, a, i) => Math.abs(a - want) < Math.abs(e.at[best] - want) ? i : best, 0);
}
function addFilm(name) {   // pictures of the window at even distances
  const e = episode(), there = e.at.map((_, i) => i).filter(i => e.pictures[name]?.[i]);
  if (!there.length) return;
  const plot = element('div.plot'), row = element('div.track.film', {}, element('span.name', {}, name), element('span.value'), plot, element('span.range', {}, `pictures of ${shown(there.length)} steps`));
  row.look = () => {
    const inside = there.filter(i => within(e.at[i])), many = Math.min(inside.length, innerWidth < 640 ? 5 : 10);
    const some = [...Array(many).keys()].map(k => inside[Math.round(k * (inside.length - 1) / Math.max(many - 1, 1))]);
    plot.replaceChildren(...some.map(i => {
      const b = button('', `step ${e.at[i] + 1}`, () => go(now.episode, i));
      b.append(frame(e.pictures[name][i].at(-1)), element('small', {}, shown(e.at[i] + 1)));
      return b;
    }));
  };
  view.tracks.append(row);
}
function addSpans(e) {   // sequences that can be sampled
  const lanes = [], burn = part().settings.burn_in ?? 0, shapes = [];
  e.spans.first.forEach((first, k) => {
    const free = lanes.findIndex(end => end <= first), lane = free < 0 ? lanes.length : free, long = e.spans.length[k];
    lanes[lane] = first + long;
    const box = (wide, kind) => shape('rect', { x: first + .1, y: 1 + 7.4 * lane, width: Math.max(wide - .2, .1), height: 6, class: kind });
    if (lane < 4) shapes.push(box(long, 'span'), box(Math.min(burn, long), 'burn'));
  });
  if (shapes.length) addRow('sequences', shapes, burn ? `first ${burn} steps: burn-in` : '');
}
function drawTracks() {
  const e = episode(), changing = [], constant = [];
  view.tracks.replaceChildren(element('div.overlay', {}, element('div.matches'), element('div.cursor')));
  const numbers = (c, most) => c.kind !== 'numbers' ? [[c.name, e.at.map((_, i) => at(e, c.name, i))]]
    : asList(at(e, c.name, 0)).slice(0, most).map((_, j) => [`${c.name}[${j}]`, e.at.map((_, i) => at(e, c.name, i)?.[j])]);
  for (const c of columnsOf('state', 'pictures')) addFilm(c.name);
  for (const c of columnsOf('reward')) addTrack('reward', e.columns[c.name]);
  for (const c of columnsOf('action', 'number', 'numbers')) for (const [name, values] of numbers(c, 4)) addTrack(name, values, c.dtype.includes('int'));
  for (const c of columnsOf('state', 'number', 'numbers', 'flag')) for (const [name, values] of numbers(c, 64)) (new Set(values).size < 2 && values.length > 1 ? constant : changing).push([name, values]);
  for (const [name, values] of changing.slice(0, 16)) addTrack(name, values);
  for (const name of ['priority', 'probability', 'sampled']) if (e[name]) addTrack(name, e[name]);
  if (e.spans) addSpans(e);
  const usual = 'state next_state action reward step_n episode_n total_reward terminated truncated env_id'.split(' ');
  for (const c of part().columns) if (['number', 'flag'].includes(c.kind) && !usual.some(u => isOf(u, c.name)) && e.columns[c.name]) addTrack(c.name, e.columns[c.name]);
  const odd = Object.keys(e.odd);
  if (odd.length) addRow('unusual', [shape('path', { class: 'bad', d: odd.map(i => `M${e.at[i] + .5} 0v30`).join('') })], `${shown(odd.length)} of ${shown(e.key.length)} steps`);
  view.notes.textContent = (constant.length ? `Constant: ${constant.slice(0, 8).map(([name, v]) => `${name} = ${shown(v[0])}`).join(', ')}. ` : '') + (changing.length > 16 ? `${changing.length - 16} more numbers are in the table.` : '');
  look();
}
function look() {   // move the window to the current step, if that comes close to its end
  const e = episode(), here = e.at[now.step], margin = seen() / 10;
  if (here < now.from + margin || here > now.from + seen() - margin) now.from = Math.round(here - seen() / 2);
  now.from = Math.min(Math.max(now.from, 0), Math.max(e.rows - seen(), 0));
  for (const t of view.tracks.children) t.look?.();
  view.windowed.textContent = `steps ${shown(now.from + 1)} to ${shown(now.from + seen())} of ${shown(e.rows)}`;
  view.zooms.hidden = e.rows <= 40;
  drawMatches();
}
function zoom(by) {
  now.span = Math.min(Math.max(Math.round(seen() * by), 20), episode().rows);
  now.from = Math.round(episode().at[now.step] - now.span / 2);
  if (now.span === episode().rows) now.span = Infinity;
  look();
  drawCursor();
}
function drawCursor() {   // one row, or the rows that an n-step row spans
  const e = episode(), cursor = view.tracks.querySelector('.cursor'), n = Math.min(Number(at(e, 'n', now.step) ?? 1), e.rows - e.at[now.step]);
  cursor.classList.toggle('several', n > 1);
  cursor.style.left = `${across(e.at[now.step] + (n > 1 ? 0 : .5) - now.from)}%`;
  cursor.style.width = n > 1 ? `${across(n)}%` : `clamp(3px, ${across(1)}%, 12px)`;
}
function drawMatches() {
  const box = view.tracks.querySelector('.matches');
  if (!box) return;
  const here = now.matches.filter(([k, i]) => k === now.episode && within(episode().at[i])).slice(0, 300);
  box.replaceChildren(...here.map(([, i]) => { const m = element('i'); m.style.left = `${across(episode().at[i] + .5 - now.from)}%`; return m; }));
}

// ---- the panel: one step ----

const frame = k => element('img.frame', { src: `data:image/png;base64,${part().frames[k]}`, alt: '' });
function drawPanel() {
  const e = episode(), i = now.step, p = part(), named = {};
  const fact = (name, value) => { named[name] = value; };
  fact('key', e.key[i]);
  fact('step', `${shown(at(e, 'step_n', i) ?? e.at[i] + 1)} of ${shown(e.length)}`);
  for (const c of p.columns) if (!['state', 'next_state', 'env_id', 'step_n', 'episode_n'].some(r => isOf(r, c.name)) && !['flag', 'pictures'].includes(c.kind)) fact(c.name, at(e, c.name, i));
  for (const name of ['sampled', 'probability', 'priority', 'weight']) if (e[name]) fact(name, e[name][i]);
  fact('age', p.inserted - e.key[i]);
  const flags = [...p.columns.filter(c => c.kind === 'flag' && at(e, c.name, i)).map(c => c.name), ...(e.odd[i] ? [e.odd[i]] : [])];
  const parts = [facts(named, p), element('p', {}, ...flags.map(f => element(`span.chip${f === e.odd[i] ? '.odd' : ''}`, {}, f))), neighbors(e, i)], rows = [];
  for (const c of columnsOf('state')) c.kind === 'pictures' ? parts.push(pictures(e, c.name, i)) : rows.push(...numberRows(e, c, i));
  if (rows.length) parts.push(table({ head: ['', 'state', 'next_state', 'change'], rows }));
  if (e.spans) parts.push(element('p.note', {}, 'Sequences with this step: ', ...sequences(e, i)));
  if (e.more.goal) parts.push(hindsight(e, i));
  view.panel.replaceChildren(...parts);
}
function neighbors(e, i) {   // the rows before and after
  const told = [...columnsOf('action', 'number', 'numbers', 'flag'), ...columnsOf('reward')].map(c => c.name), ended = j => ['terminated', 'truncated'].filter(n => at(e, n, j) === true).join(', ');
  const row = (name, j) => e.at[j] === e.at[i] + j - i ? [e.key[j], name, ...told.map(n => at(e, n, j)), ended(j)] : null;
  return table({ head: ['key', '', ...told, ''], keys: true, rows: [row('previous row', i - 1), row('this row', i), row('next row', i + 1)].filter(Boolean) });
}
function pictures(e, name, i) {
  const strip = n => {
    const ids = e.pictures[n]?.[i], there = Object.keys(e.pictures[n] ?? {}).map(Number), near = there.reduce((a, b) => Math.abs(b - i) < Math.abs(a - i) ? b : a, there[0]);
    const none = there.length ? element('p.note', {}, 'there is no image of this step on this page; the nearest: ', keyLink(e.key[near], `step ${shown(e.at[near] + 1)}`)) : element('p.note', {}, 'no pictures in this page');
    return element('figure', {}, element('figcaption', {}, n), ids ? element('div.strip', {}, ...ids.map(frame)) : none);
  };
  return element('div.pictures', {}, strip(name), strip('next_' + name));
}
function numberRows(e, c, i) {
  const a = asList(at(e, c.name, i)), b = asList(at(e, 'next_' + c.name, i));
  return a.map((v, j) => [a.length > 1 || c.kind === 'numbers' ? `${c.name}[${j}]` : c.name, v, b[j], typeof number(v) === 'number' ? Number(number(b[j] ?? NaN)) - number(v) : null]);
}
function sequences(e, i) {
  return e.spans.first.map((f, k) => k).filter(k => e.spans.first[k] <= e.at[i] && e.at[i] < e.spans.first[k] + e.spans.length[k]).map(k => {
    const from = e.spans.first[k], burn = e.at[i] - from < (part().settings.burn_in ?? 0) ? ', here burn-in' : '';
    return element('span.chip', {}, `steps ${shown(from + 1)} to ${shown(from + e.spans.length[k])}${burn}`, ...['probability', 'priority', 'weight'].filter(n => e.spans[n]).map(n => `, ${n} ${shown(e.spans[n][k])}`));
  });
}
function hindsight(e, i) {
  const m = e.more, rows = [['desired goal', shown(at(e, 'state.desired_goal', i)), shown(m.goal[i])], ['key of the goal', null, m.goal_key[i]]];
  for (const [name, values] of [['reward', m.goal_reward], ['terminated', m.goal_terminated]]) if (values) rows.push([name, at(e, name, i), values[i]]);
  return element('div', {}, element('h3', {}, 'Hindsight goal'), table({ head: ['', 'as stored', 'as it may be sampled'], rows }));
}

// ---- moving ----

function go(k, i) {
  const e = part().episodes[Math.min(Math.max(k, 0), part().episodes.length - 1)];
  now.episode = part().episodes.indexOf(e);
  now.step = Math.min(Math.max(i, 0), e.key.length - 1);
  now.key = e.key[now.step];
  if (view.shown !== e) {
    view.shown = e;
    const of = e.key.length < e.rows ? `; ${shown(e.key.length)} of its ${shown(e.rows)} rows are on this page` : '';
    view.title.replaceChildren(`Environment ${e.env_id}, keys ${shown(e.first)} to ${shown(e.last)}`, element('span.note', {}, ` ${shown(e.length)} steps, ${e.end}` +
      (e.total === undefined ? '' : `, return ${shown(e.total)}`) + (e.whole ? '' : '; its first rows were overwritten') + of + `. Chosen: ${e.why.join(', ')}.`));
    now.from = 0;
    view.slider.max = e.key.length - 1;
    drawTracks();
    showSelected();
  }
  view.slider.value = now.step;
  look();
  drawCursor();
  for (const t of view.tracks.children) t.update?.();
  drawPanel();
  try { history.replaceState(null, '', `#memory=${now.memory}&key=${now.key}`); } catch { /* a frame without an address */ }
}
function goClose(k, i) {   // of a long episode, show the neighbors
  if (part().episodes[k].rows > LONG && now.span > LONG) now.span = WINDOW;
  go(k, i);
}
function goToKey(key) {
  const k = part().episodes.findIndex(e => e.key.includes(key));
  if (k < 0) view.message.textContent = whereIs(key);
  else goClose(k, part().episodes[k].key.indexOf(key));
  return k >= 0;
}
function nextEpisode(by) {
  const k = now.found.indexOf(now.episode) + by;
  if (now.found.length) go(now.found[Math.min(Math.max(k, 0), now.found.length - 1)], 0);
}
function nextMatch(by) {
  const m = now.matches, k = m.findIndex(([a, b]) => a === now.episode && b === now.step);
  if (m.length) goClose(...m[(k + by + m.length) % m.length]);
}
function playing(on) {
  clearInterval(now.timer);
  now.timer = on ? setInterval(() => now.step < episode().key.length - 1 ? go(now.episode, now.step + 1) : playing(false), 120) : null;
  view.play.textContent = on ? '⏸' : '▶';
}
const KEYS = {
  __proto__: null, ArrowLeft: () => go(now.episode, now.step - 1), ArrowRight: () => go(now.episode, now.step + 1), ArrowUp: () => nextEpisode(-1), ArrowDown: () => nextEpisode(1),
  Home: () => go(now.episode, 0), End: () => go(now.episode, Infinity), PageUp: () => go(now.episode, now.step - 10), PageDown: () => go(now.episode, now.step + 10),
  '+': () => zoom(.5), '-': () => zoom(2), 0: () => zoom(Infinity), n: () => nextMatch(1), N: () => nextMatch(-1), ' ': () => playing(!now.timer), '/': () => view.input.focus(),
};
document.addEventListener('keydown', event => {
  if (event.ctrlKey || event.metaKey || event.altKey || !view || !part()?.episodes.length) return;
  if (event.target === view.input) { if (['Escape', 'Enter'].includes(event.key)) view.input.blur(); return; }
  if (!KEYS[event.key] || event.target.matches('summary, button:not(.episode)') && event.key === ' ') return;
  event.preventDefault();
  KEYS[event.key]();
});

// ---- the page ----

function tried(f) {   // a file of somebody else may hold anything
  try { return f(); } catch (e) { return [element('p.note', {}, `This cannot be shown: ${e.message}`)]; }
}
function openMemory(k, key) {
  clearInterval(now.timer);
  Object.assign(now, { memory: k, episode: 0, step: 0, key, span: Infinity });
  const place = document.getElementById('memory'), many = memories().length > 1, open = opened(place);
  const tabs = element('div.tabs', { role: 'tablist' }, ...memories().map((p, j) => {
    const b = button(p.name || p.title, `memory ${p.name}`, () => { now.query = ''; openMemory(j); });
    fill(b, { role: 'tab', 'aria-selected': String(j === k) }, []);
    return b;
  }));
  place.replaceChildren(...(many ? [tabs] : []), ...tried(() => memory(part())).filter(Boolean));
  reopen(place, open);
  if (!part().episodes?.length) return;
  const query = now.query;
  search('');
  if (key !== undefined && key !== null) goToKey(key);
  else if (!part().remarks.some(r => r.keys.length && part().episodes.some(e => e.key.includes(r.keys[0])) && goToKey(r.keys[0]))) go(0, 0);
  if (query) search(query);
}
const opened = place => [...place.querySelectorAll('details[open]')].map(d => d.dataset.title);
const reopen = (place, titles) => place.querySelectorAll('details').forEach(d => { d.open = titles.includes(d.dataset.title); });
function render() {
  const runs = data.parts.filter(p => p.kind === 'run'), place = document.getElementById('runs'), open = opened(place);
  place.replaceChildren(...tried(() => runs.length > 1 ? manyRuns(runs) : runs.flatMap(oneRun)).filter(Boolean));
  reopen(place, open);
}
async function refresh() {
  if (!document.hidden) try {
    const answer = await fetch(`data/${data.version}`, { cache: 'no-store' });
    if (!answer.ok) throw new Error(await answer.text());
    const fresh = await answer.json(), before = JSON.stringify(memories());
    if (fresh) {
      data = fresh;
      render();
      if (JSON.stringify(memories()) !== before && memories().length) openMemory(Math.min(now.memory, memories().length - 1), now.key);
    }
    news.textContent = `as of ${new Date().toLocaleTimeString()}`;
  } catch (e) {
    news.textContent = e instanceof TypeError ? 'the server has ended' : e.message.slice(0, 300);
  }
  setTimeout(refresh, 2000);
}

let theme = null;
try { theme = localStorage.getItem('theme'); } catch { /* a frame in a notebook keeps nothing */ }
if (['light', 'dark'].includes(theme)) root.dataset.theme = theme;
document.querySelector('header').append(button('◐', 'switch between light and dark', () => {
  const dark = (root.dataset.theme ?? (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light')) === 'dark';
  root.dataset.theme = dark ? 'light' : 'dark';
  try { localStorage.setItem('theme', root.dataset.theme); } catch { /* as above */ }
}));
main.replaceChildren(element('div', { id: 'runs' }), element('div', { id: 'memory' }));
render();
const asked = new URLSearchParams(location.hash.slice(1)), first = Number(asked.get('memory') ?? 0);
if (memories().length) openMemory(memories()[first] ? first : 0, asked.has('key') ? Number(asked.get('key')) : null);
if (data.live) refresh();
