"What a run tells of itself: report.html at its end, and the live page while it goes on"
import json, os, re, shutil, signal, subprocess, sys, time, urllib.request

import numpy as np, pytest
from pages import HOSTILE, complaints, opened, sticking_out
from test_memory_page import rows_of
from test_recipes import stop, tiny
from fastrl_replay.all import PrioritizedReplay, Rows
from fastrl_replay.app.run_reports import MemorySamples
from fastrl_replay.app.run_files import read_config, read_metrics
from fastrl_replay.app.runs import resume, start
from fastrl_replay.app.recipe_settings import recipe
from fastrl_replay.app.watching import Watch, WatchedRun, state_of, watched_in
from fastrl_replay.cli import main
from fastrl_replay.look.server import Server

def command(*args): return [sys.executable, '-m', 'fastrl_replay', *map(str, args)]

@pytest.fixture
def copied(whole, tmp_path): return shutil.copytree(whole, tmp_path/'r')

def get(url):
    with urllib.request.urlopen(url, timeout=20) as r: return r.read().decode()

def without_times(page):
    "A report without what a clock said, and without its memory's picture"
    page = re.sub(r'<img src="data:[^>]*>', '', page)
    page = re.sub(r'<figure class="chart"><figcaption><b>(environment steps|updates) a second</b>.*?</figure>', '', page)
    page = re.sub(r'<div><dt>(time|steps a second|began|id)</dt><dd>.*?</dd></div>', '', page)
    page = re.sub(r'<section id="part-speed-by-parts">.*?</section>', '', page, flags=re.S)
    return re.sub(r'(steps in) \d+ s', r'\1', page)

# ---- report.html ----

def test_a_run_ends_with_a_report_that_needs_nothing_else(whole):
    page, config = (whole/'report.html').read_text(), read_config(whole)
    s = json.loads((whole/'summary.json').read_text())
    assert not re.search(r'(src|href)="(?!data:)', page) and 'http:' not in page and page.count('<script') == 1
    for said in (s['env'], *config['versions'].values(), f'{s["env_steps"]:,}', 'data:image/png', '<h2>Memory'): assert str(said) in page, said
    assert len(s['final_returns']) == 20 and np.mean(s['final_returns']) == pytest.approx(s['final_return'])
    evals = [m for m in read_metrics(whole) if 'eval_return' in m]
    assert page.count('<tr>') > len(evals) and all(f'<td class="number">{m["env_steps"]:,}</td>' in page for m in evals)

def test_a_resumed_run_has_the_same_report_but_for_times(whole, tmp_path):
    "And one line that says at which step it was resumed"
    out = tmp_path/whole.name
    stop(tiny(out), 200)
    assert not (out/'report.html').exists()
    resume(out).train()
    note, = read_config(out)['resumed']
    assert note['env_steps'] >= 200 and set(note) == {'env_steps', 'at'}   # versions are the same
    a, b = (without_times((d/'report.html').read_text()) for d in (whole, out))
    b, n = re.subn(r'<div class="scrolls"><table><thead><tr><th scope="col"[^>]*>resumed at step.*?</table></div>', '', b)
    assert n == 1
    b = re.sub(r'<line [^>]*><title>resumed at step[^<]*</title></line>', '', b)
    assert a == b

def test_versions_are_noted_where_a_run_is_resumed_with_others(tmp_path):
    stop(tiny(tmp_path/'r'), 200)
    config = json.loads((tmp_path/'r/config.json').read_text())
    (tmp_path/'r/config.json').write_text(json.dumps({**config, 'versions': {**config['versions'], 'torch': '1.0'}}))
    resume(tmp_path/'r').train()
    assert read_config(tmp_path/'r')['resumed'][0]['versions']['torch'] != '1.0' and 'torch' in (tmp_path/'r/report.html').read_text()

def test_the_parts_of_a_run_add_up_to_its_time(tmp_path, monkeypatch):
    "Also where it was resumed; each is counted where it is spent"
    from fastrl_replay.learning.dqn import DQNLearner
    learn = DQNLearner.learn
    monkeypatch.setattr(DQNLearner, 'learn', lambda self, batch: (time.sleep(.002), learn(self, batch))[1])
    out = tmp_path/'r'
    stop(tiny(out), 200)
    run = resume(out)
    s = run.train()
    assert {*s['spent']} == {'environments and policy', 'memory: rows in, batches out', 'learner', 'evaluations', 'checkpoints', 'reports'} and min(s['spent'].values()) > 0
    assert s['spent']['learner'] > .002*s['updates'] > .1 and abs(sum(s['spent'].values()) - s['wall_s']) < .05 + .02*s['wall_s']
    page = (out/'report.html').read_text()
    for part, seconds in s['spent'].items(): assert f'<td>{part}</td><td>{seconds:,.1f} s (' in page
    assert main(['report', str(out)]) == 0 and '<h2>Speed by parts' in (out/'report.html').read_text()
    assert not {'learn', 'save', 'report'} & {*vars(run), *vars(run.agent.pipe)}   # nothing of the clock is left

@pytest.mark.parametrize('changes, part', [(dict(data='rows.npz'), 'memory: rows in, batches out'), (dict(workers=2), 'waiting for workers'), (dict(shards=2), 'waiting for workers'), ({}, 'environments and policy')])
def test_what_comes_between_two_blocks_has_the_name_of_what_it_is(changes, part):
    from fastrl_replay.app.runs import _collecting
    assert _collecting({**recipe('cartpole').settings, **changes}) == part

def test_a_report_that_fails_loses_no_run(tmp_path, monkeypatch):
    monkeypatch.setattr('fastrl_replay.app.run_reports.run_page', lambda *args: 1/0)
    with pytest.warns(UserWarning, match='report.html was not written: ZeroDivisionError'): assert tiny(tmp_path/'r').train()
    assert (tmp_path/'r/summary.json').exists() and not (tmp_path/'r/report.html').exists()

def test_a_memory_that_fails_to_tell_stops_no_training(tmp_path, monkeypatch):
    run = tiny(tmp_path/'r')
    monkeypatch.setattr(type(run.agent.memory), 'inside', lambda self: 1/0)
    with pytest.warns(UserWarning, match='no sample of the memory'): assert run.train()
    assert (tmp_path/'r/report.html').exists()

def test_samples_change_nothing_of_a_run(whole, tmp_path, monkeypatch):
    "With one at each report, and with none, it is the same run"
    from test_recipes import same_runs
    for due in True, False:
        monkeypatch.setattr(MemorySamples, 'is_due', lambda self, rows: due)
        tiny(tmp_path/str(due)).train()
        assert same_runs(whole, tmp_path/str(due))
    assert json.loads((tmp_path/'True/memory.json').read_text())['rows'] > 0

def test_report_of_runs_that_are_there(whole, copied, tmp_path, monkeypatch, capsys):
    "Written anew into its directory; of several into the working directory"
    written = (copied/'report.html').read_text()
    for name in 'report.html', 'memory.json': (copied/name).unlink()   # as an older version left it
    assert main(['report', str(copied)]) == 0 and f'report: {copied}/report.html' in capsys.readouterr().out
    page = (copied/'report.html').read_text()
    assert page.count('r="2.2"') == written.count('r="2.2"') > 0   # episodes, from the checkpoint
    monkeypatch.chdir(tmp_path)
    assert main(['report', str(whole), str(copied)]) == 0 and '2 runs' in (tmp_path/'report.html').read_text()
    assert main(['report', str(tmp_path)]) == 0   # with a run in it
    assert main(['report', str(tmp_path/'absent')]) == 2 and main(['report', str(whole), '--html', 'absent/a.html']) == 2
    assert 'no such directory' in capsys.readouterr().err

# ---- watching ----

def test_what_is_watched_is_said_before_anything_is_served(tmp_path, capsys):
    for args, said in (['absent'], 'there is no such directory'), (['.'], 'neither a run nor a memory'), (['.', '--port', '0'], 'at least 1'), ([], 'required: DIR'):
        assert main(['watch', *(str(tmp_path/a) if a in ('absent', '.') else a for a in args)]) == 2 and said in capsys.readouterr().err

@pytest.mark.slow
def test_watch_from_the_outside(whole, tmp_path):
    "It prints its address, answers, and ends at Ctrl-C with status 0; a port that is taken is named"
    p = subprocess.Popen(command('watch', whole), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        url = p.stdout.readline().strip()
        assert re.fullmatch(r'http://127\.0\.0\.1:\d+/[\w-]{20,}/', url) and 'Ctrl-C' in p.stdout.readline()
        assert 'CartPole' in get(url) and dict(json.loads(get(url + 'sections')))['part-result']
        port = url.split(':')[2].split('/')[0]
        other = subprocess.run(command('watch', whole, '--port', port), capture_output=True, text=True, timeout=100)
        assert other.returncode == 2 and f'port {port}; got it is in use' in other.stderr
        p.send_signal(signal.SIGINT)
        assert p.wait(20) == 0 and p.stdout.read().strip() == 'ended'
    finally: p.kill()

def test_a_killed_run_is_stopped_and_a_hanging_one_silent(copied):
    lines = read_metrics(copied)
    soon = max(p.stat().st_mtime for p in copied.iterdir()) + 20
    assert state_of(copied, lines, None, soon)[0] == 'stopped' and f'--resume {copied}' in state_of(copied, lines, None, soon)[1]
    run = start(recipe('cartpole'), copied.parent/'new')   # it has the lock
    soon = max(p.stat().st_mtime for p in run.out.iterdir()) + 20
    assert state_of(run.out, [], None, soon)[0] == 'running' and state_of(run.out, [], None, soon + 1000)[0] == 'silent'
    slow = [dict(env_steps=i, wall_s=300.*i) for i in range(5)]   # was: silent, as long as there were fewer than 20 lines
    last = (run.out/'config.json').stat().st_mtime
    assert [state_of(run.out, slow[:n], None, last + age)[0] for n, age in ((5, 400), (5, 1600), (1, 400))] == ['running', 'silent', 'silent']

def test_looking_at_a_lock_keeps_no_run_from_starting(tmp_path):
    "Whoever looks takes it for an instant"
    from fastrl_replay.app.runs import lock_dir
    from fastrl_replay.steps.files import lock_file
    import threading
    held = os.open(tmp_path, os.O_RDONLY)
    lock_file(held, shared=True)
    threading.Timer(.02, os.close, [held]).start()
    with lock_dir(tmp_path): pass

@pytest.mark.parametrize('name, text', [(n, t) for n in ('config.json', 'metrics.jsonl', 'summary.json', 'memory.json') for t in
    ('', '{', '[]', '{}', 'null', '{"title": 1}', '{"title": "x", "rows": "y"}', '{"env_steps": "x", "wall_s": [], "solved": {}}', '\x00'*100, '{"recipe": "cartpole", "settings": {}, "versions": [], "wrappers": 5, "resumed": 5}')])
def test_files_that_are_half_written_or_damaged_stop_no_page(name, text, copied):
    "They are read again when they have changed"
    watched = WatchedRun(copied)
    watch = Watch([watched], [])
    before = (copied/name).read_text()
    (copied/name).write_text(text)
    assert json.loads(watch('sections')[1]) and b'<!doctype html>' in watch('')[1]
    (copied/name).write_text(before)
    assert watched.now()['state'] == 'ended' and watched.now()['memory']['rows'] > 0

def test_a_memory_on_disk_is_followed(tmp_path):
    "By a reader, in the directory that the run names, as long as that is of this run"
    run = tiny(tmp_path/'r', memory_path=str(tmp_path/'rows'))
    run.train()
    assert not (tmp_path/'r/memory.json').exists() and '<h2>Memory' in (tmp_path/'r/report.html').read_text()
    watched = WatchedRun(tmp_path/'r')
    assert watched.now()['memory']['path'] == str(tmp_path/'rows')
    watch = Watch([watched], [])
    assert '<iframe' in watch('sections')[1].decode().replace('\\u003c', '<')
    assert b'<h2>Steps' in watch('rows/0/0')[1] and watch('rows/0/1') is watch('rows/1/0') is None
    (tmp_path/'rows/run').write_text('{"id": "another"}')
    assert WatchedRun(tmp_path/'r').now()['memory'] is None

@pytest.mark.slow
@pytest.mark.skipif(not os.path.exists('/proc/self/stat'), reason='the system does not say what a process has used')
def test_what_is_shown_again_and_again_takes_less_than_a_hundredth_of_a_core(whole, tmp_path):
    "A run of 3,000 lines and a memory of 100,000 rows, as a page asks for them"
    out, replay = shutil.copytree(whole, tmp_path/'r'), PrioritizedReplay(bs=4, max_sz=100_000, store=Rows(tmp_path/'m'))
    replay.add(rows_of(100_000))
    replay.flush()
    with open(out/'metrics.jsonl', 'a') as f: f.writelines(json.dumps(dict(env_steps=1000 + i, updates=i, loss=i % 7, return_mean=i % 11, wall_s=i, steps_per_s=9.)) + '\n' for i in range(3000))
    p = subprocess.Popen(command('watch', out, tmp_path/'m'), stdout=subprocess.PIPE, text=True)
    def used(): return sum(map(int, open(f'/proc/{p.pid}/stat').read().rsplit(')', 1)[1].split()[11:13]))/os.sysconf('SC_CLK_TCK')
    try:
        url = p.stdout.readline().strip()
        def asked(seconds):
            until = time.monotonic() + seconds
            while time.monotonic() < until: get(url + 'sections'); time.sleep(2)
        get(url), asked(4)   # the first two
        began, before = time.monotonic(), used()
        asked(40)
        assert used() - before < .01*(time.monotonic() - began)
        assert int(open(f'/proc/{p.pid}/stat').read().rsplit(')', 1)[1].split()[16]) >= 10   # and others go first
    finally: p.kill()

def hostile_dir(out):
    "A run's directory that somebody else has written"
    evil = {h.replace('\ud800', ''): h.replace('\ud800', '') for h in HOSTILE}
    out.mkdir()
    (out/'config.json').write_text(json.dumps(dict(recipe=HOSTILE[0], env=HOSTILE[1], wrappers=HOSTILE, settings=dict(evil, env='antigravity:Wings', wrappers='antigravity:Wings'), versions=evil, machine=HOSTILE[0], resumed=[dict(evil, env_steps=1, versions=evil)])))
    (out/'metrics.jsonl').write_text(''.join(json.dumps(dict(evil, env_steps=i, loss=1., **{f'{h}2': .5 for h in evil})) + '\n' for i in range(5)))
    (out/'memory.json').write_text(json.dumps(dict(title=HOSTILE[0], rows=1, max_sz=2, numbers={h: 1 for h in evil}, remarks=HOSTILE, place=HOSTILE[1])))
    (out/'"><img src=x onerror="window.ran = 1">.gif'.replace('/', '')).write_bytes(b'GIF89a')
    return out

def test_a_hostile_directory_is_text(tmp_path):
    watch = Watch([WatchedRun(hostile_dir(tmp_path/'r'))], [])
    for name in '', 'sections': assert not re.search(r'<img src=x|<svg onload', watch(name)[1].decode())
    assert 'antigravity' not in sys.modules   # nothing is imported that its settings name

def test_a_directory_that_has_gone_is_said(copied):
    watch = Watch([WatchedRun(copied)], [])
    shutil.rmtree(copied)
    assert 'gone' in dict(json.loads(watch('sections')[1]))['part-result']

# ---- in the browser ----

@pytest.mark.browser
@pytest.mark.parametrize('width, theme', [(1200, 'light'), (400, 'dark')])
def test_nothing_of_a_hostile_run_runs(browser, tmp_path, width, theme):
    with Server(Watch([WatchedRun(hostile_dir(tmp_path/'r'))], [])) as s:
        opened(browser, s.url, width, theme)
        time.sleep(2.5)   # refreshed once
        assert browser.execute_script('return window.ran') is None and not sticking_out(browser)
        assert 'as of' in browser.find_element('id', 'news').text and not complaints(browser)

@pytest.mark.browser
def test_a_hostile_memory_is_text_and_is_seen_to_grow(browser, tmp_path):
    "In the page that is served, in the frame with its rows, and in the file that the command writes"
    from selenium.webdriver.support.ui import WebDriverWait
    names = [h for h in HOSTILE if h[:1] != '_' and h.isprintable()]
    path = tmp_path/names[1].replace('/', '')
    replay = PrioritizedReplay(bs=4, max_sz=200, store=Rows(path))
    replay.add(rows_of(60, **{n: 'f4' for n in names}))
    replay.flush()
    assert main(['memory', str(path), '--html', str(tmp_path/'a.html')]) == 0
    opened(browser, f'file://{tmp_path}/a.html')
    assert browser.execute_script('return window.ran') is None and not complaints(browser)
    with Server(Watch(*watched_in([path]))) as s:
        opened(browser, s.url, 400, 'dark')
        def rows(b): return b.execute_script("return [...document.querySelectorAll('dl.facts div')].find(d => d.firstChild.textContent === 'rows').lastChild.textContent")
        assert rows(browser) == '60 of 200'
        browser.execute_script("document.querySelector('iframe.memory').scrollIntoView()")
        replay.add(rows_of(60, **{n: 'f4' for n in names}))
        replay.flush()
        WebDriverWait(browser, 60, .5).until(lambda b: rows(b) == '120 of 200')
        browser.switch_to.frame(browser.find_element('css selector', 'iframe.memory'))
        WebDriverWait(browser, 30, .5).until(lambda b: b.execute_script("return document.querySelectorAll('.episode').length") >= 4)
        assert browser.execute_script('return window.ran') is None
        browser.switch_to.default_content()
        assert browser.execute_script('return window.ran') is None and not complaints(browser) and not sticking_out(browser)
        opened(browser, 'about:blank')

@pytest.mark.browser
def test_videos_of_a_run_are_shown(browser, copied):
    "A picture that moves, and a video, as the server has them; a link to another file is left out"
    (copied/'a.gif').write_bytes(b'GIF89a\x01\x00\x01\x00\x80\x01\x00\x00\x00\x00\xff\xff\xff!\xf9\x04\x01\n\x00\x01\x00,\x00\x00\x00\x00\x01\x00\x01\x00\x00\x02\x02L\x01\x00;')
    (copied/'b.mp4').write_bytes(b'moving')
    (copied/'c.gif').symlink_to('/etc/passwd')
    with Server(Watch([WatchedRun(copied)], [])) as s:
        opened(browser, s.url)
        shown = "return [...document.querySelectorAll('figure.video')].map(f => [f.lastChild.textContent, new URL(f.firstChild.src).pathname.split('/').slice(2).join('/'), f.firstChild.naturalWidth ?? null])"
        assert browser.execute_script(shown) == [['b.mp4', 'video/0/0', None], ['a.gif', 'video/0/1', 1]]
        assert get(s.url + 'video/0/0') == 'moving'
        opened(browser, 'about:blank')
        complaints(browser)   # that it is no video

@pytest.mark.browser
def test_a_run_is_seen_to_go_on_and_to_end(browser, tmp_path):
    "Without loading the page again; details stay open; a server that has ended is said"
    from selenium.webdriver.support.ui import WebDriverWait
    run = subprocess.Popen(command('train', 'cartpole', '--steps', 4000, '--out', tmp_path/'r', '--set', 'report_every=200', 'network=16'), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        until = WebDriverWait(browser, 120, .2)
        while not (tmp_path/'r/checkpoint.pt').exists(): assert run.poll() is None; time.sleep(.1)
        with Server(Watch(*watched_in([tmp_path/'r']))) as s:
            opened(browser, s.url)
            browser.execute_script("window.mine = 1; document.querySelector('#all-settings').open = true")
            def state(b): return b.execute_script("return document.querySelector('.state').textContent")   # elements are replaced
            until.until(lambda b: 'running' in state(b) and len(read_metrics(tmp_path/'r')) > 3)
            until.until(lambda b: len(b.find_elements('css selector', '.charts figure')) > 3)
            until.until(lambda b: state(b).startswith('ended'))
            assert run.wait(60) == 0
            assert browser.execute_script("return window.mine") == 1 and browser.execute_script("return document.querySelector('#all-settings').open")
            until.until(lambda b: b.execute_script("return [...document.querySelectorAll('h2')].some(h => h.textContent == 'Memory')"))
            assert not complaints(browser) and not sticking_out(browser)
        until.until(lambda b: 'has ended' in b.find_element('id', 'news').text)
        opened(browser, 'about:blank')
        complaints(browser)   # that the server was missed
    finally: run.kill()

@pytest.mark.browser
def test_without_scripts_the_page_loads_again(browser, copied):
    with Server(Watch([WatchedRun(copied)], [])) as s:
        opened(browser, s.url, scripts=False)
        (copied/'summary.json').unlink()
        time.sleep(7)
        browser.execute_cdp_cmd('Emulation.setScriptExecutionDisabled', dict(value=False))
        assert 'ended' not in browser.execute_script("return document.querySelector('.state').textContent")
        opened(browser, 'about:blank')
