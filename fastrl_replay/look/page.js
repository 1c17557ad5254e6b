// What all pages share: a class that says that scripts run, and the switch between light and dark.
'use strict';
const root = document.documentElement;
root.classList.add('scripts');

const remembered = {   // a frame in a notebook may not keep anything
  get theme() { try { return localStorage.getItem('theme'); } catch { return null; } },
  set theme(value) { try { localStorage.setItem('theme', value); } catch { /* forgotten when the page is closed */ } },
};
if (['light', 'dark'].includes(remembered.theme)) root.dataset.theme = remembered.theme;

const isDark = () => (root.dataset.theme ?? (matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light')) === 'dark';
const themeSwitch = document.createElement('button');
themeSwitch.className = 'theme';
themeSwitch.type = 'button';
const nameSwitch = () => {
  themeSwitch.textContent = isDark() ? '☀' : '☾';
  themeSwitch.setAttribute('aria-label', isDark() ? 'light colours' : 'dark colours');
  themeSwitch.title = themeSwitch.getAttribute('aria-label');
};
themeSwitch.addEventListener('click', () => {
  remembered.theme = root.dataset.theme = isDark() ? 'light' : 'dark';
  nameSwitch();
  document.dispatchEvent(new Event('theme'));   // for what is drawn on a canvas
});
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => { nameSwitch(); document.dispatchEvent(new Event('theme')); });
nameSwitch();
document.querySelector('header.top')?.append(themeSwitch);

// The data that came with the page; null: none.
const pageData = () => JSON.parse(document.getElementById('data')?.textContent ?? 'null');

// An element: its tag and classes ('p.note'), its attributes, what is in it (texts are texts, never markup).
function element(name, attributes = {}, ...inside) {
  const [kind, ...classes] = name.split('.');
  const e = document.createElement(kind);
  if (classes.length) e.className = classes.join(' ');
  for (const [k, v] of Object.entries(attributes)) if (v !== null && v !== undefined && v !== false) e.setAttribute(k, v === true ? '' : v);
  e.append(...inside.flat().filter(x => x !== null && x !== undefined));
  return e;
}
