// A picture has the width of its page, and on a click the size in which it was drawn.
addEventListener('click', ({target}) => target.matches?.('div.cell_output img') && target.classList.toggle('large'));

// The edge of a box fades where it can be scrolled.
const boxes = 'article pre, div.cell_output, article .table-wrapper, div.math';
const fade = box => box.classList.toggle('more', box.scrollLeft + box.clientWidth < box.scrollWidth - 2);
const fadeAll = () => document.querySelectorAll(boxes).forEach(fade);
addEventListener('load', fadeAll);
addEventListener('resize', fadeAll);
addEventListener('scroll', ({target}) => target.matches?.(boxes) && fade(target), true);

addEventListener('DOMContentLoaded', () => {
  // The sidebar shows the current page.
  const sidebar = document.querySelector('.sidebar-scroll');
  const here = sidebar?.querySelector('.current-page');
  if (here) sidebar.scrollTop = here.offsetTop - sidebar.clientHeight / 2;
});

// Browsers refuse to fetch the pages of file://, from which excerpts come; these have no code.
DOCUMENTATION_OPTIONS.SHOW_SEARCH_SUMMARY = location.protocol != 'file:';
addEventListener('DOMContentLoaded', () => {
  if (typeof Search == 'undefined') return;
  const text = Search.htmlToText;
  Search.htmlToText = (html, anchor) => text(html.replace(/<pre[^]*?<\/pre>/g, ''), anchor);
});
