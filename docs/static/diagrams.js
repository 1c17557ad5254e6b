// Draws the mermaid fences of a page in the colours of the page, and again when the reader changes between light and dark.
const here = document.currentScript.src;
const dark = () => document.body.dataset.theme == 'dark' ||
  document.body.dataset.theme != 'light' && matchMedia('(prefers-color-scheme: dark)').matches;

async function draw(diagrams) {
  mermaid.initialize({startOnLoad: false, theme: dark() ? 'dark' : 'neutral', fontFamily: 'sans-serif', flowchart: {wrappingWidth: 300, useMaxWidth: false}});
  for (const [place, text] of diagrams) {
    place.innerHTML = innerWidth < 740 ? text.replace(/^(\s*(?:flowchart|graph)) LR/, '$1 TB') : text;   // a phone is higher than wide
    delete place.dataset.processed;
  }
  await mermaid.run({nodes: [...diagrams.keys()]});
}

addEventListener('DOMContentLoaded', () => {
  const diagrams = new Map();
  for (const fence of document.querySelectorAll('.highlight-mermaid')) {
    const place = document.createElement('div');
    place.className = 'mermaid';
    diagrams.set(place, fence.querySelector('pre').innerHTML.replace(/<\/?span[^>]*>/g, ''));
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
