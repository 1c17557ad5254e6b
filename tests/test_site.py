"""The site builds without a warning, is complete and self-contained, and works in a browser."""

import html.parser
import os
import re
import sys
from urllib.parse import unquote, urlsplit

import pytest
from filelock import FileLock
from selenium.webdriver.support.ui import WebDriverWait
from sphinx.util.inventory import InventoryFile
from test_house import NOTEBOOKS, ROOT, SURFACE, page_of, run

sys.path.insert(0, str(ROOT / 'docs'))
from conf import sidebar

pytestmark = pytest.mark.browser
SOURCES = [page for page in map(page_of, NOTEBOOKS) if page not in sidebar]


class Page(html.parser.HTMLParser):
    "The anchors of a page, its links, what it loads, its text without code, its mute pictures."

    def __init__(self, path):
        super().__init__()
        self.path = path
        self.ids = set()
        self.links = []
        self.loads = []
        self.mute = []
        self.text = ''
        self.skip = 0
        self.source = path.read_text(encoding='utf-8')
        self.feed(self.source)

    def handle_starttag(self, tag, attrs):
        a = dict(attrs)
        self.ids |= {a[k] for k in ('id', 'name') if a.get(k)}
        if tag == 'a' and 'href' in a:
            self.links.append(a['href'])
        if tag in ('script', 'img', 'iframe', 'source', 'video') and a.get('src'):
            self.loads.append(a['src'])
        if tag == 'img' and a.get('alt') in (None, '', a['src']):
            self.mute.append(a['src'][:80])
        if tag == 'link':
            self.loads.append(a['href'])
        self.skip += tag in ('pre', 'code', 'script', 'style')

    def handle_endtag(self, tag):
        self.skip -= tag in ('pre', 'code', 'script', 'style')

    def handle_data(self, data):
        if not self.skip:
            self.text += data


@pytest.fixture(scope='session')
def site(tmp_path_factory):
    "Build the site once for all workers of pytest-xdist. Any warning of Sphinx fails the build."
    folder = tmp_path_factory.getbasetemp()
    out = (folder.parent if 'PYTEST_XDIST_WORKER' in os.environ else folder) / 'site'
    with FileLock(f'{out}.lock'):
        if not out.exists():
            built = tmp_path_factory.mktemp('docs') / 'site'
            said = run(sys.executable, ROOT / "docs/make.py", built, timeout=1800)
            assert said == f'open {built}/index.html\n', said
            built.rename(out)
    return out


@pytest.fixture(scope='session')
def pages(site):
    return {p.relative_to(site).as_posix(): Page(p) for p in site.rglob('*.html')}


@pytest.fixture(scope='session')
def inventory(site):
    with open(site / 'objects.inv', 'rb') as file:
        return InventoryFile.load(file, '', lambda base, uri: uri)


# ---- files ----


def test_every_notebook_is_a_page_that_is_linked_and_its_download(pages):
    linked = {'index.html', *pages['index.html'].links}
    assert {f'{page}.html' for page in sidebar} <= linked
    linked |= {*pages['sources.html'].links}
    for nb in NOTEBOOKS:
        page = pages[f'{page_of(nb)}.html']
        assert f'{page_of(nb)}.html' in linked
        (taken,) = {l for l in page.links if l.endswith(f'/{nb.name}') and '_downloads' in l}
        assert (page.path.parent / taken).read_bytes() == nb.read_bytes()


def test_pictures_are_described(pages):
    mute = {page: pages[f'{page}.html'].mute for page in sidebar}
    assert not any(mute.values()), mute


def test_every_public_name_has_one_card_and_a_docstring(pages, inventory):
    places = {}
    for kind in 'py:class', 'py:function', 'py:exception':
        places |= {n: item.uri.replace('$', n) for n, item in inventory.get(kind, {}).items()}
    for module, names in SURFACE.items():
        for name in names.split():
            page, anchor = places[f'fastrl_replay.{module}.{name}'].split('#')
            card = rf'id="{re.escape(anchor)}">.*?</dt>\s*<dd><p>[^ ]'
            assert re.search(card, pages[page].source, re.S), f'{name} is not described on {page}'
            assert page.startswith('reference/')
            assert f'../{module.replace(".", "/")}.html' in pages[page].links, (
                f'no source of {name}'
            )


def card(page, name):
    "Return the signature and the description of a name on a page as text."
    text = page.source[page.source.index(f'id="{name}"') :]
    text = re.sub(r'<[^>]+>', '', text[: text.index('</dl>\n</dd></dl>')])
    return ' '.join(text.split())


def test_classes_have_cards_with_arguments_and_their_comments(pages):
    nstep = card(pages['stages/nstep.html'], 'fastrl_replay.stages.nstep.NStep')
    assert re.search(r' gamma – float \w+', nstep)
    name = 'fastrl_replay.replay.prioritized.PrioritizedReplay'
    page = pages['reference/prioritized_replay.html']
    assert 'PrioritizedReplay( source=None, bs=1, max_sz=1000000' in card(page, name)
    # with what it inherits
    for method in 'add_step sample update_priorities state_dict stats show page'.split():
        assert f'{name}.{method}' in page.ids
    assert f'{name}.snapshot' not in page.ids


def test_no_link_is_dead(site, pages):
    dead = set()
    for name, page in pages.items():
        for link in {*page.links, *page.loads}:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            target = (page.path.parent / unquote(parts.path)).resolve() if parts.path else page.path
            anchor = unquote(parts.fragment)
            if not target.exists():
                dead.add(f'{name}: {link}')
            elif anchor and target.suffix == '.html':
                if anchor not in pages[target.relative_to(site).as_posix()].ids:
                    dead.add(f'{name}: {link}')
    assert not dead, '\n'.join(sorted(dead))


def test_nothing_comes_from_elsewhere(site, pages):
    loads = [(n, l) for n, p in pages.items() for l in p.loads]
    for path in site.rglob('*.css'):
        for link in re.findall(r'(?:url\(|@import)\s*["\']?([^)"\']+)', path.read_text()):
            loads.append((path.name, link))
    assert not [(n, l) for n, l in loads if urlsplit(l).netloc]


def test_no_directive_is_left_over(pages):
    for name, page in pages.items():
        if name[0] != '_':
            found = re.findall(r'#\||:::|\{eval-rst\}|```|\{(?:download|toctree)\}|\$\$', page.text)
            assert not found, f'{name}: {found}'


def test_backticks_lead_to_the_api(pages):
    for page, target in {
        'memory/timeline': '../reference/batch_classes.html#fastrl_replay.steps.core.Steps',
        'all': 'reference/loss_functions.html#fastrl_replay.learning.losses.rescale',
        # written `.dqn`
        'train': 'reference/dqn_learners.html#fastrl_replay.learning.dqn.DQNLearner',
    }.items():
        assert target in pages[f'{page}.html'].links
    # a word there
    assert '../app/runs.html#fastrl_replay.app.runs.start' not in pages['steps/core.html'].links


# ---- in a browser ----


def show(browser, url, width, theme='light'):
    "Open a page in a window of that width."
    size = dict(width=width, height=900, deviceScaleFactor=1, mobile=False)
    browser.execute_cdp_cmd('Emulation.setDeviceMetricsOverride', size)
    features = [dict(name='prefers-color-scheme', value=theme)]
    browser.execute_cdp_cmd('Emulation.setEmulatedMedia', dict(features=features))
    browser.get(url)


FACTS = """
    const box = e => e.getBoundingClientRect();
    const all = selector => [...document.querySelectorAll(selector)];
    const scrolls = e => e && (/auto|scroll|hidden/.test(getComputedStyle(e).overflowX)
      || scrolls(e.parentElement));
    const sticks = r => r.right > innerWidth + 1 || r.left < -1;
    const seen = all('article *').filter(e => box(e).width);
    return {
      wide: document.documentElement.scrollWidth,
      out: seen.filter(e => sticks(box(e)) && !scrolls(e.parentElement))
        .map(e => e.outerHTML.slice(0, 150)),
      equations: document.querySelectorAll('.math').length,
      drawn: all('.math svg').filter(e => box(e).width && box(e).height).length,
      errors: all('[data-mjx-error]').length,
      broken: [...document.images].filter(i => !i.naturalWidth).map(i => i.src)}"""


@pytest.mark.parametrize('name', [*sidebar, *SOURCES, 'genindex', 'search'])
def test_page_in_the_browser(site, browser, name):
    """No console errors; equations are drawn, in light and dark.

    Nothing sticks out on a phone or a screen. Source notebooks are opened on a phone only."""
    for width, theme in (1400, 'light'), (400, 'dark'):
        if width == 1400 and name in SOURCES:
            continue
        show(browser, f'file://{site}/{name}.html', width, theme)
        log = browser.get_log('browser')
        assert not [l['message'] for l in log if l['level'] in ('SEVERE', 'WARNING')]
        facts = browser.execute_script(FACTS)
        assert facts['wide'] <= width and not facts['out'], (width, facts)
        assert facts['drawn'] >= facts['equations'] and not facts['errors'], facts
        assert not facts['broken'], facts


def test_there_is_something_to_draw(site, browser):
    "The checks above would pass a site that lost its equations."
    show(browser, f'file://{site}/learning/losses.html', 1400)
    assert browser.execute_script(FACTS)['drawn'] >= 10


@pytest.mark.parametrize(
    'query, page',
    [
        ('PrioritizedReplay', 'reference/prioritized_replay.html'),
        ('update_priorities', 'reference/'),
        ('custom sampler', 'tutorials/your_own_sampler.html'),
        ('buffer', 'memories.html'),
        ('HER', 'replay/hindsight.html'),
        ('hidden state', 'tutorials/recurrent_agents.html'),
        ('Isaac Lab', 'tutorials/simulators.html'),
        ('priorities not changing', 'faq.html'),
    ],
)
def test_search_finds_it(site, browser, query, page):
    "Without a server."
    show(browser, f'file://{site}/search.html?q={query}', 1400)
    script = """return [...document.querySelectorAll('#search-results li a')]
        .map(a => a.getAttribute('href'))"""
    found = WebDriverWait(browser, 30).until(lambda b: b.execute_script(script))
    assert any(page in link for link in found[:3]), found
