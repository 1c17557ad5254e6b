// A page that is served: its sections are asked for every two seconds, and those that have changed are replaced. What comes is markup that
// the server has escaped, and the page's policy lets no script in it run.
const news = document.getElementById('news');
const shown = new Map();   // id → markup, as it came

function put(id, markup, before) {
  let old = document.getElementById(id);
  if (shown.get(id) === markup && old) return old;
  const made = new DOMParser().parseFromString(markup, 'text/html').body.firstElementChild;
  if (!old) { before ? before.after(made) : document.querySelector('main').prepend(made); }
  else {
    const open = [...old.querySelectorAll('details[open][id]')].map(d => d.id);
    old.replaceWith(made);
    for (const d of made.querySelectorAll('details')) d.open = open.includes(d.id);
  }
  shown.set(id, markup);
  return made;
}

async function refresh() {
  if (!document.hidden) {
    try {
      const answer = await fetch('sections', {cache: 'no-store'});
      if (!answer.ok) throw new Error((await answer.text()).slice(0, 300));
      const sections = await answer.json();
      let last = null;
      for (const [id, markup] of sections) last = put(id, markup, last);
      const there = new Set(sections.map(([id]) => id));
      for (const s of document.querySelectorAll('main > section')) if (!there.has(s.id)) s.remove();
      news.textContent = `as of ${new Date().toLocaleTimeString()}`;
      news.className = '';
    } catch (e) {
      news.textContent = e instanceof TypeError ? 'the server has ended; what is shown is how it was' : `${e.message}`;
      news.className = 'lost';
    }
  }
  setTimeout(refresh, 2000);
}
refresh();
