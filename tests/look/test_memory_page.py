"The page of a memory: what is in it, how large it is, that nothing of the data runs in it; and, in Chromium, that it can be used."
import json, re, sys, time

import numpy as np, pytest
from gymnasium import spaces
from pages import HOSTILE, complaints, opened, sticking_out
from fastrl_replay.all import *
from fastrl_replay.cli import main
from fastrl_replay.look.html import Framed
from fastrl_replay.look.memory_page import memory_page
from fastrl_replay.look.sampled import choose_episodes, sample_of

FEW = spaces.Box(-9, 9, (3,))

def rows_of(n, envs=2, length=15, space=FEW, action=spaces.Discrete(4), **extra):
    "Environments in turn, whose episodes have this length; states count steps"
    rows, key = np.zeros(n, step_dtype(space, action, **extra)), np.arange(n)
    step = key//envs % length
    rows['env_id'], rows['step_n'], rows['episode_n'] = key % envs, step + 1, key//envs//length + 1
    rows['reward'] = rows['total_reward'] = np.where(step == length - 1, key//envs//length % 7 + key % envs, 0)
    rows['terminated'] = step == length - 1
    if space is FEW:
        rows['state'], rows['next_state'] = step[:, None] + [.25, .5, 0], step[:, None] + [1.25, 1.5, 1]
        rows['action'] = step % 4
    return Steps(rows)

def drawn(replay, n=40, seed=0):
    rng = np.random.default_rng(seed)
    for _ in range(n):
        b = replay.sample()
        if hasattr(replay, 'kind'): replay.update_priorities(b.index if hasattr(b, 'index') else b['index'], rng.random(len(b)) + .1)
    return replay

def having(memory, steps):
    memory.add(steps)
    return memory

def small(n=90, **kw): return drawn(having(PrioritizedReplay(bs=8, max_sz=100, seed=0, **kw), rows_of(n)))
def of_frames(): return drawn(having(ExperienceReplay(bs=2, max_sz=90, seed=0, store=Frames(2)), rows_of(60, space=spaces.Box(0, 255, (2, 12, 12), np.uint8))), 3)

def data_of(page): return json.loads(re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)[1])

# ---- what is in it ----

def test_it_says_what_the_memory_says():
    replay = small()
    page, keys = replay.page().page, replay.memory.keys
    part, = data_of(page)['parts']
    assert '90 of 100 rows, 6 episodes of 2 environments' in page and 'All 6 episodes are in this page.' in page
    rows, p = replay.memory[:].rows, replay.sampler.probabilities()*90
    seen = np.concatenate([e['key'] for e in part['episodes']])
    assert sorted(seen) == keys.tolist()
    for e in part['episodes']:
        at = np.array(e['key'])
        assert np.allclose(e['chance'], p[at], rtol=1e-5) and np.allclose(e['priority'], replay.sampler.kept()[at], rtol=1e-5)
        assert e['drawn'] == replay.memory.times_drawn[at].tolist() and np.allclose(e['weight'], (p[at]/p.min())**-.4, rtol=1e-4)
        assert e['columns']['action'] == rows['action'][at].tolist() and np.allclose(e['columns']['state'], rows['state'][at])
        assert e['before'] == [-1, *e['key'][:-1]] and e['after'] == [*e['key'][1:], -1]
        assert e['columns']['next_state'][:-1] == ['=']*(len(at) - 1) and e['columns']['next_state'][-1] == rows['next_state'][at[-1]].tolist()

def test_a_step_that_does_not_follow_is_told():
    "`next_state` is written out where it is not the state of the next row"
    steps = rows_of(30)
    steps.rows['next_state'][8] = 7
    replay = having(ExperienceReplay(bs=2, max_sz=50), steps)
    e = next(e for e in data_of(replay.page().page)['parts'][0]['episodes'] if 8 in e['key'])
    assert [x == '=' for x in e['columns']['next_state']] == [k not in (8, e['key'][-1]) for k in e['key']]

def goals(n):
    space = spaces.Dict({k: spaces.Box(-9, 9, (2,)) for k in ('observation', 'achieved_goal', 'desired_goal')})
    steps = rows_of(n, space=space)
    steps.rows['next_state']['achieved_goal'] = steps.rows['step_n'][:, None]
    steps.rows['reward'] = -2.*steps.rows['step_n']   # the distance to a goal of zeros
    return steps

def in_hindsight(): return HindsightReplay(bs=4, max_sz=90, reward=lambda a, d, info: -np.abs(a - d).sum(-1), seed=0)

def merged():
    "Rows of three steps"
    replay = ExperienceReplay(NStep([rows_of(60)[i:i+6] for i in range(0, 60, 6)], 3, .5), bs=2, max_sz=90, seed=0)
    for _ in replay: pass
    return replay

def million(): return having(ExperienceReplay(bs=2, max_sz=1_000_000), rows_of(1_000_000, envs=16, length=50))

def memories(tmp):
    sequences = having(SequenceReplay(bs=2, max_sz=90, length=6, burn_in=2, overlap=3, seed=0), rows_of(80))
    for _ in range(3): sequences.update_priorities(sequences.sample().index, np.random.rand(2, 4))
    return dict(hindsight=drawn(having(in_hindsight(), goals(80)), 3), sequences=sequences, frames=of_frames(),
        uniform=drawn(having(ExperienceReplay(bs=2, max_sz=90, seed=0), rows_of(60)), 3),
        kept=drawn(having(PrioritizedReplay(bs=2, max_sz=90, seed=0, store=Rows(tmp/'m')), rows_of(120)), 3),
        device=drawn(having(PrioritizedReplay(bs=2, max_sz=90, seed=0, store=Rows(device='cpu')), rows_of(120)), 3),
        steps=drawn(merged(), 3),
        timeline=having(Timeline(50), rows_of(70)), ranked=drawn(having(PrioritizedReplay(bs=2, max_sz=90, kind='rank', seed=0), rows_of(70)), 3),
        mixture=Mixture({'a': small(), 'b': small(70)}, dict(a=.5, b=.5)))

def test_looking_changes_nothing(tmp_path):
    "Of any kind of memory, wherever it lies: the state is as before, and the next batches are those that would have come"
    for name, memory in memories(tmp_path).items():
        state = lambda: re.sub(r"'priorities': '\d+'", '', str(memory.state_dict()))   # on disk, each state has another number
        before, page = state(), memory.page().page
        assert state() == before and all(p['episodes'] for p in data_of(page)['parts']), name
    a, b = (having(in_hindsight(), goals(80)) for _ in range(2))
    a.page()
    assert all((a.sample().rows == b.sample().rows).all() for _ in range(4))

def test_what_belongs_to_each_kind_is_there(tmp_path):
    found = {n: data_of(m.page().page)['parts'] for n, m in memories(tmp_path).items()}
    s, = found['sequences']
    assert s['unit'] == 'sequences' and s['burn_in'] == 2 and all(e['spans']['length'] and 'chance' in e['spans'] for e in s['episodes'])
    h = found['hindsight'][0]['episodes'][0]['more']
    assert {'goal', 'goal_key', 'goal_reward'} <= set(h) and found['hindsight'][0]['share'] == .8
    for e in found['hindsight'][0]['episodes']:
        assert all(g >= k and g in e['key'] for g, k in zip(e['more']['goal_key'], e['key']))
    assert found['frames'][0]['frames'] and found['frames'][0]['episodes'][0]['pictures']['state']
    assert [p['name'] for p in found['mixture']] == ['a', 'b']

def test_a_page_needs_nothing_else(tmp_path):
    "No address but those within it, a policy that allows none, and a few hundred KB beside what is sampled"
    for name, memory in {**memories(tmp_path), 'empty': Timeline(5)}.items():
        page = memory.page().page
        markup = re.sub(r'<script.*?</script>', '', page, flags=re.S)
        assert not re.search(r'(src|href|action|poster|srcset)="(?!data:)|@import|url\(', markup), name
        assert 'default-src &#x27;none&#x27;' in page and not re.search(r'connect-src|frame-src|https?://(?!www\.w3\.org/2000/svg)', page), name
        assert len(page) - len(json.dumps(data_of(page))) < 400_000, name

def test_rows_drawn_most_and_never_are_those_of_the_memory(without_figure):
    replay = drawn(having(PrioritizedReplay(bs=8, max_sz=100, seed=0), rows_of(90)), 10)
    times, tables = replay.memory.times_drawn, re.search(r'<div class="tables"><div><p class="note">The rows that were drawn most.*?</section>', replay.page().page, re.S)[0]
    most, never = ([int(k) for k in re.findall(r'data-key="(\d+)"', t)] for t in tables.split('were never drawn'))
    assert times[most].tolist() == sorted(times, reverse=True)[:10] and len({*most}) == 10
    assert never == np.flatnonzero(times == 0)[:10].tolist() and f'{(times == 0).mean():.2%} of the rows' in tables

def test_an_empty_memory_has_a_page_that_says_so(tmp_path):
    for memory in (Timeline(5), ExperienceReplay(bs=2, max_sz=5), PrioritizedReplay(bs=2, max_sz=5), SequenceReplay(bs=2, max_sz=50, length=4),
                   ExperienceReplay(bs=2, max_sz=5, store=Rows(tmp_path/'never')), ExperienceReplay(bs=2, max_sz=5, store=Frames(4))):
        page = memory.page().page
        assert 'The memory is empty: no row has come so far.' in page and data_of(page)['parts'][0]['episodes'] == []

def test_a_wrong_path_is_an_error_before_there_is_a_page(tmp_path, monkeypatch):
    replay = small()
    monkeypatch.setattr(type(replay), 'inside', lambda self: 1/0)
    for path in (tmp_path/'none'/'a.html', tmp_path):
        with pytest.raises(ArgumentError, match="PrioritizedReplay: path"): replay.page(path)

def test_a_path_comes_back_and_the_file_is_whole(tmp_path):
    path = small().page(str(tmp_path/'a.html'))
    assert path == tmp_path/'a.html' and path.read_text(encoding='utf-8').endswith('</html>\n') and [p.name for p in tmp_path.iterdir()] == ['a.html']

def test_in_a_notebook_it_is_framed():
    shown = small().page()
    assert isinstance(shown, Framed) and 'sandbox="allow-scripts"' in shown._repr_html_() and shown._repr_html_().count('<') == 2

def test_without_matplotlib_it_says_what_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, 'matplotlib', None)
    page = small().page().page
    assert 'fastrl_replay[plot]' in page and data_of(page)['parts'][0]['episodes']

@pytest.fixture
def without_figure(monkeypatch): monkeypatch.setitem(sys.modules, 'matplotlib', None)

class Remark(str):
    "As memories make them: with keys of rows that show it"
    keys = ()

def long_and_short(out=None):
    "100 short episodes, then some of 600 steps; a remark that rows of both show: a page, or a file"
    replay = ExperienceReplay(bs=4, max_sz=9000, seed=0)
    for n, length in ((2000, 20), (2400, 600)): replay.add(rows_of(n, length=length))
    inside, remark = replay.inside(), Remark('what <is> unusual')
    remark.keys = 1003, 2611, 10**9   # the last is not there
    inside.update(remarks=[Remark('that no row shows'), remark])
    page = memory_page({'': (inside, replay.memory.still_there, None)})
    return page if out is None else (out.write_text(page, encoding='utf-8'), out)[1]

def test_rows_of_remarks_are_in_the_page_and_it_opens_there(without_figure):
    page = long_and_short()
    part, = data_of(page)['parts']
    named = [e for e in part['episodes'] if e['why'][0] == 'with something unusual']
    assert part['opened'] == [1003] and [[e['key'][i] for i in e['named']] for e in named] == [[2611], [1003]]
    assert re.search(r'what &lt;is&gt; unusual .*data-key="1003".*>1,003</span>.*>2,611</span></span></li>', page) and 'data-key="1000000000"' not in page

def test_rows_of_remarks_are_among_the_steps_and_pictures_of_long_episodes():
    replay = ExperienceReplay(bs=4, max_sz=40_000, store=Frames(2))
    steps = rows_of(20_000, envs=1, length=10**6, space=spaces.Box(0, 255, (2, 12, 12), np.uint8))
    steps.rows['state'][:, 1] = np.random.default_rng(0).integers(0, 255, (20_000, 12, 12))
    steps.rows['state'][1:, 0] = steps.rows['state'][:-1, 1]
    steps.rows['next_state'][:-1] = steps.rows['state'][1:]
    replay.add(steps)
    inside, remark = replay.inside(), Remark('x')
    remark.keys = 7777,
    inside['remarks'] = [remark]
    e, = sample_of(inside, replay.memory.still_there, 300_000)['episodes']
    assert 7777 in e['key'] and 7777 in e['pictures']['state'] and len(e['pictures']['state']) < len(e['key']) < 20_000

def test_a_memory_without_remarks_says_what_was_looked_at(without_figure):
    replay = small()
    inside, there = dict(replay.inside(), remarks=[], checked='rewards, ends in 90 rows'), replay.memory.still_there
    assert 'Nothing unusual: looked at rewards, ends in 90 rows</p>' in memory_page({'': (inside, there, None)})
    assert 'Nothing unusual' not in memory_page({'': (dict(inside, remarks=['x']), there, None)})

def test_without_scripts_each_environment_has_a_picture_and_nothing_leads_nowhere(without_figure):
    page = of_frames().page().page
    seen = page[:page.index('<script')]
    assert seen.count('<img src="data:image/png;base64,') == 2 and 'alt="state of environment 1, key' in seen and '<a ' not in seen and 'class="key"' in seen

# ---- how large it is ----

def test_long_episodes_of_frames_stay_within_the_bound():
    "12 episodes of 500 steps of 84×84×4: fewer steps have pictures, and the page says so"
    n, rng = 6000, np.random.default_rng(0)
    steps = rows_of(n, envs=4, length=500, space=spaces.Box(0, 255, (4, 84, 84), np.uint8))
    noise = rng.integers(0, 255, (n + 8, 84, 84)).astype(np.uint8) >> 5   # so noisy that few fit
    for j in range(4): steps.rows['state'][:, j], steps.rows['next_state'][:, j] = noise[j:n+j], noise[4+j:n+4+j]
    replay = having(ExperienceReplay(bs=2, max_sz=n, store=Frames(4)), steps)
    began = time.perf_counter()
    page = replay.page().page
    print(f'{len(page):,} characters, {time.perf_counter() - began:.2f} s')
    part, = data_of(page)['parts']
    assert len(page) < 2_100_000 and len(part['episodes']) == 12 and 'pictures of' in page
    for e in part['episodes']: assert len(e['key']) == 500 and e['pictures']['state']   # each has some, and all numbers

def test_wide_rows_stay_within_the_bound():
    steps = rows_of(20_000, envs=8, length=1000, space=spaces.Box(-9, 9, (400,)), action=spaces.Box(-1, 1, (20,)))
    steps.rows['state'] = np.random.default_rng(0).normal(size=(20_000, 400))
    steps.rows['next_state'] = -steps.rows['state']
    page = having(ExperienceReplay(bs=2, max_sz=20_000), steps).page().page
    assert 400_000 < len(page) < 2_100_000 and 'the first 128' not in page and len(data_of(page)['parts'][0]['episodes']) >= 3

def test_a_million_rows_are_a_sample_that_says_so():
    replay = million()
    began = time.perf_counter()
    page = replay.page().page
    print(f'{len(page):,} characters, {time.perf_counter() - began:.2f} s')
    assert '16 of 20,000 episodes are in this page: the newest, the best' in page and 'longest' not in page[:page.index('<script')] and 'too many episodes' in page and len(page) < 1_000_000

def test_one_endless_episode_is_shown_in_runs():
    page = having(ExperienceReplay(bs=2, max_sz=300_000), rows_of(300_000, envs=1, length=10**6)).page().page
    e, = data_of(page)['parts'][0]['episodes']
    assert e['rows'] == 300_000 and 100 < len(e['key']) < 25_000 and e['key'][0] == 0 and e['key'][-1] == 299_999 and len(page) < 2_100_000
    assert 'steps in runs' in page

@pytest.mark.parametrize('seed', range(3))
def test_the_sample_is_the_same_for_the_same_seed(seed):
    replay = ExperienceReplay(bs=8, max_sz=9000, seed=0)
    for n, length in ((4050, 15), (4950, 25)): replay.add(rows_of(n, envs=9, length=length))
    inside = drawn(replay).inside()
    chosen = choose_episodes(inside, 16, seed)
    assert chosen == choose_episodes(inside, 16, seed) and len(chosen) == 16 and len({int(inside['episode']['env_id'][i]) for i in chosen}) == 9
    assert {w for why in chosen.values() for w in why} >= {'newest', 'longest', 'best', 'worst', 'with rows drawn most', 'with rows never drawn', 'at random'}

# ---- hostile data ----

def hostile_memory():
    "Markup in columns' names, values, remarks and names of replays; NaN and infinities among numbers"
    names = [h for h in HOSTILE if h[:1] != '_' and h.isprintable()]
    steps = rows_of(60, **{n: 'f4' for n in names})
    for i, n in enumerate(names): steps.rows[n] = [np.inf, -np.inf, i, 1e30, -0., 5]*10
    line = having(Timeline(80), steps)
    inside = line.inside()
    inside.update(title=HOSTILE[0], remarks=list(HOSTILE), path=HOSTILE[1], settings={h: h for h in HOSTILE}, numbers={h: float('nan') for h in HOSTILE})
    def take(keys):
        keys, rows = line.still_there(keys)
        rows = rows.copy()
        rows['state'][rows['step_n'] == 3] = np.nan
        rows['reward'][rows['step_n'] == 5] = np.nan
        wide = np.zeros(len(rows), [*((n, rows.dtype[n]) for n in rows.dtype.names), ('info', 'U60')])
        for n in rows.dtype.names: wide[n] = rows[n]
        wide['info'] = [HOSTILE[k % len(HOSTILE)] for k in keys]
        return keys, wide
    return {HOSTILE[1]: (inside, take, None), HOSTILE[3]: (inside, take, None)}

def test_a_hostile_memory_is_text():
    page = memory_page(hostile_memory())
    assert page.count('<script') == 3 and page.count('</script>') == 3 and not re.search(r'<img(?! src="data:image/png;base64,)|<svg onload|<!--', page)
    part = data_of(page)['parts'][0]
    assert HOSTILE[0] in part['episodes'][0]['columns'] and 'NaN' in json.dumps(part)
    assert {*HOSTILE[:6]} <= {x for e in part['episodes'] for x in e['columns']['info']}   # texts come back as they were

# ---- the command ----

def test_the_command_writes_the_page_of_a_memory_on_disk(tmp_path, capsys):
    replay = having(PrioritizedReplay(bs=4, max_sz=90, store=Rows(tmp_path/'m')), rows_of(120))
    drawn(replay, 5)
    before = sorted((p.name, p.read_bytes()) for p in (tmp_path/'m').rglob('*') if p.is_file())
    assert main(['memory', str(tmp_path/'m'), '--html', str(tmp_path/'m.html')]) == 0 and 'm.html' in capsys.readouterr().out   # while it is open for writing
    page = (tmp_path/'m.html').read_text(encoding='utf-8')
    assert '90 of 90 rows' in page and str(tmp_path/'m') in page and data_of(page)['parts'][0]['episodes'][0]['priority']
    assert before == sorted((p.name, p.read_bytes()) for p in (tmp_path/'m').rglob('*') if p.is_file())
    assert main(['memory', str(tmp_path/'m'), '--html', str(tmp_path/'none'/'m.html')]) == 2 and 'none' in capsys.readouterr().err

def test_rows_that_are_overwritten_meanwhile_are_left_out(tmp_path):
    "A reader, while the process that writes goes on between what it says and what is read"
    replay = having(ExperienceReplay(bs=2, max_sz=100, store=Rows(tmp_path/'m', spare=20)), rows_of(100))
    reader = Timeline(100, Rows(tmp_path/'m', mode='r', spare=20))
    inside = reader.inside()
    def take(keys):
        if replay.memory.inserted < 200: replay.add(rows_of(60))
        return reader.still_there(keys)
    sample = sample_of(inside, take)
    assert all(k >= replay.memory.oldest for e in sample['episodes'] for k in e['key'])
    assert memory_page({'': (inside, take, None)})

# ---- in a browser ----

@pytest.fixture(scope='module')
def pages(tmp_path_factory):
    "Files by name"
    out = tmp_path_factory.mktemp('pages')
    made = {n: m.page(out/f'{n}.html') for n, m in {**memories(out), 'small': small(), 'empty': Timeline(5), 'million': million()}.items()}
    (out/'hostile.html').write_text(memory_page(hostile_memory()), encoding='utf-8')
    return {**made, 'hostile': out/'hostile.html'}

def press(browser, *keys):
    from selenium.webdriver import ActionChains
    for key in keys: ActionChains(browser).send_keys(key).perform()

def here(browser): return browser.execute_script("""
    const fact = name => [...document.querySelectorAll('.fact')].find(f => f.firstChild.textContent === name)?.lastChild.textContent;
    return {key: Number(fact('key').replaceAll(',', '')), step: fact('step'), episode: Number(document.querySelector('.episode[aria-selected=true]')?.dataset.episode),
      shown: document.querySelectorAll('.episode').length, said: document.querySelector('.message').textContent}""")

def search(browser, text):
    box = browser.find_element('css selector', '.searching input')
    box.clear()
    box.send_keys(text)
    time.sleep(.2)
    return here(browser)

NAMES = 'small hindsight sequences frames uniform kept device steps timeline ranked mixture million hostile empty'.split()

@pytest.mark.browser
@pytest.mark.parametrize('name', NAMES)
def test_page_in_the_browser(browser, pages, name):
    "No complaints, nothing sticks out, pictures are there: in two widths, in both colours, step by step"
    from selenium.webdriver.common.keys import Keys
    for width, theme in ((1200, 'light'), (400, 'light'), (1200, 'dark'), (400, 'dark')):
        opened(browser, f'file://{pages[name]}', width, theme)
        if name != 'empty':
            for b in browser.find_elements('css selector', '.episode')[:3]: b.click()
            press(browser, Keys.END, Keys.ARROW_LEFT, Keys.HOME, '?')
        assert not complaints(browser) and not sticking_out(browser), (name, width, theme)
        assert browser.execute_script("return [...document.images].filter(i => !i.naturalWidth).length") == 0
        assert browser.execute_script("return window.ran ?? null") is None

@pytest.mark.browser
def test_it_is_gone_through_by_keyboard(browser, pages):
    from selenium.webdriver.common.keys import Keys
    opened(browser, f'file://{pages["small"]}')
    start = here(browser)
    assert start['step'] == '1 of 15' and start['shown'] == 6 and start['episode'] == 0
    press(browser, Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert here(browser)['key'] == start['key'] + 4 and here(browser)['step'] == '3 of 15'
    press(browser, Keys.END); assert here(browser)['step'] == '15 of 15'
    press(browser, Keys.ARROW_RIGHT); assert here(browser)['step'] == '15 of 15'
    press(browser, Keys.HOME, 'j'); assert here(browser)['episode'] == 1
    press(browser, 'j', 'k', Keys.ARROW_DOWN, Keys.ARROW_UP); assert here(browser)['episode'] == 1
    press(browser, Keys.PAGE_DOWN); assert here(browser)['step'] == '11 of 15'
    press(browser, '/', 'env:0', Keys.ENTER); time.sleep(.2)
    assert here(browser)['shown'] == 3
    press(browser, 'j'); assert here(browser)['shown'] == 3
    press(browser, '/', Keys.ESCAPE); time.sleep(.2)
    assert here(browser)['shown'] == 6
    press(browser, Keys.ESCAPE, Keys.HOME, ' '); time.sleep(.6); press(browser, ' ')
    assert int(here(browser)['step'].split()[0]) > 2   # it played
    assert not complaints(browser)

@pytest.mark.browser
@pytest.mark.parametrize('text, shown, said', [('env:1', 3, '3 of 6 episodes'), ('return>1', 3, '3 of 6'), ('return>=0 env:0', 3, '3 of 6'), ('terminated:true', 6, '6 steps'), ('action:3', 6, 'steps'),
    ('step:15 reward>1', 3, '3 steps'), ('drawn:0', None, 'steps'), ('priority>0 key:31', 1, '1 step'), ('key:31', 1, '1 of 6'), ('key:900', 0, 'has not come so far'), ('newest', None, 'of 6'),
    ('no_such>3', 0, 'is no column'), ('state>14', 6, '6 steps'), ('constructor:1', 0, 'is no column'), ('end:running', 0, '0 of 6'),
    ('state[1]>14', 6, '6 steps'), ('state[0]>14.3', 0, '0 of 6'), ('state[3]>0', 0, '“state[3]” is no column; there are: env, return, length, end, step, key, drawn, chance, priority, weight, state[0…2], action'),
    ('key:1,234', 0, 'row 1,234 has not come')])
def test_search(browser, pages, text, shown, said):
    opened(browser, f'file://{pages["small"]}')
    found = search(browser, text)
    assert said in found['said'] and (shown is None or found['shown'] == shown), found
    if text.endswith('key:31'): assert found['key'] == 31
    if found['shown']: assert found['episode'] is not None   # one of those in the list is selected
    assert browser.find_element('css selector', '.steps').is_displayed() == bool(found['shown'])   # nothing is shown as if it had been found
    assert not complaints(browser)

@pytest.mark.browser
def test_matches_are_gone_through(browser, pages):
    opened(browser, f'file://{pages["small"]}')
    assert search(browser, 'terminated:true')['step'] == '15 of 15'
    from selenium.webdriver.common.keys import Keys
    press(browser, Keys.ENTER)
    seen = []
    for _ in range(6): seen.append(here(browser)['key']); press(browser, 'n')
    assert len(set(seen)) == 6 and here(browser)['key'] == seen[0]
    press(browser, 'N'); assert here(browser)['key'] == seen[-1]
    assert browser.execute_script("return document.querySelectorAll('.matches i').length") == 1

@pytest.mark.browser
def test_links_lead_to_rows(browser, pages):
    opened(browser, f'file://{pages["small"]}')
    link = browser.find_element('css selector', '.tables a[data-key]')
    key = int(link.get_attribute('data-key'))
    browser.execute_script('arguments[0].click()', link)
    assert here(browser)['key'] == key
    [a for a in browser.find_elements('css selector', '.neighbours a')][-1].click()
    assert here(browser)['key'] == key + 2 or here(browser)['key'] == key - 2
    opened(browser, 'about:blank')
    opened(browser, f'file://{pages["small"]}#key=40')
    assert here(browser)['key'] == 40
    browser.execute_script("document.querySelectorAll('.ring .chosen')[2].dispatchEvent(new MouseEvent('click', {bubbles: true}))")
    assert browser.execute_script("return document.querySelectorAll('.ring .chosen.here').length") == 1

@pytest.mark.browser
@pytest.mark.parametrize('name', ['small', 'frames', 'hindsight'])
def test_examples_of_searches_find_something(browser, pages, name):
    opened(browser, f'file://{pages[name]}')
    for text in browser.find_element('css selector', '.searching input').get_attribute('placeholder').split():
        assert search(browser, text)['shown'], text

@pytest.mark.browser
def test_remarks_open_their_rows(browser, tmp_path):
    "The first at once; the list scrolls to the episode; an episode that isn't in the page is said to be in the memory"
    opened(browser, f'file://{long_and_short(tmp_path/"a.html")}')
    shown = """const list = document.querySelector('.episodes').getBoundingClientRect(), b = document.querySelector('.episode[aria-selected=true]').getBoundingClientRect();
        return b.top >= list.top - 1 && b.bottom <= list.bottom + 1"""
    assert here(browser)['key'] == 1003 and browser.execute_script(shown)
    assert search(browser, 'length:600')['shown'] == 4
    first, second = browser.find_elements('css selector', '.remarks a')
    for link, key, listed in ((second, 2611, 4), (first, 1003, 16), (second, 2611, 16)):   # a search that would hide it is over
        browser.execute_script('arguments[0].click()', link)
        assert here(browser)['key'] == key and here(browser)['shown'] == listed and browser.execute_script(shown)
    browser.execute_script("""const ring = document.querySelector('.episodes-of'), box = ring.getBoundingClientRect();
        ring.querySelector('.others path').dispatchEvent(new MouseEvent('click', {bubbles: true, clientX: box.left + box.width*.25, clientY: box.bottom - 3}))""")
    assert re.match(r'The episode of environment 1 around key 1,\d{3} is in the memory, but not in this page', browser.find_element('css selector', '.ring .said').text)
    assert [t.text for t in browser.find_elements('css selector', '.ring text')] == ['env 0', 'env 1'] and not complaints(browser)

@pytest.mark.browser
def test_a_window_shows_single_steps_of_long_episodes(browser, tmp_path):
    "It opens around a row that is asked for, goes along, and can be made smaller and larger"
    from selenium.webdriver.common.keys import Keys
    opened(browser, f'file://{long_and_short(tmp_path/"a.html")}#key=2611')
    window = lambda: browser.find_element('css selector', '.window .note').text
    inside = """const c = document.querySelector('.cursor').getBoundingClientRect(), o = document.querySelector('.overlay').getBoundingClientRect();
        return [c.left >= o.left - 6 && c.right <= o.right + 6, c.width]"""
    assert window() == 'steps 206 to 405 of 600' and here(browser)['step'] == '306 of 600'
    for keys in ((Keys.PAGE_DOWN,)*9, ('+', '+', '+'), (Keys.HOME,), (Keys.END,), ('-', '-'), ('0',)):
        press(browser, *keys)
        within, wide = browser.execute_script(inside)
        assert within and 3 <= wide <= 12.5, (keys, window())
    assert window() == 'steps 1 to 600 of 600' and not complaints(browser)

@pytest.mark.browser
def test_a_step_stands_between_its_neighbours_and_its_change_beside_what_is_usual(browser, tmp_path):
    steps = rows_of(60)
    steps.rows['next_state'][8] = steps.rows['state'][8] + [1, -4, 0]   # usual: a change by 1
    replay = ExperienceReplay(bs=2, max_sz=60)
    replay.add(steps)
    opened(browser, f'file://{replay.page(tmp_path/"a.html")}#key=8')
    cells = lambda table: [[c.text for c in r.find_elements('css selector', 'th, td')][1:] for r in browser.find_elements('css selector', f'{table} tbody tr')]
    assert cells('.neighbours') == [['6', '3', '0', ''], ['8', '0', '0', ''], ['10', '1', '0', '']]
    assert [r[3] for r in cells('.numbers')] == ['1 ×', '4 ×', '0 ×']
    bars = browser.execute_script("return [...document.querySelectorAll('.change i')].map(b => [b.style.width, b.className])")
    assert [b[1] for b in bars[:2]] == ['up', 'down'] and abs(float(bars[0][0][:-1]) - 50/3) < .01 and bars[1][0] == '50%'

@pytest.mark.browser
def test_a_step_shows_all_that_is_known_of_it(browser, tmp_path):
    "Action, reward, flags, priority, importance, draws: as the memory has them"
    replay = small()
    p, drawn = replay.sampler.probabilities()*90, replay.memory.times_drawn
    key = int(np.flatnonzero((replay.memory[:].rows['reward'] > 1) & (drawn > 1))[0])   # the last row of an episode
    row = replay.memory.take([key]).rows[0]
    opened(browser, f'file://{replay.page(tmp_path/"a.html")}#key={key}')
    found = dict(browser.execute_script("return [...document.querySelectorAll('.fact')].map(f => [f.firstChild.textContent, f.lastChild.textContent])"))
    assert [found[n] for n in ('key', 'step', 'action', 'reward', 'drawn', 'age')] == [str(key), '15 of 15', f'{row["action"]}', f'{row["reward"]:g}', f'{drawn[key]} times', f'{90 - key} rows']
    for name, value in dict(priority=replay.sampler.kept()[key], weight=(p[key]/p.min())**-.4).items(): assert float(found[name]) == pytest.approx(value, rel=1e-3), name
    assert found['chance'].endswith(' × uniform') and float(found['chance'].split()[0]) == pytest.approx(p[key], rel=1e-3)
    assert [c.text for c in browser.find_elements('css selector', '.chip')] == ['terminated']

@pytest.mark.browser
def test_rows_of_several_steps_span_them(browser, pages):
    "The cursor is as wide as the steps up to `next_state`; fewer at an episode's end, and none of them is called odd"
    from selenium.webdriver.common.keys import Keys
    opened(browser, f'file://{pages["steps"]}')
    wide = "const c = document.querySelector('.cursor').getBoundingClientRect(), o = document.querySelector('.overlay').getBoundingClientRect(); return c.width/o.width"
    spans = "return [...document.querySelectorAll('.fact')].find(f => f.firstChild.textContent === 'spans')?.lastChild.textContent ?? null"
    length, seen = int(here(browser)['step'].split()[-1]), []
    for _ in range(length):
        seen.append((browser.execute_script(spans), round(browser.execute_script(wide)*length)))
        assert not browser.find_elements('css selector', '.chip.odd')
        press(browser, Keys.ARROW_RIGHT)
    assert length == 15 and seen == [('3 steps, to next_state', 3)]*13 + [('2 steps, to next_state', 2), (None, 0)]

@pytest.mark.browser
def test_tracks_take_clicks_and_drags(browser, pages):
    from selenium.webdriver import ActionChains
    opened(browser, f'file://{pages["small"]}')
    plot = browser.find_elements('css selector', '.plot')[0]
    ActionChains(browser).move_to_element(plot).click().perform()
    assert here(browser)['step'] == '8 of 15'
    ActionChains(browser).move_to_element(plot).click_and_hold().move_by_offset(plot.size['width']//2 - 2, 0).release().perform()
    assert here(browser)['step'] == '15 of 15'

@pytest.mark.browser
def test_each_kind_shows_what_belongs_to_it(browser, pages):
    texts = {}
    for name in ('hindsight', 'sequences', 'frames', 'mixture', 'small'):
        opened(browser, f'file://{pages[name]}')
        texts[name] = browser.find_element('css selector', '#viewer').text
        counts = browser.execute_script("return ['.strip .frame', '.burn', '.span', '.tabs button', '.film img'].map(s => document.querySelectorAll(s).length)")
        texts[name, 'counts'] = counts
    assert 'With a goal in hindsight' in texts['hindsight'] and 'goal of row' in texts['hindsight']
    assert 'burn-in' in texts['sequences'] and texts['sequences', 'counts'][1] > 1 and texts['sequences', 'counts'][2] > 1
    assert texts['frames', 'counts'][0] == 4 and texts['frames', 'counts'][4] > 3   # a stack of two, and its next state
    assert texts['mixture', 'counts'][3] == 2 and 'weight' in texts['small'] and '× uniform' in texts['small']
    opened(browser, f'file://{pages["mixture"]}')
    was = here(browser)['step']
    browser.find_elements('css selector', '.tabs button')[1].click()
    assert was == '1 of 15' and here(browser)['step'] == '1 of 5'

@pytest.mark.browser
def test_odd_steps_are_marked(browser, tmp_path):
    "A next state that is not the next row's state, and one that is the state itself"
    steps = rows_of(60)
    steps.rows['next_state'][8], steps.rows['next_state'][20] = 7, steps.rows['state'][20]
    replay = ExperienceReplay(bs=2, max_sz=60)
    replay.add(steps)
    for key, said in ((8, "next_state is not the next row's state"), (20, 'next_state equals state')):
        opened(browser, 'about:blank')
        opened(browser, f'file://{replay.page(tmp_path/"a.html")}#key={key}')
        assert [c.text for c in browser.find_elements('css selector', '.chip.odd')][:1] == [said] or said in browser.find_element('css selector', '.chips').text
        assert 'odd steps' in browser.find_element('css selector', '.tracks').text
    opened(browser, 'about:blank')
    opened(browser, f'file://{replay.page(tmp_path/"a.html")}#key=31')
    assert not browser.find_elements('css selector', '.chip.odd')

@pytest.mark.browser
@pytest.mark.parametrize('width', [400, 1200])
def test_without_scripts_there_are_a_figure_and_tables(browser, pages, width):
    opened(browser, f'file://{pages["small"]}', width, scripts=False)
    body = browser.find_element('css selector', 'body').text
    assert 'Scripts are off' in body and 'The rows that were drawn most' in body and 'effective' not in body.split('\n')[0]
    assert browser.find_element('css selector', '.figure img').size['width'] > 300 and not browser.find_element('css selector', '#viewer').is_displayed()
    opened(browser, f'file://{pages["small"]}', width)
    assert not browser.find_element('css selector', '.without-scripts').is_displayed()

@pytest.mark.browser
def test_in_a_frame_of_a_notebook_it_works(browser, tmp_path):
    (tmp_path/'notebook.html').write_text(f'<!doctype html><title>n</title>{small().page()._repr_html_()}', encoding='utf-8')
    opened(browser, f'file://{tmp_path}/notebook.html')
    browser.switch_to.frame(0)
    browser.find_elements('css selector', '.episode')[2].click()
    browser.find_element('css selector', '.tables a[data-key]').click()
    assert here(browser)['step'] and browser.find_elements('css selector', '.line')
    browser.switch_to.default_content()
    assert not complaints(browser)
