// The viewer of a memory's page: episodes on the left, the steps of one on the right. Texts of the data become text nodes, never markup.
'use strict';
(() => {
const data = pageData(), home = document.getElementById('viewer');
if (!data || !home) return;
// span: how many rows of an episode the tracks show, around the current one; from: the first of these.
const now = { part: 0, episode: 0, step: 0, found: [], matches: [], timer: null, span: Infinity, from: 0 };
const part = () => data.parts[now.part], episode = () => part().episodes[now.episode];

// ---- values ----

const number = x => typeof x === 'string' && ['NaN', 'Infinity', '-Infinity'].includes(x) ? Number(x) : x;   // JSON has neither
function shown(x) {
  x = number(x);
  if (x === null || x === undefined) return '–';
  if (Array.isArray(x)) return x.length > 6 ? `${x.slice(0, 6).map(shown).join('  ')} … (${x.length})` : x.map(shown).join('  ');
  if (typeof x !== 'number') return String(x);
  const size = Math.abs(x), few = +x.toPrecision(4);   // as tables of the page have them
  if (Number.isInteger(x) && size < 1e12 || size >= 1e4 && size < 1e12) return Math.round(x).toLocaleString('en');
  return size >= 1e12 || size && size < 1e-4 ? few.toExponential() : few.toLocaleString('en', { maximumFractionDigits: 12 });
}
// A column at a step; '=' stands for the state of the next step.
function at(e, name, i) {
  const x = e.columns[name]?.[i];
  return x === '=' ? e.columns[name.slice(5)]?.[i + 1] : x;
}
const pictureAt = (e, name, i) => e.pictures[name]?.[e.at[i]];
const columnsLike = test => part().columns.filter(test);
const isOf = root => c => c.name === root || c.name.startsWith(root + '.') || c.name.startsWith(root + '[');
const stateParts = () => columnsLike(isOf('state'));
const same = (a, b) => JSON.stringify(a) === JSON.stringify(b);

// What is wrong between a step and the next: the memory's own links say that these rows follow each other.
function oddity(e, i) {
  const next = e.at[i + 1] === e.at[i] + 1, merged = part().columns.some(c => c.name === 'n'), found = [];
  let equal = stateParts().length > 0, broken = false;
  for (const c of stateParts()) {
    const get = c.kind === 'pictures' ? pictureAt : at, here = get(e, c.name, i), later = get(e, 'next_' + c.name, i);
    if (here === undefined || later === undefined || !same(here, later)) equal = false;
    if (!next || merged) continue;
    if (c.kind === 'pictures') { const follows = pictureAt(e, c.name, i + 1); broken ||= Boolean(later && follows && !same(later, follows)); }
    else broken ||= e.columns['next_' + c.name]?.[i] !== '=';
  }
  if (equal) found.push('next_state equals state');
  if (broken) found.push("next_state is not the next row's state");
  return found;
}

// ---- search: `env:3 return>10 reward<0 key:120` ----

const ofEpisode = { __proto__: null, env: 'env_id', environment: 'env_id', env_id: 'env_id', return: 'total', length: 'length', end: 'end' };
const ofStep = { __proto__: null, key: 'key', drawn: 'drawn', chance: 'chance', priority: 'priority', weight: 'weight' };
const parsed = text => text.trim().split(/\s+/).filter(Boolean).map(word => {
  const [, name, sign, value] = word.match(/^(.+?)(>=|<=|!=|:|=|>|<)(.+)$/) ?? [];
  if (!name) return { word };
  return { name, sign: sign === ':' ? '=' : sign, value, episode: ofEpisode[name], ...columnOf(name) };
});
// A name as plots have it, `state[2]` or, of `state.speed`, `speed`: the column, and which of its numbers.
function columnOf(name) {
  if (ofStep[name]) return { step: ofStep[name] };
  const known = searched(), [, base, j] = name.match(/^(.+)\[(\d+)\]$/) ?? [], long = n => [n, `state.${n}`].find(c => known.includes(c));
  if (name === 'step') return { step: 'step_n' };
  if (long(name)) return { step: long(name) };
  const column = base && part().columns.find(c => c.name === long(base) && c.kind === 'numbers');
  return column && j < shownOf(column) ? { step: column.name, component: Number(j) } : { step: null };
}
const shownOf = c => Math.min(c.shape.reduce((a, b) => a * b, 1), 128);   // of an array, the page has so many numbers
const searched = () => [...part().columns.filter(c => c.kind !== 'pictures').map(c => c.name), ...new Set(part().episodes.flatMap(e => Object.keys(e.more)))];
function names() {   // what may be searched for
  const there = Object.keys(ofStep).filter(n => part().episodes.some(e => e[n]));
  return ['env', 'return', 'length', 'end', 'step', ...there,
    ...part().columns.filter(c => c.kind !== 'pictures' && !['env_id', 'step_n'].includes(c.name)).map(c => c.kind === 'numbers' ? `${c.name}[0…${shownOf(c) - 1}]` : c.name)].join(', ');
}
function holds(x, sign, value) {
  if (Array.isArray(x)) return x.some(y => holds(y, sign, value));
  if (x === null || x === undefined) return false;
  const a = Number(number(x)), b = Number(value.replace(/(\d),(?=\d{3})/g, '$1')), numeric = value.trim() !== '' && !Number.isNaN(b) && typeof x !== 'boolean';
  if (!numeric) { const hit = String(x).toLowerCase().includes(value.toLowerCase()); return sign === '=' ? hit : sign === '!=' && !hit; }
  return { '=': a === b, '!=': a !== b, '>': a > b, '<': a < b, '>=': a >= b, '<=': a <= b }[sign];
}
function stepValue(e, q, i) {
  const x = Object.values(ofStep).includes(q.step) && Array.isArray(e[q.step]) ? e[q.step][i] : at(e, q.step, i) ?? e.more[q.step]?.[i];
  return q.component === undefined ? x : x?.[q.component];
}
const fitsStep = (e, i, query) => query.every(q => holds(stepValue(e, q, i), q.sign, q.value));
function search(text) {
  const query = parsed(text), wide = query.filter(q => q.episode || q.word), narrow = query.filter(q => !q.episode && !q.word), wrong = narrow.find(q => !q.step);
  now.found = []; now.matches = [];
  if (!wrong) part().episodes.forEach((e, k) => {
    if (!wide.every(q => q.word ? [...e.why, e.end].join(' ').toLowerCase().includes(q.word.toLowerCase()) : holds(e[q.episode], q.sign, q.value))) return;
    const steps = narrow.length ? e.key.map((_, i) => i).filter(i => fitsStep(e, i, narrow)) : [];
    if (narrow.length && !steps.length) return;
    now.found.push(k);
    steps.forEach(i => now.matches.push([k, i]));
  });
  const steps = narrow.length ? `, ${shown(now.matches.length)} step${now.matches.length === 1 ? '' : 's'}` : '';
  let said = text.trim() ? `${now.found.length} of ${part().episodes.length} episodes${steps}` : '';
  if (wrong) said = `“${wrong.name}” is no column; there are: ${names()}`;
  const key = query.find(q => q.name === 'key' && q.sign === '=');
  if (key && !now.matches.length && !wrong) said = whereIs(Number(key.value.replaceAll(',', '')));
  say(said);
  home.classList.toggle('no-match', !now.found.length);   // nothing is shown as if it had been found
  drawList(); drawMatches();
  if (narrow.length && now.matches.length && !now.matches.some(([k, i]) => k === now.episode && i === now.step)) goClose(...now.matches[0]);
  else if (now.found.length && !now.found.includes(now.episode)) go(now.found[0], 0);
}
function whereIs(key) {   // one that is not in the sample
  const p = part();
  if (!Number.isInteger(key)) return 'a key is a whole number';
  if (key < p.oldest) return `row ${shown(key)} was overwritten; the oldest is ${shown(p.oldest)}`;
  if (key >= p.inserted) return `row ${shown(key)} has not come so far; the newest is ${shown(p.inserted - 1)}`;
  const e = p.episodes.find(e => e.key[0] <= key && key <= e.key.at(-1) && e.rows > e.key.length);
  return `row ${shown(key)} is in the memory, but not in the sample of this page` + (e ? ', or between the steps of episodes that are' : '');
}
function goClose(k, i) {   // to a step that was asked for: of a long episode, with its neighbours
  if (part().episodes[k].rows > LONG && now.span > LONG) now.span = WINDOW;
  go(k, i);
}
function goToKey(key) {
  for (const [k, e] of part().episodes.entries()) {
    const i = e.key.indexOf(key);
    if (i < 0) continue;
    if (!now.found.includes(k)) { input.value = ''; search(''); }
    goClose(k, i);
    return true;
  }
  say(whereIs(key));
  return false;
}

// ---- the frame: search, list, tracks, panel ----

const input = element('input', { type: 'search', 'aria-label': 'search', spellcheck: 'false', autocomplete: 'off' });
const message = element('span.message', { role: 'status' }), list = element('div.episodes', { role: 'listbox', 'aria-label': 'episodes' });
const title = element('h3.which'), tracks = element('div.tracks'), notes = element('p.note'), panel = element('div.panel');
const button = (text, label, act) => { const b = element('button', { type: 'button', title: label, 'aria-label': label }, text); b.addEventListener('click', act); return b; };
const windowed = element('span.note'), zooms = element('div.window', {}, windowed, button('+', 'fewer steps, wider (+)', () => zoom(.5)), button('−', 'more steps (-)', () => zoom(2)), button('all', 'all steps (0)', () => zoom(Infinity)));
const slider = element('input', { type: 'range', min: 0, 'aria-label': 'step' }), play = button('▶', 'play (space)', () => playing(!now.timer));
const say = text => { message.textContent = text; };
const controls = element('div.controls', {}, button('⇤', 'first step (Home)', () => go(now.episode, 0)), button('←', 'step back (←)', () => go(now.episode, now.step - 1)), play,
  button('→', 'next step (→)', () => go(now.episode, now.step + 1)), button('⇥', 'last step (End)', () => go(now.episode, Infinity)), slider);
const tabs = element('div.tabs', { role: 'tablist' }, ...(data.parts.length < 2 ? [] : data.parts.map((p, k) => {
  const b = button(p.name, `replay ${p.name}`, () => { now.part = k; openPart(); });
  b.setAttribute('role', 'tab');
  return b;
})));
const help = element('details.help', {}, element('summary', {}, 'keys and search'), element('p.note', {},
  '← → steps, ↑ ↓ or k j episodes, Home End, PgUp PgDn ten steps, n N next and last match, + - 0 fewer, more and all steps, space plays, / searches, Esc leaves the search. ' +
  'Search: words with : = != > < >= <= between a name and a value. Of episodes: env, return, length, end. Of steps: key, step, drawn, chance, priority, weight, and each column: ' +
  'reward<0, action:2, terminated:true, or one of its numbers, as plots name it: state[2]>0.2. Several must all hold. Words without a sign look for why an episode was chosen, or how it ended: newest, truncated.'));
home.append(tabs, element('div.searching', {}, input, message), help,
  element('div.panes', {}, list, element('div.steps', {}, title, controls, zooms, tracks, notes, panel)));

function openPart() {
  [...tabs.children].forEach((b, k) => b.setAttribute('aria-selected', k === now.part));
  Object.assign(now, { episode: 0, step: 0 });
  input.value = '';
  input.placeholder = examples().slice(0, innerWidth < 640 ? 3 : 4).join('   ');
  home.classList.toggle('empty', !part().episodes.length);
  if (!part().episodes.length) { list.replaceChildren(); tracks.replaceChildren(); panel.replaceChildren(); title.textContent = notes.textContent = ''; say('no rows so far'); return; }
  now.shown = null;
  search('');
  go(0, 0);
}

// Searches that find something here.
function atMost(v) {   // two digits of a number, rounded down
  const unit = 10 ** (Math.floor(Math.log10(Math.abs(v) || 1)) - 1);
  return +(Math.floor(v / unit) * unit).toPrecision(2);
}
function examples() {
  const p = part(), e = p.episodes[0];
  if (!e) return [];
  const i = e.key.length >> 1, totals = p.episodes.map(x => x.total).filter(Number.isFinite).sort((a, b) => a - b), found = [`key:${e.key[i]}`];
  if (p.environments.length > 1) found.push(`env:${e.env_id}`);
  if (totals.length) found.push(`return>=${atMost(totals[totals.length >> 1])}`);
  const several = p.columns.find(c => isOf('state')(c) && c.kind === 'numbers'), value = several && number(at(e, several.name, i)?.[0]);
  found.push(Number.isFinite(value) ? `${several.name.replace(/^state\./, '')}[0]>=${atMost(value)}` : `step:${e.at[i] + 1}`);
  return found;
}

function drawList() {
  const p = part(), wide = Math.max(p.inserted - p.oldest, 1);
  list.replaceChildren(...now.found.map(k => {
    const e = p.episodes[k], bar = element('i'), item = element('button.episode', { type: 'button', role: 'option', 'data-episode': k, 'aria-selected': String(k === now.episode), tabindex: k === now.episode ? 0 : -1 },
      element('b', {}, `env ${e.env_id}`), element('span', {}, `${shown(e.length)} steps`), element('span.return', {}, e.total === undefined ? '' : `return ${shown(e.total)}`),
      element(`span.end.${e.end.replace(/\W/g, '-')}`, {}, e.end), element('span.why', {}, e.why.join(', ')), element('span.where', { title: `keys ${shown(e.first)} to ${shown(e.last)}` }, bar));
    bar.style.left = `${100 * (e.first - p.oldest) / wide}%`;
    bar.style.width = `max(${100 * (e.last - e.first + 1) / wide}%, 3px)`;
    item.addEventListener('click', () => go(k, k === now.episode ? now.step : 0));
    return item;
  }));
  if (!now.found.length) list.append(element('p.note', {}, 'nothing found'));
  showSelected();
}

// ---- tracks: what happens along an episode ----

const SVG = 'http://www.w3.org/2000/svg';
function shape(name, attributes, ...inside) {
  const e = document.createElementNS(SVG, name);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  e.append(...inside);
  return e;
}
// Along an episode, a row is one unit wide; the box that is seen of a drawing is what the window shows of it.
const LONG = 500, WINDOW = 200;
const x = (e, i) => e.at[i] + .5;
const seen = () => Math.min(now.span, episode().rows);
const across = rows => 100 * rows / seen();   // per cent of the width
const within = at => at >= now.from && at < now.from + seen();
function line(e, values, dots_only = false) {
  const y = values.map(v => { const n = Number(number(v ?? NaN)); return v === null || v === undefined || typeof v === 'string' && v === '=' ? NaN : n; });
  const finite = y.filter(Number.isFinite), low = Math.min(...finite), high = Math.max(...finite);
  if (!finite.length) return null;
  const place = v => high > low ? 27 - 24 * (v - low) / (high - low) : 15;
  let path = '', dots = '';
  y.forEach((v, i) => {
    if (!Number.isFinite(v)) { dots += `M${x(e, i)} 0v30`; return; }
    const on = !dots_only && i && Number.isFinite(y[i - 1]) && e.at[i] === e.at[i - 1] + 1, alone = !on && (dots_only || e.at[i + 1] !== e.at[i] + 1);
    path += `${on ? 'L' : 'M'}${x(e, i)} ${place(v).toFixed(1)}${alone ? 'h.001' : ''}`;
  });
  const range = high > low ? `${shown(low)} to ${shown(high)}` : `always ${shown(low)}`;
  return { range, shapes: [shape('path', { d: path, class: dots_only ? 'line dots' : 'line' }), shape('path', { d: dots, class: 'bad' })] };
}
function addTrack(name, drawn, value, kind = '') {
  if (!drawn) return;
  const plot = element('div.plot'), svg = shape('svg', { preserveAspectRatio: 'none', 'aria-hidden': 'true' }, ...(drawn.shapes ?? []));
  const said = element('span.value');
  plot.append(...(drawn.elements ? [] : [svg]));
  const row = element(`div.track${kind}`, {}, element('span.name', { title: name }, name), said, plot, element('span.range', {}, drawn.range ?? ''));
  row.update = () => { said.textContent = value ? shown(value(now.step)) : ''; };
  row.look = () => { drawn.elements ? plot.replaceChildren(...drawn.elements()) : svg.setAttribute('viewBox', `${now.from} 0 ${seen()} 30`); };
  if (!drawn.elements) plot.addEventListener('pointerdown', event => {
    const move = ev => { const box = plot.getBoundingClientRect(); go(now.episode, nearest((ev.clientX - box.left) / box.width)); };
    move(event);
    plot.setPointerCapture?.(event.pointerId);
    plot.addEventListener('pointermove', move);
    plot.addEventListener('pointerup', () => plot.removeEventListener('pointermove', move), { once: true });
  });
  tracks.append(row);
}
function nearest(share) {
  const e = episode(), want = now.from + share * seen() - .5;
  let best = 0;
  e.at.forEach((a, i) => { if (Math.abs(a - want) < Math.abs(e.at[best] - want)) best = i; });
  return best;
}
function spansOf(e) {
  if (!e.spans?.first.length) return null;
  const rows = [], burn = part().burn_in ?? 0, shapes = [];
  e.spans.first.forEach((first, k) => {
    let lane = rows.findIndex(end => end <= first);
    if (lane < 0) lane = rows.push(0) - 1;
    rows[lane] = first + e.spans.length[k];
    if (lane > 3) return;
    const box = (from, long, kind) => shape('rect', { x: from + .1, y: 1 + 7.4 * lane, width: Math.max(long - .2, .1), height: 6, class: kind });
    shapes.push(box(first, e.spans.length[k], 'span'), box(first, Math.min(burn, e.spans.length[k]), 'burn'));
  });
  return { shapes, range: burn ? `first ${burn} steps: burn-in` : '' };
}
function film(e, name) {   // frames at even distances, of what the window shows
  const there = e.at.map((_, i) => i).filter(i => pictureAt(e, name, i));
  if (!there.length) return null;
  const most = innerWidth < 640 ? 5 : 10;
  return { range: `pictures of ${shown(there.length)} steps`, elements: () => {
    const inside = there.filter(i => within(e.at[i])), many = Math.min(inside.length, most);
    const some = new Set([...Array(many).keys()].map(k => inside[Math.round(k * (inside.length - 1) / Math.max(many - 1, 1))]));
    return [...some].map(i => {
      const b = button('', `step ${e.at[i] + 1}`, () => go(now.episode, i));
      b.append(frame(pictureAt(e, name, i).at(-1)), element('small', {}, shown(e.at[i] + 1)));
      return b;
    });
  } };
}
function drawTracks() {
  const e = episode(), scalar = c => c.kind === 'number' || c.kind === 'flag';
  tracks.replaceChildren(element('div.overlay', {}, element('div.matches'), element('div.cursor')));
  const plain = (c, j) => e.at.map((_, i) => { const v = at(e, c.name, i); return j === undefined ? v : v?.[j]; });
  const several = (c, most) => c.kind === 'numbers' ? [...Array(Math.min(c.shape.reduce((a, b) => a * b, 1), most)).keys()].map(j => [`${c.name}[${j}]`, j]) : [[c.name, undefined]];
  const addColumn = (c, most) => several(c, most).forEach(([name, j]) => addTrack(name, line(e, plain(c, j), isOf('action')(c) && c.dtype.includes('int')), i => { const v = at(e, c.name, i); return j === undefined ? v : v?.[j]; }));
  for (const c of stateParts().filter(c => c.kind === 'pictures')) addTrack(c.name, film(e, c.name), null, '.film');
  for (const c of columnsLike(c => c.name === 'reward')) addColumn(c, 1);
  for (const c of columnsLike(isOf('action'))) if (c.kind !== 'pictures' && c.kind !== 'text') addColumn(c, 4);
  const changing = [], constant = [];   // what never changes takes no line
  for (const c of stateParts()) if (scalar(c) || c.kind === 'numbers') for (const [name, j] of several(c, 64)) {
    const values = plain(c, j), short = name.replace(/^state\.(?=.)/, '');
    (e.key.length > 1 && values.every(v => v === values[0]) ? constant : changing).push([short, values]);
  }
  for (const [name, values] of changing.slice(0, 16)) addTrack(name, line(e, values), i => values[i]);
  const left = changing.slice(16).map(([name]) => name);
  notes.textContent = [constant.length ? `Always the same: ${constant.slice(0, 8).map(([name, v]) => `${name} = ${shown(v[0])}`).join(', ')}${constant.length > 8 ? ` and ${constant.length - 8} more` : ''}.` : '',
    left.length ? `Not drawn: ${left.length} more numbers that change; they are in the table.` : ''].join(' ');
  for (const [name, label] of [['priority', 'priority'], ['chance', 'chance, × uniform'], ['drawn', 'times drawn']]) if (e[name]) addTrack(label, line(e, e[name]), i => e[name][i]);
  addTrack(part().unit, spansOf(e));
  const usual = ['reward', 'step_n', 'episode_n', 'total_reward', 'terminated', 'truncated'];
  for (const c of columnsLike(c => scalar(c) && !usual.includes(c.name) && !['state', 'next_state', 'action'].some(r => isOf(r)(c)) && e.columns[c.name])) addTrack(c.name, line(e, e.columns[c.name]), i => e.columns[c.name][i]);
  const odd = e.at.map((_, i) => oddity(e, i).length > 0);
  if (odd.some(Boolean)) addTrack('odd steps', { range: `${shown(odd.filter(Boolean).length)} of ${shown(odd.length)}`, shapes: [shape('path', { class: 'bad', d: odd.map((o, i) => o ? `M${x(e, i)} 0v30` : '').join('') })] });
  look();
}
function drawMatches() {
  const box = tracks.querySelector('.matches'), e = episode();
  if (!box || !e) return;
  const there = now.matches.filter(([k, i]) => k === now.episode && within(e.at[i]));
  box.replaceChildren(...there.slice(0, 300).map(([, i]) => { const m = element('i'); m.style.left = `${across(x(e, i) - now.from)}%`; return m; }));
}
function look() {   // move the window to the current step, if that has left it, or comes close to its end
  const e = episode(), here = e.at[now.step], margin = seen() / 10, end = Math.max(e.rows - seen(), 0);
  if (here < now.from + margin || here > now.from + seen() - margin) now.from = Math.round(here - seen() / 2);
  now.from = Math.min(Math.max(now.from, 0), end);
  for (const t of tracks.children) t.look?.();
  windowed.textContent = `steps ${shown(now.from + 1)} to ${shown(now.from + seen())} of ${shown(e.rows)}`;
  zooms.hidden = e.rows <= 40;
  drawMatches();
}
function zoom(by) {
  const e = episode();
  now.span = Math.min(Math.max(Math.round(seen() * by), 20), e.rows);
  now.from = Math.round(e.at[now.step] - now.span / 2);
  if (now.span === e.rows) now.span = Infinity;   // of any episode, all
  look();
  drawCursor();
}
function drawCursor() {   // a row, or, of rows of several steps, those
  const e = episode(), cursor = tracks.querySelector('.cursor'), n = Math.min(Number(at(e, 'n', now.step) ?? 1), e.rows - e.at[now.step]);
  cursor.classList.toggle('several', n > 1);
  cursor.style.left = `${across(n > 1 ? e.at[now.step] - now.from : x(e, now.step) - now.from)}%`;
  cursor.style.width = n > 1 ? `${across(n)}%` : `clamp(3px, ${across(1)}%, 12px)`;
}

// ---- the panel: one step ----

const frame = k => element('img.frame', { src: `data:image/png;base64,${part().frames[k]}`, alt: '' });
function keyLink(key, text) {
  if (key < 0) return element('span', {}, text ?? '–');
  const a = element('a', { href: `#key=${key}`, 'data-key': key }, text ?? shown(key));
  return a;
}
function drawPanel() {
  const e = episode(), i = now.step, p = part(), odd = oddity(e, i), fact = (name, ...value) => element('div.fact', { title: data.words[name] }, element('span', {}, name), element('b', {}, ...value));
  const flags = columnsLike(c => c.kind === 'flag').filter(c => at(e, c.name, i)).map(c => element(`span.chip.${['terminated', 'truncated'].includes(c.name) ? c.name : 'other'}`, {}, c.name));
  const facts = [fact('key', shown(e.key[i])), fact('step', `${shown(at(e, 'step_n', i) ?? e.at[i] + 1)} of ${shown(e.length)}`)];
  for (const c of p.columns) if (!['state', 'next_state'].some(r => isOf(r)(c)) && !['flag', 'pictures'].includes(c.kind) && !['env_id', 'step_n', 'episode_n'].includes(c.name) && e.columns[c.name]) facts.push(fact(c.name, shown(at(e, c.name, i))));
  if (e.drawn) facts.push(fact('drawn', e.drawn[i] === 1 ? 'once' : e.drawn[i] ? `${shown(e.drawn[i])} times` : 'never'));
  if (e.chance) facts.push(fact('chance', e.chance[i] === null ? '–' : `${shown(e.chance[i])} × uniform`));
  if (e.priority) facts.push(fact('priority', shown(e.priority[i])));
  if (e.weight) facts.push(fact('weight', shown(e.weight[i])));
  facts.push(fact('age', `${shown(p.inserted - e.key[i])} rows`));
  const n = at(e, 'n', i);
  if (n > 1) facts.splice(2, 0, fact('spans', `${n} steps, to next_state`));
  const parts = [element('div.facts', {}, ...facts, element('div.chips', {}, ...flags, ...odd.map(o => element('span.chip.odd', {}, o)))), neighbours(e, i)];
  const numbers = [];
  for (const c of stateParts()) c.kind === 'pictures' ? parts.push(pictures(e, c, i)) : numbers.push(...numberRows(e, c, i));
  if (numbers.length) parts.push(element('div.scrolls.numbers', {}, element('table', {}, element('thead', {}, element('tr', {}, element('th'), ...['state', 'next_state', 'change', 'of usual'].map(h => element('th.number', { scope: 'col' }, h)), element('th.scale', { scope: 'col', title: 'bars end at three times the usual change: the median of the changes in this page that are not 0' }, 'up to ±3 ×'))), element('tbody', {}, ...numbers))));
  parts.push(...sequences(e, i), ...hindsight(e, i));
  panel.replaceChildren(...parts);
}
function neighbours(e, i) {   // what was done in the rows before and after
  const told = columnsLike(c => isOf('action')(c) && c.kind !== 'pictures' || c.name === 'reward');
  const flags = j => ['terminated', 'truncated'].filter(n => at(e, n, j) === true).join(', ');
  const row = (name, j, key) => {
    const there = j in e.key && e.key[j] === key, cells = there ? told.map(c => shown(at(e, c.name, j))) : told.map(() => '–');
    return element(j === i ? 'tr.current' : 'tr', {}, element('th', { scope: 'row' }, name), element('td.number', {}, j === i ? shown(key) : keyLink(key)), ...cells.map(v => element('td.number', {}, v)), element('td', {}, there ? flags(j) : key < 0 ? 'none' : 'not in this page'));
  };
  return element('div.scrolls.neighbours', {}, element('table', {}, element('thead', {}, element('tr', {}, element('th'), ...['key', ...told.map(c => c.name)].map(h => element('th.number', { scope: 'col' }, h)), element('th'))),
    element('tbody', {}, row('row before', i - 1, e.before[i]), row('this row', i, e.key[i]), row('row after', i + 1, e.after[i]))));
}
function pictures(e, c, i) {
  const strip = (name, label) => {
    const found = pictureAt(e, name, i);
    return element('figure', {}, element('figcaption', {}, label), found ? element('div.strip', {}, ...found.map(frame)) : element('p.note', {}, nearestPicture(e, name, i)));
  };
  return element('div.pictures', {}, strip(c.name, c.name), e.pictures['next_' + c.name] ? strip('next_' + c.name, 'next_' + c.name) : null);
}
function nearestPicture(e, name, i) {
  const there = e.at.map((_, j) => j).filter(j => pictureAt(e, name, j));
  if (!there.length) return 'no pictures of this episode are in the page';
  const j = there.reduce((a, b) => Math.abs(b - i) < Math.abs(a - i) ? b : a);
  return element('span', {}, 'not among the pictures that this page holds; the nearest: ', keyLink(e.key[j], `step ${e.at[j] + 1}`));
}
const differences = (a, b) => a.map((v, j) => Number(number(b[j] ?? NaN)) - Number(number(v)));
const asList = v => Array.isArray(v) ? v : v === undefined ? [] : [v];
// How much each number of a column changes in a step, if it changes: the median over the steps in this page.
function usualChanges(name) {
  const kept = part().usual ??= {};
  if (kept[name]) return kept[name];
  const sizes = [];
  for (const e of part().episodes) e.key.forEach((_, i) => differences(asList(at(e, name, i)), asList(at(e, 'next_' + name, i))).forEach((d, j) => { if (d && Number.isFinite(d)) (sizes[j] ??= []).push(Math.abs(d)); }));
  return kept[name] = Array.from(sizes, found => found?.sort((a, b) => a - b)[found.length >> 1]);
}
function numberRows(e, c, i) {
  const a = asList(at(e, c.name, i)), b = asList(at(e, 'next_' + c.name, i));
  const change = differences(a, b), usual = usualChanges(c.name);
  const rows = a.map((v, j) => {
    const bar = element('i'), d = change[j];
    const times = Math.abs(d) / usual[j];   // not a number where none is usual, or nothing changes
    if (Number.isFinite(times)) { bar.style.width = `${50 * Math.min(times, 3) / 3}%`; bar.style[d < 0 ? 'right' : 'left'] = '50%'; bar.className = d < 0 ? 'down' : 'up'; }
    return element('tr', {}, element('th', { scope: 'row' }, Array.isArray(at(e, c.name, i)) ? `${c.name.replace(/^state\.?/, '')}[${j}]` : c.name), element('td.number', {}, shown(v)), element('td.number', {}, shown(b[j])),
      element('td.number', {}, Number.isFinite(d) ? (d > 0 ? '+' : '') + shown(+d.toPrecision(4)) : '–'), element('td.number', {}, Number.isFinite(times) ? `${shown(+times.toPrecision(2))} ×` : '–'), element('td.change', {}, bar));
  });
  const all = c.shape.reduce((x, y) => x * y, 1);
  if (all > a.length && a.length > 1) rows.push(element('tr', {}, element('td.note', { colspan: 6 }, `the first ${a.length} of ${shown(all)} numbers`)));
  return rows;
}
function sequences(e, i) {
  if (!e.spans) return [];
  const here = e.spans.first.map((f, k) => k).filter(k => e.spans.first[k] <= e.at[i] && e.at[i] < e.spans.first[k] + e.spans.length[k]);
  if (!here.length) return [element('p.note', {}, 'in no sequence that can be drawn')];
  return [element('p.note', {}, `in ${here.length} of the sequences that can be drawn: `, ...here.flatMap(k => {
    const from = e.spans.first[k], burn = e.at[i] - from < (part().burn_in ?? 0), i0 = e.at.indexOf(from);
    const told = ['chance', 'priority', 'weight'].filter(n => e.spans[n]).map(n => `${n} ${shown(e.spans[n][k])}${n === 'chance' ? ' × uniform' : ''}`);
    return [element('span.chip', {}, i0 >= 0 ? keyLink(e.key[i0], `steps ${from + 1} to ${from + e.spans.length[k]}`) : `steps ${from + 1} to ${from + e.spans.length[k]}`, burn ? ', here burn-in' : '', told.length ? `, ${told.join(', ')}` : ''), ' '];
  }))];
}
function hindsight(e, i) {
  const m = e.more;
  if (!m.goal) return [];
  const row = (name, ...cells) => element('tr', {}, element('th', { scope: 'row' }, name), ...cells.map(v => element('td', {}, v instanceof Node ? v : shown(v))));
  return [element('h3', {}, 'With a goal in hindsight'), element('div.scrolls', {}, element('table', {}, element('thead', {}, element('tr', {}, ...['', 'as it was', 'as it may be drawn'].map(h => element('th', { scope: 'col' }, h)))), element('tbody', {},
    row('desired goal', at(e, 'state.desired_goal', i), m.goal[i]), row('goal of row', keyLink(-1, '–'), keyLink(m.goal_key[i])), row('reward', at(e, 'reward', i), m.goal_reward?.[i]),
    m.goal_terminated ? row('terminated', at(e, 'terminated', i), m.goal_terminated[i]) : null))), element('p.note', {}, `A share of ${shown(part().share)} of the rows in a batch gets such a goal, another one each time; this one was drawn for this page.`)];
}

// ---- going somewhere ----

function go(k, i) {
  const p = part();
  if (!p.episodes.length) return;
  now.episode = Math.min(Math.max(k, 0), p.episodes.length - 1);
  const e = episode();
  now.step = Math.min(Math.max(i, 0), e.key.length - 1);
  if (now.shown !== e) {
    now.shown = e;
    title.replaceChildren(`Environment ${e.env_id}, keys ${shown(e.first)} to ${shown(e.last)}`, element('span.note', {}, ` ${shown(e.length)} steps` + (e.total === undefined ? '' : `, return ${shown(e.total)}`) + `, ${e.end}` +
      (e.whole === false ? '; its first rows are overwritten' : '') + (e.key.length < e.rows ? `; ${shown(e.key.length)} of its ${shown(e.rows)} rows are in this page` : '') + `. Chosen: ${e.why.join(', ')}.`));
    now.from = 0;
    drawTracks();
    slider.max = e.key.length - 1;
    showSelected();
    document.querySelectorAll('.ring .chosen').forEach(r => r.classList.toggle('here', Number(r.closest('.ring').dataset.part) === now.part && Number(r.dataset.number) === e.number));
  }
  slider.value = now.step;
  slider.setAttribute('aria-valuetext', `step ${shown(e.at[now.step] + 1)} of ${shown(e.rows)}, key ${shown(e.key[now.step])}`);
  const margin = seen() / 10;
  if (seen() < e.rows && !(e.at[now.step] >= now.from + margin && e.at[now.step] <= now.from + seen() - margin)) look();
  drawCursor();
  for (const t of tracks.children) t.update?.();
  drawPanel();
  try { history.replaceState(null, '', `#${data.parts.length > 1 ? `part=${now.part}&` : ''}key=${e.key[now.step]}`); } catch { /* in a frame */ }
}
function showSelected() {   // in the list, which scrolls to it
  for (const b of list.querySelectorAll('.episode')) {
    const on = Number(b.dataset.episode) === now.episode;
    b.setAttribute('aria-selected', on);
    b.tabIndex = on ? 0 : -1;
    if (on && (b.offsetTop < list.scrollTop || b.offsetTop + b.offsetHeight > list.scrollTop + list.clientHeight)) list.scrollTop = b.offsetTop - (list.clientHeight - b.offsetHeight) / 2;
  }
}
function nextEpisode(by) {
  const k = now.found.indexOf(now.episode);
  if (now.found.length) go(now.found[Math.min(Math.max(k + by, 0), now.found.length - 1)], 0);
}
function nextMatch(by) {
  const m = now.matches;
  if (!m.length) return;
  const k = m.findIndex(([a, b]) => a === now.episode && b === now.step);
  goClose(...m[(k + by + m.length) % m.length]);
}
function playing(on) {
  clearInterval(now.timer);
  now.timer = on ? setInterval(() => { now.step < episode().key.length - 1 ? go(now.episode, now.step + 1) : playing(false); }, 120) : null;
  play.textContent = on ? '⏸' : '▶';
}

const KEYS = { __proto__: null, ArrowLeft: () => go(now.episode, now.step - 1), ArrowRight: () => go(now.episode, now.step + 1), ArrowUp: () => nextEpisode(-1), ArrowDown: () => nextEpisode(1), k: () => nextEpisode(-1), j: () => nextEpisode(1),
  Home: () => go(now.episode, 0), End: () => go(now.episode, Infinity), PageUp: () => go(now.episode, now.step - 10), PageDown: () => go(now.episode, now.step + 10),
  '+': () => zoom(.5), '-': () => zoom(2), 0: () => zoom(Infinity), n: () => nextMatch(1), N: () => nextMatch(-1), ' ': () => playing(!now.timer), '/': () => { input.focus(); input.select(); }, '?': () => { help.open = !help.open; } };
document.addEventListener('keydown', event => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.target === input) {
    if (event.key === 'Escape') { if (input.value) { input.value = ''; search(''); } else input.blur(); event.preventDefault(); }
    if (event.key === 'Enter') { input.blur(); event.preventDefault(); }
    return;
  }
  if (event.key === ' ' && event.target instanceof HTMLButtonElement && event.target !== play && !event.target.matches('.episode')) return;   // it presses them
  if (!KEYS[event.key] || event.target.matches?.('summary, select') && event.key === ' ') return;
  event.preventDefault();
  KEYS[event.key]();
});
let waiting = null;
input.addEventListener('input', () => { clearTimeout(waiting); waiting = setTimeout(() => search(input.value), 80); });
slider.addEventListener('input', () => go(now.episode, Number(slider.value)));
const openOther = k => { if (k !== now.part) { now.part = k; openPart(); } };
for (const text of document.querySelectorAll('[data-key]')) {   // without scripts they are texts
  const link = keyLink(Number(text.dataset.key), text.textContent);
  link.dataset.part = text.dataset.part;
  text.replaceChildren(link);
  text.removeAttribute('data-key');
}
document.addEventListener('click', event => {
  const link = event.target.closest?.('a[data-key]');
  if (!link) return;
  event.preventDefault();
  openOther(Number(link.dataset.part ?? now.part));
  if (goToKey(Number(link.dataset.key)) && !home.contains(link)) home.scrollIntoView();
});
for (const ring of document.querySelectorAll('.ring')) ring.querySelector('.episodes-of').addEventListener('click', event => {
  const said = ring.querySelector('.said'), k = Number(ring.dataset.part), p = data.parts[k], chosen = event.target.closest('.chosen');
  said.textContent = '';
  if (chosen) { openOther(k); goToKey(p.episodes.find(e => e.number === Number(chosen.dataset.number)).key[0]); return; }
  const box = ring.querySelector('.episodes-of').getBoundingClientRect();
  const env = p.environments[Math.floor((event.clientY - box.top) / box.height * p.environments.length)], key = Math.floor(p.oldest + (event.clientX - box.left) / box.width * (p.inserted - p.oldest));
  if (event.target.closest('.others')) said.textContent = `The episode of environment ${env} around key ${shown(key)} is in the memory, but not in this page, which has ${p.episodes.length} of ${shown(p.of)} episodes.`;
});
const asked = new URLSearchParams(location.hash.slice(1));
now.part = Math.min(Number(asked.get('part') ?? 0) || 0, data.parts.length - 1);
openPart();
if (asked.has('key')) goToKey(Number(asked.get('key')));
else if (part().opened.length) goToKey(part().opened[0]);   // what is unusual
})();
