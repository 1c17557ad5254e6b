// Draws the mermaid fences of a page in the colors of the page, and again when the reader changes between light and dark.
const here = document.currentScript.src;
const dark = () => document.body.dataset.theme == 'dark' ||
  document.body.dataset.theme != 'light' && matchMedia('(prefers-color-scheme: dark)').matches;

let count = 0;
async function draw(diagrams) {
  mermaid.initialize({startOnLoad: false, theme: dark() ? 'dark' : 'neutral', fontFamily: 'sans-serif', flowchart: {wrappingWidth: 300, useMaxWidth: false}});
  const rendered = async text => (await mermaid.render(`diagram-${count++}`, text)).svg;
  for (const [place, text] of diagrams) {
    let svg = await rendered(text);
    if (svg.match(/viewBox="\S+ \S+ (\S+)/)[1] > 1.15*place.clientWidth) svg = await rendered(text.replace(/^(\s*(?:flowchart|graph)) LR/, '$1 TB'));   // its letters would be too small
    place.innerHTML = svg;
    place.dataset.processed = true;
  }
}

addEventListener('DOMContentLoaded', () => {
  const diagrams = new Map();
  for (const fence of document.querySelectorAll('.highlight-mermaid')) {
    const place = document.createElement('div');
    place.className = 'mermaid';
    diagrams.set(place, fence.querySelector('pre').textContent);
    fence.replaceWith(place);
  }
  if (!diagrams.size) return;
  const script = document.createElement('script');
  script.src = new URL('mermaid.tiny.js', here);
  script.onload = () => {
    draw(diagrams);
    new MutationObserver(() => draw(diagrams)).observe(document.body, {attributeFilter: ['data-theme']});
    matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => draw(diagrams));
  };
  document.head.append(script);
});
