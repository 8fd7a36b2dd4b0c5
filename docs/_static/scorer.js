// Scores of the search, as in Sphinx's searchtools.js, but for headings that contain the whole query:
// these come before pages with the words in different headings.
var Scorer = {
  score: (result) => result[4] + (result[6] === "title" ? 20 : 0),
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
