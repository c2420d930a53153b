// Order of search results: classes and functions with the name, explanations, the API reference, and tables of results.
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
const NAMED = { "Python class": 1002, "Python function": 1001 }; // whose last name is the query
const SIMILAR = 15; // for their other matches

Scorer = {
  // result: [page, title, anchor, description, score, file, kind]
  score: ([page, , , description, score, , kind]) => {
    if (kind === "object") {
      const bonus = NAMED[description.split(",")[0]] || 0;
      return score + (bonus && score < Scorer.objNameMatch + Scorer.objPrio[1] ? SIMILAR : bonus);
    }
    const found = BONUS.find(([prefix]) => page.startsWith(prefix));
    return score + (found ? found[1] : 0);
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
