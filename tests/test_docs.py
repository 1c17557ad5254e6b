"""The site: it builds without a warning, is complete, whole and self-contained; and the glue that makes it."""

import html.parser, importlib, inspect, json, os, posixpath, re, sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from filelock import FileLock
from sphinx.util.inventory import InventoryFile
from test_house import NOTEBOOKS, ROOT, SURFACE, copy_tree, imports, modules, run


def docs_module(name):
    "docs/NAME.py as a module (docs/ is no package)."
    if str(ROOT / 'docs') not in sys.path:
        sys.path.insert(0, str(ROOT / 'docs'))
    spec = spec_from_file_location(name, ROOT / f'docs/{name}.py')
    mod = module_from_spec(spec)
    spec.loader.exec_module(mod)
    return mod


literate, make, readme, typesetting = map(
    docs_module, ('literate', 'make', 'readme', 'typesetting')
)


class Page(html.parser.HTMLParser):
    "What the checks want of a page: its anchors, its links, what it loads, and its text without code."

    def __init__(self, path):
        super().__init__()
        self.path, self.ids, self.links, self.loads, self.text, self.skip = (
            path,
            set(),
            [],
            [],
            [],
            0,
        )
        self.feed(path.read_text(encoding='utf-8'))

    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        self.ids |= {a[k] for k in ('id', 'name') if a.get(k)}
        if tag == 'a' and 'href' in a:
            self.links.append(a['href'])
        if tag in ('script', 'img', 'iframe', 'source', 'video') and a.get('src'):
            self.loads.append(a['src'])
        if tag == 'link' and a.get('rel') not in ('canonical',):
            self.loads.append(a['href'])
        self.skip += tag in ('pre', 'code', 'script', 'style')

    def handle_endtag(self, tag):
        self.skip -= tag in ('pre', 'code', 'script', 'style')

    def handle_data(self, data):
        if not self.skip:
            self.text.append(data)


@pytest.fixture(scope='session')
def site(tmp_path_factory):
    "The folder of the built site, built once for all workers of pytest-xdist. Any warning of Sphinx fails the build."
    there = tmp_path_factory.getbasetemp()
    out = (there.parent if 'PYTEST_XDIST_WORKER' in os.environ else there) / 'site'
    with FileLock(f'{out}.lock'):
        if not out.exists():
            built = tmp_path_factory.mktemp('docs') / 'site'
            said = run(sys.executable, ROOT / 'docs/make.py', built)
            assert said == f'open {built}/index.html\n', said
            built.rename(out)
    return out


@pytest.fixture(scope='session')
def pages(site):
    return {p.relative_to(site).as_posix(): Page(p) for p in site.rglob('*.html')}


@pytest.fixture(scope='session')
def inventory(site):
    return InventoryFile.load(open(site / 'objects.inv', 'rb'), '', lambda base, uri: uri)


def lessons(pages):
    return {
        n: p
        for n, p in pages.items()
        if not n.startswith('_') and n not in ('genindex.html', 'search.html')
    }


# ---- the site ----


def test_every_notebook_is_a_page_of_the_sidebar_and_its_download(site, pages):
    sidebar = [
        l for l in pages['index.html'].links if l.endswith('.html') and not l.startswith('http')
    ]
    for nb in NOTEBOOKS:
        name = nb.relative_to(ROOT / 'nbs').with_suffix('').as_posix()
        assert f'{name}.html' in pages, name
        if name != 'index':
            assert f'{name}.html' in sidebar, f'{name} is not in the sidebar'
        taken = [
            l for l in pages[f'{name}.html'].links if l.endswith(f'{nb.name}') and '_downloads' in l
        ]
        assert taken, f'{name} offers no notebook'
        assert (pages[f'{name}.html'].path.parent / taken[0]).read_bytes() == nb.read_bytes()


def test_pages_follow_the_data(pages):
    "What a reader uses, understands and looks up; then the source lessons, and within each part modules in the order of the imports."
    order = [
        l.removesuffix('.html')
        for l in dict.fromkeys(pages['index.html'].links)
        if re.fullmatch(r'[\w/]+\.html', l)
    ]
    page = {
        m: nb.relative_to(ROOT / 'nbs').with_suffix('').as_posix()
        for nb in NOTEBOOKS
        if (m := re.search(r'#\| *default_exp +([\w.]+)', nb.read_text(encoding='utf-8')))
        and (m := m[1])
    }
    assert len(page) > 40 and set(page.values()) <= set(order)
    internal = order.index('modules')
    outside = [p for p in page.values() if order.index(p) < internal]
    used_first = {
        'app/runs',
        'envs/atari',
        'learning/r2d2',
        'memory/samplers',
    }  # source lessons that many readers look for
    assert sorted(outside) == sorted(
        used_first
        | {
            'all',
            'replay/experience',
            'replay/hindsight',
            'replay/prioritized',
            'replay/sequences',
            'sb3',
        }
    ), outside
    for m, (path, _) in modules().items():
        for used in {i.removeprefix('fastrl_replay.') for i in imports(path)} & set(page) - {m}:
            if (page[used] in outside) != (page[m] in outside):
                continue  # in two parts of the sidebar
            assert (
                m == 'sb3'
                or m == 'all'
                or page[m] in used_first
                or order.index(page[used]) < order.index(page[m])
            ), f'{page[m]} stands before {page[used]}, which it needs'
    text = (pages['index.html'].path).read_text(encoding='utf-8')
    captions = re.findall(r'<p class="caption"[^>]*><span class="caption-text">([^<]*)', text)
    assert captions == ['Use it', 'Understand it', 'Reference', 'Internals']


def test_titles_of_pages_and_of_the_sidebar_are_equal_and_differ(pages):
    text = pages['index.html'].path.read_text(encoding='utf-8')
    listed = re.findall(
        r'<li class="toctree-l\d[^"]*"><a class="reference internal" href="([\w/]+\.html)">(.*?)</a>',
        text,
    )
    assert len(listed) > 150 and len({title for _, title in listed}) == len(listed)
    for page, title in listed:
        own = re.search(
            r'<h1>(.*?)<a class="headerlink"', pages[page].path.read_text(encoding='utf-8'), re.S
        )[1]
        plain = [re.sub(r'<[^>]+>', '', t) for t in (own, title)]
        assert plain[0] == plain[1], f'{page}: {plain}'


def test_every_public_class_has_a_page_of_reference(pages):
    import fastrl_replay.all as surface

    classes = [n for n in surface.__all__ if inspect.isclass(getattr(surface, n))]
    assert len(classes) > 70 and {f'reference/{n}.html' for n in classes} <= set(pages)
    words = ' '.join(
        ' '.join(
            re.sub(
                r'<[^>]+>',
                ' ',
                pages['reference/PrioritizedReplay.html'].path.read_text(encoding='utf-8'),
            ).split()
        ).split('Inherited')[:3]
    )
    for said in (
        'alpha',
        'default: 0.6',
        'Explained in',
        'prioritized_replay',
        'ArgumentError',
        'Example',
        'Replay.sample',
    ):
        assert said in words, said
    assert '../replay/prioritized.html' in pages['reference/PrioritizedReplay.html'].links


def test_inherited_names_are_public(pages):
    "Of internal bases, and of what a stage overrides, nothing is listed"
    found = {
        n: m[1]
        for n, p in pages.items()
        if n.startswith('reference/')
        and (
            m := re.search(
                r'<section id="inherited">(.*?)</section>', p.path.read_text(encoding='utf-8'), re.S
            )
        )
    }
    bases = {
        (n, base)
        for n, table in found.items()
        for base, name in re.findall(r'<span class="pre">(\w+)\.(\w+)</span>', table)
    }
    assert len(found) > 30 and {base for _, base in bases} <= {
        'Replay',
        'Learner',
        *(n.removeprefix('reference/').removesuffix('.html') for n in pages),
    }
    assert not [
        n for n, table in found.items() if re.search(r'\.(?:snapshot|restore|check_state)<', table)
    ]


def test_every_page_leads_to_the_next(pages):
    for name, page in lessons(pages).items():
        text = page.path.read_text(encoding='utf-8')
        assert 'class="next-page"' in text or 'class="prev-page"' in text, name


def test_next_is_where_the_button_leads():
    "A page that says what is next names the next one of its part of the sidebar"
    for part in docs_module('conf').groups.values():
        for page, following in zip(part.split(), [*part.split()[1:], None]):
            file = next(
                (f for end in ('ipynb', 'md') if (f := ROOT / f'nbs/{page}.{end}').exists()), None
            )
            for target in re.findall(
                r'Next: \[[^\]]*\]\(([\w./]+)\.(?:ipynb|md)',
                file.read_text(encoding='utf-8') if file else '',
            ):
                assert (
                    posixpath.normpath(posixpath.join(posixpath.dirname(page), target)) == following
                ), page


def public_names():
    "module.name of every function and class that a module exports, whether `all` gives it or not."
    for name in modules():
        if name.startswith(('_', 'all')) or name == 'learning.learners':
            continue  # these give what others define
        mod = importlib.import_module(f'fastrl_replay.{name}')
        for n in mod.__all__:
            obj = inspect.unwrap(getattr(mod, n))
            if inspect.isclass(obj) or inspect.isfunction(obj):
                yield f'fastrl_replay.{name}.{n}'


def test_every_public_name_has_an_anchor_and_a_docstring(site, pages, inventory):
    places = {
        n: item.uri
        for kind in ('py:class', 'py:function', 'py:exception')
        for n, item in inventory.get(kind, {}).items()
    }
    wanted = {
        *public_names(),
        *(f'fastrl_replay.{m}.{n}' for m, names in SURFACE.items() for n in names.split()),
    }
    assert len(wanted) > 100
    for name in wanted:
        assert name in places, f'{name} is on no page'
        page, anchor = places[name].replace('$', name).split('#')
        assert anchor in pages[page].ids, f'{name}: {page} has no #{anchor}'
        card = re.search(
            rf'<dt class="sig[^>]*id="{re.escape(anchor)}">.*?</dt>\s*<dd><p>(.*?)</p>',
            pages[page].path.read_text(encoding='utf-8'),
            re.S,
        )
        assert card and card[1].strip(), f'{name} has no word about it on {page}'
        assert f'_modules/{name.rpartition(".")[0].replace(".", "/")}.html' in pages, (
            f"{name}'s source is not there"
        )


def test_every_public_method_has_a_docstring(inventory):
    def doc(name):
        module, cls, method = name.rsplit('.', 2)
        return inspect.getdoc(getattr(getattr(importlib.import_module(module), cls), method))

    assert not [name for name in inventory['py:method'] if not doc(name)]


def test_parameters_are_shown_with_their_comments(pages):
    text = pages['stages/nstep.html'].path.read_text(encoding='utf-8')
    assert not [
        n
        for n, p in pages.items()
        if '<span class="pre">DefaultValue' in p.path.read_text(encoding='utf-8')
    ]
    card = text[
        text.index('<dt class="sig sig-object py" id="fastrl_replay.stages.nstep.NStep">') :
    ]
    card = re.sub(r'<[^>]+>', '', card[: card.index('</dl>\n</dd></dl>')])
    assert 'gamma – float how much a reward is worth one step later, from 0 to 1' in card, card


def test_signatures_have_the_arguments(pages):
    "Also of stages, which torch's metaclass hides"
    text = pages['replay/experience.html'].path.read_text(encoding='utf-8')
    card = text[text.index('id="fastrl_replay.replay.experience.ExperienceReplay"') :]
    card = re.sub(r'<[^>]+>', '', card[: card.index('</dt>')])
    assert 'max_sz=1000000' in card and '*args' not in card, card


ALONE_NO = r"(None:|or\b|the same\b|its\b|their\b(?! error)|likewise|(how many|which|where|who)$)"  # not the beginning, or not all, of a description


def test_descriptions_of_parameters_stand_alone():
    "None begins with “or”, is only what None means, or speaks of “its” thing"
    from fastcore.docments import docments

    weak = []
    for name in public_names():
        obj = getattr(importlib.import_module(name.rpartition('.')[0]), name.rpartition('.')[2])
        fn = inspect.unwrap(obj.__init__ if inspect.isclass(inspect.unwrap(obj)) else obj)
        try:
            found = docments(fn, full=True)
        except (TypeError, ValueError, OSError):
            continue
        weak += [
            f'{name}({p}): {d.docment}'
            for p, d in found.items()
            if p != 'return' and d.docment and re.match(ALONE_NO, d.docment)
        ]
    assert not weak, '\n'.join(weak)


def test_defaults_stand_beside_parameters():
    def f(a, b=64, c=None, d=print):
        pass

    assert [literate.default_of(f, p) for p in 'abcd'] == [
        '',
        ' (default: ``64``)',
        ' (default: ``None``)',
        '',
    ]
    assert (
        literate.described('dtype', 'of the rows') == 'dtype of the rows'
        and literate.described('n', 'rows', 'int') == 'rows'
    )
    assert (
        literate.described('max_sz', 'of the memory', 'int') == 'max sz of the memory'
        and literate.described('i', 'of which environment', 'int') == 'of which environment'
    )
    assert [literate.described(p, 'of names', 'list') for p in ('columns', 'return')] == [
        'of names'
    ] * 2  # after the type


def public_functions(source):
    "Functions that stand alone, methods of classes, and what is patched into one: without those whose name or class is private"
    import ast

    for node in ast.parse(source).body:
        patched = any(
            ast.unparse(d).startswith('patch') for d in getattr(node, 'decorator_list', ())
        )
        owner = (
            node.name
            if isinstance(node, ast.ClassDef)
            else ast.unparse(node.args.args[0].annotation)
            if patched
            else ''
        )
        for f in node.body if isinstance(node, ast.ClassDef) else [node]:
            if (
                isinstance(f, (ast.FunctionDef, ast.AsyncFunctionDef))
                and not owner.startswith('_')
                and (f.name == '__init__' or not f.name.startswith('_'))
            ):
                yield f


def misplaced_comments(source):
    "Comments that a page would show at the wrong parameter: beside several, or beside none but `self`, without a `->`; and those that name theirs again"
    import io, tokenize

    comments = {
        t.start[0]: t.string
        for t in tokenize.generate_tokens(io.StringIO(source).readline)
        if t.type == tokenize.COMMENT
    }
    for f in public_functions(source):
        args, lines = f.args, {}
        for a in [
            *args.posonlyargs,
            *args.args,
            *filter(None, [args.vararg]),
            *args.kwonlyargs,
            *filter(None, [args.kwarg]),
        ]:
            lines.setdefault(a.lineno, []).append(a.arg)
        for line, names in lines.items():
            result = f.returns is not None and f.returns.end_lineno == line
            one = len([n for n in names if n != 'self']) == 1
            if line in comments and (
                not result
                and not one
                or re.match(rf'# ?`?(?:{"|".join(names)})`?: ', comments[line])
            ):
                yield f'{f.name}, line {line}: {comments[line]}'


def test_comments_in_signatures_are_of_one_parameter_or_of_the_result():
    found = [
        f'{name}: {said}'
        for name, (path, _) in modules().items()
        for said in misplaced_comments(path.read_text(encoding='utf-8'))
    ]
    assert not found, '\n'.join(found)
    wrong = 'def f(a, b): # both\n    pass\nclass C:\n    def m(self): # it\n        pass\ndef g(a)->int: # a: of what\n    pass'
    right = 'def f(a, b)->int: # both\n    pass\nclass C:\n    def m(self, a): pass # it\ndef g(\n    a, # of what\n)->int: # how many\n    pass'
    assert len([*misplaced_comments(wrong)]) == 3 and not [*misplaced_comments(right)]


def test_classes_show_their_arguments_and_methods_their_source(pages):
    text = ''.join(
        p.path.read_text(encoding='utf-8') for n, p in pages.items() if n.startswith('replay/')
    )
    cards = [
        re.sub(r'\s+|<[^>]+>', '', m[1])
        for m in re.finditer(r'<dt class="sig sig-object py"[^>]*>(.*?)</dt>', text, re.S)
    ]
    classes = [c for c in cards if c.startswith('class')]
    assert len(cards) > 50 and not [c for c in classes if '*args' in c]
    assert any(
        c.startswith('classPrioritizedReplay(source=None,bs=1,max_sz=1000000') for c in classes
    ), [c for c in classes if 'Prioritized' in c]
    for page, name in {
        'app/runs': 'Run.train',
        'data/interop': 'Steps.columns',
        'steps/core': 'Steps.done',
    }.items():
        assert f'../_modules/fastrl_replay/{page}.html#{name}' in pages[f'{page}.html'].links


def test_quotes_in_texts_of_the_api_are_those_of_code(pages):
    text = re.sub(r'<[^>]+>', '', pages['look/sample.html'].path.read_text(encoding='utf-8'))
    assert "'='" in text and '‘=’' not in text


def test_questions_hold_what_can_go_wrong_of_every_page(pages):
    text = ' '.join(''.join(pages['faq.html'].text).split())
    for words in (
        'Memory grows with a list of columns.',
        'Priorities are not changing',
        'makes nothing faster.',
        'daemonic processes',
        'Losses were given as TD errors.',
    ):
        assert words in text, words
    after = text[text.index('Priorities do not change, or rows are drawn too often') :]
    assert after.index('Priorities are not changing') < min(
        after.index(words)
        for words in ('One row is in nearly every batch', 'Losses were given as TD errors.')
    )


def test_entries_of_what_can_go_wrong_have_a_group_and_begin_with_what_one_sees():
    "In bold, with their group in a comment: a heading of the page of questions"
    groups = re.findall(
        r'^```\{can-go-wrong\} (\w+)\n```$', (ROOT / 'nbs/faq.md').read_text(encoding='utf-8'), re.M
    )
    wrong, used = [], set()
    for place, text in texts():
        section = re.split(
            r'^(?:#|Next: )', text.partition('## What can go wrong\n')[2], maxsplit=1, flags=re.M
        )[0]
        for line in re.findall(r'^- .*|^\*\*.*', section, re.M):
            entry = re.fullmatch(r'- \*\*.+?\*\* .+ <!--(\w+)-->', line)
            if not entry or entry[1] not in groups:
                wrong.append(f'{place}: {line}')
            else:
                used.add(entry[1])
    assert not wrong, '\n'.join(wrong)
    assert sorted(groups) == sorted(used)


def test_frequent_symptoms_come_first():
    "Each of them is the beginning of one entry; of the others, the order stays"
    frequent = docs_module('conf').frequent
    entries = [
        e for _, text in texts() for e in re.findall(r'^- \*\*.*(?= <!--\w+-->$)', text, re.M)
    ]
    wrong = [text for text in frequent if sum(e.startswith(f'- **{text}') for e in entries) != 1]
    assert not wrong, wrong
    assert literate.by_frequency(
        ['- **C** c', '- **B** b', '- **A** a', '- **D** d'], ['A', 'B']
    ) == ['- **A** a', '- **B** b', '- **C** c', '- **D** d']


def test_no_link_is_dead(pages):
    dead = []
    for name, page in pages.items():
        for link in [*page.links, *page.loads]:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            if not target.exists():
                dead.append(f'{name}: {link}')
            elif parts.fragment and target.suffix == '.html':
                to = pages[target.relative_to(pages['index.html'].path.parent).as_posix()]
                if unquote(parts.fragment) not in to.ids:
                    dead.append(f'{name}: {link}')
    assert not dead, '\n'.join(sorted(set(dead)))


def test_nothing_comes_from_elsewhere(site, pages):
    remote = [
        f'{n}: {l}'
        for n, p in pages.items()
        for l in p.loads
        if urlsplit(l).scheme not in ('', 'data') or l.startswith('//')
    ]
    styles = {
        p: re.findall(
            r'(?:url\(|@import)\s*["\']?((?:https?:)?//[^)"\']+)', p.read_text(encoding='utf-8')
        )
        for p in site.rglob('*.css')
    }
    remote += [f'{p.name}: {l}' for p, found in styles.items() for l in found]
    assert not remote, '\n'.join(remote)
    for script in make.SCRIPTS:
        assert (site / '_static' / script).stat().st_size > 10**6, script


def test_no_directive_is_left_over(pages):
    "In prose: inside code they may be what is talked about."
    for name, page in lessons(pages).items():
        found = re.findall(
            r'#\||:::|\{eval-rst\}|```|\{(?:download|toctree|container)\}|\$\$|\\\(|\\text\{',
            ''.join(page.text),
        )
        found = [
            f for f in found if f not in (r'\(', r'\text{')
        ]  # MathJax draws what stands between \( and \)
        assert not found, f'{name}: {found}'


def test_backticks_lead_to_the_api(pages):
    assert (
        '../steps/core.html#fastrl_replay.steps.core.Steps' in pages['memory/timeline.html'].links
    )
    assert (
        '../stages/nstep.html#fastrl_replay.stages.nstep.NStep'
        in pages['tutorials/life_of_one_step.html'].links
    )
    assert (
        'learning/losses.html#fastrl_replay.learning.losses.rescale' in pages['all.html'].links
    )  # of the public surface
    assert (
        'learning/dqn.html#fastrl_replay.learning.dqn.DQNLearner' in pages['stages.html'].links
    )  # written `.dqn`
    assert (
        '../app/runs.html#fastrl_replay.app.runs.start' not in pages['steps/core.html'].links
    )  # a word there


def test_hidden_code_stays_out_and_folded_code_is_there(pages):
    text = pages['index.html'].path.read_text(encoding='utf-8')
    assert 'annotate' not in text and '<img alt="A ring of twelve slots' in text
    folded = pages['memory/sumtree.html'].path.read_text(encoding='utf-8')
    assert folded.count('<details class="admonition hide') > 3


# ---- words ----

WORDS = {  # what notebooks, README and changelog don't say: what they say instead
    r'contestants?': 'entries, runs',
    r'dice': 'RNG state, random generator',
    r'deaths?': 'crashes',
    r'crews?': 'environment group',
    r'lanes?': 'environment slot',
    r'oftener': 'more often',
    r'whoever': 'the caller, a loop that …',
    r'nobody': 'no caller, not …',
    r'by hand': 'on paper, directly, as a plain loop',
    r'of (?:its|their|his|her|your|my|our) own': 'separate, new, your own …',
    r'mood(?:y|s)?': 'unstable across seeds',
    r'good neighbours': 'interoperability',
    r'in disguise': 'autoreset pseudo-step',
    r'another hand': 'a reference implementation',
    r'map of the house': 'module overview',
    r'networks? that remembers?': 'recurrent network',
    r'what a policy may say': 'policy outputs',
    r'what a person \w+': 'usage',
    r'(?:asked )?in vain': 'output discarded',
    r'dues|owes|owed|pays': 'the batches that are due',
    r'everybody.?s figures': 'full results',
    r'behind one door': 'adapters',
    r'behind `\w+`': 'after',
    r'new rows get': 'initial priority',
    r'bunch(?:es)?': 'chunk',
    r'late answers?': 'delayed priority updates',
    r'strangers?': 'untrusted, unrelated',
    r'same life': 'the same episodes',
    r'hardly ever met': 'sparse rewards',
    r'actions that are numbers': 'continuous actions',
    r'tak(?:en|e|es) up again': 'resumed',
    r'finds? their way': 'are routed to',
    r'what comes? of it': 'results, effect',
    r'shall': 'must, is to be',
    r'lost endings?': 'final observations are kept',
    r'(?:rows|keys|environments|agents|programs) (?:that )?come and go': 'are added and removed',
    r'returns while (?:it|they) explores?': 'training returns',
    r'(?:go|goes) on to the last bit': 'bit-exact',
    r'who tries': 'to try …',
    r'surprised you': 'TD errors',
    r'contests? that (?:is|are) lost': 'who is faster',
    r'a row has a name': 'a permanent key',
    r'types a line': 'run one command',
    r'hears? of (?:it|these|this)': 'is notified',
    r'brings? errors back': 'priority feedback',
    r'order of the house': 'module order',
    r'own tail': 'chase itself',
    r'fast as the bare array': 'faster or slower than what, at what',
}
OLD_NAMES = {'`bunch=`', '`contestants`'}  # which the changelog gives beside the new ones


def texts():
    "Where a text stands, and the text: cells without their outputs, and what is written beside the notebooks."
    for nb in NOTEBOOKS:
        for c in json.loads(nb.read_text(encoding='utf-8'))['cells']:
            yield f'{nb.name} {c["id"]}', ''.join(c['source'])
    for name in (
        'README.md',
        'CONTRIBUTING.md',
        'CHANGELOG.md',
        'CITATION.cff',
        'settings.ini',
        'nbs/faq.md',
        'nbs/install.md',
        'nbs/versions.md',
    ):
        yield name, (ROOT / name).read_text(encoding='utf-8')


def test_words_are_the_fields_own():
    found = []
    for place, text in texts():
        for old in OLD_NAMES:
            text = text.replace(old, '')
        found += [
            f'{place}: {m[0]!r}; say: {instead}'
            for word, instead in WORDS.items()
            for m in re.finditer(rf'\b(?:{word})(?!\w)', text, re.I)
        ]
    assert not found, '\n'.join(found)


LEFT_OVER = {  # in outputs: what they look like, and what it is
    r'/tmp/|\btmp[a-z0-9_]{8}\b': 'a path of the machine',
    r'compiles its kernels': 'a line of the compiler',
    r'with 0 Axes': 'an empty figure',
    r'(?m)^(?:<function |<bound method |functools\.partial\(|\'?<iframe)|\A(?:True|False)\Z': 'what the last line of a cell returns',
    r'(?m)^\|(?:-+:?\|)+$': 'a table that is not drawn: display(Markdown(…))',
    r'\d\.\d{9}': 'a number with all its digits: round it where it is shown',
}
AS_TYPED = {'command_line'}  # what a terminal shows, tables as well


def test_outputs_are_of_the_lesson():
    found = []
    for nb in NOTEBOOKS:
        for c in json.loads(nb.read_text(encoding='utf-8'))['cells']:
            if (
                c['cell_type'] != 'code'
                or 'hide' in readme.split_directives(''.join(c['source']))[0]
            ):
                continue
            for o in c['outputs']:
                data = o.get('data', {})
                text = ''.join(
                    o.get('text')
                    or (data.get('text/plain', '') if {*data} == {'text/plain'} else '')
                )
                found += [
                    f'{nb.stem} {c["id"]}: {said}: {m[0]}'
                    for looks, said in LEFT_OVER.items()
                    if (m := re.search(looks, text))
                    and not (said.startswith('a table') and nb.stem in AS_TYPED)
                ]
    assert not found, '\n'.join(found)


def test_overview_lists_every_notebook_with_its_module():
    overview = ''.join(text for place, text in texts() if place.startswith('modules.ipynb'))
    for nb in NOTEBOOKS:
        exp = re.search(
            r'#\| *default_exp +(\S+)', nb.read_text(encoding='utf-8').replace('\\n', '\n')
        )
        if not exp:
            continue
        module = exp[1].strip('",').removesuffix('.__init__')
        assert f'| [`{module}`]({nb.relative_to(ROOT / "nbs")}) |' in overview, nb.name


def test_the_front_is_read_in_a_minute():
    assert len((ROOT / 'README.md').read_text(encoding='utf-8').splitlines()) <= 120


NO_CODE = {
    'ideas',
    'papers',
    'tutorials/from_seed_to_here',
    'all',
}  # pages about ideas, about papers and seeds, and a list of names


def words_before_first_use(nb, names):
    "How many words of prose stand on a page before the first visible code that uses one of these names"
    words = 0
    for c in json.loads(nb.read_text(encoding='utf-8'))['cells']:
        given, source = readme.split_directives(''.join(c['source']))
        if c['cell_type'] == 'markdown':
            for i, part in enumerate(re.split(r'^```\w*\n(.*?)^```$', source, flags=re.M | re.S)):
                if i % 2 and names.search(part):
                    return words
                words += 0 if i % 2 else len(part.split())
        elif not {'hide', 'hide_code', 'export', 'exporti', 'default_exp'} & set(
            given
        ) and names.search(re.sub(r'^(from|import) .*', '', source, flags=re.M)):
            return words
    return words + 1000


def test_a_page_shows_the_first_use_within_100_words():
    "Pages of the sidebar's first two parts, and lessons of public names"
    import fastrl_replay.all as surface

    conf = docs_module('conf')
    names = re.compile(
        rf'fastrl-replay|benchmarks/run.py|\.add_step\(|\brecipe\(|\b(?:{"|".join(surface.__all__)})\b|(?:{"|".join(map(re.escape, conf.chained))})\('
    )
    public = {
        getattr(surface, n).__module__.removeprefix('fastrl_replay.').replace('.', '/')
        for n in surface.__all__
    }
    pages = {
        *conf.groups['Use it'].split(),
        *conf.groups['Understand it'].split(),
        *public,
    } - NO_CODE
    found = {
        p: words_before_first_use(ROOT / f'nbs/{p}.ipynb', names)
        for p in pages
        if (ROOT / f'nbs/{p}.ipynb').exists()
    }
    assert len(found) > 70 and not (late := {p: n for p, n in found.items() if n > 100}), late


# ---- the glue ----


def cell(source, kind='code', id='a'):
    return dict(cell_type=kind, id=id, metadata={}, source=source, outputs=[])


def shown(source):
    return [c['source'] for c in literate.cells_of(cell(source), 'pack.mod')]


def test_cells_become_what_a_reader_wants():
    assert shown('#| hide\nx = 1') == [] and shown('#| default_exp core') == []
    assert shown('x = 1') == ['x = 1'] and shown('#| eval: false\nx = 1') == ['x = 1']
    assert shown('#| export\nimport os\nfrom re import match') == []
    assert shown('#| export\n_SECRET = 1') == ['_SECRET = 1']
    kernel = '#| export\ndef _kernel():\n' + '    x = 1\n' * 20
    for source in ('#| export\ndef _kernel(): pass', kernel):
        (c,) = literate.cells_of(cell(source), 'pack.mod')
        assert ('hide-input' in c['metadata'].get('tags', [])) == (source is kernel)
    api, code = literate.cells_of(cell('#| export\ndef f(): pass'), 'pack.mod')
    assert '.. autofunction:: pack.mod.f' in api['source'] and code['metadata']['tags'] == [
        'hide-input'
    ]


def test_kernels_are_shown_long_tests_folded_and_a_cell_may_say():
    def tags(source, outputs=()):
        return [
            c['metadata'].get('tags', [])
            for c in literate.cells_of(dict(cell(source), outputs=outputs), 'pack.mod')
        ]

    body = '    x = 1\n' * 20
    assert tags(f'#| export\n@njit\ndef _kernel():\n{body}') == [[]]
    assert tags(f'#| export\n@njit\ndef kernel():\n{body}') == [[], []]  # its card, and the code
    assert tags('test_eq(1, 1)\n' * 3) == [['hide-input']] and tags(
        'test_eq(1, 1)\n' * 3, ['shown']
    ) == tags('test_eq(1, 1)\n' * 2) == [[]]
    assert tags('x = 1\n' * 4 + 'test_eq(1, 1)\n' * 2) == [[]] and tags(
        'x = 1\nfor i in range(3):\n    assert i < 3'
    ) == [['hide-input']]
    assert tags('#| fold\nx = 1') == [['hide-input']] and tags(
        '#| show\n' + 'test_eq(1, 1)\n' * 20
    ) == [[]]


def test_api_of_functions_classes_and_patches():
    api = literate.api_of(
        '@njit\ndef f(x): pass\nclass C(B):\n    x = 1\n    def __init__(self): pass\n    def m(self): pass\n    def _p(self): pass\n'
        '@patch\ndef late(self:C): pass\n@patch(as_prop=True)\ndef size(self:C): pass\n'
        '@patch\ndef _no(self:C): pass\n@patch\ndef no(self:_C): pass\nclass _D: pass\nY = 2',
        'p.m',
    )
    assert [l for l in api.splitlines() if l] == [
        '.. autofunction:: p.m.f',
        '.. autoclass:: p.m.C',
        '   :members: m',
        '.. automethod:: p.m.C.late',
        '.. autoproperty:: p.m.C.size',
    ]


def test_folds_that_follow_each_other_are_one():
    def folds(*sources):
        return [
            c['source']
            for c in literate.joined(
                [new for s in sources for new in literate.cells_of(cell(s), 'p.m')]
            )
        ]

    long = '#| export\ndef _f():\n' + '    x = 1\n' * 20
    assert len(folds(long, long, long)) == 1 and folds(long, long)[0].count('def _f') == 2
    assert (
        len(folds(long, 'x = 1', long)) == 3 and len(folds(long, '#| export\ndef g(): pass')) == 3
    )  # a card between
    assert len(folds(long, 'test_eq(1, 1)\n' * 3)) == 2


def test_a_picture_has_its_text_and_its_colours_with_its_code_beside_it():
    (c,) = literate.cells_of(cell('#| frames\n#| alt: a pole\nshow()'), 'p.m')
    assert (
        c['metadata'] == dict(tags=[], mystnb=dict(image=dict(alt='a pole', classes='frames')))
        and c['source'] == 'show()'
    )


@pytest.mark.parametrize(
    'text',
    [
        'a     12\nbcd    3',
        'key  slot\n0    4',
        'usage: x [-h]\n          [--all]\n          [--one]',
        '┌──┐\n└──┘',
        '| a |\n|---|\n| 1 |',
        'Items(0)\n  .n_step(3)\n  .dqn(net)',
    ],
)
def test_columns_and_drawings_scroll(text):
    assert typesetting.in_columns(text)


@pytest.mark.parametrize(
    'text',
    [
        '',
        'one line  of text',
        'recipe: no setting; got 1.  Remedy: 2\nfastrl-replay: expected one of train, eval',
        "{'a': 1,\n 'b': 2}",
        'Traceback:\n    f(x)\n    g(y)',
    ],
)
def test_other_texts_wrap(text):
    assert not typesetting.in_columns(text)


def test_numbers_stay_with_their_units():
    assert (
        typesetting.with_units('222.24 / s, 3 µs and 1.2 ×')
        == '222.24\xa0/\xa0s, 3\xa0µs and 1.2\xa0×'
        and typesetting.with_units('3 seeds') == '3 seeds'
    )


@pytest.mark.parametrize(
    'text, rst',
    [
        ('a `b` c', 'a ``b`` c'),
        ('|td| + x_*y', r'\|td\| + x\_\*y'),
        ('`a_|b`', '``a_|b``'),
        ('', ''),
        ('what --set and `--seed` say', 'what ``--set`` and ``--seed`` say'),
    ],
)
def test_docstrings_have_backticks_and_no_other_marks(text, rst):
    assert literate.rst(text) == rst


def test_colab_links_appear_where_the_repository_has_an_address():
    class config:
        repository = 'https://github.com/someone/thing'

    assert (
        'https://colab.research.google.com/github/someone/thing/blob/main/nbs/tutorials/x.ipynb'
        in literate.links_above(config, 'tutorials/x')
    )
    config.repository = ''
    assert 'olab' not in literate.links_above(config, 'tutorials/x')


def test_links_of_a_section_start_where_it_is_shown():
    moved = literate.relinked(
        '[a](b.ipynb#c), [d](../pipe.ipynb), [e](../../README.md) and [f](https://x.y/z.ipynb)',
        'memory/rows',
    )
    assert (
        moved
        == '[a](memory/b.ipynb#c), [d](pipe.ipynb), [e](../README.md) and [f](https://x.y/z.ipynb)'
    )


def test_directives_of_a_cell():
    assert readme.split_directives('#| hide_code\n#|alt: a: b\n\nx = 1\n#| not one') == (
        {'hide_code': '', 'alt': 'a: b'},
        'x = 1\n#| not one',
    )
    assert readme.split_directives('# no\nx') == ({}, '# no\nx')


def test_first_screen_fits_a_phone():
    "The first example and the two commands: nothing is cut at 400 pixels"
    text = (ROOT / 'README.md').read_text(encoding='utf-8')
    first, commands = (
        re.search(r'```python\n(.*?)```', text, re.S)[1],
        re.findall(r'```sh\n(.*?)```', text, re.S),
    )
    assert (
        text.index('```python') < text.index('```sh')
        and len(commands) == 2
        and 'train cartpole' in commands[0]
        and 'pytest' in commands[1]
    )
    long = [l for l in (first + ''.join(commands)).splitlines() if len(l) > 46]
    assert not long, long


def test_tables_of_the_readme_are_those_of_what_was_measured():
    "The cells that make them, run again, give what is saved"
    from IPython.display import Markdown

    cells = json.loads((ROOT / 'nbs/index.ipynb').read_text(encoding='utf-8'))['cells']
    names, tables = {}, 0
    for c in cells:
        *before, last = (source := ''.join(c['source'])).split('\nMarkdown(')
        if not before:
            continue
        exec(before[0], names)
        made = eval('Markdown(' + last, names)
        assert isinstance(made, Markdown) and made.data == ''.join(
            c['outputs'][-1]['data']['text/markdown']
        ), source
        tables += 1
    assert tables == 2


def test_pictures_of_the_readme_are_files():
    picture = dict(
        cell('#| hide_code\n#| alt: what\nplot()', id='p1'),
        outputs=[dict(output_type='display_data', data={'image/png': 'aGk='})],
    )
    files = {}
    assert readme.show_cell(picture, files) == ['![what](docs/images/p1.png)'] and files == {
        'docs/images/p1.png': b'hi'
    }


def test_a_folder_with_something_else_in_it_is_left_alone(tmp_path):
    (tmp_path / 'mine').write_text('precious')
    with pytest.raises(SystemExit, match='not empty and not a site'):
        make.build(tmp_path)
    assert (tmp_path / 'mine').read_text() == 'precious'


def test_a_script_that_is_not_the_noted_one_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(
        make.urllib.request,
        'urlopen',
        lambda url, timeout: __import__('io').BytesIO(b'something else'),
    )
    with pytest.raises(SystemExit, match='its hash was noted'):
        make.fetch('tex-svg.js')
    assert not list(tmp_path.rglob('*.js'))


# ---- a notebook taken alone ----

INSTALL = """#| hide
# Taken alone, on Colab say, this notebook gets what it needs.
import importlib.util

if not importlib.util.find_spec('fastrl_replay'):
    %pip install -q 'fastrl_replay[plot]'"""


@pytest.mark.parametrize('nb', NOTEBOOKS, ids=lambda p: p.stem)
def test_notebook_begins_with_title_lead_and_install_cell(nb):
    first, second = json.loads(nb.read_text(encoding='utf-8'))['cells'][:2]
    assert first['cell_type'] == 'markdown' and re.match(
        r'# [^\n]+\n\n> [^\n]+(\n\n|$)', ''.join(first['source'])
    ), 'a title and, below it, `> what it is for`'
    assert (second['cell_type'], ''.join(second['source'])) == ('code', INSTALL)


@pytest.fixture(scope='session')
def stranger(tmp_path_factory):
    """A Python that has what the development environment has, but not fastrl_replay, and that can install it from a folder.
    pip would see this environment's own installation, and is told to ignore it."""
    tmp = tmp_path_factory.mktemp('alone')
    run(
        sys.executable,
        '-m',
        'build',
        '--wheel',
        '--outdir',
        tmp / 'wheels',
        copy_tree(tmp / 'copy'),
    )
    run(sys.executable, '-m', 'venv', tmp / 'venv')
    python = tmp / 'venv' / 'bin' / 'python'
    elsewhere = [p for p in sys.path if p.endswith('site-packages')]
    place = run(python, '-c', 'import sysconfig; print(sysconfig.get_path("purelib"))').strip()
    Path(place, 'elsewhere.pth').write_text('\n'.join(elsewhere))
    settings = dict(
        PIP_NO_INDEX='1',
        PIP_FIND_LINKS=str(tmp / 'wheels'),
        PIP_IGNORE_INSTALLED='1',
        PIP_NO_DEPS='1',
    )
    return [
        'env',
        '-u',
        'PYTHONPATH',
        '-u',
        'VIRTUAL_ENV',
        *(f'{k}={v}' for k, v in settings.items()),
        python,
    ]


ALONE = """
import json, sys
from execnb.shell import CaptureShell
from fastcore.nbio import read_nb
shell = CaptureShell()
for cell in read_nb(sys.argv[1]).cells:
    if cell.cell_type != 'code' or '#| eval: false' in cell.source: continue
    shell.run(cell.source)
    if shell.exc: raise SystemExit(f'{cell.source}\\n{shell.exc}')
import fastrl_replay
print(fastrl_replay.__file__)
"""


@pytest.mark.slow
@pytest.mark.parametrize('name', ['stages/nstep', 'generic'])
def test_a_notebook_taken_alone_installs_the_library_and_runs(site, stranger, tmp_path, name):
    "The file that the site offers, in an empty folder."
    (taken,) = (site / '_downloads').rglob(f'{Path(name).name}.ipynb')
    (tmp_path / 'alone.py').write_text(ALONE)
    used = run(*stranger, tmp_path / 'alone.py', taken, cwd=tmp_path).splitlines()[-1]
    assert 'venv' in used and str(ROOT) not in used, used


def test_citation_is_of_this_version():
    import yaml

    cited = yaml.safe_load((ROOT / 'CITATION.cff').read_text())
    assert {'cff-version', 'message', 'title', 'authors', 'version', 'license', 'type'} <= set(
        cited
    )
    assert (
        cited['version'] == importlib.import_module('fastrl_replay').__version__
        and cited['title'] == 'fastrl_replay'
    )


# ---- the site in a browser: `python -m pytest -m browser`, in .ci/run ----


def show(browser, url, width, theme='light', height=900):
    "Open a page in a window of that width, and wait until its equations and diagrams are drawn."
    from selenium.webdriver.support.ui import WebDriverWait

    browser.execute_cdp_cmd(
        'Emulation.setDeviceMetricsOverride',
        dict(width=width, height=height, deviceScaleFactor=1, mobile=False),
    )
    browser.execute_cdp_cmd(
        'Emulation.setEmulatedMedia',
        dict(features=[dict(name='prefers-color-scheme', value=theme)]),
    )
    browser.get(url)
    drawn = """return (!document.querySelector('script[src*="tex-svg"]') || window.MathJax?.startup?.promise && document.readyState == 'complete')
        && [...document.querySelectorAll('.highlight-mermaid, .mermaid:not([data-processed])')].length == 0"""
    WebDriverWait(browser, 30).until(lambda b: b.execute_script(drawn))
    browser.execute_async_script(
        'const done = arguments[0]; (window.MathJax?.startup?.promise ?? Promise.resolve()).then(() => setTimeout(done, 50))'
    )


NAMES = sorted(nb.relative_to(ROOT / 'nbs').with_suffix('').as_posix() for nb in NOTEBOOKS) + [
    'contributing',
    'changelog',
    'faq',
    'install',
    'versions',
    'genindex',
    'search',
    'reference/PrioritizedReplay',
    'reference/classes',
    'internals/memory',
]


@pytest.mark.browser
@pytest.mark.parametrize('name', NAMES)
def test_page_in_the_browser(site, browser, name):
    "No console errors; equations and diagrams are drawn, in light and dark; nothing sticks out on a phone or a screen."
    for width, theme in ((1400, 'light'), (400, 'light'), (1400, 'dark')):
        show(browser, f'file://{site}/{name}.html', width, theme)
        said = [
            l['message'] for l in browser.get_log('browser') if l['level'] in ('SEVERE', 'WARNING')
        ]
        assert not said, f'{name} at {width}: {said}'
        facts = browser.execute_script("""
            const box = e => e.getBoundingClientRect(), scrolls = e => e && (/auto|scroll|hidden/.test(getComputedStyle(e).overflowX) || scrolls(e.parentElement));
            const seen = [...document.querySelectorAll('article *')].filter(e => box(e).width && !e.closest('mjx-assistive-mml'));
            return {
              wide: document.documentElement.scrollWidth,
              out: seen.filter(e => (box(e).right > innerWidth + 1 || box(e).left < -1) && !scrolls(e.parentElement)).map(e => e.outerHTML.slice(0, 150)),
              equations: document.querySelectorAll('.math').length,
              drawn: [...document.querySelectorAll('.math mjx-container svg')].filter(e => box(e).width && box(e).height).length,
              errors: document.querySelectorAll('mjx-merror, [data-mjx-error], .mermaid .error-icon').length,
              diagrams: document.querySelectorAll('.mermaid').length,
              pictured: [...document.querySelectorAll('.mermaid svg')].filter(e => box(e).height > 20 && e.querySelector('.node')).length,
              broken: [...document.images].filter(i => !i.naturalWidth).map(i => i.src)}""")
        assert facts['wide'] <= width and not facts['out'], (
            f'{name} at {width}: {facts["wide"]} px wide; {facts["out"][:5]}'
        )
        assert facts['drawn'] >= facts['equations'] and not facts['errors'], (
            f'{name}: {facts["drawn"]} of {facts["equations"]} equations, {facts["errors"]} errors'
        )
        assert facts['pictured'] == facts['diagrams'], (
            f'{name}: {facts["pictured"]} of {facts["diagrams"]} diagrams'
        )
        assert not facts['broken'], f'{name}: {facts["broken"]}'


@pytest.mark.browser
def test_there_is_something_to_draw(site, browser):
    "The checks above would pass a site that lost its equations and diagrams."
    show(browser, f'file://{site}/first_training.html', 1400)
    assert (
        browser.execute_script("return document.querySelectorAll('.mermaid svg .node').length") == 5
    )
    show(browser, f'file://{site}/learning/losses.html', 1400)
    assert (
        browser.execute_script("return document.querySelectorAll('mjx-container svg').length") >= 10
    )


@pytest.mark.browser
@pytest.mark.parametrize(
    'query, page',
    [
        ('PrioritizedReplay', 'reference/PrioritizedReplay.html'),
        ('burn-in', 'replay/sequences.html'),
        ('n_step', 'stages/nstep.html'),
        ('prioritized', 'replay/prioritized.html'),
        ('custom sampler', 'memory/samplers.html'),
        ('visualize', 'look/show.html'),
        ('buffer', 'memories.html'),
        ('batch_size', 'tutorials/coming_from.html'),
        ('PER', 'replay/prioritized.html'),
        ('HER', 'replay/hindsight.html'),
        ('HerReplayBuffer speed', 'replay/hindsight.html'),
        ('kill -9', 'command_line.html'),
        ('R2D2', 'learning/r2d2.html'),
        ('Minari', 'tutorials/your_data.html'),
        ('priorities not changing', 'faq.html'),
    ],
)
def test_search_finds_it(site, browser, query, page):
    "Without a server."
    from selenium.webdriver.support.ui import WebDriverWait

    show(browser, f'file://{site}/search.html?q={query}', 1400)
    found = WebDriverWait(browser, 30).until(
        lambda b: b.execute_script(
            "return [...document.querySelectorAll('#search-results li a')].map(a => a.getAttribute('href'))"
        )
    )
    assert any(page in link for link in found[:3]), found
    texts = WebDriverWait(browser, 30).until(
        lambda b: b.execute_script(
            "return [...document.querySelectorAll('#search-results li p.context')].map(p => p.textContent)"
        )
    )
    assert any(len(text) > 50 for text in texts), texts


@pytest.mark.browser
def test_long_errors_wrap_and_game_frames_keep_their_colours(site, browser):
    show(browser, f'file://{site}/command_line.html', 1400, 'dark')
    wide = browser.execute_script(
        "return [...document.querySelectorAll('article .output pre')].filter(p => p.scrollWidth > p.clientWidth + 1 && !p.closest('.columns')).map(p => p.textContent.slice(0, 80))"
    )
    assert not wide, wide
    show(browser, f'file://{site}/envs/catch.html', 1400, 'dark')
    filters = browser.execute_script(
        "return [...document.querySelectorAll('article img')].map(i => [i.classList.contains('frames'), getComputedStyle(i).filter])"
    )
    assert ([True, 'none']) in filters and all((f == 'none') == kept for kept, f in filters), (
        filters
    )


@pytest.mark.browser
def test_theme_can_be_changed_and_diagrams_follow(site, browser):
    show(browser, f'file://{site}/first_training.html', 1400)
    ink = "return getComputedStyle(document.querySelector('.mermaid .node rect, .mermaid .node path')).fill"
    light = browser.execute_script(ink)
    browser.execute_script("document.body.dataset.theme = 'dark'")
    from selenium.webdriver.support.ui import WebDriverWait

    WebDriverWait(browser, 30).until(
        lambda b: (
            b.execute_script(
                f"return document.querySelector('.mermaid .node rect, .mermaid .node path') && (() => {{ {ink} }})()"
            )
            != light
        )
    )


@pytest.mark.slow
def test_blocks_of_the_how_to_run_alone(tmp_path):
    "Each in a fresh namespace, as if it were copied into a script"
    from test_house import cells

    for c in cells(ROOT / 'nbs/howto.ipynb'):
        if re.search(r'#\| *hide', source := ''.join(c['source'])):
            continue
        try:
            exec(compile(source, c['id'], 'exec'), {'__name__': '__main__'})
        except Exception as e:
            pytest.fail(f"{source}\n{type(e).__name__}: {e}")


NEEDS_MORE = {'learning/video', 'data/datasets'}  # a run, a data set


@pytest.mark.slow
def test_opening_examples_run_alone(tmp_path, monkeypatch):
    "The first block of Python on a page, where it begins with its imports, as if it were copied into a script"
    monkeypatch.chdir(tmp_path)
    tried = []
    for nb in NOTEBOOKS:
        page = nb.relative_to(ROOT / 'nbs').with_suffix('').as_posix()
        block = re.search(
            r'```python\n((?:import|from) .*?)```',
            ''.join(json.loads(nb.read_text(encoding='utf-8'))['cells'][0]['source']),
            re.S,
        )
        if not block or page in NEEDS_MORE:
            continue
        try:
            exec(compile(block[1], page, 'exec'), {'__name__': '__main__'})
        except Exception as e:
            pytest.fail(f'{page}: {type(e).__name__}: {e}\n{block[1]}')
        tried.append(page)
    assert len(tried) > 25, tried
