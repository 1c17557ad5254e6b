"""What a run shows of itself: report.html at its end, and the live page while it goes on."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
from memories import rows_of
from pages import HOSTILE, complaints, opened, sticking_out
from test_page import data_of
from test_recipes import stop, tiny

from fastrl_replay.all import PrioritizedReplay, Rows
from fastrl_replay.app.run_files import read_config, read_metrics
from fastrl_replay.app.runs import resume
from fastrl_replay.app.watching import Watch, state_of
from fastrl_replay.cli import main
from fastrl_replay.look.server import Server


def command(*args):
    return [sys.executable, '-m', 'fastrl_replay', *map(str, args)]


@pytest.fixture
def copied(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / 'r')


def get(url):
    with urllib.request.urlopen(url, timeout=20) as r:
        return r.read().decode()


def report_of(out):
    return data_of((out / 'report.html').read_text())['parts']


def watched(watch):
    return json.loads(watch('data/0')[1])['parts']


def without_times(run):
    """Return a run's sample without its directory and without what a clock said."""
    clocks = 'seconds', 'environment steps per second'
    facts = {k: v for k, v in run['facts'].items() if k not in clocks}
    charts = [c for c in run['charts'] if 'per second' not in c['title']]
    for c in charts:
        c.pop('events', None)
    tables = [t for t in run['tables'] if t['title'] not in ('Versions', 'Resumed')]
    return dict(run, facts=facts, charts=charts, tables=tables, lead='', name='')


# ---- report.html ----


def test_a_run_ends_with_a_report(whole):
    run, memory = report_of(whole)
    s = json.loads((whole / 'summary.json').read_text())
    assert s['env'] in run['title'] and run['facts']['environment steps'] == s['env_steps']
    assert np.mean(s['final_returns']) == pytest.approx(s['final_return'])
    tables = {t['title']: t['rows'] for t in run['tables']}
    evals = [m['env_steps'] for m in read_metrics(whole) if 'eval_return' in m]
    assert [row[0] for row in tables['Evaluations']] == evals
    assert dict(tables['Versions'])['torch'] == read_config(whole)['versions']['torch']
    assert memory['kind'] == 'memory' and memory['rows'] > 0 and memory['episodes']


def test_a_resumed_run_has_the_same_report_but_for_times(whole, tmp_path):
    out = tmp_path / whole.name
    stop(tiny(out), 200)
    assert not (out / 'report.html').exists()
    resume(out).train()
    (a, m), (b, n) = report_of(whole), report_of(out)
    assert without_times(a) == without_times(b)
    assert m == n


# ---- watching ----


@pytest.mark.parametrize(
    'args, said', [(['absent'], 'not a directory of a run'), (['.'], 'not a directory of a run')]
)
def test_what_is_watched_is_said_before_anything_is_served(
    args, said, tmp_path, capsys, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    assert main(['watch', *args]) == 2 and said in capsys.readouterr().err


@pytest.mark.slow
def test_watch_from_the_outside(whole, tmp_path):
    """It prints its address, answers, ends at Ctrl-C with status 0, and names a port in use."""
    p = subprocess.Popen(
        command('watch', whole), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        url = p.stdout.readline().strip()
        assert (
            re.fullmatch(r'http://127\.0\.0\.1:\d+/[\w-]{20,}/', url)
            and 'Ctrl-C' in p.stdout.readline()
        )
        assert 'CartPole' in get(url) and json.loads(get(url + 'data/0'))['live']
        port = url.split(':')[2].split('/')[0]
        other = subprocess.run(
            command('watch', whole, '--port', port), capture_output=True, text=True, timeout=100
        )
        assert (
            other.returncode == 2
            and f'port {port} cannot be used; got it is in use' in other.stderr
        )
        p.send_signal(signal.SIGINT)
        assert p.wait(20) == 0 and p.stdout.read().strip() == 'ended'
    finally:
        p.kill()


def test_a_run_without_a_new_line_is_silent(copied):
    lines = read_metrics(copied)
    soon = max(p.stat().st_mtime for p in copied.iterdir()) + 20
    assert state_of(copied, lines, {}, soon)[0] == 'running'
    state, said = state_of(copied, lines, {}, soon + 1000)
    assert state == 'silent' and f'--resume {copied}' in said


DAMAGED = (
    '',
    '[]',
    '{}',
    '[' * 900 + ']' * 900,
    '{"env_steps": "x", "wall_s": [], "solved": {}, "spent": 5}',
    '{"recipe": "cartpole", "settings": {}, "versions": []}',
)


@pytest.mark.slow
@pytest.mark.parametrize('name', ['config.json', 'metrics.jsonl', 'summary.json'])
@pytest.mark.parametrize('text', DAMAGED)
def test_files_that_are_half_written_or_damaged_stop_no_page(name, text, copied):
    """They are read again when they have changed."""
    before = (copied / name).read_text()
    (copied / name).write_text(text)
    watch = Watch([copied])
    assert watched(watch) and b'<!doctype html>' in watch('')[1]
    (copied / name).write_text(before)
    assert watched(Watch([copied]))[0]['state'] == 'ended'


def test_a_run_and_its_memory_on_disk_are_followed(tmp_path):
    run = tiny(tmp_path / 'r', memory_path=str(tmp_path / 'rows'))
    run.train()
    assert [p['kind'] for p in report_of(tmp_path / 'r')] == ['run', 'memory']
    one, memory = watched(Watch([tmp_path / 'rows', tmp_path / 'r']))
    assert (one['kind'], memory['name']) == ('run', str(tmp_path / 'rows')) and memory['episodes']


def hostile_dir(out):
    """Return a run's directory that somebody else has written."""
    evil = {h.replace('\ud800', ''): h.replace('\ud800', '') for h in HOSTILE}
    settings = dict(evil, env='antigravity:Wings', wrappers='antigravity:Wings')
    config = dict(
        recipe=HOSTILE[0], env=HOSTILE[1], wrappers=HOSTILE, settings=settings, versions=evil
    )
    config |= dict(machine=HOSTILE[0])
    out.mkdir()
    (out / 'config.json').write_text(json.dumps(config))
    lines = [dict(evil, env_steps=i, loss=1.0, **{f'{h}2': 0.5 for h in evil}) for i in range(5)]
    (out / 'metrics.jsonl').write_text(''.join(json.dumps(line) + '\n' for line in lines))
    return out


def test_a_hostile_directory_is_text(tmp_path):
    watch = Watch([hostile_dir(tmp_path / 'r')])
    for name in '', 'data/0':
        assert not re.search(r'<img src=x|<svg onload', watch(name)[1].decode())
    assert 'antigravity' not in sys.modules  # nothing is imported that its settings name


# ---- in the browser ----


@pytest.mark.browser
@pytest.mark.parametrize('width, theme', [(1200, 'light'), (400, 'dark')])
def test_nothing_of_a_hostile_run_runs(browser, tmp_path, width, theme):
    with Server(Watch([hostile_dir(tmp_path / 'r')])) as s:
        opened(browser, s.url, width, theme)
        time.sleep(2.5)  # refreshed once
        assert browser.execute_script('return window.ran') is None and not sticking_out(browser)
        assert 'as of' in browser.find_element('id', 'news').text and not complaints(browser)


@pytest.mark.browser
def test_a_memory_is_seen_to_grow(browser, tmp_path):
    from selenium.webdriver.support.ui import WebDriverWait

    replay = PrioritizedReplay(bs=4, max_sz=200, store=Rows(tmp_path / 'm'))
    replay.add(rows_of(60))
    replay.flush()
    with Server(Watch([tmp_path / 'm'])) as s:
        opened(browser, s.url, 400, 'dark')
        assert '60 of 200 rows' in browser.find_element('css selector', '.lead').text
        replay.add(rows_of(60, first=60))
        replay.flush()
        until = WebDriverWait(browser, 60, 0.5)
        until.until(
            lambda b: (
                '120 of 200'
                in b.execute_script("return document.querySelector('.lead').textContent")
            )
        )
        assert not complaints(browser) and not sticking_out(browser)
        opened(browser, 'about:blank')


@pytest.mark.browser
def test_a_run_is_seen_to_go_on_and_to_end(browser, tmp_path):
    """Without loading the page again; details stay open; a server that has ended is said."""
    from selenium.webdriver.support.ui import WebDriverWait

    args = '--steps', 4000, '--out', tmp_path / 'r', '--set', 'report_every=200', 'network=16'
    run = subprocess.Popen(
        command('train', 'cartpole', *args), stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    until = WebDriverWait(browser, 120, 0.2)

    def state(b):
        return b.execute_script("return document.querySelector('.state').textContent")

    try:
        while not (tmp_path / 'r/checkpoint.ckpt').exists():
            assert run.poll() is None
            time.sleep(0.1)
        with Server(Watch([tmp_path / 'r'])) as s:
            opened(browser, s.url)
            settings = "document.querySelector('[data-title=Settings]').open"
            browser.execute_script(f'window.mine = 1; {settings} = true')
            until.until(lambda b: 'running' in state(b) and len(read_metrics(tmp_path / 'r')) > 3)
            until.until(lambda b: len(b.find_elements('css selector', '.charts figure')) > 3)
            until.until(lambda b: state(b).startswith('ended'))
            assert run.wait(60) == 0
            assert browser.execute_script(f'return window.mine === 1 && {settings}')
            assert not complaints(browser) and not sticking_out(browser)
        until.until(lambda b: 'has ended' in b.find_element('id', 'news').text)
        opened(browser, 'about:blank')
        complaints(browser)  # that the server was missed
    finally:
        run.kill()
