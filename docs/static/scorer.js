// How a search orders what it finds: pages, and the API for a name of it.
var Scorer = {
  score: ([page, title, anchor, descr, score, file, kind]) =>
    score + (kind == 'object' ? 0 : page.startsWith('reference/') ? -1 : !page.includes('/') || page.startsWith('tutorials/') ? 3 : page.startsWith('replay/') ? 2 : 0),
  objNameMatch: 30, objPartialMatch: 1, objPrio: {0: 3, 1: 0, 2: -5}, objPrioDefault: 0,
  title: 15, partialTitle: 7, term: 5, partialTerm: 2};
