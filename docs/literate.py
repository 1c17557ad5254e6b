"""The Sphinx extension that turns the notebooks of nbs/ into pages while they are read: no outputs are written anew.

An exported cell becomes the API of its public names, with its code folded below; one without public
names is folded where it is long, and so is a test that shows nothing. Compiled kernels stay visible.
`#| fold` and `#| show` say otherwise for a cell; `#| hide` leaves it out, `#| hide_code` its code; with `#| frames`
its pictures keep their colours in the dark. Names in backticks link to their API."""

import ast, inspect, json, posixpath, re
from functools import cache
from pathlib import Path
from docutils import nodes
from fastcore.docments import docments
from pygments.lexers.special import TextLexer
from sphinx import addnodes
from sphinx.domains.python import PythonDomain
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.nodes import make_refnode
from readme import split_directives
from reference import signature

GROUPED = re.compile(
    r'^(- .+) <!--(\w+)-->$', re.M
)  # an entry of “What can go wrong”, and its group on the page of questions
LONG = 12  # lines of exported code without a public name that a reader needn't unfold


def public(name):
    return not name.startswith('_')


def api_of(source, module):
    "The autodoc directives for the public functions, classes and methods that an exported cell defines."
    lines = []
    for node in ast.parse(source).body:
        if not isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            continue
        patch = next(
            (p for p in map(ast.unparse, node.decorator_list) if re.match(r'patch\b', p)), ''
        )
        path = [ast.unparse(node.args.args[0].annotation), node.name] if patch else [node.name]
        if not all(map(public, path)):
            continue
        kind = (
            'class'
            if isinstance(node, ast.ClassDef)
            else 'property'
            if 'as_prop=True' in patch
            else 'method'
            if patch
            else 'function'
        )
        lines += ['', f'.. auto{kind}:: {".".join([module, *path])}']
        members = [f.name for f in node.body if isinstance(f, ast.FunctionDef) and public(f.name)]
        if kind == 'class' and members:
            lines += [f'   :members: {", ".join(members)}']
    return '\n'.join(lines)


def only_imports(source):
    return all(isinstance(n, (ast.Import, ast.ImportFrom)) for n in ast.parse(source).body)


def cells_of(cell, module):
    "The cells that one cell of a notebook becomes on its page: none, itself, or its API and its folded code."
    names, source = split_directives(cell['source'])
    if 'hide' in names or not source.strip():
        return []
    cell = dict(cell, source=source)
    if {'hide_code', 'alt', 'frames'} & {*names}:
        image = dict(
            alt=names.get('alt', ''), **(dict(classes='frames') if 'frames' in names else {})
        )
        cell['metadata'] = dict(
            tags=['remove-input'] if 'hide_code' in names else [], mystnb=dict(image=image)
        )
    exported = {'export', 'exporti'} & set(names)
    if exported and only_imports(source):
        return []
    api, long = api_of(source, module) if exported else '', source.count('\n') >= LONG
    folded = (
        api or long
        if exported
        else cell['cell_type'] == 'code' and not cell.get('outputs') and is_test(source)
    )
    if re.search(r'^@njit', source, re.M):
        folded = False  # what is fast is to be read
    if 'fold' in names or 'show' in names:
        folded = 'fold' in names
    if folded:
        cell['metadata'] = folded_as('The code' if exported else 'The test')
    if not api:
        return [cell]
    card = dict(
        cell_type='markdown',
        id=f'api-{cell["id"]}',
        metadata={},
        source=f'```{{eval-rst}}\n{api}\n```',
    )
    return [card, cell]


def is_test(source):
    "Do tests make up half of a cell or more, by lines? Two lines or fewer are read faster than unfolded."
    try:
        found = ast.parse(source).body
    except SyntaxError:
        return False  # magics

    def lines(nodes):
        return sum(n.end_lineno - n.lineno + 1 for n in nodes)

    tests = [
        n
        for n in found
        if re.match(
            r'assert\b|test_\w+\(|with expect_fail\b|for [^\n]*:\s+(assert\b|test_\w+\(|with expect_fail\b)',
            ast.unparse(n),
        )
    ]
    return lines(found) > 2 and 2 * lines(tests) >= lines(found)


def folded_as(prompt):
    return dict(tags=['hide-input'], mystnb=dict(code_prompt_show=prompt, code_prompt_hide=prompt))


def joined(cells):
    "The cells with one fold for folded cells of one kind that follow each other and show nothing."
    found = []
    for c in cells:
        if (
            found
            and not c.get('outputs')
            and not found[-1].get('outputs')
            and is_folded(c)
            and c['metadata'] == found[-1]['metadata']
        ):
            found[-1] = dict(found[-1], source=f"{found[-1]['source']}\n\n{c['source']}")
        else:
            found.append(c)
    return found


def is_folded(cell):
    return 'hide-input' in cell.get('metadata', {}).get('tags', ())


def reading_order(folder, pages):
    "The pages of modules after the pages of those that they import, and by name where that leaves a choice."
    cells = {
        p: json.loads((folder / f'{p}.ipynb').read_text(encoding='utf-8'))['cells']
        for p in pages
        if (folder / f'{p}.ipynb').exists()
    }
    code = {
        p: ['\n' + ''.join(c['source']) for c in found if c['cell_type'] == 'code']
        for p, found in cells.items()
    }
    module = {
        m[1]: p
        for p, found in code.items()
        for c in found
        if (m := re.search(r'^#\| *default_exp +(\S+)', c, re.M))
    }

    def imported(c):
        yield from re.findall(r'^import fastrl_replay\.([\w.]+)', c, re.M)
        for m, names in re.findall(r'\bfastrl_replay\.([\w.]+) import ([\w, ]*)', c):
            yield from (m, *(f'{m}.{n.strip()}' for n in names.split(',')))

    needs = {
        p: [
            module[m]
            for c in found
            if re.search(r'^#\| *export', c, re.M)
            for m in imported(c)
            if m in module
        ]
        for p, found in code.items()
    }
    done = {}

    def place(p):
        if p in done:
            return
        done[p] = None
        for q in sorted(needs.get(p, ())):
            place(q)
        done[p] = len([*filter(lambda n: n is not None, done.values())])

    for p in pages:
        place(p)
    return sorted(pages, key=done.get)


def contents(app):
    "The sidebar: its parts, and their pages in the order of their patterns."
    trees = [
        ['```{toctree}', ':hidden:', f':caption: {caption}', '', *patterns.split(), '```']
        for caption, patterns in app.config.groups.items()
    ]
    return '\n\n'.join(map('\n'.join, trees))


def links_above(config, docname):
    "Where a page's notebook can be had: beside the page, and in Colab where the repository has an address."
    colab = f'{config.repository.replace("github.com", "colab.research.google.com/github")}/blob/main/nbs/{docname}.ipynb'
    links = [
        f'{{download}}`download this notebook <{Path(docname).name}.ipynb>`',
        *([f'[open in Colab]({colab})'] if config.repository else []),
    ]
    return f'\n\n```{{container}} notebook-links\n{" · ".join(links)}\n```\n'


def relinked(text, page):
    "A text of a page with its links as they are from the top level of the notebooks."
    return re.sub(
        r'\]\(([\w./-]+\.(?:ipynb|md))',
        lambda m: '](' + posixpath.normpath(posixpath.join(posixpath.dirname(page), m[1])),
        text,
    )


def problems(app):
    "What can go wrong: list entries of all notebooks that end with a comment, by the group that it names, each with a link to its page."
    found = {}
    for page in sorted(app.env.found_docs):
        path = Path(app.srcdir) / f'{page}.ipynb'
        if not path.exists():
            continue
        cells = [
            ''.join(c['source'])
            for c in json.loads(path.read_text(encoding='utf-8'))['cells']
            if c['cell_type'] == 'markdown'
        ]
        for entry, group in GROUPED.findall('\n'.join(cells)):
            found.setdefault(group, []).append(
                f'{relinked(entry, page)} ([{cells[0].splitlines()[0][2:]}]({page}.ipynb))'
            )
    return {group: by_frequency(entries, app.config.frequent) for group, entries in found.items()}


def by_frequency(entries, frequent):
    "Entries that begin with one of these texts first, in the order of the texts; then the others as they came."
    return sorted(
        entries,
        key=lambda e: next(
            (i for i, text in enumerate(frequent) if e.startswith(f'- **{text}')), len(frequent)
        ),
    )


def read_notebook(app, docname, content):
    "Sphinx's `source-read`: `content[0]` is the text of the page `docname`, a notebook unless it is markdown."
    if '```{can-go-wrong}' in content[0] and not content[0].startswith('{'):
        found = problems(app)
        content[0] = re.sub(
            r'```\{can-go-wrong\} (\w+)\n```', lambda m: '\n'.join(found[m[1]]), content[0]
        )
    entries = [
        f'! single: {w}' for w in filter(None, app.config.words.get(docname, '').split('; '))
    ]
    index = (
        '\n'.join(['', '', '```{eval-rst}', '.. index::', *[f'   {e}' for e in entries], '```', ''])
        if entries
        else ''
    )
    if not content[0].startswith('{'):
        content[0] = re.sub(r'(?m)^(# .*)$', lambda m: m[1] + index, content[0], count=1)
        return
    nb = json.loads(content[0])
    for c in nb['cells']:
        c['source'] = re.sub(
            r'\]\((?:\.\./)*([A-Z]+)\.md\)',
            lambda m: f'](/{m[1].lower()}.md)',
            ''.join(c['source']),
        )
    exp = re.search(r'^#\| *default_exp +(\S+)', '\n'.join(c['source'] for c in nb['cells']), re.M)
    cells = joined(
        [
            new
            for c in nb['cells']
            for new in cells_of(c, f'{app.config.package}.{exp[1]}' if exp else '')
        ]
    )
    cells[0]['source'] = re.sub(
        '\n|$', lambda m: links_above(app.config, docname) + index, cells[0]['source'], count=1
    )
    if docname == app.config.root_doc:
        cells[-1]['source'] += '\n\n' + contents(app)
    nb['metadata']['source_map'] = list(range(len(cells)))  # warnings give the number of the cell
    content[0] = json.dumps(dict(nb, cells=cells))


def rst(text):
    "Docstrings and docments have markdown's backticks and no other marks; a dash mustn't become of `--`."

    def plain(part):
        return re.sub(
            r'((?<![\w-])--\w[\w-]*)|([*|_])',
            lambda m: f'``{m[1]}``' if m[1] else f'\\{m[2]}',
            part,
        )

    return ''.join(f'``{p}``' if i % 2 else plain(p) for i, p in enumerate(text.split('`')))


def type_name(anno):
    return (
        anno
        if isinstance(anno, str)
        else getattr(anno, '__name__', None) or inspect.formatannotation(anno)
    )


def add_parameters(app, what, name, obj, options, lines):
    "autodoc's `autodoc-process-docstring`: what docments say of parameters and result, below the docstring."
    if what == 'method' and not any(lines):
        lines[:] = (inspect.getdoc(obj) or '').splitlines()  # what it overrides says it
    lines[:] = [rst(l) for l in lines] + ['']
    fn = inspect.unwrap(obj.__init__ if inspect.isclass(obj) else obj)
    try:
        found = docments(
            fn, full=True, args_kwargs=True
        )  # or a comment of `**kw` would be that of the result
    except (TypeError, ValueError, OSError):
        return  # no signature or no source: nothing to add
    types = getattr(fn, '__annotations__', {})  # docments would guess from a default
    for param, d in found.items():
        if d.docment is None:
            continue
        kind = type_name(types[param]) if param in types else ''
        field = 'returns' if param == 'return' else f'param {param}'
        lines += [
            f':{field}: {f"``{kind}`` " if kind else ""}{rst(described(param, " ".join(d.docment.split()), kind))}{default_of(fn, param)}'
        ]


PLAIN = (
    '',
    'bool',
    'float',
    'int',
    'str',
)  # types that don't say what it is that a text begins with “of” is about


def described(param, text, kind=''):
    "A description that stands alone: “seed:int # of the draws” is read with its name in code, and needs it again on a page; “list of names” doesn't."
    again = param != 'return' and kind in PLAIN and re.match('of (?!so many|these|which|how)', text)
    return f'{param.replace("_", " ")} {text}' if again else text


def show_arguments(app, what, name, obj, options, given, returned):
    "autodoc's `autodoc-process-signature`: it doesn't see the arguments of a stage behind torch's metaclass."
    if what == 'class' and given in ('(*args, **kwargs)', '(*_, **__)'):
        return signature(obj) if given == '(*args, **kwargs)' else '', returned


@cache
def source_of(app, module):
    "viewcode's `viewcode-find-source`: the lines of a module's functions and classes, those that are patched into a class under its name, too."
    found = ModuleAnalyzer.for_module(module)
    found.find_tags()
    tags = dict(found.tags)
    for node in ast.parse(found.code).body:
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) or not any(
            re.match(r'patch\b', ast.unparse(d)) for d in node.decorator_list
        ):
            continue
        tags[f'{ast.unparse(node.args.args[0].annotation)}.{node.name}'] = (
            'def',
            node.decorator_list[0].lineno,
            node.end_lineno,
        )
    return found.code, tags


def default_of(fn, param):
    "What a parameter is where it isn't given; '' where it must be, or where its value has no short text."
    p = inspect.signature(fn).parameters.get(param)
    if (
        p is None
        or p.default is p.empty
        or not isinstance(p.default, (bool, int, float, str, tuple, type(None)))
    ):
        return ''
    text = repr(p.default)
    return f' (default: ``{text}``)' if len(text) < 30 else ''


class Api(PythonDomain):
    "Python's names, of which a search finds the public surface first."

    def get_objects(self):
        config = self.env.config
        for name, *rest, prio in super().get_objects():
            if name.rpartition('.')[2] in config.surface:
                prio = 0
            yield name, *rest, prio


@cache
def api_names(env):
    """What may be written in backticks, and where it leads: `Steps`, `Steps.cat`, `.n_step`, `memory.timeline.Timeline`. Each name →
    (the page on which it is known, None for all; page; anchor) of all that it may mean. Other pages' functions need their module,
    unless they are of the public surface: `start` is also a word."""
    found, objects = {}, env.domains['py'].objects
    for full, obj in objects.items():
        name = '.'.join(
            full.split('.')[-2 if obj.objtype in ('method', 'property', 'attribute') else -1 :]
        )
        everywhere = obj.objtype != 'function' or name in env.config.surface
        for n in {full, full.removeprefix(f'{env.config.package}.'), name}:
            known = None if everywhere or n != name else obj.docname
            found.setdefault(n, []).append((known, obj.docname, obj.node_id))
    return found | {
        n: [(None, objects[full].docname, objects[full].node_id)]
        for n, full in env.config.chained.items()
    }


def place_of(env, docname, name):
    "Page and anchor of what a name means on a page; None where that is nothing, or several things."
    places = [
        (page, anchor)
        for known, page, anchor in api_names(env).get(name, ())
        if known in (None, docname)
    ]
    return places[0] if len(places) == 1 else None


def link_names(app, doctree, docname):
    "Sphinx's `doctree-resolved`: literals that are names of the API become links."
    for node in list(doctree.findall(nodes.literal)):
        place = (
            None
            if isinstance(node.parent, nodes.reference)
            else place_of(app.env, docname, re.sub(r'\(.*\)$', '', node.astext()))
        )
        if place:
            node.replace_self(make_refnode(app.builder, docname, *place, node.deepcopy()))


def add_excerpts(app, pagename, template, context, doctree):
    "Sphinx's `html-page-context`: the search page loads the texts from which it shows excerpts."
    if pagename == 'search':
        for script in 'excerpts_data.js', 'excerpts.js':
            app.add_js_file(script, loading_method='defer')


def collect_prose(app, doctree):
    "Sphinx's `doctree-read`: the prose of a page, taken when it is read. To load all pages again at the end would take as long as to write them."
    app.env.prose = {
        **getattr(app.env, 'prose', {}),
        app.env.docname: ' '.join(
            ' '.join(p.astext() for p in doctree.findall(nodes.paragraph)).split()
        ),
    }


def write_excerpts(app, error):
    "Sphinx's `build-finished`: the prose of each page, for a search without a server."
    if error:
        return
    texts = {name: app.env.prose[name] for name in sorted(app.env.found_docs)}
    (Path(app.outdir) / '_static/excerpts_data.js').write_text(
        f'const EXCERPTS = {json.dumps(texts, ensure_ascii=False)};\n', encoding='utf-8'
    )


def name_signatures(app, doctree):
    "Likewise: cards on pages of classes are in no index, but links from the source lead there."
    for sig in doctree.findall(addnodes.desc_signature):
        if not sig['ids'] and sig.get('module'):
            sig['ids'] = [f"{sig['module']}.{sig['fullname']}"]


def setup(app):
    for name, default in dict(
        package='', surface=[], chained={}, groups={}, words={}, frequent=[], repository=''
    ).items():
        app.add_config_value(name, default, 'env')
    for event, act in {
        'source-read': read_notebook,
        'autodoc-process-docstring': add_parameters,
        'autodoc-process-signature': show_arguments,
        'doctree-resolved': link_names,
        'html-page-context': add_excerpts,
        'build-finished': write_excerpts,
        'doctree-read': name_signatures,
    }.items():
        app.connect(event, act)
    app.connect('doctree-read', collect_prose)
    app.connect('viewcode-find-source', source_of)
    app.add_domain(Api, override=True)
    app.add_lexer('mermaid', TextLexer)  # static/diagrams.js draws them
    return dict(
        version='1', parallel_read_safe=False, parallel_write_safe=True
    )  # `prose` is not merged
