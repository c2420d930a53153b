// Order of search results with equal scores: explanations first, then the API reference and tables of results.
const BONUS = [
  ["guide/", 20],
  ["metrics/", 15],
  ["start/", 15],
  ["which_metric", 15],
  ["glossary", 10],
  ["examples/", 5],
  ["results/", -10],
  ["api/", -15],
];

Scorer = {
  // result: [page, title, anchor, description, score, file, kind]
  score: (result) => {
    const found = BONUS.find(([prefix]) => result[0].startsWith(prefix));
    return result[4] + (found ? found[1] : 0);
  },
  // The other values are the defaults of Sphinx.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
