"The page of a run: what is drawn from which lines, and that nothing of a run's files runs in it"
import json, re, time

import numpy as np, pytest
from pages import HOSTILE, complaints, opened, sticking_out
from fastrl_replay.look.curves import band, bars, chart, ticks
from fastrl_replay.look.run_page import live_page, memory_charts, memory_sample, new_run, run_page, run_sections, section_list
from fastrl_replay.look.html import json_text

def lines(n=20, **more): return [dict(env_steps=100*i, updates=10*i, episodes=4*i, return_mean=20. + i, loss=1/i, wall_s=.5*i, steps_per_s=200., **more) for i in range(1, n + 1)] + [
    dict(env_steps=100*n, updates=10*n, eval_return=30., eval_std=2.5, eval_episodes=20)]

def told(): return dict(title='Replay', rows=4, max_sz=100, inserted=4, place='main memory', path=None, nbytes=dict(rows=1024), numbers=dict(age_mean=3.),
    row=dict(drawn=[0, 2, 2, 5]), episode=dict(last=[1, 3], length=[2, 2], total=[1., 3.]), draw=dict(probability=[.1, .2, .3, .4]), remarks=['all rewards are 1'])

def whole_run(**more):
    return new_run(**{**dict(name='runs/a', title='cartpole on CartPole-v1, seed 0', group='cartpole on CartPole-v1', lines=lines(), state='ended', said='done', memory=told(),
        episodes=dict(ends=[*range(50, 2000, 50)], returns=[float(i % 7) for i in range(39)], successes=[]), recipe=dict(lr=.0023, seed=0),
        config=dict(settings=dict(lr=.001, seed=0, network=[256, 256]), versions=dict(torch='2.13'), machine='x86_64', began='2026-01-02T03:04:05+00:00', resumed=[dict(env_steps=700, at='2026-01-02T04:00:00+00:00')]),
        summary=dict(spent={'memory: rows in, batches out': 1., 'learner': 3.}, final_return=30., final_std=2.5, final_returns=[28., 32.], solved=25., solved_at_step=1500, best_return=31., best_at_step=1000)), **more})

def hostile_run():
    evil = {h: h for h in HOSTILE}
    evil_parts = {h: 1. for h in HOSTILE}
    bad = [dict(evil, env_steps=i, loss=h, return_mean=float(i), eval_return=1., eval_std=h, wall_s=h, shards=[evil, h], **{f'{h}2': 1.}) for i, h in enumerate(HOSTILE)]
    return new_run(HOSTILE[0], title=HOSTILE[0], group=HOSTILE[1], said=HOSTILE[2], state=HOSTILE[1], lines=bad, summary=dict(evil, solved=HOSTILE[0], final_returns=HOSTILE, spent=evil_parts),
        config=dict(settings=evil, versions=evil, began=HOSTILE[0], machine=HOSTILE[1], resumed=[dict(env_steps=1, at=HOSTILE[0], versions=evil), HOSTILE[0]]), recipe={h: 1 for h in HOSTILE},
        videos={f'{HOSTILE[1]}.mp4': HOSTILE[8], HOSTILE[1]: HOSTILE[8]}, memory=dict(told(), title=HOSTILE[0], place=HOSTILE[1], remarks=HOSTILE, numbers={h: 1 for h in HOSTILE}))

# ---- what is drawn ----

@pytest.mark.parametrize('low, high', [(0, 1), (-3.2, 7), (1e-9, 3e-9), (0, 1e9), (5, 5), (499.99, 500.01), (-1e-300, 1e-300)])
def test_ticks_are_few_round_and_within(low, high):
    found = ticks(low, high)
    assert 1 <= len(found) <= 7 and all(low - 1e-9*abs(low) <= t <= high + 1e-9*abs(high) for t in found) and found == sorted(set(found))

@pytest.mark.parametrize('y', [[1.], [1., 1.], [0., 0.], [float('nan'), 2.], [None, 'x', 3.], [1e300, -1e300], [1e-320, 0.], [True, 2.]])
def test_any_numbers_can_be_drawn(y):
    drawn = chart('t', [dict(name='a', x=[*range(len(y))], y=y)])
    assert drawn.startswith('<figure') and 'nan' not in drawn and 'inf' not in drawn

def test_what_cannot_be_drawn_is_left_out():
    assert chart('t', [dict(name='a', x=[1, 2], y=[None, float('nan')])]) == '' and bars('t', [1., 1.], 'x') == '' and band([]) == dict(x=[], y=[])
    assert '<h2>Shards' not in run_page([whole_run()]) and '<h2>Videos' not in run_page([whole_run()]) and '<h2>Evaluations' not in run_page([whole_run(lines=lines()[:-1])])

def test_a_page_tells_what_a_run_was():
    page = run_page([whole_run()])
    for said in ('30 ± 2.5', '31 at step 1,000', 'at step 1,500', '<td>lr</td><td>0.001</td><td>0.0023</td>', '256 256', '2.13', '2026-01-02 03:04:05 UTC', 'resumed at step 700', '4 of 100', 'all rewards are 1', '<td>learner</td><td>3.0 s (75.0%)</td>',
                 ': 0.05 at 2,000', 'evaluations, without exploring', 'solved'): assert said in page, said

def test_each_quantity_has_its_curve_and_each_shard_its_line():
    "Losses, rates, ages; of shards those of the last line"
    found = run_sections([whole_run(lines=lines(age_mean=12., age_max=40, shards=[dict(rows_in=7, row_age=3.5), dict(rows_in=9, row_age=4.5)]))])
    for title in 'loss', 'age of drawn rows, mean', 'age of drawn rows, most', 'environment steps a second', 'updates a second': assert f'<b>{title}</b>' in found['Curves'], title
    assert re.findall('<t[dh][^>]*>([^<]*)</t', found['Shards']) == ['shard', 'rows_in', 'row_age', '0', '7', '3.5', '1', '9', '4.5']

def test_a_page_needs_nothing_else():
    page = run_page([whole_run()])
    assert not re.search(r'(src|href)="(?!data:)', page) and 'connect-src' not in page and page.count('<script') == 1   # the switch of colours

def test_runs_side_by_side():
    "Those of a group have a band and their mean, another group another colour"
    runs = [whole_run(name=f'r{i}', lines=lines(10 + i), memory=None) for i in range(3)] + [whole_run(name='other', group='taxi', title='taxi', memory=None)]
    found = run_sections(runs)
    assert found[''].count('fill="#219ebc" opacity=".2"') == 2 and 'cartpole on CartPole-v1 (3 seeds)' in found[''] and '#fb8500' in found['']   # a wide picture and a narrow one
    assert all(r['name'] in found[''] for r in runs) and '<h2>' not in found['']

@pytest.mark.parametrize('missing', ['config', 'recipe', 'lines', 'summary', 'episodes', 'memory', 'all'])
def test_whatever_is_missing_the_rest_is_told(missing):
    run = new_run('a') if missing == 'all' else whole_run(**{missing: new_run('a')[missing]})
    assert len(run_page([run])) > 1000 and len(run_page([run, whole_run()])) > 1000

def test_a_long_run_is_a_page_of_a_few_megabytes():
    n = 200_000
    run = whole_run(lines=lines(20_000, **{f'loss{i}': .1 for i in range(20)}), episodes=dict(ends=[*range(n)], returns=[float(i % 500) for i in range(n)], successes=[]),
        memory=dict(told(), row=dict(drawn=np.arange(10**6)), episode=dict(last=np.arange(n), length=np.arange(n), total=np.ones(n)), draw=dict(probability=np.full(10**6, 1e-6))))
    began = time.monotonic()
    page = run_page([run])
    assert len(page) < 4_000_000 and time.monotonic() - began < 60

@pytest.mark.parametrize('memory', ['plain', 'parts'])
def test_a_sample_of_a_memory_is_small_and_shows_the_same_kinds(memory):
    n = 10**6
    full = dict(told(), row=dict(drawn=np.arange(n, dtype=np.int32)), episode=dict(last=np.arange(n), length=np.arange(n), total=np.random.default_rng(0).normal(size=n)),
        draw=dict(key=np.arange(n), probability=np.random.default_rng(0).random(n)/n), remarks=['x'*10_000]*100)
    if memory == 'parts': full = dict(title='Mixture', parts=dict(a=full, b=full))
    small = json.loads(json_text(memory_sample(full)))
    assert len(json.dumps(small)) < 10**6 and memory_charts(small).count('<figure') == (4 if memory == 'plain' else 8)

# ---- nothing of it runs ----

def test_a_hostile_run_is_text():
    for page in (run_page([hostile_run()]), run_page([hostile_run()]*2)):
        assert page.count('</script>') == 1 and not re.search(r'<svg onload|<img src=x|<!--', page)
        for attribute in re.findall(r'<[^>]*>', page): assert not re.search(r'''\son\w+=''', re.sub(r'"[^"]*"', '""', attribute)), attribute

@pytest.mark.browser
@pytest.mark.parametrize('scripts', [True, False])
@pytest.mark.parametrize('width, theme', [(1200, 'light'), (400, 'dark')])
@pytest.mark.parametrize('kind', ['hostile', 'whole', 'several', 'live'])
def test_a_page_in_the_browser(browser, tmp_path, kind, width, theme, scripts):
    "Nothing runs, nothing is loaded, nothing sticks out"
    runs = dict(hostile=[hostile_run()], several=[whole_run(name='b'), whole_run(), hostile_run()]).get(kind, [whole_run()])
    page = live_page('live', 'runs/a', section_list(run_sections([hostile_run()]))) if kind == 'live' else run_page(runs)
    (tmp_path/'a.html').write_text(page, encoding='utf-8')
    opened(browser, f'file://{tmp_path}/a.html', width, theme, scripts=scripts)
    if not scripts: return
    said = [m for m in complaints(browser) if kind != 'live' or 'sections' not in m]   # there is no server to ask
    assert browser.execute_script('return window.ran') is None and not [m for m in said if 'mp4' not in m and 'javascript:' not in m and 'ERR_' not in m], said
    assert not sticking_out(browser)

@pytest.mark.browser
def test_a_chart_says_its_values_and_colours_differ_in_the_dark(browser, tmp_path):
    (tmp_path/'a.html').write_text(run_page([whole_run()]))
    inks = set()
    for theme in ('light', 'dark'):
        opened(browser, f'file://{tmp_path}/a.html', theme=theme)
        assert browser.execute_script("return [...document.querySelectorAll('.charts circle title')].some(t => t.textContent.includes('at 2,000'))")
        inks.add(browser.execute_script("return getComputedStyle(document.querySelector('figure.chart svg text')).fill"))
        assert browser.execute_script("return [...document.querySelectorAll('figure.chart svg:not(.key)')].filter(s => s.getBoundingClientRect().width).every(s => s.getBoundingClientRect().height > 90)")
    assert len(inks) == 2
