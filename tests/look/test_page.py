"""The page in a file: self-contained, runs nothing of the data, and usable in Chromium."""

import json
import re

import pytest
from memories import memory, rows_of, sampled
from pages import HOSTILE, complaints, opened, sticking_out

from fastrl_replay.all import ArgumentError, PrioritizedReplay, Rows, Timeline
from fastrl_replay.cli import main
from fastrl_replay.look.page import page_html
from fastrl_replay.look.run_sample import run_sample
from fastrl_replay.look.sample import samples_of


def data_of(page):
    return json.loads(
        re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1]
    )


def a_run(name='r', **more):
    lines = [
        dict(
            env_steps=1000 * i,
            wall_s=2.0 * i,
            updates=100 * i,
            episodes=20 * i,
            return_mean=5.0 * i,
            loss=1 / i,
        )
        for i in range(1, 9)
    ]
    lines.append(dict(env_steps=8000, eval_return=30.0, eval_std=2.0, eval_episodes=5))
    config = dict(settings=dict(lr=0.1, steps=8000), versions=dict(torch='2.13'))
    return run_sample(name, f'cartpole {name}', config, lines, **more)


def hostile_parts():
    """Return a memory and a run with markup in all names and texts."""
    names = [h for h in HOSTILE if h[:1] != '_' and h.isprintable()]
    timeline = Timeline(80)
    timeline.add(rows_of(60, **{n: 'f4' for n in names}))
    (s,) = samples_of(timeline)
    evil = {h: h for h in HOSTILE}
    s |= dict(title=HOSTILE[0], name=HOSTILE[1], lead=HOSTILE[3], settings=evil, numbers=evil)
    s['remarks'] = [dict(text=h, keys=[1]) for h in HOSTILE]
    for e in s['episodes']:
        e |= dict(why=list(HOSTILE), end=HOSTILE[0])
    config = dict(settings=evil, versions=evil, machine=HOSTILE[1])
    lines = [{'env_steps': i, 'loss': 1.0, **{h: 0.5 for h in HOSTILE}} for i in range(5)]
    run = run_sample(HOSTILE[0], HOSTILE[1], config, lines, dict(evil), said=HOSTILE[2])
    return [run, run, s, s]


@pytest.mark.parametrize('kind', ['sequences', 'frames'])
def test_a_page_needs_nothing_else(kind):
    page = memory(kind).page().page
    assert "default-src" in page
    markup = re.sub(r'<script.*?</script>', '', page, flags=re.S)
    assert not re.search(r'(src|href|action)=|@import|url\(|connect-src', markup)
    assert len(page) - len(json.dumps(data_of(page))) < 80_000


def test_hostile_texts_are_in_the_data_alone():
    page = page_html(hostile_parts(), HOSTILE[0])
    assert page.count('<script') == page.count('</script>') == 2
    assert not re.search(r'<img|<svg onload|<!--', page)
    assert data_of(page)['parts'][2]['remarks'][3]['text'] == HOSTILE[3]


def test_a_path_comes_back_and_a_wrong_one_is_an_error_first(tmp_path, monkeypatch):
    replay = memory('uniform')
    path = replay.page(str(tmp_path / 'a.html'))
    assert path == tmp_path / 'a.html' and path.read_text(encoding='utf-8').endswith('</html>\n')
    for wrong in tmp_path / 'none' / 'a.html', tmp_path:
        with pytest.raises(ArgumentError, match='path'):
            replay.page(wrong)
    assert [p.name for p in tmp_path.iterdir()] == ['a.html']


def test_the_command_writes_the_page_of_a_memory_on_disk(tmp_path, capsys):
    """Also while another process writes; the directory stays as it is."""
    replay = sampled(PrioritizedReplay(bs=4, max_sz=90, store=Rows(tmp_path / 'm')), rows_of(120))
    replay.flush()
    before = {p: p.read_bytes() for p in (tmp_path / 'm').rglob('*') if p.is_file()}
    assert main(['memory', str(tmp_path / 'm'), '--html', str(tmp_path / 'm.html')]) == 0
    said = capsys.readouterr().out
    assert '90 rows' in said and 'keys 30 to 119' in said and 'm.html' in said
    (part,) = data_of((tmp_path / 'm.html').read_text(encoding='utf-8'))['parts']
    assert part['rows'] == 90 and part['episodes'][0]['priority']
    assert before == {p: p.read_bytes() for p in (tmp_path / 'm').rglob('*') if p.is_file()}
    assert main(['memory', str(tmp_path / 'm'), '--html', str(tmp_path / 'none' / 'm.html')]) == 2


@pytest.mark.slow
@pytest.mark.parametrize('kind', ['proportional', 'sequences', 'device'])
def test_the_figure_has_the_charts_of_the_sample(kind):
    m = memory(kind)
    (s,) = samples_of(m)
    titles = {a.get_title().replace('\n', ' ') for a in m.show().axes}
    assert titles >= {c['title'] for c in s['charts']} and len(s['charts']) >= 2
    assert m.show()._repr_png_().startswith(b'\x89PNG')


# ---- what a run tells ----


def test_a_run_tells_its_results_and_names_its_curves():
    s = a_run(summary=dict(final_return=31.5, solved=475, solved_at_step=None))
    assert s['facts']['final return (20 episodes, no exploration)'] == 31.5
    titles = [c['title'] for c in s['charts']]
    assert titles[0] == 'Return' and {'Loss', 'Updates per second', 'Steps per episode, mean'} <= {
        *titles
    }
    assert s['charts'][0]['levels'] == [[475, 'solved']]


# ---- in a browser ----


@pytest.fixture(scope='module')
def files(tmp_path_factory):
    """Return files of pages by name."""
    out = tmp_path_factory.mktemp('pages')
    kinds = 'timeline', 'proportional', 'sequences', 'hindsight', 'frames', 'mixture'
    made = {kind: memory(kind).page(out / f'{kind}.html') for kind in kinds}
    made['empty'] = Timeline(5).page(out / 'empty.html')
    texts = dict(hostile=hostile_parts(), run=[a_run(), *samples_of(memory('proportional'))])
    texts['runs'] = [a_run('a'), a_run('b')]
    for name, parts in texts.items():
        made[name] = out / f'{name}.html'
        made[name].write_text(page_html(parts, name), encoding='utf-8')
    return {name: f'file://{path}' for name, path in made.items()}


@pytest.mark.browser
@pytest.mark.parametrize('width, theme', [(1200, 'light'), (400, 'dark')])
@pytest.mark.parametrize('name', ['sequences', 'frames', 'empty', 'hostile', 'run', 'runs'])
def test_nothing_runs_nothing_is_missing_nothing_sticks_out(browser, files, name, width, theme):
    opened(browser, files[name], width, theme)
    said = complaints(browser)
    if name == 'hostile':
        said = [m for m in said if not re.search('javascript:|[Mm]edia', m)]
    assert not said and not sticking_out(browser)
    assert browser.execute_script('return window.ran') is None
    broken = "return document.querySelector('main').textContent.includes('cannot be shown:')"
    assert not browser.execute_script(broken)
    color = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (color == 'rgb(18, 23, 28)') == (theme == 'dark')


def key_here(browser):
    return browser.execute_script("""
        const dt = [...document.querySelectorAll('.panel dt')].find(d => d.textContent === 'key');
        return Number(dt.nextSibling.textContent.replaceAll(',', ''))""")


@pytest.mark.browser
def test_one_goes_through_an_episode(browser, files):
    from selenium.webdriver import ActionChains, Keys

    opened(browser, files['proportional'])
    first = key_here(browser)
    ActionChains(browser).send_keys(Keys.ARROW_RIGHT).perform()
    assert key_here(browser) == first + 2  # two environments
    ActionChains(browser).send_keys(Keys.END).perform()
    last = key_here(browser)
    assert f'key={last}' in browser.current_url
    browser.find_elements('css selector', '.episode')[1].click()
    assert key_here(browser) not in (first, last)


@pytest.mark.browser
@pytest.mark.parametrize(
    'text, said',
    [
        ('key:60', '1 of 6 episodes, 1 steps'),
        ('state[0]>13 terminated:false', '4 of 6 episodes, 4 steps'),
        ('key:3', 'row 3 was overwritten'),
    ],
)
def test_what_is_searched_is_found(browser, files, text, said):
    opened(browser, files['timeline'])
    box = browser.find_element('css selector', '.searching input')
    box.send_keys(text)
    assert said in browser.find_element('css selector', '.searching .note').text


@pytest.mark.browser
def test_pictures_sequences_and_goals_are_shown(browser, files):
    opened(browser, files['frames'])
    assert browser.execute_script("return document.querySelector('.strip img').naturalWidth") == 12
    opened(browser, files['sequences'])
    assert 'burn-in' in browser.find_element('css selector', '.tracks').text
    opened(browser, files['hindsight'])
    assert 'Hindsight goal' in browser.find_element('css selector', '.panel').text


@pytest.mark.browser
def test_memories_have_tabs_and_runs_stand_side_by_side(browser, files):
    opened(browser, files['mixture'])
    tabs = browser.find_elements('css selector', '[role=tab]')
    assert [t.text for t in tabs] == ['a', 'b']
    tabs[1].click()
    assert browser.find_element('css selector', '[aria-selected=true][role=tab]').text == 'b'
    opened(browser, files['runs'])
    assert (
        'a, evaluation, no exploration' in browser.find_element('css selector', 'figcaption').text
    )
    assert 'all settings are the same' in browser.find_element('tag name', 'main').text
