"""The Sphinx extension that turns the notebooks of nbs/ into pages, without running them.

A cell that begins with `#| api` and lists public names becomes their API: links and the index lead
there. In the lessons that export modules, an exported cell becomes the API of its names, with its
code folded below; one without such names is folded if it is long. Compiled kernels stay visible.
`#| fold` and `#| show` at the top of a cell decide otherwise; `#| hide` leaves out the cell,
`#| hide_code` its code; with `#| frames` its pictures keep their colors in the dark. Names in
backticks link to their API."""

import ast
import inspect
import json
import re
from dataclasses import is_dataclass
from functools import cache
from html import escape
from pathlib import Path

import fastrl_replay.all as everything
import quickjs
from docutils import nodes
from fastcore.docments import docments
from fastrl_replay.learning import settings
from fastrl_replay.pipe import Pipe
from fastrl_replay.steps import errors
from make import mathjax
from readme import split_directives
from reference import members
from sphinx import addnodes
from sphinx.builders.html import StandaloneHTMLBuilder
from sphinx.util.nodes import make_refnode

LONG = 12  # lines of exported code without a public name that are folded


# ---- cells ----


def cards(source):
    """Return the API of the names that an `api` cell lists, as markdown.

    Errors that are not public have their index entry in the lesson."""
    parts = []
    for name in re.findall(r'\w+', source):
        module = next(m for m in (everything, errors, settings) if hasattr(m, name))
        obj = getattr(module, name)
        lesson = obj.__module__.removeprefix('fastrl_replay.').replace('.', '/')
        links = f'[view source](/{lesson}.ipynb)'
        if hasattr(obj, 'stage_name'):
            links = f'In a chain: `.{obj.stage_name}(…)` · {links}'
        card = f'.. autofunction:: {obj.__module__}.{name}'
        if inspect.isclass(obj):
            shown = ', '.join(members(obj)) or '__init__'
            card = f'.. autoclass:: {obj.__module__}.{name}\n   :members: {shown}'
        if module is not everything:
            card += '\n   :no-index:'
        parts.append(f'{small(links)}```{{eval-rst}}\n{card}\n```')
    return '\n'.join(parts)


def api_of(source, module):
    """Return the autodoc directives of the functions and classes of an exported cell.

    Those of public names are not in the index, which has the cards of the reference."""
    lines = []
    for node in ast.parse(source).body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)) or node.name[0] == '_':
            continue
        name = node.name
        decorators = ' '.join(map(ast.unparse, node.decorator_list))
        if re.match(r'patch\b', decorators):
            name = ast.unparse(node.args.args[0].annotation)
            kind = 'property' if 'as_prop' in decorators else 'method'
            lines += ['', f'.. auto{kind}:: {module}.{name}.{node.name}']
        elif isinstance(node, ast.FunctionDef):
            lines += ['', f'.. autofunction:: {module}.{name}']
        else:
            methods = [f.name for f in node.body if isinstance(f, ast.FunctionDef)]
            public = ', '.join(method for method in methods if method[0] != '_')
            lines += ['', f'.. autoclass:: {module}.{name}']
            lines += [f'   :members: {public}'] if public else []
        if name in everything.__all__:
            lines.append('   :no-index:')
    return '\n'.join(lines)


def cells_of(cell, module):
    "Return the cells that a notebook's cell becomes: none, itself, or its API and its folded code."
    names, source = split_directives(cell['source'])
    if 'hide' in names or not source.strip():
        return []
    if 'api' in names:
        return [markdown(cell, cards(source))]
    cell = dict(cell, source=source)
    if {'hide_code', 'alt', 'frames'} & {*names}:
        image = dict(alt=names.get('alt', ''))
        if 'frames' in names:
            image['classes'] = 'frames'
        tags = ['remove-input'] if 'hide_code' in names else []
        cell['metadata'] = dict(tags=tags, mystnb=dict(image=image))
    if not {'export', 'exporti'} & {*names}:
        return [folded(cell, 'The test') if 'fold' in names else cell]
    if all(isinstance(node, (ast.Import, ast.ImportFrom)) for node in ast.parse(source).body):
        return []
    api = api_of(source, module)
    kernel = re.search(r'^@njit', source, re.M)
    if (
        'fold' in names
        or 'show' not in names
        and not kernel
        and (api or source.count('\n') >= LONG)
    ):
        cell = folded(cell, 'The code')
    if not api:
        return [cell]
    return [markdown(cell, f'```{{eval-rst}}\n{api}\n```'), cell]


def markdown(cell, text):
    return dict(cell_type='markdown', id=f'api-{cell["id"]}', metadata={}, source=text)


def folded(cell, prompt):
    prompts = dict(code_prompt_show=prompt, code_prompt_hide=prompt)
    return dict(cell, metadata=dict(tags=['hide-input'], mystnb=prompts))


# ---- pages ----


def small(links):
    return f'```{{container}} notebook-links\n{links}\n```\n'


def contents(groups):
    "Return the sidebar: its parts and their pages."
    return '\n'.join(
        '\n```{toctree}\n:hidden:\n'
        + f':caption: {caption}\n\n'
        + '\n'.join(pages.split())
        + '\n```'
        for caption, pages in groups.items()
    )


def links_above(repository, page):
    "Return links to a page's notebook: the file, and Colab if the repository has an address."
    links = f'{{download}}`download this notebook <{Path(page).name}.ipynb>`'
    if repository:
        colab = repository.replace('github.com', 'colab.research.google.com/github')
        links += f' · [open in Colab]({colab}/blob/main/nbs/{page}.ipynb)'
    return f'\n\n{small(links)}'


def read_page(app, page, content):
    "Sphinx's `source-read`: `content[0]` is the text of a page, a notebook or markdown."
    words = [f'   ! single: {w}' for w in app.config.words.get(page, '').split('; ') if w]
    index = '\n'.join(['\n', '```{eval-rst}', '.. index::', *words, '```', '']) if words else ''
    if not content[0].startswith('{'):
        content[0] = re.sub(r'(?m)^(# .*)$', lambda m: m[1] + index, content[0], count=1)
        return
    notebook = json.loads(content[0])
    for cell in notebook['cells']:
        cell['source'] = ''.join(cell['source'])
        if cell['cell_type'] == 'markdown':  # README.md, CHANGELOG.md: those have pages
            cell['source'] = re.sub(
                r'\]\((?:\.\./)*([A-Z]+\.md)\)', lambda m: f'](/{m[1].lower()})', cell['source']
            )
    code = '\n'.join(cell['source'] for cell in notebook['cells'])
    module = re.search(r'^#\| *default_exp +(\S+)', code, re.M)
    module = f'fastrl_replay.{module[1]}' if module else ''
    cells = [new for cell in notebook['cells'] for new in cells_of(cell, module)]
    title, _, rest = cells[0]['source'].partition('\n')
    cells[0]['source'] = title + links_above(app.config.repository, page) + index + '\n' + rest
    if page == app.config.root_doc:
        cells[-1]['source'] += '\n' + contents(app.config.groups)
    notebook['metadata']['source_map'] = [*range(len(cells))]  # warnings give a cell's number
    content[0] = json.dumps(dict(notebook, cells=cells))


@cache
def typesetter():
    "Return a function that makes an SVG of a formula in TeX: MathJax, without a browser."
    engine = quickjs.Context()
    for script in mathjax(), Path(__file__).parent / 'formulas.js':
        engine.eval(script.read_text(encoding='utf-8'))
    return engine.eval('svg')


def show_formula(translator, node):
    "Write a formula into a page (for Sphinx's `add_html_math_renderer`)."
    formula = node.astext()
    tag = 'div' if isinstance(node, nodes.math_block) else 'span'
    svg = typesetter()(formula, tag == 'div').replace(
        '<svg', f'<svg aria-label="{escape(formula)}"', 1
    )
    translator.body.append(f'<{tag} class="math">{svg}</{tag}>')
    raise nodes.SkipNode


# ---- the API ----


def rst(text):
    "Return a docstring, which has markdown's backticks and no other marks, as reStructuredText."

    def plain(part):
        part = re.sub(r'([*|_])', r'\\\1', part)
        return re.sub(r'(?<![\w-])--\w[\w-]*', r'``\g<0>``', part)  # or it would become a dash

    return ''.join(f'``{p}``' if i % 2 else plain(p) for i, p in enumerate(text.split('`')))


def add_parameters(app, what, name, obj, options, lines):
    "autodoc's `autodoc-process-docstring`: add what docments say of parameters and result."
    if what == 'method' and not any(lines):
        lines[:] = (inspect.getdoc(obj) or '').splitlines()  # of what it overrides
    lines[:] = [rst(line) for line in lines] + ['']
    plain = inspect.isclass(obj) and not is_dataclass(obj)  # a dataclass documents its fields
    function = inspect.unwrap(obj.__init__ if plain else obj)
    try:
        # without args_kwargs a comment of `**kw` would be that of the result
        found = docments(function, full=True, args_kwargs=True)
        for base in obj.__mro__[1:] if is_dataclass(obj) else ():
            if is_dataclass(base):  # an inherited field is documented where it is defined
                fields = docments(base, full=True).items()
                found |= {k: d for k, d in fields if d.docment and not found[k].docment}
    except (TypeError, ValueError, OSError):
        return  # no signature or no source
    types = getattr(function, '__annotations__', {})  # docments would guess from a default
    for param, d in found.items():
        if d.docment is None:
            continue
        kind = types.get(param, '')
        kind = '' if kind is object else kind
        kind = getattr(kind, '__name__', kind)
        field = 'returns' if param == 'return' else f'param {param}'
        lines.append(
            f':{field}: ' + (f'``{kind}`` ' if kind else '') + rst(' '.join(d.docment.split()))
        )


def show_arguments(app, what, name, obj, options, given, returned):
    "Show the arguments of a stage, and `...` for long defaults (`autodoc-process-signature`)."
    placeholder = given in ('(*args, **kwargs)', '(*_, **__)')
    if what != 'class' or not (placeholder or issubclass(obj, Pipe)):
        return None
    init = inspect.unwrap(obj.__init__)
    if not inspect.isfunction(init):
        return '', returned
    parameters = []
    for p in [*inspect.signature(init).parameters.values()][1:]:
        plain = p.default is p.empty or isinstance(p.default, (int, float, str, tuple, type(None)))
        parameters.append(p.replace(annotation=p.empty, default=p.default if plain else ...))
    return str(inspect.Signature(parameters)).replace('Ellipsis', '...'), returned


@cache
def api_names(env):
    """Return {name: [(page, anchor)]} of what may be written in backticks.

    For example `Steps`, `Steps.cat`, `.n_step` and `memory.timeline.Timeline`. Functions of other
    pages need their module, because `start` is also a word."""
    objects = env.domains['py'].objects
    found = {}
    for full, obj in objects.items():
        method = obj.objtype in ('method', 'property', 'attribute')
        name = '.'.join(full.split('.')[-2 if method else -1 :])
        if obj.objtype == 'function' and name not in everything.__all__:
            name = f'{obj.docname} {name}'
        for n in {full, full.removeprefix('fastrl_replay.'), name}:
            found.setdefault(n, []).append((obj.docname, obj.node_id))
    for cls in vars(everything).values():
        if hasattr(cls, 'stage_name'):
            found[f'.{cls.stage_name}'] = found[cls.__name__]
    return found


def link_names(app, doctree, page):
    "Sphinx's `doctree-resolved`: literals that are names of the API become links."
    names = api_names(app.env)
    for node in list(doctree.findall(nodes.literal)):
        name = re.sub(r'\(.*\)$', '', node.astext())
        places = names.get(name, []) + names.get(f'{page} {name}', [])
        if len(places) == 1 and not isinstance(node.parent, nodes.reference):
            node.replace_self(make_refnode(app.builder, page, *places[0], node.deepcopy()))


def name_signatures(app, doctree):
    "Name cards of public names in lessons, which no index has (Sphinx's `doctree-read`)."
    for sig in doctree.findall(addnodes.desc_signature):
        if not sig['ids'] and sig.get('module'):
            sig['ids'] = [f"{sig['module']}.{sig['fullname']}"]


def add_breadcrumbs(app, page, template, context, doctree):
    "Sphinx's `html-page-context`: begin each page with the part of the site that it is in."
    if doctree and page != app.config.root_doc:
        sources = f'<a href="{context["pathto"]("sources")}">Source notebooks</a>'
        groups = (g for g, pages in app.config.groups.items() if page in pages.split())
        home = f'<a href="{context["pathto"](app.config.root_doc)}">fastrl_replay</a>'
        trail = f'{home} › {next(groups, sources)} › {context["title"]}'
        context['body'] = f'<nav class="breadcrumbs">{trail}</nav>{context["body"]}'


class Site(StandaloneHTMLBuilder):
    "Sphinx's builder; only pages of the sidebar can be searched."

    def index_page(self, page, doctree, title):
        if page in self.config.sidebar:
            super().index_page(page, doctree, title)


def setup(app):
    del type(Pipe).__dir__  # it hides members from `help`, and autodoc looks for all
    for name in 'groups', 'sidebar', 'words', 'repository':
        app.add_config_value(name, None, 'env')
    app.connect('source-read', read_page)
    app.connect('autodoc-process-docstring', add_parameters)
    app.connect('autodoc-process-signature', show_arguments)
    app.connect('doctree-resolved', link_names)
    app.connect('doctree-read', name_signatures)
    app.connect('html-page-context', add_breadcrumbs)
    app.add_builder(Site, override=True)
    app.add_html_math_renderer('svg', (show_formula, None), (show_formula, None))
    return dict(version='1', parallel_read_safe=True, parallel_write_safe=True)
