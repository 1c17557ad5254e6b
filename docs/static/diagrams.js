// Draws the page's diagrams in the colours of the page, and again when the reader changes between light and dark.
const texts = new Map();
const dark = () => document.body.dataset.theme == 'dark' ||
  document.body.dataset.theme != 'light' && matchMedia('(prefers-color-scheme: dark)').matches;

async function draw() {
  mermaid.initialize({startOnLoad: false, theme: dark() ? 'dark' : 'neutral', fontFamily: 'inherit'});
  const diagrams = [...document.querySelectorAll('pre.mermaid')];
  for (const d of diagrams) {
    if (!texts.has(d)) texts.set(d, d.textContent);
    d.textContent = texts.get(d);
    delete d.dataset.processed;
  }
  await mermaid.run({nodes: diagrams});
}

addEventListener('load', () => {
  draw();
  new MutationObserver(draw).observe(document.body, {attributeFilter: ['data-theme']});
  matchMedia('(prefers-color-scheme: dark)').addEventListener('change', draw);
});
