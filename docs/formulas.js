// MathJax without a browser, run by formulas.py: svg(formula, display) returns a formula as an SVG.
const {adaptors, handlers, input, mathjax, output} = MathJax._;
const adaptor = adaptors.liteAdaptor.liteAdaptor();
handlers.html_ts.RegisterHTMLHandler(adaptor);
const page = mathjax.mathjax.document('', {
  InputJax: new input.tex_ts.TeX({packages: ['base', 'ams']}),
  OutputJax: new output.svg_ts.SVG({font: new output.svg.fonts.tex_ts.TeXFont(), fontCache: 'none'}),
});
function svg(formula, display) {
  return adaptor.innerHTML(page.convert(formula, {display}));
}
